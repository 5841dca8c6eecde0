//! Parses a completion into the parts that its client receives: token by token, and again as a
//! complete text.
//!
//! Text that could be the start of a stop string is held back, so that no client receives a stop
//! string.

use std::sync::Arc;

use levade_conversation::RecordedCompletion;
use levade_policy::FinishReason;
use levade_text::{
    Chat, CompletionDelta, CompletionStream, Message, StreamDecoder, ToolCall, ToolSpec,
};

use crate::transcript::{End, message_parts};

/// Incremental parser that splits a completion into text, reasoning and tool calls, and finds stop
/// strings.
pub(crate) struct CompletionParser {
    source: CompletionSource,
    output: ClientOutput,
}

/// Part of a parser that decides what the client receives: counts of the sent text and tool calls,
/// and text that is held back.
#[derive(Clone, Default)]
struct ClientOutput {
    is_text: bool,
    speech: HeldText,
    reasoning: HeldText,
    stops: Vec<String>,
    /// Whether the client receives the stop string that ended the completion.
    keeps_stop: bool,
    /// Prefix of the ids of the completion's tool calls.
    prefix: String,
    calls: usize,
    /// Number of well-formed tool calls so far. The client receives at most `max_calls` of them.
    readable: usize,
    max_calls: Option<usize>,
    /// Whether the client has received text of the message.
    spoken: bool,
    /// Whether the last delta was a malformed tool call.
    broken: bool,
    /// White space at the start of the completion or after text of the message. It belongs to the
    /// text unless reasoning or a tool call follows. `None` after reasoning or a tool call.
    blank: Option<String>,
    tokens: usize,
    reasoning_tokens: usize,
    /// Complete text of a completion whose prompt is not a chat.
    text: String,
}

enum CompletionSource {
    Chat(CompletionStream),
    Text(Arc<Chat>, StreamDecoder),
}

/// Options for parsing the completion of a chat.
#[derive(Clone)]
pub(crate) struct ChatParseOptions {
    pub chat: Arc<Chat>,
    /// Whether the prompt starts the completion's reasoning.
    pub in_reasoning: bool,
    pub tools: Arc<[ToolSpec]>,
    /// Whether tool calls in the completion are not parsed but returned as text of the message.
    pub calls_are_text: bool,
}

impl ChatParseOptions {
    fn stream(&self) -> CompletionStream {
        let mut stream = self.chat.stream(self.in_reasoning, Arc::clone(&self.tools));
        if self.calls_are_text {
            stream.calls_are_text();
        }
        stream
    }

    /// Returns the parts of a recorded completion (text, reasoning, tool calls) in their order.
    fn recorded_deltas(&self, recorded_completion: &RecordedCompletion) -> Vec<CompletionDelta> {
        if recorded_completion.parsed.bare && !self.calls_are_text {
            let reasoning = Some(recorded_completion.reasoning.clone())
                .filter(|reasoning| !reasoning.is_empty());
            return message_parts(&Message {
                reasoning_content: reasoning,
                ..recorded_completion.message()
            });
        }
        self.chat.deltas(
            &recorded_completion.text,
            self.in_reasoning,
            &self.tools,
            self.calls_are_text,
        )
    }
}

impl CompletionParser {
    /// Creates a parser for the completion of a chat. `stops` are the stop strings, and `prefix` is
    /// the prefix of the ids of tool calls.
    pub(crate) fn for_chat(
        parse_options: &ChatParseOptions,
        stops: &[String],
        prefix: &str,
    ) -> Self {
        Self::new(CompletionSource::Chat(parse_options.stream()), stops, prefix)
    }

    /// Creates a parser for a completion that is plain text. `stops` are the stop strings.
    pub(crate) fn for_text(chat: &Arc<Chat>, stops: &[String]) -> Self {
        Self::new(CompletionSource::Text(Arc::clone(chat), StreamDecoder::new()), stops, "")
    }

