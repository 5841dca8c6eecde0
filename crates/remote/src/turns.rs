//! Colocation: a learner and servers that take turns on the same devices.
//!
//! # Ownership
//! One lock is held during a learner call and during a handoff. At any time the devices belong to
//! one side:
//!
//! - **Learner.** A learner call that needs a device first acquires the devices: all servers are
//!   put to sleep, then the learner loads its weights and optimizer state back. Each further call
//!   checks the external servers again, because they may have been restarted. Servers that the run
//!   manages are checked once, and again after a failed call. A request never interrupts a learner
//!   call; requests wait at the gate of their server.
//! - **Samplers.** New weights, or the first request to a sleeping server, hand the devices to the
//!   servers: the learner offloads to host memory, storage by storage (`levade_torch/shelf.py`), so
//!   no tensor, shard or optimizer is affected. Then the servers wake. If weights are broadcast,
//!   the learner keeps its weights on the devices until every server has received them, and the
//!   servers allocate their KV caches afterwards.
//!
//! # Sleep
//! A sleeping server has the weight label `levade-asleep`. The label distinguishes it from a
//! restarted server, and a new run recognizes it after the previous run was killed. A server always
//! wakes in the same order: memory of the weights, weights, memory of the KV cache, resume, probe.
//! Meanwhile the router pauses its probes ([`paused`](Sampler::paused)): it probes no replica and
//! counts no failure.
//!
//! # Failures
//! A handoff either completes, even if its caller is cancelled, or leaves the devices without an
//! owner. The next handoff then starts from the beginning, since each step can be repeated. So no
//! request is sent to a sleeping server, and no server is awake while the learner believes it to be
//! asleep. A server whose process has exited occupies no device; if it comes back while the learner
//! owns the devices, it is put to sleep before the next learner call. Supervisors start servers
//! only while the samplers own the devices ([`Colocation::starts`], [`ColocatedServer::running`]):
//! either the supervisor sees that ownership has ended, or the learner sees the process and waits
//! for it.

mod learner;
mod sampler;
#[cfg(test)]
mod testing;

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::process_time::{sleep, with_timeout};
use levade_policy::{PolicyError, Sampler, WeightsRef};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::devices::{Offload, SamplerWaker};
use crate::push::WeightBroadcast;
use crate::router::Router;
use crate::server::Server;

/// Interval at which sleep is requested again from an unresponsive server.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// A party that can own the devices: the learner or the inference servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceOwner {
    /// The learner owns the devices.
    Learner,
    /// The servers own the devices.
    Samplers,
}

/// An inference server that shares the learner's devices.
pub struct ColocatedServer {
    /// Name of the server in logs and errors.
    pub name: String,
    /// Client through which requests are sent to the server.
    pub server: Server,
    /// For a server that the run manages: whether its process exists. `None` for an external
    /// server.
    pub running: Option<watch::Receiver<bool>>,
}

/// All servers that share the learner's devices, and the router over them.
struct ServerFleet {
    router: Arc<Router>,
    servers: Vec<Arc<ColocatedServer>>,
    push: Option<Arc<WeightBroadcast>>,
}

/// State of colocated devices: their owner, and what is known about the servers.
struct DeviceState {
    /// Current owner of the devices. `None` during a handoff, and after a failed handoff.
    holder: Option<DeviceOwner>,
    /// Newest weights that the servers have loaded. `None` if they have loaded none.
    loaded_weights: Option<WeightsRef>,
    /// Whether all servers that the run manages are known to be asleep since the learner acquired
    /// the devices.
    is_sure: bool,
}

/// Coordinates a learner and inference servers that share devices.
pub struct Colocation {
    /// Reference to this object, for handoffs that run in tasks of their own.
    itself: Weak<Colocation>,
    learner: Arc<dyn Offload>,
    /// Timeout for an unresponsive server to fall asleep.
    sleep_timeout: Duration,
    fleet: OnceLock<ServerFleet>,
    /// Locked during a handoff, and by every learner call while it uses the devices.
    state: Arc<tokio::sync::Mutex<DeviceState>>,
    starts: watch::Sender<bool>,
    /// Total duration of all handoffs of the devices.
    spent: Mutex<Duration>,
}

