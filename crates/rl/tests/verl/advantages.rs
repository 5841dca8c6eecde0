//! Advantages and returns, compared with verl.

use levade_rl::*;

use crate::common::{assert_close, assert_near};
use crate::fixture::{Fixture, SCORE, masked_values, number, vectors};

#[test]
fn whitening_matches_verl() {
    let v = vectors();
    let picked: Vec<f64> =
        masked_values(&v.rows("anchor/masked_stats/values"), &v.rows("anchor/masked_stats/mask"))
            .concat();
    let mean = Counting::Verl.mean(picked.iter().copied());
    assert_close(mean, v.number("anchor/masked_stats/masked_mean"), "mean");
    let variance = Counting::Verl.variance(picked.iter().copied(), mean);
    assert_close(variance, v.number("anchor/masked_stats/masked_var_unbiased"), "variance");
    assert_close(picked.iter().sum(), v.number("anchor/masked_stats/masked_sum"), "sum");
    let mut whitened = picked;
    whiten(whitened.iter_mut(), Counting::Verl);
    let want = masked_values(
        &v.rows("anchor/masked_stats/masked_whiten"),
        &v.rows("anchor/masked_stats/mask"),
    )
    .concat();
    whitened.iter().zip(want).for_each(|(got, want)| assert_close(*got, want, "whitened"));
}

#[test]
fn gae_matches_verl() {
    let f = Fixture::new();
    for (name, gamma, lambda) in [("gae_g1.0_l1.0", 1.0, 1.0), ("gae_g0.99_l0.95", 0.99, 0.95)] {
        let raw = format!("anchor/{name}/raw_advantages");
        let returns = format!("anchor/{name}/returns");
        f.expect(&Estimator::Gae { gamma, lambda, whiten: None }, &raw, Some(&returns));
        let whitened = Estimator::Gae { gamma, lambda, whiten: Some(Counting::Verl) };
        f.expect(&whitened, &format!("anchor/{name}/whitened_advantages"), Some(&returns));
    }
    let rewards = &f.v.rows("anchor/gae_process_reward_seq0/rewards")[0];
    let want = f.v.rows("anchor/gae_process_reward_seq0/raw_advantages");
    let first = &f.mask[..1];
    let got = gae(
        &masked_values(std::slice::from_ref(rewards), first)[0],
        &f.values_of("values")[0],
        0.0,
        0.99,
        0.95,
    );
    got.advantages
        .iter()
        .zip(&masked_values(&want, first)[0])
        .for_each(|(got, want)| assert_close(*got, *want, "process reward"));
}

/// TRAP: verl loses the reward of an observation. A caller must attach it to the action token
/// before; otherwise the result is verl's.
#[test]
fn gae_keeps_reward_of_observation() {
    let v = vectors();
    let values = &v.rows("anchor/gae_reward_on_masked_token/values")[0];
    let want = &v.rows("anchor/gae_reward_on_masked_token/raw_advantages")[0];
    let lost = gae(&[0.0; 3], &values[..3], 0.0, 1.0, 1.0);
    lost.advantages
        .iter()
        .zip(want)
        .for_each(|(got, want)| assert_close(*got, *want, "reward lost"));
    let kept = gae(&[0.0, 0.0, 1.0], &values[..3], 0.0, 1.0, 1.0);
    [0.9, 0.8, 0.7]
        .iter()
        .zip(&kept.advantages)
        .for_each(|(want, got)| assert_close(*got, *want, "reward kept"));
}

#[test]
fn group_baselines_match_verl() {
    let f = Fixture::new();
    let scaled = GroupBaseline { scale_by_std: true, ..SCORE };
    f.expect(&Estimator::Group(scaled), "anchor/grpo/advantages", None);
    f.expect_scalars(scaled, "anchor/grpo/per_seq_scalar");
    f.expect_scalars(SCORE, "anchor/grpo/per_seq_scalar_no_std_drgrpo");
    f.expect_scalars(
        GroupBaseline { compare: Compare::LeaveOneOut, ..SCORE },
        "anchor/rloo_per_seq",
    );
    let baseline =
        GroupBaseline { compare: Compare::LeaveOneOut, singleton: Singleton::Zero, ..SCORE };
    f.expect_scalars(baseline, "anchor/rloo_vectorized_per_seq");
    f.expect_scalars(
        GroupBaseline { compare: Compare::LengthWeightedMean, ..SCORE },
        "anchor/opo_per_seq",
    );
    // TRAP: verl's GPG counts scores other than 0, whereas the paper counts rollouts with a
    // gradient.
    f.expect_scalars(
        GroupBaseline { compare: Compare::MeanOfNonzero, ..SCORE },
        "anchor/gpg_per_seq",
    );
    let got = scaled.advantages(&[1.0, 1.0]).unwrap();
    assert_eq!(got, [0.0, 0.0]);
    // This vector was computed in f32.
    let vectorized = f.v.list("anchor/grpo_vectorized_per_seq_scalar_f32");
    let got = Estimator::Group(scaled).advantages(&f.rollouts()).unwrap();
    got.iter()
        .zip(vectorized)
        .for_each(|(got, want)| assert_near(got[0].advantages[0], want, 1e-7, "vectorised"));
}

