//! The durable record of a run: attempts with their segments, the ledger of training steps, evaluations.
//!
//! One SQLite file in WAL mode. A run can be audited back from any version of the weights to the tokens that made it, and
//! replayed: a [`StepPlan`] names, in order, the attempts that a step trains on and how strongly; the attempts hold every
//! token, its log-probability and the version of the weights that drew it.
//!
//! Guarantees:
//! - *Nothing is half written.* An attempt and its segments are one transaction, as is a step.
//! - *Nothing is lost once written.* `synchronous = FULL`: the log is flushed at every commit, so a record survives not
//!   only the end of the process but of the machine. A commit costs milliseconds, the attempt it records seconds; the
//!   weaker `NORMAL` would save nothing that shows, and after a power cut could leave a checkpoint whose attempts are gone.
//! - *Writes are idempotent.* Recording again what is recorded is a no-op; recording something else under the same key is
//!   [`StoreError::Conflict`]. Nothing is ever overwritten, save that an attempt that waited for its
//!   score gets one ([`Status::Unscored`]); its tokens stay.
//! - *Token ids, log-probabilities and versions are kept to the bit.* Rewards and scores too, save that −0 reads back as 0.
//! - *A prompt is kept once*, however many attempts begin with it.
//! - *Several handles*, in one process or many, may read and write at once.
//! - *Reading needs no permission to write*, nor a place that can be written ([`Store::open_existing`]).
//!
//! - *A record of an earlier build is brought up to date* when it is opened to be gone on with; of one that is only read, a
//!   copy is.
//!
//! Not here: what a task or an evaluation means. They are JSON to this room.

mod attempts;
mod error;
mod evals;
mod ledger;
mod migrate;
mod record;
mod schema;
mod unwritable;

pub use error::StoreError;
pub use record::{
    Attempt, AttemptSummary, ChargedKl, Earned, EvalKey, HighEntropy, PerToken, PlannedPath, PolicyPlan,
    Recorded, Status, StepPlan, Update,
};
pub use schema::{SCHEMA_VERSION, Store};

pub use dressage_tree::Earner;
