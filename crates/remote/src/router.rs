//! Distributes calls of one policy over replicas, and recovers from failures.
//!
//! A [`Router`] is itself a sampler, so a caller uses it like a single sampler.
//!
//! # Health
//! A replica is *serving*, *suspected* after a failure (other replicas then get its calls, if there
//! are any), or *quarantined* after several consecutive failures, or if it missed weights. A probe
//! samples one token from a tiny prompt, because a server that answers pings may still fail to
//! sample. Idle replicas are probed at intervals, suspected ones at once, quarantined ones after
//! waits that double. Before a quarantined replica serves again, it reports its version, loads the
//! newest weights if its own are older, and samples a token. Replicas can join and leave at any
//! time. A replica that joins starts in quarantine.
//!
//! # Failover
//! A call whose replica fails continues at another replica. The tokens already returned are
//! appended to the prompt ([`sampled_before`](levade_policy::SamplingParams::sampled_before)), and
//! the weights must be at least as new as those that sampled them
//! ([`min_version`](SampleRequest::min_version)). Tokens are functions of seed, stream and
//! position, so with the same weights the completion is the same. If the last token may have
//! completed a stop string, it is held back until the next one arrives, so that no completion
//! continues past its end. Each token is returned once. Failures of the request itself are returned
//! to the caller and are not retried on another replica.
//!
//! # Admission and weights
//! [`RouterOptions`] limits the calls that run and wait; further calls are rejected with a retry
//! hint ([`PolicyError::Busy`]). Loading weights succeeds if any replica has loaded them. If none
//! has, the router returns an error and keeps its state. If all replicas are unreachable, it waits
//! for one to come back.

mod call;
mod choice;
mod gate;
mod options;
mod pool;
mod replica;
#[cfg(test)]
mod testing;
mod totals;

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    DeviceStats, Load, PolicyError, SampleRequest, SampleStream, Sampler, WeightsRef,
};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::calls::InFlightCalls;
use call::RoutedCall;
pub use choice::{Choice, PrefixOptions};
use gate::AdmissionGate;
pub use options::RouterOptions;
use pool::ReplicaPool;
pub use replica::{Health, ReplicaStatus};
use totals::ReplicaTotals;

/// A sampler that distributes calls over several samplers of one policy, its replicas. Dropping the
/// router stops the probes of its replicas; calls in flight continue.
pub struct Router {
    pool: Arc<ReplicaPool>,
    gate: Arc<AdmissionGate>,
    calls: InFlightCalls,
    totals: ReplicaTotals,
    watches: Mutex<JoinSet<()>>,
    retained: Vec<Box<dyn Any + Send + Sync>>,
}

