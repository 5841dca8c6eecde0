//! Tests of plans.

use levade_policy::{Simulator, SimulatorConfig};
use levade_recipe::{EmptyAttempts, KlKeys};
use levade_rl::{Estimator, GroupBaseline};
use levade_store::{CreditTarget, Status, StepReward, testing::wait};
use levade_tree::{Finish, Kind, Outcome, Purpose, Segment, SegmentId, TreeBatch, VersionRun};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::signals::all_sequences;

/// Returns an id that encodes group and sample.
fn id(group: u32, sample: u32) -> AttemptId {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&group.to_le_bytes());
    bytes[4..8].copy_from_slice(&sample.to_le_bytes());
    AttemptId::from_bytes(bytes)
}

/// Returns the group and the sample that an id encodes.
fn slot(id: AttemptId) -> (u32, u32) {
    let number = |from: usize| {
        id.bytes()[from..from + 4].iter().rev().fold(0, |n, &b| n << 8 | u32::from(b))
    };
    (number(0), number(4))
}

fn attempt(
    group: u32,
    sample: u32,
    prompt: &[u32],
    completion: &[u32],
    reward: Option<f64>,
) -> Attempt {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::context(None, prompt.to_vec(), 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-1.0; completion.len()],
        versions: vec![VersionRun { version: 0, len: completion.len() as u32 }],
        ..Segment::context(Some(root), completion.to_vec(), 0)
    };
    trajectory.push(completion).unwrap();
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 1, step: 2, group, sample };
    let (id, task, outcome) = (id(group, sample), Value::Null, Outcome::demonstrated(""));
    let (score, earned) = (reward, Vec::new());
    let status = Status::Completed;
    Attempt {
        id,
        slot,
        number: 0,
        task,
        outcome,
        score,
        reward,
        step_rewards: earned,
        status,
        trajectory,
    }
}

/// GRPO without scaling by the standard deviation.
fn keys() -> RlKeys {
    let text =
        "steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0\nnormaliser = 'token_mean'";
    let advantage = Some(Estimator::Group(GroupBaseline::default()));
    RlKeys { advantage, ..toml::from_str(text).unwrap() }
}

/// Returns two groups with different rewards (one attempt has none), and one zero-variance group.
fn groups() -> Vec<Vec<Attempt>> {
    vec![
        vec![
            attempt(0, 0, &[1, 2], &[3, 4], Some(1.0)),
            attempt(0, 1, &[1, 2], &[5], Some(0.0)),
            attempt(0, 2, &[1, 2], &[5, 5, 5], None),
        ],
        vec![attempt(1, 0, &[1, 7], &[3], Some(0.5)), attempt(1, 1, &[1, 7], &[4, 4], Some(0.5))],
        vec![attempt(2, 0, &[1, 8], &[3, 3], Some(0.0)), attempt(2, 1, &[1, 8], &[6], Some(3.0))],
    ]
}

fn plan_of(
    groups: &[Vec<Attempt>],
    keys: &RlKeys,
    budget: usize,
) -> Result<PolicyPlan, TrainerError> {
    plan_with(groups, keys, budget, &|_, _| Signals::default())
}

fn plan_with(
    groups: &[Vec<Attempt>],
    keys: &RlKeys,
    budget: usize,
    signals: SignalsOf<'_>,
) -> Result<PolicyPlan, TrainerError> {
    let greedy = |group, reward| attempt(group, 99, &[1], &[2], Some(reward));
    let (baselines, kl_coefficient) = (&[Some(greedy(0, 0.25)), None, Some(greedy(2, 1.0))], 0.5);
    let (targets, version, seed) = (Targets::DEFAULT, 9, 7);
    let limits = &TokenLimits { default: 4, by_agent: [("writer".to_owned(), 8)].into() };
    let constant_length = 8;
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
    split_plan(draft_rl(&setting, &groups.iter().map(Vec::as_slice).collect::<Vec<_>>())?, budget)
}

/// Returns the plan, divided into micro-batches by the learners' default.
fn split_plan(draft: Draft, budget: usize) -> Result<PolicyPlan, TrainerError> {
    let policy = &Simulator::new(SimulatorConfig { rows: 1, ..SimulatorConfig::default() });
    wait(draft.into_plan(Models { policy, reference: None, critic: None }, budget))
}

