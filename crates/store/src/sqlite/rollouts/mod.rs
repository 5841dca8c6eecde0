//! Rollouts in SQLite: in a file of their own, or in the memory of the process.
//!
//! One thread writes and commits all queued writes together, so that many concurrent writes share a
//! flush. A file has further threads that read; a store in memory has one connection, which does
//! both.

mod control;
mod directory;
mod queue;
mod read;
mod reports;
mod rows;
mod schema;
mod spans;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
#[cfg(any(test, feature = "testing"))]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::process_time;
use rusqlite::Connection;
#[cfg(any(test, feature = "testing"))]
use rusqlite::functions::{Context, FunctionFlags};
use tokio::sync::Notify;
use tokio::time::Instant;

#[cfg(any(test, feature = "testing"))]
use super::schema::open_error;
use super::worker::{DatabaseThread, JobReceiver, process_reads, process_writes};
use super::{RESPONSE_TIMEOUT, run_on_worker, start_worker};
use crate::error::Failure;
use crate::rollouts::{
    Clock, Json, Lease, LeaseEnd, LeaseRequest, NewRollout, NewSpan, Page, PageRequest, Resources,
    ResourcesFilter, Result, Rollout, RolloutFilter, RolloutStatistics, RolloutUpdate, Rollouts,
    Span, SpanFilter, SpanOutcome, Try, TrySelector, TryUpdate, Worker, WorkerFilter,
};
use crate::{StoreError, WriteOutcome};
use control::CallContext;

/// Location that selects a store in the memory of the process.
const IN_MEMORY: &str = "memory:";

/// Number of threads that read the database file.
const READERS: usize = 2;

/// Maximum interval between two polls of a waiting call, which bounds the delay until the call sees
/// writes of other processes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum interval between two polls of a waiting call, which bounds the load while many writes
/// arrive.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A store of rollouts in an SQLite database.
struct SqliteRollouts {
    location: String,
    clock: Arc<dyn Clock>,
    writer: DatabaseThread,
    /// Threads that read the file. Empty if the store is in memory; then the writer reads, too.
    readers: Vec<DatabaseThread>,
    next_reader: AtomicUsize,
    /// Notified when rollouts change. It wakes waiting calls in their order, so that simulations
    /// are repeatable.
    changes: Arc<Notify>,
}

/// Opens a store of rollouts. `location` is `memory:` or the path of a file. The file is created if
/// it does not exist.
///
/// # Errors
/// Returns an error if the file cannot be opened, belongs to another program, or has another schema
/// version.
pub async fn open_rollouts(
    location: &str,
    clock: Arc<dyn Clock>,
) -> std::result::Result<Arc<dyn Rollouts>, StoreError> {
    let mut readers = Vec::new();
    let writer = if location == IN_MEMORY {
        start_thread(location, "levade-rollouts", schema::open_in_memory, process_writes).await?
    } else {
        let path = PathBuf::from(location);
        let of_writer = path.clone();
        let writer = start_thread(
            location,
            "levade-rollouts",
            move || schema::open_file(&of_writer),
            process_writes,
        )
        .await?;
        for _ in 0..READERS {
            let path = path.clone();
            let open = move || schema::open_reader(&path);
            readers.push(start_thread(location, "levade-reader", open, process_reads).await?);
        }
        writer
    };
    Ok(Arc::new(SqliteRollouts::new(location, clock, writer, readers)))
}

/// Opens or creates a file of rollouts. Every call runs in the task of its caller instead of on a
/// thread, and ids follow from the time of the opening, so that simulations are repeatable.
///
/// # Errors
/// Returns the errors of [`open_rollouts`].
#[cfg(any(test, feature = "testing"))]
pub fn open_rollouts_in_caller(
    file: &std::path::Path,
    clock: Arc<dyn Clock>,
) -> std::result::Result<Arc<dyn Rollouts>, StoreError> {
    let connection = schema::open_file(file)?;
    let (opened, count) = (clock.now().to_bits(), AtomicU64::new(0));
    let random = move |context: &Context<'_>| {
        let number = opened.wrapping_add(count.fetch_add(1, Ordering::Relaxed));
        let bytes = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        let length = usize::try_from(context.get::<i64>(0)?).unwrap_or_default();
        Ok::<_, rusqlite::Error>(bytes[..length.min(bytes.len())].to_vec())
    };
    let flags = FunctionFlags::SQLITE_UTF8;
    let replaced = connection.create_scalar_function("randomblob", 1, flags, random);
    replaced.map_err(|source| open_error(file, source))?;
    let writer = DatabaseThread::in_caller(connection, process_writes);
    let location = file.display().to_string();
    Ok(Arc::new(SqliteRollouts::new(&location, clock, writer, Vec::new())))
}

