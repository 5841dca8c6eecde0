//! Making attempts: concurrently, recorded one by one, scored on the way.
//!
//! Guarantees: an attempt that is recorded is never made again. Its tokens depend on the weights, the seed, its place in
//! the run and how many tries failed before it alone, not on how many run beside it, nor on tries that were abandoned
//! because their process was gone. An attempt that breaks is recorded as broken; the others go on. Each try is an attempt of
//! its own, begun in the record before anything is sampled.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use dressage_agent::tasks::Task;
use dressage_agent::{AgentLoop, AttemptContext, Samplers};
use dressage_policy::{SamplingParams, crash_point};
use dressage_reward::Score;
use dressage_store::{Attempt, Begun, Earned, Earner, Status, Store, StoreError, Tries};
use dressage_tree::{AttemptId, CallCounts, Finish, Outcome, Placement, Trouble};
use serde_json::json;
use tokio::task::JoinSet;

use crate::TrainerError;
use crate::agents::Agents;
use crate::observe::{Event, Observer, StopFlag};
use crate::random::try_stream;
use crate::recipe::RewardKeys;
use crate::tasks::opening;

/// Makes attempts and records them.
#[derive(Clone)]
pub struct Rollouts {
    /// The agents.
    pub agents: Agents,
    /// Whom they can ask.
    pub samplers: Samplers,
    /// What attempts are worth.
    pub reward: RewardKeys,
    /// Seed of the run.
    pub seed: u64,
    /// Attempts under way at once, at least 1.
    pub concurrency: usize,
    /// Where they are recorded.
    pub store: Arc<dyn Store>,
}

