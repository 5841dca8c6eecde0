//! Numbers in words, and words for magnitudes.

use super::*;

impl Reader<'_> {
    /// Replaces a number in words: forty-two, one hundred and five, three quarters, two and a half.
    /// Returns whether there was one.
    pub(super) fn number(&mut self) -> bool {
        if let Some(Token::Number { scale: 0, .. }) = self.ahead(0)
            && self.ahead(1) == Some(&Token::And)
            && let Some((top, bottom, taken)) = self.part(2)
        {
            let integer = self.tokens[self.at].clone();
            return self.replace(2 + taken, mixed(integer, top, bottom));
        }
        // 2 thirds. Quarters may be coins.
        if let (Some(number @ Token::Number { scale: 0, .. }), Some(part)) =
            (self.ahead(0), self.word(1))
            && let Some(bottom) =
                words::denominator(&part).filter(|_| part.ends_with('s') && part != "seconds")
            && (bottom != 4 || self.word(2).as_deref() == Some("of"))
        {
            let times = (self.word(2).as_deref() == Some("of") && self.is_value(3))
                .then_some(Token::Sign('*'));
            let taken = 2 + usize::from(times.is_some());
            let number = number.clone();
            let tokens = [Token::Command("frac".into()), number, Token::integer(bottom)];
            return self.replace(taken, tokens.into_iter().chain(times));
        }
        if !self.starts_operand() || self.word(0).is_none() {
            return false;
        }
        if let Some((top, bottom, taken)) = self.part(0) {
            let has_of =
                usize::from(self.word(taken).as_deref() == Some("of") && self.is_value(taken + 1));
            let article = usize::from(
                matches!(self.word(taken).as_deref(), Some("a" | "an"))
                    && self.word(taken + 1).is_some_and(|word| words::magnitude(&word).is_some()),
            );
            let times = (has_of == 1).then_some(Token::Sign('*'));
            return self
                .replace(taken + has_of + article, fraction(top, bottom).into_iter().chain(times));
        }
        let Some((value, taken)) = self.cardinal() else { return false };
        let integer = Token::integer(value);
        // Three point one four.
        if self.word(taken).as_deref() == Some("point") {
            let digit = |by: usize| words::number_word(&self.word(by)?).filter(|digit| *digit < 10);
            let decimals: String =
                (taken + 1..).map_while(digit).map(|digit| digit.to_string()).collect();
            if !decimals.is_empty() {
                let count = decimals.len();
                let digits = format!("{value}{decimals}");
                let number =
                    Token::Number { digits, scale: -(count as i32), decimal: true, spaced: false };
                return self.replace(taken + 1 + count, [number]);
            }
        }
        if self.ahead(taken) == Some(&Token::And)
            && let Some((top, bottom, more)) = self.part(taken + 1)
        {
            return self.replace(taken + 1 + more, mixed(integer, top, bottom));
        }
        self.replace(taken, [integer])
    }

    /// Parses a fraction in words that starts `by` tokens after the position: a half, two thirds.
    /// Returns its numerator, its denominator and its number of tokens.
    pub(super) fn part(&self, by: usize) -> Option<(u64, u64, usize)> {
        let word = self.word(by)?;
        let top =
            if word == "a" { Some(1) } else { words::number_word(&word).filter(|top| *top > 0) };
        if let Some(top) = top {
            let hyphen = usize::from(self.ahead(by + 1) == Some(&Token::Sign('-')));
            let bottom = words::denominator(&self.word(by + 1 + hyphen)?)?;
            return Some((top, bottom, 2 + hyphen));
        }
        let is_part = word == "half" || self.word(by + 1).as_deref() == Some("of");
        words::denominator(&word)
            .filter(|_| is_part && word != "second")
            .map(|bottom| (1, bottom, 1))
    }

    /// Parses an integer in words at the position. Returns its value and its number of tokens.
    pub(super) fn cardinal(&self) -> Option<(u64, usize)> {
        let mut total = 0u64;
        let mut group = 0u64;
        let mut taken = 0;
        let mut last = 0u64;
        loop {
            let joins =
                taken > 0 && matches!(self.ahead(taken), Some(Token::Sign('-') | Token::And));
            let by = taken + usize::from(joins);
            let Some(word) = self.word(by) else { break };
            let is_first = taken == 0;
            if word == "a" && is_first {
                let follows = self.word(1)?;
                words::magnitude(&follows)?;
                (group, taken) = (1, 1);
            } else if let Some(value) = words::number_word(&word) {
                // "twenty one" is one number, "one two" is not a number, and "one and two" are two
                // numbers.
                let is_and = self.ahead(taken) == Some(&Token::And);
                let fits =
                    is_first || (value < 10 && (20..100).contains(&last) && !is_and) || last >= 100;
                if !fits || (!is_first && value == 0) {
                    break;
                }
                (group, taken, last) = (group.checked_add(value)?, by + 1, value);
            } else if let Some(factor) = words::magnitude(&word).filter(|_| !is_first && !joins) {
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
    pub(super) fn magnitude(&mut self) -> bool {
        let Some(Token::Text(word)) = self.ahead(0) else {
            // $5k: a letter is a magnitude only after an amount of money.
            let [.., Token::Text(currency), Token::Number { .. }] = &self.out[..] else {
                return false;
            };
            let Some(Token::Letter(letter)) = self.ahead(0) else { return false };
            let is_money = ["$", "€", "£", "¥", "₹"].contains(&currency.as_str());
            let Some(factor) = words::suffix(letter).filter(|_| is_money) else { return false };
            return self.replace(1, [Token::Sign('*'), Token::integer(factor)]);
        };
        if !self.follows_value() {
            return false;
        }
        let Some(factor) = words::magnitude(word) else {
            // 5万元
            let Some(factor) = languages::leading_magnitude(word) else { return false };
            let rest = word.chars().skip(1).collect();
            return self.replace(1, [Token::Sign('*'), Token::integer(factor), Token::Text(rest)]);
        };
        let has_of = usize::from(self.word(1).as_deref() == Some("of"));
        self.replace(1 + has_of, [Token::Sign('*'), Token::integer(factor)])
    }
}
