//! Replaces phrases among tokens: numbers in words, words for magnitude and sign, remarks, known
//! sets.
//!
//! Phrases with a value become numbers and signs: `5 million` is 5 · 1000000, `minus five` is −5,
//! and `all real numbers` is ℝ. Remarks in brackets and labels are removed.
//! [`quantity`](super::quantity) handles the remaining words.

mod numbers;

use super::lexer::Token;
use super::parser::closing_bracket_index;
use crate::languages::{self, SIGNS};
use crate::words;

/// Words that start a remark in brackets, which is not part of the answer.
const REMARKS: [&str; 36] = [
    "option", "choice", "answer", "since", "because", "as", "see", "by", "from", "where", "when",
    "if", "using", "given", "that", "which", "who", "rounded", "to", "units", "check", "step",
    "after", "before", "with", "without", "for", "so", "it", "this", "we", "the", "recall", "note",
    "correct", "exact",
];

/// Words that start an approximation in brackets: (about 3.14).
const APPROXIMATIONS: [&str; 4] = ["approx", "approximately", "about", "roughly"];

/// Replaces phrases in words by mathematical tokens, such as "plus or minus" by ±.
pub(super) fn replace_phrases(tokens: Vec<Token>) -> Vec<Token> {
    if !tokens.iter().any(|token| {
        matches!(token, Token::Text(_) | Token::Sign('\'' | ':' | '_' | '^') | Token::Open('('))
            || *token == Token::Letter("h".into())
    }) {
        return tokens;
    }
    let mut reader = PhraseReader { tokens: &tokens, at: 0, out: Vec::with_capacity(tokens.len()) };
    while reader.at < tokens.len() {
        if !reader.replace_phrase() {
            reader.out.push(tokens[reader.at].clone());
            reader.at += 1;
        }
    }
    reader.out
}

/// The input tokens, a position in them, and the output tokens so far.
pub(super) struct PhraseReader<'t> {
    pub(super) tokens: &'t [Token],
    pub(super) at: usize,
    out: Vec<Token>,
}

fn token_text(token: Option<&Token>) -> Option<&str> {
    match token {
        Some(Token::Text(word)) => Some(word),
        // The article.
        Some(Token::Letter(letter)) if letter == "a" || letter == "A" => Some("a"),
        Some(Token::Or) => Some("or"),
        _ => None,
    }
}

