//! Losses, divergences and normalizers, compared with verl.

use levade_rl::*;

use crate::common::assert_close;
use crate::evaluate;
use crate::fixture::{Fixture, masked_values, number, row_weights, vectors};

/// Sums `loss` over the action tokens with the weights of `normalizer`.
fn aggregate(normalizer: Normalizer, loss: &[Vec<f64>], mask: &[Vec<f64>]) -> f64 {
    masked_values(loss, mask)
        .iter()
        .zip(row_weights(normalizer, mask))
        .map(|(row, weight)| weight * row.iter().sum::<f64>())
        .sum()
}

/// Aggregates a sum of losses of 7 in the first of `rollouts` and of 5 in the second, which are
/// those of one of two workers.
fn worker_loss(normalizer: Normalizer, rollouts: &[RolloutTokens]) -> f64 {
    let weights = normalizer.weights_counted(rollouts, Counting::Verl);
    2.0 * (weights[0] * 7.0 + weights[1] * 5.0)
}

#[test]
fn normalizers_match_verl() {
    let v = vectors();
    let loss = v.rows("anchor/agg_loss/loss_mat");
    let mask = v.rows("anchor/agg_loss/mask");
    for (normalizer, keys) in [
        (Normalizer::TokenMean, "anchor/agg_loss/token-mean"),
        (Normalizer::RolloutSum, "anchor/agg_loss/seq-mean-token-sum"),
        (Normalizer::RolloutMean, "anchor/agg_loss/seq-mean-token-mean"),
        (Normalizer::RolloutSumOver { length: 4.0 }, "head/agg_loss/seq-mean-token-sum-norm"),
        (
            Normalizer::RolloutSumOver { length: 10.0 },
            "head/agg_loss/seq-mean-token-sum-norm(scale=10)",
        ),
        (Normalizer::TokenSum, "head/agg_token-sum"),
    ] {
        assert_close(aggregate(normalizer, &loss, &mask), v.number(keys), keys);
    }
    // Until 2026 verl did not divide by the number of rollouts: a sum divided by a constant.
    let sum = aggregate(Normalizer::TokenSum, &loss, &mask);
    let keys = "anchor/agg_loss/seq-mean-token-sum-norm";
    assert_close(sum / 4.0, v.number(keys), "sum over a constant");
    let keys = "anchor/agg_loss/seq-mean-token-sum-norm(scale=10)";
    assert_close(sum / 10.0, v.number(keys), "sum over a constant");
    // Several workers: each has some of the rollouts, denominators count all of them, and the
    // averaging of gradients is undone.
    let three = [3, 1, 4].map(|tokens| RolloutTokens { group: 0, tokens });
    let six = [3, 1, 1, 1, 1, 1].map(|tokens| RolloutTokens { group: 0, tokens });
    for (normalizer, rollouts, keys) in [
        (Normalizer::TokenMean, &three[..], "anchor/agg_loss/token-mean(dp=2,batch_num_tokens=8)"),
        (
            Normalizer::RolloutMean,
            &six,
            "anchor/agg_loss/seq-mean-token-mean(dp=2,global_batch_size=6)",
        ),
        (Normalizer::TokenSum, &three, "head/agg_token-sum_dp2"),
    ] {
        assert_close(worker_loss(normalizer, rollouts), v.number(keys), keys);
    }

    // TRAP: the mean of the means of micro-batches.
    let loss = v.rows("anchor/microbatch_token_mean/loss_mat");
    let mask = v.rows("anchor/microbatch_token_mean/mask");
    assert_close(
        aggregate(Normalizer::TokenMean, &loss, &mask),
        v.number("anchor/microbatch_token_mean/global_token_mean"),
        "all",
    );
    let of_each =
        (0..2).map(|i| aggregate(Normalizer::TokenMean, &loss[i..=i], &mask[i..=i])).sum::<f64>()
            / 2.0;
    assert_close(
        of_each,
        v.number("anchor/microbatch_token_mean/legacy_dp_actor_mean_of_microbatches"),
        "micro-batches",
    );
}

