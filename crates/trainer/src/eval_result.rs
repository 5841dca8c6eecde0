//! Measures attempts at held-out tasks: success rates, mean scores and worth of k attempts, by slice.
//!
//! [`evaluate`](crate::evaluate()) makes the attempts; an [`EvalResult`] is recorded, reported and compared.

use levade_rl::{Interval, best_of, majority_of, mean_score, wilson};
use levade_store::{Attempt, Status};
use levade_tree::Outcome;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::TrainerError;
use crate::metrics::Metrics;

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
    /// A reply, where there were tools and not one answered a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncalled: Option<Uncalled>,
}

/// A first reply after which no tool answered a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uncalled {
    /// The attempt, as `levade inspect` names it.
    pub attempt: String,
    /// The whole reply.
    pub reply: String,
    /// Why no call was read in it, or what became of it.
    pub why: String,
}

/// How some tasks went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SliceResult {
    /// Name of the tasks.
    pub name: String,
    /// Whether they are reported apart from the overall result.
    pub apart: bool,
    /// Whether they choose the best checkpoint, and do nothing else.
    #[serde(default, skip_serializing_if = "is_false")]
    pub selects: bool,
    /// How many there are.
    pub tasks: u64,
    /// How many attempts were answered rightly (a score of 1).
    pub correct: u64,
    /// Share of right answers with its 95 % interval: Wilson's, or by the bootstrap over tasks where there
    /// are several attempts at each.
    pub success: Interval,
    /// Mean score with its 95 % interval by the bootstrap over tasks, where there are scores between 0 and 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<Interval>,
    /// Share of attempts that ended with an answer, right or wrong.
    pub answered: f64,
    /// Share of attempts in which a tool answered a call.
    pub used_tool: f64,
    /// Sampled tokens, on average.
    pub sampled_tokens: f64,
    /// Attempts that broke outside the model. They count as wrong.
    #[serde(default, skip_serializing_if = "is_0")]
    pub broken: u64,
    /// Worth of k attempts at a task, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at: Vec<AtK>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_0(count: &u64) -> bool {
    *count == 0
}

/// Worth of k attempts at a task, over which k of them are drawn; intervals by the bootstrap over tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AtK {
    /// How many attempts.
    pub k: usize,
    /// Share of tasks that one of them answers rightly: pass@k.
    pub pass: Interval,
    /// Mean score of the best: best@k.
    pub best: Interval,
    /// Mean score of the answer that most of them give: maj@k.
    pub majority: Interval,
}

/// Resamples of the bootstrap.
pub(crate) const RESAMPLES: u32 = 10_000;

/// Draws of k attempts for the majority's answer.
const DRAWS: u32 = 200;

/// Mean over tasks, with its interval by the bootstrap.
fn over_tasks(values: impl Iterator<Item = f64>) -> Result<Interval, TrainerError> {
    Ok(mean_score(&values.collect::<Vec<_>>(), RESAMPLES, 0)?)
}

/// 2, 4, 8, … and `most`.
fn numbers_of_attempts(most: usize) -> Vec<usize> {
    let mut all: Vec<usize> =
        std::iter::successors(Some(2), |k| Some(2 * k)).take_while(|k| *k < most).collect();
    all.extend((most > 1).then_some(most));
    all
}

/// Scores of attempts; one that broke outside the model counts 0.
fn scores(attempts: &[&Attempt]) -> Vec<f64> {
    attempts.iter().map(|attempt| attempt.score.unwrap_or(0.0)).collect()
}

/// Whether an answer is right: a score of 1. Weights whose sum is 1 may add up to a little less.
pub(crate) fn is_right(attempt: &Attempt) -> bool {
    attempt.score.is_some_and(|score| score >= 1.0 - 1e-9)
}

/// Answer of an attempt: the text that the scorer took for it, or all that was said.
fn answer(attempt: &Attempt) -> Option<String> {
    let outcome = Some(&attempt.outcome).filter(|outcome| outcome.finish.is_whole())?;
    Some(outcome.extracted.clone().unwrap_or_else(|| outcome.final_text.trim().to_owned()))
}

impl AtK {
    fn new(k: usize, tasks: &[&[&Attempt]]) -> Result<Self, TrainerError> {
        let right = |attempts: &[&Attempt]| -> Vec<f64> {
            attempts.iter().map(|a| f64::from(u8::from(is_right(a)))).collect()
        };
        let majority = |(seed, attempts): (u64, &[&Attempt])| {
            let said: Vec<Option<String>> = attempts.iter().map(|attempt| answer(attempt)).collect();
            let said: Vec<Option<&str>> = said.iter().map(Option::as_deref).collect();
            majority_of(&said, &scores(attempts), k, DRAWS, seed)
        };
        Ok(AtK {
            k,
            pass: over_tasks(tasks.iter().map(|attempts| best_of(&right(attempts), k)))?,
            best: over_tasks(tasks.iter().map(|attempts| best_of(&scores(attempts), k)))?,
            majority: over_tasks((0..).zip(tasks.iter().copied()).map(majority))?,
        })
    }
}

