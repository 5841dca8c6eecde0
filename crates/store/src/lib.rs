//! Durable storage of a run: attempts with their segments, plans of training steps, and
//! evaluations.
//!
//! From the store, a run can be replayed, and any version of the weights can be traced to the
//! tokens that it was trained on. For this purpose, a [`StepPlan`] lists, in order, the attempts
//! that a step trains on, with the advantage and loss weight of each token. An attempt contains
//! every token with its log-probability and the version of the weights that sampled it.
//!
//! All access goes through one trait, [`Store`]. A [`Location`] parses the recipe key `run.store`.
//! `levade-store-client` opens every location; two backends are here:
//! - [`Sqlite`] keeps the run in one file.
//! - [`Memory`] keeps the run in the memory of the process, for tests and for runs that need no
//!   record. All data is lost when the last handle is dropped. A run with this backend can neither
//!   be resumed nor read by another process ([`StoreError::NotDurable`]).
//!
//! # Life of an attempt
//! An attempt starts, its segments are appended as they are generated, and it ends once. An attempt
//! that waits for its score first ends as [`Unscored`](Status::Unscored) and ends again with its
//! score; its tokens do not change. An attempt whose process exited is
//! [`Abandoned`](Status::Abandoned): it is never trained on, and the next try is another attempt. A
//! complete attempt can also be recorded in one call. An attempt that was
//! [withdrawn](Store::withdraw) is in no list, and accepts no further writes.
//!
//! # Example
//! ```
//! use levade_store::{EvalKey, Memory, Store, WriteOutcome};
//! use levade_tree::RunId;
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let store: std::sync::Arc<dyn Store> = std::sync::Arc::new(Memory::new(RunId("run".into())));
//! let key = EvalKey { phase: 0, step: 0 };
//! assert_eq!(store.record_eval(key, &"first".into()).await?, WriteOutcome::Written);
//! assert_eq!(store.record_eval(key, &"first".into()).await?, WriteOutcome::AlreadyRecorded);
//! assert!(store.record_eval(key, &"other".into()).await.is_err());
//! # Ok::<_, levade_store::StoreError>(()) }).unwrap();
//! ```
//!
//! # Guarantees of every backend
//! One suite of tests checks these for all backends.
//! - **Atomic.** A call writes everything or nothing.
//! - **Idempotent.** Recording an equal value again is a no-op. Recording a different value under
//!   the same key returns [`StoreError::Conflict`]. Only the end of an unscored attempt is ever
//!   overwritten.
//! - **Exact.** Token ids, log-probabilities and versions keep every bit; so do rewards and scores,
//!   except that −0 reads back as 0.
//! - **Async.** Calls never block an async worker on the disk. Calls that wait have a deadline, and
//!   the error names the operation that timed out.
//! - **Errors have codes** ([`Code`]) and report whether a retry can succeed.
//!
//! # Guarantees of `Sqlite`
//! - **A committed write survives** the end of the process and a power failure: `synchronous =
//!   FULL` flushes the log at every commit. With the weaker `NORMAL`, a power failure could leave a
//!   checkpoint without the attempts that it was trained on. Concurrent writes share a commit.
//! - **A prompt is stored once**, however many attempts start with it. A fork within a segment
//!   stores only its new tokens.
//! - **Several handles**, in one process or many, can read and write at the same time.
//! - **Reading needs no write permission** and no writable directory ([`Sqlite::open_existing`]).
//! - **Damage is detected**: rows have checksums, and [`check_file`] saves what is not damaged.
//! - **A file of an earlier build is migrated** when it is opened for writing. When it is opened
//!   only for reading, a copy is migrated and the file stays unchanged.
//!
//! A store server and its client exchange records in the format of [`wire`].
//!
//! Out of scope: the contents of tasks and evaluations, which this crate stores as opaque JSON.

pub mod backend;
mod checks;
mod columns;
#[cfg(any(test, feature = "testing"))]
pub mod contract;
mod error;
mod location;
mod memory;
mod mongo_url;
mod plan_header;
mod record;
pub mod rollouts;
mod sqlite;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
mod withdrawal;

pub use error::{Code, StoreError};
pub use location::{Location, StoreAccess, is_run_name};
pub use memory::Memory;
pub use mongo_url::{MongoUrl, PASSWORD_VARIABLE};
pub use record::{
    AppliedKlPenalty, Attempt, AttemptEnd, AttemptStart, AttemptSummary, EvalKey, FailedAttempt,
    HighEntropy, PerToken, PlannedSequence, PolicyPlan, Status, StepPlan, StepReward, TryCounts,
    Update, WriteOutcome,
};
pub use sqlite::rollouts::open_rollouts;
#[cfg(any(test, feature = "testing"))]
pub use sqlite::rollouts::open_rollouts_in_caller;
pub use sqlite::{
    CheckReport, Finding, FindingKind, SCHEMA_VERSION, Sqlite, ValueCounts, check_file,
};
pub use store::Store;
pub use withdrawal::{WithdrawRequest, Withdrawal, erase_quotes, person_subject};

pub use levade_tree::{AttemptId, AttemptSlot, CreditTarget, Purpose, RunId, Segment};
