//! Parser of messages that consist of content blocks.

use levade_text::{Message, Role};
use serde_json::Value;

use crate::gateway::Gateway;
use crate::parts::{ContentParser, text_of_part, unsupported_part};
use levade_call::ApiError;

/// Name of Anthropic's Messages API in the counters of unknown request fields.
pub(super) const API: &str = "messages";

/// Prefix of a line that Claude Code puts before its instructions. The line is for Anthropic's
/// billing and differs in every request, so two prompts would never share a prefix.
const BILLING_PREFIX: &str = "x-anthropic-billing-header:";

/// Parses the instructions (`system`) and the messages of a request in Anthropic's format.
///
/// Blocks that belong to tools hosted by Anthropic are omitted and counted. Parts of tool results
/// that cannot be shown are counted and replaced by a line that names their type.
///
/// # Errors
/// Returns an error that names the first message or block that is invalid or that a text model
/// cannot read. Returns an error if the last message is an assistant message.
pub(super) fn parse_conversation(
    gateway: &Gateway,
    system: Option<&Value>,
    messages: &[Value],
) -> Result<Vec<Message>, ApiError> {
    let parts = ContentParser { gateway, api: API };
    let mut read = Vec::with_capacity(messages.len() + 1);
    if let Some(system) = system.filter(|system| !system.is_null()) {
        read.extend(parse_instructions(parts, system, "system")?);
    }
    for (at, message) in messages.iter().enumerate() {
        let (content, location) = (&message["content"], format!("messages.{at}.content"));
        match message["role"].as_str() {
            Some("user") => parts.parse_user(content, &location, &mut read)?,
            Some("assistant") => read.push(parts.parse_assistant(content, &location)?),
            Some("system") => read.extend(parse_instructions(parts, content, &location)?),
            _ => {
                let param = format!("messages.{at}.role");
                let message = format!(
                    "{param} is {}, but must be user, assistant or system",
                    message["role"]
                );
                return Err(ApiError::field(&param, message));
            }
        }
    }
    if read.last().is_some_and(|last| last.role == Role::Assistant) {
        let message = "the last message has the role assistant, but continuing a partial \
                       assistant message (prefill) is not supported; end with a user message";
        return Err(ApiError::field("messages", message));
    }
    Ok(read)
}

/// Returns the joined text of a message content that may have only text blocks. `kept` selects the
/// part of each block's text that is kept.
fn join_texts(
    parts: ContentParser<'_>,
    content: &Value,
    location: &str,
    kept: fn(&str) -> &str,
) -> Result<String, ApiError> {
    let mut all = String::new();
    let plain_text = parts.for_each_part(content, location, |kind, block, location| {
        all += kept(
            text_of_part(kind, block, location)?
                .ok_or_else(|| unsupported_part(kind, location, "text"))?,
        );
        Ok(())
    })?;
    Ok(plain_text.map_or(all, |text| kept(&text).to_owned()))
}

/// Returns a system message with the instructions in `content`, without Claude Code's billing line,
/// or `None` if no text remains.
fn parse_instructions(
    parts: ContentParser<'_>,
    content: &Value,
    location: &str,
) -> Result<Option<Message>, ApiError> {
    let text =
        join_texts(parts, content, location, |text| match text.strip_prefix(BILLING_PREFIX) {
            Some(line) => line.split_once('\n').map_or("", |(_, rest)| rest),
            None => text,
        })?;
    Ok((!text.is_empty()).then(|| Message::system(text)))
}

#[cfg(test)]
mod tests {
    use levade_text::ToolCall;
    use serde_json::json;

    use super::*;
    use crate::parts::FAILED_RESULT;

    fn new_gateway() -> Gateway {
        Gateway::new(Vec::new(), crate::GatewayOptions::default())
    }

    fn parse_messages(messages: Value) -> Result<Vec<Message>, ApiError> {
        parse_conversation(&new_gateway(), None, messages.as_array().unwrap())
    }

