//! Tests of logging: the destinations, and what logs contain and omit.

use std::fs;

use crate::support::{Workspace, stderr, stdout};

#[test]
fn log_options_select_destination_and_levels() {
    let workspace = Workspace::new();
    let run = ["--set", "phase.1.steps=1", "--log", "debug", "--log-file", "run.log"];
    let output = workspace.train().args(run).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("DEBUG") && !stdout(&output).contains("DEBUG"));
    let log = fs::read_to_string(workspace.path("run.log")).unwrap();
    let events = [
        (" INFO levade_trainer::trainer: run started ", 1),
        ("levade_trainer::trainer: completed a step phase=1 ", 1),
        ("levade_trainer::checkpoint: wrote a checkpoint ", 2),
        ("levade_agent::attempt: attempt started ", 8),
        ("levade_agent::tool_loop: completion sampled turn=0 ", 8),
        ("levade_agent::attempt: attempt ended ", 8),
        ("levade_engine::service: accepted request ", 8),
        ("levade_engine::sequence: sampled first token ", 8),
        ("levade_engine::sequence: finished request ", 8),
        ("finished learner command policy=0 command=\"optim_step\" ", 2),
        ("levade_store::sqlite: recorded key=plan of phase 1/step 0 ", 1),
    ];
    for (event, min_count) in events {
        let found = log.matches(event).count();
        assert!(found >= min_count, "{found} of {min_count} {event:?} in\n{log}");
    }
    // The log contains no system prompts, no tasks and no colors.
    assert!(!log.contains("calculator") && !log.contains("What") && !log.contains('\x1b'), "{log}");

    // The next process appends to the file, and only events of the requested levels.
    let inspect = |arguments: &[&str]| {
        let output = workspace.levade().args(["inspect", "run"]).args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    assert_eq!(inspect(&["--log-file", "run.log"]), "");
    assert_eq!(fs::read_to_string(workspace.path("run.log")).unwrap(), log);
    assert_eq!(inspect(&["--log", "info,store=trace", "--log-file", "run.log"]), "");
    let longer = fs::read_to_string(workspace.path("run.log")).unwrap();
    assert!(
        longer.starts_with(&log)
            && longer[log.len()..].contains("TRACE levade_store::sqlite: read ")
    );
    // Without a file, and with the environment variable, which the option overrides.
    assert_eq!(inspect(&[]), "");
    let by_environment = |arguments: &[&str]| {
        let command = ["inspect", "run"];
        let output = workspace
            .levade()
            .env("LEVADE_LOG", "trace")
            .args(command)
            .args(arguments)
            .output()
            .unwrap();
        stderr(&output)
    };
    assert!(by_environment(&[]).contains("TRACE levade_store::sqlite: read "));
    assert_eq!(by_environment(&["--log", "info"]), "");
}

#[test]
fn invalid_log_filter_or_file_is_reported() {
    let workspace = Workspace::new();
    for (arguments, part) in [
        (["--log", "loud"], "`loud` is not a level"),
        (["--log", "stor=debug"], "there is no crate `stor`"),
        (["--log-file", "no/such/folder"], "no/such/folder"),
    ] {
        let output = workspace.train().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}
