//! Token-local losses and their derivatives with respect to the token's log-probability.
//!
//! All arithmetic is in f64 on the f32 values that the terms carry. [`Loss::check`] says once per batch whether every
//! term has what the loss needs; after that [`Loss::evaluate`] cannot fail. Losses that need a whole path (GSPO) are not
//! here.

use dressage_tree::{Term, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::RlError;

/// Log-ratios are clamped to ± this before the exponential, so that a ratio stays finite and one token cannot drown
/// a batch. Beyond it the exponential is constant and has no gradient.
const LOG_RATIO_BOUND: f64 = 20.0;

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
    /// ½ (V − R)², R the return: regression of a value head. The value stands where other losses have a log-probability.
    Value {
        /// PPO's clipping (Schulman et al. 2017, as in the authors' code): the loss is at least that of a value no further
        /// than this from the one that terms carry as `value`.
        clip: Option<f32>,
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
    /// Its derivative with respect to the token's log-probability, or to the value.
    pub slope: f64,
    /// The ratio exp(log p − log p_behaviour); 1 where the term has no behaviour log-probability.
    pub ratio: f64,
    /// Whether a clip bound was active, so that the policy part has no gradient.
    pub clipped: bool,
    /// The estimated KL divergence from the reference; 0 without a penalty.
    pub kl: f64,
}

/// Value, derivative with respect to log p, and whether a bound removed the gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Surrogate {
    loss: f64,
    slope: f64,
    clipped: bool,
}

impl Loss {
    /// Checks that the loss is well-formed and that every term of the batch carries what it needs. Learners call this
    /// once per batch, before any work.
    ///
    /// # Errors
    /// Names the parameter out of range, or the first offending term with its path and what it lacks.
    pub fn check(&self, batch: &TreeBatch) -> Result<(), RlError> {
        self.check_parameters()?;
        let needs_behaviour = matches!(self.policy, PolicyLoss::Clip { .. });
        let needs_value = matches!(self.policy, PolicyLoss::Value { clip: Some(_) });
        for (index, term) in batch.terms.iter().enumerate() {
            let path = term.path;
            if needs_behaviour && term.behaviour.is_none() {
                return Err(RlError::NoBehaviour { term: index, path });
            }
            if self.kl.is_some() && term.reference.is_none() {
                return Err(RlError::NoReference { term: index, path });
            }
            if needs_value && term.value.is_none() {
                return Err(RlError::NoValue { term: index, path });
            }
            let values = [
                ("return", Some(term.returns)),
                ("value", term.value),
                ("weight", Some(term.weight)),
                ("advantage", Some(term.advantage)),
                ("behaviour log-probability", term.behaviour),
                ("reference log-probability", term.reference),
            ];
            for (what, value) in values {
                if let Some(value) = value.filter(|v| !v.is_finite()) {
                    return Err(RlError::NotFinite { term: index, path, what, value });
                }
            }
        }
        Ok(())
    }

    fn check_parameters(&self) -> Result<(), RlError> {
        let range = |ok: bool, name, value, range| {
            if ok { Ok(()) } else { Err(RlError::Parameter { name, value, range }) }
        };
        if let PolicyLoss::Clip { low, high, dual } = self.policy {
            range((0.0..=1.0).contains(&low), "clip low", low, "in 0..=1")?;
            range(high >= 0.0, "clip high", high, "at least 0")?;
            if let Some(dual) = dual {
                range(dual > 1.0, "dual clip", dual, "more than 1")?;
            }
        }
        if let PolicyLoss::Value { clip } = self.policy {
            range(clip.is_none_or(|clip| clip > 0.0), "value clip", clip.unwrap_or(0.0), "more than 0")?;
            let beta = self.kl.map_or(0.0, |kl| kl.coefficient);
            range(self.kl.is_none(), "KL coefficient", beta, "left out: a value has no divergence")?;
        }
        if let Some(kl) = self.kl {
            let beta = kl.coefficient;
            range(beta >= 0.0 && beta.is_finite(), "KL coefficient", beta, "finite and at least 0")?;
        }
        Ok(())
    }

    /// Whether it is about values, not log-probabilities.
    pub fn is_of_values(&self) -> bool {
        matches!(self.policy, PolicyLoss::Value { .. })
    }

