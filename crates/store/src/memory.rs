//! A store in the memory of the process, for tests and for runs whose data need not be kept.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId, Segment, SegmentId};

use crate::error::{Code, Failure};
use crate::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, EvalKey, FailedAttempt, Status, StepPlan,
    Store, StoreError, TryCounts, WithdrawRequest, Withdrawal, WriteOutcome, erase_quotes,
};
use crate::{checks, withdrawal};

/// Location of an in-memory store in error messages.
const LOCATION: &str = "memory";

/// A store in memory. All data is lost when the last handle is dropped or the process exits.
///
/// It has the same guarantees as the durable backends, except durability. It keeps every attempt
/// with all its tokens, so memory use grows with the run. Calls complete at once and never time
/// out.
#[derive(Debug)]
pub struct Memory {
    run: RunId,
    contents: Mutex<MemoryContents>,
}

#[derive(Debug, Default)]
struct MemoryContents {
    attempts: BTreeMap<AttemptId, Attempt>,
    /// Ids of the attempts, keyed by attempt slot and index of the try.
    tries: BTreeMap<(AttemptSlot, u32), AttemptId>,
    steps: BTreeMap<(u32, u32), StepPlan>,
    evals: BTreeMap<EvalKey, serde_json::Value>,
    withdrawals: Vec<Withdrawal>,
}

impl Memory {
    /// Creates an empty store for the run with the id `run`.
    pub fn new(run: RunId) -> Self {
        Memory { run, contents: Mutex::default() }
    }

    /// Runs `work` on the contents under the lock. `work` only compares and copies values, so the
    /// lock is held for a short time.
    fn with_locked_contents<T>(
        &self,
        action: &'static str,
        key: impl ToString,
        work: impl FnOnce(&mut MemoryContents) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        // Every write checks its input before it changes anything, so a panic leaves the data
        // consistent.
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut contents).map_err(|failure| failure.into_error(LOCATION, action, key.to_string()))
    }
}

impl MemoryContents {
    fn insert(&mut self, attempt: Attempt) {
        self.tries.insert((attempt.slot, attempt.number), attempt.id);
        self.attempts.insert(attempt.id, attempt);
    }

    fn attempt_mut(&mut self, id: &AttemptId) -> Result<&mut Attempt, Failure> {
        self.attempts.get_mut(id).ok_or(Failure::Unknown)
    }

    /// Iterates over the tries of an attempt slot, in ascending order of their index.
    fn tries_in_slot(&self, slot: &AttemptSlot) -> impl DoubleEndedIterator<Item = &Attempt> {
        self.tries.range((*slot, 0)..=(*slot, u32::MAX)).filter_map(|(_, id)| self.attempts.get(id))
    }
}

/// Serializes an evaluation result as JSON text.
fn to_json_text(result: &serde_json::Value) -> String {
    result.to_string()
}

/// Replaces −0 by 0, as SQLite does when it stores a number.
fn normalize_zero(number: Option<f64>) -> Option<f64> {
    number.map(|number| number + 0.0)
}

#[async_trait]
impl Store for Memory {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn location(&self) -> &str {
        LOCATION
    }

    async fn start_attempt(&self, start: &AttemptStart) -> Result<WriteOutcome, StoreError> {
        self.with_locked_contents("record", start.slot, |contents| {
            checks::check_attempt_id(&self.run, &start.id, &start.slot, start.number)?;
            match contents.attempts.get(&start.id) {
                Some(stored) => checks::check_restart(stored, start),
                None => {
                    contents.insert(Attempt::from_start(start));
                    Ok(WriteOutcome::Written)
                }
            }
        })
    }

    async fn append_segments(
        &self,
        id: &AttemptId,
        segments: &[Segment],
    ) -> Result<WriteOutcome, StoreError> {
        self.with_locked_contents("record", format_args!("attempt {id}"), |contents| {
            let attempt = contents.attempt_mut(id)?;
            let stored = attempt.trajectory.segments();
            let at = |id: SegmentId| stored.get(id.0 as usize);
            let new = checks::select_new_segments(
                attempt,
                stored.len() as u32,
                segments,
                |id| Ok(at(id).cloned()),
                |id| Ok(at(id).map_or(0, |segment| segment.tokens.len())),
            )?;
            let recorded =
                if new.is_empty() { WriteOutcome::AlreadyRecorded } else { WriteOutcome::Written };
            for segment in new {
                let pushed = attempt.trajectory.push(segment);
                pushed.map_err(|error| Failure::Backend(Code::Internal, error.into()))?;
            }
            Ok(recorded)
        })
    }