/// Starts a thread that opens a connection and then runs jobs on it.
async fn start_thread(
    location: &str,
    name: &str,
    open: impl FnOnce() -> std::result::Result<Connection, StoreError> + Send + 'static,
    run: fn(&mut Connection, &JobReceiver),
) -> std::result::Result<DatabaseThread, StoreError> {
    let open = || Ok(((open()?, None), ()));
    let names = (name, "the rollouts");
    Ok(start_worker(location, names, RESPONSE_TIMEOUT, open, run).await?.0)
}

/// Notifies waiting calls of a change when it is dropped. A job owns it, so the drop follows the
/// commit of the job.
struct ChangeAnnouncement {
    changes: Arc<Notify>,
    is_due: bool,
}

impl Drop for ChangeAnnouncement {
    fn drop(&mut self) {
        if self.is_due {
            self.changes.notify_waiters();
        }
    }
}

impl fmt::Debug for SqliteRollouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteRollouts").field("location", &self.location).finish_non_exhaustive()
    }
}

impl SqliteRollouts {
    fn new(
        location: &str,
        clock: Arc<dyn Clock>,
        writer: DatabaseThread,
        readers: Vec<DatabaseThread>,
    ) -> Self {
        let location = location.to_owned();
        let next_reader = AtomicUsize::new(0);
        let changes = Arc::new(Notify::new());
        SqliteRollouts { location, clock, writer, readers, next_reader, changes }
    }

    /// Runs `work` on the thread that writes, in a transaction. `work` returns its result and
    /// whether a rollout changed.
    async fn write<T: Send + 'static>(
        &self,
        key: &str,
        mut work: impl FnMut(CallContext<'_>) -> std::result::Result<(T, bool), Failure>
        + Send
        + 'static,
    ) -> Result<T> {
        let clock = Arc::clone(&self.clock);
        let mut announcement =
            ChangeAnnouncement { changes: Arc::clone(&self.changes), is_due: false };
        let work = move |db: &Connection| {
            // The closure must own the complete value, and not only its field.
            let announcement = &mut announcement;
            let (result, is_changed) = work(CallContext { db, now: clock.now() })?;
            announcement.is_due = is_changed;
            Ok(result)
        };
        self.run(&self.writer, "record", key, work).await
    }

    /// Runs `work` on a thread that reads, on one consistent snapshot.
    async fn read<T: Send + 'static>(
        &self,
        key: &str,
        work: impl FnMut(&Connection) -> std::result::Result<T, Failure> + Send + 'static,
    ) -> Result<T> {
        let index = self.next_reader.fetch_add(1, Ordering::Relaxed) % self.readers.len().max(1);
        self.run(self.readers.get(index).unwrap_or(&self.writer), "read", key, work).await
    }

    async fn run<T: Send + 'static>(
        &self,
        thread: &DatabaseThread,
        action: &'static str,
        key: &str,
        work: impl FnMut(&Connection) -> std::result::Result<T, Failure> + Send + 'static,
    ) -> Result<T> {
        let operation = (self.location.as_str(), action, key.to_owned());
        Ok(run_on_worker(thread, operation, RESPONSE_TIMEOUT, work).await?)
    }

    /// Calls `look` until it returns a value, or until `wait` is over. Calls it again after every
    /// change of a rollout, and at least once per [`POLL_INTERVAL`].
    async fn poll<T, F>(
        &self,
        wait: Duration,
        mut look: impl FnMut() -> F + Send,
    ) -> Result<Option<T>>
    where
        F: Future<Output = Result<Option<T>>> + Send,
    {
        // A wait beyond the range of the clock has no end.
        let deadline = Instant::now().checked_add(wait);
        loop {
            // A change during a poll counts.
            let changed = self.changes.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let found = look().await?;
            if found.is_some() || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(found);
            }
            let left = deadline.map_or(POLL_INTERVAL, |deadline| deadline - Instant::now());
            let _ = process_time::with_timeout(left.min(POLL_INTERVAL), changed).await;
            tokio::time::sleep(left.min(MIN_POLL_INTERVAL)).await;
        }
    }
}