impl PhraseReader<'_> {
    fn token_ahead(&self, by: usize) -> Option<&Token> {
        self.tokens.get(self.at + by)
    }

    pub(super) fn word_ahead(&self, by: usize) -> Option<String> {
        token_text(self.token_ahead(by)).map(str::to_lowercase)
    }

    /// Returns whether the tokens at the position are these words, ignoring case.
    fn starts_with_words(&self, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(by, word)| self.word_ahead(by).as_deref() == Some(*word))
    }

    pub(super) fn replace_tokens(
        &mut self,
        taken: usize,
        tokens: impl IntoIterator<Item = Token>,
    ) -> bool {
        self.out.extend(tokens);
        self.at += taken;
        true
    }

    /// Returns whether the output tokens so far end with a value.
    pub(super) fn follows_value(&self) -> bool {
        matches!(
            self.out.last(),
            Some(
                Token::Number { .. }
                    | Token::Close(_)
                    | Token::GroupClose
                    | Token::End
                    | Token::Sign('%')
            )
        )
    }

    /// Returns whether an operand can start at the position.
    fn starts_operand(&self) -> bool {
        !matches!(
            self.out.last(),
            Some(
                Token::Number { .. }
                    | Token::Close(_)
                    | Token::GroupClose
                    | Token::Letter(_)
                    | Token::Sign('%' | '°' | '!')
            )
        )
    }

    /// Returns whether a value starts `by` tokens after the position.
    fn is_value_ahead(&self, by: usize) -> bool {
        match self.token_ahead(by) {
            Some(
                Token::Number { .. } | Token::Open('(') | Token::Command(_) | Token::GroupOpen,
            ) => true,
            Some(Token::Text(word)) => {
                word == "$"
                    || words::word_to_number(word).is_some()
                    || words::multiplier_factor(word).is_some()
            }
            Some(Token::Letter(_)) => !matches!(token_text(self.token_ahead(by)), Some("a")),
            _ => false,
        }
    }

    /// Replaces a phrase that starts at the position. Returns whether there was one.
    fn replace_phrase(&mut self) -> bool {
        self.replace_known_set()
            || self.replace_time()
            || self.replace_hexadecimal()
            || self.replace_operation()
            || self.replace_sign()
            || self.replace_number()
            || self.replace_magnitude()
            || self.replace_bound()
            || self.replace_mark()
    }

    /// Replaces a number in base 16 whose digits include letters: 1A_{16}. Returns whether there
    /// was one.
    fn replace_hexadecimal(&mut self) -> bool {
        let base = match &self.tokens[self.at..] {
            [
                Token::Sign('_'),
                Token::GroupOpen,
                Token::Number { digits, .. },
                Token::GroupClose,
            ] => digits,
            [Token::Sign('_'), Token::Number { digits, .. }] => digits,
            _ => return false,
        };
        let digit = |token: &Token| match token {
            Token::Number { digits, scale: 0, .. } => Some(digits.clone()),
            Token::Letter(text) | Token::Text(text) => {
                text.chars().all(|c| ('A'..='F').contains(&c)).then(|| text.clone())
            }
            _ => None,
        };
        let digits: Option<String> = self.out.iter().map(digit).collect();
        let digits = digits.filter(|digits| base == "16" && digits.len() > 1);
        let Some(value) = digits.and_then(|digits| u64::from_str_radix(&digits, 16).ok()) else {
            return false;
        };
        self.out.clear();
        self.replace_tokens(self.tokens.len() - self.at, [Token::integer(value)])
    }

    /// Replaces operations in words: out of, percent of, plus or minus, squared. Also drops the
    /// "and" of a measure in two units. Returns whether there was one.
    fn replace_operation(&mut self) -> bool {
        if self.starts_with_words(&["plus", "or", "minus"]) && self.is_value_ahead(3) {
            return self.replace_tokens(3, [Token::Sign('±')]);
        }
        if self.follows_value() {
            if self.starts_with_words(&["out", "of"]) && self.is_value_ahead(2) {
                return self.replace_tokens(2, [Token::Sign('/')]);
            }
            if self.starts_with_words(&["of"])
                && self.out.last() == Some(&Token::Sign('%'))
                && self.is_value_ahead(1)
            {
                return self.replace_tokens(1, [Token::Sign('*')]);
            }
            if self.starts_with_words(&["per", "cent"]) {
                return self.replace_tokens(2, [Token::Sign('%')]);
            }
            // 5 per mille.
            let next: Vec<String> = (0..2).map_while(|by| self.word_ahead(by)).collect();
            let next = next.join(" ");
            if let Some((bottom, length)) = words::fraction_after_number(&next) {
                let taken = next[..length].split(' ').count();
                return self.replace_tokens(taken, [Token::Sign('/'), Token::integer(bottom)]);
            }
            let power = match self.word_ahead(0).as_deref() {
                Some("squared") => 2,
                Some("cubed") => 3,
                _ => 0,
            };
            if power > 0 && self.at + 1 == self.tokens.len() {
                return self.replace_tokens(1, [Token::Sign('^'), Token::integer(power)]);
            }
        }
        // 3 Hunde und 4 Katzen.
        if let (
            Some(Token::Text(_)),
            Some(Token::Text(and) | Token::Letter(and)),
            Some(Token::Number { .. }),
        ) = (self.out.last(), self.token_ahead(0), self.token_ahead(1))
            && ["und", "et", "y", "и"].contains(&and.as_str())
            && self.out.iter().any(|token| matches!(token, Token::Number { .. }))
        {
            return self.replace_tokens(1, [Token::And]);
        }
        let is_joint = matches!(self.token_ahead(0), Some(Token::And | Token::Separator));
        match (self.out.last(), self.token_ahead(1), self.token_ahead(2)) {
            (Some(Token::Text(large)), Some(Token::Number { .. }), Some(Token::Text(small))) => {
                is_joint && words::can_follow_in_measure(small, large) && self.replace_tokens(1, [])
            }
            _ => false,
        }
    }

    /// Replaces the name of a set in words or symbols, such as ℝ or ∅. Returns whether there was
    /// one.
    fn replace_known_set(&mut self) -> bool {
        const REALS: [&[&str]; 6] = [
            &["all", "real", "numbers"],
            &["the", "real", "numbers"],
            &["any", "real", "number"],
            &["every", "real", "number"],
            &["all", "reals"],
            &["real", "numbers"],
        ];
        const EMPTY: [&[&str]; 9] = [
            &["there", "is", "no", "solution"],
            &["there", "are", "no", "solutions"],
            &["there", "are", "no", "real", "solutions"],
            &["no", "real", "solutions"],
            &["no", "real", "solution"],
            &["no", "solutions"],
            &["no", "solution"],
            &["the", "empty", "set"],
            &["empty", "set"],
        ];
        let is_part = matches!(self.out.last(), Some(Token::Text(_)));
        if let Some(words) = REALS.iter().find(|words| !is_part && self.starts_with_words(words)) {
            return self.replace_tokens(words.len(), [Token::Letter("\\mathbb{R}".into())]);
        }
        const INTEGERS: [&[&str]; 3] =
            [&["all", "integers"], &["the", "integers"], &["any", "integer"]];
        if let Some(words) = INTEGERS.iter().find(|words| !is_part && self.starts_with_words(words))
        {
            return self.replace_tokens(words.len(), [Token::Letter("\\mathbb{Z}".into())]);
        }
        let every =
            usize::from(["all", "the", "any"].iter().any(|word| self.starts_with_words(&[word])));
        let sign = self.word_ahead(every).filter(|_| {
            !is_part
                && ["real", "reals"]
                    .iter()
                    .any(|word| self.word_ahead(every + 1).as_deref() == Some(word))
        });
        if let Some(interval) = sign.as_deref().and_then(half_line_tokens) {
            let numbers = usize::from(
                self.word_ahead(every + 2).is_some_and(|word| word.starts_with("number")),
            );
            return self.replace_tokens(every + 2 + numbers, interval);
        }
        // ℝ⁺
        if let [Token::Letter(reals), Token::Sign('^'), Token::Sign(sign @ ('+' | '-')), ..] =
            &self.tokens[self.at..]
            && reals == "\\mathbb{R}"
            && let Some(interval) =
                half_line_tokens(if *sign == '+' { "positive" } else { "negative" })
        {
            return self.replace_tokens(3, interval);
        }
        match EMPTY.iter().find(|words| self.starts_with_words(words)) {
            Some(words) => self.replace_tokens(words.len(), [Token::Command("emptyset".into())]),
            None => false,
        }
    }

    /// Replaces words for a sign or a factor before a value, or "below zero" after a value. Returns
    /// whether there were any.
    fn replace_sign(&mut self) -> bool {
        if self.starts_with_words(&["below", "zero"]) {
            let number = self.out.iter().rposition(|token| matches!(token, Token::Number { .. }));
            let Some(number) = number else { return false };
            self.out.insert(number, Token::Sign('-'));
            return self.replace_tokens(2, []);
        }
        let Some(word) = self.word_ahead(0) else { return false };
        let starts = self.starts_operand();
        let is_value = self.is_value_ahead(1);
        // "a" is the article here rather than a variable.
        if let (Some(Token::Letter(_)), Some(Token::Text(next))) =
            (self.token_ahead(0), self.token_ahead(1))
            && starts
            && word == "a"
            && words::parse_units(next).is_none()
            && self.parse_fraction_words(0).is_none()
            && words::magnitude_factor(next).is_none()
        {
            return self.replace_tokens(1, [Token::Text(word)]);
        }
        match word.as_str() {
            word if (["minus", "negative"].contains(&word) || SIGNS.contains(&word))
                && starts
                && is_value =>
            {
                self.replace_tokens(1, [Token::Sign('-')])
            }
            "plus" | "positive" if starts && is_value => self.replace_tokens(1, []),
            // Reorders $-5 to -$5.
            "$" if self.token_ahead(1) == Some(&Token::Sign('-')) => {
                self.replace_tokens(2, [Token::Sign('-'), Token::Text("$".into())])
            }
            _ => match words::multiplier_factor(&word) {
                Some(factor) if starts && is_value => {
                    self.replace_tokens(1, [Token::integer(factor), Token::Sign('*')])
                }
                _ => false,
            },
        }
    }

    /// Turns the "or" of a bound into a word that does not separate answers: 5 or more, less than
    /// or equal to 5. Returns whether there was one.
    fn replace_bound(&mut self) -> bool {
        const MORE: [&str; 10] = [
            "more", "less", "fewer", "greater", "higher", "lower", "above", "below", "over",
            "under",
        ];
        let Some(word) = self.word_ahead(1).filter(|_| self.token_ahead(0) == Some(&Token::Or))
        else {
            return false;
        };
        let is_bound =
            word == "equal" || (MORE.contains(&word.as_str()) && !self.is_value_ahead(2));
        is_bound && self.replace_tokens(1, [Token::Text("or".into())])
    }

    /// Handles remarks in brackets, colons after labels, hyphens of words, quotation marks, and
    /// bases in words. Returns whether there was one of these.
    fn replace_mark(&mut self) -> bool {
        match self.token_ahead(0) {
            Some(Token::Open('(' | '[')) => self.drop_remark(),
            Some(Token::Sign(':')) => {
                let labels = self
                    .out
                    .iter()
                    .rev()
                    .take_while(|token| matches!(token, Token::Text(_)))
                    .count();
                let rest = &self.out[..self.out.len() - labels];
                let is_opening = |token: &Token| token.is_separator() || *token == Token::GroupOpen;
                let is_label = labels > 0 && rest.last().is_none_or(is_opening);
                // "Maximum: 5" describes the value, but "maximum 5" bounds it.
                if let Some(Token::Text(last)) = self.out.last_mut().filter(|_| is_label) {
                    match last.to_lowercase().as_str() {
                        "maximum" | "max" => "largest".clone_into(last),
                        "minimum" | "min" => "smallest".clone_into(last),
                        _ => {}
                    }
                }
                is_label && self.replace_tokens(1, [])
            }
            // ten-year, 5-mile
            Some(Token::Sign('-')) => {
                let is_joint = matches!(
                    self.out.last(),
                    Some(Token::Text(_) | Token::Number { .. })
                ) && matches!(self.token_ahead(1), Some(Token::Text(word)) if word != "$" && !self.is_value_ahead(1));
                is_joint && self.replace_tokens(1, [])
            }
            Some(Token::Sign('\'')) => {
                // A quotation mark, or the end of a genitive.
                let ends = [self.tokens.first(), self.tokens.last()];
                let is_quote = ends == [Some(&Token::Sign('\'')); 2]
                    && (self.out.is_empty() || self.at + 1 == self.tokens.len());
                let is_genitive = matches!(self.out.last(), Some(Token::Text(_)));
                let letter = usize::from(
                    matches!(self.token_ahead(1), Some(Token::Letter(s) | Token::Text(s)) if s == "s"),
                );
                let is_prime = matches!(self.out.last(), Some(Token::Letter(_)));
                ((is_quote && !is_prime) || is_genitive)
                    && self.replace_tokens(1 + if is_genitive { letter } else { 0 }, [])
            }
            // 101 base 2, 101 in base two
            Some(Token::Text(word)) if matches!(self.out.last(), Some(Token::Number { .. })) => {
                let skipped = usize::from(word == "in");
                let system = match self.word_ahead(skipped).as_deref() {
                    Some("binary") => Some(2),
                    Some("ternary") => Some(3),
                    Some("octal") => Some(8),
                    Some("hexadecimal" | "hex") => Some(16),
                    _ => None,
                };
                if let Some(base) = system {
                    return self
                        .replace_tokens(skipped + 1, [Token::Sign('_'), Token::integer(base)]);
                }
                let is_base = self.word_ahead(skipped).as_deref() == Some("base");
                let base = match self.token_ahead(skipped + 1) {
                    Some(base @ Token::Number { .. }) => Some(base.clone()),
                    Some(Token::Text(base)) => words::word_to_number(base).map(Token::integer),
                    _ => None,
                };
                match base.filter(|_| is_base) {
                    Some(base) => self.replace_tokens(skipped + 2, [Token::Sign('_'), base]),
                    None => false,
                }
            }
            _ => false,
        }
    }

    /// Handles a remark in brackets after an answer, which is dropped or becomes part of the
    /// answer: (since x > 0), (Option B), (apples). Returns whether there was one.
    fn drop_remark(&mut self) -> bool {
        let follows_words = self.follows_value() || matches!(self.out.last(), Some(Token::Text(_)));
        let follows = follows_words || matches!(self.out.last(), Some(Token::Letter(_)));
        let rest = &self.tokens[self.at..];
        let Some(end) = closing_bracket_index(rest).filter(|_| follows) else { return false };
        let inner = &rest[1..end];
        let Some(first) = inner.first() else { return false };
        // The label of a choice at the end.
        if let [Token::Letter(letter)] = inner
            && ("A"..="E").contains(&letter.as_str())
            && letter.len() == 1
            && end + 1 == rest.len()
            && self.follows_value()
        {
            return self.replace_tokens(end + 1, []);
        }
        // The same number in words, or in digits after words.
        let is_restated = matches!(first, Token::Text(_))
            || matches!(self.at.checked_sub(1).map(|at| &self.tokens[at]), Some(Token::Text(_)));
        if is_restated
            && inner.len() < 8
            && replace_phrases(inner.to_vec())[..] == self.out[self.out.len() - 1..]
            && self.follows_value()
        {
            return self.replace_tokens(end + 1, []);
        }
        let Token::Text(first) = first else { return false };
        let word = first.to_lowercase();
        if let ("base", [_, base @ Token::Number { .. }]) = (word.as_str(), inner) {
            return self.replace_tokens(end + 1, [Token::Sign('_'), base.clone()]);
        }
        if APPROXIMATIONS.contains(&word.as_str()) {
            let value = inner[1..].to_vec();
            return !value.is_empty()
                && self.replace_tokens(end + 1, [Token::Sign('≈')].into_iter().chain(value));
        }
        let words: Vec<&str> = inner.iter().map_while(|token| token_text(Some(token))).collect();
        let bounds = words
            .iter()
            .enumerate()
            .any(|(at, _)| words::parse_bound(&words[at..], false).is_some());
        let is_known = |word: &str| {
            words::parse_units(word).is_some()
                || words::magnitude_factor(word).is_some()
                || words::word_to_number(word).is_some()
        };
        let is_plain_text =
            words.len() == inner.len() && !words.iter().any(|word| is_known(word) || *word == "or");
        let hedges = inner.contains(&Token::Or)
            || words.iter().any(|word| {
                ["maybe", "perhaps", "possibly", "alternatively", "alternative", "otherwise"]
                    .contains(&word.to_lowercase().as_str())
            });
        if hedges || bounds {
            return false;
        }
        if REMARKS.contains(&word.as_str()) {
            return self.replace_tokens(end + 1, []);
        }
        // A name: 3 (Alice), 4 (Bob).
        let names = inner.to_vec();
        is_plain_text && follows_words && self.replace_tokens(end + 1, names)
    }
}

