//! Rollouts in a MongoDB database: queues, leases, workers, resources and spans.

mod directory;
mod documents;
mod feed;
mod queue;
mod reads;
mod spans;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{process_time, random_hex};
use levade_store::rollouts::{
    Clock, Json, Lease, LeaseEnd, LeaseRequest, NewRollout, NewSpan, Page, PageRequest, Resources,
    ResourcesFilter, Result, Rollout, RolloutFilter, RolloutStatistics, RolloutUpdate, Rollouts,
    Span, SpanFilter, SpanOutcome, Try, TrySelector, TryUpdate, Worker, WorkerFilter,
};
use levade_store::{MongoUrl, StoreError, WriteOutcome};
use mongodb::Collection;
use mongodb::bson::{Document, doc};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::connection::{Connection, IndexDefinition, Result as OperationResult, insert_new};
use crate::fields;

/// Maximum interval between two polls of a waiting call, which bounds the delay until the call sees
/// writes of other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Minimum interval between two polls of a waiting call, which bounds the load while many writes
/// arrive.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Format version of the documents that this build reads and writes.
const FORMAT: i32 = 1;

/// A store of rollouts in a MongoDB database. Any number of processes can use the database at the
/// same time.
#[derive(Debug)]
pub struct MongoRollouts {
    connection: Connection,
    clock: Arc<dyn Clock>,
    /// Number of changes of rollouts that this process has written.
    changes: watch::Sender<u64>,
}

/// Returns the id for a new rollout: the requested id, or a generated id.
fn new_rollout_id(new: &NewRollout) -> String {
    new.id.clone().unwrap_or_else(|| new_id("ro-", 8))
}

/// Generates a random id: `prefix`, followed by `bytes` random bytes as hexadecimal digits.
fn new_id(prefix: &str, bytes: usize) -> String {
    format!("{prefix}{}", random_hex(bytes))
}

impl MongoRollouts {
    /// Opens the rollout store in the database that `url` names, or in the database `levade` if
    /// `url` names none. Creates the collections if they do not exist. All times are measured by
    /// the clock of the server.
    ///
    /// # Errors
    /// Returns [`StoreError::Deadline`] if no server responds, [`StoreError::Open`] if the server
    /// rejects the user, and [`StoreError::Version`] if another build wrote the rollouts in another
    /// format.
    pub async fn open(url: &MongoUrl) -> std::result::Result<Self, StoreError> {
        let connection = Connection::open(url, &url.rollouts_database_name()).await?;
        let clock = Arc::clone(&connection.clock);
        Self::on_connection(connection, clock).await
    }

    /// Opens the rollout store in the database of `connection`, with times measured by `clock`.
    pub(crate) async fn on_connection(
        connection: Connection,
        clock: Arc<dyn Clock>,
    ) -> std::result::Result<Self, StoreError> {
        let found = connection
            .run("record", "the rollouts", || async {
                let document = doc! { "_id": "rollouts", "format": FORMAT };
                let found = insert_new(&connection.collection("store"), document).await?;
                let found =
                    found.map(|found| fields::read_integer(&found, "format")).transpose()?;
                Ok(found.unwrap_or(FORMAT))
            })
            .await?;
        if found != FORMAT {
            let location = connection.location.clone();
            return Err(StoreError::Version { location, found, expected: FORMAT });
        }
        connection.create_indexes(list_index_definitions()).await?;
        Ok(MongoRollouts { connection, clock, changes: watch::Sender::new(0) })
    }

    fn collection(&self, name: &str) -> Collection<Document> {
        self.connection.collection(name)
    }

