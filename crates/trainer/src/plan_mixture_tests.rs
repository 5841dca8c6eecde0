//! Tests plans over attempts of several policies or agents.

use std::collections::BTreeMap;

use super::*;

/// Returns the attempt as if `policy` had been selected for the agent `default` and had sampled the
/// completion.
fn cast(attempt: Attempt, policy: &str) -> Attempt {
    let mut trajectory = Trajectory::new();
    for segment in attempt.trajectory.segments() {
        trajectory.push(Segment { policy: policy.into(), ..segment.clone() }).unwrap();
    }
    let cast = BTreeMap::from([("default".to_owned(), policy.to_owned())]);
    let outcome = Outcome { cast, ..attempt.outcome.clone() };
    Attempt { trajectory, outcome, ..attempt }
}

fn segment_of_agent(attempt: Attempt, agent: &str) -> Attempt {
    Attempt { task: json!({"agent": agent}), ..attempt }
}

/// Returns two attempts of the policy itself, with rewards of 1 and 0, and two of an opponent.
fn mixed() -> Vec<Attempt> {
    let of = |sample, reward, policy| {
        cast(attempt(0, sample, &[1], &[3 + sample], Some(reward)), policy)
    };
    vec![
        of(0, 1.0, "default"),
        of(1, 1.0, "opponent"),
        of(2, 0.0, "default"),
        of(3, 1.0, "opponent"),
    ]
}

/// Returns the plan of a run that an earlier build started.
fn plan_of_older_run(group: Vec<Attempt>, keys: &RlKeys) -> PolicyPlan {
    let targets = Targets { requires_acting: false, ..Targets::DEFAULT };
    plan_for(targets, &[group], keys, 1000, &|_, _| SequenceSignals::default()).unwrap()
}

#[test]
fn attempts_of_another_policy_are_not_samples() {
    let w = 1.0 / 2.0;
    let want = [(0, 0, 0.5, w), (0, 2, -0.5, w)];
    for group_by in [GroupBy::Task, GroupBy::Step, GroupBy::Agent] {
        let plan = plan_of(&[mixed()], &RlKeys { group_by, ..keys() }, 1000).unwrap();
        assert_eq!(rows(&plan.updates[0]), [want.to_vec()], "{group_by:?}");
    }
    // A group is uninformative if the policy's own attempts have equal rewards, whatever the
    // opponent's rewards.
    let mut group = mixed();
    group[2].reward = Some(1.0);
    group[1].reward = Some(0.0);
    let drop = RlKeys { zero_variance_groups: Some(ZeroVarianceGroups::Drop), ..keys() };
    assert_eq!(plan_of(&[group], &drop, 1000).unwrap().updates, [Update::default()]);
    // Stores of older builds do not contain the selected policy, so the mean is over all attempts:
    // 3/4.
    let older: Vec<Attempt> = mixed()
        .into_iter()
        .map(|mut attempt| {
            attempt.outcome.cast.clear();
            attempt
        })
        .collect();
    let plan = plan_of_older_run(older, &keys());
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.25, w), (0, 2, -0.75, w)].to_vec()]);
}

/// Returns an attempt in which the agent `writer` acts, which another policy plays, and after it
/// the agent `default`, if `is_called`.
fn written(sample: u32, reward: f64, is_called: bool) -> Attempt {
    let mut attempt = resampled(&attempt(0, sample, &[1], &[2], Some(reward)), |segment| {
        (segment.agent, segment.policy) = ("writer".into(), "other".into());
    });
    if is_called {
        let completion = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0],
            versions: vec![VersionRun { version: 0, len: 1 }],
            ..Segment::context(Some(SegmentId(1)), vec![3 + sample], 1)
        };
        attempt.trajectory.push(completion).unwrap();
    }
    attempt
}

