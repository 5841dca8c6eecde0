//! A toolbox whose long tool results are truncated.

use std::sync::Arc;

use async_trait::async_trait;
use levade_text::{Chat, ContentPart};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::middleware::{MiddlewareToolbox, ToolMiddleware};
use super::{Session, ToolOutput, Toolbox};

/// Initial estimate of the number of bytes per token when looking for a token boundary. Most tokens
/// are shorter.
const BYTES_PER_TOKEN: usize = 8;

/// Number of tokens at the edge of an excerpt that can differ from the tokenization of the full
/// text.
const EDGE: usize = 16;

/// Part of a long tool result that truncation leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OmittedPart {
    /// Truncation leaves out the start and keeps the end.
    Left,
    /// Truncation leaves out the end and keeps the start.
    Right,
    /// Truncation leaves out the middle and keeps equal parts of the start and the end.
    #[default]
    Middle,
}

/// Limits on the length of a tool result. A line replaces the omitted text and states its length;
/// this line does not count toward the limits.
#[derive(Clone, Default)]
pub struct ResultTruncation {
    /// Maximum number of characters of a tool result. `None` means no limit.
    pub characters: Option<usize>,
    /// Maximum number of tokens of a tool result, with the tokenizer of the model. `None` means no
    /// limit.
    pub tokens: Option<(usize, Arc<Chat>)>,
    /// Part of the tool result that is left out if the result is too long.
    pub side: OmittedPart,
}

impl ResultTruncation {
    /// Returns the truncated text, or `None` if the text is within the limits. The running time
    /// depends on the kept text, not on the omitted text.
    pub fn truncate(&self, text: &str) -> Option<String> {
        // Number of bytes to keep from the start and from the end.
        let mut head = text.len();
        let mut tail = text.len();
        if let Some(max) = self.characters {
            let (first, last) = self.halves(max);
            (head, tail) =
                (head.min(first_characters(text, first)), tail.min(last_characters(text, last)));
        }
        if let Some((max, chat)) = &self.tokens
            && prefix_length(text, *max, chat).is_some()
        {
            let (first, last) = self.halves(*max);
            head = head.min(prefix_length(text, first, chat).unwrap_or(text.len()));
            tail = tail.min(suffix_length(text, last, chat));
        }
        if head + tail >= text.len() {
            return None;
        }
        let omitted = text[head..text.len() - tail].chars().count();
        let before = &text[..head];
        let after = &text[text.len() - tail..];
        let first = line_break(!before.is_empty() && !before.ends_with('\n'));
        let last = line_break(!after.is_empty());
        let line = format!("[… {omitted} characters are left out here …]");
        Some(format!("{before}{first}{line}{last}{after}"))
    }

    fn halves(&self, max: usize) -> (usize, usize) {
        match self.side {
            OmittedPart::Left => (0, max),
            OmittedPart::Right => (max, 0),
            OmittedPart::Middle => (max - max / 2, max / 2),
        }
    }

    /// Truncates the text of a tool result. The text parts are merged into one part, which comes
    /// first.
    fn truncate_output(&self, mut output: ToolOutput) -> ToolOutput {
        let mut text = String::new();
        for part in &output.parts {
            if let ContentPart::Text(more) = part {
                text.push_str(more);
            }
        }
        if let Some(shortened) = self.truncate(&text) {
            output.parts.retain(|part| !matches!(part, ContentPart::Text(_)));
            output.parts.insert(0, ContentPart::Text(shortened));
        }
        output
    }
}

fn line_break(is_separate: bool) -> &'static str {
    if is_separate { "\n" } else { "" }
}

/// Returns the length, in bytes, of the first `count` characters of a text.
fn first_characters(text: &str, count: usize) -> usize {
    text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)
}

/// Returns the length, in bytes, of the last `count` characters of a text.
fn last_characters(text: &str, count: usize) -> usize {
    let Some(before) = count.checked_sub(1) else { return 0 };
    text.char_indices().nth_back(before).map_or(text.len(), |(at, _)| text.len() - at)
}

/// Returns the length, in bytes, of the first `count` tokens of a text, or `None` if the text has
/// at most `count` tokens.
fn prefix_length(text: &str, count: usize, chat: &Chat) -> Option<usize> {
    let tokenizer = chat.tokenizer();
    let mut read = BYTES_PER_TOKEN * (count + EDGE);
    loop {
        let end = text.floor_char_boundary(read);
        let ids = tokenizer.encode(&text[..end]);
        if end < text.len() && ids.len() < count + EDGE {
            read *= 2;
            continue;
        }
        let kept = ids.get(..count).filter(|_| ids.len() > count)?;
        return Some(common_prefix_length(&tokenizer.decode(kept), text));
    }
}

/// Returns the length, in bytes, of the last `count` tokens of a text.
fn suffix_length(text: &str, count: usize, chat: &Chat) -> usize {
    let tokenizer = chat.tokenizer();
    let mut read = BYTES_PER_TOKEN * (count + EDGE);
    loop {
        let start = text.ceil_char_boundary(text.len().saturating_sub(read));
        let ids = tokenizer.encode(&text[start..]);
        if start > 0 && ids.len() < count + EDGE {
            read *= 2;
            continue;
        }
        let kept = tokenizer.decode(&ids[ids.len().saturating_sub(count)..]);
        return common_suffix_length(&kept, text);
    }
}

/// Returns the length of the common prefix of two texts, in bytes, at a character boundary. The
/// texts can differ because a token may end within a character, and because decoding may not
/// reproduce the encoded characters.
fn common_prefix_length(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// Returns the length of the common suffix of two texts, in bytes, at a character boundary.
fn common_suffix_length(a: &str, b: &str) -> usize {
    a.chars()
        .rev()
        .zip(b.chars().rev())
        .take_while(|(a, b)| a == b)
        .map(|(a, _)| a.len_utf8())
        .sum()
}

/// Toolbox whose long tool results are truncated.
pub type TruncatingToolbox = MiddlewareToolbox<ResultTruncation>;

impl TruncatingToolbox {
    /// Wraps `toolbox` so that its tool results are truncated to the limits in `truncation`.
    pub fn new(toolbox: Arc<dyn Toolbox>, truncation: ResultTruncation) -> Self {
        MiddlewareToolbox::with_middleware(toolbox, truncation)
    }
}

#[async_trait]
impl ToolMiddleware for ResultTruncation {
    async fn call(
        &self,
        session: &dyn Session,
        tool: &str,
        arguments: &Map<String, Value>,
    ) -> ToolOutput {
        self.truncate_output(session.call(tool, arguments).await)
    }
}

#[cfg(test)]
#[path = "truncation_tests.rs"]
mod tests;