    fn new(source: CompletionSource, stops: &[String], prefix: &str) -> Self {
        let is_text = matches!(source, CompletionSource::Text(..));
        let stops: Vec<String> = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        let blank = (!is_text).then(String::new);
        let output = ClientOutput {
            is_text,
            stops,
            prefix: prefix.to_owned(),
            blank,
            ..ClientOutput::default()
        };
        CompletionParser { source, output }
    }

    /// Limits the number of tool calls that the client receives to `max`.
    pub(crate) fn set_max_calls(&mut self, max: usize) {
        self.output.max_calls = Some(max);
    }

    /// Makes the client receive the stop string that ends the completion.
    pub(crate) fn keep_stop(&mut self) {
        self.output.keeps_stop = true;
    }

    /// Returns the number of completion tokens so far.
    pub(crate) fn tokens(&self) -> usize {
        self.output.tokens
    }

    /// Parses a token, and returns the deltas that the client can receive now.
    pub(crate) fn push(&mut self, id: u32) -> Vec<CompletionDelta> {
        self.output.tokens += 1;
        let deltas = match &mut self.source {
            CompletionSource::Chat(stream) => stream.push(id),
            CompletionSource::Text(chat, decoder) => {
                vec![CompletionDelta::Speech(decoder.push(chat.tokenizer(), id))]
            }
        };
        let thinks = deltas.iter().any(|delta| matches!(delta, CompletionDelta::Reasoning(_)));
        self.output.reasoning_tokens += usize::from(thinks);
        self.output.emit(deltas)
    }

    /// Ends the completion. Returns the deltas that the client has not received yet, and the
    /// complete completion. `recorded_completion` is the recorded completion of a chat, which is
    /// parsed with `parse_options`. If `parse_options` is `None`, all text is the message.
    pub(crate) fn end(
        self,
        recorded_completion: Option<RecordedCompletion>,
        parse_options: Option<&ChatParseOptions>,
        finish: FinishReason,
    ) -> (Vec<CompletionDelta>, End) {
        let stopped = finish == FinishReason::StopString;
        let mut output = self.output;
        // A complete completion is parsed again: a tag at its end can turn the text before it into
        // reasoning.
        let mut complete = ClientOutput {
            stops: output.stops.clone(),
            prefix: output.prefix.clone(),
            keeps_stop: output.keeps_stop,
            max_calls: output.max_calls,
            blank: Some(String::new()),
            ..ClientOutput::default()
        };
        let last = match self.source {
            CompletionSource::Chat(stream) => stream.finish(),
            CompletionSource::Text(_, decoder) => vec![CompletionDelta::Speech(decoder.finish())],
        };
        let mut rest = output.emit(last);
        let (held_text, mut stopped_by) = output.finish(stopped);
        rest.extend(held_text);
        let parts = recorded_completion.as_ref().zip(parse_options).map(
            |(recorded_completion, parse_options)| {
                let mut parts = complete.emit(parse_options.recorded_deltas(recorded_completion));
                let (held_text, stop) = complete.finish(stopped);
                parts.extend(held_text);
                stopped_by = stop;
                join_parts(parts)
            },
        );
        let completion_text = recorded_completion
            .as_ref()
            .map_or(output.text.as_str(), |recorded_completion| recorded_completion.text.as_str());
        // The stop string is within a tool call or spans tags.
        let stopped_by = stopped_by
            .or_else(|| stopped.then(|| last_stop(&output.stops, completion_text)).flatten());
        let text = match &stopped_by {
            None => completion_text,
            Some(stop) => {
                let kept = if output.keeps_stop { stop.len() } else { 0 };
                &completion_text
                    [..completion_text.len().min(before_stop(completion_text, stop).len() + kept)]
            }
        };
        let text = text.to_owned();
        let parts = parts.unwrap_or_else(|| message_parts(&Message::assistant(text.as_str())));
        let message = to_message(&parts);
        let calls = !message.tool_calls.is_empty();
        let tokens = output.tokens;
        let reasoning_tokens = output.reasoning_tokens;
        let end = End {
            message,
            parts,
            text,
            recorded_completion,
            finish,
            calls,
            stopped_by,
            prompt_tokens: 0,
            tokens,
            reasoning_tokens,
        };
        (rest, end)
    }
}

