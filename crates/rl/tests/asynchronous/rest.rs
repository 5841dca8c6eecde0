//! Advantages, interpolation and shaping of AgentRL and AReaL, and formulas of slime.

use levade_rl::correction::{Bound, Correction, RatioLevel};
use levade_rl::*;

use crate::common::{Vectors, assert_close, assert_near};

fn vectors() -> Vectors {
    Vectors::new(include_str!("../asynchronous.json"))
}

#[test]
fn advantages_match_agentrl() {
    let baseline = GroupBaseline {
        compare: Compare::LeaveOneOut,
        scale: 2.0,
        success: Some(0.5),
        ..GroupBaseline::default()
    };
    let scores = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let mut rollouts = scores.map(|score| Rollout {
        score,
        sequences: vec![Sequence { turns: vec![1], rewards: vec![0.0], ..Sequence::default() }],
        ..Rollout::default()
    });
    rollouts[0].ceiling = Some(0.0);
    rollouts[3].ceiling = Some(0.0);
    let found = Estimator::Group(baseline).advantages(&rollouts).unwrap();
    let advantages: Vec<f64> = found.iter().map(|rollout| rollout[0].advantages[0]).collect();
    assert_near(advantages[1], 1.428571429, 1e-9, "right");
    assert_near(advantages[4], -0.857142857, 1e-9, "wrong");
    assert_eq!(advantages[0], 0.0, "right, but badly written");
    assert_near(advantages[3], -0.857142857, 1e-9, "wrong, and badly written");
    let scaled = GroupBaseline { scale_by_std: true, ..GroupBaseline::default() }
        .advantages(&scores)
        .unwrap();
    assert_near(scaled[0], 1.207612396, 1e-9, "GRPO, right");
    assert_near(scaled[4], -0.724567437, 1e-9, "GRPO, wrong");

    for (got, want) in [
        (shaping::rank_bonuses(&[5.0, 10.0, 10.0, 20.0], 0.2, false), &[0.1, 0.0, 0.0, -0.1][..]),
        (shaping::rank_bonuses(&[3.0, 8.0, 30.0], 0.2, true), &[-0.1, 0.0, 0.1]),
    ] {
        assert_eq!(got.len(), want.len());
        got.iter().zip(want).for_each(|(g, w)| assert_close(*g, *w, "rank"));
    }
}

#[test]
fn interpolated_proximal_policy_matches_areal() {
    let v = vectors();
    let lp = v.list("areal/inputs/lp");
    let behave = v.list("areal/inputs/behave");
    for (kind, name) in [(Interpolation::LogLinear, "loglinear"), (Interpolation::Linear, "linear")]
    {
        let want = v.list(&format!("areal/prox_approx/{name}"));
        for (t, version) in v.list("areal/prox_approx_versions").iter().enumerate() {
            let age = (*version >= 0.0).then(|| 10 - *version as u64);
            assert_near(kind.proximal(behave[t], lp[t], age), want[t], 2e-7, name);
        }
    }
    let prox = v.list("areal/inputs/prox");
    let want = v.value_at("areal/m2po_mask_0p05").clone();
    let differences: Vec<f64> = prox.iter().zip(&behave).map(|(p, b)| p - b).collect();
    let want: Vec<bool> = serde_json::from_value(want).unwrap();
    assert_eq!(prepare::second_moment_mask(&differences, 0.05), want);
}

#[test]
fn formulas_match_slime() {
    let v = vectors();
    let lp = v.list("areal/inputs/lp");
    let prox = v.list("areal/inputs/prox");
    let behave = v.list("areal/inputs/behave");
    let adv = v.list("areal/inputs/adv");
    let log_ratios = [prox.iter().zip(&behave).map(|(p, b)| p - b).collect::<Vec<f64>>()];
    let at =
        |t: usize| Point { logp: lp[t], old: Some(prox[t]), advantage: adv[t], ..Point::default() };
    let losses = |policy: PolicyLoss| -> Vec<f64> {
        (0..6).map(|t| Loss::new(policy).at(&at(t)).loss).collect()
    };
    let expect = |got: Vec<f64>, name: &str| {
        got.iter()
            .zip(v.list(&format!("slime/{name}")))
            .for_each(|(got, want)| assert_near(*got, want, 2e-7, name));
    };
    let (low, high, trust, keep) = (0.2, 0.28, None, None);
    let ppo = losses(PolicyLoss::Clip { low, high, dual: None, trust, keep });
    expect(ppo.clone(), "ppo");
    expect(losses(PolicyLoss::Clip { low, high, dual: Some(1.2), trust, keep }), "dual1_2");
    for (bound, name) in [
        (Bound::Clamp { low: 0.0, high: 2.0 }, "tis_0_2"),
        (Bound::Mask { low: 0.5, high: 2.0 }, "icepop_05_2"),
    ] {
        let correction = Correction { level: RatioLevel::Token, bound, normalize: false };
        let weights = correction.weights(&log_ratios, Counting::Exact).concat();
        expect(ppo.iter().zip(weights).map(|(loss, weight)| loss * weight).collect(), name);
    }
    expect(losses(PolicyLoss::Cispo { low: 1.0, high: 0.28 }), "cispo");

    // All fragments of a rollout have the rollout's denominator, and rollouts are summed: 0.15 +
    // 0.2 of the first, 0.6 of the second.
    let weights =
        Normalizer::RolloutMean.weights(&[4, 2].map(|tokens| RolloutTokens { group: 0, tokens }));
    let sum = weights[0] * (0.1 + 0.2 + 0.3 + 0.8) + weights[1] * (0.5 + 0.7);
    assert_close(2.0 * sum, 0.95, "mean over rollouts");
}
