//! Fuzz tests with damaged requests. For any input, an endpoint responds in the format of its API,
//! without a panic or an internal error. The record of an attempt contains exactly the calls that
//! succeeded.
//!
//! `conformance/fuzz.py` runs these tests for any duration.

use std::cell::Cell;
use std::sync::{Arc, Once};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use levade_text::testing::IM_END;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::session::Session;
use crate::testing::{OUTSIDE_KEY, TestGateway, UNREADABLE, UNUSUAL_COMPLETIONS};

thread_local! {
    /// Number of panics in this thread. A tokio runtime catches the panics of its tasks.
    static PANICS: Cell<usize> = const { Cell::new(0) };
}

/// Counts the panics of each thread from now on.
fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with(|count| count.set(count.get() + 1));
            before(panic);
        }));
    });
}

/// Runs requests to completion on this thread. Returns an error if a task panics or the requests
/// time out.
fn run(requests: impl Future<Output = Result<(), TestCaseError>>) -> Result<(), TestCaseError> {
    count_panics();
    let before = PANICS.with(Cell::get);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let limit = Duration::from_secs(60);
    let ended = runtime.block_on(async { tokio::time::timeout(limit, requests).await });
    drop(runtime);
    ended.map_err(|_| TestCaseError::fail(format!("no answer in {limit:?}")))??;
    prop_assert_eq!(PANICS.with(Cell::get), before, "a task panicked");
    Ok(())
}

/// Returns the paths that accept a body, each with a valid body that uses many fields.
fn valid_requests() -> Vec<(&'static str, Value)> {
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]});
    let function = json!({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}});
    let chat = json!({
        "model": "tiny", "max_completion_tokens": 20, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["STOP", "\n\n"],
        "seed": 7, "logprobs": true, "top_logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "logit_bias": {"65": -100, "66": 1.5}, "stream": false, "stream_options": {"include_usage": true},
        "tools": [function], "tool_choice": "auto", "parallel_tool_calls": true, "user": "u", "return_token_ids": true,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "add 2 and 1.5", "name": "x"},
            {"role": "assistant", "content": null, "refusal": null, "reasoning_content": "Hm.", "tool_calls": [
                {"id": "call_1", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{\"a\":  1.50}"}},
            ]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3.5"},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "again"},
        ],
    });
    let formed = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": true,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}},
    });
    let chosen = json!({
        "model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [function],
        "tool_choice": {"type": "function", "function": {"name": "add"}}, "guided_regex": "a+b",
        "structured_outputs": {"choice": ["a", "b"]},
    });
    let completion = json!({
        "model": "tiny", "prompt": [[72, 105], [72]], "echo": true, "logprobs": 1, "max_tokens": 4, "stop": null,
        "seed": 1, "best_of": 1, "suffix": null, "stream": false, "temperature": 0,
    });
    let responses = json!({
        "model": "tiny", "instructions": "Be brief.", "max_output_tokens": 20, "store": true, "stream": true,
        "previous_response_id": null, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}}, "parallel_tool_calls": true, "truncation": "disabled",
        "tools": [{"type": "function", "name": "add", "parameters": schema, "strict": false}, {"type": "web_search"}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Mind the time."}]},
            {"role": "user", "content": "add 2 and 1.5"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "QQ==", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": "{\"a\": 1}", "status": "completed"},
            {"type": "function_call_output", "call_id": "call_1", "output": "3.5"},
            {"type": "item_reference", "id": "msg_1"},
        ],
    });
    let messages = json!({
        "model": "tiny", "max_tokens": 20, "temperature": 1, "top_k": 5, "stop_sequences": ["STOP"], "stream": true,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "enabled", "budget_tokens": 10}, "metadata": {"user_id": "u"},
        "context_management": {"edits": []}, "output_config": {"effort": "high"},
        "tools": [{"name": "add", "description": "Adds.", "input_schema": schema}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "add"}, {"type": "image", "source": {"type": "url"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "QQ=="}, {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": false, "content": [{"type": "text", "text": "3.5"}]},
            ]},
        ],
    });
    let vllm = json!({
        "model": "tiny", "request_id": "r", "token_ids": [72, 105, IM_END], "stream": false, "priority": 0,
        "sampling_params": {
            "max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1, "stop_token_ids": [98], "min_p": 0.1, "n": 1,
            "seed": 3, "stop": ["b"], "min_tokens": 1, "ignore_eos": true, "skip_special_tokens": false,
        },
    });
    let sglang = json!({
        "rid": "r", "input_ids": [[72, 105], [72]], "return_logprob": true, "logprob_start_len": 0, "stream": false,
        "top_logprobs_num": 1, "return_text_in_logprobs": true,
        "sampling_params": {
            "max_new_tokens": 4, "temperature": 1.0, "n": 1, "stop": "b", "regex": null, "json_schema": null,
            "no_stop_trim": true, "min_new_tokens": 1,
        },
    });
    let system = json!("Be brief.");
    let text = json!({"text": "Hi", "sampling_params": {"stop": ["c"]}, "stream": true});
    let count =
        json!({"model": "tiny", "system": system, "messages": [{"role": "user", "content": "Hi"}]});
    let tokenize = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": true});
    vec![
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", formed),
        ("/v1/chat/completions", chosen),
        ("/v1/completions", completion),
        ("/v1/responses", responses),
        ("/v1/messages", messages),
        ("/v1/messages/count_tokens", count),
        ("/inference/v1/generate", vllm),
        ("/generate", sglang),
        ("/generate", text),
        ("/tokenize", tokenize),
        (
            "/tokenize",
            json!({"prompt": "Hi <|im_end|>", "add_special_tokens": true, "return_token_strs": true}),
        ),
        ("/detokenize", json!({"tokens": [72, 105, 258]})),
        ("/reward", json!({"value": 0.5, "name": "style", "turn": 0, "agent": "default"})),
    ]
}

