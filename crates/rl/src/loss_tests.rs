use proptest::prelude::*;

use super::*;
use crate::kl::KlEstimator;

const CLIP: Loss =
    Loss::new(PolicyLoss::Clip { low: 0.2, high: 0.28, dual: Some(3.0), trust: None, keep: None });

#[test]
fn on_policy_clip_equals_policy_gradient() {
    let term = Term { advantage: -0.75, behavior: Some(-2.3), ..Term::default() };
    let got = CLIP.evaluate(-2.3, &term);
    assert_eq!((got.ratio, got.loss, got.derivative, got.clipped), (1.0, 0.75, 0.75, false));
}

#[test]
fn cross_entropy_needs_no_log_probabilities() {
    let loss = Loss::new(PolicyLoss::CrossEntropy);
    let got = loss.evaluate(-1.5, &Term::default());
    assert_eq!((got.loss, got.derivative, got.ratio), (1.5, -1.0, 1.0));
    assert!(loss.check(&batch(Term::default())).is_ok());
}

#[test]
fn ratio_uses_proximal_policy() {
    let term =
        Term { advantage: 1.0, behavior: Some(-9.0), proximal: Some(-1.0), ..Term::default() };
    assert_eq!(CLIP.evaluate(-1.0, &term).ratio, 1.0);
}

/// At log p = −2, equal to the proximal policy's, the policy loss is −2, and the penalty is x² / 2
/// = 1 / 2 with a derivative of −1.
#[test]
fn correction_weights_only_policy_loss() {
    let kl = KlPenalty { estimator: KlEstimator::K2, coefficient: 0.5, importance_weighted: false };
    let at = |correction, importance_weighted| {
        let term = Term {
            advantage: 2.0,
            behavior: Some(-3.0),
            proximal: Some(-2.0),
            reference: Some(-1.0),
            correction,
            ..Term::default()
        };
        let kl = Some(KlPenalty { importance_weighted, ..kl });
        Loss { kl, ..CLIP }.evaluate(-2.0, &term)
    };
    for (correction, want) in [
        (None, (-2.0 + 0.25, -2.0 - 0.5, false)),
        (Some(0.25), (-0.5 + 0.25, -0.5 - 0.5, false)),
        // The penalty stays.
        (Some(0.0), (0.25, -0.5, true)),
    ] {
        let got = at(correction, false);
        assert_eq!((got.loss, got.derivative, got.dropped), want, "{correction:?}");
    }
    // The ratio of a weighted penalty is that to the policy that sampled the token, e. With the
    // derivatives of both factors, the gradient is e (−1 + 1 / 2).
    let e = 1f64.exp();
    let weighted = at(Some(0.25), true);
    assert!((weighted.loss - (-0.5 + 0.25 * e)).abs() < 1e-12, "{weighted:?}");
    assert!((weighted.derivative - (-0.5 - 0.25 * e)).abs() < 1e-12, "{weighted:?}");
}

fn batch(last: Term) -> TreeBatch {
    let fine = Term {
        behavior: Some(-1.0),
        reference: Some(-1.0),
        sequence_log_ratio: Some(0.0),
        ..Term::default()
    };
    TreeBatch { terms: vec![fine, last], ..TreeBatch::default() }
}

