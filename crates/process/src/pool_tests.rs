use std::time::Instant;

use serde_json::json;

use super::*;
use crate::{Handshake, Launch, Supervisor, python_command, python_first_line};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Python worker that handles each request in a thread: after `sleep` seconds it responds with its
/// process id and the number of requests so far, or it exits.
const SERVE: &str = r#"
import json, os, sys, threading, time
count = 0

def main(first, line):
    if "failure" in first:
        return line.failed(first["failure"])
    time.sleep(first.get("load", 0))
    print("loaded")
    line.ready({"tools": first.get("tools")})

    def work(request):
        global count
        count += 1
        if "exit" in request:
            print("last words", file=sys.stderr)
            os._exit(request["exit"])
        if request.get("fork") and os.fork() == 0:
            line.answer(request, {"count": "of the fork"})
        time.sleep(request.get("sleep", 0))
        line.answer(request, {"process": os.getpid(), "count": count, "nan": float("nan")} if request.get("nan")
                    else {"process": os.getpid(), "count": count})

    for request in line:
        if not request.get("stop"):
            threading.Thread(target=work, args=(request,), daemon=True).start()
    os._exit(0)
"#;

fn options(first: Value, max_workers: usize, max_requests: usize) -> PoolOptions {
    let mut first = first;
    first["key"] = json!("id");
    PoolOptions {
        name: "tests".into(),
        supervisor: Supervisor::default(),
        launch: Launch::new(python_command("python3")),
        first: Some(python_first_line(&[("serve", SERVE)], first)),
        handshake: Some(Handshake { timeout: TEST_TIMEOUT, check: Arc::new(|_| Ok(())) }),
        id_key: "id",
        max_workers,
        max_requests,
        cancel_grace: Duration::from_millis(300),
    }
}

fn pool(max_workers: usize, max_requests: usize) -> Pool {
    Pool::new(options(json!({}), max_workers, max_requests))
}

async fn request_value(pool: &Pool, body: Value) -> Result<Value, WorkerError> {
    pool.request(Request::new("test", body), TEST_TIMEOUT).await
}

#[tokio::test]
async fn worker_handles_concurrent_requests_by_id() {
    let pool = pool(1, 2);
    let (slow, fast) = tokio::join!(
        request_value(&pool, json!({ "sleep": 0.5 })),
        request_value(&pool, json!({ "sleep": 0.1 }))
    );
    let slow = slow.unwrap();
    let fast = fast.unwrap();
    assert_eq!(slow["process"], fast["process"]);
    assert!(slow["id"] != fast["id"], "{slow} {fast}");
    assert_eq!(request_value(&pool, json!({})).await.unwrap()["count"], 3);
}

#[tokio::test]
async fn pool_starts_workers_up_to_maximum_when_busy() {
    let pool = pool(3, 1);
    let start = Instant::now();
    let sleep = || request_value(&pool, json!({ "sleep": 0.4 }));
    let responses: Vec<Value> =
        <[_; 6]>::from(tokio::join!(sleep(), sleep(), sleep(), sleep(), sleep(), sleep()))
            .into_iter()
            .map(Result::unwrap)
            .collect();
    assert!(start.elapsed() >= Duration::from_millis(800), "each worker had one request at a time");
    let processes: std::collections::HashSet<String> =
        responses.iter().map(|response| response["process"].to_string()).collect();
    assert_eq!(processes.len(), 3, "{responses:?}");
}

#[tokio::test]
async fn worker_that_exits_fails_its_requests_and_is_replaced() {
    let pool = pool(1, 4);
    let before = request_value(&pool, json!({})).await.unwrap();
    let (concurrent, exits) = tokio::join!(
        request_value(&pool, json!({ "sleep": 30 })),
        request_value(&pool, json!({ "exit": 3 }))
    );
    let error = WorkerError::Exited { code: Some(3), last_line: Some("last words".into()) };
    assert_eq!((concurrent.unwrap_err(), exits.unwrap_err()), (error.clone(), error.clone()));
    assert_eq!(error.to_string(), "the worker ended with exit status: 3: last words");
    assert_ne!(request_value(&pool, json!({})).await.unwrap()["process"], before["process"]);
}

