//! Errors of the sandbox itself. Faults of the code that it runs are an
//! [`Outcome`](crate::Outcome).

/// Reason why the sandbox did not run code, or did not run the code to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The kernel provides less protection than requested.
    #[error("this machine cannot provide full protection. Missing: {missing}. Way out: {way_out}")]
    Protection {
        /// Names of the missing walls, with the reasons.
        missing: String,
        /// Ways to get the missing walls, or to run code without them.
        way_out: String,
    },
    /// The interpreter cannot be used.
    #[error("the interpreter python = {python:?} cannot be used: {why}")]
    Python {
        /// Path or name of the interpreter, as configured.
        python: String,
        /// Reason why the interpreter cannot be used.
        why: String,
    },
    /// The request is invalid or cannot be fulfilled, for example because of an option, a path or a
    /// language.
    #[error("{0}")]
    Request(String),
    /// The maximum number of runs is in progress, and the queue is full.
    #[error(
        "the sandbox is busy: {running} runs are in progress and {waiting} wait, and no more are \
         permitted; try again later"
    )]
    Busy {
        /// Maximum number of runs at the same time.
        running: usize,
        /// Maximum number of queued runs.
        waiting: usize,
    },
    /// The maximum number of sessions is already open.
    #[error(
        "{max} sessions are open, and no more are permitted: close a session, or raise `sessions`"
    )]
    Sessions {
        /// Maximum number of open sessions.
        max: usize,
    },
    /// The jail of the run failed, or the process that builds jails failed.
    #[error("the sandbox failed: {0}")]
    Broken(String),
}
