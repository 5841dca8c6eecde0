//! Extracts the value that a sentence states, without the text after it.
//!
//! "12 which is 3 times 4", "12 dollars and the change is 3 dollars", "`12` (see step 3)" and "13,
//! not 12" state a value and continue. A sentence is split into chunks at white space outside of
//! brackets and formulas. The statement starts before its first value. It ends before words that
//! neither belong to the value (a unit, a magnitude, "p.m.", "or more", a noun) nor join it to
//! another value ("and 5", "or 6", "times 3").

use crate::chunks::{
    Chunk, ChunkKind, MAX_CHARS, formula_content, split_into_chunks, strip_text_markup,
};
use crate::retraction::spoils_statement;
use crate::{languages, words};

/// Words that end the statement of a value.
const TAILS: [&str; 67] = [
    "fails",
    "which",
    "that",
    "because",
    "since",
    "so",
    "if",
    "when",
    "where",
    "while",
    "as",
    "but",
    "not",
    "after",
    "before",
    "for",
    "with",
    "from",
    "at",
    "on",
    "is",
    "are",
    "was",
    "were",
    "has",
    "have",
    "had",
    "making",
    "giving",
    "leaving",
    "the",
    "who",
    "assuming",
    "rounded",
    "using",
    "given",
    "provided",
    "though",
    "although",
    "i.e",
    "e.g",
    "ie",
    "eg",
    "namely",
    "then",
    "thus",
    "therefore",
    "hence",
    "we",
    "it",
    "this",
    "he",
    "she",
    "they",
    "there",
    "instead",
    "rather",
    "considering",
    "whereas",
    "unless",
    "until",
    "once",
    "meaning",
    "i",
    "you",
    "obtained",
    "being",
];

/// Words that join two values to one expression, which is not evaluated.
const JOINS: [&str; 20] = [
    "vs", "versus", "to", "times", "plus", "minus", "over", "divided", "out", "of", "by", "mod",
    "choose", "base", "fois", "mal", "veces", "vezes", "volte", "point",
];

/// Words before a value that change the value, in addition to the words of [`words`].
const LEADS: [&str; 7] = ["minus", "negative", "half", "than", "least", "most", "between"];

/// Words after "and" that bound a value.
const UPWARDS: [&str; 8] = ["above", "up", "over", "below", "under", "more", "upwards", "counting"];

/// Words of comparison, which join two values to one expression: 3 less than 12.
const COMPARISONS: [&str; 6] = ["less", "more", "fewer", "greater", "higher", "lower"];

/// Words between a quotient and its remainder.
const REMAINDERS: [&str; 6] = ["remainder", "rest", "reste", "resto", "r", "rem"];

/// Verbs and prepositions with which a value after "and" belongs to another statement: and 3 are
/// left.
const ELSEWHERE: [&str; 14] = [
    "are", "is", "was", "were", "remain", "remains", "left", "per", "for", "have", "has", "will",
    "each", "every",
];

/// Verbs between a negation and a value: cannot be 12.
const COPULAS: [&str; 15] = [
    "be", "is", "are", "equal", "equals", "exactly", "simply", "just", "es", "est", "ist", "é",
    "è", "это", "the",
];

/// Returns the value that a sentence states, with the words that belong to the value. Returns the
/// complete sentence if it states no value.
pub(crate) fn extract_statement(sentence: &str) -> String {
    let limit = sentence.char_indices().nth(MAX_CHARS).map_or(sentence.len(), |(at, _)| at);
    let sentence = &strip_text_markup(&sentence[..limit]);
    let chunks = split_into_chunks(sentence);
    let Some(first) = chunks.iter().position(Chunk::is_value) else {
        return trim_stops(sentence).to_owned();
    };
    let ends_clause = |chunk: &Chunk| {
        chunk.kind == ChunkKind::Word
            && chunk.stop.is_some_and(|stop| matches!(stop, ',' | ';' | ':'))
    };
    // "A, because 12 is even"
    if let [label, ..] = &chunks[..first]
        && label.stop == Some(',')
        && label.text.len() == 1
    {
        return label.text.to_owned();
    }
    let value_start = chunks[..first].iter().rposition(ends_clause).map_or(0, |at| at + 1);
    let is_arrow = |chunk: &&Chunk| ["->", "=>", "→", "⇒", "-->", ":"].contains(&chunk.text);
    let value_start = value_start + chunks[value_start..first].iter().take_while(is_arrow).count();
    let end = statement_end(&chunks, first);
    let end = if spoils_statement(&chunks[end..]) { chunks.len() } else { end };
    join_chunks(sentence, &chunks[value_start..end])
}