#[test]
fn policy_losses_match_verl() {
    let f = Fixture::new();
    let points = f.points();
    let clip = Loss::new(PolicyLoss::Clip {
        low: 0.2,
        high: 0.28,
        dual: Some(3.0),
        trust: None,
        keep: None,
    });
    for (normalizer, name) in [
        (Normalizer::TokenMean, "anchor/ppo_vanilla/token-mean"),
        (Normalizer::RolloutSum, "anchor/ppo_vanilla/seq-mean-token-sum"),
        (Normalizer::RolloutMean, "anchor/ppo_vanilla/seq-mean-token-mean"),
        (Normalizer::RolloutSumOver { length: 6.0 }, "head/ppo_vanilla/seq-mean-token-sum-norm"),
    ] {
        f.expect_loss(clip, &points, normalizer, name);
    }
    let per_token = f.masked_rows("anchor/ppo_vanilla/per_token_loss");
    let mut clipped = 0.0;
    let mut kl = 0.0;
    for (row, want) in points.iter().zip(&per_token) {
        for (point, want) in row.iter().zip(want) {
            let got = clip.at(point);
            assert_close(got.loss, *want, "loss of a token");
            clipped += f64::from(u8::from(got.clipped));
            kl -= point.log_ratio();
        }
    }
    let metrics = f.v.value_at("anchor/ppo_vanilla/metrics");
    let tokens = Counting::Verl.denominator(16.0);
    assert_close(clipped / tokens, number(metrics, "actor/pg_clipfrac"), "clip fraction");
    assert_close(kl / tokens, number(metrics, "actor/ppo_kl"), "kl");
    for case in f.v.value_at("anchor/ppo_single_token").as_array().unwrap() {
        // Only the difference matters; log-probabilities must be below 0.
        let logp = number(case, "new") - 5.0;
        let old = Some(number(case, "old") - 5.0);
        let at = Point { logp, old, advantage: number(case, "adv"), ..Point::default() };
        let got = clip.at(&at);
        for (is_counted, name) in
            [(got.clipped && !got.dual, "actor/pg_clipfrac"), (got.dual, "actor/pg_clipfrac_lower")]
        {
            let fraction = f64::from(u8::from(is_counted)) / Counting::Verl.denominator(1.0);
            assert_close(fraction, number(case, name), name);
        }
        let (loss, gradients) = evaluate(clip, &[vec![at]], &[vec![1.0]]);
        assert_close(loss, number(case, "loss"), "single loss");
        assert_close(gradients[0][0], number(case, "grad"), "single derivative");
    }
    f.expect_policy(
        PolicyLoss::Cispo { low: 0.2, high: 0.28 },
        &points,
        Normalizer::TokenMean,
        "anchor/cispo",
    );
    let gate = PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 };
    f.expect_policy(gate, &points, Normalizer::RolloutMean, "anchor/sapo");
    f.expect_policy(PolicyLoss::Reinforce, &points, Normalizer::TokenMean, "anchor/gpg");
    for (measure, bound, name) in
        [(Divergence::TotalVariation, 0.15, "head/dppo_tv"), (Divergence::Kl, 0.05, "head/dppo_kl")]
    {
        let policy = PolicyLoss::Divergence { measure, below: bound, above: bound, cap: 20.0 };
        f.expect_policy(policy, &points, Normalizer::TokenMean, name);
    }
    f.expect_policy(PolicyLoss::Direct { beta: 0.5 }, &points, Normalizer::TokenMean, "head/dro");

    let mut of_sequences = points.clone();
    of_sequences.iter_mut().for_each(|sequence| prepare::set_sequence_ratios(sequence));
    let ratios = f.v.list("anchor/gspo/seq_log_ratio");
    of_sequences.iter().zip(ratios).for_each(|(sequence, want)| {
        assert_close(sequence[0].sequence_log_ratio.unwrap(), want, "ratio of a sequence")
    });
    f.expect_policy(
        PolicyLoss::Gspo { low: 0.2, high: 0.28 },
        &of_sequences,
        Normalizer::RolloutMean,
        "anchor/gspo",
    );
    let mut of_sequences = points.clone();
    of_sequences.iter_mut().for_each(|sequence| prepare::set_geometric_means(sequence, 0.2, 0.28));
    let geometric = PolicyLoss::GeometricMean { low: 0.2, high: 0.28 };
    f.expect_policy(geometric, &of_sequences, Normalizer::RolloutMean, "anchor/geo_mean(GMPO)");

    let mut all = points.concat();
    let fraction = f.v.number("head/kl_cov/kl_cov_ratio");
    prepare::mark_covarying(&mut all, fraction);
    let mut rest = all.into_iter();
    let marked: Vec<Vec<Point>> =
        points.iter().map(|row| rest.by_ref().take(row.len()).collect()).collect();
    let coefficient = f.v.number("head/kl_cov/ppo_kl_coef");
    f.expect_policy(
        PolicyLoss::KlCov { coefficient, fraction },
        &marked,
        Normalizer::TokenMean,
        "head/kl_cov",
    );
}

