//! Numbers in words, and words for magnitudes.

use super::*;

impl PhraseReader<'_> {
    /// Replaces a number in words: forty-two, one hundred and five, three quarters, two and a half.
    /// Returns whether there was one.
    pub(super) fn replace_number(&mut self) -> bool {
        if let Some(Token::Number { scale: 0, .. }) = self.token_ahead(0)
            && self.token_ahead(1) == Some(&Token::And)
            && let Some((top, bottom, taken)) = self.parse_fraction_words(2)
        {
            let integer = self.tokens[self.at].clone();
            return self.replace_tokens(2 + taken, mixed_number_tokens(integer, top, bottom));
        }
        // 2 thirds. Quarters may be coins.
        if let (Some(number @ Token::Number { scale: 0, .. }), Some(part)) =
            (self.token_ahead(0), self.word_ahead(1))
            && let Some(bottom) = words::denominator_of_word(&part)
                .filter(|_| part.ends_with('s') && part != "seconds")
            && (bottom != 4 || self.word_ahead(2).as_deref() == Some("of"))
        {
            let times = (self.word_ahead(2).as_deref() == Some("of") && self.is_value_ahead(3))
                .then_some(Token::Sign('*'));
            let taken = 2 + usize::from(times.is_some());
            let number = number.clone();
            let tokens = [Token::Command("frac".into()), number, Token::integer(bottom)];
            return self.replace_tokens(taken, tokens.into_iter().chain(times));
        }
        if !self.starts_operand() || self.word_ahead(0).is_none() {
            return false;
        }
        if let Some((top, bottom, taken)) = self.parse_fraction_words(0) {
            let has_of = usize::from(
                self.word_ahead(taken).as_deref() == Some("of") && self.is_value_ahead(taken + 1),
            );
            let article = usize::from(
                matches!(self.word_ahead(taken).as_deref(), Some("a" | "an"))
                    && self
                        .word_ahead(taken + 1)
                        .is_some_and(|word| words::magnitude_factor(&word).is_some()),
            );
            let times = (has_of == 1).then_some(Token::Sign('*'));
            return self.replace_tokens(
                taken + has_of + article,
                fraction_tokens(top, bottom).into_iter().chain(times),
            );
        }
        let Some((value, taken)) = self.parse_cardinal() else { return false };
        let integer = Token::integer(value);
        // Three point one four.
        if self.word_ahead(taken).as_deref() == Some("point") {
            let digit = |by: usize| {
                words::word_to_number(&self.word_ahead(by)?).filter(|digit| *digit < 10)
            };
            let decimals: String =
                (taken + 1..).map_while(digit).map(|digit| digit.to_string()).collect();
            if !decimals.is_empty() {
                let count = decimals.len();
                let digits = format!("{value}{decimals}");
                let number =
                    Token::Number { digits, scale: -(count as i32), decimal: true, spaced: false };
                return self.replace_tokens(taken + 1 + count, [number]);
            }
        }
        if self.token_ahead(taken) == Some(&Token::And)
            && let Some((top, bottom, more)) = self.parse_fraction_words(taken + 1)
        {
            return self
                .replace_tokens(taken + 1 + more, mixed_number_tokens(integer, top, bottom));
        }
        self.replace_tokens(taken, [integer])
    }

    /// Parses a fraction in words that starts `by` tokens after the position: a half, two thirds.
    /// Returns its numerator, its denominator and its number of tokens.
    pub(super) fn parse_fraction_words(&self, by: usize) -> Option<(u64, u64, usize)> {
        let word = self.word_ahead(by)?;
        let top =
            if word == "a" { Some(1) } else { words::word_to_number(&word).filter(|top| *top > 0) };
        if let Some(top) = top {
            let hyphen = usize::from(self.token_ahead(by + 1) == Some(&Token::Sign('-')));
            let bottom = words::denominator_of_word(&self.word_ahead(by + 1 + hyphen)?)?;
            return Some((top, bottom, 2 + hyphen));
        }
        let is_part = word == "half" || self.word_ahead(by + 1).as_deref() == Some("of");
        words::denominator_of_word(&word)
            .filter(|_| is_part && word != "second")
            .map(|bottom| (1, bottom, 1))
    }

    /// Parses an integer in words at the position. Returns its value and its number of tokens.
    pub(super) fn parse_cardinal(&self) -> Option<(u64, usize)> {
        let mut total = 0u64;
        let mut group = 0u64;
        let mut taken = 0;
        let mut last = 0u64;
        loop {
            let joins =
                taken > 0 && matches!(self.token_ahead(taken), Some(Token::Sign('-') | Token::And));
            let by = taken + usize::from(joins);
            let Some(word) = self.word_ahead(by) else { break };
            let is_first = taken == 0;
            if word == "a" && is_first {
                let follows = self.word_ahead(1)?;
                words::magnitude_factor(&follows)?;
                (group, taken) = (1, 1);
            } else if let Some(value) = words::word_to_number(&word) {
                // "twenty one" is one number, "one two" is not a number, and "one and two" are two
                // numbers.
                let is_and = self.token_ahead(taken) == Some(&Token::And);
                let fits =
                    is_first || (value < 10 && (20..100).contains(&last) && !is_and) || last >= 100;
                if !fits || (!is_first && value == 0) {
                    break;
                }
                (group, taken, last) = (group.checked_add(value)?, by + 1, value);
            } else if let Some(factor) =
                words::magnitude_factor(&word).filter(|_| !is_first && !joins)
            {
                if factor < 1000 {
                    group = group.checked_mul(factor)?;
                } else if total > 0 && group == 0 {
                    total = total.checked_mul(factor)?;
                } else {
                    total = total.checked_add(group.checked_mul(factor)?)?;
                    group = 0;
                }
                (taken, last) = (by + 1, factor);
            } else {
                break;
            }
        }
        (taken > 0).then(|| Some((total.checked_add(group)?, taken))).flatten()
    }

    /// Replaces a word for a magnitude, which multiplies the number before it. Returns whether
    /// there was one.
    pub(super) fn replace_magnitude(&mut self) -> bool {
        let Some(Token::Text(word)) = self.token_ahead(0) else {
            // $5k: a letter is a magnitude only after an amount of money.
            let [.., Token::Text(currency), Token::Number { .. }] = &self.out[..] else {
                return false;
            };
            let Some(Token::Letter(letter)) = self.token_ahead(0) else { return false };
            let is_money = ["$", "€", "£", "¥", "₹"].contains(&currency.as_str());
            let Some(factor) = words::money_factor(letter).filter(|_| is_money) else {
                return false;
            };
            return self.replace_tokens(1, [Token::Sign('*'), Token::integer(factor)]);
        };
        if !self.follows_value() {
            return false;
        }
        let Some(factor) = words::magnitude_factor(word) else {
            // 5万元
            let Some(factor) = languages::leading_magnitude_factor(word) else { return false };
            let rest = word.chars().skip(1).collect();
            return self
                .replace_tokens(1, [Token::Sign('*'), Token::integer(factor), Token::Text(rest)]);
        };
        let has_of = usize::from(self.word_ahead(1).as_deref() == Some("of"));
        self.replace_tokens(1 + has_of, [Token::Sign('*'), Token::integer(factor)])
    }
}
