//! Queue of a run's attempts: enqueues rollouts, and follows them until runners have ended them.
//!
//! One task reads the changes of the store for all attempts that wait. It also ends the leases that
//! have expired, and reports if no runner leases.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use levade_policy::process_time;
use levade_store::rollouts::{
    NewRollout, PageRequest, Rollout, RolloutConfig, RolloutError, RolloutFilter, RolloutStatus,
    Rollouts, TryStatus, WorkerFilter,
};
use serde_json::value::to_raw_value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::wire::{AttemptReport, LeasedAttempt, WorkerStats, evaluation_queue_name};
use crate::Player;

/// Maximum wait of one request to the store for changes of rollouts.
const CHANGES_WAIT: Duration = Duration::from_secs(2);

/// Maximum number of changes of rollouts in one response of the store.
const MAX_CHANGES: usize = 1000;

/// Interval between repeated requests to a store that is unreachable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a lease after which the user is notified that no runner leases attempts.
const NOTICE_AFTER: Duration = Duration::from_secs(60);

/// Time that a runner has for its report after the timeout of an attempt.
const REPORT_GRACE: Duration = Duration::from_secs(30);

/// Options of a queue from which runners lease attempts.
#[derive(Debug, Clone)]
pub struct RunnerQueueOptions {
    /// Location of the store, for messages to the user.
    pub store: String,
    /// Name of the queue. Evaluation attempts are in its [`evaluation_queue_name`].
    pub queue: String,
    /// Id of the stored resources that contain the recipe.
    pub resources_id: String,
    /// Version of the stored resources that contain the recipe.
    pub recipe_version: u64,
    /// Maximum interval between two reports of a runner. The lease of a runner that exceeds this
    /// interval expires.
    pub lease: Duration,
    /// Timeout for a runner to lease an attempt, and maximum time for which the store may be
    /// unreachable.
    pub wait: Duration,
}

/// Result of a lease, which the waiting attempt receives.
#[derive(Debug)]
pub(super) enum LeaseResult {
    /// The runner reported how the attempt ended.
    Reported(AttemptReport),
    /// The lease expired, or the runner returned it.
    Lost(String),
    /// The attempt exceeded its timeout.
    TimedOut,
    /// No runner or no store was available in time.
    Failed(String),
}

/// State of a rollout, as the attempt that waits for the rollout sees it.
#[derive(Debug, Clone)]
enum RolloutState {
    Queued,
    Leased,
    Reported(AttemptReport),
    Lost(String),
    Failed(String),
}

/// Queue from which runners lease the attempts of a run.
pub struct RunnerQueue {
    store: Arc<dyn Rollouts>,
    options: RunnerQueueOptions,
    note: Box<dyn Fn(String) + Send + Sync>,
    /// Rollouts that attempts wait for, by id.
    pending: Mutex<BTreeMap<String, watch::Sender<RolloutState>>>,
    /// Set when the task that follows the changes in the store has started.
    follower: OnceLock<()>,
}

impl RunnerQueue {
    /// Creates a queue of attempts in `store`. `note` receives messages for the user.
    pub fn new(
        store: Arc<dyn Rollouts>,
        options: RunnerQueueOptions,
        note: impl Fn(String) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(RunnerQueue {
            store,
            options,
            note: Box::new(note),
            pending: Mutex::default(),
            follower: OnceLock::new(),
        })
    }

    /// Returns the id and the version of the stored resources that contain the recipe.
    pub(super) fn recipe_resources(&self) -> (String, u64) {
        (self.options.resources_id.clone(), self.options.recipe_version)
    }

