//! Options of a pool: the program of its workers and the limits on requests.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::supervisor::{Launch, Supervisor};

/// Options of a pool: how its workers are started, and how many requests they get.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Name of the pool in the log.
    pub name: String,
    /// Supervisor that starts the workers.
    pub supervisor: Supervisor,
    /// Program of a worker.
    pub launch: Launch,
    /// Line that a worker reads before all requests; `None` sends none.
    pub first: Option<Value>,
    /// How a worker reports that it is ready. If `None`, a worker counts as ready at once, and its
    /// output may contain lines that are not responses.
    pub handshake: Option<Handshake>,
    /// Key of the id in requests, responses and cancellations.
    pub id_key: &'static str,
    /// Maximum number of workers, at least 1.
    pub max_workers: usize,
    /// Maximum number of concurrent requests per worker, at least 1.
    pub max_requests: usize,
    /// Grace period in which a worker must respond to a cancelled request. A worker that does not
    /// is terminated, and its other requests fail. 0 terminates the worker at once.
    pub cancel_grace: Duration,
}

/// Checks the report of a ready worker, or returns why the report is rejected.
pub type ReadyCheck = dyn Fn(Value) -> Result<(), String> + Send + Sync;

/// Handshake of a worker. Its first line is `{"ready": REPORT}` or `{"error": WHY}`.
#[derive(Clone)]
pub struct Handshake {
    /// Timeout for the first line.
    pub timeout: Duration,
    /// Check of the report.
    pub check: Arc<ReadyCheck>,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
