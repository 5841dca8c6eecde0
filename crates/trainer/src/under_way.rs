//! Attempts in progress: generating, being scored, or waiting for an unavailable scorer.
//!
//! # Guarantees
//! - **Scoring takes no permit from sampling.**
//! - **An attempt that may wait for its score** is recorded as unscored as soon as it ends. That is the only
//!   case in which a record is completed later; its tokens stay. When a run resumes, such an attempt is
//!   scored, not repeated.
//! - **Cancel safety.** A caller that stops waiting for the next attempt loses nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{crash_point, process_time};
use levade_store::{Attempt, Status, Store, StoreError};
use levade_tree::Purpose;
use tokio::task::{AbortHandle, JoinError, JoinSet};

use crate::TrainerError;
use crate::scoring::{Fate, Scorers, ScoringFailure};

/// Attempts in progress, each identified by a key.
pub(crate) struct UnderWay<K> {
    scorers: Scorers,
    store: Arc<dyn Store>,
    making: JoinSet<(K, Result<Made, StoreError>)>,
    scoring: JoinSet<Result<Scored<K>, StoreError>>,
    /// Attempts that wait for unavailable scorers.
    waiting: JoinSet<Result<Scored<K>, StoreError>>,
    /// Handles that cancel the task of a key.
    handles: HashMap<K, AbortHandle>,
    /// The scorer that was most recently found unavailable.
    away: Option<ScoringFailure>,
    /// Events that no call of `next` has returned yet.
    ended: Vec<Ended<K>>,
}

/// An attempt that was generated and not scored yet.
pub(crate) struct Made {
    /// The attempt: [`Status::Failed`] if it failed, otherwise [`Status::Unscored`].
    pub attempt: Attempt,
    /// Whether the attempt may be retried if it cannot be scored.
    pub may_retry: bool,
}

/// Attempts to score: a single attempt, or several attempts of a group together.
struct Job<K> {
    attempts: Vec<(K, Made)>,
    /// Attempts of the same group that already have scores. `None` if the attempt is scored
    /// independently.
    beside: Option<Vec<Attempt>>,
}

/// A scoring job with its result.
struct Scored<K> {
    job: Job<K>,
    result: Result<(), ScoringFailure>,
}

/// An event of an attempt.
pub(crate) enum Ended<K> {
    /// An attempt ended, either completed or failed.
    Attempt(K, Attempt),
    /// An attempt has its own score, and waits to be compared with its group.
    Compares(K, Attempt),
    /// An attempt failed, is recorded as superseded, and must be retried.
    Again(K),
    /// An attempt cannot be scored now, because a scorer is unavailable.
    Waits(ScoringFailure),
}

