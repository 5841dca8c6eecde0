//! Finds numbers in prose and in LaTeX, as people and models write them.
//!
//! These notations are parsed:
//!
//! - signs (`-`, `+`, `−`), decimals, and exponents (`1.5e3`, `2 × 10^3`, `2 \cdot 10^{3}`),
//! - thousands separated by commas, spaces or LaTeX separators (`1{,}234`, `1\,234`, `1,\!234`),
//! - powers (`2^{10}`), fractions (`3/4`, `3 / 4`, `\frac{3}{4}`, `\frac34`) and mixed numbers
//!   (`1\frac12`, `1 1/2`),
//! - currency before and units after a number (`$1,000`, `50\%`, `5kg`, `5\text{ cm}^2`),
//! - words for sign and magnitude (`minus 5 million`), bases (`101_2`), and Unicode numerals.
//!
//! A percent sign is a unit like any other: 50% is parsed as 50.
//!
//! These are not parsed: numbers spelled as words ("five"), decimal commas, and digits that are
//! part of a word (`x25`, `H2O`, `x_{2}`) or the exponent of a word (`cm^2`).
//! [`context`](crate::context) determines which numbers have no value of their own.

use std::ops::Range;

use crate::Rational;
use crate::characters::normalize_characters;
use crate::context::{NumberContext, NumberEffect, without_latex};
use crate::rational::value_in_base;
use crate::unsettled::{is_unsettled_after, is_unsettled_before};
use crate::words::NumberDescription;

/// A number found in a text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NumberMatch {
    /// Text of the number, with sign and currency.
    pub text: String,
    /// Value of the number. `None` if the number has too many digits, divides by zero, or is only a
    /// part of what the text states.
    pub value: Option<Rational>,
    /// Number of decimals with which the number is written. 0 for integers, fractions, powers and
    /// numbers with an exponent.
    pub decimals: u32,
    /// Units and directions next to the number.
    pub about: NumberDescription,
    /// Range of the number in the text, in characters.
    range: Range<usize>,
}

/// Returns all numbers of a text, in text order.
#[cfg(test)]
pub(crate) fn find_numbers(text: &str) -> Vec<NumberMatch> {
    let (reader, found) = read_numbers(text);
    found.into_iter().map(|found| reader.apply_context(found)).collect()
}

/// Returns the first number of a text if the number is on the first line. The number has no value
/// if the text around it leaves the value unsettled.
pub(crate) fn first_number_on_line(text: &str) -> Option<NumberMatch> {
    let near = &text[..text.char_indices().nth(NEAR).map_or(text.len(), |(at, _)| at)];
    let (reader, found) = read_numbers(near);
    let found = found.into_iter().next()?;
    let is_line = !reader.chars[..found.range.start].contains(&'\n');
    is_line.then(|| reader.require_settled(found))
}

pub(crate) fn count_numbers(text: &str) -> usize {
    read_numbers(text).1.len()
}

/// Returns the number of a text that contains the byte at offset `byte`, or `None` if no number
/// does.
pub(crate) fn number_at(text: &str, byte: usize) -> Option<NumberMatch> {
    number_without_context_at(text, byte).map(|(reader, found)| reader.apply_context(found))
}

/// Returns the number of a text that contains the byte at offset `byte`. The number has no value if
/// its sentence leaves the value unsettled.
pub(crate) fn stated_number_at(text: &str, byte: usize) -> Option<NumberMatch> {
    number_without_context_at(text, byte).map(|(reader, found)| reader.require_settled(found))
}

/// Parses the number of a text that contains the byte at offset `byte`. The text around the number
/// has no influence on its value.
fn number_without_context_at(text: &str, byte: usize) -> Option<(NumberReader, NumberMatch)> {
    let before = text[..byte].chars().count();
    let start = text[..byte].char_indices().rev().nth(NEAR).map_or(0, |(at, _)| at);
    let end = text[byte..].char_indices().nth(NEAR).map_or(text.len(), |(at, _)| byte + at);
    let offset = before - text[..start].chars().count();
    let (reader, found) = read_numbers(&text[start..end]);
    let found = found.into_iter().find(|found| found.range.contains(&offset))?;
    Some((reader, found))
}

/// Returns the last number of a text. The number has no value if its sentence leaves the value
/// unsettled.
pub(crate) fn last_number(text: &str) -> Option<NumberMatch> {
    let (reader, found) = read_numbers(text);
    found.into_iter().next_back().map(|found| reader.require_settled(found))
}

