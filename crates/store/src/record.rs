//! The types of the record.

use std::fmt;

use levade_policy::Cut;
use levade_tree::{AttemptId, Earner, Outcome, Placement, SegmentId, Trajectory};
use serde::{Deserialize, Serialize};

/// Whether an attempt came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Was begun and has not ended.
    Running,
    /// Ended by itself or at a limit of the recipe, and has its score.
    Completed,
    /// Ended, and waits for its score, with which it ends once more.
    Unscored,
    /// Something outside the model broke; the outcome says what.
    Failed,
    /// Came to nothing, and another try was made in its place.
    Superseded,
    /// Lost its process before it ended, or broke together with every other attempt of its batch, so that
    /// the cause lies outside the run. Never trained on; a resumed run makes another try.
    Abandoned,
}

impl Status {
    const ALL: [Status; 6] = [
        Status::Running,
        Status::Completed,
        Status::Unscored,
        Status::Failed,
        Status::Superseded,
        Status::Abandoned,
    ];

    /// The name it is stored under.
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Completed => "completed",
            Status::Unscored => "unscored",
            Status::Failed => "failed",
            Status::Superseded => "superseded",
            Status::Abandoned => "abandoned",
        }
    }

    /// The status stored under `name`.
    pub fn parse(name: &str) -> Option<Self> {
        Status::ALL.into_iter().find(|s| s.name() == name)
    }

    /// Whether an attempt with this status is the one that counts at its place.
    pub fn counts(self) -> bool {
        matches!(self, Status::Completed | Status::Unscored | Status::Failed)
    }

    /// Whether an attempt can end with this status.
    pub fn is_end(self) -> bool {
        self != Status::Running
    }
}

/// An attempt as it is recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// Name of the attempt.
    pub id: AttemptId,
    /// Where it belongs in the run.
    pub placement: Placement,
    /// The try at this place, from 0. The last one counts.
    pub number: u32,
    /// The task, as the agent knows it.
    pub task: serde_json::Value,
    /// How it ended; [`Outcome::begun`] where it has not.
    pub outcome: Outcome,
    /// The weighted sum of what scorers gave; `None` where nothing was scored.
    pub score: Option<f64>,
    /// Reward that training reinforces, all of it: the score, shaped; `None` where the attempt is not to be
    /// trained on.
    pub reward: Option<f64>,
    /// The parts of the reward that were earned before the end. The rest of it is the outcome's.
    pub earned: Vec<Earned>,
    /// Whether it came to its end.
    pub status: Status,
    /// Every token.
    pub trajectory: Trajectory,
}

impl Attempt {
    /// The attempt as it begins.
    pub fn begun(begun: &Begun) -> Self {
        let Begun { id, placement, number, task } = begun.clone();
        Attempt {
            id,
            placement,
            number,
            task,
            outcome: Outcome::begun(),
            score: None,
            reward: None,
            earned: Vec::new(),
            status: Status::Running,
            trajectory: Trajectory::new(),
        }
    }

    /// Returns whether the attempt broke, and its record says so.
    pub(crate) fn is_failure(&self) -> bool {
        match self.status {
            Status::Failed | Status::Superseded => true,
            Status::Abandoned => self.outcome.error.is_some(),
            Status::Running | Status::Completed | Status::Unscored => false,
        }
    }

    /// How it ended.
    pub fn end(&self) -> End {
        let Attempt { outcome, score, reward, earned, status, .. } = self;
        let (outcome, earned) = (outcome.clone(), earned.clone());
        End { outcome, score: *score, reward: *reward, earned, status: *status }
    }
}

/// The beginning of an attempt: everything that is known of it before its first token.
#[derive(Debug, Clone, PartialEq)]
pub struct Begun {
    /// Name of the attempt.
    pub id: AttemptId,
    /// Where it belongs in the run.
    pub placement: Placement,
    /// The try at this place, from 0.
    pub number: u32,
    /// The task, as the agent knows it.
    pub task: serde_json::Value,
}

