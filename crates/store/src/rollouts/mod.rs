//! Stores of rollouts: queues, leases, workers, resources and spans. The rollouts can belong to
//! several runs, or to no run.
//!
//! [`Store`](crate::Store) records what one run made. [`Rollouts`] distributes work: a trainer
//! enqueues rollouts, workers on any machine lease and finish them, and both read resources and
//! write spans. The contents of inputs, metadata, resources and spans are opaque JSON.
//!
//! # Guarantees
//! - **One lease at a time.** A rollout is leased to one worker. After a later try has started,
//!   reports of an earlier try return [`RolloutError::Lost`].
//! - **Fair.** A queue is ordered by priority, then by age. A rollout whose try was lost returns to
//!   its old position. A rollout that is queued again by
//!   [`update_rollout`](Rollouts::update_rollout) goes to the end.
//! - **One clock.** Leases and timeouts are measured by the [`Clock`] of the store.
//! - **Durable.** A write that returned survives a crash, if the store is a file.
//! - **Waits have a deadline.** [`lease_rollouts`](Rollouts::lease_rollouts),
//!   [`wait_for_changes`](Rollouts::wait_for_changes) and
//!   [`wait_until_finished`](Rollouts::wait_until_finished) return when their wait is over.
//!
//! # Life of a rollout
//! `queuing` → `preparing` (leased) → `running` (first report) → `succeeded`, `failed` or, if the
//! configuration permits another try, `requeuing`. A report of a try cannot change the status
//! `cancelled`.
//!
//! Out of scope: HTTP, which the crates `levade-store-server` and `levade-store-client` implement.

mod clock;
#[cfg(any(test, feature = "testing"))]
pub mod contract;
mod error;
mod query;
pub mod state;
pub mod trace;
mod types;

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

pub use clock::{Clock, ManualClock, SystemClock};
pub use error::RolloutError;
pub use query::{
    LeaseRequest, LogicalOperator, Page, PageRequest, ResourcesFilter, RolloutFilter, SortOrder,
    SpanFilter, TextFilter, WorkerFilter,
};
pub use types::{
    ANNOUNCEMENT_KEY, DEFAULT_QUEUE, Json, Lease, LeaseEnd, NewRollout, NewSpan, Resources,
    Rollout, RolloutConfig, RolloutStatistics, RolloutStatus, RolloutUpdate, Span, SpanOutcome,
    Try, TrySelector, TryStatus, TryUpdate, Worker, WorkerStatus,
};

use crate::WriteOutcome;

/// Result of a call of the rollout store.
pub type Result<T> = std::result::Result<T, RolloutError>;

/// A store of rollouts. Share it as `Arc<dyn Rollouts>`.
///
/// A call writes everything or nothing. Every method can return [`RolloutError::Store`] if the
/// backend fails. A write may still be committed after its future is dropped.
#[async_trait]
pub trait Rollouts: Debug + Send + Sync {
    /// Returns the location of the store for messages: a file path, a URL, or `memory:`.
    fn location(&self) -> &str;

    /// Returns the current time of the store's clock, as a Unix timestamp in seconds.
    fn now(&self) -> f64;

    /// Appends rollouts to their queues, and returns the rollouts in the order of `new`. A rollout
    /// whose id or idempotency key is already known is not added again; the existing rollout is
    /// returned.
    ///
    /// # Errors
    /// Returns [`RolloutError::Conflict`] if the rollout under a key has another input.
    async fn enqueue(&self, new: &[NewRollout]) -> Result<Vec<Rollout>>;

    /// Creates a rollout and starts its first try at once, without a queue.
    ///
    /// # Errors
    /// Returns [`RolloutError::Conflict`] if a rollout with the id or the key exists.
    async fn start_rollout(&self, new: &NewRollout, worker: Option<&str>) -> Result<Rollout>;

    /// Starts another try of a rollout, whatever the status of the rollout and the maximum number
    /// of tries.
    ///
    /// # Errors
    /// Returns [`RolloutError::UnknownRollout`] if the rollout does not exist.
    async fn start_try(&self, rollout_id: &str, worker: Option<&str>) -> Result<Rollout>;

    /// Leases queued rollouts, and starts a try of each. If none is queued, waits for at most
    /// [`LeaseRequest::wait`]. If the wait is cancelled, no lease is lost except one that was
    /// committed at that moment: a repeated request with the same [`LeaseRequest::key`] returns it,
    /// and without a key its ttl expires.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn lease_rollouts(&self, request: &LeaseRequest) -> Result<Vec<Rollout>>;

    /// Reports that a try is in progress, and returns the time until which the next report must
    /// arrive. Returns `None` if the try has no such timeout. Revives an unresponsive try.
    ///
    /// # Errors
    /// Returns [`RolloutError::Lost`] if a later try has started, or if the try or its rollout has
    /// ended.
    async fn record_heartbeat(&self, lease: &Lease) -> Result<Option<f64>>;

    /// Ends the lease of a try. If `metadata` is set, it replaces the metadata of the try.
    /// Repeating the same end is a no-op.
    ///
    /// # Errors
    /// Returns [`RolloutError::Lost`] if a later try has started, or if the try or its rollout has
    /// already ended differently.
    async fn end_lease(
        &self,
        lease: &Lease,
        end: LeaseEnd,
        metadata: Option<Json>,
    ) -> Result<WriteOutcome>;

