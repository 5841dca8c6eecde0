//! verl's formulas, from vectors that its own functions computed in f64: to 1e-9, its additions of 1e-8 included where it has them.

mod common;

use common::{Vectors, close, near};
use dressage_rl::correction::{Bound, Correction, Level, Mismatch, Over, Rejection, Statistic};
use dressage_rl::*;

fn vectors() -> Vectors {
    Vectors::new(include_str!("verl.json"))
}

/// The action tokens of a matrix, row by row.
fn pick(rows: &[Vec<f64>], mask: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let row = |(row, mask): (&Vec<f64>, &Vec<f64>)| {
        row.iter().zip(mask).filter(|(_, m)| **m == 1.0).map(|(v, _)| *v).collect()
    };
    rows.iter().zip(mask).map(row).collect()
}

/// The fixture that most vectors share: four rollouts, the first three of one task.
struct Fixture {
    v: Vectors,
    mask: Vec<Vec<f64>>,
}

impl Fixture {
    fn new() -> Self {
        let v = vectors();
        let mask = v.rows("anchor/fixture/response_mask");
        Fixture { v, mask }
    }

    fn picked(&self, keys: &str) -> Vec<Vec<f64>> {
        pick(&self.v.rows(keys), &self.mask)
    }

    fn of(&self, name: &str) -> Vec<Vec<f64>> {
        self.picked(&format!("anchor/fixture/{name}"))
    }

    /// Lengths of the turns of a row: runs of action tokens.
    fn turns(&self, row: usize) -> Vec<usize> {
        self.mask[row].split(|m| *m == 0.0).map(<[f64]>::len).filter(|len| *len > 0).collect()
    }

    fn rollouts(&self) -> Vec<Rollout> {
        let uid = self.v.list("anchor/fixture/uid");
        let all = self.v.rows("anchor/fixture/token_level_rewards");
        let (rewards, values) = (self.of("token_level_rewards"), self.of("values"));
        let behaviour = self.of("old_log_prob");
        let concentration = self.picked("anchor/otb/sum_pi_squared");
        (0..4)
            .map(|i| Rollout {
                group: uid[i] as u64,
                score: all[i].iter().sum(),
                paths: vec![Path {
                    turns: self.turns(i),
                    rewards: rewards[i].clone(),
                    values: values[i].clone(),
                    behaviour: behaviour[i].clone(),
                    concentration: concentration[i].clone(),
                    positions: (0..6).filter(|t| self.mask[i][*t] == 1.0).collect(),
                }],
                ..Rollout::default()
            })
            .collect()
    }

    /// Checks advantages, and returns where they are given.
    #[track_caller]
    fn expect(&self, estimator: &Estimator, advantages: &str, returns: Option<&str>) {
        let got = estimator.advantages(&self.rollouts()).unwrap();
        self.compare(&got, advantages, |path| &path.advantages);
        if let Some(returns) = returns {
            self.compare(&got, returns, |path| &path.returns);
        }
    }

    #[track_caller]
    fn compare(&self, got: &[Vec<PathAdvantages>], keys: &str, of: impl Fn(&PathAdvantages) -> &Vec<f64>) {
        for (i, (got, want)) in got.iter().zip(self.picked(keys)).enumerate() {
            assert_eq!(of(&got[0]).len(), want.len());
            for (t, (got, want)) in of(&got[0]).iter().zip(want).enumerate() {
                close(*got, want, &format!("{keys}, row {i}, action token {t}"));
            }
        }
    }

    /// One advantage for each rollout.
    #[track_caller]
    fn expect_scalars(&self, baseline: GroupBaseline, keys: &str) {
        let got = Estimator::Group(baseline).advantages(&self.rollouts()).unwrap();
        for (i, (got, want)) in got.iter().zip(self.v.list(keys)).enumerate() {
            assert!(got[0].advantages.iter().all(|a| *a == got[0].advantages[0]));
            close(got[0].advantages[0], want, &format!("{keys}, row {i}"));
        }
    }

