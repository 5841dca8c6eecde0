//! Workers of one file: started as they are needed, and again where they end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::warn;

use super::PythonOptions;
use super::offered::Offered;
use super::worker::{State, Worker};
use crate::Keeper;
use crate::tools::Permit;

/// How long nobody tries to start a worker after one could not be.
const PAUSE: Duration = Duration::from_secs(1);

/// Workers of one file.
pub(super) struct Pool {
    name: String,
    options: PythonOptions,
    keeper: Keeper,
    offered: Arc<OnceLock<Arc<Offered>>>,
    places: Arc<Semaphore>,
    workers: Mutex<Workers>,
}

#[derive(Default)]
struct Workers {
    there: Vec<Arc<Worker>>,
    /// Why the last one that was started never was ready, and when that was.
    failed: Option<(Instant, String)>,
}

impl Pool {
    /// Room for the workers that the options say.
    pub fn new(name: String, options: PythonOptions, keeper: Keeper) -> Self {
        let places = options.workers.saturating_mul(options.worker_calls).clamp(1, Semaphore::MAX_PERMITS);
        Pool {
            name,
            options,
            keeper,
            offered: Arc::default(),
            places: Arc::new(Semaphore::new(places)),
            workers: Mutex::default(),
        }
    }

    /// The tools, once a worker was ready.
    pub fn offered(&self) -> Option<Arc<Offered>> {
        self.offered.get().cloned()
    }

    /// Waits for a place among the calls of all workers, and for a worker to be ready.
    pub async fn admit(&self) -> Permit {
        let mut permit = Permit::default();
        if let Ok(place) = Arc::clone(&self.places).acquire_owned().await {
            permit.hold(place);
        }
        // Where there is none, the call says why.
        let _ = self.ready().await;
        permit
    }

    /// The worker with the least to do, once there is one that is ready.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn ready(&self) -> Result<Arc<Worker>, String> {
        loop {
            let worker = self.choose()?;
            let mut state = worker.state.clone();
            let now = state.wait_for(|state| !matches!(state, State::Starting)).await;
            let is_ready = now.is_ok_and(|state| matches!(*state, State::Ready));
            if is_ready {
                return Ok(worker);
            }
        }
    }

    fn workers(&self) -> std::sync::MutexGuard<'_, Workers> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker that is ready and has the least to do, or else one that is starting.
    ///
    /// # Errors
    /// Why none can be started.
    fn choose(&self) -> Result<Arc<Worker>, String> {
        let mut workers = self.workers();
        workers.take_leave();
        let is_ready = |worker: &&Arc<Worker>| matches!(*worker.state.borrow(), State::Ready);
        let load = |worker: &Arc<Worker>| {
            (worker.sessions.load(Ordering::Relaxed), worker.busy.load(Ordering::Relaxed))
        };
        let weigh = |worker: &&Arc<Worker>| load(worker).0 + load(worker).1;
        let least = workers.there.iter().filter(is_ready).min_by_key(weigh).cloned();
        let starting = workers.there.iter().find(|worker| !is_ready(worker)).cloned();
        let is_busy = least.as_ref().is_none_or(|least| load(least) != (0, 0));
        let has_room = workers.there.len() < self.options.workers;
        let failed = workers.failed.clone().filter(|(when, _)| when.elapsed() < PAUSE);
        if is_busy && has_room && starting.is_none() {
            if let (Some((_, why)), None) = (&failed, &least) {
                return Err(why.clone());
            }
            if failed.is_none() {
                let started =
                    Worker::start(&self.name, &self.options, &self.keeper, Arc::clone(&self.offered))?;
                workers.there.push(Arc::clone(&started));
                return Ok(least.unwrap_or(started));
            }
        }
        least.or(starting).ok_or_else(|| "there is no worker".into())
    }
}

impl Workers {
    /// Takes leave of workers that have ended.
    fn take_leave(&mut self) {
        let failed = &mut self.failed;
        self.there.retain(|worker| {
            let State::Ended { why, was_ready } = &*worker.state.borrow() else { return true };
            if !was_ready {
                warn!(why, "a Python process could not be started");
                *failed = Some((Instant::now(), why.clone()));
            }
            false
        });
    }
}
