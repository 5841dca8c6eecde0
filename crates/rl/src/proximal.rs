//! Decoupled PPO without a forward pass for the proximal policy, which is interpolated for each
//! token while the loss is evaluated.

use levade_tree::Term;
use serde::{Deserialize, Serialize};

use crate::correction::Bound;

/// Interpolation of the proximal policy between the policy that sampled the token and the current
/// policy, at the position of the version before the current version (AReaL).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interpolation {
    /// Interpolates log-probabilities linearly.
    LogLinear,
    /// Interpolates probabilities linearly.
    Linear,
}

impl Interpolation {
    /// Returns the proximal log-probability of a token that is `age` versions old, from its
    /// log-probabilities under the behavior policy and the present policy. For an `age` of 0, 1 or
    /// `None`, the result is `behavior`.
    pub fn proximal(self, behavior: f64, present: f64, age: Option<u64>) -> f64 {
        let alpha = match age {
            Some(age @ 1..) => (age as f64 - 1.0) / age as f64,
            _ => 0.0,
        };
        match self {
            Interpolation::LogLinear => behavior + alpha * (present - behavior),
            Interpolation::Linear => ((1.0 - alpha) * behavior.exp() + alpha * present.exp()).ln(),
        }
    }
}

/// The interpolated proximal policy, with the weight π_proximal / π_behavior of the policy loss.
/// The policy and the weight count as constants: no gradient flows through them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterpolatedProximal {
    /// Method of interpolation between the two policies.
    pub by: Interpolation,
    /// Bounds of the weight π_proximal / π_behavior.
    pub bound: Bound,
}

impl InterpolatedProximal {
    /// Returns the log-probability of a term's token under the proximal policy, and the weight of
    /// the term, at the current log-probability `logp`. Returns `None` if no policy sampled the
    /// token.
    pub(crate) fn proximal_and_weight(&self, logp: f32, term: &Term) -> Option<(f64, f64)> {
        let behavior = f64::from(term.behavior?);
        let proximal = self.by.proximal(behavior, logp.into(), Some(term.age.into()));
        Some((proximal, self.bound.weight(proximal - behavior)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KlEstimator, KlPenalty, Loss, PolicyLoss};

    fn loss(policy: PolicyLoss, bound: Bound) -> Loss {
        Loss {
            interpolated: Some(InterpolatedProximal { by: Interpolation::LogLinear, bound }),
            ..Loss::new(policy)
        }
    }

    const WIDE: Bound = Bound::Clamp { low: 0.0, high: 5.0 };
    const CLIP: PolicyLoss =
        PolicyLoss::Clip { low: 0.9, high: 9.0, dual: None, trust: None, keep: None };

    /// At age 3 the interpolation is at two thirds: of a log-ratio of 0.6, 0.4 is the proximal
    /// policy's, and the remaining 0.2 is the current policy's.
    #[test]
    fn interpolation_splits_ratio_and_weight() {
        let term = Term { advantage: 2.0, behavior: Some(-2.0), age: 3, ..Term::default() };
        let got = loss(CLIP, WIDE).evaluate(-1.4, &term);
        assert!((got.ratio - 0.2f64.exp()).abs() < 1e-6, "{got:?}");
        assert!((got.loss + 2.0 * 0.6f64.exp()).abs() < 1e-5, "{got:?}");
        assert!((got.log_ratio - 0.2).abs() < 1e-6, "{got:?}");
        // A token of age 1 was sampled by the version before, and a token of age 0 by the current
        // one: there is nothing to interpolate, and no weight.
        for age in [0, 1] {
            let got = loss(CLIP, WIDE).evaluate(-1.4, &Term { age, ..term });
            assert_eq!(got, Loss::new(CLIP).evaluate(-1.4, &Term { age, ..term }));
        }
        let bounded = loss(CLIP, Bound::Clamp { low: 0.0, high: 1.2 }).evaluate(-1.4, &term);
        assert!((bounded.loss + 2.0 * 1.2 * 0.2f64.exp()).abs() < 1e-5, "{bounded:?}");
        let masked = loss(CLIP, Bound::Mask { low: 0.0, high: 1.2 }).evaluate(-1.4, &term);
        assert_eq!(
            (masked.loss, masked.derivative, masked.clipped, masked.dropped),
            (0.0, 0.0, true, true)
        );
    }

    /// An interpolation at one half, with a log-ratio of 0.4 on either side, does not change the
    /// weight of the penalty.
    #[test]
    fn interpolation_does_not_weight_kl_penalty() {
        let kl =
            KlPenalty { estimator: KlEstimator::K2, coefficient: 0.5, importance_weighted: false };
        let loss = Loss { kl: Some(kl), ..loss(PolicyLoss::ImportanceSampling, WIDE) };
        let term = Term {
            advantage: 2.0,
            behavior: Some(-2.0),
            reference: Some(-0.2),
            age: 2,
            ..Term::default()
        };
        let got = loss.evaluate(-1.2, &term);
        assert!((got.loss - (-2.0 * 0.8f64.exp() + 0.25)).abs() < 1e-5, "{got:?}");
        assert!((got.derivative - (-2.0 * 0.8f64.exp() - 0.5)).abs() < 1e-5, "{got:?}");
    }

    /// The derivative is that of the loss with constant proximal policy and weight, by finite
    /// differences, not that of a loss in which both change.
    #[test]
    fn interpolation_has_no_gradient() {
        let direct = PolicyLoss::Direct { beta: 0.5 };
        let soft = PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 };
        for policy in [CLIP, direct, soft, PolicyLoss::ImportanceSampling] {
            for by in [Interpolation::LogLinear, Interpolation::Linear] {
                // A weight at its bound. Otherwise the product of weight and ratio in the simplest
                // losses is one ratio, independent of the interpolation.
                let interpolated =
                    InterpolatedProximal { by, bound: Bound::Clamp { low: 0.0, high: 1.2 } };
                let loss = Loss { interpolated: Some(interpolated), ..Loss::new(policy) };
                let term =
                    Term { advantage: -0.7, behavior: Some(-2.0), age: 4, ..Term::default() };
                let here = -1.5f32;
                let at = loss.point(here, &term);
                let derivative_of =
                    |value: &dyn Fn(f64) -> f64| (value(1e-3) - value(-1e-3)) / 2e-3;
                let frozen = derivative_of(&|step| {
                    let mut moved = at;
                    moved.logp += step;
                    loss.at(&moved).loss
                });
                let moving = derivative_of(&|step| loss.evaluate(here + step as f32, &term).loss);
                let got = loss.evaluate(here, &term).derivative;
                assert!(
                    (got - frozen).abs() < 1e-5,
                    "{policy:?} {by:?}: {got}, differences {frozen}"
                );
                assert!(
                    (got - moving).abs() > 1e-2,
                    "{policy:?} {by:?}: {got}, moving along {moving}"
                );
            }
        }
    }
}
