//! Properties that hold for every call format.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::completion_parser::{CompletionParser, TagTables};
use crate::reasoning_tags::ReasoningTagSet;

/// Parses a complete completion of a model without reasoning tags.
pub(crate) fn parse_completion(
    format: CallFormat,
    text: &str,
    tools: &[ToolSpec],
) -> ParsedCompletion {
    let tags = TagTables::new(&ReasoningTagSet::default(), format.syntax());
    ParsedCompletion::from_events(CompletionParser::parse_complete(&tags, text, false, tools).0)
}

/// Generates any JSON value.
pub(crate) fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        // In Python's notation, in which arguments are written.
        any::<f64>().prop_map(|value| match value.is_finite() {
            true => serde_json::from_str(&crate::python_json::format_float(value)).unwrap(),
            false => Value::Null,
        }),
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

/// Returns a tool with one parameter of every type.
pub(crate) fn tool() -> ToolSpec {
    let kinds = ["string", "integer", "number", "boolean", "array", "object", "null"];
    let properties: Map<String, Value> = kinds
        .iter()
        .map(|kind| ((*kind).to_owned(), serde_json::json!({ "type": kind })))
        .collect();
    ToolSpec {
        name: "probe".into(),
        description: "Probes.".into(),
        parameters: serde_json::json!({ "type": "object", "properties": properties }),
    }
}

#[test]
fn arguments_keep_digits_from_completion_to_message() {
    for (number, want) in [
        ("12345678901234567890123", "12345678901234567890123"),
        ("-9223372036854775809", "-9223372036854775809"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("1.00", "1.00"),
        ("1e400", "1e+400"),
        ("-0", "-0"),
        ("[12345678901234567890123]", "[12345678901234567890123]"),
    ] {
        let text = format!(
            "<tool_call>\n{{\"name\": \"f\", \"arguments\": {{\"id\": {number}}}}}\n</tool_call>"
        );
        let parsed = parse_completion(CallFormat::Hermes, &text, &[]);
        let call = parsed.calls[0].as_ref().unwrap();
        let message = serde_json::to_value(call).unwrap();
        assert_eq!(message["function"]["arguments"], format!("{{\"id\":{want}}}"));
        let back: ToolCall = serde_json::from_value(message).unwrap();
        assert_eq!(back.arguments, call.arguments);
    }
}

/// Parses a completion that arrives in these chunks. Also returns its text.
fn read_in_chunks(
    format: CallFormat,
    chunks: &[&str],
    tools: &[ToolSpec],
) -> (ParsedCompletion, String) {
    let tags = TagTables::new(&ReasoningTagSet::default(), format.syntax());
    let mut reader = CompletionParser::new(false);
    let mut found = Vec::new();
    for chunk in chunks {
        reader.push(&tags, tools, chunk, &mut found);
    }
    reader.finish(&tags, tools, &mut found);
    let text = found.iter().map(|found| match found {
        crate::completion_parser::ParserEvent::Text(_, text) => text.as_str(),
        _ => "",
    });
    let text = text.collect();
    (ParsedCompletion::from_events(found), text)
}

/// Splits a text at character boundaries.
fn split_at_indices<'a>(text: &'a str, splits: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut at: Vec<usize> = splits.iter().map(|split| split.index(text.len() + 1)).collect();
    at.retain(|&at| text.is_char_boundary(at));
    at.extend([0, text.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Generates texts in which the tags of a format, and the texts between them, follow each other in
/// any order.
fn jumble() -> impl Strategy<Value = (CallFormat, String)> {
    (0..CallFormat::ALL.len()).prop_flat_map(|index| {
        let format = CallFormat::ALL[index];
        let syntax = format.syntax();
        let mut parts: Vec<String> =
            syntax.syntax_tags().marks.iter().map(|(tag, _)| (*tag).to_owned()).collect();
        parts.extend(
            syntax
                .syntax_tags()
                .tags
                .iter()
                .chain(syntax.syntax_tags().closes)
                .map(|tag| (*tag).to_owned()),
        );
        let call =
            ToolCall { id: String::new(), name: "probe".into(), arguments: Map::new().into() };
        parts.push(syntax.render_message("", std::slice::from_ref(&call)));
        parts.push(syntax.render_message("Say", &[call.clone(), call]));
        for part in [
            "probe",
            "{\"a\": \"",
            "\"}",
            "{}",
            "{\"name\": \"probe\"}",
            "; ",
            "\n",
            " ",
            ">",
            "```json\n",
            "```",
            "[",
            "]",
            " to=functions.probe ",
            "final",
            "analysis",
            "\"",
            "\\",
            "Hm.",
        ] {
            parts.push(part.into());
        }
        parts.extend([" ".repeat(MAX_HEADER + 1), "x".repeat(MAX_HEADER + 1)]);
        let part = prop_oneof![4 => prop::sample::select(parts), 1 => any::<String>()];
        (Just(format), prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat()))
    })
}

/// Generates arguments of `probe`, each of its type, without tags that some formats cannot
/// represent.
fn arguments() -> impl Strategy<Value = Map<String, Value>> {
    let text = "[^<]{0,12}".prop_map(Value::from);
    let items = prop::collection::vec(json_value(), 0..3).prop_map(Value::from);
    let fields = prop::collection::vec((any::<String>(), json_value()), 0..3)
        .prop_map(|fields| Value::Object(fields.into_iter().collect()));
    let all = (text, any::<i64>(), any::<f64>(), any::<bool>(), items, fields, any::<u8>());
    all.prop_map(|(text, integer, number, boolean, items, fields, some)| {
        let values = [
            ("string", text),
            ("integer", integer.into()),
            ("number", number.into()),
            ("boolean", boolean.into()),
            ("array", items),
            ("object", fields),
            ("null", Value::Null),
        ];
        let some = values.into_iter().enumerate().filter(|(index, _)| some & (1 << index) != 0);
        some.map(|(_, (key, value))| (key.to_owned(), value)).collect()
    })
}

/// Returns a value in which each number that is not an integer is replaced with the nearest float.
fn floats(value: Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => json!(number.as_f64()),
        Value::Array(items) => items.into_iter().map(floats).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (key, floats(value))).collect()
        }
        other => other,
    }
}

