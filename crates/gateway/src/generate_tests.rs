//! Tests of calls over the HTTP routes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use levade_conversation::{Fork, Origin, Reason};
use levade_text::testing::IM_END;
use levade_tree::Kind;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::ServiceExt;

use crate::GatewayOptions;
use crate::testing::{Limits, OUTSIDE_KEY, TestGateway};

const CALL: &str =
    "So.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1.50, \"b\": 2}}\n</tool_call>";

fn question(text: &str) -> Value {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": text }] })
}

fn tools() -> Value {
    let parameters = json!({ "type": "object", "properties": { "a": { "type": "number" } } });
    json!([{ "type": "function", "function": { "name": "add", "description": null, "parameters": parameters } }])
}

const CHAT: &str = "/v1/chat/completions";

/// Returns the joined deltas of a stream: content, reasoning, tool calls and finish reason.
fn joined_deltas(text: &str) -> (String, String, Vec<Value>, String) {
    let mut content = String::new();
    let mut reasoning = String::new();
    let mut calls = Vec::new();
    let mut finish = String::new();
    for frame in text.split("\n\n").filter(|frame| !frame.is_empty() && *frame != "data: [DONE]") {
        let chunk: Value = serde_json::from_str(frame.strip_prefix("data: ").unwrap()).unwrap();
        let Some(choice) = chunk["choices"].get(0) else { continue };
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
        calls.extend(choice["delta"]["tool_calls"].as_array().cloned().unwrap_or_default());
        finish += choice["finish_reason"].as_str().unwrap_or_default();
    }
    (content, reasoning, calls, finish)
}

