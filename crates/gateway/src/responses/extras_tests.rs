//! Tests of log-probabilities, input items and token counts of the Responses API, and of tools and
//! parts that several APIs share.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway};

const THINKS: &str = "<think>Hm.</think>Yes é.";

fn request_body(more: Value) -> Value {
    let mut body = json!({ "model": "tiny", "input": "Hi" });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tokens(logprobs: &Value) -> Vec<u8> {
    let bytes = logprobs.as_array().unwrap().iter().map(|one| one["bytes"].as_array().unwrap());
    bytes.flatten().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

#[tokio::test]
async fn logprobs_cover_only_message_tokens() {
    let include = json!({ "include": ["message.output_text.logprobs"] });
    let served = TestGateway::scripted(&[THINKS]);
    let full = served.post("/v1/responses", &request_body(include.clone())).await.json();
    let part = &full["output"][1]["content"][0];
    assert_eq!(part["text"], "Yes é.");
    // The list contains neither the reasoning nor the end-of-turn token.
    assert_eq!(tokens(&part["logprobs"]), "Yes é.".as_bytes());
    assert_eq!(part["logprobs"][0]["logprob"], -0.5);
    assert_eq!(part["logprobs"][0]["top_logprobs"], json!([]));

    let mut streamed = request_body(include);
    streamed["stream"] = true.into();
    let events = TestGateway::scripted(&[THINKS]).post("/v1/responses", &streamed).await.events();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let deltas: Vec<u8> = of("response.output_text.delta")
        .iter()
        .flat_map(|event| tokens(&event["logprobs"]))
        .collect();
    assert_eq!(deltas, "Yes é.".as_bytes());
    assert_eq!(tokens(&of("response.output_text.done")[0]["logprobs"]), "Yes é.".as_bytes());
    let last = &events[events.len() - 1]["response"]["output"][1]["content"][0];
    assert_eq!(last["logprobs"], part["logprobs"]);

    let without = TestGateway::scripted(&[THINKS])
        .post("/v1/responses", &request_body(json!({})))
        .await
        .json();
    assert_eq!(without["output"][1]["content"][0]["logprobs"], json!([]));
}

#[tokio::test]
async fn message_logprobs_omit_calls() {
    let text = "So.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>";
    let tools = json!([{ "type": "function", "name": "add", "parameters": { "type": "object" } }]);
    let body = request_body(
        json!({ "top_logprobs": 0, "include": ["message.output_text.logprobs"], "tools": tools }),
    );
    let response = TestGateway::scripted(&[text]).post("/v1/responses", &body).await.json();
    assert_eq!(response["output"][1]["type"], "function_call", "{response}");
    let sent = tokens(&response["output"][0]["content"][0]["logprobs"]);
    assert!(sent.starts_with(b"So.") && sent.len() <= "So.\n".len(), "{sent:?}");
}

#[tokio::test]
async fn input_items_are_listed_only_for_owner() {
    let served = TestGateway::scripted(&["Yes."]);
    let items = json!([
        { "role": "user", "content": "one" },
        { "role": "assistant", "content": "two" },
        { "type": "message", "id": "mine", "role": "user", "content": [{ "type": "input_text", "text": "three" }] },
    ]);
    let requested = request_body(json!({ "input": items }));
    let id =
        served.post("/v1/responses", &requested).await.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/responses/{id}/input_items");
    let list = async |query: &str| {
        let response =
            served.send("GET", &format!("{path}{query}"), served.session.key(), "").await;
        (response.status, response.json())
    };
    let (status, all) = list("").await;
    assert_eq!(
        (status, texts_of(&all)),
        (StatusCode::OK, vec!["three".into(), "two".into(), "one".into()])
    );
    assert_eq!(
        (&all["object"], &all["has_more"], &all["first_id"]),
        (&json!("list"), &json!(false), &json!("mine"))
    );
    assert_eq!(all["data"][1]["content"][0]["type"], "output_text");
    let (_, first) = list("?order=asc&limit=1").await;
    assert_eq!((texts_of(&first), &first["has_more"]), (vec!["one".to_owned()], &json!(true)));
    let (_, rest) = list(&format!("?order=asc&after={}", first["last_id"].as_str().unwrap())).await;
    assert_eq!(texts_of(&rest), ["two", "three"]);
    // A page with exactly as many items as remain has no next page.
    let (_, exact) = list("?limit=3").await;
    assert_eq!((texts_of(&exact).len(), &exact["has_more"]), (3, &json!(false)));
    let (_, last) = list("?limit=1&after=mine").await;
    assert_eq!((texts_of(&last), &last["has_more"]), (vec!["two".to_owned()], &json!(true)));
    for wrong in ["?limit=0", "?limit=101", "?order=up", "?after=nowhere"] {
        assert_eq!(list(wrong).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }
    let stranger = served.send("GET", &path, OUTSIDE_KEY, "").await;
    assert_eq!(stranger.status, StatusCode::NOT_FOUND);
}

fn texts_of(list: &Value) -> Vec<String> {
    let items = list["data"].as_array().unwrap();
    items
        .iter()
        .map(|item| item["content"][0]["text"].as_str().unwrap().to_owned())
        .collect::<Vec<_>>()
}

#[tokio::test]
async fn input_tokens_counts_prompt() {
    let served = TestGateway::scripted(&["Yes."]);
    let requested = request_body(json!({ "instructions": "Be brief." }));
    let counted = served.post("/v1/responses/input_tokens", &requested).await.json();
    assert_eq!(counted["object"], "response.input_tokens");
    let response = served.post("/v1/responses", &requested).await.json();
    assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"]);
    assert_eq!(served.session.recorder().ended_calls(), 1);
}

#[tokio::test]
async fn allowed_tools_limit_tools_in_prompt() {
    let tools = json!([function_tool("add"), function_tool("sub"), { "type": "web_search" }]);
    let allowed = json!({ "mode": "auto", "tools": [chat_function_tool("sub")] });
    let chat = json!({
        "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }],
        "tools": [chat_function_tool("add"), chat_function_tool("sub")],
        "tool_choice": { "type": "allowed_tools", "allowed_tools": allowed },
    });
    let listed = json!([function_tool("sub"), { "type": "web_search" }]);
    let responses = request_body(
        json!({ "tools": tools, "tool_choice": { "type": "allowed_tools", "mode": "auto", "tools": listed } }),
    );
    for (path, body) in [("/v1/chat/completions", &chat), ("/v1/responses", &responses)] {
        let served = TestGateway::scripted(&["Yes."]);
        let response = served.post(path, body).await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.text);
        let [prompt] = &served.paths().await[..] else { panic!() };
        assert!(prompt.contains("\"sub\"") && !prompt.contains("\"add\""), "{prompt}");
    }
    for wrong in [
        json!({ "mode": "auto", "tools": [] }),
        json!({ "mode": "auto", "tools": [chat_function_tool("mul")] }),
        json!({ "mode": "always", "tools": [chat_function_tool("sub")] }),
        json!({ "tools": [chat_function_tool("sub")] }),
        Value::Null,
    ] {
        let mut body = chat.clone();
        body["tool_choice"]["allowed_tools"] = wrong;
        let response = TestGateway::scripted(&["Yes."]).post("/v1/chat/completions", &body).await;
        assert_eq!(response.json()["error"]["param"], "tool_choice", "{}", response.text);
    }
}

fn function_tool(name: &str) -> Value {
    json!({ "type": "function", "name": name })
}

fn chat_function_tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name } })
}