fn same(numbers: &PerToken) -> f32 {
    let found: Vec<f32> = numbers.run_values().collect();
    let [number] = found[..] else { panic!("{numbers:?} are not all the same") };
    number
}

fn rows(update: &Update) -> Vec<Vec<(u32, u32, f32, f32)>> {
    let row = |p: &PlannedSequence| {
        let (group, sample) = slot(p.attempt);
        (group, sample, same(&p.advantage), same(&p.weight))
    };
    update.micro_batches().into_iter().map(|batch| batch.into_iter().map(row).collect()).collect()
}

#[test]
fn plan_matches_values_computed_by_hand() {
    let plan = plan_of(&groups(), &keys(), 1000).unwrap();
    assert_eq!((plan.policy.as_str(), plan.version, plan.updates.len()), ("default", 9, 1));
    assert_eq!((&plan.kl, &plan.high_entropy), (&None, &None));
    // 2 + 1 + 1 + 2 + 2 + 1 tokens: the zero-variance group counts, the attempt without a reward
    // does not.
    let w = 1.0 / 9.0;
    let all = [(0, 0, 0.5, w), (0, 1, -0.5, w), (2, 0, -1.5, w), (2, 1, 1.5, w)];
    assert_eq!(rows(&plan.updates[0]), [all.to_vec()]);

    let drop = Some(ZeroVarianceGroups::Drop);
    let dropped =
        plan_of(&groups(), &RlKeys { zero_variance_groups: drop, ..keys() }, 1000).unwrap();
    assert_eq!(rows(&dropped.updates[0])[0][0], (0, 0, 0.5, 1.0 / 6.0));

    let (estimator, apply_to, adaptive) = (levade_rl::KlEstimator::K3, KlTarget::Loss, None);
    let (coefficient, importance_weighted, reference_every) = (0.1, false, 0);
    let kl =
        KlKeys { estimator, coefficient, importance_weighted, reference_every, apply_to, adaptive };
    let kept = plan_of(&groups(), &RlKeys { kl: Some(kl), ..keys() }, 1000).unwrap();
    assert_eq!(rows(&kept.updates[0])[0].len(), 6);

    let normalizer = Some(Normalizer::RolloutSum);
    let twice = RlKeys { mini_batches: 2, epochs: 2, normalizer, ..keys() };
    let plan = plan_of(&groups(), &twice, 1000).unwrap();
    assert_eq!(plan.updates.len(), 4);
    assert_eq!(plan.updates[0], plan.updates[2]);
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.5, 0.5), (0, 1, -0.5, 0.5)]]);
    assert_eq!(rows(&plan.updates[1]), [[(2, 0, -1.5, 0.25), (2, 1, 1.5, 0.25)]]);
}

#[test]
fn uniform_group_yields_update_without_batches() {
    let uniform = vec![groups()[1].clone()];
    for uniform_groups in [ZeroVarianceGroups::Keep, ZeroVarianceGroups::Drop] {
        let keys = RlKeys { zero_variance_groups: Some(uniform_groups), ..keys() };
        let plan = plan_of(&uniform, &keys, 10).unwrap();
        assert_eq!(plan.updates, [Update::default()]);
    }
}

#[test]
fn sft_plan_includes_all_demonstrations() {
    let attempts = [attempt(0, 0, &[1], &[2, 3], None), attempt(1, 0, &[1], &[4], None)];
    let demonstrations: Vec<&Attempt> = attempts.iter().collect();
    let plan =
        split_plan(draft_sft(Targets::DEFAULT, 4, &demonstrations, Normalizer::RolloutMean), 100)
            .unwrap();
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.0, 0.25), (1, 0, 0.0, 0.5)]]);
}

