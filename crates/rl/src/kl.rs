//! Divergence from a frozen reference: estimators, penalties in the loss and in the reward, and a controller of their size.

use serde::{Deserialize, Serialize};

use crate::moments::Counting;
use crate::surrogate::bounded_exp;

/// Single-sample estimators of KL(policy ‖ reference), with x = log p − log p_ref (Schulman 2020).
///
/// As a loss only K2 has the gradient of the divergence itself, in expectation over the policy's own samples: that of K1 is 0
/// and that of K3 belongs to the reverse divergence. The last two therefore report one and descend the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// x.
    K1,
    /// x² / 2.
    K2,
    /// exp(−x) + x − 1.
    K3,
    /// |x|.
    Absolute,
    /// The value of K1 with the gradient of K2.
    K1WithK2Gradient,
    /// The value of K3 with the gradient of K2.
    K3WithK2Gradient,
}

impl KlEstimator {
    /// The estimate and its derivative with respect to log p, at x = log p − log p_ref.
    ///
    /// The exponent of K3 is clamped like every log-ratio, its derivative not taken through the bound: that would take
    /// the pull away from exactly the tokens that have left the reference farthest.
    pub fn estimate(self, x: f64) -> (f64, f64) {
        match self {
            KlEstimator::K1 => (x, 1.0),
            KlEstimator::K2 => (0.5 * x * x, x),
            KlEstimator::K3 => {
                let value = bounded_exp(-x).0;
                (value + x - 1.0, 1.0 - value)
            }
            KlEstimator::Absolute => (x.abs(), if x == 0.0 { 0.0 } else { x.signum() }),
            KlEstimator::K1WithK2Gradient => (x, x),
            KlEstimator::K3WithK2Gradient => (KlEstimator::K3.estimate(x).0, x),
        }
    }
}

/// A penalty for leaving a frozen reference policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// How the divergence is estimated from one sample.
    pub estimator: KlEstimator,
    /// Its coefficient β.
    pub coefficient: f64,
}

impl KlPenalty {
    /// Takes the penalty off the reward of every action token of a path instead: r − β KL. `logps` are those of the policy at the
    /// beginning of the step. Returns the mean divergence over the path's tokens.
    pub fn charge(&self, rewards: &mut [f64], logps: &[f64], references: &[f64], counting: Counting) -> f64 {
        let found =
            logps.iter().zip(references).map(|(logp, reference)| self.estimator.estimate(logp - reference).0);
        let found: Vec<f64> = found.collect();
        rewards.iter_mut().zip(&found).for_each(|(reward, kl)| *reward -= self.coefficient * kl);
        counting.mean(found.into_iter())
    }
}

/// Changes β until the divergence is what is wanted (Ziegler et al. 2019, section 2.2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveKl {
    /// The divergence wanted, more than 0.
    pub target: f64,
    /// How many rollouts it takes to change β by its own size, at an error of one target, more than 0.
    pub horizon: f64,
}

impl AdaptiveKl {
    /// β after a step of `rollouts` that found a divergence of `found`. The error counts up to a fifth of the target; β never falls below 0.
    pub fn next(&self, coefficient: f64, found: f64, rollouts: usize) -> f64 {
        let error = (found / self.target - 1.0).clamp(-0.2, 0.2);
        (coefficient * (1.0 + error * rollouts as f64 / self.horizon)).max(0.0)
    }
}
