//! Tests of attempts that clients of the test make over HTTP.

use std::net::SocketAddr;

use levade_gateway::{GatewayOptions, serve};
use levade_policy::{Simulator, SimulatorConfig};
use levade_tasks::Task;
use levade_text::Message;
use levade_text::testing::VOCABULARY;
use levade_tree::{Finish, Kind};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use crate::testing::{agent, context, player, post_json};

/// Key that starts sessions.
const KEY: &str = "sk-run";

/// Timeout that no test reaches.
const LONG: Duration = Duration::from_secs(60);

/// A loop whose attempts clients of the test start.
struct Bench {
    address: SocketAddr,
    session_loop: SessionLoop,
}

impl Bench {
    async fn new(wait: Duration, silence: Duration, rewards: bool) -> Self {
        let options =
            GatewayOptions { open: false, keys: vec![KEY.into()], ..GatewayOptions::default() };
        let gateway = Gateway::new(Vec::new(), options);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = gateway.clone();
        tokio::spawn(async move { serve(&served, listener, std::future::pending()).await });
        let options = SessionQueueOptions { url: "http://trainer/rl".into(), wait, silence };
        let queue = SessionQueue::open(&gateway, options, |_| {});
        let program = Program {
            command: Vec::new(),
            dir: Default::default(),
            passes: Vec::new(),
            supervisor: Default::default(),
            gateway,
            address: format!("http://{address}"),
            rewards,
            has_seats: false,
            workers: None,
        };
        Bench { address, session_loop: SessionLoop { program, queue } }
    }

    /// Starts the attempt `name`, which waits for a client.
    fn attempt(&self, name: &str) -> JoinHandle<Attempt> {
        let session_loop = self.session_loop.clone();
        let config =
            SimulatorConfig { vocabulary: VOCABULARY, context: 4096, ..Default::default() };
        let solver = player("student", Arc::new(Simulator::new(config)));
        let context = AttemptContext {
            name: name.to_owned(),
            task: Task { id: "sum-1".into(), question: "1+1?".into(), ..Task::default() },
            messages: vec![Message::user("1+1?")],
            ..context(vec![agent("solver", solver, Vec::new())])
        };
        tokio::spawn(async move { session_loop.run(context).await })
    }

    async fn post(&self, path: &str, key: &str, body: &Value) -> (u16, Value) {
        post_json(self.address, path, key, "", body).await
    }

