//! How the conversations of a model are written down: its chat, what becomes of the past, and how much of the
//! past its template must be shown.
//!
//! Most templates print what follows a reply without a look at what was said long before it. Whether this one
//! does is found out once, by a probe: over pasts of several depths and shapes, with and without instructions
//! and tools, an abridged past must give the tokens, the opened thoughts and the drift of the whole one.
//! Where it does, an abridged past is rendered for each turn, of one question and at most one call; else the
//! whole past is.

mod probe;

use std::sync::{Arc, OnceLock};

use levade_text::{Chat, Message, Role, TextError, ToolSpec};
use serde::{Deserialize, Serialize};

use crate::drift::Drift;

/// How the past is kept once the conversation goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum History {
    /// Recorded tokens stay, and only what is new is appended.
    #[default]
    Append,
    /// The template's own print of it, which is what an inference server that is sent messages sees: where
    /// that is not what was recorded, the conversation forks. Each turn renders all of it.
    Template,
}

/// How ids of tool calls are given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallIds {
    /// Counted within each reply: `call_0`, `call_1`.
    #[default]
    PerReply,
    /// Counted within each turn, and unique in the conversation: `call_3_0`. A client that sends them back is
    /// recognised by them.
    Unique,
}

/// How closely a client must repeat a reply for its tokens to be continued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Replies {
    /// A reply that only its client's rewriting changes is continued, and counted: text beside calls that is
    /// missing, arguments with further members or other spacing, text that is appended.
    #[default]
    Lenient,
    /// Such a reply is not continued: the conversation forks there.
    Strict,
}

/// Choices that a model and its chat leave open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// How the past is kept.
    pub history: History,
    /// Whether drift is an error.
    pub strict: bool,
    /// How ids of tool calls are given.
    pub call_ids: CallIds,
    /// How closely a client must repeat a reply.
    pub replies: Replies,
}

/// How the conversations of a model are written down.
#[derive(Debug)]
pub struct Format {
    chat: Arc<Chat>,
    options: Options,
    abridges: OnceLock<bool>,
}

/// Tokens that follow a reply, up to the beginning of the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Following {
    pub tokens: Vec<u32>,
    /// Whether they begin a thought.
    pub in_thought: bool,
}

/// A reply between its past and what is new.
#[derive(Clone, Copy)]
pub(crate) struct Round<'a> {
    /// The messages before the reply.
    pub past: &'a [Arc<Message>],
    /// The reply, as it was sampled.
    pub reply: &'a [u32],
    /// Text of the reply, and the text that its client has appended.
    pub said: &'a str,
    /// Text that the client has appended, if it has.
    pub rest: &'a str,
    /// The messages after it.
    pub new: &'a [Message],
    pub tools: &'a [ToolSpec],
}

impl Format {
    /// The format of a model that talks as `chat` has it. Probes the template, which renders about a thousand
    /// short conversations.
    pub fn new(chat: Arc<Chat>, options: Options) -> Self {
        let format = Format::unprobed(chat, options);
        format.abridges();
        format
    }

    /// A format without a probe, for who may not need it: that is done when it is first asked for, in
    /// whatever time that is.
    pub fn unprobed(chat: Arc<Chat>, options: Options) -> Self {
        Format { chat, options, abridges: OnceLock::new() }
    }

    /// The chat.
    pub fn chat(&self) -> &Arc<Chat> {
        &self.chat
    }

    /// The choices.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Whether an abridged past is enough for the template to print what follows a reply. Probed when it is
    /// first asked for, which renders about a thousand short conversations: away from async workers.
    pub fn abridges(&self) -> bool {
        *self.abridges.get_or_init(|| probe::abridges(self))
    }

    /// The tokens after a reply.
    ///
    /// # Errors
    /// Errors of [`Chat::continuation_within`] and [`Chat::opened_thought`].
    pub(crate) fn following(&self, round: Round<'_>, max_tokens: usize) -> Result<Following, TextError> {
        let reply = (round.reply, round.rest);
        if self.abridges() {
            let (past, tools) = abridged(round.past, round.tools);
            self.shown(&past, reply, round.new, tools, max_tokens)
        } else {
            self.shown(&whole(round.past), reply, round.new, round.tools, max_tokens)
        }
    }

