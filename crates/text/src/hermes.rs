//! Tool calls in the Hermes format: JSON between `<tool_call>` and `</tool_call>` in the reply's text.
//!
//! Guarantees: [`parse`] accepts any text and loses none of it: every character is in the content, in a call
//! or in the `raw` of a malformed call, up to white space around them. What [`render_call`] prints, [`parse`]
//! reads back. Not here: thoughts, in which no call is looked for (`thought.rs`).

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::message::arguments_object;
use crate::{ToolCall, ToolSpec, python_json};

pub(crate) const OPEN: &str = "<tool_call>";
pub(crate) const CLOSE: &str = "</tool_call>";
/// Tags around the result of a call, where the template has none of its own.
pub(crate) const RESPONSE: [&str; 2] = ["<tool_response>", "</tool_response>"];

/// Content of a reply and the tools that it calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parsed {
    /// The text outside of calls: each stretch trimmed, joined by line breaks.
    pub content: String,
    /// Calls in the order they were written, with ids `call_0`, `call_1`, … counted over all of them.
    pub calls: Vec<Result<ToolCall, Malformed>>,
    /// Whether the calls were written without tags.
    pub bare: bool,
}

/// A call that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Malformed {
    /// Fault, in words that help the one who wrote it.
    pub why: String,
    /// Text as it was written, with its tags.
    pub raw: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed tool call: {}", self.why)
    }
}

/// Reads what a reply says outside of thoughts.
///
/// - A call is a JSON object with the string `name` and the object `arguments`. The arguments may be a string
///   that holds the object as JSON, and may be missing if the call has only a name. Other keys are ignored.
/// - White space around the JSON does not matter. Tags inside of JSON strings are text.
/// - A call that is not JSON reaches to the next closing tag, or up to the next opening tag if that comes
///   first, or to the end. A call without its closing tag is malformed even where its JSON is whole: the
///   reply was cut.
/// - A closing tag on its own is content.
pub(crate) fn parse(text: &str) -> Parsed {
    let mut stretches: Vec<&str> = Vec::new();
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some(open) = rest.find(OPEN) {
        stretches.push(rest[..open].trim());
        let from_tag = &rest[open..];
        let (call, len) = parse_call(from_tag, calls.len());
        calls.push(call);
        rest = &from_tag[len..];
    }
    stretches.push(rest.trim());
    stretches.retain(|stretch| !stretch.is_empty());
    Parsed { content: stretches.join("\n"), calls, bare: false }
}

/// The next tag of a call at or after `from`.
pub(crate) fn next_tag(text: &str, from: usize) -> Option<Range<usize>> {
    let place = |tag: &str| text[from..].find(tag).map(|at| from + at..from + at + tag.len());
    [OPEN, CLOSE].into_iter().filter_map(place).min_by_key(|range| range.start)
}

/// Text between the tags of the call that `text` begins with, where it is JSON as a whole.
pub(crate) fn readable(text: &str) -> Option<Range<usize>> {
    let body = text.strip_prefix(OPEN)?;
    let mut values = serde_json::Deserializer::from_str(body).into_iter::<Value>();
    values.next()?.ok()?;
    let after = &body[values.byte_offset()..];
    let blank = after.len() - after.trim_start().len();
    let end = OPEN.len() + values.byte_offset() + blank;
    text[end..].starts_with(CLOSE).then_some(OPEN.len()..end)
}

/// Whether the tag at the end of a call stands inside of a JSON string, so that the call goes on.
pub(crate) fn ends_in_text(call: &str) -> bool {
    let body = call.strip_prefix(OPEN).unwrap_or(call);
    let mut values = serde_json::Deserializer::from_str(body).into_iter::<Value>();
    matches!(values.next(), Some(Err(error)) if error.is_eof())
}