/// Damage to a request body: to its JSON value, or to the serialized bytes.
#[derive(Debug, Clone)]
enum Damage {
    Replace(Index, Value),
    Remove(Index),
    /// Replaces a part with a copy of another part.
    Copy(Index, Index),
    /// Inserts a field into an object.
    Add(Index, String, Value),
    /// Wraps a part in this number of nested lists.
    Wrap(Index, usize),
    /// Repeats the items of a list, or the characters of a string.
    Repeat(Index, usize),
    Write(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    Truncate(Index),
}

fn odd_values() -> impl Strategy<Value = Value> {
    const VALUES: &[&str] = &[
        "",
        "assistant",
        "user",
        "system",
        "developer",
        "tool",
        "function",
        "text",
        "image_url",
        "input_text",
        "tool_use",
        "tool_result",
        "thinking",
        "reasoning",
        "function_call",
        "item_reference",
        "auto",
        "none",
        "required",
        "any",
        "json_object",
        "json_schema",
        "regex",
        "tiny",
        "default",
        "add",
        "call_1",
        "msg_1",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"a\": 1",
        "{}",
        "\u{0}",
        "\u{feff}",
        "e\u{301}",
        "😀",
        "\u{202e}",
        "-1",
        "1e999",
        "(a+)+$",
        "[",
        "data:image/png;base64,AAAA",
        "STOP",
        "\n",
    ];
    let numbers = [
        json!(0),
        json!(-1),
        json!(1),
        json!(2),
        json!(258),
        json!(259),
        json!(4096),
        json!(1u64 << 31),
        json!(1u64 << 32),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(0.5),
        json!(-0.0),
        json!(1e-320),
        json!(1e308),
        json!(-1e308),
        json!(1.5),
    ];
    let leaf = prop_oneof![
        3 => prop::sample::select(VALUES).prop_map(Value::from),
        3 => prop::sample::select(numbers.to_vec()),
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::from),
        1 => any::<String>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        1 => (0..2000usize).prop_map(|length| "x ".repeat(length).into()),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        const NAMES: &[&str] = &[
            "type",
            "text",
            "content",
            "role",
            "id",
            "name",
            "arguments",
            "input",
            "function",
            "$ref",
            "anyOf",
            "items",
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((prop::sample::select(NAMES), inner), 0..4).prop_map(|fields| {
                fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
            }),
        ]
    })
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<Index>;
    let bytes = || prop::collection::vec(any::<u8>(), 1..5);
    const FIELDS: &[&str] = &[
        "stream",
        "n",
        "seed",
        "stop",
        "logprobs",
        "prompt",
        "chat_template",
        "chat_template_kwargs",
        "best_of",
        "response_format",
        "tool_calls",
        "previous_response_id",
        "conversation",
        "background",
        "text",
        "input",
        "echo",
        "min_tokens",
        "logit_bias",
        "unknown",
    ];
    prop_oneof![
        6 => (at(), odd_values()).prop_map(|(at, value)| Damage::Replace(at, value)),
        2 => at().prop_map(Damage::Remove),
        2 => (at(), at()).prop_map(|(from, to)| Damage::Copy(from, to)),
        2 => (at(), prop::sample::select(FIELDS), odd_values()).prop_map(|(at, name, value)| Damage::Add(at, name.into(), value)),
        1 => (at(), 1..200usize).prop_map(|(at, depth)| Damage::Wrap(at, depth)),
        1 => (at(), 2..40usize).prop_map(|(at, times)| Damage::Repeat(at, times)),
        1 => (at(), bytes()).prop_map(|(at, bytes)| Damage::Write(at, bytes)),
        1 => (at(), bytes()).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        1 => at().prop_map(Damage::Truncate),
    ]
}

