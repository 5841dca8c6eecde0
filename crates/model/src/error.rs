//! Errors of reading, writing and downloading model files. Every message names the file, the tensor
//! or key, the value found and a way to fix the error, and fits on one screen.

use std::io;
use std::path::{Path, PathBuf};

/// An error of reading, writing or downloading model files.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// An I/O operation failed.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io {
        /// Verb of the failed action, such as `read` or `write`.
        action: &'static str,
        /// File or directory on which the operation failed.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A directory or file in the cache of models cannot be created.
    #[error(
        "cannot create {} in the cache of models: {cause}\n\
         set {variable} to a directory that you can write to, or name the directory of a model",
        path.display()
    )]
    Cache {
        /// Directory or file that cannot be created.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
        /// Name of the environment variable that sets the location of the cache.
        variable: &'static str,
    },
    /// The disk or the user's quota is full.
    #[error(
        "the disk is full: cannot write {} ({needed} bytes)\n\
         free some space, or choose a directory on another disk",
        path.display()
    )]
    DiskFull {
        /// Path of the file being written. Its incomplete contents are removed, except those of a
        /// download from the hub, which a later call resumes.
        path: PathBuf,
        /// Size of the complete file, in bytes; 0 if the size is unknown.
        needed: u64,
    },
    /// A file that the model needs does not exist.
    #[error("{}: {what}\n{way_out}", path.display())]
    Missing {
        /// Path at which the file was expected.
        path: PathBuf,
        /// Description of the problem, such as `the directory has no config.json`.
        what: String,
        /// Advice to the user on how to correct the problem.
        way_out: String,
    },
    /// A file's bytes contradict its format.
    #[error("{} is damaged, truncated, or not in the format that its name indicates: {what}\n\
        fetch or convert it again", path.display())]
    Damaged {
        /// Path of the damaged file.
        path: PathBuf,
        /// Description of the damaged part, with the value found in the file.
        what: String,
    },
    /// A valid file requires something that Levade does not support.
    #[error("{}: {what}\n{way_out}", path.display())]
    Unsupported {
        /// Path of the file that is not supported.
        path: PathBuf,
        /// Key or tensor that is not supported, with its value.
        what: String,
        /// Advice to the user on how to correct the problem.
        way_out: String,
    },
    /// A configuration has an entry that is missing, of the wrong type, or impossible.
    #[error("{}: {what}\ncompare the file with the published one", path.display())]
    Config {
        /// Path of the configuration file.
        path: PathBuf,
        /// Key of the invalid entry, with the value found.
        what: String,
    },
    /// The configuration requires a tensor that no file contains.
    #[error(
        "{} has no tensor {tensor}; the configuration requires it with shape {expected:?}\n\
         {way_out}",
        path.display()
    )]
    MissingTensor {
        /// Path of the model.
        path: PathBuf,
        /// Hugging Face name of the missing tensor.
        tensor: String,
        /// Shape that the configuration requires for the tensor.
        expected: Vec<usize>,
        /// Advice to the user on how to correct the problem.
        way_out: String,
    },
    /// The weights contain a tensor that does not belong to the configured model.
    #[error(
        "{} has a tensor {tensor} of shape {found:?}, which the configuration does not describe\n\
         the configuration belongs to another model: fetch both again from the same source",
        path.display()
    )]
    UnexpectedTensor {
        /// Path of the model.
        path: PathBuf,
        /// Name of the unexpected tensor in the file.
        tensor: String,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
    },
    /// A tensor's shape differs from the shape that the configuration requires.
    #[error(
        "{}: tensor {tensor} has shape {found:?}; the configuration requires {expected:?}\n\
         the configuration and the weights belong to different models: fetch both again from the \
         same source",
        path.display()
    )]
    Shape {
        /// Path of the file with the tensor.
        path: PathBuf,
        /// Hugging Face name of the tensor.
        tensor: String,
        /// Shape that the configuration requires for the tensor.
        expected: Vec<usize>,
        /// Shape of the tensor in the file.
        found: Vec<usize>,
    },
    /// A downloaded file does not have its published hash.
    #[error(
        "{} is not the file that was published: its SHA-256 is {found}, but must be {expected}\n\
         the file was removed; try again, and if this happens again, do not trust the source of \
         the file",
        path.display()
    )]
    Checksum {
        /// Path of the downloaded file.
        path: PathBuf,
        /// Published SHA-256 of the file, in hexadecimal.
        expected: String,
        /// SHA-256 of the downloaded bytes, in lower-case hexadecimal.
        found: String,
    },
    /// The source of a model, or a setting of the cache or the hub, is invalid.
    #[error("{0}")]
    Source(String),
    /// A model could not be fetched.
    #[error("cannot fetch {what}: {why}\n{way_out}")]
    Fetch {
        /// Model, package or file that was being fetched.
        what: String,
        /// Reason why the fetch failed.
        why: String,
        /// Advice to the user on how to correct the problem.
        way_out: String,
    },
}

impl ModelError {
    /// Returns a closure for `map_err` that converts an I/O error of the operation `action` on
    /// `path` to [`Self::Io`].
    pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { action, path, cause }
    }

    /// Returns a closure for `map_err` like [`Self::io_error`], for writes: the error of a full
    /// disk becomes [`Self::DiskFull`]. `needed` is the size of the complete file in bytes.
    pub(crate) fn write_error(path: &Path, needed: u64) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path, needed }
            }
            _ => Self::Io { action: "write", path, cause },
        }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn config(path: &Path, what: impl Into<String>) -> Self {
        Self::Config { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn unsupported(
        path: &Path,
        what: impl Into<String>,
        way_out: impl Into<String>,
    ) -> Self {
        Self::Unsupported { path: path.to_path_buf(), what: what.into(), way_out: way_out.into() }
    }
}
