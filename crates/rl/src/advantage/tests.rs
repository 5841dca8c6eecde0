//! Estimators against values worked out by hand.

use super::*;

/// A rollout of one path with the outcome at its end.
fn rollout(group: u64, score: f64, turns: &[usize]) -> Rollout {
    let mut rewards = vec![0.0; turns.iter().sum()];
    if let Some(last) = rewards.last_mut() {
        *last = score;
    }
    Rollout {
        group,
        score,
        paths: vec![Path { turns: turns.to_vec(), rewards, ..Path::default() }],
        ..Rollout::default()
    }
}

/// Advantages of rollouts of one path each.
fn found(estimator: &Estimator, rollouts: &[Rollout]) -> Vec<Vec<f64>> {
    let all = estimator.advantages(rollouts).unwrap();
    all.into_iter().map(|mut paths| paths.pop().map_or(Vec::new(), |path| path.advantages)).collect()
}

/// Six rollouts of which four are in groups without an advantage: what is left is three times as large. The
/// half of verl's scores that is not 0 makes it twice as large.
#[test]
fn gpg_makes_up_for_groups_without_a_gradient() {
    let scores = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0)];
    let rollouts: Vec<Rollout> = scores.iter().map(|(group, score)| rollout(*group, *score, &[1])).collect();
    let scalars = |compare, rollouts: &[Rollout]| {
        found(&Estimator::Group(GroupBaseline { compare, ..GroupBaseline::default() }), rollouts).concat()
    };
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts), [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(scalars(Compare::MeanOfNonzero, &rollouts), [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
    // A failure beside a success has a gradient, a group of one has none, and where no group has one there is
    // nothing to make up for.
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[..2]), [0.5, -0.5]);
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[..3]), [0.75, -0.75, 0.0]);
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[2..]), [0.0; 4]);
}

fn near(found: &[Vec<f64>], want: &[&[f64]]) {
    assert_eq!(found.len(), want.len());
    for (found, want) in found.iter().zip(want) {
        assert_eq!(found.len(), want.len(), "{found:?} {want:?}");
        assert!(found.iter().zip(*want).all(|(f, w)| (f - w).abs() < 1e-6), "{found:?}, expected {want:?}");
    }
}

fn baseline(recentre: bool) -> Estimator {
    let (singleton, counting) = (Singleton::Zero, Counting::Exact);
    Estimator::ReinforcePlusPlusBaseline { singleton, counting, recentre }
}

/// Differences of 0.5 at one token and −0.5 at three, 0 at the four of a group that is uniform: their mean is
/// −1/8, their variance (0.625² + 3 · 0.375² + 4 · 0.125²) / 7 = 1/8.
#[test]
fn uniform_groups_count_in_the_deviation_and_learn_nothing() {
    let rollouts =
        [rollout(0, 1.0, &[1]), rollout(0, 0.0, &[3]), rollout(1, 1.0, &[2]), rollout(1, 1.0, &[2])];
    let half = 0.5 * 8f64.sqrt();
    near(&found(&baseline(false), &rollouts), &[&[half], &[-half; 3], &[0.0; 2], &[0.0; 2]]);
    assert_eq!(found(&baseline(false), &rollouts)[2], [0.0; 2]);
    let moved = 8f64.sqrt() / 8.0;
    let (up, down) = (half + moved, -half + moved);
    near(&found(&baseline(true), &rollouts), &[&[up], &[down; 3], &[moved; 2], &[moved; 2]]);
    let parts = |recentre| {
        let rollouts = rollouts.clone().map(|r| Rollout { components: vec![r.score], ..r });
        let (baseline, counting) = (GroupBaseline::default(), Counting::Exact);
        found(&Estimator::Gdpo { weights: vec![1.0], baseline, counting, recentre }, &rollouts)
    };
    assert_eq!(
        (parts(false), parts(true)),
        (found(&baseline(false), &rollouts), found(&baseline(true), &rollouts))
    );
}

/// Masked tokens are compared with, and do not count in means and deviations over tokens.
#[test]
fn masked_tokens_are_not_whitened_with() {
    let masked = |masked: &[bool], rollout: Rollout| {
        let mut rollout = rollout;
        rollout.paths[0].masked = masked.to_vec();
        rollout
    };
    // Trained are 1, 0 and 0; the third rollout has values of its own, and so has the second half of the
    // first.
    let rollouts = [
        masked(&[false, true], rollout(0, 1.0, &[2])),
        rollout(0, 0.0, &[2]),
        masked(&[true; 3], rollout(1, 7.0, &[3])),
    ];
    let plain = Estimator::ReinforcePlusPlus { gamma: 1.0, counting: Counting::Exact, one_turn: false };
    let got = found(&plain, &rollouts);
    // Mean 1/3, variance (4/9 + 2/9) / 2 = 1/3.
    let scale = 3f64.sqrt();
    near(&[got[0][..1].to_vec(), got[1].clone()], &[&[scale * 2.0 / 3.0], &[-scale / 3.0; 2]]);
    // They go along by the same rule.
    near(&[got[2].clone()], &[&[scale * (7.0 - 1.0 / 3.0); 3]]);
    let values = |rollout: Rollout| {
        let mut rollout = rollout;
        rollout.paths[0].values = vec![0.0; rollout.paths[0].len()];
        rollout
    };
    let gae = Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: Some(Counting::Exact) };
    assert_eq!(found(&gae, &rollouts.clone().map(values)), got);
    // Compared by groups, the masked half of the group still makes its mean.
    let group = [masked(&[true], rollout(0, 1.0, &[1])), rollout(0, 0.0, &[1]), rollout(0, 0.5, &[1])];
    let got = found(&baseline(false), &group);
    near(&got[1..], &[&[-0.5 * 8f64.sqrt()], &[0.0]]);

    let short = [masked(&[true], rollout(0, 1.0, &[2]))];
    let refused = plain.advantages(&short);
    assert_eq!(refused, Err(RlError::Missing { what: "masks", needed: 2, found: 1 }));
}

