//! Evaluates attempts at held-out tasks: success rates, mean scores and metrics over k attempts, by
//! slice.
//!
//! [`evaluate`](crate::evaluate()) makes the attempts. An [`EvalResult`] is recorded, reported and
//! compared.

use std::collections::{BTreeMap, BTreeSet};

use levade_rl::{
    Interval, expected_best_score, expected_majority_score, mean_score, wilson_interval,
};
use levade_store::{Attempt, Status};
use levade_tree::Outcome;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::TrainerError;
use crate::metrics::Metrics;

/// The result of one evaluation: success rates and scores, overall and by slice of the tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvalResult {
    /// Index of the phase in which the evaluation was made, from 0.
    pub phase: u32,
    /// Number of finished steps of the phase at the evaluation.
    pub step: u32,
    /// Label of the evaluation, such as `before training` or `after sft`.
    pub label: String,
    /// Result over all slices that are not reported separately.
    pub overall: TaskSliceResult,
    /// Result of each slice.
    pub slices: Vec<TaskSliceResult>,
    /// Example completion without a successful tool call. `None` if agents had no tools, or if a
    /// tool call of the evaluation succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncalled: Option<UncalledTools>,
}

/// An example completion of an evaluation in which no tool call succeeded, although agents had
/// tools.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UncalledTools {
    /// Name of the attempt's slot, as `levade inspect` prints it.
    pub attempt: String,
    /// Full text of the attempt's first completion.
    #[serde(rename = "reply")]
    pub completion: String,
    /// Reason why no tool call was parsed from the completion, or why the call failed.
    #[serde(rename = "why")]
    pub reason: String,
}

/// Evaluation results over the tasks of one slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskSliceResult {
    /// Name of the slice, as in the metrics.
    pub name: String,
    /// Whether the slice is excluded from the overall result.
    #[serde(rename = "apart")]
    pub is_separate: bool,
    /// Whether the slice's tasks serve only to select the best checkpoint.
    #[serde(default, skip_serializing_if = "is_false")]
    pub selects: bool,
    /// Number of tasks in the slice.
    pub tasks: u64,
    /// Number of attempts with a correct answer (a score of 1).
    pub correct: u64,
    /// Success rate with its 95 % interval: Wilson's for one attempt per task, or the bootstrap
    /// over tasks for several.
    pub success: Interval,
    /// Mean score with its 95 % bootstrap interval over tasks. `None` if every score is 0 or 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<Interval>,
    /// Fraction of attempts that ended with an answer, correct or not.
    pub answered: f64,
    /// Fraction of attempts with at least one successful tool call.
    pub used_tool: f64,
    /// Mean number of sampled tokens per attempt.
    pub sampled_tokens: f64,
    /// Number of attempts that failed outside the model, for example in a tool or a scorer. They
    /// count as incorrect.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[serde(rename = "broken")]
    pub failed: u64,
    /// Metrics over k attempts per task, such as pass@k, by increasing k. Empty if there is one
    /// attempt per task.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at: Vec<MetricsAtK>,
    /// Mean of each game metric with its 95 % bootstrap interval over tasks, by metric name, such
    /// as `role.wolf.won`. Empty if the tasks are not games.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub game: BTreeMap<String, Interval>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// The metrics pass@k, best@k and maj@k of one k. Each is an expectation over the choice of k
/// attempts per task, with a bootstrap interval over tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsAtK {
    /// Number k of attempts that are chosen per task.
    pub k: usize,
    /// pass@k: fraction of tasks that are solved by at least one of k attempts.
    pub pass: Interval,
    /// best@k: mean score of the best of k attempts.
    pub best: Interval,
    /// maj@k: mean score of the most frequent answer of k attempts.
    pub majority: Interval,
}

/// Number of bootstrap resamples.
pub(crate) const NUM_RESAMPLES: u32 = 10_000;

/// Prefix of the metrics of a game, by which they are found among the tool metrics of an attempt.
const GAME: &str = "game/";

/// Number of random subsets of k attempts by which maj@k is estimated.
const MAJORITY_SAMPLES: u32 = 200;

/// Returns the mean of one value per task, with its bootstrap interval over tasks.
fn mean_over_tasks(values: impl Iterator<Item = f64>) -> Result<Interval, TrainerError> {
    Ok(mean_score(&values.collect::<Vec<_>>(), NUM_RESAMPLES, 0)?)
}

