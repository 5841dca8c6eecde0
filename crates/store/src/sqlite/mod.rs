//! A store in one SQLite file in WAL mode, written by one thread and read by another.
//!
//! A call sends a job to a thread and waits for the result, with a deadline. So no async worker
//! waits for the disk or encodes a blob. The writing thread commits all queued writes in one
//! transaction, with a savepoint for each, and sends the results after the flush. A caller that
//! stops waiting for a write must keep the value until it knows that the value is recorded.

mod attempts;
mod check;
mod checksum;
mod evals;
mod ledger;
mod migrate;
mod opening;
mod read_only;
pub(crate) mod rollouts;
mod schema;
mod segments;
mod withdrawals;
mod worker;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use levade_policy::process_time;
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId, Segment};
use rusqlite::Connection;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tracing::{debug, trace};

use crate::error::{Code, Failure};
use crate::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, EvalKey, FailedAttempt, StepPlan, Store,
    StoreError, TryCounts, WithdrawRequest, Withdrawal, WriteOutcome,
};
pub use check::{CheckReport, Finding, FindingKind, ValueCounts, check_file};
pub use schema::SCHEMA_VERSION;
use worker::{DatabaseThread, JobReceiver, QueuedJob};

/// Timeout for the result of a job on a database thread. It exceeds the time for which a thread
/// waits for another process.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);

/// Timeout for opening a file, because the file may have to be migrated or copied completely.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3600);

/// A store in an SQLite file. Several handles, in one process or many, may read and write at the
/// same time.
///
/// Dropping a handle blocks until all queued jobs are done and the file is closed, but no longer
/// than 120 seconds per thread.
pub struct Sqlite {
    file: PathBuf,
    location: String,
    run: RunId,
    /// Timeout for the result of a job on a database thread.
    timeout: Duration,
    /// Thread that writes. `None` if the store was opened only for reading.
    writer: Option<DatabaseThread>,
    reader: DatabaseThread,
}

impl fmt::Debug for Sqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sqlite")
            .field("file", &self.file)
            .field("run", &self.run)
            .finish_non_exhaustive()
    }
}

/// An open database connection, and the directory of the temporary copy if a copy is read instead
/// of the file.
pub(crate) type OpenedFile = (Connection, Option<TempDir>);

impl Sqlite {
    /// Opens the store of `run` for writing.
    ///
    /// Creates the file if it does not exist, and migrates a file of an earlier build. If the
    /// migration fails, the file keeps its earlier schema and all its data.
    ///
    /// # Errors
    /// - Returns [`StoreError::Open`] if the file cannot be opened or is not an SQLite database.
    /// - Returns [`StoreError::Foreign`] if the file belongs to another program, and
    ///   [`StoreError::OtherRun`] if it belongs to another run.
    /// - Returns [`StoreError::Version`] if this build cannot read the schema version of the file.
    /// - Returns another error if the migration fails or if opening takes longer than an hour.
    pub async fn open(file: &Path, run: &RunId) -> Result<Self, StoreError> {
        let wanted = run.clone();
        let store =
            Self::open_with_writer(file, move |file| opening::open_for_writing(file, &wanted))
                .await?;
        if store.run != *run {
            let location = store.location.clone();
            let found = store.run.to_string();
            return Err(StoreError::OtherRun { location, found, expected: run.to_string() });
        }
        Ok(store)
    }

    /// Opens an existing store for writing, whatever its run id.
    ///
    /// An empty file, left by a process that was killed before it had written anything, becomes the
    /// store of the run `new`. A file of an earlier build is migrated first, as by
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// Returns [`StoreError::Open`] with [`Code::NotFound`] if the file does not exist, and
    /// otherwise the errors of [`open`](Self::open) except [`StoreError::OtherRun`].
    pub async fn resume(file: &Path, new: &RunId) -> Result<Self, StoreError> {
        let new = new.clone();
        Self::open_with_writer(file, move |file| opening::open_to_resume(file, &new)).await
    }

