//! A toolbox whose long answers are shortened.

use std::sync::Arc;

use async_trait::async_trait;
use levade_text::{Chat, ContentPart};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::wrapped::{Around, Wrapped};
use super::{Session, ToolOutput, Toolbox};

/// Bytes that are read at first for each token that may stay, with some to spare: most tokens are shorter.
const BYTES_A_TOKEN: usize = 8;

/// Tokens at the edge of an excerpt that may be others than in the whole text, which goes on there.
const EDGE: usize = 16;

/// The side of a long answer that is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The beginning: its end stays.
    Left,
    /// The end: its beginning stays.
    Right,
    /// The middle: half of what stays is its beginning, half its end.
    #[default]
    Middle,
}

/// How much of an answer a model reads. A line in place of what is left out says how much that is; it comes
/// in addition.
#[derive(Clone, Default)]
pub struct Cut {
    /// Most characters.
    pub characters: Option<usize>,
    /// Most tokens, with the model's tokenizer.
    pub tokens: Option<(usize, Arc<Chat>)>,
    /// The side that is left out.
    pub side: Side,
}

impl Cut {
    /// The text, shortened; `None` where it is short enough. Takes time for what stays, not for the rest.
    pub fn of(&self, text: &str) -> Option<String> {
        let halves = |most: usize| match self.side {
            Side::Left => (0, most),
            Side::Right => (most, 0),
            Side::Middle => (most - most / 2, most / 2),
        };
        // What stays: from the beginning so many bytes, from the end so many.
        let (mut head, mut tail) = (text.len(), text.len());
        if let Some(most) = self.characters {
            let (first, last) = halves(most);
            (head, tail) = (head.min(first_characters(text, first)), tail.min(last_characters(text, last)));
        }
        if let Some((most, chat)) = &self.tokens
            && ends_after(text, *most, chat).is_some()
        {
            let (first, last) = halves(*most);
            head = head.min(ends_after(text, first, chat).unwrap_or(text.len()));
            tail = tail.min(begins_before(text, last, chat));
        }
        if head + tail >= text.len() {
            return None;
        }
        let left_out = text[head..text.len() - tail].chars().count();
        let (before, after) = (&text[..head], &text[text.len() - tail..]);
        let breaks = |apart: bool| if apart { "\n" } else { "" };
        let first = breaks(!before.is_empty() && !before.ends_with('\n'));
        let last = breaks(!after.is_empty());
        let line = format!("[… {left_out} characters are left out here …]");
        Some(format!("{before}{first}{line}{last}{after}"))
    }

    /// Shortens the text of an answer, which becomes one part.
    fn apply(&self, mut output: ToolOutput) -> ToolOutput {
        let mut text = String::new();
        for part in &output.parts {
            if let ContentPart::Text(more) = part {
                text.push_str(more);
            }
        }
        if let Some(shortened) = self.of(&text) {
            output.parts.retain(|part| !matches!(part, ContentPart::Text(_)));
            output.parts.insert(0, ContentPart::Text(shortened));
        }
        output
    }
}

/// The length, in bytes, of the first characters of a text.
fn first_characters(text: &str, count: usize) -> usize {
    text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)
}

/// The length, in bytes, of the last characters of a text.
fn last_characters(text: &str, count: usize) -> usize {
    let Some(before) = count.checked_sub(1) else { return 0 };
    text.char_indices().nth_back(before).map_or(text.len(), |(at, _)| text.len() - at)
}

/// The length, in bytes, of the first tokens of a text; `None` where it has no more than these.
fn ends_after(text: &str, count: usize, chat: &Chat) -> Option<usize> {
    let tokenizer = chat.tokenizer();
    let mut read = BYTES_A_TOKEN * (count + EDGE);
    loop {
        let end = text.floor_char_boundary(read);
        let ids = tokenizer.encode(&text[..end]);
        if end < text.len() && ids.len() < count + EDGE {
            read *= 2;
            continue;
        }
        let kept = ids.get(..count).filter(|_| ids.len() > count)?;
        return Some(common_start(&tokenizer.decode(kept), text));
    }
}

/// The length, in bytes, of the last tokens of a text.
fn begins_before(text: &str, count: usize, chat: &Chat) -> usize {
    let tokenizer = chat.tokenizer();
    let mut read = BYTES_A_TOKEN * (count + EDGE);
    loop {
        let start = text.ceil_char_boundary(text.len().saturating_sub(read));
        let ids = tokenizer.encode(&text[start..]);
        if start > 0 && ids.len() < count + EDGE {
            read *= 2;
            continue;
        }
        let kept = tokenizer.decode(&ids[ids.len().saturating_sub(count)..]);
        return common_end(&kept, text);
    }
}

/// How many bytes two texts begin with in common, in whole characters: a token may end within one, and a
/// tokenizer may write another character than it read.
fn common_start(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// How many bytes two texts end with in common, in whole characters.
fn common_end(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

/// Another toolbox, whose long answers are shortened.
pub type Shortened = Wrapped<Cut>;

impl Shortened {
    /// `toolbox`, of whose answers a model reads as much as `cut` says.
    pub fn new(toolbox: Arc<dyn Toolbox>, cut: Cut) -> Self {
        Wrapped::around(toolbox, cut)
    }
}

#[async_trait]
impl Around for Cut {
    async fn call(&self, session: &dyn Session, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        self.apply(session.call(tool, arguments).await)
    }
}

#[cfg(test)]
#[path = "cut_tests.rs"]
mod tests;
