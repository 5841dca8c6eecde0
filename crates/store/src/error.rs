//! Errors of a store. Callers handle an error by its code, and a service can map the code to a
//! response.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Status;

/// The underlying error of a [`StoreError`], whose type depends on the backend.
pub type Cause = Box<dyn Error + Send + Sync>;

/// The category of a store error. A server can map it to an HTTP status, and the client maps the
/// status back to a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The requested key has no record, or the store does not exist.
    NotFound,
    /// A different value is recorded under the key.
    Conflict,
    /// The value to write cannot be stored, for example because a number is not finite.
    Invalid,
    /// The caller has no permission to read or write.
    Forbidden,
    /// The backend does not respond. A later retry can succeed.
    Unavailable,
    /// The disk has no free space.
    Full,
    /// The stored bytes are corrupt.
    #[serde(rename = "damaged")]
    Corrupt,
    /// The file belongs to another program or another run.
    Foreign,
    /// The file has a schema version that this build cannot read.
    Version,
    /// There is a bug in Levade or in the backend.
    Internal,
}

/// An error of the store. Its message names the location of the store, and the key if there is one.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The store cannot be opened.
    #[error("cannot open the store {location}: {source}")]
    Open {
        /// Location of the store.
        location: String,
        /// Category of the error.
        code: Code,
        /// Cause of the error.
        source: Cause,
    },
    /// The file has no tables: the process that created it exited too early.
    #[error(
        "{location} contains no store: the process that created the file exited before it wrote \
         one"
    )]
    Empty {
        /// Location of the store.
        location: String,
    },
    /// The file can be read only through a copy, because it cannot be written, and copying it
    /// failed.
    #[error(
        "the store {location} is not writable here, and a copy for reading cannot be made: \
         {source}; copy the directory of the run to a writable file system, or set TMPDIR to a \
         directory with free space"
    )]
    Unwritable {
        /// Location of the store.
        location: String,
        /// Cause of the error.
        source: std::io::Error,
    },
    /// The store was in the memory of another process, and its data is lost.
    #[error(
        "the run in {} kept its store in memory (`run.store` is \"memory:\"), and the store was \
         lost when the process ended: the run cannot be resumed, and its store cannot be read. \
         Start a new run in another directory; without `run.store`, the store is kept in a file",
        run_dir.display()
    )]
    NotDurable {
        /// Directory of the run.
        run_dir: PathBuf,
    },
    /// The store was opened only for reading.
    #[error("cannot record {key} in the store {location}, which was opened read-only")]
    ReadOnly {
        /// Location of the store.
        location: String,
        /// Key of the rejected write.
        key: String,
    },
    /// The file is an SQLite database of another program.
    #[error("{location} is not a Levade store (application id {found:#x}); name another file")]
    Foreign {
        /// Location of the store.
        location: String,
        /// SQLite application id of the file.
        found: i32,
    },
    /// The file has a schema version of another Levade build.
    #[error(
        "the store {location} has schema version {found}, but this build reads version \
         {expected}; use the build that wrote it, or start a run in a new directory"
    )]
    Version {
        /// Location of the store.
        location: String,
        /// Schema version of the file.
        found: i32,
        /// Current schema version of this build.
        expected: i32,
    },
    /// The file contains the data of another run.
    #[error(
        "{location} is the store of run {found}, not of run {expected}; use the directory of run \
         {found}, or name another store"
    )]
    OtherRun {
        /// Location of the store.
        location: String,
        /// Id of the run in the file.
        found: String,
        /// Id of the run for which the file was opened, which is not the run in the file.
        expected: String,
    },
    /// The store already holds records of the run that is started.
    #[error(
        "{location} already holds records of a run; resume it with --resume in its directory, or \
         name another store"
    )]
    NotEmpty {
        /// Location of the store.
        location: String,
    },
    /// Another trainer has the lease of the run.
    #[error(
        "another trainer works on the run in {location}: {holder}; stop that trainer first, or \
         wait {seconds} s until its lease of the run ends if it no longer runs"
    )]
    Leased {
        /// Location of the store.
        location: String,
        /// Process and directory of the other trainer.
        holder: String,
        /// Time until the lease of the other trainer ends if the trainer does not renew it, in
        /// seconds.
        seconds: u64,
    },
    /// Another trainer has resumed the run since this store was opened.
    #[error(
        "cannot record {key} in the store {location}: another trainer has resumed the run: \
         {holder}; only one trainer can continue the run"
    )]
    Fenced {
        /// Location of the store.
        location: String,
        /// Key of the rejected write.
        key: String,
        /// Process and directory of the other trainer.
        holder: String,
    },
    /// Reading or writing failed.
    #[error("cannot {action} {key} in the store {location}: {source}{}", suggest_remedy(*code))]
    Failed {
        /// Location of the store.
        location: String,
        /// Verb for the action that failed: `read`, `record`, `migrate`, `remove`, `list` or
        /// `request`.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
        /// Category of the error.
        code: Code,
        /// Cause of the error.
        source: Cause,
    },
    /// The backend did not respond before the deadline. A write may still be committed, and can be
    /// retried.
    #[error("timed out after {waited:?} while waiting to {action} {key} in the store {location}")]
    Deadline {
        /// Location of the store.
        location: String,
        /// Verb for the action that timed out: `read`, `record` or `open`.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
        /// Time for which the caller waited.
        waited: Duration,
    },
    /// The thread that accesses the file of the store has exited.
    #[error(
        "cannot {action} {key} in the store {location}: the thread of the store has exited; start \
         the program again: everything recorded so far is intact"
    )]
    Stopped {
        /// Location of the store.
        location: String,
        /// Verb for the action that failed: `read`, `record` or `open`.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
    },
    /// The store has no record under the key.
    #[error("{key} is not recorded in the store {location}; start it first")]
    Unknown {
        /// Location of the store.
        location: String,
        /// Key of the missing record, for example the id of an attempt.
        key: String,
    },
    /// A different value is recorded under the key.
    #[error(
        "{key} is already recorded in the store {location} with another {field}; a stored record \
         is never overwritten"
    )]
    Conflict {
        /// Location of the store.
        location: String,
        /// Key of the existing record, for example the id of an attempt.
        key: String,
        /// Name of the first field in which the stored and the new value differ.
        field: &'static str,
    },
    /// The attempt has ended, so no segment can be appended and its end cannot be changed. An
    /// abandoned attempt cannot be started again.
    #[error(
        "{key} in the store {location} is {} and accepts no more writes; start another try",
        status.name()
    )]
    Ended {
        /// Location of the store.
        location: String,
        /// Key of the rejected write: the id of the attempt.
        key: String,
        /// Status with which the attempt has ended.
        status: Status,
    },
    /// The stored bytes are damaged: no write can have produced them.
    #[error("{key} in the store {location} is damaged: {what}")]
    Corrupt {
        /// Location of the store.
        location: String,
        /// Key of the damaged record, for example the id of an attempt.
        key: String,
        /// Description of the damage.
        what: String,
    },
    /// The value cannot be stored, for example because a number is not finite.
    #[error("{key} cannot be recorded in the store {location}: {what}")]
    Unstorable {
        /// Location of the store.
        location: String,
        /// Key of the rejected write, for example the id of an attempt.
        key: String,
        /// Reason why the value cannot be stored.
        what: String,
    },
}

