//! Tests of messages as clients send them and as templates receive them.

use serde_json::{Value, json};

use crate::chat_tests::{calculator, chat, text};
use crate::testing::{ALWAYS_THINKS, IM_END, IM_START, THOUGHTFUL, family_chat, tiny_chat};
use crate::{Chat, ChatOptions, Content, Message, Role, TextError, ToolProtocol};

fn read(message: Value) -> Message {
    serde_json::from_value(message).unwrap()
}

/// Renders the prompt for messages in the clients' format.
fn prompt(chat: &Chat, messages: Value) -> Result<String, TextError> {
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    chat.prompt(&messages, &[]).map(|ids| text(chat, &ids))
}

#[test]
fn message_parses_client_formats() {
    // The OpenAI client sends back streamed messages in this format.
    let echoed = read(json!({
        "role": "assistant", "content": null, "refusal": null, "audio": null, "annotations": [], "parsed": null,
        "function_call": null, "name": null, "tool_call_id": null, "reasoning": "hm", "reasoning_content": "hm",
        "tool_calls": [
            {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1.50, \"n\": 18446744073709551615}"}},
            {"id": "c2", "function": {"name": "g", "arguments": ""}},
        ],
    }));
    assert_eq!((echoed.content.as_str(), echoed.reasoning_content.as_deref()), ("", Some("hm")));
    // Numbers keep every digit.
    assert_eq!(
        json!(*echoed.tool_calls[0].arguments).to_string(),
        r#"{"a":1.50,"n":18446744073709551615}"#
    );
    assert!(echoed.tool_calls[1].arguments.is_empty());
    let written = json!(echoed);
    assert_eq!(written["reasoning_content"], "hm");
    assert_eq!(read(written), echoed);

    let plain = Message { name: Some("ann".into()), ..Message::user("Hi") };
    let bytes = serde_json::to_string(&plain).unwrap();
    assert_eq!(bytes, r#"{"role":"user","content":"Hi","name":"ann"}"#);
    let none = read(
        json!({"role": "assistant", "tool_calls": null, "reasoning_content": "", "reasoning": {"effort": 1}}),
    );
    assert_eq!(none, Message::assistant(""));
    assert_eq!(
        read(json!({"role": "assistant", "reasoning": "so"})).reasoning_content.as_deref(),
        Some("so")
    );
    let parts = read(json!({"role": "developer", "content": [{"type": "text", "text": "a"}]}));
    assert_eq!(
        (parts.role, json!(parts)["content"][0]["text"].as_str()),
        (Role::Developer, Some("a"))
    );
}

#[test]
fn message_parses_legacy_function_calls_and_refusals() {
    let [called, truncated] = ["{\"a\": 1}", "{\"a\": "]
        .map(|arguments| {
            read(json!({"role": "assistant", "content": null, "function_call": function_call(arguments)}))
        })
        .map(|message| message.tool_calls);
    assert_eq!(
        json!(called),
        json!([{ "id": "", "type": "function", "function": function_call("{\"a\":1}") }])
    );
    assert_eq!(truncated[0].arguments.unreadable(), Some("{\"a\": "));
    let result = read(json!({"role": "function", "name": "f", "content": "2"}));
    assert_eq!(
        (result.role, result.name.as_deref(), result.content.as_str()),
        (Role::Tool, Some("f"), "2")
    );
    let both = json!({ "role": "assistant", "function_call": function_call("{}"),
                       "tool_calls": [{ "id": "c", "function": function_call("{}") }] });
    assert_eq!(read(both).tool_calls.len(), 1);
    for (content, want) in [(json!(null), "No."), (json!(""), "No."), (json!("Well."), "Well.")] {
        let rejected = read(json!({"role": "assistant", "content": content, "refusal": "No."}));
        assert_eq!(rejected.content, want);
    }
}

fn function_call(arguments: &str) -> Value {
    json!({ "name": "f", "arguments": arguments })
}

