//! Conversion of MCP results into tool results.
//!
//! Results are accepted in all formats that servers send: several content blocks, one block, a
//! text, or only `structuredContent`. Content that is not text is replaced by its type.
//! `structuredContent` follows the text, unless the text already contains the same JSON.

use levade_text::ContentPart;
use rmcp::ServiceError;
use rmcp::model::{CallToolResult, ErrorCode};
use serde_json::{Map, Value, json};

use super::connection::CallFailure;
use super::ledger::{RAW_RESULT_KEY, UNREADABLE_RESPONSE, error_text, shorten};
use super::{lenient, reasons};
use crate::{CallError, ToolOutput};

/// Fields of a call's result that are not part of the tool's value.
const ENVELOPE: [&str; 3] = ["_meta", "isError", "resultType"];

/// Converts the server's response to a call into a tool result.
pub(super) fn to_tool_output(
    server: &str,
    tool: &str,
    call_response: Result<CallToolResult, CallFailure>,
) -> ToolOutput {
    match call_response {
        Ok(result) => parse_result(server, raw_result(result)),
        Err(CallFailure { error: ServiceError::McpError(error), .. })
            if error.code == UNREADABLE_RESPONSE =>
        {
            unavailable_output(server, &error.message)
        }
        Err(CallFailure { error: ServiceError::McpError(error), .. }) => {
            let kind = match error.code {
                ErrorCode::INVALID_PARAMS => CallError::BadArguments,
                _ => CallError::Failed,
            };
            ToolOutput::error(kind, error_text(&error))
        }
        Err(CallFailure { error: ServiceError::Timeout { timeout }, .. }) => ToolOutput::error(
            CallError::Late,
            format!(
                "{tool} did not answer within {timeout:?} after its start or its last progress \
                 report"
            ),
        ),
        Err(CallFailure { error, exit_text: over }) => {
            unavailable_output(server, &format!("{}{over}", reasons::call_reason(&error)))
        }
    }
}

/// Creates the tool result of a call to which the server did not respond.
pub(super) fn unavailable_output(server: &str, why: &str) -> ToolOutput {
    ToolOutput::error(
        CallError::Unavailable,
        format!("the MCP server {server:?} gave no valid response: {why}"),
    )
}

/// Converts the result of a call to JSON, as the server sent it.
fn raw_result(result: CallToolResult) -> Value {
    match result.structured_content {
        Some(Value::Object(mut fields)) => fields.remove(RAW_RESULT_KEY).unwrap_or_default(),
        _ => Value::Null,
    }
}

fn parse_result(server: &str, result: Value) -> ToolOutput {
    let fields = match result {
        Value::Object(fields) => fields,
        Value::Null => Map::new(),
        content => Map::from_iter([("content".to_owned(), content)]),
    };
    if let Some(kind) =
        fields.get("resultType").and_then(Value::as_str).filter(|kind| *kind != "complete")
    {
        let why = format!(
            "the server's response is of the type {kind:?}, which is not supported: the server \
             requests input from the user, or continues in the background"
        );
        return unavailable_output(server, &why);
    }
    let is_block = fields.contains_key("type") && !fields.contains_key("content");
    let structured =
        ["structuredContent", "toolResult"].into_iter().find_map(|key| fields.get(key)).cloned();
    // Without either field, the remaining fields are the value that the tool means to return.
    let other = fields.iter().filter(|(key, _)| !ENVELOPE.contains(&key.as_str()));
    let other: Map<String, Value> =
        other.map(|(key, value)| (key.clone(), value.clone())).collect();
    let structured = structured.or_else(|| {
        (!other.is_empty() && !is_block && !fields.contains_key("content"))
            .then_some(Value::Object(other))
    });
    let is_error = fields.get("isError").is_some_and(is_true);
    let mut parts: Vec<ContentPart> = match fields.get("content").cloned().unwrap_or_default() {
        Value::Null if is_block => vec![to_content_part(Value::Object(fields))],
        Value::Null => Vec::new(),
        Value::Array(blocks) => blocks.into_iter().map(to_content_part).collect(),
        block => vec![to_content_part(block)],
    };
    if let Some(structured) =
        structured.filter(|structured| !contains_structured(structured, &parts))
    {
        parts.push(ContentPart::Text(structured.to_string()));
    }
    // Each block becomes a separate paragraph.
    for at in 1..parts.len() {
        let (before, after) = parts.split_at_mut(at);
        if let (Some(ContentPart::Text(text)), Some(ContentPart::Text(_))) =
            (before.last_mut(), after.first())
            && !text.ends_with('\n')
        {
            text.push('\n');
        }
    }
    if is_error
        && parts
            .iter()
            .all(|part| matches!(part, ContentPart::Text(text) if text.trim().is_empty()))
    {
        return ToolOutput::error(CallError::Failed, "the tool failed");
    }
    let error = is_error.then_some(CallError::Failed);
    ToolOutput { parts, error, ..ToolOutput::default() }
}

