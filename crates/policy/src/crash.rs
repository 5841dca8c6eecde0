//! Named points at which a process can be killed, so that tests can show that a crash there loses
//! nothing.
//!
//! `LEVADE_CRASH_AT=name:count` kills the process with SIGKILL when it passes the point `name` for
//! the `count`-th time (`:count` may be omitted and is then 1). If the variable is not set, a point
//! costs one load.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::environment::read_variable;

/// Environment variable that names the crash point at which the process kills itself.
pub const CRASH_AT: &str = "LEVADE_CRASH_AT";

struct CrashTarget {
    name: String,
    remaining: AtomicU64,
}

/// Kills the process if the environment variable [`CRASH_AT`] names this crash point.
pub fn crash_point(name: &str) {
    static TARGET: OnceLock<Option<CrashTarget>> = OnceLock::new();
    let target = TARGET
        .get_or_init(|| read_variable(CRASH_AT).map(|text| parse_target(&text.to_string_lossy())));
    if let Some(target) = target
        && target.name == name
        && target.remaining.fetch_sub(1, Ordering::SeqCst) == 1
    {
        kill_process();
    }
}

/// Parses the crash point `name` or `name:count`. A count that is not a number counts as 1.
fn parse_target(text: &str) -> CrashTarget {
    let (name, remaining) = match text.rsplit_once(':') {
        Some((name, count)) => (name, count.parse().unwrap_or(1)),
        None => (text, 1),
    };
    CrashTarget { name: name.to_owned(), remaining: AtomicU64::new(remaining) }
}

/// Kills this process as the operating system would: no destructor runs, and no buffer is flushed.
fn kill_process() {
    #[cfg(unix)]
    // SAFETY: both calls take and return plain integers; sending a signal to oneself touches no
    // memory.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGKILL);
    }
    // Aborts on systems without SIGKILL, and if the signal is delivered to another thread a moment
    // later.
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crash_target_parses_name_and_count() {
        assert_eq!(name_and_count("optim_step"), ("optim_step".into(), 1));
        assert_eq!(name_and_count("optim_step:3"), ("optim_step".into(), 3));
    }

    fn name_and_count(text: &str) -> (String, u64) {
        let target = parse_target(text);
        (target.name, target.remaining.into_inner())
    }

    /// Runs itself as a child process that is killed at the third pass.
    #[test]
    #[cfg(unix)]
    fn crash_point_kills_process_at_requested_count() {
        use std::os::unix::process::ExitStatusExt;
        const CHILD: &str = "LEVADE_TEST_CRASH_CHILD";
        if std::env::var(CHILD).is_ok() {
            for passage in 1..=4 {
                println!("\npassage {passage}");
                crash_point("elsewhere");
                crash_point("here");
            }
            return;
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "crash::tests::crash_point_kills_process_at_requested_count",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .env(CRASH_AT, "here:3")
            .output()
            .unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGKILL));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("passage 3") && !text.contains("passage 4"), "{text}");
    }
}