impl SliceResult {
    /// Measures the attempts at some tasks, `samples` at each, one task after the other.
    pub(crate) fn new(
        name: &str,
        apart: bool,
        attempts: &[&Attempt],
        samples: usize,
    ) -> Result<Self, TrainerError> {
        let by_task: Vec<&[&Attempt]> = attempts.chunks(samples).collect();
        let right = |attempts: &[&Attempt]| attempts.iter().filter(|attempt| is_right(attempt)).count();
        let correct = right(attempts) as u64;
        let outcomes: Vec<&Outcome> = attempts.iter().map(|attempt| &attempt.outcome).collect();
        let share = |count: usize| count as f64 / attempts.len() as f64;
        let graded = scores(attempts).iter().any(|score| *score != 0.0 && *score != 1.0);
        let mean = |attempts: &[&Attempt]| scores(attempts).iter().sum::<f64>() / attempts.len() as f64;
        let sampled: usize = attempts.iter().map(|attempt| attempt.trajectory.sampled_tokens()).sum();
        Ok(SliceResult {
            name: name.to_owned(),
            apart,
            selects: false,
            tasks: by_task.len() as u64,
            correct,
            success: if samples == 1 {
                wilson(correct, attempts.len() as u64)?
            } else {
                over_tasks(by_task.iter().map(|attempts| right(attempts) as f64 / attempts.len() as f64))?
            },
            score: if graded {
                Some(over_tasks(by_task.iter().map(|attempts| mean(attempts)))?)
            } else {
                None
            },
            at: numbers_of_attempts(samples)
                .into_iter()
                .map(|k| AtK::new(k, &by_task))
                .collect::<Result<_, _>>()?,
            answered: share(outcomes.iter().filter(|o| o.finish.is_whole()).count()),
            used_tool: share(outcomes.iter().filter(|o| o.calls.ok > 0).count()),
            sampled_tokens: sampled as f64 / attempts.len() as f64,
            broken: attempts.iter().filter(|attempt| attempt.status == Status::Failed).count() as u64,
        })
    }

    /// How many attempts there were, at all tasks.
    pub fn attempts(&self) -> u64 {
        self.tasks * self.at.last().map_or(1, |most| most.k as u64)
    }

    /// Mean score: the share of right answers, where an answer is right or wrong.
    pub fn mean_score(&self) -> Interval {
        self.score.unwrap_or(self.success)
    }
}

impl EvalResult {
    /// Mean score of the tasks that checkpoints are chosen by.
    pub fn selection(&self) -> f64 {
        self.of_choosing(SliceResult::mean_score)
    }

    /// Share of right answers at the tasks that choose: what ends a phase, so that the tasks that are
    /// reported decide nothing.
    pub fn chosen_success(&self) -> f64 {
        self.of_choosing(|slice| slice.success)
    }

    /// Mean over the tasks that do nothing but choose (`eval.select`), or else over all that count.
    fn of_choosing(&self, of: impl Fn(&SliceResult) -> Interval) -> f64 {
        let choosing = || self.slices.iter().filter(|slice| slice.selects);
        let tasks: u64 = choosing().map(|slice| slice.tasks).sum();
        if tasks == 0 {
            return of(&self.overall).estimate;
        }
        let sum: f64 = choosing().map(|slice| of(slice).estimate * slice.tasks as f64).sum();
        sum / tasks as f64
    }

    /// The line for the metrics file.
    pub(crate) fn to_json(&self, global_step: u32) -> Value {
        let head = json!({"phase": self.phase, "step": self.step, "eval": self.label});
        self.metrics(global_step).to_json(match head {
            Value::Object(head) => head,
            _ => Map::new(),
        })
    }

    /// The numbers alone.
    pub(crate) fn metrics(&self, global_step: u32) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.add("training/global_step", f64::from(global_step));
        for (slice, name) in std::iter::once((&self.overall, "eval".to_owned()))
            .chain(self.slices.iter().map(|slice| (slice, format!("eval/{}", slice.name))))
        {
            // No name is the folder of another: some sinks keep each in a file.
            let mut add = |what: &str, interval: Interval| {
                metrics.add(format!("{name}/{what}"), interval.estimate);
                metrics.add(format!("{name}/{what}_low"), interval.low);
                metrics.add(format!("{name}/{what}_high"), interval.high);
            };
            add("success", slice.success);
            add("score", slice.mean_score());
            for at in &slice.at {
                for (what, interval) in [("pass", at.pass), ("best", at.best), ("maj", at.majority)] {
                    add(&format!("{what}@{}", at.k), interval);
                }
            }
            metrics.add(format!("{name}/answered"), slice.answered);
            metrics.add(format!("{name}/used_tool"), slice.used_tool);
            metrics.add(format!("{name}/response_length/mean"), slice.sampled_tokens);
            metrics.add(format!("{name}/broken"), slice.broken as f64);
        }
        metrics
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use levade_tree::{AttemptId, Finish, Placement, Purpose, RunId, Trajectory};