    fn points(&self) -> Vec<Vec<Point>> {
        let (old, new) = (self.of("old_log_prob"), self.of("log_prob"));
        let (reference, advantages) = (self.of("ref_log_prob"), self.picked("anchor/policy_advantages"));
        let point = |i: usize, t: usize| Point {
            logp: new[i][t],
            old: Some(old[i][t]),
            reference: Some(reference[i][t]),
            advantage: advantages[i][t],
            ..Point::default()
        };
        (0..4).map(|i| (0..new[i].len()).map(|t| point(i, t)).collect()).collect()
    }

    /// Weights of the tokens of each row, as verl's aggregation has them.
    fn weights(&self, normaliser: Normaliser) -> Vec<f64> {
        let tokens = |row: &Vec<f64>| RolloutTokens { group: 0, tokens: row.iter().sum::<f64>() as u64 };
        normaliser.weights_counted(&self.mask.iter().map(tokens).collect::<Vec<_>>(), Counting::Verl)
    }

    /// Sum and gradient of a loss over points, against `keys`/loss and `keys`/grad_log_prob.
    #[track_caller]
    fn expect_loss(&self, loss: Loss, points: &[Vec<Point>], normaliser: Normaliser, keys: &str) {
        loss.check_parameters().unwrap();
        let weights = self.weights(normaliser);
        let slopes = self.picked(&format!("{keys}/grad_log_prob"));
        let mut sum = 0.0;
        for (i, row) in points.iter().enumerate() {
            for (t, point) in row.iter().enumerate() {
                let got = loss.at(point);
                sum += weights[i] * got.loss;
                close(weights[i] * got.slope, slopes[i][t], &format!("{keys}, slope {i} {t}"));
            }
        }
        close(sum, self.v.number(&format!("{keys}/loss")), keys);
    }

    fn log_ratios(&self) -> Vec<Vec<f64>> {
        let (old, rollout) = (self.of("old_log_prob"), self.of("rollout_log_prob"));
        old.iter().zip(rollout).map(|(o, r)| o.iter().zip(r).map(|(o, r)| o - r).collect()).collect()
    }
}

const SCORE: GroupBaseline = GroupBaseline {
    compare: Compare::Mean,
    scale_by_std: false,
    singleton: Singleton::Score,
    scale: 1.0,
    success: None,
};

#[test]
fn masked_statistics() {
    let v = vectors();
    let picked: Vec<f64> =
        pick(&v.rows("anchor/masked_stats/values"), &v.rows("anchor/masked_stats/mask")).concat();
    let mean = Counting::Verl.mean(picked.iter().copied());
    close(mean, v.number("anchor/masked_stats/masked_mean"), "mean");
    let variance = Counting::Verl.variance(picked.iter().copied(), mean);
    close(variance, v.number("anchor/masked_stats/masked_var_unbiased"), "variance");
    close(picked.iter().sum(), v.number("anchor/masked_stats/masked_sum"), "sum");
    let mut whitened = picked;
    whiten(whitened.iter_mut(), Counting::Verl);
    let want =
        pick(&v.rows("anchor/masked_stats/masked_whiten"), &v.rows("anchor/masked_stats/mask")).concat();
    whitened.iter().zip(want).for_each(|(got, want)| close(*got, want, "whitened"));
}

#[test]
fn generalised_advantages() {
    let f = Fixture::new();
    for (name, gamma, lambda) in [("gae_g1.0_l1.0", 1.0, 1.0), ("gae_g0.99_l0.95", 0.99, 0.95)] {
        let (raw, returns) = (format!("anchor/{name}/raw_advantages"), format!("anchor/{name}/returns"));
        f.expect(&Estimator::Gae { gamma, lambda, whiten: None }, &raw, Some(&returns));
        let whitened = Estimator::Gae { gamma, lambda, whiten: Some(Counting::Verl) };
        f.expect(&whitened, &format!("anchor/{name}/whitened_advantages"), Some(&returns));
    }
    let rewards = &f.v.rows("anchor/gae_process_reward_seq0/rewards")[0];
    let want = f.v.rows("anchor/gae_process_reward_seq0/raw_advantages");
    let first = &f.mask[..1];
    let got = gae(&pick(&[rewards.clone()], first)[0], &f.of("values")[0], 0.99, 0.95);
    got.advantages
        .iter()
        .zip(&pick(&want, first)[0])
        .for_each(|(got, want)| close(*got, *want, "process reward"));
}

