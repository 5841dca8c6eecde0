//! Options of a vLLM or SGLang server.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::TokenBytes;
use serde::{Deserialize, Serialize};

use super::weight_dir::DirChecks;
use crate::push::WeightBroadcast;

/// Kind of an inference server, which determines its HTTP API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerKind {
    /// vLLM of version 0.20 or from 0.32 on: `/inference/v1/generate` and its routes for RL.
    Vllm,
    /// SGLang of version 0.5: `/generate` and its routes for RL.
    Sglang,
}

impl ServerKind {
    /// Returns the name of the server program, for errors and logs.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::Vllm => "vLLM",
            ServerKind::Sglang => "SGLang",
        }
    }
}

/// Treatment of running requests when the server's weights are replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InFlight {
    /// The requests are aborted and sent again with the tokens sampled so far. The new weights
    /// recompute the KV cache of these tokens.
    #[default]
    Recompute,
    /// The requests are frozen, and continue with the KV cache of the old weights. Tokens sampled
    /// after the change are returned at the end of the completion, when the server reports which
    /// weights sampled them.
    Keep,
}

/// A text and its token ids under the run's own tokenizer. A server with another tokenizer is
/// rejected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenizerProbe {
    /// Text to tokenize. If empty (the default), the tokenizer is not checked.
    pub text: String,
    /// Token ids of the text, without special tokens at its start or end.
    pub tokens: Vec<u32>,
}

/// Options of the client of an inference [`Server`](super::Server). Timeouts exclude time in which
/// this process is suspended.
#[derive(Clone)]
pub struct ServerOptions {
    /// Kind of the server, which determines its HTTP API.
    pub kind: ServerKind,
    /// Address of the server, such as `http://10.0.0.7:8000`.
    pub url: String,
    /// Environment variable that contains the server's API key. If `None`, no key is sent.
    pub key_env: Option<String>,
    /// Number of tokens in the model's vocabulary.
    pub vocabulary: usize,
    /// Maximum sequence length (prompt and completion), in tokens.
    pub context: usize,
    /// Whether the published weights are LoRA adapters for the model with which the server was
    /// started.
    pub adapters: bool,
    /// Cache of the checks of weight directories, shared by servers that load the same weights.
    pub checks: DirChecks,
    /// Broadcast that sends weights into the server's memory. If `None`, or if a push fails, the
    /// server reads the weights from a directory.
    pub push: Option<Arc<WeightBroadcast>>,
    /// Treatment of running requests when the server's weights are replaced.
    pub in_flight: InFlight,
    /// Whether the server must release its devices at times. If true, a server that was started
    /// without the required flag is rejected.
    pub sleeps: bool,
    /// Bytes of each token of the vocabulary, by which stop strings are found. If `None`, requests
    /// with stop strings are rejected.
    pub tokens: Option<Arc<dyn TokenBytes>>,
    /// Text and its token ids, by which the server's tokenizer is checked.
    pub tokenizer: TokenizerProbe,
    /// Maximum absolute difference between the server's log-probability of a probe token and the
    /// learner's, in nats. The mean difference may be at most a quarter of this value.
    pub tolerance: f32,
    /// Timeout for status queries and for the start of a completion.
    pub response_timeout: Duration,
    /// Timeout for the next event of a streamed response.
    pub silence: Duration,
    /// Timeout for loading weights.
    pub update_timeout: Duration,
}

impl ServerOptions {
    /// Creates options with default limits for a server whose model has `vocabulary` tokens.
    /// `context` is the maximum sequence length, in tokens.
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
