//! Tests of plans.

use dressage_store::{Purpose, Status};
use dressage_tree::{Kind, Segment, SegmentId, VersionRun};
use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn attempt(group: u32, sample: u32, prompt: &[u32], reply: &[u32], reward: Option<f64>) -> Attempt {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::given(None, prompt.to_vec(), 0)).unwrap();
    let reply = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-1.0; reply.len()],
        versions: vec![VersionRun { version: 0, len: reply.len() as u32 }],
        ..Segment::given(Some(root), reply.to_vec(), 0)
    };
    trajectory.push(reply).unwrap();
    let key = AttemptKey { purpose: Purpose::Train, phase: 1, step: 2, group, sample };
    let (task, outcome) = (Value::Null, Value::Null);
    Attempt { key, task, outcome, score: reward, reward, status: Status::Completed, trajectory }
}

fn keys() -> GrpoKeys {
    GrpoKeys {
        steps: 1,
        groups: 1,
        group_size: 2,
        temperature: 1.0,
        learning_rate: 1.0,
        scale_by_std: false,
        drop_uniform_groups: false,
        normaliser: Normaliser::TokenMean,
        clip_low: 0.2,
        clip_high: 0.2,
        clip_dual: None,
        kl: None,
        mini_batches: 1,
        epochs: 1,
        optimiser: Default::default(),
    }
}

/// Two groups that differ in reward, one that does not; one attempt left out.
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

fn plan_of(groups: &[Vec<Attempt>], keys: &GrpoKeys, budget: usize) -> Result<StepPlan, TrainerError> {
    grpo(1, 2, &groups.iter().map(Vec::as_slice).collect::<Vec<_>>(), keys, budget)
}

fn rows(update: &Update) -> Vec<Vec<(u32, u32, f32, f32)>> {
    let row = |p: &PlannedPath| (p.attempt.group, p.attempt.sample, p.advantage, p.weight);
    update.micro_batches.iter().map(|batch| batch.iter().map(row).collect()).collect()
}

#[test]
fn a_step_by_hand() {
    let plan = plan_of(&groups(), &keys(), 1000).unwrap();
    assert_eq!((plan.phase, plan.step, plan.updates.len()), (1, 2, 1));
    // 2 + 1 + 1 + 2 + 2 + 1 tokens: the uniform group counts, the attempt without a reward does not.
    let w = 1.0 / 9.0;
    let all = [(0, 0, 0.5, w), (0, 1, -0.5, w), (2, 0, -1.5, w), (2, 1, 1.5, w)];
    assert_eq!(rows(&plan.updates[0]), [all.to_vec()]);

    let dropped = plan_of(&groups(), &GrpoKeys { drop_uniform_groups: true, ..keys() }, 1000).unwrap();
    assert_eq!(rows(&dropped.updates[0])[0][0], (0, 0, 0.5, 1.0 / 6.0));

    let kl = dressage_rl::KlPenalty { estimator: dressage_rl::KlEstimator::K3, coefficient: 0.1 };
    let kept = plan_of(&groups(), &GrpoKeys { kl: Some(kl), ..keys() }, 1000).unwrap();
    assert_eq!(rows(&kept.updates[0])[0].len(), 6);

    let twice = GrpoKeys { mini_batches: 2, epochs: 2, normaliser: Normaliser::RolloutSum, ..keys() };
    let plan = plan_of(&groups(), &twice, 1000).unwrap();
    assert_eq!(plan.updates.len(), 4);
    assert_eq!(plan.updates[0], plan.updates[2]);
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.5, 0.5), (0, 1, -0.5, 0.5)]]);
    assert_eq!(rows(&plan.updates[1]), [[(2, 0, -1.5, 0.25), (2, 1, 1.5, 0.25)]]);
}

#[test]
fn nothing_to_learn_is_an_update_without_batches() {
    let uniform = vec![groups()[1].clone()];
    for drop_uniform_groups in [false, true] {
        let plan = plan_of(&uniform, &GrpoKeys { drop_uniform_groups, ..keys() }, 10).unwrap();
        assert_eq!(plan.updates, [Update::default()]);
    }
}

#[test]
fn demonstrations_all_learn() {
    let attempts = [attempt(0, 0, &[1], &[2, 3], None), attempt(1, 0, &[1], &[4], None)];
    let demonstrations: Vec<_> = attempts.iter().map(|a| (a.key, &a.trajectory)).collect();
    let plan = sft(0, 4, &demonstrations, Normaliser::RolloutMean, 100).unwrap();
    assert_eq!(rows(&plan.updates[0]), [[(0, 0, 0.0, 0.25), (1, 0, 0.0, 0.5)]]);
}

proptest! {
    /// Whatever the budget: the same paths in the same order with the same weights, every micro-batch within the budget
    /// unless it is a single path, and groups whole where they fit.
    #[test]
    fn micro_batching_changes_nothing(
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
        let flat = |plan: &StepPlan| rows(&plan.updates[0]).concat();
        prop_assert_eq!(flat(&cut), flat(&whole));
        prop_assert!(rows(&whole.updates[0]).len() <= 1);
        let input = |p: &PlannedPath| {
            let a = &groups[p.attempt.group as usize][p.attempt.sample as usize];
            path_input(&a.trajectory, p).unwrap()
        };
        let size = |paths: &[&PlannedPath]| {
            TreeBatch::merge(&paths.iter().map(|p| input(p)).collect::<Vec<_>>()).unwrap().tokens.len()
        };
        let batches = &cut.updates[0].micro_batches;
        for batch in batches {
            prop_assert!(!batch.is_empty());
            prop_assert!(batch.len() == 1 || size(&batch.iter().collect::<Vec<_>>()) <= budget);
        }
        for g in 0..groups.len() as u32 {
            let of_group = |batch: &Vec<PlannedPath>| batch.iter().filter(|p| p.attempt.group == g).count();
            let spread = batches.iter().filter(|b| of_group(b) > 0).count();
            let paths: Vec<&PlannedPath> = batches.iter().flatten().filter(|p| p.attempt.group == g).collect();
            prop_assert!(spread <= 1 || size(&paths) > budget);
        }
    }
}

#[test]
fn leaves_keep_their_attempt() {
    let plan = plan_of(&groups(), &keys(), 1000).unwrap();
    let path = plan.updates[0].micro_batches[0][0];
    assert_eq!((path.leaf, path.attempt), (SegmentId(1), groups()[0][0].key));
}
