//! Tests that deadlines exclude the time in which the process is stopped.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use levade_policy::process_time;

/// Environment variable that marks the child process, which the test stops.
const CHILD: &str = "LEVADE_TEST_IS_STOPPED";
const LIMIT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_secs(5);

#[test]
fn deadline_excludes_time_while_process_is_stopped() {
    if std::env::var_os(CHILD).is_some() {
        return wait();
    }
    let test = std::env::current_exe().unwrap();
    let mut child = Command::new(test)
        .args(["deadline_excludes_time_while_process_is_stopped", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    // The test harness may have started the line.
    assert!(lines.any(|line| line.ends_with("waiting")));
    let start = Instant::now();
    let send = |signal: &str| {
        assert!(
            Command::new("kill")
                .args([signal, &child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    };
    send("-STOP");
    std::thread::sleep(PAUSE);
    send("-CONT");
    assert!(lines.any(|line| line.ends_with("late")));
    // The part of the pause up to the next reading of the clock may count.
    let waited = start.elapsed();
    assert!(waited > PAUSE + LIMIT - Duration::from_millis(1500), "{waited:?}");
    assert!(child.wait().unwrap().success());
}

/// Waits for a future that never finishes, with a deadline.
fn wait() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    println!("waiting");
    assert_eq!(
        runtime.block_on(process_time::with_timeout(LIMIT, std::future::pending::<()>())),
        None
    );
    println!("late");
}
