//! Tests of plans with reward components, empty attempts and entropies.

use super::*;

/// Weights of the answer's score, of the remaining outcome, and of the turns' rewards.
fn parts(weights: [f64; 3]) -> RlKeys {
    let baseline = GroupBaseline::default();
    let counting = levade_rl::Counting::Exact;
    let advantage =
        Estimator::Gdpo { weights: weights.into(), baseline, counting, recenter: false };
    RlKeys { advantage: Some(advantage), ..keys() }
}

#[test]
fn gdpo_normalizes_reward_components_separately() {
    // The first answer is correct, with a malformed call. The second is incorrect, without such a
    // call.
    let step_rewards = vec![StepReward { credit_target: CreditTarget::Turn(0), reward: -0.5 }];
    let right = Attempt { score: Some(1.0), step_rewards, ..turn_tokens(0, 1, 0.5) };
    let wrong = Attempt { score: Some(0.0), ..turn_tokens(1, 1, 0.0) };
    let plan = plan_of(&[vec![right, wrong]], &parts([1.0, 0.0, 2.0]), 1000).unwrap();
    // 1 × 0.5 − 2 × 0.25 for the first: the advantages cancel, as for the second.
    assert_eq!(plan.updates, [Update::default()]);
}

/// A component of the score that is credited to a turn is not credited to the final answer.
#[test]
fn answer_score_excludes_components_of_turns() {
    let of = |sample, score| Attempt { score: Some(score), ..turn_tokens(sample, 1, score) };
    let mut half = of(0, 1.0);
    let by = CreditTarget::Turn(0);
    let component = Component {
        weight: Some(0.5),
        credit_target: Some(by.clone()),
        ..Component::new("step", 1.0)
    };
    half.outcome.components = vec![component];
    half.step_rewards = vec![StepReward { credit_target: by, reward: 0.5 }];
    let plan =
        plan_of(&[vec![half, of(1, 1.0), of(2, 0.0)]], &parts([1.0, 0.0, 0.0]), 1000).unwrap();
    // Answers earned 1 − 0.5, 1 and 0. The first equals the mean, so its advantage is 0.
    let [right, wrong] = &rows(&plan.updates[0])[0][..] else { panic!("{plan:?}") };
    assert_eq!(((right.1, wrong.1), right.2), ((1, 2), -wrong.2));
    assert!(right.2 > 0.0);
}

/// A value follows a truncated attempt, but not a complete one.
#[test]
fn truncated_attempt_bootstraps_from_critic_value() {
    let advantage = Some(Estimator::Gae { gamma: 0.5, lambda: 0.5, whiten: None });
    let groups = [vec![
        attempt(0, 0, &[1, 2], &[3, 4], Some(1.0)),
        attempt(0, 1, &[1, 2], &[3, 5], Some(1.0)),
    ]];
    let signals = |id: AttemptId, _| SequenceSignals {
        values: vec![0.5, 0.25],
        truncation_value: (slot(id).1 == 0).then_some(2.0),
        ..SequenceSignals::default()
    };
    let plan = plan_with(&groups, &RlKeys { advantage, ..keys() }, 1000, &signals).unwrap();
    let [truncated, ended] = &plan.updates[0].sequences[..] else { panic!("{plan:?}") };
    // δ₁ = 1 + γ · 2 − 0.25, δ₀ = γ · 0.25 − 0.5, and λ γ δ₁ more for the first.
    assert_eq!(truncated.advantage, PerToken::new([-0.375 + 0.25 * 1.75, 1.75]));
    assert_eq!(ended.advantage, PerToken::new([-0.375 + 0.25 * 0.75, 0.75]));
    assert_eq!(truncated.returns, Some(PerToken::new([0.5625, 2.0])));
}

#[test]
fn high_entropy_fraction_keeps_highest_entropy_tokens() {
    let entropies = |id: AttemptId, _| {
        let entropies = match slot(id) {
            (0, 0) => vec![0.9, 0.1],
            (0, 1) => vec![0.3],
            (1, 0) => vec![0.8],
            (1, 1) => vec![0.2, 0.7],
            (2, 0) => vec![0.4, 0.5],
            _ => vec![0.6],
        };
        SequenceSignals { entropies, ..SequenceSignals::default() }
    };
    // Three of nine tokens, including tokens of a group without advantages.
    let keys = RlKeys { high_entropy_fraction: 1.0 / 3.0, ..keys() };
    let plan = plan_with(&groups(), &keys, 1000, &entropies).unwrap();
    assert_eq!(
        plan.high_entropy,
        Some(HighEntropy { tokens: 9, kept: 3, thresholds: vec![f64::from(0.7f32)] })
    );
    let [sequence] = &plan.updates[0].sequences[..] else { panic!("{plan:?}") };
    assert_eq!(slot(sequence.attempt), (0, 0));
    assert_eq!(sequence.advantage, PerToken::new([0.5, 0.0]));
    // The loss is still a mean over all tokens.
    assert_eq!(sequence.weight, PerToken::uniform(1.0 / 9.0));
    // Every update has its own threshold.
    let keys = RlKeys { mini_batches: 2, high_entropy_fraction: 0.5, ..keys };
    let plan = plan_with(&groups(), &keys, 1000, &entropies).unwrap();
    let found = plan.high_entropy.unwrap();
    assert_eq!(found.thresholds, [f64::from(0.3f32), f64::from(0.6f32)]);
    assert_eq!((found.tokens, found.kept), (9, 5));
}

