//! Opens a file that may be damaged, without changing it.
//!
//! If SQLite rejects the header or cannot read the definitions of the tables, a copy of the file
//! gets the header and the definitions of an empty store. This works because all stores that this
//! build creates have the same definitions on the same pages. The repaired copy is used only if the
//! ids of its attempts are derived from the id of the run, which cannot happen by chance.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use levade_tree::RunId;
use rusqlite::{Connection, OpenFlags};
use tempfile::TempDir;

use super::super::schema::{
    APPLICATION_ID, EXISTING_FILE_FLAGS, SCHEMA_VERSION, connect, open_error, read_identity,
    read_run_id,
};
use super::super::{attempts, checksum, migrate, opening, read_only};
use crate::StoreError;
use crate::error::Code;

/// Page size of the files in bytes, which is SQLite's default for new files.
const PAGE_SIZE: usize = 4096;

/// Maximum number of attempts whose ids are compared with the id of the run.
const MAX_COMPARED_ROWS: i64 = 1000;

/// A possibly damaged file of a run, opened for reading, and repaired if necessary.
pub(super) struct OpenedStore {
    pub connection: Connection,
    /// Whether the file header was replaced, because it was damaged.
    pub is_restored: bool,
    /// Temporary directory of the copy that is read. `None` if the file itself is read.
    _copy: Option<TempDir>,
}

/// Opens a possibly damaged file for reading: the file itself or, if necessary, a copy with a
/// repaired header or with the current schema.
///
/// # Errors
/// Returns an error if the file cannot be opened or is not a store.
pub(super) fn open_damaged_file(
    file: &Path,
    expected: Option<&RunId>,
) -> Result<OpenedStore, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let direct = connect(file, flags).and_then(|connection| {
        let identity = read_identity(&connection)?;
        Ok((connection, None, identity))
    });
    let opened = match direct {
        Err(error) if read_only::is_permission_error(&error) && file.is_file() => {
            let (connection, copy) =
                read_only::open_read_only(file).map_err(|source| unwritable_error(file, source))?;
            let identity = checksum::register_checksum_function(&connection)
                .and_then(|()| read_identity(&connection));
            identity.map(|identity| (connection, copy, identity))
        }
        direct => direct,
    };
    let opened = opened.map_err(|source| open_error(file, source));
    let error = match opened {
        Ok((connection, copy, (APPLICATION_ID, SCHEMA_VERSION)))
            if has_current_schema(&connection) =>
        {
            return Ok(OpenedStore { connection, is_restored: false, _copy: copy });
        }
        Ok((_, _, (APPLICATION_ID, version)))
            if migrate::is_known_version(version) && version < SCHEMA_VERSION =>
        {
            let dir = copy_files(file).map_err(|source| unwritable_error(file, source))?;
            let connection = connect(&dir.path().join("run.db"), EXISTING_FILE_FLAGS);
            let mut connection = connection.map_err(|source| open_error(file, source))?;
            migrate::migrate_file(&mut connection, file)?;
            return Ok(OpenedStore { connection, is_restored: false, _copy: Some(dir) });
        }
        Ok((.., (APPLICATION_ID, SCHEMA_VERSION))) => {
            let damaged = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
            open_error(file, rusqlite::Error::SqliteFailure(damaged, None))
        }
        Ok((.., (APPLICATION_ID, found))) => StoreError::Version {
            location: file.display().to_string(),
            found,
            expected: SCHEMA_VERSION,
        },
        Ok((.., (found, _))) => StoreError::Foreign { location: file.display().to_string(), found },
        Err(error) if matches!(error.code(), Code::Corrupt | Code::Foreign) => error,
        Err(error) => return Err(error),
    };
    match restore_header(file, expected) {
        Ok(Some(restored)) => Ok(restored),
        _ => Err(error),
    }
}

fn unwritable_error(file: &Path, source: io::Error) -> StoreError {
    StoreError::Unwritable { location: file.display().to_string(), source }
}

