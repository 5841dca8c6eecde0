//! Tests of responses as clients receive them: parts in their order, with their white space, and
//! equal in a stream and a document.

use std::sync::Arc;

use levade_conversation::{Format, Options as History, Origin};
use levade_text::testing::{family_chat, tiny_tokenizer};
use levade_text::{Chat, ChatOptions, ToolProtocol};
use serde_json::{Value, json};

use crate::testing::{OUTSIDE_KEY, TestGateway};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// Returns a call to `add`, as the model writes it.
fn call(arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"add\", \"arguments\": {arguments}}}\n</tool_call>")
}

/// Returns a request in the format of an API, with or without the tool `add`.
fn request(path: &str, has_tools: bool) -> Value {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "string" } } });
    let question = json!([{ "role": "user", "content": "Hi" }]);
    let (mut body, tool) = match path {
        CHAT => (
            json!({ "messages": question }),
            json!({ "type": "function", "function": { "name": "add", "parameters": schema } }),
        ),
        MESSAGES => (
            json!({ "messages": question, "max_tokens": 900 }),
            json!({ "name": "add", "input_schema": schema }),
        ),
        _ => (
            json!({ "input": question }),
            json!({ "type": "function", "name": "add", "parameters": schema }),
        ),
    };
    body["model"] = "tiny".into();
    if has_tools {
        body["tools"] = json!([tool]);
    }
    body
}

/// Returns the parts of a completion as the client receives them, in order: `thought …`, `text …`
/// or `call …`.
async fn sent_parts(text: &str, path: &str, body: &Value, streams: bool) -> Vec<String> {
    responses_from(&TestGateway::scripted(&[text]), path, body, streams).await
}

/// Like [`told`], for the next completion of `served`.
async fn responses_from(
    served: &TestGateway,
    path: &str,
    body: &Value,
    streams: bool,
) -> Vec<String> {
    let mut body = body.clone();
    body["stream"] = streams.into();
    let response = served.send("POST", path, OUTSIDE_KEY, &body.to_string()).await;
    assert!(response.status.is_success(), "{}", response.text);
    match (path, streams) {
        (CHAT, false) => chat_texts(&[response.json()["choices"][0]["message"].clone()]),
        (CHAT, true) => {
            let frames =
                response.text.split("\n\n").filter_map(|frame| frame.strip_prefix("data: "));
            let chunks = frames.filter_map(|data| serde_json::from_str::<Value>(data).ok());
            chat_texts(
                &chunks.map(|chunk| chunk["choices"][0]["delta"].clone()).collect::<Vec<_>>(),
            )
        }
        (MESSAGES, false) => block_texts(response.json()["content"].as_array().unwrap()),
        (MESSAGES, true) => {
            let mut blocks: Vec<Value> = Vec::new();
            for event in response.events() {
                if event["type"] == "content_block_start" {
                    blocks.push(event["content_block"].clone());
                }
                let (Some(block), delta) = (blocks.last_mut(), &event["delta"]) else { continue };
                for field in ["text", "thinking"] {
                    if let Some(more) = delta[field].as_str() {
                        block[field] = format!("{}{more}", block[field].as_str().unwrap()).into();
                    }
                }
                if let Some(json) = delta["partial_json"].as_str() {
                    block["input"] = serde_json::from_str(json).unwrap();
                }
            }
            block_texts(&blocks)
        }
        (_, false) => item_texts(response.json()["output"].as_array().unwrap()),
        (_, true) => {
            item_texts(response.events().last().unwrap()["response"]["output"].as_array().unwrap())
        }
    }
}

/// Returns the parts of a chat's message, from deltas or a complete message: all text, then all
/// calls.
fn chat_texts(deltas: &[Value]) -> Vec<String> {
    let all = |field: &str| -> String {
        deltas.iter().filter_map(|delta| delta[field].as_str()).collect()
    };
    let texts = [("thought", all("reasoning_content")), ("text", all("content"))];
    let texts = texts.into_iter().filter(|(_, text)| !text.is_empty());
    let calls =
        deltas.iter().flat_map(|delta| delta["tool_calls"].as_array().into_iter().flatten());
    let calls =
        calls.map(|call| ("call", call["function"]["arguments"].as_str().unwrap().to_owned()));
    texts.chain(calls).map(|(kind, text)| format!("{kind} {text}")).collect()
}

