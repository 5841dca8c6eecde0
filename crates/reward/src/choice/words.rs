//! Regular expressions for phrases that state an option, in English and in the languages of MMMLU.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;

/// Matches the announcement of an answer up to the option: "The answer is", "answer:", "a good
/// choice here is". Group 1 contains the words inside the announcement.
pub(super) static ANNOUNCED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b|_)(?:answer|ans|option|choice|letter|solution|(?:correct|right|best)\s+(?:one|response|statement)|(?:my|final)\s+(?:pick|guess|selection|vote))",
        r"(?:_(?:letter|choice|option|key))?\b[\x22'*_`)\]]*((?:,?\s+[a-z]+){0,7}?)(?:\s+\([^()\n]{1,60}\))?,?\s*(?:",
        r"\b(?:is|can\s+only\s+be|(?:should|would|must|will|has\s+to|have\s+to|ought\s+to|seems\s+to|appears\s+to|turns\s+out\s+to)(?:\s+(?:therefore|thus|then|hence))?\s+be)\b",
        r"(?:,?\s+(?:therefore|thus|clearly|indeed|definitely|simply|then|hence|obviously|given\s+by|most\s+likely|actually|really|in\s+fact",
        r"|of\s+course|i\s+(?:think|believe|guess|conclude)|we\s+conclude)\b,?)*\s*:?",
        r"|:|=>|⇒|=|→|->|\s[-–—]\s)\s*",
    ))
});

/// Matches the words with which a model chooses an option: "I choose", "I'd say", "so it is",
/// "matches". After these words, only a capital letter is an option.
pub(super) static CHOSEN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?im)\b(?:i(?:'d|\s+would|\s+will|'ll|'m|\s+am)?\s+(?:choose|chose|pick|picked|select|selected|say|answer",
        r"|guess|conclude|opt\s+for|vote\s+for|think\s+(?:that\s+)?(?:it\s+is|it's)|believe\s+(?:it\s+is|it's)|think|believe)",
        r"|(?:go|going|went)\s+(?:with|for)|(?:we|you)\s+(?:should\s+|must\s+|can\s+)?(?:choose|pick|select)",
        r"|choose|select|pick|(?:that|this|which)\s+leaves(?:\s+us\s+with|\s+only)?|left\s+with|points\s+to",
        r"|matches|matching|corresponds\s+to|corresponding\s+to|agrees\s+with",
        r"|(?:it|this|that|which)(?:'s|\s+is|\s+can\s+only\s+be|\s+must\s+be|\s+should\s+be|\s+has\s+to\s+be|\s+would\s+be)",
        r"|(?:so|therefore|thus|hence|consequently|accordingly|finally),?",
        r"|(?:final|correct|right|best|my)\s+answer|^\s*(?:must\s+be|definitely|clearly|surely|certainly|obviously)",
        r"|^[*_#\s]*(?:answer|ans\.|(?:final|solution|correct|response|result)[*_]*:))[*_]*\s*:?\s+",
    ))
});

/// Matches a sentence such as "B is correct", with the letter in group 1.
pub(super) static IS_CORRECT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?-i:\b([A-Z]))\b[)\]}\x22'*_`.]*\s+(?i:is|was|must\s+be|should\s+be|has\s+to\s+be)",
        r"(?i:\s+(?:therefore|thus|hence|clearly|indeed|definitely|obviously|the|my|our|only|most\s+likely|best|final))*",
        r"\s+[\x22'*_`]*(?i:correct|right|answer|choice|best|most\s+(?:appropriate|accurate|plausible|likely))",
        r"(?i:\s+(?:answer|option|choice|one))?[\x22'*_`]*",
        r"(?:[.,;:!)]|$|\s*\n|\s+(?i:because|since|as|here)\b|\s+[-–—(])",
    ))
});

