//! The supervisor process, which runs a program and terminates it when this process exits.
//!
//! The first line of the supervisor's standard input is an order in JSON. The rest is the program's
//! input, or bytes that ask the program to end. When the input ends, because the program must stop
//! or because the parent was killed, the supervisor terminates the program and all that the program
//! started. The supervisor does the same when the program exits. Processes that a program has
//! detached become children of the supervisor (on Linux, as a subreaper), so that none escapes.

use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, wait};
use serde::Deserialize;

/// Time between SIGTERM and SIGKILL when a program is terminated.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Exit code of a supervisor process if its program cannot be started, as in shells.
const NOT_STARTED: u8 = 127;

/// Order to run a program, which a supervisor process reads as the first line of its input.
#[derive(Deserialize)]
struct SupervisorOrder {
    command: Vec<String>,
    #[serde(rename = "folder")]
    dir: PathBuf,
    /// Complete input of the program. If `None`, the bytes after the order are the program's input.
    input: Option<String>,
    /// Whether each byte after the order is a request to end the program (SIGTERM) instead of
    /// input.
    #[serde(default)]
    #[serde(rename = "asks")]
    signals_end: bool,
}

/// Runs the program that the first line of the standard input names. Returns the program's exit
/// code, or 128 plus the number of the signal that terminated it. A binary calls this function if
/// its arguments are those of its [`Supervisor`](crate::Supervisor).
pub fn supervise() -> ExitCode {
    let mut order = String::new();
    let read = std::io::stdin().lock().read_line(&mut order);
    let order: SupervisorOrder = match read.map_err(|error| error.to_string()).and_then(|_| {
        serde_json::from_str(&order)
            .map_err(|error| format!("the launch order cannot be parsed: {error}"))
    }) {
        Ok(order) => order,
        Err(why) => return exit_with_error(&why),
    };
    let Some((program, arguments)) = order.command.split_first() else {
        return exit_with_error("the command is empty, but must start with a program");
    };
    #[cfg(target_os = "linux")]
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped());
    if !order.dir.as_os_str().is_empty() {
        command.current_dir(&order.dir);
    }
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(_) if !order.dir.as_os_str().is_empty() && !order.dir.is_dir() => {
            let dir = order.dir.display();
            return exit_with_error(&format!(
                "cannot start {program}: there is no directory {dir}"
            ));
        }
        Err(error) => return exit_with_error(&format!("cannot start {program}: {error}")),
    };
    let mut stdin = child.stdin.take();
    let signals_end = order.signals_end;
    if let Some(input) = order.input {
        let mut stdin = stdin.take();
        // A separate thread writes, because the program may never read its input.
        std::thread::spawn(move || stdin.as_mut().map(|stdin| stdin.write_all(input.as_bytes())));
    }
    let Some(leader) = Pid::from_raw(child.id() as i32) else {
        return exit_with_error("the program has no valid process id");
    };
    std::thread::spawn(move || {
        if signals_end {
            signal_end_on_input(leader)
        } else {
            forward_stdin(stdin.take())
        }
        drop(stdin);
        terminate_until_exited(leader)
    });
    std::thread::spawn(move || {
        if wait_for_end_signal().is_ok() {
            terminate_until_exited(leader);
        }
    });
    let code = wait_for_program(leader);
    // Kills the processes that the program has left behind.
    while !find_descendants().is_empty() {
        signal_all(leader, Signal::KILL);
        while matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
        std::thread::sleep(Duration::from_millis(2));
    }
    ExitCode::from(code)
}

/// Terminates the program and its descendants. Sends SIGTERM and, after the grace period, SIGKILL
/// repeatedly, because the program may still start processes. Never returns.
fn terminate_until_exited(leader: Pid) {
    signal_all(leader, Signal::TERM);
    let since = Instant::now();
    while since.elapsed() < STOP_GRACE {
        std::thread::sleep(Duration::from_millis(20));
    }
    loop {
        signal_all(leader, Signal::KILL);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a signal that asks this supervisor process, and thus its program, to exit.
fn wait_for_end_signal() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let [mut terminate, mut interrupt, mut hang_up] = [
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::hangup())?,
        ];
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hang_up.recv() => {}
        }
        Ok(())
    })
}

/// Sends SIGTERM to the program for each byte of the standard input, until the input ends. The
/// program's descendants get no signal, because the program may need them to exit cleanly.
fn signal_end_on_input(leader: Pid) {
    let mut line = std::io::stdin().lock();
    let mut byte = [0; 1];
    loop {
        match line.read(&mut byte) {
            Ok(0) => return,
            Ok(_) => {
                let _ = kill_process(leader, Signal::TERM);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Forwards the standard input of this process to the program until the input ends.
fn forward_stdin(mut to: Option<ChildStdin>) {
    let mut line = std::io::stdin().lock();
    let mut buffer = vec![0; 16 << 10];
    loop {
        match line.read(&mut buffer) {
            Ok(0) => return,
            // A program that has closed its input may keep running.
            Ok(count) => {
                if to.as_mut().is_some_and(|to| to.write_all(&buffer[..count]).is_err()) {
                    to = None;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

fn exit_with_error(why: &str) -> ExitCode {
    // If nothing reads the standard error, the message is lost.
    let _ = writeln!(std::io::stderr(), "{why}");
    ExitCode::from(NOT_STARTED)
}

/// Waits until the program exits, and returns its exit code. Meanwhile, reaps other children that
/// exit.
fn wait_for_program(leader: Pid) -> u8 {
    loop {
        // `wait` accepts any child. `waitpid(None)` would only accept children in this process's
        // own group.
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == leader => {
                let signal = status.terminating_signal().map(|signal| 128 + signal);
                return status.exit_status().or(signal).unwrap_or(1) as u8;
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return 1,
        }
    }
}

/// Sends a signal to the program and all of its descendants.
fn signal_all(leader: Pid, signal: Signal) {
    let _ = kill_process_group(leader, signal);
    for pid in find_descendants() {
        let _ = kill_process(pid, signal);
    }
}

/// Returns all descendants of this process.
#[cfg(target_os = "linux")]
fn find_descendants() -> Vec<Pid> {
    let me = rustix::process::getpid().as_raw_nonzero().get();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let parents: Vec<(i32, i32)> = entries
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The process name may contain any character; the state and the parent's id follow it.
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect();
    let mut found = vec![me];
    let mut at = 0;
    while let Some(&above) = found.get(at) {
        found.extend(parents.iter().filter(|(_, parent)| *parent == above).map(|(pid, _)| *pid));
        at += 1;
    }
    found.into_iter().skip(1).filter_map(Pid::from_raw).collect()
}

/// Returns an empty list: on this system, only the program's process group can be found.
#[cfg(not(target_os = "linux"))]
fn find_descendants() -> Vec<Pid> {
    Vec::new()
}