/// TRAP: verl loses a reward that stands on an observation. Whoever describes a path puts it on the action token before; without
/// that the result is verl's.
#[test]
fn a_reward_on_an_observation() {
    let v = vectors();
    let (values, want) = (
        &v.rows("anchor/gae_reward_on_masked_token/values")[0],
        &v.rows("anchor/gae_reward_on_masked_token/raw_advantages")[0],
    );
    let lost = gae(&[0.0; 3], &values[..3], 1.0, 1.0);
    lost.advantages.iter().zip(want).for_each(|(got, want)| close(*got, *want, "reward lost"));
    let kept = gae(&[0.0, 0.0, 1.0], &values[..3], 1.0, 1.0);
    [0.9, 0.8, 0.7].iter().zip(&kept.advantages).for_each(|(want, got)| close(*got, *want, "reward kept"));
}

#[test]
fn group_outcomes() {
    let f = Fixture::new();
    let scaled = GroupBaseline { scale_by_std: true, ..SCORE };
    f.expect(&Estimator::Group(scaled), "anchor/grpo/advantages", None);
    f.expect_scalars(scaled, "anchor/grpo/per_seq_scalar");
    f.expect_scalars(SCORE, "anchor/grpo/per_seq_scalar_no_std_drgrpo");
    f.expect_scalars(GroupBaseline { compare: Compare::Others, ..SCORE }, "anchor/rloo_per_seq");
    let alone = GroupBaseline { compare: Compare::Others, singleton: Singleton::Zero, ..SCORE };
    f.expect_scalars(alone, "anchor/rloo_vectorized_per_seq");
    f.expect_scalars(GroupBaseline { compare: Compare::LengthWeightedMean, ..SCORE }, "anchor/opo_per_seq");
    f.expect_scalars(GroupBaseline { compare: Compare::MeanOfInformative, ..SCORE }, "anchor/gpg_per_seq");
    let got = scaled.advantages(&[1.0, 1.0]).unwrap();
    assert_eq!(got, [0.0, 0.0]);
    // This one was computed in f32.
    let vectorized = f.v.list("anchor/grpo_vectorized_per_seq_scalar_f32");
    let got = Estimator::Group(scaled).advantages(&f.rollouts()).unwrap();
    got.iter().zip(vectorized).for_each(|(got, want)| near(got[0].advantages[0], want, 1e-7, "vectorised"));
}

#[test]
fn best_of_a_group() {
    let f = Fixture::new();
    let best = GroupBaseline { compare: Compare::SecondBest, ..SCORE };
    let got = best.advantages(&[1.0, 0.0, 0.5]).unwrap();
    got.iter()
        .zip(f.v.list("anchor/passk_group_a_no_std"))
        .for_each(|(got, want)| close(*got, want, "pass@k"));
    let got = GroupBaseline { scale_by_std: true, ..best }.advantages(&[1.0, 0.0, 0.5]).unwrap();
    let want = f.v.rows("anchor/passk_group_a");
    got.iter().zip(want).for_each(|(got, want)| close(*got, want[0], "pass@k over std"));
}

