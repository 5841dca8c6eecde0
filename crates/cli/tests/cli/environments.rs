//! Tests of environments that drive their attempts, run by the binary.
//!
//! The package `gymnasium` is a small stand-in with the same interface, in the directory of the
//! recipe, so that the real package need not be installed.
#![cfg(unix)]

use std::fs;
use std::process::Command;

use crate::support::{Workspace, stderr, stdout};

/// The stand-in package with one environment, a corridor that ends after two steps. Each step has a
/// reward, unless the configured fault occurs.
const PACKAGE: &str = r#"
class error:
    class Error(Exception):
        pass
    class DependencyNotInstalled(Error):
        pass

class spaces:
    class Discrete:
        def __init__(self, n):
            self.n = n
    class Text:
        pass

class Corridor:
    action_space, render_mode, spec = spaces.Text(), None, None

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, seed):
        self.at = 0
        return f"You stand at {seed % 10}.", {}

    def step(self, action):
        self.at += 1
        if self.fault == "hang":
            import time
            time.sleep(1000)
        if self.fault == "raise":
            raise RuntimeError("the floor gave way")
        reward = float("nan") if self.fault == "no number" else 0.5 * self.at
        return f"Step {self.at}.", reward, self.at == 2, False, {}

    def close(self):
        pass

def make(name, **config):
    if name != "Corridor-v0":
        raise error.Error(f"Environment `{name}` doesn't exist.")
    return Corridor(**config)
"#;

const RECIPE: &str = r#"
[run]
name = "corridor"
folder = "run"
[model]
source = "./model"
[[tasks]]
kind = "gymnasium"
environment = "Corridor-v0"
train = 8
held_out = 2
[agent]
kind = "environment"
max_turns = 4
max_tokens = 64
[reward]
scorer = { kind = "environment" }
[eval]
tasks = 2
"#;

fn corridor() -> Workspace {
    let workspace = Workspace::new();
    fs::create_dir(workspace.path("gymnasium")).unwrap();
    workspace.write("gymnasium/__init__.py", PACKAGE);
    workspace.write("recipe.toml", RECIPE);
    workspace
}

/// Returns one line for each attempt in the store. `print` is a Python expression over `status`,
/// `score`, `earned` and `outcome`.
fn query_store(workspace: &Workspace, print: &str) -> String {
    let program = format!(
        "import json, sqlite3\n\
         rows = sqlite3.connect('{}').execute('SELECT status, score, earned, outcome FROM \
         attempts')\n\
         for status, score, earned, outcome in rows:\n    earned, outcome = json.loads(earned), \
         json.loads(outcome)\n    print({print})",
        workspace.path("run/run.db").display()
    );
    let output = Command::new("python3").args(["-c", &program]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

#[test]
fn environment_reward_is_kept_at_token_limit() {
    let workspace = corridor();
    let output = workspace.train().output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let rows =
        query_store(&workspace, "status, score, [[part['reward'], part['by']] for part in earned]");
    // The first completion of a model with random weights uses all tokens of the attempt, so there
    // is no second turn.
    let one = "completed 0.5 [[0.5, {'turn': 0}]]\n";
    assert_eq!(rows, [one, one].concat());
}

#[test]
fn environment_failure_is_reported_and_gives_no_reward() {
    for (error, want) in [
        ("raise", "Corridor-v0 ended with 1: RuntimeError: the floor gave way (__init__.py, line "),
        ("no number", "Corridor-v0 ended with 1: the reward of step 1 is nan, which is no reward"),
    ] {
        let workspace = corridor();
        let output = workspace
            .train()
            .args(["--set", &format!("tasks.0.config.fault={error}")])
            .output()
            .unwrap();
        assert!(stderr(&output).contains(want), "{}", stderr(&output));
        assert_eq!(
            query_store(&workspace, "status, score, earned"),
            "abandoned None []\n".repeat(2)
        );
    }
}

#[test]
fn hanging_environment_is_stopped_at_attempt_timeout() {
    let workspace = corridor();
    let output = workspace
        .train()
        .args(["--set", "tasks.0.config.fault=hang", "--set", "agent.attempt_seconds=3"])
        .output()
        .unwrap();
    let message = query_store(&workspace, "outcome['finish'], outcome['troubles'][0]['why']");
    assert!(
        message.lines().all(|line| line.contains("was not done within 3s, and was stopped")),
        "{message}"
    );
    assert_eq!(message.lines().count(), 2, "{}", stderr(&output));
}

#[test]
fn check_does_not_call_environment_scorer() {
    let workspace = corridor();
    let output = workspace.levade().args(["check", "recipe.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));
    assert!(stdout(&output).contains("not called"), "{}", stdout(&output));
}

#[test]
fn invalid_environment_recipe_is_rejected_with_remedy() {
    let reject = |change: &str| {
        let workspace = corridor();
        let output = workspace.train().args(["--set", change]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    };
    let message = reject("agent.kind=tools");
    assert!(
        message.contains("`agent.kind` is \"tools\", but must be \"environment\" for the tasks of"),
        "{message}"
    );
    let message = reject("tasks.0.environment=Nowhere-v0");
    assert!(message.contains("gymnasium cannot make Nowhere-v0"), "{message}");
    let message = reject("tasks.0.worker.python=/nonexistent/python");
    assert!(message.contains("cannot start /nonexistent/python"), "{message}");
    let message = reject("tasks.0.train=0");
    assert!(message.contains("`tasks.0.train` is 0, but must be at least 1"), "{message}");
}
