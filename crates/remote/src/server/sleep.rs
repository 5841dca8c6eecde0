//! Sleep of a server that releases its devices to a learner, and takes them back when it loads
//! weights.
//!
//! A sleeping server has no weights and answers no sampling request: requests wait until it has
//! loaded weights. Its label marks it as asleep, which distinguishes it from a restarted server and
//! identifies a server that another process left asleep.

use std::sync::{PoisonError, Weak};

use hyper::Method;
use levade_policy::process_time::with_timeout;
use levade_policy::{PolicyError, WeightsRef};
use tokio::time::Instant;
use tracing::{info, warn};

use super::dialect::{Facts, LoadSpec, Part};
use super::options::InFlight;
use super::weight_dir::WeightDir;
use super::{Server, ServerInner, format_label, lock};
use crate::devices::SamplerWaker;

/// Parts of a server's device memory that are asleep. Only changed while `update_lock` is locked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum SleepState {
    /// No part is asleep. The server has its devices.
    #[default]
    Awake,
    /// The weights and the KV cache are asleep. The server has no weights.
    Asleep,
    /// Only the KV cache is asleep. `holds` is the label of the weights in memory, if any.
    Half { holds: Option<String> },
}

impl Server {
    /// Puts the server to sleep. It releases its devices, with its weights and its KV cache. All
    /// requests, including running requests, wait until the server has loaded weights again. A
    /// server that already sleeps stays asleep.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable, times out, or was started without the
    /// required flag. Requests wait even then.
    pub(crate) async fn sleep(&self) -> Result<(), PolicyError> {
        self.0.sleep().await
    }

    /// Returns whether the server's address is reachable, even if the response times out.
    pub(crate) async fn is_reachable(&self) -> bool {
        let response =
            self.0.http.send(Method::GET, "/health", None, self.0.options.response_timeout).await;
        !matches!(response, Err(PolicyError::Stopped(_)))
    }

    /// Loads weights over a process group into a sleeping server without waking it completely. Its
    /// KV cache fits into device memory only after the learner has sent the weights to all servers.
    /// If the load fails, the server reads the weights from their directory when it wakes.
    pub(crate) async fn preload(&self, weights: &WeightsRef) {
        if let Err(error) = self.0.preload(weights).await {
            let server = &self.0.http.name;
            let version = weights.version;
            warn!(server, version, %error, "preloading weights failed; they are loaded with the \
                                            next update");
        }
    }

    /// Sets the object that wakes the server if it gets a request while asleep.
    pub(crate) fn set_waker(&self, wakes: Weak<dyn SamplerWaker>) {
        *self.0.wakes.lock().unwrap_or_else(PoisonError::into_inner) = Some(wakes);
    }
}

impl ServerInner {
    /// Returns whether any part of the server's memory is known to be asleep.
    pub fn is_partly_asleep(&self) -> bool {
        *lock(&self.sleep) != SleepState::Awake
    }

    fn set_sleep(&self, sleep: SleepState) {
        *lock(&self.sleep) = sleep;
    }

    async fn sleep(&self) -> Result<(), PolicyError> {
        let response_timeout = self.options.response_timeout;
        let timeout = self.options.update_timeout * 2;
        let Some(_lock) = with_timeout(timeout, self.update_lock.lock()).await else {
            let what = format!("{} to finish loading weights before it sleeps", self.http.name);
            return Err(PolicyError::Deadline(timeout, what));
        };
        self.close_gate();
        let before = lock(&self.sleep).clone();
        if before != SleepState::Awake {
            let is_asleep = self.still_sleeps(&before).await?;
            if is_asleep {
                if before == SleepState::Asleep {
                    return Ok(());
                }
                // Memory must be allocated before it can be released.
                self.dialect.wake(&self.http, Part::Cache, timeout).await?;
            }
            if !is_asleep {
                // The server was restarted, perhaps with other options.
                *self.facts.lock().await = None;
            }
            self.set_sleep(SleepState::Awake);
        }
        let start = Instant::now();
        self.dialect.check_sleeps(&self.http, response_timeout).await?;
        self.dialect.pause(&self.http, InFlight::Recompute, response_timeout).await?;
        self.dialect.sleep(&self.http, timeout).await?;
        self.set_sleep(SleepState::Asleep);
        info!(
            server = self.http.name,
            seconds = start.elapsed().as_secs_f64(),
            "a sampler is asleep"
        );
        Ok(())
    }