#[tokio::test]
async fn streamed_response_equals_complete_response() {
    let script = ["<think>Hm.</think>", CALL].concat();
    let served = TestGateway::scripted(&[&script]);
    let mut body = question("1.5 + 2?");
    body["tools"] = tools();
    let full_response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await.json();
    let message = &full_response["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("So."), &json!("Hm."))
    );
    assert_eq!(full_response["choices"][0]["finish_reason"], "tool_calls");
    let call = &message["tool_calls"][0];
    assert_eq!(call["function"]["name"], "add");
    let arguments: Value =
        serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, serde_json::from_str::<Value>(r#"{"a": 1.50, "b": 2}"#).unwrap());

    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
    assert!(response.text.ends_with("data: [DONE]\n\n"), "{}", response.text);
    let (content, reasoning, calls, finish) = joined_deltas(&response.text);
    assert_eq!(
        (content.as_str(), reasoning.as_str(), finish.as_str()),
        ("So.", "Hm.", "tool_calls")
    );
    assert_eq!(calls[0]["function"], call["function"]);
    assert_eq!((&calls[0]["index"], calls.len()), (&json!(0), 1));
    let usage = format!("\"completion_tokens\":{}", script.len() + 1);
    assert!(response.text.contains(&usage), "{usage}: {}", response.text);
}

#[tokio::test]
async fn stream_and_document_return_same_single_call() {
    let served =
        TestGateway::scripted(&[
            &["<tool_call>\n{oops}\n</tool_call>\n", CALL, "\n", CALL].concat()
        ]);
    let mut body = question("1.5 + 2?");
    (body["tools"], body["parallel_tool_calls"]) = (tools(), false.into());
    let full_response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await.json();
    let calls = &full_response["choices"][0]["message"]["tool_calls"];
    assert_eq!(calls.as_array().map(Vec::len), Some(1), "{full_response}");
    body["stream"] = true.into();
    let (_, _, calls_sent, _) =
        joined_deltas(&served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await.text);
    assert_eq!(calls_sent.len(), 1, "{calls_sent:?}");
    assert_eq!(calls_sent[0]["function"], calls[0]["function"]);
}

#[tokio::test]
async fn returned_history_continues_with_recorded_ids() {
    let served = TestGateway::scripted(&[CALL, "It is 3.5."]);
    let mut body = question("1.5 + 2?");
    body["tools"] = tools();
    let first = served.post(CHAT, &body).await.json();
    let mut text = first["choices"][0]["message"].clone();
    let id = text["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(id.len(), 9, "templates of Mistral take no other: {id}");
    // A framework has serialized the arguments again.
    text["tool_calls"][0]["function"]["arguments"] = "{\"b\":2.0,\"a\":1.5}".into();
    text["content"] = json!([{ "type": "text", "text": "So." }]);
    let result = json!({ "role": "tool", "tool_call_id": id, "content": "3.5" });
    body["messages"].as_array_mut().unwrap().extend([text, result]);
    let second = served.post(CHAT, &body).await.json();
    assert_eq!(second["choices"][0]["message"]["content"], "It is 3.5.");
    assert_eq!(served.origins(), [Origin::Started, Origin::Continued]);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    assert_eq!(recorded.trajectory.leaves().len(), 1);
    let sampled = recorded.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled);
    let lengths: Vec<usize> = sampled.map(|segment| segment.tokens.len()).collect();
    assert_eq!(lengths, [CALL.len() + 1, "It is 3.5.".len() + 1]);
    assert_eq!(recorded.counts.continued, 1);
}

#[tokio::test]
async fn modified_completion_text_continues_conversation() {
    let two = [CALL, CALL].concat();
    for (text, more, change) in [
        // The client omits the stop string, or restores it, with or without the text that follows
        // it.
        ("x = 1\n</code>", json!({ "stop": ["</code>"] }), ""),
        ("x = 1\n</code>", json!({ "stop": ["</code>"] }), "</code>"),
        ("x = 1\n</code>", json!({ "stop": ["</code>"] }), "</code>\nCalling tools:"),
        ("<think>Hm.</think>x = 1\n</code>", json!({ "stop": ["</code>"] }), "</code>"),
        ("1, 2, 3, 4", json!({ "stop": ["4", "5"] }), ""),
        ("1, 2, 3, 4", json!({ "stop": ["4", "5"] }), "4"),
        ("x = 1", json!({}), "\n</code>"),
        // Only one of two calls is returned.
        (&two, json!({ "tools": tools(), "parallel_tool_calls": false }), ""),
    ] {
        let served = TestGateway::scripted(&[text, "Yes."]);
        let mut body = question("?");
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut sent_text = served.post(CHAT, &body).await.json()["choices"][0]["message"].clone();
        sent_text["content"] = format!("{}{change}", sent_text["content"].as_str().unwrap()).into();
        let next = match sent_text["tool_calls"][0]["id"].as_str() {
            Some(id) => json!({ "role": "tool", "tool_call_id": id, "content": "3.5" }),
            None => json!({ "role": "user", "content": "And?" }),
        };
        body["messages"].as_array_mut().unwrap().extend([sent_text, next]);
        served.post(CHAT, &body).await.json();
        assert_eq!(served.origins(), [Origin::Started, Origin::Continued], "{text:?} {change:?}");
        let recorded = served.session.close(Duration::from_secs(5)).await.0;
        let sampled = recorded.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled);
        assert_eq!(sampled.count(), 2);
        assert!(recorded.drift.is_empty(), "{:?}", recorded.drift);
    }
}

#[tokio::test]
async fn api_key_authenticates_but_path_does_not() {
    let served = TestGateway::scripted(&["Yes."]);
    let body = question("?").to_string();
    let status = async |path: &str, key: &str| served.send("POST", path, key, &body).await.status;
    let key = served.session.key().to_owned();
    assert_eq!(status(&chat_path("a"), &key).await, StatusCode::OK);
    assert_eq!(status(&chat_path("a"), OUTSIDE_KEY).await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&chat_path("b"), &key).await, StatusCode::FORBIDDEN);
    let wrong = format!("{}0", &key[..key.len() - 1]);
    let wrong = if wrong == key { format!("{}1", &key[..key.len() - 1]) } else { wrong };
    assert_eq!(status(CHAT, &wrong).await, StatusCode::UNAUTHORIZED);
    assert_eq!(
        status("/rollout/r/attempt/a/agent/nobody/v1/chat/completions", &key).await,
        StatusCode::NOT_FOUND
    );
    // The key for rewards permits no calls, and the key for calls permits no rewards.
    let reward = served.session.reward_key().to_owned();
    assert_eq!(status(CHAT, &reward).await, StatusCode::FORBIDDEN);
    let posted = served.send("POST", "/rollout/r/attempt/a/reward", &key, "{\"value\": 1}").await;
    assert_eq!(posted.status, StatusCode::FORBIDDEN);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    assert_eq!(recorded.calls.len(), 1);
    assert_eq!(status(CHAT, &key).await, StatusCode::GONE);
    served.gateway.forget_session(&served.session);
    assert_eq!(
        status(CHAT, &key).await,
        StatusCode::GONE,
        "and by whoever does not know it any more"
    );
}

