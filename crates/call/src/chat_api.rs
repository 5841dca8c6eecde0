//! Chat APIs of external providers, which take messages and return messages.

use std::time::Duration;

use futures_util::future::BoxFuture;
use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::api_error::ApiError;
use crate::request::{Constraint, SamplingOptions, ToolChoice};

/// Chat API that continues conversations, such as a third-party model server.
pub trait ChatApi: Send + Sync {
    /// Starts a completion. The returned receiver yields its events, and ends with
    /// [`ChatDelta::Done`] or an error. Dropping the receiver cancels the request. Must be called
    /// within a Tokio runtime.
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>>;

    /// Checks that a server of the API accepts connections. Sends no request. An API without
    /// servers counts as reachable.
    ///
    /// # Errors
    /// Returns an error message that names the servers if no server accepts a connection.
    fn check_reachable(&self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

/// Request to a [`ChatApi`] for one assistant message.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatQuery {
    /// Messages of the conversation so far.
    pub messages: Vec<Message>,
    /// Tools that the model can call.
    pub tools: Vec<ToolSpec>,
    /// Rule for the tool calls of the completion.
    pub tool_choice: ToolChoice,
    /// Whether the completion can contain several tool calls.
    pub parallel_calls: bool,
    /// Output format that the completion must have. `None` if it is free.
    pub constraint: Option<Constraint>,
    /// Sampling options of the completion.
    pub sampling: SamplingOptions,
    /// Timeout for the complete response.
    pub timeout: Duration,
}

/// Event of a streamed completion.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatDelta {
    /// Next part of the reasoning.
    Reasoning(String),
    /// Next part of the text.
    Text(String),
    /// The completion has ended. Contains the complete completion. This is the last event.
    Done(Box<ChatCompletion>),
}

/// Completion of a [`ChatApi`] that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatCompletion {
    /// Assistant message of the completion, with its tool calls and reasoning.
    pub message: Message,
    /// Reason why the completion ended.
    pub finish: FinishReason,
    /// Number of prompt tokens. 0 if the API does not report it.
    pub prompt_tokens: usize,
    /// Number of completion tokens, including reasoning tokens. 0 if the API does not report it.
    pub tokens: usize,
    /// Number of reasoning tokens among the completion tokens. 0 if the API does not report it.
    pub reasoning_tokens: usize,
}
