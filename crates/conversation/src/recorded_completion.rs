//! A parsed completion: reasoning, content and tool calls.

use levade_policy::FinishReason;
use levade_text::{Message, ParsedCompletion};
use levade_tree::SegmentId;

/// A completion that was recorded in the conversation, either sampled or demonstrated.
#[derive(Debug, Clone, PartialEq)]
pub struct RecordedCompletion {
    /// Segment with the completion's tokens.
    pub segment: SegmentId,
    /// Turn of the completion, counted from 0 within the conversation. Each model call is one turn.
    pub turn: u32,
    /// Complete text of the completion, including the tags of reasoning and tool calls.
    pub text: String,
    /// Reasoning of the completion, without its tags.
    pub reasoning: String,
    /// Content and tool calls of the completion. A truncated completion is parsed up to its end.
    pub parsed: ParsedCompletion,
    /// Reason why the completion ended.
    pub finish: FinishReason,
}

impl RecordedCompletion {
    /// Returns the completion as the model wrote it, as a message whose content is the complete
    /// text.
    pub fn raw_message(&self) -> Message {
        Message::assistant(self.text.as_str())
    }

    /// Returns the assistant message for the client, with content and tool calls but without
    /// reasoning. A tool call that cannot be parsed becomes text.
    pub fn message(&self) -> Message {
        parsed_message(&self.parsed)
    }
}

/// Returns the content and the tool calls of a completion as an assistant message.
pub(crate) fn parsed_message(parsed: &ParsedCompletion) -> Message {
    let calls = parsed.calls.iter().filter_map(|call| call.clone().ok()).collect();
    Message::calls(parsed_content(parsed), calls)
}

/// Returns the content of a completion, followed by the tool calls that cannot be parsed.
pub(crate) fn parsed_content(parsed: &ParsedCompletion) -> String {
    let unread =
        parsed.calls.iter().filter_map(|call| call.as_ref().err()).map(|call| call.raw.as_str());
    let content = Some(parsed.content.as_str()).filter(|content| !content.is_empty());
    content.into_iter().chain(unread).collect::<Vec<_>>().join("\n")
}
