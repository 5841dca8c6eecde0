//! Tests of plans.

use levade_policy::{Simulator, SimulatorConfig};
use levade_recipe::{EmptyAttempts, KlKeys};
use levade_rl::{Estimator, GroupBaseline};
use levade_store::{CreditTarget, Status, StepReward, testing::wait};
use levade_tree::{Finish, Kind, Outcome, Purpose, Segment, SegmentId, TreeBatch, VersionRun};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::batch::AttemptSequences;
use crate::signals::trainable_sequences;

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
    let id = id(group, sample);
    let task = Value::Null;
    let outcome = Outcome::demonstrated("");
    let score = reward;
    let step_rewards = Vec::new();
    let status = Status::Completed;
    Attempt { id, slot, number: 0, task, outcome, score, reward, step_rewards, status, trajectory }
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
    plan_with(groups, keys, budget, &|_, _| SequenceSignals::default())
}

fn plan_with(
    groups: &[Vec<Attempt>],
    keys: &RlKeys,
    budget: usize,
    signals: SignalsOf<'_>,
) -> Result<PolicyPlan, TrainerError> {
    plan_for(Targets::DEFAULT, groups, keys, budget, signals)
}

fn plan_for(
    targets: Targets<'_>,
    groups: &[Vec<Attempt>],
    keys: &RlKeys,
    budget: usize,
    signals: SignalsOf<'_>,
) -> Result<PolicyPlan, TrainerError> {
    let greedy = |group, reward| attempt(group, 99, &[1], &[2], Some(reward));
    let baselines = &[Some(greedy(0, 0.25)), None, Some(greedy(2, 1.0))];
    let kl_coefficient = 0.5;
    let version = 9;
    let seed = 7;
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
fn split_plan(draft: PlanDraft, budget: usize) -> Result<PolicyPlan, TrainerError> {
    let policy = &Simulator::new(SimulatorConfig { rows: 1, ..SimulatorConfig::default() });
    wait(draft.into_plan(PhaseModels { policy, reference: None, critic: None }, budget))
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

    let estimator = levade_rl::KlEstimator::K3;
    let apply_to = KlTarget::Loss;
    let adaptive = None;
    let coefficient = 0.1;
    let importance_weighted = false;
    let reference_every = 0;
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
fn zero_variance_group_yields_empty_update() {
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
                    let completion: Vec<u32> = (0..*len as u32).map(|i| 10 + s as u32 + i).collect();
                    attempt(g as u32, s as u32, &prompt, &completion, Some(*reward))
                });
                attempts.collect()
            })
            .collect();
        let whole = plan_of(&groups, &keys(), usize::MAX).unwrap();
        let bounded = plan_of(&groups, &keys(), budget).unwrap();
        let flat = |plan: &PolicyPlan| rows(&plan.updates[0]).concat();
        prop_assert_eq!(flat(&bounded), flat(&whole));
        prop_assert!(rows(&whole.updates[0]).len() <= 1);
        let input = |p: &PlannedSequence| {
            let (group, sample) = slot(p.attempt);
            let a = &groups[group as usize][sample as usize];
            AttemptSequences::from_trajectory(&a.trajectory).build_input(p, Targets::DEFAULT, 0)
        };
        let size = |paths: &[&PlannedSequence]| {
            TreeBatch::merge(&paths.iter().map(|p| input(p)).collect::<Vec<_>>()).unwrap().tokens.len()
        };
        let batches = bounded.updates[0].micro_batches();
        for batch in &batches {
            prop_assert!(!batch.is_empty());
            prop_assert!(batch.len() == 1 || size(batch) <= budget);
        }
        for g in 0..groups.len() as u32 {
            let of_group = |batch: &Vec<&PlannedSequence>| batch.iter().filter(|p| slot(p.attempt).0 == g).count();
            let spread = batches.iter().filter(|b| of_group(b) > 0).count();
            let paths: Vec<&PlannedSequence> = bounded.updates[0].sequences.iter().filter(|p| slot(p.attempt).0 == g).collect();
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
fn is_uninformative_detects_groups_without_gradient() {
    let early = |reward| vec![StepReward { credit_target: CreditTarget::Turn(0), reward }];
    let group = |rewards: [f64; 2], parts: [f64; 2]| -> Vec<Attempt> {
        let of = |i: usize| Attempt {
            step_rewards: early(parts[i]),
            ..turn_tokens(i as u32, 2, rewards[i])
        };
        vec![of(0), of(1)]
    };
    let complete = keys();
    let parts = RlKeys { group_by: GroupBy::Agent, ..keys() };
    let uninformative = |keys: &RlKeys, group: &[Attempt]| {
        is_uninformative(keys, &rewarded_attempts(group.iter(), keys, &TokenLimits::default()))
    };
    let same = [0.5, 0.5];
    let different = [0.5, 0.25];
    assert_eq!(
        [same, different].map(|rewards| uninformative(&complete, &group([1.0, 1.0], rewards))),
        [true, true]
    );
    assert_eq!(
        [same, different].map(|rewards| uninformative(&parts, &group([1.0, 1.0], rewards))),
        [true, false]
    );
    assert_eq!(
        [&complete, &parts].map(|keys| uninformative(keys, &group([1.0, 0.0], same))),
        [false, false]
    );
    assert!(uninformative(&complete, &[]));
    let critic = RlKeys {
        advantage: Some(Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None }),
        ..keys()
    };
    assert!(!uninformative(&critic, &group([1.0, 1.0], same)));
}

