//! Deadline over all waits of a call.

use std::time::Duration;

use levade_policy::process_time::{Stopwatch, with_timeout};

use super::error::ExternalError;

/// Remaining time of a call until its deadline, and the endpoint that the call waits for.
#[derive(Debug, Clone)]
pub(crate) struct CallDeadline {
    watch: Stopwatch,
    limit: Duration,
    /// Address of the endpoint that the call waits for. The addresses of all candidates until an
    /// endpoint is selected.
    pub endpoint: String,
}

impl CallDeadline {
    /// Starts measuring the time of a call, whose deadline passes after `limit`.
    pub fn new(limit: Duration, endpoint: String) -> Self {
        CallDeadline { watch: Stopwatch::start(), limit, endpoint }
    }

    /// Returns the remaining time until the call's deadline.
    pub fn remaining(&mut self) -> Duration {
        self.limit.saturating_sub(self.watch.elapsed())
    }

    /// Waits for `work` until the call's deadline. `what` describes the work in errors.
    ///
    /// # Errors
    /// Returns [`ExternalError::Deadline`] with `what` if the deadline passes.
    pub async fn wait<T>(
        &mut self,
        what: impl Into<String>,
        work: impl Future<Output = T>,
    ) -> Result<T, ExternalError> {
        self.wait_for(Duration::MAX, what, work).await
    }

    /// Waits for `work` until the call's deadline, but for at most `timeout`. `what` describes the
    /// work in errors.
    ///
    /// # Errors
    /// Returns [`ExternalError::Deadline`] with `what` if the time passes.
    pub async fn wait_for<T>(
        &mut self,
        timeout: Duration,
        what: impl Into<String>,
        work: impl Future<Output = T>,
    ) -> Result<T, ExternalError> {
        let remaining = self.remaining();
        let waited = if timeout < remaining { timeout } else { self.limit };
        let endpoint = self.endpoint.clone();
        let done = with_timeout(remaining.min(timeout), work).await;
        done.ok_or_else(|| ExternalError::Deadline { endpoint, waited, what: what.into() })
    }
}
