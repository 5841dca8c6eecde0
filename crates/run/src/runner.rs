//! Runners: processes that lease attempts of runs from a store of rollouts, and make them.
//!
//! A runner needs no recipe file: the run has announced its recipe in the store. The model is
//! called at the address that each attempt contains. One runner serves many runs.
//!
//! # Guarantees
//! - **Heartbeats.** A runner reports six times within the time of a lease. If the lease is lost,
//!   it stops the attempt.
//! - **Draining.** The first request to stop ends leasing; attempts in progress end. After the
//!   drain timeout or a second request, they are stopped and their leases are returned.
//! - **Outages.** While the store is unreachable, attempts continue and their reports are repeated,
//!   until a timeout that names the store.

mod loaded_recipe;

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use levade_agent::runner::{AttemptReport, LeasedAttempt, WorkerStats};
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, Order, PageRequest, ResourcesFilter, Rollout,
    RolloutError, Rollouts,
};
use serde_json::value::to_raw_value;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::external::session_api;
use crate::host::Host;
use crate::runners::{Announcement, retry};
use loaded_recipe::LoadedRecipe;

/// Interval between heartbeats of the runner itself, which trainers count as connected.
const WORKER_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum wait of one request for leases. A stopping runner waits for it, because a request that
/// is dropped could lose a lease.
const LEASE_WAIT: Duration = Duration::from_secs(5);

/// Interval between searches for announced runs while there is none.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between reports of an attempt whose rollout has no timeout for reports.
const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);

/// Number of reports within the time of a lease.
const HEARTBEATS_PER_LEASE: u32 = 6;

/// Timeout for returning leases when a runner stops.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Prefix of the queues of runs.
const QUEUE_PREFIX: &str = "run/";

/// Settings of a runner.
pub struct RunnerOptions {
    /// Store from which the runner leases.
    pub store: Arc<dyn Rollouts>,
    /// Queue from which the runner leases. `None` for the queues of all announced runs.
    pub queue: Option<String>,
    /// Maximum number of concurrent attempts, at least 1.
    pub slots: usize,
    /// Id of the runner, unique in the store.
    pub name: String,
    /// Whether the runner exits after its first leases have ended.
    pub once: bool,
    /// Directory of the files that recipes name.
    pub dir: PathBuf,
    /// Timeout for an unreachable store, and for the first announced run.
    pub wait: Duration,
    /// Timeout for attempts in progress after a request to stop.
    pub drain: Duration,
}

/// Runs a runner until it is asked to stop. The first item of `requests` drains the runner, the
/// second stops its attempts.
///
/// # Errors
/// Returns an error if the store is unreachable, or if no run is announced, for longer than
/// [`RunnerOptions::wait`].
pub async fn run(
    options: RunnerOptions,
    host: Host,
    mut requests: UnboundedReceiver<()>,
) -> anyhow::Result<()> {
    let runner = Arc::new(Runner {
        options,
        host,
        recipes: tokio::sync::Mutex::default(),
        leases: Mutex::default(),
        queues: Mutex::default(),
        running: AtomicUsize::new(0),
    });
    let beating = tokio::spawn(Arc::clone(&runner).beat());
    let mut attempts = JoinSet::new();
    let ended = runner.serve(&mut attempts, &mut requests).await;
    beating.abort();
    attempts.shutdown().await;
    runner.release_all().await;
    ended
}

type Leasing = Pin<Box<dyn Future<Output = anyhow::Result<Vec<Rollout>>> + Send>>;

/// State of a runner.
struct Runner {
    options: RunnerOptions,
    host: Host,
    /// Recipes by id and version of their resources.
    recipes: tokio::sync::Mutex<HashMap<(String, u64), Arc<LoadedRecipe>>>,
    /// Leases in progress, by id of the rollout.
    leases: Mutex<HashMap<String, Lease>>,
    /// Queues of the last request for leases.
    queues: Mutex<Vec<String>>,
    /// Number of attempts in progress.
    running: AtomicUsize,
}