#[tokio::test]
async fn hosted_items_and_unsupported_results_are_accepted() {
    let served = TestGateway::scripted(&["Yes."]);
    let image = json!({ "type": "input_image", "image_url": "data:," });
    let items = json!([
        { "role": "user", "content": "Hi" },
        { "type": "web_search_call", "id": "ws_1", "status": "completed" },
        { "type": "mcp_list_tools", "id": "m", "tools": [] },
        { "type": "function_call", "call_id": "a", "name": "shot", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "a", "output": [{ "type": "input_text", "text": "shot" }, image] },
    ]);
    let response = served.post("/v1/responses", &request_body(json!({ "input": items }))).await;
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    assert_eq!(served.gateway.unknown_fields().values().sum::<u64>(), 3);
    let [prompt] = &served.paths().await[..] else { panic!() };
    assert!(
        prompt.contains("shot\n[a part of type \"input_image\", which cannot be shown]"),
        "{prompt}"
    );
    let body = json!({ "model": "tiny", "messages": [
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "tool_calls": [
            { "id": "a", "type": "function", "function": { "name": "shot", "arguments": "{}" } }] },
        { "role": "tool", "tool_call_id": "a", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] },
    ]});
    let served = TestGateway::scripted(&["Yes."]);
    assert_eq!(served.post("/v1/chat/completions", &body).await.status, StatusCode::OK);
    let [prompt] = &served.paths().await[..] else { panic!() };
    assert!(prompt.contains("[a part of type \"image_url\", which cannot be shown]"), "{prompt}");
}

