//! Tests of agent programs, which are clients of the model's endpoint, run by the binary.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::support::{Workspace, stderr, stdout};

/// Returns the directory of the small client programs and of the script that checks their recorded
/// attempts.
fn conformance() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance")
}

/// Trains with a client program that asks two questions and has its own calculator. Asserts that
/// each of its tokens is recorded once and that training reproduces the log-probabilities to the
/// bit.
fn trains_with(python: &str, program: &str, mode: &[&str]) {
    let workspace = Workspace::with_trained_model();
    for name in ["calculator.py", program] {
        fs::copy(conformance().join("clients").join(name), workspace.path(name)).unwrap();
    }
    let command = [&[python, program][..], mode].concat();
    let agent = format!("[agent]\nkind = \"program\"\ncommand = {}\n", json!(command));
    workspace.replace("recipe.toml", "[agent]\n", &agent);
    workspace.replace(
        "recipe.toml",
        "[reward]\n",
        "[reward]\nscorer = { kind = \"program\", from = \"last_line\" }\n",
    );
    let mut train = workspace.train();
    // The limits suffice for two questions of three turns each.
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
        .arg(workspace.path(""))
        .output()
        .unwrap();
    let report = stdout(&checked);
    assert!(checked.status.success(), "{program} {mode:?}: {report}{}", stderr(&checked));
    // Each of six attempts has two questions: the second one continues the conversation without a
    // fork.
    assert!(report.contains(", 6 began, ") && !report.contains("forked"), "{report}");
    assert!(!report.contains(" 0 continued") && !report.contains(" 0 tool calls"), "{report}");
}

#[test]
fn program_without_packages_is_recorded_and_trained() {
    trains_with("python3", "plain.py", &[]);
}

#[test]
fn openai_package_is_recorded_and_trained() {
    let Some(dir) = std::env::var_os("LEVADE_CLIENTS") else {
        eprintln!(
            "skipped: LEVADE_CLIENTS names no environment with the openai package; .ci/run makes \
             one"
        );
        return;
    };
    let python = Path::new(&dir).join("bin/python");
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
