//! Colocation: a learner and servers that take turns on the same devices.
//!
//! # Ownership
//! One lock is held by the side that learns or hands the devices over. At any time the devices belong to one
//! side:
//!
//! - **Learner.** A learner call that needs a device first acquires the devices: all servers are put to
//!   sleep, then the learner loads its weights and optimizer state back. Each further call checks external
//!   servers again, because somebody may have restarted them. Servers of the run are checked once, and again
//!   after a failed call. A learner call is never interrupted by a request; requests wait at the gate of
//!   their server.
//! - **Samplers.** New weights, or the first request to a sleeping server, hand the devices to the servers:
//!   the learner offloads to host memory, storage by storage (`levade_torch/shelf.py`), so no tensor, shard
//!   or optimizer notices it. Then servers wake. If weights are broadcast, the learner keeps its weights on
//!   the devices until every server has them, and servers allocate their caches afterwards.
//!
//! # Sleep
//! A sleeping server has the label `levade-asleep`. So it differs from a restarted server, and a process that
//! starts after a killed one recognizes it. A server wakes in one way only: memory of the weights, weights,
//! memory of the cache, resume, probe. The router rests meanwhile ([`paused`](Sampler::paused)): it probes no
//! member and counts no failure.
//!
//! # Failures
//! A handoff completes, even if its caller is cancelled, or leaves the devices without an owner; the next
//! handoff then starts from the beginning, since each step can be repeated. So no request is sent to a
//! sleeping server, and no server is awake that the learner believes asleep. A server whose process exited
//! occupies no device; if it comes back in the learner's turn, it is put to sleep before the next learner
//! call. Supervisors start servers in the samplers' turn only ([`Turns::starts`], [`Sharer::lives`]): either
//! the supervisor sees the end of the turn, or the learner sees the process and waits for it.

mod learner;
mod sampler;
#[cfg(test)]
mod testing;

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::awake::{sleep, within};
use levade_policy::{PolicyError, Sampler, WeightsRef};
use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::devices::{Offloads, Wakes};
use crate::push::Pushing;
use crate::router::Router;
use crate::server::Server;

/// How often a server that does not answer is asked again whether it sleeps.
const LOOK: Duration = Duration::from_millis(500);

/// A side that has devices by turns with the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// The learner.
    Learner,
    /// The servers.
    Samplers,
}

/// A server that shares its devices with the learner.
pub struct Sharer {
    /// Name in messages.
    pub name: String,
    /// The server.
    pub server: Server,
    /// Says whether it has a process, where the run starts it.
    pub lives: Option<watch::Receiver<bool>>,
}

/// All servers of the devices, and the router over them.
struct Fleet {
    router: Arc<Router>,
    sharers: Vec<Arc<Sharer>>,
    push: Option<Arc<Pushing>>,
}

/// Whose turn it is.
struct State {
    /// Nobody's while it changes hands, and where that has failed.
    holder: Option<Side>,
    /// The newest weights that were adopted.
    adopted: Option<WeightsRef>,
    /// Whether servers that the run starts were found asleep in this turn of the learner: they stay so.
    is_sure: bool,
}

/// Devices that servers and a learner have by turns.
pub struct Turns {
    /// This very one, for what it does to the end.
    itself: Weak<Turns>,
    learner: Arc<dyn Offloads>,
    /// Longest wait for a server that does not answer.
    patience: Duration,
    fleet: OnceLock<Fleet>,
    /// Held by whoever uses the devices as a learner, or hands them over.
    state: Arc<tokio::sync::Mutex<State>>,
    starts: watch::Sender<bool>,
    /// How long handing over took.
    spent: Mutex<Duration>,
}

impl Turns {
    /// Devices that the learner has now. A server that is there and does not answer is waited for as long as
    /// `patience` says before the learner's turn fails.
    pub fn new(learner: Arc<dyn Offloads>, patience: Duration) -> Arc<Self> {
        let state = State { holder: Some(Side::Learner), adopted: None, is_sure: false };
        Arc::new_cyclic(|itself| Turns {
            itself: itself.clone(),
            learner,
            patience,
            fleet: OnceLock::new(),
            state: Arc::new(tokio::sync::Mutex::new(state)),
            starts: watch::Sender::new(false),
            spent: Mutex::default(),
        })
    }

    /// Whether servers may be started now, for those who start them. One whose process begins tells so first
    /// (`lives` of its [`Sharer`]), and looks here again.
    pub fn starts(&self) -> watch::Receiver<bool> {
        self.starts.subscribe()
    }

    /// How long handing devices over took so far.
    pub fn spent(&self) -> Duration {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the learner leave the devices before there are any servers, so that these can be started.
    ///
    /// # Errors
    /// When it does not.
    pub async fn make_room(&self) -> Result<(), PolicyError> {
        let mut state = self.state.lock().await;
        state.holder = None;
        self.learner.offload(false).await?;
        self.starts.send_replace(true);
        state.holder = Some(Side::Samplers);
        Ok(())
    }

    /// Sets the servers, which are all awake now, the router over them, and what sends them weights, where
    /// these do not come in folders.
    ///
    /// # Errors
    /// When they were set before.
    pub fn share(
        &self,
        router: Arc<Router>,
        sharers: Vec<Sharer>,
        push: Option<Arc<Pushing>>,
    ) -> Result<(), PolicyError> {
        sharers.iter().for_each(|sharer| sharer.server.woken_by(self.itself.clone()));
        let sharers = sharers.into_iter().map(Arc::new).collect();
        self.fleet.set(Fleet { router, sharers, push }).map_err(|_| {
            PolicyError::Invalid("the devices of a learner are shared with one set of servers".into())
        })
    }

    /// The learner's turn, until what is returned is dropped.
    ///
    /// # Errors
    /// When a server does not sleep, or the learner cannot take its place.
    async fn learns(&self) -> Result<OwnedMutexGuard<State>, PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        let turns = self.itself()?;
        whole(async move { turns.to_learner(state).await }).await
    }