proptest! {
    /// For every budget, the sequences keep their order and weights. Every micro-batch is within
    /// the budget unless it is a single sequence, and groups stay together if they fit.
    #[test]
    fn micro_batches_preserve_order_weights_and_budget(
        shapes in prop::collection::vec(prop::collection::vec((1usize..9, 0.0f64..1.0), 1..5), 1..6),
        budget in 1usize..60,
    ) {
        let groups: Vec<Vec<Attempt>> = shapes
            .iter()
            .enumerate()
            .map(|(g, group)| {
                let prompt = [9, 9, 9, g as u32];
                let attempts = group.iter().enumerate().map(|(s, (len, reward))| {
                    let reply: Vec<u32> = (0..*len as u32).map(|i| 10 + s as u32 + i).collect();
                    attempt(g as u32, s as u32, &prompt, &reply, Some(*reward))
                });
                attempts.collect()
            })
            .collect();
        let whole = plan_of(&groups, &keys(), usize::MAX).unwrap();
        let cut = plan_of(&groups, &keys(), budget).unwrap();
        let flat = |plan: &PolicyPlan| rows(&plan.updates[0]).concat();
        prop_assert_eq!(flat(&cut), flat(&whole));
        prop_assert!(rows(&whole.updates[0]).len() <= 1);
        let input = |p: &PlannedSequence| {
            let (group, sample) = slot(p.attempt);
            let a = &groups[group as usize][sample as usize];
            AttemptSequences::from_trajectory(&a.trajectory).input(p, Targets::DEFAULT, 0)
        };
        let size = |paths: &[&PlannedSequence]| {
            TreeBatch::merge(&paths.iter().map(|p| input(p)).collect::<Vec<_>>()).unwrap().tokens.len()
        };
        let batches = cut.updates[0].micro_batches();
        for batch in &batches {
            prop_assert!(!batch.is_empty());
            prop_assert!(batch.len() == 1 || size(batch) <= budget);
        }
        for g in 0..groups.len() as u32 {
            let of_group = |batch: &Vec<&PlannedSequence>| batch.iter().filter(|p| slot(p.attempt).0 == g).count();
            let spread = batches.iter().filter(|b| of_group(b) > 0).count();
            let paths: Vec<&PlannedSequence> = cut.updates[0].sequences.iter().filter(|p| slot(p.attempt).0 == g).collect();
            prop_assert!(spread <= 1 || size(&paths) > budget);
        }
    }
}

#[test]
fn planned_sequences_name_attempt_and_leaf() {
    let plan = plan_of(&groups(), &keys(), 1000).unwrap();
    let sequence = &plan.updates[0].sequences[0];
    assert_eq!((sequence.leaf, sequence.attempt), (SegmentId(1), groups()[0][0].id));
}

/// Marks an attempt as truncated.
fn truncated_attempt(attempt: Attempt) -> Attempt {
    let outcome =
        Outcome { finish: Finish::MaxTokens, turns: 1, sampled_tokens: 2, ..Outcome::initial() };
    Attempt { outcome, ..attempt }
}

#[test]
fn truncated_attempts_follow_overlong_rule() {
    let mut groups = groups();
    groups[0][0] = truncated_attempt(groups[0][0].clone());
    let with = |overlong| plan_of(&groups[..1], &RlKeys { overlong, ..keys() }, 1000).unwrap();
    let all = |plan: &PolicyPlan| rows(&plan.updates[0]).concat();
    assert_eq!(
        all(&with(OverlongAttempts::Keep)),
        [(0, 0, 0.5, 1.0 / 3.0), (0, 1, -0.5, 1.0 / 3.0)]
    );
    // The truncated attempt still serves for comparison, and the remaining attempt is the only
    // trained one.
    assert_eq!(all(&with(OverlongAttempts::Mask)), [(0, 1, -0.5, 1.0)]);
    assert_eq!(all(&with(OverlongAttempts::Drop)), []);
    // The remaining attempts, with 1 and 3 tokens, are still compared with each other.
    let mut three = groups[0].clone();
    three[2].reward = Some(1.0);
    let dropped =
        plan_of(&[three], &RlKeys { overlong: OverlongAttempts::Drop, ..keys() }, 1000).unwrap();
    assert_eq!(all(&dropped), [(0, 1, -0.5, 0.25), (0, 2, 0.5, 0.25)]);
    // Two tokens of at most four, with a buffer of three: a third of the factor.
    let penalised = all(&with(OverlongAttempts::Penalize { buffer: 3, factor: 0.6 }));
    assert!((penalised[0].2 - 0.4).abs() < 1e-6, "{penalised:?}");
}

