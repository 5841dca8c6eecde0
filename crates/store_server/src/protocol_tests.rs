//! Tests of the protocols of Agent Lightning 0.1 and 1.0, and of what they share with that of 0.3.

use serde_json::{Value, json};

use crate::tests::{Server, server, without_debounce};

/// Header that each client of 0.1 sends.
const CLIENT: [&str; 1] = ["x-agentlightning-client: true"];

async fn send(server: &Server, method: &str, path: &str, body: Value) -> (u16, Value) {
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let response = server.send(method, path, &CLIENT, text.as_bytes()).await;
    let body = if response.body.is_empty() { Value::Null } else { response.json() };
    (response.status, body)
}

/// Enqueues a rollout in the protocol of 1.0 and returns its id.
async fn enqueued(server: &Server, body: Value) -> String {
    let (status, rollouts) = send(server, "POST", "/api/rollouts", json!([body])).await;
    assert_eq!(status, 201, "{rollouts}");
    rollouts[0]["rollout_id"].as_str().unwrap().to_owned()
}

async fn calls(server: &Server, id: &str) -> Value {
    server.get(&format!("/rollouts/{id}/calls")).await.json()
}

#[tokio::test]
async fn old_client_pulls_task_and_report_becomes_calls_and_reward() {
    let server = server(without_debounce()).await;
    let none = json!({ "is_available": false, "task": null });
    assert_eq!(send(&server, "GET", "/task", Value::Null).await, (200, none));
    assert_eq!(send(&server, "GET", "/resources/latest", Value::Null).await.0, 404);
    let llm = json!({ "resource_type": "llm", "endpoint": "http://x/v1", "model": "m" });
    let resources = server.post("/resources", json!({ "main_llm": llm })).await.json();
    let resources_id = resources["resources_id"].as_str().unwrap();
    let task = json!({ "input": { "q": 1 }, "mode": "train", "metadata": { "data_id": "d" } });
    server.post("/queues/rollouts/enqueue", json!({ "rollouts": [task] })).await;
    // A page of another origin cannot set the header.
    assert_eq!(server.send("GET", "/task", &[], b"").await.status, 403);
    let (_, leased) = send(&server, "GET", "/task", Value::Null).await;
    let task = &leased["task"];
    let id = task["rollout_id"].as_str().unwrap();
    assert_eq!((&task["num_claims"], &task["metadata"]["data_id"]), (&json!(1), &json!("d")));
    assert_eq!((&task["mode"], &task["resources_id"]), (&json!("train"), &json!(resources_id)));
    let path = format!("/resources/{resources_id}");
    let (_, found) = send(&server, "GET", &path, Value::Null).await;
    assert_eq!(found["resources"]["main_llm"]["endpoint"], "http://x/v1");
    let triplets = [(3, json!(-5)), (4, Value::Null)].map(|(token, reward)| {
        json!({ "prompt": { "token_ids": [1, 2] }, "response": { "token_ids": [token] },
                "reward": reward, "metadata": { "agent_name": "wolf" } })
    });
    let report =
        json!({ "rollout_id": id, "final_reward": 0.75, "logs": ["a"], "triplets": triplets });
    for _ in 0..2 {
        let (status, body) = send(&server, "POST", "/rollout", report.clone()).await;
        assert_eq!((status, &body["status"]), (200, &json!("ok")));
    }
    let rollout = server.get(&format!("/rollouts/{id}")).await.json();
    assert_eq!(rollout["status"], "succeeded");
    assert_eq!(rollout["attempt"]["metadata"]["logs"], json!(["a"]));
    let read = calls(&server, id).await;
    assert_eq!((&read["final_reward"], &read["problem"]), (&json!(0.75), &Value::Null));
    let tokens: Vec<&Value> =
        read["calls"].as_array().unwrap().iter().map(|call| &call["response_token_ids"]).collect();
    assert_eq!(tokens, [&json!([3]), &json!([4])]);
    assert_eq!(
        (&read["calls"][0]["reward"], &read["calls"][0]["agent"]),
        (&json!(-5.0), &json!("wolf"))
    );
    // The final reward is that of the last call, which has none of its own.
    assert_eq!(read["calls"][1]["reward"], json!(0.75));
}

