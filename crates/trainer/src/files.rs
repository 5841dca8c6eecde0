//! Writes files that are either complete or absent, and names files in errors.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::TrainerError;

/// Creates a [`TrainerError::File`] for `path`. `action` is the operation that failed, as an
/// infinitive such as `write`.
pub(crate) fn file_error(action: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::File { action, path: path.to_owned(), source }
}

/// Creates an empty directory. If the directory exists, its contents are removed.
pub(crate) fn create_empty_dir(dir: &Path) -> Result<(), TrainerError> {
    let cleared = if dir.exists() { fs::remove_dir_all(dir) } else { Ok(()) };
    cleared
        .and_then(|()| fs::create_dir_all(dir))
        .map_err(|source| file_error("empty", dir, source))
}

/// Writes a file atomically: even after a power failure, the file is either complete or unchanged.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), TrainerError> {
    replace_file(path, bytes).map_err(|source| file_error("write", path, source))?;
    match path.parent() {
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let half = path.with_extension("half");
    let mut file = File::create(&half)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&half, path)
}

/// Flushes the entries of the directory `path` to disk.
pub(crate) fn sync_dir(path: &Path) -> Result<(), TrainerError> {
    // On other systems a directory cannot be opened, and the file system's log flushes renames.
    if cfg!(unix) {
        File::open(path)
            .and_then(|dir| dir.sync_all())
            .map_err(|source| file_error("flush", path, source))?;
    }
    Ok(())
}
