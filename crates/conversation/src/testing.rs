//! Chats and conversations for tests.

use std::sync::Arc;

use levade_policy::{Completion, SamplingParams};
use levade_text::testing::{sampled, tiny_tokenizer};
use levade_text::{Chat, ChatOptions, Message, ToolSpec};
use serde_json::json;

use crate::{Conversation, Format, Options, PreparedPrompt, RecordedCompletion, Request};

/// Template that numbers the rounds, and renders all messages.
pub(crate) const ROUNDS: &str = "{% set ns = namespace(round=0) %}{% for m in messages %}
    {%- if m.role == 'user' %}{% set ns.round = ns.round + 1 %}{{- '<|im_start|>round ' ~ \
    ns.round ~ '\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' }}{% endif %}
    {{- m.content + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

pub(crate) fn chat(template: &str, options: ChatOptions) -> Chat {
    Chat::new(tiny_tokenizer().unwrap(), Some(template), options).unwrap()
}

pub(crate) fn tool(name: &str) -> ToolSpec {
    let parameters = json!({ "type": "object", "properties": { "a": { "type": "number" } } });
    ToolSpec { name: name.into(), description: "Does it.".into(), parameters }
}

pub(crate) fn completion(tokens: Vec<u32>) -> Completion {
    let mut completion = Completion::default();
    completion.extend(&tokens, &vec![-0.5; tokens.len()], 3);
    completion
}

/// A conversation with one agent, with its format and tools.
pub(crate) struct Talk {
    pub conversation: Conversation,
    pub format: Arc<Format>,
    pub tools: Vec<ToolSpec>,
    pub agent: &'static str,
    pub policy: &'static str,
}

impl Talk {
    pub(crate) fn new(chat: Chat, options: Options) -> Self {
        Talk::with(Arc::new(Format::new(Arc::new(chat), options)))
    }

    pub(crate) fn with(format: Arc<Format>) -> Self {
        Talk { conversation: Conversation::new(), format, tools: Vec::new(), agent: "", policy: "" }
    }

    pub(crate) fn prepare(&self, messages: &[Message]) -> PreparedPrompt {
        let agent = self.agent;
        let policy = self.policy;
        let format = &self.format;
        let tools = &self.tools[..];
        self.conversation.prepare(&Request { agent, policy, format, messages, tools }).unwrap()
    }

    pub(crate) fn record(
        &mut self,
        prepared: PreparedPrompt,
        completion_text: &str,
    ) -> RecordedCompletion {
        let tokens = sampled(self.format.chat(), completion_text);
        self.conversation.record(prepared, completion(tokens), &SamplingParams::default()).unwrap()
    }

    /// Prepares and records. The prompt must be equal to the recorded tokens before the completion.
    pub(crate) fn prepare_and_record(
        &mut self,
        messages: &[Message],
        completion: &str,
    ) -> (PreparedPrompt, RecordedCompletion) {
        let prepared = self.prepare(messages);
        let kept = self.record(prepared.clone(), completion);
        let full = [prepared.prompt.clone(), sampled(self.format.chat(), completion)].concat();
        assert_eq!(self.conversation.trajectory().sequence_tokens(kept.segment), full);
        (prepared, kept)
    }

    pub(crate) fn text(&self, ids: &[u32]) -> String {
        self.format.chat().tokenizer().decode_with_special(ids)
    }
}