#[tokio::test]
async fn shell_and_patch_calls_have_native_item_types() {
    let tools = json!([{ "type": "local_shell" }, { "type": "shell" }, { "type": "apply_patch" }]);
    for (name, arguments, field, action) in [
        (
            "local_shell",
            json!({ "command": ["ls"] }),
            "action",
            json!({ "type": "exec", "env": {}, "command": ["ls"] }),
        ),
        (
            "shell",
            json!({ "commands": ["ls"] }),
            "action",
            json!({ "commands": ["ls"], "timeout_ms": null, "max_output_length": null }),
        ),
        (
            "apply_patch",
            json!({ "type": "delete_file", "path": "a" }),
            "operation",
            json!({ "type": "delete_file", "path": "a" }),
        ),
    ] {
        let call = json!({ "name": name, "arguments": arguments });
        let text = format!("<tool_call>\n{call}\n</tool_call>");
        let served = TestGateway::scripted(&[&text, "Yes."]);
        let response =
            served.post("/v1/responses", &request_body(json!({ "tools": tools }))).await.json();
        let item = response["output"][0].clone();
        assert_eq!(
            (&item["type"], &item[field]),
            (&json!(format!("{name}_call")), &action),
            "{response}"
        );
        // The history continues the recorded conversation, and the model sees the result.
        let mut output = json!({ "type": format!("{name}_call_output"), "call_id": item["call_id"], "output": "RESULT" });
        match name {
            "local_shell" => {
                output["id"] = item["id"].clone();
                output.as_object_mut().unwrap().remove("call_id");
            }
            "shell" => {
                let outcome = json!({ "type": "exit", "exit_code": 2 });
                output["output"] =
                    json!([{ "stdout": "RESULT\n", "stderr": "", "outcome": outcome }]);
            }
            _ => {}
        }
        let input = json!([{ "role": "user", "content": "Hi" }, item, output]);
        let body = request_body(json!({ "tools": tools, "input": input }));
        assert_eq!(served.post("/v1/responses", &body).await.status, StatusCode::OK);
        let paths = served.paths().await;
        let [path] = &paths[..] else { panic!("{name} forks: {paths:?}") };
        assert!(
            path.contains("RESULT") && path.contains("exit code 2") == (name == "shell"),
            "{path}"
        );

        let allowed =
            json!({ "type": "allowed_tools", "mode": "auto", "tools": [{ "type": name }] });
        let mut streamed = request_body(json!({ "tools": tools, "tool_choice": allowed }));
        streamed["stream"] = true.into();
        let events =
            TestGateway::scripted(&[&text]).post("/v1/responses", &streamed).await.events();
        let last = events.last().unwrap();
        assert_eq!(last["response"]["output"][0][field], action, "{last}");
    }
    // A call that the client could not use becomes a function call.
    let text =
        "<tool_call>\n{\"name\": \"shell\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let response = TestGateway::scripted(&[text])
        .post("/v1/responses", &request_body(json!({ "tools": tools })))
        .await
        .json();
    assert_eq!(
        (&response["output"][0]["type"], &response["output"][0]["name"]),
        (&json!("function_call"), &json!("shell"))
    );
    for (field, value) in [
        ("tools", json!([{ "type": "computer_use_preview", "display_width": 1 }])),
        ("input", json!([{ "type": "computer_call", "call_id": "c", "action": {} }])),
    ] {
        let response = TestGateway::scripted(&["Yes."])
            .post("/v1/responses", &request_body(json!({ field: value })))
            .await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST);
        assert!(response.text.contains("computer_"), "{}", response.text);
    }
}

