//! The tables of rollouts, and connections to them.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use crate::StoreError;
use crate::sqlite::schema::{
    EXISTING_FILE_FLAGS, FileFormat, connect, connect_reader, is_empty, keep_query_plans,
    open_error, read_file_format, use_write_ahead_log,
};

/// Schema version of the tables that this build writes.
pub(super) const SCHEMA_VERSION: i32 = 1;

/// SQLite application id that marks a file as a store of rollouts: "LVRO" in ASCII.
const APPLICATION_ID: i32 = 0x4c56_524f;

/// Maximum number of prepared statements that a connection caches.
const STATEMENTS: usize = 256;

/// Size of the write-ahead log, in pages, at which SQLite moves its pages into the database file.
/// Each move flushes both files, so a small number slows down bursts of spans.
const CHECKPOINT_PAGES: i64 = 8192;

/// SQL that creates the tables. Every hot query is served by an index. Opaque values are JSON.
const TABLES: &str = "
CREATE TABLE rollouts (
    seq          INTEGER PRIMARY KEY,       -- order of creation
    id           TEXT    NOT NULL UNIQUE,
    key          TEXT    UNIQUE,            -- idempotency key
    queue        TEXT    NOT NULL,
    priority     INTEGER NOT NULL,
    enqueued     INTEGER NOT NULL,          -- position in the queue: smaller is older
    queued       INTEGER NOT NULL,          -- 1 while the status is queuing or requeuing
    status       TEXT    NOT NULL,
    input        TEXT    NOT NULL,
    mode         TEXT,
    resources_id TEXT,
    timeout      REAL,                      -- seconds
    unresponsive REAL,                      -- seconds
    max_tries    INTEGER NOT NULL,
    retry_on     TEXT    NOT NULL,          -- JSON
    metadata     TEXT,
    start_time   REAL    NOT NULL,
    end_time     REAL,
    tries        INTEGER NOT NULL DEFAULT 0,    -- number of the latest try
    released     INTEGER NOT NULL DEFAULT 0,    -- number of tries that workers released
    expires      REAL,                      -- when a timeout of the latest try ends
    changed      INTEGER NOT NULL           -- sequence number of the last change
) STRICT;
CREATE INDEX rollout_queue ON rollouts (queue, priority DESC, enqueued) WHERE queued = 1;
CREATE INDEX rollout_expiry ON rollouts (expires) WHERE expires IS NOT NULL;
CREATE INDEX rollout_status ON rollouts (status);
CREATE UNIQUE INDEX rollout_changed ON rollouts (changed);
CREATE TABLE tries (
    seq        INTEGER PRIMARY KEY,
    rollout    INTEGER NOT NULL REFERENCES rollouts (seq),
    number     INTEGER NOT NULL,
    id         TEXT    NOT NULL,
    status     TEXT    NOT NULL,
    worker     TEXT,
    start_time REAL    NOT NULL,
    end_time   REAL,
    heartbeat  REAL,
    ttl        REAL,                        -- seconds between reports that the lease demands
    released   INTEGER NOT NULL DEFAULT 0,  -- 1 if the worker returned the lease
    metadata   TEXT,
    UNIQUE (rollout, number),
    UNIQUE (rollout, id)
) STRICT;
CREATE TABLE workers (
    seq             INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    status          TEXT NOT NULL DEFAULT 'unknown',
    stats           TEXT,
    heartbeat       REAL,
    dequeue         REAL,
    busy            REAL,
    idle            REAL,
    current_rollout TEXT,
    current_try     TEXT
) STRICT;
CREATE TABLE resources (
    seq         INTEGER PRIMARY KEY,        -- order of the versions of all resources
    id          TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    first       INTEGER NOT NULL,           -- seq of the first version
    latest      INTEGER NOT NULL,           -- 1 for the latest version
    create_time REAL    NOT NULL,
    update_time REAL    NOT NULL,
    value       TEXT    NOT NULL,
    UNIQUE (id, version)
) STRICT;
CREATE INDEX resources_latest ON resources (first) WHERE latest = 1;
CREATE TABLE spans (
    seq        INTEGER PRIMARY KEY,
    rollout    INTEGER NOT NULL REFERENCES rollouts (seq),
    try        INTEGER NOT NULL REFERENCES tries (seq),
    number     INTEGER NOT NULL,
    trace_id   TEXT    NOT NULL,
    span_id    TEXT    NOT NULL,
    parent_id  TEXT,
    name       TEXT    NOT NULL,
    start_time REAL,
    end_time   REAL,
    body       TEXT    NOT NULL,
    UNIQUE (try, span_id)
) STRICT;
CREATE INDEX span_order ON spans (rollout, number);
CREATE TABLE span_numbers (
    rollout TEXT    NOT NULL PRIMARY KEY,   -- id, of an unknown rollout, too
    last    INTEGER NOT NULL                -- largest number that is stored or reserved
) STRICT, WITHOUT ROWID;
CREATE TABLE totals (
    spans INTEGER NOT NULL                  -- number of spans: one row
) STRICT;
INSERT INTO totals VALUES (0);
";

