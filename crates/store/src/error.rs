//! Errors of a record, each with a code by which a caller decides and a service answers.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Status;

/// The cause of an error, whatever the backend.
type Cause = Box<dyn Error + Send + Sync>;

/// The kind of an error. A service maps it to a status of HTTP, a client back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// Nothing is recorded under the name.
    NotFound,
    /// Something else is recorded under the name.
    Conflict,
    /// The value cannot be recorded.
    Invalid,
    /// Reading or writing is not allowed here.
    Forbidden,
    /// The backend does not answer now; later it may.
    Unavailable,
    /// There is no room.
    Full,
    /// The stored bytes cannot be those that were written.
    Damaged,
    /// The record belongs to another program or another run.
    Foreign,
    /// The record has a schema version that this build cannot read.
    Version,
    /// A bug, in this program or in the backend.
    Internal,
}

/// Errors of the store. Each names the place of the record, and the key where there is one.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The record cannot be opened.
    #[error("cannot open the record {place}: {source}")]
    Open {
        /// The place of the record.
        place: String,
        /// The kind of failure.
        code: Code,
        /// Why.
        source: Cause,
    },
    /// The file has no tables yet.
    #[error("{place} holds no record: the process that created it was gone before it had one")]
    Empty {
        /// The place of the record.
        place: String,
    },
    /// The file cannot be written, nor read without that.
    #[error(
        "the record {place} cannot be written here, and a copy to read cannot be made: {source}; copy the folder of the run to \
         where it can be written, or set TMPDIR to a place with room"
    )]
    Unwritable {
        /// The place of the record.
        place: String,
        /// Why.
        source: std::io::Error,
    },
    /// The record is in memory, and not of this process.
    #[error(
        "the run in {} keeps its record in memory (`run.store` is \"memory:\"), where it ends with its process: the run cannot \
         be resumed, nor its record be read. Start a new run in another folder; with `run.store` left out its record is kept",
        run_dir.display()
    )]
    NotKept {
        /// The run directory.
        run_dir: PathBuf,
    },
    /// The record was opened for reading.
    #[error("cannot record {key} in {place}, which was opened for reading only")]
    ReadOnly {
        /// The place of the record.
        place: String,
        /// Key that was to be written.
        key: String,
    },
    /// The file is an SQLite database of another program.
    #[error("{place} is not a Levade record (application id {found:#x}); name another file")]
    Foreign {
        /// The place of the record.
        place: String,
        /// The application id it carries.
        found: i32,
    },
    /// The file was written by another version of Levade.
    #[error(
        "the record {place} has schema version {found}, but this build reads version {expected}; use the build that \
         wrote it, or start a new run folder"
    )]
    Version {
        /// The place of the record.
        place: String,
        /// Version of the file.
        found: i32,
        /// The version of this build.
        expected: i32,
    },
    /// The file is the record of another run.
    #[error(
        "{place} is the record of run {found}, not of {expected}; name the folder of that run, or another one"
    )]
    OtherRun {
        /// The place of the record.
        place: String,
        /// The run whose record it is.
        found: String,
        /// The run that it was opened for.
        expected: String,
    },
    /// Reading or writing failed.
    #[error("cannot {action} {key} in {place}: {source}")]
    Failed {
        /// The place of the record.
        place: String,
        /// Action at the time: `read` or `record`.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
        /// The kind of failure.
        code: Code,
        /// Why.
        source: Cause,
    },
    /// The backend did not answer in time. A write may still be done, and can be asked for again.
    #[error("waited {waited:?} to {action} {key} in {place}")]
    Deadline {
        /// The place of the record.
        place: String,
        /// Action at the time: `read`, `record` or `open`.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
        /// For how long.
        waited: Duration,
    },
    /// The thread of the record is gone.
    #[error(
        "cannot {action} {key} in {place}: the thread of the record has died; start the program again, what was \
         recorded is whole"
    )]
    Stopped {
        /// The place of the record.
        place: String,
        /// Action at the time.
        action: &'static str,
        /// Key that was being read or written.
        key: String,
    },
    /// Nothing is recorded under the key.
    #[error("{key} is not in {place}; begin it first")]
    Unknown {
        /// The place of the record.
        place: String,
        /// The key.
        key: String,
    },
    /// Something else is recorded under the key.
    #[error("{key} is already recorded in {place} with another {field}; a record is never overwritten")]
    Conflict {
        /// The place of the record.
        place: String,
        /// The key.
        key: String,
        /// The field that differs.
        field: &'static str,
    },
    /// The attempt takes no more segments and has no other end.
    #[error("{key} in {place} is {} and takes nothing more; make another try", status.name())]
    Over {
        /// The place of the record.
        place: String,
        /// The key.
        key: String,
        /// How it ended.
        status: Status,
    },
    /// The stored bytes cannot be those that were written.
    #[error("{key} in {place} is damaged: {what}")]
    Damaged {
        /// The place of the record.
        place: String,
        /// The key.
        key: String,
        /// Fault in it.
        what: String,
    },
    /// A value that cannot be stored.
    #[error("{key} cannot be recorded in {place}: {what}")]
    Unstorable {
        /// The place of the record.
        place: String,
        /// The key.
        key: String,
        /// Fault in it.
        what: String,
    },
}