/// Returns the last value of a sentence, with the words and signs that belong to the value. Returns
/// `None` if the sentence has no value.
pub(super) fn extract_last_value(sentence: &str) -> Option<String> {
    if !sentence.contains(|c: char| c.is_ascii_digit() || c == '\\') {
        return None;
    }
    let start = sentence.char_indices().rev().nth(MAX_CHARS).map_or(0, |(at, _)| at);
    let sentence = &strip_text_markup(&sentence[start..]);
    let chunks = split_into_chunks(sentence);
    let first = chunks.iter().position(|chunk| chunk.kind == ChunkKind::Value)?;
    // Text after "which" and similar words is an explanation.
    let is_tail = |chunk: &Chunk| {
        chunk.is_any_word(&["which", "because", "since", "whereas"])
            || (chunk.kind == ChunkKind::Remark)
    };
    let stop = chunks[first..].iter().position(is_tail).map_or(chunks.len(), |at| first + at);
    let chunks = &chunks[..stop];
    let has_digits = |chunk: &&Chunk| {
        chunk.kind == ChunkKind::Value && chunk.text.contains(|c: char| c.is_ascii_digit())
    };
    let last = chunks.iter().rposition(|chunk| has_digits(&chunk))?;
    let mut value_start = last;
    let is_value =
        |at: usize| chunks[at].kind == ChunkKind::Value || chunks[at].text.chars().count() == 1;
    while value_start > 0 {
        let before = &chunks[value_start - 1];
        if before.stop.is_some() {
            break;
        }
        if before.kind == ChunkKind::Operator
            && !matches!(before.text, "=" | "==" | "≈" | "->" | "→" | "⇒" | "|")
        {
            let is_sign = value_start < 2 || !is_value(value_start - 2);
            if is_sign && before.text == "-" {
                // The dash is a list marker.
                break;
            }
            value_start -= if is_sign { 1 } else { 2 };
        } else if before.is_word("and")
            && let Some(length) = measure_length(&chunks[..value_start - 1], chunks.get(last + 1))
        {
            value_start -= length + 1;
        } else if before.is_any_word(&["or", "to", "times", "plus", "minus", "and"])
            && value_start > 1
            && is_value(value_start - 2)
        {
            let between = value_start > 2 && chunks[value_start - 3].is_word("between");
            match before.is_word("and") {
                true if between => value_start -= 3,
                true => break,
                false => value_start -= 2,
            }
        } else if let Some(length) = measure_length(&chunks[..value_start], chunks.get(last + 1)) {
            value_start -= length;
        } else if before.kind == ChunkKind::Value
            && chunks[value_start].kind == ChunkKind::Value
            && value_start == last
        {
            // A mixed number.
            value_start -= 1;
        } else if let Some(length) = bound_length(&chunks[..value_start]) {
            value_start -= length;
        } else if before.is_any_word(&COPULAS)
            && let copulas =
                chunks[..value_start].iter().rev().take_while(|c| c.is_any_word(&COPULAS)).count()
            && let Some(length) = denial_length(&chunks[..value_start - copulas])
        {
            value_start -= copulas + length;
        } else if changes_value(before) {
            value_start -= 1;
        } else {
            break;
        }
    }
    let mut end = last + 1;
    while end < chunks.len()
        && chunks[end - 1].stop.is_none()
        && chunks[end].kind == ChunkKind::Word
        && chunks[end].belongs_to_value()
    {
        end += 1;
    }
    Some(join_chunks(sentence, &chunks[value_start..end]))
}

/// Returns the number of chunks of the measure at the end of `chunks`, such as "5 feet". Returns
/// `None` unless the measure's unit is larger than the unit `small`.
fn measure_length(chunks: &[Chunk], small: Option<&Chunk>) -> Option<usize> {
    let small = small.filter(|small| small.kind == ChunkKind::Word)?;
    let [.., value, large] = chunks else { return None };
    let is_measure =
        value.kind == ChunkKind::Value && value.stop.is_none() && large.kind == ChunkKind::Word;
    (is_measure && words::can_follow_in_measure(small.text, large.text)).then_some(2)
}

/// Returns the number of words of the bound at the end of `chunks`, such as 2 for "at least".
fn bound_length(chunks: &[Chunk]) -> Option<usize> {
    let words: Vec<&str> = chunks.iter().map(|chunk| chunk.text).collect();
    (1..=words.len().min(5)).rev().find(|length| {
        let phrase = &words[words.len() - length..];
        words::parse_bound(phrase, true).is_some_and(|(_, taken)| taken == *length)
    })
}

