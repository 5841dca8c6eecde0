//! Rearranges instruction messages that a template does not print, such as repeated ones and those
//! after the first turn.
//!
//! Chat templates differ in the system messages that they accept: any, only leading ones, at most
//! one, or none at all. A client sends them as its API allows. When a chat is created, a probe
//! finds out which system messages the template accepts (`probe.rs`).
//!
//! # Guarantees
//! - **One rule for all turns**: the arrangement is a function of the messages and the template,
//!   and messages after an assistant message change nothing before it. A history therefore
//!   continues with its exact tokens, unless late messages are [merged](LateSystem::Merge).
//! - **Nothing is lost**: the text of each message is printed, in the order of the messages.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{Message, Role};

/// Handling of a system message after the first turn that the chat template does not print there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LateSystem {
    /// The late message is printed in its position, as a user message. It joins the user message
    /// before or after it if the template rejects consecutive user messages.
    #[default]
    User,
    /// The late message is appended to the first system message. This changes the start of the
    /// conversation, so a recorded conversation forks there.
    Merge,
}

/// Positions at which a chat template prints instruction messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SystemMessageSupport {
    /// Whether the chat template prints one instruction message at the start of a conversation.
    pub leading: bool,
    /// Whether the chat template prints several instruction messages at the start of a
    /// conversation.
    pub several: bool,
    /// Whether the chat template prints an instruction message after the first turn, in its
    /// position.
    pub late: bool,
    /// Whether the chat template accepts two consecutive user messages.
    pub users: bool,
    /// Handling of instruction messages after the first turn that the chat template does not print.
    pub unprinted: LateSystem,
}

/// Number of instruction messages that are printed in another position or role than they were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShiftedSystems {
    /// Number of leading instruction messages that were joined with the first one.
    pub joined: u32,
    /// Number of instruction messages that were printed in a user message or merged into the first
    /// message.
    pub moved: u32,
}

impl SystemMessageSupport {
    /// Counts the changes that [`arrange`](Self::arrange) makes to instruction messages. `opens` is
    /// whether the messages start a conversation.
    pub(crate) fn count_shifted(&self, messages: &[Message], opens: bool) -> ShiftedSystems {
        let instructing = messages.iter().filter(|message| message.role.instructs()).count() as u32;
        let leads = messages.iter().take_while(|message| message.role.instructs()).count() as u32;
        let leading = if opens && self.leading { leads } else { 0 };
        let late = if self.late && self.leading { 0 } else { instructing - leading };
        ShiftedSystems {
            joined: if self.several { 0 } else { leading.saturating_sub(1) },
            moved: late,
        }
    }

    /// Arranges messages as the chat template can print them: leading instructions as one message,
    /// joined by blank lines, and later instructions in user messages.
    pub(crate) fn arrange<'a>(&self, messages: &'a [Message]) -> Cow<'a, [Message]> {
        if self.count_shifted(messages, true) == ShiftedSystems::default() {
            return Cow::Borrowed(messages);
        }
        let leads = messages.iter().take_while(|message| message.role.instructs()).count();
        let (leading, rest) = messages.split_at(if self.leading { leads } else { 0 });
        let mut arranged: Vec<Message> = Vec::with_capacity(messages.len());
        for message in leading {
            match arranged.first_mut().filter(|_| !self.several) {
                Some(first) => append(first, message),
                None => arranged.push(message.clone()),
            }
        }
        let merges = self.unprinted == LateSystem::Merge && self.leading;
        // Whether the last message is a user message with instructions.
        let mut instructs = false;
        for message in rest {
            let is_late = message.role.instructs() && !(self.late && self.leading);
            if is_late && message.content.trim().is_empty() {
                continue;
            }
            if is_late && merges {
                match arranged.first_mut().filter(|first| first.role.instructs()) {
                    Some(first) => append(first, message),
                    None => arranged.insert(0, Message::system(message.content.as_str())),
                }
                continue;
            }
            let joins = (is_late || (instructs && message.role == Role::User)) && !self.users;
            match arranged.last_mut().filter(|last| joins && last.role == Role::User) {
                Some(last) => append(last, message),
                None if is_late => arranged.push(Message::user(message.content.as_str())),
                None => arranged.push(message.clone()),
            }
            instructs = is_late;
        }
        Cow::Owned(arranged)
    }
}

/// Appends the content of `more` to `message`, after a blank line.
fn append(message: &mut Message, more: &Message) {
    let texts = [message.content.as_str(), more.content.as_str()];
    let texts: Vec<&str> = texts.into_iter().filter(|text| !text.trim().is_empty()).collect();
    message.content = texts.join("\n\n").into();
}
