//! Recognizes phrases next to a number that change its value or negate it: at least 5, not 5, maybe
//! 5, the square of 5.
//!
//! `maths` and `numeric` share one table for all languages: German, Spanish, French, Italian,
//! Portuguese, Dutch, Russian, Polish, Turkish, Hindi, Arabic, Chinese, Japanese, Korean, and
//! common bounds of some other languages.

use std::collections::HashMap;
use std::sync::LazyLock;

/// Position of a phrase such as "at least", relative to the number that the phrase bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PhrasePosition {
    /// The phrase stands directly before or directly after the number.
    Any,
    /// The phrase stands directly before the number.
    Before,
    /// The phrase stands directly after the number.
    Behind,
}
use PhrasePosition::{Any, Before, Behind};

/// Phrases that bound or deny a number: their position relative to the number, their effect such as
/// `≥`, and the phrases, separated by `|`.
const PHRASES: &[(PhrasePosition, &str, &str)] = &[
    (
        Any,
        "≥",
        "at least|at the least|at the very least|at a minimum|at minimum|at the minimum|minimum \
         of|a minimum of|min of|no less than|not less than|no fewer than|not fewer than|no \
         smaller than|not smaller than|not below|not under|no lower than|not lower than|greater \
         than or equal to|more than or equal to|greater or equal to|equal to or greater \
         than|equal to or more than|above or equal to|bigger or equal to|\
        or more|or greater|or higher|or above|or over|or larger|or bigger|or better|or so \
        more|and up|and above|and over|and upwards|and more|and counting|upwards of|upward of|\
        lower bound of|lower limit of|starting at|starting from|anything above",
    ),
    (
        Any,
        "≤",
        "at most|at the most|at the very most|at a maximum|at maximum|at the maximum|maximum of|a \
         maximum of|max of|no more than|not more than|no greater than|not greater than|no larger \
         than|not larger than|no bigger than|no higher than|not above|not over|not exceeding|not \
         to exceed|does not exceed|less than or equal to|less or equal to|fewer than or equal \
         to|equal to or less than|below or equal to|smaller or equal to|or less|or fewer|or \
         lower|or below|or under|or smaller|or worse|and below|and under|\
        and down|up to|anywhere up to|upper bound of|upper limit of|capped at|\
        limited to|bounded by|bounded above by|anything below",
    ),
    (
        Any,
        ">",
        "more than|greater than|larger than|bigger than|higher than|exceeding|exceeds|in excess \
         of|north of",
    ),
    (
        Any,
        "<",
        "less than|fewer than|smaller than|lower than|short of|shy of|just short of|south of",
    ),
    (Any, "≈", "close to|almost|nearly|barely|hardly|scarcely|something like|ballpark of|near to"),
    (
        Any,
        "≠",
        "not|never|cannot|neither|nor|but|without|excluding|except|other than|different \
         from|rather than|instead of|anything but|far from|nowhere near|nothing \
         like|wrong|incorrect|invalid|impossible|excluded|unequal to|none of|unlikely|there is no \
         way|no way|unlike|we reject|we exclude|we discard|rule out|rules out|ruling out|ruled out|\
        is false|false that|mistake|misconception|mistaken|untrue|ain't|aint|isnt|cant|wont|doesnt",
    ),
    (
        Any,
        "maybe",
        "maybe|perhaps|probably|presumably|supposedly|alternatively|hypothetically|i guess|i'd \
         guess|rough estimate|rough guess|my guess|we guess|best guess|i \
         doubt|doubt|doubtful|doubtfully|unclear|wahrscheinlich|vermutlich|probablement|vraisemblablement|könnten|vielleicht|möglicherweise|eventuell|womöglich|quizás|quizá|tal vez|a lo mejor|posiblemente|\
        peut-être|possiblement|forse|magari|talvez|possivelmente|misschien|wellicht|возможно|может быть|\
        наверное|вероятно|być może|chyba|belki|muhtemelen|शायद|ربما|قد \
        يكون|kanskje|kanske|måske|ehkä|talán|poate|možná|ίσως|אולי|شاید|mungkin|có lẽ",
    ),
    (
        Any,
        "might",
        "possibly|potentially|conceivably|might be|may be|could be|could have been|könnte|podría \
         ser|puede ser|peut être|pourrait être|potrebbe essere|pode ser|poderia ser|mogelijk",
    ),
    (
        Any,
        "supposed",
        "suppose|supposing|supposed|if it were|if it \
         was|assume|assuming|assumed|imagine|imagining|pretend|let's say|angenommen|\
        gesetzt|unter der annahme|nehmen wir an|supposons|à \
        supposer|supongamos|suponiendo|supongo|supponiamo|suponhamos|supondo|veronderstel|предположим|допустим|пусть|załóżmy|varsayalım|मान लीजिए|मान लो|\
        لنفترض|wenn|falls es|falls er|falls sie|falls die|если|jeśli|eğer|अगर|यदि|إذا",
    ),
    (Any, "between", "between|somewhere between"),
    (Any, "factorial", "factorial|the factorial of"),
    (Any, "inverse", "inverse"),
    (Any, "absolute", "absolute value of|the absolute value of"),
    (Any, "doubled", "doubled"),
    (Any, "tripled", "tripled"),
    (Any, "halved", "halved"),
    (Any, "divisible", "divisible by|coprime to|relatively prime to"),
    (
        Any,
        "next",
        "number after|integer after|prime after|number following|integer following|successor \
         of|predecessor of",
    ),
    (Any, "modulo", "modulo|mod"),
    (Any, "first", "of the first"),
    (
        Any,
        "power",
        "to the power|to the second power|to the third power|to the fourth power|to the fifth \
         power",
    ),
    // Languages other than English.
    (
        Any,
        "≥",
        "mindestens|wenigstens|zumindest|im minimum|oder mehr|und mehr|au moins|au minimum|ou \
         plus|et plus|al menos|por lo menos|como mínimo|cuando menos|mínimo de|o más|y más|pelo \
         menos|no mínimo|ou mais|e mais|almeno|al minimo|come minimo|o più|e più|minstens|ten \
         minste|minimaal|of meer|en meer|не менее|не меньше|не ниже|как минимум|по крайней \
         мере|по меньшей мере|самое меньшее|минимум|или больше|или более|и более|\
        и больше|co najmniej|przynajmniej|lub więcej|en az|en azından|asgari|veya daha fazla|ve \
        üzeri|कम से कम|या अधिक|على الأقل|لا يقل عن|أو \
        أكثر|minst|mindst|vähintään|ainakin|legalább|cel puțin|τουλάχιστον|\
        nejméně|alespoň|najmenej|щонайменше|לפחות|حداقل|sekurang-kurangnya|setidaknya|ít \
        nhất|อย่างน้อย",
    ),
    (
        Any,
        "≤",
        "höchstens|allerhöchstens|im maximum|oder weniger|und weniger|au plus|au maximum|tout au \
         plus|ou moins|como máximo|a lo sumo|a lo más|máximo de|o menos|no máximo|ou menos|al \
         massimo|al più|o meno|hoogstens|ten hoogste|maximaal|of minder|не более|не больше|не \
         выше|максимум|самое большее|или меньше|или менее|co najwyżej|najwyżej|maksymalnie|lub \
         mniej|en fazla|en çok|azami|veya daha az|अधिक से अधिक|ज़्यादा से ज़्यादा|على الأكثر|لا \
         يزيد عن|أو أقل|högst|højst|enintään|korkeintaan|legfeljebb|cel mult|\
        το πολύ|nejvýše|najviac|щонайбільше|не більше|לכל היותר|حداکثر|paling banyak|nhiều \
        nhất|ไม่เกิน",
    ),
    (
        Any,
        ">",
        "mehr als|größer als|höher als|plus de|supérieur à|supérieure à|más de|más que|mayor que|\
        mayor de|superior a|mais de|mais que|maior que|maior do que|più di|maggiore di|superiore \
        a|meer dan|groter dan|более|больше|свыше|выше|więcej niż|ponad|powyżej|daha fazla|أكثر \
        من|mer än|mer enn|mere end|több mint|mai mult de|více než|lebih dari",
    ),
    (
        Any,
        "<",
        "weniger als|kleiner als|niedriger als|moins de|moins que|inférieur à|inférieure à|menos \
         de|menos que|menor que|menor de|menor do que|inferior a|meno di|minore di|inferiore \
         a|minder dan|kleiner dan|менее|меньше|ниже|mniej niż|poniżej|daha az|أقل من|mindre \
         än|mindre enn|mindre end|kevesebb mint|méně než|kurang dari",
    ),
    (Any, "≈", "beinahe|nahezu|presque|casi|quasi|quase|bijna|почти|prawie|neredeyse|takriben"),
    (
        Any,
        "≠",
        "pas|jamais|nicht|kein|keine|nie|niemals|ungleich|não|nunca|niet|geen|nooit|nem|не|нет|никогда|\
        не равно|nigdy|değil|asla|नहीं|ليس|ليست|لا يساوي|inte|ikke|δεν \
        είναι|όχι|není|לא|bukan|không \
        phải|ไม่ใช่|falsch|inkorrekt|faux|incorrecto|incorrecta|falso|errado|sbagliato|fout|неверно|неправильно|błędne|\
        yanlış|गलत|خطأ",
    ),
    // Directly before a number.
    (
        Before,
        ">",
        "über|over|above|beyond|well over|just over|a little over|past|slightly above|somewhat \
         above|от|hơn|anything over",
    ),
    (
        Before,
        "<",
        "under|below|before|just under|unter|knapp|dưới|slightly below|a bit under|a little \
         under|anything under|strictly under",
    ),
    (Before, "≈", "fast|près de|half|halve"),
    (
        Before,
        "maybe",
        "either|entweder|может|może|else|otherwise|sonst|sinon|si \
         no|senão|altrimenti|anders|иначе|people think it is|people say it is|students answer",
    ),
    (
        Before,
        "≤",
        "max|maximum|bis|bis zu|hasta|até|jusqu'à|fino a|within|until|till|tot|tot \
         aan|до|maximal|máximo|massimo|upto|as many as|as much as|as high as",
    ),
    (Before, "≥", "min|minimum|minimal|mínimo|minimo|from|as few as|as little as|as low as"),
    (Before, "≠", "no|no longer|non|non è|mai|no es|no son|versus|vs|wrong to say|nobody says"),
    (Before, "base", "hexadecimal|hex|octal|binary"),
    // Directly after a number.
    (Behind, "<", "under"),
    (Behind, "≥", "minimum|plus|upwards|upward|au moins"),
    (Behind, "≤", "maximum|max|tops|at best"),
    (Behind, "≈", "ish|give or take|not exactly|but not exactly"),
    (Behind, "maybe", "perhaps|maybe|i guess|i suppose"),
];

