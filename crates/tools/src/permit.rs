//! Permits to start a call.

use tokio::sync::OwnedSemaphorePermit;

/// Permit to start a tool call. It holds semaphore permits, which are released when the permit is
/// dropped.
#[derive(Debug, Default)]
pub struct Permit(Vec<OwnedSemaphorePermit>);

impl Permit {
    /// Adds a semaphore permit to this permit.
    pub fn add(&mut self, permit: OwnedSemaphorePermit) {
        self.0.push(permit);
    }

    /// Returns a permit that holds the semaphore permits of both permits.
    #[must_use]
    pub fn merge(mut self, other: Permit) -> Permit {
        self.0.extend(other.0);
        self
    }
}
