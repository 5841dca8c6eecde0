//! Adapters.

use serde::{Deserialize, Serialize};

/// A low-rank adapter (Hu et al. 2021): a linear map W x becomes W x + (alpha / rank) B A x, and only A and B are trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraOptions {
    /// Rows of A, columns of B.
    pub rank: usize,
    /// See above.
    pub alpha: f32,
    /// The projections that get one, by the last part of their names.
    pub targets: Vec<String>,
}

impl Default for LoraOptions {
    fn default() -> Self {
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        LoraOptions { rank: 16, alpha: 32.0, targets: targets.map(str::to_owned).to_vec() }
    }
}
