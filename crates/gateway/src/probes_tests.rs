//! Tests of the detection of probes over the HTTP routes. A probe is a call before the task that
//! checks the model.

use std::time::Duration;

use levade_tree::Kind;
use serde_json::{Value, json};

use crate::testing::TestGateway;

const TASK: &str = "What is 12 * 3?";

fn request_body(question: &str, system: Option<&str>, tools: bool) -> Value {
    let system = system.map(|text| json!({ "role": "system", "content": text }));
    let user = json!({ "role": "user", "content": question });
    let messages: Vec<Value> = system.into_iter().chain([user]).collect();
    let mut body = json!({ "model": "tiny", "messages": messages });
    if tools {
        let function = json!({ "name": "add", "parameters": { "type": "object" } });
        body["tools"] = json!([{ "type": "function", "function": function }]);
    }
    body
}

/// Returns the agents of the sampled segments after these calls.
async fn agents(calls: &[Value]) -> Vec<String> {
    let served = TestGateway::scripted(&["Hello.", "36."]);
    for call in calls {
        served.post("/v1/chat/completions", call).await.json();
    }
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let sampled = recorded.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled);
    let agents: Vec<String> = sampled.map(|segment| segment.agent.clone()).collect();
    let probes = agents.iter().filter(|agent| agent.ends_with(".probe")).count();
    assert_eq!(recorded.calls.iter().filter(|call| call.probe).count(), probes);
    agents
}

#[tokio::test]
async fn question_before_task_is_a_probe() {
    let task = request_body(TASK, None, true);
    assert_eq!(
        agents(&[request_body("say hello", None, false), task.clone()]).await,
        ["default.probe", "default"]
    );
    let instructed = request_body("ping", Some("You are helpful."), false);
    assert_eq!(agents(&[instructed.clone(), task.clone()]).await, ["default.probe", "default"]);
    let twice = [instructed.clone(), instructed, task].to_vec();
    assert_eq!(agents(&twice).await, ["default.probe", "default.probe", "default"]);
}

#[tokio::test]
async fn task_calls_are_not_probes() {
    let task = request_body(TASK, None, true);
    let hello = request_body("say hello", None, false);
    // An agent without tools; a plan that quotes the task; a question that is part of the task; a
    // call after the first.
    assert_eq!(agents(std::slice::from_ref(&hello)).await, ["default"]);
    assert_eq!(
        agents(&[hello.clone(), request_body("What now?", None, false)]).await,
        ["default", "default"]
    );
    let plan = request_body(&format!("Plan this: {TASK}"), None, false);
    assert_eq!(agents(&[plan, task.clone()]).await, ["default", "default"]);
    let part = request_body("12 * 3", None, false);
    assert_eq!(agents(&[part, task.clone()]).await, ["default", "default"]);
    assert_eq!(agents(&[task.clone(), hello.clone()]).await, ["default", "default"]);
    // A history of several speakers in one question, to which the task's call adds a line.
    let history = |lines: &str| format!("<history>\n{lines}</history>");
    let speech = request_body(&history("A: Hi.\n"), None, false);
    let vote = request_body(&history("A: Hi.\nB: Hello.\n"), None, true);
    assert_eq!(agents(&[speech, vote]).await, ["default", "default"]);
    // A conversation that continues.
    let mut more = hello.clone();
    more["messages"].as_array_mut().unwrap().extend([
        json!({ "role": "assistant", "content": "Hello." }),
        json!({ "role": "user", "content": "Well?" }),
    ]);
    assert_eq!(agents(&[hello, more, task]).await, ["default", "default", "default"]);
}