/// Returns whether a JSON flag is set. Servers also write flags as numbers or strings.
fn is_true(flag: &Value) -> bool {
    match flag {
        Value::Bool(flag) => *flag,
        Value::Number(flag) => flag.as_f64() != Some(0.0),
        Value::String(flag) => !["", "0", "false"].contains(&flag.trim().to_lowercase().as_str()),
        _ => false,
    }
}

/// Returns whether the text parts already contain `structuredContent`: its JSON equals one text, or
/// all texts together. A server that must wrap a value in an object, as `{"result": VALUE}`, shows
/// the bare value as text, and a list as one block per item.
fn contains_structured(structured: &Value, parts: &[ContentPart]) -> bool {
    let texts: Vec<&str> = parts
        .iter()
        .filter_map(|part| match part {
            ContentPart::Text(text) => Some(text.as_str()),
            ContentPart::Other(_) => None,
        })
        .collect();
    let all = |items: &Value| {
        let items =
            items.as_array().filter(|items| !items.is_empty() && items.len() == texts.len());
        items.is_some_and(|items| {
            items.iter().zip(&texts).all(|(item, text)| text_equals(item, text))
        })
    };
    let is_in_text = |value: &Value| {
        texts.iter().any(|text| text_equals(value, text))
            || text_equals(value, &texts.concat())
            || all(value)
    };
    let wrapped = structured.as_object().filter(|fields| fields.len() == 1);
    let wrapped = wrapped.and_then(|fields| fields.get("result"));
    let is_empty = structured.is_null() || structured.as_object().is_some_and(Map::is_empty);
    is_in_text(structured) || wrapped.is_some_and(is_in_text) || (is_empty && !texts.is_empty())
}

fn text_equals(value: &Value, text: &str) -> bool {
    value.as_str().is_some_and(|value| value == text)
        || lenient::parse(text.as_bytes()).is_ok_and(|text| equal_json(&text, value))
}

/// Returns whether two JSON values are equal, ignoring the order of keys and the format of numbers.
fn equal_json(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a == b || (a.is_f64() != b.is_f64() && a.as_f64() == b.as_f64())
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal_json(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| equal_json(a, b)))
        }
        _ => a == b,
    }
}

/// Converts a content block of an MCP result to a content part.
fn to_content_part(block: Value) -> ContentPart {
    let Value::Object(fields) = &block else { return ContentPart::Text(text_of(&block)) };
    let resource = if block["resource"].is_object() { &block["resource"] } else { &block };
    match fields.get("type").and_then(Value::as_str) {
        Some("text") => ContentPart::Text(fields.get("text").map(text_of).unwrap_or_default()),
        // The data is dropped, because it would only enlarge the recorded attempt.
        Some(kind @ ("image" | "audio")) => {
            to_json_part(json!({ "type": kind, "mime_type": mime_type(&block) }))
        }
        Some("resource_link") => {
            let of = |key: &str| block[key].as_str().unwrap_or_default();
            let name = if of("name").is_empty() { of("uri") } else { of("name") };
            let about = if of("description").is_empty() { "" } else { ": " };
            ContentPart::Text(format!("[{name}]({}){about}{}", of("uri"), of("description")))
        }
        Some("resource") => match &resource["text"] {
            Value::Null => to_json_part(
                json!({ "type": "resource", "uri": resource["uri"], "mime_type": mime_type(resource) }),
            ),
            shown => ContentPart::Text(text_of(shown)),
        },
        // A block of an unknown type is shown as its text, if it has one.
        Some(kind) => match fields.get("text") {
            Some(Value::String(text)) => ContentPart::Text(text.clone()),
            _ => to_json_part(json!({ "type": shorten(kind) })),
        },
        // This is not a content block but the value that the tool means to return.
        None => match fields.get("text") {
            Some(found @ Value::String(_)) if fields.len() == 1 => {
                ContentPart::Text(text_of(found))
            }
            _ => ContentPart::Text(block.to_string()),
        },
    }
}

