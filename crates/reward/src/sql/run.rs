//! A query on a database that is read alone, within bounds.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dressage_policy::awake::within;
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};

/// Longest text or blob, and most bytes of a query.
const LONGEST: i32 = 1 << 20;

/// A value of a result.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cell {
    Null,
    Whole(i64),
    Real(f64),
    Text(String),
    Blob(Vec<u8>),
}

impl Cell {
    fn of(value: ValueRef<'_>) -> Self {
        match value {
            ValueRef::Null => Cell::Null,
            ValueRef::Integer(value) => Cell::Whole(value),
            ValueRef::Real(value) => Cell::Real(value),
            ValueRef::Text(text) => Cell::Text(String::from_utf8_lossy(text).into_owned()),
            ValueRef::Blob(blob) => Cell::Blob(blob.to_vec()),
        }
    }

    /// Whether it is a number in floating point.
    pub fn is_real(&self) -> bool {
        matches!(self, Cell::Real(_))
    }

    fn number(&self) -> Option<f64> {
        match self {
            Cell::Whole(value) => Some(*value as f64),
            Cell::Real(value) => Some(*value),
            _ => None,
        }
    }

    /// Whether it is the same value: whole numbers to the last digit, others up to the order in which sums
    /// are added up.
    pub fn same(&self, other: &Cell) -> bool {
        match (self, other) {
            (Cell::Whole(a), Cell::Whole(b)) => a == b,
            (a, b) => match (a.number(), b.number()) {
                (Some(a), Some(b)) => a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs()),
                _ => a == b,
            },
        }
    }

    /// An order of all values.
    pub fn order(&self, other: &Cell) -> Ordering {
        match (self, other) {
            (Cell::Whole(a), Cell::Whole(b)) => a.cmp(b),
            (Cell::Text(a), Cell::Text(b)) => a.cmp(b),
            (Cell::Blob(a), Cell::Blob(b)) => a.cmp(b),
            (a, b) => match (a.number(), b.number()) {
                (Some(a), Some(b)) => a.total_cmp(&b),
                _ => a.kind().cmp(&b.kind()),
            },
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Cell::Null => 0,
            Cell::Whole(_) | Cell::Real(_) => 1,
            Cell::Text(_) => 2,
            Cell::Blob(_) => 3,
        }
    }
}

/// A query to be run.
#[derive(Debug, Clone)]
pub(super) struct Query {
    database: PathBuf,
    text: String,
    limit: Duration,
    rows: usize,
}

/// Opens a database for reading alone.
fn open(database: &Path) -> Result<Connection, String> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let opened = Connection::open_with_flags(database, flags);
    let connection = opened.map_err(|error| format!("{}: {error}", database.display()))?;
    // No other file can be read, and none written (`VACUUM INTO` attaches one).
    let limits = [(Limit::SQLITE_LIMIT_ATTACHED, 0), (Limit::SQLITE_LIMIT_LENGTH, LONGEST)];
    for (limit, value) in limits {
        connection.set_limit(limit, value).map_err(|error| error.to_string())?;
    }
    Ok(connection)
}

impl Query {
    pub fn new(database: &Path, text: &str, limit: Duration, rows: usize) -> Self {
        Query { database: database.to_owned(), text: text.to_owned(), limit, rows }
    }

    /// Checks that a query fits its database.
    ///
    /// # Errors
    /// When it does not, or the database cannot be opened, in words.
    pub fn check(database: &Path, text: &str) -> Result<(), String> {
        let connection = open(database)?;
        let statement = connection.prepare(text).map_err(|error| error.to_string())?;
        if statement.readonly() { Ok(()) } else { Err("it would write".into()) }
    }

    /// Runs the query.
    ///
    /// # Errors
    /// When it fails, writes, takes too long or gives too many rows, in words.
    pub async fn run(self) -> Result<Vec<Vec<Cell>>, String> {
        let limit = self.limit;
        let (tell, told) = tokio::sync::oneshot::channel();
        let mut running = tokio::task::spawn_blocking(move || {
            let connection = open(&self.database)?;
            // Whoever waits may have stopped.
            let _ = tell.send(connection.get_interrupt_handle());
            self.rows_of(&connection)
        });
        let done = match within(limit, &mut running).await {
            Some(done) => done,
            None => {
                if let Ok(handle) = told.await {
                    handle.interrupt();
                }
                // Once it is interrupted it ends at the next step.
                let _ = running.await;
                return Err(format!("it did not end within {limit:?}"));
            }
        };
        done.map_err(|error| error.to_string())?
    }

    fn rows_of(&self, connection: &Connection) -> Result<Vec<Vec<Cell>>, String> {
        let mut statement = connection.prepare(&self.text).map_err(|error| error.to_string())?;
        if !statement.readonly() {
            return Err("it would write".into());
        }
        let columns = statement.column_count();
        let mut rows = statement.query([]).map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        while let Some(row) = rows.next().map_err(|error| error.to_string())? {
            if found.len() == self.rows {
                return Err(format!("it gives more than {} rows", self.rows));
            }
            let cells = (0..columns).map(|at| row.get_ref(at).map(Cell::of));
            found.push(cells.collect::<Result<_, _>>().map_err(|error| error.to_string())?);
        }
        Ok(found)
    }
}