/// Returns whether no string of a value contains a tag of this format. A format with values between
/// tags cannot represent such tags.
fn has_no_tags(value: &Value, syntax: &dyn Syntax) -> bool {
    let text = value.to_string();
    syntax.syntax_tags().tags.iter().all(|tag| !text.contains(tag))
}

#[test]
fn parser_cost_is_linear_in_every_format() {
    const LENGTH: usize = 1 << 20;
    let start = std::time::Instant::now();
    let tools = [tool()];
    for format in CallFormat::ALL {
        let syntax = format.syntax();
        let call =
            ToolCall { id: String::new(), name: "probe".into(), arguments: Map::new().into() };
        let call = syntax.render_message("", std::slice::from_ref(&call));
        let (head, tail) = call.split_at(call.find("{}").map_or(call.len() / 2, |at| at + 1));
        let open = syntax.syntax_tags().marks[0].0;
        for (head, unit, tail) in [
            ("", open, ""),
            (head, "\"a\": \"", tail),
            (head, " ", tail),
            (open, " ", ""),
            (open, "x", ""),
            (head, "\"</tool_call>\": 1,", tail),
            (&format!("{head}\"a\": \""), "</tool_call><tool_call>", "\""),
            ("{", "\"a\": {", ""),
            ("", " \n", "{}"),
            ("", &call, ""),
        ] {
            let text = format!("{head}{}{tail}", unit.repeat(LENGTH / 8 / unit.len()));
            let tags = TagTables::new(&ReasoningTagSet::default(), syntax);
            let mut reader = CompletionParser::new(false);
            let mut found = Vec::new();
            let mut buffer = [0; 4];
            for c in text.chars() {
                reader.push(&tags, &tools, c.encode_utf8(&mut buffer), &mut found);
                found.clear();
            }
            reader.finish(&tags, &tools, &mut found);
        }
    }
    // 16 million characters: a cost that grows with the preceding text would take hours.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

proptest! {
    #[test]
    fn parse_result_is_independent_of_splits((format, text) in jumble(), splits in prop::collection::vec(any::<prop::sample::Index>(), 0..8)) {
        let tools = [tool()];
        let (whole, read) = read_in_chunks(format, &[&text], &tools);
        prop_assert_eq!(&read, &text);
        let (in_chunks, read) = read_in_chunks(format, &split_at_indices(&text, &splits), &tools);
        prop_assert_eq!(&read, &text);
        prop_assert_eq!(&in_chunks, &whole);
        let each: Vec<&str> = text.split("").collect();
        let (by_character, read) = read_in_chunks(format, &each, &tools);
        prop_assert_eq!(&read, &text);
        prop_assert_eq!(&by_character, &whole);
    }

    #[test]
    fn call_formats_round_trip_rendered_calls(
        index in 0..CallFormat::ALL.len(),
        content in "[^<\\[{;]{0,12}",
        arguments in prop::collection::vec(arguments(), 1..3),
    ) {
        let syntax = CallFormat::ALL[index].syntax();
        prop_assume!(arguments.iter().all(|arguments| has_no_tags(&Value::Object(arguments.clone()), syntax)));
        let call = |(index, arguments): (usize, Map<String, Value>)| ToolCall { id: format!("call_{index}"), name: "probe".into(), arguments: arguments.into() };
        let calls: Vec<ToolCall> = arguments.into_iter().enumerate().map(call).collect();
        let text = syntax.render_message(&content, &calls);
        let parsed = parse_completion(CallFormat::ALL[index], &text, &[tool()]);
        prop_assert_eq!(&parsed.content, content.trim(), "{}", text);
        // A template may write an exponent differently; the value is the same.
        let by_value = |call: &ToolCall| (call.id.clone(), call.name.clone(), floats(Value::from(call.arguments.clone())));
        let read: Option<Vec<_>> = parsed.calls.iter().map(|call| call.as_ref().ok().map(by_value)).collect();
        prop_assert_eq!(read, Some(calls.iter().map(by_value).collect()), "{}", text);
    }
}
