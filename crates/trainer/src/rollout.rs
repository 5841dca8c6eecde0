//! Generates attempts concurrently, scores them as they end, and records each of them.
//!
//! # Guarantees
//! - **A recorded attempt is never repeated.** An attempt that was in progress when its process was
//!   killed is marked as abandoned, and repeated as another try.
//! - **Tokens depend only on** the weights, the seed, the attempt's slot, and the number of failed
//!   tries before it. They do not depend on concurrent attempts, nor on abandoned tries: random
//!   streams count failed tries only.
//! - **A failed attempt is recorded as failed**; other attempts continue.
//! - **Each try is a separate attempt**, recorded as started before it samples.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use levade_agent::{AgentLoop, AttemptContext};
use levade_policy::{IntervalTimer, SamplingParams, crash_point};
use levade_store::{
    Attempt, AttemptEnd, AttemptStart, Status, Store, StoreError, TryCounts, person_subject,
};
use levade_tasks::Task;
use levade_tree::{AttemptId, AttemptSlot, AttemptWarning, Finish, Outcome, Purpose, TimedPart};
use serde_json::json;

use crate::TrainerError;
use crate::agents::Agents;
use crate::in_flight::{AttemptEvent, AttemptsInFlight, GeneratedAttempt, completed_attempts};
use crate::observe::{Event, Observer, StopFlag};
use crate::panics::catch_panic;
use crate::random::{group_random_stream, try_random_stream};
use crate::scoring::{Scorers, ScoringFailure};
use crate::sessions::{SessionRecords, task_of_session};
use crate::tracer::Tracer;

/// Maximum number of lost tries of an attempt slot in this process. A further lost try counts as
/// failed, because the attempt itself may end the processes that make it.
const MAX_LOST_TRIES: u32 = 8;

/// Generates attempts of agents at tasks, scores them, and records them in the store.
#[derive(Clone)]
pub struct AttemptMaker {
    /// The agents that make the attempts.
    pub agents: Agents,
    /// Scorers of the attempts.
    pub scorers: Scorers,
    /// Seed of the run.
    pub seed: u64,
    /// Maximum number of attempts that are generated concurrently, at least 1.
    pub concurrency: usize,
    /// Store in which attempts are recorded.
    pub store: Arc<dyn Store>,
    /// Receives every attempt that counts, when the attempt has ended.
    pub tracer: Tracer,
    /// Stores of recorded sessions. Attempts at session tasks are copied from them.
    pub sessions: SessionRecords,
    /// Subjects that were withdrawn from the run: ids of tasks, and keys of people
    /// ([`person_subject`]). No further attempts are made at their tasks.
    pub withdrawn: Arc<BTreeSet<String>>,
}

