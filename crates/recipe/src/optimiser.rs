//! `[phase.optimiser]`: the optimizer of a phase, which SFT, RL and the critic share.

use serde::{Deserialize, Serialize};

/// `[phase.optimiser]`: AdamW and its schedule. It starts afresh with each phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimiserKeys {
    /// How the learning rate falls from its peak.
    pub schedule: Schedule,
    /// Steps over which it first rises to the peak.
    pub warmup: u32,
    /// The share of the peak it falls to.
    #[serde(alias = "final_share")]
    pub min_lr_ratio: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay, of matrices only.
    pub weight_decay: f32,
    /// Gradients are scaled down to this global norm; 0 leaves them.
    pub max_grad_norm: f32,
}

impl Default for OptimiserKeys {
    fn default() -> Self {
        OptimiserKeys {
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

/// The shape of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// Stays at the peak.
    #[default]
    Constant,
    /// A straight line down to the final share.
    Linear,
    /// Half a cosine down to the final share.
    Cosine,
}
