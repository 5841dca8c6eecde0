//! The durable record of a run: attempts with their segments, the ledger of training steps, evaluations.
//!
//! One trait, [`Store`], with two backends: [`Sqlite`], one file, and [`Memory`], nothing. A [`Location`]
//! names a backend as recipes do, and opens it. A run can be
//! audited back from any version of the weights to the tokens that made it, and replayed: a [`StepPlan`]
//! names, in order, the attempts that a step trains on and how strongly; the attempts hold every token, its
//! log-probability and the version of the weights that drew it.
//!
//! An attempt is started, its segments are appended as they come, and it ends once. An attempt that waits for
//! its score ends as [`Unscored`](Status::Unscored) first, and once more with its score; its tokens stay. An
//! attempt whose process exited is [`Abandoned`](Status::Abandoned): it is never trained on, and the next try
//! is another attempt. An attempt can also be recorded completely at once.
//!
//! # Example
//! ```
//! use levade_store::{EvalKey, Memory, Recorded, Store};
//! use levade_tree::RunId;
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let store: std::sync::Arc<dyn Store> = std::sync::Arc::new(Memory::new(RunId("run".into())));
//! let key = EvalKey { phase: 0, step: 0 };
//! assert_eq!(store.record_eval(key, &"first".into()).await?, Recorded::Now);
//! assert_eq!(store.record_eval(key, &"first".into()).await?, Recorded::Before);
//! assert!(store.record_eval(key, &"other".into()).await.is_err());
//! # Ok::<_, levade_store::StoreError>(()) }).unwrap();
//! ```
//!
//! # Guarantees of every backend
//! One suite of tests runs over all backends.
//! - **Atomic.** A call writes everything or nothing.
//! - **Idempotent.** Recording the same again is a no-op; recording something else under the same key is
//!   [`StoreError::Conflict`]. Nothing is overwritten except the end of an unscored attempt.
//! - **Exact.** Token ids, log-probabilities and versions keep every bit; so do rewards and scores, except
//!   that −0 reads back as 0.
//! - **Async.** A call waits as a future, with a deadline that names what it waits for.
//! - **Errors have codes** ([`Code`]), and tell whether to try again.
//!
//! # Guarantees of `Sqlite`
//! - **A written record survives** the end of the process and of the machine: `synchronous = FULL` flushes
//!   the log at every commit. The weaker `NORMAL` could leave, after a power cut, a checkpoint without its
//!   attempts. Concurrent writes share a commit.
//! - **A prompt is stored once**, however many attempts start with it; a fork within a segment stores new
//!   tokens only.
//! - **Several handles**, in one process or many, can read and write at once.
//! - **Reading needs no permission to write** and no writable directory ([`Sqlite::open_existing`]).
//! - **A record of an earlier build is migrated** when it is opened to be continued; a record that is only
//!   read is copied and the copy migrated.
//!
//! Out of scope: the meaning of tasks and evaluations, which are JSON here.

mod checks;
#[cfg(any(test, feature = "testing"))]
pub mod contract;
mod error;
mod location;
mod memory;
mod record;
mod sqlite;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use error::{Code, StoreError};
pub use location::{Access, Location};
pub use memory::Memory;
pub use record::{
    Attempt, AttemptSummary, Begun, ChargedKl, Earned, End, EvalKey, FailedAttempt, HighEntropy, PerToken,
    PlannedPath, PolicyPlan, Recorded, Status, StepPlan, Tries, Update,
};
pub use sqlite::{SCHEMA_VERSION, Sqlite};
pub use store::Store;

pub use levade_tree::Earner;