    /// Cancels all rollouts of the queue that have not ended, such as the rollouts that a killed
    /// process left. Returns the number of cancelled rollouts.
    ///
    /// # Errors
    /// Returns an error if the store fails.
    pub async fn cancel_all(&self) -> Result<u64, RolloutError> {
        use RolloutStatus::{Preparing, Queuing, Requeuing, Running};
        let filter = RolloutFilter {
            status_in: Some(vec![Queuing, Preparing, Running, Requeuing]),
            ..RolloutFilter::default()
        };
        let all = PageRequest { limit: None, ..PageRequest::default() };
        let found = self.store.query_rollouts(&filter, &all).await?.items;
        let queues = self.queue_names();
        let own = found.into_iter().filter(|rollout| queues.contains(&rollout.queue));
        let ids: Vec<String> = own.map(|rollout| rollout.id).collect();
        self.store.cancel_rollouts(&ids).await
    }

    /// Returns the names of the two queues: first the queue of training attempts, then the queue of
    /// evaluation attempts.
    fn queue_names(&self) -> [String; 2] {
        let RunnerQueueOptions { queue, .. } = &self.options;
        [queue.clone(), evaluation_queue_name(queue)]
    }

    fn lock_pending(&self) -> MutexGuard<'_, BTreeMap<String, watch::Sender<RolloutState>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues an attempt, and returns the id of its rollout. Retries while the store is
    /// unreachable.
    ///
    /// # Errors
    /// Returns a message if the store rejects the rollout or stays unreachable for too long.
    pub(super) async fn enqueue(
        self: &Arc<Self>,
        attempt: &LeasedAttempt,
    ) -> Result<String, String> {
        let input = to_raw_value(attempt).map_err(|error| error.to_string())?;
        let lease = self.options.lease;
        let [training, evaluation] = self.queue_names();
        let queue = if attempt.is_evaluation { evaluation } else { training };
        let new = NewRollout {
            // The key of the session is new in every execution of an attempt.
            key: Some(format!("{queue}/{}/{}", attempt.name, attempt.endpoint.key)),
            queue,
            mode: Some(if attempt.is_evaluation { "val" } else { "train" }.to_owned()),
            resources_id: Some(attempt.resources_id.clone()),
            config: RolloutConfig {
                unresponsive_seconds: Some(lease.as_secs_f64()),
                ..RolloutConfig::default()
            },
            ..NewRollout::new(input)
        };
        let start = Instant::now();
        let rollout = loop {
            match self.store.enqueue(std::slice::from_ref(&new)).await {
                Ok(mut rollouts) => match rollouts.pop() {
                    Some(rollout) => break rollout,
                    None => return Err("the store returned no rollout for the attempt".into()),
                },
                Err(error @ RolloutError::Store(_)) if start.elapsed() < self.options.wait => {
                    tracing::warn!(%error, "waiting for the store");
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                Err(error) => return Err(self.unreachable_message(&error.to_string())),
            }
        };
        self.lock_pending().insert(rollout.id.clone(), watch::Sender::new(RolloutState::Queued));
        let since = rollout.changed.saturating_sub(1);
        self.follower.get_or_init(|| {
            let queue = Arc::downgrade(self);
            tokio::spawn(follow_changes(queue, since));
        });
        // The rollout may have changed before it was added to the map.
        if let Ok(Some(current)) = self.store.rollout(&rollout.id).await {
            self.notify_attempt(&current);
        }
        Ok(rollout.id)
    }

    /// Waits until a runner has ended the attempt or the timeout expires. The timeout starts when a
    /// runner leases the attempt. The clock of `player` measures the timeout.
    pub(super) async fn wait_for_end(
        &self,
        id: &str,
        player: &Player,
        timeout: Duration,
    ) -> LeaseResult {
        let receiver = self.lock_pending().get(id).map(watch::Sender::subscribe);
        let Some(mut state) = receiver else {
            return LeaseResult::Failed(format!("the rollout {id} is not in the queue"));
        };
        let ended = "the queue of runners has ended";
        if state.wait_for(|state| !matches!(state, RolloutState::Queued)).await.is_err() {
            return LeaseResult::Failed(ended.into());
        }
        let is_over =
            |state: &RolloutState| !matches!(state, RolloutState::Queued | RolloutState::Leased);
        let limit = timeout.saturating_add(REPORT_GRACE);
        let over = player.wait_within(limit, state.wait_for(is_over)).await;
        let result = match over.map(|state| state.map(|state| state.clone())) {
            None => LeaseResult::TimedOut,
            Some(Ok(RolloutState::Reported(report))) => LeaseResult::Reported(report),
            Some(Ok(RolloutState::Lost(why))) => LeaseResult::Lost(why),
            Some(Ok(RolloutState::Failed(why))) => LeaseResult::Failed(why),
            Some(Ok(RolloutState::Queued | RolloutState::Leased) | Err(_)) => {
                LeaseResult::Failed(ended.into())
            }
        };
        self.lock_pending().remove(id);
        result
    }

    /// Cancels a rollout, so that its runner stops.
    pub(super) async fn cancel(&self, id: &str) {
        self.lock_pending().remove(id);
        if let Err(error) = self.store.cancel_rollouts(&[id.to_owned()]).await {
            tracing::warn!(%error, "could not cancel the rollout {id}; its lease expires");
        }
    }

    /// Passes the change of a rollout to the attempt that waits for the rollout.
    fn notify_attempt(&self, rollout: &Rollout) {
        let pending = self.lock_pending();
        let Some(sender) = pending.get(&rollout.id) else { return };
        sender.send_if_modified(|state| {
            // A lease that ended stays ended, even if a late report revives the rollout.
            let is_open = matches!(state, RolloutState::Queued | RolloutState::Leased);
            if is_open {
                *state = to_rollout_state(rollout);
            }
            is_open
        });
    }

    /// Ends the waits of all attempts with the error `why`.
    fn fail_all(&self, why: &str) {
        for sender in self.lock_pending().values() {
            sender.send_replace(RolloutState::Failed(why.to_owned()));
        }
    }

    /// Returns whether at least one attempt waits, and no runner makes an attempt.
    fn is_starving(&self) -> bool {
        let pending = self.lock_pending();
        let is_queued =
            |sender: &watch::Sender<RolloutState>| matches!(*sender.borrow(), RolloutState::Queued);
        !pending.is_empty() && pending.values().all(is_queued)
    }

    fn unreachable_message(&self, why: &str) -> String {
        let RunnerQueueOptions { store, wait, .. } = &self.options;
        format!(
            "the store of rollouts at {store} could not be used for {wait:?} \
             (runners.wait_seconds): {why}"
        )
    }

    /// Returns the message for the user that no runner has leased an attempt for `time`.
    async fn starvation_message(&self, time: Duration) -> String {
        let RunnerQueueOptions { store, queue, .. } = &self.options;
        let known = self.count_runners().await.unwrap_or_default();
        let seconds = time.as_secs();
        format!(
            "no runner has leased an attempt of {queue} for {seconds} s; {known} runners are \
             connected; start one with: levade runner --store {store}"
        )
    }

    /// Returns the number of runners that serve the queue and have reported recently.
    async fn count_runners(&self) -> Result<usize, RolloutError> {
        let all = PageRequest { limit: None, ..PageRequest::default() };
        let workers = self.store.query_workers(&WorkerFilter::default(), &all).await?.items;
        let oldest = self.store.now() - self.options.lease.as_secs_f64();
        let queues = self.queue_names();
        let serves = |stats: &WorkerStats| stats.queues.iter().any(|queue| queues.contains(queue));
        let is_connected = |worker: &&levade_store::rollouts::Worker| {
            let stats = worker.heartbeat_stats.as_ref();
            worker.last_heartbeat_time.is_some_and(|time| time >= oldest)
                && stats
                    .and_then(|stats| serde_json::from_str(stats.get()).ok())
                    .is_some_and(|stats| serves(&stats))
        };
        Ok(workers.iter().filter(is_connected).count())
    }
}

/// Converts a rollout into the state that the waiting attempt sees.
fn to_rollout_state(rollout: &Rollout) -> RolloutState {
    let latest = rollout.latest_try.as_ref();
    let report = || {
        let metadata = latest.and_then(|latest| latest.metadata.as_ref());
        let metadata = metadata.ok_or_else(|| "the runner reported no result".to_owned())?;
        serde_json::from_str::<AttemptReport>(metadata.get())
            .map_err(|error| format!("the report of the runner is invalid: {error}"))
    };
    let runner = latest.and_then(|latest| latest.worker_id.as_deref()).unwrap_or("?");
    let number = latest.map_or(0, |latest| latest.number);
    match rollout.status {
        // A lease was returned. The session already has its calls.
        status if number > u32::from(!status.is_queued()) => {
            RolloutState::Lost(format!("the runner {runner} returned its lease"))
        }
        RolloutStatus::Queuing | RolloutStatus::Requeuing => RolloutState::Queued,
        RolloutStatus::Preparing | RolloutStatus::Running => RolloutState::Leased,
        RolloutStatus::Succeeded => {
            report().map_or_else(RolloutState::Failed, RolloutState::Reported)
        }
        RolloutStatus::Failed => match latest.map(|latest| latest.status) {
            Some(TryStatus::Failed) => {
                report().map_or_else(RolloutState::Failed, RolloutState::Reported)
            }
            _ => RolloutState::Lost(format!("the lease of the runner {runner} has expired")),
        },
        RolloutStatus::Cancelled => RolloutState::Lost("the rollout was cancelled".into()),
    }
}

/// Follows the changes in the store after `since`, and passes them to the waiting attempts until
/// the queue is dropped.
async fn follow_changes(queue: Weak<RunnerQueue>, mut since: u64) {
    let mut next_expiry = Instant::now();
    let mut reached = Instant::now();
    let mut leased = Instant::now();
    let mut next_notice = NOTICE_AFTER;
    while let Some(queue) = queue.upgrade() {
        let RunnerQueueOptions { lease, wait, store, .. } = &queue.options;
        match queue.read_changes(&mut since, &mut next_expiry, *lease).await {
            Ok(()) => reached = Instant::now(),
            Err(error) => {
                tracing::warn!(%error, "waiting for the store at {store}");
                if reached.elapsed() > *wait {
                    queue.fail_all(&queue.unreachable_message(&error.to_string()));
                    reached = Instant::now();
                }
                process_time::sleep(RETRY_INTERVAL).await;
            }
        }
        if !queue.is_starving() {
            (leased, next_notice) = (Instant::now(), NOTICE_AFTER);
        } else if leased.elapsed() > *wait {
            let why = queue.starvation_message(leased.elapsed()).await;
            queue.fail_all(&format!("{why} (runners.wait_seconds = {})", wait.as_secs_f64()));
            leased = Instant::now();
        } else if leased.elapsed() > next_notice {
            (queue.note)(queue.starvation_message(leased.elapsed()).await);
            next_notice *= 2;
        }
    }
}

impl RunnerQueue {
    /// Reads the changes after `since` from the store, and passes them to the waiting attempts.
    /// Also ends expired leases if the interval since the last check for them has passed.
    async fn read_changes(
        &self,
        since: &mut u64,
        next_expiry: &mut Instant,
        lease: Duration,
    ) -> Result<(), RolloutError> {
        if Instant::now() >= *next_expiry {
            self.store.expire_tries().await?;
            *next_expiry = Instant::now() + (lease / 6).max(Duration::from_millis(100));
        }
        let wait = CHANGES_WAIT.min(lease / 6);
        let (rollouts, next) = self.store.wait_for_changes(*since, MAX_CHANGES, wait).await?;
        *since = next;
        rollouts.iter().for_each(|rollout| self.notify_attempt(rollout));
        Ok(())
    }
}
