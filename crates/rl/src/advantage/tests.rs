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

/// Six rollouts of which four are in groups without an advantage: what is left is three times as large. The half of verl's scores that
/// is not 0 makes it twice as large.
#[test]
fn gpg_makes_up_for_groups_without_a_gradient() {
    let scores = [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0), (2, 0.0), (2, 0.0)];
    let rollouts: Vec<Rollout> = scores.iter().map(|(group, score)| rollout(*group, *score, &[1])).collect();
    let scalars = |compare, rollouts: &[Rollout]| {
        found(&Estimator::Group(GroupBaseline { compare, ..GroupBaseline::default() }), rollouts).concat()
    };
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts), [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]);
    assert_eq!(scalars(Compare::MeanOfNonzero, &rollouts), [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
    // A failure beside a success has a gradient, a group of one has none, and where no group has one there is nothing to make up for.
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[..2]), [0.5, -0.5]);
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[..3]), [0.75, -0.75, 0.0]);
    assert_eq!(scalars(Compare::MeanOfInformative, &rollouts[2..]), [0.0; 4]);
}
