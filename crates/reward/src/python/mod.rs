//! A scorer of the user's in Python: a reward function as it is written for verl or TRL.
//!
//! The names of its parameters tell how it is called: verl's `compute_score(data_source, solution_str,
//! ground_truth, extra_info=None)`, the lists of verl's `BatchRewardManager` (`data_sources`,
//! `solution_strs`, …), or TRL's `prompts` and `completions` with the columns of the data set. Lists have one
//! element here. It returns a number, or a dict with `score` whose other numbers are components; it may be
//! `async`. It runs in processes that stay alive, one call at a time in each; one that does not answer in
//! time is ended, with all that it has started, and the next call gets another.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_process::{
    Handshake, Launch, Pool, PoolOptions, Request, Supervisor, WorkerError, exit_status, python_command,
    python_first_line,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::scorer::{expected_value, task_field};
use crate::{Component, Evidence, ScoreError, Scorer};

/// The file of a worker.
const MODULES: [(&str, &str); 1] = [("serve", include_str!("serve.py"))];

/// Calls a function of the user's for each attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonKeys {
    /// The file, told from the recipe's folder.
    pub file: PathBuf,
    /// Name of the function.
    #[serde(default = "compute_score")]
    pub function: String,
    /// Keyword arguments that it gets besides those of the attempt.
    #[serde(default)]
    pub arguments: Map<String, Value>,
    /// Text that it gets as `solution_str`, or in `completions`.
    #[serde(default)]
    pub solution: Solution,
    /// Form of `prompts` and `completions`, for a function of TRL's.
    #[serde(default)]
    pub completions: Completions,
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

/// Form in which a function of TRL's gets prompts and completions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completions {
    /// Messages if the file reads their `"content"`, else texts.
    #[default]
    Auto,
    /// Texts.
    Text,
    /// Lists of messages.
    Messages,
}

impl Completions {
    fn name(self) -> &'static str {
        match self {
            Completions::Auto => "auto",
            Completions::Text => "text",
            Completions::Messages => "messages",
        }
    }
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

/// Arguments that come from the attempt.
const USUAL: [&str; 10] = [
    "data_source",
    "solution_str",
    "ground_truth",
    "extra_info",
    "data_sources",
    "solution_strs",
    "ground_truths",
    "extra_infos",
    "prompts",
    "completions",
];

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
            completions: Completions::default(),
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
        match self.arguments.keys().find(|name| USUAL.contains(&name.as_str())) {
            Some(name) => refuse(format!("arguments.{name} comes from the attempt: leave it out")),
            None => Ok(()),
        }
    }
}

/// The expected answer as verl hands it over: where it was taken from within `reward_model.ground_truth`, as
/// Search-R1's `target` is, all of that.
fn ground_truth(evidence: &Evidence) -> &Value {
    let expected = evidence.expected_value();
    let whole = task_field(&evidence.task, "reward_model").and_then(|model| model.get("ground_truth"));
    whole.filter(|whole| whole.get("target").is_some_and(|target| target == expected)).unwrap_or(expected)
}

/// Returns the columns of a task's row, with its question and its expected answer, but those that TRL takes
/// away.
fn columns(task: &Value) -> Map<String, Value> {
    let mut columns = task.get("row").and_then(Value::as_object).cloned().unwrap_or_default();
    columns.retain(|name, _| !["prompt", "completion", "completion_ids"].contains(&name.as_str()));
    let answer = task.get("answer").map(|_| expected_value(task));
    for (name, value) in [("question", task.get("question")), ("answer", answer)] {
        if let (false, Some(value)) = (columns.contains_key(name), value) {
            columns.insert(name.to_owned(), value.clone());
        }
    }
    columns
}

/// The scorer with its processes.
#[derive(Debug)]
pub struct PythonScorer {
    keys: PythonKeys,
    workers: Pool,
    /// Columns of the data set that the function must get, as the last worker that became ready reported
    /// them.
    columns: Arc<Mutex<Vec<String>>>,
}

