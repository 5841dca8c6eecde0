//! Creates attempts and step plans for the contract suite.

use levade_policy::{MicroBatchPlan, uniform};
use levade_tree::{
    AttemptId, AttemptSlot, Kind, Outcome, Purpose, RunId, Segment, SegmentId, Trajectory,
    VersionRun,
};
use serde_json::json;

use crate::{
    Attempt, AttemptStart, CreditTarget, PerToken, PlannedSequence, PolicyPlan, Status, StepPlan,
    StepReward, Update,
};

/// Creates an attempt slot for training.
pub(crate) fn train_slot(group: u32, sample: u32) -> AttemptSlot {
    AttemptSlot { purpose: Purpose::Train, phase: 1, step: 3, group, sample }
}

/// Creates a root segment. Sampled tokens get one log-probability each.
pub(crate) fn segment(kind: Kind, tokens: &[u32]) -> Segment {
    let sampled = if kind == Kind::Sampled { tokens.len() } else { 0 };
    let run = VersionRun { version: u64::MAX - 1, len: sampled as u32 };
    Segment {
        kind,
        logprobs: (0..sampled).map(|i| -0.1 * i as f32).collect(),
        versions: if sampled > 0 { vec![run] } else { Vec::new() },
        ..Segment::context(None, tokens.to_vec(), 0)
    }
}

/// Creates a completed attempt with two segments, as try 0.
pub(crate) fn attempt(run: &RunId, group: u32, sample: u32) -> Attempt {
    next_try(run, group, sample, 0)
}

/// Creates a completed attempt with two segments, as try `number`.
pub(crate) fn next_try(run: &RunId, group: u32, sample: u32, number: u32) -> Attempt {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(segment(Kind::Context, &[1, 2, u32::MAX])).expect("a root");
    let completion =
        Segment { parent: Some(root), temperature: 0.7, ..segment(Kind::Sampled, &[5, 6]) };
    trajectory.push(completion).expect("a reply");
    let slot = train_slot(group, sample);
    Attempt {
        id: AttemptId::new(run, &slot, number),
        slot,
        number,
        task: json!({"question": "2+2", "answer": 4}),
        outcome: Outcome { turns: 1, ..Outcome::demonstrated("4") },
        score: Some(1.0),
        reward: Some(0.95),
        step_rewards: vec![StepReward { credit_target: CreditTarget::Turn(0), reward: -0.05 }],
        status: Status::Completed,
        trajectory,
    }
}

/// Returns the start of an attempt.
pub(crate) fn start_of(attempt: &Attempt) -> AttemptStart {
    let Attempt { id, slot, number, task, .. } = attempt.clone();
    AttemptStart { id, slot, number, task }
}

/// Creates a random forest, in which each segment is a root or continues an earlier segment, at its
/// end or within it.
pub(crate) fn forest(seed: u64) -> Trajectory {
    let mut num_samples = 0;
    let mut below = |bound: usize| {
        num_samples += 1;
        (uniform(seed, 0, num_samples) * bound as f64) as usize
    };
    let mut trajectory = Trajectory::new();
    for turn in 0..below(12) as u32 {
        let num_segments = trajectory.segments().len();
        let parent =
            (num_segments > 0 && below(5) > 0).then(|| SegmentId(below(num_segments) as u32));
        let len = parent.map_or(0, |parent| trajectory.segments()[parent.0 as usize].tokens.len());
        let after = (len > 0 && below(2) == 0).then(|| 1 + below(len) as u32);
        let kind = [Kind::Context, Kind::Sampled, Kind::Demonstrated][below(3)];
        let tokens: Vec<u32> =
            (0..below(9)).map(|_| (below(1 << 16) << 16 | below(1 << 16)) as u32).collect();
        let sampled = if kind == Kind::Sampled { tokens.len() } else { 0 };
        let grown = Segment {
            parent,
            after,
            kind,
            // Random bits, including NaN and −0.
            logprobs: (0..sampled).map(|_| f32::from_bits((below(1 << 16) << 16) as u32)).collect(),
            versions: (0..sampled)
                .map(|_| VersionRun { version: u64::MAX - below(9) as u64, len: 1 })
                .collect(),
            temperature: below(3) as f32 * 0.7,
            filtered: below(2) == 0,
            agent: ["", "a", "ü b"][below(3)].into(),
            policy: ["", "p"][below(2)].into(),
            ..Segment::context(None, tokens, turn)
        };
        trajectory.push(grown).expect("a segment that fits");
    }
    trajectory
}

/// Creates a plan for two policies, with one sequence for each pair of advantage and weight.
pub(crate) fn plan(run: &RunId, numbers: &[(f32, f32)]) -> StepPlan {
    let sequences: Vec<PlannedSequence> = numbers
        .iter()
        .enumerate()
        .map(|(group, &(advantage, weight))| PlannedSequence {
            attempt: AttemptId::new(run, &train_slot(group as u32, 0), 0),
            leaf: SegmentId(4),
            advantage: PerToken::uniform(advantage),
            weight: PerToken::new([weight, weight, 0.5]),
            returns: (group > 0).then(|| PerToken::new([0.0, -0.0, advantage])),
            values: None,
        })
        .collect();
    let update = Update {
        micro_batch_plan: MicroBatchPlan::from_sizes([0, sequences.len()]),
        critic_plan: Some(MicroBatchPlan::from_sizes([sequences.len()])),
        sequences,
    };
    let policies = [(9, "a"), (3, "b")].map(|(version, policy)| PolicyPlan {
        policy: policy.into(),
        version,
        updates: vec![Update::default(), update.clone()],
        ..PolicyPlan::default()
    });
    StepPlan { phase: 1, step: 2, group_positions: vec![7, 9], policies: policies.into() }
}
