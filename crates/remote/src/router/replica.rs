//! A replica of a router: a sampler, and its health.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_policy::process_time::{sleep, with_timeout};
use levade_policy::{PolicyError, Sampler};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::options::RouterOptions;

/// Health of a replica, which determines whether the replica gets calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// The replica has not failed since its last success.
    Serving,
    /// The replica has failed. Calls go to serving replicas while there are any.
    Suspected,
    /// The replica gets no calls until it has loaded the newest weights and passed a probe.
    Quarantined,
}

/// Status of a replica, as the router reports it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// Name of the replica.
    pub name: String,
    /// Health of the replica.
    pub health: Health,
    /// Reason why the replica is not serving. `None` if it is serving.
    pub reason: Option<String>,
    /// Newest version of the weights that the replica is known to have. 0 if the version is
    /// unknown.
    pub version: u64,
    /// Number of the router's calls that run on the replica.
    pub running: usize,
    /// Number of calls that completed on the replica.
    pub finished: u64,
    /// Number of failed calls, probes and weight updates on the replica.
    pub failed: u64,
}

/// A sampler of a router, with its health.
pub(crate) struct Replica {
    pub index: usize,
    pub name: String,
    pub sampler: Arc<dyn Sampler>,
    /// Notified when the next probe may be due earlier than before.
    pub nudged: Notify,
    state: Mutex<ReplicaState>,
    /// Number of events that the replica has sent, over all calls.
    progress: AtomicU64,
    /// Whether the replica has left the router permanently.
    has_left: AtomicBool,
    /// Number of weight updates that have started on the replica.
    updates_started: AtomicU64,
    /// Number of weight updates that have ended on the replica, successfully or not.
    updates_ended: AtomicU64,
}

/// Guard of a weight update in progress on a replica. The update ends when the guard is dropped.
pub struct WeightUpdateGuard<'a>(&'a Replica);

impl Drop for WeightUpdateGuard<'_> {
    fn drop(&mut self) {
        self.0.updates_ended.fetch_add(1, Ordering::SeqCst);
    }
}

struct ReplicaState {
    status: ReplicaStatus,
    /// Number of consecutive failures of the replica.
    in_a_row: u32,
    /// Time at which the next probe of the replica is due.
    due: Instant,
    /// Time between the next failed probe in quarantine and the probe after it.
    wait: Duration,
    /// Whether the replica must be probed although it samples, because it has sampled from outdated
    /// weights.
    is_doubted: bool,
}

impl Replica {
    pub fn new(
        index: usize,
        name: String,
        sampler: Arc<dyn Sampler>,
        options: &RouterOptions,
    ) -> Self {
        let status = ReplicaStatus {
            name: name.clone(),
            health: Health::Serving,
            reason: None,
            version: 0,
            running: 0,
            finished: 0,
            failed: 0,
        };
        let due = Instant::now() + options.probe_every;
        let wait = options.initial_wait;
        let state = ReplicaState { status, in_a_row: 0, due, wait, is_doubted: false };
        Replica {
            index,
            name,
            sampler,
            nudged: Notify::new(),
            state: Mutex::new(state),
            progress: AtomicU64::new(0),
            has_left: AtomicBool::new(false),
            updates_started: AtomicU64::new(0),
            updates_ended: AtomicU64::new(0),
        }
    }

    /// Creates a replica that joins a running router. It is in quarantine until it passes a probe,
    /// which is due immediately.
    pub fn new_joining(
        index: usize,
        name: String,
        sampler: Arc<dyn Sampler>,
        options: &RouterOptions,
    ) -> Self {
        let replica = Self::new(index, name, sampler, options);
        {
            let mut state = replica.lock_state();
            state.status.health = Health::Quarantined;
            state.status.reason = Some("it has just joined".into());
            state.due = Instant::now();
        }
        replica
    }