/// An attempt that ended before its first token is compared with every agent's part of the other
/// attempts, unless it is dropped.
#[test]
fn empty_attempts_are_compared_with_each_agent() {
    let step_rewards =
        vec![StepReward { credit_target: CreditTarget::Agent("b".into()), reward: 1.0 }];
    let group = [vec![
        together(0, 2, 2.0, step_rewards),
        together(1, 1, 0.0, vec![]),
        attempt(0, 2, &[1, 2], &[], Some(-2.0)),
    ]];
    let with = |empty| {
        let plan =
            plan_of(&group, &RlKeys { group_by: GroupBy::Agent, empty, ..keys() }, 1000).unwrap();
        let sequences = plan.updates[0].sequences.clone();
        sequences
            .iter()
            .map(|sequence| sequence.advantage.iter().take(4).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    // Rewards of "a" were 1, 0 and −2, with a mean of −1/3. Rewards of "b" were 2 and −2.
    let third = 1.0f32 / 3.0;
    assert_eq!(
        with(EmptyAttempts::Keep),
        [vec![1.0 + third, 1.0 + third, 2.0, 2.0], vec![third; 4]]
    );
    assert_eq!(with(EmptyAttempts::Drop), [vec![0.5, 0.5, 0.0, 0.0], vec![-0.5; 4]]);
    let untrained_plan =
        [vec![attempt(0, 0, &[1], &[], Some(1.0)), attempt(0, 1, &[1], &[], Some(0.0))]];
    let plan =
        plan_of(&untrained_plan, &RlKeys { group_by: GroupBy::Agent, ..keys() }, 1000).unwrap();
    assert_eq!(plan.updates, [Update::default()]);
}

/// Statistics over tokens use only the trained tokens, whatever other attempts serve for
/// comparison.
#[test]
fn whitening_uses_only_trained_tokens() {
    let gamma = 1.0;
    let plain = Estimator::ReinforcePlusPlus { gamma, counting: Counting::Exact, one_turn: false };
    let keys =
        || RlKeys { advantage: Some(plain.clone()), overlong: OverlongAttempts::Mask, ..keys() };
    let advantages = |groups: &[Vec<Attempt>], keys: &RlKeys| -> Vec<f32> {
        let plan = plan_of(groups, keys, 1000).unwrap();
        plan.updates[0].sequences.iter().map(|sequence| same(&sequence.advantage)).collect()
    };
    let mut group =
        vec![attempt(0, 0, &[1], &[3], Some(1.0)), attempt(0, 1, &[1], &[4], Some(0.0))];
    let root = 0.5f32.sqrt();
    let separate = advantages(&[group.clone()], &keys());
    assert!((separate[0] - root).abs() < 1e-6 && (separate[1] + root).abs() < 1e-6, "{separate:?}");
    group.push(truncated_attempt(attempt(0, 2, &[1], &[5, 5, 5, 5], Some(-9.0))));
    assert_eq!(advantages(&[group.clone()], &keys()), separate);
    let from = TrainFilterKeys { reward_from: Some(-1.0), ..TrainFilterKeys::default() };
    assert_eq!(
        advantages(&[group], &RlKeys { only: from, overlong: OverlongAttempts::Keep, ..keys() }),
        separate
    );

    // One of two agents is trained. In `marked` the other agent's tokens have a different return.
    let agents = TrainFilterKeys { agents: vec!["a".into()], ..TrainFilterKeys::default() };
    let both = [vec![together(0, 2, 1.0, vec![]), together(1, 2, 0.0, vec![])]];
    let early = StepReward { credit_target: CreditTarget::Agent("a".into()), reward: 5.0 };
    let marked = [vec![together(0, 2, 6.0, vec![early]), together(1, 2, 0.0, vec![])]];
    for (groups, want) in [(both, 0.75f32.sqrt()), (marked, 0.75f32.sqrt())] {
        let plan = plan_of(&groups, &RlKeys { only: agents.clone(), ..keys() }, 1000).unwrap();
        // Two tokens each: one value in the first attempt, 0 in the second, a deviation of √(1/3)
        // of their distance.
        let first: Vec<f32> = plan.updates[0].sequences[0].advantage.iter().take(2).collect();
        assert!(first.iter().all(|a| (a - want).abs() < 1e-4), "{first:?} {want}");
    }
}
