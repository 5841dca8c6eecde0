//! A member of a router: a sampler, and what is known of its health.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_policy::awake::{sleep, within};
use levade_policy::{PolicyError, Sampler};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::options::RouterOptions;

/// Whether a member may be given calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Nothing is wrong with it.
    Serving,
    /// It has failed: calls go to others while there are any.
    Suspected,
    /// It gets no calls until it has the newest weights and has answered a probe.
    Quarantined,
}

/// State of a member, as it is reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Name of the member.
    pub name: String,
    /// Whether it may be given calls.
    pub health: Health,
    /// Reason why it is not serving.
    pub reason: Option<String>,
    /// The newest version of the weights that it is known to have; 0 where it is unknown.
    pub version: u64,
    /// Calls of the router that run there.
    pub running: usize,
    /// Calls that have ended there as they should.
    pub finished: u64,
    /// Failures: of calls, of probes and of adoptions.
    pub failed: u64,
}

/// A sampler behind a router.
pub(crate) struct Member {
    pub index: usize,
    pub name: String,
    pub sampler: Arc<dyn Sampler>,
    /// Told when a probe may be due earlier than it was.
    pub nudged: Notify,
    state: Mutex<State>,
    /// Events that came from it, of any call.
    progress: AtomicU64,
    /// Whether it gets no more calls, for ever.
    has_left: AtomicBool,
    /// Adoptions that have begun,
    begun: AtomicU64,
    /// and those that have ended, whatever came of them.
    ended: AtomicU64,
}

/// An adoption under way, until this is dropped.
pub struct Adopting<'a>(&'a Member);

impl Drop for Adopting<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

struct State {
    status: MemberStatus,
    /// Failures since the last success.
    in_a_row: u32,
    /// When the next probe is due,
    due: Instant,
    /// and how long one in quarantine waits after the next that fails.
    wait: Duration,
    /// Whether it is to be probed although it draws.
    is_doubted: bool,
}

impl Member {
    pub fn new(index: usize, name: String, sampler: Arc<dyn Sampler>, options: &RouterOptions) -> Self {
        let status = MemberStatus {
            name: name.clone(),
            health: Health::Serving,
            reason: None,
            version: 0,
            running: 0,
            finished: 0,
            failed: 0,
        };
        let (due, wait) = (Instant::now() + options.probe_every, options.first_wait);
        let state = State { status, in_a_row: 0, due, wait, is_doubted: false };
        Member {
            index,
            name,
            sampler,
            nudged: Notify::new(),
            state: Mutex::new(state),
            progress: AtomicU64::new(0),
            has_left: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    /// One that joins others: it is in quarantine until a probe, which is due now.
    pub fn joining(index: usize, name: String, sampler: Arc<dyn Sampler>, options: &RouterOptions) -> Self {
        let member = Self::new(index, name, sampler, options);
        {
            let mut state = member.state();
            state.status.health = Health::Quarantined;
            state.status.reason = Some("it has just joined".into());
            state.due = Instant::now();
        }
        member
    }

    /// Whether it gets no more calls, for ever.
    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Relaxed)
    }

    /// Takes note that it leaves.
    pub fn leaves(&self) {
        self.has_left.store(true, Ordering::Relaxed);
        self.nudged.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn status(&self) -> MemberStatus {
        self.state().status.clone()
    }

    pub fn health(&self) -> Health {
        self.state().status.health
    }

    /// When the next probe is due.
    pub fn due(&self) -> Instant {
        self.state().due
    }

    /// Takes note of an event that came from it.
    pub fn progresses(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Events that came from it so far.
    pub fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Takes note of an adoption that begins.
    pub fn adopts(&self) -> Adopting<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Adopting(self)
    }

    /// How many adoptions there have been, if none is under way. A version that it names while this changes
    /// says nothing: in the middle of an adoption it has none.
    pub fn adoptions(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::SeqCst);
        (self.begun.load(Ordering::SeqCst) == ended).then_some(ended)
    }

    /// Takes note of the version that it says it has.
    pub fn has_version(&self, version: u64) {
        self.state().status.version = version;
    }

    /// Takes note of the version of a token, which may have been drawn a while ago. Where all were to have
    /// version `least` by now, the member is to be asked.
    pub fn drew_with(&self, version: u64, least: u64) {
        let mut state = self.state();
        state.status.version = state.status.version.max(version);
        if version < least && !state.is_doubted && state.status.health != Health::Quarantined {
            (state.is_doubted, state.due) = (true, Instant::now());
            drop(state);
            self.nudged.notify_one();
        }
    }

