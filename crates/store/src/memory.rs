//! A store in the memory of the process, for tests and for runs whose data need not be kept.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use levade_tree::{AttemptId, Placement, Purpose, RunId, Segment, SegmentId};

use crate::checks;
use crate::error::{Code, Failure};
use crate::{
    Attempt, AttemptSummary, Begun, End, EvalKey, FailedAttempt, Recorded, Status, StepPlan, Store,
    StoreError, Tries,
};

/// Location of the store in messages.
const LOCATION: &str = "memory";

/// A store in memory. All data is lost when the last handle is dropped or the process exits.
///
/// It keeps the same contract as the durable backends, and holds every attempt with all its tokens, so
/// memory use grows with the run. Calls complete at once and never time out.
#[derive(Debug)]
pub struct Memory {
    run: RunId,
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    attempts: BTreeMap<AttemptId, Attempt>,
    /// Ids of the attempts, by slot and try.
    tries: BTreeMap<(Placement, u32), AttemptId>,
    steps: BTreeMap<(u32, u32), StepPlan>,
    evals: BTreeMap<EvalKey, serde_json::Value>,
}

impl Memory {
    /// Creates an empty store for the run with the id `run`.
    pub fn new(run: RunId) -> Self {
        Memory { run, contents: Mutex::default() }
    }

    /// Runs `work` under the lock. Callers hold the lock only while they compare or copy values.
    fn with<T>(
        &self,
        action: &'static str,
        key: impl ToString,
        work: impl FnOnce(&mut Contents) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        // Every write checks its input before it changes anything, so a panic leaves the data consistent.
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut contents).map_err(|failure| failure.at(LOCATION, action, key.to_string()))
    }
}

impl Contents {
    fn insert(&mut self, attempt: Attempt) {
        self.tries.insert((attempt.placement, attempt.number), attempt.id);
        self.attempts.insert(attempt.id, attempt);
    }

    fn known(&mut self, id: &AttemptId) -> Result<&mut Attempt, Failure> {
        self.attempts.get_mut(id).ok_or(Failure::Unknown)
    }

    /// Iterates over the tries of an attempt slot, in order.
    fn at(&self, location: &Placement) -> impl DoubleEndedIterator<Item = &Attempt> {
        self.tries.range((*location, 0)..=(*location, u32::MAX)).filter_map(|(_, id)| self.attempts.get(id))
    }
}

/// Serializes an evaluation result as JSON text.
fn serialised(result: &serde_json::Value) -> String {
    result.to_string()
}

/// Replaces −0 by 0, as SQLite does.
fn plain(number: Option<f64>) -> Option<f64> {
    number.map(|number| number + 0.0)
}

#[async_trait]
impl Store for Memory {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn place(&self) -> &str {
        LOCATION
    }

    async fn begin(&self, start: &Begun) -> Result<Recorded, StoreError> {
        self.with("record", start.placement, |contents| {
            checks::name(&self.run, &start.id, &start.placement, start.number)?;
            match contents.attempts.get(&start.id) {
                Some(stored) => checks::check_restart(stored, start),
                None => {
                    contents.insert(Attempt::begun(start));
                    Ok(Recorded::Now)
                }
            }
        })
    }

    async fn append(&self, id: &AttemptId, segments: &[Segment]) -> Result<Recorded, StoreError> {
        self.with("record", format_args!("attempt {id}"), |contents| {
            let attempt = contents.known(id)?;
            let stored = attempt.trajectory.segments();
            let at = |id: SegmentId| stored.get(id.0 as usize);
            let new = checks::appended(
                attempt,
                stored.len() as u32,
                segments,
                |id| Ok(at(id).cloned()),
                |id| Ok(at(id).map_or(0, |segment| segment.tokens.len())),
            )?;
            let recorded = if new.is_empty() { Recorded::Before } else { Recorded::Now };
            for segment in new {
                let pushed = attempt.trajectory.push(segment);
                pushed.map_err(|error| Failure::Backend(Code::Internal, error.into()))?;
            }
            Ok(recorded)
        })
    }

    async fn end(&self, id: &AttemptId, end: &End) -> Result<Recorded, StoreError> {
        self.with("record", format_args!("attempt {id}"), |contents| {
            checks::end(end)?;
            let attempt = contents.known(id)?;
            if checks::ended(attempt, end)? == Recorded::Before {
                return Ok(Recorded::Before);
            }
            let End { outcome, score, reward, earned, status } = end.clone();
            (attempt.outcome, attempt.earned, attempt.status) = (outcome, earned, status);
            (attempt.score, attempt.reward) = (plain(score), plain(reward));
            Ok(Recorded::Now)
        })
    }

    async fn abandon_running(&self) -> Result<u64, StoreError> {
        self.with("record", "attempts that run", |contents| {
            let mut abandoned = 0;
            for attempt in contents.attempts.values_mut().filter(|attempt| attempt.status == Status::Running)
            {
                attempt.status = Status::Abandoned;
                abandoned += 1;
            }
            Ok(abandoned)
        })
    }

