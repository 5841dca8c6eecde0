//! Text out of tokens as they arrive.

use std::sync::Arc;

use levade_policy::TokenBytes;

use crate::reader::{Found, Part, Reader, thought_of};
use crate::{Chat, Malformed, Tokenizer, ToolCall, ToolSpec};

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
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// Said to whoever asked.
    Speech(String),
    /// Thought, without tags.
    Thought(String),
    /// Text of tags and of calls, and white space around stretches of speech and thought.
    Aside(String),
    /// A call whose text is complete; it has arrived as asides.
    Call(Result<ToolCall, Malformed>),
}

/// Takes a reply apart as it is drawn.
///
/// All speech put together is [`Parsed::content`](crate::Parsed::content), all thought is [`Chat::thought`],
/// and the calls are [`Parsed::calls`](crate::Parsed::calls), to the character and in order, white space
/// trimmed: what may be white space at the end of a stretch is held back until more of it comes, and where
/// speech or thought goes on after something else, it begins with a line break. Without these line breaks,
/// all text put together is the text of the reply. The exceptions:
///
/// - A tag that closes a thought which nobody opened comes as an aside. What arrived before as speech or as a
///   call cannot be taken back by then, although [`Chat::parse`] and [`Chat::pieces`] count it to the
///   thought.
/// - Calls without tags, which `bare_calls` allows, arrive as speech.
///
/// The cost grows with the length of the reply alone, however many tokens it comes in.
#[derive(Debug, Clone)]
pub struct ReplyStream {
    chat: Arc<Chat>,
    tools: Arc<[ToolSpec]>,
    decoder: StreamDecoder,
    reader: Reader,
    speech: Stretch,
    thought: Stretch,
    /// Whether calls are speech.
    calls_are_text: bool,
}

/// A stretch of text of which the end is trimmed as it arrives.
#[derive(Debug, Clone, Default)]
struct Stretch {
    /// Whether an earlier stretch said anything.
    continues: bool,
    /// Whether this one has said anything.
    open: bool,
    /// White space that is part of it if more comes.
    held: String,
}

impl Stretch {
    /// Goes on with `text`: white space before its first word, and what is said by now.
    fn push(&mut self, text: &str) -> (String, String) {
        let (mut before, mut said) = (String::new(), String::new());
        let words = if self.open { text } else { text.trim_start() };
        before.push_str(&text[..text.len() - words.len()]);
        let until = words.trim_end();
        if !until.is_empty() {
            if !self.open && self.continues {
                said.push('\n');
            }
            (self.open, self.continues) = (true, true);
            said.push_str(&self.held);
            said.push_str(until);
            self.held.clear();
        }
        self.held.push_str(&words[until.len()..]);
        (before, said)
    }

    /// Ends here: white space that is not part of it.
    fn end(&mut self) -> String {
        self.open = false;
        std::mem::take(&mut self.held)
    }
}

impl Chat {
    /// A reply as it arrives, taken apart. `in_thought` says that the prompt has begun a thought.
    pub fn stream(self: &Arc<Self>, in_thought: bool, tools: Arc<[ToolSpec]>) -> ReplyStream {
        ReplyStream::new(self.clone(), tools, in_thought)
    }

    /// Returns a whole reply as pieces in the order in which it was written. Speech, thoughts and calls are
    /// those of [`Chat::parse`] and [`Chat::thought`]: a tag that closes a thought which was never opened
    /// counts all text before it to the thought. With `calls_are_text`, text of calls is speech.
    pub fn pieces(
        self: &Arc<Self>,
        said: &str,
        in_thought: bool,
        tools: &Arc<[ToolSpec]>,
        calls_are_text: bool,
    ) -> Vec<Piece> {
        let (mut found, _) = Reader::read(self.tags(), said, in_thought, tools);
        let mut stream = ReplyStream::new(self.clone(), tools.clone(), in_thought);
        if calls_are_text {
            stream.calls_are_text();
        }
        let mut pieces = Vec::new();
        if let Some(late) = found.iter().rposition(|found| *found == Found::Late) {
            let rest = found.split_off(late + 1);
            let thought = thought_of(&found);
            if !thought.is_empty() {
                stream.thought.continues = true;
                pieces.push(Piece::Thought(thought));
            }
            found = rest;
        }
        pieces.extend(stream.pieces(found));
        pieces.extend(stream.ends());
        pieces
    }
}

impl ReplyStream {
    fn new(chat: Arc<Chat>, tools: Arc<[ToolSpec]>, in_thought: bool) -> Self {
        ReplyStream {
            chat,
            tools,
            decoder: StreamDecoder::new(),
            reader: Reader::new(in_thought),
            speech: Stretch::default(),
            thought: Stretch::default(),
            calls_are_text: false,
        }
    }

    /// Gives the text of calls as speech, and no calls. A format that writes speech in tags of its own keeps
    /// its calls.
    pub fn calls_are_text(&mut self) {
        self.calls_are_text = self.chat.tags().syntax.spelling().thought_tags.is_none();
    }

    /// Pieces that `id` completes; often none.
    pub fn push(&mut self, id: u32) -> Vec<Piece> {
        let text = self.decoder.push_bytes(self.chat.bytes_said(id));
        self.read(&text)
    }

    /// Pieces left at the end.
    pub fn finish(mut self) -> Vec<Piece> {
        let text = std::mem::take(&mut self.decoder).finish();
        let mut pieces = self.read(&text);
        let mut found = Vec::new();
        self.reader.finish(self.chat.tags(), &self.tools, &mut found);
        pieces.extend(self.pieces(found));
        pieces.extend(self.ends());
        pieces
    }

    /// Ends both stretches: white space that is part of neither.
    fn ends(&mut self) -> impl Iterator<Item = Piece> {
        let rest = [self.speech.end(), self.thought.end()];
        rest.into_iter().filter(|text| !text.is_empty()).map(Piece::Aside)
    }

    fn read(&mut self, text: &str) -> Vec<Piece> {
        if text.is_empty() {
            return Vec::new();
        }
        let mut found = Vec::new();
        self.reader.push(self.chat.tags(), &self.tools, text, &mut found);
        self.pieces(found)
    }

    fn pieces(&mut self, found: Vec<Found>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for found in found {
            let (part, text) = match found {
                Found::Text(part, text) => (part, text),
                Found::Call(call) if !self.calls_are_text => {
                    pieces.push(Piece::Call(call));
                    continue;
                }
                Found::Call(_) | Found::Late => continue,
            };
            let part = match part {
                Part::Call | Part::CallTag if self.calls_are_text => Part::Speech,
                part => part,
            };
            let (stretch, other) = match part {
                Part::Thought => (&mut self.thought, &mut self.speech),
                _ => (&mut self.speech, &mut self.thought),
            };
            let mut texts = vec![Piece::Aside(other.end())];
            match part {
                Part::Speech | Part::Thought => {
                    let (before, said) = stretch.push(&text);
                    let said = if part == Part::Speech { Piece::Speech(said) } else { Piece::Thought(said) };
                    texts.extend([Piece::Aside(before), said]);
                }
                Part::ThoughtTag | Part::Call | Part::CallTag => {
                    texts.extend([Piece::Aside(stretch.end()), Piece::Aside(text)]);
                }
            }
            pieces.extend(texts.into_iter().filter(|piece| !piece.is_empty()));
        }
        pieces
    }
}

impl Piece {
    fn is_empty(&self) -> bool {
        match self {
            Piece::Speech(text) | Piece::Thought(text) | Piece::Aside(text) => text.is_empty(),
            Piece::Call(_) => false,
        }
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
