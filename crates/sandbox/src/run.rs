//! A run: code that is started, runs to its end or its deadline, and leaves nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::SandboxError;
use crate::jail::{Deadline, Event, Jail, Report, deadline};
use crate::limits::Limits;
use crate::output::Captured;
use crate::zygote::{Order, Zygote};

/// Languages that code can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// The interpreter of the sandbox.
    Python,
    /// `bash`, or `sh` where there is no bash.
    Shell,
}

impl Language {
    /// The language of this name, as SandboxFusion has it or as people do.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "python" | "python3" => Some(Language::Python),
            "bash" | "sh" | "shell" => Some(Language::Shell),
            _ => None,
        }
    }
}

/// Code to run, and all that it is given.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Language of the code.
    pub language: Language,
    /// Source code.
    pub code: String,
    /// Standard input.
    pub stdin: Vec<u8>,
    /// Files in the work folder, by relative paths.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Paths of files in the work folder that are handed out at the end.
    pub fetch: Vec<String>,
    /// Environment variables. Nothing of this process' environment is there but what is named here.
    pub environment: BTreeMap<String, String>,
    /// Limits, in place of the sandbox' own.
    pub limits: Limits,
}

impl Run {
    /// A run of code without input or files.
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

/// How a run, or a session, came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit code.
    Exit(i32),
    /// By a signal: a crash, or a limit that the kernel holds.
    Signal(i32),
    /// It was stopped at its deadline.
    TimeLimit,
    /// It was stopped because its processes together held too much memory.
    MemoryLimit,
}

impl Ended {
    /// Exit code as Python's `subprocess` has it, with signals below 0; `None` where it was stopped for time.
    pub fn return_code(&self) -> Option<i32> {
        match self {
            Ended::Exit(code) => Some(*code),
            Ended::Signal(signal) => Some(-signal),
            Ended::MemoryLimit => Some(-libc::SIGKILL),
            Ended::TimeLimit => None,
        }
    }
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Way in which it ended.
    pub ended: Ended,
    /// Standard output.
    pub stdout: Captured,
    /// Standard error.
    pub stderr: Captured,
    /// Time by the clock, in seconds, with that of the jail's start.
    pub seconds: f64,
    /// Time of processors, in seconds, of all processes. Without a cgroup, the time of a child is missing if
    /// its parent did not wait for it and it ended between two looks at the processes.
    pub cpu_seconds: f64,
    /// Files that were asked for and are there.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Files that were asked for and are not handed out, and why.
    pub not_fetched: BTreeMap<String, String>,
}

/// Name of the file with the code: one that no file of the run has.
pub(crate) fn main_file(language: Language, files: &BTreeMap<String, Vec<u8>>) -> String {
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

/// Whether a name is of a file within the work folder.
///
/// # Errors
/// Names the path, and how it is wrong.
pub(crate) fn check_path(path: &str) -> Result<(), SandboxError> {
    let is_inside = !path.is_empty()
        && !path.starts_with('/')
        && !path.contains('\0')
        && path.len() <= 1024
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    let wrong = || {
        SandboxError::Request(format!(
            "the path {path:?} must be relative, without \"..\", inside of the work folder"
        ))
    };
    is_inside.then_some(()).ok_or_else(wrong)
}

/// Whether a run can be met at all.
///
/// # Errors
/// Names what cannot be.
pub(crate) fn check(
    files: &BTreeMap<String, Vec<u8>>,
    fetch: &[String],
    environment: &BTreeMap<String, String>,
) -> Result<(), SandboxError> {
    files.keys().chain(fetch).try_for_each(|path| check_path(path))?;
    for (name, value) in environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(SandboxError::Request(format!(
                "{name:?} cannot be the name of an environment variable"
            )));
        }
    }
    Ok(())
}

/// Starts a run, follows it to its end, and gives the jail's own missing walls besides.
pub(crate) async fn follow(
    zygote: &Zygote,
    order: &Order,
    run: &Run,
) -> Result<(Outcome, Jail), SandboxError> {
    let begun = Instant::now();
    let files: Vec<&[u8]> = run.files.values().map(Vec::as_slice).chain([run.code.as_bytes()]).collect();
    let group = zygote.group(&run.limits)?;
    let streams = zygote.spawn(order, &files, &run.stdin, group.as_ref()).await;
    let streams = streams.map_err(|error| SandboxError::Broken(format!("the fork server: {error}")))?;
    let mut jail = Jail::new(streams, &run.limits, zygote.jailed, group);
    let (ended, report) = to_the_end(&mut jail, deadline(seconds(run.limits.seconds))).await?;
    let report = report.unwrap_or(Report { code: None, signal: None, cpu: 0.0, files: Vec::new() });
    let (mut files, mut not_fetched) = (BTreeMap::new(), BTreeMap::new());
    for (name, content) in jail.fetched(&report).await? {
        match content {
            Ok(content) => drop(files.insert(name, content)),
            Err(why) => drop(not_fetched.insert(name, why)),
        }
    }
    let (stdout, stderr) = jail.take_output(&run.limits);
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_seconds = report.cpu.max(jail.cpu_seconds());
    Ok((Outcome { ended, stdout, stderr, seconds, cpu_seconds, files, not_fetched }, jail))
}

pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e6))
}

/// Waits for the end, or brings it about where a limit is exceeded.
async fn to_the_end(jail: &mut Jail, mut until: Deadline) -> Result<(Ended, Option<Report>), SandboxError> {
    loop {
        let stopped = match jail.next(&mut until).await? {
            Event::Ended(report) => return Ok((ended(&report), Some(report))),
            Event::Cell(_) | Event::NoCells | Event::Looked(_) => continue,
            Event::Late => Ended::TimeLimit,
            Event::OverMemory => return Ok((Ended::MemoryLimit, jail.stop_at_once().await)),
        };
        return Ok((stopped, jail.stop().await));
    }
}

/// How a runner ended by itself.
pub(crate) fn ended(report: &Report) -> Ended {
    match (report.code, report.signal) {
        (Some(code), _) => Ended::Exit(code),
        (None, Some(signal)) => Ended::Signal(signal),
        (None, None) => Ended::Signal(libc::SIGKILL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_inside() {
        for path in ["a", "a/b.txt", ".hidden", "a b", "ü"] {
            assert_eq!(check_path(path), Ok(()), "{path}");
        }
        for path in ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", "a/", "a\0b"] {
            assert!(check_path(path).is_err(), "{path}");
        }
    }

    #[test]
    fn the_file_with_the_code_is_no_file_of_the_run() {
        let mut files = BTreeMap::new();
        assert_eq!(main_file(Language::Python, &files), "main.py");
        files.insert("main.sh".to_owned(), Vec::new());
        assert_eq!(main_file(Language::Shell, &files), "_main.sh");
    }
}
