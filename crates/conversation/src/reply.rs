//! A reply, read: its thought, its content, its calls.

use levade_policy::FinishReason;
use levade_text::{Message, Parsed};
use levade_tree::SegmentId;

/// A reply that was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Reply {
    /// Tokens in the trajectory.
    pub segment: SegmentId,
    /// The model call that it came from, counted from 0 within the conversation.
    pub turn: u32,
    /// Text as it was written, tags of thoughts and calls included.
    pub said: String,
    /// Thoughts, without their tags.
    pub thought: String,
    /// Content and calls. A reply that was cut is read as far as it came.
    pub parsed: Parsed,
    /// Why it ended.
    pub finish: FinishReason,
}

impl Reply {
    /// The reply as its model wrote it, as one text.
    pub fn written(&self) -> Message {
        Message::assistant(self.said.as_str())
    }

    /// The reply as a client is told it: content and calls, without the thought. A call that cannot be read
    /// is text.
    pub fn message(&self) -> Message {
        shown(&self.parsed)
    }
}

/// Content and calls of a reply as a message.
pub(crate) fn shown(parsed: &Parsed) -> Message {
    let calls = parsed.calls.iter().filter_map(|call| call.clone().ok()).collect();
    Message::calls(shown_content(parsed), calls)
}

/// The content of a reply, calls that cannot be read below it.
pub(crate) fn shown_content(parsed: &Parsed) -> String {
    let unread = parsed.calls.iter().filter_map(|call| call.as_ref().err()).map(|call| call.raw.as_str());
    let content = Some(parsed.content.as_str()).filter(|content| !content.is_empty());
    content.into_iter().chain(unread).collect::<Vec<_>>().join("\n")
}
