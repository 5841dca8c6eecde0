//! Tests of the supervisor process and of the processes that it terminates.

#![allow(clippy::unwrap_used)] // Clippy recognizes only code inside #[test], not the helpers

use std::io::{BufRead as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use levade_process::{Input, Launch, ProgramRun, Supervisor, Tail};
use serde_json::json;

/// Returns the supervisor, which is an example of this crate.
fn supervisor() -> Supervisor {
    let test = std::env::current_exe().unwrap();
    let file = test.ancestors().nth(2).unwrap().join("examples/supervise");
    assert!(file.exists(), "first build it: cargo build -p levade-process --example supervise");
    Supervisor(vec![file.display().to_string()])
}

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Starts a supervisor of a shell script and keeps the supervisor's input open. `input` is the
/// script's input; if `signals_end` is set, later bytes ask the script to end.
fn start_supervised_with(script: &str, input: Option<&str>, signals_end: bool) -> Child {
    let mut process = Command::new(supervisor().0.remove(0))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let order = json!({ "command": ["sh", "-c", script], "folder": "", "input": input, "asks": signals_end });
    writeln!(process.stdin.as_mut().unwrap(), "{order}").unwrap();
    process
}

fn start_supervised(script: &str) -> Child {
    start_supervised_with(script, Some("in\n"), false)
}

/// Returns the exit code and the output of a script whose supervisor's input stays open.
fn run(script: &str) -> (Option<i32>, String) {
    let mut process = start_supervised(script);
    let line = process.stdin.take();
    let output = process.wait_with_output().unwrap();
    drop(line);
    (output.status.code(), stdout(&output))
}

/// Returns whether a process is running and not a zombie.
fn is_running(pid: &str) -> bool {
    let found = Command::new("ps").args(["-o", "stat=", "-p", pid.trim()]).output().unwrap();
    !stdout(&found).trim().is_empty() && !stdout(&found).starts_with('Z')
}

#[test]
fn supervisor_returns_exit_code_of_its_program() {
    assert_eq!(run("read line; sleep 0.3; echo $line; exit 7"), (Some(7), "in\n".into()));
    assert_eq!(run("true"), (Some(0), String::new()));
    assert_eq!(run("kill -TERM $$"), (Some(128 + 15), String::new()));
}

#[test]
fn sigterm_leaves_program_time_to_exit() {
    let script = "trap 'sleep 3; echo saved; exit 7' TERM; echo up; while :; do sleep 0.1; done";
    let mut process = start_supervised_with(script, None, true);
    let mut line = process.stdin.take().unwrap();
    let mut printed = std::io::BufReader::new(process.stdout.take().unwrap());
    let mut output = String::new();
    printed.read_line(&mut output).unwrap();
    // If its input ended, the supervisor would kill the program.
    let holder = std::thread::spawn(move || {
        line.write_all(b"t").unwrap();
        std::thread::sleep(std::time::Duration::from_secs(8));
    });
    assert_eq!(process.wait().unwrap().code(), Some(7));
    printed.read_line(&mut output).unwrap();
    assert_eq!(output, "up\nsaved\n");
    drop(holder);
}

#[test]
fn detached_processes_are_killed_when_program_exits() {
    // Once in the background, and once in a separate session.
    for leave in ["sleep 300", "setsid sleep 300"] {
        let (code, pid) = run(&format!("{leave} >/dev/null 2>&1 & echo $!; sleep 0.2"));
        assert_eq!(code, Some(0));
        assert!(!is_running(&pid), "{leave} still runs as {pid}");
    }
}

#[test]
fn program_is_terminated_when_supervisor_input_closes() {
    let mut process = start_supervised("sleep 300");
    let since = Instant::now();
    drop(process.stdin.take());
    assert_eq!(process.wait().unwrap().code(), Some(128 + 15));
    assert!(since.elapsed() < Duration::from_secs(60));
}

/// Waits until none of the processes is running.
fn wait_for_end(pids: &str) {
    let since = Instant::now();
    while pids.lines().any(is_running) {
        assert!(since.elapsed() < Duration::from_secs(60), "{pids}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn killed_parent_terminates_program_and_detached_child() {
    let dir = tempfile::tempdir().unwrap();
    let supervisor = supervisor().0.remove(0);
    let script = "setsid sleep 300 >/dev/null 2>&1 & printf '%s\\n%s\\n' $$ $! > pids; sleep 300";
    let order = json!({ "command": ["sh", "-c", script], "folder": dir.path(), "input": "" });
    // The parent is a shell that holds the input of the supervisor.
    let parent = "mkfifo line; \"$0\" < line & exec 3> line; echo \"$1\" >&3; read _";
    let mut parent = Command::new("sh")
        .current_dir(dir.path())
        .args(["-c", parent, &supervisor, &order.to_string()])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pids = || std::fs::read_to_string(dir.path().join("pids")).unwrap_or_default();
    let since = Instant::now();
    while pids().lines().count() < 2 {
        assert!(since.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(pids().lines().all(is_running));
    parent.kill().unwrap();
    parent.wait().unwrap();
    wait_for_end(&pids());
}

#[tokio::test]
async fn dropped_child_kills_detached_processes() {
    let script = "setsid sleep 300 >/dev/null 2>&1 & echo $$; echo $!; wait";
    let launch = Launch::new(["sh", "-c", script]);
    let mut child = supervisor().start(&launch, Input::Text(String::new())).unwrap();
    let reader = levade_process::TailReader::start(child.take_stdout(), Tail::default(), None);
    let since = Instant::now();
    while reader.tail().text().lines().count() < 2 {
        let _ = tokio::time::timeout(Duration::from_millis(20), child.wait()).await;
        assert!(since.elapsed() < Duration::from_secs(60));
    }
    let pids = reader.tail().text();
    assert!(pids.lines().all(is_running), "a wait that is given up ends nothing");
    drop(child);
    wait_for_end(&pids);
}

#[tokio::test]
async fn supervised_run_returns_start_error() {
    for launch in
        [Launch::new(["/no/such"]), Launch { dir: "/no/such".into(), ..Launch::new(["true"]) }]
    {
        let mut run =
            ProgramRun::start(&supervisor(), &launch, String::new(), Tail::default()).unwrap();
        let output = run.wait().await.unwrap();
        assert_eq!(output.code, Some(127));
        assert!(output.start_error().unwrap().starts_with("cannot start "), "{output:?}");
    }
    let run = |script: &str| {
        ProgramRun::start(
            &supervisor(),
            &Launch::new(["sh", "-c", script]),
            "in".into(),
            Tail::default(),
        )
    };
    let output = run("cat; sleep 0.1; kill -9 $$").unwrap().wait().await.unwrap();
    assert_eq!(
        (output.code, output.stdout.text(), output.start_error()),
        (Some(137), "in".into(), None)
    );
    let output = run("echo begun; exec sleep 300").unwrap().stop().await;
    assert_eq!(output.code, None);
}