#[test]
fn check_reports_first_invalid_term() {
    let kl = Some(KlPenalty {
        estimator: KlEstimator::K3,
        coefficient: 0.1,
        importance_weighted: false,
    });
    let full = Term { sequence: 7, behavior: Some(-1.0), reference: Some(-1.0), ..Term::default() };
    let loss = Loss { kl, ..CLIP };
    assert_eq!(loss.check(&batch(full)), Ok(()));
    let bare = Term { behavior: None, ..full };
    assert_eq!(loss.check(&batch(bare)), Err(RlError::NoBehavior { term: 1, sequence: 7 }));
    let bare = Term { reference: None, ..full };
    assert_eq!(loss.check(&batch(bare)), Err(RlError::NoReference { term: 1, sequence: 7 }));
    assert_eq!(Loss { kl: None, ..loss }.check(&batch(bare)), Ok(()));
    // A loss without ratios needs the old policy if its penalty is importance-weighted.
    let weighted =
        KlPenalty { estimator: KlEstimator::K3, coefficient: 0.1, importance_weighted: true };
    let bare = Term { behavior: None, ..full };
    let reinforce = Loss { kl, ..Loss::new(PolicyLoss::Reinforce) };
    assert_eq!(reinforce.check(&batch(bare)), Ok(()));
    let reinforce = Loss { kl: Some(weighted), ..reinforce };
    assert_eq!(reinforce.check(&batch(bare)), Err(RlError::NoBehavior { term: 1, sequence: 7 }));
    let of_sequences = Loss::new(PolicyLoss::Gspo { low: 0.2, high: 0.2 });
    assert_eq!(
        of_sequences.check(&batch(full)),
        Err(RlError::NoSequenceRatio { term: 1, sequence: 7 })
    );
    let wild = loss.check(&batch(Term { weight: f32::INFINITY, ..full }));
    assert!(
        matches!(wild, Err(RlError::NotFinite { term: 1, sequence: 7, what: "weight", .. })),
        "{wild:?}"
    );
    let trust = TrustRegion { cap: 0.0, ..TrustRegion::default() };
    let covarying = |lower, upper| {
        Loss::new(PolicyLoss::ClipCov { low: 0.2, high: 0.2, fraction: 0.1, lower, upper })
    };
    assert_eq!(covarying(1.0, 5.0).check(&batch(full)), Ok(()));
    for rejected in [
        covarying(5.0, 1.0),
        covarying(1.0, 1.0),
        Loss::clip(1.5, 0.2),
        Loss::clip(0.2, f64::NAN),
        Loss::new(PolicyLoss::Clip {
            low: 0.2,
            high: 0.2,
            dual: Some(1.0),
            trust: None,
            keep: None,
        }),
        Loss::new(PolicyLoss::MiniRl { low: 0.2, high: 0.2, trust }),
        Loss::new(PolicyLoss::SoftGate { positive: 0.0, negative: 1.0 }),
        Loss { entropy: f64::INFINITY, ..CLIP },
        Loss { entropy: 0.1, ..Loss::new(PolicyLoss::Value { clip: None }) },
    ] {
        assert!(
            matches!(rejected.check(&batch(full)), Err(RlError::Parameter { .. })),
            "{rejected:?}"
        );
    }
}

/// Returns whether a strict trust region drops a token with log-ratio `x`.
fn dropped(low: f64, high: f64, x: f64, advantage: f64) -> bool {
    let trust = TrustRegion { strict: true, ..TrustRegion::default() };
    let at = Point { advantage, old: Some(0.0), logp: x, ..Point::default() };
    let got = Loss::new(PolicyLoss::MiniRl { low, high, trust }).at(&at);
    assert_eq!((got.loss, got.derivative) == (0.0, 0.0), got.dropped || advantage == 0.0);
    got.dropped
}

/// A token is dropped only if its gradient pushes it further out, and only beyond the bounds.
#[test]
fn trust_region_drops_tokens_outside() {
    // Ratios of 2 and 1/2, outside of 0.8 and 1.3.
    let double = 2f64.ln();
    let half = -2f64.ln();
    assert_eq!([1.0, 0.0, -1.0].map(|a| dropped(0.2, 0.3, double - 0.5, a)), [false; 3]);
    assert_eq!([1.0, 0.0, -1.0].map(|a| dropped(0.2, 0.3, double, a)), [true, false, false]);
    assert_eq!([1.0, 0.0, -1.0].map(|a| dropped(0.2, 0.3, half, a)), [false, false, true]);
    // Bounds of exactly 1, with a ratio of 1.
    assert_eq!([1.0, -1.0].map(|a| dropped(0.0, 0.0, 0.0, a)), [false, false]);
}