/// Phrases of [`PHRASES`] by their first word, longest phrases first.
static BY_WORD: LazyLock<HashMap<&'static str, Vec<BoundPhrase>>> = LazyLock::new(|| {
    let mut by_word: HashMap<_, Vec<BoundPhrase>> = HashMap::new();
    for (position, sign, phrases) in PHRASES {
        for phrase in phrases.split('|') {
            let words: Vec<&str> = phrase.split(' ').collect();
            by_word.entry(words[0]).or_default().push(BoundPhrase {
                position: *position,
                sign,
                words,
            });
        }
    }
    by_word
        .values_mut()
        .for_each(|phrases| phrases.sort_by_key(|phrase| std::cmp::Reverse(phrase.words.len())));
    by_word
});

struct BoundPhrase {
    position: PhrasePosition,
    sign: &'static str,
    words: Vec<&'static str>,
}

/// Negations in languages that are written without spaces between words.
const DENIALS: &[&str] = &[
    "不是",
    "不等",
    "不能",
    "不可",
    "不为",
    "并非",
    "不对",
    "ではな",
    "ではあり",
    "じゃな",
    "でない",
    "아닙니다",
    "아니",
    "不正确",
];

/// Bounds and doubts about a number, in languages that are written without spaces. They can be
/// parts of words. A longer phrase precedes the phrases that it contains.
const JOINED: &[(&str, &str)] = &[
    ("不少于", "≥"),
    ("不小于", "≥"),
    ("不低于", "≥"),
    ("至少", "≥"),
    ("最少", "≥"),
    ("最小", "≥"),
    ("少なくとも", "≥"),
    ("최소", "≥"),
    ("적어도", "≥"),
    ("이상", "≥"),
    ("以上", "≥"),
    ("不超过", "≤"),
    ("不超過", "≤"),
    ("不大于", "≤"),
    ("不高于", "≤"),
    ("不多于", "≤"),
    ("至多", "≤"),
    ("最多", "≤"),
    ("最大", "≤"),
    ("多くとも", "≤"),
    ("せいぜい", "≤"),
    ("최대", "≤"),
    ("많아야", "≤"),
    ("기껏해야", "≤"),
    ("이하", "≤"),
    ("以下", "≤"),
    ("以内", "≤"),
    ("超过", ">"),
    ("超過", ">"),
    ("大于", ">"),
    ("大於", ">"),
    ("多于", ">"),
    ("高于", ">"),
    ("より大き", ">"),
    ("초과", ">"),
    ("不到", "<"),
    ("不足", "<"),
    ("小于", "<"),
    ("小於", "<"),
    ("少于", "<"),
    ("低于", "<"),
    ("未満", "<"),
    ("未满", "<"),
    ("より小さ", "<"),
    ("미만", "<"),
    ("接近", "≈"),
    ("将近", "≈"),
    ("거의", "≈"),
    ("可能", "maybe"),
    ("也许", "maybe"),
    ("或许", "maybe"),
    ("大概", "maybe"),
    ("たぶん", "maybe"),
    ("おそらく", "maybe"),
    ("아마", "maybe"),
    ("假设", "supposed"),
    ("假如", "supposed"),
    ("如果", "supposed"),
    ("もし", "supposed"),
    ("만약", "supposed"),
    ("틀렸", "≠"),
    ("错", "≠"),
];