    /// Opens an existing store only for reading.
    ///
    /// This needs no write permission and works while another process writes the file. If an
    /// earlier build wrote the file, a copy is migrated and read. Every write returns
    /// [`StoreError::ReadOnly`].
    ///
    /// # Errors
    /// - Returns [`StoreError::Open`] if the file does not exist, cannot be opened, or is not an
    ///   SQLite database.
    /// - Returns [`StoreError::Empty`] if the file has no tables, and [`StoreError::Foreign`] if it
    ///   belongs to another program.
    /// - Returns [`StoreError::Version`] if this build cannot read the schema version of the file.
    /// - Returns [`StoreError::Unwritable`] if a copy is needed but cannot be made.
    /// - Returns another error if the migration of the copy fails or if opening takes longer than
    ///   an hour.
    pub async fn open_existing(file: &Path) -> Result<Self, StoreError> {
        let (reader, run) =
            start_thread(file, "levade-read", opening::open_for_reading, worker::process_reads)
                .await?;
        Ok(Self::from_parts(file, run, None, reader))
    }

    async fn open_with_writer(
        file: &Path,
        open: impl FnOnce(&Path) -> Result<OpenedFile, StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (writer, run) =
            start_thread(file, "levade-store", open, worker::process_writes).await?;
        let (reader, _) =
            start_thread(file, "levade-read", opening::open_reader, worker::process_reads).await?;
        Ok(Self::from_parts(file, run, Some(writer), reader))
    }

    fn from_parts(
        file: &Path,
        run: RunId,
        writer: Option<DatabaseThread>,
        reader: DatabaseThread,
    ) -> Self {
        let location = file.display().to_string();
        Sqlite { file: file.to_owned(), location, run, timeout: RESPONSE_TIMEOUT, writer, reader }
    }

    /// Returns the path of the SQLite file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Runs `work` on the thread that reads, on one consistent snapshot.
    async fn read<T: Send + 'static>(
        &self,
        key: impl fmt::Display + Send,
        work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        let key = key.to_string();
        run_on_worker(&self.reader, (&self.location, "read", key), self.timeout, work).await
    }

    /// Runs `work` on the thread that writes. Commits all changes of `work`, or none of them.
    async fn write<T: Send + 'static>(
        &self,
        key: impl fmt::Display + Send,
        work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        let key = key.to_string();
        match &self.writer {
            Some(writer) => {
                run_on_worker(writer, (&self.location, "record", key), self.timeout, work).await
            }
            None => Err(StoreError::ReadOnly { location: self.location.clone(), key }),
        }
    }
}

impl Sqlite {
    /// Rewrites the file without its free pages, and truncates its write-ahead log, so that erased
    /// texts are gone. Waits at most an hour.
    async fn remove_free_pages(&self) -> Result<(), StoreError> {
        let (to, outcome) = oneshot::channel();
        let file = self.file.clone();
        tokio::task::spawn_blocking(move || drop(to.send(withdrawals::remove_free_pages(&file))));
        let key = "the erased texts".to_owned();
        let location = &self.location;
        let outcome = wait_for_result(location, "erase", key, OPEN_TIMEOUT, outcome).await?;
        outcome.map_err(|(failure, key)| failure.into_error(location, "erase", key))
    }
}

/// Runs `work` on a database thread and waits for its result. Location, action and key name the
/// operation in errors and logs.
async fn run_on_worker<T: Send + 'static>(
    worker: &DatabaseThread,
    (location, action, key): (&str, &'static str, String),
    timeout: Duration,
    work: impl FnMut(&Connection) -> Result<T, Failure> + Send + 'static,
) -> Result<T, StoreError> {
    let start = Instant::now();
    let (job, outcome) = QueuedJob::new(work);
    // If the thread has exited, the job is dropped with its channel, and the wait below ends.
    worker.send(Box::new(job));
    let outcome = wait_for_result(location, action, key.clone(), timeout, outcome).await;
    let outcome = outcome.and_then(|outcome| {
        outcome.map_err(|(failure, key)| failure.into_error(location, action, key))
    });
    let seconds = start.elapsed().as_secs_f64();
    match &outcome {
        Err(error) => debug!(%key, seconds, %error, "cannot {action}"),
        Ok(_) if action == "read" => trace!(%key, seconds, "read"),
        Ok(_) => debug!(%key, seconds, "recorded"),
    }
    outcome
}

