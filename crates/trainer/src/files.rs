//! Writes files that are either complete or absent, and names files in errors.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::TrainerError;

/// An error of a file, with what was being done.
pub(crate) fn file_error(action: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::File { action, path: path.to_owned(), source }
}

/// Writes a file that is either whole or not there, also after a power cut.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TrainerError> {
    let half = path.with_extension("half");
    let write = || {
        let mut file = File::create(&half)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&half, path)
    };
    write().map_err(|source| file_error("write", path, source))?;
    match path.parent() {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Flushes the names in a folder to the disk.
pub(crate) fn sync_folder(path: &Path) -> Result<(), TrainerError> {
    // Elsewhere a folder cannot be opened, and renames are flushed with the file system's own log.
    if cfg!(unix) {
        File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|source| file_error("flush", path, source))?;
    }
    Ok(())
}
