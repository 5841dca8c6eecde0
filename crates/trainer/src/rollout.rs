//! Making attempts: concurrently, recorded one by one, scored on the way.
//!
//! Guarantees: an attempt that is recorded is never made again. Its tokens depend on the weights, the seed and its key
//! alone, not on how many run beside it. An attempt that breaks is recorded as broken; the others go on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use dressage_agent::tasks::Task;
use dressage_agent::tools::CallCounts;
use dressage_agent::{Agent, AttemptRequest, Finish, Outcome, Trouble};
use dressage_policy::{SamplingParams, crash_point};
use dressage_reward::Score;
use dressage_store::{Attempt, AttemptKey, Earned, Earner, Status, Store};
use serde_json::json;
use tokio::task::JoinSet;

use crate::TrainerError;
use crate::observe::{Event, Observer, StopFlag};
use crate::random::{attempt_stream, retry_stream};
use crate::recipe::{AgentKeys, RewardKeys};
use crate::tasks::opening;

/// Makes attempts and records them.
#[derive(Clone)]
pub struct Rollouts {
    /// The agent.
    pub agent: Agent,
    /// What it is told.
    pub prompts: AgentKeys,
    /// What attempts are worth.
    pub reward: RewardKeys,
    /// Seed of the run.
    pub seed: u64,
    /// Attempts under way at once, at least 1.
    pub concurrency: usize,
    /// Where they are recorded.
    pub store: Arc<Store>,
}

impl Rollouts {
    /// The attempts of these keys at these tasks, in the same order; those that are recorded are not made again. `None`
    /// when stopped: what was recorded until then stays.
    ///
    /// # Errors
    /// When recording fails, or not one attempt came to its end.
    pub async fn run(
        &self,
        wanted: &[(AttemptKey, Task)],
        params: &SamplingParams,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Option<Vec<Attempt>>, TrainerError> {
        let mut attempts: Vec<Option<Attempt>> = Vec::with_capacity(wanted.len());
        for (key, _) in wanted {
            attempts.push(self.store.attempt(key)?);
        }
        let mut done = attempts.iter().flatten().count();
        let mut waiting: VecDeque<usize> = (0..wanted.len()).filter(|&i| attempts[i].is_none()).collect();
        let mut running = JoinSet::new();
        loop {
            while running.len() < self.concurrency
                && !stop.is_stopped()
                && let Some(place) = waiting.pop_front()
            {
                let (key, task) = &wanted[place];
                let attempt = self.attempt(key, task, params.clone());
                running.spawn(async move { (place, attempt.await) });
            }
            let joined = tokio::select! {
                joined = running.join_next() => joined,
                // What is under way is abandoned: it is made again, from the same stream, when the run goes on.
                () = stop.stopped() => return Ok(None),
            };
            let (place, attempt) = match joined {
                None => break,
                Some(Ok(joined)) => joined,
                // A bug; the panic has already said where.
                Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            };
            self.record(&attempt)?;
            let key = attempt.key;
            done += 1;
            let sampled_tokens = attempt.trajectory.sampled_tokens();
            observer.event(&Event::Attempt {
                purpose: key.purpose,
                done,
                total: wanted.len(),
                sampled_tokens,
            });
            attempts[place] = Some(attempt);
        }
        if stop.is_stopped() {
            return Ok(None);
        }
        let attempts: Vec<Attempt> = attempts.into_iter().flatten().collect();
        self.record_broken(&attempts)?;
        Ok(Some(attempts))
    }

    /// Makes one attempt and scores it.
    pub(crate) fn attempt(
        &self,
        key: &AttemptKey,
        task: &Task,
        params: SamplingParams,
    ) -> impl Future<Output = Attempt> + Send + 'static {
        let (key, task, retries) = (*key, task.clone(), self.prompts.retries);
        let mut request = AttemptRequest {
            id: key.to_string(),
            messages: opening(&self.prompts, &task),
            seed: self.seed,
            stream: attempt_stream(&key),
            params,
        };
        let (agent, reward) = (self.agent.clone(), self.reward.clone());
        async move {
            let mut made = guarded(&agent, &request).await;
            for retry in 1..=retries {
                if made.outcome.finish != Finish::Failed && made.outcome.sampled_tokens > 0 {
                    break;
                }
                // Another stream: what the model drew may be what broke the tool.
                request.stream = retry_stream(&key, retry);
                let before = made.outcome.troubles;
                made = guarded(&agent, &request).await;
                let after = std::mem::replace(&mut made.outcome.troubles, before);
                after.into_iter().for_each(|trouble| made.outcome.trouble(trouble.source, trouble.why));
            }
            scored(&reward, key, &task, made).await
        }
    }

    /// Records an attempt, unless it broke: see [`Rollouts::record_broken`].
    pub(crate) fn record(&self, attempt: &Attempt) -> Result<(), TrainerError> {
        if attempt.status == Status::Completed {
            self.store.record_attempt(attempt)?;
            crash_point("attempt_recorded");
        }
        Ok(())
    }

