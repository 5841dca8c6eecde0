//! Opens fields that contain JSON as a string, which is common if Arrow or a table has no column
//! type for a value.

use serde_json::{Map, Value};

use super::json;

/// Parses a list of messages from a string: JSON of a list of objects with a role, a list of JSON
/// strings of such objects, or an object that contains only such a list. Returns `None` if the
/// string is a plain question.
///
/// # Errors
/// Returns the expected form if the string was meant as a list of messages but is not valid.
pub(super) fn parse_message_text(text: &str) -> Result<Option<Value>, &'static str> {
    let text = json::strip_byte_order_mark(text);
    if !text.trim_start().starts_with(['[', '{', '"', 'a', '(']) {
        return Ok(None);
    }
    match json::parse_lenient(text) {
        Ok(value) => find_messages(value),
        Err(_) if is_python_list(text) => Err(
            "the JSON of a list of messages, not a list as Python prints it: save the list with \
                 json.dumps",
        ),
        Err(error)
            if starts_messages(text)
                && (error.is_eof() || text.trim_end().ends_with(['}', ']'])) =>
        {
            Err(
                "the complete JSON of a list of messages; this text is truncated or not JSON: save \
                 the list with json.dumps",
            )
        }
        Err(_) => Ok(None),
    }
}

/// Returns whether a text starts like the JSON of a message or of a list of messages.
fn starts_messages(text: &str) -> bool {
    let start = text.trim_start().trim_start_matches('[').trim_start();
    let name = start.strip_prefix('{').map(str::trim_start);
    let names = ["\"role\"", "\"from\"", "\"content\"", "\"value\""];
    name.is_some_and(|name| names.iter().any(|known| name.starts_with(known)))
}

/// Returns the list of messages that a parsed value contains, or `None` if the value contains no
/// messages.
fn find_messages(value: Value) -> Result<Option<Value>, &'static str> {
    match value {
        Value::Array(items) => {
            let items = items.into_iter().map(|item| match item {
                Value::String(text) => json::parse_lenient(&text).unwrap_or(Value::String(text)),
                item => item,
            });
            let items: Vec<Value> = items.collect();
            match items.iter().filter(|item| is_message(item)).count() {
                0 => Ok(None),
                count if count == items.len() => Ok(Some(Value::Array(items))),
                _ => Err("a list of messages, each with `role` and `content`"),
            }
        }
        // JSON of a string that is itself JSON.
        Value::String(text) => parse_message_text(&text),
        Value::Object(mut fields) if fields.len() == 1 => {
            let inner = ["messages", "conversations", "prompt"]
                .iter()
                .find_map(|name| fields.remove(*name));
            inner.map_or(Ok(None), find_messages)
        }
        Value::Object(fields) => {
            let message = Value::Object(fields);
            Ok(is_message(&message).then(|| Value::Array(vec![message])))
        }
        _ => Ok(None),
    }
}

fn is_message(item: &Value) -> bool {
    let has = |names: &[&str]| names.iter().any(|name| item.get(*name).is_some());
    has(&["role", "from"]) && has(&["content", "value", "tool_calls"])
}

/// Returns whether a text is a list of messages in the notation of Python.
fn is_python_list(text: &str) -> bool {
    let text = text.trim();
    let within = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    let is_tuple = within("({", "})") || within("({", "},)");
    let is_printed =
        is_tuple || within("[{", "}]") || within("{'", "}") || text.starts_with("array([{");
    is_printed
        && (text.contains("'role'") && text.contains("'content'")
            || text.contains("'from'") && text.contains("'value'"))
}

/// Parses the column of a nested path if the column contains the JSON of an object or a list as a
/// string. Returns the name and the original text of the column if it was replaced.
///
/// # Errors
/// Returns the column and its expected form if it is an object in Python's notation.
pub(super) fn parse_json_column<'p>(
    row: &mut Map<String, Value>,
    path: &'p str,
) -> Result<Option<(&'p str, String)>, (&'p str, &'static str)> {
    if row.contains_key(path) {
        return Ok(None);
    }
    let Some((column, _)) = path.split_once('.') else { return Ok(None) };
    let Some(Value::String(text)) = row.get(column) else { return Ok(None) };
    match json::parse_lenient(text) {
        Ok(value @ (Value::Object(_) | Value::Array(_))) => {
            let text = text.clone();
            row.insert(column.to_owned(), value);
            Ok(Some((column, text)))
        }
        Err(_) if is_printed_list(text, '{', '}') => Err((
            column,
            "a JSON object, not a dictionary as Python prints it: save the dictionary with \
             json.dumps",
        )),
        _ => Ok(None),
    }
}