/// If the agent of another policy does not call a policy's agent, the attempt is no sample of the
/// policy: its tokens are compared only among attempts in which it acted.
#[test]
fn attempts_without_call_of_agent_are_not_samples() {
    let group = vec![
        written(0, 1.0, false),
        written(1, 1.0, true),
        written(2, 1.0, false),
        written(3, 0.0, true),
    ];
    let w = 1.0 / 2.0;
    for group_by in [GroupBy::Task, GroupBy::Step, GroupBy::Agent] {
        let keys = RlKeys { group_by, ..keys() };
        let plan = plan_of(std::slice::from_ref(&group), &keys, 1000).unwrap();
        let want = vec![(0, 1, 0.5, w), (0, 3, -0.5, w)];
        assert_eq!(rows(&plan.updates[0]), [want], "{group_by:?}");
        // In runs of earlier builds, the mean is over all attempts: 3/4.
        let older = plan_of_older_run(group.clone(), &keys);
        let want = vec![(0, 1, 0.25, w), (0, 3, -0.75, w)];
        assert_eq!(rows(&older.updates[0]), [want], "{group_by:?}");
    }
    // The other policy acts in all of them.
    let other = Targets { policy: "other", ..Targets::DEFAULT };
    let plan =
        plan_for(other, &[group], &keys(), 1000, &|_, _| SequenceSignals::default()).unwrap();
    let w = 1.0 / 4.0;
    let want = vec![(0, 0, 0.25, w), (0, 1, 0.25, w), (0, 2, 0.25, w), (0, 3, -0.75, w)];
    assert_eq!(rows(&plan.updates[0]), [want]);
}

/// An attempt that ended before any policy acted is a sample of every policy.
#[test]
fn attempts_without_completion_are_samples() {
    let mut empty = written(1, 0.0, false);
    let context = empty.trajectory.segments()[0].clone();
    empty.trajectory = Trajectory::new();
    empty.trajectory.push(context).unwrap();
    assert!(is_sample(&empty, Targets::DEFAULT));
    let group = vec![written(0, 1.0, true), empty];
    let plan = plan_of(&[group], &keys(), 1000).unwrap();
    assert_eq!(rows(&plan.updates[0]), [vec![(0, 0, 0.5, 1.0)]]);
}

/// Context tokens can carry the name of a policy, but reading them is not acting.
#[test]
fn context_of_policy_does_not_make_sample() {
    let read = |segment: &mut Segment| {
        if segment.kind == Kind::Context {
            segment.policy = "default".into();
        }
    };
    let group: Vec<Attempt> = mixed().iter().map(|attempt| resampled(attempt, read)).collect();
    assert_eq!(group.iter().filter(|attempt| is_sample(attempt, Targets::DEFAULT)).count(), 2);
    assert_eq!(
        plan_of(&[group], &keys(), 1000).unwrap(),
        plan_of(&[mixed()], &keys(), 1000).unwrap()
    );
}

/// A policy that plays one of two agents acts in the attempt, whichever policy plays the other
/// agent.
#[test]
fn attempts_shared_with_another_policy_are_samples() {
    let mut group = vec![together(0, 2, 1.0, vec![]), together(1, 2, 0.0, vec![])];
    group[0].outcome.cast = BTreeMap::from([("c".to_owned(), "opponent".to_owned())]);
    let plan = plan_of(&[group], &keys(), 1000).unwrap();
    assert_eq!(plan.updates[0].sequences.len(), 2);
}