#[tokio::test]
async fn worker_that_ignores_cancellation_is_terminated() {
    let pool = pool(1, 4);
    let timeout =
        pool.request(Request::with_id("late", json!({ "sleep": 0.3 })), Duration::from_millis(200));
    assert_eq!(timeout.await.unwrap_err(), WorkerError::Timeout(Duration::from_millis(200)));
    let first = request_value(&pool, json!({})).await.unwrap();
    assert_eq!(first["count"], 2, "the worker let go of the request within the grace");
    let mut concurrent = pool.send(Request::new("beside", json!({ "sleep": 30 }))).await.unwrap();
    drop(pool.send(Request::with_id("hangs", json!({ "sleep": 30 }))).await.unwrap());
    let error = concurrent.response().await.unwrap_err();
    let why = "did not respond within 300ms after its request hangs was cancelled";
    assert!(error.to_string().contains(why), "{error}");
    assert_ne!(request_value(&pool, json!({})).await.unwrap()["process"], first["process"]);
}

#[tokio::test]
async fn zero_grace_terminates_worker_of_late_request() {
    let pool = Pool::new(PoolOptions { cancel_grace: Duration::ZERO, ..options(json!({}), 1, 1) });
    let first = request_value(&pool, json!({})).await.unwrap();
    let late = pool
        .request(Request::new("late", json!({ "sleep": 30 })), Duration::from_millis(100))
        .await;
    assert!(matches!(late, Err(WorkerError::Timeout(_))), "{late:?}");
    assert_ne!(request_value(&pool, json!({})).await.unwrap()["process"], first["process"]);
}

#[tokio::test]
async fn failed_worker_start_returns_its_reason() {
    let failing = Pool::new(options(json!({ "failure": "no such file" }), 2, 1));
    let why = WorkerError::NotReady("no such file".into());
    assert_eq!(request_value(&failing, json!({})).await.unwrap_err(), why);
    assert_eq!(request_value(&failing, json!({})).await.unwrap_err(), why);
    let mut slow = options(json!({ "load": 30 }), 1, 1);
    let rejected = PoolOptions {
        handshake: Some(Handshake {
            timeout: TEST_TIMEOUT,
            check: Arc::new(|report| Err(report.to_string())),
        }),
        ..options(json!({ "tools": [1] }), 1, 1)
    };
    let error = request_value(&Pool::new(rejected), json!({})).await.unwrap_err();
    assert_eq!(error, WorkerError::NotReady(r#"{"tools":[1]}"#.into()));
    slow.handshake =
        Some(Handshake { timeout: Duration::from_millis(300), check: Arc::new(|_| Ok(())) });
    let error = request_value(&Pool::new(slow), json!({})).await.unwrap_err();
    assert_eq!(error.to_string(), "the worker was still loading after 300ms");
    let mut missing = options(json!({}), 1, 1);
    missing.launch = Launch::new(["/no/such/program"]);
    let error = request_value(&Pool::new(missing), json!({})).await.unwrap_err();
    assert!(error.to_string().starts_with("cannot start /no/such/program: "), "{error}");
}

#[tokio::test]
async fn affinity_counts_as_load() {
    let pool = pool(2, 8);
    let first = pool.slot().await.unwrap().worker().affinity();
    let process = first.request(Request::new("test", json!({}))).await.unwrap()["process"].clone();
    // The other worker is started because the first one has an affinity, and is used once it is
    // ready.
    let start = Instant::now();
    while request_value(&pool, json!({})).await.unwrap()["process"] == process {
        assert!(start.elapsed() < TEST_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(first.request(Request::new("test", json!({}))).await.unwrap()["process"], process);
}

#[tokio::test]
async fn forked_responses_are_dropped_and_nan_is_rejected() {
    let pool = pool(1, 4);
    for count in 1..4 {
        assert_eq!(request_value(&pool, json!({ "fork": true })).await.unwrap()["count"], count);
    }
    let error = request_value(&pool, json!({ "nan": true })).await.unwrap()["error"].to_string();
    assert!(error.contains("its answer cannot be written as JSON"), "{error}");
}

#[tokio::test]
async fn worker_without_handshake_may_print_other_lines() {
    let script = r#"echo starting; while read line; do echo "got a line"; echo "$line"; done"#;
    let pool = Pool::new(PoolOptions {
        launch: Launch::new(["sh", "-c", script]),
        first: None,
        handshake: None,
        id_key: "attempt",
        ..options(json!({}), 1, 1)
    });
    let response = pool
        .request(Request::with_id("a", json!({ "attempt": "", "x": 1 })), TEST_TIMEOUT)
        .await
        .unwrap();
    assert_eq!(response, json!({ "attempt": "a", "x": 1 }));
    let strict = PoolOptions { launch: Launch::new(["echo", "hello"]), ..options(json!({}), 1, 1) };
    let error = request_value(&Pool::new(strict), json!({})).await.unwrap_err();
    assert!(matches!(error, WorkerError::InvalidLine(_)), "{error}");
}