/// Bounds and doubts that count only directly after a number, in languages that are written without
/// spaces.
const JOINED_BEHIND: [(&str, &str); 13] = [
    ("分之", "part"),
    ("以外", "≠"),
    ("多", ">"),
    ("余", ">"),
    ("几", ">"),
    ("は間違い", "≠"),
    ("は誤り", "≠"),
    ("は誤り", "≠"),
    ("は間違", "≠"),
    ("是错", "≠"),
    ("는 틀", "≠"),
    ("은 틀", "≠"),
    ("이 틀", "≠"),
];

/// Suffixes that change the value of the number before them, such as 倍 (times) in 5的两倍.
const MULTIPLES: &[&str] = &[
    "倍",
    "一半",
    "平方",
    "立方",
    "倍数",
    "因数",
    "约数",
    "根",
    "阶乘",
    "相反数",
    "倒数",
    "绝对值",
    "对数",
    "补角",
    "余角",
    "次方",
];

/// Nouns that, followed by "of", change the value of the number after them: the square of 5.
const FUNCTIONS: &[&str] = &[
    "multiple",
    "multiples",
    "factor",
    "factors",
    "divisor",
    "divisors",
    "power",
    "powers",
    "square",
    "squares",
    "cube",
    "cubes",
    "root",
    "roots",
    "reciprocal",
    "inverse",
    "opposite",
    "negation",
    "negative",
    "logarithm",
    "log",
    "exponential",
    "sine",
    "cosine",
    "tangent",
    "complement",
    "supplement",
    "factorial",
    "hälfte",
    "doppelte",
];