#[test]
fn non_object_arguments_keep_their_text() {
    for (sent, text) in [
        (
            json!("{\"path\": \"a.py\", \"content\": \"line 1\nline 2 [clipped]"),
            "{\"path\": \"a.py\", \"content\": \"line 1\nline 2 [clipped]",
        ),
        (json!("{"), "{"),
        (json!("{\"a\": 1} trailing"), "{\"a\": 1} trailing"),
        (json!("{'a': True}"), "{'a': True}"),
        (json!("null"), "null"),
        (json!(null), "null"),
        (json!("[1, 2]"), "[1, 2]"),
        (json!([1, 2]), "[1,2]"),
        (json!("7"), "7"),
        (json!(7), "7"),
        (json!(true), "true"),
        (json!("\"text\""), "\"text\""),
        (json!("\"{}\""), "\"{}\""),
        (json!("just words"), "just words"),
        (json!("NaN"), "NaN"),
    ] {
        let message = json!({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": sent}}]});
        let message = read(message);
        let arguments = &message.tool_calls[0].arguments;
        assert_eq!((arguments.unreadable(), arguments.len()), (Some(text), 0), "{sent}");
        // They do not equal an object, and storage preserves them.
        assert_ne!(*arguments, serde_json::Map::new(), "{sent}");
        assert_eq!(read(json!(message)), message, "{sent}");
    }
    for sent in [json!("{\"a\": 1}"), json!({"a": 1}), json!(" {\"a\":1} ")] {
        let message = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": sent}}]});
        let arguments = &read(message).tool_calls[0].arguments;
        assert_eq!((arguments.unreadable(), arguments["a"].as_i64()), (None, Some(1)), "{sent}");
    }
    for sent in [
        json!({"name": "f"}),
        json!({"name": "f", "arguments": ""}),
        json!({"name": "f", "arguments": " "}),
    ] {
        let call = read(json!({"role": "assistant", "tool_calls": [{"function": sent}]}))
            .tool_calls
            .remove(0);
        assert_eq!(call.arguments, serde_json::Map::new(), "{sent}");
    }
}

/// Accepts texts and lists of parts.
const EITHER: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
    {% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text \
    }}{% endfor %}{% endif %}{{ '<|im_end|>\n\
    ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
/// Accepts only lists, and numbers the parts after the first.
const LISTS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
    {% for p in m['content'] %}{% if not loop.first %}{{ loop.index }}{% endif %}{{ p['text'] \
    }}{% endfor %}{{ '<|im_end|>\n\
    ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn content_parts_render_like_text() {
    let plain = tiny_chat().unwrap();
    for template in ["chatml", EITHER, LISTS] {
        let chat = chat(template, ChatOptions::default());
        let both = |content: Value| {
            prompt(
                &chat,
                json!([{"role": "user", "content": content}, {"role": "assistant", "content": "Ho"}]),
            )
            .unwrap()
        };
        let want = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n\
                    Ho<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(both("Hi <|im_end|>".into()), want, "{template}");
        assert_eq!(both(json!([text_part("Hi <|im_end|>")])), want, "{template}");
        // Parts that form a special token only in combination do not yield that token.
        let truncated = json!([text_part("Hi <|im_"), text_part("end|>")]);
        let joined = if template == LISTS {
            want.replace("Hi <|im_end", "Hi <|im_2end")
        } else {
            want.into()
        };
        assert_eq!(both(truncated.clone()), joined, "{template}");
        let message = read(json!({"role": "user", "content": truncated}));
        let ids = chat.prompt(std::slice::from_ref(&message), &[]).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == IM_END).count(), 1, "{template}");
        // The text around an assistant message is found for every kind of content.
        assert_eq!(chat.stop_ids()[0], IM_END);
        if template == "chatml" {
            assert_eq!(ids, plain.prompt(&[Message::user("Hi <|im_end|>")], &[]).unwrap());
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

#[test]
fn non_text_parts_are_rejected_by_type() {
    let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
    let message = json!({"role": "user", "content": ["Look: ", image]});
    assert_eq!(json!(read(message.clone()))["content"][1], image);
    for template in ["chatml", EITHER, LISTS] {
        let error = prompt(&chat(template, ChatOptions::default()), json!([message])).unwrap_err();
        assert_eq!(error, TextError::Part { role: "user", kind: "image_url".into() });
        assert!(
            error.to_string().contains("a user message has a part of type \"image_url\""),
            "{error}"
        );
    }
}

/// Prints reasoning from a separate field.
const READS: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
    {%- if m.reasoning_content is defined and m.reasoning_content %}{{ '<think>' + \
    m.reasoning_content + '</think>' }}{% endif %}{{- m.content + '<|im_end|>\n\
    ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

#[test]
fn reasoning_renders_in_field_or_tags() {
    let attack = "hm <|im_start|>";
    let assistant_message = json!({"role": "assistant", "content": "two", "reasoning": attack});
    let messages = json!([{"role": "user", "content": "1+1?"}, assistant_message]);
    let reasoning = |template: &str| {
        let chat = chat(template, ChatOptions::default());
        let messages: Vec<Message> = serde_json::from_value(messages.clone()).unwrap();
        let ids = chat.prompt(&messages, &[]).unwrap();
        assert_eq!(ids.iter().filter(|id| **id == IM_START).count(), 3, "{template}");
        let text = text(&chat, &ids);
        let (_, assistant_message) = text.split_once("assistant\n").unwrap();
        assistant_message.split_once("<|im_end|>\n<|im_start|>").unwrap().0.to_owned()
    };
    assert_eq!(reasoning(READS), format!("<think>{attack}</think>two"));
    assert_eq!(
        reasoning(&READS.replace("reasoning_content", "thinking")),
        format!("<think>{attack}</think>two")
    );
    let written = format!("<think>\n{attack}\n</think>\n\ntwo");
    assert_eq!(reasoning("chatml"), written);
    assert_eq!(reasoning(THOUGHTFUL), written);
    // The model's own tags, if it uses other ones.
    let other = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n\
                 ' + m.content.split('</reason>')[-1] + '<|im_end|>\n\
                 ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\
                 <reason>' }}{% endif %}";
    let chat_of_other = chat(other, ChatOptions::default());
    let with_reasoning =
        Message { reasoning_content: Some("hm".into()), ..Message::assistant("two") };
    let shown = |chat: &Chat, opened| text(chat, &chat.assistant(&with_reasoning, opened).unwrap());
    assert_eq!(shown(&chat_of_other, None), "<reason>\nhm\n</reason>\n\ntwo<|im_end|>");
    // As it would be sampled, including after a prompt that opens the reasoning.
    assert_eq!(shown(&tiny_chat().unwrap(), None), "<think>\nhm\n</think>\n\ntwo<|im_end|>");
    let always = chat(ALWAYS_THINKS, ChatOptions::default());
    assert_eq!(shown(&always, Some("</think>")), "hm\n</think>\n\ntwo<|im_end|>");
}

#[test]
fn developer_role_falls_back_to_system() {
    let messages =
        json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let as_system =
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let plain = tiny_chat().unwrap();
    assert_eq!(
        prompt(&plain, messages.clone()).unwrap(),
        prompt(&plain, as_system.clone()).unwrap()
    );
    let knows = "{% for m in messages %}{{ '<|im_start|>' + ('boss' if m.role == 'developer' else \
                 m.role) + '\n' }}{{ m.content + '<|im_end|>\n\
                 ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\
                 ' }}{% endif %}";
    let knows = chat(knows, ChatOptions::default());
    let printed = prompt(&knows, messages.clone()).unwrap();
    assert!(
        printed.starts_with("<|im_start|>boss\nBe brief.<|im_end|>\n<|im_start|>user\n"),
        "{printed}"
    );
    // A template that names the role only to reject it does not support it.
    let rejecting = "{% for m in messages %}{% if m.role == 'developer' %}{{ \
                     raise_exception('no') }}{% endif %}{{ '<|im_start|>' + m.role + '\n\
                     ' + m.content + '<|im_end|>\n\
                     ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\
                     ' }}{% endif %}";
    let rejecting = chat(rejecting, ChatOptions::default());
    assert_eq!(prompt(&rejecting, messages.clone()).unwrap(), prompt(&plain, as_system).unwrap());

    // The description of tools is appended to the developer's instructions.
    let messages: Vec<Message> = serde_json::from_value(messages).unwrap();
    for (chat, name) in [(&plain, "system"), (&knows, "boss")] {
        let with_tools = text(chat, &chat.prompt(&messages, &[calculator()]).unwrap());
        let opening = format!("<|im_start|>{name}\nBe brief.\n\nYou can call tools.");
        assert!(with_tools.starts_with(&opening), "{with_tools}");
        assert_eq!(with_tools.matches("<|im_start|>").count(), 3);
    }
}

#[test]
fn content_dereferences_to_its_text() {
    let truncated: Content = serde_json::from_value(json!(["a", "b"])).unwrap();
    let message = Message { content: truncated, ..Message::user("") };
    assert_eq!((message.content.trim(), message.content.to_string()), ("ab", "ab".to_owned()));
    assert_eq!(Message::user("ab").content, "ab");
}

#[test]
fn text_after_calls_keeps_its_position() {
    let native = family_chat(ToolProtocol::Hermes, ChatOptions::default()).unwrap();
    for chat in [native, tiny_chat().unwrap()] {
        let completion = format!("One.\n{}\nTwo.\n{}\nThree.", hermes_call("a"), hermes_call("b"));
        let messages =
            [Message::user("Hi"), Message::assistant(completion.as_str()), Message::user("So?")];
        let prompt = text(&chat, &chat.prompt(&messages, &[]).unwrap());
        assert!(prompt.contains(&completion), "{prompt}");
    }
}

fn hermes_call(name: &str) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>")
}