/// Parses all numbers of a text. The text around a number has no influence on its value.
fn read_numbers(text: &str) -> (NumberReader, Vec<NumberMatch>) {
    let mut reader = NumberReader::new(&normalize_characters(text), false);
    let mut found = Vec::new();
    while !reader.is_done() {
        match reader.parse_number() {
            Some(number) => found.push(number),
            None => reader.skip_word(),
        }
    }
    (reader, found)
}

/// Maximum number of characters before and after a number that are examined for its meaning.
const NEAR: usize = 2000;

/// Maximum nesting depth of fractions.
const DEPTH: u32 = 8;

/// Maximum number of characters of an exponent or a subscript in braces.
const MAX_BRACED_CHARS: usize = 100;

/// A parser of numbers at a position in a text.
pub(crate) struct NumberReader {
    chars: Vec<char>,
    at: usize,
    /// Whether the text is a single formula. If so, a dash at its start is a sign rather than a
    /// list marker.
    formula: bool,
    depth: u32,
}

/// A number without its sign.
struct UnsignedNumber {
    value: Option<Rational>,
    decimals: u32,
    /// Whether the number consists of digits only, so that a fraction may follow (mixed number).
    is_integer: bool,
}

/// Digits in the notation that [`Rational::parse`] accepts, and their number of decimals.
struct DigitRun {
    plain: String,
    decimals: u32,
    exponent: bool,
}

impl NumberReader {
    pub fn new(text: &str, formula: bool) -> Self {
        NumberReader { chars: text.chars().collect(), at: 0, formula, depth: 0 }
    }

    fn is_done(&self) -> bool {
        self.at >= self.chars.len()
    }

    pub fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn is_digit(&self, ahead: usize) -> bool {
        self.peek(ahead).is_some_and(|c| c.is_ascii_digit())
    }

    /// Returns the character before the position, or `None` at the start of the text.
    pub fn previous_char(&self) -> Option<char> {
        self.at.checked_sub(1).map(|at| self.chars[at])
    }

