//! Tests of format constraints and histories over the HTTP routes: tool schemas, JSON completions,
//! invalid arguments.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::testing::TestGateway;

/// Returns a request that requires a call to one of `tools`.
fn required(tools: Value) -> Value {
    let tools: Vec<Value> = tools
        .as_array()
        .into_iter()
        .flatten()
        .map(|function| json!({ "type": "function", "function": function }))
        .collect();
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": "q" }], "tools": tools,
            "tool_choice": "required", "parallel_tool_calls": false })
}

fn pointing() -> Value {
    json!({
        "type": "object", "properties": { "q": { "$ref": "#/$defs/Q" } }, "required": ["q"],
        "additionalProperties": false,
        "$defs": { "Q": { "enum": [{ "n": 7 }] } },
    })
}

#[tokio::test]
async fn forced_calls_resolve_schema_references_in_every_api() {
    let served = TestGateway::with_grammars(200);
    let want = json!({ "q": { "n": 7 } });
    let response = served
        .post("/v1/chat/completions", &required(json!([{ "name": "f", "parameters": pointing() }])))
        .await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    let call = &response.json()["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()).unwrap(), want);
    let body = json!({ "model": "tiny", "max_tokens": 200, "messages": [{ "role": "user", "content": "q" }],
        "tools": [{ "name": "f", "input_schema": pointing(), "strict": true }], "tool_choice": { "type": "any" } });
    let response = served.post("/v1/messages", &body).await;
    assert_eq!(response.json()["content"][0]["input"], want, "{}", response.text);
    let body = json!({ "model": "tiny", "input": "q", "tool_choice": "required",
        "tools": [{ "type": "function", "name": "f", "parameters": pointing(), "strict": true }] });
    let response = served.post("/v1/responses", &body).await;
    let arguments = response.json()["output"][0]["arguments"].as_str().map(str::to_owned);
    assert_eq!(
        serde_json::from_str::<Value>(&arguments.unwrap()).unwrap(),
        want,
        "{}",
        response.text
    );
}

#[tokio::test]
async fn unsupported_schema_keywords_are_omitted_or_named_in_error() {
    let served = TestGateway::with_grammars(60);
    let odd = json!({ "type": "object", "properties": { "v": { "type": "array", "items": { "const": 1 }, "uniqueItems": true, "maxItems": 1 } } });
    let tools = |strict: Value| json!([{ "name": "fine", "parameters": pointing() }, { "name": "odd", "parameters": odd, "strict": strict }]);
    let response = served.post("/v1/chat/completions", &required(tools(json!(false)))).await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    assert_eq!(served.gateway.unknown_fields()["tools.parameters.uniqueItems"], 1);
    let metrics = served.send("GET", "/metrics", "", "").await.text;
    assert!(metrics.contains("levade_schema_keywords_left_out_total 1\n"), "{metrics}");
    let response = served.post("/v1/chat/completions", &required(tools(json!(true)))).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST, "{}", response.text);
    for part in ["\"odd\"", "/properties/v", "uniqueItems"] {
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(part), "{message}");
    }
    let mut body = required(tools(json!(true)));
    body["tool_choice"] = json!({ "type": "function", "function": { "name": "fine" } });
    assert_eq!(served.post("/v1/chat/completions", &body).await.status, StatusCode::OK);
    let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "q" }],
        "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": odd } } });
    let response = served.post("/v1/chat/completions", &body).await;
    assert_eq!(
        (response.status, &response.json()["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("response_format"))
    );
    assert!(
        response.text.contains("/properties/v") && response.text.contains("uniqueItems"),
        "{}",
        response.text
    );
}

#[tokio::test]
async fn responses_api_rejects_unsupported_keywords_only_if_strict() {
    let served = TestGateway::with_grammars(60);
    let parameters = json!({ "type": "object", "properties": { "v": { "type": "array", "uniqueItems": true } } });
    for (strict, status) in [(json!(null), 200), (json!(false), 200), (json!(true), 400)] {
        let tool = json!({ "type": "function", "name": "odd", "parameters": parameters, "strict": strict });
        let body =
            json!({ "model": "tiny", "input": "q", "tool_choice": "required", "tools": [tool] });
        let response = served.post("/v1/responses", &body).await;
        assert_eq!(response.status, status, "{strict}: {}", response.text);
    }
}

#[tokio::test]
async fn tags_in_json_completion_are_text() {
    let served = TestGateway::with_grammars(200);
    let sent_text = json!({ "a<think>b": "</think><tool_call>\n{}" });
    for stream in [false, true] {
        let body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "q" }], "stream": stream,
            "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": { "const": sent_text } } } });
        let response = served.post("/v1/chat/completions", &body).await;
        let text = if stream {
            let chunks = response.text.lines().filter_map(|line| line.strip_prefix("data: {"));
            let chunks =
                chunks.map(|chunk| serde_json::from_str::<Value>(&format!("{{{chunk}")).unwrap());
            let deltas = chunks.filter_map(|chunk| {
                chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)
            });
            deltas.collect()
        } else {
            response.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), sent_text, "{}", response.text);
        assert!(!response.text.contains("\"reasoning\":\""), "{}", response.text);
    }
}

#[tokio::test]
async fn invalid_arguments_are_rendered_in_every_api() {
    let served = TestGateway::scripted(&["So."]);
    let broken = "{\"path\": \"a.py\", \"content\": \"cut";
    let chat = json!({ "model": "tiny", "messages": [
        { "role": "user", "content": "chat" },
        { "role": "assistant", "content": null, "tool_calls": [{ "id": "c", "type": "function", "function": { "name": "f", "arguments": broken } }] },
        { "role": "tool", "tool_call_id": "c", "content": "no JSON" },
    ] });
    let messages = json!({ "model": "tiny", "max_tokens": 9, "messages": [
        { "role": "user", "content": "messages" },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "c", "name": "f", "input": broken }] },
        { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c", "content": "no JSON" }] },
    ] });
    let responses = json!({ "model": "tiny", "input": [
        { "role": "user", "content": "responses" },
        { "type": "function_call", "call_id": "c", "name": "f", "arguments": broken },
        { "type": "function_call_output", "call_id": "c", "output": "no JSON" },
    ] });
    for (path, body) in
        [("/v1/chat/completions", chat), ("/v1/messages", messages), ("/v1/responses", responses)]
    {
        let response = served.post(path, &body).await;
        assert_eq!(response.status, StatusCode::OK, "{path}: {}", response.text);
    }
    let paths = served.paths().await;
    assert_eq!(paths.len(), 3);
    for path in paths {
        assert!(path.contains(&format!("\"name\": \"f\", \"arguments\": {broken}}}")), "{path}");
    }
}
