//! Tests of Anthropic's endpoints over the HTTP routes.

use axum::http::StatusCode;
use levade_conversation::Origin;
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway, UNREADABLE, UNUSUAL_COMPLETIONS};

const THINKS_AND_CALLS: &str = "<think>\nHm — ✓\n</think>\n\nLet me call.\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": 1.50}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 3, \"b\": 4.0}}\n</tool_call>";
const ANSWER_TEXT: &str = "The answer is **12.50**.";

fn request(messages: &Value) -> Value {
    json!({
        "model": "tiny", "max_tokens": 500, "messages": messages, "system": "Be brief.",
        "thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"},
        "tools": [{
            "name": "add", "description": "Adds.", "input_schema": {"type": "object"},
            "cache_control": {"type": "ephemeral"},
        }],
    })
}

fn streamed(messages: &Value) -> Value {
    let mut request = request(messages);
    request["stream"] = true.into();
    request
}

/// Returns the message that a stream describes, joined as in Anthropic's SDK. Checks the order of
/// the events.
fn message(events: &[Value]) -> Value {
    let first = &events[0];
    let last = &events[events.len() - 1];
    assert_eq!((&first["type"], &last["type"]), (&json!("message_start"), &json!("message_stop")));
    let mut message = first["message"].clone();
    let mut input = None::<String>;
    let mut open = false;
    for event in &events[1..events.len() - 1] {
        let blocks = message["content"].as_array_mut().unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert!(!open && event["index"] == blocks.len());
                open = true;
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open && event["index"] == blocks.len() - 1);
                let block = blocks.last_mut().unwrap();
                let delta = &event["delta"];
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        *input.get_or_insert_default() += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let text =
                    format!("{}{}", block[field].as_str().unwrap(), delta[field].as_str().unwrap());
                block[field] = text.into();
            }
            "content_block_stop" => {
                assert!(open && event["index"] == blocks.len() - 1);
                open = false;
                if let Some(input) = input.take() {
                    blocks.last_mut().unwrap()["input"] = serde_json::from_str(&input).unwrap();
                }
            }
            "message_delta" => {
                assert!(!open);
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = event["delta"][field].clone();
                }
                message["usage"] = event["usage"].clone();
            }
            other => panic!("{other}"),
        }
    }
    message
}

