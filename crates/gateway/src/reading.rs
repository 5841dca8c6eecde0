//! A reply as its client is told it, while it is drawn and once it has ended.
//!
//! Text from which a stop string could still grow is held back, so that no client sees one.

use std::sync::Arc;

use dressage_conversation::Reply;
use dressage_policy::FinishReason;
use dressage_text::{Chat, Message, Piece, ReplyStream, StreamDecoder, ToolCall, ToolSpec};

use crate::transcript::End;

/// Reads a reply token by token.
pub(crate) struct Reading {
    source: Source,
    told: Told,
}

/// What a client is told, and has been told.
struct Told {
    is_text: bool,
    speech: Held,
    stops: Vec<String>,
    /// Whether the stop string that ends the reply is told of.
    keeps_stop: bool,
    /// Beginning of the ids of its calls.
    prefix: String,
    calls: usize,
    /// Calls that can be read, of which so many are told.
    readable: usize,
    most_calls: usize,
    tokens: usize,
    thought_tokens: usize,
    /// All text of a reply that is no chat.
    text: String,
}

enum Source {
    Chat(ReplyStream),
    Text(Arc<Chat>, StreamDecoder),
}

impl Reading {
    /// Reads a turn of a chat.
    pub(crate) fn chat(
        chat: &Arc<Chat>,
        in_thought: bool,
        tools: &Arc<[ToolSpec]>,
        stops: &[String],
        prefix: &str,
    ) -> Self {
        Self::new(Source::Chat(chat.stream(in_thought, Arc::clone(tools))), stops, prefix)
    }

    /// Reads a text.
    pub(crate) fn text(chat: &Arc<Chat>, stops: &[String]) -> Self {
        Self::new(Source::Text(Arc::clone(chat), StreamDecoder::new()), stops, "")
    }

    fn new(source: Source, stops: &[String], prefix: &str) -> Self {
        let stops: Vec<String> = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        let told = Told {
            is_text: matches!(source, Source::Text(..)),
            speech: Held::default(),
            stops,
            keeps_stop: false,
            prefix: prefix.to_owned(),
            calls: 0,
            readable: 0,
            most_calls: usize::MAX,
            tokens: 0,
            thought_tokens: 0,
            text: String::new(),
        };
        Reading { source, told }
    }

    /// Tells of so many calls only.
    pub(crate) fn most_calls(&mut self, most: usize) {
        self.told.most_calls = most;
    }

    /// Tells of the stop string that ends the reply, too.
    pub(crate) fn keep_stop(&mut self) {
        self.told.keeps_stop = true;
    }

    /// Number of tokens so far.
    pub(crate) fn tokens(&self) -> usize {
        self.told.tokens
    }

    /// Reads a token; gives what a client may be told.
    pub(crate) fn push(&mut self, id: u32) -> Vec<Piece> {
        self.told.tokens += 1;
        let pieces = match &mut self.source {
            Source::Chat(stream) => stream.push(id),
            Source::Text(chat, decoder) => vec![Piece::Speech(decoder.push(chat.tokenizer(), id))],
        };
        let thinks = pieces.iter().any(|piece| matches!(piece, Piece::Thought(_)));
        self.told.thought_tokens += usize::from(thinks);
        self.told.tell(pieces)
    }

    /// Ends the reading: what a client has not been told yet, and the reply as a whole. `reply` is the
    /// recorded turn of a chat; with `as_text` calls are not told of as such.
    pub(crate) fn end(self, reply: Option<Reply>, finish: FinishReason, as_text: bool) -> (Vec<Piece>, End) {
        let last = match self.source {
            Source::Chat(stream) => stream.finish(),
            Source::Text(_, decoder) => vec![Piece::Speech(decoder.finish())],
        };
        let mut told = self.told;
        let mut rest = told.tell(last);
        let stopped = finish == FinishReason::StopString;
        let is_held = stopped && told.stops.iter().any(|stop| told.speech.0.contains(stop.as_str()));
        let (mut held, stopped_by) = told.speech.end(&told.stops, stopped);
        // Not of one that stands in a thought or a call.
        held += stopped_by.as_deref().filter(|_| told.keeps_stop && is_held).unwrap_or_default();
        if !held.is_empty() {
            rest.push(Piece::Speech(held));
        }
        let cut = |text: &str| {
            let Some(stop) = &stopped_by else { return text.to_owned() };
            let kept = if told.keeps_stop { stop.len() } else { 0 };
            text[..text.len().min(before(text, stop).len() + kept)].to_owned()
        };
        let (mut message, text) = match &reply {
            Some(reply) if as_text => (Message::assistant(cut(&reply.said)), cut(&reply.said)),
            Some(reply) => {
                let told = reply.message();
                (Message { content: cut(&told.content).into(), ..told }, cut(&reply.said))
            }
            None => {
                let text = cut(&told.text);
                (Message::assistant(text.as_str()), text)
            }
        };
        message.tool_calls.truncate(told.most_calls);
        let thought = reply.as_ref().map(|reply| reply.thought.trim()).unwrap_or_default();
        message.reasoning_content = (!thought.is_empty() && !as_text).then(|| thought.to_owned());
        let calls = !message.tool_calls.is_empty();
        let (tokens, thought_tokens) = (told.tokens, told.thought_tokens);
        (rest, End { message, text, finish, calls, stopped_by, prompt_tokens: 0, tokens, thought_tokens })
    }
}

