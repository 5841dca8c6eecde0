//! Finds calls without tags: a JSON object that names a tool, bare or in a code fence. Models that
//! were trained on another format write such calls.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::calls::parse_call_object;
use crate::{MalformedCall, ParsedCompletion, ToolCall, ToolSpec};

/// Returns the calls without tags in a text, or `None` if the text contains no such call.
///
/// A call is a JSON object whose `name` is the name of a tool. Its arguments may also be called
/// `parameters`, as in Llama 3. An object with a `description` describes a tool instead of calling
/// it. Objects within arrays and within other objects count.
pub(crate) fn find_bare_calls(text: &str, tools: &[ToolSpec]) -> Option<ParsedCompletion> {
    let mut calls = Vec::new();
    let mut stretches = Vec::new();
    let mut at = 0;
    let mut rest = 0;
    while let Some(brace) = text[at..].find('{') {
        let start = at + brace;
        at = start + 1;
        let mut values =
            serde_json::Deserializer::from_str(&text[start..]).into_iter::<Map<String, Value>>();
        let Some(Ok(object)) = values.next() else { continue };
        let name = object.get("name").and_then(Value::as_str);
        if !tools.iter().any(|tool| Some(tool.name.as_str()) == name)
            || object.contains_key("description")
        {
            continue;
        }
        let range = extend_over_fence(text, start..start + values.byte_offset());
        let raw = text[range.clone()].to_string();
        let id = format!("call_{}", calls.len());
        let call = parse_call_object(Value::Object(object), &["arguments", "parameters"]);
        calls.push(
            call.map(|(name, arguments)| ToolCall { id, name, arguments: arguments.into() })
                .map_err(|why| MalformedCall { why, raw }),
        );
        stretches.push(text[rest..range.start.max(rest)].trim());
        (at, rest) = (range.end, range.end);
    }
    stretches.push(text[rest..].trim());
    stretches.retain(|stretch| !stretch.is_empty());
    (!calls.is_empty()).then(|| ParsedCompletion {
        content: stretches.join("\n"),
        calls,
        bare: true,
    })
}

/// Returns the range `range` of a call, extended by the code fence around the call if the fence
/// contains nothing else.
fn extend_over_fence(text: &str, range: Range<usize>) -> Range<usize> {
    const FENCE: &str = "```";
    let before = text[..range.start].trim_end();
    let after = text[range.end..].trim_start();
    let line = before.rfind('\n').map_or(0, |at| at + 1);
    let opens = before[line..].trim_start().strip_prefix(FENCE);
    match (opens, after.strip_prefix(FENCE)) {
        (Some(word), Some(rest))
            if word.trim().chars().all(|c| c.is_alphanumeric() || "_-".contains(c)) =>
        {
            line..text.len() - rest.len()
        }
        _ => range,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse_bare_calls(text: &str) -> Option<(String, Vec<Value>)> {
        let parsed = find_bare_calls(text, &[make_tool("calculator"), make_tool("clock")])?;
        assert!(parsed.bare);
        let shown = |call: &Result<crate::ToolCall, MalformedCall>| match call {
            Ok(call) => json!([call.id, call.name, *call.arguments]),
            Err(malformed) => malformed.why.as_str().into(),
        };
        Some((parsed.content, parsed.calls.iter().map(shown).collect()))
    }

    fn make_tool(name: &str) -> ToolSpec {
        ToolSpec { name: name.into(), description: String::new(), parameters: json!({}) }
    }

    #[test]
    fn object_with_tool_name_is_call() {
        let call = r#"{"name": "calculator", "arguments": {"expression": "{1}"}}"#;
        let want = json!(["call_0", "calculator", {"expression": "{1}"}]);
        for (text, content) in [
            (call.to_string(), ""),
            (format!("```json\n{call}\n```"), ""),
            (format!("I compute.\n\n```\n{call}\n```\nWait."), "I compute.\nWait."),
            (format!("{{x}} {{\"name\": \"abacus\"}} {call} so"), "{x} {\"name\": \"abacus\"}\nso"),
            (call.replace("arguments", "parameters"), ""),
        ] {
            assert_eq!(
                parse_bare_calls(&text),
                Some((content.into(), vec![want.clone()])),
                "{text}"
            );
        }
        let nested = format!(r#"{{"type": "function", "function": {call}}}"#);
        assert_eq!(parse_bare_calls(&nested).unwrap().1[0], want);
        let both = parse_bare_calls(&format!("[{call}, {{\"name\": \"clock\"}}]")).unwrap().1;
        assert_eq!(both, [want, json!(["call_1", "clock", {}])]);
    }

    #[test]
    fn object_without_tool_name_is_text() {
        for text in [
            "",
            "42",
            r#"{"name": "abacus", "arguments": {}}"#,
            r#"{"answer": 42}"#,
            r#"{"name": "calculator", "arguments": {"#,
            r#"{"name": "calculator", "description": "Computes.", "parameters": {"type": "object"}}"#,
            r#"calculator({"expression": "1+1"})"#,
        ] {
            assert_eq!(parse_bare_calls(text), None, "{text}");
        }
        let why = &parse_bare_calls(r#"{"name": "calculator", "arguments": 7}"#).unwrap().1[0];
        assert!(why.as_str().unwrap().contains("not an object"), "{why}");
    }
}
