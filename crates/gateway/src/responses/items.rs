//! Parser of the items of a conversation, which become messages.
//!
//! A turn of the assistant consists of several items (reasoning, texts, tool calls) and becomes one
//! message. If the items of two turns are adjacent, the ids of the items separate the turns.
//! Without ids, the order of the items within a turn separates them.

use levade_text::{Arguments, Message, ToolCall};
use serde_json::Value;

use super::memory::call_id_of_item;
use super::tools::{NativeTool, display_name};
use crate::gateway::Gateway;
use crate::parts::{ContentParser, string_field};
use crate::tool_types::{self, custom_arguments};
use levade_call::{ApiError, ErrorKind};

/// Name of the Responses API in the counters of unknown request fields.
pub(super) const API: &str = "responses";

/// Prefix of the field `encrypted_content` of a reasoning item. The reasoning follows the prefix in
/// plain text.
const REASONING_PREFIX: &str = "levade:";
/// Prefix of `encrypted_content` from before the project was called Levade. Clients still send
/// items with this prefix.
const LEGACY_PREFIX: &str = "dressage:";

/// Returns reasoning as the `encrypted_content` of a reasoning item, for clients that keep the
/// conversation themselves. The text is not encrypted.
pub(super) fn encrypt_reasoning(reasoning: &str) -> String {
    format!("{REASONING_PREFIX}{reasoning}")
}

/// Parses the input of a request, which is a string or a list of items. `find` returns a stored
/// item by its id.
///
/// # Errors
/// Returns an error that names the first item that is invalid, that a text model cannot read, or
/// that is not in memory.
pub(super) fn parse_input(
    gateway: &Gateway,
    input: &Value,
    find: impl Fn(&str) -> Option<Value>,
) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![Message::user(text.as_str())]),
        Value::Array(items) => items,
        other => {
            return Err(ApiError::field(
                "input",
                format!("input is {other}, but must be a string or a list of items"),
            ));
        }
    };
    let mut reading = ItemReader { gateway, items, find: &find, messages: Vec::new(), turn: None };
    for (at, item) in items.iter().enumerate() {
        let field_path = format!("input[{at}]");
        let kind =
            item["type"].as_str().unwrap_or(if item["role"].is_null() { "" } else { "message" });
        match (kind, item["id"].as_str()) {
            ("item_reference", Some(id)) | ("", Some(id)) => {
                let found = find(id).ok_or_else(|| missing_item_error(id))?;
                reading.read_item(
                    found["type"].as_str().unwrap_or_default(),
                    &found,
                    &field_path,
                )?;
            }
            _ => reading.read_item(kind, item, &field_path)?,
        }
    }
    reading.end_turn();
    Ok(reading.messages)
}

fn missing_item_error(id: &str) -> ApiError {
    let message = format!(
        "Item with id '{id}' not found. Items are kept for a limited time, and only if `store` \
         is not false; send the item itself instead."
    );
    ApiError { kind: ErrorKind::NotFound, message, param: Some("input".into()) }
}

/// Role of an item within an assistant turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemRole {
    Reasoning,
    Text,
    Call,
}

/// An assistant turn that is being read, item by item.
#[derive(Debug)]
struct AssistantTurn {
    reasoning: String,
    text: String,
    calls: Vec<ToolCall>,
    last: ItemRole,
    /// Id of the model call that created the turn. `None` if the ids of the turn's items do not
    /// contain the id of a call.
    call_id: Option<String>,
}

struct ItemReader<'a> {
    gateway: &'a Gateway,
    items: &'a [Value],
    find: &'a dyn Fn(&str) -> Option<Value>,
    messages: Vec<Message>,
    turn: Option<AssistantTurn>,
}

