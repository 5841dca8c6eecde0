//! Finds drift: positions where a template renders recorded history differently.
//!
//! Each turn, drift is searched around the newest completion, also with an abridged past. A sequence that has
//! drifted counts at every later turn, even if the position is no longer rendered. At the
//! [end](crate::Conversation::finish), complete sequences are compared once. If that finds drift that was not
//! near a completion (reasoning that a template drops two turns later, once a question follows), the turns
//! are counted exactly. With [`History::Template`](crate::History::Template), and for templates that read all
//! of the past, every turn renders and compares everything; drift then forks the conversation. The fork
//! shares the tokens that both sequences start with, and continues with what the template renders.

use levade_text::{Chat, Message, Role, ToolSpec};

use crate::reply::shown;

/// How the template prints a conversation, where that is not what was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drift {
    /// The recorded text, from where the two differ.
    pub recorded: String,
    /// Text that the template prints there, or why it prints nothing.
    pub printed: String,
    /// The prompt that the template prints; `None` where it refuses the conversation.
    pub prompt: Option<Vec<u32>>,
}

/// Most characters that are shown of what two texts have in common.
const CONTEXT: usize = 24;

/// Most characters that are shown of each text.
const SHOWN: usize = 60;

impl Drift {
    /// How the template prints a conversation that was recorded as `path`; `None` where that says the same,
    /// with replies as their models wrote them, or with thoughts and calls in fields of their own. Renders
    /// all of it, and never fails: a template that refuses the conversation prints it otherwise.
    pub fn find(chat: &Chat, path: &[u32], messages: &[Message], tools: &[ToolSpec]) -> Option<Self> {
        let drift = Self::printed(chat, path, messages, tools)?;
        let apart: Vec<Message> = messages.iter().map(|message| taken_apart(chat, message, tools)).collect();
        let drifts = apart == messages || Self::printed(chat, path, &apart, tools).is_some();
        drifts.then_some(drift)
    }

    /// How the template prints these messages, where that is not `path`.
    fn printed(chat: &Chat, path: &[u32], messages: &[Message], tools: &[ToolSpec]) -> Option<Self> {
        let prompt = match chat.prompt(messages, tools) {
            Ok(prompt) => prompt,
            Err(error) => {
                return Some(Drift { recorded: String::new(), printed: error.to_string(), prompt: None });
            }
        };
        let text = |ids: &[u32]| chat.tokenizer().decode_with_special(ids);
        let (recorded, printed) = (text(path), text(&prompt));
        if recorded == printed {
            return None;
        }
        let differs = recorded.char_indices().zip(printed.chars()).find(|((_, a), b)| a != b);
        let at = differs.map_or(recorded.len().min(printed.len()), |((at, _), _)| at);
        // Tags begin alike: the whole line says more, up to a length.
        let line = recorded[..at].rfind('\n').map_or(0, |end| end + 1);
        let from = if at - line <= CONTEXT { line } else { at };
        Some(Drift {
            recorded: excerpt(&recorded[from..]),
            printed: excerpt(&printed[from..]),
            prompt: Some(prompt),
        })
    }

    /// The record of this place, before the reply of `turn`.
    pub(crate) fn at(&self, turn: u32, forked: bool) -> levade_tree::Drift {
        let Drift { recorded, printed, .. } = self.clone();
        levade_tree::Drift { turn, recorded, printed, forked }
    }
}

/// A reply that is one text, its thought and its calls in fields of their own; any other message as it is.
fn taken_apart(chat: &Chat, message: &Message, tools: &[ToolSpec]) -> Message {
    let is_written = message.tool_calls.is_empty() && message.reasoning_content.is_none();
    if message.role != Role::Assistant || !is_written {
        return message.clone();
    }
    let thought = Some(chat.thought(&message.content, false)).filter(|thought| !thought.is_empty());
    Message { reasoning_content: thought, ..shown(&chat.parse(&message.content, false, tools)) }
}

/// The first characters of a text, for a message.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

#[cfg(test)]
#[path = "drift_tests.rs"]
mod tests;
