//! Whether a text states a short answer somewhere.
//!
//! The answer must stand there as words of its own, with its numbers and symbols: "ice" is neither in "nice"
//! nor "C" in "C#", nor 5 in 5-6. Where the words around it deny it ("not Paris", "Paris is wrong"), it is
//! not stated.

use std::sync::LazyLock;

use regex::Regex;

use crate::pattern::pattern;
use crate::short::{Short, normalise};

/// Returns whether a text states an answer, in at least one place without a denial. An answer without words
/// or digits is in none.
pub(crate) fn contains(text: &str, want: &Short) -> bool {
    let words = want.text.split(' ').count();
    if !want.has_words {
        return false;
    }
    if JOINED_SCRIPT.is_match(&want.text) {
        return is_in_joined_script(text, want);
    }
    let tokens: Vec<(usize, usize)> =
        TOKEN.find_iter(text).map(|found| (found.start(), found.end())).collect();
    tokens.iter().enumerate().any(|(first, (start, end))| {
        let token = &text[*start..*end];
        let begins = normalise(POSSESSIVE.find(token).map_or(token, |owned| &token[..owned.start()]));
        if !want.text.starts_with(&begins) || (begins.is_empty() && want.symbols.is_empty()) {
            return false;
        }
        // Articles and marks that stand alone are no words.
        let ends = tokens[first..].iter().take(2 * words + 4).map(|(_, end)| *end);
        let mut fits = ends.take_while(|end| {
            let found = normalise(&text[*start..*end]);
            want.text.starts_with(&found)
                || POSSESSIVE.is_match(&text[*start..*end])
                || found.ends_with(['a', 'n', 'e'])
        });
        fits.any(|end| {
            let whole = &text[*start..end];
            let end = start + POSSESSIVE.find(whole).map_or(whole.len(), |owned| owned.start());
            let is_it = |end: usize| Short::new(&text[*start..end], false).is(want);
            let word = start + whole.trim_end_matches(|c: char| !c.is_alphanumeric()).len();
            let is_stated = || !is_denied(&text[..*start], &text[word.min(end)..]);
            (is_it(start + whole.len()) || is_it(end)) && is_stated()
        })
    })
}

/// Returns whether a text has an answer in a script that writes words without spaces.
fn is_in_joined_script(text: &str, want: &Short) -> bool {
    let own = Short::new(text, false);
    let has_all = want.numbers.iter().all(|number| own.numbers.contains(number))
        && want.symbols.iter().all(|symbol| own.symbols.contains(symbol));
    let is_letter = |c: Option<char>| c.is_some_and(char::is_lowercase);
    let (first, last) = (want.text.chars().next(), want.text.chars().next_back());
    let mut places = own
        .text
        .match_indices(&want.text)
        .map(|(at, _)| (&own.text[..at], &own.text[at + want.text.len()..]));
    has_all
        && places.any(|(before, after)| {
            let joins = is_letter(first) && is_letter(before.chars().next_back())
                || is_letter(last) && is_letter(after.chars().next());
            !joins && !DENIED_JOINED.is_match(before)
        })
}

/// Returns whether what stands around an answer denies it.
fn is_denied(before: &str, after: &str) -> bool {
    let start = before.char_indices().rev().nth(100).map_or(0, |(at, _)| at);
    let before = ANYTHING_BUT.replace_all(&before[start..], "except");
    let clause = CLAUSE.split(&before).last().unwrap_or_default();
    let clause = SURE.replace_all(clause, "");
    let end = after.char_indices().nth(100).map_or(after.len(), |(end, _)| end);
    DENIES.is_match(&clause) || CALLED_WRONG.is_match(&after[..end])
}

