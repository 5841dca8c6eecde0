//! Requests by which a trainer opens the store of a run on a server, and their responses.

use std::time::Duration;

use levade_tree::RunId;
use serde::{Deserialize, Serialize};

/// Request of a client to open the store of a run on a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenRequest {
    /// Opens the run for reading only.
    Read,
    /// Opens the run for writing, and acquires the lease of the run.
    Write {
        /// Whether the run is a new run, whose store must be empty.
        is_new: bool,
        /// Id for a new store. A store that exists already keeps its id when the run is resumed.
        run: RunId,
        /// Trainer that opens the run, and becomes the holder of the lease.
        trainer: Trainer,
    },
}

/// A trainer that opens a run on a store server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trainer {
    /// Random text that identifies the run directory. The lock of the directory ensures that only
    /// one process uses it, so a trainer with the same text can take over the lease at once.
    pub owner: String,
    /// Process id and directory of the trainer, for messages.
    pub name: String,
}

/// Response to an [`OpenRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedRun {
    /// Id of the run whose data the store holds.
    pub run: RunId,
    /// Number of the lease, which every write must contain. 0 if the run was opened only for
    /// reading.
    pub epoch: u64,
    /// Interval at which the lease must be renewed.
    pub heartbeat: Duration,
}

/// A run on a store server, as a listing of runs shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunEntry {
    /// Name of the run on the server.
    pub name: String,
    /// Size of the run's store in bytes. 0 if the store is in memory.
    pub bytes: u64,
    /// Seconds since the last change of the run's store. `None` if the store is in memory.
    pub idle_seconds: Option<f64>,
    /// Process and directory of the trainer that has the lease of the run. `None` if no trainer has
    /// renewed the lease since the server started.
    pub trainer: Option<String>,
}
