//! The lease of a run: one trainer writes the ledger, and a trainer that lost the lease stops.
//!
//! The document `run` names the owner, the epoch and the time until which the lease lasts, by the
//! clock of the server. A trainer that starts or resumes the run raises the epoch. It renews the
//! lease in the background, and writes only while a renewed lease lasts longer than any write takes.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_policy::process_time::{self, Stopwatch};
use levade_store::backend::Failure;
use levade_store::{Code, StoreError};
use levade_tree::RunId;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::info;

use crate::connection::{Connection, OperationError, Result, insert_new, now};
use crate::fields;

/// Duration of the lease.
const TTL: Duration = Duration::from_secs(60);

/// Interval between two renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);

/// Rest of the lease below which a write renews it first.
const MIN_REST: Duration = Duration::from_secs(30);

/// Timeout for the lease of another trainer to end.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(90);

/// Interval between two looks at the lease of another trainer.
const ACQUIRE_INTERVAL: Duration = Duration::from_secs(1);

/// Version of the documents that this build reads and writes.
const FORMAT: i32 = 1;

/// The lease of a run by this process. Dropping it ends the renewals and returns the lease.
#[derive(Debug)]
pub(crate) struct RunLease {
    connection: Arc<Connection>,
    epoch: i64,
    /// Time until which the lease lasts, by the clock of this process.
    until: Arc<Mutex<Instant>>,
    _stop: oneshot::Sender<()>,
}

/// Returns the owner name of the process that holds the lock of `run_dir`: the host and the
/// directory. Of two such processes, the earlier one has exited.
pub(crate) fn owner_of(run_dir: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let dir = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    format!("{}:{}", host.trim(), dir.display())
}

/// Returns the id of the run in the database, or `None` if the database contains no run.
///
/// # Errors
/// Returns [`StoreError::Version`] if another build wrote the database in another format.
pub(crate) async fn stored_run(
    connection: &Connection,
) -> std::result::Result<Option<RunId>, StoreError> {
    let read = || async { Ok(run_document(connection).await?) };
    let Some(run) = connection.run("read", "the run", read).await? else { return Ok(None) };
    let parse = || Ok::<_, Failure>((fields::integer(&run, "format")?, fields::text(&run, "run")?));
    let location = || connection.location.clone();
    let (found, run) =
        parse().map_err(|failure| failure.into_error(&location(), "read", "the run".to_owned()))?;
    if found != FORMAT {
        return Err(StoreError::Version { location: location(), found, expected: FORMAT });
    }
    Ok(Some(RunId(run)))
}

/// Creates the document of a run unless there is one.
pub(crate) async fn create_run(
    connection: &Connection,
    run: &RunId,
) -> std::result::Result<(), StoreError> {
    let document = doc! { "_id": "run", "run": &run.0, "format": FORMAT, "epoch": 0_i64 };
    let create =
        || async { insert_new(&connection.collection("run"), document.clone()).await.map(drop) };
    connection.run("record", "the run", create).await
}

async fn run_document(connection: &Connection) -> mongodb::error::Result<Option<Document>> {
    connection.collection("run").find_one(doc! { "_id": "run" }).await
}