    async fn end_attempt(
        &self,
        id: &AttemptId,
        end: &AttemptEnd,
    ) -> Result<WriteOutcome, StoreError> {
        self.with_locked_contents("record", format_args!("attempt {id}"), |contents| {
            checks::check_end_values(end)?;
            let attempt = contents.attempt_mut(id)?;
            if checks::check_end(attempt, end)? == WriteOutcome::AlreadyRecorded {
                return Ok(WriteOutcome::AlreadyRecorded);
            }
            let AttemptEnd { outcome, score, reward, step_rewards, status } = end.clone();
            (attempt.outcome, attempt.step_rewards, attempt.status) =
                (outcome, step_rewards, status);
            (attempt.score, attempt.reward) = (normalize_zero(score), normalize_zero(reward));
            Ok(WriteOutcome::Written)
        })
    }

    async fn abandon_running(&self) -> Result<u64, StoreError> {
        self.with_locked_contents("record", "running attempts", |contents| {
            let mut abandoned = 0;
            for attempt in
                contents.attempts.values_mut().filter(|attempt| attempt.status == Status::Running)
            {
                attempt.status = Status::Abandoned;
                abandoned += 1;
            }
            Ok(abandoned)
        })
    }

    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<WriteOutcome, StoreError> {
        let key = match attempts {
            [one] => one.slot.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.with_locked_contents("record", key, |contents| {
            let mut new: BTreeMap<AttemptId, &Attempt> = BTreeMap::new();
            for attempt in attempts {
                checks::check_attempt(&self.run, attempt)?;
                let stored =
                    contents.attempts.get(&attempt.id).or_else(|| new.get(&attempt.id).copied());
                match stored.map(|stored| checks::find_attempt_difference(stored, attempt)) {
                    None => drop(new.insert(attempt.id, attempt)),
                    Some(None) => {}
                    Some(Some(field)) => {
                        return Err(Failure::Conflict(attempt.slot.to_string(), field));
                    }
                }
            }
            let recorded =
                if new.is_empty() { WriteOutcome::AlreadyRecorded } else { WriteOutcome::Written };
            for attempt in new.into_values() {
                let score = normalize_zero(attempt.score);
                let reward = normalize_zero(attempt.reward);
                contents.insert(Attempt { score, reward, ..attempt.clone() });
            }
            Ok(recorded)
        })
    }

    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        self.with_locked_contents("read", format_args!("attempt {id}"), |contents| {
            Ok(contents.attempts.get(id).cloned())
        })
    }

    async fn last_try(&self, slot: &AttemptSlot) -> Result<Option<Attempt>, StoreError> {
        self.with_locked_contents("read", slot, |contents| {
            Ok(contents.tries_in_slot(slot).rfind(|attempt| attempt.status.can_count()).cloned())
        })
    }

