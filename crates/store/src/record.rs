//! The values that a store holds: attempts, step plans and evaluation keys.

use std::fmt;

use levade_policy::MicroBatchPlan;
use levade_tree::{AttemptId, AttemptSlot, CreditTarget, Outcome, SegmentId, Trajectory};
use serde::{Deserialize, Serialize};

/// The state of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The attempt has started and has not ended yet.
    Running,
    /// The attempt has its score. It ended by itself or at a limit that the recipe sets.
    Completed,
    /// The attempt ended and waits for its score. Its end is recorded again when the score arrives.
    Unscored,
    /// An error outside the model broke the attempt. The outcome contains the error.
    Failed,
    /// The attempt produced nothing usable and was replaced by another try in the same slot.
    Superseded,
    /// The process exited before the attempt ended, or every attempt of the batch broke, which has
    /// a cause outside of the run. An abandoned attempt is never trained on, and a resumed run
    /// makes another try.
    Abandoned,
    /// The attempt was withdrawn, and must not be used any longer. See
    /// [`Withdrawal`](crate::Withdrawal).
    Withdrawn,
}

impl Status {
    const ALL: [Status; 7] = [
        Status::Running,
        Status::Completed,
        Status::Unscored,
        Status::Failed,
        Status::Superseded,
        Status::Abandoned,
        Status::Withdrawn,
    ];

    /// Returns the stored name of the status, for example `"running"`.
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Completed => "completed",
            Status::Unscored => "unscored",
            Status::Failed => "failed",
            Status::Superseded => "superseded",
            Status::Abandoned => "abandoned",
            Status::Withdrawn => "withdrawn",
        }
    }

    /// Returns the status with the stored name `name`, or `None` if the name is unknown.
    pub fn parse(name: &str) -> Option<Self> {
        Status::ALL.into_iter().find(|s| s.name() == name)
    }

    /// Returns whether an attempt with this status can be the try that counts in its attempt slot.
    pub fn can_count(self) -> bool {
        matches!(self, Status::Completed | Status::Unscored | Status::Failed)
    }

    /// Returns whether the try after a try with this status must use another random number stream.
    pub fn needs_another_stream(self) -> bool {
        matches!(self, Status::Superseded | Status::Withdrawn)
    }

    /// Returns whether an attempt can be ended with this status.
    pub fn is_end(self) -> bool {
        !matches!(self, Status::Running | Status::Withdrawn)
    }
}

/// A recorded attempt, with all its tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Id of the attempt, derived from the run, the slot and the try.
    pub id: AttemptId,
    /// Attempt slot: position of the attempt in the run.
    pub slot: AttemptSlot,
    /// Index of the try in its attempt slot, from 0. The last try whose status can count is used.
    pub number: u32,
    /// The task that the agent was given, as JSON.
    pub task: serde_json::Value,
    /// Outcome of the attempt. [`Outcome::initial`] if it has not ended.
    pub outcome: Outcome,
    /// Weighted sum of the scores. `None` if the attempt was not scored.
    pub score: Option<f64>,
    /// Total reward that training reinforces: the score after reward shaping. `None` if the attempt
    /// must not be trained on.
    pub reward: Option<f64>,
    /// Parts of the reward that were credited before the end of the attempt, each to one segment,
    /// turn or agent. The remainder is credited to the outcome.
    pub step_rewards: Vec<StepReward>,
    /// Current state of the attempt.
    pub status: Status,
    /// All tokens of the attempt, in segments.
    pub trajectory: Trajectory,
}

impl Attempt {
    /// Creates a running attempt without segments from its start record.
    pub fn from_start(start: &AttemptStart) -> Self {
        let AttemptStart { id, slot, number, task } = start.clone();
        Attempt {
            id,
            slot,
            number,
            task,
            outcome: Outcome::initial(),
            score: None,
            reward: None,
            step_rewards: Vec::new(),
            status: Status::Running,
            trajectory: Trajectory::new(),
        }
    }

    /// Returns whether the attempt broke. An abandoned attempt broke only if its outcome contains
    /// an error.
    pub fn is_failure(&self) -> bool {
        match self.status {
            Status::Failed | Status::Superseded => true,
            Status::Abandoned => self.outcome.error.is_some(),
            Status::Running | Status::Completed | Status::Unscored | Status::Withdrawn => false,
        }
    }

    /// Returns the end of the attempt: its outcome, score, rewards and status.
    pub fn end(&self) -> AttemptEnd {
        let Attempt { outcome, score, reward, step_rewards, status, .. } = self;
        let outcome = outcome.clone();
        let step_rewards = step_rewards.clone();
        AttemptEnd { outcome, score: *score, reward: *reward, step_rewards, status: *status }
    }
}

/// The start of an attempt: everything that is known before its first token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptStart {
    /// Id of the attempt, derived from the run, the slot and the try.
    pub id: AttemptId,
    /// Attempt slot: position of the attempt in the run.
    pub slot: AttemptSlot,
    /// Index of the try in its attempt slot, from 0.
    pub number: u32,
    /// The task that the agent was given, as JSON.
    pub task: serde_json::Value,
}