/// Joins adjacent deltas of one kind, and omits deltas that clients do not receive.
fn join_parts(deltas: Vec<CompletionDelta>) -> Vec<CompletionDelta> {
    let mut parts: Vec<CompletionDelta> = Vec::new();
    for delta in deltas {
        match (parts.last_mut(), delta) {
            (_, CompletionDelta::Aside(_)) => {}
            (Some(CompletionDelta::Speech(last)), CompletionDelta::Speech(text))
            | (Some(CompletionDelta::Reasoning(last)), CompletionDelta::Reasoning(text)) => {
                last.push_str(&text)
            }
            (_, delta) => parts.push(delta),
        }
    }
    parts
}

/// Creates the assistant message that consists of `parts`.
fn to_message(parts: &[CompletionDelta]) -> Message {
    let mut content = String::new();
    let mut reasoning = String::new();
    let mut calls = Vec::new();
    for part in parts {
        match part {
            CompletionDelta::Speech(text) => content.push_str(text),
            CompletionDelta::Reasoning(text) => reasoning.push_str(text),
            CompletionDelta::Call(Ok(call)) => calls.push(call.clone()),
            CompletionDelta::Call(Err(_)) | CompletionDelta::Aside(_) => {}
        }
    }
    let reasoning = Some(reasoning).filter(|reasoning| !reasoning.trim().is_empty());
    Message { reasoning_content: reasoning, ..Message::calls(content, calls) }
}

impl ClientOutput {
    fn emit(&mut self, deltas: Vec<CompletionDelta>) -> Vec<CompletionDelta> {
        let mut output = Vec::with_capacity(deltas.len());
        for delta in deltas {
            match delta {
                CompletionDelta::Speech(text) => {
                    if self.is_text {
                        self.text.push_str(&text);
                    }
                    let blank = self.blank.replace(String::new()).unwrap_or_default();
                    let line = if self.broken && !text.starts_with('\n') { "\n" } else { "" };
                    self.broken = false;
                    self.emit_text(&format!("{blank}{line}{text}"), &mut output);
                }
                CompletionDelta::Call(Ok(call)) => {
                    self.flush(&mut output);
                    let id = format!("{}{}", self.prefix, self.calls);
                    self.calls += 1;
                    self.readable += 1;
                    if self.max_calls.is_none_or(|max| self.readable <= max) {
                        output.push(CompletionDelta::Call(Ok(ToolCall { id, ..call })));
                    }
                }
                // A malformed tool call becomes text, on lines of its own.
                CompletionDelta::Call(Err(malformed)) => {
                    self.blank = None;
                    self.calls += 1;
                    let line = if self.spoken { "\n" } else { "" };
                    self.broken = true;
                    self.emit_text(&format!("{line}{}", malformed.raw), &mut output);
                }
                CompletionDelta::Reasoning(text) => {
                    self.blank = None;
                    self.speech.flush(CompletionDelta::Speech, &mut output);
                    let text = self.reasoning.push(&text, &self.stops);
                    output.extend(
                        Some(text).filter(|text| !text.is_empty()).map(CompletionDelta::Reasoning),
                    );
                }
                CompletionDelta::Aside(text) => {
                    match &mut self.blank {
                        Some(blank) if text.trim().is_empty() => blank.push_str(&text),
                        blank => *blank = None,
                    }
                    // Clients do not receive this delta, but it ends the part that earlier tokens
                    // can belong to.
                    output.push(CompletionDelta::Aside(text));
                }
            }
        }
        output
    }

