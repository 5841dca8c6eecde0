//! Handoff of devices between a learner and samplers.

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};

/// Statistics of a transfer of learner state between device memory and host memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TransferReport {
    /// Number of bytes transferred, over all ranks.
    pub bytes: u64,
    /// Duration of the transfer, in seconds.
    pub seconds: f64,
}

/// A learner that can move its state to host memory to release its devices. Any learner call except
/// planning moves the state back automatically.
#[async_trait]
pub trait Offload: Send + Sync {
    /// Moves weights, gradients and optimizer state to host memory. If `keeps_weights` is true, the
    /// policy's weights stay on the devices, so that they can be sent to samplers. State that is
    /// already in host memory stays there.
    ///
    /// # Errors
    /// Returns an error if host memory is insufficient or the learner is unreachable.
    async fn offload(&self, keeps_weights: bool) -> Result<TransferReport, PolicyError>;

    /// Moves the learner's complete state from host memory back to the devices.
    ///
    /// # Errors
    /// Returns an error if device memory is insufficient or the learner is unreachable.
    async fn onload(&self) -> Result<TransferReport, PolicyError>;
}

/// Owner of devices that it shares with samplers. It can hand the devices to sleeping samplers.
#[async_trait]
pub(crate) trait SamplerWaker: Send + Sync {
    /// Hands the devices to the samplers, and returns once the samplers have loaded the newest
    /// weights again.
    ///
    /// # Errors
    /// Returns an error if the learner cannot be offloaded, if no weights have been published, or
    /// if no sampler loads the weights.
    async fn wake(&self) -> Result<(), PolicyError>;
}