impl PythonScorer {
    /// Creates a scorer whose processes `supervisor` starts as they are needed.
    pub fn new(keys: PythonKeys, supervisor: Supervisor) -> Arc<Self> {
        // The process can run in another directory than this one.
        let file = std::path::absolute(&keys.file).unwrap_or_else(|_| keys.file.clone());
        let first = json!({
            "key": "id",
            "file": file.display().to_string(),
            "function": keys.function,
            "arguments": keys.arguments.keys().collect::<Vec<_>>(),
            "completions": keys.completions.name(),
        });
        let columns = Arc::<Mutex<Vec<String>>>::default();
        let reported = Arc::clone(&columns);
        let check = move |report: Value| {
            let columns = serde_json::from_value(report["columns"].clone());
            let columns = columns.map_err(|error| format!("its first line is none of a worker: {error}"))?;
            *reported.lock().unwrap_or_else(PoisonError::into_inner) = columns;
            Ok(())
        };
        let timeout = Duration::from_secs_f64(keys.start_seconds);
        let workers = Pool::new(PoolOptions {
            name: format!("scorer {}", file.display()),
            supervisor,
            launch: Launch {
                command: python_command(&keys.python),
                dir: file.parent().map(PathBuf::from).unwrap_or_default(),
                passes: keys.environment.clone(),
                variables: Vec::new(),
            },
            first: Some(python_first_line(&MODULES, first)),
            handshake: Some(Handshake { timeout, check: Arc::new(check) }),
            id_key: "id",
            max_workers: keys.workers.min(WORKERS),
            max_requests: 1,
            // A function that is late is ended at once: nothing of the process is worth keeping.
            cancel_grace: Duration::ZERO,
        });
        Arc::new(PythonScorer { keys, workers, columns })
    }

    /// Returns what is known of an attempt, by the names that verl has for it, with the columns that TRL
    /// hands over.
    fn attempt(&self, evidence: &Evidence) -> Value {
        let task = &evidence.task;
        let source =
            task_field(task, "data_source").or_else(|| task.get("source")).cloned().unwrap_or_default();
        let extra = task_field(task, "extra_info").filter(|extra| !extra.is_null());
        let mut extra = extra.cloned().unwrap_or_else(|| json!({}));
        if let Value::Object(extra) = &mut extra {
            // verl counts the prompt, replies, and what tools answered: 2 T where T replies end in an answer.
            extra.entry("num_turns").or_insert(json!(2 * evidence.outcome.turns));
            extra.entry("rollout_reward_scores").or_insert(json!({}));
        }
        let prompt = task_field(task, "prompt").filter(|prompt| prompt.is_array());
        json!({
            "arguments": self.keys.arguments,
            "data_source": source,
            "solution_str": self.keys.solution.of(evidence),
            "ground_truth": ground_truth(evidence),
            "extra_info": extra,
            "question": prompt.or_else(|| task.get("question")),
            "columns": columns(task),
        })
    }

    fn broken(&self, what: impl Into<String>) -> ScoreError {
        ScoreError::Command { command: self.keys.file.display().to_string(), what: what.into() }
    }

    fn failed(&self, error: WorkerError) -> ScoreError {
        self.broken(match error {
            WorkerError::NotStarted(why) => format!("cannot be run by {}: {why}", self.keys.python),
            WorkerError::StartTimeout(timeout) => format!("did not load within {timeout:?}"),
            WorkerError::Exited { code, last_line } => {
                let last = last_line.unwrap_or_else(|| "nothing on standard error".into());
                format!("ended its process with {}: {last}", exit_status(code))
            }
            WorkerError::Timeout(_) => format!("{error}, and was ended"),
            error => error.to_string(),
        })
    }

    async fn ask(&self, attempt: Value) -> Result<Vec<Component>, ScoreError> {
        let timeout = Duration::from_secs_f64(self.keys.seconds);
        let said = self.workers.request(Request::new("score", attempt), timeout).await;
        let said = said.map_err(|error| self.failed(error))?;
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
    async fn check_ready(&self, task: &Value) -> Result<(), ScoreError> {
        self.keys.check()?;
        self.workers.slot().await.map_err(|error| self.failed(error))?;
        let columns = columns(task);
        let required = self.columns.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let missing = required.into_iter().find(|name| !columns.contains_key(name));
        match missing {
            None => Ok(()),
            Some(name) => Err(self.broken(format!(
                "has a function that must have the column `{name}`, which the task does not have (it has {}): \
                 name the column so, or give the parameter a default",
                columns.keys().cloned().collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        // Also where there is no answer: what that is worth, the function says.
        self.ask(self.attempt(evidence)).await
    }
}

#[cfg(test)]
mod tests;