#[test]
fn clip_cov_drops_marked_tokens() {
    let loss = Loss::new(PolicyLoss::ClipCov {
        low: 0.2,
        high: 0.2,
        fraction: 0.5,
        lower: 1.0,
        upper: 5.0,
    });
    for (marked, want) in [(false, (-2.0, -2.0, false, false)), (true, (0.0, 0.0, true, true))] {
        let got = loss.at(&Point { advantage: 2.0, marked, ..Point::default() });
        assert_eq!((got.loss, got.derivative, got.clipped, got.dropped), want, "{marked}");
    }
}

/// Cross-entropy, a penalty on the log-ratio, a penalty on marked tokens and a value loss have
/// gradients without an advantage. So have KL penalties and entropy bonuses.
#[test]
fn losses_report_gradient_without_advantage() {
    let direct = PolicyLoss::Direct { beta: 0.1 };
    let value = PolicyLoss::Value { clip: None };
    let covarying = PolicyLoss::KlCov { coefficient: 1.0, fraction: 0.1 };
    for policy in [PolicyLoss::CrossEntropy, direct, covarying, value] {
        assert!(Loss::new(policy).has_gradient_without_advantage(), "{policy:?}");
    }
    for policy in [PolicyLoss::Reinforce, PolicyLoss::ImportanceSampling, CLIP.policy] {
        assert!(!Loss::new(policy).has_gradient_without_advantage(), "{policy:?}");
    }
    let kl = Some(KlPenalty {
        estimator: KlEstimator::K3,
        coefficient: 0.1,
        importance_weighted: false,
    });
    assert!(Loss { kl, ..CLIP }.has_gradient_without_advantage());
    assert!(Loss { entropy: 0.1, ..CLIP }.has_gradient_without_advantage());
    assert!(Loss { entropy: -0.1, ..CLIP }.has_gradient_without_advantage());
    assert_eq!([CLIP.policy, value].map(|policy| Loss::new(policy).trains_values()), [false, true]);
}

#[test]
fn extreme_ratios_stay_finite() {
    let term = Term { advantage: -1.0, behavior: Some(-500.0), ..Term::default() };
    let got = Loss::clip(0.2, 0.2).evaluate(-0.5, &term);
    assert_eq!((got.ratio, got.derivative, got.clipped), (20f64.exp(), 0.0, true));
}

/// Bounds of the reference: cap 4, ages 0, 2, 10 and 20, decay 0.1.
#[test]
fn trust_region_narrows_with_age() {
    let trust = TrustRegion { age_decay: 0.1, ..TrustRegion::default() };
    for (age, low, high) in [
        (0.0, 0.2, 2.2),
        (2.0, 0.345_015, 1.982_477),
        (10.0, 0.705_696, 1.441_455),
        (20.0, 0.891_732, 1.162_402),
    ] {
        let (lower, upper) = trust.bounds(0.2, 0.3, age);
        assert!(
            (lower - low).abs() < 1e-6 && (upper - high).abs() < 1e-6,
            "{age}: {lower} {upper}"
        );
    }
    let strict = TrustRegion { strict: true, ..trust };
    assert_eq!(strict.bounds(0.2, 0.3, 9.0), (0.8, 1.3));
}