#[test]
fn reinforce_plus_plus() {
    let f = Fixture::new();
    let (gamma, counting) = (0.9, Counting::Verl);
    let right = Estimator::ReinforcePlusPlus { gamma, counting, one_turn: false };
    let name = "head/reinforce_pp_gamma0.9";
    f.expect(&right, &format!("{name}/advantages"), Some(&format!("{name}/returns")));
    // TRAP: before that verl forgot the outcome at every observation.
    let forgetful = Estimator::ReinforcePlusPlus { gamma, counting, one_turn: true };
    let got = forgetful.advantages(&f.rollouts()).unwrap();
    // It also keeps sums at the observation before a turn; only action tokens are compared here.
    let want = f.picked("anchor/reinforce_pp_gamma0.9/returns");
    for (got, want) in got.iter().zip(&want) {
        got[0].returns.iter().zip(want).for_each(|(got, want)| close(*got, *want, "returns of one turn"));
    }
    f.compare(&got, "anchor/reinforce_pp_gamma0.9/advantages", |path| &path.advantages);
    let baseline = Estimator::ReinforcePlusPlusBaseline { singleton: Singleton::Score, counting };
    f.expect(&baseline, "anchor/reinforce_pp_baseline_advantages", None);
}

#[test]
fn other_estimators() {
    let f = Fixture::new();
    let mut rollouts = f.rollouts();
    for (rollout, rival) in rollouts.iter_mut().zip([0.5, 0.5, 0.0, 1.0]) {
        rollout.rival = Some(rival);
    }
    let got = Estimator::ReMax.advantages(&rollouts).unwrap();
    let name = "anchor/remax_baseline_[.5,.5,0,1]";
    f.compare(&got, &format!("{name}/advantages"), |path| &path.advantages);
    f.compare(&got, &format!("{name}/returns"), |path| &path.returns);

    let optimal = |alignment, bare_tail| Estimator::OptimalToken { alignment, bare_tail };
    f.expect(&optimal(Alignment::Position, false), "anchor/otb/advantages", Some("anchor/otb/returns"));
    f.expect(&optimal(Alignment::Position, true), "head/otb/advantages", None);
    f.expect(&optimal(Alignment::ActionToken, true), "anchor/otb/tir_otb_advantages_handle_zero_tail", None);

    let parts = ["acc", "fmt"].map(|name| f.v.list(&format!("head/gdpo/rewards/{name}")));
    for (i, rollout) in rollouts.iter_mut().enumerate() {
        rollout.components = parts.iter().map(|part| part[i]).collect();
    }
    let baseline = GroupBaseline { scale_by_std: true, ..SCORE };
    let gdpo = Estimator::Gdpo { weights: f.v.list("head/gdpo/weights"), baseline, counting: Counting::Verl };
    // Computed in f32 where groups are normalised.
    let want = f.picked("head/gdpo/advantages");
    for (got, want) in gdpo.advantages(&rollouts).unwrap().iter().zip(want) {
        got[0].advantages.iter().zip(want).for_each(|(got, want)| near(*got, want, 1e-6, "gdpo"));
    }
}