fn chat_path(attempt: &str) -> String {
    format!("/rollout/r/attempt/{attempt}/v1/chat/completions")
}

#[tokio::test]
async fn invalid_fields_are_named_and_not_recorded() {
    let served = TestGateway::scripted(&["Yes."]);
    let image = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]);
    for (body, param) in [
        ("{".to_owned(), ""),
        ("\u{FEFF}{}".to_owned(), ""),
        ("[]".to_owned(), ""),
        (question_with("messages", json!([])), "messages"),
        (
            question_with("messages", json!([{ "role": "wizard", "content": "?" }])),
            "messages[0].role",
        ),
        (question_with("messages", image), "messages[0].content"),
        (question_with("temperature", json!("hot")), "temperature"),
        (question_with("temperature", json!(-1)), ""),
        (question_with("max_tokens", json!(-1)), "max_tokens"),
        (question_with("n", json!(0)), "n"),
        (question_with("n", json!(1000)), "n"),
        (question_with("chat_template", json!("{{ messages }}")), "chat_template"),
        (question_with("tool_choice", json!("perhaps")), "tool_choice"),
        (question_with("top_logprobs", json!(2)), "top_logprobs"),
        (question_with("logit_bias", json!({ "x": 1 })), "logit_bias"),
        (question_with("logit_bias", json!({ "1": 1000 })), ""),
        (question_with("tools", json!([{ "type": "local_shell" }])), "tools"),
    ] {
        let response = served.post(CHAT, &Value::Null).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST);
        let response = served.send("POST", CHAT, served.session.key(), &body).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{body}: {}", response.text);
        let error = &response.json()["error"];
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let response =
        served.send("POST", CHAT, served.session.key(), &question_with("stop", json!([1]))).await;
    assert!(
        response.text.contains("stop: must be a string or a list of strings"),
        "{}",
        response.text
    );
    let body_of = json!({ "prompt": { "text": "?" } });
    let response = served.post("/v1/completions", &body_of).await;
    assert!(response.text.contains("prompt: must be a string, or a list"), "{}", response.text);
    let invalid = Request::post(CHAT).body(Body::from(vec![0xFF, 0xFE])).unwrap();
    assert_eq!(served.router().oneshot(invalid).await.unwrap().status(), StatusCode::BAD_REQUEST);
    let long = question(&"x".repeat(5000)).to_string();
    let response = served.send("POST", CHAT, served.session.key(), &long).await;
    assert_eq!(response.json()["error"]["code"], "context_length_exceeded");
    let unknown =
        json!({ "model": "other", "messages": [{ "role": "user", "content": "?" }] }).to_string();
    let response = served.send("POST", CHAT, OUTSIDE_KEY, &unknown).await;
    assert_eq!(
        (response.status, &response.json()["error"]["code"]),
        (StatusCode::NOT_FOUND, &json!("model_not_found"))
    );
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    assert!(recorded.trajectory.segments().is_empty() && recorded.calls.is_empty());
}

fn question_with(key: &str, value: Value) -> String {
    let mut body = question("?");
    body[key] = value;
    body.to_string()
}

#[tokio::test]
async fn unknown_fields_are_counted_and_ignored() {
    let served = TestGateway::scripted(&["Yes."]);
    let mut body = question("?");
    body["shiny"] = json!({ "new": true });
    body["user"] = json!("somebody");
    for _ in 0..2 {
        assert_eq!(served.post(CHAT, &body).await.status, StatusCode::OK);
    }
    assert_eq!(served.gateway.unknown_fields(), [("chat.shiny".to_owned(), 2)].into());
}