    #[test]
    fn parse_conversation_converts_blocks_to_messages() {
        let read = parse_conversation(
            &new_gateway(),
            Some(&json!([
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ])),
            json!([
                {"role": "user", "content": "add"},
                {"role": "system", "content": "Mind the time."},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": " hm ", "signature": "any"},
                    {"type": "redacted_thinking", "data": "opaque"},
                    {"type": "text", "text": " Let me…\n"},
                    {"type": "tool_use", "id": "a0", "name": "add", "input": {"a": 1.5, "b": 2}},
                    {"type": "tool_use", "id": "a1", "name": "add", "input": {}},
                ]},
                {"role": "user", "content": [
                    {"type": "text", "text": "Well? "},
                    {"type": "tool_result", "tool_use_id": "a0", "content": "3.5"},
                    {"type": "tool_result", "tool_use_id": "a1", "is_error": true, "content": [
                        {"type": "text", "text": "no"}, {"type": "text", "text": "pe"},
                    ]},
                    {"type": "tool_result", "tool_use_id": "a2", "is_error": true},
                    {"type": "tool_result", "tool_use_id": "a3"},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                ]},
            ])
            .as_array()
            .unwrap(),
        )
        .unwrap();
        let calls = vec![add_call("a0", json!({"a": 1.5, "b": 2})), add_call("a1", json!({}))];
        let want = [
            Message::system("Be brief."),
            Message::user("add"),
            Message::system("Mind the time."),
            Message {
                reasoning_content: Some(" hm ".into()),
                ..Message::calls(" Let me…\n", calls)
            },
            tool_result("a0", "3.5"),
            tool_result("a1", "nope"),
            tool_result("a2", FAILED_RESULT),
            tool_result("a3", ""),
            Message::user("Well? Go on."),
        ];
        assert_eq!(read, want);
    }

    fn add_call(id: &str, arguments: Value) -> ToolCall {
        ToolCall { id: id.into(), name: "add".into(), arguments: arguments.into() }
    }

    fn tool_result(id: &str, text: &str) -> Message {
        Message { tool_call_id: Some(id.into()), ..Message::tool(text) }
    }

    #[test]
    fn non_object_arguments_keep_their_text() {
        for (input, text) in [
            (json!("{\"a\": "), "{\"a\": "),
            (json!(["x"]), "[\"x\"]"),
            (json!(null), "null"),
            (json!(7), "7"),
            (json!("words"), "words"),
        ] {
            let block = json!({"type": "tool_use", "id": "t", "name": "f", "input": input});
            let result = json!({"type": "tool_result", "tool_use_id": "t"});
            let read = parse_messages(
                json!([{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]),
            );
            assert_eq!(
                read.unwrap()[0].tool_calls[0].arguments.unreadable(),
                Some(text),
                "{input}"
            );
        }
    }

    #[test]
    fn text_blocks_equal_plain_text() {
        let plain_text = parse_messages(json!([{"role": "user", "content": "Hi there"}])).unwrap();
        let parts = json!([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]);
        assert_eq!(
            parse_messages(json!([{"role": "user", "content": parts}])).unwrap(),
            plain_text
        );
        // Empty contents yield messages as well.
        let nothing = parse_messages(
            json!([{"role": "assistant", "content": []}, {"role": "user", "content": ""}]),
        )
        .unwrap();
        assert_eq!(nothing, [Message::assistant(""), Message::user("")]);
    }

    #[test]
    fn textual_documents_and_search_results_are_shown() {
        let of_text =
            document_block(json!({"type": "text", "media_type": "text/plain", "data": "hello"}));
        let of_content = document_block(
            json!({"type": "content", "content": [text_block("hel"), text_block("lo")]}),
        );
        let found = json!({
            "type": "search_result", "title": "Page", "source": "http://a.example", "content": [text_block("hello")],
            "citations": {"enabled": true},
        });
        let bare = json!({"type": "document", "source": {"type": "content", "content": "hello"}});
        for (blocks, want) in [
            (json!([of_text]), "Notes\nhello"),
            (json!([of_content, text_block("q")]), "Notes\nhello\n\nq"),
            (
                json!([text_block("Read:"), found, bare, text_block("q")]),
                "Read:\n\nPage\nhttp://a.example\nhello\n\nhello\n\nq",
            ),
            (json!([bare, text_block("")]), "hello"),
        ] {
            assert_eq!(
                parse_messages(json!([{"role": "user", "content": blocks}])).unwrap(),
                [Message::user(want)]
            );
            let result = json!({"type": "tool_result", "tool_use_id": "a", "content": blocks});
            let read = parse_messages(json!([{"role": "user", "content": [result]}])).unwrap();
            assert_eq!(read[0].content.as_str(), want);
        }
    }

    fn text_block(text: &str) -> Value {
        json!({"type": "text", "text": text})
    }

    fn document_block(source: Value) -> Value {
        json!({"type": "document", "title": "Notes", "source": source})
    }

    #[test]
    fn unsupported_result_parts_are_named_and_counted() {
        let image = json!({"type": "image", "source": {"type": "base64", "data": "AAAA"}});
        let pdf = json!({"type": "document", "source": {"type": "base64", "data": "AAAA"}});
        for (blocks, want) in [
            (
                json!([text_block("shot"), image]),
                "shot\n[a part of type \"image\", which cannot be shown]\n",
            ),
            (
                json!([image, text_block("shot")]),
                "[a part of type \"image\", which cannot be shown]\nshot",
            ),
            (json!([pdf]), "[a part of type \"document\", which cannot be shown]\n"),
            (
                json!([{"type": "tool_reference", "tool_name": "x"}]),
                "[a part of type \"tool_reference\", which cannot be shown]\n",
            ),
        ] {
            let gateway = new_gateway();
            let result = json!({"type": "tool_result", "tool_use_id": "a", "content": blocks});
            let read =
                parse_conversation(&gateway, None, &[json!({"role": "user", "content": [result]})])
                    .unwrap();
            assert_eq!(read[0].content.as_str(), want);
            assert_eq!(gateway.unknown_fields().values().sum::<u64>(), 1);
        }
    }

    #[test]
    fn hosted_tool_blocks_are_omitted_and_counted() {
        let gateway = new_gateway();
        let read = parse_conversation(
            &gateway,
            None,
            json!([
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [
                    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                    {"type": "text", "text": "ok", "citations": []},
                ]},
                {"role": "user", "content": "q2"},
            ])
            .as_array()
            .unwrap(),
        );
        assert_eq!(
            read.unwrap(),
            [Message::user("q"), Message::assistant("ok"), Message::user("q2")]
        );
        assert_eq!(gateway.unknown_fields().len(), 2);
    }

    #[test]
    fn billing_lines_are_removed_from_instructions() {
        let line = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0a1b2;";
        for (system, kept) in [
            (
                json!([text_block(line), text_block("You are."), text_block("\nIndeed.")]),
                "You are.\nIndeed.",
            ),
            (json!([text_block(&format!("{line}\n")), text_block("You are.")]), "You are."),
            (json!(format!("{line}\nYou are.")), "You are."),
            (json!(line), ""),
            (json!([text_block(line)]), ""),
            (json!([text_block(line), text_block(&format!("Say {line}"))]), &format!("Say {line}")),
        ] {
            let read = parse_conversation(
                &new_gateway(),
                Some(&system),
                &[json!({"role": "user", "content": "Hi"})],
            )
            .unwrap();
            let want = (!kept.is_empty()).then(|| Message::system(kept));
            assert_eq!(
                read,
                want.into_iter().chain([Message::user("Hi")]).collect::<Vec<_>>(),
                "{system}"
            );
        }
    }

    #[test]
    fn parse_conversation_names_path_of_unsupported_block() {
        let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}});
        let last = |content: &str| json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]);
        for (messages, param, why) in [
            (
                user_with(&image),
                "messages.0.content.0",
                "\"image\", but this model reads only text",
            ),
            (
                user_with(&json!({"type": "document", "source": {}})),
                "messages.0.content.0",
                "reads only text",
            ),
            (
                user_with(&json!({"type": "document", "source": {"type": "base64", "data": ""}})),
                "messages.0.content.0",
                "is of type \"base64\"",
            ),
            (user_with(&json!({"text": "x"})), "messages.0.content.0", "has no type"),
            (
                user_with(&json!({"type": "text"})),
                "messages.0.content.0.text",
                "is null, but must be a string",
            ),
            (
                user_with(&json!({"type": "server_tool_use"})),
                "messages.0.content.0",
                "must be text or tool_result",
            ),
            (
                json!([{"role": "tool", "content": ""}]),
                "messages.0.role",
                "\"tool\", but must be user",
            ),
            (
                json!([{"role": "user"}]),
                "messages.0.content",
                "is null, but must be a string or a list",
            ),
            (last("It is"), "messages", "prefill"),
        ] {
            let error = parse_messages(messages).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{error}");
            assert!(error.message.contains(why), "{error}");
        }
    }

    fn user_with(block: &Value) -> Value {
        json!([{"role": "user", "content": [block]}])
    }
}
