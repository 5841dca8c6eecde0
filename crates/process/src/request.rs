//! Requests to workers, and the errors of these requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::supervisor::exit_status;

/// Number of requests so far, which makes their ids unique in this process.
static NEXT_REQUEST_ID: AtomicU64 = AtomicU64::new(0);

/// A request to a worker: a JSON object, to which the pool adds the request's id.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub(crate) id: String,
    pub(crate) body: Value,
}

impl Request {
    /// Creates a request with a unique id that starts with `label`.
    pub fn new(label: &str, body: Value) -> Self {
        Request { id: format!("{label}-{}", NEXT_REQUEST_ID.fetch_add(1, Ordering::Relaxed)), body }
    }

    /// Creates a request with the id `id`, which must differ from the ids of the pool's other
    /// pending requests.
    pub fn with_id(id: impl Into<String>, body: Value) -> Self {
        Request { id: id.into(), body }
    }
}

/// Reason why a worker did not respond to a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The worker's program cannot be started.
    #[error("{0}")]
    NotStarted(String),
    /// The worker reported an error instead of being ready, or its report was rejected. Contains
    /// the reason.
    #[error("{0}")]
    NotReady(String),
    /// The worker was not ready within the handshake's timeout, which the variant contains.
    #[error("the worker was still loading after {0:?}")]
    StartTimeout(Duration),
    /// The worker's process has exited.
    #[error("the worker ended with {}: \
             {}", exit_status(*.code), .last_line.as_deref().unwrap_or("nothing on standard \
                                                                        error"))]
    Exited {
        /// Exit code of the process, as [`Child::wait`](crate::Child::wait) returns it.
        code: Option<i32>,
        /// Last nonblank line of the worker's standard error. `None` if there is no such line.
        last_line: Option<String>,
    },
    /// The worker has closed its output, but has not exited.
    #[error("the worker closed its output, but has not exited")]
    ClosedOutput,
    /// The worker wrote a line that is not JSON, and was terminated. Contains the reason.
    #[error("the worker wrote a line that is not JSON: {0}")]
    InvalidLine(String),
    /// The worker did not respond to a cancelled request, and was terminated.
    #[error(
        "the worker was terminated, because it did not respond within {grace:?} after its request \
         {id} was cancelled"
    )]
    Unresponsive {
        /// Id of the cancelled request.
        id: String,
        /// Grace period in which the worker should have responded.
        grace: Duration,
    },
    /// The pool, or the tokio runtime that its worker ran on, has been dropped.
    #[error("the worker has stopped, because its pool or runtime was closed")]
    Closed,
    /// The worker did not respond within this timeout, and the request was cancelled.
    #[error("the worker did not respond within {0:?}")]
    Timeout(Duration),
}