/// Waits for the result of a job. The outer error states that the thread exited or did not respond
/// in time. The inner error is the error of the job, together with `key`.
async fn wait_for_result<T, E>(
    location: &str,
    action: &'static str,
    key: String,
    timeout: Duration,
    outcome: oneshot::Receiver<Result<T, E>>,
) -> Result<Result<T, (E, String)>, StoreError> {
    let outcome = process_time::with_timeout(timeout, outcome).await;
    if let Some(Ok(result)) = outcome {
        return Ok(result.map_err(|error| (error, key)));
    }
    let location = location.to_owned();
    Err(match outcome {
        Some(_) => StoreError::Stopped { location, action, key },
        None => StoreError::Deadline { location, action, key, waited: timeout },
    })
}

/// Starts a database thread on the file of a run. Returns the thread and the id of the run in the
/// file.
async fn start_thread(
    file: &Path,
    name: &str,
    open: impl FnOnce(&Path) -> Result<OpenedFile, StoreError> + Send + 'static,
    work: fn(&mut Connection, &JobReceiver),
) -> Result<(DatabaseThread, RunId), StoreError> {
    let location = file.display().to_string();
    let file = file.to_owned();
    let open = move || {
        let opened = open(&file)?;
        let run = schema::read_run_id(&opened.0, &file)?;
        Ok((opened, run))
    };
    start_worker(&location, (name, "the store"), OPEN_TIMEOUT, open, work).await
}

/// Starts a database thread, which opens a connection with `open` and then processes jobs with
/// `work`. `name` is the name of the thread, and `key` the name of the opened store in error
/// messages. Returns the thread and the second value that `open` returned. In a test after
/// [`levade_policy::block_in_caller`], each job runs in its caller instead.
async fn start_worker<T: Send + 'static>(
    location: &str,
    (name, key): (&str, &str),
    timeout: Duration,
    open: impl FnOnce() -> Result<(OpenedFile, T), StoreError> + Send + 'static,
    work: fn(&mut Connection, &JobReceiver),
) -> Result<(DatabaseThread, T), StoreError> {
    #[cfg(any(test, feature = "testing"))]
    if levade_policy::is_blocking_in_caller() {
        let ((connection, _), value) = open()?;
        return Ok((DatabaseThread::in_caller(connection, work), value));
    }
    let (to, outcome) = oneshot::channel();
    let thread = move |inbox: &JobReceiver| match open() {
        // The copy must outlive the connection.
        Ok(((mut connection, _copy), value)) => {
            if to.send(Ok(value)).is_ok() {
                work(&mut connection, inbox);
            }
            drop(connection);
        }
        Err(error) => drop(to.send(Err(error))),
    };
    let worker = DatabaseThread::start(name, RESPONSE_TIMEOUT, thread).map_err(|source| {
        StoreError::Open {
            location: location.to_owned(),
            code: Code::Unavailable,
            source: source.into(),
        }
    })?;
    let value = wait_for_result(location, "open", key.into(), timeout, outcome)
        .await?
        .map_err(|(error, _)| error)?;
    Ok((worker, value))
}

#[async_trait]
impl Store for Sqlite {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn location(&self) -> &str {
        &self.location
    }

    async fn start_attempt(&self, start: &AttemptStart) -> Result<WriteOutcome, StoreError> {
        let run = self.run.clone();
        let start = start.clone();
        self.write(start.slot, move |to| attempts::start_attempt(to, &run, &start)).await
    }

    async fn append_segments(
        &self,
        id: &AttemptId,
        segments: &[Segment],
    ) -> Result<WriteOutcome, StoreError> {
        let id = *id;
        let segments = segments.to_vec();
        self.write(attempts::attempt_key(&id), move |to| {
            attempts::append_segments(to, &id, &segments)
        })
        .await
    }

    async fn end_attempt(
        &self,
        id: &AttemptId,
        end: &AttemptEnd,
    ) -> Result<WriteOutcome, StoreError> {
        let id = *id;
        let end = end.clone();
        self.write(attempts::attempt_key(&id), move |to| attempts::end_attempt(to, &id, &end)).await
    }

