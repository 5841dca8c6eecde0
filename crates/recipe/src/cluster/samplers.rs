//! `[cluster.samplers]`: the servers that sample in place of the embedded engine.

use std::path::PathBuf;
use std::time::Duration;

use levade_rl::correction::{Bound, Correction, RatioLevel};
use serde::{Deserialize, Serialize};

/// `[cluster.samplers]`: inference servers that sample, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplersKeys {
    /// vLLM servers.
    Vllm(ServersKeys),
    /// SGLang servers.
    Sglang(ServersKeys),
}

/// `[cluster.samplers] kind = "vllm" | "sglang"`: inference servers that the run starts
/// (`start = true`) or that already run at `urls`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServersKeys {
    /// Base URLs of servers that already run, such as `http://10.0.0.7:8000`.
    pub urls: Vec<String>,
    /// File with additional server URLs, one per line, which is reread regularly. A server joins
    /// the run when its line is added, and leaves the run when its line is removed. No file if
    /// empty.
    pub urls_file: PathBuf,
    /// Name of the environment variable that contains the API key of the servers. No key is sent if
    /// empty.
    pub key_env: String,
    /// Whether the run starts, supervises and stops the servers.
    pub start: bool,
    /// Number of servers to start, in 1..=1024.
    pub count: usize,
    /// Number of GPUs per started server. The first server gets the first GPUs, and so on. If 0,
    /// the server chooses its GPUs.
    pub gpus: u32,
    /// Python interpreter of the environment that has vLLM or SGLang: a program in `PATH`, or a
    /// path.
    pub python: PathBuf,
    /// Additional command-line arguments of the servers.
    pub args: Vec<String>,
    /// Names of environment variables that are passed to the servers in addition to the usual ones.
    pub environment: Vec<String>,
    /// How new weights are transferred to the servers.
    pub weights: WeightsKey,
    /// What happens to completions in flight when new weights arrive.
    pub in_flight: InFlightKey,
    /// Importance weights that correct for numerical differences between samplers and learner. The
    /// value applies to phases whose recipe keys set no correction.
    pub correction: CorrectionDefault,
    /// Maximum difference between server and learner in the log-probability of a probe token after
    /// a weight update, in nats, more than 0. The mean difference may be at most a quarter of it.
    pub tolerance: f32,
    /// Timeout for the first response of a server that the run starts, in seconds.
    pub start_seconds: f64,
    /// Timeout for a server to load new weights, in seconds.
    #[serde(alias = "adopt_seconds")]
    pub update_seconds: f64,
    /// Maximum time in which a server that has requests may sample no token, in seconds.
    pub silent_seconds: f64,
    /// Timeout for a server's response to a status request, in seconds.
    #[serde(alias = "answer_seconds")]
    pub response_seconds: f64,
}

/// How new weights are transferred to the inference servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsKey {
    /// The servers read the weights from a directory.
    #[default]
    Folder,
    /// The learner broadcasts the weights into the servers' memory over a process group. It also
    /// writes them into a directory, for servers that missed the broadcast.
    Group,
}

/// What happens to completions in flight when new weights arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InFlightKey {
    /// Completions are aborted, and requested again with the tokens sampled so far. The new weights
    /// recompute the KV cache of these tokens.
    #[default]
    Recompute,
    /// Completions continue with the KV cache of the old weights.
    Keep,
}

/// Importance weights of tokens in phases that set no correction of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionDefault {
    /// Truncated importance sampling (TIS): the weight of a token is at most 2.
    #[default]
    Tis,
    /// IcePop: tokens whose importance ratio is outside of 0.5 to 5 have weight 0.
    Icepop,
    /// No correction. The denominator of the loss's ratios is the policy that sampled the token.
    None,
}

impl CorrectionDefault {
    /// Returns the importance correction that this value selects, or `None` for no correction.
    pub fn correction(self) -> Option<Correction> {
        let to_correction =
            |bound| Some(Correction { level: RatioLevel::Token, bound, normalize: false });
        match self {
            CorrectionDefault::Tis => to_correction(Bound::Clamp { low: 0.0, high: 2.0 }),
            CorrectionDefault::Icepop => to_correction(Bound::Mask { low: 0.5, high: 5.0 }),
            CorrectionDefault::None => None,
        }
    }
}

impl Default for ServersKeys {
    fn default() -> Self {
        ServersKeys {
            urls: Vec::new(),
            urls_file: PathBuf::new(),
            key_env: String::new(),
            start: false,
            count: 1,
            gpus: 0,
            python: "python3".into(),
            args: Vec::new(),
            environment: Vec::new(),
            weights: WeightsKey::default(),
            in_flight: InFlightKey::default(),
            correction: CorrectionDefault::default(),
            tolerance: 1.0,
            start_seconds: 900.0,
            update_seconds: 600.0,
            silent_seconds: 300.0,
            response_seconds: 60.0,
        }
    }
}

impl ServersKeys {
    /// Returns the timeout for the first response of a server that the run starts.
    pub fn start_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.start_seconds)
    }
}

impl SamplersKeys {
    /// Returns the keys that vLLM and SGLang servers have in common.
    pub fn servers(&self) -> &ServersKeys {
        match self {
            SamplersKeys::Vllm(keys) | SamplersKeys::Sglang(keys) => keys,
        }
    }
}