fn block_texts(blocks: &[Value]) -> Vec<String> {
    blocks
        .iter()
        .map(|block| match block["type"].as_str().unwrap() {
            "thinking" => format!("thought {}", block["thinking"].as_str().unwrap()),
            "text" => format!("text {}", block["text"].as_str().unwrap()),
            _ => format!("call {}", block["input"]),
        })
        .collect()
}

fn item_texts(items: &[Value]) -> Vec<String> {
    items
        .iter()
        .map(|item| match item["type"].as_str().unwrap() {
            "reasoning" => format!("thought {}", item["content"][0]["text"].as_str().unwrap()),
            "message" => format!("text {}", item["content"][0]["text"].as_str().unwrap()),
            _ => format!("call {}", item["arguments"].as_str().unwrap()),
        })
        .collect()
}

/// Checks that every API returns the parts in this order, streamed or not. Chat completions return
/// all text before all calls.
async fn check(text: &str, more: &Value, has_tools: bool, want: &[&str]) {
    for path in [CHAT, MESSAGES, RESPONSES] {
        let mut body = request(path, has_tools);
        for (field, value) in more.as_object().unwrap() {
            let field = if path == MESSAGES && field == "stop" { "stop_sequences" } else { field };
            body[field] = value.clone();
        }
        let mut expected: Vec<String> = want.iter().map(|part| (*part).to_owned()).collect();
        if path == CHAT {
            let all = |kind: &str| -> String {
                want.iter().filter_map(|part| part.strip_prefix(kind)).collect()
            };
            let texts = [("thought", all("thought ")), ("text", all("text "))];
            let texts = texts.into_iter().filter(|(_, text)| !text.is_empty());
            expected = texts.map(|(kind, text)| format!("{kind} {text}")).collect();
            expected.extend(
                want.iter().filter(|part| part.starts_with("call ")).map(|part| (*part).to_owned()),
            );
        }
        for streams in [false, true] {
            assert_eq!(
                sent_parts(text, path, &body, streams).await,
                expected,
                "{path} {streams}: {text:?}"
            );
        }
    }
}

