//! Making attempts: concurrently, recorded one by one, scored on the way.
//!
//! Guarantees: an attempt that is recorded is never made again. Its tokens depend on the weights, the seed and its key
//! alone, not on how many run beside it. An attempt that breaks is recorded as broken; the others go on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use dressage_agent::tasks::Task;
use dressage_agent::{Agent, AttemptRequest, Finish, Outcome, Trouble};
use dressage_policy::crash_point;
use dressage_store::{Attempt, AttemptKey, Status, Store};
use serde_json::json;
use tokio::task::JoinSet;

use crate::TrainerError;
use crate::observe::{Event, Observer, StopFlag};
use crate::random::attempt_stream;
use crate::recipe::{AgentKeys, RewardKeys};
use crate::tasks::opening;

/// Makes attempts and records them.
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
        temperature: f32,
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
                let attempt = self.attempt(key, task, temperature);
                running.spawn(async move { (place, attempt.await) });
            }
            let joined = tokio::select! {
                joined = running.join_next() => joined,
                // What is under way is abandoned: it is made again, from the same stream, when the run goes on.
                () = stop.stopped() => return Ok(None),
            };
            let (place, made) = match joined {
                None => break,
                Some(Ok(joined)) => joined,
                // A bug in a tool or in the loop itself; the panic has already said where.
                Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            };
            let (key, task) = &wanted[place];
            let attempt = self.finish(*key, task, made)?;
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

    /// Makes one attempt.
    pub(crate) fn attempt(
        &self,
        key: &AttemptKey,
        task: &Task,
        temperature: f32,
    ) -> impl Future<Output = dressage_agent::Attempt> + Send + 'static {
        let request = AttemptRequest {
            id: key.to_string(),
            messages: opening(&self.prompts, task),
            seed: self.seed,
            stream: attempt_stream(key),
            temperature,
        };
        let agent = self.agent.clone();
        async move { agent.run(request).await }
    }

    /// Scores an attempt and records it, unless it broke: see [`Rollouts::record_broken`].
    pub(crate) fn finish(
        &self,
        key: AttemptKey,
        task: &Task,
        made: dressage_agent::Attempt,
    ) -> Result<Attempt, TrainerError> {
        let attempt = self.score(key, task, made);
        if attempt.status == Status::Completed {
            self.store.record_attempt(&attempt)?;
            crash_point("attempt_recorded");
        }
        Ok(attempt)
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

    /// Scores the final answer, shapes the reward. Where the answer cannot be scored, the attempt counts as broken.
    fn score(&self, key: AttemptKey, task: &Task, made: dressage_agent::Attempt) -> Attempt {
        let dressage_agent::Attempt { trajectory, mut outcome } = made;
        let answered = outcome.finish == Finish::Answered;
        // Also of an empty text, so that a task that cannot be scored is found whatever the model says.
        let scored = self.reward.scorer.score(&outcome.final_text, &task.answer);
        if let Err(error) = &scored {
            outcome.trouble("scorer", error.to_string());
            outcome.error.get_or_insert_with(|| format!("the answer cannot be scored: {error}"));
            outcome.finish = Finish::Failed;
        }
        let failed = outcome.finish == Finish::Failed;
        let score = scored.map_or(0.0, |scored| if answered { scored.value } else { 0.0 });
        let reward = if failed { self.reward.broken } else { Some(score + self.shaping(&outcome)) };
        Attempt {
            key,
            task: json!(task),
            outcome: json!(outcome),
            score: (!failed).then_some(score),
            // Adding 0 turns −0, which the store does not tell from 0, into 0.
            reward: reward.map(|reward| reward + 0.0),
            status: if failed { Status::Failed } else { Status::Completed },
            trajectory,
        }
    }

    fn shaping(&self, outcome: &Outcome) -> f64 {
        let RewardKeys { malformed_call, failed_call, unfinished, .. } = self.reward;
        let malformed = f64::from(outcome.calls.malformed);
        let failed = f64::from(outcome.calls.errors()) - malformed;
        let cut = if outcome.finish == Finish::Answered { 0.0 } else { unfinished };
        malformed_call * malformed + failed_call * failed + cut
    }
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
    pub(crate) fn add(&mut self, attempts: &[Attempt]) -> Vec<String> {
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