/// Collects JSON pointers to all parts of a document.
fn parts(value: &Value, here: &str, found: &mut Vec<String>) {
    found.push(here.to_owned());
    match value {
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                parts(item, &format!("{here}/{at}"), found);
            }
        }
        Value::Object(fields) => {
            for (name, field) in fields {
                parts(
                    field,
                    &format!("{here}/{}", name.replace('~', "~0").replace('/', "~1")),
                    found,
                );
            }
        }
        _ => {}
    }
}

fn part(body: &Value, at: Index) -> String {
    let mut found = Vec::new();
    parts(body, "", &mut found);
    found.swap_remove(at.index(found.len()))
}

/// Applies a damage to a JSON value. Damages to bytes change nothing here.
fn damage_json(body: &mut Value, damage: &Damage) {
    match damage {
        Damage::Replace(at, value) => *body.pointer_mut(&part(body, *at)).unwrap() = value.clone(),
        Damage::Remove(at) => {
            let part_pointer = part(body, *at);
            let Some((parent, name)) = part_pointer.rsplit_once('/') else { return };
            match body.pointer_mut(parent).unwrap() {
                Value::Array(items) => drop(items.remove(name.parse().unwrap())),
                Value::Object(fields) => {
                    drop(fields.remove(&name.replace("~1", "/").replace("~0", "~")))
                }
                _ => {}
            }
        }
        Damage::Copy(from, to) => {
            let copy = body.pointer(&part(body, *from)).unwrap().clone();
            *body.pointer_mut(&part(body, *to)).unwrap() = copy;
        }
        Damage::Add(at, name, value) => {
            let mut part_pointer = part(body, *at);
            while !body.pointer(&part_pointer).unwrap().is_object() && !part_pointer.is_empty() {
                part_pointer.truncate(part_pointer.rfind('/').unwrap_or(0));
            }
            if let Some(fields) = body.pointer_mut(&part_pointer).unwrap().as_object_mut() {
                fields.insert(name.clone(), value.clone());
            }
        }
        Damage::Wrap(at, depth) => {
            let part_pointer = body.pointer_mut(&part(body, *at)).unwrap();
            for _ in 0..*depth {
                *part_pointer = Value::Array(vec![part_pointer.take()]);
            }
        }
        Damage::Repeat(at, times) => match body.pointer_mut(&part(body, *at)).unwrap() {
            Value::Array(items) if items.len() * times < 2000 => {
                *items = vec![std::mem::take(items); *times].into_iter().flatten().collect();
            }
            Value::String(text) if text.len() * times < 20_000 => *text = text.repeat(*times),
            _ => {}
        },
        Damage::Write(..) | Damage::Insert(..) | Damage::Truncate(_) => {}
    }
}

fn damage_bytes(body: &mut Vec<u8>, damage: &Damage) {
    match damage {
        Damage::Write(at, bytes) => {
            let at = at.index(body.len() + 1);
            for (old, new) in body[at..].iter_mut().zip(bytes) {
                *old = *new;
            }
        }
        Damage::Insert(at, bytes) => {
            let at = at.index(body.len() + 1);
            body.splice(at..at, bytes.iter().copied());
        }
        Damage::Truncate(at) => body.truncate(at.index(body.len() + 1)),
        _ => {}
    }
}