#[tokio::test]
async fn content_parts_keep_order_in_every_api() {
    let one = call(r#"{"a": "1"}"#);
    let two = call(r#"{"a": "2"}"#);
    for (text, want) in [
        (
            format!("One. {one} Two. {two} Three."),
            &[
                "text One.",
                r#"call {"a":"1"}"#,
                "text \nTwo.",
                r#"call {"a":"2"}"#,
                "text \nThree.",
            ][..],
        ),
        (format!("{one}\nSo."), &[r#"call {"a":"1"}"#, "text So."]),
        (
            format!("<think>Hm.</think>{one}<think>Ah.</think>So."),
            &["thought Hm.", r#"call {"a":"1"}"#, "thought \nAh.", "text So."],
        ),
        // A call that cannot be parsed is text at its position.
        (
            format!("One. <tool_call>{{oops}}</tool_call> Two. {two}"),
            &["text One.\n<tool_call>{oops}</tool_call>\nTwo.", r#"call {"a":"2"}"#],
        ),
        (
            "<tool_call>{oops}</tool_call> Two.".into(),
            &["text <tool_call>{oops}</tool_call>\nTwo."],
        ),
    ] {
        check(&text, &json!({}), true, want).await;
    }
}

#[tokio::test]
async fn arguments_are_equal_in_every_api_and_stream() {
    for (written, sent) in [
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("1.50", "1.50"),
        ("1e400", "1e+400"),
        ("-0", "-0"),
        (r#""\ud83d\ude00\/""#, "\"😀/\""),
    ] {
        let completion = call(&format!("{{\"b\": 1, \"a\": {written}}}"));
        check(&completion, &json!({}), true, &[&format!("call {{\"b\":1,\"a\":{sent}}}")]).await;
    }
    // A string cannot contain an unpaired surrogate, so the client receives the call as text.
    let lone = call(r#"{"a": "\ud83d"}"#);
    check(&lone, &json!({}), true, &[&format!("text {lone}")]).await;
}

#[tokio::test]
async fn tool_calls_are_text_if_tools_are_not_permitted() {
    let one = call(r#"{"a": "1"}"#);
    let text = format!("<think>Hm.</think>One. {one} Two.");
    let want = ["thought Hm.", &format!("text One. {one} Two.")];
    check(&text, &json!({}), false, &want).await;
    for (path, choice) in
        [(CHAT, json!("none")), (MESSAGES, json!({ "type": "none" })), (RESPONSES, json!("none"))]
    {
        let mut body = request(path, true);
        body["tool_choice"] = choice;
        for streams in [false, true] {
            assert_eq!(sent_parts(&text, path, &body, streams).await, want, "{path} {streams}");
        }
    }
}

#[tokio::test]
async fn untagged_tool_calls_are_parsed_in_streams() {
    let options = ChatOptions { bare_calls: true, ..ChatOptions::default() };
    let text = r#"<think>Hm.</think>So: {"name": "add", "arguments": {"a": "1"}}"#;
    for path in [CHAT, MESSAGES, RESPONSES] {
        for streams in [false, true] {
            let chat = family_chat(ToolProtocol::Hermes, options.clone()).unwrap();
            let format = Format::new(Arc::new(chat), History::default());
            let served = TestGateway::with_format(&[text], format);
            let found = responses_from(&served, path, &request(path, true), streams).await;
            assert_eq!(found, ["thought Hm.", "text So:", r#"call {"a":"1"}"#], "{path} {streams}");
        }
    }
}

#[tokio::test]
async fn template_error_is_returned_to_client() {
    // Like templates of Qwen 3.5, which accept a system message only before a user message.
    let source = "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}\
                  {{- raise_exception('No user query found in messages.') }}{%- endif %}\
                  {%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n\
                  ' + m.content + '<|im_end|>\\n\
                  ' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\
                  ' }}{%- endif %}";
    for (path, body) in [
        (CHAT, json!({ "messages": [{ "role": "system", "content": "Be brief." }] })),
        (MESSAGES, json!({ "messages": [], "system": "Be brief.", "max_tokens": 9 })),
        (RESPONSES, json!({ "input": [], "instructions": "Be brief." })),
    ] {
        let chat =
            Chat::new(tiny_tokenizer().unwrap(), Some(source), ChatOptions::default()).unwrap();
        let served =
            TestGateway::with_format(&["Yes."], Format::new(Arc::new(chat), History::default()));
        let response = served.post(path, &body).await;
        assert_eq!(response.status, 400, "{path}: {}", response.text);
        assert!(
            response.text.contains("No user query found in messages."),
            "{path}: {}",
            response.text
        );
        // Another template accepts the same messages.
        let response = TestGateway::scripted(&["Yes."]).post(path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.text);
    }
}

#[tokio::test]
async fn assistant_text_keeps_surrounding_white_space() {
    for text in ["  \n Hello. \n\n", "Hello.\n", "\tHello.", " \n"] {
        check(text, &json!({}), true, &[&format!("text {text}")]).await;
        // Whether the client sends the text back with or without its white space, it matches the
        // completion.
        for sent in [text, text.trim()] {
            let served = TestGateway::scripted(&[text, "Bye."]);
            let mut body = request(CHAT, true);
            served.post(CHAT, &body).await;
            let completion = json!({ "role": "assistant", "content": sent });
            let next = json!({ "role": "user", "content": "So?" });
            body["messages"].as_array_mut().unwrap().extend([completion, next]);
            served.post(CHAT, &body).await;
            assert_eq!(served.origins(), [Origin::Started, Origin::Continued], "{sent:?}");
        }
    }
    // Before reasoning and calls, and after them, white space separates parts and belongs to no
    // part.
    let one = call(r#"{"a": "1"}"#);
    check(&format!(" \n{one}\n"), &json!({}), true, &[r#"call {"a":"1"}"#]).await;
    check("<think>\nHm.\n</think>\n\nSo.\n", &json!({}), true, &["thought Hm.", "text So.\n"])
        .await;
}

#[tokio::test]
async fn stop_strings_are_removed_from_all_parts() {
    let one = call(r#"{"a": "x STOP y"}"#);
    let truncated = one.split_once("STOP").unwrap().0;
    for (text, stops, want) in [
        ("<think>Hm. STOP</think>So.", json!(["STOP"]), &["thought Hm. "][..]),
        ("<think>Hm. STOP</think>So.", json!(["never", "STOP"]), &["thought Hm. "]),
        (&format!("So. {one}"), json!(["never", "STOP"]), &[&format!("text So.\n{truncated}")]),
        ("One.\n\nTwo.", json!(["never", "\n\n"]), &["text One."]),
        // The start of a possible stop string is kept before a call.
        (&format!("One ST{}", call("{}")), json!(["STOP"]), &["text One ST", "call {}"]),
    ] {
        for path in [CHAT, MESSAGES] {
            let field = if path == MESSAGES { "stop_sequences" } else { "stop" };
            let mut body = request(path, true);
            body[field] = stops.clone();
            for streams in [false, true] {
                assert_eq!(
                    sent_parts(text, path, &body, streams).await,
                    want,
                    "{path} {streams}: {text:?}"
                );
            }
        }
        // The response contains the stop string that ended the completion.
        if want.len() == 1 {
            let mut body = request(MESSAGES, true);
            body["stop_sequences"] = stops.clone();
            let response = TestGateway::scripted(&[text]).post(MESSAGES, &body).await.json();
            assert_eq!(
                Some(&response["stop_sequence"]),
                stops.as_array().unwrap().last(),
                "{text}"
            );
        }
    }
}

#[tokio::test]
async fn format_fields_are_applied_or_rejected_in_every_api() {
    let schema = json!({ "type": "object", "properties": { "k": { "const": "v" } }, "required": ["k"],
        "additionalProperties": false });
    for path in [CHAT, MESSAGES, RESPONSES] {
        let served = TestGateway::with_grammars(60);
        for (field, value) in [
            ("guided_json", schema.clone()),
            ("structured_outputs", json!({ "json": schema })),
            (
                "response_format",
                json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } }),
            ),
            ("guided_regex", json!(r#"\{"k":"v"\}"#)),
            ("guided_choice", json!([r#"{"k":"v"}"#])),
            ("guided_grammar", json!(r#"start: "{\"k\":\"v\"}""#)),
        ] {
            let mut body = request(path, false);
            body[field] = value;
            let response = served.send("POST", path, OUTSIDE_KEY, &body.to_string()).await.json();
            let sent_text = match path {
                CHAT => &response["choices"][0]["message"]["content"],
                MESSAGES => &response["content"][0]["text"],
                _ => &response["output"][0]["content"][0]["text"],
            };
            let sent_text: Value = serde_json::from_str(sent_text.as_str().unwrap()).unwrap();
            assert_eq!(sent_text, json!({ "k": "v" }), "{path} {field}");
        }
        for (field, value) in [
            ("response_format", json!({ "type": "grammar" })),
            ("guided_regex", json!(7)),
            ("structural_tag", json!("x")),
            ("regex", json!("a")),
        ] {
            let mut body = request(path, false);
            body[field] = value;
            let response = served.send("POST", path, OUTSIDE_KEY, &body.to_string()).await;
            assert_eq!(response.status, 400, "{path} {field}");
            assert!(response.text.contains(field), "{path}: {}", response.text);
        }
    }
}

#[tokio::test]
async fn null_request_fields_count_as_absent() {
    let served = TestGateway::scripted(&["Yes."]);
    for (path, field, value) in [
        (CHAT, "stream_options", json!({ "include_usage": null })),
        (CHAT, "stream_options", json!(null)),
        (CHAT, "response_format", json!(null)),
        (CHAT, "guided_json", json!(null)),
        (CHAT, "structured_outputs", json!({ "json": null })),
        ("/v1/completions", "stream_options", json!({ "include_usage": null })),
        (RESPONSES, "text", json!({ "format": null })),
        (RESPONSES, "structured_outputs", json!(null)),
        (RESPONSES, "background", json!(null)),
        (RESPONSES, "background", json!(false)),
        (RESPONSES, "conversation", json!(null)),
        (MESSAGES, "output_config", json!({ "format": null })),
        (MESSAGES, "guided_regex", json!(null)),
    ] {
        let mut body = request(path, false);
        if path == "/v1/completions" {
            body = json!({ "model": "tiny", "prompt": "Hi" });
        }
        (body[field], body["stream"]) = (value, true.into());
        let response = served.send("POST", path, OUTSIDE_KEY, &body.to_string()).await;
        assert_eq!(response.status, 200, "{path} {field}: {}", response.text);
        let is_openai = path == CHAT || path == "/v1/completions";
        assert!(!is_openai || !response.text.contains("usage"), "{}", response.text);
    }
    // The name of the model, and a call's id and type, are optional.
    let mut body = request(CHAT, true);
    body["model"] = Value::Null;
    let sent = json!({ "role": "assistant", "content": null, "tool_calls": [
        { "id": null, "type": null, "function": { "name": "add", "arguments": "{}" } }] });
    let result = json!({ "role": "tool", "tool_call_id": null, "name": null, "content": "7" });
    body["messages"].as_array_mut().unwrap().extend([sent, result]);
    let response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
    assert_eq!(response.status, 200, "{}", response.text);
}

#[tokio::test]
async fn unsupported_fields_are_accepted_with_neutral_value() {
    let served = TestGateway::scripted(&["Yes."]);
    for (field, value, status) in [
        ("use_beam_search", json!(false), 200),
        ("use_beam_search", json!(null), 200),
        ("use_beam_search", json!(true), 400),
        ("stop_regex", json!(null), 200),
        ("stop_regex", json!([]), 200),
        ("stop_regex", json!("a+"), 400),
    ] {
        let mut body = request(CHAT, false);
        body[field] = value.clone();
        let response = served.send("POST", CHAT, OUTSIDE_KEY, &body.to_string()).await;
        assert_eq!(response.status, status, "{field} {value}: {}", response.text);
    }
}

#[tokio::test]
async fn lone_surrogates_are_rejected_with_field_name() {
    let served = TestGateway::scripted(&["Yes."]);
    for escaped in [r"\ud83d", r"x\ud800y", r"\udc00\ud83d", r"\udc00"] {
        for (path, body) in [
            (CHAT, r#"{"model": "tiny", "messages": [{"role": "user", "content": "TEXT"}]}"#),
            (
                MESSAGES,
                r#"{"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "TEXT"}]}"#,
            ),
            (RESPONSES, r#"{"model": "tiny", "input": "TEXT"}"#),
            ("/v1/completions", r#"{"model": "tiny", "prompt": "TEXT"}"#),
            ("/tokenize", r#"{"model": "tiny", "prompt": "TEXT"}"#),
        ] {
            let response =
                served.send("POST", path, OUTSIDE_KEY, &body.replace("TEXT", escaped)).await;
            assert_eq!(response.status, 400, "{path}: {}", response.text);
            assert!(response.text.contains("an unpaired surrogate"), "{path}: {}", response.text);
        }
    }
    // In the arguments of a call, which are JSON text, lone surrogates are kept unchanged.
    let mut body = request(CHAT, true);
    let sent = json!({ "role": "assistant", "content": null, "tool_calls": [
        { "id": "x", "type": "function", "function": { "name": "add", "arguments": r#"{"a": "\ud83d"}"# } }] });
    body["messages"].as_array_mut().unwrap().push(sent);
    served.post(CHAT, &body).await;
    assert!(served.paths().await[0].contains(r#"{"a": "\ud83d"}"#));
}