impl AttemptMaker {
    /// Makes one attempt in each slot at the slot's task, and returns the attempts in the order of
    /// `wanted`. The attempts are not for training. An attempt that is already recorded is not
    /// repeated. Returns `None` if the run is stopped. Attempts that were recorded until then
    /// remain recorded.
    ///
    /// # Errors
    /// Returns an error if the store cannot be written, if a task names an unknown agent, or if
    /// every attempt failed.
    pub async fn run(
        &self,
        wanted: &[(AttemptSlot, Task)],
        params: &SamplingParams,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Option<Vec<Attempt>>, TrainerError> {
        let mut attempts: Vec<Option<Attempt>> = Vec::with_capacity(wanted.len());
        let mut in_flight = AttemptsInFlight::new(self.scorers.clone(), self.store.clone());
        for (index, (slot, task)) in wanted.iter().enumerate() {
            let recorded = self.store.last_try(slot).await?;
            attempts.push(match recorded {
                Some(attempt) if attempt.status == Status::Unscored => {
                    in_flight.start_scoring(index, self.prepare_for_scoring(attempt, task).await?);
                    None
                }
                recorded => recorded,
            });
        }
        let mut done = attempts.iter().flatten().count();
        let mut waiting: VecDeque<usize> = (0..wanted.len())
            .filter(|index| attempts[*index].is_none() && !in_flight.contains(index))
            .collect();
        let mut scorer_outage = ScorerOutage::default();
        let compares = self.scorers.group_scorers().next().is_some();
        loop {
            while in_flight.num_generating() < self.concurrency
                && !stop.is_stopped()
                && let Some(index) = waiting.pop_front()
            {
                let (slot, task) = &wanted[index];
                in_flight.start_generating(
                    index,
                    self.generate_attempt(slot, task, params.clone(), false)?,
                );
            }
            let ended = tokio::select! {
                // A fixed order of the branches makes simulations repeatable.
                biased;
                ended = in_flight.next(Some(self.scorers.outage_timeout())) => ended?,
                // Attempts in progress are abandoned. The resumed run repeats them from the same
                // random streams.
                () = stop.stopped() => return Ok(None),
            };
            let (index, attempt) = match ended {
                None => break,
                Some(
                    AttemptEvent::Attempt(index, attempt)
                    | AttemptEvent::NeedsComparison(index, attempt),
                ) => (index, attempt),
                Some(AttemptEvent::Retry(index)) => {
                    waiting.push_front(index);
                    continue;
                }
                Some(AttemptEvent::ScorerUnavailable(failure)) => {
                    scorer_outage.add(&failure);
                    scorer_outage.report(observer);
                    continue;
                }
            };
            if attempt.status != Status::Unscored {
                self.record_completed(&attempt).await?;
                done += 1;
                let purpose = attempt.slot.purpose;
                let sampled_tokens = attempt.trajectory.sampled_tokens();
                observer.event(&Event::Attempt {
                    purpose,
                    done,
                    total: wanted.len(),
                    sampled_tokens,
                });
            }
            attempts[index] = Some(attempt);
            if !compares {
                continue;
            }
            // Once all attempts at a task have ended, they are compared with each other.
            let group = wanted[index].0.group;
            let group_indices =
                || (0..wanted.len()).filter(move |other| wanted[*other].0.group == group);
            if group_indices().all(|other| attempts[other].is_some()) {
                let mut waits = Vec::new();
                for other in group_indices() {
                    let waiting =
                        attempts[other].take_if(|attempt| attempt.status == Status::Unscored);
                    waits.extend(waiting.map(|attempt| (other, attempt)));
                }
                if !waits.is_empty() {
                    let other_attempts =
                        group_indices().filter_map(|other| attempts[other].as_ref());
                    in_flight.score_together(waits, completed_attempts(other_attempts));
                }
            }
        }
        if stop.is_stopped() {
            return Ok(None);
        }
        let attempts: Vec<Attempt> = attempts.into_iter().flatten().collect();
        self.record_failed_attempts(&attempts).await?;
        Ok(Some(attempts))
    }

    /// Generates one attempt, without its score. `trains` states whether the attempt is for
    /// training. When the future ends, the store still lists the attempt as running.
    ///
    /// A failed try is recorded as superseded, and repeated as often as the recipe allows. A lost
    /// try is recorded as abandoned, and repeated with the same random stream.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown agent or was withdrawn. The future returns an
    /// error if the store cannot be written.
    pub(crate) fn generate_attempt(
        &self,
        slot: &AttemptSlot,
        task: &Task,
        params: SamplingParams,
        trains: bool,
    ) -> Result<
        impl Future<Output = Result<GeneratedAttempt, StoreError>> + Send + 'static,
        TrainerError,
    > {
        let task = &task_of_session(slot, task);
        reject_withdrawn_task(&self.withdrawn, &task.id, &task.persons())?;
        let agent = self.agents.agent_for(task)?;
        let retries = agent.keys.retries;
        let tries = SlotTries {
            slot: *slot,
            retries,
            needs_tokens: true,
            agent_loop: match self.sessions.session_to_copy(slot, task) {
                Some(taken) => Arc::new(taken),
                None => agent.agent_loop.clone(),
            },
            context: AttemptContext {
                name: String::new(),
                task: task.clone(),
                messages: agent.keys.initial_messages(task),
                agent: agent.agent.name.clone(),
                roster: self.agents.roster.clone(),
                limits: agent.agent.limits,
                teacher: self.agents.teacher.clone(),
                seed: self.seed,
                stream: 0,
                group_stream: group_random_stream(slot),
                is_evaluation: slot.purpose == Purpose::Eval,
                params,
                has_own_sampling: trains,
            },
        };
        let (scorers, store) = (self.scorers.clone(), self.store.clone());
        Ok(async move {
            let (attempt, failed) = tries.run(&*store).await?;
            let broke = attempt.outcome.finish == Finish::Failed;
            let attempt = if broke { scorers.mark_broken(attempt) } else { attempt };
            Ok(GeneratedAttempt { attempt, may_retry: failed < retries })
        })
    }

    /// Prepares a recorded attempt that has no score yet for scoring.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown agent, or if the store cannot be read.
    pub(crate) async fn prepare_for_scoring(
        &self,
        attempt: Attempt,
        task: &Task,
    ) -> Result<GeneratedAttempt, TrainerError> {
        let retries = self.agents.agent_for(task)?.keys.retries;
        let TryCounts { failed, .. } = self.store.count_tries(&attempt.slot).await?;
        Ok(GeneratedAttempt { attempt, may_retry: failed < retries })
    }

    /// Returns the superseded tries that preceded these attempts in their slots.
    ///
    /// # Errors
    /// Returns an error if the store cannot be read.
    pub async fn earlier_tries(&self, attempts: &[Attempt]) -> Result<Vec<Attempt>, StoreError> {
        let mut found = Vec::new();
        for attempt in attempts {
            for number in 0..attempt.number {
                let id = AttemptId::new(self.store.run(), &attempt.slot, number);
                let earlier = self.store.attempt(&id).await?;
                found.extend(earlier.filter(|attempt| attempt.status == Status::Superseded));
            }
        }
        Ok(found)
    }

    /// Records the end of `attempt` if it is completed, and otherwise does nothing.
    /// [`AttemptMaker::record_failed_attempts`] records failed attempts.
    pub(crate) async fn record_completed(&self, attempt: &Attempt) -> Result<(), TrainerError> {
        if attempt.status == Status::Completed {
            self.store.end_attempt(&attempt.id, &attempt.end()).await?;
            self.tracer.attempt_ended(attempt);
            crash_point("attempt_recorded");
        }
        Ok(())
    }

    /// Records the ends of the failed attempts among `attempts`.
    ///
    /// If all attempts failed, the cause lies outside the run (for example, the sampler is
    /// unreachable), and a resumed run must repeat the attempts. They are then recorded as
    /// abandoned, so that `inspect` can list them with their errors.
    ///
    /// # Errors
    /// Returns [`TrainerError::AllFailed`] if every attempt failed, and an error if the store
    /// cannot be written.
    pub(crate) async fn record_failed_attempts(
        &self,
        attempts: &[Attempt],
    ) -> Result<(), TrainerError> {
        let broken = || attempts.iter().filter(|attempt| attempt.status == Status::Failed);
        if let Some(first) = attempts.first().filter(|_| broken().count() == attempts.len()) {
            let first =
                first.outcome.error.as_deref().unwrap_or("no reason was recorded").to_owned();
            for attempt in attempts {
                // An attempt that waits for its score is scored by the resumed run, and not
                // repeated.
                if self.store.last_try(&attempt.slot).await?.is_none() {
                    let end = AttemptEnd { status: Status::Abandoned, ..attempt.end() };
                    self.store.end_attempt(&attempt.id, &end).await?;
                }
            }
            return Err(TrainerError::AllFailed { count: attempts.len(), first });
        }
        for attempt in broken() {
            self.store.end_attempt(&attempt.id, &attempt.end()).await?;
            self.tracer.attempt_ended(attempt);
        }
        Ok(())
    }
}

/// Executes the tries of one attempt slot, until a try succeeds or no retry is left.
pub(crate) struct SlotTries {
    pub slot: AttemptSlot,
    /// Maximum number of retries after failed tries.
    pub retries: u32,
    /// Whether a try without sampled tokens counts as failed.
    pub needs_tokens: bool,
    pub agent_loop: Arc<dyn AgentLoop>,
    /// Input of every try. Each try replaces the name and the random stream.
    pub context: AttemptContext,
}

impl SlotTries {
    /// Executes tries until a try does not fail or no retry is left. Returns the last try, without
    /// a score and still recorded as running, and the number of failed tries before it. A failed
    /// try is recorded as superseded, and a lost try as abandoned.
    pub async fn run(self, store: &dyn Store) -> Result<(Attempt, u32), StoreError> {
        let SlotTries { slot, retries, needs_tokens, agent_loop, context } = self;
        let TryCounts { next: mut number, mut failed } = store.count_tries(&slot).await?;
        let mut lost = 0;
        loop {
            let id = AttemptId::new(store.run(), &slot, number);
            let start = AttemptStart { id, slot, number, task: json!(context.task) };
            store.start_attempt(&start).await?;
            let input = AttemptContext {
                name: if number == 0 { slot.to_string() } else { format!("{slot}, try {number}") },
                // A try after a failed try gets a separate random stream, because the sampled
                // tokens may have caused the failure of the tool.
                stream: try_random_stream(&slot, failed),
                ..context.clone()
            };
            let timer = IntervalTimer::start();
            let mut made = run_guarded(&agent_loop, input).await;
            made.outcome.timings.add(TimedPart::Attempt, timer.interval());
            store.append_segments(&id, made.trajectory.segments()).await?;
            let levade_agent::Attempt { trajectory, outcome, is_lost } = made;
            let is_lost = is_lost && lost < MAX_LOST_TRIES;
            let status = Status::Unscored;
            let attempt = Attempt { status, outcome, trajectory, ..Attempt::from_start(&start) };
            let Outcome { finish, sampled_tokens, .. } = attempt.outcome;
            let is_unusable = finish == Finish::Failed || needs_tokens && sampled_tokens == 0;
            let status = if is_lost {
                lost += 1;
                Status::Abandoned
            } else if is_unusable && failed < retries {
                failed += 1;
                Status::Superseded
            } else {
                return Ok((attempt, failed));
            };
            number += 1;
            store.end_attempt(&attempt.id, &AttemptEnd { status, ..attempt.end() }).await?;
        }
    }
}

/// Checks that a task was not withdrawn from the run, neither by its id nor by a person. `subjects`
/// are the subjects of all withdrawals, `id` is the id of the task, and `persons` are the keys of
/// the task's people.
///
/// # Errors
/// Returns [`TrainerError::WithdrawnTask`] if the task was withdrawn.
pub(crate) fn reject_withdrawn_task(
    subjects: &BTreeSet<String>,
    id: &str,
    persons: &[String],
) -> Result<(), TrainerError> {
    if subjects.contains(id) {
        return Err(TrainerError::WithdrawnTask(format!("{id:?}")));
    }
    match persons.iter().find(|key| subjects.contains(&person_subject(key))) {
        Some(key) => Err(TrainerError::WithdrawnTask(format!("{id:?} of the person {key:?}"))),
        None => Ok(()),
    }
}

/// Runs an attempt of `agent`. If the agent loop panics, returns a failed attempt with the panic's
/// message.
async fn run_guarded(agent: &Arc<dyn AgentLoop>, context: AttemptContext) -> levade_agent::Attempt {
    let agent = agent.clone();
    let made = catch_panic(async move { agent.run(context).await }).await;
    made.unwrap_or_else(|panic| levade_agent::Attempt::failed("attempt", panic))
}

/// Scorers that are or were unavailable. Each scorer is reported to the user once.
#[derive(Debug, Default)]
pub(crate) struct ScorerOutage {
    known: BTreeSet<String>,
    unreported: Vec<String>,
}

impl ScorerOutage {
    /// Notes that the scorer of this failure is unavailable.
    pub fn add(&mut self, ScoringFailure { scorer, why, .. }: &ScoringFailure) {
        if self.known.insert(scorer.clone()) {
            self.unreported
                .push(format!("attempts wait for the scorer {scorer} and are kept: {why}"));
        }
    }

