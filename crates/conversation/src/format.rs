//! Format of a model's conversations: its chat template, the treatment of history, and how much of
//! the past the template must see.
//!
//! Most templates render the text after a completion independently of messages long before it. A
//! probe checks this once per template, over pasts of several depths and shapes, with and without
//! instructions and tools. An abridged past must yield the same tokens, opened reasoning and drift
//! as the complete past. If the probe succeeds, each turn is rendered with an abridged past of one
//! question and at most one call. Otherwise the complete past is rendered.

mod probe;

use std::sync::{Arc, OnceLock};

use levade_text::{Chat, Message, Role, TextError, ToolSpec};
use serde::{Deserialize, Serialize};

use crate::drift::Drift;

/// Treatment of the recorded history when a later prompt is rendered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum History {
    /// Recorded tokens do not change. The tokens of new messages are appended.
    #[default]
    Append,
    /// The chat template renders all messages, as in an inference server that receives messages. If
    /// the result differs from the recorded tokens, the conversation forks. Each turn renders the
    /// complete conversation.
    Template,
}

/// Scheme for the ids of tool calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallIds {
    /// The ids are numbered within each completion: `call_0`, `call_1`.
    #[default]
    #[serde(rename = "per_reply")]
    PerCompletion,
    /// The ids are numbered within each turn, and unique in the conversation: `call_3_0`. If a
    /// client sends the ids back, its requests are matched by them.
    Unique,
}

/// Tolerance for changes that a client makes to a completion that it sends back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CompletionMatching {
    /// A completion that the client has only rewritten is continued and counted. Rewrites are
    /// missing text next to tool calls, arguments with more members or other spacing, and appended
    /// text.
    #[default]
    Lenient,
    /// A rewritten completion is not continued: the conversation forks at its position.
    Strict,
}

/// Options of a model's chat format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Treatment of the recorded history in later prompts.
    pub history: History,
    /// Whether drift is an error, instead of being recorded and counted. Default: false.
    pub strict: bool,
    /// Scheme for the ids of tool calls.
    pub call_ids: CallIds,
    /// Tolerance for changes that a client makes to a completion.
    #[serde(rename(serialize = "replies"), alias = "replies")]
    pub completion_matching: CompletionMatching,
}

/// Format of a model's conversations: its chat template, and options.
#[derive(Debug)]
pub struct Format {
    chat: Arc<Chat>,
    options: Options,
    abridges: OnceLock<bool>,
}

/// Tokens that a prompt adds after a completion, up to the start of the next completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FollowingTokens {
    pub tokens: Vec<u32>,
    /// Whether these tokens open the reasoning of the next completion.
    pub in_reasoning: bool,
}

/// A completion, with the messages before and after it.
#[derive(Clone, Copy)]
pub(crate) struct CompletionRound<'a> {
    /// Messages of the conversation before the completion.
    pub past: &'a [Arc<Message>],
    /// Sampled token ids of the completion.
    pub completion: &'a [u32],
    /// Text of the completion, including the text that the client has appended.
    pub text: &'a str,
    /// Text that the client has appended to the completion. Empty if it has appended none.
    pub rest: &'a str,
    /// Messages of the conversation after the completion.
    pub new: &'a [Message],
    pub tools: &'a [ToolSpec],
}

impl Format {
    /// Creates a format for the model of `chat`, and probes the chat template like
    /// [`can_abridge`](Self::can_abridge). The probe renders about a thousand short conversations.
    pub fn new(chat: Arc<Chat>, options: Options) -> Self {
        let format = Format::without_probe(chat, options);
        format.can_abridge();
        format
    }

    /// Creates a format for the model of `chat`. The chat template is probed only when the result
    /// is first needed.
    pub fn without_probe(chat: Arc<Chat>, options: Options) -> Self {
        Format { chat, options, abridges: OnceLock::new() }
    }

    /// Returns the model's chat template and tokenizer.
    pub fn chat(&self) -> &Arc<Chat> {
        &self.chat
    }

    /// Returns the options of the format.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Returns whether the chat template needs only an abridged past to render the text after a
    /// completion. The first call probes the template, which renders about a thousand short
    /// conversations, so it must run outside async workers.
    pub fn can_abridge(&self) -> bool {
        *self.abridges.get_or_init(|| probe::probe_abridging(self))
    }

    /// Returns the tokens that follow a completion, up to the start of the next completion.
    ///
    /// # Errors
    /// Returns the errors of [`Chat::continuation_within`] and [`Chat::opened_reasoning`].
    pub(crate) fn following_tokens(
        &self,
        round: CompletionRound<'_>,
        max_tokens: usize,
    ) -> Result<FollowingTokens, TextError> {
        let completion = (round.completion, round.rest);
        if self.can_abridge() {
            let (past, tools) = abridge(round.past, round.tools);
            self.tokens_after(&past, completion, round.new, tools, max_tokens)
        } else {
            self.tokens_after(
                &to_messages(round.past),
                completion,
                round.new,
                round.tools,
                max_tokens,
            )
        }
    }