    /// One term's loss and its derivative, at log-probability `logp` of the token, or at the value for a loss of values. The
    /// weight is not applied.
    ///
    /// [`Loss::check`] must have accepted the batch. A term that lacks its behaviour log-probability is otherwise taken
    /// to be on policy (ratio 1), one that lacks its reference to have no penalty.
    pub fn evaluate(&self, logp: f32, term: &Term) -> Evaluated {
        let logp = f64::from(logp);
        let log_ratio = term.behaviour.map_or(0.0, |b| logp - f64::from(b));
        let policy = match self.policy {
            PolicyLoss::CrossEntropy => Surrogate { loss: -logp, slope: -1.0, clipped: false },
            PolicyLoss::Value { clip } => value_loss(
                logp,
                f64::from(term.returns),
                clip.zip(term.value).map(|(clip, old)| (f64::from(clip), f64::from(old))),
            ),
            PolicyLoss::Clip { low, high, dual } => clipped_surrogate(
                log_ratio,
                f64::from(term.advantage),
                f64::from(low),
                f64::from(high),
                dual.map(f64::from),
            ),
        };
        let (penalty, kl, slope) = match (self.kl, term.reference) {
            (Some(penalty), Some(reference)) => {
                let (kl, slope) = penalty.estimator.estimate(logp - f64::from(reference));
                (f64::from(penalty.coefficient), kl, slope)
            }
            _ => (0.0, 0.0, 0.0),
        };
        Evaluated {
            loss: policy.loss + penalty * kl,
            slope: policy.slope + penalty * slope,
            ratio: bounded_exp(log_ratio).0,
            clipped: policy.clipped,
            kl,
        }
    }
}

/// exp(x) with x clamped to ±[`LOG_RATIO_BOUND`], and its derivative, which is 0 where the clamp holds.
fn bounded_exp(x: f64) -> (f64, f64) {
    let value = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp();
    (value, if x.abs() > LOG_RATIO_BOUND { 0.0 } else { value })
}

/// ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), with `clip` = (c, V_old).
fn value_loss(value: f64, returns: f64, clip: Option<(f64, f64)>) -> Surrogate {
    let free = value - returns;
    let bounded = clip.map_or(free, |(clip, old)| value.clamp(old - clip, old + clip) - returns);
    if bounded * bounded > free * free {
        Surrogate { loss: 0.5 * bounded * bounded, slope: 0.0, clipped: true }
    } else {
        Surrogate { loss: 0.5 * free * free, slope: free, clipped: false }
    }
}

/// max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)), for A < 0 at most −A·dual, with ρ = exp(`log_ratio`).
///
/// Schulman et al. 2017 (equation 7), with the upper bound apart from the lower (DAPO, Yu et al. 2025) and the dual clip
/// of Ye et al. 2020 (equation 5).
fn clipped_surrogate(log_ratio: f64, advantage: f64, low: f64, high: f64, dual: Option<f64>) -> Surrogate {
    let (ratio, slope) = bounded_exp(log_ratio);
    let free = -advantage * ratio;
    let bounded = -advantage * ratio.max(1.0 - low).min(1.0 + high);
    let mut surrogate = if bounded > free {
        Surrogate { loss: bounded, slope: 0.0, clipped: true }
    } else {
        Surrogate { loss: free, slope: -advantage * slope, clipped: log_ratio.abs() > LOG_RATIO_BOUND }
    };
    if let Some(dual) = dual
        && advantage < 0.0
        && surrogate.loss > -advantage * dual
    {
        surrogate = Surrogate { loss: -advantage * dual, slope: 0.0, clipped: true };
    }
    surrogate
}