fn turns(gamma: f64, scale_by_std: bool) -> Estimator {
    Estimator::Turns { gamma, scale_by_std }
}

/// Three rollouts end after one, two and four turns. From the third turn on nobody is left to be compared
/// with.
#[test]
fn the_last_to_go_on_keeps_its_advantage() {
    let outcomes = [rollout(0, 0.0, &[2]), rollout(0, 0.0, &[1, 1]), rollout(0, 1.0, &[1, 2, 1, 1])];
    let third = 1.0 / 3.0;
    let want: [&[f64]; 3] = [&[-third; 2], &[-third, -0.5], &[2.0 * third, 0.5, 0.5, 0.5, 0.5]];
    near(&found(&turns(1.0, false), &outcomes), &want);
    // A failure as well, whoever succeeded before it.
    let outcomes = [rollout(0, 1.0, &[1]), rollout(0, 0.0, &[1, 1])];
    near(&found(&turns(1.0, false), &outcomes), &[&[0.5], &[-0.5, -0.5]]);
    let root = 0.5f64.sqrt();
    near(&found(&turns(1.0, true), &outcomes), &[&[root], &[-root, -root]]);
    // With a discount the return at the first turn is what it was compared with.
    let outcomes = [rollout(0, 0.0, &[1]), rollout(0, 1.0, &[1, 1, 1])];
    near(&found(&turns(0.5, false), &outcomes), &[&[-0.125], &[0.125; 3]]);
    // Rewards of 1 a turn, to two turns and to four: not the less for having less to come.
    let mut outcomes = [rollout(0, 2.0, &[1, 1]), rollout(0, 4.0, &[1, 1, 1, 1])];
    outcomes.iter_mut().for_each(|rollout| rollout.paths[0].rewards.fill(1.0));
    near(&found(&turns(1.0, false), &outcomes), &[&[-1.0; 2], &[1.0; 4]]);
    // Who is alone from the beginning, or equal where it was compared, has nothing to keep.
    near(&found(&turns(1.0, false), &[rollout(0, 1.0, &[1, 1])]), &[&[0.0; 2]]);
    let equal = [rollout(0, 1.0, &[1]), rollout(0, 1.0, &[1, 1])];
    near(&found(&turns(1.0, false), &equal), &[&[0.0], &[0.0; 2]]);
}

/// A rollout in two paths is the last to go on: the second begins at its third turn and has the advantage of
/// the whole.
#[test]
fn a_path_that_begins_alone_keeps_that_of_its_rollout() {
    let path = |turns_before, rewards: &[f64]| Path {
        turns: vec![1; rewards.len()],
        turns_before,
        rewards: rewards.to_vec(),
        ..Path::default()
    };
    let forked =
        Rollout { score: 1.0, paths: vec![path(0, &[0.0, 1.0]), path(2, &[0.0, 1.0])], ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[forked, rollout(0, 0.0, &[1, 1])]).unwrap();
    assert_eq!(all[0][0].advantages, [0.5, 0.5]);
    assert_eq!(all[0][1].advantages, [0.5, 0.5]);
}

/// Without a turn there is nothing to train, but a score to compare with.
#[test]
fn rollouts_without_a_turn_are_compared_with() {
    let empty = Rollout { score: -1.0, paths: Vec::new(), ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[empty, rollout(0, 1.0, &[1, 1])]).unwrap();
    assert_eq!((all[0].len(), &all[1][0].advantages), (0, &vec![1.0, 1.0]));
}

