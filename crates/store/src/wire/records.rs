//! The form of each record: its head, and the columns that it adds.

use levade_tree::{
    AttemptId, AttemptSlot, CreditTarget, Kind, Outcome, Purpose, Segment, SegmentId, Trajectory,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::columns::{ColumnReader, ColumnWriter};
use super::lease::{OpenRequest, OpenedRun};
use crate::plan_header::{StepPlanHeader, indexed_sequences, push_sequence};
use crate::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, EvalKey, FailedAttempt, PlannedSequence,
    Status, StepPlan, StepReward, TryCounts, WithdrawRequest, Withdrawal, WriteOutcome,
};

/// A value that can be sent as a record: a JSON head and binary columns.
pub trait Record: Sized {
    /// The part of the value that is sent as JSON.
    type Head: Serialize + DeserializeOwned;

    /// Returns the head of the value, and appends the other parts to `columns`.
    fn to_head(&self, columns: &mut ColumnWriter) -> Self::Head;

    /// Restores the value from its head and its columns.
    ///
    /// # Errors
    /// Returns a message if the columns do not fit the head.
    fn from_head(head: Self::Head, columns: &mut ColumnReader<'_>) -> Result<Self, String>;
}

/// Implements [`Record`] for types that are sent as JSON only.
macro_rules! heads_only {
    ($($type:ty),* $(,)?) => {$(
        impl Record for $type {
            type Head = $type;

            fn to_head(&self, _: &mut ColumnWriter) -> $type {
                self.clone()
            }

            fn from_head(head: $type, _: &mut ColumnReader<'_>) -> Result<Self, String> {
                Ok(head)
            }
        }
    )*};
}

heads_only!(
    (),
    u32,
    u64,
    Value,
    AttemptId,
    AttemptSlot,
    Purpose,
    EvalKey,
    AttemptStart,
    AttemptSummary,
    FailedAttempt,
    TryCounts,
    WriteOutcome,
    WithdrawRequest,
    Withdrawal,
    OpenRequest,
    OpenedRun,
);

impl<T: Record> Record for Vec<T> {
    type Head = Vec<T::Head>;

    fn to_head(&self, columns: &mut ColumnWriter) -> Self::Head {
        self.iter().map(|record| record.to_head(columns)).collect()
    }

    fn from_head(head: Self::Head, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        head.into_iter().map(|head| T::from_head(head, columns)).collect()
    }
}

impl<T: Record> Record for Option<T> {
    type Head = Option<T::Head>;

    fn to_head(&self, columns: &mut ColumnWriter) -> Self::Head {
        self.as_ref().map(|record| record.to_head(columns))
    }

    fn from_head(head: Self::Head, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        head.map(|head| T::from_head(head, columns)).transpose()
    }
}

impl<A: Record, B: Record> Record for (A, B) {
    type Head = (A::Head, B::Head);

    fn to_head(&self, columns: &mut ColumnWriter) -> Self::Head {
        (self.0.to_head(columns), self.1.to_head(columns))
    }

    fn from_head((a, b): Self::Head, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        Ok((A::from_head(a, columns)?, B::from_head(b, columns)?))
    }
}

/// JSON head of a segment's record. Lengths of columns are in bytes.
#[derive(Serialize, Deserialize)]
pub struct SegmentHead {
    id: SegmentId,
    parent: Option<SegmentId>,
    after: Option<u32>,
    kind: Kind,
    /// Bits of the temperature, an `f32`.
    temperature: u32,
    filtered: bool,
    agent: String,
    policy: String,
    turn: u32,
    tokens: u32,
    logprobs: u32,
    versions: u32,
}

impl Record for Segment {
    type Head = SegmentHead;

    fn to_head(&self, columns: &mut ColumnWriter) -> SegmentHead {
        SegmentHead {
            id: self.id,
            parent: self.parent,
            after: self.after,
            kind: self.kind,
            temperature: self.temperature.to_bits(),
            filtered: self.filtered,
            agent: self.agent.clone(),
            policy: self.policy.clone(),
            turn: self.turn,
            tokens: columns.push_tokens(&self.tokens),
            logprobs: columns.push_floats(&self.logprobs),
            versions: columns.push_versions(&self.versions),
        }
    }

    fn from_head(head: SegmentHead, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        Ok(Segment {
            id: head.id,
            parent: head.parent,
            after: head.after,
            kind: head.kind,
            temperature: f32::from_bits(head.temperature),
            filtered: head.filtered,
            agent: head.agent,
            policy: head.policy,
            turn: head.turn,
            tokens: columns.take_tokens(head.tokens)?,
            logprobs: columns.take_floats(head.logprobs)?,
            versions: columns.take_versions(head.versions)?,
        })
    }
}

/// JSON head of the record of an attempt's end. Numbers are sent as their bits: JSON reads a NaN
/// back as null, which would remove a reward instead of being rejected.
#[derive(Serialize, Deserialize)]
pub struct EndHead {
    outcome: Outcome,
    score: Option<u64>,
    reward: Option<u64>,
    step_rewards: Vec<(CreditTarget, u64)>,
    status: Status,
}

impl Record for AttemptEnd {
    type Head = EndHead;

