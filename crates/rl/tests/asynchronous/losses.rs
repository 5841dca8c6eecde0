//! Losses, compared with AgentRL and AReaL.

use levade_rl::correction::{Bound, Correction, RatioLevel, Rejection, Statistic, StatisticSpan};
use levade_rl::*;

use crate::common::{Vectors, assert_close, assert_near};
use crate::evaluate;

fn vectors() -> Vectors {
    Vectors::new(include_str!("../asynchronous.json"))
}

/// A loss of AgentRL, summed over its two rows: the mean over rows of the sum, or of the mean over
/// the unmasked tokens of a row.
struct Agentrl {
    v: Vectors,
}

impl Agentrl {
    fn points(&self, age_at: Option<f64>) -> Vec<Vec<Point>> {
        let [lp, old, mask, advantage, created] = ["lp", "old", "mask", "adv", "created"]
            .map(|name| self.v.rows(&format!("agentrl/inputs/{name}")));
        let point = |i: usize, t: usize| Point {
            logp: lp[i][t],
            old: Some(old[i][t]),
            advantage: advantage[i][t],
            age: age_at.map_or(0.0, |now| now - created[i][t]),
            ..Point::default()
        };
        (0..2)
            .map(|i| (0..4).filter(|t| mask[i][*t] == 1.0).map(|t| point(i, t)).collect())
            .collect()
    }

    #[track_caller]
    fn expect(&self, policy: PolicyLoss, points: &[Vec<Point>], by_length: bool, keys: &str) {
        let loss = Loss::new(policy);
        loss.check_parameters().unwrap();
        let want: Vec<Vec<f64>> =
            serde_json::from_value(self.v.value_at(&format!("{keys}/dloss_dlp")).clone()).unwrap();
        let weights: Vec<Vec<f64>> = points
            .iter()
            .map(|row| {
                let left = row.iter().filter(|point| !loss.at(point).dropped).count().max(1) as f64;
                vec![1.0 / points.len() as f64 / if by_length { left } else { 1.0 }; row.len()]
            })
            .collect();
        let (sum, gradients) = evaluate(loss, points, &weights);
        // Masked tokens are at the end of a row.
        for (got, want) in gradients.iter().zip(&want).flat_map(|(got, want)| got.iter().zip(want))
        {
            assert_close(*got, *want, &format!("{keys}, derivative"));
        }
        assert_close(sum, self.v.number(&format!("{keys}/loss")), keys);
    }
}

#[test]
fn losses_match_agentrl() {
    let a = Agentrl { v: vectors() };
    let points = a.points(None);
    let low = 0.2;
    let high = 0.3;
    let dual = None;
    let strict = TrustRegion { strict: true, ..TrustRegion::default() };
    let grpo = |trust, keep| PolicyLoss::Clip { low, high, dual, trust: Some(trust), keep };
    a.expect(grpo(TrustRegion::default(), None), &points, true, "agentrl/cases/grpo_default");
    a.expect(
        grpo(TrustRegion::default(), None),
        &points,
        true,
        "agentrl/cases/grpo_token_level_false",
    );
    a.expect(grpo(strict, None), &points, true, "agentrl/cases/grpo_strict");
    // TRAP: the gradient that AgentRL means to keep beyond the bounds is 0.
    let keep = KeepGradient { below: 0.5, above: 0.5, in_value_only: true };
    a.expect(
        grpo(TrustRegion::default(), Some(keep)),
        &points,
        true,
        "agentrl/cases/grpo_beta_half",
    );
    let kept = Loss::new(grpo(
        TrustRegion::default(),
        Some(KeepGradient { in_value_only: false, ..keep }),
    ));
    assert_close(kept.at(&points[1][0]).derivative, 0.5 * 0.8 * 0.5, "gradient kept below");
    for (trust, by_length, name) in [
        (strict, false, "minirl_recipe"),
        (strict, true, "minirl_strict_lennorm"),
        (TrustRegion::default(), false, "minirl_nonstrict"),
    ] {
        let policy = PolicyLoss::MiniRl { low, high, trust };
        a.expect(policy, &points, by_length, &format!("agentrl/cases/{name}"));
    }
    let fading = TrustRegion { age_decay: 0.1, ..TrustRegion::default() };
    for now in [10, 12, 20, 30] {
        let row = a.points(Some(f64::from(now))).split_off(1);
        a.expect(grpo(fading, None), &row, true, &format!("agentrl/cases/decay_row1/{now}"));
    }
}

