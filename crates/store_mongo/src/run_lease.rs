//! The lease of a run: one trainer writes the ledger, and a trainer that lost the lease stops.
//!
//! The document `run` contains the owner, the epoch, and the time at which the lease ends, by the
//! clock of the server. A trainer that starts or resumes the run raises the epoch. It renews the
//! lease in the background, and writes only while a renewed lease lasts longer than any write
//! takes.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_store::StoreError;
use levade_store::backend::Failure;
use levade_store::rollouts::Clock as _;
use levade_tree::RunId;
use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::connection::{Connection, OperationError, Result, insert_new};
use crate::fields;

/// Duration of a lease without renewal.
const TTL: Duration = Duration::from_secs(60);

/// Interval between two renewals of a lease.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);

/// Remaining time of a lease below which a write renews the lease first.
const MIN_REST: Duration = Duration::from_secs(30);

/// Format version of the documents that this build reads and writes.
const FORMAT: i32 = 1;

/// The lease of a run, which this process holds. Dropping the value ends the renewals and returns
/// the lease.
#[derive(Debug)]
pub(crate) struct RunLease {
    connection: Arc<Connection>,
    epoch: i64,
    /// Time at which the lease ends without a renewal, by the clock of this process.
    until: Arc<Mutex<Instant>>,
    _stop: oneshot::Sender<()>,
}

/// Returns the owner name of the process that has locked `run_dir`: host and directory. If two
/// processes have the same owner name, the earlier process has exited.
pub(crate) fn owner_name(run_dir: &Path) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let dir = std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    format!("{}:{}", host.trim(), dir.display())
}

/// Returns the id of the run that the database contains, or `None` if the database contains no run.
///
/// # Errors
/// Returns [`StoreError::Version`] if another build wrote the database in another format.
pub(crate) async fn read_run_id(
    connection: &Connection,
) -> std::result::Result<Option<RunId>, StoreError> {
    let location = &connection.location;
    let read =
        connection.run("read", "the run", || async { Ok(read_run_document(connection).await?) });
    let Some(document) = read.await? else { return Ok(None) };
    let (found, run) = parse_format_and_run(&document)
        .map_err(|failure| failure.into_error(location, "read", "the run".to_owned()))?;
    if found != FORMAT {
        let location = location.clone();
        return Err(StoreError::Version { location, found, expected: FORMAT });
    }
    Ok(Some(RunId(run)))
}

fn parse_format_and_run(document: &Document) -> std::result::Result<(i32, String), Failure> {
    Ok((fields::read_integer(document, "format")?, fields::read_text(document, "run")?))
}

/// Inserts the document of a run, unless the database contains a run already.
pub(crate) async fn create_run(
    connection: &Connection,
    run: &RunId,
) -> std::result::Result<(), StoreError> {
    let document = doc! { "_id": "run", "run": &run.0, "format": FORMAT, "epoch": 0_i64 };
    let create =
        || async { insert_new(&connection.collection("run"), document.clone()).await.map(drop) };
    connection.run("record", "the run", create).await
}

async fn read_run_document(connection: &Connection) -> mongodb::error::Result<Option<Document>> {
    connection.collection("run").find_one(doc! { "_id": "run" }).await
}

impl RunLease {
    /// Acquires the lease of the run for `owner`, and renews it in the background until the value
    /// is dropped.
    ///
    /// # Errors
    /// Returns [`StoreError::Leased`] if another trainer has the lease.
    pub async fn acquire(
        connection: &Arc<Connection>,
        owner: &str,
    ) -> std::result::Result<Self, StoreError> {
        let start = Instant::now();
        let server_now = connection.clock.now();
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
                Some(run) => Ok(Ok(fields::read_integer(&run, "epoch")?)),
                None => Ok(Err(read_run_document(connection).await?.unwrap_or_default())),
            }
        };
        match connection.run("record", "the lease of the run", acquire).await? {
            Ok(epoch) => Ok(Self::renew_in_background(connection, epoch, start + TTL)),
            Err(run) => Err(StoreError::Leased {
                location: connection.location.clone(),
                holder: holder_name(&run),
                seconds: (fields::read_number(&run, "until").unwrap_or(0.0) - server_now).ceil()
                    as u64,
            }),
        }
    }

    fn renew_in_background(connection: &Arc<Connection>, epoch: i64, until: Instant) -> Self {
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
                // If the renewal fails, the next write reports the error.
                let _ = renew(&of, epoch, &renewed).await;
            }
            let own = doc! { "_id": "run", "epoch": epoch };
            let _ = of.collection("run").update_one(own, doc! { "$set": { "owner": null } }).await;
        });
        RunLease { connection: Arc::clone(connection), epoch, until, _stop: stop }
    }

    /// Checks that this process may write: no other trainer has raised the lease number, and the
    /// lease lasts longer than any write. Renews the lease if it ends soon.
    ///
    /// # Errors
    /// Returns [`OperationError::Fenced`] if another trainer has acquired the lease.
    pub async fn check_and_renew(&self) -> Result<()> {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if Instant::now() + MIN_REST > until {
            return renew(&self.connection, self.epoch, &self.until).await;
        }
        let run = read_run_document(&self.connection).await?.unwrap_or_default();
        let is_held = fields::read_optional_integer(&run, "epoch")? == Some(self.epoch);
        if is_held { Ok(()) } else { Err(OperationError::Fenced(holder_name(&run))) }
    }
}

/// Extends the lease with the number `epoch`, and updates the time `until` at which it ends.
///
/// # Errors
/// Returns [`OperationError::Fenced`] if another trainer has acquired the lease.
async fn renew(connection: &Connection, epoch: i64, until: &Mutex<Instant>) -> Result<()> {
    let start = Instant::now();
    let end = connection.clock.now() + TTL.as_secs_f64();
    let own = doc! { "_id": "run", "epoch": epoch };
    let renewed =
        connection.collection("run").update_one(own, doc! { "$set": { "until": end } }).await?;
    if renewed.matched_count == 0 {
        let run = read_run_document(connection).await?.unwrap_or_default();
        return Err(OperationError::Fenced(holder_name(&run)));
    }
    let mut until = until.lock().unwrap_or_else(PoisonError::into_inner);
    *until = (*until).max(start + TTL);
    Ok(())
}

/// Returns the name of the trainer that has the lease, for an error message.
fn holder_name(run: &Document) -> String {
    let owner = fields::read_optional_text(run, "owner").ok().flatten();
    owner.unwrap_or_else(|| "a trainer that has ended since".to_owned())
}