    async fn read<T, F>(
        &self,
        key: impl Into<String> + Send,
        operation: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = OperationResult<T>> + Send,
    {
        Ok(self.connection.run("read", key, operation).await?)
    }

    async fn write<T, F>(
        &self,
        key: impl Into<String> + Send,
        operation: impl Fn() -> F + Send + Sync,
    ) -> Result<T>
    where
        F: Future<Output = OperationResult<T>> + Send,
    {
        Ok(self.connection.run("record", key, operation).await?)
    }

    /// Calls `look` until it returns a value, or until `wait` is over. Calls it again after every
    /// change by this process, and at intervals because of other processes.
    async fn poll<T, F>(
        &self,
        wait: Duration,
        mut look: impl FnMut() -> F + Send,
    ) -> Result<Option<T>>
    where
        F: Future<Output = Result<Option<T>>> + Send,
    {
        let mut changes = self.changes.subscribe();
        // A wait beyond the range of the clock has no end.
        let deadline = Instant::now().checked_add(wait);
        loop {
            changes.borrow_and_update();
            let found = look().await?;
            if found.is_some() || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(found);
            }
            let left = deadline.map_or(POLL_INTERVAL, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            let _ = process_time::with_timeout(left.min(POLL_INTERVAL), changes.changed()).await;
            tokio::time::sleep(left.min(MIN_POLL_INTERVAL)).await;
        }
    }
}

/// Returns the definitions of all indexes of the rollout collections.
fn list_index_definitions() -> Vec<IndexDefinition> {
    let queue = doc! { "queue": 1, "queued": 1, "priority": -1, "enqueued": 1 };
    let span_id = doc! { "rollout": 1, "try": 1, "span_id": 1 };
    vec![
        IndexDefinition::plain("rollouts", "rollout_queue", queue),
        IndexDefinition::plain("rollouts", "rollout_key", doc! { "key": 1 }).unique().sparse(),
        IndexDefinition::plain("rollouts", "rollout_expiry", doc! { "expires": 1 }).sparse(),
        IndexDefinition::plain("rollouts", "rollout_lease", doc! { "lease_key": 1 }).sparse(),
        IndexDefinition::plain("rollouts", "rollout_status", doc! { "status": 1 }),
        IndexDefinition::plain("rollouts", "rollout_changed", doc! { "changed": 1 }),
        IndexDefinition::plain("rollouts", "rollout_order", doc! { "seq": 1 }),
        IndexDefinition::plain("spans", "span_id", span_id).unique(),
        IndexDefinition::plain("spans", "span_order", doc! { "rollout": 1, "number": 1 }),
        IndexDefinition::plain("resources", "resources_version", doc! { "id": 1, "version": 1 })
            .unique(),
        IndexDefinition::plain("resources", "resources_order", doc! { "seq": 1 }),
    ]
}

#[async_trait]
impl Rollouts for MongoRollouts {
    fn location(&self) -> &str {
        &self.connection.location
    }

    fn now(&self) -> f64 {
        self.clock.now()
    }

    async fn enqueue(&self, new: &[NewRollout]) -> Result<Vec<Rollout>> {
        // A repeated operation must not create the rollouts again.
        let ids: &Vec<String> = &new.iter().map(new_rollout_id).collect();
        self.write("rollouts", || self.enqueue_as(ids, new)).await
    }

    async fn start_rollout(&self, new: &NewRollout, worker: Option<&str>) -> Result<Rollout> {
        self.write("a rollout", || async { self.start_as(&new_rollout_id(new), new, worker).await })
            .await
    }

    async fn start_try(&self, rollout_id: &str, worker: Option<&str>) -> Result<Rollout> {
        self.write(rollout_id, || self.start_another(rollout_id, worker)).await
    }

    async fn lease_rollouts(&self, request: &LeaseRequest) -> Result<Vec<Rollout>> {
        if request.max == 0 {
            return Ok(Vec::new());
        }
        // Without a key of the caller, only repetitions within this call can return the same
        // leases.
        let own_key = request.key.clone().unwrap_or_else(|| new_id("own-", 8));
        let key = own_key.as_str();
        let lease = || self.write("leases", move || self.lease_once(request, key));
        let leased = lease().await?;
        if !leased.is_empty() || request.wait.is_zero() {
            return Ok(leased);
        }
        let look = || async {
            if !self.read("queues", || self.can_lease(&request.queues, key)).await? {
                return Ok(None);
            }
            // Another worker may have leased the rollout in the meantime.
            let leased = lease().await?;
            Ok((!leased.is_empty()).then_some(leased))
        };
        Ok(self.poll(request.wait, look).await?.unwrap_or_default())
    }

    async fn record_heartbeat(&self, lease: &Lease) -> Result<Option<f64>> {
        self.write(&lease.rollout_id, || self.report_heartbeat(lease)).await
    }

    async fn end_lease(
        &self,
        lease: &Lease,
        end: LeaseEnd,
        metadata: Option<Json>,
    ) -> Result<WriteOutcome> {
        let metadata = metadata.as_ref();
        self.write(&lease.rollout_id, || self.end_lease(lease, end, metadata)).await
    }

