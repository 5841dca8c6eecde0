//! The durable record of a run: attempts with their segments, the ledger of training steps, evaluations.
//!
//! One trait, [`Store`], with two backends: [`Sqlite`], one file, and [`Memory`], nothing. A [`Location`]
//! names a backend as recipes do, and opens it. A run can be
//! audited back from any version of the weights to the tokens that made it, and replayed: a [`StepPlan`]
//! names, in order, the attempts that a step trains on and how strongly; the attempts hold every token, its
//! log-probability and the version of the weights that drew it.
//!
//! An attempt is begun, its segments are appended as they come, and it ends once. One that has to wait for
//! its score ends as [`Unscored`](Status::Unscored) first, and once more with its score; its tokens stay.
//! One whose process is gone is [`Abandoned`](Status::Abandoned): it is never trained on, and the next try
//! is another attempt. Where nothing is to be seen before the end, a whole attempt is recorded at once.
//!
//! Guarantees of every backend (one suite of tests runs over all of them):
//! - *Nothing is half written.* A call writes everything or nothing.
//! - *Writes are idempotent.* Recording again what is recorded is a no-op; recording something else under
//!   the same key is [`StoreError::Conflict`]. Nothing is ever overwritten but the end of an attempt that
//!   was unscored.
//! - *Token ids, log-probabilities and versions are kept to the bit.* Rewards and scores too, save that −0
//!   reads back as 0.
//! - *No caller is blocked*: a call waits as a future, with a deadline that says what for.
//! - *Errors have codes* ([`Code`]), and say whether to try again.
//!
//! Guarantees of [`Sqlite`]:
//! - *Nothing is lost once written.* `synchronous = FULL`: the log is flushed at every commit, so a record
//!   survives not only the end of the process but of the machine. The weaker `NORMAL` could leave, after a
//!   power cut, a checkpoint whose attempts are gone. Writes that come at once share a commit.
//! - *A prompt is kept once*, however many attempts begin with it; a fork within a segment keeps only what
//!   is new.
//! - *Several handles*, in one process or many, may read and write at once.
//! - *Reading needs no permission to write*, nor a place that can be written ([`Sqlite::open_existing`]).
//! - *A record of an earlier build is brought up to date* when it is opened to be gone on with; of one that
//!   is only read, a copy is.
//!
//! Not here: what a task or an evaluation means. They are JSON to this room.
//!
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