impl Rollouts {
    /// The attempts of these places at these tasks, in the same order, none of them to train on; those that are recorded
    /// are not made again. `None` when stopped: what was recorded until then stays.
    ///
    /// # Errors
    /// When recording fails, a task names no agent, or not one attempt came to its end.
    pub async fn run(
        &self,
        wanted: &[(Placement, Task)],
        params: &SamplingParams,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Option<Vec<Attempt>>, TrainerError> {
        let mut attempts: Vec<Option<Attempt>> = Vec::with_capacity(wanted.len());
        for (placement, _) in wanted {
            attempts.push(self.store.last_try(placement).await?);
        }
        let mut done = attempts.iter().flatten().count();
        let mut waiting: VecDeque<usize> = (0..wanted.len()).filter(|&i| attempts[i].is_none()).collect();
        let mut running = JoinSet::new();
        loop {
            while running.len() < self.concurrency
                && !stop.is_stopped()
                && let Some(place) = waiting.pop_front()
            {
                let (placement, task) = &wanted[place];
                let attempt = self.attempt(placement, task, params.clone(), false)?;
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
            let attempt = attempt?;
            self.record(&attempt).await?;
            done += 1;
            let sampled_tokens = attempt.trajectory.sampled_tokens();
            observer.event(&Event::Attempt {
                purpose: attempt.placement.purpose,
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
        self.record_broken(&attempts).await?;
        Ok(Some(attempts))
    }

    /// Makes one attempt, to train on where `trains`, and scores it; in the record it still runs. A try that came to nothing
    /// ends there, superseded by another one as long as the recipe allows.
    ///
    /// # Errors
    /// When the task names no agent; the attempt's own, when recording fails.
    pub(crate) fn attempt(
        &self,
        placement: &Placement,
        task: &Task,
        params: SamplingParams,
        trains: bool,
    ) -> Result<impl Future<Output = Result<Attempt, StoreError>> + Send + 'static, TrainerError> {
        let (placement, task, agent) = (*placement, task.clone(), self.agents.of(task)?);
        let (messages, retries) = (opening(&agent.keys, &task), agent.keys.retries);
        let (agent, params) = (agent.runs(), agent.params(params, trains));
        let (samplers, reward, store, seed) =
            (self.samplers.clone(), self.reward.clone(), self.store.clone(), self.seed);
        Ok(async move {
            let Tries { next: mut number, mut failed } = store.tries(&placement).await?;
            loop {
                let made_at =
                    Place { id: AttemptId::new(store.run(), &placement, number), placement, number };
                store.begin(&made_at.begun(&task)).await?;
                let context = AttemptContext {
                    name: made_at.to_string(),
                    task: task.clone(),
                    messages: messages.clone(),
                    samplers: samplers.clone(),
                    seed,
                    // After one that failed, a stream of its own: what the model sampled may be what broke the tool.
                    stream: try_stream(&placement, failed),
                    params: params.clone(),
                };
                let made = guarded(&agent, context).await;
                store.append(&made_at.id, made.trajectory.segments()).await?;
                let came_to_nothing =
                    made.outcome.finish == Finish::Failed || made.outcome.sampled_tokens == 0;
                if !came_to_nothing || failed >= retries {
                    return Ok(scored(&reward, made_at, &task, made).await);
                }
                let failure = Attempt { status: Status::Superseded, ..made_at.attempt(&task, made) };
                store.end(&made_at.id, &failure.end()).await?;
                (number, failed) = (number + 1, failed + 1);
            }
        })
    }

    /// Tries that came before these attempts and were superseded.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub async fn earlier_tries(&self, attempts: &[Attempt]) -> Result<Vec<Attempt>, StoreError> {
        let mut found = Vec::new();
        for attempt in attempts {
            for number in 0..attempt.number {
                let id = AttemptId::new(self.store.run(), &attempt.placement, number);
                let earlier = self.store.attempt(&id).await?;
                found.extend(earlier.filter(|attempt| attempt.status == Status::Superseded));
            }
        }
        Ok(found)
    }

    /// Records the end of an attempt, unless it broke: see [`Rollouts::record_broken`].
    pub(crate) async fn record(&self, attempt: &Attempt) -> Result<(), TrainerError> {
        if attempt.status == Status::Completed {
            self.store.end(&attempt.id, &attempt.end()).await?;
            crash_point("attempt_recorded");
        }
        Ok(())
    }

    /// Records the ends of attempts that broke, now that it is known that not all of them did: then the cause lies outside (a sampler that
    /// is gone), and a record of it would keep the run from going on when it is mended.
    pub(crate) async fn record_broken(&self, attempts: &[Attempt]) -> Result<(), TrainerError> {
        let broken = || attempts.iter().filter(|attempt| attempt.status == Status::Failed);
        if let Some(first) = attempts.first().filter(|_| broken().count() == attempts.len()) {
            let first = first.outcome.error.as_deref().unwrap_or("no reason was recorded").to_owned();
            return Err(TrainerError::AllFailed { count: attempts.len(), first });
        }
        for attempt in broken() {
            self.store.end(&attempt.id, &attempt.end()).await?;
        }
        Ok(())
    }
}

/// The place of an attempt that is made, and its name.
#[derive(Clone, Copy)]
struct Place {
    id: AttemptId,
    placement: Placement,
    number: u32,
}

impl Place {
    /// How an attempt begins there.
    fn begun(self, task: &Task) -> Begun {
        let Place { id, placement, number } = self;
        Begun { id, placement, number, task: json!(task) }
    }

    /// What was made there, not scored.
    fn attempt(self, task: &Task, made: dressage_agent::Attempt) -> Attempt {
        let Place { id, placement, number } = self;
        let dressage_agent::Attempt { trajectory, outcome } = made;
        Attempt {
            id,
            placement,
            number,
            task: json!(task),
            outcome,
            score: None,
            reward: None,
            earned: Vec::new(),
            status: Status::Failed,
            trajectory,
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.number {
            0 => write!(f, "{}", self.placement),
            number => write!(f, "{}, try {number}", self.placement),
        }
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
async fn guarded(agent: &Arc<dyn AgentLoop>, context: AttemptContext) -> dressage_agent::Attempt {
    let agent = agent.clone();
    let made = alone(async move { agent.run(context).await }).await;
    made.unwrap_or_else(|panic| dressage_agent::Attempt::broken("attempt", panic))
}

/// Scores the final answer, shapes the reward. Where the answer cannot be scored, the attempt counts as broken.
async fn scored(keys: &RewardKeys, place: Place, task: &Task, made: dressage_agent::Attempt) -> Attempt {
    let mut attempt = place.attempt(task, made);
    let outcome = &mut attempt.outcome;
    let answered = outcome.finish.is_whole();
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
    let earned = if failed { Vec::new() } else { earned(keys, outcome) };
    let cut = if answered { 0.0 } else { keys.unfinished };
    let whole = score + cut + earned.iter().map(|earned| earned.reward).sum::<f64>();
    let reward = if failed { keys.broken } else { Some(whole) };
    Attempt {
        score: (!failed).then_some(score),
        // Adding 0 turns −0, which the store does not tell from 0, into 0.
        reward: reward.map(|reward| reward + 0.0),
        earned,
        status: if failed { Status::Failed } else { Status::Completed },
        ..attempt
    }
}

/// Rewards of turns: for how their calls went, and those that tools gave.
fn earned(keys: &RewardKeys, outcome: &Outcome) -> Vec<Earned> {
    let of_calls = |(turn, calls): &(u32, CallCounts)| {
        let malformed = f64::from(calls.malformed);
        let failed = f64::from(calls.errors()) - malformed;
        (*turn, keys.malformed_call * malformed + keys.failed_call * failed)
    };
    let mut by_turn: BTreeMap<u32, f64> = outcome.calls_by_turn.iter().map(of_calls).collect();
    for (turn, reward) in &outcome.earned_by_turn {
        *by_turn.entry(*turn).or_default() += reward;
    }
    let of_turn = |(turn, reward)| (reward != 0.0).then_some(Earned { by: Earner::Turn(turn), reward });
    by_turn.into_iter().filter_map(of_turn).collect()
}

/// What went wrong around the model, by where: how often, and the first of each.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Troubles(BTreeMap<String, (u64, String)>);

impl Troubles {
    /// Adds those of some attempts; returns the ones from places where nothing had gone wrong before.
    pub fn add(&mut self, attempts: &[Attempt]) -> Vec<String> {
        let mut new = Vec::new();
        for attempt in attempts {
            for Trouble { source, why } in &attempt.outcome.troubles {
                let (count, _) = self.0.entry(source.clone()).or_insert_with(|| {
                    new.push(format!("{source}: {why} (in {})", attempt.placement));
                    (0, why.clone())
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
