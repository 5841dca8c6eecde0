//! Detects retractions of a statement, such as "wait, 13", "which is wrong" and "but it should be
//! 13".

use std::sync::LazyLock;

use regex::Regex;

use crate::chunks::{Chunk, ChunkKind, MAX_CHARS, split_into_chunks, strip_text_markup};
use crate::pattern::pattern;

/// Words that retract the preceding statement.
const RETRACTIONS: [&str; 9] =
    ["wait", "actually", "sorry", "oops", "hmm", "correction", "nope", "scratch", "mistake"];

/// Words that retract the preceding statement only as the first word of a sentence, most of them in
/// languages other than English.
const FIRST_RETRACTIONS: [&str; 18] = [
    "moment",
    "warte",
    "halt",
    "attendez",
    "attends",
    "pardon",
    "espera",
    "espere",
    "perdón",
    "aspetta",
    "不对",
    "不",
    "等等",
    "等一下",
    "いや",
    "стоп",
    "подождите",
    "wacht",
];

/// Words for "no" in several languages.
const DENIALS: [&str; 6] = ["no", "nein", "non", "não", "nee", "нет"];

/// Words that deny a statement (`WRONG`), after a verb (`WRONG_IS`) and a subject (`SUBJECTS`):
/// "which is wrong".
const WRONG: [&str; 16] = [
    "wrong",
    "incorrect",
    "false",
    "untrue",
    "mistaken",
    "impossible",
    "not",
    "falsch",
    "inkorrekt",
    "faux",
    "incorrecte",
    "incorrecto",
    "incorrecta",
    "falso",
    "errado",
    "неверно",
];
const WRONG_IS: [&str; 11] =
    ["is", "was", "be", "ist", "war", "est", "es", "é", "that's", "it's", "c'est"];
const SUBJECTS: [&str; 14] = [
    "which", "that", "this", "it", "answer", "das", "dies", "was", "ce", "cela", "eso", "esto",
    "isso", "это",
];

/// Words that start a contrast (`CONTRASTS`), and words between these and the corrected value
/// (`RESTATES`): "but it should be 13".
const CONTRASTS: [&str; 11] =
    ["but", "however", "yet", "aber", "doch", "sondern", "mais", "pero", "sino", "mas", "но"];
const RESTATES: [&str; 32] = [
    "it", "it's", "that", "this", "the", "answer", "correct", "actual", "real", "true", "right",
    "is", "should", "must", "be", "really", "actually", "in", "fact", "es", "ist", "muss",
    "sollte", "sein", "c'est", "est", "doit", "être", "debe", "ser", "realidad", "en",
];

/// Words that introduce another value in addition to a stated one.
const ALTERNATIVES: [&str; 8] =
    ["otherwise", "else", "alternatively", "maybe", "perhaps", "possibly", "might", "rather"];

/// Pattern for verbs that reject one of several answers, such as "eliminate".
pub(crate) const REJECTIONS: &str = r"eliminat(?:e[sd]?|ing)|exclud(?:e[sd]?|ing)|rul(?:e[sd]?|ing)\s+out|reject(?:s|ed|ing)?|dismiss(?:es|ed|ing)?|discard(?:s|ed|ing)?";

/// Matches the start of a sentence that retracts the answer before it: "The answer is B, no, A",
/// "B. Wait, …".
static TAKES_BACK: LazyLock<Regex> = LazyLock::new(|| {
    let first = FIRST_RETRACTIONS.join("|");
    pattern(&format!(
        r"(?i)^\W*(?:{}|{}|{})",
        concat!(
            r"(?:(?:hmm+|oh|oops|sorry|but|well|actually|edit|update)\b\W*)*(?:no\s*(?:[,.;:!—–]|$)|no,?\s+wait|nope\b|correction\b|scratch\s+that",
            r"|(?:wait|hold\s+on)\s*(?:[.,:;!…—–]|-|$)|just\s+kidding|i\s+(?:doubt|disagree)|on\s+second\s+thought|strike\s+that|never\s*mind|make\s+that|i\s+meant?\b",
            r"|my\s+(?:bad|mistake)|not\s*(?:really|quite)?\s*[.!]|let\s+me\s+(?:re|double)|i\s+misread|or\s+rather\b|(?-i:[Rr]ather\s+[A-Z]\b)|revised\b|(?:this|that)\s+contradicts",
            r"|i\s+(?:retract|take\s+(?:that|it|this)\s+back|was\s+wrong|made\s+a(?:n\s+error|\s+mistake)))",
        ),
        r"(?:nein|doch|non|нет|いや|いいえ|不对|不對|不是|아니)\b?[\s,.:;!，、。]|[^.\n]{0,12}(?:不对|不對)",
        format_args!(r"(?:{first})\s*[,.:;!…，、。]"),
    ))
});

/// Matches the start of a sentence that gives up the statement before it, even without another
/// value: "I made a mistake", "On second thought", "However, this ignores the tax".
static GIVES_UP: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^\W*(?:(?:hmm+|oh|oops|sorry|but|however|well|actually|wait|no)\b\W*)*(?:on\s+second\s+thought|scratch\s+that|strike\s+that|never\s*mind",
        r"|my\s+(?:bad|mistake)|make\s+that|i\s+meant?\b|i\s+(?:retract|take\s+(?:that|it|this)\s+back|was\s+wrong|misread|made\s+a(?:n\s+error|\s+mistake))",
        r"|(?:i|we)\s+(?:need|have|must|should|ought)\s+(?:to\s+)?re(?:calculate|compute|do|consider|think|vise|work)\b",
        r"|(?:this|that|it)\s+(?:ignores|overlooks|forgets|neglects|misses|omits|contradicts)\b",
        r"|(?:这|那|此)[^。.\n]{0,4}(?:错|不对|不正确))",
    ))
});

