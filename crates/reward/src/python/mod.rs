//! Scoring by a Python function of the user, written as a reward function for verl or TRL.
//!
//! The names of the function's parameters determine the calling convention: verl's
//! `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, the lists of verl's
//! `BatchRewardManager` (`data_sources`, `solution_strs`, …), or TRL's `prompts` and `completions`
//! with the columns of the data set. Lists always have one element here. The function returns a
//! number, or a dict with `score` whose other numbers become components; it may be `async`.
//!
//! The function runs in worker processes that stay alive between calls. Each worker handles one
//! call at a time. A worker that exceeds its timeout is killed with all processes that it has
//! started, and the next call gets a new worker.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_process::{
    Handshake, Launch, Pool, PoolOptions, Request, Supervisor, WorkerError, exit_status,
    python_command, python_first_line,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::scorer::{expected_value, task_field};
use crate::{Component, ScoreError, Scorer, ScorerInput};

/// Python modules of a worker process, each with its name and source.
const MODULES: [(&str, &str); 1] = [("serve", include_str!("serve.py"))];

/// Recipe keys of a scorer that calls a Python function for each attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PythonKeys {
    /// Python file that defines the function. Relative paths start at the recipe's directory.
    pub file: PathBuf,
    /// Name of the function. The default is `compute_score`.
    #[serde(default = "compute_score")]
    pub function: String,
    /// Additional keyword arguments of the function. They must not contain an argument that comes
    /// from the attempt.
    #[serde(default)]
    pub arguments: Map<String, Value>,
    /// Text of the attempt that is passed as `solution_str` or in `completions`.
    #[serde(default)]
    pub solution: SolutionText,
    /// Type of `prompts` and `completions` for a TRL function.
    #[serde(default)]
    pub completions: Completions,
    /// Python interpreter. The default is `python3`.
    #[serde(default = "default_python")]
    pub python: String,
    /// Maximum number of worker processes, in 1..=256. The default is 2.
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Timeout for a call of the function, in seconds. The default is 60.
    #[serde(default = "default_timeout_seconds")]
    pub seconds: f64,
    /// Timeout for loading the Python file, in seconds. The default is 60.
    #[serde(default = "default_timeout_seconds")]
    pub start_seconds: f64,
    /// Names of environment variables that the workers get in addition to the usual ones, such as
    /// `PATH`.
    #[serde(default)]
    pub environment: Vec<String>,
}

/// Text of an attempt that a scorer receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SolutionText {
    /// The final answer, without reasoning.
    #[default]
    Answer,
    /// The final assistant message, with its reasoning between `<think>` and `</think>`.
    #[serde(alias = "whole")]
    Full,
}

/// Type in which a TRL function receives prompts and completions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completions {
    /// The function gets lists of messages if its file contains the string literal `"content"`,
    /// otherwise strings.
    #[default]
    Auto,
    /// The function gets strings.
    Text,
    /// The function gets lists of messages.
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

impl SolutionText {
    /// Returns the text of an attempt for the scorer. Empty unless the attempt ended with an
    /// answer.
    pub(crate) fn text_of(self, input: &ScorerInput) -> String {
        match self {
            SolutionText::Answer => input.text().to_owned(),
            SolutionText::Full => input.full_text(),
        }
    }
}

fn compute_score() -> String {
    "compute_score".into()
}

fn default_python() -> String {
    "python3".into()
}

fn default_workers() -> usize {
    2
}

fn default_timeout_seconds() -> f64 {
    60.0
}

