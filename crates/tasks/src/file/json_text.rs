//! Fields that hold JSON as a text, as people save what Arrow or a table has no column for.

use serde_json::{Map, Value};

use super::json;

/// Returns the messages that a text is the JSON of: a list of objects with a role, of the JSON of such
/// objects, or a table with such a list alone. `None` if the text is a question as it stands.
///
/// # Errors
/// Returns what the text must be if it was meant as such a list, and is none.
pub(super) fn messages(text: &str) -> Result<Option<Value>, &'static str> {
    let text = json::without_mark(text);
    if !text.trim_start().starts_with(['[', '{', '"', 'a', '(']) {
        return Ok(None);
    }
    match json::lenient(text) {
        Ok(value) => listed(value),
        Err(_) if is_python(text) => {
            Err("JSON where it is a list of messages; this is how Python prints one: \
             save it with json.dumps")
        }
        Err(error) if begins_messages(text) && (error.is_eof() || text.trim_end().ends_with(['}', ']'])) => {
            Err("JSON where it is a list of messages; it is cut short, or no JSON: save it with json.dumps")
        }
        Err(_) => Ok(None),
    }
}

/// Whether a text begins as the JSON of a message or a list of messages.
fn begins_messages(text: &str) -> bool {
    let start = text.trim_start().trim_start_matches('[').trim_start();
    let name = start.strip_prefix('{').map(str::trim_start);
    let names = ["\"role\"", "\"from\"", "\"content\"", "\"value\""];
    name.is_some_and(|name| names.iter().any(|known| name.starts_with(known)))
}

/// The list of messages in a value that was read from a text.
fn listed(value: Value) -> Result<Option<Value>, &'static str> {
    match value {
        Value::Array(items) => {
            let items = items.into_iter().map(|item| match item {
                Value::String(text) => json::lenient(&text).unwrap_or(Value::String(text)),
                item => item,
            });
            let items: Vec<Value> = items.collect();
            match items.iter().filter(|item| is_message(item)).count() {
                0 => Ok(None),
                count if count == items.len() => Ok(Some(Value::Array(items))),
                _ => Err("a list of which each item is a message, with `role` and `content`"),
            }
        }
        // The JSON of a text that is JSON itself.
        Value::String(text) => messages(&text),
        Value::Object(mut fields) if fields.len() == 1 => {
            let inner = ["messages", "conversations", "prompt"].iter().find_map(|name| fields.remove(*name));
            inner.map_or(Ok(None), listed)
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

/// Whether a text is a list of messages as Python prints it.
fn is_python(text: &str) -> bool {
    let text = text.trim();
    let within = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
    let is_tuple = within("({", "})") || within("({", "},)");
    let is_printed = is_tuple || within("[{", "}]") || within("{'", "}") || text.starts_with("array([{");
    is_printed
        && (text.contains("'role'") && text.contains("'content'")
            || text.contains("'from'") && text.contains("'value'"))
}

/// Replaces the field that a path leads through by what it is the JSON of, if that is a table or a list.
/// Returns the column's name and text if it was.
///
/// # Errors
/// Returns the column and what it must be if it is a table as Python prints it.
pub(super) fn open_column<'p>(
    row: &mut Map<String, Value>,
    path: &'p str,
) -> Result<Option<(&'p str, String)>, (&'p str, &'static str)> {
    if row.contains_key(path) {
        return Ok(None);
    }
    let Some((column, _)) = path.split_once('.') else { return Ok(None) };
    let Some(Value::String(text)) = row.get(column) else { return Ok(None) };
    match json::lenient(text) {
        Ok(value @ (Value::Object(_) | Value::Array(_))) => {
            let text = text.clone();
            row.insert(column.to_owned(), value);
            Ok(Some((column, text)))
        }
        Err(_) if is_printed(text, '{', '}') => {
            Err((column, "JSON of a table; this is how Python prints one: save it with json.dumps"))
        }
        _ => Ok(None),
    }
}

/// Replaces options that are the JSON of a list or a table by these. Returns their text if they were.
pub(super) fn open_options(row: &mut Map<String, Value>, column: &str) -> Option<String> {
    let Some(Value::String(text)) = row.get(column) else { return None };
    let value = json::lenient(text).ok().filter(|value| value.is_array() || value.is_object())?;
    let text = text.clone();
    row.insert(column.to_owned(), value);
    Some(text)
}

/// Whether an answer prints a list of right answers, rather than of tests.
pub(super) fn is_list_of_answers(answer: &str) -> bool {
    is_printed(answer, '[', ']') && !answer.contains("assert")
}

/// Whether a text is a list or a table of texts as JSON or Python prints it, within the brackets.
pub(super) fn is_printed(text: &str, open: char, close: char) -> bool {
    let inside = text.trim().strip_prefix(open).and_then(|text| text.strip_suffix(close));
    inside.is_some_and(|inside| inside.trim_start().starts_with(['\'', '"']))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_of_messages_is_a_list_of_messages() {
        let chat = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]);
        let items: Vec<String> = chat.as_array().unwrap().iter().map(Value::to_string).collect();
        let call = json!([{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "x"}]);
        let share = json!([{"from": "human", "value": "Hi"}]);
        for (text, want) in [
            (chat.to_string(), &chat),
            (format!("\n {chat}\t"), &chat),
            (serde_json::to_string_pretty(&chat).unwrap(), &chat),
            (json!(chat.to_string()).to_string(), &chat),
            (json!(items).to_string(), &chat),
            (json!({"messages": chat}).to_string(), &chat),
            (call.to_string(), &call),
            (share.to_string(), &share),
            (share[0].to_string(), &share),
            (format!("\u{feff}{chat}"), &chat),
        ] {
            assert_eq!(messages(&text).unwrap().as_ref(), Some(want), "{text}");
        }
    }

    #[test]
    fn questions_that_look_like_json_stay_texts() {
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
            assert_eq!(messages(text), Ok(None), "{text}");
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
            assert!(messages(text).unwrap_err().contains("json.dumps"), "{text}");
        }
        assert!(messages("[{\"role\": \"user\", \"content\": \"a\"}, 5]").is_err());
    }
    #[test]
    fn half_a_surrogate_pair_in_json_of_messages_is_replaced() {
        let text = r#"[{"role": "user", "content": "a \ud83d b"}]"#;
        assert_eq!(messages(text).unwrap().unwrap()[0]["content"], "a \u{fffd} b");
    }

    #[test]
    fn columns_that_are_json_of_tables_are_opened() {
        let row = |text: &str| Map::from_iter([("extra_info".to_owned(), Value::from(text))]);
        let mut json = row("{\"a\": 18446744073709551617}");
        assert_eq!(open_column(&mut json, "extra_info.").unwrap().unwrap().0, "extra_info");
        assert_eq!(json["extra_info"].to_string(), "{\"a\":18446744073709551617}");
        for text in ["free text", "[x]", "{x}", "7"] {
            assert!(open_column(&mut row(text), "extra_info.").unwrap().is_none(), "{text}");
        }
        let (column, why) = open_column(&mut row("{'a': None}"), "extra_info.").unwrap_err();
        assert!(column == "extra_info" && why.contains("json.dumps"), "{why}");
    }
}
