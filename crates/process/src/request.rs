//! Requests to workers, and how they fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::supervisor::exit_status;

/// Numbers of requests, unique in this process.
static REQUESTS: AtomicU64 = AtomicU64::new(0);

/// A request to a worker: a JSON object, to which the pool adds the id.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub(crate) id: String,
    pub(crate) body: Value,
}

impl Request {
    /// Creates a request with a unique id that starts with `label`.
    pub fn new(label: &str, body: Value) -> Self {
        Request { id: format!("{label}-{}", REQUESTS.fetch_add(1, Ordering::Relaxed)), body }
    }

    /// Creates a request with an id that no other open request of the pool has.
    pub fn with_id(id: impl Into<String>, body: Value) -> Self {
        Request { id: id.into(), body }
    }
}

/// Why a worker cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// The program cannot be started.
    #[error("{0}")]
    NotStarted(String),
    /// The worker reported an error instead of being ready, or its report was rejected.
    #[error("{0}")]
    NotReady(String),
    /// The worker was not ready in time.
    #[error("it was still loading after {0:?}")]
    StartTimeout(Duration),
    /// The worker exited.
    #[error("the worker ended with {}: {}", exit_status(*.code), .last_line.as_deref().unwrap_or("nothing on standard error"))]
    Exited {
        /// Exit code, as [`Child::wait`](crate::Child::wait) returns it.
        code: Option<i32>,
        /// Last line of its standard error that is not blank.
        last_line: Option<String>,
    },
    /// The worker closed its output, but has not exited.
    #[error("the worker closed its output")]
    ClosedOutput,
    /// The worker wrote a line that is no JSON. The worker was ended.
    #[error("a line of the worker is no answer: {0}")]
    InvalidLine(String),
    /// The worker did not let go of a cancelled request. The worker was ended.
    #[error("the worker was ended, since its request {id} went on for {grace:?} after it had been given up")]
    Unresponsive {
        /// Id of the cancelled request.
        id: String,
        /// The pool's grace.
        grace: Duration,
    },
    /// The pool, or the runtime that it ran on, is gone.
    #[error("the worker is gone")]
    Closed,
    /// The request was not answered within its timeout, and was cancelled.
    #[error("did not answer within {0:?}")]
    Timeout(Duration),
}