/// Returns `result` with the flag that a rollout changed.
fn mark_changed<T>(result: T) -> (T, bool) {
    (result, true)
}

/// Returns `result` with the flag that no rollout changed.
fn mark_unchanged<T>(result: T) -> (T, bool) {
    (result, false)
}

#[async_trait]
impl Rollouts for SqliteRollouts {
    fn location(&self) -> &str {
        &self.location
    }

    fn now(&self) -> f64 {
        self.clock.now()
    }

    async fn enqueue(&self, new: &[NewRollout]) -> Result<Vec<Rollout>> {
        let new = new.to_vec();
        self.write("rollouts", move |call| queue::enqueue_rollouts(call, &new).map(mark_changed))
            .await
    }

    async fn start_rollout(&self, new: &NewRollout, worker: Option<&str>) -> Result<Rollout> {
        let new = new.clone();
        let worker = worker.map(str::to_owned);
        self.write("a rollout", move |call| {
            queue::start_rollout(call, &new, worker.as_deref()).map(mark_changed)
        })
        .await
    }

    async fn start_try(&self, rollout_id: &str, worker: Option<&str>) -> Result<Rollout> {
        let id = rollout_id.to_owned();
        let worker = worker.map(str::to_owned);
        let start = move |call: CallContext<'_>| {
            queue::start_try(call, &id, worker.as_deref()).map(mark_changed)
        };
        self.write(rollout_id, start).await
    }

    async fn lease_rollouts(&self, request: &LeaseRequest) -> Result<Vec<Rollout>> {
        if request.max == 0 {
            return Ok(Vec::new());
        }
        let lease = || {
            let request = request.clone();
            let lease = move |call: CallContext<'_>| {
                let leased = queue::lease_rollouts(call, &request)?;
                let is_changed = !leased.is_empty();
                Ok((leased, is_changed))
            };
            self.write("leases", lease)
        };
        let leased = lease().await?;
        if !leased.is_empty() || request.wait.is_zero() {
            return Ok(leased);
        }
        let look = || async {
            let request = request.clone();
            let can_lease =
                move |db: &Connection| queue::can_lease(CallContext { db, now: 0.0 }, &request);
            if !self.read("queues", can_lease).await? {
                return Ok(None);
            }
            // Another worker may have been faster.
            let leased = lease().await?;
            Ok((!leased.is_empty()).then_some(leased))
        };
        Ok(self.poll(request.wait, look).await?.unwrap_or_default())
    }

    async fn record_heartbeat(&self, lease: &Lease) -> Result<Option<f64>> {
        let of = lease.clone();
        self.write(&lease.rollout_id, move |call| reports::record_heartbeat(call, &of)).await
    }

    async fn end_lease(
        &self,
        lease: &Lease,
        end: LeaseEnd,
        metadata: Option<Json>,
    ) -> Result<WriteOutcome> {
        let of = lease.clone();
        let finish = move |call: CallContext<'_>| {
            reports::end_lease(call, &of, end, metadata.as_ref()).map(mark_changed)
        };
        self.write(&lease.rollout_id, finish).await
    }

    async fn cancel_rollouts(&self, ids: &[String]) -> Result<u64> {
        let ids = ids.to_vec();
        self.write("rollouts", move |call| queue::cancel_rollouts(call, &ids).map(mark_changed))
            .await
    }

    async fn expire_tries(&self) -> Result<Vec<Try>> {
        let now = self.now();
        if !self.read("timeouts", move |db| reports::has_expired(CallContext { db, now })).await? {
            return Ok(Vec::new());
        }
        self.write("timeouts", |call| reports::expire_tries(call).map(mark_changed)).await
    }

    async fn update_rollout(&self, rollout_id: &str, update: &RolloutUpdate) -> Result<Rollout> {
        let id = rollout_id.to_owned();
        let update = update.clone();
        self.write(rollout_id, move |call| {
            reports::update_rollout(call, &id, &update).map(mark_changed)
        })
        .await
    }

    async fn update_try(
        &self,
        rollout_id: &str,
        name: &TrySelector,
        update: &TryUpdate,
    ) -> Result<Try> {
        let id = rollout_id.to_owned();
        let name = name.clone();
        let update = update.clone();
        self.write(rollout_id, move |call| {
            reports::update_try(call, &id, &name, &update).map(mark_changed)
        })
        .await
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>> {
        let id = rollout_id.to_owned();
        self.read(rollout_id, move |db| read::find_rollout(db, &id)).await
    }

    async fn query_rollouts(
        &self,
        filter: &RolloutFilter,
        page: &PageRequest,
    ) -> Result<Page<Rollout>> {
        let filter = filter.clone();
        let page = page.clone();
        self.read("rollouts", move |db| read::query_rollouts(db, &filter, &page)).await
    }

    async fn query_tries(&self, rollout_id: &str, page: &PageRequest) -> Result<Page<Try>> {
        let id = rollout_id.to_owned();
        let page = page.clone();
        self.read(rollout_id, move |db| read::query_tries(db, &id, &page)).await
    }

    async fn wait_for_changes(
        &self,
        since: u64,
        max: usize,
        wait: Duration,
    ) -> Result<(Vec<Rollout>, u64)> {
        let look = || async {
            let changes =
                self.read("changes", move |db| read::changed_rollouts(db, since, max)).await?;
            Ok((!changes.is_empty()).then_some(changes))
        };
        let changes = self.poll(wait, look).await?.unwrap_or_default();
        let last = changes.last().map_or(since, |rollout| rollout.changed);
        Ok((changes, last))
    }

    async fn wait_until_finished(&self, ids: &[String], wait: Duration) -> Result<Vec<Rollout>> {
        let finished = || {
            let ids = ids.to_vec();
            self.read("rollouts", move |db| read::finished_rollouts(db, &ids))
        };
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
        let of = id.map(str::to_owned);
        let value = value.clone();
        let put = move |call: CallContext<'_>| {
            directory::put_resources(call, of.as_deref(), &value).map(mark_unchanged)
        };
        self.write(id.unwrap_or("resources"), put).await
    }

    async fn resources(&self, id: Option<&str>, version: Option<u64>) -> Result<Option<Resources>> {
        let of = id.map(str::to_owned);
        let key = id.unwrap_or("the latest resources");
        self.read(key, move |db| read::find_resources(db, of.as_deref(), version)).await
    }

    async fn query_resources(
        &self,
        filter: &ResourcesFilter,
        page: &PageRequest,
    ) -> Result<Page<Resources>> {
        let filter = filter.clone();
        let page = page.clone();
        self.read("resources", move |db| read::query_resources(db, &filter, &page)).await
    }

    async fn record_worker_heartbeat(&self, id: &str, stats: Option<Json>) -> Result<Worker> {
        let of = id.to_owned();
        let beat = move |call: CallContext<'_>| {
            directory::record_worker_heartbeat(call, &of, stats.as_ref()).map(mark_unchanged)
        };
        self.write(id, beat).await
    }

    async fn worker(&self, id: &str) -> Result<Option<Worker>> {
        let of = id.to_owned();
        self.read(id, move |db| read::find_worker(db, &of)).await
    }

    async fn query_workers(
        &self,
        filter: &WorkerFilter,
        page: &PageRequest,
    ) -> Result<Page<Worker>> {
        let filter = filter.clone();
        let page = page.clone();
        self.read("workers", move |db| read::query_workers(db, &filter, &page)).await
    }

    async fn add_spans(&self, spans: Vec<NewSpan>) -> Result<Vec<SpanOutcome>> {
        self.write("spans", move |call| spans::add_spans(call, &spans)).await
    }

    async fn query_spans(&self, filter: &SpanFilter, page: &PageRequest) -> Result<Page<Span>> {
        let of = filter.clone();
        let page = page.clone();
        self.read(&filter.rollout_id, move |db| read::query_spans(db, &of, &page)).await
    }

    async fn reserve_span_numbers(&self, rollout_id: &str, count: u64) -> Result<u64> {
        let id = rollout_id.to_owned();
        self.write(rollout_id, move |call| {
            spans::reserve_numbers(call, &id, count).map(mark_unchanged)
        })
        .await
    }

    async fn statistics(&self) -> Result<RolloutStatistics> {
        self.read("the statistics", read::count_rows).await
    }
}