#[tokio::test]
async fn chat_parses_parts_of_foreign_apis() {
    let call = |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let text = json!({ "type": "text", "text": "x" });
    let thinking = |reasoning: Value| json!({ "role": "assistant", "content": [{ "type": "thinking", "thinking": reasoning }, text] });
    let used = json!({ "type": "tool_use", "id": "c1", "name": "f", "input": {} });
    let document = json!({ "type": "document", "source": { "type": "text", "data": "RESULT" } });
    for (messages, seen, count) in [
        (json!([thinking(json!("THOUGHT")), user_message(json!("q"))]), "THOUGHT", 1),
        (
            json!([
                thinking(json!([{ "type": "text", "text": "THOUGHT" }])),
                user_message(json!("q"))
            ]),
            "THOUGHT",
            1,
        ),
        (
            json!([{ "role": "assistant", "content": [{ "type": "reasoning", "text": "THOUGHT" }, text] }, user_message(json!("q"))]),
            "THOUGHT",
            1,
        ),
        (
            json!([{ "role": "assistant", "content": [{ "type": "redacted_thinking", "data": "SECRET" }, text] }, user_message(json!("q"))]),
            "SECRET",
            0,
        ),
        (
            json!([{ "role": "assistant", "content": "x", "reasoning_content": [{ "type": "text", "text": "THOUGHT" }] }, user_message(json!("q"))]),
            "THOUGHT",
            1,
        ),
        (
            json!([{ "role": "assistant", "content": [text, used], "tool_calls": [call("c1")] },
                   { "role": "tool", "tool_call_id": "c1", "content": "r" }]),
            "\"name\": \"f\"",
            1,
        ),
        (
            json!([{ "role": "assistant", "content": [text, used] },
                   user_message(json!([{ "type": "tool_result", "tool_use_id": "c1", "content": [document] }, text]))]),
            "RESULT",
            1,
        ),
        (json!([user_message(json!([document, text]))]), "RESULT\n\nx", 1),
        (
            json!([{ "role": "assistant", "tool_calls": [{ "id": "c1", "type": "custom", "custom": { "name": "f", "input": "INPUT" } }] },
                   { "role": "tool", "tool_call_id": "c1", "content": [document] }]),
            "{\"input\": \"INPUT\"}",
            1,
        ),
    ] {
        let served = TestGateway::scripted(&["Yes."]);
        let messages =
            [&[user_message(json!("Hi"))], messages.as_array().unwrap().as_slice()].concat();
        let response = served
            .post("/v1/chat/completions", &json!({ "model": "tiny", "messages": messages }))
            .await;
        assert_eq!(response.status, StatusCode::OK, "{}", response.text);
        let [path] = &served.paths().await[..] else { panic!() };
        assert_eq!(path.matches(seen).count(), count, "{seen}: {path}");
    }
}

fn user_message(content: Value) -> Value {
    json!({ "role": "user", "content": content })
}

#[tokio::test]
async fn chat_supports_custom_tools_and_omits_hosted() {
    let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"input\": \"x\"}}\n</tool_call>";
    let tools = json!([{ "type": "custom", "custom": { "name": "f", "description": "d" } }, { "type": "web_search" }]);
    let mut body = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }], "tools": tools });
    let served = TestGateway::scripted(&[text]);
    let response = served.post("/v1/chat/completions", &body).await.json();
    let call = &response["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(
        (&call["type"], &call["custom"]),
        (&json!("custom"), &json!({ "name": "f", "input": "x" })),
        "{response}"
    );
    assert_eq!(served.gateway.unknown_fields().get("chat.tools[type=web_search]"), Some(&1));
    body["tools"] = json!([{ "type": "local_shell" }]);
    let response = served.post("/v1/chat/completions", &body).await;
    assert_eq!(response.status, StatusCode::BAD_REQUEST);
    assert!(response.text.contains("local_shell"), "{}", response.text);
}
