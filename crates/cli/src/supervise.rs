//! Runs `levade train` in a child process and restarts the process when it fails.

use std::ffi::OsString;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};

use crate::failure::INTERRUPTED;
use crate::screen::{self, Style};
use crate::stop::StopRequests;

/// Uptime after which the count of restarts returns to 0, because the process has made progress.
const STABLE_UPTIME: Duration = Duration::from_secs(600);

/// Options that only the first process of a supervised run handles, because it goes back to an
/// earlier step only once.
const REMOVED: [&str; 2] = ["--restarts", "--from"];

/// Runs this program as a child process with the same arguments except [`REMOVED`], and restarts it
/// until it exits normally or has failed more than `restarts` times in a row.
///
/// Adds `--resume` as soon as `resumable` returns true. A child is not restarted if it exits
/// because of input that the user must correct (exit code 2), or because it was asked to stop
/// (130).
pub fn run_supervised(restarts: u32, resumable: impl Fn() -> bool) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(supervise(restarts, resumable))
}

async fn supervise(restarts: u32, resumable: impl Fn() -> bool) -> anyhow::Result<ExitCode> {
    let style = Style::stderr();
    let mut stop = StopRequests::listen()?;
    let mut failures = 0;
    loop {
        let mut arguments = remove_options(std::env::args_os().skip(1));
        if resumable() && !arguments.iter().any(|argument| argument == "--resume") {
            arguments.push("--resume".into());
        }
        let start = Instant::now();
        let mut child =
            Command::new(std::env::current_exe()?).args(arguments).kill_on_drop(true).spawn()?;
        let mut stop_requested = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                // Ctrl-C on a keyboard reaches the child as well. The child treats both signals as
                // one request and stops at its next safe point.
                signal = stop.next_signal() => {
                    stop_requested = true;
                    forward_signal(&child, signal);
                }
            }
        };
        match status.code() {
            Some(code @ (0 | 2)) => return Ok(ExitCode::from(code as u8)),
            Some(code) if code == i32::from(INTERRUPTED) => return Ok(ExitCode::from(INTERRUPTED)),
            // The run failed while it stopped, for example because a checkpoint could not be
            // written.
            Some(1) if stop_requested => return Ok(ExitCode::FAILURE),
            _ if stop_requested => return Ok(ExitCode::from(INTERRUPTED)),
            _ => {}
        }
        if start.elapsed() > STABLE_UPTIME {
            failures = 0;
        }
        failures += 1;
        let why = describe_exit(status);
        if failures > restarts {
            eprintln!(
                "{} the run {why}; it has been restarted {} in a row",
                style.red("error:"),
                screen::plural(restarts, "time")
            );
            return Ok(ExitCode::FAILURE);
        }
        let pause = Duration::from_secs(1 << failures.min(5));
        eprintln!(
            "{} the run {why} after {}; restarting it in {} s ({failures} of {restarts})",
            style.dim("note:"),
            screen::clock(start.elapsed()),
            pause.as_secs()
        );
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.next_signal() => return Ok(ExitCode::from(INTERRUPTED)),
        }
    }
}

/// Forwards a signal to a process if it is still running.
#[cfg(unix)]
fn forward_signal(child: &Child, signal: rustix::process::Signal) {
    use rustix::process::{Pid, kill_process};
    let pid = child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?));
    // The process can exit at any time.
    let _ = pid.map(|pid| kill_process(pid, signal));
}

/// Does nothing. On this system, only the keyboard requests a stop, and Ctrl-C has already reached
/// the child process.
#[cfg(not(unix))]
fn forward_signal(_: &Child, (): ()) {}

/// Describes how a process ended. The text completes a sentence that starts with "the run".
fn describe_exit(status: ExitStatus) -> String {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        match status.signal() {
            Some(9) => {
                return "was killed (signal 9: out of memory, or another process killed it)".into();
            }
            Some(signal) => return format!("was ended by signal {signal}"),
            None => {}
        }
    }
    match status.code() {
        Some(code) => format!("failed with exit code {code} (the error is above)"),
        None => "ended in an unknown way".into(),
    }
}

/// Returns the arguments without the options [`REMOVED`] and their values, which are written as
/// `--from N` or `--from=N`.
fn remove_options(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut skip = false;
    for argument in arguments {
        if std::mem::take(&mut skip) {
            continue;
        }
        let text = argument.to_string_lossy();
        if REMOVED.contains(&&*text) {
            skip = true;
        } else if !REMOVED
            .iter()
            .any(|name| text.strip_prefix(name).is_some_and(|rest| rest.starts_with('=')))
        {
            kept.push(argument);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remove_options_removes_both_option_forms() {
        let arguments = [
            "train",
            "r",
            "--restarts",
            "3",
            "--from",
            "2",
            "--set",
            "a=1",
            "--restarts=4",
            "--from=1",
        ]
        .map(OsString::from);
        assert_eq!(remove_options(arguments.into_iter()), ["train", "r", "--set", "a=1"]);
    }
}
