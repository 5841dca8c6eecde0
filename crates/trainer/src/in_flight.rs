//! Attempts in progress: generating, being scored, or waiting for an unavailable scorer.
//!
//! # Guarantees
//! - **Scoring takes no permit from sampling.**
//! - **An attempt that may wait for its score** is recorded as unscored as soon as it ends, and
//!   gets its score later. A resumed run scores the recorded attempt instead of repeating it.
//! - **Cancel safety.** A caller that stops waiting for the next attempt loses nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{IntervalTimer, crash_point, process_time};
use levade_store::{Attempt, Status, Store, StoreError};
use levade_tree::{Purpose, TimedPart};
use tokio::task::{AbortHandle, JoinError, JoinSet};

use crate::TrainerError;
use crate::scoring::{FailureAction, Scorers, ScoringFailure};

/// Attempts in progress: being generated, being scored, or waiting for an unavailable scorer. Each
/// has a key of type `K`.
pub(crate) struct AttemptsInFlight<K> {
    scorers: Scorers,
    store: Arc<dyn Store>,
    generating: JoinSet<(K, Result<GeneratedAttempt, StoreError>)>,
    scoring: JoinSet<Result<ScoredJob<K>, StoreError>>,
    /// Attempts that wait for unavailable scorers.
    waiting: JoinSet<Result<ScoredJob<K>, StoreError>>,
    /// Handles that cancel the generation or the scoring of an attempt, by the attempt's key.
    handles: HashMap<K, AbortHandle>,
    /// Failure of the scorer that was most recently found unavailable.
    last_failure: Option<ScoringFailure>,
    /// Events that [`AttemptsInFlight::next`] has not returned yet.
    ended: Vec<AttemptEvent<K>>,
}

/// An attempt that was generated and is not scored yet.
pub(crate) struct GeneratedAttempt {
    /// The attempt: [`Status::Failed`] if it failed, otherwise [`Status::Unscored`].
    pub attempt: Attempt,
    /// Whether the attempt may be retried if it cannot be scored.
    pub may_retry: bool,
}

/// A job for the scorers: a single attempt, or several attempts of a group that are compared with
/// each other.
struct ScoringJob<K> {
    attempts: Vec<(K, GeneratedAttempt)>,
    /// Attempts of the same group that already have scores. `None` if the job is a single attempt
    /// that is scored independently of its group.
    compared_with: Option<Vec<Attempt>>,
}

/// A scoring job with the result of one call of the scorers.
struct ScoredJob<K> {
    job: ScoringJob<K>,
    result: Result<(), ScoringFailure>,
}

/// A change in the state of an attempt in progress, which [`AttemptsInFlight::next`] returns.
pub(crate) enum AttemptEvent<K> {
    /// The attempt has ended: it is completed, or it has failed.
    Attempt(K, Attempt),
    /// The attempt has its own score, and must still be compared with the other attempts of its
    /// group.
    NeedsComparison(K, Attempt),
    /// The attempt failed and is recorded as superseded. The caller must start another try.
    Retry(K),
    /// A scorer is unavailable, so an attempt waits for its score.
    ScorerUnavailable(ScoringFailure),
}

