//! Messages of instructions where a template does not print them: several of them, and those after the first
//! turn.
//!
//! Chat templates differ in the system messages that they take: any, only leading ones, one, or none. A
//! client sends them as its API allows. What a template takes is found by a probe when the chat is made
//! (`probe.rs`).
//!
//! # Guarantees
//! - **One rule for all turns**: the arrangement is a function of the messages and of the template, and
//!   messages after a reply change nothing before it. So a history goes on with its exact tokens, unless late
//!   messages are [merged](LateSystem::Merge).
//! - **Nothing is lost**: the text of each message is printed, in the order of the messages.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{Message, Role};

/// What becomes of a system message after the first turn that the chat template does not print there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LateSystem {
    /// It is printed where it stands, in a user's turn.
    #[default]
    User,
    /// It is appended to the first system message, which changes the beginning of the conversation: a
    /// recorded conversation forks there.
    Merge,
}

/// Which messages of instructions a template prints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SystemForm {
    /// Whether it prints one that leads a conversation.
    pub leading: bool,
    /// Whether it prints several that lead a conversation.
    pub several: bool,
    /// Whether it prints one after the first turn, where it stands.
    pub late: bool,
    /// Whether it takes two messages of the user in a row.
    pub users: bool,
    /// What becomes of late ones that it does not print.
    pub unprinted: LateSystem,
}

/// Number of messages of instructions that are printed elsewhere than as they came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShiftedSystems {
    /// Leading messages that were joined with the first one.
    pub joined: u32,
    /// Messages that were printed in a user's turn, or merged into the first one.
    pub moved: u32,
}

impl SystemForm {
    /// Counts what [`arranged`](Self::arranged) changes. `opens` says that the messages begin a conversation.
    pub(crate) fn shifted(&self, messages: &[Message], opens: bool) -> ShiftedSystems {
        let instructing = messages.iter().filter(|message| message.role.instructs()).count() as u32;
        let leads = messages.iter().take_while(|message| message.role.instructs()).count() as u32;
        let leading = if opens && self.leading { leads } else { 0 };
        let late = if self.late && self.leading { 0 } else { instructing - leading };
        ShiftedSystems { joined: if self.several { 0 } else { leading.saturating_sub(1) }, moved: late }
    }

    /// Returns the messages as the template prints them: leading instructions as one message, joined by a
    /// blank line, and later ones in a user's turn.
    pub(crate) fn arranged<'a>(&self, messages: &'a [Message]) -> Cow<'a, [Message]> {
        if self.shifted(messages, true) == ShiftedSystems::default() {
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
        // Whether the last message is a user's that holds instructions.
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

/// Appends the content of a message to another one, after a blank line.
fn append(message: &mut Message, more: &Message) {
    let texts = [message.content.as_str(), more.content.as_str()];
    let texts: Vec<&str> = texts.into_iter().filter(|text| !text.trim().is_empty()).collect();
    message.content = texts.join("\n\n").into();
}
