//! Policies that others serve: asked in messages, answered in messages, recorded so.

use std::collections::HashMap;
use std::time::Duration;

use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedReceiver;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::call::{Constraint, Sampling, ToolChoice};
use crate::fault::Fault;

/// An API of others that continues conversations.
pub trait Responder: Send + Sync {
    /// Begins a reply: its parts as they come, the last of which is its end or a fault. Whoever does not want
    /// it any more drops the receiver. Called within a Tokio runtime.
    fn respond(&self, query: Query) -> UnboundedReceiver<Result<Said, Fault>>;
}

/// A conversation to be continued by one message.
#[derive(Debug, Clone, PartialEq)]
pub struct Query {
    /// The conversation so far.
    pub messages: Vec<Message>,
    /// Tools that may be called.
    pub tools: Vec<ToolSpec>,
    /// Which of them it may call.
    pub tool_choice: ToolChoice,
    /// Whether it may call several at once.
    pub parallel_calls: bool,
    /// Form that the reply must have.
    pub constraint: Option<Constraint>,
    /// Wishes about sampling.
    pub sampling: Sampling,
    /// Longest wait for the end of the reply.
    pub deadline: Duration,
}

/// A part of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// More of the thought.
    Thought(String),
    /// More of the text.
    Speech(String),
    /// The last part: all of it.
    Ended(Box<Answer>),
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The reply, with its calls and its thought.
    pub message: Message,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt, as the API counts them; 0 where it does not.
    pub prompt_tokens: usize,
    /// Tokens of the reply, likewise,
    pub tokens: usize,
    /// and those of its thought.
    pub thought_tokens: usize,
}

/// A call that a policy of others answered, in messages. Histories that repeat an earlier one are kept once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExternalCall {
    /// Agent that asked.
    pub agent: String,
    /// Policy that answered.
    pub policy: String,
    /// The earlier call whose history this one goes on from, by its place in the list,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<usize>,
    /// and the number of messages of that history, replies included, that come first here.
    #[serde(default)]
    pub shared: usize,
    /// The messages after these.
    pub messages: Vec<Message>,
    /// Tools that it was told of; those of the call before where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<ToolSpec>>,
    /// The reply, as far as it came.
    pub reply: Message,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt, as the API counts them.
    pub prompt_tokens: usize,
    /// Tokens of the reply, likewise.
    pub tokens: usize,
    /// Fault that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

impl ExternalCall {
    /// The whole history of call number `at` of `calls`, its reply included.
    pub fn history(calls: &[ExternalCall], at: usize) -> Vec<Message> {
        let Some(call) = calls.get(at) else { return Vec::new() };
        // Calls go on from earlier ones alone.
        let after = call.after.filter(|after| *after < at);
        let mut messages = after.map(|after| Self::history(calls, after)).unwrap_or_default();
        messages.truncate(call.shared);
        messages.extend(call.messages.iter().cloned());
        messages.push(call.reply.clone());
        messages
    }
}

impl ExternalCall {
    /// The tools that call number `at` of `calls` was told of.
    pub fn tools(calls: &[ExternalCall], at: usize) -> &[ToolSpec] {
        let upto = &calls[..calls.len().min(at + 1)];
        upto.iter().rev().find_map(|call| call.tools.as_deref()).unwrap_or_default()
    }
}

/// Histories of calls so far, by keys of their beginnings.
#[derive(Debug, Default)]
pub(crate) struct Histories(HashMap<u128, (usize, usize)>);

impl Histories {
    /// The call that a history goes on from, with how many of its messages are there; then notes the history,
    /// and `reply` after it, as that of call number `at`.
    pub(crate) fn note(
        &mut self,
        at: usize,
        messages: &[Message],
        reply: &Message,
    ) -> (Option<usize>, usize) {
        let (mut key, mut keys) = (0, Vec::with_capacity(messages.len() + 1));
        for message in messages.iter().chain([reply]) {
            let text = serde_json::to_vec(message).unwrap_or_default();
            key = xxh3_128_with_seed(&text, key as u64 ^ (key >> 64) as u64);
            keys.push(key);
        }
        let known = keys[..messages.len()].iter().rev().find_map(|key| self.0.get(key).copied());
        for (key, length) in keys.into_iter().zip(1..) {
            self.0.entry(key).or_insert((at, length));
        }
        known.map_or((None, 0), |(call, length)| (Some(call), length))
    }
}