/// Returns the mean over tasks of each game metric, by metric name. Attempts without the metric,
/// such as failed matches, do not count.
fn game_metrics(tasks: &[&[&Attempt]]) -> Result<BTreeMap<String, Interval>, TrainerError> {
    let all = tasks.iter().copied().flatten().flat_map(|a| a.outcome.tool_metrics.keys());
    let names: BTreeSet<&String> = all.filter(|name| name.starts_with(GAME)).collect();
    let mut means = BTreeMap::new();
    for name in names {
        let of_tasks = tasks.iter().filter_map(|attempts| {
            let values: Vec<f64> = attempts
                .iter()
                .filter_map(|attempt| attempt.outcome.tool_metrics.get(name).copied())
                .collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        });
        means.insert(name[GAME.len()..].to_owned(), mean_over_tasks(of_tasks)?);
    }
    Ok(means)
}

/// Returns the values of k for which metrics over k attempts are computed: 2, 4, 8, … below
/// `max_attempts`, then `max_attempts`. Returns no values if `max_attempts` is at most 1.
fn k_values(max_attempts: usize) -> Vec<usize> {
    let mut all: Vec<usize> =
        std::iter::successors(Some(2), |k| Some(2 * k)).take_while(|k| *k < max_attempts).collect();
    all.extend((max_attempts > 1).then_some(max_attempts));
    all
}

/// Returns the scores of attempts. An attempt without a score failed outside the model, and counts
/// as 0.
fn scores(attempts: &[&Attempt]) -> Vec<f64> {
    attempts.iter().map(|attempt| attempt.score.unwrap_or(0.0)).collect()
}

/// Returns whether the attempt's answer is correct: its score is 1. The tolerance allows for
/// weights whose sum is slightly below 1.
pub(crate) fn is_correct(attempt: &Attempt) -> bool {
    attempt.score.is_some_and(|score| score >= 1.0 - 1e-9)
}

/// Returns the answer of an attempt: the text that the scorer extracted, or else the complete final
/// text. Returns `None` if the attempt did not end with an answer.
fn final_answer(attempt: &Attempt) -> Option<String> {
    let outcome = Some(&attempt.outcome).filter(|outcome| outcome.finish.is_complete())?;
    Some(outcome.extracted.clone().unwrap_or_else(|| outcome.final_text.trim().to_owned()))
}

impl MetricsAtK {
    fn new(k: usize, tasks: &[&[&Attempt]]) -> Result<Self, TrainerError> {
        let pass = tasks.iter().map(|attempts| {
            let flags = attempts.iter().map(|attempt| f64::from(u8::from(is_correct(attempt))));
            expected_best_score(&flags.collect::<Vec<_>>(), k)
        });
        let best = tasks.iter().map(|attempts| expected_best_score(&scores(attempts), k));
        let majority = (0..).zip(tasks).map(|(seed, attempts)| {
            let answers: Vec<Option<String>> =
                attempts.iter().map(|attempt| final_answer(attempt)).collect();
            let answers: Vec<Option<&str>> = answers.iter().map(Option::as_deref).collect();
            expected_majority_score(&answers, &scores(attempts), k, MAJORITY_SAMPLES, seed)
        });
        Ok(MetricsAtK {
            k,
            pass: mean_over_tasks(pass)?,
            best: mean_over_tasks(best)?,
            majority: mean_over_tasks(majority)?,
        })
    }
}

impl TaskSliceResult {
    /// Computes the results of one slice from its attempts, which are ordered by task, with
    /// `samples` attempts per task.
    pub(crate) fn new(
        name: &str,
        is_separate: bool,
        attempts: &[&Attempt],
        samples: usize,
    ) -> Result<Self, TrainerError> {
        let by_task: Vec<&[&Attempt]> = attempts.chunks(samples).collect();
        let count_correct =
            |attempts: &[&Attempt]| attempts.iter().filter(|attempt| is_correct(attempt)).count();
        let correct = count_correct(attempts) as u64;
        let outcomes: Vec<&Outcome> = attempts.iter().map(|attempt| &attempt.outcome).collect();
        let fraction = |count: usize| count as f64 / attempts.len() as f64;
        let graded = scores(attempts).iter().any(|score| *score != 0.0 && *score != 1.0);
        let mean =
            |attempts: &[&Attempt]| scores(attempts).iter().sum::<f64>() / attempts.len() as f64;
        let sampled: usize =
            attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens()).sum();
        Ok(TaskSliceResult {
            name: name.to_owned(),
            is_separate,
            selects: false,
            tasks: by_task.len() as u64,
            correct,
            success: if samples == 1 {
                wilson_interval(correct, attempts.len() as u64)?
            } else {
                mean_over_tasks(
                    by_task
                        .iter()
                        .map(|attempts| count_correct(attempts) as f64 / attempts.len() as f64),
                )?
            },
            score: if graded {
                Some(mean_over_tasks(by_task.iter().map(|attempts| mean(attempts)))?)
            } else {
                None
            },
            at: k_values(samples)
                .into_iter()
                .map(|k| MetricsAtK::new(k, &by_task))
                .collect::<Result<_, _>>()?,
            answered: fraction(outcomes.iter().filter(|o| o.finish.is_complete()).count()),
            used_tool: fraction(outcomes.iter().filter(|o| o.calls.ok > 0).count()),
            sampled_tokens: sampled as f64 / attempts.len() as f64,
            game: game_metrics(&by_task)?,
            failed: attempts.iter().filter(|attempt| attempt.status == Status::Failed).count()
                as u64,
        })
    }

    /// Returns the number of attempts over all tasks of the slice.
    pub fn attempts(&self) -> u64 {
        self.tasks * self.at.last().map_or(1, |max_attempts| max_attempts.k as u64)
    }

    /// Returns the mean score, which is the success rate if every score is 0 or 1.
    pub fn mean_score(&self) -> Interval {
        self.score.unwrap_or(self.success)
    }
}