    async fn count_tries(&self, slot: &AttemptSlot) -> Result<TryCounts, StoreError> {
        self.with_locked_contents("read", slot, |contents| {
            let next = contents.tries_in_slot(slot).next_back().map_or(0, |last| last.number + 1);
            let failed = contents
                .tries_in_slot(slot)
                .filter(|attempt| attempt.status.needs_another_stream())
                .count();
            Ok(TryCounts { next, failed: failed as u32 })
        })
    }

    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError> {
        self.with_locked_contents(
            "read",
            format_args!("tasks for {}", purpose.name()),
            |contents| {
                let matching =
                    contents.attempts.values().filter(|attempt| attempt.slot.purpose == purpose);
                let matching = matching.filter(|attempt| !attempt.task.is_null());
                let distinct: BTreeMap<String, serde_json::Value> = matching
                    .map(|attempt| (attempt.task.to_string(), attempt.task.clone()))
                    .collect();
                Ok(distinct.into_values().collect())
            },
        )
    }

    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        self.with_locked_contents(
            "read",
            format_args!("attempts for {}", purpose.name()),
            |contents| {
                let mut found: BTreeMap<AttemptSlot, AttemptSummary> = BTreeMap::new();
                for ((slot, number), id) in &contents.tries {
                    let Some(attempt) = contents.attempts.get(id) else { continue };
                    if slot.purpose == purpose && attempt.status.can_count() {
                        let segments = attempt.trajectory.segments();
                        let summary = AttemptSummary {
                            id: *id,
                            slot: *slot,
                            number: *number,
                            score: attempt.score,
                            reward: attempt.reward,
                            status: attempt.status,
                            sampled_tokens: attempt.trajectory.sampled_tokens() as u64,
                            tokens: segments
                                .iter()
                                .map(|segment| segment.tokens.len() as u64)
                                .sum(),
                        };
                        // Tries are iterated in order, so the last one that counts replaces the
                        // earlier ones.
                        found.insert(*slot, summary);
                    }
                }
                Ok(found.into_values().collect())
            },
        )
    }

    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError> {
        self.with_locked_contents(
            "read",
            format_args!("failures for {}", purpose.name()),
            |contents| {
                let tries = contents.tries.iter().filter(|((slot, _), _)| slot.purpose == purpose);
                let attempts = tries.filter_map(|(_, id)| contents.attempts.get(id));
                Ok(attempts
                    .filter(|attempt| attempt.is_failure())
                    .map(FailedAttempt::from)
                    .collect())
            },
        )
    }

    async fn record_step(&self, plan: &StepPlan) -> Result<WriteOutcome, StoreError> {
        let key = format!("plan of phase {}/step {}", plan.phase, plan.step);
        self.with_locked_contents("record", key.clone(), |contents| {
            checks::check_plan(plan)?;
            match contents.steps.get(&(plan.phase, plan.step)) {
                Some(stored) if checks::are_plans_equal(stored, plan) => {
                    Ok(WriteOutcome::AlreadyRecorded)
                }
                Some(_) => Err(Failure::Conflict(key, "plan")),
                None => {
                    contents.steps.insert((plan.phase, plan.step), plan.clone());
                    Ok(WriteOutcome::Written)
                }
            }
        })
    }

    async fn step_plan(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        let key = format_args!("plan of phase {phase}/step {step}");
        self.with_locked_contents("read", key, |contents| {
            Ok(contents.steps.get(&(phase, step)).cloned())
        })
    }

    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.with_locked_contents("read", "the planned steps", |contents| {
            Ok(contents.steps.keys().copied().collect())
        })
    }

    async fn record_eval(
        &self,
        key: EvalKey,
        result: &serde_json::Value,
    ) -> Result<WriteOutcome, StoreError> {
        self.with_locked_contents("record", key, |contents| match contents.evals.get(&key) {
            // Compared as text, as in SQLite: two numbers are equal if their text is equal.
            Some(stored) if to_json_text(stored) == to_json_text(result) => {
                Ok(WriteOutcome::AlreadyRecorded)
            }
            Some(_) => Err(Failure::Conflict(key.to_string(), "result")),
            None => {
                contents.evals.insert(key, result.clone());
                Ok(WriteOutcome::Written)
            }
        })
    }

    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.with_locked_contents("read", "evaluations", |contents| {
            Ok(contents.evals.iter().map(|(key, result)| (*key, result.clone())).collect())
        })
    }

    async fn withdraw(&self, request: &WithdrawRequest) -> Result<Vec<Withdrawal>, StoreError> {
        self.with_locked_contents("record", "a withdrawal", |contents| {
            let MemoryContents { attempts, tries, evals, withdrawals, .. } = contents;
            if let Some(id) = request.attempts.iter().find(|id| !attempts.contains_key(id)) {
                return Err(withdrawal::unknown_attempt_error(id));
            }
            let mut added = Vec::new();
            for id in tries.values() {
                let Some(attempt) = attempts.get_mut(id).filter(|a| request.selects(a)) else {
                    continue;
                };
                let earlier: Vec<Withdrawal> =
                    withdrawals.iter().filter(|earlier| earlier.id == *id).cloned().collect();
                let Some(tombstone) = request.tombstone(attempt, &earlier) else { continue };
                attempt.status = Status::Withdrawn;
                if request.erase {
                    withdrawal::erase_attempt(attempt);
                }
                added.push(tombstone);
            }
            withdrawals.extend(added.iter().cloned());
            if request.erase {
                let names = added.iter().map(|tombstone| tombstone.slot.name()).collect();
                for result in evals.values_mut() {
                    erase_quotes(result, &names);
                }
            }
            Ok(added)
        })
    }

    async fn withdrawals(&self) -> Result<Vec<Withdrawal>, StoreError> {
        self.with_locked_contents("read", "withdrawals", |contents| {
            Ok(contents.withdrawals.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    crate::store_contract!(memory, async || ((), Arc::new(Memory::new(RunId("test".into())))));
}
