//! Decodes and parses completions while their tokens arrive.

use std::sync::Arc;

use levade_policy::TokenBytes;

use crate::completion_parser::{CompletionParser, ParserEvent, SpanKind, collect_reasoning};
use crate::{Chat, MalformedCall, Tokenizer, ToolCall, ToolSpec};

/// Decodes the tokens of a completion one by one to text. Never returns an incomplete character.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    /// Bytes of the last character, which is still incomplete. Empty if there is none.
    pending: Vec<u8>,
    keep_special: bool,
}

impl StreamDecoder {
    /// Creates a decoder that omits special tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a decoder that prints special tokens by name.
    pub fn with_special() -> Self {
        StreamDecoder { keep_special: true, ..Self::default() }
    }

    /// Returns the text that becomes complete with the token `id`. The text is often empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.push_bytes(if self.keep_special {
            tokenizer.bytes_with_special(id)
        } else {
            tokenizer.token_bytes(id).unwrap_or_default()
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

    /// Returns the remaining text at the end of the completion: U+FFFD for an incomplete last
    /// character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// A delta of a streamed completion: new text of one kind, or a tool call.
#[derive(Debug, Clone, PartialEq)]
pub enum CompletionDelta {
    /// Content of the assistant message, which is sent to the client.
    Speech(String),
    /// Reasoning of the model, without its tags.
    Reasoning(String),
    /// Text of tags and calls, and white space around stretches of content and reasoning.
    Aside(String),
    /// A complete tool call. Its text has already arrived as [`CompletionDelta::Aside`].
    Call(Result<ToolCall, MalformedCall>),
}

/// Parses a completion into reasoning, content and tool calls while it is sampled.
///
/// The concatenated [`CompletionDelta::Speech`] deltas equal
/// [`ParsedCompletion::content`](crate::ParsedCompletion::content), the concatenated
/// [`CompletionDelta::Reasoning`] deltas equal [`Chat::reasoning`], and the calls equal
/// [`ParsedCompletion::calls`](crate::ParsedCompletion::calls), in order and to the character. A
/// stretch is an uninterrupted run of content or of reasoning. Each stretch is trimmed: white space
/// that may end a stretch is held back until more text arrives. A later stretch of the same kind
/// starts with a line break. Without these line breaks, all deltas concatenated are the text of the
/// completion.
///
/// Exceptions:
///
/// - A tag that closes reasoning which was never opened arrives as an aside. Text that already
///   arrived as content or as a call cannot be retracted, although [`Chat::parse`] and
///   [`Chat::deltas`] count it as reasoning.
/// - Calls without tags, which `bare_calls` enables, arrive as content.
///
/// The cost depends only on the length of the completion, not on the number of its tokens.
#[derive(Debug, Clone)]
pub struct CompletionStream {
    chat: Arc<Chat>,
    tools: Arc<[ToolSpec]>,
    decoder: StreamDecoder,
    parser: CompletionParser,
    speech: StretchTrimmer,
    reasoning: StretchTrimmer,
    /// Whether the text of tool calls is reported as content.
    calls_are_text: bool,
}

/// Trims the text of one kind, which arrives in separate stretches.
#[derive(Debug, Clone, Default)]
struct StretchTrimmer {
    /// Whether an earlier stretch contained text.
    continues: bool,
    /// Whether the current stretch has contained text so far.
    open: bool,
    /// White space that belongs to the stretch if more text follows.
    pending_space: String,
}

impl StretchTrimmer {
    /// Appends `text` to the current stretch. Returns the white space before the stretch's first
    /// word, and the text that is now final.
    fn push_text(&mut self, text: &str) -> (String, String) {
        let mut before = String::new();
        let mut output = String::new();
        let words = if self.open { text } else { text.trim_start() };
        before.push_str(&text[..text.len() - words.len()]);
        let until = words.trim_end();
        if !until.is_empty() {
            if !self.open && self.continues {
                output.push('\n');
            }
            (self.open, self.continues) = (true, true);
            output.push_str(&self.pending_space);
            output.push_str(until);
            self.pending_space.clear();
        }
        self.pending_space.push_str(&words[until.len()..]);
        (before, output)
    }

    /// Ends the current stretch, and returns its trailing white space, which is not part of the
    /// stretch.
    fn end_stretch(&mut self) -> String {
        self.open = false;
        std::mem::take(&mut self.pending_space)
    }
}

impl Chat {
    /// Creates a parser for a streamed completion. `in_reasoning` is whether the prompt has already
    /// opened the reasoning.
    pub fn stream(
        self: &Arc<Self>,
        in_reasoning: bool,
        tools: Arc<[ToolSpec]>,
    ) -> CompletionStream {
        CompletionStream::new(self.clone(), tools, in_reasoning)
    }

    /// Converts a complete completion to deltas, in the order in which they were written.
    ///
    /// Content, reasoning and calls are those of [`Chat::parse`] and [`Chat::reasoning`]: if a tag
    /// closes reasoning that was never opened, all text before the tag is reasoning.
    /// `calls_are_text` reports the text of calls as content.
    pub fn deltas(
        self: &Arc<Self>,
        completion: &str,
        in_reasoning: bool,
        tools: &Arc<[ToolSpec]>,
        calls_are_text: bool,
    ) -> Vec<CompletionDelta> {
        let (mut found, _) =
            CompletionParser::parse_complete(self.tags(), completion, in_reasoning, tools);
        let mut stream = CompletionStream::new(self.clone(), tools.clone(), in_reasoning);
        if calls_are_text {
            stream.calls_are_text();
        }
        let mut deltas = Vec::new();
        if let Some(late) = found.iter().rposition(|found| *found == ParserEvent::Late) {
            let rest = found.split_off(late + 1);
            let reasoning = collect_reasoning(&found);
            if !reasoning.is_empty() {
                stream.reasoning.continues = true;
                deltas.push(CompletionDelta::Reasoning(reasoning));
            }
            found = rest;
        }
        deltas.extend(stream.convert_events(found));
        deltas.extend(stream.end_stretches());
        deltas
    }
}

impl CompletionStream {
    fn new(chat: Arc<Chat>, tools: Arc<[ToolSpec]>, in_reasoning: bool) -> Self {
        CompletionStream {
            chat,
            tools,
            decoder: StreamDecoder::new(),
            parser: CompletionParser::new(in_reasoning),
            speech: StretchTrimmer::default(),
            reasoning: StretchTrimmer::default(),
            calls_are_text: false,
        }
    }

    /// Makes the parser report the text of tool calls as content, and no calls. A format that
    /// writes content in tags of its own keeps its calls.
    pub fn calls_are_text(&mut self) {
        self.calls_are_text = self.chat.tags().syntax.syntax_tags().reasoning_tags.is_none();
    }

    /// Returns the deltas that become complete with the token `id`. The list is often empty.
    pub fn push(&mut self, id: u32) -> Vec<CompletionDelta> {
        let text = self.decoder.push_bytes(self.chat.completion_bytes(id));
        self.read_text(&text)
    }

    /// Returns the remaining deltas at the end of the completion.
    pub fn finish(mut self) -> Vec<CompletionDelta> {
        let text = std::mem::take(&mut self.decoder).finish();
        let mut deltas = self.read_text(&text);
        let mut found = Vec::new();
        self.parser.finish(self.chat.tags(), &self.tools, &mut found);
        deltas.extend(self.convert_events(found));
        deltas.extend(self.end_stretches());
        deltas
    }

    /// Ends the current stretches of content and reasoning, and returns the white space that
    /// belongs to neither.
    fn end_stretches(&mut self) -> impl Iterator<Item = CompletionDelta> {
        let rest = [self.speech.end_stretch(), self.reasoning.end_stretch()];
        rest.into_iter().filter(|text| !text.is_empty()).map(CompletionDelta::Aside)
    }

    fn read_text(&mut self, text: &str) -> Vec<CompletionDelta> {
        if text.is_empty() {
            return Vec::new();
        }
        let mut found = Vec::new();
        self.parser.push(self.chat.tags(), &self.tools, text, &mut found);
        self.convert_events(found)
    }

    fn convert_events(&mut self, found: Vec<ParserEvent>) -> Vec<CompletionDelta> {
        let mut deltas = Vec::new();
        for found in found {
            let (part, text) = match found {
                ParserEvent::Text(part, text) => (part, text),
                ParserEvent::Call(call) if !self.calls_are_text => {
                    deltas.push(CompletionDelta::Call(call));
                    continue;
                }
                ParserEvent::Call(_) | ParserEvent::Late => continue,
            };
            let part = match part {
                SpanKind::Call | SpanKind::CallTag if self.calls_are_text => SpanKind::Speech,
                part => part,
            };
            let (stretch, other) = match part {
                SpanKind::Reasoning => (&mut self.reasoning, &mut self.speech),
                _ => (&mut self.speech, &mut self.reasoning),
            };
            let mut texts = vec![CompletionDelta::Aside(other.end_stretch())];
            match part {
                SpanKind::Speech | SpanKind::Reasoning => {
                    let (before, message) = stretch.push_text(&text);
                    let message = if part == SpanKind::Speech {
                        CompletionDelta::Speech(message)
                    } else {
                        CompletionDelta::Reasoning(message)
                    };
                    texts.extend([CompletionDelta::Aside(before), message]);
                }
                SpanKind::ReasoningTag | SpanKind::Call | SpanKind::CallTag => {
                    texts.extend([
                        CompletionDelta::Aside(stretch.end_stretch()),
                        CompletionDelta::Aside(text),
                    ]);
                }
            }
            deltas.extend(texts.into_iter().filter(|delta| !delta.is_empty()));
        }
        deltas
    }
}

impl CompletionDelta {
    fn is_empty(&self) -> bool {
        match self {
            CompletionDelta::Speech(text)
            | CompletionDelta::Reasoning(text)
            | CompletionDelta::Aside(text) => text.is_empty(),
            CompletionDelta::Call(_) => false,
        }
    }
}

/// Returns whether invalid UTF-8 bytes are the start of a character that more bytes could complete.
fn could_continue(bytes: &[u8]) -> bool {
    !bytes.is_empty()
        && matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{IM_END, tiny_tokenizer};

    #[test]
    fn stream_decoder_waits_for_complete_characters() {
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
        fn stream_decoder_matches_decode(ids in proptest::collection::vec(0u32..265, 0..40)) {
            let tokenizer = tiny_tokenizer().unwrap();
            let mut stream = StreamDecoder::new();
            let mut text: String = ids.iter().map(|&id| stream.push(&tokenizer, id)).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, tokenizer.decode(&ids));
        }
    }
}