/// Nouns with a preposition that change the value of the number after them, in languages other than
/// English: "hälfte von" (half of).
const OTHER_FUNCTIONS: &[&str] = &[
    "hälfte von",
    "doppelte von",
    "mitad de",
    "doble de",
    "moitié de",
    "double de",
    "metà di",
    "doppio di",
    "metade de",
    "dobro de",
    "helft van",
    "половина от",
    "половины от",
    "viel wie",
];

/// Returns the bound that a word directly after a number expresses, such as `≥`, or `None` if the
/// word is not a bound.
pub(crate) fn bound_after_number(word: &str) -> Option<&'static str> {
    let word = word.to_lowercase();
    find_longest_phrase(&[word.as_str()], |position, _| position == Behind).map(|(sign, _)| sign)
}

/// Returns the bound at the start of `words`, which directly follow a number, and the number of
/// words in the bound. Considers phrases that are bounds only after a number, and the bounds ≥ and
/// ≤.
pub(crate) fn bound_phrase_after_number(words: &[&str]) -> Option<(&'static str, usize)> {
    let behind = |position: PhrasePosition, sign: &str| {
        position == Behind || (position == Any && ["≥", "≤"].contains(&sign))
    };
    find_longest_phrase(words, behind)
}

/// Returns the bound at the start of `text`, which directly follows a number in a language without
/// spaces between words. Returns `None` if there is no bound.
pub(crate) fn unspaced_bound_after_number(text: &str) -> Option<&'static str> {
    let mut parts = JOINED.iter().chain(&JOINED_BEHIND);
    let found = parts.find(|(part, _)| text.starts_with(part)).map(|(_, sign)| *sign);
    let denial = ["이 ", "가 ", "は", ""].iter().any(|particle| {
        text.strip_prefix(particle)
            .is_some_and(|rest| DENIALS.iter().any(|own| rest.starts_with(own)))
    });
    found.or(denial.then_some("≠")).or(starts_with_multiple(text).then_some("multiple"))
}

