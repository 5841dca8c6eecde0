//! Sides of devices that a learner and samplers have by turns.

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};

/// Account of a move between the memory of devices and that of the host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes that were moved, on all ranks,
    pub bytes: u64,
    /// and the time that it took.
    pub seconds: f64,
}

/// A learner that can leave its devices to others. Whatever it is asked for but to plan brings it back by
/// itself.
#[async_trait]
pub trait Offloads: Send + Sync {
    /// Moves weights, gradients and the optimiser's state to the memory of the host; with `keeps_weights` all
    /// but the weights of the policy, which can be sent then. What is there already stays there.
    ///
    /// # Errors
    /// When the host's memory does not suffice, or the learner is gone.
    async fn offload(&self, keeps_weights: bool) -> Result<Moved, PolicyError>;

    /// Moves all of it back.
    ///
    /// # Errors
    /// When the devices' memory does not suffice, or the learner is gone.
    async fn onload(&self) -> Result<Moved, PolicyError>;
}

/// Whoever can hand devices to samplers that sleep.
#[async_trait]
pub(crate) trait Wakes: Send + Sync {
    /// Returns once samplers have their devices and the newest weights that they adopted.
    ///
    /// # Errors
    /// When the learner does not leave them, no weights were adopted yet, or nobody adopts them again.
    async fn wake(&self) -> Result<(), PolicyError>;
}
