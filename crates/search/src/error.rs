//! Errors of retrieval. Each names the file, row or value, and the way out.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::PolicyError;

/// Errors of indices and searches.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// The operating system refused.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// Action that was tried: `read`, `write`, ….
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        cause: io::Error,
    },
    /// A row of a corpus cannot be used.
    #[error("{}, line {line}: {why}", path.display())]
    Row {
        /// The corpus.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Fault, and the way out.
        why: String,
    },
    /// A corpus without passages.
    #[error(
        "{} holds no passage; give a file with a JSON object a line: id, title, text (or id, contents)",
        .0.display()
    )]
    Empty(PathBuf),
    /// The folder of a new index holds something already.
    #[error("{} exists already; remove it, or give the index another folder", .0.display())]
    Exists(PathBuf),
    /// The empty folder in the place of a new index cannot be replaced.
    #[error(
        "the empty folder {} cannot give way to an index ({cause}); it may be a mount: give a folder within it \
         that does not exist yet",
        path.display()
    )]
    Stays {
        /// The folder.
        path: PathBuf,
        /// Why not.
        cause: io::Error,
    },
    /// Another process builds an index in the same place.
    #[error("another process is building {}; wait for its end, or give another folder", .0.display())]
    Locked(PathBuf),
    /// A folder is no index.
    #[error("{} {why}; build an index with `levade search index CORPUS --out FOLDER`", path.display())]
    NotAnIndex {
        /// The folder.
        path: PathBuf,
        /// Why, as the rest of a sentence that begins with the path.
        why: String,
    },
    /// An index of another version.
    #[error(
        "{} is an index of schema {found}, and this version of Levade reads schema {wanted}\n\
         build it again from its corpus: levade search index CORPUS --out FOLDER",
        path.display()
    )]
    Schema {
        /// The folder.
        path: PathBuf,
        /// Schema of the index.
        found: u64,
        /// Schema that is read.
        wanted: u64,
    },
    /// An index whose files contradict its manifest or their formats.
    #[error("{} is damaged or cut short: {why}\nbuild the index again from its corpus", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part, and what was found there.
        why: String,
    },
    /// A dense search of an index without vectors, or without a model that embeds queries.
    #[error("{0}")]
    NoVectors(String),
    /// A request that cannot be answered as it stands.
    #[error("{0}")]
    Query(String),
    /// A model could not embed texts.
    #[error("the texts could not be embedded: {0}")]
    Embed(#[from] PolicyError),
    /// Too many searches wait.
    #[error("waited {0:?} for a turn to search; ask again later, or ask less at once")]
    Busy(Duration),
    /// A retrieval server that could not be asked, or whose answer cannot be used.
    #[error("{url}: {why}")]
    Server {
        /// The server.
        url: String,
        /// Fault of the request or of its answer.
        why: String,
        /// Whether the same request may pass later.
        may_pass: bool,
    },
    /// A fault inside.
    #[error("the search failed: {0}")]
    Internal(String),
}

impl SearchError {
    /// For `map_err` on an operation on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| SearchError::Io { action, path, cause }
    }

    pub(crate) fn damaged(path: &Path, why: impl Into<String>) -> Self {
        SearchError::Damaged { path: path.to_path_buf(), why: why.into() }
    }

    /// Whether the user can put it right.
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
            SearchError::Embed(error) => matches!(error, PolicyError::Invalid(_)),
            SearchError::Busy(_) | SearchError::Server { .. } | SearchError::Internal(_) => false,
            _ => true,
        }
    }
}