/// Returns whether SQLite can find all tables and columns of the current schema.
fn has_current_schema(connection: &Connection) -> bool {
    let columns = [
        "id FROM run",
        "id, name, purpose, phase, step, grp, sample, number, task, outcome, score, reward, \
         earned, status, sampled_tokens, tokens, crc FROM attempts",
        "id, digest, tokens FROM prompts",
        "attempt, id, parent, after, kind, agent, policy, turn, temperature, filtered, prompt, \
         tokens, logprobs, versions, crc FROM segments",
        "phase, step, plan, crc FROM steps",
        "phase, step, place, policy, upd, attempt, leaf, advantage, weight, returns, vals, crc \
         FROM planned_paths",
        "phase, step, result, crc FROM evals",
    ];
    columns.iter().all(|columns| connection.prepare(&format!("SELECT {columns}")).is_ok())
}

/// Copies the database file and its write-ahead log to a temporary directory.
fn copy_files(file: &Path) -> io::Result<TempDir> {
    let dir = TempDir::with_prefix("levade-check-")?;
    for suffix in ["", "-wal"] {
        let mut from = file.as_os_str().to_owned();
        from.push(suffix);
        let to = dir.path().join(format!("run.db{suffix}"));
        match fs::read(&from) {
            // Written, not copied, so that the copy does not have the permissions of the original.
            Ok(bytes) => fs::write(to, bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !suffix.is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(dir)
}

/// Repairs the header in a copy of the file: first only the number of pages, which is wrong in a
/// truncated file, and then also the definitions of the tables. Returns `None` if the result is
/// still not a store of the run.
fn restore_header(
    file: &Path,
    expected: Option<&RunId>,
) -> Result<Option<OpenedStore>, Box<dyn std::error::Error>> {
    for replaces_tables in [false, true] {
        let dir = copy_files(file)?;
        let copy = dir.path().join("run.db");
        if replaces_tables {
            replace_tables(&dir, &copy)?;
        }
        set_page_count(&copy)?;
        let connection = connect(&copy, EXISTING_FILE_FLAGS)?;
        let stored = read_run_id(&connection, file).ok();
        let is_store = has_current_schema(&connection)
            && [stored.as_ref(), expected]
                .into_iter()
                .flatten()
                .any(|run| matches_attempt_ids(&connection, run, MAX_COMPARED_ROWS));
        if is_store {
            return Ok(Some(OpenedStore { connection, is_restored: true, _copy: Some(dir) }));
        }
    }
    Ok(None)
}

/// Overwrites the pages of `copy` that define tables with the same pages of an empty store.
fn replace_tables(dir: &TempDir, copy: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let empty = dir.path().join("empty.db");
    // Dropped at once, so that the log is written to the file.
    drop(opening::open_for_writing(&empty, &RunId("empty".into()))?);
    let roots = {
        let connection = connect(&empty, EXISTING_FILE_FLAGS)?;
        let mut statement = connection.prepare("SELECT rootpage FROM sqlite_schema")?;
        let roots = statement.query_map([], |row| row.get(0))?;
        roots.collect::<rusqlite::Result<BTreeSet<i64>>>()?
    };
    let mut to = OpenOptions::new().write(true).open(copy)?;
    for (number, page) in (1..).zip(fs::read(&empty)?.chunks(PAGE_SIZE)) {
        if !roots.contains(&number) {
            to.seek(SeekFrom::Start(u64::try_from(number - 1)? * PAGE_SIZE as u64))?;
            to.write_all(page)?;
        }
    }
    Ok(())
}

/// Writes the actual number of pages to the file header. Format of the header:
/// <https://sqlite.org/fileformat2.html#the_database_header>.
fn set_page_count(file: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).write(true).open(file)?;
    let pages = u32::try_from(file.metadata()?.len() / PAGE_SIZE as u64).unwrap_or(u32::MAX);
    let mut change_counter = [0; 4];
    file.seek(SeekFrom::Start(24))?;
    file.read_exact(&mut change_counter)?;
    file.write_all(&pages.to_be_bytes())?;
    // The number is valid only if these counters are equal.
    file.seek(SeekFrom::Start(92))?;
    file.write_all(&change_counter)
}

/// Returns whether an attempt in the first [`MAX_COMPARED_ROWS`] rows has an id that is derived
/// from `run`.
pub(super) fn matches_attempt_ids(connection: &Connection, run: &RunId, last_row: i64) -> bool {
    let rows = 1..=last_row.min(MAX_COMPARED_ROWS);
    rows.into_iter().any(|row| attempts::read_slot_name(connection, run, row).is_some())
}
