//! Options of a vLLM or SGLang server.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::TokenBytes;
use serde::{Deserialize, Serialize};

use super::weight_dir::DirChecks;
use crate::push::WeightBroadcast;

/// Kind of a server, which decides its API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerKind {
    /// vLLM: `/inference/v1/generate` and its RL routes, of version 0.20 and from 0.32 on.
    Vllm,
    /// SGLang: `/generate` and its RL routes, of version 0.5.
    Sglang,
}

impl ServerKind {
    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::Vllm => "vLLM",
            ServerKind::Sglang => "SGLang",
        }
    }
}

/// What happens to running requests when weights change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InFlight {
    /// The requests are aborted and sent again with the tokens that they have, whose KV cache the
    /// new weights recompute.
    #[default]
    Recompute,
    /// The requests are frozen, and continue with the KV cache of the old weights. Tokens sampled
    /// after the change are returned at the end of the completion, when the server reports which
    /// weights sampled them.
    Keep,
}

/// A text and its tokens under the tokenizer that prompts are made with. A server with another
/// tokenizer is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenizerProbe {
    /// The text. An empty text, the default, checks nothing.
    pub text: String,
    /// Tokens of the text, without special tokens at its start or end.
    pub tokens: Vec<u32>,
}

/// Options of a [`Server`](super::Server). Timeouts exclude time in which this process is
/// suspended.
#[derive(Clone)]
pub struct ServerOptions {
    /// Kind of the server.
    pub kind: ServerKind,
    /// Address of the server, such as `http://10.0.0.7:8000`.
    pub url: String,
    /// Environment variable that holds the server's key. `None` sends no key.
    pub key_env: Option<String>,
    /// Number of tokens in the model's vocabulary.
    pub vocabulary: usize,
    /// Maximum sequence length, prompt and completion together, in tokens.
    pub context: usize,
    /// Whether published weights are LoRA adapters for the model that the server was started with.
    pub adapters: bool,
    /// Checks of weight directories, shared by servers that load the same weights.
    pub checks: DirChecks,
    /// Pushes weights into the server's memory. With `None`, or if a push fails, the server reads a
    /// directory.
    pub push: Option<Arc<WeightBroadcast>>,
    /// What happens to running requests when weights change.
    pub in_flight: InFlight,
    /// Whether the server must release its devices at times. A server that was started without the
    /// required flag is rejected.
    pub sleeps: bool,
    /// Bytes of each token, to find stop strings. With `None`, requests with stop strings are
    /// rejected.
    pub tokens: Option<Arc<dyn TokenBytes>>,
    /// A text and its tokens, to check the server's tokenizer.
    pub tokenizer: TokenizerProbe,
    /// Maximum absolute difference between the server's log-probability of a probe token and the
    /// learner's, in nats. The mean may reach a quarter of it.
    pub tolerance: f32,
    /// Timeout for status queries and for the start of a completion.
    pub response_timeout: Duration,
    /// Timeout for the next event of a stream.
    pub silence: Duration,
    /// Timeout for loading weights.
    pub update_timeout: Duration,
}

impl ServerOptions {
    /// Creates options with default limits for a server whose model has `vocabulary` tokens.
    pub fn new(
        kind: ServerKind,
        url: impl Into<String>,
        vocabulary: usize,
        context: usize,
    ) -> Self {
        ServerOptions {
            kind,
            url: url.into(),
            key_env: None,
            vocabulary,
            context,
            adapters: false,
            checks: DirChecks::default(),
            push: None,
            in_flight: InFlight::default(),
            sleeps: false,
            tokens: None,
            tokenizer: TokenizerProbe::default(),
            tolerance: 1.0,
            response_timeout: Duration::from_secs(60),
            silence: Duration::from_secs(300),
            update_timeout: Duration::from_secs(600),
        }
    }
}
