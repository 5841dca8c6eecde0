//! Requests and responses of SandboxFusion's API, in the format of its own client and of verl's.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize};

use crate::limits::Limits;
use crate::run::{EndReason, Outcome};
use crate::session::{Cell, CellError};

/// Names of SandboxFusion's languages. For a language that this service does not support, the
/// response is a sandbox error, as in SandboxFusion if the interpreter is not installed.
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

/// Request body of `POST /run_code`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunCode {
    /// Source code to run.
    pub code: String,
    /// Language of the code, by its name in SandboxFusion.
    pub language: String,
    /// Maximum run time, in seconds.
    #[serde(default = "default_run_timeout")]
    pub run_timeout: f64,
    /// Maximum compilation time, in seconds. It has no effect, because this service compiles
    /// nothing.
    #[serde(default = "default_run_timeout")]
    pub compile_timeout: f64,
    /// Memory limit, in MiB. A value below 1 selects the maximum of the service. Values above the
    /// maximum are reduced to it.
    #[serde(rename = "memory_limit_MB", default = "default_memory_limit")]
    pub memory_limit_mb: i64,
    /// Standard input as text. `None` means that it is empty.
    #[serde(default)]
    pub stdin: Option<String>,
    /// Base64-encoded contents of files, by path. Files whose content is `None` are ignored.
    #[serde(default, deserialize_with = "null_to_default")]
    pub files: BTreeMap<String, Option<String>>,
    /// Paths of the files to return after the run.
    #[serde(default, deserialize_with = "null_to_default")]
    pub fetch_files: Vec<String>,
}

/// Request body of `POST /run_jupyter`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunJupyter {
    /// Source code of the cells, which run one after another.
    pub cells: Vec<String>,
    /// Maximum time of each cell, in seconds. 0 disables this limit, so that only `total_timeout`
    /// applies.
    #[serde(default)]
    pub cell_timeout: f64,
    /// Maximum total time of all cells, in seconds.
    #[serde(default = "default_total_timeout")]
    pub total_timeout: f64,
    /// Memory limit, in MiB. A value below 1 selects the maximum of the service. Values above the
    /// maximum are reduced to it.
    #[serde(rename = "memory_limit_MB", default = "default_memory_limit")]
    pub memory_limit_mb: i64,
    /// Name of the Jupyter kernel. Only `python3` is supported.
    #[serde(default = "default_kernel")]
    pub kernel: String,
    /// Base64-encoded contents of files, by path. Files whose content is `None` are ignored.
    #[serde(default, deserialize_with = "null_to_default")]
    pub files: BTreeMap<String, Option<String>>,
    /// Paths of the files to return after the last cell.
    #[serde(default, deserialize_with = "null_to_default")]
    pub fetch_files: Vec<String>,
}

fn default_run_timeout() -> f64 {
    10.0
}

fn default_total_timeout() -> f64 {
    45.0
}

fn default_memory_limit() -> i64 {
    -1
}

fn default_kernel() -> String {
    "python3".into()
}

fn null_to_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Overall status of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// All commands exited with code 0.
    Success,
    /// A command failed or exceeded its time limit.
    Failed,
    /// The sandbox itself failed.
    SandboxError,
}

/// Status of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandStatus {
    /// The command exited or was ended by a signal.
    Finished,
    /// The command could not be started.
    Error,
    /// The command exceeded its time limit.
    TimeLimitExceeded,
}

/// Result of a command, such as a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommandResult {
    /// Status of the command.
    pub status: CommandStatus,
    /// Wall-clock time of the command, in seconds.
    #[serde(default)]
    pub execution_time: Option<f64>,
    /// Processor time of the command, in seconds.
    #[serde(default)]
    pub cpu_time: Option<f64>,
    /// Exit code of the command, or the negative number of the signal that ended it. `None` if the
    /// time limit was exceeded.
    #[serde(default)]
    pub return_code: Option<i32>,
    /// Standard output of the command.
    #[serde(default)]
    pub stdout: Option<String>,
    /// Standard error of the command.
    #[serde(default)]
    pub stderr: Option<String>,
}