    use super::*;

    /// An attempt at which nothing was done.
    pub(crate) fn blank(placement: Placement) -> Attempt {
        Attempt {
            id: AttemptId::new(&RunId("r".into()), &placement, 0),
            placement,
            number: 0,
            task: json!({}),
            outcome: Outcome::begun(),
            score: None,
            reward: None,
            earned: Vec::new(),
            status: Status::Completed,
            trajectory: Trajectory::default(),
        }
    }

    fn slice(name: &str, apart: bool, tasks: u64) -> Value {
        let success = json!({"estimate": 0.5, "low": 0.0, "high": 1.0});
        json!({
            "name": name, "apart": apart, "tasks": tasks, "correct": 0, "success": success, "answered": 1.0, "used_tool": 1.0,
            "sampled_tokens": 1.0,
        })
    }

    /// Six tasks count, three are apart and lie between them.
    pub(crate) fn eval(phase: u32, step: u32, label: &str) -> EvalResult {
        let slices = [slice("a", false, 4), slice("b", true, 3), slice("c", false, 2)];
        let value = json!({
            "phase": phase, "step": step, "label": label, "overall": slice("overall", false, 6), "slices": slices,
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn slice_result_measures_several_attempts_at_a_task() {
        assert!(numbers_of_attempts(1).is_empty());
        assert_eq!(numbers_of_attempts(2), [2]);
        assert_eq!(numbers_of_attempts(6), [2, 4, 6]);
        // The scorer finds the number, whatever is said around it.
        let attempt = |group: u32, sample: u32, said: &str, score: f64| Attempt {
            score: Some(score),
            outcome: Outcome {
                extracted: Some(said.into()),
                ..Outcome::demonstrated(format!("{group}{sample}: {said}"))
            },
            ..blank(Placement { purpose: Purpose::Eval, phase: 0, step: 0, group, sample })
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
        let result = SliceResult::new("x", false, &all.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!((result.tasks, result.correct, result.success.estimate), (2, 3, 0.375));
        let [two, four] = &result.at[..] else { panic!("{:?}", result.at) };
        assert_eq!((two.k, four.k), (2, 4));
        // 1 − 1/6 of the first task's pairs, 3 of 6 of the second's.
        assert!((two.pass.estimate - (5.0 / 6.0 + 0.5) / 2.0).abs() < 1e-12, "{two:?}");
        assert_eq!((four.pass.estimate, four.majority.estimate), (1.0, 0.5));
        assert_eq!((result.score, result.mean_score()), (None, result.success));

        // Nothing but failures at two tasks is not certainty, and nothing but successes is not either.
        let with = |score| all.clone().map(|attempt| Attempt { score: Some(score), ..attempt });
        let of = |score| SliceResult::new("x", false, &with(score).iter().collect::<Vec<_>>(), 4).unwrap();
        let (wrong, right) = (of(0.0), of(1.0));
        let unsure = wilson(0, 2).unwrap().high;
        assert_eq!((wrong.success.estimate, wrong.success.low, right.success.high), (0.0, 0.0, 1.0));
        for high in [wrong.success, wrong.at[1].pass, wrong.at[1].majority].map(|interval| interval.high) {
            assert!((high - unsure).abs() < 1e-12, "{high} {unsure}");
        }
        assert!((right.success.low - (1.0 - unsure)).abs() < 1e-12, "{right:?}");

        let mut graded = all;
        graded[1].score = Some(0.5);
        // An attempt that was cut says nothing, and does not vote.
        graded[4].outcome.finish = Finish::MaxTokens;
        let result = SliceResult::new("x", false, &graded.iter().collect::<Vec<_>>(), 4).unwrap();
        assert_eq!((result.correct, result.mean_score().estimate), (3, 3.5 / 8.0));
        let metrics = EvalResult { overall: result, ..eval(0, 0, "x") }.metrics(0);
        assert_eq!(metrics.get("eval/score"), Some(3.5 / 8.0));
        let folders: Vec<String> = metrics.iter().map(|(name, _)| format!("{name}/")).collect();
        let nested = |name: &str| folders.iter().find(|folder| name.starts_with(folder.as_str())).cloned();
        assert_eq!(
            metrics.iter().find_map(|(name, _)| nested(name)),
            None,
            "a name is the folder of another"
        );
    }
}
