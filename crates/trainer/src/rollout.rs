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
use levade_store::{Attempt, AttemptStart, End, Status, Store, StoreError, Tries, person_subject};
use levade_tasks::Task;
use levade_tree::{AttemptId, AttemptSlot, AttemptWarning, Finish, Outcome, Purpose, TimedPart};
use serde_json::json;

use crate::TrainerError;
use crate::agents::Agents;
use crate::in_flight::{AttemptEvent, GeneratedAttempt, InFlight, completed_attempts};
use crate::observe::{Event, Observer, StopFlag};
use crate::panics::catch_panic;
use crate::random::{group_stream, try_stream};
use crate::scoring::{Scorers, ScoringFailure};
use crate::sessions::{SessionRecords, own_task};
use crate::tracer::Tracer;

/// Maximum number of lost tries of an attempt slot in this process. Another loss counts as a
/// failure: the attempt itself may end the processes that make it.
const MAX_LOST_TRIES: u32 = 8;

/// Generates attempts and records them.
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
    /// Receives every attempt that counts when it has ended.
    pub tracer: Tracer,
    /// Records of sessions, from which the attempts of session tasks are copied.
    pub sessions: SessionRecords,
    /// Subjects of withdrawals from the run: ids of tasks, and people by their key
    /// ([`person_subject`]). No further attempt at their tasks is made.
    pub withdrawn: Arc<BTreeSet<String>>,
}