#[test]
fn aggregation() {
    let v = vectors();
    let (loss, mask) = (v.rows("anchor/agg_loss/loss_mat"), v.rows("anchor/agg_loss/mask"));
    let aggregate = |normaliser: Normaliser, loss: &[Vec<f64>], mask: &[Vec<f64>]| -> f64 {
        let tokens = |row: &Vec<f64>| RolloutTokens { group: 0, tokens: row.iter().sum::<f64>() as u64 };
        let weights =
            normaliser.weights_counted(&mask.iter().map(tokens).collect::<Vec<_>>(), Counting::Verl);
        pick(loss, mask).iter().zip(weights).map(|(row, weight)| weight * row.iter().sum::<f64>()).sum()
    };
    let expect = |normaliser, keys: &str| close(aggregate(normaliser, &loss, &mask), v.number(keys), keys);
    expect(Normaliser::TokenMean, "anchor/agg_loss/token-mean");
    expect(Normaliser::RolloutSum, "anchor/agg_loss/seq-mean-token-sum");
    expect(Normaliser::RolloutMean, "anchor/agg_loss/seq-mean-token-mean");
    expect(Normaliser::RolloutSumOver { length: 4.0 }, "head/agg_loss/seq-mean-token-sum-norm");
    expect(Normaliser::RolloutSumOver { length: 10.0 }, "head/agg_loss/seq-mean-token-sum-norm(scale=10)");
    expect(Normaliser::TokenSum, "head/agg_token-sum");
    // Until 2026 verl did not divide by the number of rollouts: a sum over a constant.
    let sum_over = |length: f64| aggregate(Normaliser::TokenSum, &loss, &mask) / length;
    close(sum_over(4.0), v.number("anchor/agg_loss/seq-mean-token-sum-norm"), "sum over a constant");
    close(
        sum_over(10.0),
        v.number("anchor/agg_loss/seq-mean-token-sum-norm(scale=10)"),
        "sum over a constant",
    );
    // Several workers: each has a part of the rollouts, denominators count all, and averaging gradients is undone.
    let tokens = |n| RolloutTokens { group: 0, tokens: n };
    let all = [tokens(3), tokens(1), tokens(4)];
    let share = |normaliser: Normaliser, all: &[RolloutTokens]| {
        let weights = normaliser.weights_counted(all, Counting::Verl);
        2.0 * (weights[0] * 7.0 + weights[1] * 5.0)
    };
    close(
        share(Normaliser::TokenMean, &all),
        v.number("anchor/agg_loss/token-mean(dp=2,batch_num_tokens=8)"),
        "workers",
    );
    let six = [tokens(3), tokens(1), tokens(1), tokens(1), tokens(1), tokens(1)];
    close(
        share(Normaliser::RolloutMean, &six),
        v.number("anchor/agg_loss/seq-mean-token-mean(dp=2,global_batch_size=6)"),
        "workers",
    );
    close(share(Normaliser::TokenSum, &all), v.number("head/agg_token-sum_dp2"), "workers");

    // TRAP: a mean in each micro-batch, and the mean of those.
    let (loss, mask) =
        (v.rows("anchor/microbatch_token_mean/loss_mat"), v.rows("anchor/microbatch_token_mean/mask"));
    close(
        aggregate(Normaliser::TokenMean, &loss, &mask),
        v.number("anchor/microbatch_token_mean/global_token_mean"),
        "all",
    );
    let of_each =
        (0..2).map(|i| aggregate(Normaliser::TokenMean, &loss[i..=i], &mask[i..=i])).sum::<f64>() / 2.0;
    close(
        of_each,
        v.number("anchor/microbatch_token_mean/legacy_dp_actor_mean_of_microbatches"),
        "micro-batches",
    );
}

