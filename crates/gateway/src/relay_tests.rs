//! Tests of parties with an external chat API over the HTTP routes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use levade_call::{
    ApiError, Backend, ChatApi, ChatCompletion, ChatDelta, ChatQuery, Constraint, ErrorKind,
    ExternalCall, Party, PartyLimits, SamplingRule, ToolChoice,
};
use levade_policy::{FinishReason, SamplingParams};
use levade_text::{Message, ToolCall};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::session::Session;
use crate::testing::{LIMITS, TestGateway, TestResponse};
use crate::{CallPattern, Route, SessionOptions};

/// Chat API that returns the deltas in `parts`, and records its queries.
#[derive(Default)]
struct Parrot {
    parts: Mutex<Vec<Result<ChatDelta, ApiError>>>,
    queries: Mutex<Vec<ChatQuery>>,
    /// Whether the API stays silent after its deltas instead of ending the stream.
    hangs: bool,
}

impl ChatApi for Parrot {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        self.queries.lock().unwrap().push(query);
        let (sender, receiver) = mpsc::unbounded_channel();
        for part in self.parts.lock().unwrap().iter() {
            sender.send(part.clone()).unwrap();
        }
        if self.hangs {
            tokio::spawn(async move { sender.closed().await });
        }
        receiver
    }
}

/// Returns the deltas of a complete completion with reasoning and a tool call.
fn parts() -> Vec<Result<ChatDelta, ApiError>> {
    let arguments = json!({ "a": 1 }).as_object().cloned().unwrap_or_else(Map::new);
    let call = ToolCall { id: "c1".into(), name: "add".into(), arguments: arguments.into() };
    let mut message = Message::calls("So be it.", vec![call]);
    message.reasoning_content = Some("Hm.".into());
    let finish = FinishReason::StopId;
    let response =
        ChatCompletion { message, finish, prompt_tokens: 21, tokens: 9, reasoning_tokens: 2 };
    let sent_text = ["So ", "be it."].map(|text| ChatDelta::Text(text.into()));
    let all = [ChatDelta::Reasoning("Hm.".into())]
        .into_iter()
        .chain(sent_text)
        .chain([ChatDelta::Done(Box::new(response))]);
    all.map(Ok).collect()
}

/// Creates a gateway with an attempt of two agents: `default`, which samples tokens, and `judge`,
/// which uses the external chat API.
fn gateway_with_parrot(parrot: Parrot) -> (TestGateway, Arc<Session>, Arc<Parrot>) {
    let served = TestGateway::scripted(&["Yes."]);
    let parrot = Arc::new(parrot);
    let judge = Party::new(
        "api",
        Backend::Messages(Arc::<Parrot>::clone(&parrot)),
        None,
        PartyLimits { context: usize::MAX, timeout: LIMITS.timeout },
        SamplingRule::Default(SamplingParams::default()),
    );
    let judge = Party { agent: "judge".into(), ..judge };
    let mut routes = served.session.options.routes.clone();
    let pattern = CallPattern { models: vec!["api".into()], ..CallPattern::default() };
    routes.push(Route { party: Arc::new(judge), pattern });
    let session = served.gateway.open_session(SessionOptions {
        rollout: "r".into(),
        attempt: "mixed".into(),
        routes,
        recorder: served.gateway.new_recorder("mixed", (1, 3), (LIMITS.calls, LIMITS.tokens)),
        rewards: false,
    });
    (served, session, parrot)
}

async fn post(served: &TestGateway, session: &Session, path: &str, body: &Value) -> TestResponse {
    served.send("POST", path, session.key(), &body.to_string()).await
}

fn question(text: &str) -> Value {
    json!({ "model": "api", "messages": [{ "role": "user", "content": text }] })
}

