//! Agents that are programs, run by the binary: clients of the model's endpoint, and the keeper that starts
//! them.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Place, stderr, stdout};

/// The folder of small clients, and of the script that checks what they leave behind.
fn conformance() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance")
}

/// Trains with a client, whose agent asks two questions and has a calculator of its own; all of its tokens
/// must be in the record once, and be trained to the bit.
fn trains_with(python: &str, program: &str, mode: &[&str]) {
    let place = Place::with_trained_model();
    for name in ["calculator.py", program] {
        fs::copy(conformance().join("clients").join(name), place.path(name)).unwrap();
    }
    let command = [&[python, program][..], mode].concat();
    let agent = format!("[agent]\nkind = \"program\"\ncommand = {}\n", json!(command));
    place.replace("recipe.toml", "[agent]\n", &agent);
    place.replace(
        "recipe.toml",
        "[reward]\n",
        "[reward]\nscorer = { kind = \"program\", from = \"last_line\" }\n",
    );
    let mut train = place.train();
    // Of two questions with three replies each, none is cut.
    for change in [
        "eval.tasks=0",
        "agent.max_turns=6",
        "agent.max_tokens=300",
        "agent.attempt_seconds=100",
        "phase.1.steps=1",
        "engine.micro_batch_tokens=1200",
    ] {
        train.args(["--set", change]);
    }
    let output = train.output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let checked = Command::new("python3")
        .arg(conformance().join("clients.py"))
        .arg("--check")
        .arg(place.path(""))
        .output()
        .unwrap();
    let told = stdout(&checked);
    assert!(checked.status.success(), "{program} {mode:?}: {told}{}", stderr(&checked));
    // Two questions in each of six attempts: the second continues the first, and nothing forks.
    assert!(told.contains(", 6 began, ") && !told.contains("forked"), "{told}");
    assert!(!told.contains(" 0 continued") && !told.contains(" 0 tool calls"), "{told}");
}

#[test]
fn a_program_without_packages_is_recorded_and_trained() {
    trains_with("python3", "plain.py", &[]);
}

#[test]
fn the_openai_package_is_recorded_and_trained() {
    let Some(folder) = std::env::var_os("LEVADE_CLIENTS") else {
        eprintln!("skipped: LEVADE_CLIENTS names no environment with the openai package; .ci/run makes one");
        return;
    };
    let python = Path::new(&folder).join("bin/python");
    for (program, mode) in [
        ("openai_chat.py", "whole"),
        ("openai_chat.py", "stream"),
        ("openai_responses.py", "whole"),
        ("openai_responses.py", "stream"),
        ("openai_responses.py", "previous"),
    ] {
        trains_with(python.to_str().unwrap(), program, &[mode]);
    }
}

/// A keeper of a shell's script, with the line to it held open, on which `input` comes or what `asks` it to
/// end.
fn keeper_with(script: &str, input: Option<&str>, asks: bool) -> Child {
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_levade"))
        .arg("keep")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let order = json!({ "command": ["sh", "-c", script], "folder": "", "input": input, "asks": asks });
    writeln!(keeper.stdin.as_mut().unwrap(), "{order}").unwrap();
    keeper
}

fn keeper(script: &str) -> Child {
    keeper_with(script, Some("in\n"), false)
}

/// How a script ends under a keeper whose line stays open, and what it prints.
fn kept(script: &str) -> (Option<i32>, String) {
    let mut keeper = keeper(script);
    let line = keeper.stdin.take();
    let output = keeper.wait_with_output().unwrap();
    drop(line);
    (output.status.code(), stdout(&output))
}

/// Whether a process runs that is no corpse.
fn runs(pid: &str) -> bool {
    let found = Command::new("ps").args(["-o", "stat=", "-p", pid.trim()]).output().unwrap();
    !stdout(&found).trim().is_empty() && !stdout(&found).starts_with('Z')
}

#[test]
fn a_keeper_waits_for_its_program_and_ends_as_it_did() {
    assert_eq!(kept("read line; sleep 0.3; echo $line; exit 7"), (Some(7), "in\n".into()));
    assert_eq!(kept("true"), (Some(0), String::new()));
    assert_eq!(kept("kill -TERM $$"), (Some(128 + 15), String::new()));
}

#[test]
fn a_program_that_is_asked_to_end_has_its_time() {
    let script = "trap 'sleep 3; echo saved; exit 7' TERM; echo up; while :; do sleep 0.1; done";
    let mut keeper = keeper_with(script, None, true);
    let mut line = keeper.stdin.take().unwrap();
    let mut printed = std::io::BufReader::new(keeper.stdout.take().unwrap());
    let mut said = String::new();
    printed.read_line(&mut said).unwrap();
    // Without its line it would be ended by force.
    let holder = std::thread::spawn(move || {
        line.write_all(b"t").unwrap();
        std::thread::sleep(std::time::Duration::from_secs(8));
    });
    assert_eq!(keeper.wait().unwrap().code(), Some(7));
    printed.read_line(&mut said).unwrap();
    assert_eq!(said, "up\nsaved\n");
    drop(holder);
}

#[test]
fn nothing_that_a_program_leaves_behind_outlives_its_keeper() {
    // In the background, and in a session of its own.
    for leave in ["sleep 300", "setsid sleep 300"] {
        let (code, pid) = kept(&format!("{leave} >/dev/null 2>&1 & echo $!; sleep 0.2"));
        assert_eq!(code, Some(0));
        assert!(!runs(&pid), "{leave} still runs as {pid}");
    }
}

#[test]
fn a_program_ends_with_the_line_to_its_keeper() {
    let mut keeper = keeper("sleep 300");
    let since = Instant::now();
    drop(keeper.stdin.take());
    assert_eq!(keeper.wait().unwrap().code(), Some(128 + 15));
    assert!(since.elapsed() < Duration::from_secs(60));
}
