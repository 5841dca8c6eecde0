//! Splits a formula, in LaTeX or in plain text, into tokens.

mod signs;

mod numbers;

use super::digits::{parse_repeating_digits, strip_thousands_separator};
use super::names::{
    DROPPED, FRAMES, GREEK, LOOKS, NAMES, NO_FUNCTIONS, PROSE_WORDS, SAME, TEXTS, UNITS, WORDS,
    first_factor_length, is_capitalized_name,
};
use crate::words::{self, is_month};
use signs::{resolve_ambiguous_signs, starts_with_segment_name};

/// A token of a formula.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// A number: its digits, a power of ten, and whether it contains a decimal point.
    Number {
        digits: String,
        scale: i32,
        decimal: bool,
        /// Whether white space precedes the number.
        spaced: bool,
    },
    /// A variable, whose name can have several letters.
    Letter(String),
    /// Words next to the mathematics.
    Text(String),
    /// A LaTeX command, or a function or a constant under its LaTeX name.
    Command(String),
    /// `+ - * / ^ _ ! % | = < >`, or a LaTeX symbol as one character.
    Sign(char),
    /// An opening bracket: `(`, `[`, or `{` for a visible brace.
    Open(char),
    Close(char),
    /// An opening LaTeX brace that only groups and is not visible.
    GroupOpen,
    GroupClose,
    /// A comma or a semicolon.
    Separator,
    And,
    Or,
    /// The start of a LaTeX environment, `\begin{…}`, with the environment's name.
    Begin(String),
    End,
    /// The sign `&` between the cells of a matrix or an alignment.
    Cell,
    Row,
}

/// Maximum length of a formula, in characters.
pub(super) const MAX_CHARS: usize = 4000;

impl Token {
    /// Returns whether the token separates the items of a list.
    pub fn is_separator(&self) -> bool {
        matches!(self, Token::Separator | Token::And | Token::Or)
    }

    /// Creates an integer token.
    pub fn integer(digits: impl ToString) -> Token {
        Token::Number { digits: digits.to_string(), scale: 0, decimal: false, spaced: false }
    }
}

struct Lexer<'t> {
    rest: &'t str,
    tokens: Vec<Token>,
    spaced: bool,
    /// Nesting depth of the LaTeX arguments around the position.
    depth: u32,
    /// Whether the position is in the argument of a LaTeX text command.
    is_text: bool,
    /// Whether a dollar sign is currency rather than the delimiter of a formula.
    is_currency: bool,
    /// Whether the text contains words.
    is_prose: bool,
    /// Whether a comma before three digits separates thousands, if it is outside of brackets.
    thousands: bool,
    brackets: u32,
}

/// Splits a formula into tokens. `thousands` is whether a comma before three digits separates
/// thousands, rather than items of a list. Returns `None` if the text is too long or has characters
/// that do not occur in formulas.
pub(super) fn tokenize(text: &str, thousands: bool) -> Option<Vec<Token>> {
    if text.chars().count() > MAX_CHARS {
        return None;
    }
    let is_word = |word: &str| {
        word.chars().count() > 3
            && word.chars().all(char::is_alphabetic)
            && !NAMES.contains(&word)
            && first_factor_length(word).is_none()
    };
    let is_prose = text.split_whitespace().any(is_word);
    if is_prose && text.chars().all(|c| c.is_alphabetic() || c.is_whitespace() || c == '.') {
        let words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
        let token = |word: &str| match word {
            "and" => Token::And,
            "or" => Token::Or,
            word => Token::Text(word.to_owned()),
        };
        return Some(words.map(token).collect());
    }
    let dollars = text.match_indices('$').filter(|(at, _)| !text[..*at].ends_with('\\')).count();
    let mut lexer = Lexer {
        rest: text,
        tokens: Vec::new(),
        spaced: false,
        depth: 0,
        is_text: false,
        is_currency: dollars == 1,
        is_prose,
        thousands,
        brackets: 0,
    };
    lexer.lex_all()?;
    resolve_ambiguous_signs(&mut lexer.tokens);
    Some(lexer.tokens)
}