    /// Returns whether the replica has left the router permanently.
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Relaxed)
    }

    /// Marks the replica as having left the router.
    pub fn mark_left(&self) {
        self.has_left.store(true, Ordering::Relaxed);
        self.nudged.notify_one();
    }

    fn lock_state(&self) -> MutexGuard<'_, ReplicaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self) -> ReplicaStatus {
        self.lock_state().status.clone()
    }

    pub fn health(&self) -> Health {
        self.lock_state().status.health
    }

    /// Returns the time at which the next probe of the replica is due.
    pub fn next_probe_time(&self) -> Instant {
        self.lock_state().due
    }

    /// Counts an event that the replica has sent.
    pub fn count_event(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of events that the replica has sent so far.
    pub fn num_events(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Starts a weight update, which ends when the guard is dropped.
    pub fn start_weight_update(&self) -> WeightUpdateGuard<'_> {
        self.updates_started.fetch_add(1, Ordering::SeqCst);
        WeightUpdateGuard(self)
    }

    /// Returns the number of completed weight updates, or `None` if an update is in progress. A
    /// version that the replica reports while this number changes is meaningless, because a replica
    /// has no version during an update.
    pub fn weight_updates(&self) -> Option<u64> {
        let ended = self.updates_ended.load(Ordering::SeqCst);
        (self.updates_started.load(Ordering::SeqCst) == ended).then_some(ended)
    }

    /// Records the version of the weights that the replica reports.
    pub fn set_version(&self, version: u64) {
        self.lock_state().status.version = version;
    }

    /// Records the version of the weights from which a token was sampled, possibly a while ago.
    /// `min_version` is the version that all replicas should have by now. If the token's version is
    /// older, schedules a probe immediately.
    pub fn note_sampled_version(&self, version: u64, min_version: u64) {
        let mut state = self.lock_state();
        state.status.version = state.status.version.max(version);
        if version < min_version && !state.is_doubted && state.status.health != Health::Quarantined
        {
            (state.is_doubted, state.due) = (true, Instant::now());
            drop(state);
            self.nudged.notify_one();
        }
    }

    /// Returns whether a due probe can be skipped, because the replica serves and has sent events.
    /// In this case, postpones the probe.
    pub fn postpone_probe(&self, has_progressed: bool, options: &RouterOptions) -> bool {
        let mut state = self.lock_state();
        let doubted = std::mem::take(&mut state.is_doubted);
        let may = state.status.health == Health::Serving && has_progressed && !doubted;
        if may {
            state.due = Instant::now() + options.probe_every;
        }
        may
    }

    /// Counts a call on the replica as started if `is_start` is true, otherwise as ended.
    pub fn count_call(&self, is_start: bool) {
        let running = &mut self.lock_state().status.running;
        *running = if is_start { *running + 1 } else { *running - 1 };
    }

    /// Records a completed call, after which a suspected replica serves again.
    pub fn record_completion(&self, options: &RouterOptions) {
        let mut state = self.lock_state();
        state.status.finished += 1;
        if state.status.health != Health::Quarantined {
            state.serve(options);
            (state.in_a_row, state.wait) = (0, options.initial_wait);
        }
    }

    /// Records a passed probe. Returns whether the replica serves again after a failure. Only a
    /// completed call resets the failure count. So a replica that passes probes but fails calls
    /// returns to quarantine at its next failed call, for a longer time.
    pub fn record_passed_probe(&self, options: &RouterOptions) -> bool {
        let mut state = self.lock_state();
        let again = state.status.health != Health::Serving;
        state.serve(options);
        state.in_a_row = state.in_a_row.min(options.failures - 1);
        again
    }

    /// Records a failure of the replica. Returns the resulting health, and whether the health has
    /// changed.
    pub fn record_failure(&self, error: &PolicyError, options: &RouterOptions) -> (Health, bool) {
        let mut state = self.lock_state();
        state.in_a_row += 1;
        state.status.failed += 1;
        let before = state.status.health;
        match before {
            _ if state.in_a_row >= options.failures => state.quarantine(error, options),
            Health::Quarantined => state.quarantine(error, options),
            Health::Serving | Health::Suspected => {
                state.status.health = Health::Suspected;
                state.status.reason = Some(error.to_string());
                state.due = Instant::now();
            }
        }
        let health = state.status.health;
        drop(state);
        self.nudged.notify_one();
        (health, health != before)
    }

    /// Quarantines the replica. Returns whether it was serving or suspected before.
    pub fn start_quarantine(&self, reason: &PolicyError, options: &RouterOptions) -> bool {
        let mut state = self.lock_state();
        let before = state.status.health;
        state.status.failed += 1;
        state.quarantine(reason, options);
        drop(state);
        self.nudged.notify_one();
        before != Health::Quarantined
    }

    /// Runs a query to the replica, with a timeout. `what` describes the query in errors.
    ///
    /// # Errors
    /// Returns the query's error, or [`PolicyError::Deadline`] after `timeout`.
    pub async fn call_with_timeout<T>(
        &self,
        timeout: Duration,
        what: &str,
        question: impl Future<Output = Result<T, PolicyError>>,
    ) -> Result<T, PolicyError> {
        let response = with_timeout(timeout, question).await;
        response.unwrap_or_else(|| {
            Err(PolicyError::Deadline(timeout, format!("{} to {what}", self.name)))
        })
    }

    /// Waits for the duration `limit`, excluding time in which the replica was paused.
    pub async fn sleep_unpaused(&self, limit: Duration, options: &RouterOptions) {
        loop {
            // Pauses are queried late and not during every wait, because the replica may be on
            // another machine. A pause that lasts until now, or almost, shows in the rest of the
            // time.
            sleep(limit.mul_f64(0.75)).await;
            let before = self.query_paused(options).await;
            sleep(limit.mul_f64(0.25)).await;
            if self.query_paused(options).await <= before {
                return;
            }
        }
    }

    async fn query_paused(&self, options: &RouterOptions) -> Duration {
        let paused = with_timeout(options.response_timeout, self.sampler.paused()).await;
        paused.and_then(Result::ok).unwrap_or_default()
    }

    /// Waits until the replica is silent: it has sampled nothing for any call for
    /// `options.silence`, although its weights have version `min_version` or a newer one.
    pub async fn wait_until_silent(&self, min_version: u64, options: &RouterOptions) {
        loop {
            let before = self.num_events();
            self.sleep_unpaused(options.silence, options).await;
            let may_sample = || async {
                let version = with_timeout(options.response_timeout, self.sampler.version()).await;
                // A replica that does not report its version counts as silent.
                version.and_then(Result::ok).is_none_or(|version| version >= min_version)
            };
            if self.num_events() == before && may_sample().await {
                return;
            }
        }
    }
}

impl ReplicaState {
    fn serve(&mut self, options: &RouterOptions) {
        self.status.health = Health::Serving;
        self.status.reason = None;
        self.due = Instant::now() + options.probe_every;
    }

    fn quarantine(&mut self, reason: &PolicyError, options: &RouterOptions) {
        // Calls that ran when the replica was quarantined fail one after another; they are no new
        // failures.
        if self.status.health == Health::Quarantined && Instant::now() < self.due {
            return;
        }
        self.status.health = Health::Quarantined;
        self.status.reason = Some(reason.to_string());
        self.due = Instant::now() + self.wait;
        self.wait = (self.wait * 2).min(options.max_wait);
    }
}
