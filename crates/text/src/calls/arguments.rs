//! Parses calls whose name and arguments are JSON.

use serde_json::{Map, Value};

use super::ParsedCall;
use crate::message::arguments_object;

/// Parses a JSON object with a tool's name and arguments as a call. The arguments can be under any
/// of `keys`, can be a string that contains the object as JSON, and may be missing if the call has
/// only a name. Other keys are ignored.
pub(crate) fn parse_call_object(value: Value, keys: &[&str]) -> Result<ParsedCall, String> {
    let key = keys.first().copied().unwrap_or("arguments");
    let Value::Object(mut map) = value else {
        return Err(format!("the call is not a JSON object with \"name\" and {key:?}"));
    };
    let name = match map.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => name,
        Some(Value::String(_)) => return Err("\"name\" is empty".into()),
        Some(other) => return Err(format!("\"name\" is {other}, but must be a string")),
        None => return Err("\"name\" is missing".into()),
    };
    let arguments = match keys.iter().find_map(|key| map.remove(*key)) {
        Some(arguments) => arguments_object(arguments)?,
        None if map.is_empty() => Map::new(),
        None => {
            let found: Vec<String> = map.keys().map(|key| format!("{key:?}")).collect();
            return Err(format!("{key:?} is missing; the call has only {}", found.join(", ")));
        }
    };
    Ok((name, arguments))
}

/// Parses the JSON arguments of a call of the tool `name`.
pub(crate) fn parse_arguments(name: &str, json: &str) -> Result<ParsedCall, String> {
    if name.is_empty() {
        return Err("the tool's name is missing".into());
    }
    let value = serde_json::from_str(json)
        .map_err(|error| format!("the arguments are not valid JSON: {error}"))?;
    Ok((name.to_owned(), arguments_object(value)?))
}

/// Explains why a call's text up to the tag `close` is not valid JSON. `closed` is whether the tag
/// is present.
pub(crate) fn unclosed_json_error(text: &str, close: &str, closed: bool) -> String {
    match text.strip_suffix(close).filter(|_| closed) {
        Some(body) => invalid_json_error(body),
        None => format!("{close} is missing"),
    }
}

/// Explains why the text between the tags of a call is not valid JSON.
pub(crate) fn invalid_json_error(body: &str) -> String {
    let body = body.trim();
    if body.is_empty() {
        return "there is nothing between the tags; a call is a JSON object".into();
    }
    match serde_json::from_str::<Value>(body) {
        Err(error) => format!("the call is not valid JSON: {error}"),
        Ok(Value::Object(_)) => "the JSON ends before the closing tag".into(),
        Ok(_) => "the call is not a JSON object".into(),
    }
}
