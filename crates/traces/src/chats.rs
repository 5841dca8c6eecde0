//! Chat formats by which recorded attempts are parsed: one for each agent and policy.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_text::{Chat, Message};

/// Chat formats by agent and policy.
#[derive(Debug, Clone, Default)]
pub struct Chats(BTreeMap<(String, String), ChatFormat>);

/// A chat format, with properties that are needed to parse recorded attempts.
#[derive(Debug, Clone)]
pub(crate) struct ChatFormat {
    pub chat: Arc<Chat>,
    /// Whether the generation prompt opens the model's reasoning.
    pub opens_reasoning: bool,
}

impl Chats {
    /// Adds the format in which `agent` talks to `policy`.
    pub fn insert(&mut self, agent: &str, policy: &str, chat: Arc<Chat>) {
        let opened = chat.opened_reasoning(&[Message::user("Hi")], &[]);
        let opens_reasoning = opened.is_ok_and(|tag| tag.is_some());
        self.0.insert((agent.to_owned(), policy.to_owned()), ChatFormat { chat, opens_reasoning });
    }

    /// Returns the chat format in which `agent` talks to `policy`. If the agent has no format,
    /// returns any format of the policy.
    pub fn chat(&self, agent: &str, policy: &str) -> Option<&Arc<Chat>> {
        self.find(agent, policy).map(|format| &format.chat)
    }

    /// Returns the chat format in which `agent` talks to `policy`, with its properties. If the
    /// agent has no format of its own (for example `writer.summary`), returns any format of the
    /// policy.
    pub(crate) fn find(&self, agent: &str, policy: &str) -> Option<&ChatFormat> {
        self.0.get(&(agent.to_owned(), policy.to_owned())).or_else(|| {
            let mut of_policy = self.0.iter().filter(|((_, known), _)| known == policy);
            of_policy.next().map(|(_, format)| format)
        })
    }
}
