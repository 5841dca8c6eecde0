//! The replicas of a router: selection for a call, attribution of errors, and recovery.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use levade_policy::awake::within;
use levade_policy::{Completion, PolicyError, SampleRequest, Sampler, SamplingParams, WeightsRef};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::choice::{Candidate, Choose};
use super::member::{Health, Member};
use super::options::RouterOptions;

/// Stream of probes, which no call uses.
const PROBES: u64 = u64::MAX - 2;

/// The replicas of a router.
pub(crate) struct Pool {
    /// All replicas since the start, by index, including those that have left.
    members: Mutex<Vec<Arc<Member>>>,
    pub options: RouterOptions,
    choice: Mutex<Box<dyn Choose>>,
    weights: Mutex<Weights>,
    /// Notified when a replica serves again.
    returned: Notify,
    /// Whether the replicas have released their devices, until they load weights again.
    rests: watch::Sender<bool>,
}

/// Weights that replicas should have.
#[derive(Default)]
struct Weights {
    /// The newest published weights.
    newest: Option<WeightsRef>,
    /// The version that all serving replicas have loaded. A replica that reports an older version
    /// has lost it.
    adopted: u64,
}

/// A replica that runs a call, until this is dropped.
pub(crate) struct Chosen(pub Arc<Member>);

impl Drop for Chosen {
    fn drop(&mut self) {
        self.0.counts(false);
    }
}

/// The party that an error of a replica is attributed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request: no replica can serve it.
    Request,
    /// Neither: another replica may serve the request.
    Nobody,
    /// The replica.
    Member,
}

impl Fault {
    /// Returns the party that `error` is attributed to.
    pub fn of(error: &PolicyError) -> Self {
        match error {
            PolicyError::Busy { .. } | PolicyError::Behind { .. } => Fault::Nobody,
            PolicyError::Deadline(..)
            | PolicyError::Stopped(_)
            | PolicyError::Storage(_)
            | PolicyError::NotAdopted(_)
            // Damaged weights are the fault of one replica. Diverged weights fail on the next
            // replica too.
            | PolicyError::NotFinite { .. } => Fault::Member,
            PolicyError::Invalid(_)
            | PolicyError::PromptTooLong { .. }
            | PolicyError::Cut(_)
            | PolicyError::NoValueHead
            | PolicyError::NoPredictions
            | PolicyError::NoTerms => Fault::Request,
        }
    }
}

/// Ends the pause of probes when dropped.
struct Rested<'a>(&'a Pool);

