//! Tests of runs whose store is on a `levade store serve`: equal to runs on a file, whatever is
//! killed.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use crate::crash::Trace;
use crate::support::{Workspace, stderr, stdout, unused_port};

/// A store server, which is killed when it is dropped.
struct StoreServer {
    child: Child,
    port: u16,
    url: String,
    /// Kept open, so that the server can log.
    _stderr: Lines<BufReader<ChildStderr>>,
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl StoreServer {
    /// Starts a server on `records.db` in a workspace, and waits until it listens.
    fn start(workspace: &Workspace, port: u16) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_levade"))
            .current_dir(workspace.path(""))
            .args(["store", "serve", "--db", "records.db", "--port", &port.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let url = stderr
            .by_ref()
            .map(Result::unwrap)
            .find_map(|line| line.find("http://").map(|start| line[start..].trim().to_owned()));
        StoreServer { child, port, url: url.expect("the address of the server"), _stderr: stderr }
    }

    /// Kills the server, and starts another one at the same port.
    fn restart(&mut self, workspace: &Workspace) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        // The trainer meets a closed port for a while.
        std::thread::sleep(Duration::from_millis(300));
        *self = StoreServer::start(workspace, self.port);
    }
}

/// Returns a command that trains with the store on a server.
fn train(workspace: &Workspace, url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_levade"));
    command
        .current_dir(workspace.path(""))
        .args(["train", "recipe.toml", "--set", "engine.threads=1", "--store", url])
        .env("LEVADE_STORE_TIMEOUT", "60")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn store_file(workspace: &Workspace) -> PathBuf {
    workspace.path("records.db.runs/run.db")
}

#[test]
fn run_on_killed_store_server_equals_run_on_file() {
    let workspace = Workspace::with_trained_model();
    let mut server = StoreServer::start(&workspace, unused_port());
    let mut run = train(&workspace, &server.url).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("grpo 1/")), "{:?}", run.wait_with_output());
    server.restart(&workspace);
    lines.for_each(drop);
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!workspace.path("run/run.db").exists());
    Trace::read(&workspace, &store_file(&workspace)).assert_same("killed store server");
}

#[test]
fn killed_trainer_resumes_from_its_store_server_at_once() {
    let workspace = Workspace::with_trained_model();
    let server = StoreServer::start(&workspace, 0);
    let killed =
        train(&workspace, &server.url).env("LEVADE_CRASH_AT", "in_optim_step:2").output().unwrap();
    assert!(!killed.status.success());
    let output = train(&workspace, &server.url).arg("--resume").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    Trace::read(&workspace, &store_file(&workspace)).assert_same("killed trainer");
    for arguments in [["inspect", "run"], ["replay", "run"]] {
        let output = workspace.levade().args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
        assert!(!stdout(&output).is_empty(), "{arguments:?}");
    }
    // Another directory does not overwrite the run, and stays empty.
    let url = format!("{}/run", server.url);
    let output = workspace.train().args(["--run", "other", "--store", &url]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("already holds records of a run"), "{}", stderr(&output));
    assert!(!workspace.path("other/recipe.toml").exists());
}

#[test]
fn unreachable_store_server_is_named_in_error() {
    let workspace = Workspace::with_trained_model();
    let url = format!("http://127.0.0.1:{}", unused_port());
    let output = train(&workspace, &url).env("LEVADE_STORE_TIMEOUT", "1").output().unwrap();
    assert!(!output.status.success());
    let text = stderr(&output);
    assert!(text.contains(&url) && text.contains("LEVADE_STORE_TIMEOUT"), "{text}");
}