    /// Cancels the rollouts in `ids` that have not ended, and returns the number of cancelled
    /// rollouts. Unknown ids are ignored. A worker learns of the cancellation from its next
    /// heartbeat.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn cancel_rollouts(&self, ids: &[String]) -> Result<u64>;

    /// Ends the tries that exceeded a timeout, and returns them. Their rollouts are queued again or
    /// fail.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn expire_tries(&self) -> Result<Vec<Try>>;

    /// Replaces fields of a rollout. The tries of the rollout and their workers are not changed.
    ///
    /// # Errors
    /// Returns [`RolloutError::UnknownRollout`] if the rollout does not exist.
    async fn update_rollout(&self, rollout_id: &str, update: &RolloutUpdate) -> Result<Rollout>;

    /// Replaces fields of a try. If the try is the latest one of its rollout, the status of the
    /// rollout is updated to match, unless the rollout is cancelled.
    ///
    /// # Errors
    /// Returns an error if the rollout or the try does not exist.
    async fn update_try(
        &self,
        rollout_id: &str,
        name: &TrySelector,
        update: &TryUpdate,
    ) -> Result<Try>;

    /// Returns the rollout with the id `rollout_id`, or `None` if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>>;

    /// Returns one page of the rollouts that match `filter`.
    ///
    /// # Errors
    /// Returns [`RolloutError::Invalid`] if rollouts have no field with the name to sort by.
    async fn query_rollouts(
        &self,
        filter: &RolloutFilter,
        page: &PageRequest,
    ) -> Result<Page<Rollout>>;

    /// Returns one page of the tries of a rollout. The page is empty if the rollout does not exist.
    ///
    /// # Errors
    /// Returns [`RolloutError::Invalid`] if tries have no field with the name to sort by.
    async fn query_tries(&self, rollout_id: &str, page: &PageRequest) -> Result<Page<Try>>;

    /// Returns at most `max` rollouts that changed after the sequence number `since`, in the order
    /// of their last change. Also returns the sequence number for the next call. If no rollout has
    /// changed, waits for at most `wait`.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn wait_for_changes(
        &self,
        since: u64,
        max: usize,
        wait: Duration,
    ) -> Result<(Vec<Rollout>, u64)>;

    /// Waits until all known rollouts of `ids` have ended, or for at most `wait`. Returns the
    /// rollouts that have ended, in the order of `ids`.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn wait_until_finished(&self, ids: &[String], wait: Duration) -> Result<Vec<Rollout>>;

    /// Adds a version of the resources with the id `id`. If `id` is `None`, an id is generated.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn put_resources(&self, id: Option<&str>, value: &Json) -> Result<Resources>;

    /// Returns a version of the resources with the id `id`, or `None` if that version does not
    /// exist. If `version` is `None`, returns the latest version. If `id` is `None`, returns the
    /// resources that were added last, except resources that announce a run ([`ANNOUNCEMENT_KEY`]).
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn resources(&self, id: Option<&str>, version: Option<u64>) -> Result<Option<Resources>>;

    /// Returns one page of the latest versions of the resources that match `filter`.
    ///
    /// # Errors
    /// Returns [`RolloutError::Invalid`] if resources have no field with the name to sort by.
    async fn query_resources(
        &self,
        filter: &ResourcesFilter,
        page: &PageRequest,
    ) -> Result<Page<Resources>>;

    /// Records a heartbeat of a worker. If `stats` is `None`, the statistics of the previous
    /// heartbeat are kept.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn record_worker_heartbeat(&self, id: &str, stats: Option<Json>) -> Result<Worker>;

    /// Returns the worker with the id `id`, or `None` if the worker is unknown.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn worker(&self, id: &str) -> Result<Option<Worker>>;

    /// Returns one page of the workers that match `filter`.
    ///
    /// # Errors
    /// Returns [`RolloutError::Invalid`] if workers have no field with the name to sort by.
    async fn query_workers(
        &self,
        filter: &WorkerFilter,
        page: &PageRequest,
    ) -> Result<Page<Worker>>;

    /// Stores trace spans, and returns one outcome for each span. A stored span counts as a
    /// progress report of its try.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn add_spans(&self, spans: Vec<NewSpan>) -> Result<Vec<SpanOutcome>>;

    /// Returns one page of the spans that match `filter`.
    ///
    /// # Errors
    /// Returns [`RolloutError::Invalid`] if spans have no field with the name to sort by.
    async fn query_spans(&self, filter: &SpanFilter, page: &PageRequest) -> Result<Page<Span>>;

    /// Reserves `count` consecutive sequence numbers for spans of a rollout, and returns the first
    /// number. The numbers are above those of all stored spans. The rollout may be unknown.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn reserve_span_numbers(&self, rollout_id: &str, count: u64) -> Result<u64>;

    /// Returns the numbers of stored rollouts, tries, spans, resources and workers.
    ///
    /// # Errors
    /// Returns an error if the backend fails.
    async fn statistics(&self) -> Result<RolloutStatistics>;
}
