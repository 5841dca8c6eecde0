//! Options of a pool: the program of its workers and the limits on requests.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::supervisor::{Launch, Supervisor};

/// Options of a pool of worker processes: how its workers are started, and how many requests they
/// get.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Name of the pool in log messages.
    pub name: String,
    /// Supervisor that starts the worker processes.
    pub supervisor: Supervisor,
    /// Program that each worker runs.
    pub launch: Launch,
    /// Line that each worker receives before any request. If `None`, no line is sent.
    pub first: Option<Value>,
    /// Exchange by which a worker reports that it is ready. If `None`, a worker counts as ready
    /// immediately, and its output may contain lines that are not responses.
    pub handshake: Option<Handshake>,
    /// JSON key of the id in requests, responses and cancellations.
    pub id_key: &'static str,
    /// Maximum number of worker processes. Must be at least 1.
    pub max_workers: usize,
    /// Maximum number of concurrent requests per worker. Must be at least 1.
    pub max_requests: usize,
    /// Grace period in which a worker must respond to a cancelled request. A worker that does not
    /// respond is terminated, and its other requests fail. 0 terminates the worker immediately.
    pub cancel_grace: Duration,
}

/// Function that checks the report of a ready worker, and returns the reason if the report is
/// rejected.
pub type ReadyCheck = dyn Fn(Value) -> Result<(), String> + Send + Sync;

/// Exchange by which a worker reports that it is ready. The worker's first line is `{"ready":
/// REPORT}` or `{"error": WHY}`.
#[derive(Clone)]
pub struct Handshake {
    /// Timeout for the worker's first line.
    pub timeout: Duration,
    /// Function that checks the worker's report.
    pub check: Arc<ReadyCheck>,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
