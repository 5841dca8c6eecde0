//! A run: code that runs to its end or its deadline and leaves nothing behind.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::SandboxError;
use crate::jail::{Deadline, Jail, JailEvent, JailReport, new_deadline};
use crate::limits::Limits;
use crate::output::CapturedOutput;
use crate::zygote::{RunOrder, Zygote};

/// Programming language of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// Python, with the interpreter of the sandbox.
    Python,
    /// Shell, with `bash`, or `sh` if there is no bash.
    Shell,
}

impl Language {
    /// Returns the language with the name `name`, as in SandboxFusion or a common name such as
    /// `sh`. Returns `None` if the name is unknown.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "python" | "python3" => Some(Language::Python),
            "bash" | "sh" | "shell" => Some(Language::Shell),
            _ => None,
        }
    }
}

/// Code to run, with its inputs and limits.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Language of the code.
    pub language: Language,
    /// Source code.
    pub code: String,
    /// Bytes of the standard input.
    pub stdin: Vec<u8>,
    /// Contents of files in the work directory, by relative path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Relative paths of the files in the work directory that are returned after the run.
    pub fetch: Vec<String>,
    /// Environment variables of the code. The code inherits no variable of this process.
    pub environment: BTreeMap<String, String>,
    /// Resource limits of the run.
    pub limits: Limits,
}

impl Run {
    /// Creates a run with default limits, and without standard input and files.
    pub fn new(language: Language, code: impl Into<String>) -> Self {
        Run {
            language,
            code: code.into(),
            stdin: Vec::new(),
            files: BTreeMap::new(),
            fetch: Vec::new(),
            environment: BTreeMap::new(),
            limits: Limits::default(),
        }
    }
}

/// Reason why a run or session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The code exited with this exit code.
    Exit(i32),
    /// This signal ended the code, because of a crash or of a limit that the kernel enforces.
    Signal(i32),
    /// The code was stopped because it exceeded the time limit.
    TimeLimit,
    /// The code was stopped because its processes together exceeded the memory limit.
    MemoryLimit,
}

impl EndReason {
    /// Returns the exit code as in Python's `subprocess`, where signals are negative numbers.
    /// Returns `None` if the time limit was exceeded.
    pub fn return_code(&self) -> Option<i32> {
        match self {
            EndReason::Exit(code) => Some(*code),
            EndReason::Signal(signal) => Some(-signal),
            EndReason::MemoryLimit => Some(-libc::SIGKILL),
            EndReason::TimeLimit => None,
        }
    }
}

/// Outcome of a run: how it ended, its output and its files.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Reason why the run ended.
    pub ended: EndReason,
    /// Captured standard output.
    pub stdout: CapturedOutput,
    /// Captured standard error.
    pub stderr: CapturedOutput,
    /// Wall-clock time of the run, in seconds. It includes the start of the jail.
    pub seconds: f64,
    /// Processor time of all processes of the run, in seconds. Without a cgroup, the time of a
    /// child is missing if its parent did not wait for it and it ended between two observations.
    pub cpu_seconds: f64,
    /// Contents of the requested files that exist, by relative path.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Reasons why requested files are not returned, by relative path.
    pub not_fetched: BTreeMap<String, String>,
}

/// Returns a file name for the code that differs from the names of all files of the run.
pub(crate) fn choose_main_file(language: Language, files: &BTreeMap<String, Vec<u8>>) -> String {
    let ending = match language {
        Language::Python => "py",
        Language::Shell => "sh",
    };
    let mut name = format!("main.{ending}");
    while files.contains_key(&name) {
        name = format!("_{name}");
    }
    name
}

/// Checks that a path of a request is inside the work directory.
///
/// # Errors
/// Returns an error that names the path if it is not relative, or contains empty parts, `.` or
/// `..`.
pub(crate) fn check_path(path: &str) -> Result<(), SandboxError> {
    let is_inside = !path.is_empty()
        && !path.starts_with('/')
        && !path.contains('\0')
        && path.len() <= 1024
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    is_inside.then_some(()).ok_or_else(|| {
        SandboxError::Request(format!(
            "the path {path:?} must be relative, without \"..\", and inside of the work directory"
        ))
    })
}

