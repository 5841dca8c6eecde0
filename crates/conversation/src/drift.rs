//! Finds drift: positions where a template renders recorded history differently.
//!
//! # Search
//! At each turn, drift is searched around the newest completion, even if the past is abridged. A
//! sequence that has drifted counts at every later turn, even if the position is no longer
//! rendered.
//!
//! At the [end](crate::Conversation::finish) of a conversation, complete sequences are compared
//! once. This can find drift that was not near a completion, for example reasoning that a template
//! drops two turns later, after another question. The turns with drift are then counted exactly.
//!
//! # Forks
//! With [`History::Template`](crate::History::Template), and for templates that read all of the
//! past, every turn renders and compares everything. Drift then forks the conversation. The fork
//! shares the tokens that both sequences start with, and continues with the tokens that the
//! template renders.

use levade_text::{Chat, Message, Role, ToolSpec};

use crate::recorded_completion::parsed_message;

/// A difference between the conversation as the chat template renders it and the recorded tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// Recorded text, from the first difference or, if it is near, from the start of its line.
    pub recorded: String,
    /// Text that the chat template renders there, or the template's error if it rejects the
    /// conversation.
    pub printed: String,
    /// Token ids of the prompt that the chat template renders. `None` if the template rejects the
    /// conversation.
    pub prompt: Option<Vec<u32>>,
}

/// Maximum number of bytes of common text before the difference that an excerpt shows.
const CONTEXT: usize = 24;

/// Maximum number of characters of an excerpt.
const MAX_EXCERPT_CHARS: usize = 60;

impl Drift {
    /// Compares the recorded tokens `path` with the conversation as the chat template renders it.
    /// Renders completions as their models wrote them and, if this differs, with reasoning and tool
    /// calls in separate fields. Returns `None` if either rendering equals the recorded tokens.
    /// Renders the complete conversation, and never fails: a template that rejects the conversation
    /// counts as drift.
    pub fn find(
        chat: &Chat,
        path: &[u32],
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Option<Self> {
        let drift = Self::compare_rendered(chat, path, messages, tools)?;
        let separated: Vec<Message> =
            messages.iter().map(|message| parse_message(chat, message, tools)).collect();
        let drifts = separated == messages
            || Self::compare_rendered(chat, path, &separated, tools).is_some();
        drifts.then_some(drift)
    }

    /// Renders the messages, and returns the difference to the recorded tokens `path`, or `None` if
    /// they are equal.
    fn compare_rendered(
        chat: &Chat,
        path: &[u32],
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Option<Self> {
        let prompt = match chat.prompt(messages, tools) {
            Ok(prompt) => prompt,
            Err(error) => {
                return Some(Drift {
                    recorded: String::new(),
                    printed: error.to_string(),
                    prompt: None,
                });
            }
        };
        let text = |ids: &[u32]| chat.tokenizer().decode_with_special(ids);
        let recorded = text(path);
        let printed = text(&prompt);
        if recorded == printed {
            return None;
        }
        let differs = recorded.char_indices().zip(printed.chars()).find(|((_, a), b)| a != b);
        let at = differs.map_or(recorded.len().min(printed.len()), |((at, _), _)| at);
        // Tags start alike, so the complete line is clearer if it is short.
        let line = recorded[..at].rfind('\n').map_or(0, |end| end + 1);
        let from = if at - line <= CONTEXT { line } else { at };
        Some(Drift {
            recorded: excerpt(&recorded[from..]),
            printed: excerpt(&printed[from..]),
            prompt: Some(prompt),
        })
    }

    /// Converts the difference to the record of a drift before the completion of `turn`. `forked`
    /// states whether the conversation forked there.
    pub(crate) fn to_record(&self, turn: u32, forked: bool) -> levade_tree::Drift {
        let Drift { recorded, printed, .. } = self.clone();
        levade_tree::Drift { turn, recorded, printed, forked }
    }
}

/// Parses an assistant message whose completion is one text into reasoning, content and tool calls.
/// Returns any other message unchanged.
fn parse_message(chat: &Chat, message: &Message, tools: &[ToolSpec]) -> Message {
    let is_written = message.tool_calls.is_empty() && message.reasoning_content.is_none();
    if message.role != Role::Assistant || !is_written {
        return message.clone();
    }
    let reasoning =
        Some(chat.reasoning(&message.content, false)).filter(|reasoning| !reasoning.is_empty());
    Message {
        reasoning_content: reasoning,
        ..parsed_message(&chat.parse(&message.content, false, tools))
    }
}

/// Returns the first [`MAX_EXCERPT_CHARS`] characters of a text.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(MAX_EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

#[cfg(test)]
#[path = "drift_tests.rs"]
mod tests;
