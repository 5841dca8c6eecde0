//! The error type of retrieval. Messages name the file, row or value, and suggest what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::PolicyError;

/// Error of building, opening or searching an index, or of calling a retrieval server.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A file operation failed.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// Operation that failed, as a verb such as `read` or `write`.
        action: &'static str,
        /// File or directory on which the operation failed.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A row of a corpus is invalid.
    #[error("{}, line {line}: {why}", path.display())]
    Row {
        /// Path of the corpus file.
        path: PathBuf,
        /// Line number of the row, from 1.
        line: u64,
        /// Reason why the row is invalid, and what to do.
        why: String,
    },
    /// The corpus file contains no passages.
    #[error(
        "the corpus {} contains no passage; it must have one JSON object per line, with id, title, \
         text (or id, contents)",
        .0.display()
    )]
    Empty(PathBuf),
    /// The directory for a new index already exists and is not empty.
    #[error("{} already exists; remove it, or select another directory", .0.display())]
    Exists(PathBuf),
    /// The directory for a new index is empty, but cannot be replaced.
    #[error(
        "the empty directory {} cannot be replaced by an index ({cause}); it may be a mount: \
         select a directory within it that does not exist yet",
        path.display()
    )]
    Stays {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the replacement.
        cause: io::Error,
    },
    /// Another process is building an index in the same directory.
    #[error(
        "another process is building {}; wait until it has finished, or select another directory",
        .0.display()
    )]
    Locked(PathBuf),
    /// A directory is not an index.
    #[error("{}: {why}; build an index with `levade search index CORPUS --out \
             FOLDER`", path.display())]
    NotAnIndex {
        /// Path of the directory.
        path: PathBuf,
        /// Reason why the directory is not an index.
        why: String,
    },
    /// An index has a schema that this build of Levade does not read.
    #[error(
        "{} is an index of schema {found}, but this version of Levade reads schema \
         {wanted}\nbuild it again from its corpus: levade search index CORPUS --out FOLDER",
        path.display()
    )]
    Schema {
        /// Path of the directory.
        path: PathBuf,
        /// Schema version of the index.
        found: u64,
        /// Newest schema version that this build reads.
        wanted: u64,
    },
    /// A file of an index contradicts the manifest or its own format.
    #[error("{} is damaged or truncated: {why}\n\
             build the index again from its corpus", path.display())]
    Damaged {
        /// Path of the damaged file or directory.
        path: PathBuf,
        /// Description of the damage: the affected part, and what was found there.
        why: String,
    },
    /// A dense or hybrid search is impossible, because the index has no vectors or the model that
    /// embedded them is missing.
    #[error("{0}")]
    NoVectors(String),
    /// A request is invalid, and fails again unless it is changed.
    #[error("{0}")]
    Query(String),
    /// The embedding model failed to embed texts.
    #[error("the texts could not be embedded: {0}")]
    Embedding(#[from] PolicyError),
    /// No search permit became available within this time, because too many searches are waiting.
    #[error(
        "no search permit became available within {0:?}; try again later, or send fewer queries at \
         once"
    )]
    Busy(Duration),
    /// A retrieval server could not be reached, or its response cannot be used.
    #[error("{url}: {why}")]
    Server {
        /// URL of the server.
        url: String,
        /// What is wrong with the request or its response.
        why: String,
        /// Whether a repetition of the same request can succeed later.
        may_pass: bool,
    },
    /// An internal error occurred, such as a panic in a search thread.
    #[error("the search failed: {0}")]
    Internal(String),
}

impl SearchError {
    /// Returns a function for `map_err` that wraps an I/O error. `action` and `path` describe the
    /// failed operation.
    pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| SearchError::Io { action, path, cause }
    }

    pub(crate) fn damaged_error(path: &Path, why: impl Into<String>) -> Self {
        SearchError::Damaged { path: path.to_path_buf(), why: why.into() }
    }

    /// Returns whether the user can fix the cause, such as a missing file, an invalid corpus or a
    /// full disk.
    pub fn is_user_error(&self) -> bool {
        match self {
            SearchError::Io { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::ReadOnlyFilesystem
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::IsADirectory
                    | io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
            ),
            SearchError::Embedding(error) => matches!(error, PolicyError::Invalid(_)),
            SearchError::Busy(_) | SearchError::Server { .. } | SearchError::Internal(_) => false,
            _ => true,
        }
    }
}