#[tokio::test]
async fn every_dialect_returns_external_completion() {
    let (served, session, _) =
        gateway_with_parrot(Parrot { parts: Mutex::new(parts()), ..Parrot::default() });
    let mut body = question("1?");
    let full = post(&served, &session, "/v1/chat/completions", &body).await.json();
    let message = &full["choices"][0]["message"];
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("So be it."), &json!("Hm."))
    );
    assert_eq!(message["tool_calls"][0]["function"]["name"], "add");
    assert_eq!(full["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(
        (&full["usage"]["prompt_tokens"], &full["usage"]["completion_tokens"]),
        (&json!(21), &json!(9))
    );

    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let streamed = post(&served, &session, "/v1/chat/completions", &body).await.text;
    for part in [
        "\"content\":\"So \"",
        "\"reasoning\":\"Hm.\"",
        "\"id\":\"c1\"",
        "\"prompt_tokens\":21",
        "[DONE]",
    ] {
        assert!(streamed.contains(part), "{part}: {streamed}");
    }
    let body = json!({ "model": "api", "input": "1?" });
    let response = post(&served, &session, "/v1/responses", &body).await.json();
    let kinds: Vec<&str> = response["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(response["usage"]["input_tokens"], 21);

    let mut body = question("1?");
    body["max_tokens"] = 9.into();
    let message = post(&served, &session, "/v1/messages", &body).await.json();
    assert_eq!(
        (&message["stop_reason"], &message["usage"]["input_tokens"]),
        (&json!("tool_use"), &json!(21))
    );
    assert_eq!(message["content"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn request_options_are_forwarded_to_chat_api() {
    let (served, session, parrot) =
        gateway_with_parrot(Parrot { parts: Mutex::new(parts()), ..Parrot::default() });
    let mut body = question("1?");
    body["temperature"] = 0.5.into();
    body["tool_choice"] = "required".into();
    body["tools"] = json!([{ "type": "function", "function": { "name": "add" } }]);
    body["response_format"] = json!({ "type": "json_object" });
    assert_eq!(post(&served, &session, "/v1/chat/completions", &body).await.status, StatusCode::OK);
    let requested = parrot.queries.lock().unwrap();
    assert_eq!(
        (requested[0].sampling.temperature, &requested[0].tool_choice),
        (Some(0.5), &ToolChoice::Required)
    );
    assert_eq!((requested[0].tools.len(), requested[0].messages.len()), (1, 1));
    assert_eq!(requested[0].constraint, Some(Constraint::JsonObject));
}

#[tokio::test]
async fn external_histories_are_recorded_once_as_messages() {
    let (served, session, _) =
        gateway_with_parrot(Parrot { parts: Mutex::new(parts()), ..Parrot::default() });
    let mut body = question("1?");
    let first = post(&served, &session, "/v1/chat/completions", &body).await.json();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "tool", "tool_call_id": "c1", "content": "2" }));
    post(&served, &session, "/v1/chat/completions", &body).await.json();
    // A call with an unrelated history, and a call of the other agent.
    post(&served, &session, "/v1/chat/completions", &question("2?")).await.json();
    let mut own = question("3?");
    own["model"] = "tiny".into();
    post(&served, &session, "/v1/chat/completions", &own).await.json();
    let recorded = session.close(Duration::from_secs(5)).await.0;
    let external = &recorded.external;
    let ranges: Vec<(Option<usize>, usize, usize)> = external
        .iter()
        .map(|call| (call.after, call.shared_messages, call.messages.len()))
        .collect();
    assert_eq!(ranges, [(None, 0, 1), (Some(0), 2, 1), (None, 0, 1)]);
    let history = ExternalCall::history(external, 1);
    let texts: Vec<&str> = history.iter().map(|message| message.content.as_str()).collect();
    assert_eq!(texts, ["1?", "So be it.", "2", "So be it."]);
    assert!(
        external.iter().all(|call| (call.agent.as_str(), call.policy.as_str()) == ("judge", "api"))
    );
    let is_external: Vec<bool> = recorded.calls.iter().map(|call| call.external).collect();
    assert_eq!(is_external, [true, true, true, false]);
    let leaves = recorded.trajectory.leaves();
    assert_eq!(leaves.len(), 1, "only the agent of tokens has a path");
    let record = serde_json::to_string(external).unwrap();
    assert_eq!(serde_json::from_str::<Vec<ExternalCall>>(&record).unwrap(), *external);
}

#[tokio::test]
async fn tools_of_chat_api_are_recorded_when_they_change() {
    let (served, session, _) =
        gateway_with_parrot(Parrot { parts: Mutex::new(parts()), ..Parrot::default() });
    for names in [&["add"][..], &["add"], &["add", "sub"], &[], &[]] {
        let tools =
            names.iter().map(|name| json!({ "type": "function", "function": { "name": name } }));
        let mut body = question("1?");
        body["tools"] = tools.collect();
        assert_eq!(
            post(&served, &session, "/v1/chat/completions", &body).await.status,
            StatusCode::OK
        );
    }
    let recorded = session.close(Duration::from_secs(5)).await.0;
    let listed = recorded.external.iter().map(|call| call.tools.as_ref().map(Vec::len));
    assert_eq!(listed.collect::<Vec<_>>(), [Some(1), None, Some(2), Some(0), None]);
    let counts = (0..5).map(|at| ExternalCall::tools(&recorded.external, at).len());
    assert_eq!(counts.collect::<Vec<_>>(), [1, 1, 2, 0, 0]);
    assert!(recorded.calls.iter().all(|call| !call.summary && call.external));
}

#[tokio::test]
async fn chat_api_errors_keep_status_and_are_recorded() {
    let busy = ApiError::new(ErrorKind::Busy(Duration::from_secs(3)), "come back");
    let (served, session, _) = self::gateway_with_parrot(Parrot {
        parts: Mutex::new(vec![Err(busy)]),
        ..Parrot::default()
    });
    let response = post(&served, &session, "/v1/chat/completions", &question("1?")).await;
    assert_eq!(
        (response.status, &response.headers["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"3".parse().unwrap())
    );
    assert!(session.close(Duration::from_secs(5)).await.0.external.is_empty(), "nothing was said");

    // The API breaks off in the middle of a completion.
    let started = parts().into_iter().take(2).collect();
    let (served, session, _) =
        self::gateway_with_parrot(Parrot { parts: Mutex::new(started), ..Parrot::default() });
    let response = post(&served, &session, "/v1/chat/completions", &question("1?")).await;
    assert_eq!(response.status, StatusCode::SERVICE_UNAVAILABLE, "{}", response.text);
    let external = session.close(Duration::from_secs(5)).await.0.external;
    assert_eq!(external[0].message.content.as_str(), "So ");
    assert!(
        external[0].error.as_ref().unwrap().contains("stopped before the completion ended"),
        "{external:?}"
    );
}

#[tokio::test]
async fn silent_call_ends_with_attempt_and_keeps_text() {
    let started = parts().into_iter().take(2).collect();
    let (served, session, _) = gateway_with_parrot(Parrot {
        parts: Mutex::new(started),
        hangs: true,
        ..Parrot::default()
    });
    let mut body = question("1?");
    body["stream"] = true.into();
    let requested = post(&served, &session, "/v1/chat/completions", &body);
    let closed = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        session.close(Duration::from_secs(5)).await.0
    };
    let (response, recorded) = tokio::join!(requested, closed);
    assert!(response.text.contains("So "), "{}", response.text);
    assert_eq!(recorded.external[0].message.content.as_str(), "So ");
    assert_eq!(recorded.external[0].finish, FinishReason::Aborted);
}

#[tokio::test]
async fn token_requests_to_chat_api_are_rejected() {
    let (served, session, _) =
        gateway_with_parrot(Parrot { parts: Mutex::new(parts()), ..Parrot::default() });
    for (path, body) in [
        ("/v1/completions", json!({ "model": "api", "prompt": "a" })),
        ("/generate", json!({ "model": "api", "input_ids": [1] })),
        ("/inference/v1/generate", json!({ "model": "api", "token_ids": [1] })),
        ("/tokenize", json!({ "model": "api", "prompt": "a" })),
        ("/v1/messages/count_tokens", question_with("max_tokens", json!(1))),
        ("/v1/chat/completions", question_with("logprobs", json!(true))),
        ("/v1/chat/completions", question_with("return_token_ids", json!(true))),
        ("/v1/chat/completions", question_with("chat_template_kwargs", json!({ "a": 1 }))),
        ("/v1/chat/completions", question_with("n", json!(2))),
        ("/v1/chat/completions", question_with("messages", json!([]))),
    ] {
        let response = post(&served, &session, path, &body).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{path} {body}: {}", response.text);
    }
    assert!(session.close(Duration::from_secs(5)).await.0.external.is_empty());
}

fn question_with(field: &str, value: Value) -> Value {
    let mut body = question("1?");
    body[field] = value;
    body
}