/// Keyword arguments of the function that come from the attempt.
const ATTEMPT_ARGUMENTS: [&str; 10] = [
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

/// Maximum value of `workers`.
const WORKERS: usize = 256;

impl PythonKeys {
    /// Creates the keys for a function `compute_score` in `file`, with defaults for all other keys.
    pub fn new(file: impl Into<PathBuf>) -> Self {
        PythonKeys {
            file: file.into(),
            function: compute_score(),
            arguments: Map::new(),
            solution: SolutionText::default(),
            completions: Completions::default(),
            python: default_python(),
            workers: default_workers(),
            seconds: default_timeout_seconds(),
            start_seconds: default_timeout_seconds(),
            environment: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let invalid = |what: String| Err(ScoreError::Unusable(what));
        if self.file.as_os_str().is_empty() {
            return invalid(
                "file is empty: set it to the Python file with the scoring function".into(),
            );
        }
        for (name, seconds) in [("seconds", self.seconds), ("start_seconds", self.start_seconds)] {
            if !(seconds > 0.0 && seconds <= 1e9) {
                return invalid(format!(
                    "{name} = {seconds}, but it must be more than 0 and at most 1e9"
                ));
            }
        }
        if !(1..=WORKERS).contains(&self.workers) {
            return invalid(format!("workers = {}, but it must be in 1..={WORKERS}", self.workers));
        }
        match self.arguments.keys().find(|name| ATTEMPT_ARGUMENTS.contains(&name.as_str())) {
            Some(name) => invalid(format!("arguments.{name} is set from the attempt: remove it")),
            None => Ok(()),
        }
    }
}

/// Returns the expected answer as verl passes it. If the answer equals
/// `reward_model.ground_truth.target` of the row, as in Search-R1, this is the complete
/// `ground_truth` object.
fn ground_truth(input: &ScorerInput) -> &Value {
    let expected = input.expected_value();
    let object =
        task_field(&input.task, "reward_model").and_then(|model| model.get("ground_truth"));
    object
        .filter(|object| object.get("target").is_some_and(|target| target == expected))
        .unwrap_or(expected)
}

/// Returns the columns of a task's row that are passed to the function, plus `question` and
/// `answer` if the row has no such columns. Columns that TRL removes are omitted.
fn task_columns(task: &Value) -> Map<String, Value> {
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

/// Scorer that calls a Python function of the user in a pool of worker processes.
#[derive(Debug)]
pub struct PythonScorer {
    keys: PythonKeys,
    workers: Pool,
    /// Columns of the data set that the function requires, as reported by the worker that started
    /// last.
    columns: Arc<Mutex<Vec<String>>>,
}

impl PythonScorer {
    /// Creates a scorer whose worker processes are started by `supervisor` on demand.
    pub fn new(keys: PythonKeys, supervisor: Supervisor) -> Arc<Self> {
        // The worker runs in the file's directory, so the path must be absolute.
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
            let columns = columns
                .map_err(|error| format!("its first line is not a message of a worker: {error}"))?;
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
            // A function that exceeds its timeout is killed at once: the process holds nothing
            // worth keeping.
            cancel_grace: Duration::ZERO,
        });
        Arc::new(PythonScorer { keys, workers, columns })
    }

    /// Returns the data of an attempt by verl's argument names, and the columns that TRL passes.
    fn attempt_data(&self, input: &ScorerInput) -> Value {
        let task = &input.task;
        let source = task_field(task, "data_source")
            .or_else(|| task.get("source"))
            .cloned()
            .unwrap_or_default();
        let extra = task_field(task, "extra_info").filter(|extra| !extra.is_null());
        let mut extra = extra.cloned().unwrap_or_else(|| json!({}));
        if let Value::Object(extra) = &mut extra {
            // verl counts the prompt, the assistant messages and the tool results: 2 T for T model
            // calls, the last of which is the answer.
            extra.entry("num_turns").or_insert(json!(2 * input.outcome.turns));
            extra.entry("rollout_reward_scores").or_insert(json!({}));
        }
        let prompt = task_field(task, "prompt").filter(|prompt| prompt.is_array());
        json!({
            "arguments": self.keys.arguments,
            "data_source": source,
            "solution_str": self.keys.solution.text_of(input),
            "ground_truth": ground_truth(input),
            "extra_info": extra,
            "question": prompt.or_else(|| task.get("question")),
            "columns": task_columns(task),
        })
    }

    fn failure(&self, what: impl Into<String>) -> ScoreError {
        ScoreError::Command { command: self.keys.file.display().to_string(), what: what.into() }
    }

    fn to_score_error(&self, error: WorkerError) -> ScoreError {
        self.failure(match error {
            WorkerError::NotStarted(why) => {
                format!("cannot run the file with {}: {why}", self.keys.python)
            }
            WorkerError::StartTimeout(timeout) => {
                format!("the file did not load within {timeout:?}")
            }
            WorkerError::Exited { code, last_line } => {
                let last = last_line.unwrap_or_else(|| "nothing on standard error".into());
                format!("its process exited with {}: {last}", exit_status(code))
            }
            WorkerError::Timeout(_) => format!("{error}, and was killed"),
            error => error.to_string(),
        })
    }

    async fn call_function(&self, attempt: Value) -> Result<Vec<Component>, ScoreError> {
        let timeout = Duration::from_secs_f64(self.keys.seconds);
        let response = self.workers.request(Request::new("score", attempt), timeout).await;
        let response = response.map_err(|error| self.to_score_error(error))?;
        if let Some(error) = response["error"].as_str() {
            return Err(self.failure(error));
        }
        let score = response["score"]
            .as_f64()
            .ok_or_else(|| self.failure("the function returned no score"))?;
        let extra = response["extra"].as_object().into_iter().flatten();
        let extra =
            extra.filter_map(|(name, value)| Some(Component::new(name.clone(), value.as_f64()?)));
        Ok([Component::score(score)].into_iter().chain(extra).collect())
    }
}

#[async_trait]
impl Scorer for PythonScorer {
    async fn check_ready(&self, task: &Value) -> Result<(), ScoreError> {
        self.keys.check()?;
        self.workers.slot().await.map_err(|error| self.to_score_error(error))?;
        let columns = task_columns(task);
        let required = self.columns.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let missing = required.into_iter().find(|name| !columns.contains_key(name));
        match missing {
            None => Ok(()),
            Some(name) => Err(self.failure(format!(
                "the function requires the column `{name}`, but the task has only the columns {}: \
                 rename a column, or give the parameter a default",
                columns.keys().cloned().collect::<Vec<_>>().join(", ")
            ))),
        }
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        // The function also scores attempts without an answer; it receives an empty text.
        self.call_function(self.attempt_data(input)).await
    }
}

#[cfg(test)]
mod tests;
