//! A scorer of the user's in Python: a function as verl's `custom_reward_function` has it.
//!
//! `compute_score(data_source, solution_str, ground_truth, extra_info=None)` is called with these names. It
//! returns a number, or a dict with `score` whose other numbers are components; it may be `async`. It runs in
//! processes that stay alive, one call at a time in each; one that does not answer in time is ended, with all
//! that it has started, and the next call gets another.

mod workers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dressage_policy::awake::within;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::scorer::task_field;
use crate::{Component, Evidence, ScoreError, Scorer, Supervisor};
use workers::Workers;

/// Calls a function of the user's for each attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonKeys {
    /// The file, told from the recipe's folder.
    pub file: PathBuf,
    /// Name of the function.
    #[serde(default = "compute_score")]
    pub function: String,
    /// Keyword arguments that it gets besides the usual four.
    #[serde(default)]
    pub arguments: Map<String, Value>,
    /// Text that it gets as `solution_str`.
    #[serde(default)]
    pub solution: Solution,
    /// The interpreter.
    #[serde(default = "python3")]
    pub python: String,
    /// Processes at most.
    #[serde(default = "two")]
    pub workers: usize,
    /// Longest wait for a call, in seconds,
    #[serde(default = "minute")]
    pub seconds: f64,
    /// and for the file to load.
    #[serde(default = "minute")]
    pub start_seconds: f64,
    /// Names of environment variables that the processes get besides the usual ones.
    #[serde(default)]
    pub environment: Vec<String>,
}

/// Text of an attempt that is looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Solution {
    /// The final answer, without thoughts.
    #[default]
    Answer,
    /// The final reply, with its thoughts between `<think>` and `</think>`.
    Whole,
}

impl Solution {
    /// The text of an attempt; empty unless it ended with an answer.
    pub(crate) fn of(self, evidence: &Evidence) -> String {
        match self {
            Solution::Answer => evidence.text().to_owned(),
            Solution::Whole => evidence.whole(),
        }
    }
}

fn compute_score() -> String {
    "compute_score".into()
}

fn python3() -> String {
    "python3".into()
}

fn two() -> usize {
    2
}

fn minute() -> f64 {
    60.0
}

/// Most processes.
const WORKERS: usize = 256;

impl PythonKeys {
    /// A function `compute_score` in a file.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        PythonKeys {
            file: file.into(),
            function: compute_score(),
            arguments: Map::new(),
            solution: Solution::default(),
            python: python3(),
            workers: two(),
            seconds: minute(),
            start_seconds: minute(),
            environment: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let refuse = |what: String| Err(ScoreError::Unusable(what));
        if self.file.as_os_str().is_empty() {
            return refuse("file is empty: name the file of the scoring function".into());
        }
        for (name, seconds) in [("seconds", self.seconds), ("start_seconds", self.start_seconds)] {
            if !(seconds > 0.0 && seconds <= 1e9) {
                return refuse(format!("{name} = {seconds}, but it must be in 0..=1e9, not 0"));
            }
        }
        if !(1..=WORKERS).contains(&self.workers) {
            return refuse(format!("workers = {}, but it must be in 1..={WORKERS}", self.workers));
        }
        let usual = ["data_source", "solution_str", "ground_truth", "extra_info"];
        match self.arguments.keys().find(|name| usual.contains(&name.as_str())) {
            Some(name) => refuse(format!("arguments.{name} is one of the usual four: leave it out")),
            None => Ok(()),
        }
    }
}

/// The expected answer as verl hands it over: where it was taken from within `reward_model.ground_truth`, as
/// Search-R1's `target` is, all of that.
fn ground_truth(evidence: &Evidence) -> &Value {
    let expected = evidence.expected();
    let whole = task_field(&evidence.task, "reward_model").and_then(|model| model.get("ground_truth"));
    whole.filter(|whole| whole.get("target").is_some_and(|target| target == expected)).unwrap_or(expected)
}

/// The scorer with its processes.
#[derive(Debug)]
pub struct PythonScorer {
    keys: PythonKeys,
    workers: Workers,
}

impl PythonScorer {
    /// Creates a scorer whose processes `supervisor` starts as they are needed.
    pub fn new(keys: PythonKeys, supervisor: Option<Arc<dyn Supervisor>>) -> Arc<Self> {
        Arc::new(PythonScorer { workers: Workers::new(&keys, supervisor), keys })
    }

    /// Keyword arguments of the function: as verl has them.
    fn arguments(&self, evidence: &Evidence) -> Value {
        let task = &evidence.task;
        let mut arguments = self.keys.arguments.clone();
        let source =
            task_field(task, "data_source").or_else(|| task.get("source")).cloned().unwrap_or_default();
        let extra = task_field(task, "extra_info").filter(|extra| !extra.is_null());
        let mut extra = extra.cloned().unwrap_or_else(|| json!({}));
        if let Value::Object(extra) = &mut extra {
            // verl counts the prompt, replies, and what tools answered: 2 T where T replies end in an answer.
            extra.entry("num_turns").or_insert(json!(2 * evidence.outcome.turns));
            extra.entry("rollout_reward_scores").or_insert(json!({}));
        }
        arguments.insert("data_source".into(), source);
        arguments.insert("solution_str".into(), self.keys.solution.of(evidence).into());
        arguments.insert("ground_truth".into(), ground_truth(evidence).clone());
        arguments.insert("extra_info".into(), extra);
        Value::Object(arguments)
    }

    fn broken(&self, what: impl Into<String>) -> ScoreError {
        ScoreError::Command { command: self.keys.file.display().to_string(), what: what.into() }
    }

    async fn ask(&self, arguments: &Value) -> Result<Vec<Component>, ScoreError> {
        let start = Duration::from_secs_f64(self.keys.start_seconds);
        let limit = Duration::from_secs_f64(self.keys.seconds);
        let mut worker = self.workers.take(start).await.map_err(|why| self.broken(why))?;
        let said = match within(limit, worker.ask(arguments)).await {
            Some(said) => said.map_err(|why| self.broken(why))?,
            // The worker is dropped, which ends it.
            None => return Err(self.broken(format!("did not answer within {limit:?}, and was ended"))),
        };
        worker.give_back();
        if let Some(error) = said["error"].as_str() {
            return Err(self.broken(error));
        }
        let score = said["score"].as_f64().ok_or_else(|| self.broken("gave no score"))?;
        let extra = said["extra"].as_object().into_iter().flatten();
        let extra = extra.filter_map(|(name, value)| Some(Component::new(name.clone(), value.as_f64()?)));
        Ok([Component::score(score)].into_iter().chain(extra).collect())
    }
}

#[async_trait]
impl Scorer for PythonScorer {
    async fn check_ready(&self, _task: &Value) -> Result<(), ScoreError> {
        self.keys.check()?;
        let start = Duration::from_secs_f64(self.keys.start_seconds);
        let worker = self.workers.take(start).await.map_err(|why| self.broken(why))?;
        worker.give_back();
        Ok(())
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        // Also where there is no answer: what that is worth, the function says.
        self.ask(&self.arguments(evidence)).await
    }
}

#[cfg(test)]
mod tests;