impl<'a> ItemReader<'a> {
    fn content_parser(&self) -> ContentParser<'a> {
        ContentParser { gateway: self.gateway, api: API }
    }

    /// Returns the id of the tool call that a tool result item belongs to. Results of local shells
    /// can refer to the id of the call item instead.
    fn find_call_id(&self, item: &Value, field_path: &str) -> Result<String, ApiError> {
        let (None, Some(id)) = (item["call_id"].as_str(), item["id"].as_str()) else {
            return string_field(item, "call_id", field_path).map(str::to_owned);
        };
        let sent = self.items.iter().find(|sent| sent["id"] == id && sent["call_id"].is_string());
        let call = sent.cloned().or_else(|| (self.find)(id));
        Ok(call
            .and_then(|call| call["call_id"].as_str().map(str::to_owned))
            .unwrap_or_else(|| id.to_owned()))
    }

    fn end_turn(&mut self) {
        let Some(AssistantTurn { reasoning, text: assistant_text, calls, .. }) = self.turn.take()
        else {
            return;
        };
        let reasoning_content = (!reasoning.is_empty()).then_some(reasoning);
        self.messages.push(Message { reasoning_content, ..Message::calls(assistant_text, calls) });
    }

    fn push(&mut self, message: Message) {
        self.end_turn();
        self.messages.push(message);
    }

    /// Returns the assistant turn that an item belongs to. Starts a new turn if the item does not
    /// belong to the current turn.
    fn turn_for(&mut self, part: ItemRole, item: &Value) -> &mut AssistantTurn {
        let call_id = item["id"].as_str().and_then(call_id_of_item).map(str::to_owned);
        let joins = self.turn.as_ref().is_some_and(|turn| match (&turn.call_id, &call_id) {
            (Some(turn), Some(item)) => turn == item,
            _ => match part {
                ItemRole::Call => true,
                ItemRole::Text => turn.last != ItemRole::Text,
                ItemRole::Reasoning => turn.last == ItemRole::Reasoning,
            },
        });
        if !joins {
            self.end_turn();
        }
        let (reasoning, assistant_text, calls) = Default::default();
        let turn = self.turn.get_or_insert(AssistantTurn {
            reasoning,
            text: assistant_text,
            calls,
            last: part,
            call_id: None,
        });
        turn.last = part;
        turn.call_id = call_id.or(turn.call_id.take());
        turn
    }

    fn read_item(&mut self, kind: &str, item: &Value, field_path: &str) -> Result<(), ApiError> {
        if let Some(tool) = NativeTool::from_item(kind, "_call") {
            let id = string_field(item, "call_id", field_path)?.to_owned();
            let call = ToolCall {
                id,
                name: tool.name().to_owned(),
                arguments: tool.parse_arguments(item),
            };
            self.turn_for(ItemRole::Call, item).calls.push(call);
            return Ok(());
        }
        if let Some(tool) = NativeTool::from_item(kind, "_call_output") {
            let id = self.find_call_id(item, field_path)?;
            let output = match tool.format_output(item) {
                Some(output) => output,
                None => self
                    .content_parser()
                    .parse_tool_result(&item["output"], &format!("{field_path}.output"))?,
            };
            self.push(Message { tool_call_id: Some(id), ..Message::tool(output) });
            return Ok(());
        }
        match kind {
            "message" => {
                let text = self
                    .content_parser()
                    .parse_text(&item["content"], &format!("{field_path}.content"))?;
                match item["role"].as_str() {
                    Some("user") => self.push(Message::user(text)),
                    Some("system") => self.push(Message::system(text)),
                    Some("developer") => self.push(developer_message(text)),
                    Some("assistant") => self.turn_for(ItemRole::Text, item).text += &text,
                    _ => {
                        let param = format!("{field_path}.role");
                        let message = format!(
                            "{param} is {}, but must be user, assistant, system or developer",
                            item["role"]
                        );
                        return Err(ApiError::field(&param, message));
                    }
                }
            }
            "reasoning" => {
                let reasoning = extract_reasoning(item);
                self.turn_for(ItemRole::Reasoning, item).reasoning += &reasoning;
            }
            "function_call" => {
                let arguments =
                    item.get("arguments").cloned().map(Arguments::from).unwrap_or_default();
                let call = parse_tool_call(item, field_path, arguments)?;
                self.turn_for(ItemRole::Call, item).calls.push(call);
            }
            "custom_tool_call" => {
                let call = parse_tool_call(
                    item,
                    field_path,
                    custom_arguments(string_field(item, "input", field_path)?),
                )?;
                self.turn_for(ItemRole::Call, item).calls.push(call);
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = string_field(item, "call_id", field_path)?.to_owned();
                let output = self
                    .content_parser()
                    .parse_tool_result(&item["output"], &format!("{field_path}.output"))?;
                self.push(Message { tool_call_id: Some(id), ..Message::tool(output) });
            }
            hosted if tool_types::is_hosted_type(hosted) => {
                self.gateway.count_unknown_field(API, &format!("input[type={hosted}]"));
            }
            _ => {
                let kind =
                    if kind.is_empty() { "no type".into() } else { format!("the type {kind:?}") };
                let message = format!(
                    "{field_path} has {kind}, but its type must be message, reasoning, \
                     item_reference, or a call or its output of type function_call, \
                     custom_tool_call, local_shell_call, shell_call or apply_patch_call"
                );
                return Err(ApiError::field(field_path, message));
            }
        }
        Ok(())
    }
}

fn developer_message(text: String) -> Message {
    Message { role: levade_text::Role::Developer, ..Message::system(text) }
}

