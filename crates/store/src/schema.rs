//! The file: opening, checking, its tables.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior};
use tempfile::TempDir;

use dressage_tree::RunId;

use crate::{StoreError, migrate, unwritable};

/// Version of the tables that this build reads and writes.
pub const SCHEMA_VERSION: i32 = 4;

/// "DRSG": marks the file as ours.
const APPLICATION_ID: i32 = 0x4452_5347;

/// How long a handle waits for another one's transaction.
const BUSY: Duration = Duration::from_secs(30);

/// The tables. Numbers of tokens are little-endian blobs; whatever else has a shape of its own is JSON.
pub(crate) const TABLES: &str = "
CREATE TABLE run (
    id TEXT NOT NULL                        -- the run whose record this is: one row
) STRICT;
CREATE TABLE attempts (
    id      INTEGER PRIMARY KEY,
    name    BLOB    NOT NULL UNIQUE,        -- AttemptId
    purpose TEXT    NOT NULL,
    phase   INTEGER NOT NULL,
    step    INTEGER NOT NULL,
    grp     INTEGER NOT NULL,
    sample  INTEGER NOT NULL,
    number  INTEGER NOT NULL,               -- which try
    task    TEXT    NOT NULL,               -- JSON
    outcome TEXT    NOT NULL,               -- JSON
    score   REAL,
    reward  REAL,
    earned  TEXT    NOT NULL,               -- JSON
    status  TEXT    NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    tokens  INTEGER NOT NULL,
    UNIQUE (purpose, phase, step, grp, sample, number)
) STRICT;
CREATE TABLE prompts (
    id     INTEGER PRIMARY KEY,
    digest BLOB    NOT NULL UNIQUE,         -- SHA-256 of the tokens
    tokens BLOB    NOT NULL                 -- u32
) STRICT;
CREATE TABLE segments (
    attempt     INTEGER NOT NULL REFERENCES attempts (id),
    id          INTEGER NOT NULL,
    parent      INTEGER,
    after       INTEGER,                    -- tokens of the parent that come before; NULL for all
    kind        TEXT    NOT NULL,
    agent       TEXT    NOT NULL,
    policy      TEXT    NOT NULL,
    turn        INTEGER NOT NULL,
    temperature REAL    NOT NULL,
    filtered    INTEGER NOT NULL,
    prompt      INTEGER REFERENCES prompts (id),    -- where its tokens are, if it begins a conversation
    tokens      BLOB,                       -- u32; NULL where there is a prompt
    logprobs    BLOB    NOT NULL,           -- f32
    versions    BLOB    NOT NULL,           -- runs of (version u64, length u32)
    PRIMARY KEY (attempt, id),
    CHECK ((prompt IS NULL) <> (tokens IS NULL))
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    phase INTEGER NOT NULL,
    step  INTEGER NOT NULL,
    plan  TEXT    NOT NULL,                 -- JSON: everything but the paths
    PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE planned_paths (
    phase       INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    place       INTEGER NOT NULL,           -- in the step, over all its updates
    policy      INTEGER NOT NULL,           -- which policy of the step
    upd         INTEGER NOT NULL,           -- which update of that
    micro_batch INTEGER NOT NULL,           -- of that
    attempt     BLOB    NOT NULL,           -- AttemptId
    leaf        INTEGER NOT NULL,
    advantage   BLOB    NOT NULL,           -- runs of (f32, length u32), as the next three
    weight      BLOB    NOT NULL,
    returns     BLOB,
    vals        BLOB,
    PRIMARY KEY (phase, step, place),
    FOREIGN KEY (phase, step) REFERENCES steps (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE evals (
    phase  INTEGER NOT NULL,
    step   INTEGER NOT NULL,
    result TEXT    NOT NULL,                -- JSON
    PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
";

/// A handle on the record of a run. Cheap enough to have several; safe to share between threads.
#[derive(Debug)]
pub struct Store {
    pub(crate) file: PathBuf,
    run: RunId,
    connection: Mutex<Connection>,
    /// The copy that is read in place of the file, where it cannot be read in its place.
    _copy: Option<TempDir>,
}

impl Store {
    /// Opens the record of `run`, creating it where there is none, and bringing one of an earlier build up to date: all
    /// of it or, where that fails, nothing.
    ///
    /// # Errors
    /// When the file cannot be opened, belongs to another program or another run, or has a schema version that this
    /// build cannot read.
    pub fn open(file: &Path, run: &RunId) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = connect(file, flags)?;
        prepare(&mut connection, file, Some(run))?;
        let store = Self::checked(connection, file, None)?;
        if store.run != *run {
            let (file, found) = (file.to_owned(), store.run.to_string());
            return Err(StoreError::OtherRun { file, found, expected: run.to_string() });
        }
        Ok(store)
    }

    /// Opens a record that exists, to go on with whatever run it is of. One of an earlier build is brought up to date
    /// first, as by [`open`](Self::open).
    ///
    /// # Errors
    /// When the file is missing, and those of [`open`](Self::open).
    pub fn resume(file: &Path) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut connection = connect(file, flags)?;
        prepare(&mut connection, file, None)?;
        Self::checked(connection, file, None)
    }

    /// Opens a record that exists, to read it, also where nothing may be written, and while another process
    /// writes it. Of one of an earlier build a copy is brought up to date and read.
    ///
    /// # Errors
    /// When the file is missing or cannot be opened, belongs to another program, or has a schema version that this
    /// build cannot read.
    pub fn open_existing(file: &Path) -> Result<Self, StoreError> {
        // Read-write, because a reader of a WAL file may have to create its shared-memory index.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let readable = connect(file, flags).and_then(|connection| {
            identity(&connection).map_err(|source| opening(file, source)).map(|_| connection)
        });
        let (connection, copy) = match readable {
            Err(StoreError::Open { source, .. }) if unwritable::is_why(&source) && file.is_file() => {
                unwritable::open(file)
                    .map_err(|source| StoreError::Unwritable { file: file.to_owned(), source })?
            }
            opened => (opened?, None),
        };
        let (application, version) = identity(&connection).map_err(|source| opening(file, source))?;
        if application == APPLICATION_ID && migrate::is_known(version) && version < SCHEMA_VERSION {
            let (mut connection, copy) = migrate::copy(&connection, file)?;
            migrate::run(&mut connection, file)?;
            return Self::checked(connection, file, Some(copy));
        }
        Self::checked(connection, file, copy)
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The run whose record it is.
    pub fn run(&self) -> &RunId {
        &self.run
    }

    fn checked(connection: Connection, file: &Path, copy: Option<TempDir>) -> Result<Self, StoreError> {
        check(&connection, file)?;
        let run = connection.query_row("SELECT id FROM run", [], |row| row.get(0));
        let run = RunId(run.map_err(|source| opening(file, source))?);
        Ok(Store { file: file.to_owned(), run, connection: Mutex::new(connection), _copy: copy })
    }

    /// A panic while the lock was held has rolled its transaction back: the connection is still good.
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads on one consistent snapshot.
    pub(crate) fn reading<T>(
        &self,
        key: &dyn std::fmt::Display,
        read: impl FnOnce(&Transaction<'_>) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.transact("read", key, TransactionBehavior::Deferred, read)
    }

    /// Writes all or nothing.
    pub(crate) fn writing<T>(
        &self,
        key: &dyn std::fmt::Display,
        write: impl FnOnce(&Transaction<'_>) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        self.transact("record", key, TransactionBehavior::Immediate, write)
    }

    fn transact<T>(
        &self,
        action: &'static str,
        key: &dyn std::fmt::Display,
        behavior: TransactionBehavior,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let mut connection = self.lock();
        let run = || -> Result<T, Failure> {
            let transaction = connection.transaction_with_behavior(behavior)?;
            let result = work(&transaction)?;
            transaction.commit()?;
            Ok(result)
        };
        run().map_err(|failure| failure.at(&self.file, action, key))
    }
}

pub(crate) fn opening(file: &Path, source: rusqlite::Error) -> StoreError {
    StoreError::Open { file: file.to_owned(), source: Box::new(source) }
}

pub(crate) fn connect(file: &Path, flags: OpenFlags) -> Result<Connection, StoreError> {
    let connection = Connection::open_with_flags(file, flags).map_err(|source| opening(file, source))?;
    connection.busy_timeout(BUSY).map_err(|source| opening(file, source))?;
    Ok(connection)
}

/// Gives a new file the tables of `run`, where there is one, and an earlier build's file the present ones.
fn prepare(connection: &mut Connection, file: &Path, run: Option<&RunId>) -> Result<(), StoreError> {
    let opening = |source| opening(file, source);
    // Named before anything else, so that a file of another program is not changed.
    let (application, version) = identity(connection).map_err(opening)?;
    let is_new = is_empty(connection).map_err(opening)?;
    if application != APPLICATION_ID && !is_new {
        return Err(StoreError::Foreign { file: file.to_owned(), found: application });
    }
    if !is_new && !migrate::is_known(version) {
        return check(connection, file);
    }
    connection.pragma_update(None, "journal_mode", "wal").map_err(opening)?;
    connection.pragma_update(None, "synchronous", "full").map_err(opening)?;
    if let Some(run) = run {
        // Immediate: of two handles that open a new file at once, the second waits and finds the tables.
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(opening)?;
        if is_empty(&transaction).map_err(opening)? {
            transaction.execute_batch(TABLES).map_err(opening)?;
            transaction.execute("INSERT INTO run (id) VALUES (?1)", [&run.0]).map_err(opening)?;
            transaction.pragma_update(None, "application_id", APPLICATION_ID).map_err(opening)?;
            transaction.pragma_update(None, "user_version", SCHEMA_VERSION).map_err(opening)?;
        }
        transaction.commit().map_err(opening)?;
    }
    migrate::run(connection, file)?;
    connection.pragma_update(None, "foreign_keys", true).map_err(opening)
}

fn check(connection: &Connection, file: &Path) -> Result<(), StoreError> {
    let (application, version) = identity(connection).map_err(|source| opening(file, source))?;
    if application != APPLICATION_ID {
        return Err(StoreError::Foreign { file: file.to_owned(), found: application });
    }
    if version != SCHEMA_VERSION {
        return Err(StoreError::Version { file: file.to_owned(), found: version, expected: SCHEMA_VERSION });
    }
    Ok(())
}

/// Things that can go wrong inside a transaction, before file and key are added.
pub(crate) enum Failure {
    Sql(rusqlite::Error),
    Conflict(String, &'static str),
    Damaged(String),
    Unstorable(String),
}

impl Failure {
    /// The error for whoever asked for `key`.
    pub fn at(self, file: &Path, action: &'static str, key: &dyn std::fmt::Display) -> StoreError {
        let (file, key) = (file.to_owned(), key.to_string());
        match self {
            Failure::Sql(source) => StoreError::Sql { file, action, key, source: Box::new(source) },
            Failure::Conflict(key, field) => StoreError::Conflict { file, key, field },
            Failure::Damaged(what) => StoreError::Damaged { file, key, what },
            Failure::Unstorable(what) => StoreError::Unstorable { file, key, what },
        }
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Failure::Sql(error)
    }
}

pub(crate) fn identity(connection: &Connection) -> rusqlite::Result<(i32, i32)> {
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    Ok((pragma("application_id")?, pragma("user_version")?))
}

fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunId {
        RunId("test".into())
    }

    #[test]
    fn the_record_of_another_run_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.db");
        drop(Store::open(&file, &run()).unwrap());
        let error = Store::open(&file, &RunId("other".into())).unwrap_err().to_string();
        assert!(error.contains("run test, not of other"), "{error}");
        assert_eq!(Store::open_existing(&file).unwrap().run(), &run());
    }

    #[test]
    fn a_file_of_another_program_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("other.db");
        Connection::open(&file).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
        let before = std::fs::read(&file).unwrap();
        assert!(matches!(Store::open(&file, &run()), Err(StoreError::Foreign { found: 0, .. })));
        assert!(matches!(Store::open_existing(&file), Err(StoreError::Foreign { found: 0, .. })));
        assert_eq!(std::fs::read(&file).unwrap(), before);
    }

    #[test]
    fn another_schema_version_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.db");
        drop(Store::open(&file, &run()).unwrap());
        Connection::open(&file).unwrap().pragma_update(None, "user_version", 7).unwrap();
        let error = Store::open(&file, &run()).unwrap_err().to_string();
        assert!(error.contains("schema version 7, but this build reads version 4"), "{error}");
        assert!(error.contains("run.db"), "{error}");
    }

    /// SQLite reports a limit on its pages as it reports a full disk.
    #[test]
    fn a_full_disk_is_known_as_one_and_breaks_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("run.db"), &run()).unwrap();
        let key = crate::EvalKey { phase: 0, step: 0 };
        store.record_eval(key, &"kept".into()).unwrap();
        store.lock().pragma_update(None, "max_page_count", 20).unwrap();
        let large = crate::EvalKey { phase: 0, step: 1 };
        let error = store.record_eval(large, &"x".repeat(1 << 20).into()).unwrap_err();
        assert!(error.is_disk_full(), "{error}");
        assert_eq!(store.evals().unwrap(), [(key, "kept".into())]);
        store.lock().pragma_update(None, "max_page_count", 1 << 20).unwrap();
        store.record_eval(large, &"room".into()).unwrap();
    }

    #[test]
    fn what_is_not_a_database_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.db");
        std::fs::write(&file, "not a database, but long enough to look like a header of one\n".repeat(20))
            .unwrap();
        assert!(matches!(Store::open(&file, &run()), Err(StoreError::Open { .. })));
        assert!(matches!(
            Store::open_existing(&folder.path().join("missing.db")),
            Err(StoreError::Open { .. })
        ));
    }
}