/// Response body of `POST /run_code`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodeResponse {
    /// Overall status of the request.
    pub status: Status,
    /// Reason why the sandbox failed. Empty if it did not fail.
    #[serde(default)]
    pub message: String,
    /// Result of the compilation. Always `None`, because this service compiles nothing.
    #[serde(default)]
    pub compile_result: Option<CommandResult>,
    /// Result of the run. `None` if the sandbox failed.
    #[serde(default)]
    pub run_result: Option<CommandResult>,
    /// Name of SandboxFusion's executor. Always `None`.
    #[serde(default)]
    pub executor_pod_name: Option<String>,
    /// Base64-encoded contents of the requested files that exist, by path.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// Response body of `POST /run_jupyter`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JupyterResponse {
    /// Overall status of the request.
    pub status: Status,
    /// Reason why the sandbox failed. Empty if it did not fail.
    #[serde(default)]
    pub message: String,
    /// Result of the interpreter process. `None` if the sandbox failed.
    #[serde(default)]
    pub driver: Option<CommandResult>,
    /// Results of the cells that were run, in order.
    #[serde(default)]
    pub cells: Vec<CellResponse>,
    /// Name of SandboxFusion's executor. Always `None`.
    #[serde(default)]
    pub executor_pod_name: Option<String>,
    /// Base64-encoded contents of the requested files that exist, by path.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// Result of a notebook cell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CellResponse {
    /// Standard output of the cell.
    pub stdout: String,
    /// Standard error of the cell.
    pub stderr: String,
    /// Values that the cell displayed, by media type.
    pub display: Vec<BTreeMap<String, serde_json::Value>>,
    /// The exception that ended the cell, as a list of one item. Empty if the cell raised none.
    pub error: Vec<Exception>,
}

/// An exception that a notebook cell raised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exception {
    /// Name of the exception's class.
    pub ename: String,
    /// Message of the exception.
    pub evalue: String,
    /// Lines of the traceback.
    pub traceback: Vec<String>,
}

impl CodeResponse {
    /// Creates the response for an error of the sandbox itself.
    pub(crate) fn from_sandbox_error(message: String) -> Self {
        CodeResponse {
            status: Status::SandboxError,
            message,
            compile_result: None,
            run_result: None,
            executor_pod_name: None,
            files: BTreeMap::new(),
        }
    }

    /// Creates the response for a run that has ended.
    pub(crate) fn from_outcome(outcome: &Outcome, limits: &Limits) -> Self {
        let command = to_command_result(outcome.ended, limits);
        let is_good = outcome.ended == EndReason::Exit(0);
        let stderr = match memory_limit_text(outcome.ended, limits) {
            Some(why) => append_line(outcome.stderr.text(), &why),
            None => outcome.stderr.text(),
        };
        let result = CommandResult {
            execution_time: Some(outcome.seconds),
            cpu_time: Some(outcome.cpu_seconds),
            stdout: Some(outcome.stdout.text()),
            stderr: Some(stderr),
            ..command
        };
        CodeResponse {
            status: if is_good { Status::Success } else { Status::Failed },
            run_result: Some(result),
            files: outcome
                .files
                .iter()
                .map(|(name, file)| (name.clone(), BASE64_STANDARD.encode(file)))
                .collect(),
            ..Self::from_sandbox_error(String::new())
        }
    }
}

impl JupyterResponse {
    /// Creates the response for an error of the sandbox itself.
    pub(crate) fn from_sandbox_error(message: String) -> Self {
        JupyterResponse {
            status: Status::SandboxError,
            message,
            driver: None,
            cells: Vec::new(),
            executor_pod_name: None,
            files: BTreeMap::new(),
        }
    }
}

