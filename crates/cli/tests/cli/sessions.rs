//! Sessions of an agent outside of the process: recorded by `levade serve --record`, read by the
//! commands for runs, and trained on by a recipe. Runs that go back to an earlier step.
#![cfg(unix)]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use levade_store::testing::wait;
use levade_store::{Attempt, Purpose, Sqlite, Status, Store};
use serde_json::{Value, json};

use crate::support::{Workspace, stderr, stdout};

/// A server that records sessions, which is killed when it is dropped.
struct Server {
    child: Child,
    address: String,
    /// Kept open, so that the server can log.
    _stderr: BufReader<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Serves the model of a workspace, and waits until the server listens.
    fn start(workspace: &Workspace) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_levade"))
            .current_dir(workspace.path(""))
            .args(["serve", "model", "--record", "served", "--port", "0", "--threads", "1"])
            .args(["--max-tokens", "40"])
            .env("LEVADE_API_KEYS", "secret")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut read = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "{read}");
            if let Some((_, rest)) = line.split_once("http://") {
                break rest.trim().trim_end_matches("/v1").to_owned();
            }
            read += &line;
        };
        Server { child, address, _stderr: stderr }
    }

    /// Posts a document and returns the response, which must be a success.
    fn post(&self, path: &str, key: &str, body: &Value) -> Value {
        let body = body.to_string();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        let mut client = TcpStream::connect(&self.address).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).unwrap();
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
        serde_json::from_str(response.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Makes a session of one call that earns `reward`, and ends it if `ends`.
    fn session(&self, task: &str, reward: f64, ends: bool) {
        let started = self.post("/rl/start_session", "secret", &json!({ "task_id": task }));
        let key = started["api_key"].as_str().unwrap();
        let messages = json!([{ "role": "user", "content": "12 + 30 = ?" }]);
        self.post("/v1/chat/completions", key, &json!({ "model": "model", "messages": messages }));
        self.post("/rl/set_reward", key, &json!({ "reward": reward }));
        if ends {
            self.post("/rl/end_session", key, &json!({}));
        }
    }
}