#[test]
fn value_losses_match_verl() {
    let f = Fixture::new();
    let new = f.masked_rows("anchor/value_loss/vpreds");
    let old = f.values_of("values");
    let returns = f.masked_rows("anchor/gae_g1.0_l1.0/returns");
    let loss = Loss::new(PolicyLoss::Value {
        clip: Some(f.v.number("anchor/value_loss/cliprange_value")),
    });
    let point = |i: usize, t: usize| Point {
        logp: new[i][t],
        returns: returns[i][t],
        value: Some(old[i][t]),
        ..Point::default()
    };
    let points: Vec<Vec<Point>> =
        (0..4).map(|i| (0..new[i].len()).map(|t| point(i, t)).collect()).collect();
    let gradients = "anchor/value_loss/grad_vpreds";
    let sum = "anchor/value_loss/loss";
    f.expect_sum(loss, &points, Normalizer::TokenMean, gradients, sum);
    let clipped = points.iter().flatten().filter(|point| loss.at(point).clipped).count() as f64;
    assert_close(
        clipped / Counting::Verl.denominator(16.0),
        f.v.number("anchor/value_loss/clipfrac"),
        "clip fraction",
    );
    let returns = returns.concat();
    let values = old.concat();
    let want =
        f.v.value_at("metrics")["critic/vf_explained_var(gae_g1_l1 returns, fixture values)"]
            .as_f64()
            .unwrap();
    assert_close(explained_variance(&returns, &values), want, "explained variance");
}

#[test]
fn kl_penalties_match_verl() {
    let f = Fixture::new();
    use KlEstimator::*;
    for (estimator, keys, value) in [
        (K1, "anchor/kl_penalty/k1", true),
        (K2, "anchor/kl_penalty/k2", true),
        (K3, "anchor/kl_penalty/k3", true),
        (Absolute, "anchor/kl_penalty/abs", true),
        (K1WithK2Gradient, "head/kl_k1+", false),
        (K3WithK2Gradient, "head/kl_k3+", false),
    ] {
        let gradients = f.masked_rows(&format!("{keys}/grad_log_prob"));
        let mut sum = 0.0;
        for (i, row) in f.points().iter().enumerate() {
            for (t, point) in row.iter().enumerate() {
                let (kl, derivative) = estimator.estimate(point.logp - point.reference.unwrap());
                assert_close(derivative / 16.0, gradients[i][t], keys);
                if value {
                    assert_close(kl, f.masked_rows(&format!("{keys}/per_token"))[i][t], keys);
                }
                sum += kl / 16.0;
            }
        }
        assert_close(sum, f.v.number(&format!("{keys}/token_mean")), keys);
    }
}

#[test]
fn kl_in_reward_matches_verl() {
    let f = Fixture::new();
    let old = f.values_of("old_log_prob");
    let reference = f.values_of("ref_log_prob");
    let penalty =
        KlPenalty { estimator: KlEstimator::K1, coefficient: 0.05, importance_weighted: false };
    let mut rollouts = f.rollouts();
    let mut means = Vec::new();
    for (i, rollout) in rollouts.iter_mut().enumerate() {
        means.push(penalty.apply_to_rewards(
            &mut rollout.sequences[0].rewards,
            &old[i],
            &reference[i],
            Counting::Verl,
        ));
    }
    let want = f.masked_rows("anchor/kl_in_reward_k1_beta0.05/token_level_rewards");
    for (got, want) in rollouts.iter().zip(want) {
        got.sequences[0]
            .rewards
            .iter()
            .zip(want)
            .for_each(|(got, want)| assert_close(*got, want, "charged reward"));
    }
    let found = Counting::Exact.mean(means.into_iter());
    assert_close(found, f.v.number("anchor/kl_in_reward_k1_beta0.05/current_kl"), "divergence");
    let case = f.v.value_at("anchor/adaptive_kl");
    let adaptive = AdaptiveKl { target: number(case, "target"), horizon: number(case, "horizon") };
    let rollouts = number(case, "n_steps") as usize;
    let found =
        adaptive.next_coefficient(number(case, "init"), number(case, "current_kl"), rollouts);
    assert_close(found, number(case, "after"), "adapted");
}
