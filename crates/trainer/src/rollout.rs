//! Makes attempts: concurrently, scored when they have ended, recorded one by one.
//!
//! # Guarantees
//! - **A recorded attempt is never repeated.** An attempt that was in progress when its process was killed is
//!   marked as abandoned, and made again as another try.
//! - **Tokens depend only on** the weights, the seed, the attempt's slot, and the number of failed tries
//!   before it. They do not depend on concurrent attempts, nor on abandoned tries: random streams count
//!   failed tries only.
//! - **A broken attempt is recorded as broken**; other attempts continue.
//! - **Each try is an attempt of its own**, recorded as started before it samples.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use levade_agent::{AgentLoop, AttemptContext};
use levade_policy::{SamplingParams, crash_point};
use levade_store::{Attempt, Begun, End, Status, Store, StoreError, Tries};
use levade_tasks::Task;
use levade_tree::{AttemptId, Finish, Placement, Purpose, Trouble};
use serde_json::json;

use crate::TrainerError;
use crate::agents::Agents;
use crate::alone::alone;
use crate::observe::{Event, Observer, StopFlag};
use crate::random::try_stream;
use crate::scoring::{NotScored, Scorers};
use crate::under_way::{Ended, Made, UnderWay, compared_before};

/// Makes attempts and records them.
#[derive(Clone)]
pub struct Rollouts {
    /// The agents.
    pub agents: Agents,
    /// Scorers of the attempts.
    pub scorers: Scorers,
    /// Seed of the run.
    pub seed: u64,
    /// Attempts under way at once, at least 1.
    pub concurrency: usize,
    /// Where they are recorded.
    pub store: Arc<dyn Store>,
}

