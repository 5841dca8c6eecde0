//! Pools of workers, which start on demand and are replaced when they exit.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_policy::process_time;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tracing::warn;

use crate::options::PoolOptions;
use crate::request::{Request, WorkerError};
use crate::worker::{Call, Slot, Worker, WorkerState};

/// Minimum interval between the failed start of a worker and the next start.
const RESTART_INTERVAL: Duration = Duration::from_secs(1);

/// A pool of worker processes that run the same program.
#[derive(Debug)]
pub struct Pool {
    options: Arc<PoolOptions>,
    permits: Arc<Semaphore>,
    workers: Mutex<Workers>,
}

#[derive(Debug, Default)]
struct Workers {
    running: Vec<Arc<Worker>>,
    /// Time and reason of the last exit of a worker that was not ready yet. `None` if there was no
    /// such exit.
    failure: Option<(Instant, WorkerError)>,
}

impl Pool {
    /// Creates a pool of workers, which are started on demand.
    pub fn new(mut options: PoolOptions) -> Self {
        options.max_workers = options.max_workers.max(1);
        options.max_requests = options.max_requests.max(1);
        let permits =
            options.max_workers.saturating_mul(options.max_requests).min(Semaphore::MAX_PERMITS);
        Pool {
            options: Arc::new(options),
            permits: Arc::new(Semaphore::new(permits)),
            workers: Mutex::default(),
        }
    }

    /// Waits for a permit to send a request. The number of permits is the number of requests that
    /// all workers can handle concurrently. Returns `None` only if the pool is closed, which no
    /// method does.
    pub async fn acquire_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }

    /// Reserves a slot on the worker with the lowest load, and waits until that worker is ready.
    /// Starts a worker if all workers are busy. The slot needs no permit, so it does not count
    /// toward the concurrent requests.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready.
    pub async fn slot(&self) -> Result<Slot, WorkerError> {
        loop {
            let slot = self.reserve_slot()?;
            let mut state = slot.worker().state.clone();
            // A worker that has exited is not chosen again.
            let state = state.wait_for(|state| !matches!(state, WorkerState::Starting)).await;
            if state.is_ok_and(|state| matches!(*state, WorkerState::Ready)) {
                return Ok(slot);
            }
        }
    }

    /// Waits for a permit and a ready worker, and sends a request.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready.
    pub async fn send(&self, request: Request) -> Result<Call, WorkerError> {
        let permit = self.acquire_permit().await;
        let mut slot = self.slot().await?;
        slot.permit = permit;
        Ok(slot.send(request))
    }

    /// Sends a request and waits for the response. The timeout starts when the request is sent.
    ///
    /// # Errors
    /// Returns an error if no worker becomes ready, the worker exits first, or the timeout passes.
    pub async fn request(&self, request: Request, timeout: Duration) -> Result<Value, WorkerError> {
        let mut call = self.send(request).await?;
        match process_time::with_timeout(timeout, call.response()).await {
            Some(response) => response,
            None => {
                call.cancel().await;
                Err(WorkerError::Timeout(timeout))
            }
        }
    }

    /// Reserves a slot on a worker that is ready or starting. Starts another worker if no worker is
    /// idle, no starting worker has a free slot, and the pool may have more workers.
    fn reserve_slot(&self) -> Result<Slot, WorkerError> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.remove_ended();
        let max_requests = self.options.max_requests;
        let has_idle_worker =
            workers.running.iter().filter(is_ready).any(|worker| worker.load() == 0);
        let mut starting = workers.running.iter().filter(|worker| !is_ready(worker));
        let needs_worker =
            !has_idle_worker && !starting.any(|worker| worker.has_slot(max_requests));
        let failure =
            workers.failure.clone().filter(|(since, _)| since.elapsed() < RESTART_INTERVAL);
        if needs_worker && failure.is_none() && workers.running.len() < self.options.max_workers {
            workers.running.push(Worker::start(&self.options)?);
        }
        // A starting worker is preferred to a full one, unless it is full, too.
        match (
            workers.running.iter().min_by_key(|worker| {
                (!worker.has_slot(max_requests), !is_ready(worker), worker.load())
            }),
            failure,
        ) {
            (Some(worker), _) => Ok(worker.slot()),
            (None, Some((_, error))) => Err(error),
            (None, None) => Err(WorkerError::Closed),
        }
    }
}

fn is_ready(worker: &&Arc<Worker>) -> bool {
    matches!(*worker.state.borrow(), WorkerState::Ready)
}

impl Workers {
    fn remove_ended(&mut self) {
        let failure = &mut self.failure;
        self.running.retain(|worker| {
            if let WorkerState::Ended { error, was_ready: false } = &*worker.state.borrow() {
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
