//! Errors in a model's files, or in getting them. Every message names the file, the tensor or key, what was
//! found, and the way out, and fits on one screen.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of model files.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
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
    /// Writing ran out of space.
    #[error(
        "the disk is full: cannot write {} ({needed} bytes)\nfree some space, or choose a folder on another disk",
        path.display()
    )]
    DiskFull {
        /// The file being written; what was written of it is removed.
        path: PathBuf,
        /// Size when complete.
        needed: u64,
    },
    /// A file that a model needs is not there.
    #[error("{} {what}\n{way_out}", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// Missing thing, as the rest of a sentence that begins with the path.
        what: String,
        /// Way out.
        way_out: String,
    },
    /// A file's bytes contradict its format.
    #[error("{} is damaged, cut short, or not the format its name says: {what}\nfetch or convert it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which part, and what was found there.
        what: String,
    },
    /// A sound file asks for something that Levade does not do.
    #[error("{}: {what}\n{way_out}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Which key or tensor, and its value.
        what: String,
        /// Way out.
        way_out: String,
    },
    /// A configuration has an entry that is missing, of the wrong type, or impossible.
    #[error("{}: {what}\ncompare the file with the one the model was published with", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Which key, and what was found.
        what: String,
    },
    /// The configuration asks for a tensor that no file has.
    #[error(
        "{} has no tensor {tensor}; the configuration asks for it with shape {expected:?}\n{way_out}",
        path.display()
    )]
    MissingTensor {
        /// The model.
        path: PathBuf,
        /// The tensor, by its Hugging Face name.
        tensor: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// Way out.
        way_out: String,
    },
    /// The weights have a tensor that the configuration leaves no room for.
    #[error(
        "{} has a tensor {tensor} of shape {found:?}, which the configuration does not ask for\n\
         the configuration belongs to another model: fetch both again from the same place",
        path.display()
    )]
    UnexpectedTensor {
        /// The model.
        path: PathBuf,
        /// The tensor, by the name the file gives it.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// A tensor's shape is not the expected one.
    #[error(
        "{}: tensor {tensor} has shape {found:?}; the configuration asks for {expected:?}\n\
         the configuration and the weights belong to different models: fetch both again from the same place",
        path.display()
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor, by its Hugging Face name.
        tensor: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A downloaded file is not the one that was promised.
    #[error(
        "{} is not the file that was published: its SHA-256 is {found}, it should be {expected}\n\
         it was removed; try again, and if this repeats, do not trust the place it comes from",
        path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The published hash, lower-case hexadecimal.
        expected: String,
        /// The hash of the bytes.
        found: String,
    },
    /// The text that names a model is not understood.
    #[error("{0}")]
    Source(String),
    /// A model could not be fetched.
    #[error("cannot fetch {what}: {why}\n{way_out}")]
    Fetch {
        /// Thing that was being fetched.
        what: String,
        /// Reason why it was not.
        why: String,
        /// Way out.
        way_out: String,
    },
}

impl ModelError {
    /// For `map_err` on an operation on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| Self::Io { action, path, cause }
    }

    /// Like [`Self::io`] for writes, telling a full disk apart.
    pub(crate) fn writing(path: &Path, needed: u64) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |cause| match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path, needed },
            _ => Self::Io { action: "write", path, cause },
        }
    }

    pub(crate) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn config(path: &Path, what: impl Into<String>) -> Self {
        Self::Config { path: path.to_path_buf(), what: what.into() }
    }

    pub(crate) fn unsupported(path: &Path, what: impl Into<String>, way_out: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_path_buf(), what: what.into(), way_out: way_out.into() }
    }
}