    /// Whether a probe may wait, since it serves and draws. Puts it off then.
    pub fn may_wait(&self, draws: bool, options: &RouterOptions) -> bool {
        let mut state = self.state();
        let doubted = std::mem::take(&mut state.is_doubted);
        let may = state.status.health == Health::Serving && draws && !doubted;
        if may {
            state.due = Instant::now() + options.probe_every;
        }
        may
    }

    /// Takes note of a call that begins, or ends.
    pub fn counts(&self, begins: bool) {
        let running = &mut self.state().status.running;
        *running = if begins { *running + 1 } else { *running - 1 };
    }

    /// Takes note of a call that ended as it should: suspicion is over.
    pub fn finishes(&self, options: &RouterOptions) {
        let mut state = self.state();
        state.status.finished += 1;
        if state.status.health != Health::Quarantined {
            state.serve(options);
            (state.in_a_row, state.wait) = (0, options.first_wait);
        }
    }

    /// Takes note of a probe that was answered. Returns whether it serves again. Failures are forgotten only
    /// when a call ends well: one that answers probes alone is back in quarantine with the next call, for
    /// longer.
    pub fn passes(&self, options: &RouterOptions) -> bool {
        let mut state = self.state();
        let again = state.status.health != Health::Serving;
        state.serve(options);
        state.in_a_row = state.in_a_row.min(options.failures - 1);
        again
    }

    /// Takes note of a failure. Returns its health, and whether that has changed.
    pub fn fails(&self, error: &PolicyError, options: &RouterOptions) -> (Health, bool) {
        let mut state = self.state();
        state.in_a_row += 1;
        state.status.failed += 1;
        let before = state.status.health;
        match before {
            _ if state.in_a_row >= options.failures => state.quarantine(error, options),
            Health::Quarantined => state.quarantine(error, options),
            Health::Serving | Health::Suspected => {
                state.status.health = Health::Suspected;
                state.status.reason = Some(error.to_string());
                state.due = Instant::now();
            }
        }
        let health = state.status.health;
        drop(state);
        self.nudged.notify_one();
        (health, health != before)
    }

    /// Gives it no more calls. Returns whether it was given some until now.
    pub fn quarantines(&self, reason: &PolicyError, options: &RouterOptions) -> bool {
        let mut state = self.state();
        let before = state.status.health;
        state.status.failed += 1;
        state.quarantine(reason, options);
        drop(state);
        self.nudged.notify_one();
        before != Health::Quarantined
    }

    /// Asks it something, for as long as an answer may take.
    ///
    /// # Errors
    /// Its own, or that it took too long.
    pub async fn ask<T>(
        &self,
        longest: Duration,
        what: &str,
        question: impl Future<Output = Result<T, PolicyError>>,
    ) -> Result<T, PolicyError> {
        let answer = within(longest, question).await;
        answer.unwrap_or_else(|| Err(PolicyError::Deadline(longest, format!("{} to {what}", self.name))))
    }

    /// Ends when `limit` has passed, without time in which the member stood still.
    pub async fn over(&self, limit: Duration, options: &RouterOptions) {
        let paused = || async {
            let paused = within(options.answer, self.sampler.paused()).await;
            paused.and_then(Result::ok).unwrap_or_default()
        };
        loop {
            // Asked late, and not at every wait: it may be far away. Whether it stands still now, or did
            // until a moment ago, is seen in the rest of the time.
            sleep(limit.mul_f64(0.75)).await;
            let before = paused().await;
            sleep(limit.mul_f64(0.25)).await;
            if paused().await <= before {
                return;
            }
        }
    }

    /// Ends when the member has drawn nothing for anybody for `options.silence`, although it may draw for a
    /// call that asks for version `least`.
    pub async fn falls_silent(&self, least: u64, options: &RouterOptions) {
        loop {
            let before = self.progress();
            self.over(options.silence, options).await;
            let may_draw = || async {
                let version = within(options.answer, self.sampler.version()).await;
                // One that does not say is as silent as can be.
                version.and_then(Result::ok).is_none_or(|version| version >= least)
            };
            if self.progress() == before && may_draw().await {
                return;
            }
        }
    }
}

impl State {
    fn serve(&mut self, options: &RouterOptions) {
        self.status.health = Health::Serving;
        self.status.reason = None;
        self.due = Instant::now() + options.probe_every;
    }

    fn quarantine(&mut self, reason: &PolicyError, options: &RouterOptions) {
        // Calls that ran when it was quarantined fail after each other, and say nothing new.
        if self.status.health == Health::Quarantined && Instant::now() < self.due {
            return;
        }
        self.status.health = Health::Quarantined;
        self.status.reason = Some(reason.to_string());
        self.due = Instant::now() + self.wait;
        self.wait = (self.wait * 2).min(options.longest_wait);
    }
}