/// The end of an attempt: everything but its task and its tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// How it ended.
    pub outcome: Outcome,
    /// The weighted sum of what scorers gave.
    pub score: Option<f64>,
    /// Reward that training reinforces.
    pub reward: Option<f64>,
    /// The parts of the reward that were earned before the end.
    pub earned: Vec<Earned>,
    /// Status with which it ended: any but [`Status::Running`].
    pub status: Status,
}

/// The tries at a place in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tries {
    /// The number of the next one: one more than the last that was begun.
    pub next: u32,
    /// How many came to nothing and were superseded. Abandoned tries, whose process was gone, are left out:
    /// the stream of random numbers of the next try counts by this, so that a run that was killed samples
    /// what it would have.
    pub failed: u32,
}

/// A part of a reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Earned {
    /// Action or agent that earned it.
    pub by: Earner,
    /// How much.
    pub reward: f64,
}

/// An attempt without its segments, for listings.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptSummary {
    /// Name of the attempt.
    pub id: AttemptId,
    /// Where it belongs in the run.
    pub placement: Placement,
    /// The try at this place, from 0.
    pub number: u32,
    /// The weighted sum of what scorers gave.
    pub score: Option<f64>,
    /// Reward that training reinforces.
    pub reward: Option<f64>,
    /// Whether it came to its end.
    pub status: Status,
    /// How many tokens the model sampled.
    pub sampled_tokens: u64,
    /// How many tokens there are in all.
    pub tokens: u64,
}

/// An attempt that broke, for listings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedAttempt {
    /// Name of the attempt.
    pub id: AttemptId,
    /// Slot of the attempt in the run.
    pub placement: Placement,
    /// Index of the try in that slot, from 0.
    pub number: u32,
    /// [`Failed`](Status::Failed), [`Superseded`](Status::Superseded) or [`Abandoned`](Status::Abandoned).
    pub status: Status,
    /// Error that broke the attempt. `None` if the try was superseded because it sampled no token.
    pub error: Option<String>,
}

impl From<&Attempt> for FailedAttempt {
    fn from(attempt: &Attempt) -> Self {
        FailedAttempt {
            id: attempt.id,
            placement: attempt.placement,
            number: attempt.number,
            status: attempt.status,
            error: attempt.outcome.error.clone(),
        }
    }
}

/// A number for every trained token of a path, in runs of (number, tokens); a run of 0 tokens goes on to
/// the end.
#[derive(Debug, Clone, PartialEq)]
pub struct PerToken(Vec<(f32, u32)>);

impl PerToken {
    /// One value for all tokens.
    pub fn same(value: f32) -> Self {
        PerToken(vec![(value, 0)])
    }

    /// In as few runs as possible.
    pub fn new(values: impl IntoIterator<Item = f32>) -> Self {
        let mut runs: Vec<(f32, u32)> = Vec::new();
        for value in values {
            match runs.last_mut() {
                Some((last, len)) if last.to_bits() == value.to_bits() => *len += 1,
                _ => runs.push((value, 1)),
            }
        }
        match runs[..] {
            [] => PerToken::same(0.0),
            [(value, _)] => PerToken::same(value),
            _ => PerToken(runs),
        }
    }

    /// The numbers one by one; without end where the last run has none.
    pub fn iter(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().flat_map(|&(value, len)| {
            std::iter::repeat_n(value, if len == 0 { usize::MAX } else { len as usize })
        })
    }

    /// Runs as bytes: a little-endian f32 and u32 each.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(value, len)| [value.to_le_bytes(), len.to_le_bytes()]).flatten().collect()
    }

    /// The numbers that [`to_bytes`](Self::to_bytes) wrote; `None` where bytes are missing.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, []) = bytes.as_chunks::<4>() else { return None };
        let (runs, []) = words.as_chunks::<2>() else { return None };
        Some(PerToken(
            runs.iter().map(|[value, len]| (f32::from_le_bytes(*value), u32::from_le_bytes(*len))).collect(),
        ))
    }

    /// The runs as an earlier schema wrote them.
    pub(crate) fn from_runs(runs: Vec<(f32, u32)>) -> Self {
        PerToken(runs)
    }

    /// Each number once for every run of it.
    pub fn distinct(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().map(|(value, _)| *value)
    }
}

