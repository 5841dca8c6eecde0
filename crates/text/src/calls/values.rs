//! Types arguments that a completion contains as plain text between tags, using the schema of their
//! tool.

use serde_json::{Map, Value};

use super::ParsedCall;
use super::python;
use crate::schema::{Schema, json_type};
use crate::{ToolCall, ToolSpec, python_json};

/// Returns the argument value that `text` represents, or `None` if the text is empty and the
/// parameter cannot be a string.
///
/// 1. A parameter that can only be a string is the text unchanged.
/// 2. Any other parameter is JSON of one of its types, including Python's `True`, `False` and
///    `None`.
/// 3. If the text is not JSON and the parameter cannot be a string, an array, an object or a number
///    is parsed as a Python literal. An integer may be written with a zero fraction.
/// 4. Any other text is a string, and so is a text that is not JSON if the types of the parameter
///    are unknown.
/// 5. A text that the schema lists is a string, unless the schema also lists the value that the
///    text represents.
fn parse_typed(schema: Schema<'_>, text: &str) -> Option<Value> {
    let types = schema.types();
    let allows = |name: &str| types.contains(name);
    let is_text = allows("string");
    let as_text = || Some(Value::String(text.to_owned()));
    if types.len() == 1 && is_text {
        return as_text();
    }
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return if types.is_empty() || is_text { as_text() } else { None };
    }
    let value = match trimmed {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        // Strings are written without quotation marks, so quotation marks are part of the text.
        json => serde_json::from_str(json).ok().filter(|value: &Value| !value.is_string()),
    };
    let literal = || {
        let lower = trimmed.to_lowercase();
        match lower.as_str() {
            "true" | "false" if allows("boolean") => Some(Value::Bool(lower == "true")),
            "null" | "none" if allows("null") => Some(Value::Null),
            _ if allows("array") || allows("object") => python::parse_container(trimmed),
            _ => None,
        }
        .or_else(|| python::parse_number(trimmed).filter(|_| allows("integer") || allows("number")))
    };
    let Some(value) = value.or_else(|| if is_text { None } else { literal() }) else {
        return as_text();
    };
    let value =
        if allows("integer") && !allows("number") && !is_text { to_integer(value) } else { value };
    let listed = schema.listed_values().unwrap_or_default();
    if !listed.contains(&value) && listed.iter().any(|value| value == text) {
        return as_text();
    }
    let kind = json_type(&value);
    let fits = types.is_empty() || allows(kind) || (kind == "integer" && allows("number"));
    if fits || !is_text { Some(value) } else { as_text() }
}

/// Converts a number with a zero fraction to an integer. Returns any other value unchanged.
fn to_integer(value: Value) -> Value {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let float =
        value.as_f64().filter(|float| json_type(&value) == "number" && float.fract() == 0.0);
    float.filter(|float| float.abs() < EXACT).map_or(value, |float| (float as i64).into())
}

/// Creates a call of the tool `name`, whose argument texts are parsed by the types in the tool's
/// schema. Empty arguments that cannot be strings are omitted.
pub(crate) fn make_typed_call(
    name: &str,
    arguments: Vec<(&str, &str)>,
    tools: &[ToolSpec],
) -> ParsedCall {
    let tool = tools.iter().find(|tool| tool.name == name);
    let properties =
        tool.map(|tool| Schema::from_document(&tool.parameters).properties()).unwrap_or_default();
    let unknown = Schema::from_document(&Value::Null);
    (
        name.to_owned(),
        arguments
            .into_iter()
            .filter_map(|(key, text)| {
                let schema = properties
                    .iter()
                    .find(|(name, _)| *name == key)
                    .map_or(unknown, |(_, schema)| *schema);
                Some((key.to_owned(), parse_typed(schema, text)?))
            })
            .collect::<Map<String, Value>>(),
    )
}

/// Returns the names of a tool's parameters, or `None` if the tool is unknown.
pub(crate) fn parameter_names<'a>(tool: &str, tools: &'a [ToolSpec]) -> Option<Vec<&'a str>> {
    let tool = tools.iter().find(|spec| spec.name == tool)?;
    Some(
        Schema::from_document(&tool.parameters)
            .properties()
            .into_iter()
            .map(|(name, _)| name)
            .collect(),
    )
}

/// Removes the quotation marks around a name.
pub(crate) fn strip_quotes(name: &str) -> &str {
    let name = name.trim();
    strip_quotation_marks(name, '"')
        .or_else(|| strip_quotation_marks(name, '\''))
        .map_or(name, str::trim)
}

fn strip_quotation_marks(name: &str, mark: char) -> Option<&str> {
    name.strip_prefix(mark).and_then(|name| name.strip_suffix(mark))
}

