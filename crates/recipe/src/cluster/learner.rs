//! `[cluster.learner]`: who trains, in place of the embedded engine.

use std::path::PathBuf;
use std::time::Duration;

use levade_policy::Precision;
use serde::{Deserialize, Serialize};

/// `[cluster.learner]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearnerKeys {
    /// Processes of `levade_torch` under torchrun.
    Torch(TorchKeys),
}

/// `[cluster.learner] kind = "torch"`: started by the run (`start = true`), or where `url` says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TorchKeys {
    /// Address of rank 0 of a group that runs already, such as `http://127.0.0.1:29700`; empty where it is
    /// started.
    pub url: String,
    /// Environment variable with the token of that group.
    pub token_env: String,
    /// Whether the run starts the group, and ends it.
    pub start: bool,
    /// Python of the environment that has `levade_torch`: a program, or its path.
    pub python: PathBuf,
    /// Machines of the group. On each but the first, `levade cluster join RUN` takes part, which
    /// `levade launch` starts.
    pub nodes: u32,
    /// Processes on each machine; 0 for one for each GPU, or one where there is none.
    pub processes: u32,
    /// GPUs on each machine; 0 trains on the processors.
    pub gpus: u32,
    /// Threads of each process. Results can depend on it.
    pub threads: u32,
    /// Precision that is computed in: weights as they are learnt are f32 in any case.
    pub dtype: Precision,
    /// Ranks that share a tensor.
    pub tp: u32,
    /// Ranks that share a path.
    pub cp: u32,
    /// Ranks that share experts.
    pub ep: u32,
    /// Stages of a pipeline, each with a run of the layers.
    pub pp: u32,
    /// Further arguments of `levade_torch`.
    pub args: Vec<String>,
    /// Names of environment variables that the processes get besides the usual ones.
    pub environment: Vec<String>,
    /// Longest time until a group that is started answers, in seconds.
    pub start_seconds: f64,
    /// Longest time for one micro-batch, step of the optimiser, forward pass, or writing or reading of
    /// weights, in seconds.
    pub call_seconds: f64,
    /// Longest time in which the group says nothing, or there is no connection to it, in seconds.
    pub silent_seconds: f64,
    /// Times in a row that the run goes on from its newest checkpoint, with a group that is started anew,
    /// when one has died or hangs.
    pub restarts: u32,
}

impl Default for TorchKeys {
    fn default() -> Self {
        TorchKeys {
            url: String::new(),
            token_env: String::new(),
            start: false,
            python: "python3".into(),
            nodes: 1,
            processes: 0,
            gpus: 0,
            threads: 1,
            dtype: Precision::F32,
            tp: 1,
            cp: 1,
            ep: 1,
            pp: 1,
            args: Vec::new(),
            environment: Vec::new(),
            start_seconds: 600.0,
            call_seconds: 900.0,
            silent_seconds: 120.0,
            restarts: 3,
        }
    }
}

impl TorchKeys {
    /// Processes on each machine.
    pub fn of_node(&self) -> u32 {
        if self.processes > 0 { self.processes } else { self.gpus.max(1) }
    }

    /// Longest time until a group answers.
    pub fn start(&self) -> Duration {
        Duration::from_secs_f64(self.start_seconds)
    }

    /// Longest time for one thing.
    pub fn call(&self) -> Duration {
        Duration::from_secs_f64(self.call_seconds)
    }

    /// Longest silence.
    pub fn silence(&self) -> Duration {
        Duration::from_secs_f64(self.silent_seconds)
    }
}
