//! Loop of a worker: leases rollouts from a store, keeps their leases, and reports their ends.
//!
//! An implementation of [`RolloutExecutor`] defines how a rollout is executed.
//!
//! # Guarantees
//! - **Heartbeats.** A worker reports six times within the duration of a lease. If the lease is
//!   lost, it stops the rollout.
//! - **Draining.** After the first request to stop, the worker leases no more rollouts and
//!   completes the ones in progress. After the drain timeout or a second request, it stops them and
//!   returns their leases.
//! - **Outages.** While the store is unreachable, rollouts continue and their reports are repeated,
//!   until a timeout that names the store.
//! - **Dropping stops everything.** A dropped loop leaves no task; its leases expire.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::random_hex;
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, Rollout, RolloutError, Rollouts,
};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Interval between heartbeats of the worker itself. Trainers count workers with recent heartbeats
/// as connected.
const WORKER_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum wait of one request for leases. A worker that stops waits for the response, because
/// dropping the request could lose a lease.
const LEASE_WAIT: Duration = Duration::from_secs(5);

/// Interval between heartbeats of a rollout that has no timeout for progress reports.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);

/// Number of heartbeats that are sent within the duration of a lease.
const HEARTBEATS_PER_LEASE: u32 = 6;

/// Timeout for returning the leases in progress when a worker stops.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between retries while the store is unreachable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Error of a store call that failed. If the store was unreachable, all retries have failed.
#[derive(Debug)]
pub struct RetryError {
    purpose: String,
    location: String,
    waited: Duration,
    /// Error that the last call of the store returned.
    pub source: RolloutError,
}

impl fmt::Display for RetryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RetryError { purpose, location, waited, .. } = self;
        write!(f, "could not {purpose} at {location}")?;
        // Errors of a reachable store are not retried.
        match waited.as_secs() {
            0 => Ok(()),
            seconds => write!(f, " within {seconds} s"),
        }
    }
}

impl Error for RetryError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// Calls `call`, and repeats it while the store is unreachable, for at most `wait`.
///
/// # Errors
/// Returns the last error of the call, together with `purpose` and the location of the store.
pub async fn retry<T, F: Future<Output = Result<T, RolloutError>>>(
    store: &dyn Rollouts,
    purpose: &str,
    wait: Duration,
    mut call: impl FnMut() -> F,
) -> Result<T, RetryError> {
    let start = Instant::now();
    loop {
        match call().await {
            Ok(done) => return Ok(done),
            Err(error @ RolloutError::Store(_)) if start.elapsed() < wait => {
                tracing::warn!(%error, "waiting for the store to {purpose}");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            Err(source) => {
                let (purpose, location) = (purpose.to_owned(), store.location().to_owned());
                return Err(RetryError { purpose, location, waited: start.elapsed(), source });
            }
        }
    }
}

/// Executes the rollouts that a worker leases.
#[async_trait]
pub trait RolloutExecutor: Send + Sync + 'static {
    /// Type of the error with which a worker ends.
    type Error: From<RetryError> + Send;

    /// Returns the names of the queues to lease from, at least one. It may wait until a queue
    /// exists.
    ///
    /// # Errors
    /// Returns an error if no queue is found in time.
    async fn queues(&self) -> Result<Vec<String>, Self::Error>;

    /// Executes a leased rollout. Returns the result with which the lease ends, and the metadata of
    /// the try. The future is dropped if the lease is lost.
    async fn execute(&self, rollout: &Rollout) -> (LeaseEnd, Option<Json>);

    /// Returns the statistics that a heartbeat of the worker contains. The worker leases from
    /// `queues` and executes `running` rollouts. `None` sends no statistics.
    fn stats(&self, queues: Vec<String>, running: usize) -> Option<Json>;

    /// Shows a message to the user, such as a note that a lease was lost.
    fn note(&self, text: String);
}

/// Settings of a worker that leases and executes rollouts.
pub struct WorkerOptions {
    /// Store from which the worker leases rollouts.
    pub store: Arc<dyn Rollouts>,
    /// Maximum number of rollouts that run at the same time, at least 1.
    pub slots: usize,
    /// Id of the worker, unique in the store.
    pub name: String,
    /// Whether the worker exits once the rollouts of its first lease request have ended.
    pub once: bool,
    /// Maximum duration of retries while the store is unreachable.
    pub wait: Duration,
    /// Timeout for rollouts in progress after the worker was asked to stop.
    pub drain: Duration,
}

