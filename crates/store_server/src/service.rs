//! State that all routes share: the stores, the search for expired tries, and the shutdown signal.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use levade_store::rollouts::{Page, Rollouts};
use serde::Serialize;
use tokio::sync::watch;

use crate::metrics::RequestMetrics;
use crate::request::Paging;
use crate::response::ApiError;
use crate::runs::ServedRuns;

/// State that all route handlers of the server share.
pub(crate) struct Service {
    store: Arc<dyn Rollouts>,
    runs: ServedRuns,
    /// Minimum interval between two searches for expired tries. Zero searches at every request.
    scan_debounce: Duration,
    last_scan: Mutex<Option<Instant>>,
    pub metrics: RequestMetrics,
    pub started: Instant,
    stopping: watch::Receiver<bool>,
    /// Locked while a route checks and changes the state of a rollout.
    transitions: tokio::sync::Mutex<()>,
}

/// Shared reference to the state of the server, which route handlers receive.
pub(crate) type Shared = Arc<Service>;

impl Service {
    pub fn new(
        store: Arc<dyn Rollouts>,
        runs: ServedRuns,
        scan_debounce: Duration,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let last_scan = Mutex::new(None);
        let metrics = RequestMetrics::default();
        let started = Instant::now();
        let transitions = tokio::sync::Mutex::default();
        Service { store, runs, scan_debounce, last_scan, metrics, started, stopping, transitions }
    }

    /// Returns the collection of the runs on this server.
    pub fn runs(&self) -> &ServedRuns {
        &self.runs
    }

    /// Returns the rollout store, without ending expired tries first.
    pub fn store(&self) -> &dyn Rollouts {
        &*self.store
    }

    /// Ends expired tries, unless a search was recent, and returns the rollout store.
    pub async fn checked(&self) -> Result<&dyn Rollouts, ApiError> {
        if self.is_scan_due() {
            self.scan().await?;
        }
        Ok(self.store())
    }

    /// Waits for the permit to read and change the state of a rollout in several steps. The wait is
    /// bounded by the deadlines of the store calls in other requests.
    pub async fn acquire_transition(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.transitions.lock().await
    }

    fn is_scan_due(&self) -> bool {
        let mut last = self.last_scan.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| last.elapsed() >= self.scan_debounce);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }

    /// Ends all tries that exceeded a timeout.
    pub async fn scan(&self) -> Result<(), ApiError> {
        for expired in self.store.expire_tries().await? {
            let rollout = &expired.rollout_id;
            let number = expired.number;
            let status = expired.status.name();
            tracing::info!(%rollout, number, status, "ended a try by its timeout");
        }
        Ok(())
    }

    /// Ends tries that exceeded a timeout, once per `interval`, until the future is dropped.
    pub async fn scan_every(&self, interval: Duration) {
        loop {
            tokio::time::sleep(interval).await;
            if let Err(error) = self.scan().await {
                tracing::error!(body = %error.body, "cannot search for timeouts");
            }
        }
    }

    /// Waits until the server begins to stop.
    pub async fn stopped(&self) {
        let mut stopping = self.stopping.clone();
        // An error means that the sender was dropped, so the server has stopped.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    }
}

/// A page of results in Agent Lightning's format, which repeats the page limits of the request.
#[derive(Serialize)]
pub(crate) struct WirePage<T> {
    items: Vec<T>,
    limit: i64,
    offset: i64,
    total: u64,
}

impl<T> WirePage<T> {
    pub fn new(page: Page<T>, paging: &Paging) -> Self {
        WirePage {
            items: page.items,
            limit: paging.limit,
            offset: paging.offset,
            total: page.total,
        }
    }
}
