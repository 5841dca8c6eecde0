//! Finding numbers in prose, as people and models write them.
//!
//! Read: signs (`-`, `+`, `−`), decimals, thousands separated by commas, exponents (`1.5e3`, `2 × 10^3`), fractions
//! (`3/4`, `3 / 4`, `\frac{3}{4}`), currency before and units after (`$1,000`, `50%`, `5kg`). A percent sign is a unit like
//! any other: 50% reads as 50.
//!
//! Not read: numbers spelled as words ("five", "2 million"), mixed numbers ("1 1/2" is a 1 and a half), decimal commas,
//! and digits that belong to a word (`x25`, `H2O`).

use crate::Rational;

/// A number as it stands in a text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// Its characters, with sign and currency.
    pub text: String,
    /// Its value; `None` if it is too large or too fine for exact comparison, or divides by zero.
    pub value: Option<Rational>,
    /// How many decimals it is written with; 0 for integers, fractions and numbers with an exponent.
    pub decimals: u32,
}

/// All numbers of a text, in order.
pub(crate) fn find(text: &str) -> Vec<Found> {
    let mut reader = Reader { chars: text.chars().collect(), at: 0 };
    let mut found = Vec::new();
    while reader.at < reader.chars.len() {
        let start = reader.at;
        match reader.number() {
            Some((value, decimals)) => {
                let text = reader.chars[start..reader.at].iter().collect();
                found.push(Found { text, value, decimals });
            }
            None => {
                reader.at = start;
                reader.skip_word();
            }
        }
    }
    found
}

struct Reader {
    chars: Vec<char>,
    at: usize,
}

/// Digits as written: the plain text that [`Rational::parse`] reads, and the number of decimals.
struct Digits {
    plain: String,
    decimals: u32,
    exponent: bool,
}