impl AttemptMaker {
    /// Makes one attempt for each slot, at the task of the same index, and returns the attempts in
    /// this order. The attempts are not for training. Attempts that are already recorded are not
    /// repeated. Returns `None` if the run is stopped; the attempts that were recorded until then
    /// stay.
    ///
    /// # Errors
    /// Returns an error if recording fails, if a task names an unknown agent, or if every attempt
    /// failed.
    pub async fn run(
        &self,
        wanted: &[(AttemptSlot, Task)],
        params: &SamplingParams,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Option<Vec<Attempt>>, TrainerError> {
        let mut attempts: Vec<Option<Attempt>> = Vec::with_capacity(wanted.len());
        let mut in_flight = InFlight::new(self.scorers.clone(), self.store.clone());
        for (index, (slot, task)) in wanted.iter().enumerate() {
            let recorded = self.store.last_try(slot).await?;
            attempts.push(match recorded {
                Some(attempt) if attempt.status == Status::Unscored => {
                    in_flight.score(index, self.unscored(attempt, task).await?);
                    None
                }
                recorded => recorded,
            });
        }
        let mut done = attempts.iter().flatten().count();
        let mut waiting: VecDeque<usize> = (0..wanted.len())
            .filter(|index| attempts[*index].is_none() && !in_flight.has(index))
            .collect();
        let mut scorer_outage = ScorerOutage::default();
        let compares = self.scorers.group_scorers().next().is_some();
        loop {
            while in_flight.num_generating() < self.concurrency
                && !stop.is_stopped()
                && let Some(index) = waiting.pop_front()
            {
                let (slot, task) = &wanted[index];
                in_flight.generate(index, self.attempt(slot, task, params.clone(), false)?);
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
                self.record(&attempt).await?;
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

    /// Generates one attempt, for training if `trains`. The attempt is not scored yet, and its
    /// record is still running. A failed try is recorded as superseded and repeated, as often as
    /// the recipe allows. A lost try is recorded as abandoned and repeated with the same random
    /// stream.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown agent. The future returns an error if
    /// recording fails.
    pub(crate) fn attempt(
        &self,
        slot: &AttemptSlot,
        task: &Task,
        params: SamplingParams,
        trains: bool,
    ) -> Result<
        impl Future<Output = Result<GeneratedAttempt, StoreError>> + Send + 'static,
        TrainerError,
    > {
        let task = &own_task(slot, task);
        reject_withdrawn_task(&self.withdrawn, &task.id, &task.persons())?;
        let agent = self.agents.agent_for(task)?;
        let retries = agent.keys.retries;
        let tries = SlotTries {
            slot: *slot,
            retries,
            needs_tokens: true,
            agent_loop: match self.sessions.taken(slot, task) {
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
                group_stream: group_stream(slot),
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

    /// Prepares a recorded attempt without a score for scoring.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown agent, or if the store cannot be read.
    pub(crate) async fn unscored(
        &self,
        attempt: Attempt,
        task: &Task,
    ) -> Result<GeneratedAttempt, TrainerError> {
        let retries = self.agents.agent_for(task)?.keys.retries;
        let Tries { failed, .. } = self.store.tries(&attempt.slot).await?;
        Ok(GeneratedAttempt { attempt, may_retry: failed < retries })
    }

    /// Returns the superseded tries before these attempts.
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

    /// Records the end of an attempt unless it failed: [`AttemptMaker::record_failed_attempts`]
    /// records failed attempts.
    pub(crate) async fn record(&self, attempt: &Attempt) -> Result<(), TrainerError> {
        if attempt.status == Status::Completed {
            self.store.end(&attempt.id, &attempt.end()).await?;
            self.tracer.attempt_ended(attempt);
            crash_point("attempt_recorded");
        }
        Ok(())
    }

    /// Records the ends of the attempts that failed.
    ///
    /// If all of them failed, the cause lies outside the run (for example, the sampler is
    /// unreachable), and a resumed run must repeat them. They are then recorded as abandoned, so
    /// that `inspect` can list them with their errors.
    ///
    /// # Errors
    /// Returns [`TrainerError::AllFailed`] if every attempt failed, and an error if recording
    /// fails.
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
                    let end = End { status: Status::Abandoned, ..attempt.end() };
                    self.store.end(&attempt.id, &end).await?;
                }
            }
            return Err(TrainerError::AllFailed { count: attempts.len(), first });
        }
        for attempt in broken() {
            self.store.end(&attempt.id, &attempt.end()).await?;
            self.tracer.attempt_ended(attempt);
        }
        Ok(())
    }
}

/// The tries at one slot.
pub(crate) struct SlotTries {
    pub slot: AttemptSlot,
    /// Number of failed tries that are repeated.
    pub retries: u32,
    /// Whether a try without sampled tokens counts as failed.
    pub needs_tokens: bool,
    pub agent_loop: Arc<dyn AgentLoop>,
    /// Input of every try. Each try sets its own name and random stream.
    pub context: AttemptContext,
}

impl SlotTries {
    /// Executes tries until one does not fail or no retry is left. Returns the last try, unscored
    /// and still recorded as running, with the number of failed tries before it. A failed try is
    /// recorded as superseded, and a lost try as abandoned.
    pub async fn run(self, store: &dyn Store) -> Result<(Attempt, u32), StoreError> {
        let SlotTries { slot, retries, needs_tokens, agent_loop, context } = self;
        let Tries { next: mut number, mut failed } = store.tries(&slot).await?;
        let mut lost = 0;
        loop {
            let id = AttemptId::new(store.run(), &slot, number);
            let start = AttemptStart { id, slot, number, task: json!(context.task) };
            store.start(&start).await?;
            let input = AttemptContext {
                name: if number == 0 { slot.to_string() } else { format!("{slot}, try {number}") },
                // A try after a failed one gets a separate random stream: the sampled tokens
                // may have caused the failure of the tool.
                stream: try_stream(&slot, failed),
                ..context.clone()
            };
            let timer = IntervalTimer::start();
            let mut made = run_guarded(&agent_loop, input).await;
            made.outcome.timings.add(TimedPart::Attempt, timer.interval());
            store.append(&id, made.trajectory.segments()).await?;
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
            store.end(&attempt.id, &End { status, ..attempt.end() }).await?;
        }
    }
}

/// Returns an error if a task was withdrawn from the run, by its id or by a person. `subjects` are
/// the subjects of all withdrawals, `id` is the id of the task, and `persons` are the keys of the
/// task's people.
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

/// Runs an attempt. If it panics, returns it as a failed attempt.
async fn run_guarded(agent: &Arc<dyn AgentLoop>, context: AttemptContext) -> levade_agent::Attempt {
    let agent = agent.clone();
    let made = catch_panic(async move { agent.run(context).await }).await;
    made.unwrap_or_else(|panic| levade_agent::Attempt::failed("attempt", panic))
}

/// Unavailable scorers, each of which is reported once.
#[derive(Debug, Default)]
pub(crate) struct ScorerOutage {
    known: BTreeSet<String>,
    unreported: Vec<String>,
}

impl ScorerOutage {
    /// Records that a scorer is unavailable.
    pub fn add(&mut self, ScoringFailure { scorer, why, .. }: &ScoringFailure) {
        if self.known.insert(scorer.clone()) {
            self.unreported
                .push(format!("attempts wait for the scorer {scorer} and are kept: {why}"));
        }
    }

    /// Reports the unavailable scorers that have not been reported yet.
    pub fn report(&mut self, observer: &mut dyn Observer) {
        self.unreported.drain(..).for_each(|note| observer.event(&Event::Note(note)));
    }
}

/// Failures around the model, by source: their number, and the message of the first one.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AttemptWarnings(BTreeMap<String, (u64, String)>);

impl AttemptWarnings {
    /// Adds the warnings of `attempts`. Returns a message for each source that had no warning
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

    /// Returns each source with its number of failures and the message of the first one.
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