impl Rollouts {
    /// The attempts of these places at these tasks, in the same order, none of them to train on; those that
    /// are recorded are not made again. `None` when stopped: what was recorded until then stays.
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
        let mut under_way = UnderWay::new(self.scorers.clone(), self.store.clone());
        for (place, (placement, task)) in wanted.iter().enumerate() {
            let recorded = self.store.last_try(placement).await?;
            attempts.push(match recorded {
                Some(attempt) if attempt.status == Status::Unscored => {
                    under_way.score(place, self.unscored(attempt, task).await?);
                    None
                }
                recorded => recorded,
            });
        }
        let mut done = attempts.iter().flatten().count();
        let mut waiting: VecDeque<usize> =
            (0..wanted.len()).filter(|place| attempts[*place].is_none() && !under_way.has(place)).collect();
        let (mut away, compares) = (Away::default(), self.scorers.by_group().next().is_some());
        loop {
            while under_way.making() < self.concurrency
                && !stop.is_stopped()
                && let Some(place) = waiting.pop_front()
            {
                let (placement, task) = &wanted[place];
                under_way.make(place, self.attempt(placement, task, params.clone(), false)?);
            }
            let ended = tokio::select! {
                ended = under_way.next(Some(self.scorers.outage())) => ended?,
                // What is under way is abandoned: it is made again, from the same stream, when the run goes
                // on.
                () = stop.stopped() => return Ok(None),
            };
            let (place, attempt) = match ended {
                None => break,
                Some(Ended::Attempt(place, attempt) | Ended::Compares(place, attempt)) => (place, attempt),
                Some(Ended::Again(place)) => {
                    waiting.push_front(place);
                    continue;
                }
                Some(Ended::Waits(not_scored)) => {
                    away.found(&not_scored);
                    away.tell(observer);
                    continue;
                }
            };
            if attempt.status != Status::Unscored {
                self.record(&attempt).await?;
                done += 1;
                let (purpose, sampled_tokens) =
                    (attempt.placement.purpose, attempt.trajectory.sampled_tokens());
                observer.event(&Event::Attempt { purpose, done, total: wanted.len(), sampled_tokens });
            }
            attempts[place] = Some(attempt);
            if !compares {
                continue;
            }
            // Once all at a task have ended, they are compared with each other.
            let group = wanted[place].0.group;
            let of_group = || (0..wanted.len()).filter(move |other| wanted[*other].0.group == group);
            if of_group().all(|other| attempts[other].is_some()) {
                let mut waits = Vec::new();
                for other in of_group() {
                    let waiting = attempts[other].take_if(|attempt| attempt.status == Status::Unscored);
                    waits.extend(waiting.map(|attempt| (other, attempt)));
                }
                if !waits.is_empty() {
                    let others = of_group().filter_map(|other| attempts[other].as_ref());
                    under_way.score_together(waits, compared_before(others));
                }
            }
        }
        if stop.is_stopped() {
            return Ok(None);
        }
        let attempts: Vec<Attempt> = attempts.into_iter().flatten().collect();
        self.record_broken(&attempts).await?;
        Ok(Some(attempts))
    }

    /// Makes one attempt, to train on where `trains`; it is not scored yet, and in the record it still runs.
    /// A try that came to nothing ends there, superseded by another one as long as the recipe allows.
    ///
    /// # Errors
    /// When the task names no agent; the attempt's own, when recording fails.
    pub(crate) fn attempt(
        &self,
        placement: &Placement,
        task: &Task,
        params: SamplingParams,
        trains: bool,
    ) -> Result<impl Future<Output = Result<Made, StoreError>> + Send + 'static, TrainerError> {
        let (placement, task, agent) = (*placement, task.clone(), self.agents.of(task)?);
        let (messages, retries) = (agent.keys.opening(&task), agent.keys.retries);
        let runs = agent.runs.clone();
        let (agent, limits) = (agent.agent.name.clone(), agent.agent.limits);
        let (roster, teacher) = (self.agents.roster.clone(), self.agents.teacher.clone());
        let (scorers, store, seed) = (self.scorers.clone(), self.store.clone(), self.seed);
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
                    agent: agent.clone(),
                    roster: roster.clone(),
                    limits,
                    teacher: teacher.clone(),
                    seed,
                    // After one that failed, a stream of its own: what the model sampled may be what broke
                    // the tool.
                    stream: try_stream(&placement, failed),
                    is_evaluation: placement.purpose == Purpose::Eval,
                    params: params.clone(),
                    has_own_sampling: trains,
                };
                let made = guarded(&runs, context).await;
                store.append(&made_at.id, made.trajectory.segments()).await?;
                let broke = made.outcome.finish == Finish::Failed;
                let came_to_nothing = broke || made.outcome.sampled_tokens == 0;
                let attempt = made_at.attempt(&task, made);
                if !came_to_nothing || failed >= retries {
                    let attempt = if broke { scorers.broken(attempt) } else { attempt };
                    return Ok(Made { attempt, may_retry: failed < retries });
                }
                let failure = Attempt { status: Status::Superseded, ..attempt };
                store.end(&failure.id, &failure.end()).await?;
                (number, failed) = (number + 1, failed + 1);
            }
        })
    }

    /// An attempt that the record has without a score, and which is to be scored now.
    ///
    /// # Errors
    /// When the task names no agent, or the record cannot be read.
    pub(crate) async fn unscored(&self, attempt: Attempt, task: &Task) -> Result<Made, TrainerError> {
        let retries = self.agents.of(task)?.keys.retries;
        let Tries { failed, .. } = self.store.tries(&attempt.placement).await?;
        Ok(Made { attempt, may_retry: failed < retries })
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

    /// Records the ends of the attempts that broke.
    ///
    /// If all of them broke, the cause lies outside the run (a sampler that is gone), and a resumed run must
    /// make them again: they are recorded as abandoned, so that `inspect` can list them with their errors.
    ///
    /// # Errors
    /// Returns [`TrainerError::AllFailed`] if every attempt broke, and an error if recording fails.
    pub(crate) async fn record_broken(&self, attempts: &[Attempt]) -> Result<(), TrainerError> {
        let broken = || attempts.iter().filter(|attempt| attempt.status == Status::Failed);
        if let Some(first) = attempts.first().filter(|_| broken().count() == attempts.len()) {
            let first = first.outcome.error.as_deref().unwrap_or("no reason was recorded").to_owned();
            for attempt in attempts {
                // An attempt that waits for its score is scored by the resumed run, and not made again.
                if self.store.last_try(&attempt.placement).await?.is_none() {
                    let end = End { status: Status::Abandoned, ..attempt.end() };
                    self.store.end(&attempt.id, &end).await?;
                }
            }
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
    /// The beginning of an attempt there.
    fn begun(self, task: &Task) -> Begun {
        let Place { id, placement, number } = self;
        Begun { id, placement, number, task: json!(task) }
    }

    /// The attempt that was made there, not scored yet.
    fn attempt(self, task: &Task, made: levade_agent::Attempt) -> Attempt {
        let Place { id, placement, number } = self;
        let levade_agent::Attempt { trajectory, outcome } = made;
        Attempt {
            id,
            placement,
            number,
            task: json!(task),
            outcome,
            score: None,
            reward: None,
            earned: Vec::new(),
            status: Status::Unscored,
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

/// Makes an attempt; one that panics is a broken one.
async fn guarded(agent: &Arc<dyn AgentLoop>, context: AttemptContext) -> levade_agent::Attempt {
    let agent = agent.clone();
    let made = alone(async move { agent.run(context).await }).await;
    made.unwrap_or_else(|panic| levade_agent::Attempt::broken("attempt", panic))
}

/// Scorers that are away, each told of once.
#[derive(Debug, Default)]
pub(crate) struct Away {
    known: BTreeSet<String>,
    untold: Vec<String>,
}

impl Away {
    /// Notes that a scorer is away.
    pub fn found(&mut self, NotScored { scorer, why, .. }: &NotScored) {
        if self.known.insert(scorer.clone()) {
            self.untold.push(format!("attempts wait for the scorer {scorer}, and are kept: {why}"));
        }
    }

    /// Tells of those that nobody was told of.
    pub fn tell(&mut self, observer: &mut dyn Observer) {
        self.untold.drain(..).for_each(|note| observer.event(&Event::Note(note)));
    }
}

/// Troubles around the model, by where: how often, and the first of each.
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
