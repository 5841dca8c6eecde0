//! Text out of tokens as they arrive.

use dressage_policy::TokenBytes;

use crate::Tokenizer;

/// Decodes a reply as it is drawn; never yields half a character.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    /// The start of a character that is not complete yet.
    pending: Vec<u8>,
    keep_special: bool,
}

impl StreamDecoder {
    /// A decoder that leaves special tokens out.
    pub fn new() -> Self {
        Self::default()
    }

    /// A decoder that prints special tokens by their names.
    pub fn with_special() -> Self {
        StreamDecoder { keep_special: true, ..Self::default() }
    }

    /// The text that `id` completes; often empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let bytes = match self.keep_special {
            true => tokenizer.bytes_with_special(id),
            false => tokenizer.token_bytes(id).unwrap_or_default(),
        };
        self.pending.extend_from_slice(bytes);
        let unfinished = match self.pending.utf8_chunks().last() {
            Some(last) if could_continue(last.invalid()) => last.invalid().len(),
            _ => 0,
        };
        let tail = self.pending.split_off(self.pending.len() - unfinished);
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = tail;
        text
    }

    /// What is left at the end: U+FFFD for a character that was never completed.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Whether bytes that are not UTF-8 are the start of a character, so that more bytes could complete it.
fn could_continue(bytes: &[u8]) -> bool {
    !bytes.is_empty() && matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{IM_END, tiny_tokenizer};

    #[test]
    fn a_stream_waits_for_whole_characters() {
        let tokenizer = tiny_tokenizer().unwrap();
        let mut stream = StreamDecoder::new();
        let pushed: Vec<String> =
            "é😀a".bytes().map(|byte| stream.push(&tokenizer, u32::from(byte))).collect();
        assert_eq!(pushed, ["", "é", "", "", "", "😀", "a"]);
        assert_eq!(stream.finish(), "");
        let mut stream = StreamDecoder::with_special();
        assert_eq!(stream.push(&tokenizer, 0xE9), "");
        assert_eq!(stream.push(&tokenizer, IM_END), "\u{FFFD}<|im_end|>");
        assert_eq!(stream.push(&tokenizer, 0xF0), "");
        assert_eq!(stream.finish(), "\u{FFFD}");
    }

    proptest! {
        #[test]
        fn a_stream_says_what_decode_says(ids in proptest::collection::vec(0u32..265, 0..40)) {
            let tokenizer = tiny_tokenizer().unwrap();
            let mut stream = StreamDecoder::new();
            let mut text: String = ids.iter().map(|&id| stream.push(&tokenizer, id)).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, tokenizer.decode(&ids));
        }
    }
}