    /// Has servers adopt weights, in the samplers' turn.
    ///
    /// # Errors
    /// When the learner does not leave the devices, or no server adopts them.
    async fn adopts(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        let (turns, weights) = (self.itself()?, weights.clone());
        whole(async move { turns.to_samplers(state, weights).await }).await
    }

    async fn to_learner(
        &self,
        mut state: OwnedMutexGuard<State>,
    ) -> Result<OwnedMutexGuard<State>, PolicyError> {
        let begun = Instant::now();
        let changes = state.holder.take() != Some(Side::Learner);
        if changes {
            self.starts.send_replace(false);
        }
        if let Some(fleet) = self.fleet.get() {
            if changes {
                fleet.router.rest();
            }
            let is_sure = std::mem::take(&mut state.is_sure) && !changes;
            self.all_sleep(fleet, is_sure).await?;
            state.is_sure = true;
        }
        if changes {
            let moved = self.learner.onload().await?;
            self.spends(begun);
            info!(seconds = begun.elapsed().as_secs_f64(), moved.bytes, "the learner has the devices");
        }
        state.holder = Some(Side::Learner);
        Ok(state)
    }

    async fn to_samplers(
        &self,
        mut state: OwnedMutexGuard<State>,
        weights: WeightsRef,
    ) -> Result<(), PolicyError> {
        let begun = Instant::now();
        state.holder = None;
        let Some(fleet) = self.fleet.get() else {
            return Err(PolicyError::Stopped("the servers that share the learner's devices".into()));
        };
        if let Some(push) = &fleet.push
            && push.offers(weights.version).await
        {
            self.learner.offload(true).await?;
            let mut calls = JoinSet::new();
            for sharer in &fleet.sharers {
                let (sharer, weights) = (Arc::clone(sharer), weights.clone());
                calls.spawn(async move { sharer.server.takes(&weights).await });
            }
            calls.join_all().await;
            // Who comes later reads the folder: the learner would need the devices to send it.
            push.withdraw().await;
        }
        let moved = self.learner.offload(false).await?;
        self.starts.send_replace(true);
        fleet.router.adopt(&weights).await?;
        self.spends(begun);
        info!(
            version = weights.version,
            seconds = begun.elapsed().as_secs_f64(),
            moved.bytes,
            "samplers have the devices"
        );
        state.adopted = Some(weights);
        state.holder = Some(Side::Samplers);
        Ok(())
    }

    /// Has all servers sleep that are there; only those that others may start again, where it is sure of
    /// those that the run starts.
    async fn all_sleep(&self, fleet: &Fleet, is_sure: bool) -> Result<(), PolicyError> {
        let mut calls = JoinSet::new();
        for sharer in fleet.sharers.iter().filter(|sharer| !is_sure || sharer.lives.is_none()) {
            let (sharer, patience) = (Arc::clone(sharer), self.patience);
            calls.spawn(async move { sharer.sleeps(patience).await });
        }
        // All of them, although one fails: the next who asks finds them as they should be.
        calls.join_all().await.into_iter().collect()
    }

    fn itself(&self) -> Result<Arc<Self>, PolicyError> {
        self.itself.upgrade().ok_or_else(|| PolicyError::Stopped("the run".into()))
    }

    fn spends(&self, begun: Instant) {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner) += begun.elapsed();
    }
}

#[async_trait]
impl Wakes for Turns {
    async fn wake(&self) -> Result<(), PolicyError> {
        let state = Arc::clone(&self.state).lock_owned().await;
        if state.holder == Some(Side::Samplers) {
            return Ok(());
        }
        let Some(weights) = state.adopted.clone() else {
            return Err(PolicyError::NotAdopted("no weights were published yet".into()));
        };
        let turns = self.itself()?;
        whole(async move { turns.to_samplers(state, weights).await }).await
    }
}

impl Sharer {
    /// Has it sleep, or finds out that it is gone.
    ///
    /// # Errors
    /// When it refuses, or is there and does not answer for as long as `longest`.
    async fn sleeps(&self, longest: Duration) -> Result<(), PolicyError> {
        let mut last = String::new();
        let asleep = within(longest, async {
            loop {
                match self.server.sleep().await {
                    Ok(()) => return Ok(()),
                    Err(error) if !error.may_pass() => return Err(error),
                    Err(error) => last = error.to_string(),
                }
                let is_gone = match &self.lives {
                    Some(lives) => !*lives.borrow(),
                    None => !self.server.is_there().await,
                };
                if is_gone {
                    warn!(sampler = self.name, "a sampler is gone, and holds no device");
                    return Ok(());
                }
                sleep(LOOK).await;
            }
        });
        asleep.await.unwrap_or_else(|| {
            let what = format!("the sampler {} to give its devices to the learner: {last}", self.name);
            Err(PolicyError::Deadline(longest, what))
        })
    }
}

/// Does something to its end, also when nobody waits for that any more: in the middle of it, devices belong
/// to nobody.
async fn whole<T: Send + 'static>(
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