/// Returns the tokens of the half-line that an adjective denotes, such as the positive numbers for
/// "positive".
fn half_line_tokens(adjective: &str) -> Option<Vec<Token>> {
    let zero = Token::integer(0);
    let infinity = Token::Command("infty".into());
    Some(match adjective {
        "positive" => {
            vec![Token::Open('('), zero, Token::Separator, infinity, Token::Close(')')]
        }
        "nonnegative" => {
            vec![Token::Open('['), zero, Token::Separator, infinity, Token::Close(')')]
        }
        "negative" => {
            vec![
                Token::Open('('),
                Token::Sign('-'),
                infinity,
                Token::Separator,
                zero,
                Token::Close(')'),
            ]
        }
        _ => return None,
    })
}

fn fraction_tokens(top: u64, bottom: u64) -> Vec<Token> {
    vec![Token::Command("frac".into()), Token::integer(top), Token::integer(bottom)]
}

/// Returns the tokens of an integer plus a fraction, in brackets.
fn mixed_number_tokens(integer: Token, top: u64, bottom: u64) -> Vec<Token> {
    let mut tokens = vec![Token::Open('('), integer, Token::Sign('+')];
    tokens.extend(fraction_tokens(top, bottom));
    tokens.push(Token::Close(')'));
    tokens
}