/// Parses a column of answer options that contains the JSON of a list or an object as a string.
/// Returns the original text if the column was replaced.
pub(super) fn parse_json_options(row: &mut Map<String, Value>, column: &str) -> Option<String> {
    let Some(Value::String(text)) = row.get(column) else { return None };
    let value =
        json::parse_lenient(text).ok().filter(|value| value.is_array() || value.is_object())?;
    let text = text.clone();
    row.insert(column.to_owned(), value);
    Some(text)
}

/// Returns whether an expected answer is the notation of a list of right answers. A list of tests
/// (with `assert`) does not count.
pub(super) fn is_list_of_answers(answer: &str) -> bool {
    is_printed_list(answer, '[', ']') && !answer.contains("assert")
}

/// Returns whether a text is the notation of a list or object of strings, in JSON or Python,
/// between the brackets `open` and `close`.
pub(super) fn is_printed_list(text: &str, open: char, close: char) -> bool {
    let inside = text.trim().strip_prefix(open).and_then(|text| text.strip_suffix(close));
    inside.is_some_and(|inside| inside.trim_start().starts_with(['\'', '"']))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_text_of_messages_is_parsed() {
        let chat = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]);
        let items: Vec<String> = chat.as_array().unwrap().iter().map(Value::to_string).collect();
        let call =
            json!([{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "x"}]);
        let sharegpt = json!([{"from": "human", "value": "Hi"}]);
        for (text, want) in [
            (chat.to_string(), &chat),
            (format!("\n {chat}\t"), &chat),
            (serde_json::to_string_pretty(&chat).unwrap(), &chat),
            (json!(chat.to_string()).to_string(), &chat),
            (json!(items).to_string(), &chat),
            (json!({"messages": chat}).to_string(), &chat),
            (call.to_string(), &call),
            (sharegpt.to_string(), &sharegpt),
            (sharegpt[0].to_string(), &sharegpt),
            (format!("\u{feff}{chat}"), &chat),
        ] {
            assert_eq!(parse_message_text(&text).unwrap().as_ref(), Some(want), "{text}");
        }
    }

    #[test]
    fn questions_similar_to_json_stay_unchanged() {
        for text in [
            "[1, 2, 3]",
            "[]",
            "{\"a\": 1}",
            "[{\"name\": \"x\"}]",
            "[{\"role\": \"user\"}]",
            "[x] What is the sum?",
            "{\"role\": \"king\"}: who is it?",
            "\"Quoted\"",
            "What does [{'role': 'user', 'content': 'x'}] mean?",
        ] {
            assert_eq!(parse_message_text(text), Ok(None), "{text}");
        }
        for text in [
            "[{'role': 'user', 'content': \"What's 1+1?\"}]",
            "[{'content': 'x', 'role': 'user'}\n {'content': 'y', 'role': 'assistant'}]",
            "array([{'from': 'human', 'value': 'x'}], dtype=object)",
            "({'role': 'system', 'content': 'x'}, {'role': 'user', 'content': 'y'})",
            "({'role': 'user', 'content': 'y'},)",
            "{'role': 'user', 'content': 'Hi'}",
            "[{\"role\": \"user\", \"content\": \"cut sh",
            "[{\"role\": \"user\", \"content\": \"two\nlines\"}]",
            "[{\"content\": None, \"role\": \"user\"}]",
        ] {
            assert!(parse_message_text(text).unwrap_err().contains("json.dumps"), "{text}");
        }
        assert!(parse_message_text("[{\"role\": \"user\", \"content\": \"a\"}, 5]").is_err());
    }
    #[test]
    fn lone_surrogate_in_json_messages_is_replaced() {
        let text = r#"[{"role": "user", "content": "a \ud83d b"}]"#;
        assert_eq!(parse_message_text(text).unwrap().unwrap()[0]["content"], "a \u{fffd} b");
    }

    #[test]
    fn json_columns_of_objects_are_parsed() {
        let mut json = extra_info_row("{\"a\": 18446744073709551617}");
        assert_eq!(parse_json_column(&mut json, "extra_info.").unwrap().unwrap().0, "extra_info");
        assert_eq!(json["extra_info"].to_string(), "{\"a\":18446744073709551617}");
        for text in ["free text", "[x]", "{x}", "7"] {
            assert!(
                parse_json_column(&mut extra_info_row(text), "extra_info.").unwrap().is_none(),
                "{text}"
            );
        }
        let (column, why) =
            parse_json_column(&mut extra_info_row("{'a': None}"), "extra_info.").unwrap_err();
        assert!(column == "extra_info" && why.contains("json.dumps"), "{why}");
    }

    fn extra_info_row(text: &str) -> Map<String, Value> {
        Map::from_iter([("extra_info".to_owned(), Value::from(text))])
    }
}
