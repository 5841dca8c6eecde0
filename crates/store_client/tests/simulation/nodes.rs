//! The clients of a simulation: runners, and a trainer that makes attempts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_store::rollouts::{
    Json, LeaseEnd, NewRollout, PageRequest, Rollout, RolloutConfig, RolloutError, RolloutFilter,
    RolloutStatus, Rollouts, TryStatus,
};
use levade_store_client::worker::{RolloutExecutor, WorkerOptions, retry, run_worker};
use levade_store_client::{HttpRollouts, ServiceOptions};
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::network::{Link, URL};
use crate::world::World;

/// Queue of the trainer.
const QUEUE: &str = "run/simulated";

/// Timeout for an unreachable store, after which a process ends.
const WAIT: Duration = Duration::from_secs(120);

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Connects a node to the server.
async fn connect(world: &Arc<World>, node: &str) -> Result<Arc<dyn Rollouts>, Failure> {
    let link = Link { world: Arc::clone(world), node: node.to_owned() };
    let options = ServiceOptions { key: None, timeout: WAIT };
    Ok(Arc::new(HttpRollouts::connect_over(Arc::new(link), URL, &options).await?))
}

/// Result of a rollout, as its runner reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub slot: usize,
    pub number: u32,
    pub runner: String,
}

/// Work of a simulated runner.
struct Sampling {
    world: Arc<World>,
    name: String,
}

#[async_trait]
impl RolloutExecutor for Sampling {
    type Error = Failure;

    async fn queues(&self) -> Result<Vec<String>, Failure> {
        Ok(vec![QUEUE.to_owned()])
    }

    async fn execute(&self, rollout: &Rollout) -> (LeaseEnd, Option<Json>) {
        let (time, is_failed) = self.world.with_random(|random, _| {
            let longest = if random.percent(15) { 90_000 } else { 10_000 };
            (random.millis(50..longest), random.percent(10))
        });
        tokio::time::sleep(time).await;
        let slot = serde_json::from_str(rollout.input.get()).unwrap();
        let number = rollout.latest_try.as_ref().unwrap().number;
        let report = Report { slot, number, runner: self.name.clone() };
        let end = if is_failed { LeaseEnd::Failed } else { LeaseEnd::Succeeded };
        (end, Some(to_raw_value(&report).unwrap()))
    }

    fn stats(&self, _: Vec<String>, _: usize) -> Option<Json> {
        None
    }

    fn note(&self, text: String) {
        self.world.note(&self.name, &text);
    }
}

/// Runs a runner until `requests` stop it, or until the store is unreachable for too long.
pub async fn run_runner(
    world: Arc<World>,
    name: String,
    slots: usize,
    requests: mpsc::UnboundedReceiver<()>,
) {
    let store = match connect(&world, &name).await {
        Ok(store) => store,
        Err(error) => return world.note(&name, &error.to_string()),
    };
    let work = Arc::new(Sampling { world: Arc::clone(&world), name: name.clone() });
    let drain = Duration::from_secs(20);
    let options =
        WorkerOptions { store, slots, name: name.clone(), once: false, wait: WAIT, drain };
    let ended = run_worker(options, work, requests).await;
    world.note(&name, if ended.is_ok() { "ended" } else { "ended by an error" });
}

/// State of an attempt slot that survives the trainer.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    /// Number of rollouts that were enqueued for it.
    pub rollouts: u32,
    /// Rollout that was trained on.
    pub trained: Option<String>,
}

/// The trainer's own record, in which a step is counted once it is written.
pub type Ledger = Arc<Mutex<Vec<Slot>>>;

/// Timeouts and retries of the rollouts of a simulation.
pub fn config(lease: f64, max_tries: u32) -> RolloutConfig {
    RolloutConfig {
        timeout_seconds: None,
        unresponsive_seconds: Some(lease),
        max_tries,
        retry_on: vec![TryStatus::Unresponsive, TryStatus::Failed],
    }
}

/// A trainer process.
struct Trainer {
    world: Arc<World>,
    store: Arc<dyn Rollouts>,
    ledger: Ledger,
    config: RolloutConfig,
    /// Rollouts in progress, by id.
    pending: Mutex<BTreeMap<String, watch::Sender<Option<Rollout>>>>,
}

/// Runs a trainer until all slots are trained. Ends early if the store is unreachable for too long.
pub async fn run_trainer(world: Arc<World>, ledger: Ledger, config: RolloutConfig) {
    let trained = async {
        let store = connect(&world, "trainer").await?;
        let pending = Mutex::default();
        let world = Arc::clone(&world);
        Arc::new(Trainer { world, store, ledger, config, pending }).train().await
    };
    if let Err(error) = trained.await {
        world.note("trainer", &format!("ended: {error}"));
    }
}

