//! Compares `/openapi.json` with the server: routes, and the data that they return.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::tests::{server, without_debounce};

/// Returns the path of the document that a request path matches.
fn template(document: &Value, method: &str, path: &str) -> Option<String> {
    let path = path.split('?').next()?;
    let paths = document["paths"].as_object()?.iter();
    let matching = paths.filter(|(template, methods)| {
        methods.get(method).is_some() && matches_template(path, template)
    });
    // Literal segments win over parameters.
    let (best, _) = matching.min_by_key(|(template, _)| template.matches('{').count())?;
    Some(best.clone())
}

fn matches_template(path: &str, template: &str) -> bool {
    let mut parts = template.split('/').zip(path.split('/'));
    template.split('/').count() == path.split('/').count()
        && parts.all(|(of, part)| of.starts_with('{') || of == part)
}

fn check(document: &Value, schema: &Value, value: &Value, of: &str) {
    let schema = json!({ "components": document["components"], "allOf": [schema] });
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = validator
        .iter_errors(value)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{of}: {errors:?} in {value}");
}

/// Returns the path of a route of Agent Lightning.
fn agl(route: &str) -> String {
    format!("/v1/agl{route}")
}

#[tokio::test]
async fn openapi_document_describes_every_route_and_response() {
    let server = server(without_debounce()).await;
    let document = server.send("GET", "/openapi.json", &[], b"").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    let started =
        server.post("/rollouts", json!({ "input": 1, "worker_id": "w", "idempotency_key": "k" }));
    let started = started.await.json();
    let id = started["rollout_id"].as_str().unwrap();
    let attempt = started["attempt"]["attempt_id"].as_str().unwrap();
    let span = |span_id: &str| {
        let attributes =
            json!({ "agentlightning.reward.0.name": "a", "agentlightning.reward.0.value": 0.5 });
        json!({ "rollout_id": id, "attempt_id": attempt, "sequence_id": 1, "trace_id": "t",
                "span_id": span_id, "name": "openai.chat.completion", "attributes": attributes })
    };
    let llm =
        json!({ "main_llm": { "resource_type": "llm", "endpoint": "http://x", "model": "m" } });
    let empty = json!({});
    let of_rollout = json!({ "rollout_id": id });
    let new = json!({ "rollouts": [{ "input": null, "config": { "max_attempts": 2 } }] });
    let requests = vec![
        ("GET", "/healthz".to_owned(), None),
        ("GET", agl("/health"), None),
        ("GET", agl("/statistics"), None),
        ("POST", agl("/queues/rollouts/enqueue"), Some(new)),
        ("POST", agl("/queues/rollouts/dequeue"), Some(json!({ "worker_id": "w" }))),
        ("GET", agl("/rollouts?limit=5&status_in=preparing"), None),
        ("POST", agl("/rollouts"), Some(json!({ "input": {}, "mode": "val" }))),
        ("POST", agl("/rollouts/search"), Some(empty.clone())),
        ("GET", agl(&format!("/rollouts/{id}")), None),
        ("POST", agl(&format!("/rollouts/{id}")), Some(json!({ "metadata": { "a": 1 } }))),
        ("POST", agl("/spans"), Some(span("1"))),
        ("GET", agl(&format!("/spans?rollout_id={id}")), None),
        ("POST", agl("/spans/search"), Some(of_rollout.clone())),
        (
            "POST",
            agl("/spans/next"),
            Some(json!({ "rollout_id": id, "attempt_id": attempt, "count": 2 })),
        ),
        ("GET", agl(&format!("/rollouts/{id}/calls")), None),
        ("GET", agl(&format!("/rollouts/{id}/attempts")), None),
        ("POST", agl(&format!("/rollouts/{id}/attempts/search")), Some(empty.clone())),
        ("GET", agl(&format!("/rollouts/{id}/attempts/latest")), None),
        (
            "POST",
            agl(&format!("/rollouts/{id}/attempts/{attempt}")),
            Some(json!({ "metadata": {} })),
        ),
        (
            "POST",
            agl(&format!("/rollouts/{id}/attempts/latest")),
            Some(json!({ "status": "succeeded" })),
        ),
        ("POST", agl(&format!("/rollouts/{id}/attempts")), Some(json!({ "worker_id": "w" }))),
        ("POST", agl("/waits/rollouts"), Some(json!({ "rollout_ids": [id], "timeout": 0 }))),
        ("GET", agl("/workers"), None),
        ("POST", agl("/workers/search"), Some(empty.clone())),
        ("POST", agl("/workers/w"), Some(json!({ "heartbeat_stats": { "cpu": 1 } }))),
        ("GET", agl("/workers/w"), None),
        ("POST", agl("/resources"), Some(llm.clone())),
        ("POST", agl("/resources/latest"), Some(llm.clone())),
        ("POST", agl("/resources/r"), Some(llm)),
        ("GET", agl("/resources"), None),
        ("GET", agl("/resources/latest"), None),
        ("GET", agl("/resources/r?version=1"), None),
        ("POST", "/v1/traces".to_owned(), Some(json!({ "resourceSpans": [] }))),
        ("POST", "/v1/metrics".to_owned(), Some(empty.clone())),
        ("POST", "/v1/logs".to_owned(), Some(empty.clone())),
        ("POST", "/v1/development/profiles".to_owned(), Some(empty)),
        ("GET", "/v1/prometheus/".to_owned(), None),
        ("GET", "/v1/prometheus".to_owned(), None),
        ("GET", "/openapi.json".to_owned(), None),
        (
            "POST",
            "/api/rollouts".to_owned(),
            Some(json!([{ "input": { "data_id": "d" }, "rollout_id": "chosen" }])),
        ),
        ("GET", "/api/rollouts?state_in=queuing&limit=1".to_owned(), None),
        ("GET", "/task".to_owned(), None),
        ("GET", "/resources/latest".to_owned(), None),
        ("GET", "/resources/r".to_owned(), None),
        (
            "POST",
            "/rollout".to_owned(),
            Some(json!({ "rollout_id": "chosen", "final_reward": 1.0 })),
        ),
        ("GET", "/api/rollouts/terminal".to_owned(), None),
        (
            "POST",
            "/api/rollouts/chosen/attempt/0/events".to_owned(),
            Some(json!({ "event_type": "reward", "data": { "value": 1 } })),
        ),
        ("GET", "/api/rollouts/chosen/events".to_owned(), None),
        ("GET", "/api/rollouts/chosen".to_owned(), None),
        (
            "PATCH",
            "/api/rollouts/chosen".to_owned(),
            Some(json!({ "status": { "error_message": "x" } })),
        ),
        ("DELETE", "/api/rollouts/chosen".to_owned(), None),
    ];
    let mut seen = BTreeSet::new();
    for (method, path, body) in requests {
        let lower = method.to_lowercase();
        let template = template(&document, &lower, &path).unwrap_or_else(|| panic!("{path}"));
        let operation = &document["paths"][&template][&lower];
        let text = body.as_ref().map(Value::to_string).unwrap_or_default();
        let header = ["x-agentlightning-client: true"];
        let response = server.send(method, &path, &header, text.as_bytes()).await;
        let of = format!("{method} {path}");
        let described = &operation["responses"][response.status.to_string()];
        assert!(described.is_object(), "{of}: {} {:?}", response.status, response.body);
        let json = "application/json";
        if let Some(body) = &body
            && operation.get("requestBody").is_some()
        {
            check(&document, &operation["requestBody"]["content"][json]["schema"], body, &of);
        }
        if let Some(content) = described.get("content") {
            check(&document, &content[json]["schema"], &response.json(), &of);
        }
        seen.insert((template, lower));
    }
    let documented: BTreeSet<(String, String)> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, of)| of.as_object().unwrap().keys().map(|it| (path.clone(), it.clone())))
        .collect();
    assert_eq!(seen, documented);
}