proptest! {
    /// Central differences, away from kinks, of every loss whose `derivative` is the derivative of
    /// its value.
    #[test]
    fn derivative_matches_finite_differences(
        logp in -6.0f64..-0.1,
        x in -1.5f64..1.5,
        advantage in -2.0f64..2.0,
        low in 0.05f64..0.5,
        high in 0.05f64..0.5,
        dual in prop::option::of(1.5f64..4.0),
        reference in -6.0f64..-0.1,
        returns in -2.0f64..2.0,
    ) {
        let trust = None;
        let losses = [
            PolicyLoss::CrossEntropy,
            PolicyLoss::Reinforce,
            PolicyLoss::ImportanceSampling,
            PolicyLoss::Clip { low, high, dual, trust, keep: None },
            PolicyLoss::SoftGate { positive: 1.0 + low, negative: 1.0 + high },
            PolicyLoss::Direct { beta: low },
            PolicyLoss::KlCov { coefficient: high, fraction: 0.5 },
            PolicyLoss::Value { clip: Some(low) },
        ];
        let kinks = [(1.0 - low).ln(), (1.0 + high).ln(), dual.map_or(9.0, f64::ln), 0.0];
        prop_assume!(kinks.iter().all(|k| (x - k).abs() > 1e-3));
        prop_assume!((logp - reference).abs() > 1e-3);
        let old_value = logp - x;
        let kink = [old_value - low, old_value + low, 2.0 * returns - (old_value - low), 2.0 * returns - (old_value + low)];
        prop_assume!(kink.iter().all(|k| (logp - k).abs() > 1e-3));
        for policy in losses {
            let estimators = [KlEstimator::K1, KlEstimator::K2, KlEstimator::K3, KlEstimator::Absolute];
            let weighted = |e| [false, true].map(|importance_weighted| (e, importance_weighted));
            for (estimator, importance_weighted) in estimators.into_iter().flat_map(weighted) {
                let kl = KlPenalty { estimator, coefficient: 0.3, importance_weighted };
                let kl = (!Loss::new(policy).trains_values()).then_some(kl);
                let loss = Loss { kl, ..Loss::new(policy) };
                let at = |logp| loss.at(&Point {
                    logp, advantage, returns, old: Some(old_value), value: Some(old_value), reference: Some(reference),
                    marked: true, ..Point::default()
                });
                let step = 1e-6;
                let quotient = (at(logp + step).loss - at(logp - step).loss) / (2.0 * step);
                prop_assert!((at(logp).derivative - quotient).abs() < 1e-5, "{:?}: {} {}", loss, at(logp).derivative, quotient);
            }
        }
    }

    /// The derivative of a loss with a constant factor is that of REINFORCE times the factor.
    #[test]
    fn constant_factors_scale_reinforce_gradient(logp in -6.0f64..-0.1, x in -1.5f64..1.5, advantage in -2.0f64..2.0) {
        let trust = TrustRegion { cap: 1e9, ..TrustRegion::default() };
        let at = Point { logp, advantage, old: Some(logp - x), ..Point::default() };
        let derivative = |policy| Loss::new(policy).at(&at).derivative;
        let close = |a: f64, b: f64| (a - b).abs() < 1e-12;
        let weighted = derivative(PolicyLoss::MiniRl { low: 0.2, high: 0.2, trust });
        prop_assert!(close(weighted, -advantage * x.exp()));
        let weighted = derivative(PolicyLoss::Cispo { low: 0.2, high: 0.3 });
        prop_assert!(close(weighted, -advantage * x.exp().clamp(0.8, 1.3)));
        let measure = Divergence::Kl;
        let weighted = derivative(PolicyLoss::Divergence { measure, below: 1e9, above: 1e9, cap: 1.5 });
        prop_assert!(close(weighted, -advantage * x.exp().min(1.5)));
    }

    /// `evaluate` computes in f64 the same as `at` for its f32 inputs.
    #[test]
    fn f32_loss_evaluation_matches_f64_evaluation(logp in -9.0f32..0.0, old in -9.0f32..0.0, advantage in -2.0f32..2.0) {
        let got = CLIP.evaluate(logp, &Term { advantage, behavior: Some(old), ..Term::default() });
        let at = Point { logp: logp.into(), advantage: advantage.into(), old: Some(old.into()), ..Point::default() };
        prop_assert_eq!(got, CLIP.at(&at));
    }
}