impl Told {
    fn tell(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        let mut told = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match piece {
                Piece::Speech(text) => {
                    if self.is_text {
                        self.text.push_str(&text);
                    }
                    let text = self.speech.push(&text, &self.stops);
                    if !text.is_empty() {
                        told.push(Piece::Speech(text));
                    }
                }
                Piece::Call(Ok(call)) => {
                    let id = format!("{}{}", self.prefix, self.calls);
                    self.calls += 1;
                    self.readable += 1;
                    if self.readable <= self.most_calls {
                        told.push(Piece::Call(Ok(ToolCall { id, ..call })));
                    }
                }
                // A call that cannot be read is text.
                Piece::Call(Err(malformed)) => {
                    self.calls += 1;
                    told.push(Piece::Speech(malformed.raw));
                }
                Piece::Thought(text) if !text.is_empty() => told.push(Piece::Thought(text)),
                // No client is told of it, but it ends what tokens before it may belong to.
                Piece::Aside(text) => told.push(Piece::Aside(text)),
                Piece::Thought(_) => {}
            }
        }
        told
    }
}

/// The part of a text before the stop string that ended it; all of it where the string is not there. That is
/// the last one, or the first of several that overlap: a token ended the reply that completed all of them.
pub(crate) fn before<'a>(text: &'a str, stop: &str) -> &'a str {
    let Some(mut at) = text.rfind(stop) else { return text };
    let last = stop.chars().next_back().map_or(0, char::len_utf8);
    while let Some(earlier) = text[..at + stop.len() - last].rfind(stop)
        && earlier + stop.len() > at
    {
        at = earlier;
    }
    &text[..at]
}

/// Text held back because a stop string may be under way at its end.
#[derive(Debug, Default)]
struct Held(String);

impl Held {
    /// Adds text; gives what no stop string can begin in.
    fn push(&mut self, text: &str, stops: &[String]) -> String {
        if stops.is_empty() {
            return text.to_owned();
        }
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        // Of all that end in what is new, the first is the one to stop at.
        let earliest = (self.0.len() + 1).saturating_sub(longest);
        self.0.push_str(text);
        let begun = (earliest..self.0.len()).filter(|&at| self.0.is_char_boundary(at)).find(|&at| {
            let rest = &self.0[at..];
            stops.iter().any(|stop| stop.starts_with(rest) || rest.starts_with(stop.as_str()))
        });
        self.0.drain(..begun.unwrap_or(self.0.len())).collect()
    }

    /// The rest, up to the stop string where one has ended the reply, and which that was.
    fn end(&mut self, stops: &[String], stopped: bool) -> (String, Option<String>) {
        let rest = std::mem::take(&mut self.0);
        if !stopped {
            return (rest, None);
        }
        let found = stops.iter().filter_map(|stop| Some((rest.find(stop.as_str())?, stop)));
        match found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len()))) {
            Some((at, stop)) => (rest[..at].to_owned(), Some(stop.clone())),
            // It stands in a thought or a call, or across their tags.
            None => (rest, stops.first().filter(|_| stops.len() == 1).cloned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_part_of_a_stop_string_is_told() {
        let stops = ["STOP".to_owned(), "\n\n".to_owned()];
        let mut held = Held::default();
        let told: Vec<String> =
            ["ab S", "T", "x\n", "c ST", "OP"].iter().map(|t| held.push(t, &stops)).collect();
        assert_eq!(told, ["ab ", "", "STx", "\nc ", ""]);
        assert_eq!(held.end(&stops, true), (String::new(), Some("STOP".into())));
        let mut held = Held::default();
        assert_eq!((held.push("a", &stops), held.push("\n\n\n", &stops)), ("a".into(), String::new()));
        assert_eq!(held.end(&stops, true), (String::new(), Some("\n\n".into())));
        let mut held = Held::default();
        assert_eq!(held.push("so ST", &stops), "so ");
        assert_eq!(held.end(&stops, false), ("ST".into(), None));
    }

    #[test]
    fn of_stop_strings_that_overlap_the_first_counts() {
        for (text, stop, want) in [
            ("a\n\n\n", "\n\n", "a"),
            ("a\n\n\n\n\nb", "\n\n", "a"),
            // Those before came when there were too few tokens.
            ("x\n\ny\n\n", "\n\n", "x\n\ny"),
            ("éaéaé", "éaé", ""),
            ("none", "STOP", "none"),
            ("whole", "", "whole"),
        ] {
            assert_eq!(before(text, stop), want, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_is_lost(parts in proptest::collection::vec("[abé ]{0,4}", 0..8), stop in "[abé]{1,3}") {
            let whole: String = parts.concat();
            prop_assume!(!whole.contains(&stop));
            let stops = [stop];
            let mut held = Held::default();
            let mut told: String = parts.iter().map(|part| held.push(part, &stops)).collect();
            told += &held.end(&stops, false).0;
            prop_assert_eq!(told, whole);
        }
    }
}