impl Drop for Rested<'_> {
    fn drop(&mut self) {
        self.0.rests.send_replace(false);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    pub fn new(members: Vec<(String, Arc<dyn Sampler>)>, options: RouterOptions) -> Self {
        let members = members.into_iter().enumerate();
        let members = members.map(|(i, (name, sampler))| Arc::new(Member::new(i, name, sampler, &options)));
        Pool {
            members: Mutex::new(members.collect()),
            choice: Mutex::new(options.choice.make()),
            options,
            weights: Mutex::default(),
            returned: Notify::new(),
            rests: watch::Sender::new(false),
        }
    }

    /// Returns the replicas that have not left.
    pub fn members(&self) -> Vec<Arc<Member>> {
        lock(&self.members).iter().filter(|member| !member.has_left()).cloned().collect()
    }

    /// Returns the replica with this index, even if it has left.
    pub fn member(&self, index: usize) -> Option<Arc<Member>> {
        lock(&self.members).get(index).cloned()
    }

    /// Adds a replica, which gets no calls before it has loaded the newest weights and passed a
    /// probe. Returns `None` if a replica with this name exists.
    pub fn join(&self, name: String, sampler: Arc<dyn Sampler>) -> Option<Arc<Member>> {
        let mut members = lock(&self.members);
        if members.iter().any(|member| member.name == name && !member.has_left()) {
            return None;
        }
        let member = Arc::new(Member::joining(members.len(), name, sampler, &self.options));
        members.push(Arc::clone(&member));
        Some(member)
    }

    /// Pauses probes until replicas load weights, because they have no devices meanwhile.
    pub fn rest(&self) {
        self.rests.send_replace(true);
    }

    fn is_resting(&self) -> bool {
        *self.rests.borrow()
    }

    /// Waits until probes are paused (`rests`) or resumed.
    async fn until(&self, rests: bool) {
        // Cannot fail: the pool owns the sender.
        self.rests.subscribe().wait_for(|now| *now == rests).await.ok();
    }

    /// Removes a replica for good; its calls in flight continue. Returns whether a replica with
    /// this name existed.
    pub fn leave(&self, name: &str) -> bool {
        let Some(member) = self.members().into_iter().find(|member| member.name == name) else {
            return false;
        };
        member.leaves();
        lock(&self.choice).forgets(member.index);
        info!(member = member.name, "a sampler leaves");
        true
    }

    /// Returns the replicas whose health is `worst` or better.
    pub fn up_to(&self, worst: Health) -> Vec<Arc<Member>> {
        self.members().into_iter().filter(|member| member.health() <= worst).collect()
    }

    /// Assigns a call with this prompt to a replica that is not quarantined, or returns `None` if
    /// there is none. Prefers replicas that were not `tried`, then those that serve, then those
    /// that have version `least`.
    pub fn choose(&self, prompt: &[u32], least: u64, tried: &[usize]) -> Option<Chosen> {
        // One lock around the selection, so that simultaneous calls see each other.
        let mut choice = lock(&self.choice);
        let members = self.members();
        let known = members.iter().map(|member| (member, member.status()));
        let may: Vec<_> = known
            .filter(|(_, status)| status.health != Health::Quarantined)
            .map(|(member, status)| {
                let is_suspected = status.health == Health::Suspected;
                let rank = (tried.contains(&member.index), is_suspected, status.version < least);
                (rank, Candidate { member: member.index, running: status.running })
            })
            .collect();
        let best = may.iter().map(|(rank, _)| *rank).min()?;
        let candidates: Vec<Candidate> =
            may.into_iter().filter(|(rank, _)| *rank == best).map(|(_, candidate)| candidate).collect();
        let chosen = choice.choose(prompt, &candidates);
        let member = members.into_iter().find(|member| member.index == chosen)?;
        choice.computes(member.index, prompt);
        member.counts(true);
        Some(Chosen(member))
    }

    /// Assigns a call to a replica, and waits for one if necessary.
    ///
    /// # Errors
    /// Returns [`PolicyError::Stopped`] with the reasons of all replicas if none serves within
    /// `options.patience`.
    pub async fn await_member(
        &self,
        prompt: &[u32],
        least: u64,
        tried: &[usize],
    ) -> Result<Chosen, PolicyError> {
        let chosen = async {
            loop {
                let mut returned = std::pin::pin!(self.returned.notified());
                returned.as_mut().enable();
                if let Some(chosen) = self.choose(prompt, least, tried) {
                    return chosen;
                }
                returned.await;
            }
        };
        within(self.options.patience, chosen).await.ok_or_else(|| self.nobody())
    }

    /// Builds the error of a router none of whose replicas serves.
    pub fn nobody(&self) -> PolicyError {
        let reason = |member: &Arc<Member>| {
            let status = member.status();
            format!("{}: {}", status.name, status.reason.unwrap_or_else(|| "it serves".into()))
        };
        let reasons: Vec<String> = self.members().iter().map(reason).collect();
        PolicyError::Stopped(format!("every member of the router ({})", reasons.join("; ")).into())
    }

    /// Records a completed call and the tokens that the replica has now cached.
    pub fn finishes(&self, member: &Member, path: &[u32]) {
        lock(&self.choice).computes(member.index, path);
        member.finishes(&self.options);
    }

    /// Records an error of a replica if the replica is at fault.
    pub fn blames(&self, member: &Member, error: &PolicyError) {
        if Fault::of(error) == Fault::Member {
            self.fails(member, error);
        }
    }

    /// Records a failure, whatever its cause.
    fn fails(&self, member: &Member, error: &PolicyError) {
        if let (health, true) = member.fails(error, &self.options) {
            warn!(member = member.name, ?health, %error, "a sampler failed");
            if health == Health::Quarantined {
                lock(&self.choice).forgets(member.index);
            }
        }
    }

    /// Quarantines a replica until it has recovered.
    pub fn quarantines(&self, member: &Member, reason: &PolicyError) {
        if member.quarantines(reason, &self.options) {
            warn!(member = member.name, %reason, "a sampler is quarantined");
            lock(&self.choice).forgets(member.index);
        }
    }

    /// Records the version of a sampled token, or the version that a rejection reports.
    pub fn drew_with(&self, member: &Member, version: u64) {
        member.drew_with(version, lock(&self.weights).adopted);
    }

    /// Returns whether a replica exists that can take a call and was not tried.
    pub fn has_other(&self, tried: &[usize]) -> bool {
        self.up_to(Health::Suspected).iter().any(|member| !tried.contains(&member.index))
    }

    /// Makes all replicas load weights concurrently, except quarantined ones, which load them when
    /// they recover.
    ///
    /// If all replicas are unreachable, as servers during a restart, waits for one to come back and
    /// load them.
    ///
    /// # Errors
    /// Returns [`PolicyError::NotAdopted`] with the reasons of all replicas if none has loaded the
    /// weights. No replica is quarantined then, since the weights may be at fault.
    pub async fn adopt(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let rested = Rested(self);
        let (asked, before) = {
            let mut known = lock(&self.weights);
            let before = known.newest.replace(weights.clone());
            let served = self.up_to(Health::Suspected);
            (if served.is_empty() { self.members() } else { served }, before)
        };
        let mut calls = JoinSet::new();
        for member in asked {
            let (weights, longest) = (weights.clone(), self.options.adopt);
            calls.spawn(async move {
                let what = format!("adopt version {}", weights.version);
                let adopting = member.adopts();
                let adopted = member.ask(longest, &what, member.sampler.adopt(&weights)).await;
                if adopted.is_ok() {
                    member.has_version(weights.version);
                }
                drop(adopting);
                (member, adopted)
            });
        }
        let (mut adopted, mut missed) = (false, Vec::new());
        while let Some(done) = calls.join_next().await {
            match done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
                (_, Ok(())) => adopted = true,
                (member, Err(error)) => missed.push((member, error)),
            }
        }
        drop(rested);
        let all_gone = !adopted && missed.iter().all(|(_, error)| error.may_pass());
        if adopted || all_gone {
            for (member, error) in &missed {
                self.quarantines(member, error);
            }
        }
        if all_gone {
            adopted = within(self.options.adopt, self.return_with(weights.version)).await.is_some();
        }
        if !adopted {
            let mut known = lock(&self.weights);
            if known.newest.as_ref() == Some(weights) {
                known.newest = before;
            }
            let reasons = missed.iter().map(|(member, error)| format!("{}: {error}", member.name));
            return Err(PolicyError::NotAdopted(reasons.collect::<Vec<_>>().join("; ")));
        }
        let mut known = lock(&self.weights);
        // Not the maximum: a run that resumes from an earlier checkpoint publishes lower versions
        // again.
        if known.newest.as_ref() == Some(weights) {
            known.adopted = weights.version;
        }
        Ok(())
    }

    /// Waits until a serving replica has this version of the weights.
    async fn return_with(&self, version: u64) {
        loop {
            let returned = self.returned.notified();
            let mut returned = std::pin::pin!(returned);
            returned.as_mut().enable();
            let serves = |member: &Arc<Member>| {
                let status = member.status();
                status.health == Health::Serving && status.version == version
            };
            if self.members().iter().any(serves) {
                return;
            }
            returned.await;
        }
    }

    /// Monitors a replica until it leaves: probes it when a probe is due.
    pub async fn watch(self: Arc<Self>, member: Arc<Member>) {
        let mut progress = 0;
        while !member.has_left() {
            self.until(false).await;
            tokio::select! {
                () = tokio::time::sleep_until(member.due()) => {}
                () = member.nudged.notified() => continue,
            }
            if self.is_resting() {
                continue;
            }
            // A replica that is sampling needs no probe.
            let before = std::mem::replace(&mut progress, member.progress());
            if member.may_wait(before != progress, &self.options) {
                continue;
            }
            match self.checks(&member).await {
                Ok(()) => {}
                Err(error) => self.fails(&member, &error),
            }
        }
    }

    /// Checks that a replica has the right weights, and samples a token from it.
    async fn checks(&self, member: &Member) -> Result<(), PolicyError> {
        loop {
            let newest = self.resync(member).await?;
            self.probe(member).await?;
            if self.is_resting() {
                return Ok(());
            }
            let known = lock(&self.weights);
            // Weights published in the meantime were not sent to quarantined replicas.
            if member.health() == Health::Quarantined && known.newest != newest {
                continue;
            }
            if member.passes(&self.options) {
                info!(member = member.name, "a sampler serves again");
                self.returned.notify_waiters();
            }
            return Ok(());
        }
    }

    /// Quarantines a replica that has lost its weights, as after a restart, and sends a quarantined
    /// replica the newest weights if its own are older. Returns the newest weights.
    async fn resync(&self, member: &Member) -> Result<Option<WeightsRef>, PolicyError> {
        let (answer, adopt) = (self.options.answer, self.options.adopt);
        let version = || member.ask(answer, "say which weights it has", member.sampler.version());
        let behind = |least, version| {
            let policy = self.options.policy.clone();
            PolicyError::Behind { policy, least, version }
        };
        // Read before the query, because the replica may load weights at this moment.
        let (adopted, adoptions) = (lock(&self.weights).adopted, member.adoptions());
        let has = version().await?;
        if self.is_resting() {
            return Ok(None);
        }
        let stands = adoptions.is_some() && member.adoptions() == adoptions;
        if !stands && member.health() != Health::Quarantined {
            // The weight update in progress records its own outcome.
            return Ok(lock(&self.weights).newest.clone());
        }
        member.has_version(has);
        if has < adopted && member.health() != Health::Quarantined {
            self.quarantines(member, &behind(adopted, has));
        }
        let newest = lock(&self.weights).newest.clone();
        let Some(weights) = newest.as_ref().filter(|_| member.health() == Health::Quarantined) else {
            return Ok(newest);
        };
        let least = weights.version;
        if has < least {
            let what = format!("adopt version {least}");
            member.ask(adopt, &what, member.sampler.adopt(weights)).await?;
            let has = version().await?;
            member.has_version(has);
            if has < least {
                return Err(behind(least, has));
            }
        }
        Ok(newest)
    }

    /// Samples one token from a replica.
    async fn probe(&self, member: &Member) -> Result<(), PolicyError> {
        let before = member.progress();
        let request = SampleRequest {
            id: "probe".into(),
            policy: self.options.policy.clone(),
            stream: PROBES,
            prompt: self.options.probe.clone(),
            params: SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() },
            ..SampleRequest::default()
        };
        let draws = async {
            let mut reply = Completion::default();
            member.sampler.sample(request).await?.gather(&mut reply).await?;
            Ok(reply)
        };
        let limit = self.options.probe_within;
        tokio::select! {
            biased;
            // The probe is abandoned, so that it does not wake a replica that gives up its devices.
            () = self.until(true) => Ok(()),
            reply = draws => match reply?.logprobs[..] {
                [logprob] if logprob.is_finite() => Ok(()),
                [_] => Err(PolicyError::NotFinite { position: self.options.probe.len() }),
                _ => Err(PolicyError::Stopped(format!("{}, which sampled no token,", member.name).into())),
            },
            // A replica that samples for other calls meanwhile is busy, not unreachable.
            () = member.over(limit, &self.options) => match member.progress() == before {
                true => Err(PolicyError::Deadline(limit, format!("{} to sample a token", member.name))),
                false => Ok(()),
            },
        }
    }
}