#[test]
fn policy_losses() {
    let f = Fixture::new();
    let points = f.points();
    let clip = Loss::of(PolicyLoss::Clip { low: 0.2, high: 0.28, dual: Some(3.0), trust: None, keep: None });
    for (normaliser, name) in [
        (Normaliser::TokenMean, "anchor/ppo_vanilla/token-mean"),
        (Normaliser::RolloutSum, "anchor/ppo_vanilla/seq-mean-token-sum"),
        (Normaliser::RolloutMean, "anchor/ppo_vanilla/seq-mean-token-mean"),
        (Normaliser::RolloutSumOver { length: 6.0 }, "head/ppo_vanilla/seq-mean-token-sum-norm"),
    ] {
        f.expect_loss(clip, &points, normaliser, name);
    }
    let per_token = f.picked("anchor/ppo_vanilla/per_token_loss");
    let (mut clipped, mut kl) = (0.0, 0.0);
    for (row, want) in points.iter().zip(&per_token) {
        for (point, want) in row.iter().zip(want) {
            let got = clip.at(point);
            close(got.loss, *want, "loss of a token");
            clipped += f64::from(u8::from(got.clipped));
            kl -= point.log_ratio();
        }
    }
    let metrics = |name: &str| f.v.at("anchor/ppo_vanilla/metrics")[name].as_f64().unwrap();
    close(clipped / Counting::Verl.of(16.0), metrics("actor/pg_clipfrac"), "clip fraction");
    close(kl / Counting::Verl.of(16.0), metrics("actor/ppo_kl"), "kl");
    for case in f.v.at("anchor/ppo_single_token").as_array().unwrap() {
        let of = |name: &str| case[name].as_f64().unwrap();
        let got = clip.at(&Point {
            logp: of("new"),
            old: Some(of("old")),
            advantage: of("adv"),
            ..Point::default()
        });
        close(got.loss, of("loss"), "single loss");
        close(got.slope, of("grad"), "single slope");
    }
    let expect = |policy, points: &[Vec<Point>], normaliser, keys| {
        f.expect_loss(Loss::of(policy), points, normaliser, keys)
    };
    expect(PolicyLoss::Cispo { low: 0.2, high: 0.28 }, &points, Normaliser::TokenMean, "anchor/cispo");
    let gate = PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 };
    expect(gate, &points, Normaliser::RolloutMean, "anchor/sapo");
    expect(PolicyLoss::Reinforce, &points, Normaliser::TokenMean, "anchor/gpg");
    for (measure, bound, name) in
        [(Divergence::TotalVariation, 0.15, "head/dppo_tv"), (Divergence::Kl, 0.05, "head/dppo_kl")]
    {
        let policy = PolicyLoss::Divergence { measure, below: bound, above: bound, cap: 20.0 };
        expect(policy, &points, Normaliser::TokenMean, name);
    }
    expect(PolicyLoss::Direct { beta: 0.5 }, &points, Normaliser::TokenMean, "head/dro");

    let mut of_paths = points.clone();
    of_paths.iter_mut().for_each(|path| prepare::path_ratios(path));
    let ratios = f.v.list("anchor/gspo/seq_log_ratio");
    of_paths
        .iter()
        .zip(ratios)
        .for_each(|(path, want)| close(path[0].path_log_ratio.unwrap(), want, "ratio of a path"));
    expect(PolicyLoss::Gspo { low: 0.2, high: 0.28 }, &of_paths, Normaliser::RolloutMean, "anchor/gspo");
    let mut of_paths = points.clone();
    of_paths.iter_mut().for_each(|path| prepare::geometric_means(path, 0.2, 0.28));
    let geometric = PolicyLoss::GeometricMean { low: 0.2, high: 0.28 };
    expect(geometric, &of_paths, Normaliser::RolloutMean, "anchor/geo_mean(GMPO)");

    let mut all = points.concat();
    let share = f.v.number("head/kl_cov/kl_cov_ratio");
    prepare::mark_covarying(&mut all, share);
    let mut rest = all.into_iter();
    let marked: Vec<Vec<Point>> = points.iter().map(|row| rest.by_ref().take(row.len()).collect()).collect();
    let coefficient = f.v.number("head/kl_cov/ppo_kl_coef");
    expect(PolicyLoss::KlCov { coefficient, share }, &marked, Normaliser::TokenMean, "head/kl_cov");
}

#[test]
fn value_losses() {
    let f = Fixture::new();
    let (new, old) = (f.picked("anchor/value_loss/vpreds"), f.of("values"));
    let returns = f.picked("anchor/gae_g1.0_l1.0/returns");
    let slopes = f.picked("anchor/value_loss/grad_vpreds");
    let loss = Loss::of(PolicyLoss::Value { clip: Some(f.v.number("anchor/value_loss/cliprange_value")) });
    let weights = f.weights(Normaliser::TokenMean);
    let (mut sum, mut clipped) = (0.0, 0.0);
    for i in 0..4 {
        for t in 0..new[i].len() {
            let at =
                Point { logp: new[i][t], returns: returns[i][t], value: Some(old[i][t]), ..Point::default() };
            let got = loss.at(&at);
            close(weights[i] * got.slope, slopes[i][t], "slope");
            sum += weights[i] * got.loss;
            clipped += f64::from(u8::from(got.clipped));
        }
    }
    close(sum, f.v.number("anchor/value_loss/loss"), "value loss");
    close(clipped / Counting::Verl.of(16.0), f.v.number("anchor/value_loss/clipfrac"), "clip fraction");
    let (returns, values) = (returns.concat(), old.concat());
    let want =
        f.v.at("metrics")["critic/vf_explained_var(gae_g1_l1 returns, fixture values)"].as_f64().unwrap();
    close(explained_variance(&returns, &values), want, "explained variance");
}