    /// The tokens after a reply, where the template is shown this past.
    pub(crate) fn shown(
        &self,
        past: &[Message],
        reply: (&[u32], &str),
        new: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<Following, TextError> {
        let tokens = self.chat.continuation_within(past, reply, new, tools, max_tokens)?;
        // The text of the reply does not matter, only that there is one.
        let replied = [Message::assistant("")];
        let messages: Vec<Message> = past.iter().chain(&replied).chain(new).cloned().collect();
        let in_thought = self.chat.opened_thought(&messages, tools)?.is_some();
        Ok(Following { tokens, in_thought })
    }

    /// Whether the template prints the newest reply otherwise now that `following` comes after it, as far as
    /// an abridged past shows it.
    pub(crate) fn drift_near(&self, round: Round<'_>, following: &[u32]) -> Option<Drift> {
        let (mut messages, tools) = abridged(round.past, round.tools);
        let mut path = match self.chat.prompt(&messages, tools) {
            Ok(prompt) => prompt,
            Err(error) => {
                return Some(Drift { recorded: String::new(), printed: error.to_string(), prompt: None });
            }
        };
        path.extend(round.reply);
        path.extend(following);
        messages.push(Message::assistant(round.said));
        messages.extend(round.new.iter().cloned());
        Drift::find(&self.chat, &path, &messages, tools)
    }

    /// Whether the template prints the whole conversation otherwise than as `path`.
    pub(crate) fn drift_of_all(&self, path: &[u32], round: Round<'_>) -> Option<Drift> {
        let mut messages = whole(round.past);
        messages.push(Message::assistant(round.said));
        messages.extend(round.new.iter().cloned());
        Drift::find(&self.chat, path, &messages, round.tools)
    }
}

/// Messages that a template can be given.
pub(crate) fn whole(past: &[Arc<Message>]) -> Vec<Message> {
    past.iter().map(|message| Message::clone(message)).collect()
}

/// A past that stands for another one: its instructions, a question, and a call with its result where the
/// past ends with one, all in a word. A tool stands for all tools.
pub(crate) fn abridged(past: &[Arc<Message>], tools: &[ToolSpec]) -> (Vec<Message>, &'static [ToolSpec]) {
    static TOOL: OnceLock<[ToolSpec; 1]> = OnceLock::new();
    let speaks = |role| matches!(role, Role::User | Role::Assistant | Role::Tool);
    let opening = past.first().filter(|first| !speaks(first.role));
    let mut messages: Vec<Message> =
        opening.map(|first| Message { role: first.role, ..Message::user("Help.") }).into_iter().collect();
    messages.push(Message::user("Hi"));
    match past.last().map(|last| last.role) {
        Some(Role::Tool) => messages.extend([Message::assistant("Done."), Message::tool("1")]),
        Some(Role::Assistant) => messages.push(Message::assistant("Done.")),
        _ => {}
    }
    let tool = || {
        [ToolSpec {
            name: "tool".into(),
            description: String::new(),
            parameters: serde_json::json!({ "type": "object", "properties": {} }),
        }]
    };
    (messages, if tools.is_empty() { &[] } else { TOOL.get_or_init(tool) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_past_stands_for_another_of_its_instructions_and_its_end() {
        let short = |past: &[Message]| {
            let past: Vec<_> = past.iter().cloned().map(Arc::new).collect();
            abridged(&past, &[]).0
        };
        let (asked, answered) = (Message::user("1+1?"), Message::assistant("two"));
        let (hi, done) = (|| Message::user("Hi"), || Message::assistant("Done."));
        assert_eq!(short(&[]), [hi()]);
        assert_eq!(short(std::slice::from_ref(&asked)), [hi()]);
        assert_eq!(short(&[asked.clone(), answered.clone(), asked.clone()]), [hi()]);
        assert_eq!(short(&[asked.clone(), answered.clone()]), [hi(), done()]);
        let result = [asked.clone(), answered, Message::tool("2"), Message::tool("3")];
        assert_eq!(short(&result), [hi(), done(), Message::tool("1")]);
        // Instructions stay instructions, of the role that they have.
        for opening in
            [Message::system("Use tools."), Message { role: Role::Developer, ..Message::user("x") }]
        {
            let help = Message { role: opening.role, ..Message::user("Help.") };
            assert_eq!(short(&[opening, asked.clone()]), [help, hi()]);
        }
    }

    #[test]
    fn one_tool_stands_for_all() {
        let tools = ["add", "sub"].map(crate::testing::tool);
        assert_eq!(abridged(&[], &[]).1, []);
        let names: Vec<&str> = abridged(&[], &tools).1.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["tool"]);
    }
}
