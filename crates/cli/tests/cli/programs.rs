//! Agents that are programs, run by the binary: clients of the model's endpoint.
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
