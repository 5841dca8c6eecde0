//! A deadline over the waits of a call.

use std::time::Duration;

use levade_policy::awake::{Stopwatch, within};

use super::error::ExternalError;

/// The time that a call has, and whom it asks.
#[derive(Debug, Clone)]
pub(crate) struct Waits {
    watch: Stopwatch,
    limit: Duration,
    /// Address that is asked, or all that may be.
    pub endpoint: String,
}

impl Waits {
    /// Starts now.
    pub fn new(limit: Duration, endpoint: String) -> Self {
        Waits { watch: Stopwatch::start(), limit, endpoint }
    }

    /// Time that is left.
    pub fn left(&mut self) -> Duration {
        self.limit.saturating_sub(self.watch.elapsed())
    }

    /// Waits for something, for as long as there is time.
    ///
    /// # Errors
    /// [`ExternalError::Deadline`] with `what`.
    pub async fn wait<T>(
        &mut self,
        what: impl Into<String>,
        work: impl Future<Output = T>,
    ) -> Result<T, ExternalError> {
        self.wait_at_most(Duration::MAX, what, work).await
    }

    /// Waits for something, at most for so long.
    ///
    /// # Errors
    /// [`ExternalError::Deadline`] with `what`.
    pub async fn wait_at_most<T>(
        &mut self,
        most: Duration,
        what: impl Into<String>,
        work: impl Future<Output = T>,
    ) -> Result<T, ExternalError> {
        let left = self.left();
        let waited = if most < left { most } else { self.limit };
        let (endpoint, done) = (self.endpoint.clone(), within(left.min(most), work).await);
        done.ok_or_else(|| ExternalError::Deadline { endpoint, waited, what: what.into() })
    }
}
