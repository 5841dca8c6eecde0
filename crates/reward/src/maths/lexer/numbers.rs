//! Parses numbers in digits, with separators and repeating decimals.

use super::*;

impl Lexer<'_> {
    /// Parses a number: digits with thousands separators, decimals and an exponent.
    pub(super) fn lex_number(&mut self) {
        let spaced = self.spaced;
        let mut digits = self.take_digits();
        if !digits.is_empty() && digits.len() <= 3 {
            // The base of a logarithm and its argument are two numbers.
            let is_script = matches!(self.tokens.last(), Some(Token::Sign('_' | '^')));
            let thousands = self.thousands && self.brackets == 0 && !is_script;
            while let Some(rest) = strip_thousands_separator(self.rest, thousands) {
                self.rest = rest;
                digits.push_str(&self.take_digits());
            }
        }
        let mut decimal = false;
        let mut scale = 0;
        if let Some(rest) = self.rest.strip_prefix('.')
            && (rest.starts_with(|c: char| c.is_ascii_digit())
                || parse_repeating_digits(rest).is_some()
                || ["\\overline", "\\dot{"].iter().any(|mark| rest.trim_start().starts_with(mark)))
        {
            self.rest = rest;
            let decimals = self.take_digits();
            (decimal, scale) = (true, -(decimals.len() as i32));
            digits.push_str(&decimals);
        }
        if decimal && let Some((block, rest)) = parse_repeating_digits(self.rest) {
            self.rest = rest;
            return self.push_repeating_decimal(digits, scale, spaced, block.to_owned());
        }
        if let Some(after) = self.rest.strip_prefix(['e', 'E']) {
            let unsigned = after.strip_prefix(['-', '+']).unwrap_or(after);
            let end = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
            let exponent =
                after[..after.len() - unsigned.len() + end].trim_start_matches('+').parse::<i32>();
            if let Some(exponent) =
                exponent.ok().filter(|exponent| end > 0 && exponent.abs() < 10_000)
            {
                self.rest = &unsigned[end..];
                scale += exponent;
                decimal = true;
            }
        }
        if let Some(rest) = ["...", "…", "\\ldots", "\\dots", "\\cdots"]
            .iter()
            .find_map(|m| self.rest.strip_prefix(m))
            && scale < 0
        {
            self.rest = rest;
            return self.push_ellipsis_decimal(digits, scale, spaced);
        }
        self.push_token(Token::Number { digits, scale, decimal, spaced });
    }

    /// Pushes the token of a decimal that ends in an ellipsis. The decimal's last digits repeat if
    /// they occur at least twice, or at least three times if the block is one digit.
    fn push_ellipsis_decimal(&mut self, mut digits: String, scale: i32, spaced: bool) {
        let decimals = &digits[digits.len() - scale.unsigned_abs() as usize..];
        let repeats = |length: &usize| {
            let times = if *length == 1 { 3 } else { 2 };
            decimals.len() >= length * times && {
                let block = &decimals[decimals.len() - length..];
                decimals.ends_with(&block.repeat(times))
            }
        };
        let Some(length) = (1..=6).find(repeats) else {
            return self.push_token(Token::Number { digits, scale, decimal: true, spaced });
        };
        let block = digits[digits.len() - length..].to_owned();
        let mut remaining = scale;
        while remaining <= -(length as i32) && digits.ends_with(&block) {
            digits.truncate(digits.len() - length);
            remaining += length as i32;
        }
        self.push_repeating_decimal(digits, remaining, spaced, block);
    }

    /// Pushes the tokens of a decimal and of the block of repeating digits after it.
    fn push_repeating_decimal(&mut self, digits: String, scale: i32, spaced: bool, block: String) {
        self.push_token(Token::Number { digits, scale, decimal: true, spaced });
        self.push_token(Token::Command("overline".into()));
        self.push_token(Token::GroupOpen);
        self.push_token(Token::integer(block));
        self.push_token(Token::GroupClose);
    }

    fn take_digits(&mut self) -> String {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.to_owned()
    }
}