/// Returns whether `text`, which directly follows a number, starts with a word that changes the
/// number's value, such as 的两倍 (twice). `text` has no spaces between words.
pub(crate) fn starts_with_multiple(text: &str) -> bool {
    let word: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
    is_multiple_word(&word)
}

/// Returns whether a word after a number changes its value, such as 的两倍 (twice).
fn is_multiple_word(word: &str) -> bool {
    MULTIPLES.iter().any(|end| word.strip_suffix(end).is_some_and(|rest| rest.starts_with('的')))
}

/// Returns the bound at the end of `text`, which directly precedes a number in a language without
/// spaces between words. Returns `None` if there is no bound.
pub(crate) fn unspaced_bound_before_number(text: &str) -> Option<&'static str> {
    let found = JOINED.iter().find(|(part, _)| text.ends_with(part)).map(|(_, sign)| *sign);
    let denial = || DENIALS.iter().any(|denial| text.ends_with(denial)).then_some("≠");
    found.or_else(denial)
}

/// Returns the effect of the longest known phrase at the start of `words`, such as `≥` for "at
/// least", and the phrase's number of words. `words` must be in lower case. `fits` selects phrases
/// by position and effect.
fn find_longest_phrase(
    words: &[&str],
    fits: impl Fn(PhrasePosition, &str) -> bool,
) -> Option<(&'static str, usize)> {
    let candidates = BY_WORD.get(*words.first()?)?;
    let starts = |phrase: &BoundPhrase| {
        words.len() >= phrase.words.len() && words.starts_with(&phrase.words)
    };
    let found =
        candidates.iter().find(|phrase| fits(phrase.position, phrase.sign) && starts(phrase))?;
    Some((found.sign, found.words.len()))
}