    /// Appends text of the message to `output`, except for an end that can start a stop string.
    fn emit_text(&mut self, text: &str, output: &mut Vec<CompletionDelta>) {
        self.reasoning.flush(CompletionDelta::Reasoning, output);
        self.spoken |= !text.is_empty();
        let text = self.speech.push(text, &self.stops);
        output.extend(Some(text).filter(|text| !text.is_empty()).map(CompletionDelta::Speech));
    }

    /// Appends the text that was held back to `output`, because a tool call follows.
    fn flush(&mut self, output: &mut Vec<CompletionDelta>) {
        (self.blank, self.broken) = (None, false);
        self.reasoning.flush(CompletionDelta::Reasoning, output);
        self.speech.flush(CompletionDelta::Speech, output);
    }

    /// Ends the completion. Returns the text that was held back, and the stop string that ended the
    /// completion if the message or the reasoning contains it.
    fn finish(&mut self, stopped: bool) -> (Vec<CompletionDelta>, Option<String>) {
        let mut rest = Vec::new();
        if let Some(blank) = self.blank.take().filter(|blank| !blank.is_empty()) {
            self.emit_text(&blank, &mut rest);
        }
        let mut stopped_by = None;
        let held_text = [
            (&mut self.reasoning, CompletionDelta::Reasoning as fn(String) -> CompletionDelta),
            (&mut self.speech, CompletionDelta::Speech),
        ];
        for (held_text, kind) in held_text {
            let (mut text, stop) = held_text.end(&self.stops, stopped);
            text += stop.as_deref().filter(|_| self.keeps_stop).unwrap_or_default();
            stopped_by = stop.or(stopped_by);
            rest.extend(Some(text).filter(|text| !text.is_empty()).map(kind));
        }
        (rest, stopped_by)
    }
}

/// Returns the stop string whose last occurrence in `text` ends last. If `text` contains no stop
/// string, returns the only stop string, or `None` if there are several.
fn last_stop(stops: &[String], text: &str) -> Option<String> {
    let ends =
        stops.iter().filter_map(|stop| Some((text.rfind(stop.as_str())? + stop.len(), stop)));
    ends.max_by_key(|(end, stop)| (*end, stop.len()))
        .map(|(_, stop)| stop)
        .or_else(|| stops.first().filter(|_| stops.len() == 1))
        .cloned()
}

/// Returns the part of `text` before the stop string that ended the completion, or all of `text` if
/// it does not contain the stop string. The last occurrence counts. Of several overlapping
/// occurrences the first counts, because one token completed all of them and ended the completion.
pub fn before_stop<'a>(text: &'a str, stop: &str) -> &'a str {
    let Some(mut at) = text.rfind(stop) else { return text };
    let last = stop.chars().next_back().map_or(0, char::len_utf8);
    while let Some(earlier) = text[..at + stop.len() - last].rfind(stop)
        && earlier + stop.len() > at
    {
        at = earlier;
    }
    &text[..at]
}

/// Text that is held back because its end can be the start of a stop string.
#[derive(Debug, Clone, Default)]
struct HeldText(String);

impl HeldText {
    /// Appends a text. Removes and returns the part in which no stop string can start.
    fn push(&mut self, text: &str, stops: &[String]) -> String {
        if stops.is_empty() {
            return text.to_owned();
        }
        let max_length = stops.iter().map(String::len).max().unwrap_or(0);
        // If several stop strings end in the new text, the first one ends the completion.
        let earliest = (self.0.len() + 1).saturating_sub(max_length);
        self.0.push_str(text);
        let stop_start =
            (earliest..self.0.len()).filter(|&at| self.0.is_char_boundary(at)).find(|&at| {
                let rest = &self.0[at..];
                stops.iter().any(|stop| stop.starts_with(rest) || rest.starts_with(stop.as_str()))
            });
        self.0.drain(..stop_start.unwrap_or(self.0.len())).collect()
    }

    /// Appends all held text to `output`, because text of another kind follows.
    fn flush(&mut self, kind: fn(String) -> CompletionDelta, output: &mut Vec<CompletionDelta>) {
        output.extend(Some(std::mem::take(&mut self.0)).filter(|text| !text.is_empty()).map(kind));
    }

