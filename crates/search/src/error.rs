//! The error type of retrieval. Messages name the file, row or value, and suggest what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::PolicyError;

/// An error of building, opening, searching or calling an index.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A file operation failed.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// Operation that failed, as a verb: `read`, `write`, ….
        action: &'static str,
        /// File or directory of the operation.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A row of a corpus is invalid.
    #[error("{}, line {line}: {why}", path.display())]
    Row {
        /// The corpus file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// Reason, and what to do about it.
        why: String,
    },
    /// The corpus has no passages.
    #[error(
        "{} contains no passage; it must have one JSON object per line, with id, title, text (or \
         id, contents)",
        .0.display()
    )]
    Empty(PathBuf),
    /// The directory of a new index already exists and is not empty.
    #[error("{} already exists; remove it, or select another directory", .0.display())]
    Exists(PathBuf),
    /// The directory of a new index exists and is empty, but cannot be replaced.
    #[error(
        "the empty directory {} cannot be replaced by an index ({cause}); it may be a mount: \
         select a directory within it that does not exist yet",
        path.display()
    )]
    Stays {
        /// The directory.
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
    #[error("{} {why}; build an index with `levade search index CORPUS --out \
             FOLDER`", path.display())]
    NotAnIndex {
        /// The directory.
        path: PathBuf,
        /// Reason, as the rest of a sentence that starts with the path.
        why: String,
    },
    /// An index has a schema that this version of Levade does not read.
    #[error(
        "{} is an index of schema {found}, but this version of Levade reads schema \
         {wanted}\nbuild it again from its corpus: levade search index CORPUS --out FOLDER",
        path.display()
    )]
    Schema {
        /// The directory.
        path: PathBuf,
        /// Schema of the index.
        found: u64,
        /// Newest schema that this version reads.
        wanted: u64,
    },
    /// A file of an index contradicts the manifest or its own format.
    #[error("{} is damaged or cut short: {why}\n\
             build the index again from its corpus", path.display())]
    Damaged {
        /// The damaged file or directory.
        path: PathBuf,
        /// The damage: the part and what was found there.
        why: String,
    },
    /// A dense or hybrid search lacks the vectors of the passages or the model that embedded them.
    #[error("{0}")]
    NoVectors(String),
    /// A request is invalid: it will fail again unless it is changed.
    #[error("{0}")]
    Query(String),
    /// The model failed to embed texts.
    #[error("the texts could not be embedded: {0}")]
    Embedding(#[from] PolicyError),
    /// No permit to search became available in time, because too many searches are waiting.
    #[error("waited {0:?} for a turn to search; ask again later, or ask less at once")]
    Busy(Duration),
    /// A retrieval server could not be reached, or its response cannot be used.
    #[error("{url}: {why}")]
    Server {
        /// URL of the server.
        url: String,
        /// What is wrong with the request or its response.
        why: String,
        /// Whether the same request may succeed later.
        may_pass: bool,
    },
    /// An internal error, such as a panic in a search thread.
    #[error("the search failed: {0}")]
    Internal(String),
}

impl SearchError {
    /// Returns a function for `map_err` that wraps the error of an operation on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
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