impl CellResponse {
    /// Converts the result of a session's cell to the format of the API.
    pub(crate) fn from_cell(cell: &Cell) -> Self {
        CellResponse {
            stdout: cell.stdout.text(),
            stderr: cell.stderr.text(),
            display: cell
                .shown
                .iter()
                .map(|text| BTreeMap::from([("text/plain".to_owned(), text.as_str().into())]))
                .collect(),
            error: cell.error.iter().map(Exception::from_cell_error).collect(),
        }
    }
}

impl Exception {
    fn from_cell_error(error: &CellError) -> Self {
        let CellError { ename, evalue, traceback } = error.clone();
        Exception { ename, evalue, traceback }
    }
}

/// Creates the result of a command from the reason why it ended. The output is filled in later.
pub(crate) fn to_command_result(ended: EndReason, limits: &Limits) -> CommandResult {
    let is_late = ended == EndReason::TimeLimit;
    CommandResult {
        status: if is_late { CommandStatus::TimeLimitExceeded } else { CommandStatus::Finished },
        execution_time: None,
        cpu_time: None,
        return_code: ended.return_code(),
        stdout: Some(String::new()),
        stderr: Some(memory_limit_text(ended, limits).unwrap_or_default()),
    }
}

/// Describes the memory limit if `ended` states that it was exceeded. Returns `None` for other
/// reasons.
pub(crate) fn memory_limit_text(ended: EndReason, limits: &Limits) -> Option<String> {
    match ended {
        EndReason::MemoryLimit => Some(format!(
            "[ended by the sandbox: its processes held more than {} MiB]",
            limits.memory_mb
        )),
        _ => None,
    }
}

fn append_line(text: String, line: &str) -> String {
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    format!("{text}{gap}{line}\n")
}

/// Decodes the base64-encoded contents of files. Files whose content is `None` are skipped.
///
/// # Errors
/// Returns an error that names the file if its content is invalid.
pub(crate) fn decode_files(
    files: &BTreeMap<String, Option<String>>,
) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let provided = files.iter().filter_map(|(name, content)| Some((name, content.as_ref()?)));
    provided
        .map(|(name, content)| {
            let bytes = BASE64_STANDARD.decode(content.as_bytes());
            let bytes = bytes
                .map_err(|error| format!("the content of {name:?} is not valid base64: {error}"))?;
            Ok((name.clone(), bytes))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_use_defaults_for_missing_fields() {
        let minimal: RunCode =
            serde_json::from_str(r#"{"code": "1", "language": "python"}"#).unwrap();
        assert_eq!((minimal.run_timeout, minimal.memory_limit_mb, minimal.stdin), (10.0, -1, None));
        // This is a request as verl sends it.
        let full = r#"{"compile_timeout": 30, "run_timeout": 30, "code": "1", "stdin": null, "memory_limit_MB": 1024,
                       "language": "python", "files": {}, "fetch_files": []}"#;
        let full: RunCode = serde_json::from_str(full).unwrap();
        assert_eq!((full.run_timeout, full.memory_limit_mb), (30.0, 1024));
        let cells: RunJupyter = serde_json::from_str(r#"{"cells": ["1"], "files": null}"#).unwrap();
        assert_eq!(
            (cells.total_timeout, cells.cell_timeout, cells.kernel.as_str()),
            (45.0, 0.0, "python3")
        );
    }

    #[test]
    fn files_without_content_are_skipped_and_invalid_base64_is_rejected() {
        let files =
            BTreeMap::from([("a".to_owned(), Some("aGk=".to_owned())), ("b".to_owned(), None)]);
        assert_eq!(
            decode_files(&files).unwrap(),
            BTreeMap::from([("a".to_owned(), b"hi".to_vec())])
        );
        let files = BTreeMap::from([("a".to_owned(), Some("a?".to_owned()))]);
        assert!(
            decode_files(&files)
                .unwrap_err()
                .starts_with("the content of \"a\" is not valid base64")
        );
    }
}