    async fn cancel_rollouts(&self, ids: &[String]) -> Result<u64> {
        self.write("rollouts", || self.cancel_all(ids)).await
    }

    async fn expire_tries(&self) -> Result<Vec<Try>> {
        self.write("timeouts", || self.expire_all()).await
    }

    async fn update_rollout(&self, rollout_id: &str, update: &RolloutUpdate) -> Result<Rollout> {
        self.write(rollout_id, || self.change_rollout(rollout_id, update)).await
    }

    async fn update_try(
        &self,
        rollout_id: &str,
        name: &TrySelector,
        update: &TryUpdate,
    ) -> Result<Try> {
        self.write(rollout_id, || self.change_try(rollout_id, name, update)).await
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>> {
        self.read(rollout_id, || async {
            let found = self.find_rollout(rollout_id).await?;
            found.map(|found| found.to_rollout()).transpose()
        })
        .await
    }

    async fn query_rollouts(
        &self,
        filter: &RolloutFilter,
        page: &PageRequest,
    ) -> Result<Page<Rollout>> {
        self.read("rollouts", || self.find_rollouts(filter, page)).await
    }

    async fn query_tries(&self, rollout_id: &str, page: &PageRequest) -> Result<Page<Try>> {
        self.read(rollout_id, || self.find_tries(rollout_id, page)).await
    }

    async fn wait_for_changes(
        &self,
        since: u64,
        max: usize,
        wait: Duration,
    ) -> Result<(Vec<Rollout>, u64)> {
        let look = || async {
            let changes = self.read("changes", || self.changed_after(since, max)).await?;
            Ok((!changes.is_empty()).then_some(changes))
        };
        let changes = self.poll(wait, look).await?.unwrap_or_default();
        let last = changes.last().map_or(since, |rollout| rollout.changed);
        Ok((changes, last))
    }

    async fn wait_until_finished(&self, ids: &[String], wait: Duration) -> Result<Vec<Rollout>> {
        let finished = || self.read("rollouts", || self.find_finished(ids));
        let look = || async {
            let (finished, has_open) = finished().await?;
            Ok((!has_open).then_some(finished))
        };
        match self.poll(wait, look).await? {
            Some(all) => Ok(all),
            None => Ok(finished().await?.0),
        }
    }

    async fn put_resources(&self, id: Option<&str>, value: &Json) -> Result<Resources> {
        self.write(id.unwrap_or("resources"), || async {
            match id {
                Some(id) => self.add_resources(id, value).await,
                // Clients expect `rs-` and 12 digits.
                None => self.add_resources(&new_id("rs-", 6), value).await,
            }
        })
        .await
    }

    async fn resources(&self, id: Option<&str>, version: Option<u64>) -> Result<Option<Resources>> {
        let key = id.unwrap_or("the latest resources");
        self.read(key, || self.find_resources(id, version)).await
    }

    async fn query_resources(
        &self,
        filter: &ResourcesFilter,
        page: &PageRequest,
    ) -> Result<Page<Resources>> {
        self.read("resources", || self.find_latest_resources(filter, page)).await
    }

    async fn record_worker_heartbeat(&self, id: &str, stats: Option<Json>) -> Result<Worker> {
        let stats = stats.as_ref();
        self.write(id, || self.record_heartbeat_of_worker(id, stats)).await
    }

    async fn worker(&self, id: &str) -> Result<Option<Worker>> {
        self.read(id, || self.find_worker(id)).await
    }

    async fn query_workers(
        &self,
        filter: &WorkerFilter,
        page: &PageRequest,
    ) -> Result<Page<Worker>> {
        self.read("workers", || self.find_workers(filter, page)).await
    }

    async fn add_spans(&self, spans: Vec<NewSpan>) -> Result<Vec<SpanOutcome>> {
        let spans = &spans;
        self.write("spans", || self.insert_spans(spans)).await
    }

    async fn query_spans(&self, filter: &SpanFilter, page: &PageRequest) -> Result<Page<Span>> {
        self.read(&filter.rollout_id, || self.find_spans(filter, page)).await
    }

    async fn reserve_span_numbers(&self, rollout_id: &str, count: u64) -> Result<u64> {
        self.write(rollout_id, || self.reserve_above(rollout_id, 0, count)).await
    }

    async fn statistics(&self) -> Result<RolloutStatistics> {
        self.read("the statistics", || self.count_rows()).await
    }
}