/// The end of an attempt: its outcome, score, rewards and status.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptEnd {
    /// Outcome of the attempt: why it ended and what it returned.
    pub outcome: Outcome,
    /// Weighted sum of the scores. `None` if the attempt was not scored.
    pub score: Option<f64>,
    /// Total reward that training reinforces. `None` if the attempt must not be trained on.
    pub reward: Option<f64>,
    /// Parts of the reward that were credited before the end of the attempt, each to one segment,
    /// turn or agent.
    pub step_rewards: Vec<StepReward>,
    /// Status of the attempt after its end. Must not be [`Status::Running`].
    pub status: Status,
}

/// Counts of the tries in an attempt slot, from which the next try is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TryCounts {
    /// Index of the next try: one more than the index of the last try that started. 0 if no try has
    /// started.
    pub next: u32,
    /// Number of superseded and withdrawn tries. Abandoned tries are not counted: this number
    /// selects the random number stream of the next try, so that a run that was killed and resumed
    /// samples the same tokens as an undisturbed run.
    pub failed: u32,
}

/// A part of an attempt's reward, credited to one segment, turn or agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepReward {
    /// Segment, turn or agent that the reward is credited to.
    #[serde(rename = "by")]
    pub credit_target: CreditTarget,
    /// Amount of the reward. Must be finite; negative for a penalty.
    pub reward: f64,
}

/// An attempt without its segments, as listings show it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptSummary {
    /// Id of the attempt, derived from the run, the slot and the try.
    pub id: AttemptId,
    /// Attempt slot: position of the attempt in the run.
    pub slot: AttemptSlot,
    /// Index of the try in its attempt slot, from 0.
    pub number: u32,
    /// Weighted sum of the scores. `None` if the attempt was not scored.
    pub score: Option<f64>,
    /// Total reward that training reinforces. `None` if the attempt must not be trained on.
    pub reward: Option<f64>,
    /// Current state of the attempt.
    pub status: Status,
    /// Number of tokens that the model sampled.
    pub sampled_tokens: u64,
    /// Number of tokens in all segments: context, sampled and demonstrated.
    pub tokens: u64,
}

/// An attempt that broke, as listings of failures show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    /// Id of the attempt, derived from the run, the slot and the try.
    pub id: AttemptId,
    /// Attempt slot: position of the attempt in the run.
    pub slot: AttemptSlot,
    /// Index of the try in its attempt slot, from 0.
    pub number: u32,
    /// Status of the attempt: [`Failed`](Status::Failed), [`Superseded`](Status::Superseded) or
    /// [`Abandoned`](Status::Abandoned).
    pub status: Status,
    /// Error that broke the attempt. `None` if the try was superseded because it sampled no token.
    pub error: Option<String>,
}

impl From<&Attempt> for FailedAttempt {
    fn from(attempt: &Attempt) -> Self {
        FailedAttempt {
            id: attempt.id,
            slot: attempt.slot,
            number: attempt.number,
            status: attempt.status,
            error: attempt.outcome.error.clone(),
        }
    }
}

/// One number per trained token of a sequence, run-length encoded as pairs (value, number of
/// tokens). A run of 0 tokens extends to the end of the sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct PerToken(Vec<(f32, u32)>);

impl PerToken {
    /// Creates a list that has the same value for every token of a sequence of any length.
    pub fn uniform(value: f32) -> Self {
        PerToken(vec![(value, 0)])
    }

    /// Creates a list from one value per token, in as few runs as possible.
    ///
    /// If all values are equal, the list applies to a sequence of any length. If `values` is empty,
    /// every token gets 0.
    pub fn new(values: impl IntoIterator<Item = f32>) -> Self {
        let mut runs: Vec<(f32, u32)> = Vec::new();
        for value in values {
            match runs.last_mut() {
                Some((last, len)) if last.to_bits() == value.to_bits() => *len += 1,
                _ => runs.push((value, 1)),
            }
        }
        match runs[..] {
            [] => PerToken::uniform(0.0),
            [(value, _)] => PerToken::uniform(value),
            _ => PerToken(runs),
        }
    }

    /// Iterates over the values, one per token. The iterator never ends if the last run extends to
    /// the end of the sequence.
    pub fn iter(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().flat_map(|&(value, len)| {
            std::iter::repeat_n(value, if len == 0 { usize::MAX } else { len as usize })
        })
    }