/// Returns whether a sentence gives up the statement before it.
pub(crate) fn gives_up_statement(sentence: &str) -> bool {
    GIVES_UP.is_match(sentence)
}

/// Returns whether a sentence retracts the answer before it.
pub(crate) fn retracts_answer(sentence: &str) -> bool {
    TAKES_BACK.is_match(sentence)
}

/// Returns whether a text starts by retracting the statement before it. A single word, such as
/// "wait", counts only if the text contains a digit.
pub(crate) fn starts_with_retraction(text: &str) -> bool {
    let near = &text[..text.char_indices().nth(MAX_CHARS).map_or(text.len(), |(at, _)| at)];
    let near = strip_text_markup(near);
    let chunks = split_into_chunks(&near);
    let is_end = |chunk: &Chunk| matches!(chunk.stop, Some('.' | '!' | '?'));
    let end = chunks.iter().position(is_end).map_or(chunks.len(), |at| at + 1);
    let is_condition = chunks.first().is_some_and(|first| first.is_any_word(&["if", "unless"]));
    if !is_condition && are_denying_chunks(&chunks[..end.min(8)], false)
        || chunks.first().is_some_and(|first| first.is_any_word(&CONTRASTS))
            && are_contrasting_chunks(&chunks[..end])
    {
        return true;
    }
    if !text.contains(|c: char| c.is_ascii_digit()) {
        return false;
    }
    let mut words = text.split_whitespace().map(|word| {
        (
            word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase(),
            word.ends_with([',', '.', '!']),
        )
    });
    match words.find(|(word, _)| !word.is_empty()) {
        Some((word, stops)) if DENIALS.contains(&word.as_str()) => {
            stops || words.next().is_some_and(|(next, _)| RETRACTIONS.contains(&next.as_str()))
        }
        Some((word, _)) => {
            RETRACTIONS.contains(&word.as_str()) || FIRST_RETRACTIONS.contains(&word.as_str())
        }
        None => false,
    }
}

/// Returns whether chunks of text deny the statement before them. `is_tail` is whether the chunks
/// are in the same sentence as the statement.
fn are_denying_chunks(chunks: &[Chunk], is_tail: bool) -> bool {
    (1..chunks.len().min(20)).any(|at| {
        let is_wrong = chunks[at].is_any_word(&WRONG)
            && (!chunks[at].is_word("not")
                || chunks.get(at + 1).is_some_and(|next| {
                    next.is_any_word(&["correct", "right", "true", "possible"])
                }));
        let is_subject = match at {
            1 => is_tail,
            _ => chunks[at - 2].is_any_word(&SUBJECTS),
        };
        let is_short = chunks[at - 1].text.contains('\'');
        is_wrong && chunks[at - 1].is_any_word(&WRONG_IS) && (is_short || is_subject)
    })
}

/// Returns whether chunks of text replace the value before them: "but it should be 13".
fn are_contrasting_chunks(chunks: &[Chunk]) -> bool {
    let is_other = |rest: &[Chunk]| {
        let restates = rest.iter().take_while(|chunk| chunk.is_any_word(&RESTATES)).count();
        restates > 0 && rest.get(restates).is_some_and(|value| value.is_value())
    };
    (0..chunks.len()).any(|at| chunks[at].is_any_word(&CONTRASTS) && is_other(&chunks[at + 1..]))
}

/// Returns whether the rest of the sentence after a statement retracts the statement or gives
/// another value. Examples are "no, 13", "but it might be 13", "and 13 otherwise" and "if x > 0 and
/// 13 if x < 0".
pub(crate) fn spoils_statement(tail: &[Chunk]) -> bool {
    let is_value = |chunk: &Chunk| chunk.is_value();
    let is_retraction = |at: usize| {
        let is_than = tail.get(at + 1).is_some_and(|next| next.is_word("than"));
        let is_no = tail[at].is_any_word(&DENIALS) && tail[at].stop.is_some();
        let is_then = at == 0 && tail[at].is_word("then");
        // True for "12, wait, 13", but not for "he has to wait 13 days".
        let is_start = at == 0
            || tail[at].stop.is_some()
            || tail[at - 1].stop.is_some()
            || tail[at - 1].kind == ChunkKind::Operator
            || tail[at - 1].is_any_word(&["no", "oh", "but", "or", "and", "well"]);
        let is_other =
            (is_start && tail[at].is_any_word(&RETRACTIONS)) || tail[at].is_any_word(&ALTERNATIVES);
        (is_other && !is_than) || is_no || is_then
    };
    // "12 for men, 13 for women", "12, though 13 is possible"
    let is_case = |at: usize| {
        let is_joined = tail[at - 1].stop.is_some() || tail[at - 1].is_word("and");
        is_value(&tail[at])
            && is_joined
            && tail[0].is_word("for")
            && tail.get(at + 1).is_some_and(|next| next.is_word("for"))
    };
    let is_possible = |at: usize| {
        let next = |by: usize, word: &str| tail.get(at + by).is_some_and(|next| next.is_word(word));
        is_value(&tail[at]) && next(1, "is") && next(2, "possible")
    };
    // Conditions after "because" belong to the reason, and not to the value.
    let reason = tail
        .iter()
        .position(|chunk| chunk.is_any_word(&["because", "since"]))
        .unwrap_or(tail.len());
    let conditions =
        tail[..reason].iter().filter(|chunk| chunk.is_any_word(&["if", "when"])).count();
    are_denying_chunks(tail, true)
        || are_contrasting_chunks(tail)
        || (1..tail.len()).any(is_case)
        || (0..tail.len()).any(is_possible)
        || tail.iter().any(is_value) && (conditions > 1 || (0..tail.len()).any(is_retraction))
}