    async fn abandon_running(&self) -> Result<u64, StoreError> {
        self.write("running attempts", attempts::abandon_running).await
    }

    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<WriteOutcome, StoreError> {
        let run = self.run.clone();
        let attempts = attempts.to_vec();
        let key = match &attempts[..] {
            [one] => one.slot.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.write(key, move |to| attempts::record_attempts(to, &run, &attempts)).await
    }

    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        let id = *id;
        self.read(attempts::attempt_key(&id), move |from| attempts::read_attempt(from, &id)).await
    }

    async fn last_try(&self, slot: &AttemptSlot) -> Result<Option<Attempt>, StoreError> {
        let slot = *slot;
        self.read(slot, move |from| attempts::read_last_try(from, &slot)).await
    }

    async fn count_tries(&self, slot: &AttemptSlot) -> Result<TryCounts, StoreError> {
        let slot = *slot;
        self.read(slot, move |from| attempts::count_tries(from, &slot)).await
    }

    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError> {
        let key = format!("tasks for {}", purpose.name());
        self.read(key, move |from| attempts::read_tasks(from, purpose)).await
    }

    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        let key = format!("attempts for {}", purpose.name());
        self.read(key, move |from| attempts::read_summaries(from, purpose)).await
    }

    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError> {
        let key = format!("failures for {}", purpose.name());
        self.read(key, move |from| attempts::read_failures(from, purpose)).await
    }

    async fn record_step(&self, plan: &StepPlan) -> Result<WriteOutcome, StoreError> {
        let plan = plan.clone();
        self.write(ledger::plan_key(plan.phase, plan.step), move |to| {
            ledger::record_plan(to, &plan)
        })
        .await
    }

    async fn step_plan(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        self.read(ledger::plan_key(phase, step), move |from| ledger::read_plan(from, phase, step))
            .await
    }

    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.read("the planned steps", ledger::read_planned_steps).await
    }

    async fn record_eval(
        &self,
        key: EvalKey,
        result: &serde_json::Value,
    ) -> Result<WriteOutcome, StoreError> {
        let text = result.to_string();
        self.write(key, move |to| evals::record_eval(to, key, &text)).await
    }

    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.read("evaluations", evals::read_all_evals).await
    }

    async fn withdraw(&self, request: &WithdrawRequest) -> Result<Vec<Withdrawal>, StoreError> {
        let erase = request.erase;
        let request = request.clone();
        let added = self
            .write("a withdrawal", move |to| withdrawals::record_withdrawals(to, &request))
            .await?;
        if erase {
            self.remove_free_pages().await?;
        }
        Ok(added)
    }

    async fn withdrawals(&self) -> Result<Vec<Withdrawal>, StoreError> {
        self.read("withdrawals", withdrawals::read_tombstones).await
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Self {
        Failure::Backend(classify_error(&error), error.into())
    }
}

/// Maps an SQLite error to a category of store errors.
pub(crate) fn classify_error(error: &rusqlite::Error) -> Code {
    use rusqlite::{Error, ErrorCode};
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Code::Full,
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked | ErrorCode::OutOfMemory) => {
            Code::Unavailable
        }
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied | ErrorCode::CannotOpen) => {
            Code::Forbidden
        }
        Some(ErrorCode::NotADatabase) => Code::Foreign,
        Some(ErrorCode::DatabaseCorrupt) => Code::Corrupt,
        // A value does not have the type of its column.
        None if matches!(
            error,
            Error::FromSqlConversionFailure(..)
                | Error::InvalidColumnType(..)
                | Error::IntegralValueOutOfRange(..)
        ) =>
        {
            Code::Corrupt
        }
        _ => Code::Internal,
    }
}

/// Copies an SQLite error, so that several callers can receive it.
fn copy_error(error: &rusqlite::Error) -> rusqlite::Error {
    match error {
        rusqlite::Error::SqliteFailure(code, text) => {
            rusqlite::Error::SqliteFailure(*code, text.clone())
        }
        other => {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ERROR);
            rusqlite::Error::SqliteFailure(code, Some(other.to_string()))
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