#[test]
fn parameters_are_checked() {
    let gae = |gamma, lambda| Estimator::Gae { gamma, lambda, whiten: None };
    let gdpo = |weights: &[f64]| Estimator::Gdpo {
        weights: weights.to_vec(),
        baseline: GroupBaseline::scaled(),
        counting: Counting::Exact,
        recentre: false,
    };
    let turns = |gamma| Estimator::Turns { gamma, scale_by_std: false };
    for fine in [gae(1.0, 0.0), gdpo(&[1.0, -0.5]), turns(0.5), Estimator::ReMax] {
        assert_eq!(fine.check(), Ok(()), "{fine:?}");
    }
    for wrong in [gae(1.1, 0.5), gae(0.5, -0.1), gdpo(&[1.0, f64::NAN]), turns(f64::INFINITY)] {
        assert!(matches!(wrong.check(), Err(RlError::Parameter { .. })), "{wrong:?}");
    }
    assert_eq!([gae(1.0, 1.0), turns(1.0)].map(|estimator| estimator.needs_values()), [true, false]);
    let optimal: Estimator = serde_json::from_str(r#"{"optimal_token": {}}"#).unwrap();
    assert!(matches!(optimal, Estimator::OptimalToken { bare_tail: true, .. }), "{optimal:?}");
}

#[test]
fn paths_are_empty_without_a_token() {
    let paths = [Path::default(), Path { rewards: vec![0.0], ..Path::default() }];
    assert_eq!(paths.map(|path| (path.len(), path.is_empty())), [(0, true), (1, false)]);
}

/// Rewards of 1 and 3 at one turn of two paths are one sample of 2; the other rollout got 0. The mean is 1.
#[test]
fn paths_that_share_a_turn_are_one_sample() {
    let path = |reward| Path { turns: vec![1], rewards: vec![reward], ..Path::default() };
    let both = Rollout { score: 4.0, paths: vec![path(1.0), path(3.0)], ..Rollout::default() };
    let other = Rollout { paths: vec![path(0.0)], ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[both, other]).unwrap();
    let found: Vec<f64> = all.into_iter().flatten().flat_map(|path| path.advantages).collect();
    assert_eq!(found, [0.0, 2.0, -1.0]);
}

/// Scores of 3 and 1 have a mean of 2 and a deviation of √2.
#[test]
fn grpo_divides_by_the_deviation() {
    let found = GroupBaseline::scaled().advantages(&[3.0, 1.0]).unwrap();
    let want = 0.5f64.sqrt();
    assert!((found[0] - want).abs() < 1e-5 && (found[1] + want).abs() < 1e-5, "{found:?}");
}

/// Where not one token was sampled there is nothing to weigh by.
#[test]
fn the_length_weighted_mean_of_no_tokens_is_the_mean() {
    let baseline = GroupBaseline { compare: Compare::LengthWeightedMean, ..GroupBaseline::default() };
    assert_eq!(baseline.advantages(&[3.0, 1.0]).unwrap(), [1.0, -1.0]);
}

/// Probabilities of 1/2 and 3/4 of two tokens each: squared norms of 1/2 and 1/8 for the first, of 1 and 1/4
/// with the second. With returns of 1 and 0 the baselines are 4/5 at both.
#[test]
fn the_optimal_baseline_weighs_by_the_norm_of_the_score() {
    let optimal = Estimator::OptimalToken { alignment: Alignment::ActionToken, bare_tail: true };
    let path = |score, p: f64| Path {
        turns: vec![2],
        rewards: vec![0.0, score],
        behaviour: vec![p.ln(); 2],
        concentration: vec![p * p + (1.0 - p) * (1.0 - p); 2],
        ..Path::default()
    };
    let rollout = |score, p| Rollout { score, paths: vec![path(score, p)], ..Rollout::default() };
    near(&found(&optimal, &[rollout(1.0, 0.5), rollout(0.0, 0.75)]), &[&[0.2, 0.2], &[-0.8, -0.8]]);
}

/// A path that was cut goes on for as much as a critic says: 2. With γ = λ = 1/2 and values of 1/2 the second
/// difference is 1 − 1/2 = 1/2, the first 1/4 − 1/2 = −1/4, and the first advantage −1/4 + 1/8.
#[test]
fn gae_counts_value_of_cut_state() {
    let found = gae(&[0.0, 0.0], &[0.5, 0.5], 2.0, 0.5, 0.5);
    assert_eq!((found.advantages, found.returns), (vec![-0.125, 0.5], vec![0.375, 1.0]));
    let estimator = Estimator::Gae { gamma: 0.5, lambda: 0.5, whiten: None };
    let of = |cut: Option<f64>| {
        let path =
            Path { turns: vec![2], rewards: vec![0.0; 2], values: vec![0.5; 2], cut, ..Path::default() };
        let all = estimator.advantages(&[Rollout { paths: vec![path], ..Rollout::default() }]).unwrap();
        all[0][0].advantages.clone()
    };
    assert_eq!(of(Some(2.0)), [-0.125, 0.5]);
    assert_eq!(of(None), [-0.375, -0.5]);
}

/// The second path of a rollout begins at its second turn. There the rollout's returns of 1 and 3 are one
/// sample of 2; at the first turn its return is 1.
#[test]
fn turns_compare_later_paths_by_position() {
    let path = |turns_before, rewards: &[f64]| Path {
        turns: vec![1; rewards.len()],
        turns_before,
        rewards: rewards.to_vec(),
        ..Path::default()
    };
    let forked =
        Rollout { score: 1.0, paths: vec![path(0, &[0.0, 1.0]), path(1, &[3.0])], ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[forked, rollout(0, 0.0, &[1, 1])]).unwrap();
    let found: Vec<Vec<f64>> = all.into_iter().flatten().map(|path| path.advantages).collect();
    assert_eq!(found, [vec![0.5, 0.0], vec![2.0], vec![-0.5, -1.0]]);
}
