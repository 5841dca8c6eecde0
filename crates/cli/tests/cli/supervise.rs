//! A run with `--restarts` has a process of its own, which is started again when it dies, and ends with its
//! parent.
#![cfg(unix)]

use crate::support::{Place, stderr, stdout};

#[test]
fn a_run_that_dies_is_started_again() {
    let place = Place::with_trained_model();
    let whole = place.train().args(["--run", "whole"]).output().unwrap();
    assert!(whole.status.success(), "{}", stderr(&whole));

    // Four checkpoints in all: only the first process comes to a third.
    let mut command = place.train();
    let output = command.args(["--restarts", "1"]).env("LEVADE_CRASH_AT", "after_rename:3").output().unwrap();
    let (text, notes) = (stdout(&output), stderr(&output));
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("the run was killed (signal 9: ") && notes.contains("(1 of 1)"), "{notes}");
    assert!(text.contains("goes on from run/checkpoints/step-000003"), "{text}");
    assert_eq!(place.weights("run"), place.weights("whole"));
}

#[test]
fn a_run_that_always_dies_is_given_up() {
    let place = Place::with_trained_model();
    let mut command = place.train();
    let output = command.args(["--restarts=1"]).env("LEVADE_CRASH_AT", "ledger_written:1").output().unwrap();
    let notes = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{notes}");
    assert_eq!(notes.matches("starting it again").count(), 1, "{notes}");
    assert!(notes.contains("was killed (signal 9: ") && notes.contains("1 time in a row"), "{notes}");
    // What its user can mend is not tried again.
    let output = place.train().args(["--restarts", "9", "--resume", "--set", "run.seed=8"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!stderr(&output).contains("starting it again"), "{}", stderr(&output));
}

/// A request to stop that reaches the parent alone stops the run as Ctrl-C does from a keyboard, at a safe
/// point, and is not answered with another start.
#[test]
fn the_run_stops_where_its_parent_is_asked_to() {
    for signal in ["-INT", "-TERM"] {
        let place = Place::with_trained_model();
        let output =
            place.train_until_signal(signal, &["--restarts", "3", "--set", "run.checkpoint_every=0"]);
        let notes = stderr(&output);
        assert_eq!(output.status.code(), Some(130), "{notes}");
        assert!(
            notes.contains("stopping at the next safe point") && notes.contains("stopped after step "),
            "{notes}"
        );
        assert!(!notes.contains("starting it again"), "{notes}");

        // Nobody is left to hold the folder.
        let output = place.train().args(["--resume", "--set", "phase.1.steps=12"]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stdout(&output).contains("goes on from run/checkpoints/step-0000"), "{}", stdout(&output));
    }
}