#[test]
fn best_of_group_matches_verl() {
    let f = Fixture::new();
    let best = GroupBaseline { compare: Compare::SecondBest { k: None }, ..SCORE };
    let got = best.advantages(&[1.0, 0.0, 0.5]).unwrap();
    got.iter()
        .zip(f.v.list("anchor/passk_group_a_no_std"))
        .for_each(|(got, want)| assert_close(*got, want, "pass@k"));
    let got = GroupBaseline { scale_by_std: true, ..best }.advantages(&[1.0, 0.0, 0.5]).unwrap();
    let want = f.v.rows("anchor/passk_group_a");
    got.iter().zip(want).for_each(|(got, want)| assert_close(*got, want[0], "pass@k over std"));
}

#[test]
fn reinforce_plus_plus_matches_verl() {
    let f = Fixture::new();
    let gamma = 0.9;
    let counting = Counting::Verl;
    let right = Estimator::ReinforcePlusPlus { gamma, counting, one_turn: false };
    let name = "head/reinforce_pp_gamma0.9";
    f.expect(&right, &format!("{name}/advantages"), Some(&format!("{name}/returns")));
    // TRAP: earlier versions of verl dropped the outcome at every observation.
    let forgetful = Estimator::ReinforcePlusPlus { gamma, counting, one_turn: true };
    let got = forgetful.advantages(&f.rollouts()).unwrap();
    // verl also stores sums at the observation before a turn. Only action tokens are compared here.
    let want = f.masked_rows("anchor/reinforce_pp_gamma0.9/returns");
    for (got, want) in got.iter().zip(&want) {
        got[0]
            .returns
            .iter()
            .zip(want)
            .for_each(|(got, want)| assert_close(*got, *want, "returns of one turn"));
    }
    f.compare(&got, "anchor/reinforce_pp_gamma0.9/advantages", |sequence| &sequence.advantages);
    let baseline = Estimator::ReinforcePlusPlusBaseline {
        singleton: Singleton::Score,
        counting,
        recenter: true,
    };
    f.expect(&baseline, "anchor/reinforce_pp_baseline_advantages", None);
}

#[test]
fn other_estimators_match_verl() {
    let f = Fixture::new();
    let mut rollouts = f.rollouts();
    for (rollout, rival) in rollouts.iter_mut().zip([0.5, 0.5, 0.0, 1.0]) {
        rollout.rival = Some(rival);
    }
    let got = Estimator::ReMax.advantages(&rollouts).unwrap();
    let name = "anchor/remax_baseline_[.5,.5,0,1]";
    f.compare(&got, &format!("{name}/advantages"), |sequence| &sequence.advantages);
    f.compare(&got, &format!("{name}/returns"), |sequence| &sequence.returns);

    for (alignment, bare_tail, advantages, returns) in [
        (Alignment::Position, false, "anchor/otb/advantages", Some("anchor/otb/returns")),
        (Alignment::Position, true, "head/otb/advantages", None),
        (Alignment::ActionToken, true, "anchor/otb/tir_otb_advantages_handle_zero_tail", None),
    ] {
        f.expect(&Estimator::OptimalToken { alignment, bare_tail }, advantages, returns);
    }

    let parts = ["acc", "fmt"].map(|name| f.v.list(&format!("head/gdpo/rewards/{name}")));
    for (i, rollout) in rollouts.iter_mut().enumerate() {
        rollout.components = parts.iter().map(|part| part[i]).collect();
    }
    let baseline = GroupBaseline { scale_by_std: true, ..SCORE };
    let weights = f.v.list("head/gdpo/weights");
    let gdpo = Estimator::Gdpo { weights, baseline, counting: Counting::Verl, recenter: true };
    // Computed in f32 if groups are normalized.
    let want = f.masked_rows("head/gdpo/advantages");
    for (got, want) in gdpo.advantages(&rollouts).unwrap().iter().zip(want) {
        got[0]
            .advantages
            .iter()
            .zip(want)
            .for_each(|(got, want)| assert_near(*got, want, 1e-6, "gdpo"));
    }
}

#[test]
fn overlong_penalty_matches_verl() {
    let v = vectors();
    for case in v.value_at("anchor/overlong").as_array().unwrap() {
        let got = shaping::overlong_penalty(
            number(case, "valid_len") as u64,
            number(case, "max") as u64,
            number(case, "buf") as u64,
            number(case, "factor"),
        );
        assert_close(got, number(case, "penalty"), "penalty for length");
    }
}