impl Reader {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.chars.get(self.at + ahead).copied()
    }

    fn is_digit(&self, ahead: usize) -> bool {
        self.peek(ahead).is_some_and(|c| c.is_ascii_digit())
    }

    fn skip_spaces(&mut self) {
        while self.peek(0) == Some(' ') {
            self.at += 1;
        }
    }

    /// Moves on by one character, past a whole word if one starts here, with the digits that belong to it.
    fn skip_word(&mut self) {
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let starts = self.peek(0).is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        self.at += 1;
        while starts && self.peek(0).is_some_and(in_word) {
            self.at += 1;
        }
    }

    /// Moves past `text` if it is next.
    fn take(&mut self, text: &str) -> bool {
        let is_next = text.chars().enumerate().all(|(i, c)| self.peek(i) == Some(c));
        if is_next {
            self.at += text.chars().count();
        }
        is_next
    }

    /// A number that starts exactly here, with its sign and currency.
    fn number(&mut self) -> Option<(Option<Rational>, u32)> {
        let before = self.at.checked_sub(1).map(|i| self.chars[i]);
        let mut negative = false;
        if let Some('-' | '−' | '+') = self.peek(0) {
            // After an operand it is an operator or a hyphen: 10-7, page-3.
            if before.is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, ')' | ']' | '}' | '%' | '_')) {
                return None;
            }
            negative = self.peek(0) != Some('+');
            self.at += 1;
            // Apart from its number it could be the dash of a list, except after an equals sign.
            if self.peek(0) == Some(' ') {
                let follows_equals =
                    self.chars[..self.at - 1].iter().rev().find(|c| **c != ' ') == Some(&'=');
                if !follows_equals {
                    return None;
                }
                self.skip_spaces();
            }
        }
        if self.peek(0) == Some('\\') && self.peek(1) == Some('$') {
            self.at += 1;
        }
        if let Some('$' | '€' | '£' | '¥' | '₹') = self.peek(0) {
            self.at += 1;
            if !negative && let Some('-' | '−') = self.peek(0) {
                negative = true;
                self.at += 1;
            }
        }
        let (value, decimals) = self.fraction_command().or_else(|| self.quotient())?;
        Some((value.map(|v| if negative { v.negate() } else { v }), decimals))
    }

    /// `\frac{a}{b}`, also as `\dfrac` and `\tfrac`.
    fn fraction_command(&mut self) -> Option<(Option<Rational>, u32)> {
        let start = self.at;
        let read = |r: &mut Self| {
            if !(r.take("\\frac{") || r.take("\\dfrac{") || r.take("\\tfrac{")) {
                return None;
            }
            let negative = r.take("-");
            let top = r.digits()?;
            if !r.take("}{") {
                return None;
            }
            let bottom = r.digits()?;
            let value = r.take("}").then(|| divide(&top, &bottom))?;
            Some((value.map(|v| if negative { v.negate() } else { v }), 0))
        };
        let fraction = read(self);
        if fraction.is_none() {
            self.at = start;
        }
        fraction
    }

    /// Digits, or two of them with a slash between.
    fn quotient(&mut self) -> Option<(Option<Rational>, u32)> {
        let follows_slash = self.at > 0 && self.chars[self.at - 1] == '/';
        let top = self.digits()?;
        let end = self.at;
        self.skip_spaces();
        if !follows_slash && self.take("/") {
            self.skip_spaces();
            if let Some(bottom) = self.digits() {
                // A third part makes it a date, not a fraction.
                if self.peek(0) != Some('/') {
                    return Some((divide(&top, &bottom), 0));
                }
            }
        }
        self.at = end;
        let decimals = if top.exponent { 0 } else { top.decimals };
        Some((Rational::parse(&top.plain), decimals))
    }

    /// Digits with thousands separators, decimals and an exponent.
    fn digits(&mut self) -> Option<Digits> {
        let before = self.at.checked_sub(1).map(|i| self.chars[i]);
        let mut plain = String::new();
        self.run(&mut plain);
        if plain.is_empty() {
            // A bare point starts a decimal only where it cannot end a word or another number.
            let free = before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '.');
            if !(free && self.peek(0) == Some('.') && self.is_digit(1)) {
                return None;
            }
        } else if plain.len() <= 3 {
            while self.peek(0) == Some(',') && (1..=3).all(|i| self.is_digit(i)) && !self.is_digit(4) {
                self.at += 1;
                self.run(&mut plain);
            }
        }
        let mut decimals = 0;
        if self.peek(0) == Some('.') && self.is_digit(1) {
            self.at += 1;
            plain.push('.');
            let whole = plain.len();
            self.run(&mut plain);
            decimals = (plain.len() - whole) as u32;
        }
        let exponent = self.exponent();
        if let Some(exponent) = &exponent {
            plain.push('e');
            plain.push_str(exponent);
        }
        Some(Digits { plain, decimals, exponent: exponent.is_some() })
    }

    fn run(&mut self, into: &mut String) {
        while let Some(digit) = self.peek(0).filter(char::is_ascii_digit) {
            into.push(digit);
            self.at += 1;
        }
    }

    /// `e-5`, `× 10^5`, `\times 10^{5}`: the power of ten, if one follows.
    fn exponent(&mut self) -> Option<String> {
        let start = self.at;
        let read = |r: &mut Self| {
            let mut power = String::new();
            let mut braced = false;
            if r.take("e") || r.take("E") {
            } else {
                r.skip_spaces();
                if !(r.take("×") || r.take("x") || r.take("*") || r.take("\\times")) {
                    return None;
                }
                r.skip_spaces();
                if !(r.take("10^") || r.take("10**")) {
                    return None;
                }
                braced = r.take("{");
            }
            if r.take("-") || r.take("−") {
                power.push('-');
            } else {
                r.take("+");
            }
            let sign = power.len();
            r.run(&mut power);
            let ends = !braced || r.take("}");
            // `5e` of `5ex` is not an exponent.
            let word_goes_on = r.peek(0).is_some_and(char::is_alphabetic);
            (power.len() > sign && ends && !word_goes_on).then_some(power)
        };
        let power = read(self);
        if power.is_none() {
            self.at = start;
        }
        power
    }
}

