//! Tests of Python tools that harm their process, and of the effects on other calls.

use std::time::Instant;

use levade_tools::ObservationKind;
use serde_json::json;

use super::*;

const HAZARDS: &str = include_str!("hazards.py");

#[tokio::test]
async fn exceptions_and_return_values_become_results() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, LONG);
    let mut open = open(&set, "a").await;
    for (mode, wanted) in [
        (
            "raise",
            "Error: ZeroDivisionError: division by zero (own.py, line 10, in divide: return 1 / x)",
        ),
        ("exit", "Error: it called exit(3)"),
        ("print", "printed"),
        ("close", "closed"),
        ("none", ""),
        ("bytes", "ab"),
        ("binary", "[2 bytes that are no text]"),
        ("object", "an object"),
        ("surrogate", "\u{fffd}"),
        ("stop", "Error: RuntimeError: StopIteration: 5"),
        ("interrupt", "Error: KeyboardInterrupt"),
        ("recursion", "Error: RecursionError: maximum recursion depth exceeded"),
    ] {
        let found = text(&mut open, "does", json!({ "mode": mode })).await;
        assert!(
            found.starts_with(wanted) && (!wanted.is_empty() || found.is_empty()),
            "{mode}: {found}"
        );
    }
    let long = text(&mut open, "does", json!({ "mode": "long" })).await;
    assert!((1_000_000..1_000_100).contains(&long.len()), "{}", long.len());
    assert!(long.contains("[… 49000000 characters are left out here …]"));
    // All calls ran in one process, which is still running.
    assert_eq!(text(&mut open, "does", json!({ "mode": "count" })).await, "14");
    open.close().await.unwrap();
}

#[tokio::test]
async fn timed_out_loop_is_interrupted_and_process_survives() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, Duration::from_secs(4));
    let mut open = open(&set, "a").await;
    let first = text(&mut open, "process", json!({})).await;
    let late = call_tool(&mut open, "does", json!({ "mode": "loop" })).await;
    assert_eq!(
        (late.text.as_str(), late.kind),
        ("Error: does did not answer within 4s", ObservationKind::Timeout)
    );
    let late = call_tool(&mut open, "waits", json!({})).await;
    assert_eq!(late.kind, ObservationKind::Timeout);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(text(&mut open, "process", json!({})).await, first);
    open.close().await.unwrap();
}

#[tokio::test]
async fn blocked_call_kills_process_and_pending_calls() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, Duration::from_secs(6));
    let mut x = open(&set, "x").await;
    let mut y = open(&set, "y").await;
    let first = text(&mut x, "process", json!({})).await;
    let blocks = call_tool(&mut x, "does", json!({ "mode": "block" }));
    let heartbeat = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        // This call has not reached its own timeout when the process is killed because of the other
        // call.
        call_tool(&mut y, "does", json!({ "mode": "block" })).await
    };
    let (blocked, heartbeat) = tokio::join!(blocks, heartbeat);
    assert_eq!(blocked.text, "Error: does did not answer within 6s");
    assert!(
        heartbeat.text.contains("did not respond within 2s after its request"),
        "{}",
        heartbeat.text
    );
    assert!(heartbeat.failure.is_some());
    let second = text(&mut x, "process", json!({})).await;
    assert_ne!(second, first);
    x.close().await.unwrap();
    y.close().await.unwrap();
}

#[tokio::test]
async fn exited_process_is_reported_and_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, LONG);
    let mut open = open(&set, "a").await;
    let found = text(&mut open, "does", json!({ "mode": "end" })).await;
    assert_eq!(found, "Error: the Python process ended (exit code 5): last words");
    let found = text(&mut open, "does", json!({ "mode": "kill" })).await;
    assert!(found.starts_with("Error: the Python process ended (killed by signal 9)"), "{found}");
    assert_eq!(text(&mut open, "does", json!({ "mode": "print" })).await, "printed");
    open.close().await.unwrap();
}

#[tokio::test]
async fn process_with_closed_pipe_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, Duration::from_secs(4));
    let mut open = open(&set, "a").await;
    let late = call_tool(&mut open, "does", json!({ "mode": "close_all" })).await;
    assert!(late.failure.is_some(), "{late:?}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(text(&mut open, "does", json!({ "mode": "print" })).await, "printed");
    open.close().await.unwrap();
}

#[tokio::test]
async fn orphaned_children_end_with_process() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS, LONG);
    let mut open = open(&set, "a").await;
    let mut children = Vec::new();
    for mode in ["fork", "detach"] {
        let child = text(&mut open, "does", json!({ "mode": mode })).await;
        assert!(is_running(&child), "{child}");
        children.push(child);
    }
    assert_eq!(text(&mut open, "does", json!({ "mode": "print" })).await, "printed");
    open.close().await.unwrap();
    drop(set);
    let start = Instant::now();
    while children.iter().any(|child| is_running(child)) {
        assert!(start.elapsed() < Duration::from_secs(20), "{children:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns whether a process with this id exists and is not a zombie.
fn is_running(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[tokio::test]
async fn lost_instances_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let set = python(dir.path(), HAZARDS_WITH_STATE, LONG);
    let mut open = open(&set, "a").await;
    assert_eq!(text(&mut open, "counter", json!({})).await, "1");
    assert_eq!(text(&mut open, "counter", json!({})).await, "2");
    let ended = "the Python process ended (exit code 9): it printed nothing";
    assert_eq!(text(&mut open, "ends", json!({})).await, format!("Error: {ended}"));
    let lost = call_tool(&mut open, "counter", json!({})).await;
    assert_eq!(lost.text, format!("Error: the state of this attempt is lost: {ended}"));
    assert!(lost.failure.is_some());
    // Functions do not depend on the state of an attempt.
    assert_eq!(text(&mut open, "plain", json!({})).await, "plain");
    let (_, errors) = open.scorer_input().await;
    assert!(errors[0].to_string().contains("the state of this attempt is lost"), "{errors:?}");
    let mut next = super::open(&set, "b").await;
    assert_eq!(text(&mut next, "counter", json!({})).await, "1");
    next.close().await.unwrap();
}

const HAZARDS_WITH_STATE: &str = "
import os

class Counter:
    name = 'counter'
    parameters = {'type': 'object', 'properties': {}}

    def __init__(self):
        self.counts = {}

    def create(self, instance_id=None):
        self.counts[instance_id] = 0
        return instance_id

    def execute(self, instance_id, parameters):
        self.counts[instance_id] += 1
        return str(self.counts[instance_id])

    def release(self, instance_id):
        del self.counts[instance_id]

def ends():
    os._exit(9)

def plain():
    return 'plain'
";