/// Returns a strategy for a path and a damaged body.
fn request() -> impl Strategy<Value = (String, Vec<u8>)> {
    let body = (any::<Index>(), prop::collection::vec(damage(), 0..4), 0..20u8);
    body.prop_map(|(at, damages, astray)| {
        let sound = valid_requests();
        let (mut path, mut body) = sound[at.index(sound.len())].clone();
        if astray == 0 {
            path = sound[damages.len() % sound.len()].0;
        }
        damages.iter().for_each(|damage| damage_json(&mut body, damage));
        let mut bytes = body.to_string().into_bytes();
        damages.iter().for_each(|damage| damage_bytes(&mut bytes, damage));
        (path.to_owned(), bytes)
    })
}

/// Response of an endpoint, with its complete body.
struct ReceivedResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

async fn send(served: &TestGateway, request: Request<Body>) -> ReceivedResponse {
    let response = served.router().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap().to_vec();
    ReceivedResponse { status: parts.status, headers: parts.headers, body }
}

/// Checks that a response has the format of the API: a document, a complete stream, or an error
/// with a message.
fn check_shape(path: &str, response: &ReceivedResponse) -> Result<(), TestCaseError> {
    let text = String::from_utf8_lossy(&response.body);
    let describe = || format!("{path}: {} {text}", response.status);
    prop_assert!(response.status != StatusCode::INTERNAL_SERVER_ERROR, "{}", describe());
    let kind = response.headers.get("content-type").map_or("", |kind| kind.to_str().unwrap());
    if kind.starts_with("text/event-stream") {
        prop_assert!(response.status == StatusCode::OK && text.ends_with("\n\n"), "{}", describe());
        let mut last = Value::Null;
        for frame in text.split("\n\n").filter(|frame| !frame.is_empty() && !frame.starts_with(':'))
        {
            let data = frame.lines().find_map(|line| line.strip_prefix("data: "));
            prop_assert!(data.is_some(), "{}", describe());
            let data = data.unwrap_or_default();
            last = if data == "[DONE]" {
                data.into()
            } else {
                serde_json::from_str(data)
                    .map_err(|error| TestCaseError::fail(format!("{error}: {}", describe())))?
            };
        }
        let ends = [
            "[DONE]",
            "message_stop",
            "error",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ];
        let end = last.as_str().or_else(|| last["type"].as_str()).unwrap_or_default();
        prop_assert!(ends.contains(&end) || last["error"].is_object(), "{}", describe());
        return Ok(());
    }
    prop_assert_eq!(kind, "application/json", "{}", describe());
    let body: Value = serde_json::from_slice(&response.body)
        .map_err(|error| TestCaseError::fail(format!("{error}: {}", describe())))?;
    if response.status.is_success() {
        return Ok(());
    }
    prop_assert!(
        !body["error"]["message"].as_str().unwrap_or_default().is_empty(),
        "{}",
        describe()
    );
    prop_assert!(body["error"]["type"].is_string(), "{}", describe());
    prop_assert_eq!(&body["type"] == "error", path.contains("/messages"), "{}", describe());
    Ok(())
}

/// Closes an attempt. Checks that its record has at most `max_calls` calls, and contains every
/// sampled token once.
async fn check_record(session: &Arc<Session>, max_calls: usize) -> Result<(), TestCaseError> {
    let recorded = session.close(Duration::from_secs(30)).await.0;
    prop_assert!(
        recorded.calls.len() <= max_calls,
        "{} calls of {max_calls} requests",
        recorded.calls.len()
    );
    let total: usize = recorded.calls.iter().map(|call| call.tokens).sum();
    prop_assert_eq!(recorded.trajectory.sampled_tokens(), total);
    Ok(())
}

fn post(path: &str, key: &str, body: Vec<u8>) -> Request<Body> {
    let request =
        Request::builder().method("POST").uri(path).header("content-type", "application/json");
    request.header("authorization", format!("Bearer {key}")).body(Body::from(body)).unwrap()
}

/// Returns texts that a model may sample, well formed and malformed.
fn texts() -> Vec<&'static str> {
    let odd = [
        "STOP",
        "<think>\n<tool_call>\n{\"name\": \"add\"}",
        "{\"a\": 1}",
        "a\u{0}é😀",
        "</tool_call>",
    ];
    UNUSUAL_COMPLETIONS.into_iter().chain([UNREADABLE, "One."]).chain(odd).collect()
}