/// SQL that creates the tables that an earlier build with the same schema version did not create.
const ADDED_TABLES: &str = "
CREATE TABLE IF NOT EXISTS lease_requests (
    seq     INTEGER PRIMARY KEY,
    key     TEXT    NOT NULL,           -- idempotency key of a request for leases
    rollout INTEGER NOT NULL,
    number  INTEGER NOT NULL,           -- number of the leased try
    time    REAL    NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS lease_request_key ON lease_requests (key);
CREATE INDEX IF NOT EXISTS lease_request_time ON lease_requests (time);
";

/// Opens an empty rollout store in the memory of the process.
pub(super) fn open_in_memory() -> Result<Connection, StoreError> {
    let location = Path::new("memory:");
    let mut connection =
        Connection::open_in_memory().map_err(|source| open_error(location, source))?;
    keep_query_plans(&connection).map_err(|source| open_error(location, source))?;
    create_tables(&mut connection).map_err(|source| open_error(location, source))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(connection)
}

/// Opens the file of a rollout store for writing. Creates the file if it does not exist.
pub(super) fn open_file(file: &Path) -> Result<Connection, StoreError> {
    let opening = |source| open_error(file, source);
    let mut connection =
        connect(file, EXISTING_FILE_FLAGS | OpenFlags::SQLITE_OPEN_CREATE).map_err(opening)?;
    let FileFormat { application, version, is_empty } =
        read_file_format(&connection).map_err(opening)?;
    let location = || file.display().to_string();
    if !is_empty {
        if application != APPLICATION_ID {
            return Err(StoreError::Foreign { location: location(), found: application });
        }
        if version != SCHEMA_VERSION {
            return Err(StoreError::Version {
                location: location(),
                found: version,
                expected: SCHEMA_VERSION,
            });
        }
    }
    use_write_ahead_log(&connection).map_err(opening)?;
    connection.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES).map_err(opening)?;
    create_tables(&mut connection).map_err(opening)?;
    tune_connection(&connection).map_err(opening)?;
    Ok(connection)
}

/// Opens the file of a rollout store for reading. A writer of this process must have opened it
/// before.
pub(super) fn open_reader(file: &Path) -> Result<Connection, StoreError> {
    connect_reader(file)
        .and_then(|connection| tune_connection(&connection).map(|()| connection))
        .map_err(|source| open_error(file, source))
}

fn tune_connection(connection: &Connection) -> rusqlite::Result<()> {
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    connection.pragma_update(None, "cache_size", -64_000)
}

/// Creates the tables of the rollout store if the database is empty.
fn create_tables(connection: &mut Connection) -> rusqlite::Result<()> {
    // Immediate: if two processes open a new file at the same time, the second one waits and finds
    // tables.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if is_empty(&transaction)? {
        transaction.execute_batch(TABLES)?;
        transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
        transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
    }
    transaction.execute_batch(ADDED_TABLES)?;
    transaction.commit()
}
