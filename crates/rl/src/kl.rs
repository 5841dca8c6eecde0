//! Divergence from a frozen reference: estimators, penalties in the loss and in the reward, and a
//! controller of the coefficient.

use serde::{Deserialize, Serialize};

use crate::moments::Counting;
use crate::surrogate::bounded_exp;

/// Single-sample estimators of KL(policy ‖ reference), with x = log p − log p_ref (Schulman 2020).
///
/// As a loss without importance weights, only K2 has the gradient of the divergence, in expectation
/// over samples of the policy. The expected gradient of K1 is 0, and the expected gradient of K3 is
/// the gradient of the reverse divergence. Therefore the last two estimators combine the value of
/// K1 or K3 with the gradient of K2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// K1: the log-ratio x, which is unbiased as a value.
    K1,
    /// K2: x² / 2, whose gradient is unbiased.
    K2,
    /// K3: exp(−x) + x − 1, which is never negative.
    K3,
    /// The absolute log-ratio |x|.
    Absolute,
    /// The value of K1 with the gradient of K2.
    K1WithK2Gradient,
    /// The value of K3 with the gradient of K2.
    K3WithK2Gradient,
}

impl KlEstimator {
    /// Returns the estimate and its derivative with respect to log p, at x = log p − log p_ref.
    ///
    /// The exponent of K3 is clamped like every log-ratio. Its derivative ignores the clamp, which
    /// would otherwise remove the gradient from the tokens that are farthest from the reference.
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

/// Penalty for the divergence of the policy from a frozen reference policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// Estimator of the KL divergence from one sampled token.
    pub estimator: KlEstimator,
    /// Coefficient β of the penalty.
    pub coefficient: f64,
    /// Whether the loss multiplies an estimate by the token's ratio ρ to the behavior policy. The
    /// estimate is then unbiased for tokens that other weights sampled (DeepSeek-AI 2025,
    /// DeepSeek-V3.2, section 3.1).
    #[serde(default)]
    pub importance_weighted: bool,
}

impl KlPenalty {
    /// Returns a token's KL divergence from the reference, and its derivative with respect to log
    /// p, at x = log p − log p_ref. `log_ratio` is log p − log p_behavior, and is used only if the
    /// penalty is importance-weighted.
    ///
    /// The weighted divergence is ρ k, and the gradient goes through both factors: ρ (k + k′). For
    /// K1 and K3 this is the gradient of the divergence, in expectation over samples of the
    /// behavior policy. If K2's gradient replaces the estimator's own, it is multiplied by ρ.
    pub fn evaluate(&self, x: f64, log_ratio: f64) -> (f64, f64) {
        let (value, derivative) = self.estimator.estimate(x);
        if !self.importance_weighted {
            return (value, derivative);
        }
        let (ratio, through) = bounded_exp(log_ratio);
        match self.estimator {
            KlEstimator::K1WithK2Gradient | KlEstimator::K3WithK2Gradient => {
                (ratio * value, ratio * derivative)
            }
            _ => (ratio * value, ratio * derivative + through * value),
        }
    }

    /// Subtracts the KL penalty from the reward of every action token of a sequence, r − β KL,
    /// instead of adding a penalty to the loss. `logps` are the log-probabilities under the policy
    /// at the start of the step. Returns the mean divergence over the sequence's tokens.
    pub fn apply_to_rewards(
        &self,
        rewards: &mut [f64],
        logps: &[f64],
        references: &[f64],
        counting: Counting,
    ) -> f64 {
        let found = logps
            .iter()
            .zip(references)
            .map(|(logp, reference)| self.estimator.estimate(logp - reference).0);
        let found: Vec<f64> = found.collect();
        rewards.iter_mut().zip(&found).for_each(|(reward, kl)| *reward -= self.coefficient * kl);
        counting.mean(found.into_iter())
    }
}

/// Bound on the controller's relative error (KL − target) / target; larger errors are clipped.
const MAX_RELATIVE_ERROR: f64 = 0.2;

/// Controller that adjusts the KL coefficient β until the divergence reaches a target (Ziegler et
/// al. 2019, section 2.2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptiveKl {
    /// Target of the KL divergence, in nats per token, greater than 0.
    pub target: f64,
    /// Number of rollouts over which β changes by 100 % at a relative error of 1. Must be greater
    /// than [`AdaptiveKl::min_horizon`].
    pub horizon: f64,
}

impl AdaptiveKl {
    /// Returns the horizon up to which a step of `rollouts` could set β to 0. β would then stay 0,
    /// because each step multiplies β by a factor.
    pub fn min_horizon(&self, rollouts: usize) -> f64 {
        MAX_RELATIVE_ERROR * rollouts as f64
    }