impl RunLease {
    /// Acquires the lease for `owner`, and renews it in the background until the value is dropped.
    /// Waits while another owner has it.
    ///
    /// # Errors
    /// Returns [`StoreError::Failed`] with [`Code::Forbidden`] if another trainer keeps the lease.
    pub async fn acquire(
        connection: &Arc<Connection>,
        owner: &str,
    ) -> std::result::Result<Self, StoreError> {
        let mut watch = Stopwatch::start();
        loop {
            let start = Instant::now();
            let server_now = now() + connection.clock_offset;
            let free = doc! { "_id": "run", "$or": [
                { "owner": owner },
                { "owner": null },
                { "until": { "$lt": server_now } },
            ] };
            let take = doc! {
                "$set": { "owner": owner, "until": server_now + TTL.as_secs_f64() },
                "$inc": { "epoch": 1_i64 },
            };
            let acquire = || async {
                let runs = connection.collection("run");
                let acquiring = runs.find_one_and_update(free.clone(), take.clone());
                match acquiring.return_document(ReturnDocument::After).await? {
                    Some(run) => Ok(Ok(fields::integer(&run, "epoch")?)),
                    None => Ok(Err(run_document(connection).await?.unwrap_or_default())),
                }
            };
            let holder = match connection.run("record", "the lease of the run", acquire).await? {
                Ok(epoch) => return Ok(Self::start(connection, epoch, start + TTL)),
                Err(run) => holder(&run),
            };
            if watch.elapsed() >= ACQUIRE_TIMEOUT {
                let failure = Failure::Backend(Code::Forbidden, format!(
                    "{holder} still works on the run after {} seconds; stop that trainer, or start a \
                     run in another directory", ACQUIRE_TIMEOUT.as_secs()).into());
                let key = "the lease of the run".to_owned();
                return Err(failure.into_error(&connection.location, "record", key));
            }
            info!(%holder, timeout = ?ACQUIRE_TIMEOUT, "waiting for the lease of the run");
            process_time::sleep(ACQUIRE_INTERVAL).await;
        }
    }

    fn start(connection: &Arc<Connection>, epoch: i64, until: Instant) -> Self {
        let until = Arc::new(Mutex::new(until));
        let (stop, mut stopped) = oneshot::channel::<()>();
        let renewed = Arc::clone(&until);
        let of = Arc::clone(connection);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = &mut stopped => break,
                    () = tokio::time::sleep(RENEW_INTERVAL) => {}
                }
                // A failure shows at the next write.
                let _ = renew(&of, epoch, &renewed).await;
            }
            let own = doc! { "_id": "run", "epoch": epoch };
            let _ = of.collection("run").update_one(own, doc! { "$set": { "owner": null } }).await;
        });
        RunLease { connection: Arc::clone(connection), epoch, until, _stop: stop }
    }

    /// Checks that this process may write: that no other trainer has raised the epoch, and that the
    /// lease lasts until the write is done. Renews the lease if it ends soon.
    ///
    /// # Errors
    /// Returns an error with [`Code::Forbidden`] if another trainer has acquired the lease.
    pub async fn check(&self) -> Result<()> {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if Instant::now() + MIN_REST > until {
            return renew(&self.connection, self.epoch, &self.until).await;
        }
        let run = run_document(&self.connection).await?.unwrap_or_default();
        let is_held = fields::optional_integer(&run, "epoch")? == Some(self.epoch);
        if is_held { Ok(()) } else { Err(lost(&run, self.epoch)) }
    }
}

/// Extends a lease.
///
/// # Errors
/// Returns an error with [`Code::Forbidden`] if another trainer has acquired the lease.
async fn renew(connection: &Connection, epoch: i64, until: &Mutex<Instant>) -> Result<()> {
    let start = Instant::now();
    let end = now() + connection.clock_offset + TTL.as_secs_f64();
    let own = doc! { "_id": "run", "epoch": epoch };
    let renewed =
        connection.collection("run").update_one(own, doc! { "$set": { "until": end } }).await?;
    if renewed.matched_count == 0 {
        let run = run_document(connection).await?.unwrap_or_default();
        return Err(lost(&run, epoch));
    }
    let mut until = until.lock().unwrap_or_else(PoisonError::into_inner);
    *until = (*until).max(start + TTL);
    Ok(())
}

/// Names the trainer that has the lease.
fn holder(run: &Document) -> String {
    match fields::optional_text(run, "owner") {
        Ok(Some(owner)) => format!("the trainer {owner}"),
        _ => "another trainer".to_owned(),
    }
}

/// Creates the error of a trainer whose lease another trainer has acquired.
fn lost(run: &Document, epoch: i64) -> OperationError {
    let current = run.get("epoch").map_or_else(|| "unknown".to_owned(), Bson::to_string);
    let text = format!(
        "{} has resumed the run (epoch {current}; this trainer has {epoch}); this trainer must stop",
        holder(run),
    );
    Failure::Backend(Code::Forbidden, text.into()).into()
}