impl StoreError {
    /// The kind of the error.
    pub fn code(&self) -> Code {
        match self {
            StoreError::Open { code, .. } | StoreError::Failed { code, .. } => *code,
            StoreError::Unwritable { .. } | StoreError::ReadOnly { .. } => Code::Forbidden,
            StoreError::Foreign { .. } | StoreError::OtherRun { .. } => Code::Foreign,
            StoreError::Version { .. } => Code::Version,
            StoreError::Deadline { .. } => Code::Unavailable,
            StoreError::Stopped { .. } => Code::Internal,
            StoreError::Empty { .. } | StoreError::NotKept { .. } | StoreError::Unknown { .. } => {
                Code::NotFound
            }
            StoreError::Conflict { .. } | StoreError::Over { .. } => Code::Conflict,
            StoreError::Damaged { .. } => Code::Damaged,
            StoreError::Unstorable { .. } => Code::Invalid,
        }
    }

    /// Whether the same call may succeed later. Writes are idempotent, so that it can be made again.
    pub fn try_again(&self) -> bool {
        self.code() == Code::Unavailable
    }

    /// Whether it is for the user to put right: the record that they name, or their disk.
    pub fn is_user_error(&self) -> bool {
        let unusable = matches!(
            self,
            StoreError::Open { .. }
                | StoreError::Empty { .. }
                | StoreError::NotKept { .. }
                | StoreError::Unwritable { .. }
                | StoreError::Foreign { .. }
                | StoreError::OtherRun { .. }
                | StoreError::Version { .. }
        );
        unusable || self.code() == Code::Full
    }
}

/// Things that go wrong inside a backend, before place and key are added.
#[derive(Debug)]
pub(crate) enum Failure {
    Backend(Code, Cause),
    Unknown,
    Conflict(String, &'static str),
    Over(Status),
    Damaged(String),
    Unstorable(String),
}

impl Failure {
    /// The error for whoever asked for `key`.
    pub fn at(self, place: &str, action: &'static str, key: String) -> StoreError {
        let place = place.to_owned();
        match self {
            Failure::Backend(code, source) => StoreError::Failed { place, action, key, code, source },
            Failure::Unknown => StoreError::Unknown { place, key },
            Failure::Conflict(key, field) => StoreError::Conflict { place, key, field },
            Failure::Over(status) => StoreError::Over { place, key, status },
            Failure::Damaged(what) => StoreError::Damaged { place, key, what },
            Failure::Unstorable(what) => StoreError::Unstorable { place, key, what },
        }
    }
}
