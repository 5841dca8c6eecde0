//! Tests of recorded calls, and of the responses to repeated calls.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use levade_conversation::Origin;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::testing::{OUTSIDE_KEY, TestGateway};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn question() -> Value {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }] })
}

/// Parses the chunks of a stream of completions or of a chat.
fn chunks(stream: &str) -> Vec<Value> {
    let frames = stream.split("\n\n").filter_map(|frame| frame.strip_prefix("data: "));
    frames.filter_map(|data| serde_json::from_str(data).ok()).collect()
}

#[tokio::test]
async fn failed_completion_is_recorded_up_to_failure() {
    let served = TestGateway::failing();
    let response_body = served.post(CHAT, &question()).await;
    assert!(!response_body.status.is_success(), "{}", response_body.text);
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let call = &recorded.calls[0];
    assert!(call.error.is_some() && call.tokens > 0, "{call:?}");
    assert_eq!(recorded.trajectory.sampled_tokens(), call.tokens);
}

#[tokio::test]
async fn choices_are_recorded_in_index_order() {
    let served =
        TestGateway::paced(&["A long reply, which ends last.", "No."], Duration::from_millis(5));
    let mut body = question();
    body["n"] = 2.into();
    let reported_body = served.post(CHAT, &body).await.json();
    assert_eq!(reported_body["choices"][1]["message"]["content"], "No.");
    let recorded = served.session.close(Duration::from_secs(5)).await.0;
    let contents: Vec<&str> = recorded.calls.iter().map(|call| call.content.as_str()).collect();
    assert_eq!(contents, ["A long reply, which ends last.", "No."]);
}

#[tokio::test]
async fn empty_completion_is_recorded() {
    let served = TestGateway::scripted(&["", "Yes."]);
    let mut body = question();
    served.post(CHAT, &body).await;
    let next = [
        json!({ "role": "assistant", "content": "" }),
        json!({ "role": "user", "content": "So?" }),
    ];
    body["messages"].as_array_mut().unwrap().extend(next);
    served.post(CHAT, &body).await;
    assert_eq!(served.origins(), [Origin::Started, Origin::Continued]);
}