    fn to_head(&self, _: &mut ColumnWriter) -> EndHead {
        let step_rewards = self.step_rewards.iter();
        EndHead {
            outcome: self.outcome.clone(),
            score: self.score.map(f64::to_bits),
            reward: self.reward.map(f64::to_bits),
            step_rewards: step_rewards
                .map(|part| (part.credit_target.clone(), part.reward.to_bits()))
                .collect(),
            status: self.status,
        }
    }

    fn from_head(head: EndHead, _: &mut ColumnReader<'_>) -> Result<Self, String> {
        let step_rewards = head.step_rewards.into_iter();
        Ok(AttemptEnd {
            outcome: head.outcome,
            score: head.score.map(f64::from_bits),
            reward: head.reward.map(f64::from_bits),
            step_rewards: step_rewards
                .map(|(credit_target, bits)| StepReward {
                    credit_target,
                    reward: f64::from_bits(bits),
                })
                .collect(),
            status: head.status,
        })
    }
}

/// JSON head of an attempt's record.
#[derive(Serialize, Deserialize)]
pub struct AttemptHead {
    start: AttemptStart,
    end: EndHead,
    segments: Vec<SegmentHead>,
}

impl Record for Attempt {
    type Head = AttemptHead;

    fn to_head(&self, columns: &mut ColumnWriter) -> AttemptHead {
        let Attempt { id, slot, number, task, .. } = self;
        AttemptHead {
            start: AttemptStart { id: *id, slot: *slot, number: *number, task: task.clone() },
            end: self.end().to_head(columns),
            segments: self.trajectory.segments().iter().map(|s| s.to_head(columns)).collect(),
        }
    }

    fn from_head(head: AttemptHead, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        let AttemptEnd { outcome, score, reward, step_rewards, status } =
            AttemptEnd::from_head(head.end, columns)?;
        let mut trajectory = Trajectory::new();
        for segment in Vec::<Segment>::from_head(head.segments, columns)? {
            trajectory.push(segment).map_err(|error| error.to_string())?;
        }
        let started = Attempt::from_start(&head.start);
        Ok(Attempt { outcome, score, reward, step_rewards, status, trajectory, ..started })
    }
}

/// JSON head of a step plan's record.
#[derive(Serialize, Deserialize)]
pub struct PlanHead {
    phase: u32,
    step: u32,
    plan: StepPlanHeader,
    sequences: Vec<SequenceHead>,
}

/// JSON head of one sequence of a step plan. Lengths of columns are in bytes.
#[derive(Serialize, Deserialize)]
struct SequenceHead {
    policy: u32,
    update: u32,
    attempt: AttemptId,
    leaf: SegmentId,
    advantage: u32,
    weight: u32,
    returns: Option<u32>,
    values: Option<u32>,
}

impl Record for StepPlan {
    type Head = PlanHead;

    fn to_head(&self, columns: &mut ColumnWriter) -> PlanHead {
        let sequences = indexed_sequences(self).map(|(policy, update, sequence)| SequenceHead {
            policy,
            update,
            attempt: sequence.attempt,
            leaf: sequence.leaf,
            advantage: columns.push_per_token(&sequence.advantage),
            weight: columns.push_per_token(&sequence.weight),
            returns: sequence.returns.as_ref().map(|returns| columns.push_per_token(returns)),
            values: sequence.values.as_ref().map(|values| columns.push_per_token(values)),
        });
        let sequences = sequences.collect();
        PlanHead { phase: self.phase, step: self.step, plan: self.into(), sequences }
    }

    fn from_head(head: PlanHead, columns: &mut ColumnReader<'_>) -> Result<Self, String> {
        let mut plan = head.plan.into_plan(head.phase, head.step);
        for head in head.sequences {
            let sequence = PlannedSequence {
                attempt: head.attempt,
                leaf: head.leaf,
                advantage: columns.take_per_token(head.advantage)?,
                weight: columns.take_per_token(head.weight)?,
                returns: head.returns.map(|len| columns.take_per_token(len)).transpose()?,
                values: head.values.map(|len| columns.take_per_token(len)).transpose()?,
            };
            push_sequence(&mut plan, (head.policy, head.update), sequence)?;
        }
        Ok(plan)
    }
}