/// Matches an announcement of the answer in languages other than English, including the option's
/// capital letter. Group 1 or 2 ends with the letter.
pub(super) static ANNOUNCED_ELSEWHERE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        // Languages with spaces between words: an adjective, a verb and an article may follow.
        r"(?i)(?:\b(?:richtig\s+ist|ich\s+wähle|je\s+choisis|elijo|escolho|scelgo|antwort|respuesta|réponse|reponse|jawaban(?:nya)?|risposta|resposta|jibu|ìdáhùn|idahun|ìdáhun",
        r"|ответ(?:ом)?|правильный\s+вариант|alternativa|opción|opção|opzione|l'option|option|lösung|solución|soluzione|solução)\b[*_]*",
        r"(?:\s+(?:richtige|korrekte|endgültige|correcta|correcte|correta|corretta|final|finale|yang|benar|tepat|sahihi",
        r"|náà|naa|tó|tọ́|правильный|верный|lautet|ist|wäre|es|est|è|é|sería|serait|sarebbe|seria|ni|adalah|ialah|это",
        r"|является|la|(?-i:a|o)|el|l|die|(?:l')?option|opción|opção|opzione|opsi|chaguo|pilihan|вариант|letra|letter|lettera|lettre|donc|also|daher|somit|entonces|quindi|portanto|certa|giusta|esatta|exacta|exacte|juste|lililo",
        r"|buchstabe)\b){0,5}\s*(?:[:=]|\s[-–—])?\s*",
        r"|(?:إجابة|اجابة|جواب|الإجابة|الاجابة|الجواب)(?:\s+(?:الصحيحة|الصحيح|النهائية|النهائي))?(?:\s+(?:هي|هو))?",
        r"\s*:?\s*(?:الخيار\s+|الحرف\s+)?",
        r"|(?:উত্তর|উত্তরটি|জবাব)(?:\s*(?:হল|হলো|হবে|হচ্ছে|বিকল্প))*\s*[:-]?\s*(?:বিকল্প\s+)?",
        r"|(?:उत्तर|जवाब|सही\s+विकल्प)(?:\s*(?:है|विकल्प|होगा))*\s*[:-]?\s*(?:विकल्प\s+)?",
        // Languages without spaces between words.
        r"|(?:答案|答え|正解|解答|回答|正答)[\]\x22]?\s*(?:应该|應該|应|應|就|只能)?(?:是|为|為|選|选|选择|は|が)?\s*:?\s*(?:选项|選項)?\s*",
        r"|(?:选项|選項|选择|選擇|选|選)\s*(?:是|为|為)?\s*:?\s*",
        r"|(?:정답|답안|답변|답)\s*(?:은|는|이)?\s*:?\s*)",
        r"([\s*_\x22'`(\[{$]*(?-i:[A-Z]))",
        // One option negated, and another one named instead.
        r"|(?:不是|\b(?:nicht|no\s+es|n'est\s+pas|non\s+è|não\s+é))\s*(?:(?:die|la|l)\s+)?(?-i:[A-Z])\s*,?\s*(?:而是|sondern|sino|mais|ma|mas)\s*(?:(?:die|la)\s+)?((?-i:[A-Z]))\b",
    ))
});

/// Matches a sentence such as "B is correct" in languages other than English, with the letter in
/// group 1.
pub(super) static IS_CORRECT_ELSEWHERE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?-i:([A-Z]))\s*(?:选项|選項|项|項)?\s*(?:是\s*(?:正确|正確|对|對)的?|(?:正确|正確)(?:[。.,;!]|$|\n)|が(?:正解|正しい)",
        r"|[가이은는]\s*정답|\s(?:ist|es|est|è)?\s+(?:(?:la|le|el|die)\s+)?(?:richtig|korrekt|correct[aeo]?|corrett[ao])(?:[.,!]|$|\n)",
        r"|\s+(?:ist|es|est|è)\s+(?:la|die)\s+(?:(?:richtige|korrekte|bonne)\s+)?(?i:antwort|réponse|respuesta|risposta)(?:\s+(?:correct[ae]|corretta))?(?:[.,!]|$|\n))",
    ))
});

/// Matches text that can follow an option in languages other than English.
pub(super) static ENDS_ELSEWHERE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^\s*(?:(?:です|だ|である|になります|となります|でした|。|입니다|이다|예요|이에요|번|है|हैं|হবে|选项|選項|项|項|吧|번입니다|번이다|。)",
        r"\s*(?:[.,。!）)*」]|।|$|\s)",
        r"|(?:porque|weil|denn|car|parce|perché|poiché|pois|karena|kwa|nitorí|nitori|потому|так|لأن)\b)",
    ))
});

