//! Normalizes short answers and compares their words, numbers and symbols.
//!
//! Words are normalized as by SQuAD's evaluation script. That normalization removes all
//! punctuation, even a sign, a decimal point or an operator. Two answers are therefore equal only
//! if their numbers and symbols are equal as well. Quotation marks and sentence punctuation of
//! other scripts are removed like those of ASCII. Minus signs, en dashes and full-width characters
//! are read as their ASCII counterparts.

use std::sync::LazyLock;

use regex::{Captures, Regex};
use unicode_normalization::UnicodeNormalization;

use crate::pattern::pattern;

/// Returns a text in the Unicode form NFC. ASCII characters replace full-width characters, minus
/// signs, hyphens, en dashes, primes and apostrophes.
fn to_nfc_narrow(text: &str) -> String {
    let narrow = |c: char| match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        '\u{2212}' | '\u{2010}'..='\u{2013}' => '-',
        '\u{2018}' | '\u{2019}' | '\u{2032}' => '\'',
        '\u{2033}' => '"',
        c => c,
    };
    text.nfc().map(narrow).collect()
}

/// Returns the form of a [`to_nfc_narrow`] text in which answers are compared.
///
/// Spaces within initials (`J. R.`) and ranges (`1 - 2`) are removed. If the complete text is a
/// number, it loses its article, quotes, markup, final punctuation and trailing zeros of the
/// decimals, and its currency symbol is moved before it.
fn canonical_text(plain: &str) -> String {
    let text = INITIALS.replace_all(plain, "$1$2");
    let text = INITIALS.replace_all(&text, "$1$2");
    let text = RANGE.replace_all(&text, "$1-$2");
    let bare = text.trim_matches(|c: char| c.is_whitespace() || "*_`()".contains(c));
    let quoted = |quote| bare.strip_prefix(quote)?.strip_suffix(quote);
    let bare = quoted('"').or_else(|| quoted('\'')).unwrap_or(bare);
    let number = |found: &Captures<'_>| {
        let group_text = |group: usize| found.get(group).map_or("", |part| part.as_str());
        let integer = group_text(3);
        let decimals = group_text(4).trim_end_matches('0');
        let integer = if integer.is_empty() { "0" } else { integer };
        let point = if decimals.is_empty() { "" } else { "." };
        let unit = group_text(5);
        let (before, behind) = if "€$£¥₹".contains(unit) { (unit, "") } else { ("", unit) };
        format!("{}{}{before}{integer}{point}{decimals}{behind}", group_text(1), group_text(2))
    };
    match ONLY_NUMBER.captures(bare) {
        Some(found)
            if found.get(3).is_some_and(|integer| !integer.is_empty())
                || found.get(4).is_some() =>
        {
            number(&found)
        }
        _ => text.into_owned(),
    }
}

static INITIALS: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b([A-Z]\.)\s+([A-Z]\.)"));
static RANGE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(\d)\s+-\s+(\d)"));
static ONLY_NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"^(?:(?i:the|an?)\s+)?([-+]?)([$€£¥₹]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d+))?\s*([€$£¥₹%]|°\s?[CFK]?)?[.!?,]?$",
    )
});
/// Matches an "A" that is a name instead of an article: the key A minor, the options A, B.
static NAMED_A: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"(?:^|[\s(\x22])(?:A(?:,|\s+(?:and|or|&|→|[A-Z]\b))",
        r"|(?i:a)\s+(?i:minor|major|flat|sharp)\b)",
    ))
});

/// Returns whether a character is a quotation mark or sentence punctuation that is not ASCII.
fn is_non_ascii_mark(c: char) -> bool {
    matches!(
        c,
        '\u{2018}'..='\u{201f}' | '«' | '»' | '‹' | '›' | '…' | '¿' | '¡' | '\u{3001}' | '\u{3002}'
    ) || matches!(c, '\u{3008}'..='\u{3011}' | '\u{3014}'..='\u{3017}' | '।' | '؟' | '،' | '؛')
}

/// Returns a text in lower case and in the Unicode form NFC, with single spaces, and without
/// punctuation and the articles a, an and the. The last word is always kept: no noun follows it, so
/// it is not an article (vitamin A, The The).
pub fn normalize(text: &str) -> String {
    normalized_words(&to_nfc_narrow(text))
}