#[test]
fn divergences() {
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
        let slopes = f.picked(&format!("{keys}/grad_log_prob"));
        let mut sum = 0.0;
        for (i, row) in f.points().iter().enumerate() {
            for (t, point) in row.iter().enumerate() {
                let (kl, slope) = estimator.estimate(point.logp - point.reference.unwrap());
                close(slope / 16.0, slopes[i][t], keys);
                if value {
                    close(kl, f.picked(&format!("{keys}/per_token"))[i][t], keys);
                }
                sum += kl / 16.0;
            }
        }
        close(sum, f.v.number(&format!("{keys}/token_mean")), keys);
    }
}

#[test]
fn divergence_in_the_reward() {
    let f = Fixture::new();
    let (old, reference) = (f.of("old_log_prob"), f.of("ref_log_prob"));
    let penalty = KlPenalty { estimator: KlEstimator::K1, coefficient: 0.05 };
    let mut rollouts = f.rollouts();
    let mut means = Vec::new();
    for (i, rollout) in rollouts.iter_mut().enumerate() {
        means.push(penalty.charge(&mut rollout.paths[0].rewards, &old[i], &reference[i], Counting::Verl));
    }
    let want = f.picked("anchor/kl_in_reward_k1_beta0.05/token_level_rewards");
    for (got, want) in rollouts.iter().zip(want) {
        got.paths[0].rewards.iter().zip(want).for_each(|(got, want)| close(*got, want, "charged reward"));
    }
    let found = Counting::Exact.mean(means.into_iter());
    close(found, f.v.number("anchor/kl_in_reward_k1_beta0.05/current_kl"), "divergence");
    let v = &f.v;
    let of = |name: &str| v.number(&format!("anchor/adaptive_kl/{name}"));
    let adaptive = AdaptiveKl { target: of("target"), horizon: of("horizon") };
    close(adaptive.next(of("init"), of("current_kl"), of("n_steps") as usize), of("after"), "adapted");
}

#[test]
fn importance_weights() {
    let f = Fixture::new();
    let clamp = |high| Bound::Clamp { low: 0.0, high };
    for (level, bound, normalise, keys) in [
        (Level::Token, clamp(2.0), false, "anchor/tis/token_C2.0"),
        (Level::Token, clamp(1.2), false, "anchor/tis/token_C1.2"),
        (Level::Path, clamp(2.0), false, "anchor/tis/sequence_C2.0"),
        (Level::Token, clamp(1.2), true, "anchor/tis/token_C1.2_batch_norm"),
        (Level::Path, clamp(2.0), true, "anchor/tis/sequence_C2.0_batch_norm"),
        (Level::Token, Bound::Mask { low: 0.9, high: 1.2 }, false, "head/icepop_token_0.9_1.2"),
        (Level::Path, Bound::Mask { low: 0.95, high: 2.0 }, false, "head/icepop_sequence_0.95_2.0"),
    ] {
        let got = Correction { level, bound, normalise }.weights(&f.log_ratios(), Counting::Verl);
        for (got, want) in got.iter().zip(f.picked(&format!("{keys}/weights"))) {
            got.iter().zip(want).for_each(|(got, want)| close(*got, want, keys));
        }
    }
    let weighted = |bound| {
        let correction = Correction { level: Level::Token, bound, normalise: false };
        let clip =
            Loss::of(PolicyLoss::Clip { low: 0.2, high: 0.28, dual: Some(3.0), trust: None, keep: None });
        let weights = correction.weights(&f.log_ratios(), Counting::Verl).concat();
        f.points().concat().iter().zip(weights).map(|(point, w)| clip.at(point).loss * w / 16.0).sum::<f64>()
    };
    close(weighted(clamp(2.0)), f.v.number("anchor/ppo_vanilla_token_TIS_C2/loss"), "weighted loss");
    let masked = weighted(Bound::Mask { low: 0.9, high: 1.2 });
    close(masked, f.v.number("head/ppo_vanilla_icepop_0.9_1.2_loss"), "masked loss");
}

