//! Chat APIs of external providers, which take messages and return messages.

use std::time::Duration;

use futures_util::future::BoxFuture;
use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::api_error::ApiError;
use crate::request::{Constraint, SamplingOptions, ToolChoice};

/// Chat API that continues conversations.
pub trait ChatApi: Send + Sync {
    /// Starts a completion. The receiver yields its deltas; the last one is [`ChatDelta::Done`] or
    /// an error. Dropping the receiver cancels the request. Must be called within a Tokio runtime.
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>>;

    /// Checks that a server of the API accepts connections. Sends no request. An API without
    /// servers is reachable.
    ///
    /// # Errors
    /// Returns a message that names the servers if none accepts a connection.
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
    /// Which tools the model may or must call.
    pub tool_choice: ToolChoice,
    /// Whether the model may call several tools at once.
    pub parallel_calls: bool,
    /// Format that the completion must have.
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
    /// The complete completion. This is the last part.
    Done(Box<ChatCompletion>),
}

/// Completion of a [`ChatApi`] that has ended.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatCompletion {
    /// Assistant message, with its tool calls and reasoning.
    pub message: Message,
    /// Reason for the end of the completion.
    pub finish: FinishReason,
    /// Number of prompt tokens that the API reports; 0 if it reports none.
    pub prompt_tokens: usize,
    /// Number of completion tokens that the API reports; 0 if it reports none.
    pub tokens: usize,
    /// Number of reasoning tokens among the completion tokens.
    pub reasoning_tokens: usize,
}