fn recorded(workspace: &Workspace, run: &str, purpose: Purpose) -> Vec<Attempt> {
    let store = wait(Sqlite::open_existing(&workspace.path(run).join("run.db"))).unwrap();
    let all = wait(store.summaries(purpose)).unwrap();
    all.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

const RECIPE: &str = r#"
run = { name = "taken", folder = "run" }
model = { source = "model" }
engine = { threads = 1 }
eval = { tasks = 0 }
reward = { scorer = { kind = "program" } }

[[tasks]]
kind = "sessions"
path = "served"

[[phase]]
kind = "rl"
steps = 2
groups = 2
group_size = 2
learning_rate = 1e-3
"#;

#[test]
fn sessions_are_recorded_shown_and_trained_on() {
    let workspace = Workspace::with_trained_model();
    let server = Server::start(&workspace);
    for (task, reward) in [("a", 1.0), ("a", 0.0), ("b", 0.5), ("b", 1.0), ("b", 0.0)] {
        server.session(task, reward, true);
    }
    // A killed server leaves its open session as abandoned.
    server.session("a", 1.0, false);
    drop(server);
    let server = Server::start(&workspace);
    drop(server);

    let sessions = recorded(&workspace, "served", Purpose::Session);
    assert_eq!(sessions.len(), 5);
    assert!(sessions.iter().all(|session| session.status == Status::Completed));
    let list = workspace.levade().args(["inspect", "served", "--sessions"]).output().unwrap();
    assert_eq!(stdout(&list).lines().count(), 5, "{}", stderr(&list));
    let name = sessions[0].slot.name();
    let shown =
        workspace.levade().args(["inspect", "served", "--attempt", &name]).output().unwrap();
    assert!(stdout(&shown).contains("12 + 30 = ?"), "{}", stderr(&shown));
    let export = ["export", "served", "--purpose", "session", "--out", "sessions.jsonl"];
    let exported = workspace.levade().args(export).output().unwrap();
    assert!(exported.status.success(), "{}", stderr(&exported));
    let rows = fs::read_to_string(workspace.path("sessions.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 5);

    workspace.write("taken.toml", RECIPE);
    let large = ["train", "taken.toml", "--run", "large", "--set", "phase.0.group_size=9"];
    let rejected = workspace.levade().args(large).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    for want in ["form no group of 9", "5 sessions are left out, because they are fewer than the 9"]
    {
        assert!(stderr(&rejected).contains(want), "{want}: {}", stderr(&rejected));
    }
    let trained = workspace.levade().args(["train", "taken.toml"]).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    let note = "1 sessions are left out, because they are fewer than the 2 of a group";
    let output = stdout(&trained) + &stderr(&trained);
    assert!(output.contains(note), "{output}");
    let taken = recorded(&workspace, "run", Purpose::Train);
    assert_eq!(taken.len(), 8, "two steps take both groups");
    for attempt in &taken {
        let ids = attempt.task["row"]["taken_from"].as_array().unwrap();
        let id = ids[attempt.slot.sample as usize].as_str().unwrap();
        let session = sessions.iter().find(|session| session.id.to_string() == id).unwrap();
        assert_eq!(attempt.trajectory, session.trajectory);
        assert_eq!(attempt.score, session.score);
    }
    // The server and the learner compute the same log-probabilities, to the bit.
    let metrics = fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let steps: Vec<Value> =
        metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(steps[0]["training/logprob_mismatch"], 0.0);
    assert_eq!(
        (&steps[0]["training/staleness/max"], &steps[1]["training/staleness/max"]),
        (&json!(0.0), &json!(1.0))
    );
    let initial = fs::read(workspace.path("model/model.safetensors")).unwrap();
    assert!(workspace.weights("run") != initial, "the sessions trained nothing");

    // Sessions of another model cannot be trained on, and not be added.
    workspace.write("model/model.safetensors", workspace.weights("run"));
    let other =
        workspace.levade().args(["train", "taken.toml", "--run", "other"]).output().unwrap();
    assert_eq!(other.status.code(), Some(2));
    assert!(stderr(&other).contains("model.safetensors differs"), "{}", stderr(&other));
    let serve = ["serve", "model", "--record", "served", "--port", "0"];
    let other = workspace.levade().args(serve).output().unwrap();
    assert_eq!(other.status.code(), Some(2));
    assert!(stderr(&other).contains("name another directory"), "{}", stderr(&other));
}

#[test]
fn session_record_and_run_cannot_replace_each_other() {
    let workspace = Workspace::new();
    let train = ["train", "recipe.toml", "--set", "phase.1.steps=1"];
    let trained = workspace.levade().args(train).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    let serve = ["serve", "model", "--record", "run", "--port", "0"];
    let rejected = workspace.levade().args(serve).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    assert!(stderr(&rejected).contains("run holds a run"), "{}", stderr(&rejected));
    workspace.write("taken.toml", RECIPE.replace("path = \"served\"", "path = \"nowhere\""));
    let rejected = workspace.levade().args(["train", "taken.toml", "--run", "x"]).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    assert!(
        stderr(&rejected).contains("nowhere holds no record of sessions"),
        "{}",
        stderr(&rejected)
    );
    let greedy = ["check", "taken.toml", "--set", "phase.0.algorithm=remax"];
    let rejected = workspace.levade().args(greedy).output().unwrap();
    assert!(stdout(&rejected).contains("phase.0.advantage"), "{}", stdout(&rejected));
}

#[test]
fn train_goes_back_to_an_earlier_step_with_another_reward() {
    let workspace = Workspace::with_trained_model();
    let trained = workspace.train().args(["--set", "run.keep=9"]).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
    let before = recorded(&workspace, "run", Purpose::Train);
    let reward = "reward={ scorer = { kind = \"format\", tags = [\"answer\"] } }";
    let back = ["train", "run", "--resume", "--from", "2", "--set", reward];
    let output = workspace.levade().args(back).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let note = "went back to step 2; the run with the 2 steps after it is kept in";
    assert!(stderr(&output).contains(note), "{}", stderr(&output));
    let after = recorded(&workspace, "run", Purpose::Train);
    assert_eq!(after.len(), before.len());
    assert_eq!(after[..6], before[..6], "the first RL step stays");
    assert_ne!(after[6..], before[6..]);
    assert_eq!(recorded(&workspace, "run.superseded-1", Purpose::Train), before);
    // The recipe of the run has the new reward.
    let resumed = workspace.levade().args(["train", "run", "--resume"]).output().unwrap();
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    let inspect = ["inspect", "run.superseded-1"];
    assert!(workspace.levade().args(inspect).output().unwrap().status.success());

    let none = ["train", "run", "--resume", "--from", "0"];
    let output = workspace.levade().args(none).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("it has those at 1, 2, 3, 4"), "{}", stderr(&output));
}
