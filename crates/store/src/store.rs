//! The trait of every backend.

use std::fmt::Debug;

use async_trait::async_trait;
use levade_tree::{AttemptId, Placement, Purpose, RunId, Segment};

use crate::{
    Attempt, AttemptSummary, Begun, End, EvalKey, FailedAttempt, Recorded, StepPlan, StoreError, Tries,
};

/// The durable record of a run. Share it as `Arc<dyn Store>`.
///
/// When a write returns, it is durable as far as the backend is. Every write can be made again: what is
/// recorded already and equal is [`Recorded::Before`], what differs is [`StoreError::Conflict`], and
/// nothing is ever overwritten but the end of an unscored attempt. A write whose future is dropped may be
/// done nevertheless. Every call ends by a deadline of the backend.
///
/// Errors common to all: the backend fails or does not answer
/// ([`Code::Unavailable`](crate::Code::Unavailable)), and, of reads, stored bytes are damaged.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// The run whose record it is.
    fn run(&self) -> &RunId;

    /// Where the record is, in words for messages: the path of a file, an address.
    fn place(&self) -> &str;

    /// Begins an attempt, which is then [`Running`](crate::Status::Running).
    ///
    /// # Errors
    /// When the id is not that of its try in this run, another attempt is recorded under it, or it was
    /// abandoned.
    async fn begin(&self, begun: &Begun) -> Result<Recorded, StoreError>;

    /// Appends segments, whose ids are their places in the trajectory, to an attempt that runs: all or
    /// none. Segments that are there already are compared. Work grows with the segments that are given, not
    /// with those before.
    ///
    /// # Errors
    /// When there is no such attempt, other segments are recorded under the ids, a segment does not fit
    /// what is there (its parent, the place of a fork, numbers per token) or leaves a gap, or is new and
    /// the attempt is over.
    async fn append(&self, id: &AttemptId, segments: &[Segment]) -> Result<Recorded, StoreError>;

    /// Ends an attempt that runs, or one that ended as [`Unscored`](crate::Status::Unscored).
    ///
    /// # Errors
    /// When there is no such attempt, it has another end or was abandoned, the status is none that an
    /// attempt ends with, or a number is not finite.
    async fn end(&self, id: &AttemptId, end: &End) -> Result<Recorded, StoreError>;

    /// Turns all attempts that run into [`Abandoned`](crate::Status::Abandoned) ones; returns how many. For
    /// whoever goes on with a run whose process is gone, or has ended it: nobody may be making attempts
    /// meanwhile.
    ///
    /// # Errors
    /// When writing fails.
    async fn abandon_running(&self) -> Result<u64, StoreError>;

    /// Records whole attempts at once: all or none.
    ///
    /// # Errors
    /// When another attempt is recorded under an id, an id is not that of its try in this run, or a number
    /// is not finite.
    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<Recorded, StoreError>;

    /// Records a whole attempt at once.
    ///
    /// # Errors
    /// Errors are those of [`record_attempts`](Self::record_attempts).
    async fn record_attempt(&self, attempt: &Attempt) -> Result<Recorded, StoreError> {
        self.record_attempts(std::slice::from_ref(attempt)).await
    }

    /// The attempt of this name, whatever has become of it.
    ///
    /// # Errors
    /// When reading fails.
    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError>;

    /// The try that counts at a place in the run: the last that was completed, failed or is unscored.
    ///
    /// # Errors
    /// When reading fails.
    async fn last_try(&self, placement: &Placement) -> Result<Option<Attempt>, StoreError>;

    /// The tries at a place in the run.
    ///
    /// # Errors
    /// When reading fails.
    async fn tries(&self, placement: &Placement) -> Result<Tries, StoreError>;

    /// The tasks of all attempts begun for `purpose`, each once.
    ///
    /// # Errors
    /// When reading fails.
    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError>;

    /// Names, numbers and sizes of the tries that count made for `purpose`, by phase, step, group and sample.
    ///
    /// # Errors
    /// When reading fails.
    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError>;

    /// Returns the attempts for `purpose` that broke, by placement and number: failed ones, superseded tries,
    /// and abandoned ones whose outcome has an error. An attempt whose process was killed is not listed.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError>;

    /// Records what a step will train on. To be called before it runs.
    ///
    /// # Errors
    /// When another plan is recorded for the step, or a number in it is not finite.
    async fn record_step(&self, plan: &StepPlan) -> Result<Recorded, StoreError>;

    /// The plan of a step, if it has been decided.
    ///
    /// # Errors
    /// When reading fails.
    async fn step(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError>;

    /// (phase, step) of all planned steps, in order.
    ///
    /// # Errors
    /// When reading fails.
    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError>;

    /// Records the result of an evaluation.
    ///
    /// # Errors
    /// When another result is recorded under the key.
    async fn record_eval(&self, key: EvalKey, result: &serde_json::Value) -> Result<Recorded, StoreError>;

    /// All results, by phase and step.
    ///
    /// # Errors
    /// When reading fails.
    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError>;
}