#[tokio::test]
async fn restored_stop_string_continues_conversation() {
    for put_back in ["", "STOP"] {
        let served = TestGateway::scripted(&["So. STOP", "Yes."]);
        let mut body = question();
        body["stop"] = "STOP".into();
        let reported_body = served.post(CHAT, &body).await.json();
        let text = reported_body["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(text, "So. ");
        let sent = json!({ "role": "assistant", "content": format!("{text}{put_back}") });
        body["messages"]
            .as_array_mut()
            .unwrap()
            .extend([sent, json!({ "role": "user", "content": "So?" })]);
        served.post(CHAT, &body).await;
        assert_eq!(served.origins(), [Origin::Started, Origin::Continued]);
        let recorded = served.session.close(Duration::from_secs(5)).await.0;
        assert_eq!(recorded.calls[0].content, "So. ");
        assert_eq!((recorded.counts.extended, recorded.counts.trimmed), (0, 0), "{put_back:?}");
    }
}

#[tokio::test]
async fn completion_with_calls_matches_with_or_without_stop_string() {
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>";
    for text in
        [format!("So. {call} Now STOP"), "So. <tool_call>{oops}</tool_call> Now STOP".into()]
    {
        for put_back in ["", "STOP"] {
            let served = TestGateway::scripted(&[&text, "Yes."]);
            let mut body = question();
            body["tools"] = json!([{ "type": "function", "function": { "name": "add" } }]);
            body["stop"] = "STOP".into();
            let mut sent = served.post(CHAT, &body).await.json()["choices"][0]["message"].clone();
            sent["content"] = format!("{}{put_back}", sent["content"].as_str().unwrap()).into();
            body["messages"]
                .as_array_mut()
                .unwrap()
                .extend([sent, json!({ "role": "user", "content": "So?" })]);
            served.post(CHAT, &body).await;
            assert_eq!(served.origins(), [Origin::Started, Origin::Continued], "{text} {put_back}");
        }
    }
}

#[tokio::test]
async fn edited_arguments_fork_and_equivalent_json_continues() {
    for (written, sent, continues) in [
        (r#"{"a": 1.50, "b": 2}"#, r#"{"b":2,"a":1.5}"#, true),
        (r#"{"a": 1.0}"#, r#"{ "a" : 1 }"#, true),
        (r#"{"a": 18446744073709551616}"#, r#"{"a":1.8446744073709551616e19}"#, true),
        (r#"{"a": "12 * 3"}"#, r#"{"a": "12*3"}"#, true),
        (r#"{"a": 1}"#, r#"{"a": 2}"#, false),
        (r#"{"a": 18446744073709551616}"#, r#"{"a": 18446744073709551617}"#, false),
        (r#"{"a": 18446744073709551616}"#, r#"{"a": 1.8446744073709552e19}"#, false),
        (r#"{"a": 0.1000000000000000055511151231257827}"#, r#"{"a": 0.1}"#, false),
        (r#"{"a": "1 2"}"#, r#"{"a": "12"}"#, false),
        (r#"{"a": "rm /tmp /b"}"#, r#"{"a": "rm /tmp/b"}"#, false),
        (r#"{"a": "say 'a  b'"}"#, r#"{"a": "say 'a b'"}"#, false),
        (r#"{"a": true}"#, r#"{"a": 1}"#, false),
    ] {
        let served = TestGateway::scripted(&[
            &format!("<tool_call>\n{{\"name\": \"add\", \"arguments\": {written}}}\n</tool_call>"),
            "Yes.",
        ]);
        let mut body = question();
        body["tools"] = json!([{ "type": "function", "function": { "name": "add" } }]);
        let mut assistant_message =
            served.post(CHAT, &body).await.json()["choices"][0]["message"].clone();
        assistant_message["tool_calls"][0]["function"]["arguments"] = sent.into();
        let result = json!({ "role": "tool", "tool_call_id": assistant_message["tool_calls"][0]["id"], "content": "7" });
        body["messages"].as_array_mut().unwrap().extend([assistant_message, result]);
        served.post(CHAT, &body).await;
        assert_eq!(served.origins()[1] == Origin::Continued, continues, "{written} {sent}");
    }
}

#[tokio::test]
async fn retried_body_returns_same_completions_per_prompt() {
    let served = TestGateway::scripted(&["one", "two", "three"]);
    let body = json!({ "prompt": ["a", "b", "c"] }).to_string();
    let mut responses = Vec::new();
    for retries in ["0", "1"] {
        let request = Request::builder().method("POST").uri(COMPLETIONS);
        let request = request.header("content-type", "application/json");
        let request = request.header("authorization", format!("Bearer {}", served.session.key()));
        let request = request
            .header("x-stainless-retry-count", retries)
            .body(Body::from(body.clone()))
            .unwrap();
        let response = served.router().oneshot(request).await.unwrap();
        let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let response_body: Value = serde_json::from_slice(&bytes).unwrap();
        let choices = response_body["choices"].as_array().unwrap().clone();
        let texts = choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned());
        responses.push(texts.collect::<Vec<_>>());
    }
    assert_eq!(responses[1], responses[0]);
    responses[0].sort();
    assert_eq!(responses[0], ["one", "three", "two"]);
    assert_eq!(served.session.close(Duration::from_secs(5)).await.0.calls.len(), 3);
}

#[tokio::test]
async fn completion_stream_reports_all_tokens() {
    // Tokens that complete no character have no text, but must be reported.
    for assistant_message in ["é😀a", "abc"] {
        for (echo, logprobs) in [(false, false), (false, true), (true, true), (true, false)] {
            let mut body = json!({ "prompt": "Say", "return_token_ids": true, "echo": echo, "max_tokens": 9, "seed": 7 });
            if logprobs {
                body["logprobs"] = 1.into();
            }
            let full = gateway_for(assistant_message, echo && logprobs)
                .post(COMPLETIONS, &body)
                .await
                .json();
            body["stream"] = true.into();
            let stream = gateway_for(assistant_message, echo && logprobs)
                .post(COMPLETIONS, &body)
                .await
                .text;
            let choices: Vec<Value> =
                chunks(&stream).iter().map(|chunk| chunk["choices"][0].clone()).collect();
            let all = |path: &str| -> Vec<Value> {
                let lists =
                    choices.iter().filter_map(|choice| choice.pointer(path)?.as_array().cloned());
                lists.flatten().collect()
            };
            let want = &full["choices"][0];
            assert_eq!(json!(all("/token_ids")), want["token_ids"], "{echo} {logprobs}: {stream}");
            let text: String =
                choices.iter().filter_map(|choice| choice["text"].as_str()).collect();
            assert_eq!(text, want["text"], "{stream}");
            for list in ["tokens", "token_logprobs", "text_offset"] {
                let path = format!("/logprobs/{list}");
                let want = want.pointer(&path).cloned().unwrap_or(json!([]));
                assert_eq!(json!(all(&path)), want, "{echo} {logprobs} {list}: {stream}");
            }
            // Only the last frame of a choice can be empty.
            for choice in &choices {
                let is_empty = choice["text"] == "" && choice["token_ids"].is_null();
                let is_silent = is_empty && choice["logprobs"].is_null();
                assert!(!is_silent || !choice["finish_reason"].is_null(), "{stream}");
            }
        }
    }
}

fn gateway_for(assistant_message: &str, reads_prompt: bool) -> TestGateway {
    match reads_prompt {
        // Scripted samplers return no log-probabilities of prompts.
        true => TestGateway::simulated(9),
        false => TestGateway::scripted(&[assistant_message]),
    }
}

#[tokio::test]
async fn only_unknown_models_return_model_not_found() {
    let served = TestGateway::scripted(&["Yes."]);
    let mut body = question();
    body["model"] = "other".into();
    let response_body = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await.json();
    assert_eq!(response_body["error"]["code"], "model_not_found", "{response_body}");
    let reference =
        json!({ "model": "tiny", "input": [{ "type": "item_reference", "id": "msg_1" }] });
    let response_body = served.post("/v1/responses", &reference).await;
    assert_eq!(response_body.status, 404, "{}", response_body.text);
    assert_eq!(response_body.json()["error"]["code"], Value::Null, "{}", response_body.text);
    let response_body = served.send("GET", "/v1/nowhere", OUTSIDE_KEY, "").await;
    assert_eq!(
        (response_body.status.as_u16(), &response_body.json()["error"]["code"]),
        (404, &Value::Null),
        "{}",
        response_body.text
    );
}
