//! Short answers, normalized: their words, numbers and symbols.
//!
//! Words are normalized as SQuAD's evaluation script does it. In addition, equal answers have equal numbers
//! and symbols: the punctuation that normalization removes may be a sign, a decimal point or an operator.
//! Quotation marks and marks of sentences of other scripts are removed as those of ASCII are, and minus
//! signs and full-width characters are read as ASCII.

use unicode_normalization::UnicodeNormalization;

/// Returns a text with ASCII in place of full-width characters and of minus signs, composed (NFC).
fn plain(text: &str) -> String {
    let narrow = |c: char| match c {
        '\u{ff01}'..='\u{ff5e}' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        '\u{2212}' | '\u{2010}' | '\u{2011}' => '-',
        c => c,
    };
    let mut plain: String = text.nfc().map(narrow).collect();
    // An en dash before a number is its sign.
    if let Some(number) = plain.trim_start().strip_prefix('\u{2013}').filter(|rest| is_number(rest)) {
        plain = format!("-{number}");
    }
    plain
}

fn is_number(text: &str) -> bool {
    text.trim_start_matches('.').starts_with(|c: char| c.is_ascii_digit())
}

/// Returns whether a character is a mark of sentences or of quotations in a script other than ASCII.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{2018}'..='\u{201f}' | '«' | '»' | '‹' | '›' | '…' | '¿' | '¡' | '\u{3001}' | '\u{3002}')
        || matches!(c, '\u{3008}'..='\u{3011}' | '\u{3014}'..='\u{3017}' | '।' | '؟' | '،' | '؛')
}

/// Returns a text in lower case and composed (NFC), without punctuation, without the words a, an, the, with
/// single spaces. The last word is no article, since no noun follows it: vitamin A, The The.
pub fn normalise(text: &str) -> String {
    let plain: String = plain(text).chars().filter(|c| !c.is_ascii_punctuation() && !is_mark(*c)).collect();
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

/// Returns the numbers of a text, with signs, decimal points and without marks of thousands. Normalization
/// removes these: without a look at the numbers, `1.5` would be 15, `-3` be 3 and `1/2` be 12.
fn numbers(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let digits = |from: usize| chars[from..].iter().take_while(|c| c.is_ascii_digit()).count();
    let (mut found, mut at) = (Vec::new(), 0);
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
        // 1e5 is not 1e-5.
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

/// Returns the punctuation of a text that is no mark of sentences, quotes or emphasis: operators, charges and
/// what belongs to a name. Normalization removes it: without a look at it, `C++` would be C, `a<b` be a>b and
/// the blood group O- be O+.
fn symbols(text: &str) -> Vec<char> {
    let text = text.trim().trim_start_matches("...");
    let chars: Vec<char> = text.chars().collect();
    let is =
        |at: Option<usize>, fits: fn(char) -> bool| at.and_then(|at| chars.get(at)).is_some_and(|c| fits(*c));
    let is_symbol = |(at, c): &(usize, &char)| {
        let (before, after) = (at.checked_sub(1), Some(at + 1));
        let (word, space) = (char::is_alphanumeric, char::is_whitespace);
        let digit = |c: char| c.is_ascii_digit();
        let starts = before.is_none() || is(before, space);
        match c {
            '<' | '>' | '=' | '^' | '|' | '&' | '~' | '/' => true,
            // +5 is 5; signs before digits are those of numbers.
            '+' => !(starts && is(after, digit)),
            '-' => {
                let leads = starts && is(after, |c| !c.is_whitespace() && !c.is_ascii_digit() && c != '.');
                let is_flag = starts && is(after, |c| c == '-') && is(Some(at + 2), word);
                let ends = is(before, word) && !is(after, |c| c.is_alphanumeric() || c == '-');
                // 5 - 3, but not Paris - France.
                let is_operator = is(before, space)
                    && is(after, space)
                    && leads_to_digit(chars[..*at].iter().rev())
                    && leads_to_digit(chars[at + 1..].iter());
                (leads && !is(after, |c| c == '-')) || is_flag || ends || is_operator
            }
            // .NET, and ,5 of a decimal comma.
            '.' => starts && is(after, char::is_alphabetic),
            ',' => starts && is(after, |c| c.is_ascii_digit()),
            '#' => is(before, word),
            '@' | '_' => is(before, word) && is(after, word),
            // Those of emphasis stand at one side of a word.
            '*' => (is(before, word) && is(after, word)) || (is(before, space) && is(after, space)),
            '!' => starts && is(after, word),
            '\\' => is(after, word),
            '[' => is(after, digit),
            ']' => is(before, digit),
            _ => false,
        }
    };
    chars.iter().enumerate().filter(is_symbol).map(|(_, c)| *c).collect()
}

/// Returns whether the first character that is no white space is a digit.
fn leads_to_digit<'c>(mut chars: impl Iterator<Item = &'c char>) -> bool {
    chars.find(|c| !c.is_whitespace()).is_some_and(char::is_ascii_digit)
}

/// A short answer, normalized unless it consists of punctuation.
pub(crate) struct Short {
    pub text: String,
    /// Whether it has more than punctuation.
    pub has_words: bool,
    pub numbers: Vec<String>,
    pub symbols: Vec<char>,
    /// Whether an answer must equal it, however answers are compared: "no" is within "I do not know".
    pub closed: bool,
}

impl Short {
    pub fn new(text: &str, closed: bool) -> Self {
        let words = Some(normalise(text)).filter(|words| !words.is_empty());
        let written = plain(text);
        Short {
            has_words: words.is_some(),
            text: words.unwrap_or_else(|| text.trim().to_owned()),
            numbers: numbers(&written),
            symbols: symbols(&written),
            closed,
        }
    }

    /// Whether this answer is the expected one.
    pub fn is(&self, want: &Short) -> bool {
        let same = self.text == want.text && self.numbers == want.numbers;
        same && (want.closed || self.symbols == want.symbols)
    }
}