/// One path that a step trains: the way from a root to `leaf`. Its sampled and demonstrated segments are
/// the targets, save those that an earlier leaf of the same attempt already trains.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedPath {
    /// The attempt.
    pub attempt: AttemptId,
    /// The leaf.
    pub leaf: SegmentId,
    /// Advantage of every trained token; 0 for demonstrations, whose loss does not use it.
    pub advantage: PerToken,
    /// Weight of every trained token in the sum that is the loss; 0 where it is left out of it.
    pub weight: PerToken,
    /// Values that a critic should give before every trained token, where there is one.
    pub returns: Option<PerToken>,
    /// Values that it gave.
    pub values: Option<PerToken>,
}

/// One optimiser step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Update {
    /// The paths, in order.
    pub paths: Vec<PlannedPath>,
    /// How their learner cuts them.
    pub cut: Cut,
    /// How a critic's does, where there is one.
    pub critic: Option<Cut>,
}

impl Update {
    /// The paths of each micro-batch, in order.
    pub fn micro_batches(&self) -> Vec<Vec<&PlannedPath>> {
        self.cut.apply(&self.paths).collect()
    }
}

/// Plan of a step of the run, written before it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct StepPlan {
    /// The phase of the recipe, from 0.
    pub phase: u32,
    /// The step within the phase, from 0.
    pub step: u32,
    /// The places, in the phase's order of tasks, of the groups that it takes, those that teach nothing
    /// included; empty for demonstrations.
    pub places: Vec<u64>,
    /// Each policy that it trains, in the order in which they learn.
    pub policies: Vec<PolicyPlan>,
}

impl StepPlan {
    /// Every path of every policy, in order.
    pub fn paths(&self) -> impl Iterator<Item = &PlannedPath> {
        self.policies.iter().flat_map(PolicyPlan::paths)
    }
}

/// A policy's part of a step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyPlan {
    /// The name of the policy.
    pub policy: String,
    /// The version of its weights before the step.
    pub version: u64,
    /// Charge on the rewards for leaving the reference, where there was one.
    pub kl: Option<ChargedKl>,
    /// Which tokens kept their advantages for their entropy, where only some did.
    pub high_entropy: Option<HighEntropy>,
    /// The optimiser steps in order.
    pub updates: Vec<Update>,
}

impl PolicyPlan {
    /// Paths of all updates, in order.
    pub fn paths(&self) -> impl Iterator<Item = &PlannedPath> {
        self.updates.iter().flat_map(|update| &update.paths)
    }
}

/// A divergence charged to the rewards of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChargedKl {
    /// Coefficient of the charge.
    pub coefficient: f64,
    /// The divergence that was found, a mean over rollouts.
    pub found: f64,
    /// Over how many rollouts.
    pub rollouts: u64,
}

/// How many tokens of a step kept their advantages because the policy was least sure of them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HighEntropy {
    /// Tokens that there were.
    pub tokens: u64,
    /// How many of them kept their advantages.
    pub kept: u64,
    /// The least entropy that was enough, in nats, for each share of the groups that has an update of its
    /// own.
    pub thresholds: Vec<f64>,
}

/// When an evaluation was made: after `step` steps of `phase`. Before the first phase is (0, 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EvalKey {
    /// The phase of the recipe, from 0.
    pub phase: u32,
    /// Steps of the phase done.
    pub step: u32,
}

impl fmt::Display for EvalKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "evaluation phase {}/step {}", self.phase, self.step)
    }
}

/// Whether a write did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// Written now.
    Now,
    /// Was there already, equal.
    Before,
}
