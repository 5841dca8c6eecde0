//! The best checkpoint of a run.
//!
//! The evaluation that selects the best checkpoint overestimates it, because the luckiest of
//! several equally good checkpoints is selected. So [`BestCheckpoint`] records how the checkpoint
//! was selected.

use std::path::PathBuf;

use levade_rl::Interval;

use crate::eval_result::EvalResult;

/// The checkpoint with the best evaluation result on the selection tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct BestCheckpoint {
    /// Directory of the checkpoint.
    pub checkpoint: PathBuf,
    /// Label of the checkpoint's evaluation, such as `grpo, step 20`.
    pub label: String,
    /// Number of checkpoints among which the best one was selected.
    pub candidates: usize,
    /// Success rate of the checkpoint on the reported tasks.
    pub success: Interval,
    /// Whether the checkpoint was selected on separate tasks (`eval.select`). If false, `success`
    /// is the success rate on the selection tasks themselves, and is biased upwards.
    pub uses_selection_tasks: bool,
}

/// Returns the evaluation with the highest mean score on the selection tasks. If several
/// evaluations are equal, returns the first of them.
pub(crate) fn find_best_eval(evals: &[EvalResult]) -> Option<&EvalResult> {
    evals.iter().reduce(|best, eval| if eval.selection() > best.selection() { eval } else { best })
}

impl BestCheckpoint {
    /// Returns the best evaluation among `evals`. `checkpoint` is the directory of its weights.
    /// Returns `None` if fewer than two checkpoints were evaluated, or if the evaluation before
    /// training is the best.
    pub(crate) fn select(evals: &[EvalResult], checkpoint: Option<PathBuf>) -> Option<Self> {
        let best = find_best_eval(evals)?;
        let is_trained = |eval: &&EvalResult| eval.phase > 0 || eval.step > 0;
        let candidates = evals.iter().filter(is_trained).count();
        let checkpoint = checkpoint.filter(|_| is_trained(&best) && candidates > 1)?;
        let label = best.label.clone();
        let success = best.overall.success;
        let uses_selection_tasks = best.slices.iter().any(|slice| slice.selects);
        Some(BestCheckpoint { checkpoint, label, candidates, success, uses_selection_tasks })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns an evaluation with ten reported tasks, and optionally tasks for selection.
    fn eval_result(step: u32, correct: u64, chosen: Option<(u64, u64)>) -> EvalResult {
        let slice = |name: &str, selects: bool, correct: u64, tasks: u64| -> Value {
            let estimate = correct as f64 / tasks as f64;
            json!({
                "name": name, "apart": selects, "selects": selects, "tasks": tasks, "correct": correct,
                "success": {"estimate": estimate, "low": 0.0, "high": 1.0},
                "answered": 1.0, "used_tool": 1.0, "sampled_tokens": 1.0,
            })
        };
        let choosing = chosen.map(|(correct, tasks)| slice("x-choosing", true, correct, tasks));
        let slices: Vec<Value> =
            choosing.into_iter().chain([slice("x", false, correct, 10)]).collect();
        let value = json!({
            "phase": 0, "step": step, "label": format!("step {step}"), "overall": slice("overall", false, correct, 10),
            "slices": slices,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn selection_success_prefers_selection_tasks() {
        assert_eq!(eval_result(1, 4, None).selection_success(), 0.4);
        assert_eq!(eval_result(1, 9, Some((1, 4))).selection_success(), 0.25);
        assert_eq!(eval_result(1, 4, Some((4, 4))).selection_success(), 1.0);
    }

    #[test]
    fn best_checkpoint_reports_selection() {
        let checkpoint_dir = || Some(PathBuf::from("step-000002"));
        let evals = [
            eval_result(0, 1, None),
            eval_result(1, 4, None),
            eval_result(2, 7, None),
            eval_result(3, 7, None),
        ];
        let best = BestCheckpoint::select(&evals, checkpoint_dir()).unwrap();
        assert_eq!(
            (
                best.label.as_str(),
                best.candidates,
                best.success.estimate,
                best.uses_selection_tasks
            ),
            ("step 2", 3, 0.7, false)
        );
        // The selection tasks can select another checkpoint than the remaining tasks would. The
        // reported success is the success on the remaining tasks.
        let evals = [eval_result(1, 4, Some((4, 4))), eval_result(2, 7, Some((3, 4)))];
        let best = BestCheckpoint::select(&evals, checkpoint_dir()).unwrap();
        assert_eq!(
            (
                best.label.as_str(),
                best.candidates,
                best.success.estimate,
                best.uses_selection_tasks
            ),
            ("step 1", 2, 0.4, true)
        );
        assert_eq!(BestCheckpoint::select(&evals[..1], checkpoint_dir()), None, "one is no choice");
        assert_eq!(BestCheckpoint::select(&evals, None), None);
        let fell = [eval_result(0, 9, None), eval_result(1, 4, None), eval_result(2, 7, None)];
        assert_eq!(
            BestCheckpoint::select(&fell, checkpoint_dir()),
            None,
            "training made it worse, and the model it began with is no checkpoint"
        );
    }
}
