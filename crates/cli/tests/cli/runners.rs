//! Tests of runners: processes of the binary that make the attempts of a trainer in another
//! process.
#![cfg(unix)]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use levade_store::testing::wait;
use levade_store::{AttemptSummary, Sqlite, Status, Store};
use levade_tree::Purpose;
use serde_json::json;

use crate::support::{Workspace, stderr, stdout, unused_port};

/// Process of a runner or a store. It is killed when dropped.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts the binary in `dir`. Its output is in the file `NAME.log` of the workspace.
    fn start(workspace: &Workspace, name: &str, dir: &Path, arguments: &[&str]) -> Self {
        let log = workspace.path(&format!("{name}.log"));
        let file = File::create(&log).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_levade"))
            .current_dir(dir)
            .env_remove("LEVADE_API_KEYS")
            .args(arguments)
            .stderr(Stdio::from(file.try_clone().unwrap()))
            .stdout(Stdio::from(file))
            .spawn()
            .unwrap();
        Process { child, log }
    }

    /// Starts a runner of `store` that finds files in `dir`.
    fn runner(workspace: &Workspace, name: &str, dir: &Path, store: &str, slots: &str) -> Self {
        let arguments = ["runner", "--name", name, "--slots", slots, "--store", store];
        Process::start(workspace, name, dir, &arguments)
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Waits until the process has printed `text`.
    fn wait_for(&self, text: &str) {
        let start = Instant::now();
        while !self.log().contains(text) {
            assert!(start.elapsed() < Duration::from_secs(100), "no {text:?} in {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }

    /// Waits until the runner has exited, and returns its exit code.
    fn exit_code(&mut self) -> Option<i32> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the runner has not exited: {}", self.log());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Adds `[runners]` to the recipe, with a store in a file. Returns the location of the store.
fn lease(workspace: &Workspace) -> String {
    let store = workspace.path("rollouts.db").display().to_string();
    // A runner keeps its leases on a machine that is busy for a while.
    lease_from(workspace, &store, 30);
    store
}

/// Adds `[runners]` to the recipe.
fn lease_from(workspace: &Workspace, store: &str, lease_seconds: u32) {
    let table = format!(
        "[runners]\nstore = {store:?}\nlease_seconds = {lease_seconds}\nwait_seconds = 100\n\
         [agent]\n"
    );
    workspace.replace("recipe.toml", "[agent]\n", &table);
}

fn train(workspace: &Workspace, changes: &[&str]) -> std::process::Output {
    let mut train = workspace.train();
    for change in changes {
        train.args(["--set", change]);
    }
    let output = train.output().unwrap();
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    output
}

/// Returns the number of tries that were lost with their runner.
fn lost_tries(workspace: &Workspace) -> usize {
    let store = wait(Sqlite::open_existing(&workspace.path("run/run.db"))).unwrap();
    let failures = wait(store.failures(Purpose::Train)).unwrap();
    failures.iter().filter(|failure| failure.status == Status::Abandoned).count()
}

/// Returns the attempts of training with this status.
fn attempts(workspace: &Workspace, status: Status) -> Vec<AttemptSummary> {
    let store = wait(Sqlite::open_existing(&workspace.path("run/run.db"))).unwrap();
    let mut found = wait(store.summaries(Purpose::Train)).unwrap();
    found.retain(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap().status == status);
    found
}

/// Changes that make a run short and its tool slow.
const SHORT: [&str; 3] = ["eval.tasks=0", "phase.1.steps=2", "agent.tool_delay=0.3"];

#[test]
fn killed_runner_changes_no_weights_with_server_or_file() {
    let workspace = Workspace::with_trained_model();
    let store = lease(&workspace);
    let runners =
        ["a", "b"].map(|name| Process::runner(&workspace, name, &workspace.path(""), &store, "2"));
    runners.iter().for_each(|runner| runner.wait_for("making attempts of all runs"));
    train(&workspace, &SHORT);
    // On a busy machine, one of them may make all attempts.
    let logs = runners.each_ref().map(Process::log);
    assert!(logs.iter().any(|log| log.contains("making attempts of run/tiny,")), "{logs:?}");
    drop(runners);
    assert_eq!(attempts(&workspace, Status::Completed).len(), 12);
    assert_eq!(lost_tries(&workspace), 0);
    let undisturbed = workspace.weights("run");

    let workspace = Workspace::with_trained_model();
    let port = unused_port().to_string();
    let store = format!("http://127.0.0.1:{port}");
    lease_from(&workspace, &store, 2);
    // The runner starts before the store and the trainer.
    let dir = workspace.path("");
    let killed = Process::runner(&workspace, "killed", &dir, &store, "4");
    let serve = ["store", "serve", "--db", "served.db", "--port", &port];
    let server = Process::start(&workspace, "store", &dir, &serve);
    let kill_and_replace = || {
        killed.wait_for("making attempts of run/tiny,");
        // Its first attempts sample, or wait for their slow tools.
        std::thread::sleep(Duration::from_millis(100));
        killed.signal("-9");
        Process::runner(&workspace, "other", &dir, &store, "1")
    };
    let other = std::thread::scope(|scope| {
        let other = scope.spawn(kill_and_replace);
        train(&workspace, &SHORT);
        other.join().unwrap()
    });
    drop((killed, other, server));
    assert_eq!(attempts(&workspace, Status::Completed).len(), 12, "every attempt is made");
    let lost = lost_tries(&workspace);
    assert!(lost > 0, "the killed runner had attempts");
    assert!(workspace.weights("run") == undisturbed, "repeated tries sample the same tokens");
}

#[test]
fn program_runs_in_directory_of_runner_and_drains() {
    let workspace = Workspace::with_trained_model();
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/clients");
    // Only the runner has the files of the program.
    let dir = workspace.path("elsewhere");
    fs::create_dir_all(&dir).unwrap();
    for name in ["calculator.py", "plain.py"] {
        fs::copy(clients.join(name), dir.join(name)).unwrap();
    }
    let store = lease(&workspace);
    let command = json!(["python3", "plain.py"]);
    let agent = format!("[agent]\nkind = \"program\"\ncommand = {command}\n");
    workspace.replace("recipe.toml", "[agent]\n", &agent);
    workspace.replace(
        "recipe.toml",
        "[reward]\n",
        "[reward]\nscorer = { kind = \"program\", from = \"last_line\" }\n",
    );
    let mut runner = Process::runner(&workspace, "a", &dir, &store, "3");
    let changes = [
        "eval.tasks=0",
        "agent.max_turns=6",
        "agent.max_tokens=300",
        "agent.attempt_seconds=100",
        "phase.1.steps=1",
        "engine.micro_batch_tokens=1200",
    ];
    train(&workspace, &changes);
    assert_eq!(attempts(&workspace, Status::Completed).len(), 6, "{}", runner.log());
    runner.signal("-TERM");
    assert_eq!(runner.exit_code(), Some(130), "{}", runner.log());
}

#[test]
fn runner_error_names_missing_program_directory() {
    let workspace = Workspace::with_trained_model();
    let store = lease(&workspace);
    let agent =
        "[agent]\nkind = \"program\"\ncommand = [\"python3\", \"x.py\"]\nfolder = \"sub\"\n";
    workspace.replace("recipe.toml", "[agent]\n", agent);
    let dir = workspace.path("elsewhere");
    fs::create_dir_all(&dir).unwrap();
    let runner = Process::runner(&workspace, "a", &dir, &store, "3");
    let output = workspace.train().args(["--set", "eval.tasks=0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let missing = dir.join("sub").display().to_string();
    for text in [runner.log(), stderr(&output)] {
        assert!(text.contains(&missing) && text.contains("--dir"), "{text}");
    }
}