/// Runs a worker until it is asked to stop. The first item of `requests` lets the rollouts in
/// progress finish without new leases. The second item stops these rollouts.
///
/// # Errors
/// Returns an error if the store is unreachable for longer than [`WorkerOptions::wait`], and the
/// errors of [`RolloutExecutor::queues`].
pub async fn run_worker<W: RolloutExecutor>(
    options: WorkerOptions,
    work: Arc<W>,
    mut requests: UnboundedReceiver<()>,
) -> Result<(), W::Error> {
    let worker = Arc::new(WorkerLoop {
        options,
        work,
        leases: Mutex::default(),
        queues: Mutex::default(),
        running: AtomicUsize::new(0),
        is_requesting: AtomicBool::new(false),
    });
    let mut beating = JoinSet::new();
    beating.spawn(Arc::clone(&worker).send_heartbeats());
    let mut rollouts = JoinSet::new();
    let ended = worker.serve(&mut rollouts, &mut requests).await;
    beating.shutdown().await;
    rollouts.shutdown().await;
    worker.release_all().await;
    ended
}

type Leasing<E> = Pin<Box<dyn Future<Output = Result<Vec<Rollout>, E>> + Send>>;

/// State that the concurrent tasks of a worker share.
struct WorkerLoop<W> {
    options: WorkerOptions,
    work: Arc<W>,
    /// Leases in progress, keyed by the id of the rollout.
    leases: Mutex<BTreeMap<String, Lease>>,
    /// Names of the queues in the last request for leases.
    queues: Mutex<Vec<String>>,
    /// Number of rollouts that are executing.
    running: AtomicUsize,
    /// Whether a response to a request for leases is outstanding. A worker that stops waits for the
    /// response, to return its leases.
    is_requesting: AtomicBool,
}

impl<W: RolloutExecutor> WorkerLoop<W> {
    /// Leases and executes rollouts. Returns when no more rollouts will be leased and all have
    /// ended, or when the drain timeout has expired.
    async fn serve(
        self: &Arc<Self>,
        rollouts: &mut JoinSet<()>,
        requests: &mut UnboundedReceiver<()>,
    ) -> Result<(), W::Error> {
        let WorkerOptions { slots, once, drain, .. } = self.options;
        let mut leasing: Option<Leasing<W::Error>> = None;
        let mut deadline = None;
        let mut has_leased = false;
        loop {
            let can_lease = deadline.is_none() && !(once && has_leased);
            let free = slots.saturating_sub(rollouts.len());
            if can_lease && free > 0 && leasing.is_none() {
                leasing = Some(Box::pin(Arc::clone(self).lease(free)));
            }
            if leasing.is_none() && rollouts.is_empty() {
                return Ok(());
            }
            let expiry = deadline.unwrap_or_else(Instant::now);
            tokio::select! {
                // A fixed order of the branches makes simulations repeatable.
                biased;
                Some(()) = requests.recv() => {
                    if deadline.is_some() {
                        return Ok(());
                    }
                    let running = rollouts.len();
                    self.work.note(format!("stopping after {running} attempts in progress"));
                    deadline = Some(Instant::now() + drain);
                    if !self.is_requesting.load(Ordering::Relaxed) {
                        leasing = None;
                    }
                }
                () = tokio::time::sleep_until(expiry), if deadline.is_some() => {
                    let running = rollouts.len();
                    self.work.note(format!(
                        "stopped {running} attempts that had not ended within {drain:?}; other \
                         runners repeat them"
                    ));
                    return Ok(());
                }
                Some(_) = rollouts.join_next(), if !rollouts.is_empty() => {}
                leased = async {
                    match &mut leasing {
                        Some(leasing) => leasing.await,
                        None => std::future::pending().await,
                    }
                },
                    if leasing.is_some() =>
                {
                    leasing = None;
                    for rollout in leased? {
                        has_leased = true;
                        if let Some(lease) = rollout.latest_try.as_ref().map(|latest| latest.lease()) {
                            self.leases().insert(rollout.id.clone(), lease.clone());
                            // A stopping worker does not start the rollout, and returns its lease
                            // later.
                            if deadline.is_none() {
                                rollouts.spawn(Arc::clone(self).execute(rollout, lease));
                            }
                        }
                    }
                }
            }
        }
    }