    /// Posts a document that must be accepted.
    async fn ok(&self, path: &str, key: &str, body: &Value) -> Value {
        let (status, value) = self.post(path, key, body).await;
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    /// Starts a session, and waits for an attempt if none waits yet.
    async fn start(&self) -> Value {
        self.ok("/rl/start_session", KEY, &json!({ "wait_seconds": 20 })).await
    }
}

fn question(text: &str) -> Value {
    json!({ "model": "student", "messages": [{ "role": "user", "content": text }] })
}

async fn joined(attempt: JoinHandle<Attempt>) -> Attempt {
    tokio::time::timeout(Duration::from_secs(30), attempt).await.expect("the attempt ends").unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_of_client_is_attempt_of_run() {
    let bench = Bench::new(LONG, LONG, true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let task = &started["task"];
    assert_eq!((&task["id"], &task["question"]), (&json!("sum-1"), &json!("1+1?")));
    assert_eq!(task["messages"][0]["content"], "1+1?");
    assert_eq!(task["is_evaluation"], false);
    let key = started["api_key"].as_str().unwrap();
    let response = bench.ok("/v1/chat/completions", key, &question("1+1?")).await;
    bench.ok("/rl/set_reward", key, &json!({ "reward": 0.5 })).await;
    let ended = bench.ok("/rl/end_session", key, &json!({ "final_text": "2" })).await;
    assert_eq!((&ended["attempt"], &ended["interaction_count"]), (&json!("a"), &json!(1)));

    let Attempt { trajectory, outcome, is_lost } = joined(attempt).await;
    assert!(!is_lost);
    assert_eq!((outcome.finish, outcome.final_text.as_str()), (Finish::Answered, "2"));
    assert_eq!(outcome.scorer_inputs["program"]["rewards"][0]["value"], 0.5);
    let tokens = response["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!((outcome.turns, outcome.sampled_tokens as u64), (1, tokens));
    let segments = trajectory.segments();
    assert!(segments.iter().any(|segment| segment.kind == Kind::Sampled));
    assert!(segments.iter().all(|s| s.agent == "solver" && s.policy == "student"));
    for (path, body) in [
        ("/v1/chat/completions", question("again?")),
        ("/rl/set_reward", json!({ "reward": 1.0 })),
        ("/rl/end_session", json!({})),
    ] {
        let (status, error) = bench.post(path, key, &body).await;
        assert_eq!(status, 410, "{path}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_client_loses_attempt() {
    let bench = Bench::new(LONG, Duration::from_millis(200), true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let made = joined(attempt).await;
    assert!(made.is_lost, "{made:?}");
    assert!(made.outcome.error.unwrap().contains("sessions.silence_seconds"));
    let key = started["api_key"].as_str().unwrap();
    let (status, error) = bench.post("/rl/end_session", key, &json!({})).await;
    assert_eq!(status, 410, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_without_client_fails_after_wait() {
    let bench = Bench::new(Duration::from_millis(200), LONG, true).await;
    let made = joined(bench.attempt("a")).await;
    let error = made.outcome.error.unwrap();
    assert!(error.contains("no client has started a session at http://trainer/rl"), "{error}");
    assert!(!made.is_lost);
    let (status, error) = bench.post("/rl/start_session", KEY, &json!({})).await;
    assert_eq!(status, 429, "the failed attempt has left the queue: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_client_fails_attempt() {
    let bench = Bench::new(LONG, LONG, true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let key = started["api_key"].as_str().unwrap();
    bench.ok("/v1/chat/completions", key, &question("1+1?")).await;
    // A key of the run names the session.
    let failed = json!({ "error": "the browser crashed", "session_id": started["session_id"] });
    bench.ok("/rl/end_session", KEY, &failed).await;
    let outcome = joined(attempt).await.outcome;
    assert_eq!(outcome.finish, Finish::Failed);
    assert_eq!(outcome.error.as_deref(), Some("the browser crashed"));

    let attempt = bench.attempt("b");
    let started = bench.start().await;
    bench.ok("/rl/end_session", started["api_key"].as_str().unwrap(), &json!({})).await;
    let outcome = joined(attempt).await.outcome;
    assert!(outcome.error.unwrap().contains("called no model"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_fails_at_limit_is_truncated() {
    let bench = Bench::new(LONG, LONG, true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let key = started["api_key"].as_str().unwrap();
    let mut status = 200;
    for turn in 0..4 {
        // The agent is permitted three calls.
        let call = question(&format!("{turn}+1?"));
        status = bench.post("/v1/chat/completions", key, &call).await.0;
    }
    assert_ne!(status, 200, "the limit rejects the last call");
    bench.ok("/rl/end_session", key, &json!({ "error": "a call failed" })).await;
    let outcome = joined(attempt).await.outcome;
    assert!(matches!(outcome.finish, Finish::MaxTurns | Finish::MaxTokens), "{outcome:?}");
    assert_eq!(outcome.error, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_fails_at_full_context_is_truncated() {
    let bench = Bench::new(LONG, LONG, true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let key = started["api_key"].as_str().unwrap();
    let mut short = question("1+1?");
    short["max_tokens"] = 5.into();
    bench.ok("/v1/chat/completions", key, &short).await;
    let long = question(&"x".repeat(5000));
    assert_ne!(bench.post("/v1/chat/completions", key, &long).await.0, 200);
    bench.ok("/rl/end_session", key, &json!({ "error": "a call failed" })).await;
    let outcome = joined(attempt).await.outcome;
    assert_eq!((outcome.finish, outcome.error), (Finish::Context, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_waits_while_client_makes_another() {
    let bench = Bench::new(Duration::from_secs(1), LONG, true).await;
    let first = bench.attempt("a");
    bench.start().await;
    let second = bench.attempt("b");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(!second.is_finished(), "the only client is busy");
    first.abort();
    let error = joined(second).await.outcome.error.unwrap();
    assert!(error.contains("no client has started a session"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_attempt_closes_its_session() {
    let bench = Bench::new(LONG, LONG, true).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let key = started["api_key"].as_str().unwrap();
    attempt.abort();
    assert!(attempt.await.unwrap_err().is_cancelled());
    let (status, error) = bench.post("/v1/chat/completions", key, &question("1+1?")).await;
    assert_eq!(status, 410, "{error}");
    let waiting = bench.attempt("b");
    bench.start().await;
    waiting.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_session_requests_are_rejected_with_reason() {
    let bench = Bench::new(LONG, LONG, false).await;
    let attempt = bench.attempt("a");
    let started = bench.start().await;
    let key = started["api_key"].as_str().unwrap();
    let waiting = bench.attempt("b");
    let task = json!({ "task": { "question": "2+2?" } });
    for (path, key, body, status, text) in [
        ("/rl/start_session", "sk-other", json!({}), 401, "key"),
        ("/rl/start_session", key, json!({}), 403, "with a key of the server"),
        ("/rl/start_session", KEY, task, 400, "this run chooses the tasks"),
        ("/rl/start_session", KEY, json!({ "person": "ann" }), 400, "(tasks.person)"),
        ("/rl/start_session", KEY, json!({ "wait_seconds": 61 }), 400, "wait_seconds is 61"),
        ("/rl/start_session", KEY, json!({ "task_id": "x" }), 429, "at the task"),
        ("/rl/set_reward", key, json!({ "reward": 1.0 }), 403, "accepts no rewards"),
        ("/rl/end_session", KEY, json!({ "session_id": "x" }), 404, "no open session"),
        ("/v1/chat/completions", KEY, question("1+1?"), 401, "the key of an attempt"),
    ] {
        let (found, error) = bench.post(path, key, &body).await;
        let error = error.to_string();
        assert_eq!(found, status, "{path} {body}: {error}");
        assert!(error.contains(text), "{path} {body}: {error}");
    }
    // The second attempt still waits, and is found by its task.
    let named = json!({ "task_id": "sum-1", "wait_seconds": 20 });
    bench.ok("/rl/start_session", KEY, &named).await;
    attempt.abort();
    waiting.abort();
}