    /// Holds requests to the server back until it has loaded weights.
    fn close_gate(&self) {
        lock(&self.paused).since.get_or_insert_with(Instant::now);
        self.gate.send_if_modified(|gate| {
            let changes = !gate.is_asleep;
            if changes {
                gate.changes += 1;
                (gate.is_closed, gate.is_asleep, gate.weights) = (true, true, None);
            }
            changes
        });
    }

    /// Returns whether the server has not restarted since it fell asleep as in `before`: it still
    /// sleeps, or has the label of the weights that it has loaded since.
    async fn still_sleeps(&self, before: &SleepState) -> Result<bool, PolicyError> {
        let response_timeout = self.options.response_timeout;
        if self.dialect.is_asleep(&self.http, response_timeout).await? {
            return Ok(true);
        }
        let known = self.facts.lock().await.clone();
        let (SleepState::Half { holds: Some(label) }, Some(facts)) = (before, known) else {
            return Ok(false);
        };
        Ok(self.dialect.query_label(&self.http, &facts, response_timeout).await? == *label)
    }

    /// Treats a server that was put to sleep as awake if it has been restarted since.
    pub async fn recheck_sleep(&self) -> Result<(), PolicyError> {
        let before = lock(&self.sleep).clone();
        if before != SleepState::Awake && !self.still_sleeps(&before).await? {
            self.set_sleep(SleepState::Awake);
            *self.facts.lock().await = None;
        }
        Ok(())
    }

    /// Wakes a server that an earlier run left asleep, with the weights that it was started with.
    pub async fn wake_if_asleep(&self) -> Result<(), PolicyError> {
        let response_timeout = self.options.response_timeout;
        let update_timeout = self.options.update_timeout;
        let asleep = match self.dialect.is_asleep(&self.http, response_timeout).await {
            // The server is of another kind, which the inspection will report.
            Err(error) if !error.is_transient() => false,
            asleep => asleep?,
        };
        if asleep {
            warn!(server = self.http.name, "waking a server that was left asleep");
            self.dialect.wake(&self.http, Part::Weights, update_timeout).await?;
            self.dialect.load_initial_weights(&self.http, update_timeout).await?;
            self.dialect.wake(&self.http, Part::Cache, update_timeout).await?;
            self.dialect.resume(&self.http, response_timeout).await?;
        }
        self.set_sleep(SleepState::Awake);
        Ok(())
    }

    async fn preload(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let _lock = self.update_lock.lock().await;
        let dir = self.checked_dir(weights).await?;
        self.recheck_sleep().await?;
        let known = self.facts.lock().await.clone();
        let Some(facts) = known.filter(|_| *lock(&self.sleep) == SleepState::Asleep) else {
            return Ok(());
        };
        self.dialect.wake(&self.http, Part::Weights, self.options.update_timeout).await?;
        self.set_sleep(SleepState::Half { holds: None });
        let Some(membership) = self.join_group(weights.version, &facts).await else {
            return Ok(());
        };
        let label = format_label(weights.version, dir.sum);
        let load = LoadSpec {
            facts: &facts,
            label: &label,
            keeps: true,
            within: self.options.update_timeout,
        };
        self.load_into_paused(&dir, &load, Some(membership)).await?;
        self.set_sleep(SleepState::Half { holds: Some(label) });
        Ok(())
    }

    /// Wakes a server and resumes sampling. The server reads the weights in `dir` unless it already
    /// holds weights with the label `label`.
    pub async fn wake_with(
        &self,
        dir: &WeightDir,
        facts: &Facts,
        label: &str,
    ) -> Result<(), PolicyError> {
        let response_timeout = self.options.response_timeout;
        let update_timeout = self.options.update_timeout;
        let before = lock(&self.sleep).clone();
        if before == SleepState::Asleep {
            self.dialect.wake(&self.http, Part::Weights, update_timeout).await?;
            self.set_sleep(SleepState::Half { holds: None });
        }
        if before != (SleepState::Half { holds: Some(label.to_owned()) }) {
            let load = LoadSpec { facts, label, keeps: true, within: update_timeout };
            self.set_sleep(SleepState::Half { holds: None });
            self.load_into_paused(dir, &load, None).await?;
            self.set_sleep(SleepState::Half { holds: Some(label.to_owned()) });
        }
        self.dialect.wake(&self.http, Part::Cache, update_timeout).await?;
        self.set_sleep(SleepState::Awake);
        self.dialect.resume(&self.http, response_timeout).await
    }
}