/// A greedy attempt of another policy is not a baseline for this policy.
#[test]
fn baseline_is_greedy_attempt_of_same_policy() {
    let keys = RlKeys { advantage: Some(Estimator::ReMax), ..keys() };
    // The second group's greedy attempt failed.
    let plan = plan_of(&groups(), &keys, 1000).unwrap();
    let w = 1.0 / 6.0;
    let all = [(0, 0, 0.75, w), (0, 1, -0.25, w), (2, 0, -1.0, w), (2, 1, 2.0, w)];
    assert_eq!(rows(&plan.updates[0]), [all.to_vec()]);
    let rival = |baseline: &Attempt, keys: &RlKeys| {
        let limits = &TokenLimits { default: 4, by_agent: BTreeMap::new() };
        let constant_length = 4;
        let targets = Targets::DEFAULT;
        let version = 0;
        let seed = 0;
        let kl_coefficient = 0.0;
        let (baselines, signals): (&[Option<Attempt>], SignalsOf<'_>) =
            (&[], &|_, _| SequenceSignals::default());
        let setting = PlanInput {
            targets,
            version,
            keys,
            seed,
            limits,
            constant_length,
            kl_coefficient,
            baselines,
            signals,
        };
        baseline_reward(&setting, baseline)
    };
    let buffer = OverlongAttempts::Penalize { buffer: 2, factor: 1.0 };
    let long = attempt(0, 0, &[1], &[3, 4, 5], Some(1.0));
    assert_eq!(rival(&long, &RlKeys { overlong: buffer, ..keys.clone() }), Some(0.5));
    assert_eq!(rival(&cast(long.clone(), "opponent"), &keys), None);
    assert_eq!(rival(&cast(long.clone(), "default"), &keys), Some(1.0));
    // An attempt in which the agent of another policy did not call the agent is a baseline.
    assert_eq!(rival(&written(0, 0.5, false), &keys), Some(0.5));
    // Truncated samples are dropped, but not their baseline.
    assert_eq!(
        rival(&truncated_attempt(long), &RlKeys { overlong: OverlongAttempts::Drop, ..keys }),
        Some(1.0)
    );
}

/// Groups in which only another policy acted are not part of a policy's step. They affect neither
/// its optimizer steps, nor the baselines of its attempts, nor its mean divergence.
#[test]
fn groups_of_another_policy_are_ignored() {
    let other = |group| -> Vec<Attempt> {
        (0..2)
            .map(|i| cast(attempt(group, i, &[1], &[3], Some(9.0 * f64::from(i))), "opponent"))
            .collect()
    };
    let own = |group| {
        vec![attempt(group, 0, &[1], &[3], Some(1.0)), attempt(group, 1, &[1], &[4], Some(0.0))]
    };
    // This holds even if the store does not contain the selected policy.
    let older = |group| -> Vec<Attempt> {
        other(group)
            .into_iter()
            .map(|mut attempt| {
                attempt.outcome.cast.clear();
                attempt
            })
            .collect()
    };
    let all = [other(0), older(1), own(2), own(3)];
    let twice = RlKeys { mini_batches: 2, ..keys() };
    let plan = plan_of(&all, &twice, 1000).unwrap();
    let w = 1.0 / 2.0;
    for (update, group) in plan.updates.iter().zip([2, 3]) {
        assert_eq!(rows(update), [[(group, 0, 0.5, w), (group, 1, -0.5, w)].to_vec()]);
    }
    let step = plan_of(&all, &RlKeys { group_by: GroupBy::Step, ..keys() }, 1000).unwrap();
    let separate = plan_of(&all[2..], &RlKeys { group_by: GroupBy::Step, ..keys() }, 1000).unwrap();
    assert_eq!(step.updates, separate.updates);
    let estimator = levade_rl::KlEstimator::K1;
    let apply_to = KlTarget::Reward;
    let adaptive = None;
    let coefficient = 0.1;
    let importance_weighted = false;
    let reference_every = 0;
    let kl = Some(KlKeys {
        estimator,
        coefficient,
        importance_weighted,
        reference_every,
        apply_to,
        adaptive,
    });
    let signals = |_, _| SequenceSignals {
        logprobs: vec![-1.0],
        reference: vec![-3.0],
        ..SequenceSignals::default()
    };
    let plan = plan_with(&all, &RlKeys { kl, ..keys() }, 1000, &signals).unwrap();
    let charged = plan.kl.unwrap();
    assert_eq!((charged.found, charged.rollouts), (2.0, 4));
}

/// A critic also learns from attempts that have no advantage for the policy.
#[test]
fn critic_learns_from_tokens_without_advantage() {
    let advantage = Some(Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None });
    let group =
        vec![attempt(0, 0, &[1], &[3, 4], Some(0.0)), attempt(0, 1, &[1], &[5, 6], Some(0.0))];
    let signals = |_, _| SequenceSignals { values: vec![0.0; 2], ..SequenceSignals::default() };
    let plan =
        plan_with(std::slice::from_ref(&group), &RlKeys { advantage, ..keys() }, 1000, &signals)
            .unwrap();
    let advantages: Vec<f32> =
        plan.updates[0].sequences.iter().map(|sequence| same(&sequence.advantage)).collect();
    assert_eq!(advantages, [0.0, 0.0]);
    assert!(plan_of(&[group], &keys(), 1000).unwrap().updates[0].sequences.is_empty());
}

/// Attempts that only serve for comparison do not count in the fraction of high-entropy tokens.
#[test]
fn entropy_fraction_excludes_masked_attempts() {
    let group = vec![
        attempt(0, 0, &[1], &[3, 4], Some(1.0)),
        attempt(0, 1, &[1], &[5, 6], Some(0.0)),
        truncated_attempt(attempt(0, 2, &[1], &[7, 8, 9, 9], Some(0.5))),
    ];
    let entropies = |id: AttemptId, _| {
        let entropies = match slot(id).1 {
            0 => vec![0.4, 0.1],
            1 => vec![0.3, 0.2],
            _ => vec![0.9; 4],
        };
        SequenceSignals { entropies, ..SequenceSignals::default() }
    };
    let keys = RlKeys { overlong: OverlongAttempts::Mask, high_entropy_fraction: 0.5, ..keys() };
    let plan = plan_with(&[group], &keys, 1000, &entropies).unwrap();
    let want = HighEntropy { tokens: 4, kept: 2, thresholds: vec![f64::from(0.3f32)] };
    assert_eq!(plan.high_entropy, Some(want));
    let [first, second] = &plan.updates[0].sequences[..] else { panic!("{plan:?}") };
    assert_eq!(first.advantage, PerToken::new([0.5, 0.0]));
    assert_eq!(second.advantage, PerToken::new([-0.5, 0.0]));
}

