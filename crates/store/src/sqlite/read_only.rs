//! Opens a store without write permission, for example a run of another user or on a read-only
//! mount.
//!
//! In WAL mode, a reader needs an index of the log. Readers and writers share this index in a
//! `-shm` file next to the database. There are three cases if the reader cannot create that file:
//! - The `-shm` file exists. SQLite then reads with a private index. The caller tries this first;
//!   it is how a run in progress is read.
//! - Neither the `-shm` file nor a log exists, or the log is empty. The database file is then
//!   complete, and is read as immutable.
//! - Only a log exists. The database and the log are then copied to a temporary directory, in which
//!   the index can be created.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rusqlite::{Connection, ErrorCode, OpenFlags};
use tempfile::TempDir;

use super::schema::connect;

/// Maximum number of times that a file is copied. A copy is repeated if another process writes to
/// the file meanwhile.
const MAX_COPY_TRIES: u32 = 5;

/// Returns whether SQLite reports that it could not open a file for writing.
pub(super) fn is_permission_error(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied)
    )
}

/// Opens a database for reading without creating files next to it. Returns the directory of the
/// temporary copy if one was needed.
pub(super) fn open_read_only(file: &Path) -> io::Result<(Connection, Option<TempDir>)> {
    let log = with_suffix(file, "-wal");
    if fs::metadata(&log).map_or(0, |log| log.len()) == 0 {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY
            | OpenFlags::SQLITE_OPEN_URI
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection =
            connect(Path::new(&immutable_uri(file)?), flags).map_err(io::Error::other)?;
        return Ok((connection, None));
    }
    let dir = TempDir::with_prefix("levade-record-")?;
    let copy = dir.path().join("run.db");
    for _ in 0..MAX_COPY_TRIES {
        let before = (read_file_state(file)?, read_file_state(&log)?);
        fs::copy(file, &copy)?;
        fs::copy(&log, with_suffix(&copy, "-wal"))?;
        if (read_file_state(file)?, read_file_state(&log)?) == before {
            // A copy keeps the permissions of its source, which may be read-only.
            for copied in [&copy, &with_suffix(&copy, "-wal")] {
                make_writable(copied)?;
            }
            let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
            let connection = connect(&copy, flags).map_err(io::Error::other)?;
            return Ok((connection, Some(dir)));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        "the store cannot be copied, because another process keeps writing to it; try again later",
    ))
}

fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn read_file_state(file: &Path) -> io::Result<(u64, SystemTime)> {
    let metadata = fs::metadata(file)?;
    Ok((metadata.len(), metadata.modified()?))
}

fn make_writable(file: &Path) -> io::Result<()> {
    let mut permissions = fs::metadata(file)?.permissions();
    #[cfg(unix)]
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o600);
    #[cfg(not(unix))]
    permissions.set_readonly(false);
    fs::set_permissions(file, permissions)
}

/// Returns the SQLite URI that opens a file as immutable: a database that no process changes.
fn immutable_uri(file: &Path) -> io::Result<String> {
    let absolute = std::path::absolute(file)?;
    let path: String = absolute
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .map(|byte| percent_encode_byte(*byte))
        .collect();
    Ok(format!("file:{path}?immutable=1"))
}

fn percent_encode_byte(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("%{byte:02X}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::wait;
    use crate::{EvalKey, Sqlite, Store};
    use levade_tree::RunId;

    fn count_evals(connection: &Connection) -> u32 {
        connection.query_row("SELECT count(*) FROM evals", [], |row| row.get(0)).unwrap()
    }

    /// Covers both ways to read without the index, in a directory whose name needs escaping. A test
    /// of the command covers a user without write permission.
    #[test]
    fn open_creates_no_file_next_to_database() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("100 % of? it#é");
        fs::create_dir(&inside).unwrap();
        let file = inside.join("run.db");
        let store = wait(Sqlite::open(&file, &RunId("test".into()))).unwrap();
        let key = EvalKey { phase: 0, step: 0 };
        wait(store.record_eval(key, &"kept".into())).unwrap();
        // The files as a killed process leaves them.
        let killed = inside.join("killed.db");
        fs::copy(&file, &killed).unwrap();
        fs::copy(with_suffix(&file, "-wal"), with_suffix(&killed, "-wal")).unwrap();
        let (connection, copy) = open_read_only(&killed).unwrap();
        assert!(copy.is_some());
        assert_eq!(count_evals(&connection), 1);
        assert!(!with_suffix(&killed, "-shm").exists());

        drop(store);
        let (connection, copy) = open_read_only(&file).unwrap();
        assert!(copy.is_none());
        assert_eq!(count_evals(&connection), 1);
        assert!(!with_suffix(&file, "-wal").exists() && !with_suffix(&file, "-shm").exists());
    }
}
