//! Evaluations: greedy decoding on held-out tasks, scored on the final answer alone.

use dressage_agent::Finish;
use dressage_rl::{Interval, Paired, paired_difference, wilson};
use dressage_store::{Attempt, AttemptKey, EvalKey, Purpose, Store};
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

/// How much more of the same tasks one evaluation solved than another.
#[derive(Debug, Clone, PartialEq)]
pub struct Gain {
    /// The earlier one.
    pub from: String,
    /// The later one.
    pub to: String,
    /// Difference of the shares of right answers, with its 95 % interval by the bootstrap over tasks; slices that are
    /// reported apart do not count.
    pub difference: Interval,
}

/// Resamples of the bootstrap.
const RESAMPLES: u32 = 10_000;

impl Gain {
    /// From each of `evals`, which had the same tasks, to the next.
    ///
    /// # Errors
    /// When their attempts cannot be read.
    pub(crate) fn between(evals: &[&EvalResult], store: &Store) -> Result<Vec<Gain>, TrainerError> {
        let attempts = store.summaries(Purpose::Eval)?;
        let correct = |eval: &EvalResult| -> Vec<f64> {
            let mine = attempts.iter().filter(|a| (a.key.phase, a.key.step) == (eval.phase, eval.step));
            let counted = eval.slices.iter().flat_map(|slice| (0..slice.tasks).map(|_| !slice.apart));
            let right = mine.map(|a| f64::from(u8::from(a.score == Some(1.0))));
            right.zip(counted).filter_map(|(right, counted)| counted.then_some(right)).collect()
        };
        let mut gains = Vec::new();
        for pair in evals.windows(2) {
            let (before, after) = (correct(pair[0]), correct(pair[1]));
            let pairs: Vec<Paired> = (0..)
                .zip(before.iter().zip(&after))
                .map(|(cluster, (&before, &after))| Paired { cluster, before, after })
                .collect();
            let difference = paired_difference(&pairs, RESAMPLES, 0)?;
            gains.push(Gain { from: pair[0].label.clone(), to: pair[1].label.clone(), difference });
        }
        Ok(gains)
    }
}

/// Before training, and after each phase: the evaluations that a summary compares.
pub fn milestones(evals: &[EvalResult]) -> Vec<&EvalResult> {
    let mut picked: Vec<&EvalResult> = evals.iter().take(1).collect();
    for (i, eval) in evals.iter().enumerate().skip(1) {
        // The last evaluation of a phase is the one after it.
        if evals.get(i + 1).is_none_or(|next| next.phase != eval.phase) {
            picked.push(eval);
        }
    }
    picked
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

#[cfg(test)]
mod tests {
    use dressage_store::Status;
    use dressage_tree::Trajectory;
    use serde_json::json;

    use super::*;

    fn slice(name: &str, apart: bool, tasks: u64) -> Value {
        let success = json!({"estimate": 0.5, "low": 0.0, "high": 1.0});
        json!({
            "name": name, "apart": apart, "tasks": tasks, "correct": 0, "success": success, "answered": 1.0, "used_tool": 1.0,
            "sampled_tokens": 1.0,
        })
    }

    /// Six tasks count, three are apart and lie between them.
    fn eval(phase: u32, step: u32, label: &str) -> EvalResult {
        let slices = [slice("a", false, 4), slice("b", true, 3), slice("c", false, 2)];
        let value = json!({
            "phase": phase, "step": step, "label": label, "overall": slice("overall", false, 6), "slices": slices,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn milestones_are_the_ends_of_phases() {
        let evals =
            [eval(0, 0, "before"), eval(0, 3, "x"), eval(0, 6, "sft"), eval(1, 3, "y"), eval(1, 5, "grpo")];
        let labels: Vec<&str> = milestones(&evals).iter().map(|eval| eval.label.as_str()).collect();
        assert_eq!(labels, ["before", "sft", "grpo"]);
        assert_eq!(milestones(&[]).len(), 0);
    }

    #[test]
    fn a_gain_counts_the_tasks_that_count() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("run.db")).unwrap();
        let (before, after) = (eval(0, 0, "before"), eval(1, 7, "after"));
        // Scores by task; those of the slice apart would double the gain.
        let scores = [(&before, "100100010"), (&after, "111010011")];
        for (eval, scores) in scores {
            let attempts = scores.bytes().zip(0..).map(|(score, group)| Attempt {
                key: AttemptKey {
                    purpose: Purpose::Eval,
                    phase: eval.phase,
                    step: eval.step,
                    group,
                    sample: 0,
                },
                task: json!({}),
                outcome: json!({}),
                score: Some(f64::from(score - b'0')),
                reward: None,
                status: Status::Completed,
                trajectory: Trajectory::default(),
            });
            store.record_attempts(&attempts.collect::<Vec<_>>()).unwrap();
        }
        let gains = Gain::between(&[&before, &after], &store).unwrap();
        let [gain] = &gains[..] else { panic!("{gains:?}") };
        assert_eq!((gain.from.as_str(), gain.to.as_str()), ("before", "after"));
        // a: 1001 → 1110, c: 10 → 11.
        assert!((gain.difference.estimate - 2.0 / 6.0).abs() < 1e-12, "{gain:?}");
        assert!(
            gain.difference.low < gain.difference.estimate && gain.difference.estimate < gain.difference.high
        );
        assert_eq!(Gain::between(&[&before], &store).unwrap(), []);
    }
}