/// Returns an attempt of several turns of two tokens each.
fn turn_tokens(sample: u32, turns: u32, reward: f64) -> Attempt {
    let mut attempt = attempt(0, sample, &[1, 2], &[3, 4 + sample], Some(reward));
    for turn in 1..turns {
        let last = SegmentId(attempt.trajectory.segments().len() as u32 - 1);
        let observation =
            attempt.trajectory.push(Segment::context(Some(last), vec![9], turn)).unwrap();
        let completion = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0; 2],
            versions: vec![VersionRun { version: 0, len: 2 }],
            ..Segment::context(Some(observation), vec![5, 6], turn)
        };
        attempt.trajectory.push(completion).unwrap();
    }
    attempt
}

#[test]
fn sampled_turns_carry_weight_of_skipped_turns() {
    let groups = [vec![turn_tokens(0, 5, 1.0), turn_tokens(1, 2, 0.0)]];
    let plan = plan_of(&groups, &RlKeys { max_trained_turns: 2, ..keys() }, 1000).unwrap();
    let [long, short] = &plan.updates[0].sequences[..] else { panic!() };
    let weights: Vec<f32> = long.weight.iter().collect();
    assert_eq!(weights.len(), 10);
    assert!(weights.chunks(2).all(|turn| turn[0] == turn[1]));
    assert_eq!(weights.iter().filter(|w| **w > 0.0).count(), 4);
    // 14 tokens in total. Two turns carry the weight of five.
    assert!((weights.iter().sum::<f32>() - 10.0 / 14.0).abs() < 1e-6);
    assert!((same(&short.weight) - 1.0 / 14.0).abs() < 1e-9);
    assert_eq!(plan, plan_of(&groups, &RlKeys { max_trained_turns: 2, ..keys() }, 1000).unwrap());
    let plan = plan_of(&groups, &RlKeys { max_trained_turns: 1, ..keys() }, 1000).unwrap();
    for (sequence, turns) in plan.updates[0].sequences.iter().zip([5.0, 2.0]) {
        let weights: Vec<f32> = sequence.weight.iter().filter(|weight| *weight != 0.0).collect();
        assert!(
            weights.len() == 2 && weights.iter().all(|w| (w - turns / 14.0).abs() < 1e-6),
            "{weights:?}"
        );
    }
}

/// Groups with equal rewards have no gradient, unless the estimator uses parts of the rewards that
/// differ.
#[test]
fn is_idle_detects_groups_without_gradient() {
    let early = |reward| vec![StepReward { credit_target: CreditTarget::Turn(0), reward }];
    let group = |rewards: [f64; 2], parts: [f64; 2]| -> Vec<Attempt> {
        let of = |i: usize| Attempt {
            step_rewards: early(parts[i]),
            ..turn_tokens(i as u32, 2, rewards[i])
        };
        vec![of(0), of(1)]
    };
    let whole = keys();
    let parts = RlKeys { group_by: GroupBy::Agent, ..keys() };
    let idle = |keys: &RlKeys, group: &[Attempt]| {
        is_uninformative(keys, &with_rewards(group.iter(), keys, &TokenLimits::default()))
    };
    let (same, different) = ([0.5, 0.5], [0.5, 0.25]);
    assert_eq!(
        [same, different].map(|earned| idle(&whole, &group([1.0, 1.0], earned))),
        [true, true]
    );
    assert_eq!(
        [same, different].map(|earned| idle(&parts, &group([1.0, 1.0], earned))),
        [true, false]
    );
    assert_eq!([&whole, &parts].map(|keys| idle(keys, &group([1.0, 0.0], same))), [false, false]);
    assert!(idle(&whole, &[]));
    let critic = RlKeys {
        advantage: Some(Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None }),
        ..keys()
    };
    assert!(!idle(&critic, &group([1.0, 1.0], same)));
}

