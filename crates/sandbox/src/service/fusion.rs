//! SandboxFusion's API: what requests and answers hold, as its own client and verl's have it.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize};

use crate::limits::Limits;
use crate::run::{Ended, Outcome};
use crate::session::{Cell, CellError};

/// Languages of SandboxFusion. Those that are not run here answer with an error of the sandbox, as they do
/// there where an interpreter is not installed.
pub(crate) const LANGUAGES: [&str; 33] = [
    "python",
    "python2",
    "cpp",
    "nodejs",
    "go",
    "go_test",
    "java",
    "php",
    "csharp",
    "bash",
    "typescript",
    "sql",
    "rust",
    "cuda",
    "lua",
    "R",
    "perl",
    "D_ut",
    "ruby",
    "scala",
    "julia",
    "pytest",
    "junit",
    "kotlin_script",
    "jest",
    "verilog",
    "python_gpu",
    "lean",
    "swift",
    "racket",
    "gtest",
    "react",
    "shell",
];

/// `POST /run_code`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunCode {
    /// Code to run.
    pub code: String,
    /// Its language.
    pub language: String,
    /// Longest time of a run, in seconds.
    #[serde(default = "ten")]
    pub run_timeout: f64,
    /// Longest time of compiling, in seconds; nothing is compiled here.
    #[serde(default = "ten")]
    pub compile_timeout: f64,
    /// Memory, in MiB; below 1 for as much as the service allows, which is the most in any case.
    #[serde(rename = "memory_limit_MB", default = "unlimited")]
    pub memory_limit_mb: i64,
    /// Standard input.
    #[serde(default)]
    pub stdin: Option<String>,
    /// Files in base64, by their paths; those without content are left out.
    #[serde(default, deserialize_with = "or_default")]
    pub files: BTreeMap<String, Option<String>>,
    /// Paths of files to hand out.
    #[serde(default, deserialize_with = "or_default")]
    pub fetch_files: Vec<String>,
}

/// `POST /run_jupyter`
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunJupyter {
    /// Cells, which run one after the other.
    pub cells: Vec<String>,
    /// Longest time of a cell, in seconds; 0 for that of all.
    #[serde(default)]
    pub cell_timeout: f64,
    /// Longest time of all cells, in seconds.
    #[serde(default = "forty_five")]
    pub total_timeout: f64,
    /// Memory, in MiB; below 1 for as much as the service allows, which is the most in any case.
    #[serde(rename = "memory_limit_MB", default = "unlimited")]
    pub memory_limit_mb: i64,
    /// Always `python3`.
    #[serde(default = "python3")]
    pub kernel: String,
    /// Files in base64, by their paths; those without content are left out.
    #[serde(default, deserialize_with = "or_default")]
    pub files: BTreeMap<String, Option<String>>,
    /// Paths of files to hand out.
    #[serde(default, deserialize_with = "or_default")]
    pub fetch_files: Vec<String>,
}

fn ten() -> f64 {
    10.0
}

fn forty_five() -> f64 {
    45.0
}

fn unlimited() -> i64 {
    -1
}

fn python3() -> String {
    "python3".into()
}

fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// State of an answer as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// All commands ended with 0.
    Success,
    /// A command ended otherwise, or was stopped for time.
    Failed,
    /// It is the sandbox that failed.
    SandboxError,
}

/// State of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandStatus {
    /// It ended by itself, or by a signal.
    Finished,
    /// It could not be started.
    Error,
    /// It was stopped for time.
    TimeLimitExceeded,
}

/// Result of a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommandResult {
    /// State.
    pub status: CommandStatus,
    /// Time by the clock, in seconds.
    #[serde(default)]
    pub execution_time: Option<f64>,
    /// Time of processors, in seconds.
    #[serde(default)]
    pub cpu_time: Option<f64>,
    /// Exit code, or the negative number of a signal.
    #[serde(default)]
    pub return_code: Option<i32>,
    /// Standard output.
    #[serde(default)]
    pub stdout: Option<String>,
    /// Standard error.
    #[serde(default)]
    pub stderr: Option<String>,
}

/// Answer to `POST /run_code`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodeAnswer {
    /// State.
    pub status: Status,
    /// Cause, where the sandbox failed.
    #[serde(default)]
    pub message: String,
    /// Always absent: nothing is compiled here.
    #[serde(default)]
    pub compile_result: Option<CommandResult>,
    /// The run.
    #[serde(default)]
    pub run_result: Option<CommandResult>,
    /// Always absent.
    #[serde(default)]
    pub executor_pod_name: Option<String>,
    /// Files that were asked for and are there, in base64.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// Answer to `POST /run_jupyter`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JupyterAnswer {
    /// State.
    pub status: Status,
    /// Cause, where the sandbox failed.
    #[serde(default)]
    pub message: String,
    /// The interpreter.
    #[serde(default)]
    pub driver: Option<CommandResult>,
    /// Cells that were run.
    #[serde(default)]
    pub cells: Vec<CellAnswer>,
    /// Always absent.
    #[serde(default)]
    pub executor_pod_name: Option<String>,
    /// Files that were asked for and are there, in base64.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// A cell of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellAnswer {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Values that it showed, by media type.
    pub display: Vec<BTreeMap<String, serde_json::Value>>,
    /// The exception that ended it.
    pub error: Vec<Exception>,
}

