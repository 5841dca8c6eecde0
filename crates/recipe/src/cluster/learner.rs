//! `[cluster.learner]`: the learner that trains in place of the embedded engine.

use std::path::PathBuf;
use std::time::Duration;

use levade_policy::Precision;
use serde::{Deserialize, Serialize};

/// `[cluster.learner]`: an external learner, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearnerKeys {
    /// A group of `levade_torch` processes, started with torchrun.
    Torch(TorchKeys),
}

/// `[cluster.learner] kind = "torch"`: a group of learner processes that the run starts
/// (`start = true`) or that already runs at `url`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TorchKeys {
    /// URL of rank 0 of a process group that already runs, such as `http://127.0.0.1:29700`. Empty
    /// if the run starts the group.
    pub url: String,
    /// Name of the environment variable that contains the access token of the group at `url`.
    pub token_env: String,
    /// Whether the run starts and stops the process group.
    pub start: bool,
    /// Python interpreter of the environment that has `levade_torch`: a program in `PATH`, or a
    /// path.
    pub python: PathBuf,
    /// Number of nodes of the learner, in 1..=16384. Each node except the first runs
    /// `levade cluster join RUN`, which `levade launch` starts.
    pub nodes: u32,
    /// Number of processes per node. 0 starts one process per GPU, or one process if there are no
    /// GPUs.
    pub processes: u32,
    /// Number of GPUs per node; 0 trains on CPUs.
    pub gpus: u32,
    /// Number of threads per process, at least 1. Results can depend on it.
    pub threads: u32,
    /// Precision in which the learner computes. The trained weights are always f32.
    pub dtype: Precision,
    /// Tensor-parallel size: number of ranks that share a tensor.
    pub tp: u32,
    /// Context-parallel size: number of ranks that share a sequence.
    pub cp: u32,
    /// Expert-parallel size: number of ranks that share experts.
    pub ep: u32,
    /// Pipeline-parallel size: number of stages, each with consecutive layers.
    pub pp: u32,
    /// Additional command-line arguments of `levade_torch`.
    pub args: Vec<String>,
    /// Names of environment variables that are passed to the learner's processes in addition to the
    /// usual ones.
    pub environment: Vec<String>,
    /// Timeout for the first response of a process group that the run starts, in seconds.
    pub start_seconds: f64,
    /// Timeout for one micro-batch, optimizer step or forward pass, or for reading or writing
    /// weights, in seconds.
    pub call_seconds: f64,
    /// Maximum time without a message from the process group or a connection to it, in seconds.
    pub silent_seconds: f64,
    /// Maximum number of consecutive restarts. If the process group has exited or does not respond,
    /// the run starts a new group and resumes from its newest checkpoint.
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
    /// Returns the number of learner processes per node.
    pub fn processes_per_node(&self) -> u32 {
        if self.processes > 0 { self.processes } else { self.gpus.max(1) }
    }

    /// Returns the timeout for the first response of a process group that the run starts.
    pub fn start_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.start_seconds)
    }

    /// Returns the timeout for one call of the learner.
    pub fn call_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.call_seconds)
    }

    /// Returns the maximum time without a message from the learner.
    pub fn silence_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.silent_seconds)
    }
}
