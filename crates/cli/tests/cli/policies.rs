//! Tests of a run that trains two adapters on one engine, each for a separate agent.
#![cfg(unix)]

use std::fmt::Write as _;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use crate::support::{Workspace, stderr, stdout};

const SIGKILL: i32 = 9;

/// Creates a directory with tasks that alternate between two agents, and a recipe with one adapter
/// for each.
fn new_workspace() -> Workspace {
    let workspace = Workspace::with_trained_model();
    let mut rows = String::new();
    for i in 0..60u32 {
        let a = i + 3;
        let b = 7 * i % 40 + 2;
        let agent = if i % 2 == 0 { r#", "agent_name": "checker""# } else { "" };
        writeln!(rows, r#"{{"question": "What is {a} + {b}?", "answer": {}{agent}}}"#, a + b)
            .unwrap();
    }
    workspace.write("rows.jsonl", rows);
    workspace.write("recipe.toml", RECIPE);
    workspace
}

const RECIPE: &str = r#"
[run]
name = "two"
folder = "run"
checkpoint_every = 1
keep = 10

[model]
source = "./model"
lora = { rank = 4 }

[policy.checker]
kind = "trained"

[policy.solver]
kind = "trained"

[engine]
micro_batch_tokens = 600

[[tasks]]
kind = "file"
path = "rows.jsonl"
held_out = 0

[agent]
policy = "solver"
tools = ["calculator"]
tool_prompt = "compact"
max_turns = 2
max_tokens = 110

[agent.checker]
policy = "checker"

[reward]
malformed_call = -0.1
unfinished = -0.2

[eval]
tasks = 0

[[phase]]
kind = "rl"
steps = 3
groups = 4
group_size = 4
learning_rate = 1e-2
kl = { estimator = "k3", coefficient = 0.01 }
"#;

/// Returns a command that starts the run, or resumes it if it exists.
fn command(workspace: &Workspace) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_levade"));
    command
        .current_dir(workspace.path(""))
        .args(["train", "recipe.toml"])
        .env_remove("LEVADE_CRASH_AT");
    if workspace.path("run/recipe.toml").exists() {
        command.arg("--resume");
    }
    command
}

/// Reads the adapter of a policy after a step, counted from 1. `None` selects the first trained
/// policy, whose adapter is in the checkpoint directory itself.
fn adapter(workspace: &Workspace, step: usize, policy: Option<&str>) -> Vec<u8> {
    let checkpoint = workspace.checkpoints("run").remove(step - 1);
    let dir = policy.map_or(checkpoint.clone(), |name| checkpoint.join("policies").join(name));
    fs::read(dir.join("adapter_model.safetensors")).unwrap()
}

/// Reads both adapters after the last step, ordered by the names of their policies.
fn adapters(workspace: &Workspace) -> [Vec<u8>; 2] {
    [adapter(workspace, 3, None), adapter(workspace, 3, Some("solver"))]
}

/// The tasks of one group are those of one agent, so the other agent's policy has no update.
#[test]
fn check_measure_reports_update_of_each_policy() {
    let workspace = new_workspace();
    let output = workspace.levade().args(["check", "recipe.toml", "--measure"]).output().unwrap();
    let report = stdout(&output);
    assert!(output.status.success(), "{report}{}", stderr(&output));
    let time = report.lines().find(|line| line.contains("a step of 4 groups may take"));
    let time = time.unwrap_or_else(|| panic!("{report}"));
    for policy in ["checker", "solver"] {
        assert!(time.contains(&format!("update of {policy}")), "{report}");
    }
    assert!(time.contains("not included, because the group left the policy"), "{report}");
}

fn train_both_adapters() -> Workspace {
    let workspace = new_workspace();
    let output = command(&workspace).output().unwrap();
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(text.matches(" · mismatch 0 · ").count(), 3, "{text}");
    workspace
}

/// Each adapter ends with the same bits as in a run in which the other policy is frozen. A run that
/// is killed and resumed, or replayed, ends with the same two adapters.
#[test]
fn two_adapters_in_one_run_match_separate_runs() {
    let workspace = train_both_adapters();
    let both = adapters(&workspace);
    assert!(
        both[0] != adapter(&workspace, 1, None)
            && both[1] != adapter(&workspace, 1, Some("solver")),
        "both learn"
    );
    assert_ne!(both[0], both[1]);

    let replay = workspace.levade().args(["replay", "run"]).output().unwrap();
    assert!(replay.status.success(), "{}", stderr(&replay));
    assert!(stdout(&replay).contains("the same, bit for bit"), "{}", stdout(&replay));

    // `eval` measures the models of all policies together. One model is not enough.
    let eval = |arguments: &[&str]| {
        workspace
            .levade()
            .args(["eval", "run", "--json", "--tasks", "60"])
            .args(arguments)
            .output()
            .unwrap()
    };
    let held_out = ["--set", "tasks.0.held_out=all"];
    let second = "run/checkpoints/step-000003/policies/solver";
    let output = eval(&[&held_out[..], &["--model", second]].concat());
    assert_eq!(output.status.code(), Some(2));
    let want = "use several trained policies, checker, solver, and run/checkpoints/step-000003";
    assert!(stderr(&output).contains(want), "{}", stderr(&output));
    let output = eval(&held_out);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("the model was trained on"), "{}", stderr(&output));
    for (policy, dir) in [("checker", "step-000003\n"), ("solver", "step-000003/policies/solver")] {
        let want = format!("{policy}: run/checkpoints/{dir}");
        assert!(stderr(&output).contains(&want), "{}", stderr(&output));
    }

    for (index, other) in ["solver", "checker"].into_iter().enumerate() {
        let workspace = self::new_workspace();
        let frozen = format!("policy.{other}.kind=frozen");
        let output = command(&workspace).args(["--set", &frozen]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(adapter(&workspace, 3, None) == both[index], "with {other} frozen");
    }

    for point in [
        "attempt_recorded:9",
        "ledger_written:2",
        "micro_batch:3",
        "after_optim_step:3",
        "weights_saved:3",
    ] {
        let workspace = self::new_workspace();
        let killed = command(&workspace).env("LEVADE_CRASH_AT", point).output().unwrap();
        assert_eq!(
            killed.status.signal(),
            Some(SIGKILL),
            "{point} was not reached: {}",
            stderr(&killed)
        );
        let output = command(&workspace).output().unwrap();
        assert!(output.status.success(), "{point}: {}", stderr(&output));
        assert!(adapters(&workspace) == both, "{point}");
    }
}