/// Matches words that prevent a following statement in their clause from stating an option: "if",
/// "never".
pub(super) static UNDONE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:if|suppose|supposing|assum\w+|whether|unless|not|never|\w+n't|cannot|doubt|doubtful|neither|nor|wrong",
        r"|incorrect|false|impossible|unlikely|could|might|may|why|than|instead\s+of|unlike|had|claims?|claimed|none",
        r"|no\s+(?:evidence|reason|proof|indication|sign)|nothing|imagine|pretend|to\s+(?:prove|show|check|verify|test|decide)|format|template|placeholder",
        r"|initially|originally|tempt\w+|almost|nearly|at\s+first|going\s+to|would\s+have|thought|many|some|most\s+people",
        r"|students|people|others|perhaps|maybe|possibly|nobody|no\s+one|no\s+way",
        r"|refuse\w*|mistake|misconception|hard|difficult|avoid|wenn|falls|si|se|jika|kama|ikiwa|nicht|bukan|não|без|если|не)\b",
        r"|¿|如果|若|假如|有人|他们认为|もし|만약|यदि|अगर|যদি|إذا|لو|错误|錯誤|不正确|不正確|间违|間違|틀린|오답|ليس|خاطئ|غير|गलत|ভুল|नहीं|неправильн|неверн",
        r"|\b(?:falsche|incorrecta|incorrecte|mauvaise|fausse|salah|sbagliata|errada|incorreta|equivocada)\b",
    ))
});

/// Matches words directly before "answer" that refer to a different answer: "the other answer".
pub(super) static OTHER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)오\s*$|\bleast\s+\w+\s*$|\b(?:they|he|she|who|someone|everyone|first|initial|other|another|second|third|(?:second|next|third)[\s-]best|previous|earlier|tempting|common|worst|bad|eliminated|excluded|discarded|rejected|dismissed",
        r"|naive|alternative|next|each|every|no|his|her|their|your|student's|should|shall|do|did|can|no\s+es|si)\s*$|[不别非勿没](?:应该|應該|应当|应|應|能|可以|可|会|要|宜)?\s*$",
    ))
});

/// Matches a negation after the letter of an option.
pub(super) static DENIED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[^\w(]*(?:is|was|are|seems|looks|can|could|would|does|do|has|must)?(?:\s+be)?\s*\b(?:not|\w*n't|cannot|never|wrong|incorrect",
        r"|false|excluded|eliminated|impossible|out|too|ruled|implausible|unlikely|fails?)\b",
    ))
});
/// Matches a negation before the letter of an option.
pub(super) static RULED_OUT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:not|cannot\s+be|can't\s+be|isn't|neither|nor|eliminate[sd]?|exclude[sd]?|rules?\s+out|ruled\s+out|reject(?:ed|s)?",
        r"|instead\s+of|rather\s+than|unlike|than|except|without|(?:\w+n't|not)\s+(?:be|choose|pick|select|match|say))",
        r"\s+(?:the\s+)?(?:option|choice|answer|letter)?\s*$",
    ))
});

/// Matches a condition or a doubt after the letter of an option: "B, unless x is 0", "B is correct
/// only if", "B, perhaps".
pub(super) static LIMITED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[\W_]*(?:is\s+(?:the\s+)?(?:correct|right|true)(?:\s+(?:answer|option|choice))?[\W_]*)?",
        r"(?:unless|only\s+(?:if|when)|perhaps|maybe|possibly|probably)\b",
        // The text of an option can start with "if": "B) If it rains".
        r"|^[\s,*_$}]*(?:is\s+(?:the\s+)?(?:correct|right|true)(?:\s+(?:answer|option|choice))?[\s,*_]*)?(?:if|assuming|provided)\b",
    ))
});
/// Matches a second option directly after an option, with the second letter in group 1: "B or C",
/// "B, C", "B/C".
pub(super) static ALTERNATIVE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"^[)\]}\x22'*_`$.]*[\s(]*(?:[,、/&|+]|\s?[-–—−]|,?\s*\b(?i:or|and|as\s+well\s+as|(?:along|together)\s+with|plus|und|oder|et|ou|y|o|e|atau|dan|или|и|na|au)\b|或者|或|和|と|または|또는)+\s*",
        r"(?:(?i:option|choice|answer|possibly|maybe|perhaps|even|also|both|then)\s+)*[(\[{\x22'*_`$]*([A-Z]|[IVX]{2,}|\d+)",
        r"[)\]}\x22'*_`$]*\s*(?:[.,、;:!?/&|)都均]|都|均|$|\n|\b(?i:or|and|und|oder)\b)",
    ))
});