impl Colocation {
    /// Creates a coordinator for devices that the learner currently owns. A handoff to the learner
    /// fails if a running server does not fall asleep within `sleep_timeout`.
    pub fn new(learner: Arc<dyn Offload>, sleep_timeout: Duration) -> Arc<Self> {
        let state = DeviceState {
            holder: Some(DeviceOwner::Learner),
            loaded_weights: None,
            is_sure: false,
        };
        Arc::new_cyclic(|itself| Colocation {
            itself: itself.clone(),
            learner,
            sleep_timeout,
            fleet: OnceLock::new(),
            state: Arc::new(tokio::sync::Mutex::new(state)),
            starts: watch::Sender::new(false),
            spent: Mutex::default(),
        })
    }

    /// Returns a channel that reports whether managed servers may be started now.
    ///
    /// To start a server without racing a handoff, first set [`ColocatedServer::running`], then
    /// read this channel again.
    pub fn starts(&self) -> watch::Receiver<bool> {
        self.starts.subscribe()
    }

    /// Returns the total duration of all handoffs of the devices so far.
    pub fn spent(&self) -> Duration {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offloads the learner while there are no servers, so that the first servers can be started.
    ///
    /// # Errors
    /// Returns an error if the learner cannot be offloaded.
    pub async fn make_room(&self) -> Result<(), PolicyError> {
        let mut state = self.state.lock().await;
        state.holder = None;
        self.learner.offload(false).await?;
        self.starts.send_replace(true);
        state.holder = Some(DeviceOwner::Samplers);
        Ok(())
    }

    /// Sets the router and the servers that share the devices, all of which must be awake. `push`
    /// is the broadcast that sends weights to the servers. If it is `None`, they load weights from
    /// directories.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if the servers have already been set.
    pub fn colocate(
        &self,
        router: Arc<Router>,
        servers: Vec<ColocatedServer>,
        push: Option<Arc<WeightBroadcast>>,
    ) -> Result<(), PolicyError> {
        servers.iter().for_each(|colocated| colocated.server.set_waker(self.itself.clone()));
        let servers = servers.into_iter().map(Arc::new).collect();
        self.fleet.set(ServerFleet { router, servers, push }).map_err(|_| {
            PolicyError::Invalid(
                "a learner can share its devices with only one set of servers".into(),
            )
        })
    }

    /// Acquires the devices for the learner, until the returned guard is dropped.
    ///
    /// # Errors
    /// Returns an error if a server cannot be put to sleep or the learner cannot be loaded.
    async fn acquire_for_learner(&self) -> Result<OwnedMutexGuard<DeviceState>, PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        let colocation = self.upgrade_self()?;
        run_detached(async move { colocation.hand_to_learner(state).await }).await
    }

    /// Hands the devices to the servers, and makes the servers load `weights`.
    ///
    /// # Errors
    /// Returns an error if the learner cannot be offloaded or no server loads the weights.
    async fn hand_to_samplers(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        let colocation = self.upgrade_self()?;
        let weights = weights.clone();
        run_detached(async move { colocation.hand_over_and_load(state, weights).await }).await
    }

    async fn hand_to_learner(
        &self,
        mut state: OwnedMutexGuard<DeviceState>,
    ) -> Result<OwnedMutexGuard<DeviceState>, PolicyError> {
        let start = Instant::now();
        let changes = state.holder.take() != Some(DeviceOwner::Learner);
        if changes {
            self.starts.send_replace(false);
        }
        if let Some(fleet) = self.fleet.get() {
            if changes {
                fleet.router.pause_probes();
            }
            let is_sure = std::mem::take(&mut state.is_sure) && !changes;
            self.put_all_to_sleep(fleet, is_sure).await?;
            state.is_sure = true;
        }
        if changes {
            let moved = self.learner.onload().await?;
            self.add_handoff_time(start);
            info!(
                seconds = start.elapsed().as_secs_f64(),
                moved.bytes, "handed the devices to the learner"
            );
        }
        state.holder = Some(DeviceOwner::Learner);
        Ok(state)
    }