/// Reads one call at the start of `text`, opening tag included; also returns how long it is.
fn parse_call(text: &str, index: usize) -> (Result<ToolCall, Malformed>, usize) {
    let body = &text[OPEN.len()..];
    if let Some(json) = readable(text)
        && let Ok(value) = serde_json::from_str(&text[json.clone()])
    {
        let len = json.end + CLOSE.len();
        let call = call_from(value, index).map_err(|why| Malformed { why, raw: text[..len].to_string() });
        return (call, len);
    }
    let next_open = body.find(OPEN).unwrap_or(body.len());
    let (why, len) = match body.find(CLOSE).filter(|&close| close < next_open) {
        Some(close) => (not_json(&body[..close]), OPEN.len() + close + CLOSE.len()),
        None => (format!("{CLOSE} is missing"), OPEN.len() + next_open),
    };
    (Err(Malformed { why, raw: text[..len].trim_end().to_string() }), len)
}

fn not_json(body: &str) -> String {
    if body.trim().is_empty() {
        return "there is nothing between the tags; a call is a JSON object".into();
    }
    match serde_json::from_str::<Value>(body.trim()) {
        Err(error) => format!("not valid JSON: {error}"),
        Ok(_) => "the JSON ends before the closing tag".into(),
    }
}

pub(crate) fn call_from(value: Value, index: usize) -> Result<ToolCall, String> {
    let Value::Object(mut map) = value else {
        return Err("not a JSON object with \"name\" and \"arguments\"".into());
    };
    let name = match map.remove("name") {
        Some(Value::String(name)) if !name.is_empty() => name,
        Some(Value::String(_)) => return Err("\"name\" is empty".into()),
        Some(other) => return Err(format!("\"name\" is {other}, not a string")),
        None => return Err("\"name\" is missing".into()),
    };
    let arguments = match map.remove("arguments") {
        Some(arguments) => arguments_object(arguments)?,
        None if map.is_empty() => Map::new(),
        None => {
            let found: Vec<&str> = map.keys().map(String::as_str).collect();
            return Err(format!("\"arguments\" is missing (found {:?} instead)", found.join(", ")));
        }
    };
    Ok(ToolCall { id: format!("call_{index}"), name, arguments })
}

/// A call as the model writes it.
pub(crate) fn render_call(call: &ToolCall) -> String {
    let name = python_json::dumps(&Value::String(call.name.clone()));
    let arguments = python_json::dumps(&Value::Object(call.arguments.clone()));
    format!("{OPEN}\n{{\"name\": {name}, \"arguments\": {arguments}}}\n{CLOSE}")
}

/// Text of an assistant's turn: its content, then its calls, each on a line of its own.
pub(crate) fn render_turn(content: &str, calls: &[ToolCall]) -> String {
    let content = (!content.is_empty()).then(|| content.to_string());
    content.into_iter().chain(calls.iter().map(render_call)).collect::<Vec<_>>().join("\n")
}

/// How the system prompt describes tools, where the chat template does not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolPrompt {
    /// The whole JSON schema of every tool.
    #[default]
    Full,
    /// One line for each tool: its name, the names and types of its parameters, its description. Descriptions
    /// of parameters are left out.
    Compact,
}

/// The section of the system prompt that describes tools and how to call them. `quote` is applied to what
/// tools say of themselves.
pub(crate) fn describe_tools(tools: &[ToolSpec], form: ToolPrompt, quote: impl Fn(&str) -> String) -> String {
    let lines: Vec<String> = match form {
        ToolPrompt::Full => tools.iter().map(|tool| python_json::dumps(&tool.to_openai())).collect(),
        ToolPrompt::Compact => tools.iter().map(signature).collect(),
    };
    let lines = quote(&lines.join("\n"));
    match form {
        ToolPrompt::Full => format!(
            "You can call tools. They are:\n<tools>\n{lines}\n</tools>\n\nTo call one, write its name and its arguments as \
             JSON between tags, like this:\n{OPEN}\n{{\"name\": \"<tool>\", \"arguments\": {{\"<parameter>\": <value>}}}}\n{CLOSE}"
        ),
        ToolPrompt::Compact => format!(
            "Tools:\n{lines}\nCall: {OPEN}\n{{\"name\": \"<tool>\", \"arguments\": {{\"<parameter>\": <value>}}}}\n{CLOSE}"
        ),
    }
}

