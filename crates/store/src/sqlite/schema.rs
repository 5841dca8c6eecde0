//! The tables of the SQLite file, and connections to it.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use levade_tree::RunId;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::{checksum, classify_error};
use crate::StoreError;
use crate::error::Code;

/// Schema version of the tables that this build writes. Files of schema 3 and 4 are migrated.
pub const SCHEMA_VERSION: i32 = 5;

/// SQLite application id that marks a file as a Levade store: "DRSG" in ASCII.
pub(super) const APPLICATION_ID: i32 = 0x4452_5347;

/// Timeout for waiting until the transaction of another connection ends.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// Open flags for a file that exists. Each connection is used by only one thread.
pub(super) const EXISTING_FILE_FLAGS: OpenFlags =
    OpenFlags::SQLITE_OPEN_READ_WRITE.union(OpenFlags::SQLITE_OPEN_NO_MUTEX);

/// The tables. Values per token are little-endian blobs; other structured values are JSON. A column
/// `crc` contains the `checksum` of the row's other columns. In a migrated file it can be NULL, for
/// rows that a build without checksums wrote.
pub(super) const TABLES: &str = "
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
    crc INTEGER NOT NULL,                   -- without status and counts, which can be checked
    UNIQUE (purpose, phase, step, grp, sample, number)
) STRICT;
CREATE INDEX running ON attempts (status) WHERE status = 'running';
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
    prompt      INTEGER REFERENCES prompts (id),    -- where its tokens are, if it begins a \
    conversation
    tokens      BLOB,                       -- u32; NULL where there is a prompt
    logprobs    BLOB    NOT NULL,           -- f32
    versions    BLOB    NOT NULL,           -- runs of (version u64, length u32)
    crc INTEGER NOT NULL,                   -- with the tokens of the prompt
    PRIMARY KEY (attempt, id),
    CHECK ((prompt IS NULL) <> (tokens IS NULL))
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    phase INTEGER NOT NULL,
    step  INTEGER NOT NULL,
    plan  TEXT    NOT NULL,                 -- JSON: all but the paths; how updates are cut is in it
    crc INTEGER NOT NULL,
    PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE planned_paths (
    phase     INTEGER NOT NULL,
    step      INTEGER NOT NULL,
    place     INTEGER NOT NULL,             -- in the step, over all its updates
    policy    INTEGER NOT NULL,             -- which policy of the step
    upd       INTEGER NOT NULL,             -- which update of that
    attempt   BLOB    NOT NULL,             -- AttemptId
    leaf      INTEGER NOT NULL,
    advantage BLOB    NOT NULL,             -- runs of (f32, length u32), as the next three
    weight    BLOB    NOT NULL,
    returns   BLOB,
    vals      BLOB,
    crc INTEGER NOT NULL,
    PRIMARY KEY (phase, step, place),
    FOREIGN KEY (phase, step) REFERENCES steps (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE evals (
    phase  INTEGER NOT NULL,
    step   INTEGER NOT NULL,
    result TEXT    NOT NULL,                -- JSON
    crc INTEGER NOT NULL,
    PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE withdrawals (
    id      INTEGER PRIMARY KEY,            -- in the order in which they were added
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    status  TEXT    NOT NULL,               -- of the attempt, before it was withdrawn
    task    TEXT,                           -- its name, if the whole task was withdrawn
    reason  TEXT    NOT NULL,
    at      INTEGER NOT NULL,               -- seconds since 1970
    erased  INTEGER NOT NULL
) STRICT;
";

/// Returns the id of the run that is stored in the file.
pub(super) fn read_run_id(connection: &Connection, file: &Path) -> Result<RunId, StoreError> {
    let run = connection.query_row("SELECT id FROM run", [], |row| row.get(0));
    run.map(RunId).map_err(|source| open_error(file, source))
}

/// Creates the error for a file that SQLite cannot open.
pub(super) fn open_error(file: &Path, source: rusqlite::Error) -> StoreError {
    let code = match classify_error(&source) {
        Code::Forbidden if !file.exists() => Code::NotFound,
        code => code,
    };
    StoreError::Open { location: file.display().to_string(), code, source: source.into() }
}

/// Opens a connection to a file, with the busy timeout and the SQL function `checksum`.
pub(super) fn connect(file: &Path, flags: OpenFlags) -> rusqlite::Result<Connection> {
    let connection = Connection::open_with_flags(file, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    checksum::register_checksum_function(&connection)?;
    keep_query_plans(&connection)?;
    Ok(connection)
}

/// Opens a connection that cannot write to an existing file.
pub(super) fn connect_reader(file: &Path) -> rusqlite::Result<Connection> {
    let connection = connect(file, EXISTING_FILE_FLAGS)?;
    connection.pragma_update(None, "query_only", true)?;
    Ok(connection)
}

/// Lets a cached statement keep its query plan. By default, SQLite prepares a statement again
/// whenever a parameter of its `WHERE` clause changes, in case another index fits the new value
/// better. Here the best index never depends on a value.
pub(super) fn keep_query_plans(connection: &Connection) -> rusqlite::Result<()> {
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map(drop)
}

/// Kind of a file, as one transaction sees it: application id, schema version, and whether the file
/// is empty.
pub(super) struct FileFormat {
    pub application: i32,
    pub version: i32,
    /// Whether the file has no tables.
    pub is_empty: bool,
}

/// Reads the application id and the schema version of a file in one transaction. If another process
/// creates the tables at the same time, the result contains both tables and application id, or
/// neither.
pub(super) fn read_file_format(connection: &Connection) -> rusqlite::Result<FileFormat> {
    let transaction = connection.unchecked_transaction()?;
    let is_empty = is_empty(&transaction)?;
    let (application, version) = read_identity(&transaction)?;
    Ok(FileFormat { application, version, is_empty })
}

/// Switches a file to a write-ahead log. SQLite does not wait for other connections that switch the
/// file at the same time, so this function retries for [`BUSY_TIMEOUT`].
pub(super) fn use_write_ahead_log(connection: &Connection) -> rusqlite::Result<()> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match connection.pragma_update(None, "journal_mode", "wal") {
            Err(error)
                if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(5));
            }
            switched => break switched,
        }
    }?;
    connection.pragma_update(None, "synchronous", "full")
}

/// Returns the SQLite application id and the schema version of a file.
pub(super) fn read_identity(connection: &Connection) -> rusqlite::Result<(i32, i32)> {
    let application = connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let version = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    Ok((application, version))
}

/// Returns whether a database has no tables.
pub(super) fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))
}