/// The constant is the largest limit among the agents of the tasks: 8, the writer's.
#[test]
fn constant_normalizer_is_largest_agent_limit() {
    for algorithm in ["dr_grpo", "rloo", "minirl"] {
        let algorithm = serde_json::from_value(json!(algorithm)).unwrap();
        let keys = RlKeys { algorithm, normalizer: None, ..keys() };
        let weights = |groups: &[Vec<Attempt>]| -> Vec<f32> {
            let plan = plan_of(groups, &keys, 1000).unwrap();
            rows(&plan.updates[0])[0].iter().map(|row| row.3).collect()
        };
        assert_eq!(weights(&groups()[..1]), [1.0 / 16.0; 2], "{algorithm:?}");
        let written = |group: &[Attempt]| {
            group.iter().map(|a| segment_of_agent(a.clone(), "writer")).collect()
        };
        assert_eq!(weights(&[written(&groups()[0])]), [1.0 / 16.0; 2], "{algorithm:?}");
        let both = [groups()[0].clone(), written(&groups()[2])];
        assert_eq!(weights(&both), [1.0 / 32.0; 4], "{algorithm:?}");
    }
}

/// The length penalty starts below the limit of the acting agent.
#[test]
fn length_penalty_uses_limit_of_acting_agent() {
    let overlong = OverlongAttempts::Penalize { buffer: 2, factor: 1.0 };
    let long = |sample, completion: &[u32]| attempt(0, sample, &[1], completion, Some(1.0));
    let group = vec![long(0, &[3, 4, 5]), long(1, &[3])];
    let keys = RlKeys { overlong, ..keys() };
    let advantages = |group: Vec<Attempt>| -> Vec<f32> {
        let plan = plan_of(&[group], &keys, 1000).unwrap();
        plan.updates[0].sequences.iter().map(|sequence| same(&sequence.advantage)).collect()
    };
    // One token beyond 4 − 2 costs half of the factor. The writer's limit is 8 tokens.
    assert_eq!(advantages(group.clone()), [-0.25, 0.25]);
    assert!(
        advantages(group.into_iter().map(|a| segment_of_agent(a, "writer")).collect()).is_empty()
    );
    let group = vec![
        segment_of_agent(long(0, &[3; 7]), "writer"),
        segment_of_agent(long(1, &[3]), "writer"),
    ];
    assert_eq!(advantages(group), [-0.25, 0.25]);
}

/// Returns an attempt at a game in which the policy `default` plays the seats `wolf@1` and
/// `wolf@2`, and `good` plays `good@3`. A seat has one completion.
fn match_of(sample: u32, wolf_rewards: [f64; 2], good: (&str, f64)) -> Attempt {
    let mut attempt = attempt(0, sample, &[1], &[2], None);
    let mut trajectory = Trajectory::new();
    let seats = [("wolf@1", "default"), ("wolf@2", "default"), ("good@3", good.0)];
    for (turn, (agent, policy)) in (0..).zip(seats) {
        let root = Segment { agent: agent.into(), ..Segment::context(None, vec![turn], turn) };
        let root = trajectory.push(root).unwrap();
        let tokens = turn + 1 + sample % 2;
        let completion = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0; tokens as usize],
            versions: vec![VersionRun { version: 0, len: tokens }],
            agent: agent.into(),
            policy: policy.into(),
            ..Segment::context(Some(root), vec![5 + sample; tokens as usize], turn)
        };
        trajectory.push(completion).unwrap();
    }
    let rewards = [wolf_rewards[0], wolf_rewards[1], good.1];
    attempt.step_rewards = seats
        .iter()
        .zip(rewards)
        .map(|((agent, _), reward)| StepReward {
            credit_target: CreditTarget::Agent((*agent).to_owned()),
            reward,
        })
        .collect();
    attempt.outcome.cast =
        seats.iter().map(|(agent, policy)| ((*agent).into(), (*policy).into())).collect();
    attempt.reward = Some(rewards.iter().sum());
    Attempt { trajectory, ..attempt }
}