/// Checks that the paths and environment variables of a run are valid.
///
/// # Errors
/// Returns an error that names the first invalid path or variable.
pub(crate) fn check_paths_and_variables(
    files: &BTreeMap<String, Vec<u8>>,
    fetch: &[String],
    environment: &BTreeMap<String, String>,
) -> Result<(), SandboxError> {
    files.keys().chain(fetch).try_for_each(|path| check_path(path))?;
    for (name, value) in environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(SandboxError::Request(format!(
                "the environment variable {name:?} has an invalid name or value: the name must be \
                 non-empty and without \"=\", and both must be without NUL"
            )));
        }
    }
    Ok(())
}

/// Starts a run and waits until it ends. Also returns the jail, which contains the missing walls.
pub(crate) async fn run_to_end(
    zygote: &Zygote,
    order: &RunOrder,
    run: &Run,
) -> Result<(Outcome, Jail), SandboxError> {
    let started = Instant::now();
    let files: Vec<&[u8]> =
        run.files.values().map(Vec::as_slice).chain([run.code.as_bytes()]).collect();
    let group = zygote.create_cgroup(&run.limits)?;
    let streams = zygote.start_run(order, &files, &run.stdin, group.as_ref()).await;
    let streams =
        streams.map_err(|error| SandboxError::Broken(format!("the fork server: {error}")))?;
    let mut jail = Jail::new(streams, &run.limits, zygote.jailed, group);
    let (ended, report) =
        wait_for_end(&mut jail, new_deadline(to_duration(run.limits.seconds))).await?;
    let report =
        report.unwrap_or(JailReport { code: None, signal: None, cpu: 0.0, files: Vec::new() });
    let mut files = BTreeMap::new();
    let mut not_fetched = BTreeMap::new();
    for (name, content) in jail.fetch_files(&report).await? {
        match content {
            Ok(content) => drop(files.insert(name, content)),
            Err(why) => drop(not_fetched.insert(name, why)),
        }
    }
    let (stdout, stderr) = jail.take_output(&run.limits);
    let seconds = started.elapsed().as_secs_f64();
    let cpu_seconds = report.cpu.max(jail.cpu_seconds());
    Ok((Outcome { ended, stdout, stderr, seconds, cpu_seconds, files, not_fetched }, jail))
}

pub(crate) fn to_duration(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
}

/// Waits until the run ends, and stops the run if it exceeds a limit.
async fn wait_for_end(
    jail: &mut Jail,
    mut until: Deadline,
) -> Result<(EndReason, Option<JailReport>), SandboxError> {
    loop {
        let stopped = match jail.next_event(&mut until).await? {
            JailEvent::Ended(report) => return Ok((end_reason(&report), Some(report))),
            JailEvent::Cell(_) | JailEvent::NoCells | JailEvent::Observed(_) => continue,
            JailEvent::Late => EndReason::TimeLimit,
            JailEvent::OverMemory => return Ok((EndReason::MemoryLimit, jail.kill_all().await)),
        };
        return Ok((stopped, jail.stop().await));
    }
}

/// Returns the reason why a runner ended that was not stopped.
pub(crate) fn end_reason(report: &JailReport) -> EndReason {
    match (report.code, report.signal) {
        (Some(code), _) => EndReason::Exit(code),
        (None, Some(signal)) => EndReason::Signal(signal),
        (None, None) => EndReason::Signal(libc::SIGKILL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_path_rejects_paths_outside_work_directory() {
        for path in ["a", "a/b.txt", ".hidden", "a b", "ü"] {
            assert_eq!(check_path(path), Ok(()), "{path}");
        }
        for path in ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", "a/", "a\0b"] {
            assert!(check_path(path).is_err(), "{path}");
        }
    }

    #[test]
    fn main_file_avoids_names_of_run_files() {
        let mut files = BTreeMap::new();
        assert_eq!(choose_main_file(Language::Python, &files), "main.py");
        files.insert("main.sh".to_owned(), Vec::new());
        assert_eq!(choose_main_file(Language::Shell, &files), "_main.sh");
    }
}