static TOKEN: LazyLock<Regex> = LazyLock::new(|| pattern(r"[^\s\u2014]+"));
static POSSESSIVE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?:'|\u2019)s?[.,;:!?)]*$"));
/// Han, Kana, and the scripts of South-East Asia.
static JOINED_SCRIPT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"));
static DENIED_JOINED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?:不是|不为|并非|並非|不在|而非|没有|沒有|不选|不叫)$"));
static ANYTHING_BUT: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)\banything\s+but\b"));
/// What ends a clause; a comma does if a subject follows.
static CLAUSE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)[.!?;:\n\u{3002}]\s*|\b(?:but|however|instead,|so|therefore|because)\s",
        r"|,\s*(?:it|it's|it\u{2019}s|the|he|she|they|that|this|we|i|who|which)\s",
    ))
});
/// Denials that deny nothing: "No, Paris", "no doubt it is Paris", "not only Paris".
static SURE: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?i)^\W*no\s*,|\b(?:there\s+is\s+)?(?:no|without(?:\s+a)?|not\s+any)\s+doubt\b|\bnot\s+only\b")
});
/// A denial in a clause, at most six words before its end.
static DENIES: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)(?:\b(?:not|cannot|never|whether|wrong|incorrect|false|unlikely|impossible|den(?:y|ies|ied)|rul(?:e|es|ed|ing)\s+out",
        r"|exclud(?:e|es|ed|ing)|nicht|kein|keine|keinen|pas|nunca|jamais|не|cant|dont|doesnt|didnt|isnt|wasnt|arent|werent|wont)\b|\w+n['\u{2019}]t\b)(?:\W+[\w'\u{2019}]+){0,6}\W*$",
        r"|\b(?:neither|nor|without|except(?:\s+for)?|excluding|anything\s+but|other\s+than|rather\s+than|instead\s+of|unlike)\b[^.]*$",
        r"|\b(?:no|non|no\s+es|n(?:'|\u{2019})est)\W+$|\bnon-$",
    ))
});
/// What follows an answer that is called wrong.
static CALLED_WRONG: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?i)^[^\w.!?;]*(?:(?:is|was|are|were|would\s+be|seems)\s+(?:\w+ly\s+)?(?:not\s+(?:it|right|correct|true|the\s+(?:\w+\s+)?(?:answer|one))\b|wrong|incorrect|false|excluded|ruled\s+out)",
        r"|(?:is|was)n(?:'|\u{2019})t\s+(?:it|the|right|correct|true)\b|(?:cannot|can(?:'|\u{2019})t)\s+be\b)",
        r"|^\W*\?\W*(?:no|nope|wrong)\b|^[.!]\s+(?:no\s*[,.!]|nope\b|(?:that|this|it)\s+(?:is|was)\s+(?:not|wrong|incorrect|false)\b)",
        r"|^[^.!?;\n]*\b(?:but|which|though)\s+(?:that\s+|this\s+|it\s+)?(?:is|was)\s+(?:not\s+(?:right|correct|true)|wrong|incorrect|false)\b",
    ))
});

#[cfg(test)]
mod tests {
    use super::*;

    fn states(text: &str, answer: &str) -> bool {
        contains(text, &Short::new(answer, false))
    }

    #[test]
    fn contains_finds_words_of_their_own() {
        for (answer, text) in [
            ("Paris", "It is Paris."),
            ("Paris", "Paris's mayor"),
            ("Paris", "(Paris), I think"),
            ("Paris", "the city\u{2014}Paris\u{2014}is old"),
            ("Paris", "\u{201c}Paris\u{201d}"),
            ("New York", "in new york city"),
            ("the man of the hour", "He is a man of hour."),
            ("C++", "I use C++ daily"),
            ("5", "It is 5."),
            ("1234", "about 1,234 men"),
            ("-5", "It was -5."),
            ("not guilty", "They found him not guilty."),
            ("no", "no"),
            ("\u{5df4}\u{9ece}", "\u{7b54}\u{6848}\u{662f}\u{5df4}\u{9ece}\u{3002}"),
        ] {
            assert!(states(text, answer), "{answer} {text}");
        }
        for (answer, text) in [
            ("ice", "nice"),
            ("Paris", "a comparison of Parisians"),
            ("5", "It is 15."),
            ("5", "5-6"),
            ("5", "1.5 or 5,000"),
            ("5", "-5"),
            ("30", "at 12:30"),
            ("2", "1/2"),
            ("3", "the 3rd"),
            ("C", "C# and C++"),
            ("C++", "C"),
            ("York New", "New York"),
            ("mail", "an e-mail"),
            ("???", "anything???"),
            ("A", "anything"),
        ] {
            assert!(!states(text, answer), "{answer} {text}");
        }
    }

    #[test]
    fn contains_leaves_out_what_is_denied() {
        for text in [
            "It is not Paris.",
            "It isn't really Paris",
            "I don't think that it is Paris",
            "Paris is wrong",
            "Paris? No.",
            "Paris. No, that is wrong.",
            "never Paris",
            "neither London, Rome nor Paris",
            "anything but Paris",
            "every city except for Paris",
            "Rome, not Paris",
            "I can't say whether it's Paris",
            "It was thought to be Paris, but that is false.",
            "Die Stadt ist nicht Paris",
            "Ce n'est pas Paris",
            "Paris cannot be the answer",
        ] {
            assert!(!states(text, "Paris"), "{text}");
        }
        for text in [
            "Not London but Paris",
            "The president of a different, ancient Paris",
            "It's not London, it's Paris",
            "Not London; it is Paris.",
            "London isn't right. Paris.",
            "Paris, not London",
            "No, Paris.",
            "No doubt it is Paris",
            "It is not only Paris",
            "It is not Paris. No, it is Paris.",
            "The city that does not sleep, and is so proud of all of this, is Paris",
        ] {
            assert!(states(text, "Paris"), "{text}");
        }
        assert!(
            !states("not guilty", "guilty")
                && !states("\u{4e0d}\u{662f}\u{5df4}\u{9ece}", "\u{5df4}\u{9ece}")
        );
    }

    #[test]
    fn contains_reads_long_texts_in_linear_time() {
        let begun = std::time::Instant::now();
        for piece in ["not ", "a ", "Paris is wrong. ", "no, ", "x", "'s ", "- ", "5,"] {
            states(&piece.repeat(50_000 / piece.len()), "Paris in the spring");
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", begun.elapsed());
    }
}
