//! The [`Store`] trait, which every backend implements.

use std::fmt::Debug;

use async_trait::async_trait;
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId, Segment};

use crate::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, EvalKey, FailedAttempt, StepPlan,
    StoreError, TryCounts, WithdrawRequest, Withdrawal, WriteOutcome,
};

/// The store of one run. Share it as `Arc<dyn Store>`.
///
/// When a write returns, it is as durable as the backend allows. Every write can be repeated: a
/// write of an equal value returns [`WriteOutcome::AlreadyRecorded`], a write of a different value
/// returns [`StoreError::Conflict`]. Only the end of an unscored attempt is ever overwritten, and
/// only [`withdraw`](Self::withdraw) erases. A write may still be committed after its future is
/// dropped. Every call returns before a deadline that the backend sets.
///
/// Every method can return an error if the backend fails or does not respond
/// ([`Code::Unavailable`](crate::Code::Unavailable)). A read also returns an error if stored bytes
/// are damaged.
#[async_trait]
pub trait Store: Debug + Send + Sync {
    /// Returns the id of the run whose data the store holds.
    fn run(&self) -> &RunId;

    /// Returns the location of the store for messages, such as a file path or a URL.
    fn location(&self) -> &str;

    /// Records the start of an attempt. The status of the attempt is then
    /// [`Running`](crate::Status::Running).
    ///
    /// # Errors
    /// Returns [`StoreError::Unstorable`] if the id does not belong to this run, slot and try,
    /// [`StoreError::Conflict`] if an attempt with another task is recorded under the id, and
    /// [`StoreError::Ended`] if the attempt was abandoned.
    async fn start_attempt(&self, started: &AttemptStart) -> Result<WriteOutcome, StoreError>;

    /// Appends all of `segments`, or none of them, to a running attempt.
    ///
    /// The id of a segment is its index in the trajectory. Segments that are already recorded are
    /// compared with the stored ones. The cost depends on the number of `segments`, not on the
    /// length of the stored trajectory.
    ///
    /// # Errors
    /// Returns [`StoreError::Unknown`] if the attempt is not recorded, [`StoreError::Conflict`] if
    /// a different segment is recorded under an id, and [`StoreError::Ended`] if a segment is new
    /// but the attempt has ended. Returns [`StoreError::Unstorable`] if a segment leaves a gap, has
    /// a temperature that is not finite, or does not fit the trajectory: its parent, the position
    /// of its fork or its number of values per token.
    async fn append_segments(
        &self,
        id: &AttemptId,
        segments: &[Segment],
    ) -> Result<WriteOutcome, StoreError>;

    /// Records the end of an attempt whose status is running or
    /// [`Unscored`](crate::Status::Unscored).
    ///
    /// # Errors
    /// Returns [`StoreError::Unknown`] if the attempt is not recorded, [`StoreError::Conflict`] if
    /// it already has a different end, and [`StoreError::Ended`] if it was abandoned with a
    /// different end. Returns [`StoreError::Unstorable`] if the status is
    /// [`Running`](crate::Status::Running) or if a score, a reward or a part of a reward is not
    /// finite.
    async fn end_attempt(
        &self,
        id: &AttemptId,
        end: &AttemptEnd,
    ) -> Result<WriteOutcome, StoreError>;

    /// Marks all running attempts as [`Abandoned`](crate::Status::Abandoned) and returns their
    /// number.
    ///
    /// Call this when resuming a run whose process has exited, or after a run has ended. No process
    /// may be generating attempts of the run at the same time.
    ///
    /// # Errors
    /// Returns an error if writing fails.
    async fn abandon_running(&self) -> Result<u64, StoreError>;

    /// Records all of the complete `attempts` in one write, or none of them.
    ///
    /// # Errors
    /// Returns [`StoreError::Conflict`] if a different attempt is recorded under an id, and
    /// [`StoreError::Unstorable`] if an id does not belong to this run, slot and try, or if a
    /// score, reward or temperature is not finite.
    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<WriteOutcome, StoreError>;

    /// Records one complete attempt in one write.
    ///
    /// # Errors
    /// Returns the errors of [`record_attempts`](Self::record_attempts).
    async fn record_attempt(&self, attempt: &Attempt) -> Result<WriteOutcome, StoreError> {
        self.record_attempts(std::slice::from_ref(attempt)).await
    }

    /// Returns the attempt with the id `id`, whatever its status, or `None` if it is not recorded.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError>;

    /// Returns the try that counts in an attempt slot: the last try that is completed, failed or
    /// unscored. Returns `None` if there is no such try.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn last_try(&self, slot: &AttemptSlot) -> Result<Option<Attempt>, StoreError>;

    /// Returns the index of the next try in an attempt slot, and the number of superseded and
    /// withdrawn tries.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn count_tries(&self, slot: &AttemptSlot) -> Result<TryCounts, StoreError>;

    /// Returns the distinct tasks of all attempts that were started for `purpose`, including
    /// running attempts. Erased tasks are not returned.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError>;

    /// Returns summaries of the attempts for `purpose`, sorted by phase, step, group and sample.
    /// Each attempt slot is represented by the try that counts.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError>;

    /// Returns the attempts for `purpose` that broke, sorted by slot and try.
    ///
    /// These are failed attempts, superseded tries, and abandoned attempts whose outcome has an
    /// error. An attempt whose process was killed is not listed.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError>;

    /// Records the plan of a training step. Call this before the step runs.
    ///
    /// # Errors
    /// Returns [`StoreError::Conflict`] if a different plan is recorded for the step, and
    /// [`StoreError::Unstorable`] if a number in the plan is not finite or a micro-batch plan does
    /// not fit the sequences of its update.
    async fn record_step(&self, plan: &StepPlan) -> Result<WriteOutcome, StoreError>;

    /// Returns the plan of a training step, or `None` if no plan is recorded for the step.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn step_plan(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError>;

    /// Returns the keys (phase, step) of all recorded step plans, in ascending order.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError>;

    /// Records the result of an evaluation.
    ///
    /// # Errors
    /// Returns [`StoreError::Conflict`] if a different result is recorded under `key`.
    async fn record_eval(
        &self,
        key: EvalKey,
        result: &serde_json::Value,
    ) -> Result<WriteOutcome, StoreError>;

    /// Returns the results of all evaluations, sorted by phase and step.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError>;

    /// Withdraws attempts: adds a tombstone for each attempt that the request selects, and gives
    /// the attempts the status [`Withdrawn`](crate::Status::Withdrawn). Returns the tombstones that
    /// were added, sorted by slot and try. A repeated request adds no tombstones.
    ///
    /// If the request erases, the task of each attempt becomes null, its outcome becomes
    /// [`Outcome::initial`](levade_tree::Outcome::initial), its segments are removed, and
    /// [`erase_quotes`](crate::erase_quotes) is applied to all evaluations. When this method
    /// returns, the backend's own files contain none of the erased bytes. Scores, rewards and step
    /// plans stay. Call this only while no process works on the run.
    ///
    /// # Errors
    /// Returns [`StoreError::Unstorable`] if an attempt of the request is not recorded. If the
    /// tombstones are recorded but the backend's files cannot be erased, an error is returned; a
    /// repeated request completes the erasure.
    async fn withdraw(&self, request: &WithdrawRequest) -> Result<Vec<Withdrawal>, StoreError>;

    /// Returns the tombstones of all withdrawn attempts, in the order in which they were added. An
    /// attempt that was first withdrawn and later erased has two tombstones.
    ///
    /// # Errors
    /// Returns an error if reading fails.
    async fn withdrawals(&self) -> Result<Vec<Withdrawal>, StoreError>;
}
