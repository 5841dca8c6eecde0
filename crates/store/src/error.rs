//! What can go wrong with the record of a run.

use std::path::PathBuf;

/// Errors of the store. Each names the file, and the key where there is one.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be opened.
    #[error("cannot open the record {file}: {source}")]
    Open {
        /// The file.
        file: PathBuf,
        /// Why.
        source: Box<rusqlite::Error>,
    },
    /// The file cannot be written, nor read without that.
    #[error(
        "the record {file} cannot be written here, and a copy to read cannot be made: {source}; copy the folder of the run to \
         where it can be written, or set TMPDIR to a place with room"
    )]
    Unwritable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is an SQLite database of another program.
    #[error("{file} is not a Dressage record (application id {found:#x}); name another file")]
    Foreign {
        /// The file.
        file: PathBuf,
        /// The application id it carries.
        found: i32,
    },
    /// The file was written by another version of Dressage.
    #[error(
        "the record {file} has schema version {found}, but this build reads version {expected}; use the build that \
         wrote it, or start a new run folder"
    )]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: i32,
        /// The version of this build.
        expected: i32,
    },
    /// The file is the record of another run.
    #[error(
        "{file} is the record of run {found}, not of {expected}; name the folder of that run, or another one"
    )]
    OtherRun {
        /// The file.
        file: PathBuf,
        /// The run whose record it is.
        found: String,
        /// The run that it was opened for.
        expected: String,
    },
    /// Reading or writing failed.
    #[error("cannot {action} {key} in {file}: {source}")]
    Sql {
        /// The file.
        file: PathBuf,
        /// What was being done: `read` or `record`.
        action: &'static str,
        /// What was being read or written.
        key: String,
        /// Why.
        source: Box<rusqlite::Error>,
    },
    /// Something else is recorded under the key.
    #[error("{key} is already recorded in {file} with another {field}; a record is never overwritten")]
    Conflict {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What differs.
        field: &'static str,
    },
    /// What is stored cannot be what was written.
    #[error("{key} in {file} is damaged: {what}")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        what: String,
    },
    /// A value that cannot be stored.
    #[error("{key} cannot be recorded in {file}: {what}")]
    Unstorable {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with it.
        what: String,
    },
}

impl StoreError {
    /// Whether there was no room left on the disk. What was recorded before is whole.
    pub fn is_disk_full(&self) -> bool {
        let (StoreError::Sql { source, .. } | StoreError::Open { source, .. }) = self else { return false };
        source.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
    }
}
