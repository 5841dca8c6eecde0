//! Tests of `train --restarts`: the run is a child process, which is restarted if it fails and ends
//! with its parent.
#![cfg(unix)]

use crate::support::{Workspace, stderr, stdout};

#[test]
fn killed_run_is_restarted_with_equal_weights() {
    let workspace = Workspace::with_trained_model();
    let uninterrupted = workspace.train().args(["--run", "whole"]).output().unwrap();
    assert!(uninterrupted.status.success(), "{}", stderr(&uninterrupted));

    // The run writes four checkpoints. Only the first process writes three of them, so only that
    // one crashes.
    let mut command = workspace.train();
    let output = command
        .args(["--restarts", "1"])
        .env("LEVADE_CRASH_AT", "after_rename:3")
        .output()
        .unwrap();
    let text = stdout(&output);
    let notes = stderr(&output);
    assert!(output.status.success(), "{notes}");
    assert!(
        notes.contains("the run was killed (signal 9: ") && notes.contains("(1 of 1)"),
        "{notes}"
    );
    assert!(text.contains("resuming from run/checkpoints/step-000003"), "{text}");
    assert_eq!(workspace.weights("run"), workspace.weights("whole"));
}

#[test]
fn restarts_stop_after_limit_or_input_error() {
    let workspace = Workspace::with_trained_model();
    let mut command = workspace.train();
    let output =
        command.args(["--restarts=1"]).env("LEVADE_CRASH_AT", "ledger_written:1").output().unwrap();
    let notes = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{notes}");
    assert_eq!(notes.matches("restarting it in").count(), 1, "{notes}");
    assert!(
        notes.contains("was killed (signal 9: ") && notes.contains("1 time in a row"),
        "{notes}"
    );
    // A run is not restarted after an error that the user must correct.
    let output = workspace
        .train()
        .args(["--restarts", "9", "--resume", "--set", "run.seed=8"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!stderr(&output).contains("restarting it in"), "{}", stderr(&output));
}

/// A request to stop that reaches only the parent stops the run at a safe point, like Ctrl-C on a
/// keyboard, and causes no restart.
#[test]
fn signal_to_supervisor_stops_run_at_safe_point() {
    for signal in ["-INT", "-TERM"] {
        let workspace = Workspace::with_trained_model();
        let output = workspace
            .train_until_signal(signal, &["--restarts", "3", "--set", "run.checkpoint_every=0"]);
        let notes = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{notes}");
        assert!(
            notes.contains("stopping at the next safe point")
                && notes.contains("stopped after step "),
            "{notes}"
        );
        assert!(!notes.contains("restarting it in"), "{notes}");

        // No process holds the lock of the run directory any more.
        let output =
            workspace.train().args(["--resume", "--set", "phase.1.steps=12"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(
            stdout(&output).contains("resuming from run/checkpoints/step-0000"),
            "{}",
            stdout(&output)
        );
    }
}