/// Splits the text after a parameter's opening tag into the value and the rest.
///
/// The value ends with the first closing tag that is followed by an opening tag or the end of the
/// call, so it may contain closing tags itself. An opening tag at the start of a line also ends the
/// value if the tag names a parameter (`is_parameter`), no such closing tag precedes it, and the
/// value closes fewer tags than it opens.
pub(crate) fn split_parameter_value<'a>(
    text: &'a str,
    [open, close]: [&str; 2],
    is_parameter: impl Fn(&str) -> bool,
) -> (&'a str, &'a str) {
    let closes = || text.match_indices(close).map(|(at, _)| at);
    let closed = closes().find(|at| {
        let after = text[at + close.len()..].trim_start();
        after.is_empty() || after.starts_with(open)
    });
    let before = &text[..closed.unwrap_or(text.len())];
    let opened_tags = || {
        before
            .match_indices(open)
            .map(|(at, _)| at)
            .filter(|at| before[..*at].trim_end_matches(' ').ends_with('\n'))
    };
    // An equal number of closing tags belongs to parameters that the value only mentions.
    let is_open = opened_tags().count() > before.matches(close).count();
    if let Some(opened) = opened_tags()
        .find(|at| {
            let after = &text[at + open.len()..];
            after.split_once('>').is_some_and(|(name, _)| is_parameter(strip_quotes(name)))
        })
        .filter(|_| is_open)
    {
        return text.split_at(opened);
    }
    // The caller reports other text after a tag.
    match closed.or_else(|| closes().next()) {
        Some(at) => (&text[..at], &text[at + close.len()..]),
        None => text.split_at(opened_tags().next().unwrap_or(text.len())),
    }
}

/// Returns the text of an argument's value: a string unchanged, any other value as JSON.
fn value_text(value: &Value) -> String {
    value.as_str().map_or_else(|| python_json::dumps(value), str::to_owned)
}

/// Returns the arguments of a call as JSON text.
pub(crate) fn arguments_json(call: &ToolCall) -> String {
    call.arguments.to_text()
}

/// Returns a call as the text of a JSON object, with its arguments under `key`, followed by `more`.
pub(crate) fn call_object_json(call: &ToolCall, key: &str, more: &str) -> String {
    let name = python_json::dumps(&Value::String(call.name.clone()));
    format!("{{\"name\": {name}, \"{key}\": {}{more}}}", arguments_json(call))
}

/// Returns the arguments of a call as text, each written by `argument` from its name and value.
/// Arguments that are not a JSON object are written unchanged, followed by `line`.
pub(crate) fn write_tagged(
    call: &ToolCall,
    line: &str,
    argument: impl Fn(&str, &str) -> String,
) -> String {
    let mut text: String =
        call.arguments.iter().map(|(key, value)| argument(key, &value_text(value))).collect();
    if let Some(unreadable) = call.arguments.unreadable() {
        text.push_str(&format!("{unreadable}{line}"));
    }
    text
}