/// Returns the remedy that is appended to the message of a backend error. Empty if the cause
/// already names the remedy.
fn suggest_remedy(code: Code) -> &'static str {
    match code {
        Code::Full => "; free space on its disk: everything recorded so far is intact",
        _ => "",
    }
}

impl StoreError {
    /// Returns the category of the error.
    pub fn code(&self) -> Code {
        match self {
            StoreError::Open { code, .. } | StoreError::Failed { code, .. } => *code,
            StoreError::Unwritable { .. }
            | StoreError::ReadOnly { .. }
            | StoreError::Leased { .. }
            | StoreError::Fenced { .. } => Code::Forbidden,
            StoreError::Foreign { .. } | StoreError::OtherRun { .. } => Code::Foreign,
            StoreError::Version { .. } => Code::Version,
            StoreError::Deadline { .. } => Code::Unavailable,
            StoreError::Stopped { .. } => Code::Internal,
            StoreError::Empty { .. }
            | StoreError::NotDurable { .. }
            | StoreError::Unknown { .. } => Code::NotFound,
            StoreError::Conflict { .. }
            | StoreError::Ended { .. }
            | StoreError::NotEmpty { .. } => Code::Conflict,
            StoreError::Corrupt { .. } => Code::Corrupt,
            StoreError::Unstorable { .. } => Code::Invalid,
        }
    }

    /// Returns whether a retry can succeed. A retry is safe, because writes are idempotent.
    pub fn is_retryable(&self) -> bool {
        self.code() == Code::Unavailable
    }

    /// Returns whether the user can fix the cause, such as a wrong file name or a full disk.
    pub fn is_user_error(&self) -> bool {
        let unusable = matches!(
            self,
            StoreError::Open { .. }
                | StoreError::Empty { .. }
                | StoreError::NotDurable { .. }
                | StoreError::Unwritable { .. }
                | StoreError::Foreign { .. }
                | StoreError::OtherRun { .. }
                | StoreError::Version { .. }
                | StoreError::NotEmpty { .. }
                | StoreError::Leased { .. }
                | StoreError::Fenced { .. }
        );
        unusable || self.code() == Code::Full
    }
}

/// An error inside a storage backend. [`into_error`](Self::into_error) adds the location and the
/// key.
#[derive(Debug)]
pub enum Failure {
    /// The backend failed, or rejected the call for a backend-specific reason.
    Backend(Code, Cause),
    /// The store has no record under the key.
    Unknown,
    /// A different value is recorded under the key. Contains the key and the name of the first
    /// field that differs.
    Conflict(String, &'static str),
    /// The attempt has ended with this status.
    Ended(Status),
    /// The stored bytes are damaged. The text describes the damage.
    Corrupt(String),
    /// The value cannot be stored. The text gives the reason.
    Unstorable(String),
}

impl Failure {
    /// Converts a failure of a backend to a [`StoreError`] that names the location of the store,
    /// the action and the key.
    pub fn into_error(self, location: &str, action: &'static str, key: String) -> StoreError {
        let location = location.to_owned();
        match self {
            Failure::Backend(code, source) => {
                StoreError::Failed { location, action, key, code, source }
            }
            Failure::Unknown => StoreError::Unknown { location, key },
            Failure::Conflict(key, field) => StoreError::Conflict { location, key, field },
            Failure::Ended(status) => StoreError::Ended { location, key, status },
            Failure::Corrupt(what) => StoreError::Corrupt { location, key, what },
            Failure::Unstorable(what) => StoreError::Unstorable { location, key, what },
        }
    }
}