    /// Records the attempts that broke, now that it is known that not all of them did: then the cause lies outside (a sampler that
    /// is gone), and a record of it would keep the run from going on when it is mended.
    pub(crate) fn record_broken(&self, attempts: &[Attempt]) -> Result<(), TrainerError> {
        let broken = || attempts.iter().filter(|attempt| attempt.status == Status::Failed);
        if let Some(first) = attempts.first().filter(|_| broken().count() == attempts.len()) {
            let reason = first.outcome.get("error").and_then(serde_json::Value::as_str);
            let first = reason.unwrap_or("no reason was recorded").to_owned();
            return Err(TrainerError::AllFailed { count: attempts.len(), first });
        }
        Ok(self.store.record_attempts(&broken().cloned().collect::<Vec<_>>())?)
    }
}

/// Does something that may panic, which is then not the end of the run.
///
/// # Errors
/// With what it panicked.
async fn alone<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Result<T, String> {
    // A set ends its task when it is dropped, as an attempt that is given up is.
    let mut set = JoinSet::new();
    set.spawn(work);
    match set.join_next().await {
        Some(done) => done.map_err(|error| error.to_string()),
        None => Err("it was never begun".into()),
    }
}

/// Makes an attempt; one that panics is a broken one.
async fn guarded(agent: &Agent, request: &AttemptRequest) -> dressage_agent::Attempt {
    let (agent, request) = (agent.clone(), request.clone());
    let made = alone(async move { agent.run(request).await }).await;
    made.unwrap_or_else(|panic| dressage_agent::Attempt::broken("attempt", panic))
}

/// Scores the final answer, shapes the reward. Where the answer cannot be scored, the attempt counts as broken.
async fn scored(keys: &RewardKeys, key: AttemptKey, task: &Task, made: dressage_agent::Attempt) -> Attempt {
    let dressage_agent::Attempt { trajectory, mut outcome } = made;
    let answered = outcome.finish == Finish::Answered;
    let (scorer, text, answer) = (keys.scorer.clone(), outcome.final_text.clone(), task.answer.clone());
    let score = alone(async move {
        if answered {
            scorer.score(&text, &answer).await
        } else {
            // Also without an answer, so that a task that cannot be scored is found whatever the model says.
            scorer.check_expected(&answer).map(|()| Score { value: 0.0, extracted: None })
        }
    });
    let score = score.await.and_then(|score| score.map_err(|error| error.to_string()));
    if let Err(error) = &score {
        outcome.trouble("scorer", error.as_str());
        outcome.error.get_or_insert_with(|| format!("the answer cannot be scored: {error}"));
        outcome.finish = Finish::Failed;
    }
    let failed = outcome.finish == Finish::Failed;
    let score = score.map_or(0.0, |score| {
        outcome.extracted = score.extracted;
        score.value
    });
    let earned = if failed { Vec::new() } else { earned(keys, &outcome) };
    let cut = if answered { 0.0 } else { keys.unfinished };
    let whole = score + cut + earned.iter().map(|earned| earned.reward).sum::<f64>();
    let reward = if failed { keys.broken } else { Some(whole) };
    Attempt {
        key,
        task: json!(task),
        outcome: json!(outcome),
        score: (!failed).then_some(score),
        // Adding 0 turns −0, which the store does not tell from 0, into 0.
        reward: reward.map(|reward| reward + 0.0),
        earned,
        status: if failed { Status::Failed } else { Status::Completed },
        trajectory,
    }
}

/// What each turn earned by its calls.
fn earned(keys: &RewardKeys, outcome: &Outcome) -> Vec<Earned> {
    let of_turn = |(turn, calls): &(u32, CallCounts)| {
        let malformed = f64::from(calls.malformed);
        let failed = f64::from(calls.errors()) - malformed;
        let reward = keys.malformed_call * malformed + keys.failed_call * failed;
        (reward != 0.0).then_some(Earned { by: Earner::Turn(*turn), reward })
    };
    outcome.calls_by_turn.iter().filter_map(of_turn).collect()
}

/// The outcome of a recorded attempt.
pub(crate) fn outcome_of(attempt: &Attempt) -> Option<Outcome> {
    serde_json::from_value(attempt.outcome.clone()).ok()
}

/// What went wrong around the model, by where: how often, and the first of each.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Troubles(BTreeMap<String, (u64, String)>);

impl Troubles {
    /// Adds those of some attempts; returns the ones from places where nothing had gone wrong before.
    pub fn add(&mut self, attempts: &[Attempt]) -> Vec<String> {
        let mut new = Vec::new();
        for attempt in attempts {
            let Some(outcome) = outcome_of(attempt) else { continue };
            for Trouble { source, why } in outcome.troubles {
                let (count, _) = self.0.entry(source.clone()).or_insert_with(|| {
                    new.push(format!("{source}: {why} (in {})", attempt.key));
                    (0, why)
                });
                *count += 1;
            }
        }
        new
    }

    /// Where, how often, and what went wrong there first.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64, &str)> {
        self.0.iter().map(|(source, (count, first))| (source.as_str(), *count, first.as_str()))
    }
}
