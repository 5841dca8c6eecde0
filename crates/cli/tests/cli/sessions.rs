//! Sessions of an agent outside of the process: recorded by `levade serve --record`, read by the
//! commands for runs, and trained on by a recipe, or made as attempts of a run. Runs that go back
//! to an earlier step.
#![cfg(unix)]

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use levade_store::testing::wait;
use levade_store::{Attempt, Purpose, Sqlite, Status, Store};
use levade_tree::Kind;
use serde_json::{Value, json};

use crate::support::{Workspace, stderr, stdout, unused_port};

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
        let (status, value) = request(&self.address, path, key, body).unwrap();
        assert_eq!(status, 200, "{path}: {value}");
        value
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

/// Posts a document, and returns the status and the body of the response.
fn request(address: &str, path: &str, key: &str, body: &Value) -> io::Result<(u16, Value)> {
    let body = body.to_string();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         authorization: Bearer {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut client = TcpStream::connect(address)?;
    client.write_all(request.as_bytes())?;
    let mut response = String::new();
    client.read_to_string(&mut response)?;
    let parts = response.split_once("\r\n\r\n");
    let (head, body) = parts.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.expect("a response has a status"), serde_json::from_str(body)?))
}

/// A run whose attempts a client of the test makes, which is killed when it is dropped.
struct Trainer(Child);

impl Drop for Trainer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn recorded(workspace: &Workspace, run: &str, purpose: Purpose) -> Vec<Attempt> {
    let store = wait(Sqlite::open_existing(&workspace.path(run).join("run.db"))).unwrap();
    let all = wait(store.summaries(purpose)).unwrap();
    all.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

/// Returns a recipe of two GRPO steps. `keys` are its `agent` and its tasks.
fn recipe(name: &str, keys: &str) -> String {
    format!(
        r#"
run = {{ name = "{name}", folder = "run" }}
model = {{ source = "model" }}
engine = {{ threads = 1 }}
eval = {{ tasks = 0 }}
reward = {{ scorer = {{ kind = "program" }} }}
{keys}

[[phase]]
kind = "rl"
steps = 2
groups = 2
group_size = 2
learning_rate = 1e-3
"#
    )
}

/// Returns a recipe whose tasks are the sessions recorded in `path`.
fn recipe_of_sessions(path: &str) -> String {
    recipe("taken", &format!("[[tasks]]\nkind = \"sessions\"\npath = \"{path}\""))
}

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

    workspace.write("taken.toml", recipe_of_sessions("served"));
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
fn sessions_with_good_rewards_are_imitated() {
    let workspace = Workspace::with_trained_model();
    let server = Server::start(&workspace);
    for (task, reward) in [("a", 1.0), ("a", 0.0), ("b", 0.5), ("b", 1.0)] {
        server.session(task, reward, true);
    }
    drop(server);
    let sessions = recorded(&workspace, "served", Purpose::Session);
    let taken = recipe_of_sessions("served");
    let (head, _) = taken.split_once("[[phase]]").unwrap();
    let phase = "[[phase]]\nkind = \"sft\"\ndemonstrations = 2\nbatch = 1\nlearning_rate = 1e-3\n\
                 source = { sessions = true }\n";
    workspace.write("imitated.toml", format!("{head}{phase}"));
    let trained = workspace.levade().args(["train", "imitated.toml"]).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));

    let demonstrations = recorded(&workspace, "run", Purpose::Demonstration);
    let (originals, copies): (Vec<_>, Vec<_>) =
        demonstrations.iter().partition(|attempt| attempt.slot.step == 0);
    assert!((2..=4).contains(&originals.len()), "each session is tried at most once");
    for original in &originals {
        let ids = original.task["row"]["taken_from"].as_array().unwrap();
        let id = ids[original.slot.sample as usize].as_str().unwrap();
        let session = sessions.iter().find(|session| session.id.to_string() == id).unwrap();
        assert_eq!(original.trajectory, session.trajectory);
        assert_eq!(original.score, session.score);
    }
    assert_eq!(copies.len(), 2);
    for copy in &copies {
        assert_eq!(copy.score, Some(1.0), "worse sessions are not imitated");
        let kinds: Vec<Kind> = copy.trajectory.segments().iter().map(|s| s.kind).collect();
        assert!(kinds.contains(&Kind::Demonstrated) && !kinds.contains(&Kind::Sampled));
    }
    let initial = fs::read(workspace.path("model/model.safetensors")).unwrap();
    assert!(workspace.weights("run") != initial, "the sessions trained nothing");

    let more = ["train", "imitated.toml", "--run", "more", "--set", "phase.0.demonstrations=3"];
    let rejected = workspace.levade().args(more).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    let why = "the sessions reached a score of 1 in 2 of 4 attempts";
    assert!(stderr(&rejected).contains(why), "{}", stderr(&rejected));
    let more = ["train", "imitated.toml", "--run", "most", "--set", "phase.0.demonstrations=9"];
    let rejected = workspace.levade().args(more).output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    let why = "is 9, but the training tasks have only 4";
    assert!(stderr(&rejected).contains(why), "{}", stderr(&rejected));

    // A model with other weights and the same tokenizer can imitate the sessions.
    workspace.write("model/model.safetensors", workspace.weights("run"));
    let other = ["train", "imitated.toml", "--run", "other"];
    let trained = workspace.levade().args(other).output().unwrap();
    assert!(trained.status.success(), "{}", stderr(&trained));
}