fn kinds(message: &Value) -> Vec<&str> {
    message["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|block| block["type"].as_str().unwrap())
        .collect()
}

async fn request_message(served: &TestGateway, messages: &Value, streams: bool) -> Value {
    if streams {
        return message(&served.post("/v1/messages?beta=true", &streamed(messages)).await.events());
    }
    let response = served.post("/v1/messages", &request(messages)).await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    response.json()
}

/// Runs a conversation of three calls that sends each completion back as received. Returns the
/// three responses.
async fn talk(streams: bool) -> Vec<Value> {
    let served = TestGateway::scripted(&[THINKS_AND_CALLS, ANSWER_TEXT]);
    let mut messages = vec![json!({"role": "user", "content": "add 2 and 1.5"})];
    let first = request_message(&served, &json!(messages), streams).await;
    assert_eq!(kinds(&first), ["thinking", "text", "tool_use", "tool_use"]);
    let blocks = &first["content"];
    assert!(!blocks[0]["signature"].as_str().unwrap().is_empty());
    assert_eq!(
        (&blocks[0]["thinking"], &blocks[1]["text"]),
        (&json!("Hm — ✓"), &json!("Let me call."))
    );
    assert_eq!(
        (&blocks[2]["name"], &blocks[2]["input"]),
        (&json!("add"), &serde_json::from_str::<Value>(r#"{"b": 2, "a": 1.50}"#).unwrap())
    );
    assert_ne!(blocks[2]["id"], blocks[3]["id"]);
    assert_eq!(
        (&first["stop_reason"], &first["model"], &first["role"]),
        (&json!("tool_use"), &json!("tiny"), &json!("assistant"))
    );
    let usage = &first["usage"];
    assert_eq!(usage["output_tokens"], THINKS_AND_CALLS.len() + 1);
    messages.push(json!({"role": "assistant", "content": blocks}));
    let result = |at: usize| json!({"type": "tool_result", "tool_use_id": blocks[at]["id"], "content": "3.5"});
    let reminder = json!({"type": "text", "text": "Mind the time."});
    messages.push(json!({"role": "user", "content": [result(2), result(3), reminder]}));
    let second = request_message(&served, &json!(messages), streams).await;
    assert_eq!((kinds(&second), &second["stop_reason"]), (vec!["text"], &json!("end_turn")));
    assert_eq!(second["content"][0]["text"], ANSWER_TEXT);
    // The client now sends the completion as a plain text, as some clients do.
    messages.push(json!({"role": "assistant", "content": ANSWER_TEXT}));
    messages.push(json!({"role": "user", "content": "again please"}));
    let third = request_message(&served, &json!(messages), streams).await;
    assert_eq!(served.origins(), [Origin::Started, Origin::Continued, Origin::Continued]);
    let paths = served.paths().await;
    assert_eq!(paths.len(), 1, "{paths:?}");
    assert!(paths[0].contains(THINKS_AND_CALLS), "{}", paths[0]);
    let results = "<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>tool\n3.5<|im_end|>";
    assert!(
        paths[0].contains(results) && paths[0].contains("user\nMind the time.<|im_end|>"),
        "{}",
        paths[0]
    );
    vec![first, second, third]
}

#[tokio::test]
async fn returned_history_continues_with_and_without_streaming() {
    let full_response = talk(false).await;
    let streamed = talk(true).await;
    for (mut full_response, mut streamed) in full_response.into_iter().zip(streamed) {
        for message in [&mut full_response, &mut streamed] {
            assert!(message["id"].take().as_str().unwrap().starts_with("msg_"));
        }
        assert_eq!(full_response, streamed);
    }
}

#[tokio::test]
async fn random_completions_are_equal_with_and_without_streaming() {
    for content in ["a", "b", "c", "d"] {
        let messages = json!([{"role": "user", "content": content}]);
        let one = TestGateway::simulated(60);
        let other = TestGateway::simulated(60);
        let full_response = request_message(&one, &messages, false).await;
        let streamed = request_message(&other, &messages, true).await;
        assert_eq!(full_response["content"], streamed["content"]);
        assert_eq!(
            (&full_response["usage"], &full_response["stop_reason"]),
            (&streamed["usage"], &streamed["stop_reason"])
        );
        let assistant_message = json!({"role": "assistant", "content": full_response["content"]});
        let next = json!([messages[0], assistant_message, {"role": "user", "content": "So?"}]);
        request_message(&one, &next, false).await;
        assert_eq!(one.origins(), [Origin::Started, Origin::Continued]);
    }
}

#[tokio::test]
async fn unusual_completions_round_trip_with_and_without_streaming() {
    /// Returns the joined contents of the blocks: reasoning, text and inputs.
    fn joined_contents(message: &Value) -> [String; 3] {
        let blocks = message["content"].as_array().unwrap();
        ["thinking", "text", "input"].map(|field| {
            let found = blocks.iter().map(|block| &block[field]).filter(|value| !value.is_null());
            found
                .map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
                .collect()
        })
    }
    for assistant_message in UNUSUAL_COMPLETIONS.into_iter().chain([UNREADABLE]) {
        let mut parts_seen = Vec::new();
        for streams in [false, true] {
            let served = TestGateway::scripted(&[assistant_message]);
            let mut messages = vec![json!({"role": "user", "content": "Hi"})];
            let first = request_message(&served, &json!(messages), streams).await;
            parts_seen.push(joined_contents(&first));
            messages.push(json!({"role": "assistant", "content": first["content"]}));
            let calls =
                first["content"].as_array().unwrap().iter().filter(|block| !block["id"].is_null());
            let results =
                calls.map(|call| json!({"type": "tool_result", "tool_use_id": call["id"]}));
            let text = json!({"type": "text", "text": "So?"});
            messages.push(
                json!({"role": "user", "content": results.chain([text]).collect::<Vec<_>>()}),
            );
            request_message(&served, &json!(messages), streams).await;
            assert_eq!(
                served.origins(),
                [Origin::Started, Origin::Continued],
                "{assistant_message:?} {streams}"
            );
        }
        assert_eq!(parts_seen[0], parts_seen[1]);
    }
}

#[tokio::test]
async fn stop_reasons_match_anthropic() {
    let served = TestGateway::scripted(&["One two three."]);
    let messages = json!([{"role": "user", "content": "Count."}]);
    let mut truncated = request(&messages);
    truncated["max_tokens"] = 5.into();
    let mut stopped = streamed(&messages);
    stopped["stop_sequences"] = json!(["thr", "zz"]);
    let truncated = served.post("/messages", &truncated).await.json();
    assert_eq!(
        (&truncated["stop_reason"], &truncated["content"][0]["text"]),
        (&json!("max_tokens"), &json!("One t"))
    );
    let stopped = message(&served.post("/messages", &stopped).await.events());
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("thr"))
    );
    assert_eq!(stopped["content"][0]["text"], "One two ");
}

#[tokio::test]
async fn disabled_parallel_use_returns_one_call() {
    let served = TestGateway::scripted(&[THINKS_AND_CALLS]);
    let mut body = request(&json!([{"role": "user", "content": "add"}]));
    body["tool_choice"] = json!({"type": "auto", "disable_parallel_tool_use": true});
    let response = served.post("/v1/messages", &body).await.json();
    assert_eq!(kinds(&response), ["thinking", "text", "tool_use"]);
    body["tool_choice"] = json!({"type": "none"});
    let response = served.post("/v1/messages", &body).await.json();
    assert_eq!(
        (kinds(&response), &response["stop_reason"]),
        (vec!["thinking", "text"], &json!("end_turn"))
    );
}

#[tokio::test]
async fn count_tokens_equals_prompt_tokens() {
    let served = TestGateway::scripted(&["Yes."]);
    let mut body = request(&json!([{"role": "user", "content": "Count."}]));
    let counted = served.post("/v1/messages/count_tokens?beta=true", &body).await.json();
    body["max_tokens"] = 10.into();
    let response = served.post("/v1/messages", &body).await.json();
    assert_eq!(counted, json!({"input_tokens": response["usage"]["input_tokens"]}));
}

#[tokio::test]
async fn errors_have_anthropic_format() {
    let served = TestGateway::scripted(&["Yes."]);
    let with = |field: &str, value: Value| {
        let mut request = request(&json!([{"role": "user", "content": "Hi"}]));
        request[field] = value;
        request
    };
    let long = "x".repeat(5000);
    for (request, status, kind, message_part) in [
        (with("max_tokens", Value::Null), 400, "invalid_request_error", "max_tokens is missing"),
        (
            with("tools", json!([{"name": "f"}])),
            400,
            "invalid_request_error",
            "the input_schema of tools.0",
        ),
        (with("tools", json!([{}])), 400, "invalid_request_error", "has no name"),
        (
            with("tool_choice", json!("any")),
            400,
            "invalid_request_error",
            "must be an object of type auto",
        ),
        (with("max_tokens", json!(0)), 400, "invalid_request_error", "max_tokens = 0"),
        (with("top_k", json!(-5)), 400, "invalid_request_error", "top_k = -5"),
        (with("temperature", json!("hot")), 400, "invalid_request_error", "temperature"),
        (
            with("mcp_servers", json!([{"url": "x"}])),
            400,
            "invalid_request_error",
            "mcp_servers is not supported",
        ),
        (with("seed", json!(1)), 400, "invalid_request_error", "seed is not supported"),
        (
            with("system", json!([{"type": "image"}])),
            400,
            "invalid_request_error",
            "system.0 is of type",
        ),
        (
            with("messages", json!([{"role": "user", "content": long}])),
            400,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        (
            with("output_config", json!({"format": {"type": "xml"}})),
            400,
            "invalid_request_error",
            "output_config.format is",
        ),
    ] {
        let response = served.post("/v1/messages", &request).await;
        let body = response.json();
        assert_eq!((response.status.as_u16(), &body["type"]), (status, &json!("error")), "{body}");
        assert_eq!(body["error"]["type"], kind, "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(message_part), "{body}");
        let id = body["request_id"].as_str().unwrap();
        assert!(id.starts_with("req_") && response.headers["request-id"] == id);
    }
    let foreign = served.send("POST", "/rollout/r/attempt/a/v1/messages", OUTSIDE_KEY, "{}").await;
    assert_eq!(
        (foreign.status.as_u16(), &foreign.json()["error"]["type"]),
        (401, &json!("authentication_error"))
    );
    let unknown = json!({"model": "other", "max_tokens": 1, "messages": []});
    let response = served.send("POST", "/v1/messages", OUTSIDE_KEY, &unknown.to_string()).await;
    assert_eq!(
        (response.status.as_u16(), &response.json()["error"]["type"]),
        (404, &json!("not_found_error"))
    );
}

#[tokio::test]
async fn client_tools_are_rendered_or_named_in_error() {
    let called =
        "<tool_call>\n{\"name\": \"bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let served = TestGateway::scripted(&[called]);
    let mut body = request(&json!([{"role": "user", "content": "Hi"}]));
    body["tools"] = json!([
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ]);
    let response = served.post("/v1/messages", &body).await.json();
    assert_eq!(response["content"][0]["type"], "tool_use", "{response}");
    assert_eq!(response["content"][0]["input"], json!({"command": "ls"}));
    let [path] = &served.paths().await[..] else { panic!() };
    for name in ["\"bash\"", "\"str_replace_based_edit_tool\"", "\"memory\"", "insert_text"] {
        assert!(path.contains(name), "{path}");
    }
    body["tools"] =
        json!([{"type": "computer_20250124", "name": "computer", "display_width_px": 1}]);
    let response = TestGateway::scripted(&[]).post("/v1/messages", &body).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST);
    assert!(response.text.contains("tools.0 (\\\"computer\\\") is of type"), "{}", response.text);
}

#[tokio::test]
async fn hosted_tools_are_omitted_and_counted() {
    let served = TestGateway::scripted(&["Yes."]);
    let mut body = request(&json!([{"role": "user", "content": "Hi"}]));
    let own = body["tools"][0].clone();
    body["tools"] = json!([{"type": "web_search_20250305", "name": "web_search"}, own, {"type": "code_execution_20250825", "name": "code_execution"}]);
    served.post("/v1/messages", &body).await.json();
    let [path] = &served.paths().await[..] else { panic!() };
    assert!(
        path.contains("\"add\"")
            && !path.contains("web_search")
            && !path.contains("code_execution"),
        "{path}"
    );
    for kind in ["web_search_20250305", "code_execution_20250825"] {
        let field = format!("messages.tools[type={kind}]");
        assert_eq!(served.gateway.unknown_fields().get(&field), Some(&1), "{field}");
    }
}

#[tokio::test]
async fn fields_without_effect_are_counted() {
    let served = TestGateway::scripted(&["Yes."]);
    let mut body = request(&json!([{"role": "user", "content": "Hi"}]));
    body["context_management"] = json!({"edits": []});
    body["output_config"] = json!({"effort": "high"});
    body["newest"] = 1.into();
    assert_eq!(served.post("/v1/messages", &body).await.status, StatusCode::OK);
    let unknown: Vec<String> = served.gateway.unknown_fields().into_keys().collect();
    let want = ["context_management", "newest", "output_config.effort", "thinking"];
    assert_eq!(unknown, want.map(|name| format!("messages.{name}")));
}

#[tokio::test]
async fn root_paths_return_ok() {
    let served = TestGateway::scripted(&["Yes."]);
    for path in [
        "/",
        "/v1",
        "/rollout/r/attempt/a",
        "/rollout/r/attempt/a/",
        "/rollout/r/attempt/a/agent/x/",
    ] {
        for method in ["HEAD", "GET"] {
            assert_eq!(
                served.send(method, path, OUTSIDE_KEY, "").await.status,
                StatusCode::OK,
                "{method} {path}"
            );
        }
    }
}

#[tokio::test]
async fn failure_ends_stream_with_error_event() {
    let served = TestGateway::failing();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let events = served.post("/v1/messages", &streamed(&messages)).await.events();
    let first = &events[0];
    let last = &events[events.len() - 1];
    assert_eq!((&first["type"], &last["type"]), (&json!("message_start"), &json!("error")));
    assert!(last["error"]["message"].is_string() && last["request_id"].is_string(), "{last}");
    let full_response = served.post("/v1/messages", &request(&messages)).await;
    assert_eq!(full_response.json()["error"], last["error"]);
    assert_eq!(full_response.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn waiting_client_receives_ping() {
    let served = TestGateway::slow();
    let mut body = request(&json!([{"role": "user", "content": "Hi"}]));
    body["max_tokens"] = 10.into();
    let full_response = served.post("/v1/messages", &body).await;
    assert!(
        full_response.text.starts_with("  ") && full_response.json()["stop_reason"].is_string(),
        "{}",
        full_response.text
    );
    body["stream"] = true.into();
    let mut events = served.post("/v1/messages", &body).await.events();
    let all = events.len();
    events.retain(|event| event["type"] != "ping");
    assert!(events.len() < all);
    assert!(message(&events)["stop_reason"].is_string());
}
