//! The directories next to a run directory that a run leaves when it goes back to an earlier step.
//!
//! `NAME.partial` is the directory that is being built. Once it is exchanged with the run
//! directory, it contains the former run, and is renamed to `NAME.superseded-1`. The file
//! `rewind.json` of the new run names that directory, so that a later process can complete the
//! rename.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TrainerError;
use crate::files::{file_error, sync_dir, write_atomically};

const FILE: &str = "rewind.json";
/// Schema version of `rewind.json` that this build writes and reads.
const SCHEMA: u32 = 1;

/// Contents of `rewind.json`. A run has this file once it has gone back to an earlier step.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RewindRecord {
    schema: u32,
    /// Number of finished steps at the checkpoint from which the run continued.
    from: u32,
    /// Name of the directory, next to the run directory, that contains the run with the superseded
    /// steps.
    superseded: String,
}

impl RewindRecord {
    /// Creates the record of a run that went back and continues after `from` finished steps.
    pub fn new(from: u32, superseded: String) -> Self {
        RewindRecord { schema: SCHEMA, from, superseded }
    }

    /// Writes the record into the run directory `dir`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), TrainerError> {
        let path = dir.join(FILE);
        let text = serde_json::to_string_pretty(self)
            .map_err(|error| file_error("write", &path, error.into()))?;
        write_atomically(&path, text.as_bytes())
    }

    /// Reads the record in the run directory `dir`. Returns `None` if the run never went back.
    fn read(dir: &Path) -> Result<Option<Self>, TrainerError> {
        let path = dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|source| file_error("read", &path, source))?,
        };
        let damaged = |why: String| TrainerError::Damaged { path: path.clone(), why };
        let record: RewindRecord =
            serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        if record.schema != SCHEMA {
            return Err(damaged(format!(
                "the file has schema version {}, but this build reads version {SCHEMA}",
                record.schema
            )));
        }
        Ok(Some(record))
    }
}

/// Renames the directory of the former run to its final name, if an earlier process was killed
/// before the rename.
///
/// # Errors
/// Returns an error if `rewind.json` is damaged or the directory cannot be renamed.
pub(crate) fn finish_rewind(root: &Path) -> Result<(), TrainerError> {
    let Some(record) = RewindRecord::read(root)? else { return Ok(()) };
    let root = fs::canonicalize(root).map_err(|source| file_error("open", root, source))?;
    let partial = partial_dir(&root)?;
    let superseded = root.with_file_name(&record.superseded);
    if superseded.exists() || !partial.join("recipe.toml").exists() {
        return Ok(());
    }
    // If the user has removed the superseded directory, the other one can be the new directory of a
    // later call that was killed before the exchange.
    if RewindRecord::read(&partial)?.is_some_and(|it| it.superseded == record.superseded) {
        return Ok(());
    }
    fs::rename(&partial, &superseded).map_err(|source| file_error("rename", &partial, source))?;
    sync_parent(&root)
}

/// Returns the path of the directory in which a new version of the run directory `root` is built.
/// The two directories are then exchanged.
///
/// # Errors
/// Returns an error if `root` is the root of a file system.
pub(crate) fn partial_dir(root: &Path) -> Result<PathBuf, TrainerError> {
    sibling_path(root, "partial")
}

/// Returns the first unused path for the superseded steps of the run in `root`, such as
/// `NAME.superseded-1`.
///
/// # Errors
/// Returns an error if `root` is the root of a file system.
pub(crate) fn superseded_dir(root: &Path) -> Result<PathBuf, TrainerError> {
    let mut n = 1;
    loop {
        let path = sibling_path(root, &format!("superseded-{n}"))?;
        if !path.exists() {
            return Ok(path);
        }
        n += 1;
    }
}

/// Flushes the entries of the parent directory of `root` to disk.
///
/// # Errors
/// Returns an error if the directory cannot be flushed.
pub(crate) fn sync_parent(root: &Path) -> Result<(), TrainerError> {
    root.parent().map_or(Ok(()), sync_dir)
}

fn sibling_path(root: &Path, suffix: &str) -> Result<PathBuf, TrainerError> {
    let mut name = root.file_name().unwrap_or_default().to_owned();
    if name.is_empty() {
        let why = io::Error::other("no directory can exist next to the root of a file system");
        return Err(file_error("exchange", root, why));
    }
    name.push(".");
    name.push(suffix);
    Ok(root.with_file_name(name))
}