#[tokio::test]
async fn call_after_broken_connection_is_sampled_once() {
    let served = TestGateway::paced(&["One, two, three.", "Other."], Duration::from_millis(5));
    let body = question("Count.").to_string();
    let key = served.session.key().to_owned();
    let hung_up =
        tokio::time::timeout(Duration::from_millis(40), served.send("POST", CHAT, &key, &body))
            .await;
    assert!(hung_up.is_err());
    let response_body = served.send("POST", CHAT, &key, &body).await.json();
    assert_eq!(response_body["choices"][0]["message"]["content"], "One, two, three.");
    // An equal request after a complete response is a separate call, unless the client marks it as
    // a retry.
    let other = served.send("POST", CHAT, &key, &body).await.json();
    assert_eq!(other["choices"][0]["message"]["content"], "Other.");
    let repeated = Request::post(CHAT)
        .header("authorization", format!("Bearer {key}"))
        .header("x-stainless-retry-count", "1")
        .body(Body::from(body))
        .unwrap();
    let response = served.router().oneshot(repeated).await.unwrap();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let repeated: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(repeated, other);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    assert_eq!(recorded.calls.len(), 2);
    let repeated_origin = Origin::Forked(Fork { at: 1, reason: Reason::Repeated });
    assert_eq!(recorded.calls[1].origin, Some(repeated_origin));
}

/// Uses a TCP connection, because an HTTP server does not poll a body further than its length.
#[tokio::test]
async fn repeated_call_after_complete_response_is_sampled_again() {
    let served = TestGateway::scripted(&["One.", "Two."]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let gateway = served.gateway.clone();
    let server =
        tokio::spawn(async move { crate::serve(&gateway, listener, std::future::pending()).await });
    let key = served.session.key();
    let body = question("Say something.").to_string();
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {key}\r\n\
         content-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    );
    for want in ["One.", "Two."] {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (_, text) = response.split_once("\r\n\r\n").unwrap();
        let response: Value = serde_json::from_str(text).unwrap();
        assert_eq!(response["choices"][0]["message"]["content"], want);
    }
    server.abort();
}

#[tokio::test]
async fn failed_call_is_sampled_again_on_retry() {
    let served = TestGateway::failing();
    let key = served.session.key().to_owned();
    let body = question("?").to_string();
    for made in 1..=2 {
        let response = served.send("POST", CHAT, &key, &body).await;
        assert_ne!(response.status, StatusCode::OK, "{}", response.text);
        assert_eq!(served.session.recorder().ended_calls(), made);
    }
}

