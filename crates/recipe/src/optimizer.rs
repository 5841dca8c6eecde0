//! `[phase.optimizer]`: the optimizer of a phase. SFT, RL and the critic share its keys.

use serde::{Deserialize, Serialize};

/// `[phase.optimizer]`: AdamW and its learning-rate schedule. The optimizer state is reset in each
/// phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerKeys {
    /// Schedule of the learning rate after the warm-up.
    pub schedule: Schedule,
    /// Number of warm-up steps, in which the learning rate rises to its peak.
    pub warmup: u32,
    /// Final learning rate as a fraction of the peak, in 0..=1.
    #[serde(alias = "final_share")]
    pub min_lr_ratio: f32,
    /// Exponential decay rate of the first moment, in 0..1.
    pub beta1: f32,
    /// Exponential decay rate of the second moment, in 0..1.
    pub beta2: f32,
    /// Constant that is added to the root of the second moment, more than 0.
    pub epsilon: f32,
    /// Decoupled weight decay, applied to matrices only; at least 0.
    pub weight_decay: f32,
    /// Maximum global norm of the gradients. Larger gradients are scaled down. 0 disables clipping.
    pub max_grad_norm: f32,
}

impl Default for OptimizerKeys {
    fn default() -> Self {
        OptimizerKeys {
            schedule: Schedule::default(),
            warmup: 0,
            min_lr_ratio: 0.0,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
        }
    }
}

/// Shape of the learning-rate schedule after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// The learning rate stays at the peak.
    #[default]
    Constant,
    /// The learning rate decays linearly to `min_lr_ratio` of the peak.
    Linear,
    /// The learning rate decays along half a cosine to `min_lr_ratio` of the peak.
    Cosine,
}