fn divide(top: &Digits, bottom: &Digits) -> Option<Rational> {
    Rational::parse(&top.plain)?.over(Rational::parse(&bottom.plain)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(text: &str) -> Vec<String> {
        find(text).into_iter().map(|f| f.text).collect()
    }

    #[test]
    fn reads_what_people_write() {
        for (text, value) in [
            ("1,234.50", "1234.5"),
            ("-7.", "-7"),
            ("−7", "-7"),
            ("+7", "7"),
            ("$1,000", "1000"),
            ("-$5", "-5"),
            ("$-5", "-5"),
            ("\\$18", "18"),
            ("£0.99", "0.99"),
            ("50%", "50"),
            ("5kg", "5"),
            ("3 / 4", "0.75"),
            ("-3/4", "-0.75"),
            ("1,000/4", "250"),
            ("\\frac{3}{4}", "0.75"),
            ("-\\dfrac{3}{4}", "-0.75"),
            ("\\frac{-1}{2}", "-0.5"),
            ("1.5e3", "1500"),
            ("2E-2", "0.02"),
            ("3 × 10^5", "300000"),
            ("1.2\\times 10^{-2}", "0.012"),
            (".5", "0.5"),
            ("**42**", "42"),
            ("1,234,567", "1234567"),
            ("x = - 7", "-7"),
            ("Rs.500", "500"),
            ("(12)", "12"),
            ("007", "7"),
        ] {
            let found = find(text);
            assert_eq!(found.len(), 1, "{text}: {found:?}");
            assert_eq!(found[0].value, Rational::parse(value), "{text}");
        }
    }

    #[test]
    fn tells_numbers_apart() {
        for (text, want) in [
            ("", &[][..]),
            ("none at all.", &[]),
            ("x25 and H2O and x_12", &[]),
            ("答案是72。", &["72"]),
            ("12x5", &["12"]),
            ("10-7", &["10", "7"]),
            ("5, 6", &["5", "6"]),
            ("1,23", &["1", "23"]),
            ("1,2345", &["1", "2345"]),
            ("1234,567", &["1234", "567"]),
            ("- 7 apples", &["7"]),
            ("1.2.3", &["1.2", "3"]),
            ("3/4/2024", &["3", "4", "2024"]),
            ("covid-19", &["19"]),
            ("5ex", &["5"]),
            ("48 + 24 = 72.", &["48", "24", "72"]),
            ("3 x 4", &["3", "4"]),
            ("٣ is not read", &[]),
        ] {
            assert_eq!(texts(text), want, "{text}");
        }
        assert_eq!(find("5/0")[0].value, None);
        assert_eq!(find(&"9".repeat(50))[0].value, None);
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in "[-0-9.,/eE$%×^{} \\\\a−]{0,40}") {
            for found in find(&text) {
                prop_assert!(text.contains(&found.text));
            }
        }

        #[test]
        fn finds_any_decimal(whole in 0u64..10_000_000, cents in 0u32..100, negative: bool) {
            let sign = if negative { "-" } else { "" };
            let plain = format!("{sign}{whole}.{cents:02}");
            let mut grouped = whole.to_string();
            for at in (1..grouped.len()).rev().filter(|at| (grouped.len() - at).is_multiple_of(3)).collect::<Vec<_>>() {
                grouped.insert(at, ',');
            }
            for written in [plain.clone(), format!("{sign}{grouped}.{cents:02}"), format!("{sign}${grouped}.{cents:02}")] {
                let found = find(&format!("So it is {written}. Good"));
                prop_assert_eq!(found.len(), 1);
                prop_assert_eq!(found[0].value, Rational::parse(&plain));
                prop_assert_eq!(&found[0].text, &written);
                prop_assert_eq!(found[0].decimals, 2);
            }
        }
    }
}
