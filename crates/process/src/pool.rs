//! Pools of workers: started when they are needed, and again after they ended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_policy::awake;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tracing::warn;

use crate::options::PoolOptions;
use crate::request::{Request, WorkerError};
use crate::worker::{Call, Slot, State, Worker};

/// Interval between a worker that did not become ready and the next start.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);

/// Workers of one program.
#[derive(Debug)]
pub struct Pool {
    options: Arc<PoolOptions>,
    permits: Arc<Semaphore>,
    workers: Mutex<Workers>,
}

#[derive(Debug, Default)]
struct Workers {
    running: Vec<Arc<Worker>>,
    /// When a worker last ended before it was ready, and why.
    failure: Option<(Instant, WorkerError)>,
}

impl Pool {
    /// Creates a pool. No worker is started yet.
    pub fn new(mut options: PoolOptions) -> Self {
        options.max_workers = options.max_workers.max(1);
        options.max_requests = options.max_requests.max(1);
        let permits = options.max_workers.saturating_mul(options.max_requests).min(Semaphore::MAX_PERMITS);
        Pool {
            options: Arc::new(options),
            permits: Arc::new(Semaphore::new(permits)),
            workers: Mutex::default(),
        }
    }

    /// Waits for a permit for a request: there are as many as all workers take requests at once. Returns
    /// `None` only if the pool is closed, which no method does.
    pub async fn acquire_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }

    /// Reserves a slot at the worker with the lowest load, once a worker is ready. Starts a worker if all
    /// others are busy. The slot does not count against the number of requests at once.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready.
    pub async fn slot(&self) -> Result<Slot, WorkerError> {
        loop {
            let slot = self.choose()?;
            let mut state = slot.worker().state.clone();
            // A worker that ended is not chosen again.
            let state = state.wait_for(|state| !matches!(state, State::Starting)).await;
            if state.is_ok_and(|state| matches!(*state, State::Ready)) {
                return Ok(slot);
            }
        }
    }

    /// Sends a request, once there is a place for it.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready.
    pub async fn send(&self, request: Request) -> Result<Call, WorkerError> {
        let permit = self.acquire_permit().await;
        let mut slot = self.slot().await?;
        slot.permit = permit;
        Ok(slot.send(request))
    }

    /// Sends a request, and waits for the answer. The timeout starts when the request is sent.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready, the worker ends first, or the timeout passes.
    pub async fn request(&self, request: Request, timeout: Duration) -> Result<Value, WorkerError> {
        let mut call = self.send(request).await?;
        match awake::within(timeout, call.answer()).await {
            Some(answer) => answer,
            None => {
                call.cancel().await;
                Err(WorkerError::Timeout(timeout))
            }
        }
    }

    /// Reserves a slot at a worker that is ready or starts.
    fn choose(&self) -> Result<Slot, WorkerError> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.remove_ended();
        let max_requests = self.options.max_requests;
        let is_ready = |worker: &&Arc<Worker>| matches!(*worker.state.borrow(), State::Ready);
        let has_idle = workers.running.iter().filter(is_ready).any(|worker| worker.load() == 0);
        let mut starting = workers.running.iter().filter(|worker| !is_ready(worker));
        let needs_worker = !has_idle && !starting.any(|worker| worker.has_slot(max_requests));
        let failure = workers.failure.clone().filter(|(since, _)| since.elapsed() < RESTART_INTERVAL);
        if needs_worker && failure.is_none() && workers.running.len() < self.options.max_workers {
            workers.running.push(Worker::start(&self.options)?);
        }
        // A full worker is better than one that starts only if the latter is full, too.
        let rank = |worker: &&Arc<Worker>| (!worker.has_slot(max_requests), !is_ready(worker), worker.load());
        match (workers.running.iter().min_by_key(rank), failure) {
            (Some(worker), _) => Ok(worker.slot()),
            (None, Some((_, error))) => Err(error),
            (None, None) => Err(WorkerError::Closed),
        }
    }
}

impl Workers {
    fn remove_ended(&mut self) {
        let failure = &mut self.failure;
        self.running.retain(|worker| {
            if let State::Ended { error, was_ready: false } = &*worker.state.borrow() {
                warn!(%error, "a worker did not become ready");
                *failure = Some((Instant::now(), error.clone()));
            }
            worker.error().is_none()
        });
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