/// Matches text after an option that calls the option wrong: "B, which is wrong", "B. This is
/// incorrect."
pub(super) static CALLED_WRONG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^\W*(?:(?:hmm+|but|actually|however|wait|oops|sorry|oh|no|hold\s+on)\b\W*)*(?:(?:which|that|this|it)(?:(?:'s|\s+is|\s+was)\s+(?:not|wrong|incorrect|false)",
        r"|\s+(?:cannot|can't|isn't|wasn't|must\s+not|may\s+not|might\s+not|doesn't|does\s+not)(?:\s+be)?)",
        r"(?:\s+(?:correct|right|true|so|it|fit|work))?(?:\s+though)?\s*(?:[.,;:!)]|$|\b(?:because|since|as)\b)|\(\s*(?:wrong|incorrect|no|not)\s*\))",
    ))
});
/// Matches a later sentence or clause that only names another option: "Sorry, C.", "Edit: C". One
/// of the groups contains the label.
pub(super) static ANOTHER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?:^|[,:;(—–…]|\s-|\b(?i:hmm|reflection|mean|rather|actually|correction|wait|believe|think|now|possibly|maybe|perhaps|probably|that|is|be|so|it's|c'est|doch|option|answer|choice|also|to|alternatively|truth\s+is))",
        r"[\s*_\x22'`(\[]*([A-Z])[)\]*_\x22'`]*(?:です|。)?[.!?;…]*\s*$",
        r"|^[\s*_(]*([A-Z])[)*_]*,\s+(?i:sorry|rather|actually|instead)\b",
        r"|\b([A-Z])[)\]*_\x22'`]*\s+(?i:is|are|seems|looks|fits|would\s+be|could\s+be|may\s+be)\s+(?i:also|equally|just\s+as|likewise|better)\b",
    ))
});
/// Matches another option's label in the sentence that states an option: "B (ice) or C (sand)", "B
/// for even n and C for odd n", "B, though it could also be C". One of the groups contains the
/// label.
pub(super) static JOINED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i:[^\w]\b(?:or|alternatively|rather|mean|wait|sorry),?)\s+(?:(?i:option|rather)\s+)?[(\[*]*([A-Z])\b(?:[)\].,;!(*]|\s*$|\s+\(|\s+(?i:for|if|when|in)\b)",
        r"|\b(?i:and|but)\s+(?:(?i:option)\s+)?[(\[*]*([A-Z])\b[)\]*]*\s+(?i:for|if|when|in|is\s+also|\()",
        r"|\b(?i:also\s+(?:be\s+)?|(?:truth|answer)\s+is\s+)[(\[*]*([A-Z])\b",
        r"|\b(?i:but|although|though|aber|mais|pero)\s+(?:(?i:option)\s+)?[(\[*]*([A-Z])\b[^.!?;\n]*\b(?i:(?:also|could|would|acceptable|possible|valid|auch|aussi|también)\b|too\s*(?:$|[,.)!]))",
        r"|但(?:选项)?([A-Z])|\b(?i:so\s+(?:do|does|is|would))\s+([A-Z])\b",
        r"|\(([A-Z])\s+(?i:is|would\s+be|could\s+be)\s+(?i:also|too|equally|possible)",
        r"|\d\s*%[)\s,;/]*(?i:(?:and|or)\s+)?\(?([A-Z])\b",
    ))
});
/// Matches words that attribute an answer to a speaker: "The user says: the answer is", "One would
/// think that the answer is". The speaker is in group 1 or 2.
pub(super) static REPORTED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b(\w+)\s+(?:\w+ly\s+)?(?:says|said|writes|wrote|claims|claimed|argues|argued|thinks|believes|believed|suggests|suggested|assumes|assumed|guesses|guessed)",
        r"|\b(\w+)(?:\s+(?:would|will)|'d|'ll)\s+(?:\w+\s+){0,2}?(?:say|think|guess|claim|argue|believe|assume|suppose|suggest|conclude|answer))",
        r"\s*[:,]?\s*[\x22']?\s*(?:that\s+)?(?:(?:the|my)\s+)?(?:(?:correct|right|final)\s+)?$",
    ))
});
/// Subjects whose statements count as the speaker's own: "I would say that", "This suggests that".
pub(super) const OWN_SUBJECTS: [&str; 12] = [
    "i",
    "we",
    "this",
    "that",
    "which",
    "it",
    "evidence",
    "reasoning",
    "analysis",
    "calculation",
    "result",
    "context",
];
/// Matches words that turn a box or tag in the same sentence into an example: "Suppose", "Please
/// put the answer as".
pub(super) static SUPPOSED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)\b(?:suppose|supposing|please|format|template|example|e\.g|such\s+as|might|may\s+be|were|had)\b",
        r"|^\W*(?:if|unless|assum\w+)\b(?:[^,]|,\s*\W*$)*$",
    ))
});
/// Matches words such as "answer" or "option", which distinguish "B is the correct answer" from "B
/// is true".
pub(super) static NAMES_ANSWER: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?i)\b(?:answer|option|choice|one)\b"));
/// Matches a sentence that calls an option wrong, with its letter in group 1: "B is wrong".
pub(super) static IS_DENIED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"\b([A-Z])\b[)\]}\x22'*_`]*\s+(?i:(?:is|was)\s+(?:clearly\s+|also\s+|actually\s+)?(?:the\s+)?(?:not\s+(?:the\s+)?(?:correct|right|answer|true)",
        r"|wrong|incorrect|false|excluded|eliminated|impossible|ruled\s+out)|can't\s+be|cannot\s+be)\b",
    ))
});
/// Matches a sentence that calls a statement false, with the statement's letter in group 1: "The
/// false statement is B".
pub(super) static FALSE_IS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:false|incorrect|wrong|untrue)\s+(?:statement|option|claim|one)\s+is\s*:?\s*[(*_]*((?-i:[A-Z]))\b",
    )
});
/// Matches a sentence that calls a statement true, with the statement's letter in group 1: "B is
/// true".
pub(super) static IS_TRUE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\b([A-HJ-Z])\b[)\]}\x22'*_`]*\s+is\s+(?:clearly\s+|therefore\s+)?true[\x22'*_`]*(?:[.,;!]|\s*$|\s*\n)",
    )
});
/// Matches words of a sentence that states the option in brackets: "the capital is Paris (D)".
pub(super) static STATES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:is|are|be|equals?|gives?|get|yields?|option|choice|thus|so|hence|therefore)\b|=",
    )
});
/// Matches a sentence such as "B works". Group 1 is the letter of the option, and group 2 the rest
/// of the sentence.
pub(super) static WORKS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"\b([A-HJ-Z])\b[)\]}\x22'*_`]*[ \t]+(?:also[ \t]+)?(?:works|fits)\b([^.!\n]*)")
});
/// Matches nouns before a letter in brackets that does not name an option: "equation (B)".
pub(super) static NUMBERED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)\b(?:equations?|eq\.?|figure|fig\.?|lemma|theorem|part|case|step|line|point|section|but|copyright|see|by|in|of)(?:\s+is)?\s*$",
    )
});
/// Matches text that can precede the word "answer": nothing, punctuation, or an adjective such as
/// "final".
pub(super) static OWN: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:^|[^a-z'\s-]|\b(?:the|an?|my|our|final|correct|right|best|better|most\s+\w+|only|single|good|true|real|actual|proper",
        r"|valid|accurate|appropriate|suitable|closest|nearest|logical|reasonable|sensible|plausible|exact|numeric|numerical|precise|intended|expected|required",
        r"|desired|corresponding|matching|resulting|chosen|selected|ultimate|simplified|complete|full|this|that|which|whose|so|thus|hence|therefore|then|and|is|as|with|choose|select|pick|mark",
        r"|i|we|de|la|el|il|une?|multiple|short|direct|overall|official|likely|one|strongest|safest|ideal|optimal|answer|option|choice|letter|of|to|for|in|solution))[\s*_\x22'(\[{`-]*$",
    ))
});
pub(super) static AFTER_ANOTHER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?:\b[A-Z]\b[)\]\x22'*_`]*\s*(?:,|、|/|&|,?\s*\b(?i:or|and|nor)\b)|\b(?i:neither|nor|none\s+of|not|than|if|whether|only\s+if))\s*(?i:option|choice|answer)?$",
    )
});
/// Matches text that can precede the letter of an option in "B is correct". A noun, as in "vitamin
/// B", does not match.
pub(super) static BEFORE_OPTION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)(?:^|[^\w\s-]|\n|选项|選項|選択肢|\b(?:option|opción|opção|opzione|antwort|respuesta|réponse|risposta|resposta|somit|daher|choice|answer|letter|that|so|therefore|thus|hence|then|only|think|believe|and|but|because|since|conclude|clearly))\s*$",
    )
});
