//! Handoff of devices between a learner and samplers.

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};

/// Statistics of a move between device memory and host memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TransferReport {
    /// Bytes moved, over all ranks.
    pub bytes: u64,
    /// Duration of the move, in seconds.
    pub seconds: f64,
}

/// A learner that can release its devices. Any call except planning moves its state back
/// automatically.
#[async_trait]
pub trait Offload: Send + Sync {
    /// Moves weights, gradients and optimizer state to host memory. With `keeps_weights`, the
    /// policy's weights stay on the devices, so that they can be sent. State that is already in
    /// host memory stays there.
    ///
    /// # Errors
    /// Returns an error if host memory is insufficient or the learner is unreachable.
    async fn offload(&self, keeps_weights: bool) -> Result<TransferReport, PolicyError>;

    /// Moves all state back to the devices.
    ///
    /// # Errors
    /// Returns an error if device memory is insufficient or the learner is unreachable.
    async fn onload(&self) -> Result<TransferReport, PolicyError>;
}

/// An owner of devices that can hand them to sleeping samplers.
#[async_trait]
pub(crate) trait Wake: Send + Sync {
    /// Hands the devices to the samplers, and returns once they have loaded the newest
    /// weights again.
    ///
    /// # Errors
    /// Returns an error if the learner cannot be offloaded, there are no weights yet, or no
    /// sampler loads them.
    async fn wake(&self) -> Result<(), PolicyError>;
}
