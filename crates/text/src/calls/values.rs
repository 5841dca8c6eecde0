//! Arguments that stand in a reply as bare text, typed by the schema of their tool.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::Written;
use crate::{ToolCall, ToolSpec, python_json};

/// The value that `text` stands for. A parameter that can only be a string is the text as it is; another is
/// JSON of one of its types, Python's `True`, `False` and `None` included. Where the text is none, and where
/// nothing is known of the parameter and the text is no JSON, it is a string.
fn typed(schema: &Value, text: &str) -> Value {
    let types = types(schema);
    let as_text = || Value::String(text.to_owned());
    if types.len() == 1 && types.contains("string") {
        return as_text();
    }
    let value = match text.trim() {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        json => serde_json::from_str(json).unwrap_or(Value::Null),
    };
    let kind = kind(&value);
    let is_null = matches!(text.trim(), "null" | "None");
    let fits = types.is_empty() || types.contains(kind) || (kind == "integer" && types.contains("number"));
    // Strings are written as they are, so quotation marks are part of them.
    let readable = !value.is_string() && (!value.is_null() || is_null);
    if readable && (fits || !types.contains("string")) { value } else { as_text() }
}

/// The name of a value's type in a schema.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.as_str().contains(['.', 'e']) => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The types that a schema allows; none where it does not say.
pub(super) fn types(schema: &Value) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    match &schema["type"] {
        Value::String(kind) => drop(found.insert(kind.as_str())),
        Value::Array(kinds) => found.extend(kinds.iter().filter_map(Value::as_str)),
        _ => {
            let values = schema["enum"].as_array().into_iter().flatten().chain(schema.get("const"));
            found.extend(values.map(|value| -> &str { kind(value) }));
            for key in ["anyOf", "oneOf", "allOf"] {
                found.extend(schema[key].as_array().into_iter().flatten().flat_map(types));
            }
        }
    }
    found
}

/// A call of `name` with arguments as they were written.
pub(crate) fn call_of(name: &str, arguments: Vec<(&str, &str)>, tools: &[ToolSpec]) -> Written {
    let tool = tools.iter().find(|tool| tool.name == name);
    let properties = tool.map_or(&Value::Null, |tool| &tool.parameters["properties"]);
    let value = |(key, text): (&str, &str)| (key.to_owned(), typed(&properties[key], text));
    (name.to_owned(), arguments.into_iter().map(value).collect::<Map<String, Value>>())
}

/// The text that an argument is written as.
pub(crate) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| python_json::dumps(value), str::to_owned)
}

/// The arguments of a call as JSON.
pub(crate) fn arguments(call: &ToolCall) -> String {
    python_json::dumps(&Value::Object(call.arguments.clone()))
}

/// Text between `open` and `close` at the beginning of `text`, and what follows. White space before does not
/// matter.
pub(crate) fn between<'a>(text: &'a str, open: &str, close: &str) -> Option<(&'a str, &'a str)> {
    text.trim_start().strip_prefix(open)?.split_once(close)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_are_typed_by_the_schema() {
        let read = |number: &str| -> Value { serde_json::from_str(number).unwrap() };
        let string = json!({"type": "string"});
        for text in ["42", "\"a\"", "null", " a\n", "{\"a\": 1}", "True", ""] {
            assert_eq!(typed(&string, text), json!(text));
            assert_eq!(typed(&json!({"enum": ["a", "b"]}), text), json!(text));
        }
        for (schema, text, want) in [
            (json!({"type": "integer"}), " 42\n", json!(42)),
            (json!({"type": "number"}), "42", json!(42)),
            (json!({"type": "number"}), "4.5", json!(4.5)),
            (json!({"type": "integer"}), "12345678901234567890123", read("12345678901234567890123")),
            (json!({"type": "number"}), "1e400", read("1e400")),
            (json!({"type": ["integer", "string"]}), "1e400", json!("1e400")),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "false", json!(false)),
            (json!({"type": ["integer", "null"]}), "None", json!(null)),
            (json!({"type": ["string", "null"]}), "null", json!(null)),
            (json!({"type": ["string", "null"]}), "42", json!("42")),
            (json!({"anyOf": [{"type": "string"}, {"type": "array"}]}), "[1]", json!([1])),
            (json!({"anyOf": [{"type": "string"}, {"type": "array"}]}), "[1", json!("[1")),
            (json!({"type": "object"}), "{\"a\": [null]}", json!({"a": [null]})),
            // Of another type than it should be, or no JSON at all: the tool may say so.
            (json!({"type": "integer"}), "[1]", json!([1])),
            (json!({"type": "integer"}), "many", json!("many")),
            (json!({"type": "integer"}), "\"42\"", json!("\"42\"")),
            (Value::Null, "42", json!(42)),
            (Value::Null, "two", json!("two")),
            (json!({}), "", json!("")),
        ] {
            assert_eq!(typed(&schema, text), want, "{schema} {text}");
        }
    }
}