impl Runner {
    /// Leases attempts and starts them, until no more are to be leased and all have ended or the
    /// drain timeout has expired.
    async fn serve(
        self: &Arc<Self>,
        attempts: &mut JoinSet<()>,
        requests: &mut UnboundedReceiver<()>,
    ) -> anyhow::Result<()> {
        let RunnerOptions { slots, once, drain, .. } = self.options;
        let mut leasing: Option<Leasing> = None;
        let mut deadline = None;
        let mut has_leased = false;
        loop {
            let can_lease = deadline.is_none() && !(once && has_leased);
            let free = slots.saturating_sub(attempts.len());
            if can_lease && free > 0 && leasing.is_none() {
                leasing = Some(Box::pin(Arc::clone(self).lease(free)));
            }
            if leasing.is_none() && attempts.is_empty() {
                return Ok(());
            }
            let expiry = deadline.unwrap_or_else(Instant::now);
            tokio::select! {
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
                            // A stopping runner returns it.
                            if deadline.is_none() {
                                attempts.spawn(Arc::clone(self).work(rollout, lease));
                            }
                        }
                    }
                }
                Some(_) = attempts.join_next(), if !attempts.is_empty() => {}
                Some(()) = requests.recv() => {
                    if deadline.is_some() {
                        return Ok(());
                    }
                    let running = attempts.len();
                    self.host.note(format!("stopping after {running} attempts in progress"));
                    deadline = Some(Instant::now() + drain);
                }
                () = tokio::time::sleep_until(expiry), if deadline.is_some() => {
                    let running = attempts.len();
                    self.host.note(format!(
                        "stopped {running} attempts that had not ended within {drain:?}; other \
                         runners repeat them"
                    ));
                    return Ok(());
                }
            }
        }
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<String, Lease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queues(&self) -> MutexGuard<'_, Vec<String>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests leases. The result may be empty.
    async fn lease(self: Arc<Self>, max: usize) -> anyhow::Result<Vec<Rollout>> {
        let RunnerOptions { store, wait, name, .. } = &self.options;
        let queues = self.find_queues().await?;
        self.queues().clone_from(&queues);
        let request = LeaseRequest {
            queues,
            wait: LEASE_WAIT,
            // A repeated request returns the leases of a response that was lost.
            key: Some(random_key()?),
            ..LeaseRequest::new(max, Some(name))
        };
        retry(&**store, "lease attempts", *wait, || store.lease(&request)).await
    }

    /// Returns the queues to lease from. Waits until a run is announced.
    async fn find_queues(&self) -> anyhow::Result<Vec<String>> {
        let RunnerOptions { store, queue, wait, .. } = &self.options;
        if let Some(queue) = queue {
            return Ok(vec![queue.clone()]);
        }
        let filter = ResourcesFilter { id: None, id_contains: Some(QUEUE_PREFIX.to_owned()) };
        let newest = PageRequest {
            sort_by: Some("update_time".into()),
            order: Order::Desc,
            ..PageRequest::default()
        };
        let start = Instant::now();
        loop {
            let query = || store.query_resources(&filter, &newest);
            let found = retry(&**store, "look for runs", *wait, query).await?.items;
            let ids = found.into_iter().map(|resources| resources.id);
            let queues: Vec<String> = ids.filter(|id| id.starts_with(QUEUE_PREFIX)).collect();
            if !queues.is_empty() {
                return Ok(queues);
            }
            if start.elapsed() > *wait {
                anyhow::bail!(
                    "no run was announced at {} within {wait:?}; start one whose recipe has \
                     runners.store, or name its queue with --queue",
                    store.location()
                );
            }
            tokio::time::sleep(SEARCH_INTERVAL).await;
        }
    }

    /// Reports that the runner is connected, until the future is dropped.
    async fn beat(self: Arc<Self>) {
        loop {
            let stats = WorkerStats {
                queues: self.queues().clone(),
                slots: self.options.slots,
                running: self.running.load(Ordering::Relaxed),
            };
            let stats = to_raw_value(&stats).ok();
            // Leases report an unreachable store.
            if let Err(error) = self.options.store.beat_worker(&self.options.name, stats).await {
                tracing::debug!(%error, "could not report that the runner is connected");
            }
            tokio::time::sleep(WORKER_INTERVAL).await;
        }
    }

    /// Makes a leased attempt and reports its end.
    async fn work(self: Arc<Self>, rollout: Rollout, lease: Lease) {
        let _running = RunningAttempt::new(&self.running);
        let lease_seconds = rollout.config.unresponsive_seconds.map(Duration::from_secs_f64);
        let interval = lease_seconds.map_or(DEFAULT_HEARTBEAT, |time| time / HEARTBEATS_PER_LEASE);
        let report = tokio::select! {
            report = self.make(&rollout) => report,
            why = self.keep_lease(&lease, interval) => {
                self.leases().remove(&rollout.id);
                tracing::info!("stopped an attempt: {why}");
                return;
            }
        };
        let end = match &report {
            AttemptReport::Failed { why } => {
                self.host.note(format!("an attempt of {} could not be made: {why}", rollout.queue));
                LeaseEnd::Failed
            }
            _ => LeaseEnd::Succeeded,
        };
        // A report has no values that JSON cannot represent.
        let metadata: Option<Json> = to_raw_value(&report).ok();
        let RunnerOptions { store, wait, .. } = &self.options;
        let finish = || store.finish(&lease, end, metadata.clone());
        let finished = tokio::select! {
            finished = retry(&**store, "report an attempt", *wait, finish) => finished,
            why = self.keep_lease(&lease, interval) => Err(anyhow::anyhow!(why)),
        };
        if let Err(error) = finished {
            tracing::info!("discarded the report of an attempt: {error:#}");
        }
        self.leases().remove(&rollout.id);
    }

    /// Makes a leased attempt. Errors are in the report.
    async fn make(&self, rollout: &Rollout) -> AttemptReport {
        let made = async {
            let leased: LeasedAttempt = serde_json::from_str(rollout.input.get())?;
            let recipe = self.recipe(&leased.resources_id, leased.recipe_version).await?;
            let agent = recipe.agent(&leased.agent)?;
            // The gateway enforces the timeout of completions.
            let timeout = leased.limits.attempt_timeout;
            let api = session_api(&leased.endpoint, timeout)?;
            anyhow::Ok(agent.run(leased, api).await)
        };
        made.await.unwrap_or_else(|error| AttemptReport::Failed { why: format!("{error:#}") })
    }

    /// Returns the recipe of a run, which is read once.
    async fn recipe(&self, id: &str, version: u64) -> anyhow::Result<Arc<LoadedRecipe>> {
        let mut recipes = self.recipes.lock().await;
        let key = (id.to_owned(), version);
        if let Some(recipe) = recipes.get(&key) {
            return Ok(Arc::clone(recipe));
        }
        let RunnerOptions { store, dir, wait, .. } = &self.options;
        let read = || store.resources(Some(id), Some(version));
        let resources = retry(&**store, "read the recipe", *wait, read).await?;
        let missing = || anyhow::anyhow!("the store has no version {version} of {id}");
        let announcement = Announcement::parse(&resources.ok_or_else(missing)?)?;
        let supervisor = self.host.supervisor();
        let recipe = LoadedRecipe::new(&announcement.recipe, id, dir, supervisor)?;
        self.host.note(format!("making attempts of {id}, version {version}"));
        let recipe = Arc::new(recipe);
        // Older versions of the run have no attempts to lease.
        recipes.retain(|(other, _), _| other != id);
        recipes.insert(key, Arc::clone(&recipe));
        Ok(recipe)
    }

    /// Reports that an attempt is in progress, until its lease is lost. Returns the reason.
    async fn keep_lease(&self, lease: &Lease, interval: Duration) -> String {
        loop {
            match self.options.store.heartbeat(lease).await {
                Ok(_) => {}
                Err(RolloutError::Store(error)) => tracing::warn!(%error, "could not report"),
                Err(lost) => return lost.to_string(),
            }
            tokio::time::sleep(interval).await;
        }
    }

    /// Returns all leases in progress to the store.
    async fn release_all(&self) {
        let leases: Vec<Lease> = self.leases().drain().map(|(_, lease)| lease).collect();
        let release = async {
            for lease in leases {
                let released = self.options.store.finish(&lease, LeaseEnd::Released, None).await;
                if let Err(error) = released {
                    tracing::info!(%error, "could not return a lease; it expires");
                }
            }
        };
        if tokio::time::timeout(RELEASE_TIMEOUT, release).await.is_err() {
            self.host.note("the store did not take back the leases; they expire");
        }
    }
}

/// Returns a random text.
fn random_key() -> anyhow::Result<String> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).context("the system has no random numbers")?;
    Ok(format!("{:032x}", u128::from_be_bytes(random)))
}

/// Counts an attempt as running until dropped.
struct RunningAttempt<'a>(&'a AtomicUsize);

impl<'a> RunningAttempt<'a> {
    fn new(running: &'a AtomicUsize) -> Self {
        running.fetch_add(1, Ordering::Relaxed);
        RunningAttempt(running)
    }
}

impl Drop for RunningAttempt<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
