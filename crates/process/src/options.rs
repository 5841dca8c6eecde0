//! How the workers of a pool are started, and the limits for their requests.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::supervisor::{Launch, Supervisor};

/// How the workers of a pool are started, and what they are asked at once.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Name in the log.
    pub name: String,
    /// Starts the workers.
    pub supervisor: Supervisor,
    /// The program of a worker.
    pub launch: Launch,
    /// Line that a worker reads before all requests.
    pub first: Option<Value>,
    /// How a worker reports that it is ready. If `None`, a worker is ready at once, and its output can have
    /// lines that are no answers.
    pub handshake: Option<Handshake>,
    /// Key of the id in requests, answers and cancellations.
    pub id_key: &'static str,
    /// Maximum number of workers.
    pub max_workers: usize,
    /// Maximum number of requests at once for each worker.
    pub max_requests: usize,
    /// Time in which a worker must let go of a cancelled request. A worker that does not is ended, and
    /// fails its other requests. 0 ends the worker at once.
    pub cancel_grace: Duration,
}

/// Checks the report of a worker that is ready, or returns why it is rejected.
pub type ReadyCheck = dyn Fn(Value) -> Result<(), String> + Send + Sync;

/// A worker's first line: `{"ready": REPORT}`, or `{"error": WHY}`.
#[derive(Clone)]
pub struct Handshake {
    /// Timeout for the line.
    pub timeout: Duration,
    /// Gets the report.
    pub check: Arc<ReadyCheck>,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