/// Sequences of attempts with a reward, with all of their targets.
#[test]
fn trainable_sequences_cover_attempts_with_reward() {
    let groups = groups();
    let sequences = trainable_sequences(
        &groups.iter().map(Vec::as_slice).collect::<Vec<_>>(),
        Targets::DEFAULT,
    );
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
    assert_eq!(found, want.map(|(slot, leaf, tokens)| (slot, leaf, tokens.to_vec())));
    assert!(sequences.iter().all(|(_, input)| input.targets.len() == input.tokens.len() - 2));
}

/// Returns an attempt in which "a" and "b" act in turn, two tokens each, starting with "a".
fn together(sample: u32, acts: u32, reward: f64, step_rewards: Vec<StepReward>) -> Attempt {
    let mut attempt = turn_tokens(sample, acts, reward);
    let mut trajectory = Trajectory::new();
    for segment in attempt.trajectory.segments() {
        let agent = ["a", "b"][segment.turn as usize % 2].to_owned();
        trajectory.push(Segment { agent, ..segment.clone() }).unwrap();
    }
    (attempt.trajectory, attempt.step_rewards) = (trajectory, step_rewards);
    attempt
}

#[test]
fn group_by_compares_tasks_agents_or_steps() {
    let agent_reward = |agent: &str, reward| StepReward {
        credit_target: CreditTarget::Agent(agent.into()),
        reward,
    };
    // The reward of "b" is higher by 2 in the first attempt than in the second; the reward of "a"
    // is equal.
    let groups =
        [vec![together(0, 2, 3.0, vec![agent_reward("b", 2.0)]), together(1, 4, 1.0, vec![])]];
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
    let input = AttemptSequences::from_trajectory(&groups[2][1].trajectory).build_input(
        &plan.updates[0].sequences[2],
        Targets::DEFAULT,
        0,
    );
    assert_eq!(input.targets.iter().map(|target| target.index).collect::<Vec<_>>(), [2, 3, 8, 9]);

    let none: Vec<Attempt> = groups.iter().flatten().map(greedy).collect();
    // The attempt without a reward would not have been trained on anyway.
    let why = count_target_tokens(none.iter(), Targets::DEFAULT, &keys()).describe_masks().unwrap();
    assert!(why.starts_with("14 were decoded greedily"), "{why}");
    assert_eq!(
        count_target_tokens(groups.iter().flatten(), Targets::DEFAULT, &keys()).describe_masks(),
        None
    );
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
    let signals =
        |_, _| SequenceSignals { values: vec![0.5, 0.25, 0.75, 1.0], ..SequenceSignals::default() };
    let plan = plan_with(&groups, &RlKeys { advantage, ..keys() }, 1000, &signals).unwrap();
    let sequence = &plan.updates[0].sequences[0];
    assert_eq!(sequence.advantage, PerToken::new([0.5, 0.75, 0.25, 0.0]));
    assert_eq!(sequence.returns, Some(PerToken::uniform(1.0)));
    assert_eq!(sequence.values, Some(PerToken::new([0.5, 0.25, 0.75, 1.0])));
    let input = AttemptSequences::from_trajectory(&groups[0][0].trajectory).build_input(
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
    let signals = |_, _| SequenceSignals {
        values: vec![0.0, 0.0],
        logprobs: vec![-1.0, -2.0],
        reference: vec![-2.0, -2.5],
        ..SequenceSignals::default()
    };
    // The current coefficient is 0.5: 1 − 0.25 after the last token, and 0.5 less before.
    let plan = plan_with(&groups, &RlKeys { advantage, kl, ..keys() }, 1000, &signals).unwrap();
    assert_eq!(plan.updates[0].sequences[0].advantage, PerToken::new([0.25, 0.75]));
    assert_eq!(plan.kl, Some(AppliedKlPenalty { coefficient: 0.5, found: 0.75, rollouts: 1 }));

    // If attempts are compared within groups, attempts with equal rewards differ by their
    // divergence from the reference: 1.5 and 0.5 nats.
    let groups = [vec![turn_tokens(0, 1, 1.0), turn_tokens(1, 1, 1.0)]];
    let far = |id: AttemptId, _| SequenceSignals {
        logprobs: vec![-1.0, -2.0],
        reference: if slot(id).1 == 0 { vec![-2.0, -2.5] } else { vec![-1.0, -2.5] },
        ..SequenceSignals::default()
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

#[path = "plan_components_tests.rs"]
mod components;

#[path = "plan_mixture_tests.rs"]
mod mixture;