/// Returns the text between `open` and `close` at the start of `text`, and the text after `close`.
/// Leading white space is skipped.
pub(crate) fn split_between<'a>(
    text: &'a str,
    open: &str,
    close: &str,
) -> Option<(&'a str, &'a str)> {
    text.trim_start().strip_prefix(open)?.split_once(close)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn argument_texts_are_typed_by_schema() {
        let string = json!({"type": "string"});
        for text in ["42", "\"a\"", "null", " a\n", "{\"a\": 1}", "True", "", "['a']", "+5"] {
            assert_eq!(parse_as(&string, text), Some(json!(text)));
            assert_eq!(parse_as(&json!({"enum": ["a", "b"]}), text), Some(json!(text)));
        }
        let [optional, either] =
            ["null", "array"].map(|other| json!({"anyOf": [string, {"type": other}]}));
        let integer = json!({"type": "integer"});
        let number = json!({"type": "number"});
        for (schema, text, want) in [
            (integer.clone(), " 42\n", json!(42)),
            (integer.clone(), "5.0", json!(5)),
            (integer.clone(), "-0", parse_json("-0")),
            (integer.clone(), "12345678901234567890123", parse_json("12345678901234567890123")),
            (number.clone(), "1e400", parse_json("1e400")),
            (json!({"type": ["integer", "string"]}), "1e400", json!("1e400")),
            (integer.clone(), "1e3", json!(1000)),
            (integer.clone(), "5.5", json!(5.5)),
            (integer.clone(), "+5", json!(5)),
            (integer.clone(), "1_000", json!(1000)),
            (integer.clone(), "007", json!(7)),
            (integer.clone(), "1,000", json!("1,000")),
            (integer.clone(), "0x10", json!("0x10")),
            (number.clone(), "42", json!(42)),
            (number.clone(), "4.5", json!(4.5)),
            (number.clone(), "5.0", json!(5.0)),
            (number.clone(), ".5", json!(0.5)),
            (number.clone(), "NaN", json!("NaN")),
            (number.clone(), "Infinity", json!("Infinity")),
            (json!({"type": ["integer", "number"]}), "5.0", json!(5.0)),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "false", json!(false)),
            (json!({"type": "boolean"}), "TRUE", json!(true)),
            (json!({"type": "boolean"}), "1", json!(1)),
            (json!({"type": "boolean"}), "yes", json!("yes")),
            (json!({"type": ["integer", "null"]}), "None", json!(null)),
            (json!({"type": ["integer", "null"]}), "NULL", json!(null)),
            (optional.clone(), "null", json!(null)),
            (optional.clone(), "None", json!(null)),
            (optional.clone(), "none", json!("none")),
            (optional.clone(), "42", json!("42")),
            (optional.clone(), "", json!("")),
            (either.clone(), "[1]", json!([1])),
            (either.clone(), "[1", json!("[1")),
            // A value that can be a string is a string before it is a Python literal.
            (either.clone(), "['a']", json!("['a']")),
            (json!({"type": ["string", "integer"]}), "42", json!(42)),
            (json!({"enum": ["1", "two", 3]}), "1", json!("1")),
            (json!({"enum": ["1", "two", 3]}), "3", json!(3)),
            (json!({"enum": ["1", 1]}), "1", json!(1)),
            (json!({"const": true}), "True", json!(true)),
            (json!({"type": ["string", "integer"]}), "5.0", json!("5.0")),
            (json!({"type": "array"}), "['a', 'b']", json!(["a", "b"])),
            (json!({"type": "array"}), "('a', 1)", json!(["a", 1])),
            (json!({"type": "array"}), "[a]", json!("[a]")),
            (json!({"type": "object"}), "{\"a\": [null]}", json!({"a": [null]})),
            (json!({"type": "object"}), "{'a': True}", json!({"a": true})),
            // Of another type than the schema requires, or not JSON: the tool may report it.
            (integer.clone(), "[1]", json!([1])),
            (integer.clone(), "many", json!("many")),
            (integer.clone(), "\"42\"", json!("\"42\"")),
            (Value::Null, "42", json!(42)),
            (Value::Null, "two", json!("two")),
            (Value::Null, "['a']", json!("['a']")),
            (json!({}), "", json!("")),
        ] {
            assert_eq!(parse_as(&schema, text), Some(want), "{schema} {text}");
        }
        for schema in
            [integer, number, json!({"type": "array"}), json!({"type": ["object", "null"]})]
        {
            assert_eq!([parse_as(&schema, ""), parse_as(&schema, " \n")], [None, None], "{schema}");
        }
    }

    fn parse_json(number: &str) -> Value {
        serde_json::from_str(number).unwrap()
    }

    fn parse_as(schema: &Value, text: &str) -> Option<Value> {
        parse_typed(Schema::from_document(schema), text)
    }

    #[test]
    fn parameter_value_ends_before_next_parameter() {
        let value = |text| split_parameter_value(text, ["<p=", "</p>"], |name| name == "b");
        for (text, want, rest) in [
            ("1</p>", "1", ""),
            ("1</p>\n<p=b>2</p>", "1", "\n<p=b>2</p>"),
            ("1</p><p=x>2</p>", "1", "<p=x>2</p>"),
            ("a </p> b</p>", "a </p> b", ""),
            ("a <p=b> c</p>", "a <p=b> c", ""),
            ("a\n<p=x>1</p>\n</p>", "a\n<p=x>1</p>\n", ""),
            ("1\n<p=b>\n2</p>", "1\n", "<p=b>\n2</p>"),
            ("a\n<p=b>\n1\n</p>\n</p>", "a\n<p=b>\n1\n</p>\n", ""),
            ("1\n<p=b>\n2</p>\n<p=c>3</p>", "1\n", "<p=b>\n2</p>\n<p=c>3</p>"),
            ("1\n<p=\"b\">\n2</p>", "1\n", "<p=\"b\">\n2</p>"),
            ("1\n<p=x>\n2", "1\n", "<p=x>\n2"),
            ("1\n", "1\n", ""),
            ("1</p> junk", "1", " junk"),
            ("", "", ""),
        ] {
            assert_eq!(value(text), (want, rest), "{text}");
        }
    }

    #[test]
    fn matching_quotation_marks_are_removed() {
        for (name, want) in [
            ("\"log\"", "log"),
            ("'log'", "log"),
            (" log ", "log"),
            ("\"log", "\"log"),
            ("\"log'", "\"log'"),
            ("\"", "\""),
        ] {
            assert_eq!(strip_quotes(name), want);
        }
    }
}