/// Pause before the first retry with an unavailable scorer, and the maximum pause between retries.
const RETRY_INTERVALS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// Returns the output of a joined task, or `None` if the task was cancelled. If the task panicked,
/// resumes the panic, whose location has already been reported.
fn unwrap_joined<T>(joined: Result<T, JoinError>) -> Option<T> {
    match joined {
        Ok(done) => Some(done),
        Err(error) if error.is_cancelled() => None,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

impl<K: Copy + Eq + Hash + Send + 'static> AttemptsInFlight<K> {
    /// Creates an empty set of attempts. `scorers` score the attempts, and `store` records them.
    pub fn new(scorers: Scorers, store: Arc<dyn Store>) -> Self {
        AttemptsInFlight {
            scorers,
            store,
            generating: JoinSet::new(),
            scoring: JoinSet::new(),
            waiting: JoinSet::new(),
            handles: HashMap::new(),
            last_failure: None,
            ended: Vec::new(),
        }
    }

    /// Returns the number of attempts that are being generated.
    pub fn num_generating(&self) -> usize {
        self.generating.len()
    }

    /// Returns whether no attempt is in progress.
    pub fn is_empty(&self) -> bool {
        self.generating.is_empty()
            && self.scoring.is_empty()
            && self.waiting.is_empty()
            && self.ended.is_empty()
    }

    /// Returns whether an attempt with this key is in progress.
    pub fn contains(&self, key: &K) -> bool {
        self.handles.contains_key(key)
    }

    /// Starts to generate an attempt by spawning the future `making`.
    pub fn start_generating(
        &mut self,
        key: K,
        making: impl Future<Output = Result<GeneratedAttempt, StoreError>> + Send + 'static,
    ) {
        let scorers = self.scorers.clone();
        let store = self.store.clone();
        let handle = self.generating.spawn(async move {
            let made = async {
                let made = making.await?;
                if made.attempt.status == Status::Unscored && scorers.can_defer(&made.attempt) {
                    store.end_attempt(&made.attempt.id, &made.attempt.end()).await?;
                    crash_point("attempt_unscored");
                }
                Ok(made)
            };
            (key, made.await)
        });
        self.handles.insert(key, handle);
    }

    /// Starts to score a generated attempt independently of its group.
    pub fn start_scoring(&mut self, key: K, made: GeneratedAttempt) {
        let job = ScoringJob { attempts: vec![(key, made)], compared_with: None };
        let handle = self.scoring.spawn(score_job(self.scorers.clone(), self.store.clone(), job));
        self.handles.insert(key, handle);
    }

    /// Starts to score the attempts of a group against each other. Attempts in `compared_with`
    /// already have scores, and only serve for comparison.
    pub fn score_together(&mut self, attempts: Vec<(K, Attempt)>, compared_with: Vec<Attempt>) {
        // If they cannot be compared, a retry of each would not help.
        let job = ScoringJob {
            attempts: attempts
                .into_iter()
                .map(|(key, attempt)| (key, GeneratedAttempt { attempt, may_retry: false }))
                .collect(),
            compared_with: Some(compared_with),
        };
        self.scoring.spawn(score_job(self.scorers.clone(), self.store.clone(), job));
    }

    /// Cancels all attempts for whose keys `which` returns true.
    pub fn cancel(&mut self, which: impl Fn(&K) -> bool) {
        self.handles.retain(|key, handle| {
            let is_cancelled = which(key);
            if is_cancelled {
                handle.abort();
            }
            !is_cancelled
        });
    }

    /// Waits for the next event of an attempt. Returns `None` if no attempt is in progress. `limit`
    /// is the maximum wait if all attempts in progress wait for unavailable scorers. `None`
    /// disables the limit.
    ///
    /// # Errors
    /// Returns an error if the store cannot be written, or if the scorers stay unavailable for
    /// longer than `limit`.
    pub async fn next(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<Option<AttemptEvent<K>>, TrainerError> {
        loop {
            if let Some(ended) = self.ended.pop() {
                return Ok(Some(ended));
            }
            let only_waiting =
                self.generating.is_empty() && self.scoring.is_empty() && !self.waiting.is_empty();
            let scored = if let Some(limit) = limit.filter(|_| only_waiting) {
                match process_time::with_timeout(limit, self.waiting.join_next()).await {
                    Some(scored) => scored,
                    None => return Err(self.outage_error(limit)),
                }
            } else {
                tokio::select! {
                    // A fixed order of the branches makes simulations repeatable.
                    biased;
                    Some(made) = self.generating.join_next() => {
                        if let Some((key, made)) = unwrap_joined(made) {
                            self.handles.remove(&key);
                            self.handle_generated(key, made?);
                        }
                        continue;
                    }
                    Some(scored) = self.scoring.join_next() => Some(scored),
                    Some(scored) = self.waiting.join_next() => Some(scored),
                    else => return Ok(None),
                }
            };
            if let Some(scored) = scored.and_then(unwrap_joined) {
                self.handle_scored(scored?);
            }
        }
    }

    fn handle_generated(&mut self, key: K, made: GeneratedAttempt) {
        match made.attempt.status {
            Status::Unscored => self.start_scoring(key, made),
            _ => self.ended.push(AttemptEvent::Attempt(key, made.attempt)),
        }
    }

    fn handle_scored(&mut self, ScoredJob { job, result }: ScoredJob<K>) {
        for (key, _) in &job.attempts {
            self.handles.remove(key);
        }
        match result {
            Err(failure) if failure.action == FailureAction::Deferred => {
                let keys: Vec<K> = job.attempts.iter().map(|(key, _)| *key).collect();
                let retry = retry_scoring(self.scorers.clone(), self.store.clone(), job);
                let handle = self.waiting.spawn(retry);
                // The attempts of a group are cancelled together or not at all.
                if let [key] = keys[..] {
                    self.handles.insert(key, handle);
                }
                self.ended.push(AttemptEvent::ScorerUnavailable(failure.clone()));
                self.last_failure = Some(failure);
            }
            Err(failure) => {
                for (key, GeneratedAttempt { attempt, .. }) in job.attempts {
                    self.ended.push(match attempt.status {
                        Status::Superseded => AttemptEvent::Retry(key),
                        _ => AttemptEvent::Attempt(key, failure.apply_to(&self.scorers, attempt)),
                    });
                }
            }
            Ok(()) => {
                for (key, GeneratedAttempt { attempt, .. }) in job.attempts {
                    // A greedy attempt belongs to no group.
                    let is_baseline = attempt.slot.purpose == Purpose::Baseline;
                    let compares = job.compared_with.is_none()
                        && !is_baseline
                        && self.scorers.compares_group(&attempt);
                    self.ended.push(if compares {
                        AttemptEvent::NeedsComparison(key, attempt)
                    } else {
                        AttemptEvent::Attempt(key, self.scorers.compute_score(attempt))
                    });
                }
            }
        }
    }

    fn outage_error(&self, limit: Duration) -> TrainerError {
        let (scorer, why) = match &self.last_failure {
            Some(ScoringFailure { scorer, why, .. }) => (scorer.clone(), why.clone()),
            None => Default::default(),
        };
        TrainerError::Outage {
            scorer,
            seconds: limit.as_secs_f64(),
            waiting: self.waiting.len(),
            why,
        }
    }
}

/// Returns the attempts of a group that already have their final scores. They exist without the
/// other attempts of the group if the run was killed while it recorded the group's scores one by
/// one. The other attempts must still be compared with them.
pub(crate) fn completed_attempts<'a>(attempts: impl Iterator<Item = &'a Attempt>) -> Vec<Attempt> {
    attempts.filter(|attempt| attempt.status == Status::Completed).cloned().collect()
}

/// Calls the scorers once for the attempts of a job. If an attempt must be retried, records it as
/// superseded.
async fn score_job<K>(
    scorers: Scorers,
    store: Arc<dyn Store>,
    mut job: ScoringJob<K>,
) -> Result<ScoredJob<K>, StoreError> {
    crash_point("scoring");
    let timer = IntervalTimer::start();
    let mut attempts: Vec<&mut Attempt> =
        job.attempts.iter_mut().map(|(_, made)| &mut made.attempt).collect();
    let result = match (&job.compared_with, &mut attempts[..]) {
        (Some(compared_with), group) => scorers.score_together(group, compared_with).await,
        (None, [attempt]) => scorers.score(attempt).await,
        (None, _) => Ok(()),
    };
    for attempt in attempts {
        attempt.outcome.timings.add(TimedPart::Scoring, timer.interval());
    }
    if let Err(failure) = &result
        && failure.action == (FailureAction::Broken { retry: true })
    {
        for (_, GeneratedAttempt { attempt, may_retry }) in &mut job.attempts {
            if *may_retry {
                let broken = failure.apply_to(&scorers, attempt.clone());
                *attempt = Attempt { reward: None, status: Status::Superseded, ..broken };
                store.end_attempt(&attempt.id, &attempt.end()).await?;
            }
        }
    }
    Ok(ScoredJob { job, result })
}

/// Calls the scorers for a job again, with growing pauses, until no scorer that the job needs is
/// unavailable.
async fn retry_scoring<K>(
    scorers: Scorers,
    store: Arc<dyn Store>,
    mut job: ScoringJob<K>,
) -> Result<ScoredJob<K>, StoreError> {
    // Even if the outage timeout is short, the scorer is called before it expires.
    let [mut pause, max_pause] =
        RETRY_INTERVALS.map(|pause| pause.min(scorers.outage_timeout() / 4));
    loop {
        process_time::sleep(pause).await;
        let scored = score_job(scorers.clone(), store.clone(), job).await?;
        match &scored.result {
            Err(failure) if failure.action == FailureAction::Deferred => job = scored.job,
            _ => return Ok(scored),
        }
        pause = (2 * pause).min(max_pause);
    }
}
