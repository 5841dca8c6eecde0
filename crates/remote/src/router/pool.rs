//! The replicas of a router: selection for a call, attribution of errors, and recovery.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use levade_policy::process_time::with_timeout;
use levade_policy::{Completion, PolicyError, SampleRequest, Sampler, SamplingParams, WeightsRef};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::choice::{ReplicaCandidate, ReplicaSelector};
use super::options::RouterOptions;
use super::replica::{Health, Replica};

/// Random stream of probes, which no sampling call uses.
const PROBES: u64 = u64::MAX - 2;

/// The replicas of a router, with their weights and their health.
pub(crate) struct ReplicaPool {
    /// All replicas that have ever joined, by index, including replicas that have left.
    replicas: Mutex<Vec<Arc<Replica>>>,
    pub options: RouterOptions,
    choice: Mutex<Box<dyn ReplicaSelector>>,
    weights: Mutex<PoolWeights>,
    /// Notified when a replica starts to serve again.
    returned: Notify,
    /// Whether probes are paused because the replicas have released their devices and have not
    /// loaded weights since.
    probes_paused: watch::Sender<bool>,
}

/// Weights that the replicas of a router should have loaded.
#[derive(Default)]
struct PoolWeights {
    /// Newest published weights. `None` if no weights have been published.
    newest: Option<WeightsRef>,
    /// Version that all serving replicas have loaded. A replica that reports an older version has
    /// lost its weights.
    loaded_version: u64,
}

/// Guard that counts a call as running on a replica until the guard is dropped.
pub(crate) struct ReplicaGuard(pub Arc<Replica>);

impl Drop for ReplicaGuard {
    fn drop(&mut self) {
        self.0.count_call(false);
    }
}

/// The cause of an error that a replica returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorCause {
    /// The request is the cause: no replica can serve it.
    Request,
    /// Neither the request nor the replica is the cause. Another replica may serve the request.
    Neither,
    /// The replica is the cause.
    Replica,
}

impl ErrorCause {
    /// Returns the cause of `error`.
    pub fn from_error(error: &PolicyError) -> Self {
        match error {
            PolicyError::Busy { .. } | PolicyError::Behind { .. } => ErrorCause::Neither,
            PolicyError::Deadline(..)
            | PolicyError::Stopped(_)
            | PolicyError::Storage(_)
            | PolicyError::WeightsNotLoaded(_)
            // Damaged weights are the fault of one replica. Diverged weights fail on the next
            // replica too.
            | PolicyError::NotFinite { .. } => ErrorCause::Replica,
            PolicyError::Invalid(_)
            | PolicyError::PromptTooLong { .. }
            | PolicyError::PlanMismatch(_)
            | PolicyError::NoValueHead
            | PolicyError::NoPredictions
            | PolicyError::NoTerms => ErrorCause::Request,
        }
    }
}

/// Guard that resumes the probes of all replicas when dropped.
struct ProbePauseGuard<'a>(&'a ReplicaPool);