proptest! {
    #[test]
    fn any_request_body_gets_response_in_api_format(
        requests in prop::collection::vec(request(), 1..4),
        first in 0..12usize,
        simulated in any::<bool>(),
        stranger in any::<bool>(),
    ) {
        run(async {
            let mut texts = texts();
            texts.rotate_left(first);
            let served = if simulated { TestGateway::simulated(12) } else { TestGateway::scripted(&texts) };
            let mut answers = 0;
            for (path, body) in requests {
                let key = if stranger { OUTSIDE_KEY } else { served.session.key() };
                let key = if path == "/reward" { served.session.reward_key() } else { key };
                let answered = send(&served, post(&path, key, body)).await;
                check_shape(&path, &answered)?;
                answers += if answered.status.is_success() { 4096 } else { 0 };
            }
            check_record(&served.session, if stranger { 0 } else { answers }).await
        })?;
    }

    #[test]
    fn request_reaches_only_attempt_of_its_key(
        segments in prop::collection::vec(prop::sample::select(vec![
            "v1", "rollout", "attempt", "agent", "r", "a", "b", "default", "chat", "completions", "messages", "responses", "models",
            "generate", "reward", "tokenize", "metrics", "health", "", ".", "..", "%2e%2e", "%2F", "%00", "%ff", "%C3%A9", "%", "{attempt}",
            "*", "a%20b", "count_tokens", "resp_1", ";", "v1%2Fchat",
        ]), 0..9),
        end in prop::sample::select(vec!["", "/", "?beta=true", "?a=%ff&b", "#x", "/v1/chat/completions", "/chat/completions", "/v1/messages"]),
        prefix in prop::sample::select(vec!["", "/rollout/r/attempt/a", "/rollout/r/attempt/b", "/rollout/x/attempt/a", "/rollout/r/attempt/a/agent/default", "/rollout//attempt/a"]),
        method in prop::sample::select(vec!["GET", "POST", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"]),
        key in 0..8usize,
        scheme in prop::sample::select(vec!["authorization", "x-api-key", "api-key"]),
        agent in prop::option::of(prop::sample::select(vec!["default", "", "nobody", "\u{e9}", "a b"])),
        retries in prop::option::of(prop::sample::select(vec!["0", "1", "x", ""])),
    ) {
        let uri = format!("{prefix}/{}{end}", segments.join("/"));
        run(async {
            let served = TestGateway::scripted(&["One."]);
            let own = served.session.key().to_owned();
            let truncated = own.split_at(own.len() - 1).0.to_owned();
            let keys = [own.clone(), own.clone(), own.clone(), truncated, served.session.reward_key().to_owned(), OUTSIDE_KEY.into(), String::new(), own.to_uppercase()];
            let bearer = if scheme == "authorization" { "Bearer " } else { "" };
            let mut request = Request::builder().method(method).uri(&uri).header(scheme, format!("{bearer}{}", keys[key]));
            if let Some(agent) = agent {
                request = request.header("x-levade-agent", agent.as_bytes());
            }
            if let Some(retries) = retries {
                request = request.header("x-stainless-retry-count", retries);
            }
            let body = json!({"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]});
            let request = request.body(Body::from(body.to_string()));
            // An invalid URI cannot be sent as a request.
            let Ok(request) = request else { return Ok(()) };
            let answered = send(&served, request).await;
            let text = String::from_utf8_lossy(&answered.body).into_owned();
            prop_assert!(!answered.status.is_server_error(), "{method} {uri}: {} \
                                                              {text}", answered.status);
            let calls = served.session.recorder().ended_calls();
            // Paths of another attempt are always rejected, whatever the key is.
            let is_other = ["/rollout/r/attempt/b", "/rollout/x/attempt/a", "/rollout//attempt/a"].contains(&prefix);
            prop_assert!(calls == 0 || (key < 3 && !is_other), "{method} {uri} with key {key}: \
                                                                {text}");
            prop_assert!(calls <= 1);
            if answered.status.is_client_error() && method != "HEAD" {
                let body: Value = serde_json::from_str(&text).unwrap_or_default();
                prop_assert!(body["error"]["message"].is_string(), "{method} {uri}: {} \
                                                                    {text}", answered.status);
            }
            check_record(&served.session, calls).await
        })?;
    }
}
