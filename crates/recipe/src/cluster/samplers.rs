//! `[cluster.samplers]`: who samples, in place of the embedded engine.

use std::path::PathBuf;
use std::time::Duration;

use levade_rl::correction::{Bound, Correction, Level};
use serde::{Deserialize, Serialize};

/// `[cluster.samplers]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplersKeys {
    /// Servers of vLLM.
    Vllm(ServersKeys),
    /// Servers of SGLang.
    Sglang(ServersKeys),
}

/// `[cluster.samplers] kind = "vllm" | "sglang"`: started by the run (`start = true`), or where `urls` say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServersKeys {
    /// Addresses of servers that run already, such as `http://10.0.0.7:8000`.
    pub urls: Vec<String>,
    /// A file with further addresses, one a line, which is looked at again and again: a server whose line is
    /// added joins the run, one whose line goes leaves it. None where empty.
    pub urls_file: PathBuf,
    /// Environment variable that holds the key of these servers; none is sent where empty.
    pub key_env: String,
    /// Whether the run starts the servers, looks after them, and ends them.
    pub start: bool,
    /// How many are started.
    pub count: usize,
    /// GPUs of each that is started: the first has the first ones, and so on. 0 leaves that to the server.
    pub gpus: u32,
    /// Python of the environment that has vLLM or SGLang: a program, or its path.
    pub python: PathBuf,
    /// Further arguments of the servers.
    pub args: Vec<String>,
    /// Names of environment variables that they get besides the usual ones.
    pub environment: Vec<String>,
    /// How new weights reach the servers.
    pub weights: WeightsKey,
    /// Treatment of replies that are under way when new weights come.
    pub in_flight: InFlightKey,
    /// Weights that correct for what the samplers' numerics differ from the learner's, in phases that name
    /// none.
    pub correction: CorrectionDefault,
    /// Most that the log-probability of a token of a probe may differ between server and learner after each
    /// change of weights, in nats; the mean a quarter of it.
    pub tolerance: f32,
    /// Longest time until a server that is started answers, in seconds.
    pub start_seconds: f64,
    /// Longest time until a server has read new weights, in seconds.
    pub adopt_seconds: f64,
    /// Longest time in which a server that is asked for tokens samples none for anybody, in seconds.
    pub silent_seconds: f64,
    /// Longest time until a server answers a question about itself, in seconds.
    pub answer_seconds: f64,
}

/// How new weights reach servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsKey {
    /// In a folder that they read.
    #[default]
    Folder,
    /// Over a process group with the learner, into their memory; the folder is written all the same, for
    /// servers that missed that.
    Group,
}

/// Treatment of replies that are under way when new weights come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InFlightKey {
    /// They are aborted, and asked for again with the tokens that they have, which the new weights compute
    /// anew.
    #[default]
    Recompute,
    /// They go on over what the old weights have computed.
    Keep,
}

/// Weights of tokens in phases that name no correction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorrectionDefault {
    /// Truncated importance sampling, at most 2 a token.
    #[default]
    Tis,
    /// Tokens whose ratio is outside of 0.5 to 5 count nothing (IcePop).
    Icepop,
    /// None: ratios are taken to the policy that sampled a token.
    None,
}

impl CorrectionDefault {
    /// The correction that it stands for.
    pub fn correction(self) -> Option<Correction> {
        let of = |bound| Some(Correction { level: Level::Token, bound, normalise: false });
        match self {
            CorrectionDefault::Tis => of(Bound::Clamp { low: 0.0, high: 2.0 }),
            CorrectionDefault::Icepop => of(Bound::Mask { low: 0.5, high: 5.0 }),
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
            adopt_seconds: 600.0,
            silent_seconds: 300.0,
            answer_seconds: 60.0,
        }
    }
}

impl ServersKeys {
    /// Longest time until a server that is started answers.
    pub fn start_within(&self) -> Duration {
        Duration::from_secs_f64(self.start_seconds)
    }
}

impl SamplersKeys {
    /// Keys that all kinds have.
    pub fn servers(&self) -> &ServersKeys {
        match self {
            SamplersKeys::Vllm(keys) | SamplersKeys::Sglang(keys) => keys,
        }
    }
}