impl Drop for ProbePauseGuard<'_> {
    fn drop(&mut self) {
        self.0.probes_paused.send_replace(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReplicaPool {
    pub fn new(replicas: Vec<(String, Arc<dyn Sampler>)>, options: RouterOptions) -> Self {
        let replicas = replicas.into_iter().enumerate();
        let replicas =
            replicas.map(|(i, (name, sampler))| Arc::new(Replica::new(i, name, sampler, &options)));
        ReplicaPool {
            replicas: Mutex::new(replicas.collect()),
            choice: Mutex::new(options.choice.create_selector()),
            options,
            weights: Mutex::default(),
            returned: Notify::new(),
            probes_paused: watch::Sender::new(false),
        }
    }

    /// Returns the replicas that have not left the router.
    pub fn replicas(&self) -> Vec<Arc<Replica>> {
        lock(&self.replicas).iter().filter(|replica| !replica.has_left()).cloned().collect()
    }

    /// Returns the replica with the index `index`, even if it has left the router.
    pub fn replica(&self, index: usize) -> Option<Arc<Replica>> {
        lock(&self.replicas).get(index).cloned()
    }

    /// Adds a replica, which gets no calls before it has loaded the newest weights and passed a
    /// probe. Returns `None` if a replica with this name exists.
    pub fn join(&self, name: String, sampler: Arc<dyn Sampler>) -> Option<Arc<Replica>> {
        let mut replicas = lock(&self.replicas);
        if replicas.iter().any(|replica| replica.name == name && !replica.has_left()) {
            return None;
        }
        let replica = Arc::new(Replica::new_joining(replicas.len(), name, sampler, &self.options));
        replicas.push(Arc::clone(&replica));
        Some(replica)
    }

    /// Pauses the probes of all replicas until they load weights, because they have no devices in
    /// the meantime.
    pub fn pause_probes(&self) {
        self.probes_paused.send_replace(true);
    }

    fn is_paused(&self) -> bool {
        *self.probes_paused.borrow()
    }

    /// Waits until probes are paused if `paused` is true, otherwise until they are resumed.
    async fn wait_until_paused(&self, paused: bool) {
        // Cannot fail: the pool owns the sender.
        self.probes_paused.subscribe().wait_for(|now| *now == paused).await.ok();
    }

    /// Removes a replica permanently. Its calls in flight continue. Returns whether a replica with
    /// this name existed.
    pub fn leave(&self, name: &str) -> bool {
        let Some(replica) = self.replicas().into_iter().find(|replica| replica.name == name) else {
            return false;
        };
        replica.mark_left();
        lock(&self.choice).forget_replica(replica.index);
        info!(member = replica.name, "removed a sampler");
        true
    }

    /// Returns the replicas whose health is `worst` or better.
    pub fn replicas_up_to(&self, worst: Health) -> Vec<Arc<Replica>> {
        self.replicas().into_iter().filter(|replica| replica.health() <= worst).collect()
    }

    /// Assigns a call with the prompt `prompt` to a replica that is not quarantined. Returns `None`
    /// if there is no such replica. Prefers replicas that are not in `tried`, then serving
    /// replicas, then replicas that have the weights of version `min_version`.
    pub fn choose_replica(
        &self,
        prompt: &[u32],
        min_version: u64,
        tried: &[usize],
    ) -> Option<ReplicaGuard> {
        // One lock around the selection, so that simultaneous calls see each other.
        let mut choice = lock(&self.choice);
        let replicas = self.replicas();
        let known = replicas.iter().map(|replica| (replica, replica.status()));
        let may: Vec<_> = known
            .filter(|(_, status)| status.health != Health::Quarantined)
            .map(|(replica, status)| {
                let is_suspected = status.health == Health::Suspected;
                let rank =
                    (tried.contains(&replica.index), is_suspected, status.version < min_version);
                (rank, ReplicaCandidate { replica: replica.index, running: status.running })
            })
            .collect();
        let best = may.iter().map(|(rank, _)| *rank).min()?;
        let candidates: Vec<ReplicaCandidate> = may
            .into_iter()
            .filter(|(rank, _)| *rank == best)
            .map(|(_, candidate)| candidate)
            .collect();
        let chosen = choice.choose(prompt, &candidates);
        let replica = replicas.into_iter().find(|replica| replica.index == chosen)?;
        choice.record_tokens(replica.index, prompt);
        replica.count_call(true);
        Some(ReplicaGuard(replica))
    }

    /// Assigns a call to a replica, and waits for a replica if none serves.
    ///
    /// # Errors
    /// Returns [`PolicyError::Stopped`] with the reasons of all replicas if no replica serves
    /// within `options.replica_timeout`.
    pub async fn await_replica(
        &self,
        prompt: &[u32],
        min_version: u64,
        tried: &[usize],
    ) -> Result<ReplicaGuard, PolicyError> {
        let chosen = async {
            loop {
                let mut returned = std::pin::pin!(self.returned.notified());
                returned.as_mut().enable();
                if let Some(chosen) = self.choose_replica(prompt, min_version, tried) {
                    return chosen;
                }
                returned.await;
            }
        };
        with_timeout(self.options.replica_timeout, chosen)
            .await
            .ok_or_else(|| self.no_replica_error())
    }

    /// Builds the error of a router none of whose replicas serves.
    pub fn no_replica_error(&self) -> PolicyError {
        let reasons: Vec<String> = self
            .replicas()
            .iter()
            .map(|replica| {
                let status = replica.status();
                format!("{}: {}", status.name, status.reason.unwrap_or_else(|| "serving".into()))
            })
            .collect();
        PolicyError::Stopped(format!("every replica of the router ({})", reasons.join("; ")).into())
    }

    /// Records that a call has completed on a replica, and that the replica has now cached
    /// `tokens`.
    pub fn record_completion(&self, replica: &Replica, tokens: &[u32]) {
        lock(&self.choice).record_tokens(replica.index, tokens);
        replica.record_completion(&self.options);
    }

    /// Counts an error as a failure of a replica if the replica is its cause.
    pub fn record_error(&self, replica: &Replica, error: &PolicyError) {
        if ErrorCause::from_error(error) == ErrorCause::Replica {
            self.record_failure(replica, error);
        }
    }

    /// Counts an error as a failure of a replica, whatever its cause.
    fn record_failure(&self, replica: &Replica, error: &PolicyError) {
        if let (health, true) = replica.record_failure(error, &self.options) {
            warn!(member = replica.name, ?health, %error, "a sampler failed");
            if health == Health::Quarantined {
                lock(&self.choice).forget_replica(replica.index);
            }
        }
    }

    /// Quarantines a replica: it gets no calls until it has loaded the newest weights and passed a
    /// probe.
    pub fn quarantine(&self, replica: &Replica, reason: &PolicyError) {
        if replica.start_quarantine(reason, &self.options) {
            warn!(member = replica.name, %reason, "a sampler is quarantined");
            lock(&self.choice).forget_replica(replica.index);
        }
    }

    /// Records the version of the weights that a replica has used, from a sampled token or from a
    /// rejection.
    pub fn note_sampled_version(&self, replica: &Replica, version: u64) {
        replica.note_sampled_version(version, lock(&self.weights).loaded_version);
    }

    /// Returns whether there is a replica that can take a call and is not in `tried`.
    pub fn has_untried_replica(&self, tried: &[usize]) -> bool {
        self.replicas_up_to(Health::Suspected).iter().any(|replica| !tried.contains(&replica.index))
    }

    /// Makes all replicas load weights concurrently. Quarantined replicas load them when they
    /// recover.
    ///
    /// If all replicas are unreachable, as servers are during a restart, waits until a replica is
    /// reachable again and has loaded the weights.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] with the reasons of all replicas if no replica has
    /// loaded the weights. No replica is quarantined then, since the weights may be the cause.
    pub async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let rest_guard = ProbePauseGuard(self);
        let (targets, before) = {
            let mut known = lock(&self.weights);
            let before = known.newest.replace(weights.clone());
            let served = self.replicas_up_to(Health::Suspected);
            (if served.is_empty() { self.replicas() } else { served }, before)
        };
        let mut calls = JoinSet::new();
        for replica in targets {
            let weights = weights.clone();
            let timeout = self.options.update_timeout;
            calls.spawn(async move {
                let what = format!("load version {} of the weights", weights.version);
                let update_guard = replica.start_weight_update();
                let loaded = replica
                    .call_with_timeout(timeout, &what, replica.sampler.update_weights(&weights))
                    .await;
                if loaded.is_ok() {
                    replica.set_version(weights.version);
                }
                drop(update_guard);
                (replica, loaded)
            });
        }
        let mut loaded = false;
        let mut missed = Vec::new();
        while let Some(done) = calls.join_next().await {
            match done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
                (_, Ok(())) => loaded = true,
                (replica, Err(error)) => missed.push((replica, error)),
            }
        }
        drop(rest_guard);
        let all_unreachable = !loaded && missed.iter().all(|(_, error)| error.is_transient());
        if loaded || all_unreachable {
            for (replica, error) in &missed {
                self.quarantine(replica, error);
            }
        }
        if all_unreachable {
            loaded =
                with_timeout(self.options.update_timeout, self.wait_for_version(weights.version))
                    .await
                    .is_some();
        }
        if !loaded {
            let mut known = lock(&self.weights);
            if known.newest.as_ref() == Some(weights) {
                known.newest = before;
            }
            let reasons =
                missed.iter().map(|(replica, error)| format!("{}: {error}", replica.name));
            return Err(PolicyError::WeightsNotLoaded(reasons.collect::<Vec<_>>().join("; ")));
        }
        let mut known = lock(&self.weights);
        // Not the maximum: a run that resumes from an earlier checkpoint publishes lower versions
        // again.
        if known.newest.as_ref() == Some(weights) {
            known.loaded_version = weights.version;
        }
        Ok(())
    }

    /// Waits until a serving replica has loaded the weights of version `version`.
    async fn wait_for_version(&self, version: u64) {
        loop {
            let returned = self.returned.notified();
            let mut returned = std::pin::pin!(returned);
            returned.as_mut().enable();
            if self.replicas().iter().any(|replica| {
                let status = replica.status();
                status.health == Health::Serving && status.version == version
            }) {
                return;
            }
            returned.await;
        }
    }

    /// Monitors a replica until it leaves the router: probes it whenever a probe is due.
    pub async fn monitor(self: Arc<Self>, replica: Arc<Replica>) {
        let mut progress = 0;
        while !replica.has_left() {
            self.wait_until_paused(false).await;
            tokio::select! {
                () = tokio::time::sleep_until(replica.next_probe_time()) => {}
                () = replica.nudged.notified() => continue,
            }
            if self.is_paused() {
                continue;
            }
            // A replica that is sampling needs no probe.
            let before = std::mem::replace(&mut progress, replica.num_events());
            if replica.postpone_probe(before != progress, &self.options) {
                continue;
            }
            match self.check_replica(&replica).await {
                Ok(()) => {}
                Err(error) => self.record_failure(&replica, &error),
            }
        }
    }

    /// Checks that a replica has the newest weights, and samples a token from it.
    async fn check_replica(&self, replica: &Replica) -> Result<(), PolicyError> {
        loop {
            let newest = self.resync(replica).await?;
            self.probe_replica(replica).await?;
            if self.is_paused() {
                return Ok(());
            }
            let known = lock(&self.weights);
            // Weights published in the meantime were not sent to quarantined replicas.
            if replica.health() == Health::Quarantined && known.newest != newest {
                continue;
            }
            if replica.record_passed_probe(&self.options) {
                info!(member = replica.name, "a sampler is serving again");
                self.returned.notify_waiters();
            }
            return Ok(());
        }
    }

    /// Quarantines a replica that has lost its weights, for example because it was restarted. Sends
    /// a quarantined replica the newest weights if its own are older. Returns the newest weights.
    async fn resync(&self, replica: &Replica) -> Result<Option<WeightsRef>, PolicyError> {
        let response_timeout = self.options.response_timeout;
        let update_timeout = self.options.update_timeout;
        let version = || {
            replica.call_with_timeout(
                response_timeout,
                "report the version of its weights",
                replica.sampler.version(),
            )
        };
        // Read before the query, because the replica may load weights at this moment.
        let loaded = lock(&self.weights).loaded_version;
        let weight_updates = replica.weight_updates();
        let has = version().await?;
        if self.is_paused() {
            return Ok(None);
        }
        let stands = weight_updates.is_some() && replica.weight_updates() == weight_updates;
        if !stands && replica.health() != Health::Quarantined {
            // The weight update in progress records its own outcome.
            return Ok(lock(&self.weights).newest.clone());
        }
        replica.set_version(has);
        if has < loaded && replica.health() != Health::Quarantined {
            self.quarantine(replica, &self.behind_error(loaded, has));
        }
        let newest = lock(&self.weights).newest.clone();
        let Some(weights) = newest.as_ref().filter(|_| replica.health() == Health::Quarantined)
        else {
            return Ok(newest);
        };
        let min_version = weights.version;
        if has < min_version {
            let what = format!("load version {min_version} of the weights");
            replica
                .call_with_timeout(update_timeout, &what, replica.sampler.update_weights(weights))
                .await?;
            let has = version().await?;
            replica.set_version(has);
            if has < min_version {
                return Err(self.behind_error(min_version, has));
            }
        }
        Ok(newest)
    }

    fn behind_error(&self, min_version: u64, version: u64) -> PolicyError {
        let policy = self.options.policy.clone();
        PolicyError::Behind { policy, min_version, version }
    }

    /// Samples one token from a replica, to check that it works.
    async fn probe_replica(&self, replica: &Replica) -> Result<(), PolicyError> {
        let old = replica.num_events();
        let request = SampleRequest {
            id: "probe".into(),
            policy: self.options.policy.clone(),
            stream: PROBES,
            prompt: self.options.probe.clone(),
            params: SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() },
            ..SampleRequest::default()
        };
        let sampling = async {
            let mut completion = Completion::default();
            replica.sampler.sample(request).await?.gather(&mut completion).await?;
            Ok(completion)
        };
        let limit = self.options.probe_within;
        tokio::select! {
            biased;
            // The probe is abandoned, so that it does not wake a replica that gives up its devices.
            () = self.wait_until_paused(true) => Ok(()),
            sampled = sampling => match sampled?.logprobs[..] {
                [logprob] if logprob.is_finite() => Ok(()),
                [_] => Err(PolicyError::NotFinite { position: self.options.probe.len() }),
                _ => Err(PolicyError::Stopped(format!("{}, which sampled no \
                                                       token,", replica.name).into())),
            },
            // A replica that samples for other calls meanwhile is busy, not unreachable.
            () = replica.sleep_unpaused(limit, &self.options) => match replica.num_events() == old {
                true => Err(PolicyError::Deadline(limit, format!("{} to sample a \
                                                                  token", replica.name))),
                false => Ok(()),
            },
        }
    }
}
