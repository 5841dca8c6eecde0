//! Importance weights, rejection and mismatch metrics, compared with verl.

use levade_rl::correction::{
    Bound, Correction, Mismatch, RatioLevel, Rejection, Statistic, StatisticSpan,
};
use levade_rl::*;

use crate::common::{assert_close, assert_near};
use crate::fixture::{Fixture, number};

#[test]
fn importance_weights_match_verl() {
    let f = Fixture::new();
    for (level, bound, normalise, keys) in [
        (RatioLevel::Token, clamp(2.0), false, "anchor/tis/token_C2.0"),
        (RatioLevel::Token, clamp(1.2), false, "anchor/tis/token_C1.2"),
        (RatioLevel::Sequence, clamp(2.0), false, "anchor/tis/sequence_C2.0"),
        (RatioLevel::Token, clamp(1.2), true, "anchor/tis/token_C1.2_batch_norm"),
        (RatioLevel::Sequence, clamp(2.0), true, "anchor/tis/sequence_C2.0_batch_norm"),
        (
            RatioLevel::Token,
            Bound::Mask { low: 0.9, high: 1.2 },
            false,
            "head/icepop_token_0.9_1.2",
        ),
        (
            RatioLevel::Sequence,
            Bound::Mask { low: 0.95, high: 2.0 },
            false,
            "head/icepop_sequence_0.95_2.0",
        ),
    ] {
        let got = Correction { level, bound, normalize: normalise }
            .weights(&f.log_ratios(), Counting::Verl);
        for (got, want) in got.iter().zip(f.masked_rows(&format!("{keys}/weights"))) {
            got.iter().zip(want).for_each(|(got, want)| assert_close(*got, want, keys));
        }
    }
    let clip = Loss::new(PolicyLoss::Clip {
        low: 0.2,
        high: 0.28,
        dual: Some(3.0),
        trust: None,
        keep: None,
    });
    for (bound, keys) in [
        (clamp(2.0), "anchor/ppo_vanilla_token_TIS_C2/loss"),
        (Bound::Mask { low: 0.9, high: 1.2 }, "head/ppo_vanilla_icepop_0.9_1.2_loss"),
    ] {
        let correction = Correction { level: RatioLevel::Token, bound, normalize: false };
        let weights = correction.weights(&f.log_ratios(), Counting::Verl).concat();
        let points = f.points().concat();
        let losses = points.iter().zip(weights).map(|(point, w)| clip.at(point).loss * w / 16.0);
        assert_close(losses.sum(), f.v.number(keys), keys);
    }
}

fn clamp(high: f64) -> Bound {
    Bound::Clamp { low: 0.0, high }
}

/// Creates a rejection by the inverse of the ratio. A `low` of 0 means no lower bound.
fn inverted(statistic: Statistic, over: StatisticSpan, low: f64, high: f64) -> Rejection {
    Rejection { statistic, over, low: (low > 0.0).then_some(low), high, inverted: true }
}

#[test]
fn rejection_matches_verl() {
    let f = Fixture::new();
    use Statistic::*;
    use StatisticSpan::*;
    let cases: [(&str, Vec<Rejection>); 9] = [
        ("token_k1@0.8_1.25", vec![inverted(K1, Token, 0.8, 1.25)]),
        ("token_k2@0.02", vec![inverted(K2, Token, 0.0, 0.02)]),
        ("token_k3@0.02", vec![inverted(K3, Token, 0.0, 0.02)]),
        ("seq_sum_k1@0.5_2.0", vec![inverted(K1, SequenceSum, 0.5, 2.0)]),
        ("seq_sum_k1@0.9_3.0", vec![inverted(K1, SequenceSum, 0.9, 3.0)]),
        ("seq_mean_k1@0.95_1.05", vec![inverted(K1, SequenceMean, 0.95, 1.05)]),
        ("seq_mean_k3@0.02", vec![inverted(K3, SequenceMean, 0.0, 0.02)]),
        ("seq_max_k2@0.02", vec![inverted(K2, SequenceMax, 0.0, 0.02)]),
        (
            "token_k1,seq_mean_k3@0.8_1.25,0.02",
            vec![inverted(K1, Token, 0.8, 1.25), inverted(K3, SequenceMean, 0.0, 0.02)],
        ),
    ];
    for (name, rejections) in cases {
        let want = f.masked_rows(&format!("anchor/rejection_sampling/{name}/mask")).concat();
        let all: Vec<Vec<bool>> = rejections
            .iter()
            .map(|r| r.kept_tokens(&f.log_ratios(), Counting::Verl).concat())
            .collect();
        for (i, want) in want.iter().enumerate() {
            assert_eq!(all.iter().all(|kept| kept[i]), *want == 1.0, "{name}, token {i}");
        }
    }
    // TRAP: verl bounds the inverse of the ratio.
    for (inverted, kept) in [(true, [false, true]), (false, [true, false])] {
        let rejection =
            Rejection { statistic: K1, over: Token, low: Some(0.9), high: 3.0, inverted };
        let ratios = [vec![2.5f64.ln(), 0.4f64.ln()]];
        assert_eq!(rejection.kept_tokens(&ratios, Counting::Exact), [kept], "{inverted}");
    }
}

#[test]
fn mismatch_metrics_match_verl() {
    let f = Fixture::new();
    let old = f.values_of("old_log_prob");
    let rollout = f.values_of("rollout_log_prob");
    let pairs: Vec<Vec<(f64, f64)>> =
        old.into_iter().zip(rollout).map(|(o, r)| o.into_iter().zip(r).collect()).collect();
    let got = Mismatch::new(&pairs, Counting::Verl);
    for (name, got) in [
        ("training_ppl", got.training_ppl),
        ("rollout_ppl", got.rollout_ppl),
        ("kl", got.kl),
        ("k3_kl", got.k3_kl),
        ("log_ppl_diff", got.log_ppl_diff),
        ("log_ppl_abs_diff", got.log_ppl_abs_diff),
        ("log_ppl_diff_max", got.log_ppl_diff_max),
        ("log_ppl_diff_min", got.log_ppl_diff_min),
        ("ppl_ratio", got.ppl_ratio),
        ("chi2_token", got.chi2_token),
        ("chi2_seq", got.chi2_seq),
    ] {
        assert_close(got, f.v.number(&format!("anchor/offpolicy_metrics/{name}")), name);
    }
    let metrics = f.v.value_at("metrics");
    assert_close(
        got.probs_diff_max,
        number(metrics, "training/rollout_probs_diff_max"),
        "largest difference",
    );
    assert_close(
        got.probs_diff_mean,
        number(metrics, "training/rollout_probs_diff_mean"),
        "mean difference",
    );
    // Computed in f32.
    assert_near(
        got.probs_diff_std,
        number(metrics, "training/rollout_probs_diff_std"),
        1e-7,
        "deviation of differences",
    );
    assert_near(
        got.probs_correlation,
        number(metrics, "training/rollout_actor_probs_pearson_corr"),
        1e-7,
        "correlation",
    );
}