#[tokio::test]
async fn aborted_call_is_sampled_again_on_late_retry() {
    let options = GatewayOptions { grace: Duration::from_millis(20), ..GatewayOptions::default() };
    let long = "x".repeat(3000);
    let served =
        TestGateway::paced_with(&[long.as_str(), "Whole."], Duration::from_millis(2), options);
    let key = served.session.key().to_owned();
    let body = question("?").to_string();
    let hung_up =
        tokio::time::timeout(Duration::from_millis(60), served.send("POST", CHAT, &key, &body))
            .await;
    assert!(hung_up.is_err());
    tokio::time::timeout(Duration::from_secs(5), async {
        while served.gateway.0.metrics.running.load(Ordering::Relaxed) > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .expect("the call ends");
    let response = served.send("POST", CHAT, &key, &body).await.json();
    let choice = &response["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("Whole."), &json!("stop"))
    );
}

#[tokio::test]
async fn concurrent_equal_calls_are_sampled_separately() {
    let served = TestGateway::paced(&["A.", "B."], Duration::from_millis(2));
    let body = question("Say something.").to_string();
    let key = served.session.key().to_owned();
    let call = || async { served.send("POST", CHAT, &key, &body).await.json() };
    let (one, other) = tokio::join!(call(), call());
    let mut both = [content_of(&one), content_of(&other)];
    both.sort_by_key(Value::to_string);
    assert_eq!(both, [json!("A."), json!("B.")]);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.trajectory.leaves().len(), 2);
}

fn content_of(response: &Value) -> Value {
    response["choices"][0]["message"]["content"].clone()
}

#[tokio::test]
async fn abandoned_call_aborts_and_keeps_sampled_tokens() {
    let options = GatewayOptions { grace: Duration::from_millis(20), ..GatewayOptions::default() };
    let served =
        TestGateway::paced_with(&["x".repeat(3000).as_str()], Duration::from_millis(2), options);
    let key = served.session.key().to_owned();
    let body = question("?").to_string();
    let hung_up =
        tokio::time::timeout(Duration::from_millis(60), served.send("POST", CHAT, &key, &body))
            .await;
    assert!(hung_up.is_err());
    let metrics = &served.gateway.0.metrics;
    tokio::time::timeout(Duration::from_secs(5), async {
        while metrics.running.load(Ordering::Relaxed) > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
    .expect("the call ends");
    assert_eq!(metrics.aborted.load(Ordering::Relaxed), 1);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let sampled_count = recorded.calls[0].tokens;
    assert!((1..3000).contains(&sampled_count), "{sampled_count}");
    let sampled = recorded.trajectory.segments().iter().find(|s| s.kind == Kind::Sampled).unwrap();
    assert_eq!(sampled.tokens.len(), sampled_count);
}

#[tokio::test]
async fn close_aborts_calls_in_flight() {
    let served = TestGateway::paced(&["x".repeat(3000).as_str()], Duration::from_millis(2));
    let key = served.session.key().to_owned();
    let body = question("?").to_string();
    let call = served.send("POST", CHAT, &key, &body);
    let close = async {
        tokio::time::sleep(Duration::from_millis(40)).await;
        served.session.close(Duration::from_secs(5)).await.0
    };
    let (response, recorded) = tokio::join!(call, close);
    assert_eq!(response.json()["choices"][0]["finish_reason"], "abort");
    assert_eq!(recorded.calls.len(), 1);
}

#[tokio::test]
async fn full_queue_returns_429() {
    let options = GatewayOptions { running: 1, waiting: 1, ..GatewayOptions::default() };
    let served =
        TestGateway::paced_with(&["x".repeat(50).as_str()], Duration::from_millis(2), options);
    let body = question("?").to_string();
    let call = || served.send("POST", CHAT, OUTSIDE_KEY, &body);
    let late = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        call().await
    };
    let (first, second, third) = tokio::join!(call(), call(), late);
    assert_eq!((first.status, second.status), (StatusCode::OK, StatusCode::OK));
    assert_eq!(
        (third.status, &third.headers["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"1".parse().unwrap())
    );
    assert_eq!(served.gateway.0.waiting.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn attempt_limits_reject_further_calls() {
    let limits = Limits { calls: 2, tokens: 10, timeout: Duration::from_secs(5) };
    let served = TestGateway::with_limits(&["Four"], limits);
    let body_of = async |text: &str| served.post(CHAT, &question(text)).await;
    assert_eq!(body_of("a").await.status, StatusCode::OK);
    assert_eq!(body_of("b").await.status, StatusCode::OK);
    let rejected = body_of("c").await;
    // Clients retry neither this status nor a response with this header.
    assert_eq!(
        (rejected.status, &rejected.headers["x-should-retry"]),
        (StatusCode::BAD_REQUEST, &"false".parse().unwrap())
    );
    assert_eq!(rejected.json()["error"]["code"], "attempt_limit_reached");
    assert!(rejected.text.contains("limit of 2 calls"), "{}", rejected.text);
    let limits = Limits { calls: 9, tokens: 7, timeout: Duration::from_secs(5) };
    let served = TestGateway::with_limits(&["Four"], limits);
    let body_of = async |text: &str| served.post(CHAT, &question(text)).await;
    assert_eq!(body_of("a").await.json()["choices"][0]["finish_reason"], "stop");
    assert_eq!(body_of("b").await.json()["choices"][0]["finish_reason"], "length");
    assert!(body_of("c").await.text.contains("limit of 7 sampled tokens"));
}

#[tokio::test]
async fn waiting_client_receives_keep_alive() {
    let options = GatewayOptions { ping: Duration::from_millis(10), ..GatewayOptions::default() };
    let served = TestGateway::paced_with(&["Yes."], Duration::from_millis(30), options);
    let mut body = question("?");
    let full_response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
    assert!(full_response.text.starts_with("  "), "{:?}", full_response.text);
    assert_eq!(full_response.json()["choices"][0]["message"]["content"], "Yes.");
    body["stream"] = true.into();
    let stream = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
    assert!(stream.text.contains(": ping\n\n"));
    let deltas: String = stream
        .text
        .split("\n\n")
        .filter(|frame| !frame.starts_with(':'))
        .map(|f| format!("{f}\n\n"))
        .collect();
    assert_eq!(joined_deltas(deltas.trim_end()).0, "Yes.");
}

#[path = "generate_tokens_tests.rs"]
mod tokens;