    async fn record_attempts(&self, attempts: &[Attempt]) -> Result<Recorded, StoreError> {
        let key = match attempts {
            [one] => one.placement.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.with("record", key, |contents| {
            let mut new: BTreeMap<AttemptId, &Attempt> = BTreeMap::new();
            for attempt in attempts {
                checks::attempt(&self.run, attempt)?;
                let stored = contents.attempts.get(&attempt.id).or_else(|| new.get(&attempt.id).copied());
                match stored.map(|stored| checks::difference(stored, attempt)) {
                    None => drop(new.insert(attempt.id, attempt)),
                    Some(None) => {}
                    Some(Some(field)) => {
                        return Err(Failure::Conflict(attempt.placement.to_string(), field));
                    }
                }
            }
            let recorded = if new.is_empty() { Recorded::Before } else { Recorded::Now };
            for attempt in new.into_values() {
                let (score, reward) = (plain(attempt.score), plain(attempt.reward));
                contents.insert(Attempt { score, reward, ..attempt.clone() });
            }
            Ok(recorded)
        })
    }

    async fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        self.with("read", format_args!("attempt {id}"), |contents| Ok(contents.attempts.get(id).cloned()))
    }

    async fn last_try(&self, placement: &Placement) -> Result<Option<Attempt>, StoreError> {
        self.with("read", placement, |contents| {
            Ok(contents.at(placement).rfind(|attempt| attempt.status.counts()).cloned())
        })
    }

    async fn tries(&self, placement: &Placement) -> Result<Tries, StoreError> {
        self.with("read", placement, |contents| {
            let next = contents.at(placement).next_back().map_or(0, |last| last.number + 1);
            let failed =
                contents.at(placement).filter(|attempt| attempt.status == Status::Superseded).count();
            Ok(Tries { next, failed: failed as u32 })
        })
    }

    async fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError> {
        self.with("read", format_args!("tasks for {}", purpose.name()), |contents| {
            let of = contents.attempts.values().filter(|attempt| attempt.placement.purpose == purpose);
            let each: BTreeMap<String, serde_json::Value> =
                of.map(|attempt| (attempt.task.to_string(), attempt.task.clone())).collect();
            Ok(each.into_values().collect())
        })
    }

    async fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        self.with("read", format_args!("attempts for {}", purpose.name()), |contents| {
            let mut found: BTreeMap<Placement, AttemptSummary> = BTreeMap::new();
            for ((placement, number), id) in &contents.tries {
                let Some(attempt) = contents.attempts.get(id) else { continue };
                if placement.purpose == purpose && attempt.status.counts() {
                    let segments = attempt.trajectory.segments();
                    let summary = AttemptSummary {
                        id: *id,
                        placement: *placement,
                        number: *number,
                        score: attempt.score,
                        reward: attempt.reward,
                        status: attempt.status,
                        sampled_tokens: attempt.trajectory.sampled_tokens() as u64,
                        tokens: segments.iter().map(|segment| segment.tokens.len() as u64).sum(),
                    };
                    // Tries are iterated in order, so the last one that counts replaces the earlier ones.
                    found.insert(*placement, summary);
                }
            }
            Ok(found.into_values().collect())
        })
    }

    async fn failures(&self, purpose: Purpose) -> Result<Vec<FailedAttempt>, StoreError> {
        self.with("read", format_args!("failures for {}", purpose.name()), |contents| {
            let tries = contents.tries.iter().filter(|((placement, _), _)| placement.purpose == purpose);
            let attempts = tries.filter_map(|(_, id)| contents.attempts.get(id));
            Ok(attempts.filter(|attempt| attempt.is_failure()).map(FailedAttempt::from).collect())
        })
    }

    async fn record_step(&self, plan: &StepPlan) -> Result<Recorded, StoreError> {
        let key = format!("plan of phase {}/step {}", plan.phase, plan.step);
        self.with("record", key.clone(), |contents| {
            checks::plan(plan)?;
            match contents.steps.get(&(plan.phase, plan.step)) {
                Some(stored) if checks::same_plan(stored, plan) => Ok(Recorded::Before),
                Some(_) => Err(Failure::Conflict(key, "plan")),
                None => {
                    contents.steps.insert((plan.phase, plan.step), plan.clone());
                    Ok(Recorded::Now)
                }
            }
        })
    }

    async fn step(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        let key = format_args!("plan of phase {phase}/step {step}");
        self.with("read", key, |contents| Ok(contents.steps.get(&(phase, step)).cloned()))
    }

    async fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.with("read", "the ledger", |contents| Ok(contents.steps.keys().copied().collect()))
    }

    async fn record_eval(&self, key: EvalKey, result: &serde_json::Value) -> Result<Recorded, StoreError> {
        self.with("record", key, |contents| match contents.evals.get(&key) {
            // Compared as text, as in SQLite: two numbers are equal if their text is equal.
            Some(stored) if serialised(stored) == serialised(result) => Ok(Recorded::Before),
            Some(_) => Err(Failure::Conflict(key.to_string(), "result")),
            None => {
                contents.evals.insert(key, result.clone());
                Ok(Recorded::Now)
            }
        })
    }

    async fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.with("read", "evaluations", |contents| {
            Ok(contents.evals.iter().map(|(key, result)| (*key, result.clone())).collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    crate::store_contract!(memory, async || ((), Arc::new(Memory::new(RunId("test".into())))));
}
