//! Token-local losses and their derivatives with respect to the token's log-probability.

use serde::{Deserialize, Serialize};

/// What a learner minimises: the sum of `weight × loss` over all terms of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Loss {
    /// The part that imitates or reinforces.
    pub policy: PolicyLoss,
    /// A penalty for leaving the frozen reference, if any. Terms then carry `reference`.
    pub kl: Option<KlPenalty>,
}

/// The part of a loss that imitates or reinforces.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PolicyLoss {
    /// −log p: supervised learning.
    CrossEntropy,
    /// PPO's clipped surrogate (Schulman et al. 2017), which GRPO shares, with separate bounds below and above 1 and,
    /// for negative advantages, the dual clip of Ye et al. 2020.
    Clip {
        /// The ratio is clipped below at 1 − `low`.
        low: f32,
        /// The ratio is clipped above at 1 + `high`.
        high: f32,
        /// For a negative advantage A the loss is at most −`dual` × A; more than 1 where given.
        dual: Option<f32>,
    },
}

/// A penalty for leaving a frozen reference policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// How the divergence is estimated from one sample.
    pub estimator: KlEstimator,
    /// Its coefficient β in the loss.
    pub coefficient: f32,
}

/// Single-sample estimators of KL(policy ‖ reference), with x = log p − log p_ref (Schulman 2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// x.
    K1,
    /// x² / 2.
    K2,
    /// exp(−x) + x − 1.
    K3,
}

/// One term's contribution, before its weight.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Evaluated {
    /// The loss.
    pub loss: f64,
    /// Its derivative with respect to the token's log-probability.
    pub dlogp: f64,
    /// The ratio exp(log p − log p_behaviour); 1 where the term has no behaviour log-probability.
    pub ratio: f64,
    /// Whether a clip bound was active, so that the policy part has no gradient.
    pub clipped: bool,
    /// The estimated KL divergence from the reference; 0 without a penalty.
    pub kl: f64,
}
