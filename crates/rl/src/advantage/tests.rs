//! Estimators compared with values computed by hand.

use super::*;

/// Creates a rollout with one sequence and the outcome at its end.
fn rollout(group: u64, score: f64, turns: &[usize]) -> Rollout {
    let mut rewards = vec![0.0; turns.iter().sum()];
    if let Some(last) = rewards.last_mut() {
        *last = score;
    }
    Rollout {
        group,
        score,
        sequences: vec![Sequence { turns: turns.to_vec(), rewards, ..Sequence::default() }],
        ..Rollout::default()
    }
}

/// Returns the advantages of rollouts with one sequence each.
fn found(estimator: &Estimator, rollouts: &[Rollout]) -> Vec<Vec<f64>> {
    let all = estimator.advantages(rollouts).unwrap();
    all.into_iter()
        .map(|mut sequences| sequences.pop().map_or(Vec::new(), |sequence| sequence.advantages))
        .collect()
}

fn group_advantages(compare: Compare, rollouts: &[Rollout]) -> Vec<f64> {
    found(&Estimator::Group(GroupBaseline { compare, ..GroupBaseline::default() }), rollouts)
        .concat()
}

/// Of six rollouts, four are in groups without an advantage, so the remaining advantages are three
/// times as large. Half of the scores are not 0, so verl's are twice as large.
#[test]
fn gpg_scales_up_informative_groups() {
    let scores = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0)];
    let rollouts: Vec<Rollout> =
        scores.iter().map(|(group, score)| rollout(*group, *score, &[1])).collect();
    use Compare::{MeanOfInformative, MeanOfNonzero};
    assert_eq!(group_advantages(MeanOfInformative, &rollouts), [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(group_advantages(MeanOfNonzero, &rollouts), [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
    // A failure in a group with a success has a gradient, and a group of one has none. If no group
    // has a gradient, nothing is scaled.
    assert_eq!(group_advantages(MeanOfInformative, &rollouts[..2]), [0.5, -0.5]);
    assert_eq!(group_advantages(MeanOfInformative, &rollouts[..3]), [0.75, -0.75, 0.0]);
    assert_eq!(group_advantages(MeanOfInformative, &rollouts[2..]), [0.0; 4]);
}

fn near(found: &[Vec<f64>], want: &[&[f64]]) {
    assert_eq!(found.len(), want.len());
    for (found, want) in found.iter().zip(want) {
        assert_eq!(found.len(), want.len(), "{found:?} {want:?}");
        assert!(
            found.iter().zip(*want).all(|(f, w)| (f - w).abs() < 1e-6),
            "{found:?}, expected {want:?}"
        );
    }
}

fn baseline(recenter: bool) -> Estimator {
    let singleton = Singleton::Zero;
    let counting = Counting::Exact;
    Estimator::ReinforcePlusPlusBaseline { singleton, counting, recenter }
}

/// Plans of runs from before the rename have the old name.
#[test]
fn recenter_is_stored_under_its_old_name() {
    let stored = serde_json::to_value(baseline(true)).unwrap();
    assert_eq!(stored["reinforce_plus_plus_baseline"]["recentre"], true);
    assert_eq!(serde_json::from_value::<Estimator>(stored).unwrap(), baseline(true));
    for name in ["recentre", "recenter"] {
        let text = format!("{{\"reinforce_plus_plus_baseline\": {{\"{name}\": true}}}}");
        let estimator: Estimator = serde_json::from_str(&text).unwrap();
        assert!(
            matches!(estimator, Estimator::ReinforcePlusPlusBaseline { recenter: true, .. }),
            "{name}"
        );
    }
}

/// Differences of 0.5 at one token and −0.5 at three, and 0 at the four tokens of a zero-variance
/// group: their mean is −1/8, their variance (0.625² + 3 · 0.375² + 4 · 0.125²) / 7 = 1/8.
#[test]
fn zero_variance_groups_count_in_deviation() {
    let rollouts = [
        rollout(0, 1.0, &[1]),
        rollout(0, 0.0, &[3]),
        rollout(1, 1.0, &[2]),
        rollout(1, 1.0, &[2]),
    ];
    let half = 0.5 * 8f64.sqrt();
    near(&found(&baseline(false), &rollouts), &[&[half], &[-half; 3], &[0.0; 2], &[0.0; 2]]);
    assert_eq!(found(&baseline(false), &rollouts)[2], [0.0; 2]);
    let moved = 8f64.sqrt() / 8.0;
    let up = half + moved;
    let down = -half + moved;
    near(&found(&baseline(true), &rollouts), &[&[up], &[down; 3], &[moved; 2], &[moved; 2]]);
    for recenter in [false, true] {
        let gdpo = Estimator::Gdpo {
            weights: vec![1.0],
            baseline: GroupBaseline::default(),
            counting: Counting::Exact,
            recenter,
        };
        let parts = rollouts.clone().map(|r| Rollout { components: vec![r.score], ..r });
        assert_eq!(found(&gdpo, &parts), found(&baseline(recenter), &rollouts), "{recenter}");
    }
}

/// Returns the rollout with a mask of its only sequence.
fn masked(masked: &[bool], mut rollout: Rollout) -> Rollout {
    rollout.sequences[0].masked = masked.to_vec();
    rollout
}

/// Masked tokens are part of the baseline, but not of means and deviations over tokens.
#[test]
fn whitening_ignores_masked_tokens() {
    // Trained tokens have 1, 0 and 0. The third rollout and the second half of the first have other
    // values.
    let rollouts = [
        masked(&[false, true], rollout(0, 1.0, &[2])),
        rollout(0, 0.0, &[2]),
        masked(&[true; 3], rollout(1, 7.0, &[3])),
    ];
    let plain =
        Estimator::ReinforcePlusPlus { gamma: 1.0, counting: Counting::Exact, one_turn: false };
    let got = found(&plain, &rollouts);
    // Mean 1/3, variance (4/9 + 2/9) / 2 = 1/3.
    let scale = 3f64.sqrt();
    near(&[got[0][..1].to_vec(), got[1].clone()], &[&[scale * 2.0 / 3.0], &[-scale / 3.0; 2]]);
    // Masked tokens are mapped in the same way.
    near(&[got[2].clone()], &[&[scale * (7.0 - 1.0 / 3.0); 3]]);
    let mut with_values = rollouts.clone();
    for rollout in &mut with_values {
        rollout.sequences[0].values = vec![0.0; rollout.sequences[0].len()];
    }
    let gae = Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: Some(Counting::Exact) };
    assert_eq!(found(&gae, &with_values), got);
    // In a comparison by groups, the masked half of the group counts in the mean.
    let group =
        [masked(&[true], rollout(0, 1.0, &[1])), rollout(0, 0.0, &[1]), rollout(0, 0.5, &[1])];
    let got = found(&baseline(false), &group);
    near(&got[1..], &[&[-0.5 * 8f64.sqrt()], &[0.0]]);

    let short = [masked(&[true], rollout(0, 1.0, &[2]))];
    let rejected = plain.advantages(&short);
    assert_eq!(rejected, Err(RlError::Missing { what: "masks", needed: 2, found: 1 }));
}

fn turns(gamma: f64, scale_by_std: bool) -> Estimator {
    Estimator::Turns { gamma, scale_by_std }
}

/// Three rollouts end after one, two and four turns. From the third turn on there is no other
/// rollout to compare with.
#[test]
fn longest_rollout_keeps_last_compared_advantage() {
    let outcomes =
        [rollout(0, 0.0, &[2]), rollout(0, 0.0, &[1, 1]), rollout(0, 1.0, &[1, 2, 1, 1])];
    let third = 1.0 / 3.0;
    let want: [&[f64]; 3] = [&[-third; 2], &[-third, -0.5], &[2.0 * third, 0.5, 0.5, 0.5, 0.5]];
    near(&found(&turns(1.0, false), &outcomes), &want);
    // A failure keeps its advantage, too, even if another rollout succeeded before.
    let outcomes = [rollout(0, 1.0, &[1]), rollout(0, 0.0, &[1, 1])];
    near(&found(&turns(1.0, false), &outcomes), &[&[0.5], &[-0.5, -0.5]]);
    let root = 0.5f64.sqrt();
    near(&found(&turns(1.0, true), &outcomes), &[&[root], &[-root, -root]]);
    // With a discount, the comparison uses the return at the first turn.
    let outcomes = [rollout(0, 0.0, &[1]), rollout(0, 1.0, &[1, 1, 1])];
    near(&found(&turns(0.5, false), &outcomes), &[&[-0.125], &[0.125; 3]]);
    // Rewards of 1 per turn, for two turns and for four: later turns do not have smaller
    // advantages, although their returns are smaller.
    let mut outcomes = [rollout(0, 2.0, &[1, 1]), rollout(0, 4.0, &[1, 1, 1, 1])];
    outcomes.iter_mut().for_each(|rollout| rollout.sequences[0].rewards.fill(1.0));
    near(&found(&turns(1.0, false), &outcomes), &[&[-1.0; 2], &[1.0; 4]]);
    // A rollout that is always the only one, or equal to the other at the last comparison, keeps 0.
    near(&found(&turns(1.0, false), &[rollout(0, 1.0, &[1, 1])]), &[&[0.0; 2]]);
    let equal = [rollout(0, 1.0, &[1]), rollout(0, 1.0, &[1, 1])];
    near(&found(&turns(1.0, false), &equal), &[&[0.0], &[0.0; 2]]);
}

/// Creates a sequence that starts after `turns_before` turns of its rollout, with a reward for each
/// of its turns of one token.
fn path_after(turns_before: usize, rewards: &[f64]) -> Sequence {
    Sequence {
        turns: vec![1; rewards.len()],
        turns_before,
        rewards: rewards.to_vec(),
        ..Sequence::default()
    }
}

/// The longest rollout has two sequences: the second starts at its third turn, and has the
/// advantage of the rollout.
#[test]
fn uncompared_path_keeps_advantage_of_rollout() {
    let forked = Rollout {
        score: 1.0,
        sequences: vec![path_after(0, &[0.0, 1.0]), path_after(2, &[0.0, 1.0])],
        ..Rollout::default()
    };
    let all = turns(1.0, false).advantages(&[forked, rollout(0, 0.0, &[1, 1])]).unwrap();
    assert_eq!(all[0][0].advantages, [0.5, 0.5]);
    assert_eq!(all[0][1].advantages, [0.5, 0.5]);
}

/// A rollout without turns has nothing to train, but its score is part of the baseline.
#[test]
fn rollouts_without_turns_count_in_baseline() {
    let empty = Rollout { score: -1.0, sequences: Vec::new(), ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[empty, rollout(0, 1.0, &[1, 1])]).unwrap();
    assert_eq!((all[0].len(), &all[1][0].advantages), (0, &vec![1.0, 1.0]));
}

fn gae_estimator(gamma: f64, lambda: f64) -> Estimator {
    Estimator::Gae { gamma, lambda, whiten: None }
}

fn gdpo_estimator(weights: [f64; 2]) -> Estimator {
    Estimator::Gdpo {
        weights: weights.to_vec(),
        baseline: GroupBaseline::scaled(),
        counting: Counting::Exact,
        recenter: false,
    }
}

#[test]
fn advantage_check_rejects_invalid_parameters() {
    let valid =
        [gae_estimator(1.0, 0.0), gdpo_estimator([1.0, -0.5]), turns(0.5, false), Estimator::ReMax];
    for estimator in valid {
        assert_eq!(estimator.check(), Ok(()), "{estimator:?}");
    }
    let invalid = [
        gae_estimator(1.1, 0.5),
        gae_estimator(0.5, -0.1),
        gdpo_estimator([1.0, f64::NAN]),
        turns(f64::INFINITY, false),
    ];
    for estimator in invalid {
        assert!(matches!(estimator.check(), Err(RlError::Parameter { .. })), "{estimator:?}");
    }
    assert!(gae_estimator(1.0, 1.0).needs_values());
    assert!(!turns(1.0, false).needs_values());
    let optimal: Estimator = serde_json::from_str(r#"{"optimal_token": {}}"#).unwrap();
    assert!(matches!(optimal, Estimator::OptimalToken { bare_tail: true, .. }), "{optimal:?}");
}

#[test]
fn path_without_tokens_is_empty() {
    let sequences = [Sequence::default(), Sequence { rewards: vec![0.0], ..Sequence::default() }];
    assert_eq!(sequences.map(|path| (path.len(), path.is_empty())), [(0, true), (1, false)]);
}

/// Rewards of 1 and 3 at one turn of two sequences are one sample of 2. The other rollout has 0, so
/// the mean is 1.
#[test]
fn paths_with_same_turn_are_one_sample() {
    let sequences = vec![path_after(0, &[1.0]), path_after(0, &[3.0])];
    let both = Rollout { score: 4.0, sequences, ..Rollout::default() };
    let other = Rollout { sequences: vec![path_after(0, &[0.0])], ..Rollout::default() };
    let all = turns(1.0, false).advantages(&[both, other]).unwrap();
    let found: Vec<f64> =
        all.into_iter().flatten().flat_map(|sequence| sequence.advantages).collect();
    assert_eq!(found, [0.0, 2.0, -1.0]);
}

/// Scores of 3 and 1 have a mean of 2 and a standard deviation of √2.
#[test]
fn grpo_divides_by_standard_deviation() {
    let found = GroupBaseline::scaled().advantages(&[3.0, 1.0]).unwrap();
    let want = 0.5f64.sqrt();
    assert!((found[0] - want).abs() < 1e-5 && (found[1] + want).abs() < 1e-5, "{found:?}");
}

/// Without sampled tokens there are no weights.
#[test]
fn length_weighted_mean_without_tokens_is_mean() {
    let baseline =
        GroupBaseline { compare: Compare::LengthWeightedMean, ..GroupBaseline::default() };
    assert_eq!(baseline.advantages(&[3.0, 1.0]).unwrap(), [1.0, -1.0]);
}

/// Two tokens each, with probabilities of 1/2 and 3/4. The sums of squared norms are 1/2 and 1/8 at
/// the first token, and 1 and 1/4 at the second. With returns of 1 and 0, the baseline is 4/5 at
/// both.
#[test]
fn optimal_baseline_weights_by_score_norm() {
    let optimal = Estimator::OptimalToken { alignment: Alignment::ActionToken, bare_tail: true };
    let rollouts = [(1.0, 0.5f64), (0.0, 0.75)].map(|(score, p)| {
        let mut rollout = rollout(0, score, &[2]);
        rollout.sequences[0].behavior = vec![p.ln(); 2];
        rollout.sequences[0].concentration = vec![p * p + (1.0 - p) * (1.0 - p); 2];
        rollout
    });
    near(&found(&optimal, &rollouts), &[&[0.2, 0.2], &[-0.8, -0.8]]);
}

/// The state after a truncated sequence has a critic's value of 2. With γ = λ = 1/2 and values of
/// 1/2, the second difference is 1 − 1/2 = 1/2, the first 1/4 − 1/2 = −1/4, and the first advantage
/// −1/4 + 1/8.
#[test]
fn gae_counts_value_of_truncated_state() {
    let values = gae(&[0.0, 0.0], &[0.5, 0.5], 2.0, 0.5, 0.5);
    assert_eq!((values.advantages, values.returns), (vec![-0.125, 0.5], vec![0.375, 1.0]));
    for (truncation_value, want) in [(Some(2.0), [-0.125, 0.5]), (None, [-0.375, -0.5])] {
        let mut rollout = rollout(0, 0.0, &[2]);
        rollout.sequences[0].values = vec![0.5; 2];
        rollout.sequences[0].truncation_value = truncation_value;
        assert_eq!(found(&gae_estimator(0.5, 0.5), &[rollout]), [want], "{truncation_value:?}");
    }
}

/// The second sequence of a rollout starts at its second turn. There, the rollout's returns of 1
/// and 3 are one sample of 2. At the first turn its return is 1.
#[test]
fn turns_compare_later_paths_by_position() {
    let forked = Rollout {
        score: 1.0,
        sequences: vec![path_after(0, &[0.0, 1.0]), path_after(1, &[3.0])],
        ..Rollout::default()
    };
    let all = turns(1.0, false).advantages(&[forked, rollout(0, 0.0, &[1, 1])]).unwrap();
    let found: Vec<Vec<f64>> =
        all.into_iter().flatten().map(|sequence| sequence.advantages).collect();
    assert_eq!(found, [vec![0.5, 0.0], vec![2.0], vec![-0.5, -1.0]]);
}