/// TRAP: in AgentRL, GSPO's gradient has the wrong sign. The expected one is from finite
/// differences of the objective.
#[test]
fn gspo_gradient_has_sign_of_objective() {
    let a = Agentrl { v: vectors() };
    let row = a.points(None).swap_remove(0);
    let loss = Loss::new(PolicyLoss::Gspo { low: 0.9, high: 9.0 });
    let mut prepared = row.clone();
    prepare::set_sequence_ratios(&mut prepared);
    let wrong = &a.v.rows("agentrl/cases/gspo_row0_wrong_sign/dloss_dlp")[0];
    for t in 0..row.len() {
        let [above, below] = [1e-6, -1e-6].map(|step| {
            let mut moved = row.clone();
            moved[t].logp += step;
            prepare::set_sequence_ratios(&mut moved);
            moved.iter().map(|point| loss.at(point).loss).sum::<f64>()
        });
        let derivative = (above - below) / 2e-6;
        assert_near(
            loss.at(&prepared[t]).derivative,
            derivative,
            1e-8,
            "derivative of a sequence's ratio",
        );
        assert!(derivative < 0.0 && wrong[t] > 0.0);
    }
}

/// Decoupled PPO over one sequence of six tokens: ratios to the proximal policy, and weights from
/// it to the policy that sampled the tokens.
#[test]
fn losses_match_areal() {
    let v = vectors();
    let [lp, prox, behave, adv] =
        ["lp", "prox", "behave", "adv"].map(|name| v.list(&format!("areal/inputs/{name}")));
    let log_ratios: Vec<f64> = prox.iter().zip(&behave).map(|(p, b)| p - b).collect();
    let points = |old: &[f64]| -> Vec<Point> {
        (0..6)
            .map(|t| Point {
                logp: lp[t],
                old: Some(old[t]),
                advantage: adv[t],
                ..Point::default()
            })
            .collect()
    };
    let expect = |loss: Loss, points: &[Point], weights: &[f64], case: &str| {
        let want = v.list(&format!("areal/cases/{case}/dloss_dlp"));
        let weights = weights.iter().map(|weight| weight / 6.0).collect();
        let (sum, gradients) = evaluate(loss, &[points.to_vec()], &[weights]);
        gradients[0].iter().zip(want).for_each(|(got, want)| assert_near(*got, want, 2e-7, case));
        assert_near(sum, v.number(&format!("areal/cases/{case}/loss")), 2e-7, case);
    };
    let clip = Loss::clip(0.2, 0.2);
    let ones = [1.0; 6];
    expect(clip, &points(&prox), &ones, "no_rs");
    expect(clip, &points(&behave), &ones, "naive");
    let one = std::slice::from_ref(&log_ratios);
    let bound = Bound::Mask { low: 0.0, high: 5.0 };
    let correction = Correction { level: RatioLevel::Token, bound, normalize: false };
    let masked = correction.weights(one, Counting::Exact).concat();
    expect(clip, &points(&prox), &masked, "rs_mask5");
    let clamped = Correction::DECOUPLED.weights(one, Counting::Exact).concat();
    expect(clip, &points(&prox), &clamped, "rs_clamp5");
    let dual = Loss::new(PolicyLoss::Clip {
        low: 0.2,
        high: 0.2,
        dual: Some(1.2),
        trust: None,
        keep: None,
    });
    // AReaL bounds |A|·c before the weight, as in other implementations.
    expect(dual, &points(&prox), &masked, "rs_mask5_dual1.2");

    // Two sequences of three tokens, with geometric means as ratio and weight.
    let mut sequences: Vec<Vec<Point>> = points(&prox).chunks(3).map(<[Point]>::to_vec).collect();
    sequences.iter_mut().for_each(|sequence| prepare::set_sequence_ratios(sequence));
    let halves: Vec<Vec<f64>> = log_ratios.chunks(3).map(<[f64]>::to_vec).collect();
    let bound = Bound::Mask { low: 0.0, high: 1.5 };
    let correction = Correction { level: RatioLevel::GeometricMean, bound, normalize: false };
    let of_sequences = correction.weights(&halves, Counting::Exact).concat();
    expect(
        Loss::new(PolicyLoss::Gspo { low: 0.2, high: 0.2 }),
        &sequences.concat(),
        &of_sequences,
        "gspo_seqmask1.5",
    );
    let rejection = Rejection {
        statistic: Statistic::Ratio,
        over: StatisticSpan::SequenceMean,
        low: None,
        high: 1.5,
        inverted: false,
    };
    assert_eq!(
        rejection.kept_tokens(&halves, Counting::Exact).concat(),
        [true, true, true, false, false, false]
    );
}