/// Returns the text of a reasoning item: from the first of its fields `encrypted_content`,
/// `content` and `summary` that contains readable text.
fn extract_reasoning(item: &Value) -> String {
    let kept = item["encrypted_content"].as_str().and_then(|text| {
        text.strip_prefix(REASONING_PREFIX).or_else(|| text.strip_prefix(LEGACY_PREFIX))
    });
    kept.map(str::to_owned)
        .or_else(|| Some(part_texts(item, "content").concat()).filter(|text| !text.is_empty()))
        .unwrap_or_else(|| part_texts(item, "summary").join("\n\n"))
}

fn part_texts<'a>(item: &'a Value, field: &str) -> Vec<&'a str> {
    item[field].as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect()
}

fn parse_tool_call(
    item: &Value,
    field_path: &str,
    arguments: Arguments,
) -> Result<ToolCall, ApiError> {
    let name = display_name(item["namespace"].as_str(), string_field(item, "name", field_path)?);
    Ok(ToolCall { id: string_field(item, "call_id", field_path)?.to_owned(), name, arguments })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn new_gateway() -> Gateway {
        Gateway::new(Vec::new(), crate::GatewayOptions::default())
    }

    fn parse_messages(items: Value) -> Result<Vec<Message>, ApiError> {
        parse_input(&new_gateway(), &items, |_| None)
    }

    fn tool_call(id: &str, name: &str, arguments: Value) -> ToolCall {
        ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() }
    }

    fn with_reasoning(reasoning: &str, message: Message) -> Message {
        Message { reasoning_content: Some(reasoning.into()), ..message }
    }

    fn tool_result_message(id: &str, text: &str) -> Message {
        Message { tool_call_id: Some(id.into()), ..Message::tool(text) }
    }

    #[test]
    fn items_of_one_turn_become_one_message() {
        let read = parse_messages(json!([
            {"type": "message", "id": "msg_01a2-7f", "role": "developer", "content": [
                {"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."},
            ]},
            {"role": "system", "content": "Really."},
            {"role": "user", "content": "add"},
            {
                "type": "reasoning", "id": "rs_Fake0237", "encrypted_content": "ENC==",
                "summary": [{"type": "summary_text", "text": "sum"}],
                "content": [{"type": "reasoning_text", "text": " hm"}, {"type": "reasoning_text", "text": " so "}],
            },
            {"type": "message", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": " Let me…\n", "annotations": [], "logprobs": []},
            ]},
            {"type": "function_call", "call_id": "a0", "name": "add", "arguments": "{\"b\":  2, \"a\": 1.50}"},
            {"type": "function_call", "call_id": "a1", "namespace": "math", "name": "add", "arguments": ""},
            {"type": "custom_tool_call", "call_id": "a2", "name": "patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "a0", "output": "3.5"},
            {"type": "function_call_output", "call_id": "a1", "output": [
                {"type": "input_text", "text": "no"}, {"type": "input_text", "text": "pe"},
            ]},
            {"type": "custom_tool_call_output", "call_id": "a2", "output": "done"},
            {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]))
        .unwrap();
        let calls = vec![
            tool_call("a0", "add", serde_json::from_str(r#"{"b": 2, "a": 1.50}"#).unwrap()),
            tool_call("a1", "math__add", json!({})),
            tool_call("a2", "patch", json!({"input": "*** Begin"})),
        ];
        let want = [
            developer_message("Be brief.".into()),
            Message::system("Really."),
            Message::user("add"),
            with_reasoning(" hm so ", Message::calls(" Let me…\n", calls)),
            tool_result_message("a0", "3.5"),
            tool_result_message("a1", "nope"),
            tool_result_message("a2", "done"),
            Message::assistant("No."),
        ];
        assert_eq!(read, want);
        assert_eq!(parse_messages(json!("Hi")).unwrap(), [Message::user("Hi")]);
    }

    #[test]
    fn reasoning_is_read_from_all_client_fields() {
        let mut item = json!({"type": "reasoning", "summary": [{"text": "a"}, {"text": "b"}]});
        assert_eq!(extract_reasoning(&item), "a\n\nb");
        item["content"] = json!([{"type": "reasoning_text", "text": "all of it"}]);
        assert_eq!(extract_reasoning(&item), "all of it");
        item["encrypted_content"] = encrypt_reasoning(" exactly ").into();
        assert_eq!(extract_reasoning(&item), " exactly ");
        item["encrypted_content"] = "dressage: as before ".into();
        assert_eq!(extract_reasoning(&item), " as before ");
        item["encrypted_content"] = "gAAAA".into();
        assert_eq!(extract_reasoning(&item), "all of it");
        // A reasoning item without readable text yields a turn without reasoning.
        let bare = json!([
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {"role": "assistant", "content": "So."},
        ]);
        assert_eq!(parse_messages(bare).unwrap(), [Message::assistant("So.")]);
    }

    #[test]
    fn adjacent_turns_become_separate_messages() {
        let f = || vec![tool_call("c", "f", json!({}))];
        // With ids.
        assert_eq!(
            parse_messages(json!([
                assistant_item("msg_a_0", "one"),
                call_item("fc_a_1"),
                assistant_item("msg_a_2", "\ntwo")
            ]))
            .unwrap(),
            [Message::calls("one\ntwo", f())]
        );
        assert_eq!(
            parse_messages(json!([
                reasoning_item("rs_a_0", "x"),
                reasoning_item("rs_b_0", "y"),
                assistant_item("msg_b_1", "two")
            ]))
            .unwrap(),
            [
                with_reasoning("x", Message::assistant("")),
                with_reasoning("y", Message::assistant("two"))
            ]
        );
        assert_eq!(
            parse_messages(json!([assistant_item("msg_a_0", "one"), call_item("fc_b_0")]))
                .unwrap()
                .len(),
            2
        );
        // Without ids, by the order of the items within a turn.
        assert_eq!(
            parse_messages(json!([assistant_item("", "one"), assistant_item("", "two")]))
                .unwrap()
                .len(),
            2
        );
        assert_eq!(
            parse_messages(json!([
                assistant_item("", "one"),
                reasoning_item("", "x"),
                assistant_item("", "two")
            ]))
            .unwrap()
            .len(),
            2
        );
        assert_eq!(
            parse_messages(json!([
                reasoning_item("", "x"),
                reasoning_item("", "y"),
                assistant_item("", "one"),
                call_item("")
            ]))
            .unwrap()
            .len(),
            1
        );
    }

    fn assistant_item(id: &str, text: &str) -> Value {
        json!({"type": "message", "role": "assistant", "id": id, "content": text})
    }

    fn reasoning_item(id: &str, text: &str) -> Value {
        json!({"type": "reasoning", "id": id, "content": [{"text": text}]})
    }

    fn call_item(id: &str) -> Value {
        json!({"type": "function_call", "id": id, "call_id": "c", "name": "f", "arguments": "{}"})
    }

    #[test]
    fn non_object_arguments_keep_their_text() {
        for (arguments, text) in [
            (json!("{\"a\": "), "{\"a\": "),
            (json!("[]"), "[]"),
            (json!("null"), "null"),
            (json!(null), "null"),
            (json!(7), "7"),
        ] {
            let item = json!([{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]);
            assert_eq!(
                parse_messages(item).unwrap()[0].tool_calls[0].arguments.unreadable(),
                Some(text),
                "{arguments}"
            );
        }
        let item = json!([{"type": "function_call", "call_id": "c", "name": "f"}]);
        assert_eq!(
            parse_messages(item).unwrap(),
            [Message::calls("", vec![tool_call("c", "f", json!({}))])]
        );
    }

    #[test]
    fn item_references_resolve_to_items() {
        let reference = json!({"type": "item_reference", "id": "msg_a_0"});
        let items = json!([reference, {"role": "user", "content": "?"}, {"id": "msg_b_0"}]);
        let want =
            [Message::assistant("msg_a_0"), Message::user("?"), Message::assistant("msg_b_0")];
        assert_eq!(parse_input(&new_gateway(), &items, find_message).unwrap(), want);
        let error = parse_input(
            &new_gateway(),
            &json!([{"type": "item_reference", "id": "rs_a_0"}]),
            find_message,
        )
        .unwrap_err();
        assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::NotFound, Some("input")));
        assert!(error.message.starts_with("Item with id 'rs_a_0' not found."), "{error}");
    }

    fn find_message(id: &str) -> Option<Value> {
        let content = json!([{"type": "output_text", "text": id}]);
        id.starts_with("msg")
            .then(|| json!({"type": "message", "role": "assistant", "id": id, "content": content}))
    }

    #[test]
    fn parse_input_names_invalid_items() {
        for (input, param, why) in [
            (json!(1), "input", "a string or a list of items"),
            (json!([{}]), "input[0]", "has no type"),
            (json!([{"type": "wizard", "id": "w"}]), "input[0]", "has the type \"wizard\""),
            (
                json!([{"role": "tool", "content": ""}]),
                "input[0].role",
                "\"tool\", but must be user",
            ),
            (json!([{"role": "user"}]), "input[0].content", "is null, but must be a string"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
                "input[0].content[0]",
                "\"input_image\", but this model reads only text",
            ),
            (
                json!([{"type": "function_call", "name": "f", "arguments": "{}"}]),
                "input[0].call_id",
                "is null",
            ),
            (
                json!([{"type": "function_call_output", "output": ""}]),
                "input[0].call_id",
                "is null",
            ),
        ] {
            let error = parse_messages(input).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{error}");
            assert!(error.message.contains(why), "{error}");
        }
    }
}
