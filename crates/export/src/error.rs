//! Errors of exports.

use std::io;
use std::path::{Path, PathBuf};

use levade_store::StoreError;

/// Error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A file or standard output cannot be read or written.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The target of the export exists already.
    #[error("{} exists already; name another file with --out, or remove it", .0.display())]
    Exists(PathBuf),
    /// An interrupted export to the same target used other options.
    #[error(
        "{} is the unfinished part of an export with other options; repeat that export to finish \
         it, or remove the file", .0.display()
    )]
    OtherOptions(PathBuf),
    /// Another process is exporting to the same target.
    #[error("another process is exporting to {}; wait for it, or name another file", .0.display())]
    Busy(PathBuf),
    /// The rows of this format have no common columns, which Parquet needs.
    #[error("{0} cannot be written as Parquet; write .jsonl")]
    NoColumns(&'static str),
    /// The target does not support the format of the rows.
    #[error("{} must be {expected}", path.display())]
    Target {
        /// Path of the target.
        path: PathBuf,
        /// Description of the targets that the format supports.
        expected: &'static str,
    },
    /// A value in a row does not have the type of its column.
    #[error("column {column} expects {expected}, but a row has {found}; please report this defect")]
    Row {
        /// Name of the column that contains the value.
        column: String,
        /// Type that the column expects.
        expected: &'static str,
        /// Value in the row, shortened.
        found: String,
    },
    /// A Parquet file cannot be written.
    #[error("cannot write {} as Parquet: {source}", path.display())]
    Parquet {
        /// Path of the Parquet file.
        path: PathBuf,
        /// Error of the writer.
        source: parquet::errors::ParquetError,
    },
    /// The store of the run cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ExportError {
    /// Returns whether the user can correct the cause of the error.
    pub fn is_user_error(&self) -> bool {
        match self {
            ExportError::Exists(_)
            | ExportError::OtherOptions(_)
            | ExportError::Busy(_)
            | ExportError::NoColumns(_)
            | ExportError::Target { .. } => true,
            ExportError::Store(error) => error.is_user_error(),
            ExportError::Io { .. } | ExportError::Row { .. } | ExportError::Parquet { .. } => false,
        }
    }

    /// Returns a function that adds `path` to an I/O error.
    pub(crate) fn io_error_at(path: &Path) -> impl Fn(io::Error) -> ExportError + use<> {
        let path = path.to_owned();
        move |source| ExportError::Io { path: path.clone(), source }
    }
}