/// Initial and maximum pause before the next request to an unavailable scorer.
const PAUSES: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// Returns the output of a task, or `None` if the task was cancelled. Resumes the panic of a task
/// that panicked, whose location is already reported.
fn joined<T>(joined: Result<T, JoinError>) -> Option<T> {
    match joined {
        Ok(done) => Some(done),
        Err(error) if error.is_cancelled() => None,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

impl<K: Copy + Eq + Hash + Send + 'static> UnderWay<K> {
    /// Creates an empty collection.
    pub fn new(scorers: Scorers, store: Arc<dyn Store>) -> Self {
        UnderWay {
            scorers,
            store,
            making: JoinSet::new(),
            scoring: JoinSet::new(),
            waiting: JoinSet::new(),
            handles: HashMap::new(),
            away: None,
            ended: Vec::new(),
        }
    }

    /// Returns the number of attempts that are being generated.
    pub fn making(&self) -> usize {
        self.making.len()
    }

    /// Returns whether no attempt is in progress.
    pub fn is_empty(&self) -> bool {
        self.making.is_empty() && self.scoring.is_empty() && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// Returns whether an attempt with this key is in progress.
    pub fn has(&self, key: &K) -> bool {
        self.handles.contains_key(key)
    }

    /// Starts an attempt.
    pub fn make(&mut self, key: K, making: impl Future<Output = Result<Made, StoreError>> + Send + 'static) {
        let (scorers, store) = (self.scorers.clone(), self.store.clone());
        let handle = self.making.spawn(async move {
            let made = async {
                let made = making.await?;
                if made.attempt.status == Status::Unscored && scorers.may_wait(&made.attempt.task) {
                    store.end(&made.attempt.id, &made.attempt.end()).await?;
                    crash_point("attempt_unscored");
                }
                Ok(made)
            };
            (key, made.await)
        });
        self.handles.insert(key, handle);
    }

    /// Scores an attempt that was generated.
    pub fn score(&mut self, key: K, made: Made) {
        let job = Job { attempts: vec![(key, made)], beside: None };
        let handle = self.scoring.spawn(score(self.scorers.clone(), self.store.clone(), job));
        self.handles.insert(key, handle);
    }

    /// Scores the attempts of a group against each other, and against attempts that already have
    /// scores.
    pub fn score_together(&mut self, attempts: Vec<(K, Attempt)>, beside: Vec<Attempt>) {
        // If they cannot be compared, a retry of each would not help.
        let made = |(key, attempt)| (key, Made { attempt, may_retry: false });
        let job = Job { attempts: attempts.into_iter().map(made).collect(), beside: Some(beside) };
        self.scoring.spawn(score(self.scorers.clone(), self.store.clone(), job));
    }

    /// Cancels the attempts whose keys match `which`.
    pub fn give_up(&mut self, which: impl Fn(&K) -> bool) {
        self.handles.retain(|key, handle| {
            let given_up = which(key);
            if given_up {
                handle.abort();
            }
            !given_up
        });
    }

    /// Waits for the next event. Returns `None` if no attempt is in progress. If `limit` is set, it
    /// limits all waits for unavailable scorers.
    ///
    /// # Errors
    /// Returns an error if recording fails, or if only unavailable scorers are left to wait for,
    /// for longer than `limit`.
    pub async fn next(&mut self, limit: Option<Duration>) -> Result<Option<Ended<K>>, TrainerError> {
        loop {
            if let Some(ended) = self.ended.pop() {
                return Ok(Some(ended));
            }
            let only_waiting = self.making.is_empty() && self.scoring.is_empty() && !self.waiting.is_empty();
            let scored = if let Some(limit) = limit.filter(|_| only_waiting) {
                match process_time::with_timeout(limit, self.waiting.join_next()).await {
                    Some(scored) => scored,
                    None => return Err(self.outage(limit)),
                }
            } else {
                tokio::select! {
                    Some(made) = self.making.join_next() => {
                        if let Some((key, made)) = joined(made) {
                            self.handles.remove(&key);
                            self.made(key, made?);
                        }
                        continue;
                    }
                    Some(scored) = self.scoring.join_next() => Some(scored),
                    Some(scored) = self.waiting.join_next() => Some(scored),
                    else => return Ok(None),
                }
            };
            if let Some(scored) = scored.and_then(joined) {
                self.scored(scored?);
            }
        }
    }

    fn made(&mut self, key: K, made: Made) {
        match made.attempt.status {
            Status::Unscored => self.score(key, made),
            _ => self.ended.push(Ended::Attempt(key, made.attempt)),
        }
    }

    fn scored(&mut self, Scored { job, result }: Scored<K>) {
        for (key, _) in &job.attempts {
            self.handles.remove(key);
        }
        match result {
            Err(not_scored) if not_scored.fate == Fate::Parked => {
                let keys: Vec<K> = job.attempts.iter().map(|(key, _)| *key).collect();
                let asking = retry_scoring(self.scorers.clone(), self.store.clone(), job);
                let handle = self.waiting.spawn(asking);
                // The attempts of a group are cancelled together or not at all.
                if let [key] = keys[..] {
                    self.handles.insert(key, handle);
                }
                self.ended.push(Ended::Waits(not_scored.clone()));
                self.away = Some(not_scored);
            }
            Err(not_scored) => {
                for (key, Made { attempt, .. }) in job.attempts {
                    self.ended.push(match attempt.status {
                        Status::Superseded => Ended::Again(key),
                        _ => Ended::Attempt(key, not_scored.of(&self.scorers, attempt)),
                    });
                }
            }
            Ok(()) => {
                for (key, Made { attempt, .. }) in job.attempts {
                    // A greedy attempt belongs to no group.
                    let alone = attempt.placement.purpose == Purpose::Baseline;
                    let compares = job.beside.is_none() && !alone && self.scorers.compares(&attempt.task);
                    self.ended.push(match compares {
                        true => Ended::Compares(key, attempt),
                        false => Ended::Attempt(key, self.scorers.finish(attempt)),
                    });
                }
            }
        }
    }

    fn outage(&self, limit: Duration) -> TrainerError {
        let (scorer, why) = match &self.away {
            Some(ScoringFailure { scorer, why, .. }) => (scorer.clone(), why.clone()),
            None => Default::default(),
        };
        TrainerError::Outage { scorer, seconds: limit.as_secs_f64(), waiting: self.waiting.len(), why }
    }
}

/// Returns the attempts of a group that were compared before. The remaining attempts are still to
/// be compared with them: the run was killed while the scores were recorded one by one.
pub(crate) fn compared_before<'a>(attempts: impl Iterator<Item = &'a Attempt>) -> Vec<Attempt> {
    attempts.filter(|attempt| attempt.status == Status::Completed).cloned().collect()
}

/// Scores a job once. An attempt that is to be retried is recorded as superseded.
async fn score<K>(scorers: Scorers, store: Arc<dyn Store>, mut job: Job<K>) -> Result<Scored<K>, StoreError> {
    crash_point("scoring");
    let mut attempts: Vec<&mut Attempt> =
        job.attempts.iter_mut().map(|(_, made)| &mut made.attempt).collect();
    let result = match (&job.beside, &mut attempts[..]) {
        (Some(beside), group) => scorers.score_together(group, beside).await,
        (None, [attempt]) => scorers.score(attempt).await,
        (None, _) => Ok(()),
    };
    if let Err(not_scored) = &result
        && not_scored.fate == (Fate::Broken { again: true })
    {
        for (_, Made { attempt, may_retry }) in &mut job.attempts {
            if *may_retry {
                let broken = not_scored.of(&scorers, attempt.clone());
                *attempt = Attempt { reward: None, status: Status::Superseded, ..broken };
                store.end(&attempt.id, &attempt.end()).await?;
            }
        }
    }
    Ok(Scored { job, result })
}

/// Retries a job until the scorer is available again.
async fn retry_scoring<K>(
    scorers: Scorers,
    store: Arc<dyn Store>,
    mut job: Job<K>,
) -> Result<Scored<K>, StoreError> {
    // Even if the outage timeout is short, the scorer is called before it expires.
    let [mut pause, most] = PAUSES.map(|pause| pause.min(scorers.outage() / 4));
    loop {
        process_time::sleep(pause).await;
        let scored = score(scorers.clone(), store.clone(), job).await?;
        match &scored.result {
            Err(not_scored) if not_scored.fate == Fate::Parked => job = scored.job,
            _ => return Ok(scored),
        }
        pause = (2 * pause).min(most);
    }
}
