//! The record in one SQLite file in WAL mode, written by one thread and read by another.
//!
//! A call is a message to a thread and a wait for its answer, with a deadline. So no async worker waits for
//! the disk or encodes a blob. The writing thread takes all waiting writes into one transaction, with a
//! savepoint each, and answers after the flush. A caller that stops waiting for a write must keep what it
//! wrote until it knows that it is recorded.

mod attempts;
mod evals;
mod ledger;
mod migrate;
mod opening;
mod schema;
mod segments;
mod unwritable;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use levade_policy::awake;
use levade_tree::{AttemptId, Placement, Purpose, RunId, Segment};
use rusqlite::Connection;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tracing::{debug, trace};

use crate::error::{Code, Failure};
use crate::{
    Attempt, AttemptSummary, Begun, End, EvalKey, FailedAttempt, Recorded, StepPlan, Store, StoreError, Tries,
};
pub use schema::SCHEMA_VERSION;
use worker::{Asked, Inbox, Worker};

/// The longest wait for an answer: longer than a thread waits for another process.
const ANSWER: Duration = Duration::from_secs(120);

/// The longest wait for a record to be opened, which may have to be migrated or copied as a whole.
const OPENING: Duration = Duration::from_secs(3600);

/// The record of a run in an SQLite file. Several handles, in one process or many, may read and write at
/// once.
///
/// Dropping it blocks until everything that was asked is done and the file is closed.
pub struct Sqlite {
    file: PathBuf,
    place: String,
    run: RunId,
    /// The longest wait for an answer.
    limit: Duration,
    /// `None` where the record was opened for reading.
    writer: Option<Worker>,
    reader: Worker,
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite").field("file", &self.file).field("run", &self.run).finish_non_exhaustive()
    }
}

/// A connection that a thread has opened, with the copy that is read in place of the file, where it cannot
/// be read in its place.
pub(crate) type Opened = (Connection, Option<TempDir>);

impl Sqlite {
    /// Opens the record of `run`, creating it where there is none, and bringing one of an earlier build up
    /// to date: all of it or, where that fails, nothing.
    ///
    /// # Errors
    /// When the file cannot be opened, belongs to another program or another run, or has a schema version
    /// that this build cannot read.
    pub async fn open(file: &Path, run: &RunId) -> Result<Self, StoreError> {
        let wanted = run.clone();
        let store = Self::writing(file, move |file| opening::open(file, &wanted)).await?;
        if store.run != *run {
            let (place, found) = (store.place.clone(), store.run.to_string());
            return Err(StoreError::OtherRun { place, found, expected: run.to_string() });
        }
        Ok(store)
    }

    /// Opens a record that exists, to go on with whatever run it is of; an empty file, which a process left
    /// that was killed before it had written anything, becomes the record of `new`. One of an earlier build
    /// is brought up to date first, as by [`open`](Self::open).
    ///
    /// # Errors
    /// When the file is missing, and those of [`open`](Self::open).
    pub async fn resume(file: &Path, new: &RunId) -> Result<Self, StoreError> {
        let new = new.clone();
        Self::writing(file, move |file| opening::resume(file, &new)).await
    }

    /// Opens a record that exists, to read it, also where nothing may be written, and while another process
    /// writes it. Of one of an earlier build a copy is brought up to date and read. Writes are
    /// [`StoreError::ReadOnly`].
    ///
    /// # Errors
    /// When the file is missing or cannot be opened, belongs to another program, or has a schema version
    /// that this build cannot read.
    pub async fn open_existing(file: &Path) -> Result<Self, StoreError> {
        let (reader, run) = started(file, "levade-read", opening::open_existing, worker::read).await?;
        Ok(Self::of(file, run, None, reader))
    }

    async fn writing(
        file: &Path,
        open: impl FnOnce(&Path) -> Result<Opened, StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (writer, run) = started(file, "levade-store", open, worker::write).await?;
        let (reader, _) = started(file, "levade-read", opening::beside_the_writer, worker::read).await?;
        Ok(Self::of(file, run, Some(writer), reader))
    }

    fn of(file: &Path, run: RunId, writer: Option<Worker>, reader: Worker) -> Self {
        let place = file.display().to_string();
        Sqlite { file: file.to_owned(), place, run, limit: ANSWER, writer, reader }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads on one consistent snapshot.
    async fn read<T: Send + 'static>(
        &self,
        key: impl fmt::Display + Send,
        work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.ask(&self.reader, "read", key.to_string(), work).await
    }

    /// Writes all or nothing.
    async fn write<T: Send + 'static>(
        &self,
        key: impl fmt::Display + Send,
        work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        let key = key.to_string();
        match &self.writer {
            Some(writer) => self.ask(writer, "record", key, work).await,
            None => Err(StoreError::ReadOnly { place: self.place.clone(), key }),
        }
    }

    async fn ask<T: Send + 'static>(
        &self,
        worker: &Worker,
        action: &'static str,
        key: String,
        work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (start, (job, answer)) = (Instant::now(), Asked::new(work));
        // Where the thread is gone, so is the way back.
        worker.send(Box::new(job));
        let answer = answered(&self.place, action, key.clone(), self.limit, answer).await;
        let answer =
            answer.and_then(|answer| answer.map_err(|(failure, key)| failure.at(&self.place, action, key)));
        let seconds = start.elapsed().as_secs_f64();
        match &answer {
            Err(error) => debug!(%key, seconds, %error, "cannot {action}"),
            Ok(_) if action == "read" => trace!(%key, seconds, "read"),
            Ok(_) => debug!(%key, seconds, "recorded"),
        }
        answer
    }
}