/// Returns the bound at the start of `words`, such as `≥` for "at least", and the bound's number of
/// words. `before` is whether a number follows the words.
pub(crate) fn parse_bound(words: &[&str], before: bool) -> Option<(&'static str, usize)> {
    let lower: Vec<String> = words.iter().take(8).map(|word| word.to_lowercase()).collect();
    let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
    let first = *lower.first()?;
    if let Some(found) = find_longest_phrase(&lower, |position, _| position == Any) {
        return Some(found);
    }
    // Can't, won't, doesn't. In languages without spaces, a negation can be inside a longer word:
    // 答案不是.
    if ["n't", "n’t"].iter().any(|denial| first.ends_with(denial))
        || DENIALS.iter().any(|denial| first.contains(denial))
    {
        return Some(("≠", 1));
    }
    let is_multiple = |word: &str| {
        is_multiple_word(word) || word.starts_with("分之") || ["平方", "立方", "非"].contains(&word)
    };
    // 最大 means "at most", 最大值 means "maximum", and 最大公约数 means "greatest common divisor".
    let is_part = |part: &str| {
        let mut rests = first.match_indices(part).map(|(at, _)| &first[at + part.len()..]);
        rests.any(|rest| !rest.starts_with(['值', '値', '公', '的', '数', '공', '값']))
    };
    if let Some((_, bound)) = JOINED.iter().find(|(part, _)| is_part(part)) {
        return Some((bound, 1));
    }
    if is_multiple(first) {
        return Some(("multiple", 1));
    }
    // "The 5th prime" denotes another number than 5.
    if let [ordinal, noun, ..] = &lower[..]
        && ["st", "nd", "rd", "th"].contains(ordinal)
        && ["prime", "power", "root", "term", "multiple", "square", "cube"].contains(noun)
    {
        return Some(("ordinal", 2));
    }
    if let [noun, of, ..] = &lower[..] {
        if *of == "of"
            && let Some(noun) = FUNCTIONS.iter().find(|own| noun == *own)
        {
            return Some((noun, 2));
        }
        if OTHER_FUNCTIONS.iter().any(|own| own.split(' ').eq([*noun, *of])) {
            return Some(("multiple", 2));
        }
    }
    let found = find_longest_phrase(&lower, |position, _| before && position == Before)?;
    (found.1 == words.len()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_recognized_in_several_languages() {
        for (words, before, want) in [
            (&["at", "least"][..], true, Some(("≥", 2))),
            (&["Höchstens"][..], true, Some(("≤", 1))),
            (&["не", "менее"][..], true, Some(("≥", 2))),
            (&["答案不是"][..], true, Some(("≠", 1))),
            (&["最大値は"][..], true, None),
            (&["最大"][..], true, Some(("≤", 1))),
            (&["can’t"][..], true, Some(("≠", 1))),
            (&["no"][..], true, Some(("≠", 1))),
            (&["no"][..], false, None),
            (&["wrong"][..], false, Some(("≠", 1))),
            (&["Angenommen"][..], true, Some(("supposed", 1))),
            (&["bis", "zu"][..], true, Some(("≤", 2))),
            (&["apples"][..], true, None),
        ] {
            assert_eq!(parse_bound(words, before), want, "{words:?}");
        }
    }

    #[test]
    fn bound_phrase_ignores_bounds_on_later_numbers() {
        for (words, want) in [
            (&["at", "least"][..], Some(("≥", 2))),
            (&["or", "less"][..], Some(("≤", 2))),
            (&["more", "than", "3"][..], None),
            (&["apples"][..], None),
        ] {
            assert_eq!(bound_phrase_after_number(words), want, "{words:?}");
        }
    }
}
