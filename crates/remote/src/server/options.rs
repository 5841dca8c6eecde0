//! Settings of a server of vLLM or SGLang.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::TokenBytes;
use serde::{Deserialize, Serialize};

use super::folder::FolderChecks;
use crate::push::Pushing;

/// The API that a server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerKind {
    /// vLLM: `/inference/v1/generate` and its RL routes, of 0.20 and from 0.32 on.
    Vllm,
    /// SGLang: `/generate` and its RL routes, of 0.5.
    Sglang,
}

impl ServerKind {
    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            ServerKind::Vllm => "vLLM",
            ServerKind::Sglang => "SGLang",
        }
    }
}

/// Treatment of replies that are being drawn when new weights come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InFlight {
    /// They are aborted, and asked for again with the tokens that they have, whose keys and values the new
    /// weights compute.
    #[default]
    Recompute,
    /// They stand still and go on over the keys and values of the old weights. Tokens that come after the
    /// change are handed out at the end of the reply, when the server tells which weights drew which.
    Keep,
}

/// A text and its tokens, of the tokenizer that prompts are made with: a server that has another is refused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenizerProbe {
    /// The text.
    pub text: String,
    /// Its tokens, without any that begin or end a text.
    pub tokens: Vec<u32>,
}

/// Settings of a [`Server`](super::Server). Times do not count while this process stands still.
#[derive(Clone)]
pub struct ServerOptions {
    /// The API that it speaks.
    pub kind: ServerKind,
    /// Its address, such as `http://10.0.0.7:8000`.
    pub url: String,
    /// Environment variable that holds its key; without it none is sent.
    pub key_env: Option<String>,
    /// Tokens of the model's vocabulary, and of the longest sequence that is asked for.
    pub vocabulary: usize,
    /// Longest sequence, prompt and reply together, in tokens.
    pub context: usize,
    /// Whether weights that are published are adapters over the model that the server was started with.
    pub adapters: bool,
    /// Checks of folders, which servers that get the same weights share.
    pub checks: FolderChecks,
    /// Sends the learner's weights straight to it; without, and where that fails, they come as folders.
    pub push: Option<Arc<Pushing>>,
    /// Treatment of replies under way when weights change.
    pub in_flight: InFlight,
    /// Whether it is to give its devices back now and then: one that was started without the flag for that is
    /// refused.
    pub sleeps: bool,
    /// Bytes of tokens, for stop strings; requests that have any are refused without.
    pub tokens: Option<Arc<dyn TokenBytes>>,
    /// A text and its tokens, to tell its tokenizer by.
    pub tokenizer: TokenizerProbe,
    /// Most that the log-probability of a token of the probe may differ from the learner's, in nats; the mean
    /// a quarter of it.
    pub tolerance: f32,
    /// How long it may take to answer a question about itself or to begin a reply,
    pub answer: Duration,
    /// how long a reply may stop,
    pub silence: Duration,
    /// and how long it may take to read weights.
    pub adopt: Duration,
}

impl ServerOptions {
    /// A server at an address, under the usual limits. Its model has a vocabulary of so many tokens.
    pub fn new(kind: ServerKind, url: impl Into<String>, vocabulary: usize, context: usize) -> Self {
        ServerOptions {
            kind,
            url: url.into(),
            key_env: None,
            vocabulary,
            context,
            adapters: false,
            checks: FolderChecks::default(),
            push: None,
            in_flight: InFlight::default(),
            sleeps: false,
            tokens: None,
            tokenizer: TokenizerProbe::default(),
            tolerance: 1.0,
            answer: Duration::from_secs(60),
            silence: Duration::from_secs(300),
            adopt: Duration::from_secs(600),
        }
    }
}