/// Sequences of attempts with a reward, with all of their targets.
#[test]
fn every_path_covers_attempts_with_reward() {
    let groups = groups();
    let sequences =
        all_sequences(&groups.iter().map(Vec::as_slice).collect::<Vec<_>>(), Targets::DEFAULT);
    let found: Vec<_> = sequences
        .iter()
        .map(|((id, leaf), input)| (slot(*id), leaf.0, input.tokens.to_vec()))
        .collect();
    let want: [((u32, u32), u32, &[u32]); 6] = [
        ((0, 0), 1, &[1, 2, 3, 4]),
        ((0, 1), 1, &[1, 2, 5]),
        ((1, 0), 1, &[1, 7, 3]),
        ((1, 1), 1, &[1, 7, 4, 4]),
        ((2, 0), 1, &[1, 8, 3, 3]),
        ((2, 1), 1, &[1, 8, 6]),
    ];
    assert_eq!(found, want.map(|(place, leaf, tokens)| (place, leaf, tokens.to_vec())));
    assert!(sequences.iter().all(|(_, input)| input.targets.len() == input.tokens.len() - 2));
}

/// Returns an attempt in which "a" and "b" act in turn, two tokens each, starting with "a".
fn together(sample: u32, acts: u32, reward: f64, earned: Vec<StepReward>) -> Attempt {
    let mut attempt = turn_tokens(sample, acts, reward);
    let mut trajectory = Trajectory::new();
    for segment in attempt.trajectory.segments() {
        let agent = ["a", "b"][segment.turn as usize % 2].to_owned();
        trajectory.push(Segment { agent, ..segment.clone() }).unwrap();
    }
    (attempt.trajectory, attempt.step_rewards) = (trajectory, earned);
    attempt
}

#[test]
fn group_by_compares_tasks_agents_or_steps() {
    let earned = |agent: &str, reward| StepReward {
        credit_target: CreditTarget::Agent(agent.into()),
        reward,
    };
    // The reward of "b" is higher by 2 in the first attempt than in the second; the reward of "a"
    // is equal.
    let groups = [vec![together(0, 2, 3.0, vec![earned("b", 2.0)]), together(1, 4, 1.0, vec![])]];
    let by = |group_by| plan_of(&groups, &RlKeys { group_by, ..keys() }, 1000).unwrap();
    let of = |plan: &PolicyPlan| -> Vec<Vec<f32>> {
        plan.updates[0]
            .sequences
            .iter()
            .map(|sequence| sequence.advantage.iter().take(4).collect())
            .collect()
    };
    assert_eq!(of(&by(GroupBy::Task)), [[1.0; 4], [-1.0; 4]]);
    assert_eq!(of(&by(GroupBy::Agent)), [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0]]);
    // The mean over the complete step is the mean of all attempts, which equals the first attempt's
    // reward.
    let two = [groups[0].clone(), vec![attempt(1, 0, &[1, 7], &[3], Some(5.0))]];
    let plan = plan_of(&two, &RlKeys { group_by: GroupBy::Step, ..keys() }, 1000).unwrap();
    let advantages: Vec<f32> =
        plan.updates[0].sequences.iter().map(|p| same(&p.advantage)).collect();
    assert_eq!(advantages, [-2.0, 2.0]);
}

#[test]
fn only_keys_restrict_agents_and_rewards() {
    let groups = [vec![together(0, 2, 1.0, vec![]), together(1, 4, 0.0, vec![])]];
    let agents = TrainFilterKeys { agents: vec!["b".into()], ..TrainFilterKeys::default() };
    let plan = plan_of(&groups, &RlKeys { only: agents, ..keys() }, 1000).unwrap();
    let [short, long] = &plan.updates[0].sequences[..] else { panic!() };
    // "b" has two tokens in the first attempt and four in the second.
    let sixth = 1.0 / 6.0;
    assert_eq!(short.weight.iter().collect::<Vec<_>>(), [0.0, 0.0, sixth, sixth]);
    assert_eq!(
        long.weight.iter().collect::<Vec<_>>(),
        [0.0, 0.0, sixth, sixth, 0.0, 0.0, sixth, sixth]
    );
    assert_eq!((same(&short.advantage), same(&long.advantage)), (0.5, -0.5));

    let winners = TrainFilterKeys { reward_from: Some(0.5), ..TrainFilterKeys::default() };
    let plan = plan_of(&groups, &RlKeys { only: winners, ..keys() }, 1000).unwrap();
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.5, 0.25)]]);
}

/// Returns the attempt with changed segments.
fn resampled(attempt: &Attempt, change: impl Fn(&mut Segment)) -> Attempt {
    let mut trajectory = Trajectory::new();
    for mut segment in attempt.trajectory.segments().iter().cloned() {
        change(&mut segment);
        trajectory.push(segment).unwrap();
    }
    Attempt { trajectory, ..attempt.clone() }
}

