//! Text out of tokens as they arrive.

use dressage_policy::TokenBytes;

use crate::thought::{Part, Thoughts};
use crate::{Tokenizer, hermes};

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
        self.push_bytes(match self.keep_special {
            true => tokenizer.bytes_with_special(id),
            false => tokenizer.token_bytes(id).unwrap_or_default(),
        })
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> String {
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

    /// Rest at the end: U+FFFD for a character that was never completed.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// A piece of a reply as it arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Said to whoever asked.
    Speech(String),
    /// Part of a thought or of a call, tags included.
    Aside(String),
}

/// Takes a reply apart as it is drawn.
///
/// A tag that closes a thought which nobody opened comes as an aside; what was said before has arrived as
/// speech by then, although [`Chat::parse`](crate::Chat::parse) counts it to the thought.
#[derive(Debug, Clone)]
pub struct ReplyStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Special tokens that are printed by their names.
    kept: &'a [u32],
    thoughts: &'a Thoughts,
    decoder: StreamDecoder,
    state: Part,
    /// Text that may be the beginning of a tag.
    held: String,
    /// The call that is under way, with its first tag.
    call: String,
}

impl<'a> ReplyStream<'a> {
    pub(crate) fn new(
        tokenizer: &'a Tokenizer,
        kept: &'a [u32],
        thoughts: &'a Thoughts,
        in_thought: bool,
    ) -> Self {
        let state = if in_thought { Part::Thought } else { Part::Speech };
        let (decoder, held, call) = (StreamDecoder::new(), String::new(), String::new());
        ReplyStream { tokenizer, kept, thoughts, decoder, state, held, call }
    }

    /// Text that `id` completes; often none.
    pub fn push(&mut self, id: u32) -> Vec<Piece> {
        let text = self.decoder.push_bytes(self.tokenizer.bytes_keeping(id, self.kept));
        self.read(&text)
    }

    /// Text left at the end.
    pub fn finish(mut self) -> Vec<Piece> {
        let text = std::mem::take(&mut self.decoder).finish();
        let mut pieces = self.read(&text);
        let rest = std::mem::take(&mut self.held);
        pieces.extend(self.piece(rest));
        pieces
    }

    fn read(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        loop {
            let tags: Vec<&str> = match self.state {
                Part::Thought => self.thoughts.pairs().iter().map(|tags| tags.close.as_str()).collect(),
                Part::Call => vec![hermes::CLOSE],
                _ => {
                    let pairs = self.thoughts.pairs().iter();
                    pairs.flat_map(|tags| [tags.open.as_str(), &tags.close]).chain([hermes::OPEN]).collect()
                }
            };
            let found = tags.iter().filter_map(|tag| Some((self.held.find(tag)?, *tag)));
            let first = found.min_by_key(|(at, tag)| (*at, std::cmp::Reverse(tag.len())));
            // A longer tag, or an earlier one, may be under way.
            let begun = (0..self.held.len()).filter(|&at| self.held.is_char_boundary(at)).find(|&at| {
                let rest = &self.held[at..];
                tags.iter().any(|tag| tag.len() > rest.len() && tag.starts_with(rest))
            });
            let Some((at, tag)) = first.filter(|(at, _)| begun.is_none_or(|begun| *at < begun)) else {
                let ready = self.held.drain(..begun.unwrap_or(self.held.len())).collect();
                pieces.extend(self.piece(ready));
                return pieces;
            };
            let end = at + tag.len();
            let next = match self.state {
                Part::Thought => Part::Speech,
                Part::Call => {
                    let written = format!("{}{}", self.call, &self.held[..end]);
                    if hermes::ends_in_text(&written) { Part::Call } else { Part::Speech }
                }
                _ if tag == hermes::OPEN => Part::Call,
                _ if self.thoughts.pairs().iter().any(|tags| tags.open == tag) => Part::Thought,
                _ => Part::Speech,
            };
            // Tags belong to what they begin or end.
            let before: String = self.held.drain(..at).collect();
            let tag: String = self.held.drain(..end - at).collect();
            pieces.extend(self.piece(before));
            if self.state == Part::Call || next == Part::Call {
                self.call.push_str(&tag);
            }
            pieces.push(Piece::Aside(tag));
            if next == Part::Speech {
                self.call.clear();
            }
            self.state = next;
        }
    }

    fn piece(&mut self, text: String) -> Option<Piece> {
        if text.is_empty() {
            return None;
        }
        if self.state == Part::Call {
            self.call.push_str(&text);
        }
        Some(if self.state == Part::Speech { Piece::Speech(text) } else { Piece::Aside(text) })
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
