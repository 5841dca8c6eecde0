//! Tests of `levade export` and `levade store check` on a run.

use std::fs;

use serde_json::Value;

use crate::support::{Workspace, stderr, stdout};

fn rows(workspace: &Workspace, arguments: &[&str]) -> Vec<Value> {
    let output = workspace.levade().args(["export", "run"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn export_writes_every_format_and_check_finds_damage() {
    let workspace = Workspace::with_trained_model();
    let output = workspace.train().args(["--set", "phase.1.steps=2"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));

    let all = rows(&workspace, &["--tokens"]);
    assert_eq!(all.len(), 12);
    for row in &all {
        let messages = row["messages"].as_array().unwrap_or_else(|| panic!("{row}"));
        let roles: Vec<&str> = messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles[..2], ["system", "user"], "{row}");
        assert!(roles.contains(&"assistant"), "{row}");
        let question: Value = serde_json::from_str(row["task_json"].as_str().unwrap()).unwrap();
        assert_eq!(messages[1]["content"], question["question"]);
        assert_eq!(
            row["token_ids"].as_array().unwrap().len() as u64,
            row["tokens"].as_u64().unwrap()
        );
        // The model's calls have results, and the results name the calls.
        for (message, next) in messages.iter().zip(&messages[1..]) {
            if let Some(call) = message["tool_calls"].get(0) {
                assert_eq!(call["function"]["name"], "calculator");
                assert_eq!((&next["role"], &next["tool_call_id"]), (&"tool".into(), &call["id"]));
            }
        }
    }
    assert!(all.iter().any(|row| row["messages"][2]["tool_calls"].is_array()), "{:?}", all[0]);
    assert_eq!(rows(&workspace, &["--step", "1"]).len(), 6);
    assert!(!rows(&workspace, &["--purpose", "demonstration"]).is_empty());
    let one = all[3]["slot"].as_str().unwrap();
    let id = all[3]["attempt"].as_str().unwrap();
    assert_eq!(rows(&workspace, &["--attempt", one]), rows(&workspace, &["--attempt", id]));

    for (format, name) in [
        ("parquet", "rows.parquet"),
        ("verl", "verl.parquet"),
        ("verl-sft", "sft.parquet"),
        ("trl-sft", "sft.jsonl"),
        ("trl-preference", "pairs.jsonl"),
        ("atif", "trajectories/"),
    ] {
        let export = || {
            let mut command = workspace.levade();
            command.args(["export", "run", "--format", format, "--out", name]).output().unwrap()
        };
        let output = export();
        assert!(output.status.success(), "{format}: {}", stderr(&output));
        assert!(workspace.path(name).exists(), "{format}");
        // The target is not overwritten.
        let output = export();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("exists already"), "{}", stderr(&output));
    }
    assert_eq!(fs::read_dir(workspace.path("trajectories")).unwrap().count(), 12);

    let check = |arguments: &[&str]| {
        let mut command = workspace.levade();
        command.args(["store", "check", "run"]).args(arguments).output().unwrap()
    };
    let output = check(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    assert!(stdout(&output).contains("is not damaged"), "{}", stdout(&output));
    // A byte of log-probabilities that stand in the file once, in a single attempt.
    let mut bytes = fs::read(workspace.path("run/run.db")).unwrap();
    let offset_of = |window: &[Value]| {
        // Context tokens have none.
        let numbers: Option<Vec<f64>> = window.iter().map(Value::as_f64).collect();
        let pattern: Vec<u8> =
            numbers?.into_iter().flat_map(|p| (p as f32).to_le_bytes()).collect();
        let mut offsets = bytes.windows(pattern.len()).enumerate().filter(|(_, b)| *b == pattern);
        Some((offsets.next()?.0, offsets.next())).filter(|(_, other)| other.is_none())
    };
    let (damaged, at) = all
        .iter()
        .flat_map(|row| row["logprobs"].as_array().unwrap().windows(6).map(move |w| (row, w)))
        .find_map(|(row, window)| Some((row, offset_of(window)?.0)))
        .unwrap();
    bytes[at + 2] ^= 1;
    fs::write(workspace.path("run/run.db"), bytes).unwrap();
    let output = check(&["--out", "rescued.db", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["attempts"]["lost"], 1, "{report}");
    assert_eq!(report["findings"][0]["subject"], damaged["slot"], "{report}");

    for (arguments, want) in [
        (["run", "--out", "rescued.db"], "--out rescued.db exists already; name a new file"),
        (["nowhere", "--out", "new.db"], "nowhere does not exist; name the directory of a run"),
    ] {
        let mut command = workspace.levade();
        let output = command.args(["store", "check"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(want), "{}", stderr(&output));
    }

    // The run resumes from the rescued file.
    fs::rename(workspace.path("rescued.db"), workspace.path("run/run.db")).unwrap();
    let output = workspace.train().args(["--resume", "--set", "phase.1.steps=3"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(rows(&workspace, &[]).len() > 12, "the third step is recorded");
}

#[test]
fn export_rejects_target_that_format_cannot_write() {
    let workspace = Workspace::new();
    for (arguments, part) in [
        (&["--format", "trl-sft", "--out", "a.parquet"][..], "Parquet"),
        (&["--format", "parquet", "--out", "a.jsonl"], ".parquet"),
        (&["--format", "verl", "--out", "dir/"], "only ATIF"),
        (&["--format", "verl", "--tokens"], "rows of --format verl have no columns for --tokens"),
        (&["--format", "trl-sft", "--tokens", "--out", "a.jsonl"], "--format trl-sft"),
        (&["--step", "5..2"], "A..B"),
        (&["--status", "running"], "superseded"),
    ] {
        let output = workspace.levade().args(["export", "run"]).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains(part), "{arguments:?}: {}", stderr(&output));
    }
}