    /// Removes and returns the text that was held back. If a stop string ended the completion,
    /// returns the text before this stop string, and the stop string.
    fn end(&mut self, stops: &[String], stopped: bool) -> (String, Option<String>) {
        let rest = std::mem::take(&mut self.0);
        if !stopped {
            return (rest, None);
        }
        let found = stops.iter().filter_map(|stop| Some((rest.find(stop.as_str())?, stop)));
        match found.min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len()))) {
            Some((at, stop)) => (rest[..at].to_owned(), Some(stop.clone())),
            None => (rest, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn no_part_of_stop_string_is_sent() {
        let stops = ["STOP".to_owned(), "\n\n".to_owned()];
        let mut held_text = HeldText::default();
        let output: Vec<String> =
            ["ab S", "T", "x\n", "c ST", "OP"].iter().map(|t| held_text.push(t, &stops)).collect();
        assert_eq!(output, ["ab ", "", "STx", "\nc ", ""]);
        assert_eq!(held_text.end(&stops, true), (String::new(), Some("STOP".into())));
        let mut held_text = HeldText::default();
        assert_eq!(
            (held_text.push("a", &stops), held_text.push("\n\n\n", &stops)),
            ("a".into(), String::new())
        );
        assert_eq!(held_text.end(&stops, true), (String::new(), Some("\n\n".into())));
        let mut held_text = HeldText::default();
        assert_eq!(held_text.push("so ST", &stops), "so ");
        assert_eq!(held_text.end(&stops, false), ("ST".into(), None));
    }

    #[test]
    fn held_stop_string_is_released_if_completion_continues() {
        let stops = ["ab".to_owned()];
        let mut held_text = HeldText::default();
        assert_eq!(held_text.push("xab", &stops), "x");
        assert_eq!(held_text.push("c", &stops), "abc");
        assert_eq!(held_text.end(&stops, false), (String::new(), None));
    }

    #[test]
    fn before_stop_takes_first_of_overlapping_occurrences() {
        for (text, stop, want) in [
            ("a\n\n\n", "\n\n", "a"),
            ("a\n\n\n\n\nb", "\n\n", "a"),
            // Earlier occurrences came before the minimum number of tokens.
            ("x\n\ny\n\n", "\n\n", "x\n\ny"),
            ("éaéaé", "éaé", ""),
            ("none", "STOP", "none"),
            ("whole", "", "whole"),
        ] {
            assert_eq!(before_stop(text, stop), want, "{text:?}");
        }
    }

    #[test]
    fn last_stop_prefers_latest_end_then_longest() {
        let last = |stops: &[&str], text: &str| {
            let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
            last_stop(&stops, text)
        };
        for (stops, text, want) in [
            // A long stop string that starts first can end last.
            (&["bcd", "c"][..], "abcd", Some("bcd")),
            (&["c", "bc"], "abc", Some("bc")),
            (&["a", "b"], "b a", Some("a")),
            (&["aaaa", "b"], "aaaab", Some("b")),
            (&["aaaa", "b"], "xxaaaaxb", Some("b")),
            (&["x"], "abc", Some("x")),
            (&["x", "y"], "abc", None),
            (&[], "abc", None),
        ] {
            assert_eq!(last(stops, text).as_deref(), want, "{stops:?} {text:?}");
        }
    }

    proptest! {
        #[test]
        fn completion_parser_emits_complete_text(
            parts in proptest::collection::vec("[abé ]{0,4}", 0..8),
            stop in "[abé]{1,3}",
        ) {
            let whole: String = parts.concat();
            prop_assume!(!whole.contains(&stop));
            let stops = [stop];
            let mut buffer = HeldText::default();
            let mut streamed: String = parts.iter().map(|part| buffer.push(part, &stops)).collect();
            streamed += &buffer.end(&stops, false).0;
            prop_assert_eq!(streamed, whole);
        }
    }
}
