//! Runs a query on a read-only database, within limits.

use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::process_time::with_timeout;
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};

/// Maximum length of an SQL query, in bytes.
const QUERY_BYTES: i32 = 16 << 10;

/// A value in the result of an SQL query.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum SqlValue {
    Null,
    Integer(i64),
    Real(f64),
    /// Text, as bytes that may be invalid UTF-8. Two texts that differ only in invalid bytes are
    /// different.
    Text(Vec<u8>),
    Blob(Vec<u8>),
}

impl SqlValue {
    fn from_value(value: ValueRef<'_>) -> Self {
        match value {
            ValueRef::Null => SqlValue::Null,
            ValueRef::Integer(value) => SqlValue::Integer(value),
            ValueRef::Real(value) => SqlValue::Real(value),
            ValueRef::Text(text) => SqlValue::Text(text.to_vec()),
            ValueRef::Blob(blob) => SqlValue::Blob(blob.to_vec()),
        }
    }

    /// Returns the number of bytes that a value takes in memory.
    fn bytes(value: ValueRef<'_>) -> usize {
        size_of::<SqlValue>()
            + match value {
                ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes.len(),
                _ => 0,
            }
    }
}

/// Limits on an SQL query and its result.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryLimits {
    /// Timeout for running the query.
    pub time: Duration,
    /// Maximum number of rows of the result. A larger result is an error.
    pub rows: usize,
    /// Maximum total size of the result's rows, in bytes.
    pub bytes: usize,
    /// Number of rows after which reading the result stops without an error.
    pub enough: usize,
    /// Maximum size of a text, a blob or a table row, in bytes.
    pub value: usize,
    /// Maximum number of columns of a table, or of any result within the query.
    pub columns: usize,
}

/// Maximum sizes of a value in a query's result, in bytes. The first size that suffices for the
/// expected query applies to answers.
pub(super) const VALUE_BYTES: [usize; 2] = [128 << 10, 1 << 20];

/// Maximum numbers of columns of a query's result. The first number that suffices for the expected
/// query applies to answers. All values of a row are in memory at once.
pub(super) const COLUMNS: [usize; 2] = [128, 2000];

/// Prefixes of functions for which SQLite collects rows in memory without a limit.
const UNBOUNDED: [&str; 2] = ["json_group_", "jsonb_group_"];

/// Rows that an SQL query returned.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct QueryRows {
    pub rows: Vec<Vec<SqlValue>>,
    /// Whether `rows` contains all rows of the result.
    pub is_complete: bool,
}

/// An SQL query with its database and limits.
#[derive(Debug, Clone)]
pub(super) struct Query {
    database: PathBuf,
    text: String,
    bounds: QueryLimits,
}

/// Opens an SQLite database read-only. `value` is the maximum size of a value in bytes, and
/// `columns` the maximum number of columns.
fn open_database(database: &Path, value: usize, columns: usize) -> Result<Connection, String> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let opened = Connection::open_with_flags(database, flags);
    let connection = opened.map_err(|error| format!("{}: {error}", database.display()))?;
    // Without attached databases, no other file can be read or written (`VACUUM INTO` attaches
    // one). The other limits bound the values that one statement holds in memory. Intermediate
    // tables are stored in files.
    let limits = [
        (Limit::SQLITE_LIMIT_ATTACHED, 0),
        (Limit::SQLITE_LIMIT_LENGTH, value as i32),
        (Limit::SQLITE_LIMIT_SQL_LENGTH, QUERY_BYTES),
        (Limit::SQLITE_LIMIT_EXPR_DEPTH, 250),
        (Limit::SQLITE_LIMIT_COLUMN, columns as i32),
    ];
    for (limit, value) in limits {
        connection.set_limit(limit, value).map_err(|error| error.to_string())?;
    }
    Ok(connection)
}

/// Checks that an SQL query does not call a function with unlimited memory use.
///
/// # Errors
/// Returns a message if the query contains a name that starts with one of [`UNBOUNDED`].
fn check_memory_use(query: &str) -> Result<(), String> {
    let query = query.to_ascii_lowercase();
    match UNBOUNDED.iter().find(|name| query.contains(**name)) {
        Some(name) => Err(format!(
            "the query calls {name}array or {name}object, whose memory use is unlimited"
        )),
        None => Ok(()),
    }
}

impl Query {
    pub fn new(database: &Path, text: &str, bounds: QueryLimits) -> Self {
        Query { database: database.to_owned(), text: text.to_owned(), bounds }
    }

    /// Checks that an SQL query can run on its database, without running it.
    ///
    /// # Errors
    /// Returns a message if the query is invalid, would write, or has no columns, or if the
    /// database cannot be opened.
    pub fn check(database: &Path, text: &str) -> Result<(), String> {
        let connection = open_database(database, VALUE_BYTES[1], COLUMNS[1])?;
        check_memory_use(text)?;
        let statement = connection.prepare(text).map_err(|error| error.to_string())?;
        match (statement.readonly(), statement.column_count()) {
            (false, _) => Err("the query would write to the database".into()),
            (true, 0) => Err("the statement is not a query".into()),
            _ => Ok(()),
        }
    }

    /// Runs the SQL query on a blocking thread.
    ///
    /// # Errors
    /// Returns a message if the query fails, would write, has no columns, or exceeds one of its
    /// limits.
    pub async fn run(self) -> Result<QueryRows, String> {
        let limit = self.bounds.time;
        let (handle_sender, handle_receiver) = tokio::sync::oneshot::channel();
        let mut running = tokio::task::spawn_blocking(move || {
            let connection = open_database(&self.database, self.bounds.value, self.bounds.columns)?;
            // Sending fails if the caller has stopped waiting.
            let _ = handle_sender.send(connection.get_interrupt_handle());
            self.read_rows(&connection)
        });
        let done = match with_timeout(limit, &mut running).await {
            Some(done) => done,
            None => {
                if let Ok(handle) = handle_receiver.await {
                    handle.interrupt();
                }
                // An interrupted query ends at its next step.
                let _ = running.await;
                return Err(format!("the query did not finish within {limit:?}"));
            }
        };
        done.map_err(|error| error.to_string())?
    }

    fn read_rows(&self, connection: &Connection) -> Result<QueryRows, String> {
        check_memory_use(&self.text)?;
        let mut statement = connection.prepare(&self.text).map_err(|error| error.to_string())?;
        if !statement.readonly() {
            return Err("the query would write to the database".into());
        }
        let columns = statement.column_count();
        if columns == 0 {
            return Err("the statement is not a query, because it never returns rows".into());
        }
        let mut rows = statement.query([]).map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        let mut bytes = 0;
        while let Some(row) = rows.next().map_err(|error| error.to_string())? {
            if found.len() == self.bounds.enough {
                return Ok(QueryRows { rows: found, is_complete: false });
            }
            if found.len() == self.bounds.rows {
                return Err(format!("the query returns more than {} rows", self.bounds.rows));
            }
            let mut cells = Vec::with_capacity(columns);
            for at in 0..columns {
                let value = row.get_ref(at).map_err(|error| error.to_string())?;
                bytes += SqlValue::bytes(value);
                if bytes > self.bounds.bytes {
                    return Err(format!(
                        "the rows of the result have more than {} bytes",
                        self.bounds.bytes
                    ));
                }
                cells.push(SqlValue::from_value(value));
            }
            found.push(cells);
        }
        Ok(QueryRows { rows: found, is_complete: true })
    }
}