impl EvalResult {
    /// Returns the mean score on the selection tasks, by which the best checkpoint is selected.
    pub fn selection(&self) -> f64 {
        self.selection_mean(TaskSliceResult::mean_score)
    }

    /// Returns the success rate on the selection tasks, by which a phase can stop early. The
    /// reported tasks therefore do not influence training.
    pub fn selection_success(&self) -> f64 {
        self.selection_mean(|slice| slice.success)
    }

    /// Returns the mean of `interval_of` over the tasks that only select the checkpoint
    /// (`eval.select`), or over all tasks of the overall result if there are no selection tasks.
    fn selection_mean(&self, interval_of: impl Fn(&TaskSliceResult) -> Interval) -> f64 {
        let choosing = || self.slices.iter().filter(|slice| slice.selects);
        let tasks: u64 = choosing().map(|slice| slice.tasks).sum();
        if tasks == 0 {
            return interval_of(&self.overall).estimate;
        }
        let sum: f64 =
            choosing().map(|slice| interval_of(slice).estimate * slice.tasks as f64).sum();
        sum / tasks as f64
    }

    /// Returns the evaluation's line for the metrics file, with its phase, step and label.
    pub(crate) fn to_json(&self, global_step: u32) -> Value {
        let head = json!({"phase": self.phase, "step": self.step, "eval": self.label});
        self.metrics(global_step).to_json(match head {
            Value::Object(head) => head,
            _ => Map::new(),
        })
    }

    /// Returns the numeric metrics of the evaluation, by metric name.
    pub(crate) fn metrics(&self, global_step: u32) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.add("training/global_step", f64::from(global_step));
        for (slice, name) in std::iter::once((&self.overall, "eval".to_owned()))
            .chain(self.slices.iter().map(|slice| (slice, format!("eval/{}", slice.name))))
        {
            // Some sinks store each metric in a file, so the name of a metric must not be a
            // directory in the name of another.
            let mut add = |what: &str, interval: Interval| {
                metrics.add(format!("{name}/{what}"), interval.estimate);
                metrics.add(format!("{name}/{what}_low"), interval.low);
                metrics.add(format!("{name}/{what}_high"), interval.high);
            };
            add("success", slice.success);
            add("score", slice.mean_score());
            for at in &slice.at {
                for (what, interval) in [("pass", at.pass), ("best", at.best), ("maj", at.majority)]
                {
                    add(&format!("{what}@{}", at.k), interval);
                }
            }
            for (what, interval) in &slice.game {
                add(&format!("game/{what}"), *interval);
            }
            metrics.add(format!("{name}/answered"), slice.answered);
            metrics.add(format!("{name}/used_tool"), slice.used_tool);
            metrics.add(format!("{name}/response_length/mean"), slice.sampled_tokens);
            metrics.add(format!("{name}/broken"), slice.failed as f64);
        }
        metrics
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use levade_tree::{AttemptId, AttemptSlot, Finish, Purpose, RunId, Trajectory};

    use super::*;

    /// Creates an attempt without any turns, in the given slot.
    pub(crate) fn blank(slot: AttemptSlot) -> Attempt {
        Attempt {
            id: AttemptId::new(&RunId("r".into()), &slot, 0),
            slot,
            number: 0,
            task: json!({}),
            outcome: Outcome::initial(),
            score: None,
            reward: None,
            step_rewards: Vec::new(),
            status: Status::Completed,
            trajectory: Trajectory::default(),
        }
    }

    fn slice(name: &str, is_separate: bool, tasks: u64) -> Value {
        let success = json!({"estimate": 0.5, "low": 0.0, "high": 1.0});
        json!({
            "name": name, "apart": is_separate, "tasks": tasks, "correct": 0, "success": success, "answered": 1.0, "used_tool": 1.0,
            "sampled_tokens": 1.0,
        })
    }