fn normalized_words(plain: &str) -> String {
    let plain: String =
        plain.chars().filter(|c| !c.is_ascii_punctuation() && !is_non_ascii_mark(*c)).collect();
    let plain = plain.to_lowercase();
    let plain = plain.trim_end();
    let mut kept = String::with_capacity(plain.len());
    let mut word = String::new();
    for c in plain.chars() {
        if c.is_alphanumeric() {
            word.push(c);
            continue;
        }
        if !matches!(word.as_str(), "a" | "an" | "the") {
            kept.push_str(&word);
        } else {
            kept.push(' ');
        }
        word.clear();
        kept.push(c);
    }
    kept.push_str(&word);
    kept.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the numbers in a text with signs and decimal points, but without thousands separators.
/// Normalization removes signs and decimal points, so a comparison of words would make `1.5` equal
/// to 15, `-3` to 3 and `1/2` to 12.
fn numbers_in_text(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let digits = |from: usize| chars[from..].iter().take_while(|c| c.is_ascii_digit()).count();
    let mut found = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        if !chars[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let before = |back: usize| at.checked_sub(back).map(|at| chars[at]);
        let after_value = |c: char| c.is_alphanumeric() || matches!(c, ')' | ']' | '-');
        let is_fraction = before(1) == Some('.') && !before(2).is_some_and(char::is_alphanumeric);
        let sign = if is_fraction { 2 } else { 1 };
        let is_negative = before(sign) == Some('-') && !before(sign + 1).is_some_and(after_value);
        let mut number = String::from(if is_negative { "-" } else { "" });
        number.extend(is_fraction.then_some('.'));
        loop {
            let end = at + digits(at);
            number.extend(&chars[at..end]);
            at = end;
            match chars.get(at) {
                Some(',') if digits(at + 1) == 3 && !number.contains('.') => at += 1,
                Some('.') if digits(at + 1) > 0 => {
                    number.push('.');
                    at += 1;
                }
                _ => break,
            }
        }
        // The exponent belongs to the number: 1e5 differs from 1e-5.
        if let (Some('e' | 'E'), Some(sign @ ('-' | '+'))) = (chars.get(at), chars.get(at + 1))
            && digits(at + 2) > 0
        {
            number.push('e');
            number.extend(Some(*sign).filter(|sign| *sign == '-'));
            at += 2;
            let end = at + digits(at);
            number.extend(&chars[at..end]);
            at = end;
        } else if let Some('e' | 'E') = chars.get(at)
            && digits(at + 1) > 0
        {
            number.push('e');
            at += 1;
            let end = at + digits(at);
            number.extend(&chars[at..end]);
            at = end;
        }
        found.push(number);
    }
    found
}

/// Returns the characters of punctuation in a text that carry meaning: operators, charges and parts
/// of names, but not sentence punctuation, quotation marks and emphasis. Normalization removes them
/// all, so a comparison of words would make `C++` equal to C, `a<b` to a>b and the blood group O-
/// to O+.
fn meaningful_symbols(text: &str) -> Vec<char> {
    let text = text.trim().trim_start_matches("...");
    let chars: Vec<char> = text.chars().collect();
    let is = |at: Option<usize>, fits: fn(char) -> bool| {
        at.and_then(|at| chars.get(at)).is_some_and(|c| fits(*c))
    };
    let run = |letters: &mut dyn Iterator<Item = &char>| {
        letters.take_while(|c| c.is_alphanumeric()).take(3).count()
    };
    // Whether one of the 100 characters before `at` opens a quotation, which the quote at `at` then
    // closes.
    let is_opened = |at: usize, quote: char| {
        let starts = |at: usize| {
            at == 0 || !chars[at - 1].is_alphanumeric() && !"'\"".contains(chars[at - 1])
        };
        (at.saturating_sub(100)..at).any(|at| chars[at] == quote && starts(at))
    };
    let is_symbol = |(at, c): &(usize, &char)| {
        let before = at.checked_sub(1);
        let after = Some(at + 1);
        let word = char::is_alphanumeric;
        let space = char::is_whitespace;
        let digit = |c: char| c.is_ascii_digit();
        let starts = before.is_none() || is(before, space);
        let is_inner = is(before, word) && is(after, word);
        let has_letters =
            is_inner && (is(before, char::is_alphabetic) || is(after, char::is_alphabetic));
        let (left, right) = if is_inner {
            (run(&mut chars[..*at].iter().rev()), run(&mut chars[at + 1..].iter()))
        } else {
            (0, 0)
        };
        let is_single = (left, right) == (1, 1);
        match c {
            '<' | '>' | '=' | '^' | '|' | '&' | '~' | '/' => true,
            // +5 equals 5; a sign before digits belongs to the number.
            '+' => !(starts && is(after, digit)),
            '-' => {
                let leads =
                    starts && is(after, |c| !c.is_whitespace() && !c.is_ascii_digit() && c != '.');
                let is_flag = starts && is(after, |c| c == '-') && is(Some(at + 2), word);
                let ends = is(before, word) && !is(after, |c| c.is_alphanumeric() || c == '-');
                // True for 5 - 3, but not for Paris - France.
                let is_operator = is(before, space)
                    && is(after, space)
                    && leads_to_digit(chars[..*at].iter().rev())
                    && leads_to_digit(chars[at + 1..].iter());
                let is_letter = |at| is(at, char::is_alphabetic);
                // The hyphen counts in a-b, which differs from ab, but not in A-level.
                let is_inner = is_single && is_letter(before) && is_letter(after);
                (leads && !is(after, |c| c == '-')) || is_flag || ends || is_operator || is_inner
            }
            // The period counts in .NET, example.com and a.b, but not in p.m. and U.S.A.
            '.' => {
                let is_abbreviation = is(Some(at + 2), |c| c == '.') || is(after, |c| c == 'm');
                let is_lower = is(before, char::is_lowercase) && is(after, char::is_lowercase);
                starts && is(after, char::is_alphabetic)
                    || has_letters && left > 1 && right > 1
                    || is_single && is_lower && !is_abbreviation
            }
            // The comma counts in ,5 (a decimal comma) and in (a,b).
            ',' => has_letters || starts && is(after, |c| c.is_ascii_digit()),
            ';' | ':' => has_letters,
            '(' => is(before, |c| c.is_alphanumeric() || c == '\'') && is(after, word),
            // Primes count: f', 5', 5".
            '\'' | '"' => {
                let start = at.saturating_sub(8);
                let base = chars[start..*at].iter().rev().skip_while(|c| **c == chars[*at]);
                let first = base.clone().next().copied();
                let is_base = first.is_some_and(|c| c.is_ascii_digit())
                    || chars[*at] == '\'' && run(&mut base.clone()) == 1;
                is_base && !is(after, word) && !is_opened(*at, chars[*at])
            }
            '#' => is(before, word),
            '@' | '_' => is(before, word) && is(after, word),
            // An asterisk for emphasis is at one side of a word.
            '*' => (is(before, word) && is(after, word)) || (is(before, space) && is(after, space)),
            '!' => starts && is(after, word),
            '\\' => is(after, word),
            '[' => is(after, digit),
            ']' => is(before, digit),
            _ => false,
        }
    };
    let named = NAMED_A.find_iter(text).map(|_| 'A');
    chars.iter().enumerate().filter(is_symbol).map(|(_, c)| *c).chain(named).collect()
}

/// Returns whether the first character that is not white space is a digit.
fn leads_to_digit<'c>(mut chars: impl Iterator<Item = &'c char>) -> bool {
    chars.find(|c| !c.is_whitespace()).is_some_and(char::is_ascii_digit)
}