impl KlEstimator {
    /// The estimate and its derivative with respect to log p, at x = log p − log p_ref.
    ///
    /// The exponent of K3 is clamped like every log-ratio. Its value is not clamped further: a bound there would take
    /// the pull away from exactly the tokens that have left the reference farthest.
    fn estimate(self, x: f64) -> (f64, f64) {
        match self {
            KlEstimator::K1 => (x, 1.0),
            KlEstimator::K2 => (0.5 * x * x, x),
            KlEstimator::K3 => {
                let (value, slope) = bounded_exp(-x);
                (value + x - 1.0, 1.0 - slope)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    const CLIP: PolicyLoss = PolicyLoss::Clip { low: 0.2, high: 0.28, dual: Some(3.0) };

    fn vectors() -> Value {
        serde_json::from_str(include_str!("../tests/vectors.json")).unwrap()
    }

    fn matrix(value: &Value) -> Vec<Vec<f64>> {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[track_caller]
    fn close(got: f64, want: f64, what: &str) {
        assert!((got - want).abs() < 1e-9, "{what}: {got}, expected {want}");
    }

    /// Calls `visit` with (row, column) of every unmasked token of the fixture.
    fn for_each_token(v: &Value, mut visit: impl FnMut(usize, usize)) {
        for (b, row) in matrix(&v["mask"]).iter().enumerate() {
            for (t, _) in row.iter().enumerate().filter(|(_, m)| **m == 1.0) {
                visit(b, t);
            }
        }
    }

    /// Clip 0.5, token mean over 16 tokens: loss 0.1828125, the gradients below; checked against the formula's executed source.
    #[test]
    fn value_loss_matches_the_reference() {
        let v = &vectors()["value"];
        let (new, old) = (matrix(&v["new"]), matrix(&v["old"]));
        let (returns, grad) = (matrix(&v["returns"]), matrix(&v["gradient"]));
        let loss = Loss { policy: PolicyLoss::Value { clip: Some(0.5) }, kl: None };
        let (mut sum, mut clipped) = (0.0, 0);
        for_each_token(&vectors(), |b, t| {
            let got = value_loss(new[b][t], returns[b][t], Some((0.5, old[b][t])));
            close(got.slope / 16.0, grad[b][t], "gradient");
            sum += got.loss / 16.0;
            clipped += u32::from(got.clipped);
            let term =
                Term { returns: returns[b][t] as f32, value: Some(old[b][t] as f32), ..Term::default() };
            assert!((loss.evaluate(new[b][t] as f32, &term).loss - got.loss).abs() < 1e-6);
        });
        close(sum, v["loss"].as_f64().unwrap_or_default(), "loss");
        assert_eq!(clipped, 2);
    }

    #[test]
    fn clip_matches_the_reference() {
        let v = vectors();
        let (logp, old, adv) = (matrix(&v["logp"]), matrix(&v["behaviour"]), matrix(&v["advantages"]));
        let (loss, grad) = (matrix(&v["clip"]["loss"]), matrix(&v["clip"]["token_mean"]["grad_log_prob"]));
        let mut sum = 0.0;
        for_each_token(&v, |b, t| {
            let got = clipped_surrogate(logp[b][t] - old[b][t], adv[b][t], 0.2, 0.28, Some(3.0));
            close(got.loss, loss[b][t], "loss");
            close(got.slope / 16.0, grad[b][t], "gradient");
            sum += got.loss / 16.0;
        });
        close(sum, v["clip"]["token_mean"]["loss"].as_f64().unwrap(), "token mean");
        for case in matrix(&v["single"]) {
            let got = clipped_surrogate(case[1] - case[0], case[2], 0.2, 0.28, Some(3.0));
            close(got.loss, case[3], "single loss");
            close(got.slope, case[4], "single gradient");
            assert_eq!(got.clipped, case[4] == 0.0);
        }
    }

    #[test]
    fn kl_matches_the_reference() {
        let v = vectors();
        let (logp, reference) = (matrix(&v["logp"]), matrix(&v["reference"]));
        for (name, estimator) in [("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3)] {
            let (value, grad) =
                (matrix(&v["kl"][name]["per_token"]), matrix(&v["kl"][name]["grad_log_prob"]));
            for_each_token(&v, |b, t| {
                let (kl, slope) = estimator.estimate(logp[b][t] - reference[b][t]);
                close(kl, value[b][t], name);
                close(slope / 16.0, grad[b][t], name);
            });
        }
    }

    #[test]
    fn evaluate_joins_both_parts() {
        let loss =
            Loss { policy: CLIP, kl: Some(KlPenalty { estimator: KlEstimator::K2, coefficient: 0.5 }) };
        let term = Term { advantage: 1.0, behaviour: Some(-1.0), reference: Some(-1.5), ..Term::default() };
        // Inside the bounds: −A·ρ + β·x²/2, and its slope.
        let got = loss.evaluate(-1.125, &term);
        let ratio = (-0.125f64).exp();
        close(got.ratio, ratio, "ratio");
        close(got.kl, 0.5 * 0.375 * 0.375, "kl");
        close(got.loss, -ratio + 0.5 * got.kl, "loss");
        close(got.slope, -ratio + 0.5 * 0.375, "slope");
        assert!(!got.clipped);
        // Above the upper bound only the penalty pulls.
        let got = loss.evaluate(-0.5, &term);
        assert!(got.clipped);
        close(got.slope, 0.5, "slope");
    }

    #[test]
    fn on_policy_is_plain_policy_gradient() {
        let loss = Loss { policy: CLIP, kl: None };
        let term = Term { advantage: -0.75, behaviour: Some(-2.3), ..Term::default() };
        let got = loss.evaluate(-2.3, &term);
        assert_eq!((got.ratio, got.loss, got.slope, got.clipped), (1.0, 0.75, 0.75, false));
    }

    #[test]
    fn cross_entropy_needs_nothing() {
        let loss = Loss { policy: PolicyLoss::CrossEntropy, kl: None };
        let got = loss.evaluate(-1.5, &Term::default());
        assert_eq!((got.loss, got.slope, got.ratio), (1.5, -1.0, 1.0));
        assert!(loss.check(&batch(Term::default())).is_ok());
    }

    fn batch(last: Term) -> TreeBatch {
        let fine = Term { behaviour: Some(-1.0), reference: Some(-1.0), ..Term::default() };
        TreeBatch { terms: vec![fine, last], ..TreeBatch::default() }
    }

    #[test]
    fn check_names_the_first_offending_term() {
        let kl = Some(KlPenalty { estimator: KlEstimator::K3, coefficient: 0.1 });
        let full = Term { path: 7, behaviour: Some(-1.0), reference: Some(-1.0), ..Term::default() };
        let loss = Loss { policy: CLIP, kl };
        assert_eq!(loss.check(&batch(full)), Ok(()));
        let bare = Term { behaviour: None, ..full };
        assert_eq!(loss.check(&batch(bare)), Err(RlError::NoBehaviour { term: 1, path: 7 }));
        let bare = Term { reference: None, ..full };
        assert_eq!(loss.check(&batch(bare)), Err(RlError::NoReference { term: 1, path: 7 }));
        assert_eq!(Loss { kl: None, ..loss }.check(&batch(bare)), Ok(()));
        let wild = loss.check(&batch(Term { weight: f32::INFINITY, ..full }));
        assert!(matches!(wild, Err(RlError::NotFinite { term: 1, path: 7, what: "weight", .. })), "{wild:?}");
        for policy in [
            PolicyLoss::Clip { low: 1.5, high: 0.2, dual: None },
            PolicyLoss::Clip { low: 0.2, high: f32::NAN, dual: None },
            PolicyLoss::Clip { low: 0.2, high: 0.2, dual: Some(1.0) },
        ] {
            let refused = Loss { policy, kl: None }.check(&batch(full));
            assert!(matches!(refused, Err(RlError::Parameter { .. })), "{policy:?}");
        }
    }

    #[test]
    fn far_ratios_stay_finite() {
        let loss = Loss { policy: PolicyLoss::Clip { low: 0.2, high: 0.2, dual: None }, kl: None };
        let term = Term { advantage: -1.0, behaviour: Some(-500.0), ..Term::default() };
        let got = loss.evaluate(-0.5, &term);
        assert_eq!((got.ratio, got.slope, got.clipped), (20f64.exp(), 0.0, true));
    }

    proptest! {
        /// Central differences of the loss itself, away from its kinks.
        #[test]
        fn derivative_is_the_slope(
            x in -3.0f64..3.0,
            advantage in -2.0f64..2.0,
            low in 0.05f64..0.5,
            high in 0.05f64..0.5,
            dual in prop::option::of(1.5f64..4.0),
        ) {
            let kinks = [(1.0 - low).ln(), (1.0 + high).ln(), dual.map_or(9.0, f64::ln)];
            prop_assume!(kinks.iter().all(|k| (x - k).abs() > 1e-3));
            let step = 1e-6;
            let at = |x| clipped_surrogate(x, advantage, low, high, dual);
            let slope = (at(x + step).loss - at(x - step).loss) / (2.0 * step);
            prop_assert!((at(x).slope - slope).abs() < 1e-6, "{} {}", at(x).slope, slope);
            for estimator in [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3] {
                let slope = (estimator.estimate(x + step).0 - estimator.estimate(x - step).0) / (2.0 * step);
                prop_assert!((estimator.estimate(x).1 - slope).abs() < 1e-6);
            }
        }

        /// `evaluate` computes in f64 what the inner functions say of its f32 inputs, weights aside.
        #[test]
        fn evaluate_agrees_with_its_parts(logp in -9.0f32..0.0, old in -9.0f32..0.0, advantage in -2.0f32..2.0) {
            let loss = Loss { policy: CLIP, kl: None };
            let got = loss.evaluate(logp, &Term { advantage, behaviour: Some(old), ..Term::default() });
            let x = f64::from(logp) - f64::from(old);
            let want = clipped_surrogate(x, advantage.into(), 0.2f32.into(), 0.28f32.into(), Some(3.0));
            prop_assert_eq!((got.loss, got.slope, got.clipped), (want.loss, want.slope, want.clipped));
            prop_assert_eq!(got.ratio, x.exp());
        }
    }
}