    /// Returns the tokens that follow a completion if it is rendered after the messages `past`.
    pub(crate) fn tokens_after(
        &self,
        past: &[Message],
        completion: (&[u32], &str),
        new: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<FollowingTokens, TextError> {
        let tokens = self.chat.continuation_within(past, completion, new, tools, max_tokens)?;
        // Only the existence of the completion matters here, not its text.
        let placeholder = [Message::assistant("")];
        let messages: Vec<Message> = past.iter().chain(&placeholder).chain(new).cloned().collect();
        let in_reasoning = self.chat.opened_reasoning(&messages, tools)?.is_some();
        Ok(FollowingTokens { tokens, in_reasoning })
    }

    /// Returns drift near the newest completion. `following` are the tokens after it. Finds only
    /// drift that shows if an abridged past is rendered.
    pub(crate) fn nearby_drift(
        &self,
        round: CompletionRound<'_>,
        following: &[u32],
    ) -> Option<Drift> {
        let (mut messages, tools) = abridge(round.past, round.tools);
        let mut sequence = match self.chat.prompt(&messages, tools) {
            Ok(prompt) => prompt,
            Err(error) => {
                return Some(Drift {
                    recorded: String::new(),
                    printed: error.to_string(),
                    prompt: None,
                });
            }
        };
        sequence.extend(round.completion);
        sequence.extend(following);
        messages.push(Message::assistant(round.text));
        messages.extend(round.new.iter().cloned());
        Drift::find(&self.chat, &sequence, &messages, tools)
    }

    /// Returns drift if the chat template renders the complete conversation differently from the
    /// tokens `sequence`.
    pub(crate) fn full_drift(&self, sequence: &[u32], round: CompletionRound<'_>) -> Option<Drift> {
        let mut messages = to_messages(round.past);
        messages.push(Message::assistant(round.text));
        messages.extend(round.new.iter().cloned());
        Drift::find(&self.chat, sequence, &messages, round.tools)
    }
}

/// Clones shared messages into the form that a chat template takes.
pub(crate) fn to_messages(past: &[Arc<Message>]) -> Vec<Message> {
    past.iter().map(|message| Message::clone(message)).collect()
}

/// Returns a minimal past that replaces a complete past when a template renders the messages after
/// it. It contains the instructions and a question. If the past ends with an assistant message or a
/// tool result, it also contains an assistant message and, in the second case, a tool result. Each
/// message has one word, and one tool replaces all tools.
pub(crate) fn abridge(
    past: &[Arc<Message>],
    tools: &[ToolSpec],
) -> (Vec<Message>, &'static [ToolSpec]) {
    static TOOL: OnceLock<[ToolSpec; 1]> = OnceLock::new();
    let opening = past
        .first()
        .filter(|first| !matches!(first.role, Role::User | Role::Assistant | Role::Tool));
    let mut messages: Vec<Message> = opening
        .map(|first| Message { role: first.role, ..Message::user("Help.") })
        .into_iter()
        .collect();
    messages.push(Message::user("Hi"));
    match past.last().map(|last| last.role) {
        Some(Role::Tool) => messages.extend([Message::assistant("Done."), Message::tool("1")]),
        Some(Role::Assistant) => messages.push(Message::assistant("Done.")),
        _ => {}
    }
    if tools.is_empty() {
        return (messages, &[]);
    }
    let tool = TOOL.get_or_init(|| {
        [ToolSpec {
            name: "tool".into(),
            description: String::new(),
            parameters: serde_json::json!({ "type": "object", "properties": {} }),
        }]
    });
    (messages, tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abridged_past_keeps_instructions_and_end() {
        let requested = Message::user("1+1?");
        let response_message = Message::assistant("two");
        assert_eq!(abridged(&[]), [hi()]);
        assert_eq!(abridged(std::slice::from_ref(&requested)), [hi()]);
        assert_eq!(
            abridged(&[requested.clone(), response_message.clone(), requested.clone()]),
            [hi()]
        );
        assert_eq!(abridged(&[requested.clone(), response_message.clone()]), [hi(), done()]);
        let result = [requested.clone(), response_message, Message::tool("2"), Message::tool("3")];
        assert_eq!(abridged(&result), [hi(), done(), Message::tool("1")]);
        // Instructions keep their role.
        for opening in
            [Message::system("Use tools."), Message { role: Role::Developer, ..Message::user("x") }]
        {
            let help = Message { role: opening.role, ..Message::user("Help.") };
            assert_eq!(abridged(&[opening, requested.clone()]), [help, hi()]);
        }
    }

    fn abridged(past: &[Message]) -> Vec<Message> {
        let past: Vec<_> = past.iter().cloned().map(Arc::new).collect();
        abridge(&past, &[]).0
    }

    fn hi() -> Message {
        Message::user("Hi")
    }

    fn done() -> Message {
        Message::assistant("Done.")
    }

    #[test]
    fn abridge_replaces_all_tools_by_one() {
        let tools = ["add", "sub"].map(crate::testing::tool);
        assert_eq!(abridge(&[], &[]).1, []);
        let names: Vec<&str> =
            abridge(&[], &tools).1.iter().map(|tool| tool.name.as_str()).collect();
        assert_eq!(names, ["tool"]);
    }
}
