//! A thread that owns an SQLite connection and runs jobs on it, in order.
//!
//! Queued writes share one transaction, with a savepoint for each. So one flush serves all of them,
//! and a rejected write does not affect the other writes. Results are sent after the commit. Jobs
//! that are in the queue when the last handle is dropped are still run.

use std::any::Any;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use levade_policy::process_time;
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::oneshot;

use super::copy_error;
use crate::error::{Code, Failure};

/// Maximum number of writes that are committed in one transaction.
const MAX_BATCH_JOBS: usize = 256;

/// A job for a database thread, together with the channel for its result.
pub(super) trait DatabaseJob: Send {
    /// Runs the job and returns whether it succeeded. The job can run again if its transaction was
    /// rolled back.
    fn run(&mut self, connection: &Connection) -> bool;
    /// Sets the result to a failure whose cause lies outside the job.
    fn set_failure(&mut self, failure: Failure);
    /// Sends the result to the caller.
    fn send_result(self: Box<Self>);
}

/// A job that calls a function with the connection.
pub(super) struct QueuedJob<T, W> {
    work: W,
    result: Option<Result<T, Failure>>,
    to: oneshot::Sender<Result<T, Failure>>,
}

impl<T, W> QueuedJob<T, W> {
    /// Creates a job that runs `work`, and the receiver of its result.
    pub fn new(work: W) -> (Self, oneshot::Receiver<Result<T, Failure>>) {
        let (to, receiver) = oneshot::channel();
        (QueuedJob { work, result: None, to }, receiver)
    }
}

impl<T: Send, W: FnMut(&Connection) -> Result<T, Failure> + Send> DatabaseJob for QueuedJob<T, W> {
    fn run(&mut self, connection: &Connection) -> bool {
        // After a panic, the transaction or the savepoint is rolled back, so the connection remains
        // usable.
        let result =
            catch_unwind(AssertUnwindSafe(|| (self.work)(connection))).unwrap_or_else(|panic| {
                Err(Failure::Backend(Code::Internal, panic_message(&*panic).into()))
            });
        self.result.insert(result).is_ok()
    }

    fn set_failure(&mut self, failure: Failure) {
        self.result = Some(Err(failure));
    }

    fn send_result(self: Box<Self>) {
        if let Some(result) = self.result {
            // The caller may have stopped waiting.
            let _ = self.to.send(result);
        }
    }
}

/// Returns the message of a caught panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    format!(
        "a panic: {}",
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
    )
}

/// The receiving end of a database thread's job queue.
pub(super) type JobReceiver = Receiver<Box<dyn DatabaseJob>>;

/// Destination of the jobs that a [`DatabaseThread`] gets: a thread, or the caller in tests.
enum JobQueue {
    Thread(Sender<Box<dyn DatabaseJob>>),
    /// The calling thread runs each job with this function on this connection.
    #[cfg(any(test, feature = "testing"))]
    Caller(Mutex<Connection>, fn(&mut Connection, &JobReceiver)),
}

/// A handle to a database thread. Dropping it waits until all queued jobs are done, or until
/// `timeout` has passed.
pub(super) struct DatabaseThread {
    /// Queue of the jobs. `None` while the handle is being dropped.
    queue: Option<JobQueue>,
    /// Channel that is disconnected when the thread has closed its connection.
    ended: Mutex<Receiver<Infallible>>,
    /// Timeout for the thread to close its connection.
    timeout: Duration,
}

