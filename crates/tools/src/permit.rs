//! Leave to begin a call.

use tokio::sync::OwnedSemaphorePermit;

/// Leave to begin a call, with the places that it takes up, which are free again once this is dropped.
#[derive(Debug, Default)]
pub struct Permit(Vec<OwnedSemaphorePermit>);

impl Permit {
    /// Takes up a place.
    pub fn hold(&mut self, place: OwnedSemaphorePermit) {
        self.0.push(place);
    }

    /// Leave that takes up the places of both.
    #[must_use]
    pub fn and(mut self, other: Permit) -> Permit {
        self.0.extend(other.0);
        self
    }
}