impl Router {
    /// Creates a router over `replicas`, each with a name for errors and logs. Must be called
    /// within a Tokio runtime.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if there are no replicas, if two replicas have the same
    /// name, if `tries` or `failures` is 0, or if the probe prompt is empty.
    pub fn new(
        replicas: Vec<(String, Arc<dyn Sampler>)>,
        options: RouterOptions,
    ) -> Result<Self, PolicyError> {
        if replicas.is_empty() {
            return Err(PolicyError::Invalid(
                "the router has no replicas; add at least one sampler".into(),
            ));
        }
        let mut names = BTreeSet::new();
        if let Some((name, _)) = replicas.iter().find(|(name, _)| !names.insert(name)) {
            return Err(PolicyError::Invalid(format!(
                "the router has two replicas with the name {name:?}; give each a different name"
            )));
        }
        let positive = [("tries", options.tries), ("failures", options.failures as usize)];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(PolicyError::Invalid(format!(
                "the router has {name} = 0, but it must be at least 1"
            )));
        }
        if options.probe.is_empty() {
            return Err(PolicyError::Invalid(
                "the router needs a prompt for its probes; set `probe` to at least one token"
                    .into(),
            ));
        }
        let gate = AdmissionGate::new(options.max_running, options.max_waiting);
        let totals = ReplicaTotals::new(replicas.len());
        let pool = Arc::new(ReplicaPool::new(replicas, options));
        let mut watches = JoinSet::new();
        for replica in pool.replicas() {
            watches.spawn(pool.clone().monitor(replica));
        }
        Ok(Router {
            pool,
            gate,
            calls: InFlightCalls::default(),
            totals,
            watches: Mutex::new(watches),
            retained: Vec::new(),
        })
    }

    /// Keeps `what` alive as long as the router, for example the processes of its replicas.
    pub fn keep_alive(mut self, what: impl Any + Send + Sync) -> Self {
        self.retained.push(Box::new(what));
        self
    }

    /// Adds a replica, which gets calls once it has loaded the newest weights and passed a probe.
    /// Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if the router already has a replica with this name.
    pub fn join(
        &self,
        name: impl Into<String>,
        sampler: Arc<dyn Sampler>,
    ) -> Result<(), PolicyError> {
        let name = name.into();
        let Some(replica) = self.pool.join(name.clone(), sampler) else {
            return Err(PolicyError::Invalid(format!(
                "the router already has a replica with the name {name:?}"
            )));
        };
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        watches.spawn(self.pool.clone().monitor(replica));
        Ok(())
    }

    /// Removes a replica from the router. It gets no more calls, and its calls in flight continue.
    /// Returns whether the router had a replica with this name.
    pub fn leave(&self, name: &str) -> bool {
        self.pool.leave(name)
    }

    /// Returns the status of every replica.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        self.pool.replicas().iter().map(|replica| replica.status()).collect()
    }

    /// Stops starting calls. New calls wait, up to the maximum number of waiting calls. Running
    /// calls continue.
    pub fn pause(&self) {
        self.gate.pause();
    }

    /// Starts calls again, after [`pause`](Self::pause) or [`drain`](Self::drain).
    pub fn resume(&self) {
        self.gate.resume();
    }

    /// Stops probing the replicas until they load weights again, because the replicas have given up
    /// their devices. Calls are still sent to the replicas, and wait there.
    pub(crate) fn pause_probes(&self) {
        self.pool.pause_probes();
    }

    /// Rejects new calls, and waits until all admitted calls have ended.
    ///
    /// # Errors
    /// Returns [`PolicyError::Deadline`] with the number of remaining calls if they have not ended
    /// within `timeout`. New calls are rejected even then, until [`resume`](Self::resume).
    pub async fn drain(&self, timeout: Duration) -> Result<(), PolicyError> {
        self.gate.drain(timeout).await
    }
}

#[async_trait]
impl Sampler for Router {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let policy = &self.pool.options.policy;
        if !policy.is_empty() && !request.policy.is_empty() && request.policy != *policy {
            return Err(PolicyError::Invalid(format!(
                "the request names the policy {:?}, but the router serves {policy:?}",
                request.policy
            )));
        }
        request.params.validate()?;
        let ticket = self.gate.join_queue()?;
        let (events, stream) = SampleStream::channel();
        let (accepted, response) = oneshot::channel();
        let (call_guard, aborted) = self.calls.register(request.stream);
        let call = RoutedCall {
            request,
            events,
            aborted,
            accepted: Some(accepted),
            sampled: 0,
            scored: 0,
            retained: None,
        };
        let pool = self.pool.clone();
        tokio::spawn(async move {
            call.run(pool, ticket).await;
            drop(call_guard);
        });
        match response.await {
            Ok(accepted) => accepted.map(|()| stream),
            Err(_) => Err(PolicyError::Stopped("the router".into())),
        }
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        Ok(self.calls.abort(stream))
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(self.totals.load(&self.pool, self.gate.counts().1).await)
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(self.totals.stats(&self.pool).await)
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(self.totals.paused(&self.pool).await)
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        self.pool.update_weights(weights).await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.totals.version(&self.pool).await
    }
}

#[cfg(test)]
#[path = "router/router_tests.rs"]
mod tests;