impl DatabaseThread {
    /// Starts a database thread that runs `work`, which must process jobs until the queue is
    /// closed.
    ///
    /// # Errors
    /// Returns an error if the operating system cannot create a thread.
    pub fn start(
        name: &str,
        timeout: Duration,
        work: impl FnOnce(&JobReceiver) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (queue, jobs) = mpsc::channel();
        let (exit_sender, ended) = mpsc::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _exit_sender = exit_sender;
            work(&jobs);
        })?;
        Ok(DatabaseThread {
            queue: Some(JobQueue::Thread(queue)),
            ended: Mutex::new(ended),
            timeout,
        })
    }

    /// Creates a worker without a thread: [`send`](Self::send) runs each job in the calling thread,
    /// so that jobs run in the order of the calls.
    #[cfg(any(test, feature = "testing"))]
    pub fn in_caller(connection: Connection, work: fn(&mut Connection, &JobReceiver)) -> Self {
        let (_, ended) = mpsc::channel();
        let queue = Some(JobQueue::Caller(Mutex::new(connection), work));
        DatabaseThread { queue, ended: Mutex::new(ended), timeout: Duration::ZERO }
    }

    /// Queues a job. Returns `false` if the thread has exited, which drops the job.
    pub fn send(&self, job: Box<dyn DatabaseJob>) -> bool {
        match &self.queue {
            Some(JobQueue::Thread(queue)) => queue.send(job).is_ok(),
            #[cfg(any(test, feature = "testing"))]
            Some(JobQueue::Caller(connection, work)) => {
                let (one, jobs) = mpsc::channel();
                let is_sent = one.send(job).is_ok();
                drop(one);
                work(&mut connection.lock().unwrap_or_else(PoisonError::into_inner), &jobs);
                is_sent
            }
            None => false,
        }
    }
}

impl Drop for DatabaseThread {
    fn drop(&mut self) {
        self.queue = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        // If the limit passes, the thread hangs in a system call. Writes that it reported as
        // recorded are durable.
        let _ = process_time::receive(ended, self.timeout);
    }
}

/// Processes write jobs until all handles of the queue are dropped. Queued jobs share one commit.
pub(super) fn process_writes(connection: &mut Connection, queue: &JobReceiver) {
    while let Ok(first) = queue.recv() {
        let mut jobs = vec![first];
        jobs.extend(queue.try_iter().take(MAX_BATCH_JOBS - 1));
        if jobs.len() == 1 || !run_batch(connection, &mut jobs) {
            // Each job runs in its own transaction, so that only the failing ones are rejected.
            jobs.iter_mut().for_each(|job| run_single(connection, &mut **job));
        }
        jobs.into_iter().for_each(|job| job.send_result());
    }
}

/// Runs all jobs in one transaction. Returns `false` if the transaction was rolled back, so that no
/// job has an effect.
fn run_batch(connection: &mut Connection, jobs: &mut [Box<dyn DatabaseJob>]) -> bool {
    let transaction = match connection.transaction_with_behavior(TransactionBehavior::Immediate) {
        Ok(transaction) => transaction,
        // Another process is writing. The busy timeout has passed, so it is not applied again to
        // each job.
        Err(error) => {
            jobs.iter_mut().for_each(|job| job.set_failure(copy_error(&error).into()));
            return true;
        }
    };
    for job in jobs {
        if execute_cached(&transaction, "SAVEPOINT job").is_err() {
            return false;
        }
        let succeeded = job.run(&transaction);
        // Some errors, such as a full disk, roll back the transaction and not only the failed
        // statement.
        if transaction.is_autocommit()
            || !succeeded && execute_cached(&transaction, "ROLLBACK TO job").is_err()
            || execute_cached(&transaction, "RELEASE job").is_err()
        {
            return false;
        }
    }
    transaction.commit().is_ok()
}

/// Executes an SQL statement that is parsed once and cached. rusqlite's own savepoints would be
/// parsed for each job.
fn execute_cached(connection: &Connection, sql: &str) -> rusqlite::Result<usize> {
    connection.prepare_cached(sql)?.execute([])
}

fn run_single(connection: &mut Connection, job: &mut dyn DatabaseJob) {
    if let Err(error) = try_single(connection, job) {
        job.set_failure(error.into());
    }
}

fn try_single(connection: &mut Connection, job: &mut dyn DatabaseJob) -> rusqlite::Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if job.run(&transaction) { transaction.commit() } else { Ok(()) }
}

/// Processes read jobs until all handles of the queue are dropped. Each job sees one consistent
/// snapshot.
pub(super) fn process_reads(connection: &mut Connection, queue: &JobReceiver) {
    while let Ok(mut job) = queue.recv() {
        match connection.transaction() {
            Ok(transaction) => {
                job.run(&transaction);
            }
            Err(error) => job.set_failure(error.into()),
        }
        job.send_result();
    }
}
