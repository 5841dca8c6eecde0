//! A thread that owns a connection and does what is asked of it, in order.
//!
//! Writes that wait together become one transaction with a savepoint each: one flush for all, and one that
//! is refused takes none of the others with it. Each is answered after the commit. What is in the queue
//! when the last handle goes is still done.

use std::any::Any;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use levade_policy::awake;
use rusqlite::{Connection, TransactionBehavior};
use tokio::sync::oneshot;

use super::again;
use crate::error::{Code, Failure};

/// Most writes that share a transaction.
const TOGETHER: usize = 256;

/// Something to be done with a connection, and the way back to whoever asked.
pub(super) trait Job: Send {
    /// Does it; whether it succeeded. Can be done again where the transaction around it was undone.
    fn run(&mut self, connection: &Connection) -> bool;
    /// Makes it fail for a reason outside of it.
    fn fail(&mut self, failure: Failure);
    /// Says how it went.
    fn answer(self: Box<Self>);
}

/// A function of a connection, and who waits for its result.
pub(super) struct Asked<T, W> {
    work: W,
    result: Option<Result<T, Failure>>,
    to: oneshot::Sender<Result<T, Failure>>,
}

impl<T, W> Asked<T, W> {
    /// A job, and where its result comes.
    pub fn new(work: W) -> (Self, oneshot::Receiver<Result<T, Failure>>) {
        let (to, answer) = oneshot::channel();
        (Asked { work, result: None, to }, answer)
    }
}

impl<T: Send, W: FnMut(&Connection) -> Result<T, Failure> + Send> Job for Asked<T, W> {
    fn run(&mut self, connection: &Connection) -> bool {
        // A panic undoes the transaction or its part, and the connection is as good as before.
        let result = catch_unwind(AssertUnwindSafe(|| (self.work)(connection)))
            .unwrap_or_else(|panic| Err(Failure::Backend(Code::Internal, words(&*panic).into())));
        self.result.insert(result).is_ok()
    }

    fn fail(&mut self, failure: Failure) {
        self.result = Some(Err(failure));
    }

    fn answer(self: Box<Self>) {
        if let Some(result) = self.result {
            // Whoever asked may have gone.
            let _ = self.to.send(result);
        }
    }
}

/// The message of a panic.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    format!("a panic: {}", text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words"))
}

/// The jobs of a worker, as they come.
pub(super) type Inbox = Receiver<Box<dyn Job>>;

/// A handle on the thread. Dropping it waits until everything that was asked is done.
pub(super) struct Worker {
    /// `None` once it is dropped.
    inbox: Option<Sender<Box<dyn Job>>>,
    /// Disconnected once the thread has closed its connection.
    ended: Mutex<Receiver<Infallible>>,
    /// The longest wait for that.
    limit: Duration,
}

impl Worker {
    /// A thread that runs `work`, which takes jobs until there are no more.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        name: &str,
        limit: Duration,
        work: impl FnOnce(&Inbox) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (inbox, jobs) = mpsc::channel();
        let (alive, ended) = mpsc::channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _alive = alive;
            work(&jobs);
        })?;
        Ok(Worker { inbox: Some(inbox), ended: Mutex::new(ended), limit })
    }

    /// Puts a job into the queue; `false` where the thread is gone.
    pub fn send(&self, job: Box<dyn Job>) -> bool {
        self.inbox.as_ref().is_some_and(|inbox| inbox.send(job).is_ok())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.inbox = None;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Beyond the limit it hangs in a call of the system. Whatever it has said is recorded is durable.
        let _ = awake::receive(ended, self.limit);
    }
}

/// Writes until no handle is left.
pub(super) fn write(connection: &mut Connection, inbox: &Inbox) {
    while let Ok(first) = inbox.recv() {
        let mut jobs = vec![first];
        jobs.extend(inbox.try_iter().take(TOGETHER - 1));
        if jobs.len() == 1 || !together(connection, &mut jobs) {
            // Each alone, so that only those fail that cannot be done.
            jobs.iter_mut().for_each(|job| alone(connection, &mut **job));
        }
        jobs.into_iter().for_each(|job| job.answer());
    }
}

/// Does all in one transaction. `false` where that was undone as a whole.
fn together(connection: &mut Connection, jobs: &mut [Box<dyn Job>]) -> bool {
    let mut transaction = match connection.transaction_with_behavior(TransactionBehavior::Immediate) {
        Ok(transaction) => transaction,
        // Another process writes. It was waited for, and is not waited for again for each.
        Err(error) => {
            jobs.iter_mut().for_each(|job| job.fail(again(&error).into()));
            return true;
        }
    };
    for job in jobs {
        let Ok(savepoint) = transaction.savepoint() else { return false };
        let succeeded = job.run(&savepoint);
        // A full disk and the like undo more than the statement that met them.
        if savepoint.is_autocommit() {
            return false;
        }
        let ended = if succeeded { savepoint.commit() } else { savepoint.finish() };
        if ended.is_err() {
            return false;
        }
    }
    transaction.commit().is_ok()
}

fn alone(connection: &mut Connection, job: &mut dyn Job) {
    let mut run = || -> rusqlite::Result<()> {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if job.run(&transaction) { transaction.commit() } else { Ok(()) }
    };
    if let Err(error) = run() {
        job.fail(error.into());
    }
}

/// Reads until no handle is left, each job on one consistent snapshot.
pub(super) fn read(connection: &mut Connection, inbox: &Inbox) {
    while let Ok(mut job) = inbox.recv() {
        match connection.transaction() {
            Ok(transaction) => {
                job.run(&transaction);
            }
            Err(error) => job.fail(error.into()),
        }
        job.answer();
    }
}