#[test]
fn external_agent_makes_attempts_of_run() {
    let workspace = Workspace::with_trained_model();
    let address = format!("127.0.0.1:{}", unused_port());
    let joined = recipe(
        "joined",
        &format!(
            r#"agent = {{ kind = "session", max_tokens = 40 }}
sessions = {{ listen = "{address}" }}
tasks = [{{ kind = "arithmetic", train = 8 }}]"#
        ),
    );
    workspace.write("joined.toml", joined);
    let train = ["train", "joined.toml"];
    let rejected = workspace.levade().args(train).env_remove("LEVADE_API_KEYS").output().unwrap();
    assert_eq!(rejected.status.code(), Some(2));
    assert!(stderr(&rejected).contains("LEVADE_API_KEYS"), "{}", stderr(&rejected));

    let log = File::create(workspace.path("log")).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_levade"))
        .current_dir(workspace.path(""))
        .args(train)
        .env("LEVADE_API_KEYS", "secret")
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut trainer = Trainer(child);
    let start = Instant::now();
    let mut tasks = Vec::new();
    let status = loop {
        if let Some(status) = trainer.0.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(110), "the run does not end");
        let wait = json!({ "wait_seconds": 1 });
        let Ok((200, session)) = request(&address, "/rl/start_session", "secret", &wait) else {
            // The run starts, trains or ends.
            sleep(Duration::from_millis(20));
            continue;
        };
        let key = session["api_key"].as_str().unwrap();
        let call = json!({ "model": "model", "messages": session["task"]["messages"] });
        // The first attempt at each task earns a reward, so that every group is informative.
        let id = session["task"]["id"].as_str().unwrap().to_owned();
        let reward = json!({ "reward": if tasks.contains(&id) { 0.0 } else { 1.0 } });
        tasks.push(id);
        for (path, body) in [
            ("/v1/chat/completions", &call),
            ("/rl/set_reward", &reward),
            ("/rl/end_session", &json!({})),
        ] {
            let (status, response) = request(&address, path, key, body).unwrap();
            assert_eq!(status, 200, "{path}: {response}");
        }
    };
    let log = fs::read_to_string(workspace.path("log")).unwrap();
    assert!(status.success(), "{log}");
    let mut made: Vec<String> = Vec::new();
    let mut total = 0.0;
    for attempt in recorded(&workspace, "run", Purpose::Train) {
        assert_eq!(attempt.status, Status::Completed, "{}", attempt.slot);
        assert!(attempt.trajectory.sampled_tokens() > 0);
        total += attempt.score.unwrap();
        made.push(attempt.task["id"].as_str().unwrap().to_owned());
    }
    made.sort();
    tasks.sort();
    assert_eq!((made.len(), made), (8, tasks), "every session is one attempt");
    assert_eq!(total, 4.0, "the posted rewards are the scores");
    let initial = fs::read(workspace.path("model/model.safetensors")).unwrap();
    assert!(workspace.weights("run") != initial, "the sessions trained nothing");
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
    workspace.write("taken.toml", recipe_of_sessions("nowhere"));
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
