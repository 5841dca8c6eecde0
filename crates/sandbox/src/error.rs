//! Errors of the sandbox itself. Faults of the code that it runs are an
//! [`Outcome`](crate::Outcome).

/// Reason why code was not run, or was not run to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The kernel provides less protection than requested.
    #[error("full protection cannot be had here. Missing: {missing}. Way out: {way_out}")]
    Protection {
        /// Missing walls with reasons.
        missing: String,
        /// Ways to get the missing walls, or to run without them.
        way_out: String,
    },
    /// The interpreter cannot be used.
    #[error("python = {python:?} cannot be used: {why}")]
    Python {
        /// Path or name of the interpreter.
        python: String,
        /// Reason for the failure.
        why: String,
    },
    /// The request is invalid or cannot be fulfilled, for instance because of an option, a path or
    /// a language.
    #[error("{0}")]
    Request(String),
    /// The concurrency limit is reached and the queue is full.
    #[error("{running} runs are under way and {waiting} wait, and no more may; try again later")]
    Busy {
        /// Maximum number of concurrent runs.
        running: usize,
        /// Maximum length of the queue.
        waiting: usize,
    },
    /// The maximum number of sessions is open.
    #[error("{max} sessions are open, and no more may be: close one, or raise `sessions`")]
    Sessions {
        /// Maximum number of open sessions.
        max: usize,
    },
    /// The jail or the process that builds it failed.
    #[error("the sandbox failed: {0}")]
    Broken(String),
}