/// Waits for the answer of a thread, which comes back with the key where it is a failure.
async fn answered<T, E>(
    place: &str,
    action: &'static str,
    key: String,
    limit: Duration,
    answer: oneshot::Receiver<Result<T, E>>,
) -> Result<Result<T, (E, String)>, StoreError> {
    let place = || place.to_owned();
    match awake::within(limit, answer).await {
        Some(Ok(result)) => Ok(result.map_err(|error| (error, key))),
        Some(Err(_)) => Err(StoreError::Stopped { place: place(), action, key }),
        None => Err(StoreError::Deadline { place: place(), action, key, waited: limit }),
    }
}

/// Starts a thread that opens a record with `open` and then does jobs by `work`. Returns the run whose
/// record it is.
async fn started(
    file: &Path,
    name: &str,
    open: impl FnOnce(&Path) -> Result<Opened, StoreError> + Send + 'static,
    work: fn(&mut Connection, &Inbox),
) -> Result<(Worker, RunId), StoreError> {
    let (to, answer) = oneshot::channel();
    let (place, of_thread) = (file.display().to_string(), file.to_owned());
    let thread = move |inbox: &Inbox| {
        let opened = open(&of_thread)
            .and_then(|opened| schema::run_of(&opened.0, &of_thread).map(|run| (opened, run)));
        match opened {
            // The copy outlives the connection.
            Ok(((mut connection, _copy), run)) => {
                if to.send(Ok(run)).is_ok() {
                    work(&mut connection, inbox);
                }
                drop(connection);
            }
            Err(error) => drop(to.send(Err(error))),
        }
    };
    let worker = Worker::start(name, ANSWER, thread).map_err(|source| StoreError::Open {
        place: place.clone(),
        code: Code::Unavailable,
        source: source.into(),
    })?;
    let run =
        answered(&place, "open", "the record".into(), OPENING, answer).await?.map_err(|(error, _)| error)?;
    Ok((worker, run))
}

#[async_trait]
impl Store for Sqlite {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn place(&self) -> &str {
        &self.place
    }

    async fn begin(&self, begun: &Begun) -> Result<Recorded, StoreError> {
        let (run, begun) = (self.run.clone(), begun.clone());
        self.write(begun.placement, move |to| attempts::begin(to, &run, &begun)).await
    }

    async fn append(&self, id: &AttemptId, segments: &[Segment]) -> Result<Recorded, StoreError> {
        let (id, segments) = (*id, segments.to_vec());
        self.write(attempts::key(&id), move |to| attempts::append(to, &id, &segments)).await
    }

    async fn end(&self, id: &AttemptId, end: &End) -> Result<Recorded, StoreError> {
        let (id, end) = (*id, end.clone());
        self.write(attempts::key(&id), move |to| attempts::end(to, &id, &end)).await
    }

    async fn abandon_running(&self) -> Result<u64, StoreError> {
        self.write("attempts that run", attempts::abandon_running).await
    }

    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<Recorded, StoreError> {
        let (run, attempts) = (self.run.clone(), attempts.to_vec());
        let key = match &attempts[..] {
            [one] => one.placement.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.write(key, move |to| attempts::record(to, &run, &attempts)).await
    }

    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        let id = *id;
        self.read(attempts::key(&id), move |from| attempts::read(from, &id)).await
    }

    async fn last_try(&self, placement: &Placement) -> Result<Option<Attempt>, StoreError> {
        let place = *placement;
        self.read(place, move |from| attempts::last_try(from, &place)).await
    }

    async fn tries(&self, placement: &Placement) -> Result<Tries, StoreError> {
        let place = *placement;
        self.read(place, move |from| attempts::tries(from, &place)).await
    }

    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError> {
        let key = format!("tasks for {}", purpose.name());
        self.read(key, move |from| attempts::tasks(from, purpose)).await
    }

    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        let key = format!("attempts for {}", purpose.name());
        self.read(key, move |from| attempts::summaries(from, purpose)).await
    }

    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError> {
        let key = format!("failures for {}", purpose.name());
        self.read(key, move |from| attempts::failures(from, purpose)).await
    }

    async fn record_step(&self, plan: &StepPlan) -> Result<Recorded, StoreError> {
        let plan = plan.clone();
        self.write(ledger::key(plan.phase, plan.step), move |to| ledger::record(to, &plan)).await
    }

    async fn step(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        self.read(ledger::key(phase, step), move |from| ledger::read(from, phase, step)).await
    }

    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.read("the ledger", ledger::planned).await
    }

    async fn record_eval(&self, key: EvalKey, result: &serde_json::Value) -> Result<Recorded, StoreError> {
        let text = result.to_string();
        self.write(key, move |to| evals::record(to, key, &text)).await
    }

    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.read("evaluations", evals::all).await
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Failure::Backend(code_of(&error), error.into())
    }
}

/// The kind of an error of SQLite.
pub(crate) fn code_of(error: &rusqlite::Error) -> Code {
    use rusqlite::{Error, ErrorCode};
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Code::Full,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::OutOfMemory) => {
            Code::Unavailable
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => Code::Forbidden,
        Some(ErrorCode::NotADatabase) => Code::Foreign,
        Some(ErrorCode::DatabaseCorrupt) => Code::Damaged,
        // A value of another type than was written.
        None if matches!(
            error,
            Error::FromSqlConversionFailure(..)
                | Error::InvalidColumnType(..)
                | Error::IntegralValueOutOfRange(..)
        ) =>
        {
            Code::Damaged
        }
        _ => Code::Internal,
    }
}

/// Copies an error for another one who waits.
fn again(error: &rusqlite::Error) -> rusqlite::Error {
    match error {
        rusqlite::Error::SqliteFailure(code, text) => rusqlite::Error::SqliteFailure(*code, text.clone()),
        other => {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ERROR);
            rusqlite::Error::SqliteFailure(code, Some(other.to_string()))
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
