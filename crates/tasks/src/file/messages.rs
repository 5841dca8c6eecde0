//! Parses a list of messages, the question of a chat row, in the layouts of common data sets.

use levade_text::{Message, Role, ToolCall};
use serde_json::{Map, Value};

/// Parses a list of chat messages in OpenAI's layout (`role`, `content`) or ShareGPT's layout
/// (`from`, `value`).
///
/// # Errors
/// Returns a description of the problem, with the index of the message, if a message is invalid.
pub(super) fn messages(items: &[Value]) -> Result<Vec<Message>, String> {
    let numbered = items.iter().enumerate();
    let messages: Result<Vec<Message>, String> = numbered
        .map(|(at, item)| parse_message(item).map_err(|why| format!("message {at}: {why}")))
        .collect();
    let messages = messages?;
    match messages.last() {
        None => Err("the list has no messages".into()),
        Some(last) if !matches!(last.role, Role::User | Role::Tool) => Err(format!(
            "the last message has the role {}, which leaves nothing to respond to: end with a user \
             message",
            last.role.as_str()
        )),
        Some(last) if last.content.trim().is_empty() => Err("the last message is empty".into()),
        Some(_) => Ok(messages),
    }
}

fn parse_message(item: &Value) -> Result<Message, String> {
    let fields = item.as_object().ok_or("the message is not an object")?;
    // Arrow fills columns that a message lacks with null.
    let field = |names: &[&str]| {
        names.iter().find_map(|name| fields.get(*name).filter(|value| !value.is_null()))
    };
    let role = field(&["role", "from"]).ok_or_else(|| {
        format!("the message has no `role`; it has the fields {}", list_names(fields))
    })?;
    let text = |name: &str| fields.get(name).and_then(Value::as_str).map(str::to_owned);
    let tool_calls: Vec<ToolCall> = match field(&["tool_calls"]) {
        Some(calls) => serde_json::from_value(calls.clone())
            .map_err(|error| format!("the message has invalid `tool_calls`: {error}"))?,
        None => Vec::new(),
    };
    let content = match field(&["content", "value"]) {
        Some(content) => parse_content(content)?,
        None if tool_calls.is_empty() => {
            return Err(format!(
                "the message has no `content`; it has the fields {}",
                list_names(fields)
            ));
        }
        None => String::new(),
    };
    let message = Message {
        role: parse_role(role)?,
        content: content.into(),
        reasoning_content: None,
        tool_calls,
        tool_call_id: text("tool_call_id"),
        name: text("name"),
    };
    message.check_calls().map_err(|why| format!("the message has invalid `tool_calls`: {why}"))?;
    Ok(message)
}

fn parse_role(role: &Value) -> Result<Role, String> {
    match role.as_str() {
        Some("system" | "developer") => Ok(Role::System),
        Some("user" | "human") => Ok(Role::User),
        Some("assistant" | "gpt") => Ok(Role::Assistant),
        Some("tool") => Ok(Role::Tool),
        _ => Err(format!(
            "the message has the role {role}, but the role must be system, user, assistant or tool"
        )),
    }
}

/// Returns the text of a message, whose content is a string or a list of text parts.
fn parse_content(content: &Value) -> Result<String, String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts.iter().map(parse_part).collect(),
        _ => Err(format!(
            "the message has the content {content}, but the content must be a string or a list of \
             parts"
        )),
    }
}

fn parse_part(part: &Value) -> Result<String, String> {
    let kind = part.get("type").and_then(Value::as_str);
    match (part, part.get("text")) {
        (Value::String(text), _) => Ok(text.clone()),
        (_, Some(Value::String(text))) if matches!(kind, None | Some("text" | "input_text")) => {
            Ok(text.clone())
        }
        _ => Err(format!(
            "the message has a part of type {}, but only parts of type text are supported",
            kind.unwrap_or("unknown")
        )),
    }
}

fn list_names(fields: &Map<String, Value>) -> String {
    fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, String> {
        messages(value.as_array().unwrap())
    }

    #[test]
    fn messages_parse_all_layouts() {
        let want = [
            Message::system("Be brief."),
            Message::user("1 + 1?"),
            Message::assistant("2"),
            Message::user("1 + 2?"),
        ];
        let plain = json!([
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "2", "tool_calls": null, "name": null},
            {"role": "user", "content": "1 + 2?"},
        ]);
        let parts = json!([
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, "brief."]},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            {"role": "assistant", "content": [{"text": "2", "image": null}]},
            {"role": "user", "content": "1 + 2?"},
        ]);
        let sharegpt = json!([
            {"from": "system", "value": "Be brief."}, {"from": "human", "value": "1 + 1?"},
            {"from": "gpt", "value": "2"}, {"from": "human", "value": "1 + 2?"},
        ]);
        for shape in [plain, parts, sharegpt] {
            assert_eq!(read(shape).unwrap(), want);
        }
        let call = json!({"id": "a", "type": "function", "function": {"name": "add", "arguments": "{\"x\": 1}"}});
        let called = read(json!([
            {"role": "user", "content": "?"}, {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "a", "name": "add"},
        ]));
        let called = called.unwrap();
        assert_eq!(
            (called[1].content.as_str(), called[1].tool_calls[0].name.as_str()),
            ("", "add")
        );
        assert_eq!(
            (called[2].tool_call_id.as_deref(), called[2].name.as_deref()),
            (Some("a"), Some("add"))
        );
    }

    #[test]
    fn invalid_messages_are_rejected() {
        let user = json!({"role": "user", "content": "?"});
        for (chat, why) in [
            (json!([]), "the list has no messages"),
            (
                json!([user, {"role": "assistant", "content": "!"}]),
                "the last message has the role assistant, which leaves nothing",
            ),
            (json!([{"role": "user", "content": " "}]), "the last message is empty"),
            (json!(["Hi"]), "message 0: the message is not an object"),
            (
                json!([user, {"content": "?"}]),
                "message 1: the message has no `role`; it has the fields content",
            ),
            (
                json!([{"role": "user", "text": "?"}]),
                "message 0: the message has no `content`; it has the fields role, text",
            ),
            (
                json!([{"role": "critic", "content": "?"}]),
                "message 0: the message has the role \"critic\", but the role must be system",
            ),
            (
                json!([{"role": "user", "content": 5}]),
                "message 0: the message has the content 5, but the content must be a string or a \
                 list of parts",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
                "message 0: the message has a part of type image_url, but only parts of type text \
                 are supported",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "a"}]}, user]),
                "message 0: the message has invalid `tool_calls`",
            ),
        ] {
            let error = read(chat).unwrap_err();
            assert!(error.starts_with(why), "gave: {error}\nwant: {why}");
        }
    }
}