impl Trainer {
    /// Trains all slots that are not trained yet. As a resumed run does, cancels the rollouts of an
    /// earlier process first.
    async fn train(self: Arc<Self>) -> Result<(), Failure> {
        let store = &*self.store;
        let since = retry(store, "cancel earlier attempts", WAIT, || self.cancel_all()).await?;
        let mut tasks = JoinSet::new();
        let slots = self.ledger.lock().unwrap().clone();
        for (index, _) in slots.iter().enumerate().filter(|(_, slot)| slot.trained.is_none()) {
            tasks.spawn(Arc::clone(&self).train_slot(index));
        }
        let following = self.follow(since);
        tokio::pin!(following);
        loop {
            tokio::select! {
                biased;
                trained = tasks.join_next() => match trained {
                    Some(trained) => trained??,
                    None => return Ok(()),
                },
                failed = &mut following => return failed,
            }
        }
    }

    /// Cancels open rollouts, and returns the number of the last change.
    async fn cancel_all(&self) -> Result<u64, RolloutError> {
        use RolloutStatus::{Preparing, Queuing, Requeuing, Running};
        let filter = RolloutFilter {
            status_in: Some(vec![Queuing, Preparing, Running, Requeuing]),
            ..RolloutFilter::default()
        };
        let all = PageRequest { limit: None, ..PageRequest::default() };
        let open = self.store.query_rollouts(&filter, &all).await?.items;
        let ids: Vec<String> = open.iter().map(|rollout| rollout.id.clone()).collect();
        self.store.cancel_rollouts(&ids).await?;
        Ok(open.iter().map(|rollout| rollout.changed).max().unwrap_or(0))
    }

    /// Makes attempts until one has succeeded, and trains on it.
    async fn train_slot(self: Arc<Self>, index: usize) -> Result<(), Failure> {
        loop {
            let number = {
                let slot = &mut self.ledger.lock().unwrap()[index];
                slot.rollouts += 1;
                slot.rollouts
            };
            let new = NewRollout {
                key: Some(format!("{QUEUE}/{index}/{number}")),
                queue: QUEUE.to_owned(),
                config: self.config.clone(),
                ..NewRollout::new(to_raw_value(&index).unwrap())
            };
            let enqueue = || self.store.enqueue(std::slice::from_ref(&new));
            let rollout = retry(&*self.store, "enqueue an attempt", WAIT, enqueue).await?.remove(0);
            let (sender, mut ended) = watch::channel(None);
            self.pending.lock().unwrap().insert(rollout.id.clone(), sender);
            // The rollout may have changed before it was added to the map.
            let read = || self.store.rollout(&rollout.id);
            if let Some(current) = retry(&*self.store, "read an attempt", WAIT, read).await? {
                self.update(&current);
            }
            let ended = ended.wait_for(Option::is_some).await?.clone();
            self.pending.lock().unwrap().remove(&rollout.id);
            let Some(ended) = ended.filter(|of| of.status == RolloutStatus::Succeeded) else {
                continue;
            };
            let latest = ended.latest_try.as_ref().unwrap();
            let report: Report = serde_json::from_str(latest.metadata.as_ref().unwrap().get())?;
            let of = (report.slot, report.number);
            self.world.check(of == (index, latest.number), || {
                format!("slot {index} got {report:?} as the result of try {}", latest.number)
            });
            self.world.check(latest.worker_id.as_ref() == Some(&report.runner), || {
                format!("{report:?} is the result of the try of {:?}", latest.worker_id)
            });
            let slot = &mut self.ledger.lock().unwrap()[index];
            self.world.check(slot.trained.is_none(), || format!("slot {index} is trained twice"));
            slot.trained = Some(ended.id);
            return Ok(());
        }
    }

    /// Passes the end of a rollout to the slot that waits for it.
    fn update(&self, rollout: &Rollout) {
        let pending = self.pending.lock().unwrap();
        if rollout.status.is_finished()
            && let Some(sender) = pending.get(&rollout.id)
        {
            sender.send_replace(Some(rollout.clone()));
        }
    }

    /// Reads the changes of the store, until it is unreachable for too long.
    async fn follow(&self, mut since: u64) -> Result<(), Failure> {
        loop {
            let read = || self.store.wait_for_changes(since, 1000, Duration::from_secs(2));
            let (changed, last) = retry(&*self.store, "read changes", WAIT, read).await?;
            self.world.check(last >= since, || format!("the feed went from {since} to {last}"));
            since = last;
            changed.iter().for_each(|rollout| self.update(rollout));
        }
    }
}

/// Checks the end of a simulation: every slot is trained once, on a result that the store accepted.
pub async fn check_trained(world: &World, store: &dyn Rollouts, slots: &[Slot]) {
    let mut trained: Vec<&String> = Vec::new();
    for (index, slot) in slots.iter().enumerate() {
        let Some(id) = &slot.trained else {
            world.check(false, || format!("slot {index} is not trained"));
            continue;
        };
        world.check(!trained.contains(&id), || format!("slot {index} has another's result"));
        trained.push(id);
        let rollout = store.rollout(id).await.unwrap();
        let is_succeeded = rollout.is_some_and(|of| of.status == RolloutStatus::Succeeded);
        world.check(is_succeeded, || format!("the result of slot {index} is not in the store"));
    }
    let all = PageRequest { limit: None, ..PageRequest::default() };
    for rollout in store.query_rollouts(&RolloutFilter::default(), &all).await.unwrap().items {
        world.check(rollout.status.is_finished(), || {
            format!("a rollout of slot {} is {}", rollout.input, rollout.status.name())
        });
    }
}
