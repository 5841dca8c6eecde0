//! Requests by which a trainer opens the store of a run on a server, and their responses.

use std::time::Duration;

use levade_tree::RunId;
use serde::{Deserialize, Serialize};

/// Request to open the store of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenRequest {
    /// Opens the run for reading only.
    Read,
    /// For writing: takes the lease of the run.
    Write {
        /// Whether the run is a new one, whose store must be empty.
        is_new: bool,
        /// Id of a run that starts. A store that exists already keeps its id when it is resumed.
        run: RunId,
        /// Trainer that opens the run.
        trainer: Trainer,
    },
}

/// A trainer that works on a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trainer {
    /// Random text of the run directory. The lock of the directory ensures that only one process
    /// uses it, so a trainer with the same text can take the run over at once.
    pub owner: String,
    /// Process and directory, for messages.
    pub name: String,
}

/// Response to an [`OpenRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedRun {
    /// Id of the run whose data the store holds.
    pub run: RunId,
    /// Number of the lease, which every write carries. 0 if the store was opened only for reading.
    pub epoch: u64,
    /// Interval at which the lease must be renewed.
    pub heartbeat: Duration,
}

/// A run whose record a server keeps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunEntry {
    /// Name of the run.
    pub name: String,
    /// Size of the record in bytes. 0 if the record is in memory.
    pub bytes: u64,
    /// Seconds since the last change of the record. `None` if the record is in memory.
    pub idle_seconds: Option<f64>,
    /// Process and directory of the trainer that has the lease of the run. `None` if no trainer has
    /// renewed the lease since the server started.
    pub trainer: Option<String>,
}
