//! Tests of the Responses API over the HTTP routes.

use axum::http::StatusCode;
use levade_conversation::Origin;
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway, UNREADABLE, UNUSUAL_COMPLETIONS};

const THINKS_AND_CALLS: &str = "<think>\nHm — ✓\n</think>\n\nLet me call.\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": 1.50}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 3, \"b\": 4.0}}\n</tool_call>";
const ANSWER_TEXT: &str = "The answer is **12.50**.";
const CONTINUED: [Origin; 3] = [Origin::Started, Origin::Continued, Origin::Continued];

fn request(input: &Value) -> Value {
    json!({
        "model": "tiny", "input": input, "instructions": "Be brief.", "metadata": {"k": "v"},
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "tools": [{
            "type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"},
            "strict": false,
        }],
    })
}

fn with_field(mut request: Value, field: &str, value: impl Into<Value>) -> Value {
    request[field] = value.into();
    request
}

/// Returns the response that a stream describes. Checks the order of the events, and that the
/// deltas add up to the completed texts.
fn response(events: &[Value]) -> Value {
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at, "{event}");
    }
    let kinds: Vec<&str> =
        events.iter().take(2).map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["response.created", "response.in_progress"]);
    let last = &events[events.len() - 1];
    let mut items = Vec::new();
    let mut texts = std::collections::BTreeMap::new();
    let mut open = None::<Value>;
    for event in &events[2..events.len() - 1] {
        let kind = event["type"].as_str().unwrap();
        assert_eq!(event["output_index"], items.len(), "{event}");
        match kind.strip_prefix("response.").unwrap() {
            "output_item.added" => {
                assert!(open.is_none());
                assert_eq!(event["item"]["status"], "in_progress");
                open = Some(event["item"].clone());
            }
            "output_item.done" => {
                let started = open.take().unwrap();
                let item = event["item"].clone();
                assert_eq!((&started["id"], &started["type"]), (&item["id"], &item["type"]));
                items.push(item);
            }
            other => {
                assert_eq!(event["item_id"], open.as_ref().unwrap()["id"]);
                let (what, step) = other.rsplit_once('.').unwrap();
                match step {
                    "delta" => {
                        *texts.entry(what.to_owned()).or_insert_with(String::new) +=
                            event["delta"].as_str().unwrap()
                    }
                    "done" if !what.ends_with("part") => {
                        let parts_seen = ["text", "arguments", "input"]
                            .into_iter()
                            .find_map(|field| event[field].as_str());
                        assert_eq!(
                            texts.remove(what).unwrap_or_default(),
                            parts_seen.unwrap(),
                            "{event}"
                        );
                    }
                    "added" | "done" => assert!(event["part"]["text"].is_string()),
                    other => panic!("{other}"),
                }
            }
        }
    }
    assert!(open.is_none() && texts.is_empty());
    assert_eq!(last["response"]["output"], json!(items));
    assert_eq!(last["type"], format!("response.{}", last["response"]["status"].as_str().unwrap()));
    last["response"].clone()
}

async fn request_message(served: &TestGateway, request: Value, streams: bool) -> Value {
    if streams {
        return response(
            &served.post("/v1/responses", &with_field(request, "stream", true)).await.events(),
        );
    }
    let response_body = served.post("/v1/responses", &request).await;
    assert_eq!(response_body.status, StatusCode::OK, "{}", response_body.text);
    response_body.json()
}