    fn leases(&self) -> MutexGuard<'_, BTreeMap<String, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queues(&self) -> MutexGuard<'_, Vec<String>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests at most `max` leases from the store. The result can be empty.
    async fn lease(self: Arc<Self>, max: usize) -> Result<Vec<Rollout>, W::Error> {
        let WorkerOptions { store, wait, name, .. } = &self.options;
        let queues = self.work.queues().await?;
        self.queues().clone_from(&queues);
        // If the response was lost, the repeated request returns the same leases.
        let request = LeaseRequest {
            queues,
            wait: LEASE_WAIT,
            key: Some(random_hex(16)),
            ..LeaseRequest::new(max, Some(name))
        };
        self.is_requesting.store(true, Ordering::Relaxed);
        let leased =
            retry(&**store, "lease attempts", *wait, || store.lease_rollouts(&request)).await;
        self.is_requesting.store(false, Ordering::Relaxed);
        Ok(leased?)
    }

    /// Sends heartbeats of the worker until the future is dropped.
    async fn send_heartbeats(self: Arc<Self>) {
        loop {
            let queues = self.queues().clone();
            let stats = self.work.stats(queues, self.running.load(Ordering::Relaxed));
            // An error is ignored here: the requests for leases report an unreachable store.
            if let Err(error) =
                self.options.store.record_worker_heartbeat(&self.options.name, stats).await
            {
                tracing::debug!(%error, "could not report that the runner is connected");
            }
            tokio::time::sleep(WORKER_INTERVAL).await;
        }
    }

    /// Executes a leased rollout and reports the result to the store.
    async fn execute(self: Arc<Self>, rollout: Rollout, lease: Lease) {
        let _running = RunningRollout::new(&self.running);
        let lease_seconds = rollout.config.unresponsive_seconds.map(Duration::from_secs_f64);
        let interval = lease_seconds.map_or(DEFAULT_HEARTBEAT, |time| time / HEARTBEATS_PER_LEASE);
        let (end, metadata) = tokio::select! {
            biased;
            made = self.work.execute(&rollout) => made,
            why = self.keep_lease(&lease, interval) => {
                self.leases().remove(&rollout.id);
                tracing::info!("stopped an attempt: {why}");
                return;
            }
        };
        let WorkerOptions { store, wait, .. } = &self.options;
        let finish = || store.end_lease(&lease, end, metadata.clone());
        let discarded = tokio::select! {
            biased;
            finished = retry(&**store, "report an attempt", *wait, finish) => {
                finished.err().map(|error| format!("{error}: {}", error.source))
            }
            why = self.keep_lease(&lease, interval) => Some(why),
        };
        if let Some(why) = discarded {
            tracing::info!("discarded the report of an attempt: {why}");
        }
        self.leases().remove(&rollout.id);
    }

    /// Sends heartbeats of a rollout until its lease is lost. Returns the reason why the lease was
    /// lost.
    async fn keep_lease(&self, lease: &Lease, interval: Duration) -> String {
        loop {
            match self.options.store.record_heartbeat(lease).await {
                Ok(_) => {}
                Err(RolloutError::Store(error)) => tracing::warn!(%error, "could not report"),
                Err(lost) => return lost.to_string(),
            }
            tokio::time::sleep(interval).await;
        }
    }

    /// Returns all leases in progress to the store, so that other workers can lease the rollouts.
    async fn release_all(&self) {
        let leases = std::mem::take(&mut *self.leases());
        let release = async {
            for lease in leases.into_values() {
                let released = self.options.store.end_lease(&lease, LeaseEnd::Released, None).await;
                if let Err(error) = released {
                    tracing::info!(%error, "could not return a lease; it expires");
                }
            }
        };
        if tokio::time::timeout(RELEASE_TIMEOUT, release).await.is_err() {
            self.work.note("the store did not take back the leases; they expire".to_owned());
        }
    }
}

/// Guard that counts a rollout as running until it is dropped.
struct RunningRollout<'a>(&'a AtomicUsize);

impl<'a> RunningRollout<'a> {
    fn new(running: &'a AtomicUsize) -> Self {
        running.fetch_add(1, Ordering::Relaxed);
        RunningRollout(running)
    }
}

impl Drop for RunningRollout<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