    async fn hand_over_and_load(
        &self,
        mut state: OwnedMutexGuard<DeviceState>,
        weights: WeightsRef,
    ) -> Result<(), PolicyError> {
        let start = Instant::now();
        state.holder = None;
        let Some(fleet) = self.fleet.get() else {
            return Err(PolicyError::Stopped(
                "the servers that share the learner's devices".into(),
            ));
        };
        if let Some(push) = &fleet.push
            && push.is_offered(weights.version).await
        {
            self.learner.offload(true).await?;
            let mut calls = JoinSet::new();
            for colocated in &fleet.servers {
                let colocated = Arc::clone(colocated);
                let weights = weights.clone();
                calls.spawn(async move { colocated.server.preload(&weights).await });
            }
            calls.join_all().await;
            // Servers that come back later read the weights from the directory: sending them needs
            // the devices.
            push.withdraw().await;
        }
        let moved = self.learner.offload(false).await?;
        self.starts.send_replace(true);
        fleet.router.update_weights(&weights).await?;
        self.add_handoff_time(start);
        info!(
            version = weights.version,
            seconds = start.elapsed().as_secs_f64(),
            moved.bytes,
            "handed the devices to the samplers"
        );
        state.loaded_weights = Some(weights);
        state.holder = Some(DeviceOwner::Samplers);
        Ok(())
    }

    /// Puts all reachable servers to sleep. If `is_sure`, skips the servers that the run manages,
    /// because they are known to be asleep.
    async fn put_all_to_sleep(
        &self,
        fleet: &ServerFleet,
        is_sure: bool,
    ) -> Result<(), PolicyError> {
        let mut calls = JoinSet::new();
        for colocated in
            fleet.servers.iter().filter(|colocated| !is_sure || colocated.running.is_none())
        {
            let colocated = Arc::clone(colocated);
            let sleep_timeout = self.sleep_timeout;
            calls.spawn(async move { colocated.put_to_sleep(sleep_timeout).await });
        }
        // Waits for all servers even if one fails: the next caller then finds the other servers
        // asleep.
        calls.join_all().await.into_iter().collect()
    }

    fn upgrade_self(&self) -> Result<Arc<Self>, PolicyError> {
        self.itself.upgrade().ok_or_else(|| PolicyError::Stopped("the run".into()))
    }

    fn add_handoff_time(&self, start: Instant) {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner) += start.elapsed();
    }
}

#[async_trait]
impl SamplerWaker for Colocation {
    async fn wake(&self) -> Result<(), PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        if state.holder == Some(DeviceOwner::Samplers) {
            return Ok(());
        }
        let Some(weights) = state.loaded_weights.clone() else {
            return Err(PolicyError::WeightsNotLoaded("no weights have been published yet".into()));
        };
        let colocation = self.upgrade_self()?;
        run_detached(async move { colocation.hand_over_and_load(state, weights).await }).await
    }
}

impl ColocatedServer {
    /// Puts the server to sleep. Returns immediately if the server has exited and so occupies no
    /// device.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request, or if it is running and does not fall
    /// asleep within `timeout`.
    async fn put_to_sleep(&self, timeout: Duration) -> Result<(), PolicyError> {
        let mut last = String::new();
        let asleep = with_timeout(timeout, async {
            loop {
                match self.server.sleep().await {
                    Ok(()) => return Ok(()),
                    Err(error) if !error.is_transient() => return Err(error),
                    Err(error) => last = error.to_string(),
                }
                let has_exited = match &self.running {
                    Some(running) => !*running.borrow(),
                    None => !self.server.is_reachable().await,
                };
                if has_exited {
                    warn!(sampler = self.name, "a sampler has exited and holds no device");
                    return Ok(());
                }
                sleep(POLL_INTERVAL).await;
            }
        });
        asleep.await.unwrap_or_else(|| {
            let what =
                format!("the sampler {} to release its devices for the learner: {last}", self.name);
            Err(PolicyError::Deadline(timeout, what))
        })
    }
}

/// Runs `work` to completion in a task of its own, even if the caller is cancelled. If a handoff
/// stopped halfway, no side would own the devices.
async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, PolicyError>> + Send + 'static,
) -> Result<T, PolicyError> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(PolicyError::Stopped("the run".into())),
        },
    }
}

#[cfg(test)]
#[path = "turns/turns_tests.rs"]
mod tests;
