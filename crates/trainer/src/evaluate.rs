//! Evaluations: greedy decoding on held-out tasks, scored on the final answer alone.

use dressage_agent::Finish;
use dressage_rl::{Interval, wilson};
use dressage_store::{Attempt, AttemptKey, EvalKey, Purpose};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::TrainerError;
use crate::metrics::Metrics;
use crate::observe::{Observer, StopFlag};
use crate::rollout::{Rollouts, outcome_of};
use crate::tasks::EvalSlice;

/// The result of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalResult {
    /// The phase, from 0.
    pub phase: u32,
    /// Steps of the phase done before.
    pub step: u32,
    /// When it was, in words: `before training`, `after sft`, …
    pub label: String,
    /// Over all slices that are not reported apart.
    pub overall: SliceResult,
    /// Every slice by itself.
    pub slices: Vec<SliceResult>,
}

/// How some tasks went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SliceResult {
    /// What they are called.
    pub name: String,
    /// Whether they are reported apart from the overall result.
    pub apart: bool,
    /// How many there are.
    pub tasks: u64,
    /// How many were answered rightly (a score of 1).
    pub correct: u64,
    /// Share of right answers with its 95 % interval (Wilson).
    pub success: Interval,
    /// Share of attempts that ended with an answer, right or wrong.
    pub answered: f64,
    /// Share of attempts in which a tool answered a call.
    pub used_tool: f64,
    /// Sampled tokens, on average.
    pub sampled_tokens: f64,
}

impl SliceResult {
    fn new(name: &str, apart: bool, attempts: &[&Attempt]) -> Result<Self, TrainerError> {
        let tasks = attempts.len() as u64;
        let correct = attempts.iter().filter(|attempt| attempt.score == Some(1.0)).count() as u64;
        let outcomes: Vec<_> = attempts.iter().filter_map(|attempt| outcome_of(attempt)).collect();
        let share = |count: usize| count as f64 / tasks as f64;
        let sampled: usize = attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens()).sum();
        Ok(SliceResult {
            name: name.to_owned(),
            apart,
            tasks,
            correct,
            success: wilson(correct, tasks)?,
            answered: share(outcomes.iter().filter(|o| o.finish == Finish::Answered).count()),
            used_tool: share(outcomes.iter().filter(|o| o.calls.ok > 0).count()),
            sampled_tokens: sampled as f64 / tasks as f64,
        })
    }
}

impl EvalResult {
    /// The line for the metrics file.
    pub(crate) fn to_json(&self, global_step: u32) -> Value {
        let mut metrics = Metrics::default();
        metrics.add("training/global_step", f64::from(global_step));
        for (slice, name) in std::iter::once((&self.overall, "eval".to_owned()))
            .chain(self.slices.iter().map(|slice| (slice, format!("eval/{}", slice.name))))
        {
            metrics.add(format!("{name}/success"), slice.success.estimate);
            metrics.add(format!("{name}/success/low"), slice.success.low);
            metrics.add(format!("{name}/success/high"), slice.success.high);
            metrics.add(format!("{name}/answered"), slice.answered);
            metrics.add(format!("{name}/used_tool"), slice.used_tool);
            metrics.add(format!("{name}/response_length/mean"), slice.sampled_tokens);
        }
        let head = json!({"phase": self.phase, "step": self.step, "eval": self.label});
        metrics.to_json(match head {
            Value::Object(head) => head,
            _ => Map::new(),
        })
    }
}

/// Evaluates the policy as it is published. `None` when stopped.
///
/// # Errors
/// When there are no tasks, recording fails, or not one attempt came to its end.
pub async fn evaluate(
    rollouts: &Rollouts,
    slices: &[EvalSlice],
    key: EvalKey,
    label: &str,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<Option<EvalResult>, TrainerError> {
    let tasks = slices.iter().flat_map(|slice| &slice.tasks);
    let wanted: Vec<_> = tasks
        .enumerate()
        .map(|(group, task)| {
            let EvalKey { phase, step } = key;
            let group = group as u32;
            (AttemptKey { purpose: Purpose::Eval, phase, step, group, sample: 0 }, task.clone())
        })
        .collect();
    let Some(attempts) = rollouts.run(&wanted, 0.0, observer, stop).await? else { return Ok(None) };

    let mut rest = attempts.iter();
    let mut results = Vec::with_capacity(slices.len());
    let mut counted: Vec<&Attempt> = Vec::new();
    for slice in slices {
        let mine: Vec<&Attempt> = rest.by_ref().take(slice.tasks.len()).collect();
        results.push(SliceResult::new(&slice.name, slice.apart, &mine)?);
        if !slice.apart {
            counted.extend(mine);
        }
    }
    let overall = SliceResult::new("overall", false, &counted)?;
    Ok(Some(EvalResult {
        phase: key.phase,
        step: key.step,
        label: label.to_owned(),
        overall,
        slices: results,
    }))
}