    /// Parses with `read`, and resets the position if `read` returns `None`.
    fn try_parse<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        let start = self.at;
        let done = read(self);
        if done.is_none() {
            self.at = start;
        }
        done
    }

    /// Moves past `text` if the text at the position starts with it, and returns whether it did.
    fn take_text(&mut self, text: &str) -> bool {
        let is_next = text.chars().enumerate().all(|(i, c)| self.peek(i) == Some(c));
        if is_next {
            self.at += text.chars().count();
        }
        is_next
    }

    fn take_any_text(&mut self, texts: &[&str]) -> bool {
        texts.iter().any(|text| self.take_text(text))
    }

    /// Moves past a thin space of LaTeX, which can separate thousands. Returns whether there was
    /// one.
    fn take_thin_space(&mut self) -> bool {
        self.take_any_text(&["\\,", "\\!", "\\;", "\\:", "\\ ", "~"])
    }

    pub fn skip_spaces(&mut self) {
        while self.take_text(" ") || self.take_thin_space() {}
    }

    /// Returns the name of the LaTeX command at the position, without its backslash. Returns `None`
    /// if there is no command.
    pub fn command_name(&self) -> Option<String> {
        let name =
            || self.chars[self.at + 1..].iter().take_while(|c| c.is_ascii_alphabetic()).collect();
        (self.peek(0) == Some('\\')).then(name)
    }

    /// Moves past one character, or past a complete word and the digits that belong to it.
    pub fn skip_word(&mut self) {
        if let Some(name) = self.command_name() {
            // A backslash can be the last character of the text.
            self.at = (self.at + 1 + name.len().max(1)).min(self.chars.len());
            return;
        }
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        match self.peek(0) {
            Some('^') => {
                self.at += 1;
                self.skip_argument();
            }
            // Markdown emphasis.
            Some('_')
                if !self
                    .previous_char()
                    .is_some_and(|c| c.is_alphanumeric() || matches!(c, ')' | '}' | ']')) =>
            {
                while self.peek(0) == Some('_') {
                    self.at += 1;
                }
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                while self.peek(0).is_some_and(in_word) {
                    self.at += 1;
                }
                // A subscript.
                if self.previous_char() == Some('_') && self.peek(0) == Some('{') {
                    self.skip_argument();
                }
            }
            _ => self.at += 1,
        }
    }

    /// Returns the text that `skip` moves past.
    pub fn skipped_text(&mut self, skip: impl FnOnce(&mut Self)) -> String {
        let start = self.at;
        skip(self);
        self.chars[start..self.at].iter().collect()
    }

    /// Moves past the argument of a LaTeX command, an exponent or a subscript: a group, a command,
    /// a signed number, or a single character.
    pub fn skip_argument(&mut self) {
        match self.peek(0) {
            Some('{') => {
                let group = self.try_parse(|r| {
                    let mut depth = 0;
                    for _ in 0..MAX_BRACED_CHARS {
                        depth += match r.peek(0)? {
                            '{' => 1,
                            '}' => -1,
                            _ => 0,
                        };
                        r.at += 1;
                        if depth == 0 {
                            return Some(());
                        }
                    }
                    None
                });
                // A brace that is not closed within [`MAX_BRACED_CHARS`] characters does not open a
                // group.
                if group.is_none() {
                    self.at += 1;
                }
            }
            Some('\\') => self.skip_word(),
            Some(_) => {
                let _ = self.take_any_text(&["-", "−", "+"]);
                let start = self.at;
                self.push_digits(&mut String::new());
                if self.at == start && !self.is_done() {
                    self.at += 1;
                }
            }
            None => {}
        }
    }

    /// Parses a number that starts at the position, with its sign and currency.
    pub fn parse_number(&mut self) -> Option<NumberMatch> {
        let start = self.at;
        let (value, decimals) = self.try_parse(Self::signed_number)?;
        let range = start..self.at;
        Some(NumberMatch {
            text: self.chars[range.clone()].iter().collect(),
            value,
            decimals,
            about: NumberDescription::default(),
            range,
        })
    }

    /// Returns the number with the effects of the surrounding text on its value.
    pub fn apply_context(&self, found: NumberMatch) -> NumberMatch {
        let NumberEffect { factor, base, range, about } =
            NumberContext { chars: &self.chars, range: found.range.clone(), formula: self.formula }
                .find_effect();
        let own = match (base, found.value) {
            (Some(base), Some(value)) => value_in_base(&value, base),
            (_, value) => value,
        };
        let is_changed = factor.as_ref() != Some(&Rational::from(1));
        NumberMatch {
            text: self.chars[range.clone()].iter().collect(),
            value: own.zip(factor).and_then(|(value, factor)| value.times(&factor)),
            decimals: if is_changed { 0 } else { found.decimals },
            about,
            range,
        }
    }

    /// Returns the number with the effects of the surrounding text. The number has no value if this
    /// text leaves its value unsettled.
    fn require_settled(&self, found: NumberMatch) -> NumberMatch {
        let mut found = self.apply_context(found);
        let Range { start, end } = found.range.clone();
        let before: String = self.chars[start.saturating_sub(NEAR)..start].iter().collect();
        let after: String = self.chars[end..].iter().take(NEAR).collect();
        found.value.take_if(|_| {
            is_unsettled_before(&before) || is_unsettled_after(&without_latex(&after))
        });
        found
    }

    fn signed_number(&mut self) -> Option<(Option<Rational>, u32)> {
        let before = self.previous_char();
        let mut negative = false;
        if let Some('-' | '−' | '+') = self.peek(0) {
            // After an operand, the character is an operator or a hyphen: 10-7, page-3.
            if before.is_some_and(|c| {
                c.is_ascii_alphanumeric() || matches!(c, ')' | ']' | '}' | '%' | '_')
            }) {
                return None;
            }
            let sign = self.at;
            negative = self.peek(0) != Some('+');
            self.at += 1;
            // If a space follows, the dash may be a list marker, except after an equals sign and at
            // the start of a formula.
            if self.peek(0) == Some(' ') {
                let last = self.chars[..sign].iter().rev().find(|c| **c != ' ');
                if last != Some(&'=') && !(self.formula && last.is_none()) {
                    return None;
                }
            }
            if self.peek(0).is_some_and(|c| c == ' ' || c == '\\' || c == '~') {
                self.skip_spaces();
            }
        }
        if self.peek(0) == Some('\\') && self.peek(1) == Some('$') {
            self.at += 1;
        }
        if let Some('$' | '€' | '£' | '¥' | '₹') = self.peek(0) {
            self.at += 1;
            while self.take_thin_space() {}
            if !negative && let Some('-' | '−') = self.peek(0) {
                negative = true;
                self.at += 1;
            }
        }
        let UnsignedNumber { value, decimals, .. } =
            self.try_parse(Self::latex_fraction).or_else(|| self.quotient())?;
        Some((value.map(|v| if negative { v.negate() } else { v }), decimals))
    }

    /// Parses a LaTeX fraction: `\frac{a}{b}` or `\frac12`, also as `\dfrac`, `\tfrac` and
    /// `\cfrac`.
    fn latex_fraction(&mut self) -> Option<UnsignedNumber> {
        if self.depth == DEPTH || !self.take_any_text(&["\\frac", "\\dfrac", "\\tfrac", "\\cfrac"])
        {
            return None;
        }
        self.depth += 1;
        let parts = self.fraction_argument().and_then(|top| Some((top, self.fraction_argument()?)));
        self.depth -= 1;
        let (top, bottom) = parts?;
        Some(UnsignedNumber {
            value: top.zip(bottom).and_then(|(t, b)| t.divide(&b)),
            decimals: 0,
            is_integer: false,
        })
    }

    /// Parses the numerator or denominator of a LaTeX fraction: a number in braces, or one digit.
    /// The inner value is `None` if the number cannot be represented.
    fn fraction_argument(&mut self) -> Option<Option<Rational>> {
        while self.take_text(" ") {}
        if !self.take_text("{") {
            let digit = self.peek(0)?.to_digit(10)?;
            self.at += 1;
            return Some(Some(Rational::from(i64::from(digit))));
        }
        self.skip_spaces();
        let negative = self.take_any_text(&["-", "−"]);
        if !negative {
            self.take_text("+");
        }
        let UnsignedNumber { value, .. } =
            self.try_parse(Self::latex_fraction).or_else(|| self.quotient())?;
        self.skip_spaces();
        self.take_text("}").then_some(value.map(|v| if negative { v.negate() } else { v }))
    }

    /// Parses an operand, two operands that a slash separates, or digits and a LaTeX fraction.
    fn quotient(&mut self) -> Option<UnsignedNumber> {
        let follows_slash = self.previous_char() == Some('/');
        let top = self.quotient_operand()?;
        let end = self.at;
        self.skip_spaces();
        if top.is_integer
            && let Some(part) = self.try_parse(Self::latex_fraction)
        {
            let value = top.value.zip(part.value).and_then(|(integer, part)| integer.plus(&part));
            return Some(UnsignedNumber { value, ..part });
        }
        if top.is_integer
            && self.previous_char() == Some(' ')
            && let Some(part) = self.try_parse(Self::mixed_number_fraction)
        {
            let value = top.value.as_ref().and_then(|integer| integer.plus(&part));
            return Some(UnsignedNumber { value, decimals: 0, is_integer: false });
        }
        if !follows_slash && self.take_text("/") {
            self.skip_spaces();
            if let Some(bottom) = self.quotient_operand() {
                // A third part makes it a date rather than a fraction.
                if self.peek(0) != Some('/') {
                    let value = top.value.zip(bottom.value).and_then(|(t, b)| t.divide(&b));
                    return Some(UnsignedNumber { value, decimals: 0, is_integer: false });
                }
            }
        }
        self.at = end;
        Some(top)
    }

    /// Parses the fraction of a mixed number, such as the 1/2 of 1 1/2: plain digits, below 1.
    fn mixed_number_fraction(&mut self) -> Option<Rational> {
        let mut top = String::new();
        let mut bottom = String::new();
        self.push_digits(&mut top);
        let slash = self.take_text("/");
        self.push_digits(&mut bottom);
        let decimal = self.peek(0) == Some('.') && self.is_digit(1);
        let ends = !decimal && !self.peek(0).is_some_and(|c| c == '/' || c.is_alphanumeric());
        let top = Rational::parse(&top)?;
        let bottom = Rational::parse(&bottom)?;
        (slash && ends && top.compare(&bottom).is_lt()).then(|| top.divide(&bottom)).flatten()
    }

    /// Parses an operand of a fraction: digits, a repeating decimal, or a power.
    fn quotient_operand(&mut self) -> Option<UnsignedNumber> {
        let DigitRun { plain, decimals, exponent } = self.digit_run()?;
        let value = Rational::parse(&plain);
        if exponent {
            return Some(UnsignedNumber { value, decimals: 0, is_integer: false });
        }
        if let Some(block) = self.try_parse(|r| r.repeating_digits(decimals)) {
            let ninths = Rational::from(10)
                .power(block.len() as i32)
                .and_then(|p| p.minus(&Rational::from(1)));
            let unit = Rational::from(10).power(-(decimals as i32));
            let repeated = Rational::parse(&block)
                .zip(ninths)
                .and_then(|(block, by)| block.divide(&by)?.times(&unit?));
            let value = value.zip(repeated).and_then(|(value, repeated)| value.plus(&repeated));
            return Some(UnsignedNumber { value, decimals: 0, is_integer: false });
        }
        match self.try_parse(|r| if r.take_text("^") { r.signed_exponent() } else { None }) {
            Some(power) => {
                let power = power.parse().ok();
                let value = value.zip(power).and_then(|(base, power)| base.power(power));
                Some(UnsignedNumber { value, decimals: 0, is_integer: false })
            }
            None => Some(UnsignedNumber { value, decimals, is_integer: decimals == 0 }),
        }
    }

    /// Parses the repeating digits of a decimal, in brackets or overlined: the 3 of 0.(3) and
    /// 0.\overline{3}.
    fn repeating_digits(&mut self, decimals: u32) -> Option<String> {
        if decimals == 0 && !self.take_text(".") {
            return None;
        }
        let close = if self.take_text("(") {
            ")"
        } else if self.take_text("\\overline{") {
            "}"
        } else {
            return None;
        };
        let mut block = String::new();
        self.push_digits(&mut block);
        ((1..=30).contains(&block.len()) && self.take_text(close)).then_some(block)
    }

    /// Parses the digits of a number with thousands separators, decimals and an exponent.
    fn digit_run(&mut self) -> Option<DigitRun> {
        let before = self.previous_char();
        let mut plain = String::new();
        self.push_digits(&mut plain);
        if plain.is_empty() {
            // A leading decimal point is accepted only if it cannot end a word or another number.
            let free = before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '.');
            if !(free && self.peek(0) == Some('.') && self.is_digit(1)) {
                return None;
            }
        } else if plain.len() <= 3 && !plain.starts_with('0') {
            while self.try_parse(Self::skip_thousands_separator).is_some() {
                self.push_digits(&mut plain);
            }
        }
        let mut decimals = 0;
        if self.peek(0) == Some('.') && self.is_digit(1) {
            self.at += 1;
            plain.push('.');
            let integer_length = plain.len();
            self.push_digits(&mut plain);
            decimals = (plain.len() - integer_length) as u32;
        }
        let exponent = self.try_parse(Self::exponent);
        if let Some(exponent) = &exponent {
            plain.push('e');
            plain.push_str(exponent);
        }
        Some(DigitRun { plain, decimals, exponent: exponent.is_some() })
    }

    /// Moves past a thousands separator: `,`, `{,}`, `,\!`, a space, an apostrophe or an
    /// underscore. `,\,` is not accepted, because it separates the items of a list.
    fn skip_thousands_separator(&mut self) -> Option<()> {
        let braced = self.take_text("{");
        let plain = !braced && self.take_any_text(&[" ", "'", "_"]);
        let parts = plain || self.take_text(",") || self.take_thin_space();
        if !parts || (braced && !self.take_text("}")) {
            return None;
        }
        while self.take_text("\\!") {}
        ((0..3).all(|i| self.is_digit(i)) && !self.is_digit(3)).then_some(())
    }

    fn push_digits(&mut self, into: &mut String) {
        while let Some(digit) = self.peek(0).filter(char::is_ascii_digit) {
            into.push(digit);
            self.at += 1;
        }
    }

    /// Parses the power of ten at the position, and returns its exponent: `e-5`, `× 10^5`,
    /// `\times 10^{5}`.
    fn exponent(&mut self) -> Option<String> {
        if self.take_any_text(&["e", "E"]) {
            let power = self.signed_exponent()?;
            // `5e1` of `5e1x` is not an exponent.
            return (!self.peek(0).is_some_and(char::is_alphabetic)).then_some(power);
        }
        self.skip_spaces();
        if !self.take_any_text(&["×", "x", "*", "·", "\\times", "\\cdot"]) {
            return None;
        }
        self.skip_spaces();
        if self.take_any_text(&["10^", "{10}^", "10**"]) { self.signed_exponent() } else { None }
    }

    /// Parses the digits of an exponent with their sign, which may be in braces.
    fn signed_exponent(&mut self) -> Option<String> {
        let braced = self.take_text("{");
        let mut power = String::new();
        if self.take_any_text(&["-", "−"]) {
            power.push('-');
        } else {
            self.take_text("+");
        }
        let sign = power.len();
        self.push_digits(&mut power);
        let ends = !braced || self.take_text("}");
        (power.len() > sign && ends).then_some(power)
    }
}

#[cfg(test)]
#[path = "numbers_tests.rs"]
mod tests;
