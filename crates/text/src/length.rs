//! Lower bounds on the number of tokens of a text, computed from its bytes only.
//!
//! Tokenizing takes seconds for a few megabytes, so a prompt that is far too long is rejected
//! before that. Let A be the largest number of ASCII letters and digits in any token of the
//! vocabulary. A text with n letters and digits has at least ⌈n / A⌉ tokens, because each letter is
//! in exactly one token. Let L be the length of the longest token in bytes. The text then has at
//! least ⌈bytes / L⌉ tokens. Example: with A = 20 and L = 128, a megabyte of prose with 800,000
//! letters has at least 40,000 tokens, and a megabyte of spaces at least 8,192.
//!
//! # Guarantees
//! **No text that fits is rejected.** The second bound holds only for a tokenizer that neither
//! drops nor composes characters. Composition (NFC and NFKC) never changes a letter that is
//! followed by an ASCII character, so the first bound counts only those letters. With other
//! normalizers there is no bound.

use tokenizers::NormalizerWrapper;

use crate::TextError;

/// Sizes of the longest tokens of a vocabulary, which bound the number of tokens of a text from
/// below. 0 means that there is no bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TokenSizes {
    /// Largest number of ASCII letters and digits in one token.
    letters: usize,
    /// Largest number of bytes in one token.
    bytes: usize,
}

/// Effect of a normalizer on the length of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NormalizerEffect {
    /// The normalizer never decreases the number of bytes.
    Keeps,
    /// The normalizer composes characters, so it can decrease the number of bytes.
    Composes,
    /// The normalizer can have any effect on the length.
    Unknown,
}

fn classify_normalizer(normalizer: &NormalizerWrapper) -> NormalizerEffect {
    match normalizer {
        NormalizerWrapper::NFD(_)
        | NormalizerWrapper::Prepend(_)
        | NormalizerWrapper::ByteLevel(_) => NormalizerEffect::Keeps,
        NormalizerWrapper::NFC(_) | NormalizerWrapper::NFKC(_) => NormalizerEffect::Composes,
        NormalizerWrapper::Sequence(all) => {
            all.as_ref().iter().map(classify_normalizer).max().unwrap_or(NormalizerEffect::Keeps)
        }
        // SentencePiece replaces a space with ▁.
        NormalizerWrapper::Replace(replace) => {
            let written = serde_json::to_value(replace).unwrap_or_default();
            let widens = written["pattern"]["String"] == " " && written["content"] == "\u{2581}";
            if widens { NormalizerEffect::Keeps } else { NormalizerEffect::Unknown }
        }
        _ => NormalizerEffect::Unknown,
    }
}

/// Returns the number of ASCII letters and digits in a text that no composition of characters can
/// change.
fn count_letters(text: &[u8]) -> usize {
    let last = text.last().is_some_and(u8::is_ascii_alphanumeric);
    text.windows(2).filter(|pair| pair[0].is_ascii_alphanumeric() && pair[1].is_ascii()).count()
        + usize::from(last)
}

impl TokenSizes {
    /// Measures the longest tokens of a vocabulary. `absorbs_space` is whether a token absorbs
    /// adjacent white space.
    pub(crate) fn measure<'a>(
        tokens: impl IntoIterator<Item = &'a [u8]>,
        normalizer: Option<&NormalizerWrapper>,
        absorbs_space: bool,
    ) -> Self {
        let effect = normalizer.map_or(NormalizerEffect::Keeps, classify_normalizer);
        if effect == NormalizerEffect::Unknown {
            return TokenSizes::default();
        }
        let mut bytes = 0;
        let mut letters = 0;
        for token in tokens {
            bytes = bytes.max(token.len());
            letters = letters.max(token.iter().filter(|byte| byte.is_ascii_alphanumeric()).count());
        }
        TokenSizes {
            letters,
            bytes: if absorbs_space || effect == NormalizerEffect::Composes { 0 } else { bytes },
        }
    }

    /// Rejects a text if its length in bytes shows that it has more than `max_tokens` tokens.
    pub(crate) fn check(self, text: &str, max_tokens: usize) -> Result<(), TextError> {
        // Each token covers at least one byte of the text.
        if text.len() <= max_tokens {
            return Ok(());
        }
        check_count(text, max_tokens, text.len(), self.bytes, "bytes")?;
        check_count(
            text,
            max_tokens,
            count_letters(text.as_bytes()),
            self.letters,
            "letters and digits",
        )
    }
}