#[test]
fn rejection() {
    let f = Fixture::new();
    let of = |statistic, over, low: f64, high| Rejection {
        statistic,
        over,
        low: (low > 0.0).then_some(low),
        high,
        inverted: true,
    };
    use Over::*;
    use Statistic::*;
    let cases: [(&str, Vec<Rejection>); 9] = [
        ("token_k1@0.8_1.25", vec![of(K1, Token, 0.8, 1.25)]),
        ("token_k2@0.02", vec![of(K2, Token, 0.0, 0.02)]),
        ("token_k3@0.02", vec![of(K3, Token, 0.0, 0.02)]),
        ("seq_sum_k1@0.5_2.0", vec![of(K1, PathSum, 0.5, 2.0)]),
        ("seq_sum_k1@0.9_3.0", vec![of(K1, PathSum, 0.9, 3.0)]),
        ("seq_mean_k1@0.95_1.05", vec![of(K1, PathMean, 0.95, 1.05)]),
        ("seq_mean_k3@0.02", vec![of(K3, PathMean, 0.0, 0.02)]),
        ("seq_max_k2@0.02", vec![of(K2, PathMax, 0.0, 0.02)]),
        ("token_k1,seq_mean_k3@0.8_1.25,0.02", vec![of(K1, Token, 0.8, 1.25), of(K3, PathMean, 0.0, 0.02)]),
    ];
    for (name, rejections) in cases {
        let want = f.picked(&format!("anchor/rejection_sampling/{name}/mask")).concat();
        let all: Vec<Vec<bool>> =
            rejections.iter().map(|r| r.keeps(&f.log_ratios(), Counting::Verl).concat()).collect();
        for (i, want) in want.iter().enumerate() {
            assert_eq!(all.iter().all(|kept| kept[i]), *want == 1.0, "{name}, token {i}");
        }
    }
    // TRAP: verl bounds the inverse of the ratio.
    let kept = |inverted, ratio: f64| {
        let rejection = Rejection { statistic: K1, over: Token, low: Some(0.9), high: 3.0, inverted };
        rejection.keeps(&[vec![ratio.ln()]], Counting::Exact)[0][0]
    };
    assert_eq!((kept(true, 2.5), kept(true, 0.4)), (false, true));
    assert_eq!((kept(false, 2.5), kept(false, 0.4)), (true, false));
}

#[test]
fn mismatch() {
    let f = Fixture::new();
    let (old, rollout) = (f.of("old_log_prob"), f.of("rollout_log_prob"));
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
        close(got, f.v.number(&format!("anchor/offpolicy_metrics/{name}")), name);
    }
    let metrics = |name: &str| f.v.at("metrics")[name].as_f64().unwrap();
    close(got.probs_diff_max, metrics("training/rollout_probs_diff_max"), "largest difference");
    close(got.probs_diff_mean, metrics("training/rollout_probs_diff_mean"), "mean difference");
    // Computed in f32.
    near(got.probs_diff_std, metrics("training/rollout_probs_diff_std"), 1e-7, "deviation of differences");
    near(got.probs_correlation, metrics("training/rollout_actor_probs_pearson_corr"), 1e-7, "correlation");
}

#[test]
fn long_replies() {
    let v = vectors();
    for case in v.at("anchor/overlong").as_array().unwrap() {
        let of = |name: &str| case[name].as_f64().unwrap();
        let got = shaping::overlong(of("valid_len") as u64, of("max") as u64, of("buf") as u64, of("factor"));
        close(got, of("penalty"), "penalty for length");
    }
}