    /// Returns the KL coefficient β after a step of `rollouts` rollouts with a divergence of
    /// `found`. The relative error is clipped to ± 0.2. β is never below 0.
    pub fn next_coefficient(&self, coefficient: f64, found: f64, rollouts: usize) -> f64 {
        let error = (found / self.target - 1.0).clamp(-MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR);
        (coefficient * (1.0 + error * rollouts as f64 / self.horizon)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn softmax(logits: &[f64; 3]) -> [f64; 3] {
        let sum: f64 = logits.iter().map(|z| z.exp()).sum();
        logits.map(|z| z.exp() / sum)
    }

    fn divergence(logits: &[f64; 3], reference: &[f64; 3]) -> f64 {
        softmax(logits).iter().zip(reference).map(|(p, r)| p * (p / r).ln()).sum()
    }

    /// Returns the mean value and gradient in the logits of a penalty, over tokens sampled from
    /// `behavior`.
    fn expected(
        penalty: KlPenalty,
        logits: &[f64; 3],
        behavior: &[f64; 3],
        reference: &[f64; 3],
    ) -> (f64, [f64; 3]) {
        let p = softmax(logits);
        let mut value = 0.0;
        let mut gradient = [0.0; 3];
        for token in 0..3 {
            let x = (p[token] / reference[token]).ln();
            let (kl, derivative) = penalty.evaluate(x, (p[token] / behavior[token]).ln());
            value += behavior[token] * kl;
            for (v, gradient) in gradient.iter_mut().enumerate() {
                let indicator = if v == token { 1.0 } else { 0.0 };
                *gradient += behavior[token] * derivative * (indicator - p[v]);
            }
        }
        (value, gradient)
    }

    /// Independent of the policy that sampled the tokens, the mean of weighted estimates is the
    /// divergence of the current policy, with its gradient.
    #[test]
    fn weighted_kl_is_unbiased_off_policy() {
        let logits = [0.3, -0.4, 0.9];
        let behavior = softmax(&[-0.5, 0.6, 0.1]);
        let reference = softmax(&[0.0, 0.8, -0.7]);
        let exact = divergence(&logits, &reference);
        let derivatives: [f64; 3] = std::array::from_fn(|v| {
            let [above, below] = [1e-6, -1e-6].map(|h| {
                let mut moved = logits;
                moved[v] += h;
                divergence(&moved, &reference)
            });
            (above - below) / 2e-6
        });
        use KlEstimator::*;
        // Whether the mean of the weighted estimates, and of the unweighted ones, is exact.
        for (estimator, want) in [
            (K1, [true, false]),
            (K3, [true, false]),
            (K1WithK2Gradient, [true, false]),
            (K3WithK2Gradient, [true, false]),
            // On average, K2 is not the divergence of any policy.
            (K2, [false, false]),
        ] {
            for (importance_weighted, is_exact) in [true, false].into_iter().zip(want) {
                let penalty = KlPenalty { estimator, coefficient: 1.0, importance_weighted };
                let (value, gradient) = expected(penalty, &logits, &behavior, &reference);
                let value_is_exact = (value - exact).abs() < 1e-12;
                let gradient_is_exact =
                    gradient.iter().zip(derivatives).all(|(got, want)| (got - want).abs() < 1e-8);
                assert_eq!(
                    (value_is_exact, gradient_is_exact),
                    (is_exact, is_exact),
                    "{penalty:?}"
                );
            }
        }
    }

    /// For a tenth of the horizon, an error of 0.1 changes β by 1 %. Larger errors count as 0.2.
    #[test]
    fn adaptive_kl_coefficient_follows_divergence() {
        let adaptive = AdaptiveKl { target: 0.5, horizon: 100.0 };
        for (divergence, rollouts, want) in [
            (0.5, 10, 2.0),
            (0.55, 10, 2.02),
            (0.45, 10, 1.98),
            (5.0, 10, 2.04),
            (0.0, 10, 1.96),
            (0.0, 500, 0.0),
            (0.0, 1000, 0.0),
        ] {
            let got: f64 = adaptive.next_coefficient(2.0, divergence, rollouts);
            assert!((got - want).abs() < 1e-12, "{divergence} {rollouts}: {got}, expected {want}");
        }
        assert_eq!(adaptive.min_horizon(500), 100.0);
        assert!(adaptive.next_coefficient(2.0, 0.0, 499) > 0.0);
    }

    /// A ratio beyond the bound is clamped, and has no further gradient.
    #[test]
    fn kl_stays_finite_at_extreme_ratios() {
        let penalty =
            KlPenalty { estimator: KlEstimator::K3, coefficient: 1.0, importance_weighted: true };
        let (k3, derivative) = KlEstimator::K3.estimate(0.5);
        assert_eq!(penalty.evaluate(0.5, 500.0), (20f64.exp() * k3, 20f64.exp() * derivative));
        assert_eq!(penalty.evaluate(0.5, 0.0), (k3, derivative + k3));
    }
}