fn check_count(
    text: &str,
    max_tokens: usize,
    count: usize,
    max_size: usize,
    what: &'static str,
) -> Result<(), TextError> {
    let min_tokens = if max_size == 0 { 0 } else { count.div_ceil(max_size) };
    let bytes = text.len();
    if min_tokens > max_tokens {
        Err(TextError::TooLong { bytes, min_tokens, max_tokens, max_token_size: max_size, what })
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use levade_model::TokenizerSource;
    use proptest::prelude::*;

    use super::*;
    use crate::Tokenizer;
    use crate::testing::tiny_tokenizer;

    #[test]
    fn letters_before_combining_marks_are_not_counted() {
        for (text, count) in
            [("abc 12", 5), ("e\u{301}a", 1), ("aé", 0), ("", 0), ("é1", 1), ("--", 0)]
        {
            assert_eq!(count_letters(text.as_bytes()), count, "{text}");
        }
    }

    #[test]
    fn length_check_rejects_only_overlong_texts() {
        let sizes = TokenSizes { letters: 4, bytes: 10 };
        assert!(sizes.check(&" ".repeat(100), 10).is_ok());
        let error = sizes.check(&" ".repeat(101), 10).unwrap_err().to_string();
        assert!(error.contains("101 bytes") && error.contains("at least 11 tokens"), "{error}");
        assert!(error.contains("more than 10 bytes"), "{error}");
        assert!(sizes.check(&"a".repeat(40), 10).is_ok());
        let error = sizes.check(&"a".repeat(41), 10).unwrap_err().to_string();
        assert!(error.contains("more than 4 letters and digits"), "{error}");
        assert!(TokenSizes::default().check(&"a".repeat(1000), 10).is_ok());
    }

    #[test]
    fn normalizers_that_drop_characters_have_no_bound() {
        for bounded in [
            serde_json::Value::Null,
            normalizer("NFC"),
            normalizer("NFKC"),
            replace_normalizer(" ", "\u{2581}"),
        ] {
            assert!(has_no_bound(bounded.clone()), "{bounded}");
        }
        for unbounded in [
            normalizer("StripAccents"),
            replace_normalizer("a", ""),
            serde_json::json!({ "type": "Strip", "strip_left": true, "strip_right": true }),
            serde_json::json!({ "type": "Sequence", "normalizers": [normalizer("NFC"), replace_normalizer("a", "")] }),
        ] {
            assert!(!has_no_bound(unbounded.clone()), "{unbounded}");
        }
    }

    fn has_no_bound(normalizer: serde_json::Value) -> bool {
        let mut json: serde_json::Value =
            serde_json::from_str(&tiny_tokenizer().unwrap().to_json().unwrap()).unwrap();
        json["normalizer"] = normalizer;
        let bytes = json.to_string().into_bytes();
        Tokenizer::new(&TokenizerSource::Json(bytes))
            .unwrap()
            .check_length(&"a".repeat(5000), 10)
            .is_err()
    }

    fn normalizer(kind: &str) -> serde_json::Value {
        serde_json::json!({ "type": kind })
    }

    fn replace_normalizer(pattern: &str, content: &str) -> serde_json::Value {
        serde_json::json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content })
    }

    proptest! {
        #[test]
        fn length_bound_never_exceeds_token_count(text in "(\\PC|[a-z0-9 \
                                                           ]{1,8}|<\\|im_end\\|>|[áe\u{301}]){0,60}") {
            let tokenizer = tiny_tokenizer().unwrap();
            let count = tokenizer.encode_template(&text).len();
            prop_assert!(tokenizer.check_length(&text, count).is_ok());
        }
    }
}