/// A short answer in normalized form, for comparison with other answers.
pub(crate) struct ShortAnswer {
    /// The text before normalization of its words, with punctuation, as returned by
    /// [`canonical_text`].
    pub written: String,
    /// Normalized words; the trimmed original text if it consists of punctuation only.
    pub text: String,
    /// Whether the answer contains words rather than only punctuation.
    pub has_words: bool,
    pub numbers: Vec<String>,
    pub symbols: Vec<char>,
    /// Whether an answer must equal this expected answer even if the scorer compares by containment
    /// or F1: "I do not know" contains "no".
    pub closed: bool,
}

impl ShortAnswer {
    pub fn new(text: &str, closed: bool) -> Self {
        let written = canonical_text(&to_nfc_narrow(text));
        let words = Some(normalized_words(&written)).filter(|words| !words.is_empty());
        ShortAnswer {
            has_words: words.is_some(),
            text: words.unwrap_or_else(|| text.trim().to_owned()),
            numbers: numbers_in_text(&written),
            symbols: meaningful_symbols(&written),
            written,
            closed,
        }
    }

    /// Returns whether this answer equals the expected answer `want`. Symbols are ignored if `want`
    /// is `closed`.
    pub fn matches_expected(&self, want: &ShortAnswer) -> bool {
        let same = self.text == want.text && self.numbers == want.numbers;
        same && (want.closed || self.symbols == want.symbols)
    }
}