/// `name(first: type, second?: type): description`, a question mark after parameters that may be left out.
fn signature(tool: &ToolSpec) -> String {
    let required: Vec<&str> =
        tool.parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let parameters: Vec<String> = tool.parameters["properties"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, schema)| {
            let optional = if required.contains(&name.as_str()) { "" } else { "?" };
            format!("{name}{optional}: {}", type_name(schema))
        })
        .collect();
    let head = format!("{}({})", tool.name, parameters.join(", "));
    if tool.description.is_empty() { head } else { format!("{head}: {}", tool.description) }
}

/// The type of a schema in a word: its allowed values where it lists them, else its type.
fn type_name(schema: &Value) -> String {
    let words = |values: &[Value]| values.iter().map(word).collect::<Vec<_>>().join("|");
    match (&schema["enum"], &schema["type"]) {
        (Value::Array(values), _) => values.iter().map(python_json::dumps).collect::<Vec<_>>().join("|"),
        (_, Value::String(kind)) if kind == "array" && schema["items"].is_object() => {
            format!("[{}]", type_name(&schema["items"]))
        }
        (_, Value::Array(kinds)) => words(kinds),
        (_, Value::String(kind)) => kind.clone(),
        _ => "any".into(),
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn why(text: &str) -> String {
        let parsed = parse(text);
        assert_eq!(parsed.calls.len(), 1, "{text}");
        parsed.calls[0].clone().unwrap_err().why
    }

    fn calls(text: &str) -> Vec<(String, Value)> {
        parse(text)
            .calls
            .into_iter()
            .map(|call| call.unwrap())
            .map(|call| (call.name, call.arguments.into()))
            .collect()
    }

    #[test]
    fn calls_and_the_text_around_them() {
        let parsed = parse(
            "Let me see. <tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>\n\
             <tool_call>{\"arguments\": {}, \"name\": \"b\"}</tool_call> Done. ",
        );
        assert_eq!(parsed.content, "Let me see.\nDone.");
        let calls: Vec<ToolCall> = parsed.calls.into_iter().map(Result::unwrap).collect();
        assert_eq!((calls[0].name.as_str(), calls[0].id.as_str()), ("a", "call_0"));
        assert_eq!(Value::Object(calls[0].arguments.clone()), json!({"x": 1}));
        assert_eq!((calls[1].name.as_str(), calls[1].id.as_str()), ("b", "call_1"));
        assert_eq!(
            parse("No call </tool_call> here. "),
            Parsed { content: "No call </tool_call> here.".into(), ..Parsed::default() }
        );
        assert_eq!(parse(""), Parsed::default());
    }

    #[test]
    fn shapes_of_arguments() {
        let wrap = |json: &str| format!("<tool_call>{json}</tool_call>");
        assert_eq!(calls(&wrap(r#"{"name": "a"}"#)), [("a".into(), json!({}))]);
        assert_eq!(
            calls(&wrap(r#"{"name": "a", "arguments": "{\"x\": [1]}"}"#)),
            [("a".into(), json!({"x": [1]}))]
        );
        assert_eq!(calls(&wrap(r#"{"id": 3, "name": "a", "arguments": {}}"#)), [("a".into(), json!({}))]);
        let tags = r#"{"name": "a", "arguments": {"t": "</tool_call><tool_call>"}}"#;
        assert_eq!(calls(&wrap(tags)), [("a".into(), json!({"t": "</tool_call><tool_call>"}))]);
        assert!(why(&wrap(r#"{"name": "a", "arguments": "x"}"#)).contains("a string that is not JSON"));
        assert!(why(&wrap(r#"{"name": "a", "arguments": "[1]"}"#)).contains("holds [1]"));
        assert!(why(&wrap(r#"{"name": "a", "arguments": [1]}"#)).contains("is [1], not an object"));
        assert!(why(&wrap(r#"{"name": "a", "arguments": null}"#)).contains("is null"));
        assert!(
            why(&wrap(r#"{"name": "a", "parameters": {}}"#))
                .contains("\"arguments\" is missing (found \"parameters\"")
        );
    }

    #[test]
    fn malformed_calls() {
        let wrap = |json: &str| format!("<tool_call>{json}</tool_call>");
        assert!(why(&wrap(r#"{"name": "a", "arguments": {"#)).contains("not valid JSON"));
        assert!(why(&wrap("calculator(1+2)")).contains("not valid JSON"));
        assert!(why(&wrap(" \n")).contains("nothing between the tags"));
        assert!(why(&wrap("[]")).contains("not a JSON object"));
        assert!(why(&wrap(r#"{"arguments": {}}"#)).contains("\"name\" is missing"));
        assert!(why(&wrap(r#"{"name": 7}"#)).contains("\"name\" is 7"));
        assert!(why(&wrap(r#"{"name": ""}"#)).contains("\"name\" is empty"));
        assert!(why(&wrap(r#"{"name": "a"} and more"#)).contains("not valid JSON"));
        assert_eq!(why(r#"<tool_call>{"name": "a"}"#), "</tool_call> is missing");
        assert_eq!(why("<tool_call>"), "</tool_call> is missing");
    }

    #[test]
    fn an_open_call_ends_where_the_next_begins() {
        let parsed = parse("A <tool_call>{\"name\": \n<tool_call>{\"name\": \"b\"}</tool_call> C");
        assert_eq!(parsed.content, "A\nC");
        let broken = Malformed { why: "</tool_call> is missing".into(), raw: "<tool_call>{\"name\":".into() };
        assert_eq!(parsed.calls[0], Err(broken));
        assert_eq!(parsed.calls[1].as_ref().unwrap().name, "b");
        let broken = parse("x <tool_call>{oops}</tool_call> y");
        assert_eq!(broken.content, "x\ny");
        assert_eq!(broken.calls[0].as_ref().unwrap_err().raw, "<tool_call>{oops}</tool_call>");
    }

    #[test]
    fn compact_descriptions_are_signatures() {
        let tool = ToolSpec {
            name: "search".into(),
            description: "Finds pages.".into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "left out"},
                    "kind": {"enum": ["web", "news"]},
                    "sites": {"type": "array", "items": {"type": "string"}},
                    "limit": {"type": ["integer", "null"]},
                    "more": {},
                },
                "required": ["query"],
            }),
        };
        let expected = "search(query: string, kind?: \"web\"|\"news\", sites?: [string], limit?: integer|null, more?: any): Finds pages.";
        assert_eq!(signature(&tool), expected);
        let bare = ToolSpec { name: "now".into(), description: String::new(), parameters: Value::Null };
        assert_eq!(signature(&bare), "now()");
        let section = describe_tools(&[tool.clone(), bare], ToolPrompt::Compact, str::to_owned);
        assert!(section.starts_with(&format!("Tools:\n{expected}\nnow()\nCall: <tool_call>\n")));
        let full = describe_tools(std::slice::from_ref(&tool), ToolPrompt::Full, str::to_owned);
        assert!(full.contains(&python_json::dumps(&tool.to_openai())) && full.len() > section.len());
        // The example call is itself no valid call: nothing is to be copied from it verbatim.
        assert!(parse(&section).calls[0].is_err());
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec((any::<String>(), inner), 0..4)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn parse_never_panics(parts in proptest::collection::vec(
            prop_oneof![
                Just("<tool_call>".to_string()), Just("</tool_call>".to_string()), Just("{\"name\": \"".to_string()),
                Just("\", \"arguments\": {".to_string()), Just("}}".to_string()), Just("\n".to_string()),
                any::<String>(),
            ],
            0..12,
        )) {
            let text = parts.concat();
            let parsed = parse(&text);
            // One call for each opening tag, but for tags within the JSON of another call.
            prop_assert!(parsed.calls.len() <= text.matches(OPEN).count());
            prop_assert_eq!(parsed.calls.is_empty(), !text.contains(OPEN));
        }

        #[test]
        fn what_is_rendered_reads_back(
            name in ".+",
            arguments in proptest::collection::vec((any::<String>(), json_value()), 0..4),
            content in "[^<]*",
        ) {
            let call = ToolCall { id: "call_0".into(), name, arguments: arguments.into_iter().collect() };
            let parsed = parse(&render_turn(&content, std::slice::from_ref(&call)));
            prop_assert_eq!(parsed.content, content.trim());
            prop_assert_eq!(parsed.calls, vec![Ok(call)]);
        }
    }
}