/// Returns the number of words of the negation or doubt at the end of `chunks`. "The maximum is 5"
/// has no negation.
fn denial_length(chunks: &[Chunk]) -> Option<usize> {
    let length = bound_length(chunks)?;
    let words: Vec<&str> = chunks[chunks.len() - length..].iter().map(|chunk| chunk.text).collect();
    words::parse_bound(&words, true).filter(|(sign, _)| !["≤", "≥"].contains(sign)).map(|_| length)
}

/// Returns whether a word directly before a value changes the value, such as "minus".
fn changes_value(chunk: &Chunk) -> bool {
    let word = chunk.text.to_lowercase();
    chunk.kind == ChunkKind::Word
        && (LEADS.contains(&word.as_str())
            || languages::SIGNS.contains(&word.as_str())
            || words::multiplier_factor(&word).is_some()
            || words::parse_bound(&[&word], true).is_some())
}

/// Returns the index after the last chunk of a statement whose first value is at index `first`.
fn statement_end(chunks: &[Chunk], first: usize) -> usize {
    let is_plain = |at: usize| chunks.get(at).is_some_and(Chunk::is_value);
    // y = 13
    let is_assigned = |at: usize| {
        chunks
            .get(at)
            .is_some_and(|name| name.text.chars().count() == 1 && name.kind == ChunkKind::Word)
            && chunks.get(at + 1).is_some_and(|sign| sign.text == "=")
    };
    let is_value = |at: usize| is_plain(at) || is_assigned(at);
    // The first noun after the last value.
    let mut noun = None;
    let mut at = first + 1;
    // Whether the value at an index belongs to another statement: and 3 pears are left.
    let is_elsewhere = |at: usize| {
        let words = chunks[(at + 1).min(chunks.len())..].iter().take(3);
        let same = chunks.get(at).is_some_and(|value| value.stop.is_none());
        same && words.take_while(|c| c.kind == ChunkKind::Word).any(|c| c.is_any_word(&ELSEWHERE))
    };
    while let Some(chunk) = chunks.get(at) {
        let before = &chunks[at - 1];
        let reach = chunks[at..].iter().take(4);
        let is_remainder = chunk.is_any_word(&REMAINDERS)
            && (is_plain(at + 1)
                || (is_plain(at + 2) && chunks[at + 1].is_any_word(&["of", "is"])))
            || (chunk.is_word("with")
                && reach
                    .take_while(|c| c.kind == ChunkKind::Word)
                    .any(|c| c.is_any_word(&REMAINDERS[..4])));
        // R3
        let is_short = chunk
            .text
            .strip_prefix(['R', 'r'])
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()));
        if is_remainder || is_short {
            return chunks.len();
        }
        // In scripts without spaces, a clause is one chunk: 因为3乘以4等于12.
        let first_char = chunk.text.chars().next().unwrap_or(' ');
        let is_clause = ('\u{3040}'..'\u{e000}').contains(&first_char)
            && chunk.text.contains(|c: char| c.is_ascii_digit())
            && !["或", "和", "与", "还是", "以及", "または", "또는"]
                .iter()
                .any(|join| chunk.text.starts_with(join));
        if is_clause && before.stop.is_some() {
            return at;
        }
        match before.stop {
            // A second guess makes the first one uncertain.
            Some(',' | ';') if chunk.is_word("or") => {}
            Some(',' | ';') => {
                let value = if chunk.is_word("and") { at + 1 } else { at };
                let joins = is_value(at) || (chunk.is_any_word(&["and", "or"]) && is_value(at + 1));
                if !joins || is_elsewhere(value) {
                    return at;
                }
            }
            Some(_) => return at,
            None => {}
        }
        let word = chunk.text.to_lowercase();
        match chunk.kind {
            ChunkKind::Value if chunk.explains_value() => return at,
            // After a noun, a value that is not joined to the first one is separate.
            ChunkKind::Value | ChunkKind::Operator if noun.is_some() && before.stop.is_none() => {
                return noun.unwrap_or(at);
            }
            ChunkKind::Value => noun = None,
            ChunkKind::Operator => {
                let operand = |at: usize| {
                    is_value(at) || chunks.get(at).is_some_and(|c| c.text.chars().count() == 1)
                };
                if !operand(at + 1) {
                    return at;
                }
                at += 1;
            }
            // 12 (thirteen)
            ChunkKind::Remark
                if word
                    .trim_matches(['(', ')'])
                    .split('-')
                    .all(|w| words::word_to_number(w).is_some()) =>
            {
                return at + 1;
            }
            ChunkKind::Remark if word.starts_with("(base ") => return at + 1,
            ChunkKind::Remark => {
                let hedges = ["(or ", "(maybe ", "(perhaps ", "(possibly "];
                let is_hedge = hedges.iter().any(|hedge| word.starts_with(hedge));
                return if is_hedge { chunks.len() } else { at };
            }
            ChunkKind::Word if word == "or" => {
                let more = ["more", "less", "fewer", "greater", "higher", "above"];
                if !chunks.get(at + 1).is_some_and(|chunk| chunk.is_any_word(&more)) {
                    return chunks.len();
                }
                at += 1;
            }
            // 12 through 15, 12 modulo 5, 12 oder 13
            ChunkKind::Word
                if is_plain(at + 1)
                    && (["through", "thru", "modulo"].contains(&word.as_str())
                        || (word != "of" && languages::JOINS.contains(&word.as_str()))) =>
            {
                return chunks.len();
            }
            // 12 in binary
            ChunkKind::Word
                if word == "in"
                    && chunks.get(at + 1).is_some_and(|next| {
                        next.is_any_word(&[
                            "base",
                            "binary",
                            "ternary",
                            "octal",
                            "hexadecimal",
                            "hex",
                        ])
                    }) =>
            {
                return chunks.len();
            }
            // 12 and above
            ChunkKind::Word
                if word == "and"
                    && at <= first + 2
                    && chunks.get(at + 1).is_some_and(|next| next.is_any_word(&UPWARDS)) =>
            {
                return chunks.len();
            }
            ChunkKind::Word if word == "and" => {
                let half = chunks.get(at + 1).is_some_and(|chunk| chunk.is_word("a"))
                    && chunks.get(at + 2).is_some_and(Chunk::is_number_word);
                if !is_value(at + 1) && !half || is_elsewhere(at + 1) {
                    return at;
                }
                noun = None;
                at += if half { 2 } else { 1 };
            }
            // To the power of 2.
            ChunkKind::Word
                if word == "raised"
                    || (word == "to" && chunks.get(at + 1).is_some_and(|c| c.is_word("the"))) =>
            {
                return chunks.len();
            }
            ChunkKind::Word
                if COMPARISONS.contains(&word.as_str())
                    && chunks.get(at + 1).is_some_and(|chunk| chunk.is_word("than"))
                    && (is_plain(at + 2) || is_plain(at + 3)) =>
            {
                return chunks.len();
            }
            ChunkKind::Word
                if word == "as" && chunks.get(at + 1).is_some_and(|c| c.is_word("well")) =>
            {
                return chunks.len();
            }
            // 12 from 20, 12 in 20
            ChunkKind::Word
                if ["from", "in"].contains(&word.as_str())
                    && is_plain(at + 1)
                    && noun.is_none()
                    && at + 2 == chunks.len() =>
            {
                return chunks.len();
            }
            ChunkKind::Word if JOINS.contains(&word.as_str()) => {
                let reach = if word == "of" { 1 } else { 2 };
                let value = (at + 1..=at + reach).find(|next| is_value(*next));
                let Some(value) = value else { return at };
                at = value;
            }
            ChunkKind::Word if chunk.is_word("at") => {
                let is_article = |c: &&Chunk| c.is_any_word(&["the", "a", "very"]);
                let article = chunks[at + 1..].iter().take_while(is_article).count();
                let bounds = ["least", "most", "minimum", "maximum"];
                if !chunks.get(at + 1 + article).is_some_and(|chunk| chunk.is_any_word(&bounds)) {
                    return at;
                }
                at += 1 + article;
            }
            // "in" means inches at the end, and is a preposition elsewhere.
            ChunkKind::Word if word == "in" && at + 1 < chunks.len() => return at,
            // In "after 3 days", "after" is a preposition.
            ChunkKind::Word
                if ["after", "before", "above", "below", "under"].contains(&word.as_str())
                    && is_plain(at + 1)
                    && !chunks[at + 1].is_word("zero") =>
            {
                return at;
            }
            ChunkKind::Word if chunk.belongs_to_value() => {}
            ChunkKind::Word if TAILS.contains(&word.as_str()) => return at,
            ChunkKind::Word if noun.is_some_and(|noun| at == noun + 3) => return at,
            ChunkKind::Word if chunk.text.chars().nth(1).is_none() && noun.is_some() => {
                return noun.unwrap_or(at);
            }
            ChunkKind::Word => noun = noun.or(Some(at)),
        }
        at += 1;
    }
    chunks.len()
}

