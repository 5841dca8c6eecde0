//! Splits a text into words: runs of letters and digits.
//!
//! Each Han or Hiragana character is a word of its own, as in Lucene's standard tokenizer. Chinese
//! and Japanese are written without spaces, so complete sentences would otherwise be single words.

use tantivy::tokenizer::{Token, TokenStream, Tokenizer};

/// A tokenizer for tantivy that splits texts into words.
#[derive(Clone)]
pub struct WordTokenizer {
    /// Whether each Han or Hiragana character is a separate word.
    divides: bool,
    token: Token,
}

impl WordTokenizer {
    /// Creates a tokenizer. If `divides` is true, each Han or Hiragana character is a separate
    /// word.
    pub fn new(divides: bool) -> Self {
        WordTokenizer { divides, token: Token::default() }
    }
}

/// Iterator over the remaining words of a text.
pub struct WordTokenStream<'a> {
    text: &'a str,
    at: usize,
    divides: bool,
    token: &'a mut Token,
}

impl Tokenizer for WordTokenizer {
    type TokenStream<'a> = WordTokenStream<'a>;

    fn token_stream<'a>(&'a mut self, text: &'a str) -> WordTokenStream<'a> {
        self.token.reset();
        WordTokenStream { text, at: 0, divides: self.divides, token: &mut self.token }
    }
}

impl TokenStream for WordTokenStream<'_> {
    fn advance(&mut self) -> bool {
        let rest = &self.text[self.at..];
        let Some(start) = rest.find(char::is_alphanumeric) else {
            self.at = self.text.len();
            return false;
        };
        let word = &rest[start..];
        let divides = self.divides;
        let is_complete = |c: char| divides && is_word_by_itself(c);
        let length = match word.chars().next() {
            Some(first) if is_complete(first) => first.len_utf8(),
            _ => word.find(|c: char| !c.is_alphanumeric() || is_complete(c)).unwrap_or(word.len()),
        };
        let from = self.at + start;
        self.at = from + length;
        (self.token.offset_from, self.token.offset_to) = (from, self.at);
        self.token.position = self.token.position.wrapping_add(1);
        self.token.text.clear();
        self.token.text.push_str(&self.text[from..self.at]);
        true
    }

    fn token(&self) -> &Token {
        self.token
    }

    fn token_mut(&mut self) -> &mut Token {
        self.token
    }
}

/// Returns whether `c` is a Han or Hiragana character, which is a word without spaces around it.
fn is_word_by_itself(c: char) -> bool {
    matches!(
        c,
        '\u{3005}'
            | '\u{3007}'
            | '\u{3041}'..='\u{309F}'
            | '\u{3400}'..='\u{4DBF}'
            | '\u{4E00}'..='\u{9FFF}'
            | '\u{F900}'..='\u{FAFF}'
            | '\u{20000}'..='\u{3FFFF}'
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tantivy::tokenizer::SimpleTokenizer;

    use super::*;

    fn tokens(mut tokenizer: impl Tokenizer, text: &str) -> Vec<Token> {
        let mut found = Vec::new();
        tokenizer.token_stream(text).process(&mut |token| found.push(token.clone()));
        found
    }

    #[test]
    fn han_and_hiragana_characters_are_words() {
        assert_eq!(words("GPT模型, 2024年"), ["GPT", "模", "型", "2024", "年"]);
        assert_eq!(words("東京タワーは高い。"), ["東", "京", "タワー", "は", "高", "い"]);
        assert_eq!(words("한국어 문장 - café"), ["한국어", "문장", "café"]);
        assert!(words(" …。").is_empty());
    }

    fn words(text: &str) -> Vec<String> {
        tokens(WordTokenizer::new(true), text).into_iter().map(|token| token.text).collect()
    }

    proptest! {
        #[test]
        fn undivided_words_match_tantivy_simple_tokenizer(text in "[a模い1 ,é]{0,20}") {
            prop_assert_eq!(tokens(WordTokenizer::new(false), &text), tokens(SimpleTokenizer::default(), &text));
        }
    }
}