/// The plan of a policy is the same whether the policy of the other side is trained or not, and
/// whatever the other side earns. A zero-sum game therefore does not cancel the rewards of a side.
#[test]
fn plan_of_policy_ignores_opponent_seats() {
    let keys = RlKeys { group_by: GroupBy::Agent, ..keys() };
    let wolves = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.5], [0.0, -0.1]];
    let group = |policy: &str, factor: f64| -> Vec<Attempt> {
        (0..)
            .zip(wolves)
            .map(|(sample, wolves)| {
                match_of(sample, wolves, (policy, factor * (wolves[0] + wolves[1])))
            })
            .collect()
    };
    let plan = plan_of(&[group("other", -1.0)], &keys, 1000).unwrap();
    assert_eq!(plan.updates[0].sequences.len(), 8);
    for other in [group("other", 0.0), group("frozen", -1.0), group("frozen", 7.0)] {
        assert_eq!(plan_of(&[other], &keys, 1000).unwrap(), plan);
    }
    // Each seat is compared with itself: the mean of the first is 1/2, of the second 0.35.
    let advantages: Vec<f32> = plan.updates[0]
        .sequences
        .iter()
        .map(|planned| planned.advantage.iter().next().unwrap())
        .collect();
    let want = [0.5, 0.65, -0.5, -0.35, 0.5, 0.15, -0.5, -0.45];
    assert!(advantages.iter().zip(want).all(|(a, w)| (a - w).abs() < 1e-6), "{advantages:?}");
}

/// The score of one agent (`reward.of`) changes neither the rewards nor the advantages of seats.
#[test]
fn score_of_agent_leaves_rewards_of_seats_unchanged() {
    let keys = RlKeys { group_by: GroupBy::Agent, ..keys() };
    let group = |of_wolves: bool| -> Vec<Attempt> {
        let of = |(sample, wolf): (u32, f64)| {
            let mut attempt = match_of(sample, [wolf, wolf], ("frozen", -2.0 * wolf));
            attempt.outcome.components = attempt
                .step_rewards
                .iter()
                .map(|step| Component {
                    credit_target: Some(step.credit_target.clone()),
                    ..Component::score(step.reward)
                })
                .collect();
            attempt.score = Some(if of_wolves { wolf } else { 0.0 });
            attempt.reward = attempt.score;
            attempt
        };
        (0..).zip([1.0, 0.0, 0.25]).map(of).collect()
    };
    let plan = plan_of(&[group(true)], &keys, 1000).unwrap();
    assert_eq!(plan.updates[0].sequences.len(), 6);
    assert_eq!(plan_of(&[group(false)], &keys, 1000).unwrap(), plan);
}

/// With the unit `sample`, both seats of an attempt have the weight of a rollout.
#[test]
fn unit_sample_weights_seats_equally() {
    let group: Vec<Attempt> = [[1.0, 1.0], [0.0, 0.0]]
        .into_iter()
        .zip(0..)
        .map(|(wolves, sample)| match_of(sample, wolves, ("frozen", 0.0)))
        .collect();
    let weights = |unit| {
        let keys = RlKeys {
            group_by: GroupBy::Agent,
            normalizer: Some(levade_rl::Normalizer::RolloutMean),
            unit,
            ..keys()
        };
        let plan = plan_of(std::slice::from_ref(&group), &keys, 1000).unwrap();
        let sequences = plan.updates[0].sequences.clone();
        // The list of weights can extend to the end of any sequence.
        sequences
            .iter()
            .zip([1, 2, 2, 3])
            .map(|(planned, tokens)| f64::from(planned.weight.iter().take(tokens).sum::<f32>()))
            .collect::<Vec<f64>>()
    };
    let close = |found: Vec<f64>, want: [f64; 4]| {
        assert!(found.iter().zip(want).all(|(a, w)| (a - w).abs() < 1e-6), "{found:?}");
    };
    // Tokens per seat: 1 and 2 in the first attempt, 2 and 3 in the second.
    close(weights(Unit::Attempt), [1.0 / 6.0, 2.0 / 6.0, 2.0 / 10.0, 3.0 / 10.0]);
    close(weights(Unit::Sample), [0.25; 4]);
}