/// Returns the text of consecutive chunks of a sentence. If only one chunk is a formula, and the
/// words of the other chunks do not change its value, returns only the formula.
fn join_chunks(sentence: &str, chunks: &[Chunk]) -> String {
    let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return String::new() };
    let mut formulas =
        chunks.iter().filter_map(|chunk| Some((chunk, formula_content(chunk.text)?)));
    if let (Some((chunk, formula)), None) = (formulas.next(), formulas.next()) {
        let is_relevant = |other: &Chunk| {
            !std::ptr::eq(other, chunk)
                && (other.kind != ChunkKind::Word
                    || changes_value(other)
                    || other.belongs_to_value()
                    || other.is_number_word())
        };
        if !chunks.iter().any(is_relevant) {
            return formula.trim().to_owned();
        }
    }
    sentence[first.start..last.end].to_owned()
}

fn trim_stops(text: &str) -> &str {
    text.trim().trim_end_matches(['.', '!', '*', '_', ' ']).trim_start_matches(['*', ' '])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_ends_after_its_value() {
        for (sentence, want) in [
            ("12 which is 3 times 4", "12"),
            ("12 if we round down.", "12"),
            ("12 - that is, 3 times 4", "12"),
            ("12 dollars and the change is 3 dollars", "12 dollars"),
            ("`12`.", "12"),
            ("\"12\"", "12"),
            ("indeed 12!", "indeed 12"),
            ("__12__", "12"),
            ("<b>12</b> (see step 3)", "12"),
            ("13, not 12", "13"),
            ("between 12 and 13", "between 12 and 13"),
            ("12 or 13", "12 or 13"),
            ("12 (or 13)", "12 (or 13)"),
            ("3 times 4", "3 times 4"),
            ("3 boys and 4 girls", "3 boys and 4 girls"),
            ("3 boys, 4 girls, as said", "3 boys, 4 girls"),
            ("(0, 1)", "(0, 1)"),
            ("x = 12 when y = 3", "x = 12"),
            ("5! = 120", "5! = 120"),
            ("$x = 3$ because $y = 4$", "x = 3"),
            ("at least $5$", "at least $5$"),
            ("2:30 p.m. on Monday", "2:30 p.m"),
            ("5 million dollars in total", "5 million dollars"),
            ("two and a half hours", "two and a half hours"),
            ("well, 12", "12"),
            ("12, actually 13", "12, actually 13"),
            ("12 if x > 0 and 13 otherwise", "12 if x > 0 and 13 otherwise"),
            ("12, rather than 13", "12"),
            ("12 for men, 13 for women", "12 for men, 13 for women"),
            ("12 for men who work 3 days", "12"),
            ("12, though 13 is possible", "12, though 13 is possible"),
            ("12, as 13 is impossible", "12"),
            ("12 less than 20", "12 less than 20"),
            ("x = 12 and y = 13", "x = 12 and y = 13"),
            ("12 after 3 days", "12"),
            ("12 :)", "12"),
            ("no solution", "no solution"),
            ("7, which is wrong", "7, which is wrong"),
            ("7, but it must be 8", "7, but it must be 8"),
            ("7, but if x = 3 it is 8", "7"),
            ("7 through 9", "7 through 9"),
            ("7 ou 8", "7 ou 8"),
            ("7 in octal", "7 in octal"),
            ("7 (base 9)", "7 (base 9)"),
            ("$5 and then $7", "$5"),
        ] {
            assert_eq!(extract_statement(sentence), want, "{sentence}");
        }
    }

    #[test]
    fn last_value_keeps_units_and_bounds() {
        for (sentence, want) in [
            ("The point is (2, 3)", Some("(2, 3)")),
            ("The ratio is 3:2", Some("3:2")),
            ("So x = 42, which is what we wanted after 3 steps", Some("42")),
            ("48 + 24 = 72 clips", Some("72")),
            ("It falls by minus 5 degrees", Some("minus 5 degrees")),
            ("They sold 5 million", Some("5 million")),
            ("It is between 12 and 13", Some("between 12 and 13")),
            ("It is 5 or 6", Some("5 or 6")),
            ("It cannot be 12", Some("cannot be 12")),
            ("No es 12", Some("No es 12")),
            ("They start at 2:30 p.m.", Some("2:30 p.m")),
            ("He has 1 1/2 left", Some("1 1/2 left")),
            ("nothing", None),
        ] {
            assert_eq!(extract_last_value(sentence).as_deref(), want, "{sentence}");
        }
    }
}