fn kinds(response: &Value) -> Vec<&str> {
    response["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect()
}

fn results(response: &Value) -> Vec<Value> {
    let calls =
        response["output"].as_array().unwrap().iter().filter(|item| !item["call_id"].is_null());
    calls
        .map(|call| json!({"type": "function_call_output", "call_id": call["call_id"], "output": "3.5"}))
        .collect()
}

/// How a client sends the history back.
#[derive(Clone, Copy)]
enum Client {
    /// Sends the id of the response that the request continues.
    Previous,
    /// Repeats every item.
    Items,
    /// Repeats tool calls, without their ids and with reformatted arguments, and refers to all
    /// other items.
    References,
    /// Repeats items without ids and without the text of reasoning, like a client that stores no
    /// responses here.
    Stateless,
}

impl Client {
    fn item(self, item: &Value) -> Value {
        let mut item = item.clone();
        let is_call = item["type"] == "function_call";
        match self {
            Client::References if !is_call => {
                return json!({"type": "item_reference", "id": item["id"]});
            }
            Client::Stateless | Client::References => {
                if is_call {
                    let arguments: Value =
                        serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
                    item["arguments"] = serde_json::to_string_pretty(&arguments).unwrap().into();
                }
                let fields = item.as_object_mut().unwrap();
                fields.retain(|name, _| !["id", "status"].contains(&name.as_str()));
                if fields["type"] == "reasoning" {
                    fields.remove("content");
                }
            }
            Client::Items | Client::Previous => {}
        }
        item
    }

    /// Extends an input with a response and the results of its calls.
    fn give_back(self, input: &mut Vec<Value>, response: &Value) {
        match self {
            Client::Previous => input.clear(),
            _ => input
                .extend(response["output"].as_array().unwrap().iter().map(|item| self.item(item))),
        }
        input.extend(results(response));
    }

    async fn talk(self, streams: bool) -> Vec<Value> {
        let served = TestGateway::scripted(&[THINKS_AND_CALLS, ANSWER_TEXT]);
        let mut input = vec![json!({"role": "user", "content": "add 2 and 1.5"})];
        let mut responses: Vec<Value> = Vec::new();
        let second_run =
            json!({"role": "user", "content": [{"type": "input_text", "text": "again please"}]});
        for new in [vec![], vec![second_run]] {
            input.extend(new);
            loop {
                let mut request = request(&json!(input));
                if let (Client::Previous, Some(before)) = (self, responses.last()) {
                    request["previous_response_id"] = before["id"].clone();
                }
                let response = request_message(&served, request, streams).await;
                self.give_back(&mut input, &response);
                let is_done = results(&response).is_empty();
                responses.push(response);
                if is_done || responses.len() == 3 {
                    break;
                }
            }
        }
        assert_eq!(served.origins(), CONTINUED);
        let paths = served.paths().await;
        assert_eq!(paths.len(), 1, "{paths:?}");
        assert_eq!(paths[0].matches(THINKS_AND_CALLS).count(), 2, "{}", paths[0]);
        assert!(
            paths[0].contains("<|im_start|>tool\n3.5<|im_end|>\n<|im_start|>tool\n3.5<|im_end|>"),
            "{}",
            paths[0]
        );
        responses
    }
}

#[tokio::test]
async fn history_continues_for_every_kind_of_client() {
    let mut all = Vec::new();
    for client in [Client::Previous, Client::Items, Client::References, Client::Stateless] {
        for streams in [false, true] {
            all.push(client.talk(streams).await);
        }
    }
    for talk in &all {
        let first = &talk[0];
        assert_eq!(kinds(first), ["reasoning", "message", "function_call", "function_call"]);
        assert_eq!(kinds(&talk[1]), ["message"]);
        let output = &first["output"];
        assert_eq!(output[0]["summary"], json!([{"type": "summary_text", "text": "Hm — ✓"}]));
        assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Hm — ✓"}]));
        assert_eq!(output[1]["content"][0]["text"], "Let me call.");
        assert_eq!(
            (&output[2]["name"], &output[2]["arguments"]),
            (&json!("add"), &json!(r#"{"b":2,"a":1.50}"#))
        );
        assert_ne!(output[2]["call_id"], output[3]["call_id"]);
        let parts_seen = ["object", "status", "model"].map(|field| first[field].as_str().unwrap());
        assert_eq!(parts_seen, ["response", "completed", "tiny"]);
        assert_eq!(
            (&first["metadata"], &first["instructions"]),
            (&json!({"k": "v"}), &json!("Be brief."))
        );
        let usage = &first["usage"];
        let [input, output, total] =
            ["input", "output", "total"].map(|n| usage[format!("{n}_tokens")].as_u64().unwrap());
        assert_eq!((output, total), (THINKS_AND_CALLS.len() as u64 + 1, input + output));
        assert!(usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
        assert_eq!(without_ids(talk), without_ids(&all[0]));
    }
}

/// Returns the responses without their ids and times.
fn without_ids(talk: &[Value]) -> Vec<Value> {
    talk.iter()
        .map(|response| {
            let mut response = response.clone();
            for field in ["id", "created_at", "previous_response_id"] {
                response[field].take();
            }
            for item in response["output"].as_array_mut().unwrap() {
                item["id"].take();
            }
            response
        })
        .collect()
}

#[tokio::test]
async fn random_completions_are_equal_with_and_without_streaming() {
    for content in ["a", "b", "c", "d"] {
        let input = json!([{"role": "user", "content": content}]);
        let one = TestGateway::simulated(60);
        let other = TestGateway::simulated(60);
        let full_response = request_message(&one, request(&input), false).await;
        let streamed = request_message(&other, request(&input), true).await;
        assert_eq!(
            (kinds(&full_response), text_of(&full_response)),
            (kinds(&streamed), text_of(&streamed))
        );
        assert_eq!(
            (&full_response["usage"], &full_response["status"]),
            (&streamed["usage"], &streamed["status"])
        );
        let next =
            json!([input[0], full_response["output"][0], {"role": "user", "content": "So?"}]);
        request_message(&one, request(&next), false).await;
        assert_eq!(one.origins(), [Origin::Started, Origin::Continued]);
    }
}

fn text_of(response: &Value) -> Value {
    response["output"][0]["content"][0]["text"].clone()
}

#[tokio::test]
async fn unusual_completions_round_trip_for_every_client() {
    /// Returns the joined contents of the items: reasoning, text and arguments.
    fn joined_contents(response: &Value) -> [String; 3] {
        let items = response["output"].as_array().unwrap();
        ["reasoning", "message", "function_call"].map(|kind| {
            let found = items.iter().filter(|item| item["type"] == kind);
            let text = |item: &Value| {
                item["content"][0]["text"]
                    .as_str()
                    .or(item["arguments"].as_str())
                    .map(str::to_owned)
            };
            found.map(|item| text(item).unwrap()).collect()
        })
    }
    for assistant_message in UNUSUAL_COMPLETIONS.into_iter().chain([UNREADABLE]) {
        let mut parts_seen = Vec::new();
        for client in [Client::Previous, Client::Items, Client::References, Client::Stateless] {
            for streams in [false, true] {
                let served = TestGateway::scripted(&[assistant_message]);
                let mut input = vec![json!({"role": "user", "content": "Hi"})];
                let first = request_message(&served, request(&json!(input)), streams).await;
                parts_seen.push(joined_contents(&first));
                client.give_back(&mut input, &first);
                input.push(json!({"role": "user", "content": "So?"}));
                let mut next = request(&json!(input));
                if matches!(client, Client::Previous) {
                    next["previous_response_id"] = first["id"].clone();
                }
                request_message(&served, next, streams).await;
                assert_eq!(
                    served.origins(),
                    [Origin::Started, Origin::Continued],
                    "{assistant_message:?} {streams}"
                );
            }
        }
        assert!(parts_seen.iter().all(|other| *other == parts_seen[0]), "{parts_seen:?}");
    }
}

#[tokio::test]
async fn truncated_completion_is_incomplete() {
    let served = TestGateway::scripted(&["One two three."]);
    for streams in [false, true] {
        let requested = with_field(request(&json!("Count.")), "max_output_tokens", 5);
        let response = request_message(&served, requested, streams).await;
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        let item = &response["output"][0];
        assert_eq!(
            (&item["status"], &item["content"][0]["text"]),
            (&json!("incomplete"), &json!("One t"))
        );
    }
}

#[tokio::test]
async fn empty_completion_is_continuable_message() {
    for streams in [false, true] {
        let served = TestGateway::scripted(&[""]);
        let first = request_message(&served, request(&json!("Hi")), streams).await;
        assert_eq!(
            (kinds(&first), &first["output"][0]["content"][0]["text"]),
            (vec!["message"], &json!(""))
        );
        let next = json!([user_message("Hi"), first["output"][0], user_message("So?")]);
        request_message(&served, request(&next), streams).await;
        assert_eq!(served.origins(), [Origin::Started, Origin::Continued]);
    }
}

fn user_message(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

#[tokio::test]
async fn tool_calls_have_item_type_of_their_tool() {
    let assistant_message = [
        call_text("apply_patch", "{\"input\": \"*** Begin\\n+é\"}"),
        call_text("apply_patch", "{\"text\": 1}"),
        call_text("agents__spawn", "{\"task\": \"x\"}"),
    ]
    .join("\n");
    let tools = json!([
        {
            "type": "custom", "name": "apply_patch", "description": "Patches.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
        },
        {
            "type": "namespace", "name": "agents", "description": "Agents.",
            "tools": [function_tool("spawn"), function_tool("apply_patch")],
        },
        {"type": "web_search", "external_web_access": false},
    ]);
    for streams in [false, true] {
        let served = TestGateway::scripted(&[&assistant_message, "Done."]);
        let mut input = vec![json!({"role": "user", "content": "go"})];
        let response = request_message(
            &served,
            with_field(request(&json!(input)), "tools", tools.clone()),
            streams,
        )
        .await;
        let output = response["output"].as_array().unwrap();
        assert_eq!(kinds(&response), ["custom_tool_call", "function_call", "function_call"]);
        let field = |at: usize, name: &str| output[at][name].as_str().unwrap_or_default();
        assert_eq!((field(0, "name"), field(0, "input")), ("apply_patch", "*** Begin\n+é"));
        assert_eq!((field(1, "name"), field(1, "arguments")), ("apply_patch", r#"{"text":1}"#));
        assert_eq!((field(2, "namespace"), field(2, "name")), ("agents", "spawn"));
        input.extend(output.iter().cloned());
        for (call, kind) in output.iter().zip([
            "custom_tool_call_output",
            "function_call_output",
            "function_call_output",
        ]) {
            input.push(json!({"type": kind, "call_id": call["call_id"], "output": "ok"}));
        }
        request_message(
            &served,
            with_field(request(&json!(input)), "tools", tools.clone()),
            streams,
        )
        .await;
        assert_eq!(served.origins(), [Origin::Started, Origin::Continued]);
        assert_eq!(served.gateway.unknown_fields()["responses.tools[type=web_search]"], 2);
        let path = &served.paths().await[0];
        assert!(path.contains("agents__apply_patch") && path.contains("start: LINE"), "{path}");
    }
}

fn call_text(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

fn function_tool(name: &str) -> Value {
    json!({"type": "function", "name": name, "parameters": {"type": "object"}})
}

#[tokio::test]
async fn responses_are_stored_only_for_owner_with_permission() {
    let served = TestGateway::scripted(&["Yes."]);
    let text = request(&json!("Hi")).to_string();
    let first = served.send("POST", "/v1/responses", OUTSIDE_KEY, &text).await.json();
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(served.send("GET", &path, OUTSIDE_KEY, "").await.json(), first);
    let follow =
        with_field(request(&json!("So?")), "previous_response_id", first["id"].clone()).to_string();
    for other in ["sk-other", served.session.key()] {
        let hidden = served.send("GET", &path, other, "").await;
        assert_eq!(hidden.status, StatusCode::NOT_FOUND);
        assert!(hidden.json()["error"]["message"].as_str().unwrap().ends_with("not found."));
        assert_eq!(served.send("DELETE", &path, other, "").await.status, StatusCode::NOT_FOUND);
        let lost = served.send("POST", "/v1/responses", other, &follow).await;
        let error = &lost.json()["error"];
        assert_eq!(
            (lost.status.as_u16(), &error["code"]),
            (400, &json!("previous_response_not_found"))
        );
        assert_eq!(error["param"], "previous_response_id");
    }
    let next = served.send("POST", "/v1/responses", OUTSIDE_KEY, &follow).await.json();
    assert_eq!(next["previous_response_id"], first["id"]);
    assert!(next["usage"]["input_tokens"].as_u64() > first["usage"]["input_tokens"].as_u64());
    let deleted = served.send("DELETE", &path, OUTSIDE_KEY, "").await.json();
    assert_eq!(deleted, json!({"id": first["id"], "object": "response", "deleted": true}));
    assert_eq!(served.send("GET", &path, OUTSIDE_KEY, "").await.status, StatusCode::NOT_FOUND);
    // The response after the deleted response has lost its history, and the error reports this.
    let late =
        with_field(request(&json!("So?")), "previous_response_id", next["id"].clone()).to_string();
    let late = served.send("POST", "/v1/responses", OUTSIDE_KEY, &late).await;
    assert!(
        late.json()["error"]["message"].as_str().unwrap().contains("which is no longer stored")
    );

    let unkept = with_field(request(&json!("Hi")), "store", false).to_string();
    let unkept = served.send("POST", "/v1/responses", OUTSIDE_KEY, &unkept).await.json();
    let path = format!("/v1/responses/{}", unkept["id"].as_str().unwrap());
    assert_eq!(served.send("GET", &path, OUTSIDE_KEY, "").await.status, StatusCode::NOT_FOUND);
    let reference = json!([{"type": "item_reference", "id": unkept["output"][0]["id"]}]);
    let lost =
        served.send("POST", "/v1/responses", OUTSIDE_KEY, &request(&reference).to_string()).await;
    assert_eq!(
        (lost.status, &lost.json()["error"]["param"]),
        (StatusCode::NOT_FOUND, &json!("input"))
    );
}

#[tokio::test]
async fn continued_response_drops_earlier_instructions() {
    let served = TestGateway::scripted(&["Yes."]);
    let first = request_message(&served, request(&json!("Hi")), false).await;
    let mut next = with_field(request(&json!("So?")), "previous_response_id", first["id"].clone());
    next["instructions"] = "Be long.".into();
    request_message(&served, next, false).await;
    let paths = served.paths().await;
    let path = paths.iter().find(|path| path.contains("Be long.")).unwrap();
    assert!(!path.contains("Be brief.") && path.contains("user\nHi<|im_end|>"), "{path}");
}

#[tokio::test]
async fn reasoning_items_follow_request_options() {
    let served = TestGateway::scripted(&["<think>\nHm\n</think>\n\nSo."]);
    let mut plain = request(&json!("Hi"));
    plain["include"] = json!([]);
    plain["reasoning"] = json!({"effort": "low"});
    for streams in [false, true] {
        let item = &request_message(&served, plain.clone(), streams).await["output"][0];
        assert_eq!((&item["summary"], &item["content"][0]["text"]), (&json!([]), &json!("Hm")));
        assert!(item.get("encrypted_content").is_none());
        let item = &request_message(&served, request(&json!("Hi")), streams).await["output"][0];
        assert_eq!(item["summary"][0]["text"], "Hm");
        assert!(item["encrypted_content"].as_str().unwrap().ends_with("Hm"));
    }
}

#[tokio::test]
async fn unsupported_fields_are_named_in_error() {
    let served = TestGateway::scripted(&["Yes."]);
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
    let schema = json!({"format": {"type": "json_schema", "name": "x"}});
    let long = "x".repeat(5000);
    for (field, value, param) in [
        ("input", image, "input[0].content[0]"),
        ("input", json!(null), "input"),
        ("input", json!(7), "input"),
        ("input", json!(long), ""),
        ("background", json!(true), "background"),
        ("conversation", json!("conv_1"), "conversation"),
        ("prompt", json!({"id": "pmpt_1"}), "prompt"),
        ("top_logprobs", json!(21), "top_logprobs"),
        ("n", json!(2), "n"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
        ("temperature", json!("hot"), "temperature"),
        ("allowed_token_ids", json!([1]), "allowed_token_ids"),
        ("text", json!({"format": {"type": "xml"}}), "text.format"),
        ("text", schema, "text.format"),
        ("tools", json!([{"type": "function", "parameters": {}}]), "tools[0]"),
        ("tools", json!([{"name": "f"}]), "tools[0]"),
        (
            "tools",
            json!([{"type": "custom", "name": "f"}, {"type": "function", "name": "f"}]),
            "tools[1]",
        ),
        ("tool_choice", json!({"type": "web_search"}), "tool_choice"),
        ("tool_choice", json!({"type": "function", "name": "g"}), "tool_choice"),
        (
            "tool_choice",
            json!({"type": "allowed_tools", "mode": "auto", "tools": []}),
            "tool_choice",
        ),
        ("previous_response_id", json!("resp_x"), "previous_response_id"),
    ] {
        let mut requested = with_field(request(&json!("Hi")), field, value.clone());
        if field == "input" && value.is_null() {
            requested.as_object_mut().unwrap().remove("instructions");
        }
        let response = served.post("/v1/responses", &requested).await;
        let error = &response.json()["error"];
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{field} {value}: {error}");
        assert_eq!(error["param"].as_str().unwrap_or_default(), param, "{error}");
    }
    assert!(served.gateway.unknown_fields().is_empty());
    let odd = with_field(with_field(request(&json!("Hi")), "newest", 1), "max_tokens", 1);
    assert_eq!(served.post("/responses", &odd).await.json()["status"], "completed");
    let unknown: Vec<String> = served.gateway.unknown_fields().into_keys().collect();
    assert_eq!(unknown, ["responses.max_tokens", "responses.newest"]);
}

#[tokio::test]
async fn failure_ends_stream_with_failed_response() {
    let served = TestGateway::failing();
    let events = served
        .post("/v1/responses", &with_field(request(&json!("Hi")), "stream", true))
        .await
        .events();
    let last = &events[events.len() - 1];
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
    assert!(
        last["response"]["error"]["message"].is_string() && last["response"]["usage"].is_null()
    );
    assert_eq!(last["sequence_number"], events.len() - 1);
    let path = format!("/v1/responses/{}", last["response"]["id"].as_str().unwrap());
    assert_eq!(
        served.send("GET", &path, served.session.key(), "").await.status,
        StatusCode::NOT_FOUND
    );
}