/// Masked attempts serve for comparison. Denominators and sequences cover the remaining tokens.
#[test]
fn masked_tokens_are_not_targets() {
    let greedy = |attempt: &Attempt| resampled(attempt, |segment| segment.temperature = 0.0);
    let mut groups = groups();
    groups[0][0] = greedy(&groups[0][0]);
    let mixed = resampled(&turn_tokens(1, 3, 3.0), |segment| segment.filtered = segment.id.0 == 3);
    groups[2][1].trajectory = mixed.trajectory;
    let plan = plan_of(&groups, &keys(), 1000).unwrap();
    // 1 + 1 + 2 + 2 + 4 tokens.
    let w = 1.0 / 10.0;
    assert_eq!(rows(&plan.updates[0]), [[(0, 1, -0.5, w), (2, 0, -1.5, w), (2, 1, 1.5, w)]]);
    let input = AttemptSequences::from_trajectory(&groups[2][1].trajectory).input(
        &plan.updates[0].sequences[2],
        Targets::DEFAULT,
        0,
    );
    assert_eq!(input.targets.iter().map(|target| target.index).collect::<Vec<_>>(), [2, 3, 8, 9]);

    let none: Vec<Attempt> = groups.iter().flatten().map(greedy).collect();
    // The attempt without a reward would not have been trained on anyway.
    let why = census(none.iter(), Targets::DEFAULT, &keys()).masked_reasons().unwrap();
    assert!(why.starts_with("14 were decoded greedily"), "{why}");
    assert_eq!(census(groups.iter().flatten(), Targets::DEFAULT, &keys()).masked_reasons(), None);
}

#[test]
fn empty_attempts_follow_empty_rule() {
    let groups = [vec![
        attempt(0, 0, &[1], &[3], Some(1.0)),
        attempt(0, 1, &[1], &[4], Some(0.0)),
        attempt(0, 2, &[1], &[], Some(0.0)),
    ]];
    let with = |empty| plan_of(&groups, &RlKeys { empty, ..keys() }, 1000).unwrap();
    let advantages =
        |plan: &PolicyPlan| rows(&plan.updates[0])[0].iter().map(|row| row.2).collect::<Vec<_>>();
    assert_eq!(advantages(&with(EmptyAttempts::Keep)), [2.0 / 3.0, -1.0 / 3.0]);
    assert_eq!(advantages(&with(EmptyAttempts::Drop)), [0.5, -0.5]);
}

#[test]
fn critic_values_yield_per_token_advantages() {
    let groups = [vec![turn_tokens(0, 2, 1.0)]];
    let advantage = Some(Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None });
    let signals = |_, _| Signals { values: vec![0.5, 0.25, 0.75, 1.0], ..Signals::default() };
    let plan = plan_with(&groups, &RlKeys { advantage, ..keys() }, 1000, &signals).unwrap();
    let sequence = &plan.updates[0].sequences[0];
    assert_eq!(sequence.advantage, PerToken::new([0.5, 0.75, 0.25, 0.0]));
    assert_eq!(sequence.returns, Some(PerToken::uniform(1.0)));
    assert_eq!(sequence.values, Some(PerToken::new([0.5, 0.25, 0.75, 1.0])));
    let input = AttemptSequences::from_trajectory(&groups[0][0].trajectory).input(
        sequence,
        Targets::DEFAULT,
        3,
    );
    let of = |i: usize| input.targets[i].term;
    assert_eq!(
        (of(2).advantage, of(2).returns, of(2).value, of(2).age),
        (0.25, 1.0, Some(0.75), 3)
    );
}

