//! Errors of sandboxes themselves. What code does wrong is an [`Outcome`](crate::Outcome).

/// Reasons why code was not run, or not to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// The kernel gives less protection than was asked for.
    #[error("full protection cannot be had here. Missing: {missing}. Way out: {way_out}")]
    Protection {
        /// Walls that are missing, and why.
        missing: String,
        /// Ways to have them, or to do without.
        way_out: String,
    },
    /// The interpreter cannot be used.
    #[error("python = {python:?} cannot be used: {why}")]
    Python {
        /// Path or name.
        python: String,
        /// Cause.
        why: String,
    },
    /// A request that cannot be met: an option, a path, a language.
    #[error("{0}")]
    Request(String),
    /// All places are taken, and so are those to wait in.
    #[error("{running} runs are under way and {waiting} wait, and no more may; try again later")]
    Busy {
        /// Runs at once.
        running: usize,
        /// Places to wait in.
        waiting: usize,
    },
    /// All sessions that may be open are.
    #[error("{most} sessions are open, and no more may be: close one, or raise `sessions`")]
    Sessions {
        /// How many may be.
        most: usize,
    },
    /// The jail, or who builds it, failed.
    #[error("the sandbox failed: {0}")]
    Broken(String),
}