    /// Serializes each run of equal values as a little-endian `f32` (value) and `u32` (number of
    /// tokens).
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|(value, len)| [value.to_le_bytes(), len.to_le_bytes()])
            .flatten()
            .collect()
    }

    /// Parses the output of [`to_bytes`](Self::to_bytes). Returns `None` if the length is not a
    /// multiple of 8 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (chunks, []) = bytes.as_chunks::<4>() else { return None };
        let (runs, []) = chunks.as_chunks::<2>() else { return None };
        Some(PerToken(
            runs.iter()
                .map(|[value, len]| (f32::from_le_bytes(*value), u32::from_le_bytes(*len)))
                .collect(),
        ))
    }

    /// Creates a list from the pairs (value, number of tokens) that schema 3 stored.
    pub(crate) fn from_runs(runs: Vec<(f32, u32)>) -> Self {
        PerToken(runs)
    }

    /// Iterates over the values of the run-length encoding, one for each run of equal values.
    pub fn run_values(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().map(|(value, _)| *value)
    }
}

/// A sequence that a training step trains on: the segments from a root of the attempt's tree to
/// `leaf`.
///
/// The sampled and demonstrated segments are the targets, except those that an earlier leaf of the
/// same attempt already trains.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedSequence {
    /// Attempt that contains the sequence.
    pub attempt: AttemptId,
    /// Last segment of the sequence, which identifies it within the attempt.
    pub leaf: SegmentId,
    /// Advantage of every trained token. 0 for demonstrations, whose loss does not use advantages.
    pub advantage: PerToken,
    /// Weight of every trained token in the sum that forms the loss. 0 excludes a token.
    pub weight: PerToken,
    /// Target values of the critic before every trained token. `None` without a critic.
    pub returns: Option<PerToken>,
    /// Values that the critic predicted before every trained token. `None` without a critic.
    pub values: Option<PerToken>,
}

/// Sequences and micro-batches of one optimizer step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Update {
    /// Sequences of the update, in order.
    pub sequences: Vec<PlannedSequence>,
    /// Micro-batch plan of the learner.
    pub micro_batch_plan: MicroBatchPlan,
    /// Micro-batch plan of the critic. `None` without a critic.
    pub critic_plan: Option<MicroBatchPlan>,
}

impl Update {
    /// Returns the sequences of each micro-batch, in order.
    pub fn micro_batches(&self) -> Vec<Vec<&PlannedSequence>> {
        self.micro_batch_plan.apply(&self.sequences).collect()
    }
}

/// The plan of a training step: the sequences and micro-batches to train on. It is recorded before
/// the step runs.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPlan {
    /// Index of the phase in the recipe, from 0.
    pub phase: u32,
    /// Index of the step within the phase, from 0.
    pub step: u32,
    /// Positions of the step's groups in the phase's task order, including zero-variance groups.
    /// Empty for demonstrations.
    pub group_positions: Vec<u64>,
    /// Plans of the policies that the step trains, in the order in which they are trained.
    pub policies: Vec<PolicyPlan>,
}

impl StepPlan {
    /// Iterates over the sequences of all policies, in order.
    pub fn sequences(&self) -> impl Iterator<Item = &PlannedSequence> {
        self.policies.iter().flat_map(PolicyPlan::sequences)
    }
}

/// The part of a step plan that concerns one policy.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyPlan {
    /// Name of the policy in the recipe.
    pub policy: String,
    /// Version of the policy's weights before the step.
    pub version: u64,
    /// KL penalty that was applied to the rewards. `None` if the rewards were not penalized.
    pub kl: Option<AppliedKlPenalty>,
    /// Selection of high-entropy tokens. `None` if all tokens kept their advantages.
    pub high_entropy: Option<HighEntropy>,
    /// Optimizer steps of the policy, in the order in which they run.
    pub updates: Vec<Update>,
}

impl PolicyPlan {
    /// Iterates over the sequences of all updates, in order.
    pub fn sequences(&self) -> impl Iterator<Item = &PlannedSequence> {
        self.updates.iter().flat_map(|update| &update.sequences)
    }
}

/// A KL penalty that was applied to the rewards of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AppliedKlPenalty {
    /// Coefficient of the penalty.
    pub coefficient: f64,
    /// Measured KL divergence from the reference policy, averaged over `rollouts`.
    pub found: f64,
    /// Number of rollouts in the average.
    pub rollouts: u64,
}

/// The number of tokens of a step that kept their advantages because of their high entropy.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HighEntropy {
    /// Number of tokens before the selection.
    pub tokens: u64,
    /// Number of tokens that kept their advantages.
    pub kept: u64,
    /// Minimum entropy of a kept token, in nats: one threshold for each subset of the groups that
    /// has its own update.
    pub thresholds: Vec<f64>,
}

/// Identifies an evaluation by its time: after `step` steps of `phase`. (0, 0) is before the first
/// phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EvalKey {
    /// Index of the phase in the recipe, from 0.
    pub phase: u32,
    /// Number of completed steps of the phase.
    pub step: u32,
}

impl fmt::Display for EvalKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "evaluation phase {}/step {}", self.phase, self.step)
    }
}

/// The effect of a successful write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteOutcome {
    /// The value was written by this call.
    Written,
    /// An equal value was already recorded, so nothing was written.
    AlreadyRecorded,
}