#[test]
fn kl_penalty_on_rewards_changes_advantages() {
    let groups = [vec![turn_tokens(0, 1, 1.0)]];
    let advantage = Some(Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None });
    let kl = Some(KlKeys {
        estimator: levade_rl::KlEstimator::K1,
        coefficient: 9.0,
        importance_weighted: false,
        reference_every: 0,
        apply_to: KlTarget::Reward,
        adaptive: None,
    });
    let signals = |_, _| Signals {
        values: vec![0.0, 0.0],
        logprobs: vec![-1.0, -2.0],
        reference: vec![-2.0, -2.5],
        ..Signals::default()
    };
    // The current coefficient is 0.5: 1 − 0.25 after the last token, and 0.5 less before.
    let plan = plan_with(&groups, &RlKeys { advantage, kl, ..keys() }, 1000, &signals).unwrap();
    assert_eq!(plan.updates[0].sequences[0].advantage, PerToken::new([0.25, 0.75]));
    assert_eq!(plan.kl, Some(AppliedKlPenalty { coefficient: 0.5, found: 0.75, rollouts: 1 }));

    // If attempts are compared within groups, attempts with equal rewards differ by their
    // divergence from the reference: 1.5 and 0.5 nats.
    let groups = [vec![turn_tokens(0, 1, 1.0), turn_tokens(1, 1, 1.0)]];
    let far = |id: AttemptId, _| Signals {
        logprobs: vec![-1.0, -2.0],
        reference: if slot(id).1 == 0 { vec![-2.0, -2.5] } else { vec![-1.0, -2.5] },
        ..Signals::default()
    };
    let plan = plan_with(
        &groups,
        &RlKeys { kl, zero_variance_groups: Some(ZeroVarianceGroups::Drop), ..keys() },
        1000,
        &far,
    )
    .unwrap();
    assert_eq!(
        rows(&plan.updates[0])[0].iter().map(|row| row.2).collect::<Vec<_>>(),
        [-0.25, 0.25]
    );
}

/// Weights of the answer's score, of the remaining outcome, and of the turns' rewards.
fn parts(weights: [f64; 3]) -> RlKeys {
    let (baseline, counting) = (GroupBaseline::default(), levade_rl::Counting::Exact);
    let advantage =
        Estimator::Gdpo { weights: weights.into(), baseline, counting, recenter: false };
    RlKeys { advantage: Some(advantage), ..keys() }
}

#[test]
fn gdpo_normalizes_reward_components_separately() {
    // The first answer is correct, with a malformed call. The second is incorrect, without such a
    // call.
    let earned = vec![StepReward { credit_target: CreditTarget::Turn(0), reward: -0.5 }];
    let right = Attempt { score: Some(1.0), step_rewards: earned, ..turn_tokens(0, 1, 0.5) };
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
    let signals = |id: AttemptId, _| Signals {
        values: vec![0.5, 0.25],
        truncation_value: (slot(id).1 == 0).then_some(2.0),
        ..Signals::default()
    };
    let plan = plan_with(&groups, &RlKeys { advantage, ..keys() }, 1000, &signals).unwrap();
    let [cut, ended] = &plan.updates[0].sequences[..] else { panic!("{plan:?}") };
    // δ₁ = 1 + γ · 2 − 0.25, δ₀ = γ · 0.25 − 0.5, and λ γ δ₁ more for the first.
    assert_eq!(cut.advantage, PerToken::new([-0.375 + 0.25 * 1.75, 1.75]));
    assert_eq!(ended.advantage, PerToken::new([-0.375 + 0.25 * 0.75, 0.75]));
    assert_eq!(cut.returns, Some(PerToken::new([0.5625, 2.0])));
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
        Signals { entropies, ..Signals::default() }
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
    let earned = vec![StepReward { credit_target: CreditTarget::Agent("b".into()), reward: 1.0 }];
    let group = [vec![
        together(0, 2, 2.0, earned),
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
    // Rewards of "a" were 1, 0 and −2, with a mean of −1/3; those of "b" were 2 and −2.
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
    let alone = advantages(&[group.clone()], &keys());
    assert!((alone[0] - root).abs() < 1e-6 && (alone[1] + root).abs() < 1e-6, "{alone:?}");
    group.push(truncated_attempt(attempt(0, 2, &[1], &[5, 5, 5, 5], Some(-9.0))));
    assert_eq!(advantages(&[group.clone()], &keys()), alone);
    let from = TrainFilterKeys { reward_from: Some(-1.0), ..TrainFilterKeys::default() };
    assert_eq!(
        advantages(&[group], &RlKeys { only: from, overlong: OverlongAttempts::Keep, ..keys() }),
        alone
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

#[path = "plan_mixture_tests.rs"]
mod mixture;