#[tokio::test]
async fn old_client_that_reports_nothing_fails_its_try() {
    let server = server(without_debounce()).await;
    let config = json!({ "max_attempts": 2, "retry_condition": ["failed"] });
    let new = json!({ "rollouts": [{ "input": 1, "config": config }] });
    server.post("/queues/rollouts/enqueue", new).await;
    let (_, leased) = send(&server, "GET", "/task", Value::Null).await;
    let id = leased["task"]["rollout_id"].as_str().unwrap();
    let empty = json!({ "rollout_id": id, "task": leased["task"], "metadata": {} });
    assert_eq!(send(&server, "POST", "/rollout", empty.clone()).await.0, 200);
    let (_, again) = send(&server, "GET", "/task", Value::Null).await;
    assert_eq!(
        (&again["task"]["rollout_id"], &again["task"]["num_claims"]),
        (&json!(id), &json!(2))
    );
    // The first client is late: its report names the first try.
    let late = json!({ "rollout_id": id, "task": leased["task"], "final_reward": 1.0 });
    assert_eq!(send(&server, "POST", "/rollout", late).await.0, 409);
    assert_eq!(calls(&server, id).await["final_reward"], Value::Null);
    let tries = server.get(&format!("/rollouts/{id}/attempts")).await.json();
    let first = tries["items"][0]["attempt_id"].as_str().unwrap();
    for (name, status) in [(first, 200), ("latest", 200), ("at-none", 404)] {
        let response = server.get(&format!("/rollouts/{id}/calls?attempt_id={name}")).await;
        assert_eq!(response.status, status, "{name}: {}", response.json());
    }
    let unknown = json!({ "rollout_id": "ro-none", "final_reward": 1.0 });
    assert_eq!(send(&server, "POST", "/rollout", unknown).await.0, 404);
}

#[tokio::test]
async fn rollout_state_changes_only_by_permitted_transitions() {
    let server = server(without_debounce()).await;
    let config = json!({ "timeout_seconds": 60, "local": { "agent_class": "a.B" } });
    let new = json!({ "input": { "data_id": 7 }, "is_train": false, "config": config,
                      "metadata": { "batch_idx": 1, "x": "y" }, "rollout_id": "mine" });
    let id = enqueued(&server, new).await;
    assert_eq!(id, "mine");
    let path = "/api/rollouts/mine";
    let (_, detail) = send(&server, "GET", path, Value::Null).await;
    let rollout = &detail["rollout"];
    assert_eq!(rollout["metadata"], json!({ "batch_idx": 1, "x": "y" }));
    assert_eq!(rollout["config"]["local"]["agent_class"], "a.B");
    assert_eq!((&rollout["is_train"], &rollout["status"]["version"]), (&json!(false), &json!(1)));
    let patch = |status: Value| send(&server, "PATCH", path, json!({ "status": status }));
    assert_eq!(patch(json!({ "state": "succeeded" })).await.0, 409);
    assert_eq!(patch(json!({ "state": "cancelled" })).await.0, 422);
    assert_eq!(patch(json!({ "cancel_requested": true })).await.0, 422);
    let (_, running) = patch(json!({ "state": "running", "k8s_job_name": "job" })).await;
    assert_eq!(running["status"]["k8s_job_name"], "job");
    assert_eq!(patch(json!({ "state": "running" })).await.0, 409);
    assert_eq!(patch(json!({ "state": null })).await.0, 409);
    // A report without fields changes nothing, and null clears a field.
    let (_, noted) = patch(json!({ "error_message": "slow" })).await;
    let (_, unchanged) = patch(json!({})).await;
    assert_eq!(unchanged["status"], noted["status"]);
    let (_, cleared) = patch(json!({ "error_message": null })).await;
    let status = &cleared["status"];
    assert_eq!((&status["error_message"], &status["k8s_job_name"]), (&Value::Null, &json!("job")));
    assert_eq!(
        status["version"].as_u64().unwrap(),
        noted["status"]["version"].as_u64().unwrap() + 1
    );
    let (_, ended) = patch(json!({ "state": "succeeded" })).await;
    assert_eq!(
        (&ended["status"]["state"], &ended["status"]["version"]),
        (&json!("succeeded"), &json!(5))
    );
    assert_eq!(patch(json!({ "state": "failed" })).await.0, 409);
    // Another input under the same id changes nothing.
    enqueued(&server, json!({ "input": 2, "rollout_id": "mine" })).await;
    let other = enqueued(&server, json!({ "input": 3 })).await;
    let (_, page) = send(&server, "GET", "/api/rollouts/terminal?limit=5", Value::Null).await;
    let item =
        json!({ "rollout_id": "mine", "state": "succeeded", "data_id": "7", "is_train": false });
    assert_eq!((&page["items"], &page["total_terminal"]), (&json!([item]), &json!(1)));
    let next = format!("/api/rollouts/terminal?after={}", page["next_after"]);
    assert_eq!(send(&server, "GET", &next, Value::Null).await.1["items"], json!([]));
    let path = format!("/api/rollouts/{other}");
    let failed = json!({ "status": { "state": "failed", "error_message": "no pod" } });
    let (_, failed) = send(&server, "PATCH", &path, failed).await;
    assert_eq!(failed["status"]["error_message"], "no pod");
    assert_eq!(
        send(&server, "GET", &next, Value::Null).await.1["items"][0]["rollout_id"],
        json!(other)
    );
    assert_eq!(send(&server, "GET", "/api/rollouts", Value::Null).await.0, 422);
    let (_, listed) =
        send(&server, "GET", "/api/rollouts?state_in=failed&state_in=queuing", Value::Null).await;
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(send(&server, "DELETE", &path, Value::Null).await.0, 204);
    assert_eq!(send(&server, "DELETE", &path, Value::Null).await.0, 204);
    assert_eq!(send(&server, "GET", &path, Value::Null).await.0, 404);
    let (_, listed) = send(&server, "GET", "/api/rollouts?state_in=failed", Value::Null).await;
    assert_eq!(listed, json!([]));
}