    /// Reports unavailable scorers to `observer` that have not been reported yet.
    pub fn report(&mut self, observer: &mut dyn Observer) {
        self.unreported.drain(..).for_each(|note| observer.event(&Event::Note(note)));
    }
}

/// Failures of components around the model, by source. Each source has its number of failures and
/// the message of its first failure.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AttemptWarnings(BTreeMap<String, (u64, String)>);

impl AttemptWarnings {
    /// Counts the warnings of `attempts`. Returns a message for each source that had no warning
    /// before.
    pub fn add(&mut self, attempts: &[Attempt]) -> Vec<String> {
        let mut new = Vec::new();
        for attempt in attempts {
            for AttemptWarning { source, message: why } in &attempt.outcome.warnings {
                let (count, _) = self.0.entry(source.clone()).or_insert_with(|| {
                    new.push(format!("{source}: {why} (in {})", attempt.slot));
                    (0, why.clone())
                });
                *count += 1;
            }
        }
        new
    }

    /// Returns each source with its number of failures and the message of its first failure.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64, &str)> {
        self.0.iter().map(|(source, (count, first))| (source.as_str(), *count, first.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn task_of_withdrawn_person_is_rejected_by_name() {
        let subjects = BTreeSet::from(["sums-1".to_owned(), person_subject("alice")]);
        let check = |id: &str, persons: &[&str]| {
            let persons: Vec<String> = persons.iter().map(|key| (*key).to_owned()).collect();
            reject_withdrawn_task(&subjects, id, &persons).map_err(|error| error.to_string())
        };
        assert_eq!(check("sums-2", &["bob"]), Ok(()));
        assert_eq!(check("alice", &[]), Ok(()), "the id of a task is no key");
        let error = check("sums-1", &[]).unwrap_err();
        assert!(error.starts_with("the task \"sums-1\" was withdrawn"), "{error}");
        let error = check("sums-2", &["bob", "alice"]).unwrap_err();
        let want = "the task \"sums-2\" of the person \"alice\" was withdrawn";
        assert!(error.starts_with(want), "{error}");
    }
}
