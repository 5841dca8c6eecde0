//! Tokenizers of encoder models, which read complete texts: WordPiece, and any other kind of
//! `tokenizer.json`.

use levade_policy::{PolicyError, TextIds, catch_panic};
use tokenizers::{TruncationDirection, TruncationParams, TruncationStrategy};

use crate::TextError;

/// Tokenizer of an encoder model. It adds special tokens around every text, as its `tokenizer.json`
/// specifies.
pub struct EncoderTokenizer {
    inner: tokenizers::Tokenizer,
}

impl EncoderTokenizer {
    /// Creates a tokenizer from the contents of a `tokenizer.json`. `max_tokens` is the maximum
    /// number of tokens of a text, including special tokens; longer texts are truncated.
    ///
    /// # Errors
    /// Returns an error if the file is damaged, or if `max_tokens` leaves no room for a text.
    pub fn new(json: &[u8], max_tokens: usize) -> Result<Self, TextError> {
        let read = catch_panic(|| tokenizers::Tokenizer::from_bytes(json));
        let mut inner =
            read.map_err(encoder_error)?.map_err(|error| encoder_error(error.to_string()))?;
        inner.with_padding(None);
        let truncation = TruncationParams {
            max_length: max_tokens,
            direction: TruncationDirection::Right,
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
        };
        inner
            .with_truncation(Some(truncation))
            .map_err(|error| encoder_error(error.to_string()))?;
        let tokenizer = EncoderTokenizer { inner };
        let num_special =
            tokenizer.ids("").map_err(|error| encoder_error(error.to_string()))?.len();
        if num_special >= max_tokens {
            return Err(encoder_error(format!(
                "{num_special} special tokens leave no room for text in the limit of {max_tokens} \
                 tokens"
            )));
        }
        Ok(tokenizer)
    }
}

fn encoder_error(why: String) -> TextError {
    TextError::Tokenizer(format!("the encoder's tokenizer.json cannot be used: {why}"))
}

impl TextIds for EncoderTokenizer {
    fn ids(&self, text: &str) -> Result<Vec<u32>, PolicyError> {
        let encoded = catch_panic(|| self.inner.encode_fast(text, true));
        let encoded = encoded.map_err(PolicyError::Invalid)?;
        let encoded = encoded.map_err(|error| PolicyError::Invalid(error.to_string()))?;
        Ok(encoded.get_ids().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small WordPiece tokenizer in BERT's format.
    const SMALL: &str = r###"{
        "version": "1.0", "truncation": null, "padding": {"strategy": {"Fixed": 8}, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
                "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3,
                "search": 4, "##es": 5, "cafe": 6, "中": 7, ".": 8}}
    }"###;

    #[test]
    fn encoder_truncates_before_final_special_token() {
        let tokenizer = EncoderTokenizer::new(SMALL.as_bytes(), 5).unwrap();
        let ids = |text: &str| tokenizer.ids(text).unwrap();
        assert_eq!(ids("Searches"), [2, 4, 5, 3]);
        assert_eq!(ids("Café 中."), [2, 6, 7, 8, 3]);
        assert_eq!(ids("unknown"), [2, 1, 3]);
        assert_eq!(ids(""), [2, 3]);
        assert_eq!(ids("search search search search search"), [2, 4, 4, 4, 3]);
    }

    #[test]
    fn encoder_rejects_invalid_file_or_limit() {
        assert!(EncoderTokenizer::new(b"{", 5).is_err());
        let error = EncoderTokenizer::new(SMALL.as_bytes(), 2).err().unwrap().to_string();
        assert!(error.contains("the encoder's tokenizer.json"), "{error}");
    }
}