/// An exception of a cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exception {
    /// Its class.
    pub ename: String,
    /// Its text.
    pub evalue: String,
    /// Lines of its traceback.
    pub traceback: Vec<String>,
}

impl CodeAnswer {
    /// An error of the sandbox.
    pub(crate) fn failed(message: String) -> Self {
        CodeAnswer {
            status: Status::SandboxError,
            message,
            compile_result: None,
            run_result: None,
            executor_pod_name: None,
            files: BTreeMap::new(),
        }
    }

    /// A run's outcome.
    pub(crate) fn of(outcome: &Outcome, limits: &Limits) -> Self {
        let command = command(outcome.ended, limits);
        let is_good = outcome.ended == Ended::Exit(0);
        let stderr = match stopped(outcome.ended, limits) {
            Some(why) => joined(outcome.stderr.text(), &why),
            None => outcome.stderr.text(),
        };
        let result = CommandResult {
            execution_time: Some(outcome.seconds),
            cpu_time: Some(outcome.cpu_seconds),
            stdout: Some(outcome.stdout.text()),
            stderr: Some(stderr),
            ..command
        };
        CodeAnswer {
            status: if is_good { Status::Success } else { Status::Failed },
            run_result: Some(result),
            files: outcome
                .files
                .iter()
                .map(|(name, file)| (name.clone(), BASE64_STANDARD.encode(file)))
                .collect(),
            ..Self::failed(String::new())
        }
    }
}

impl JupyterAnswer {
    /// An error of the sandbox.
    pub(crate) fn failed(message: String) -> Self {
        JupyterAnswer {
            status: Status::SandboxError,
            message,
            driver: None,
            cells: Vec::new(),
            executor_pod_name: None,
            files: BTreeMap::new(),
        }
    }
}

impl CellAnswer {
    /// A cell's result.
    pub(crate) fn of(cell: &Cell) -> Self {
        let shown = |text: &String| BTreeMap::from([("text/plain".to_owned(), text.as_str().into())]);
        CellAnswer {
            stdout: cell.stdout.text(),
            stderr: cell.stderr.text(),
            display: cell.shown.iter().map(shown).collect(),
            error: cell.error.iter().map(Exception::of).collect(),
        }
    }
}

impl Exception {
    fn of(error: &CellError) -> Self {
        let CellError { ename, evalue, traceback } = error.clone();
        Exception { ename, evalue, traceback }
    }
}

/// A command's state and exit code, without its output.
pub(crate) fn command(ended: Ended, limits: &Limits) -> CommandResult {
    let is_late = ended == Ended::TimeLimit;
    CommandResult {
        status: if is_late { CommandStatus::TimeLimitExceeded } else { CommandStatus::Finished },
        execution_time: None,
        cpu_time: None,
        return_code: ended.return_code(),
        stdout: Some(String::new()),
        stderr: Some(stopped(ended, limits).unwrap_or_default()),
    }
}

/// Limit for which something was stopped, in words.
pub(crate) fn stopped(ended: Ended, limits: &Limits) -> Option<String> {
    match ended {
        Ended::MemoryLimit => {
            Some(format!("[ended by the sandbox: its processes held more than {} MiB]", limits.memory_mb))
        }
        _ => None,
    }
}

fn joined(text: String, line: &str) -> String {
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    format!("{text}{gap}{line}\n")
}

/// Files from base64.
///
/// # Errors
/// Names the file that cannot be read.
pub(crate) fn decoded(files: &BTreeMap<String, Option<String>>) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let given = files.iter().filter_map(|(name, content)| Some((name, content.as_ref()?)));
    given
        .map(|(name, content)| {
            let bytes = BASE64_STANDARD.decode(content.as_bytes());
            let bytes = bytes.map_err(|error| format!("the content of {name:?} is no base64: {error}"))?;
            Ok((name.clone(), bytes))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_clients_are_read_with_their_defaults() {
        let least: RunCode = serde_json::from_str(r#"{"code": "1", "language": "python"}"#).unwrap();
        assert_eq!((least.run_timeout, least.memory_limit_mb, least.stdin), (10.0, -1, None));
        // What verl sends.
        let full = r#"{"compile_timeout": 30, "run_timeout": 30, "code": "1", "stdin": null, "memory_limit_MB": 1024,
                       "language": "python", "files": {}, "fetch_files": []}"#;
        let full: RunCode = serde_json::from_str(full).unwrap();
        assert_eq!((full.run_timeout, full.memory_limit_mb), (30.0, 1024));
        let cells: RunJupyter = serde_json::from_str(r#"{"cells": ["1"], "files": null}"#).unwrap();
        assert_eq!((cells.total_timeout, cells.cell_timeout, cells.kernel.as_str()), (45.0, 0.0, "python3"));
    }

    #[test]
    fn files_without_content_are_left_out_and_damaged_ones_named() {
        let files = BTreeMap::from([("a".to_owned(), Some("aGk=".to_owned())), ("b".to_owned(), None)]);
        assert_eq!(decoded(&files).unwrap(), BTreeMap::from([("a".to_owned(), b"hi".to_vec())]));
        let files = BTreeMap::from([("a".to_owned(), Some("a?".to_owned()))]);
        assert!(decoded(&files).unwrap_err().starts_with("the content of \"a\" is no base64"));
    }
}
