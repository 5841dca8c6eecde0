//! Log-probabilities, input items and counts of the Responses API, and tools that a choice allows.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::testing::{STRANGER, Served};

const THINKS: &str = "<think>Hm.</think>Yes é.";

fn asks(more: Value) -> Value {
    let mut body = json!({ "model": "tiny", "input": "Hi" });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn tokens(logprobs: &Value) -> Vec<u8> {
    let bytes = logprobs.as_array().unwrap().iter().map(|one| one["bytes"].as_array().unwrap());
    bytes.flatten().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

#[tokio::test]
async fn logprobs_are_those_of_message_tokens() {
    let include = json!({ "include": ["message.output_text.logprobs"] });
    let served = Served::scripted(&[THINKS]);
    let whole = served.post("/v1/responses", &asks(include.clone())).await.json();
    let part = &whole["output"][1]["content"][0];
    assert_eq!(part["text"], "Yes é.");
    // Neither the thought nor the end of the turn.
    assert_eq!(tokens(&part["logprobs"]), "Yes é.".as_bytes());
    assert_eq!(part["logprobs"][0]["logprob"], -0.5);
    assert_eq!(part["logprobs"][0]["top_logprobs"], json!([]));

    let mut streamed = asks(include);
    streamed["stream"] = true.into();
    let events = Served::scripted(&[THINKS]).post("/v1/responses", &streamed).await.events();
    let of = |kind: &str| events.iter().filter(|event| event["type"] == kind).collect::<Vec<_>>();
    let deltas: Vec<u8> =
        of("response.output_text.delta").iter().flat_map(|event| tokens(&event["logprobs"])).collect();
    assert_eq!(deltas, "Yes é.".as_bytes());
    assert_eq!(tokens(&of("response.output_text.done")[0]["logprobs"]), "Yes é.".as_bytes());
    let last = &events[events.len() - 1]["response"]["output"][1]["content"][0];
    assert_eq!(last["logprobs"], part["logprobs"]);

    let without = Served::scripted(&[THINKS]).post("/v1/responses", &asks(json!({}))).await.json();
    assert_eq!(without["output"][1]["content"][0]["logprobs"], json!([]));
}

#[tokio::test]
async fn message_logprobs_leave_out_calls() {
    let text = "So.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>";
    let tools = json!([{ "type": "function", "name": "add", "parameters": { "type": "object" } }]);
    let body =
        asks(json!({ "top_logprobs": 0, "include": ["message.output_text.logprobs"], "tools": tools }));
    let answer = Served::scripted(&[text]).post("/v1/responses", &body).await.json();
    assert_eq!(answer["output"][1]["type"], "function_call", "{answer}");
    let told = tokens(&answer["output"][0]["content"][0]["logprobs"]);
    assert!(told.starts_with(b"So.") && told.len() <= "So.\n".len(), "{told:?}");
}

#[tokio::test]
async fn input_items_are_listed_for_their_owner() {
    let served = Served::scripted(&["Yes."]);
    let items = json!([
        { "role": "user", "content": "one" },
        { "role": "assistant", "content": "two" },
        { "type": "message", "id": "mine", "role": "user", "content": [{ "type": "input_text", "text": "three" }] },
    ]);
    let asked = asks(json!({ "input": items }));
    let id = served.post("/v1/responses", &asked).await.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/responses/{id}/input_items");
    let list = async |query: &str| {
        let answer = served.send("GET", &format!("{path}{query}"), served.session.key(), "").await;
        (answer.status, answer.json())
    };
    let texts = |list: &Value| {
        let items = list["data"].as_array().unwrap();
        items.iter().map(|item| item["content"][0]["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (status, all) = list("").await;
    assert_eq!((status, texts(&all)), (StatusCode::OK, vec!["three".into(), "two".into(), "one".into()]));
    assert_eq!(
        (&all["object"], &all["has_more"], &all["first_id"]),
        (&json!("list"), &json!(false), &json!("mine"))
    );
    assert_eq!(all["data"][1]["content"][0]["type"], "output_text");
    let (_, first) = list("?order=asc&limit=1").await;
    assert_eq!((texts(&first), &first["has_more"]), (vec!["one".to_owned()], &json!(true)));
    let (_, rest) = list(&format!("?order=asc&after={}", first["last_id"].as_str().unwrap())).await;
    assert_eq!(texts(&rest), ["two", "three"]);
    // As many as there are leave none for another page.
    let (_, exact) = list("?limit=3").await;
    assert_eq!((texts(&exact).len(), &exact["has_more"]), (3, &json!(false)));
    let (_, last) = list("?limit=1&after=mine").await;
    assert_eq!((texts(&last), &last["has_more"]), (vec!["two".to_owned()], &json!(true)));
    for wrong in ["?limit=0", "?limit=101", "?order=up", "?after=nowhere"] {
        assert_eq!(list(wrong).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }
    let stranger = served.send("GET", &path, STRANGER, "").await;
    assert_eq!(stranger.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn input_tokens_counts_prompt() {
    let served = Served::scripted(&["Yes."]);
    let asked = asks(json!({ "instructions": "Be brief." }));
    let counted = served.post("/v1/responses/input_tokens", &asked).await.json();
    assert_eq!(counted["object"], "response.input_tokens");
    let answer = served.post("/v1/responses", &asked).await.json();
    assert_eq!(counted["input_tokens"], answer["usage"]["input_tokens"]);
    assert_eq!(served.session.recorder().ended_calls(), 1);
}

#[tokio::test]
async fn allowed_tools_are_those_that_model_sees() {
    let named = |name: &str| json!({ "type": "function", "name": name });
    let tools = json!([named("add"), named("sub"), { "type": "web_search" }]);
    let chat_tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
    let allowed = json!({ "mode": "auto", "tools": [chat_tool("sub")] });
    let chat = json!({
        "model": "tiny", "messages": [{ "role": "user", "content": "Hi" }],
        "tools": [chat_tool("add"), chat_tool("sub")],
        "tool_choice": { "type": "allowed_tools", "allowed_tools": allowed },
    });
    let listed = json!([named("sub"), { "type": "web_search" }]);
    let responses = asks(
        json!({ "tools": tools, "tool_choice": { "type": "allowed_tools", "mode": "auto", "tools": listed } }),
    );
    for (path, body) in [("/v1/chat/completions", &chat), ("/v1/responses", &responses)] {
        let served = Served::scripted(&["Yes."]);
        let answer = served.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
        let [prompt] = &served.paths().await[..] else { panic!() };
        assert!(prompt.contains("\"sub\"") && !prompt.contains("\"add\""), "{prompt}");
    }
    for wrong in [
        json!({ "mode": "auto", "tools": [] }),
        json!({ "mode": "auto", "tools": [chat_tool("mul")] }),
        json!({ "mode": "always", "tools": [chat_tool("sub")] }),
        json!({ "tools": [chat_tool("sub")] }),
        Value::Null,
    ] {
        let mut body = chat.clone();
        body["tool_choice"]["allowed_tools"] = wrong;
        let answer = Served::scripted(&["Yes."]).post("/v1/chat/completions", &body).await;
        assert_eq!(answer.json()["error"]["param"], "tool_choice", "{}", answer.text);
    }
}

#[tokio::test]
async fn hosted_items_and_parts_of_results_end_no_attempt() {
    let served = Served::scripted(&["Yes."]);
    let image = json!({ "type": "input_image", "image_url": "data:," });
    let items = json!([
        { "role": "user", "content": "Hi" },
        { "type": "web_search_call", "id": "ws_1", "status": "completed" },
        { "type": "mcp_list_tools", "id": "m", "tools": [] },
        { "type": "function_call", "call_id": "a", "name": "shot", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "a", "output": [{ "type": "input_text", "text": "shot" }, image] },
    ]);
    let answer = served.post("/v1/responses", &asks(json!({ "input": items }))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    assert_eq!(served.gateway.unknown_fields().values().sum::<u64>(), 3);
    let [prompt] = &served.paths().await[..] else { panic!() };
    assert!(prompt.contains("shot\n[a part of type \"input_image\", which cannot be shown]"), "{prompt}");
    let body = json!({ "model": "tiny", "messages": [
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "tool_calls": [
            { "id": "a", "type": "function", "function": { "name": "shot", "arguments": "{}" } }] },
        { "role": "tool", "tool_call_id": "a", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] },
    ]});
    let served = Served::scripted(&["Yes."]);
    assert_eq!(served.post("/v1/chat/completions", &body).await.status, StatusCode::OK);
    let [prompt] = &served.paths().await[..] else { panic!() };
    assert!(prompt.contains("[a part of type \"image_url\", which cannot be shown]"), "{prompt}");
}