fn to_json_part(value: Value) -> ContentPart {
    match value {
        Value::Object(part) => ContentPart::Other(part),
        _ => ContentPart::Other(Map::new()),
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn mime_type(of: &Value) -> Value {
    of.get("mimeType").cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown_text(result: Value) -> String {
        parse_result("s", result).read()
    }

    fn text(text: &str) -> Value {
        json!({ "type": "text", "text": text })
    }

    #[test]
    fn structured_content_follows_different_text() {
        for (content, structured, want) in [
            (
                json!([text("2 found.")]),
                json!({ "items": ["a", "b"] }),
                "2 found.\n{\"items\":[\"a\",\"b\"]}",
            ),
            (json!([]), json!({ "sum": 3 }), "{\"sum\":3}"),
            (json!(null), json!([1, 2]), "[1,2]"),
            (json!([text("2")]), json!({ "a": 2 }), "2\n{\"a\":2}"),
            (json!([text("see"), text("below")]), json!({ "a": 2 }), "see\nbelow\n{\"a\":2}"),
            (json!([text("{\"a\": 2}")]), json!({ "a": 3 }), "{\"a\": 2}\n{\"a\":3}"),
            (
                json!([text("{\"a\": 2}")]),
                json!({ "a": 2, "b": 1 }),
                "{\"a\": 2}\n{\"a\":2,\"b\":1}",
            ),
            (json!([text("2")]), json!({ "result": 3 }), "2\n{\"result\":3}"),
            (
                json!([text("a")]),
                json!({ "result": "a", "more": 1 }),
                "a\n{\"result\":\"a\",\"more\":1}",
            ),
            (json!([text("a")]), json!({ "result": ["a", "b"] }), "a\n{\"result\":[\"a\",\"b\"]}"),
            (json!([text("1")]), json!({ "count": 1 }), "1\n{\"count\":1}"),
        ] {
            let result = json!({ "content": content, "structuredContent": structured });
            assert_eq!(shown_text(result), want);
        }
    }

    #[test]
    fn equal_structured_content_is_shown_once() {
        for (content, structured, want) in [
            (
                json!([text("{\"b\": 1, \"a\": 2.0}")]),
                json!({ "a": 2, "b": 1 }),
                "{\"b\": 1, \"a\": 2.0}",
            ),
            (json!([text("{\n \"a\": [1]\n}\n")]), json!({ "a": [1] }), "{\n \"a\": [1]\n}\n"),
            (json!([text("Found."), text("{\"a\":1}")]), json!({ "a": 1 }), "Found.\n{\"a\":1}"),
            (json!([text("hello")]), json!({ "result": "hello" }), "hello"),
            (json!([text("5")]), json!({ "result": 5 }), "5"),
            (json!([text("a"), text("b")]), json!({ "result": ["a", "b"] }), "a\nb"),
            (
                json!([text("{\"x\":1}"), text("{\"x\":2}")]),
                json!({ "result": [{ "x": 1 }, { "x": 2 }] }),
                "{\"x\":1}\n{\"x\":2}",
            ),
            (json!([text("[1,"), text("2]")]), json!([1, 2]), "[1,\n2]"),
            (json!([text("{\"a\": NaN}")]), json!({ "a": null }), "{\"a\": NaN}"),
            (json!([text("hello")]), json!({}), "hello"),
            (json!([text("hello")]), json!(null), "hello"),
        ] {
            let result = json!({ "content": content, "structuredContent": structured });
            assert_eq!(shown_text(result), want);
        }
    }

    #[test]
    fn mcp_error_results_show_text_and_structured_content() {
        let both = json!({ "content": [text("no such city")], "structuredContent": { "near": "Rome" }, "isError": true });
        assert_eq!(failed_text(both), "no such city\n{\"near\":\"Rome\"}");
        assert_eq!(
            failed_text(json!({ "structuredContent": { "code": 7 }, "isError": true })),
            "{\"code\":7}"
        );
        for empty in [json!([]), json!([text(" \n")]), json!(null), json!([{ "type": "text" }])] {
            assert_eq!(
                failed_text(json!({ "content": empty, "isError": true })),
                "the tool failed"
            );
        }
        let image =
            json!({ "content": [{ "type": "image", "mimeType": "image/png" }], "isError": true });
        assert!(failed_text(image).contains("\"image\""));
        for (flag, error) in [
            (json!(1), Some(CallError::Failed)),
            (json!("True"), Some(CallError::Failed)),
            (json!(0), None),
            (json!("false"), None),
            (json!(null), None),
            (json!(false), None),
        ] {
            assert_eq!(
                parse_result("s", json!({ "content": [text("x")], "isError": flag })).error,
                error,
                "{flag}"
            );
        }
    }

    fn failed_text(result: Value) -> String {
        let output = parse_result("s", result);
        assert_eq!(output.error, Some(CallError::Failed));
        output.read()
    }

    #[test]
    fn every_content_block_type_is_shown_or_named() {
        for (content, want) in [
            (
                json!([{ "type": "video", "data": "AAAA" }, text("after")]),
                unshown("video") + "after",
            ),
            (
                json!([text("before"), { "type": "chart_v2" }]),
                format!("before\n{}", unshown("chart_v2")),
            ),
            (
                json!([{ "type": "image", "data": "AAAA" }, text("a cat")]),
                unshown("image") + "a cat",
            ),
            (json!([{ "type": "image", "data": 5 }]), unshown("image")),
            (json!("plain"), "plain".to_owned()),
            (json!(text("single")), "single".to_owned()),
            (json!(["a", "b"]), "a\nb".to_owned()),
            (json!([{ "type": "text", "text": null }]), String::new()),
            (json!([{ "type": "text", "text": 5 }]), "5".to_owned()),
            (json!([{ "type": "text", "text": { "a": 1 } }]), "{\"a\":1}".to_owned()),
            (json!([{ "text": "no type" }]), "no type".to_owned()),
            (json!([{ "a": 1 }]), "{\"a\":1}".to_owned()),
            (
                json!([{ "type": "resource", "resource": { "uri": "f:1", "text": "body" } }]),
                "body".to_owned(),
            ),
            (
                json!([{ "type": "resource", "resource": { "uri": "f:1", "blob": "AA" } }]),
                unshown("resource"),
            ),
            (
                json!([{ "type": "resource_link", "uri": "x:1", "name": "report" }]),
                "[report](x:1)".to_owned(),
            ),
            (json!([{ "type": "resource_link", "uri": "x:1" }]), "[x:1](x:1)".to_owned()),
            (
                json!([{ "type": "resource_link", "uri": "x:1", "name": "report", "description": "of May" }]),
                "[report](x:1): of May".to_owned(),
            ),
            (json!([{ "type": "resource", "uri": "f:1", "text": "body" }]), "body".to_owned()),
            (json!([{ "type": "output_text", "text": "said" }, text("b")]), "said\nb".to_owned()),
        ] {
            assert_eq!(shown_text(json!({ "content": content })), want);
        }
        assert_eq!(shown_text(json!("bare text")), "bare text");
        assert_eq!(shown_text(json!([text("a list")])), "a list");
        assert_eq!(shown_text(text("a block")), "a block");
        assert_eq!(shown_text(json!(null)), "");
        assert_eq!(shown_text(json!({ "toolResult": { "x": 1 } })), "{\"x\":1}");
        assert_eq!(shown_text(json!({ "answer": 42, "_meta": { "a": 1 } })), "{\"answer\":42}");
        assert_eq!(shown_text(json!({ "_meta": { "a": 1 } })), "");
        let input_required =
            parse_result("s", json!({ "resultType": "input_required", "inputRequests": {} }));
        assert_eq!(input_required.error, Some(CallError::Unavailable));
    }

    fn unshown(kind: &str) -> String {
        format!("[a part of type {kind:?}, which cannot be shown]\n")
    }
}