/// Returns the data of a model call with these prompt tokens and a completion of one token.
fn model_call(prompt: &[u32], completion: u32) -> Value {
    json!({ "response": { "id": format!("r{completion}"), "prompt_token_ids": prompt,
                          "choices": [{ "token_ids": [completion] }] } })
}

#[tokio::test]
async fn posted_events_become_rewards_and_calls_of_rollout() {
    let server = server(without_debounce()).await;
    let id = enqueued(&server, json!({ "input": 1 })).await;
    let post = |attempt: &str, kind: &str, data: Value| {
        let path = format!("/api/rollouts/{id}/attempt/{attempt}/events");
        let body = json!({ "event_type": kind, "data": data });
        let server = &server;
        async move { send(server, "POST", &path, body).await.0 }
    };
    assert_eq!(post("0", "model_request", model_call(&[1, 2], 10)).await, 200);
    // The process was faster than the report of its controller.
    let patch = |status: Value| {
        let path = format!("/api/rollouts/{id}");
        let server = &server;
        async move { send(server, "PATCH", &path, json!({ "status": status })).await.0 }
    };
    assert_eq!(patch(json!({ "state": "running" })).await, 200);
    assert_eq!(patch(json!({ "state": "running" })).await, 409);
    assert_eq!(post("0", "reward", json!({ "value": 0.5, "extra": 1 })).await, 200);
    assert_eq!(post("0", "model_request", model_call(&[3], 20)).await, 200);
    assert_eq!(post("0", "model_request", model_call(&[1, 2], 30)).await, 200);
    assert_eq!(post("1", "log", json!({ "x": 1.50 })).await, 200);
    let events = |query: &str| {
        let path = format!("/api/rollouts/{id}/events{query}");
        let server = &server;
        async move { send(server, "GET", &path, Value::Null).await.1 }
    };
    let raw = events("?event_type=model_request").await;
    assert_eq!(raw.as_array().unwrap().len(), 3);
    assert_eq!(raw[2]["data"]["response"]["choices"][0]["token_ids"], json!([30]));
    let triplets = events("?format=triplet").await;
    let kinds: Vec<&str> =
        triplets.as_array().unwrap().iter().map(|of| of["event_type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reward", "model_request", "model_request"]);
    assert_eq!(triplets[0]["data"], json!({ "value": 0.5 }));
    assert_eq!(triplets[2]["data"]["response_token_ids"], json!([30]));
    let (_, detail) = send(&server, "GET", &format!("/api/rollouts/{id}"), Value::Null).await;
    assert_eq!(detail["attempts"], json!(["0", "1"]));
    assert_eq!(patch(json!({ "last_attempt_id": "1" })).await, 200);
    assert_eq!(events("").await[0]["data"]["x"], json!(1.5));
    let read = calls(&server, &id).await;
    assert_eq!(read["final_reward"], json!(0.5));
    assert_eq!(read["calls"].as_array().unwrap().len(), 3);
    assert_eq!(
        (&read["calls"][0]["response_id"], &read["calls"][0]["reward"]),
        (&json!("r10"), &json!(0.5))
    );
    assert_eq!(post("1", "reward", json!({ "value": "high" })).await, 200);
    let read = calls(&server, &id).await;
    assert_eq!(read["final_reward"], Value::Null);
    assert!(read["problem"].as_str().unwrap().contains("\"high\""), "{read}");
    assert_eq!(send(&server, "GET", "/api/rollouts/none/events", Value::Null).await.0, 404);
}

#[tokio::test]
async fn all_protocols_lease_from_one_queue() {
    let server = server(without_debounce()).await;
    let id = enqueued(&server, json!({ "input": { "q": 1 }, "is_train": false })).await;
    let leased = server.post("/queues/rollouts/dequeue", json!({ "worker_id": "w" })).await.json();
    assert_eq!((&leased[0]["rollout_id"], &leased[0]["mode"]), (&json!(id), &json!("val")));
    let (_, running) = send(&server, "GET", "/api/rollouts?state_in=running", Value::Null).await;
    assert_eq!(running[0]["rollout_id"], json!(id));
    // The timeout of 1.0, an hour if none is set, ends a lost runner.
    server.clock.advance(3601.0);
    let (_, failed) = send(&server, "GET", "/api/rollouts?state_in=failed", Value::Null).await;
    assert_eq!(failed[0]["rollout_id"], json!(id));
}