impl<'t> Lexer<'t> {
    fn lex_all(&mut self) -> Option<()> {
        while let Some(c) = self.rest.chars().next() {
            let before = self.tokens.len();
            match c {
                '\\' => self.lex_command()?,
                c if c.is_ascii_digit() => self.lex_number(),
                '.' if self.rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                    self.lex_number()
                }
                c if c.is_alphabetic() => self.lex_word(),
                c => {
                    self.rest = &self.rest[c.len_utf8()..];
                    self.lex_sign(c)?;
                }
            }
            if self.tokens.len() > before {
                self.spaced = false;
            }
        }
        Some(())
    }

    fn push_token(&mut self, token: Token) {
        match token {
            Token::Open(_) => self.brackets += 1,
            Token::Close(_) => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        self.tokens.push(token);
    }

    fn lex_sign(&mut self, c: char) -> Option<()> {
        match c {
            '$' if self.is_currency => self.push_token(Token::Text("$".into())),
            '$' | '"' | '`' => {}
            c if c.is_whitespace() || c == '~' => self.spaced = true,
            '{' => self.push_token(Token::GroupOpen),
            // An empty group has no meaning.
            '}' if self.tokens.last() == Some(&Token::GroupOpen) => {
                self.tokens.pop();
            }
            // {-}3 is -3.
            '}' if matches!(&self.tokens[..], [.., Token::GroupOpen, Token::Sign(_)]) => {
                let sign = self.tokens.len() - 2;
                self.tokens.remove(sign);
            }
            '}' => self.push_token(Token::GroupClose),
            '(' | '[' => self.push_token(Token::Open(c)),
            ')' | ']' => self.push_token(Token::Close(c)),
            ',' | ';' => self.push_token(Token::Separator),
            '&' => self.push_token(Token::Cell),
            '−' | '–' | '—' => self.push_token(Token::Sign('-')),
            '·' | '×' => self.push_token(Token::Sign('*')),
            '÷' => self.push_token(Token::Sign('/')),
            '*' if self.rest.starts_with('*') => {
                self.rest = &self.rest[1..];
                self.push_token(Token::Sign('^'));
            }
            '√' => self.push_token(Token::Command("sqrt".into())),
            '∞' => self.push_token(Token::Command("infty".into())),
            '∅' => self.push_token(Token::Command("emptyset".into())),
            '<' | '>' if self.rest.starts_with('=') => {
                self.rest = &self.rest[1..];
                self.push_token(Token::Sign(if c == '<' { '≤' } else { '≥' }));
            }
            '=' if self.rest.starts_with('>') => {
                self.rest = &self.rest[1..];
                self.push_token(Token::Sign('⇒'));
            }
            '€' | '£' | '¥' | '₹' | '¢' => self.push_token(Token::Text(c.to_string())),
            // The label of a choice.
            '.' if (self.is_text || !self.rest.trim().is_empty())
                && matches!(&self.tokens[..], [Token::Letter(label)] if ("A"..="J").contains(&label.as_str())) =>
            {
                self.push_token(Token::Sign(':'));
            }
            // A period that ends a sentence or an abbreviation.
            '.' if self.is_text || self.rest.trim().is_empty() => {}
            '.' if matches!(self.tokens.last(), Some(Token::Text(_))) => {}
            '+' | '-' | '*' | '/' | '^' | '_' | '!' | '%' | '|' | '=' | '<' | '>' | '±' | '≤'
            | '≥' | '≠' | '≈' | '∪' | '∈' | '°' | ':' | '\'' | '→' | '∩' | '∖' | '⇒' => {
                self.push_token(Token::Sign(c))
            }
            _ => return None,
        }
        Some(())
    }

    fn lex_command(&mut self) -> Option<()> {
        let after = &self.rest[1..];
        let Some(first) = after.chars().next() else {
            self.rest = after;
            return Some(());
        };
        if !first.is_ascii_alphabetic() {
            self.rest = &after[first.len_utf8()..];
            match first {
                '{' => self.push_token(Token::Open('{')),
                '}' => self.push_token(Token::Close('}')),
                '%' => self.push_token(Token::Sign('%')),
                '$' => self.push_token(Token::Text("$".into())),
                // In plain text, the difference of sets.
                ' ' if self.tokens.ends_with(&[Token::Letter("\\mathbb{R}".into())]) => {
                    self.push_token(Token::Sign('∖'));
                }
                '|' => self.push_token(Token::Sign('|')),
                '\\' => {
                    // `\\[4pt]` specifies the distance between rows.
                    if let Some((_, rest)) =
                        self.rest.strip_prefix('[').and_then(|rest| rest.split_once(']'))
                    {
                        self.rest = rest;
                    }
                    self.push_token(Token::Row);
                }
                '_' | '&' | '#' => {}
                _ => self.spaced = true,
            }
            return Some(());
        }
        let end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (name, rest) = after.split_at(end);
        self.rest = rest;
        // Operators between letters: f \circ g, p \star q.
        let follows_letter = matches!(self.tokens.last(), Some(Token::Letter(_)));
        let starts_letter =
            self.rest.trim_start().starts_with(|c: char| c.is_alphabetic() || c == '\\');
        let operator = match name {
            "circ" => Some('∘'),
            "star" | "bigstar" => Some('⋆'),
            _ => None,
        };
        if let Some(sign) = operator.filter(|_| follows_letter && starts_letter) {
            self.push_token(Token::Sign(sign));
            return Some(());
        }
        if LOOKS.contains(&name) {
            self.spaced = true;
            // `\left.` denotes an invisible bracket.
            if matches!(name, "left" | "right") {
                self.rest = self.rest.trim_start();
                self.rest = self.rest.strip_prefix('.').unwrap_or(self.rest);
            }
            return Some(());
        }
        if TEXTS.contains(&name) {
            let inside = self.take_argument().unwrap_or_default();
            let start = self.tokens.len();
            self.lex_text(inside)?;
            self.name_function(start, name == "operatorname");
            return Some(());
        }
        if let Some((_, arguments)) = DROPPED.iter().find(|(own, _)| *own == name) {
            // `\color[rgb]{1, 0, 0}`
            if let Some((_, rest)) =
                self.rest.strip_prefix('[').and_then(|rest| rest.split_once(']'))
            {
                self.rest = rest;
            }
            for _ in 0..*arguments {
                self.take_argument();
            }
            self.spaced = true;
        }
        if FRAMES.contains(&name) {
            return self.lex_framed(name);
        }
        if DROPPED.iter().any(|(own, _)| *own == name) {
            return Some(());
        }
        match name {
            "not" => {
                self.rest = self.rest.trim_start().strip_prefix('=')?;
                self.push_token(Token::Sign('≠'));
            }
            "begin" => {
                let name = self.take_argument()?;
                if name.starts_with("array") {
                    self.take_argument();
                }
                self.push_token(Token::Begin(name.trim_end_matches('*').to_owned()));
            }
            "end" => {
                self.take_argument()?;
                self.push_token(Token::End);
            }
            "lbrace" => self.push_token(Token::Open('{')),
            "rbrace" => self.push_token(Token::Close('}')),
            "lfloor" => self.push_token(Token::Open('⌊')),
            "rfloor" => self.push_token(Token::Close('⌊')),
            "lceil" => self.push_token(Token::Open('⌈')),
            "rceil" => self.push_token(Token::Close('⌈')),
            "langle" => self.push_token(Token::Open('⟨')),
            "rangle" => self.push_token(Token::Close('⟨')),
            "mathbb" => {
                let letter = match self.take_argument() {
                    Some(letter) => letter.trim(),
                    None => {
                        let rest = self.rest.trim_start();
                        let end = rest.chars().next()?.len_utf8();
                        self.rest = &rest[end..];
                        &rest[..end]
                    }
                };
                self.push_token(Token::Letter(format!("\\mathbb{{{letter}}}")));
            }
            "R" | "reals" | "Reals" => self.push_token(Token::Letter("\\mathbb{R}".into())),
            "wedge" | "land" => self.push_token(Token::Sign('∧')),
            "vee" | "lor" => self.push_token(Token::Sign('∨')),
            // The vector between two points, whose letters are not factors.
            "vec" | "overrightarrow" if starts_with_segment_name(self.rest) => {
                let points = self.take_argument()?.trim();
                self.push_token(Token::Letter(format!("\\vec{{{points}}}")));
            }
            name => self.push_command(name),
        }
        // One-digit arguments: `\frac12`.
        let arguments = match self.tokens.last() {
            Some(Token::Command(name)) if name == "frac" || name == "binom" => 2,
            Some(Token::Command(name)) if name == "sqrt" => 1,
            _ => 0,
        };
        for _ in 0..arguments {
            self.rest = self.rest.trim_start();
            let Some(digit) = self.rest.chars().next().filter(char::is_ascii_digit) else { break };
            self.rest = &self.rest[1..];
            self.push_token(Token::integer(digit));
        }
        Some(())
    }

    fn push_command(&mut self, name: &str) {
        let name = SAME.iter().find(|(from, _)| *from == name).map_or(name, |(_, to)| to);
        let mut chars = name.chars();
        match (chars.next(), chars.next()) {
            (Some(sign), None) => self.push_token(Token::Sign(sign)),
            _ => self.push_token(Token::Command(name.to_owned())),
        }
    }

    /// Returns the argument in braces that starts at the position, without the braces.
    fn take_argument(&mut self) -> Option<&'t str> {
        let rest = self.rest.trim_start().strip_prefix('{')?;
        let mut depth = 1;
        for (at, c) in rest.char_indices() {
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            if depth == 0 {
                self.rest = &rest[at + 1..];
                return Some(&rest[..at]);
            }
        }
        None
    }

    /// Parses the argument of a LaTeX command that frames, underlines or colors the argument.
    fn lex_framed(&mut self, name: &str) -> Option<()> {
        // `\framebox[2cm]{4}`
        if let Some((_, rest)) = self.rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            self.rest = rest;
        }
        let Some(inside) = self.take_argument() else { return Some(()) };
        if name.ends_with("brace") && self.rest.trim_start().starts_with(['_', '^']) {
            // A label at a brace is an explanation.
            self.rest = &self.rest.trim_start()[1..];
            self.take_argument()?;
        }
        let is_base = self.rest.trim_start().starts_with(['_', '^']);
        if is_base {
            self.push_token(Token::GroupOpen);
        }
        self.lex_argument(inside, self.is_text, Self::lex_all)?;
        if is_base {
            self.push_token(Token::GroupClose);
        }
        Some(())
    }

    /// Parses the LaTeX argument `inside` with `read`. Returns `None` if arguments are nested too
    /// deeply.
    fn lex_argument(
        &mut self,
        inside: &'t str,
        is_text: bool,
        read: impl FnOnce(&mut Self) -> Option<()>,
    ) -> Option<()> {
        if self.depth == 8 {
            return None;
        }
        let outside = (self.rest, self.is_text);
        (self.rest, self.is_text) = (inside, is_text);
        self.depth += 1;
        let done = read(self);
        self.depth -= 1;
        (self.rest, self.is_text) = outside;
        done
    }

    /// Parses the argument of a LaTeX text command. If it does not consist of words, it is parsed
    /// as a formula.
    fn lex_text(&mut self, inside: &'t str) -> Option<()> {
        let start = self.tokens.len();
        let plain = inside.trim();
        if self.depth == 8 {
            return None;
        }
        self.spaced |= inside.starts_with(' ');
        let done = self.lex_argument(inside, true, |lexer| {
            if plain.is_empty() || !plain.chars().all(|c| c.is_alphabetic() || c == ' ') {
                return lexer.lex_all();
            }
            for word in plain.split(' ').filter(|word| !word.is_empty()) {
                lexer.push_word(word, true);
            }
            Some(())
        });
        // If the argument has a character that does not occur in formulas, all of it is words.
        if done.is_none() {
            self.tokens.truncate(start);
            self.push_token(Token::Text(plain.to_owned()));
        }
        Some(())
    }

    fn lex_word(&mut self) {
        let end = self.rest.find(|c: char| !c.is_alphabetic()).unwrap_or(self.rest.len());
        let after_number = matches!(self.tokens.last(), Some(Token::Number { .. }));
        let end = first_factor_length(&self.rest[..end])
            .filter(|_| !(after_number && words::parse_units(&self.rest[..end]).is_some()))
            .unwrap_or(end);
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        // In 3 x 10^5, the letter x is a multiplication sign.
        let is_operand = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        if after_number && matches!(word, "x" | "X") && is_operand(rest.trim_start()) {
            self.push_token(Token::Sign('*'));
            return;
        }
        // a.m. and p.m.
        let noon = |rest: &'t str| rest.trim_start().strip_prefix(['m', 'M']);
        if let ("a" | "A" | "p" | "P", Some(rest)) = (word, rest.strip_prefix('.').and_then(noon))
            && !rest.starts_with(char::is_alphabetic)
        {
            self.rest = rest.strip_prefix('.').unwrap_or(rest);
            self.push_token(Token::Text(format!("{word}m")));
            return;
        }
        let start = self.tokens.len();
        self.push_word(word, self.is_text);
        self.name_function(start, false);
    }

    /// Turns the word at index `start` of the tokens into the name of a function if an argument
    /// follows: a bracket, as in Var(X) and SO(3), or a letter after an operator, as in
    /// \operatorname{Re} z. Otherwise the word is a remark, which the comparison of answers
    /// ignores.
    fn name_function(&mut self, start: usize, is_operator: bool) {
        let Some([Token::Text(word)]) = self.tokens.get(start..) else { return };
        let follows_value = matches!(
            start.checked_sub(1).map(|at| &self.tokens[at]),
            Some(
                Token::Number { .. }
                    | Token::Close(_)
                    | Token::GroupClose
                    | Token::Text(_)
                    | Token::Sign('°' | '%')
            )
        );
        let inside = self.rest.strip_prefix("\\left").unwrap_or(self.rest).strip_prefix('(');
        let inside = inside.map(|inside| inside.split(')').next().unwrap_or_default());
        // A name before several items is the name of a point, but SL(2, R) is a group.
        let is_group = word.len() < 4 && word.chars().all(|c| c.is_ascii_uppercase());
        let mut next = self.rest.trim_start().chars();
        let is_letter = next.next().is_some_and(|c| c.is_alphabetic() || c == '\\')
            && !next
                .next()
                .is_some_and(|c| c.is_alphabetic() && !self.rest.trim_start().starts_with('\\'));
        let applies = inside.is_some_and(|inside| is_group || !inside.contains(','))
            || (is_operator && is_letter);
        let is_known = NO_FUNCTIONS.contains(&word.to_lowercase().as_str())
            || words::parse_units(word).is_some();
        if applies && !follows_value && !is_known && word.is_ascii() && word.len() > 1 {
            self.tokens[start] = Token::Letter(word.clone());
        }
    }

    fn push_word(&mut self, word: &str, is_text: bool) {
        let after_number = matches!(
            self.tokens.last(),
            Some(
                Token::Number { .. }
                    | Token::Close(_)
                    | Token::GroupClose
                    | Token::Text(_)
                    | Token::Sign('°')
            )
        );
        let after_degree = matches!(self.tokens.last(), Some(Token::Sign('°')))
            || self.tokens.ends_with(&[Token::Sign('°'), Token::GroupClose]);
        let one = word.chars().nth(1).is_none();
        match word {
            "or" => self.push_token(Token::Or),
            "and" => self.push_token(Token::And),
            "at" if self.rest.trim_start().starts_with(|c: char| c.is_ascii_digit()) => {
                self.push_token(Token::Text(word.into()));
            }
            "choose" if after_number => self.push_token(Token::Command(word.into())),
            "to" if after_number => self.push_token(Token::Text(word.into())),
            _ if let Some((_, name)) = GREEK.iter().find(|(letter, _)| *letter == word) => {
                self.push_command(name)
            }
            "percent" | "degrees" | "degree" | "infinity" | "inf" | "oo" => self.push_command(word),
            "i" | "e" if is_text => self.push_token(Token::Letter(word.into())),
            "C" | "F" | "K" if after_degree => self.push_token(Token::Text(word.into())),
            "m" | "g" | "s" | "h" | "l" if is_text => self.push_token(Token::Text(word.into())),
            // 5K may mean 5000.
            "K" if is_text && after_number && !self.spaced => {
                self.push_token(Token::Letter(word.into()))
            }
            "A" | "C" | "J" | "K" | "L" | "N" | "V" | "W" if is_text && after_number => {
                self.push_token(Token::Text(word.into()));
            }
            // A single Chinese, Japanese or Korean character is a word.
            _ if one && word.starts_with(|c| ('\u{3000}'..'\u{e000}').contains(&c)) => {
                self.push_token(Token::Text(word.into()));
            }
            _ if one => self.push_token(Token::Letter(word.into())),
            _ if WORDS.contains(&word.to_lowercase().as_str()) => {
                self.push_token(Token::Text(word.into()))
            }
            _ if self.is_prose && PROSE_WORDS.contains(&word.to_lowercase().as_str()) => {
                self.push_token(Token::Text(word.into()));
            }
            // In a unit, sec and min are not functions.
            _ if is_text && self.tokens.last() == Some(&Token::Sign('/')) => {
                self.push_token(Token::Text(word.into()));
            }
            _ if NAMES.contains(&word) && !(is_text && after_number) => self.push_command(word),
            _ if is_text || word.chars().count() > 3 || !word.is_ascii() => {
                self.push_token(Token::Text(word.into()))
            }
            _ if after_number && UNITS.contains(&word) => self.push_token(Token::Text(word.into())),
            "yes" | "no" | "Yes" | "No" | "YES" | "NO" => self.push_token(Token::Text(word.into())),
            // Names, whose letters are not factors: Tom in prose, May, the triangle ABC.
            _ if is_capitalized_name(word) && (self.is_prose || is_month(word)) => {
                self.push_token(Token::Text(word.into()))
            }
            _ if word.len() == 3 && word.chars().all(|c| c.is_ascii_uppercase()) => {
                let is_angle = self.tokens.last() == Some(&Token::Command("angle".into()));
                let turned: String = word.chars().rev().collect();
                let name =
                    if is_angle && turned.as_str() < word { turned } else { word.to_owned() };
                self.push_token(Token::Letter(name));
            }
            _ => word.chars().for_each(|c| self.push_token(Token::Letter(c.to_string()))),
        }
    }
}