    /// Creates the result of an evaluation in which six tasks count. Three further tasks, in the
    /// middle, are reported separately.
    pub(crate) fn eval(phase: u32, step: u32, label: &str) -> EvalResult {
        let slices = [slice("a", false, 4), slice("b", true, 3), slice("c", false, 2)];
        let value = json!({
            "phase": phase, "step": step, "label": label, "overall": slice("overall", false, 6), "slices": slices,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn slice_result_covers_several_attempts_per_task() {
        assert!(k_values(1).is_empty());
        assert_eq!(k_values(2), [2]);
        assert_eq!(k_values(6), [2, 4, 6]);
        // The scorer extracts the number from the surrounding text.
        let attempt = |group: u32, sample: u32, answers: &str, score: f64| Attempt {
            score: Some(score),
            outcome: Outcome {
                extracted: Some(answers.into()),
                ..Outcome::demonstrated(format!("{group}{sample}: {answers}"))
            },
            ..blank(AttemptSlot { purpose: Purpose::Eval, phase: 0, step: 0, group, sample })
        };
        let all = [
            attempt(0, 0, "7", 1.0),
            attempt(0, 1, "8", 0.0),
            attempt(0, 2, "7", 1.0),
            attempt(0, 3, "9", 0.0),
            attempt(1, 0, "1", 0.0),
            attempt(1, 1, "1", 0.0),
            attempt(1, 2, "2", 1.0),
            attempt(1, 3, "1", 0.0),
        ];
        let result = TaskSliceResult::new("x", false, &all.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!((result.tasks, result.correct, result.success.estimate), (2, 3, 0.375));
        let [two, four] = &result.at[..] else { panic!("{:?}", result.at) };
        assert_eq!((two.k, four.k), (2, 4));
        // 1 − 1/6 of the first task's pairs, 3 of 6 of the second's.
        assert!((two.pass.estimate - (5.0 / 6.0 + 0.5) / 2.0).abs() < 1e-12, "{two:?}");
        assert_eq!((four.pass.estimate, four.majority.estimate), (1.0, 0.5));
        assert_eq!((result.score, result.mean_score()), (None, result.success));

        // The interval stays wide if all attempts at two tasks fail, and if all of them succeed.
        let with_score =
            |score| all.clone().map(|attempt| Attempt { score: Some(score), ..attempt });
        let slice_with_score = |score| {
            TaskSliceResult::new("x", false, &with_score(score).iter().collect::<Vec<_>>(), 4)
                .unwrap()
        };
        let wrong = slice_with_score(0.0);
        let all_correct = slice_with_score(1.0);
        let unsure = wilson_interval(0, 2).unwrap().high;
        assert_eq!(
            (wrong.success.estimate, wrong.success.low, all_correct.success.high),
            (0.0, 0.0, 1.0)
        );
        for high in
            [wrong.success, wrong.at[1].pass, wrong.at[1].majority].map(|interval| interval.high)
        {
            assert!((high - unsure).abs() < 1e-12, "{high} {unsure}");
        }
        assert!((all_correct.success.low - (1.0 - unsure)).abs() < 1e-12, "{all_correct:?}");

        // A match that failed has no metrics.
        let mut matches = all.clone();
        for (index, won) in [(0, 1.0), (1, 0.0), (2, 0.0), (4, 1.0)] {
            let metrics = &mut matches[index].outcome.tool_metrics;
            metrics.insert("game/role.wolf.won".into(), won);
            metrics.insert("calculator/calls".into(), 3.0);
        }
        let played =
            TaskSliceResult::new("x", false, &matches.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!(played.game.keys().collect::<Vec<_>>(), ["role.wolf.won"]);
        let won = played.game["role.wolf.won"];
        // A third of the matches at one task, and the only one at the other.
        assert!((won.estimate - 2.0 / 3.0).abs() < 1e-12 && won.low < won.estimate, "{won:?}");
        let metrics = EvalResult { overall: played, ..eval(0, 0, "x") }.metrics(0);
        assert_eq!(metrics.get("eval/game/role.wolf.won_low"), Some(won.low));

        let mut graded = all;
        graded[1].score = Some(0.5);
        // A truncated attempt has no answer, so it does not vote.
        graded[4].outcome.finish = Finish::MaxTokens;
        let result =
            TaskSliceResult::new("x", false, &graded.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!((result.correct, result.mean_score().estimate), (3, 3.5 / 8.0));
        let metrics = EvalResult { overall: result, ..eval(0, 0, "x") }.metrics(0);
        assert_eq!(metrics.get("eval/score"), Some(3.5 / 8.0));
        let dirs: Vec<String> = metrics.iter().map(|(name, _)| format!("{name}/")).collect();
        let nested = |name: &str| dirs.iter().find(|dir| name.starts_with(dir.as_str())).cloned();
        assert_eq!(
            metrics.iter().find_map(|(name, _)| nested(name)),
            None,
            "a metric name is a prefix of another"
        );
    }
}
