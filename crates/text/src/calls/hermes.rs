//! Tool calls in the Hermes format of Qwen 2.5 and 3: JSON between `<tool_call>` and
//! `</tool_call>`.
//!
//! - A call is a JSON object with the string `name` and the object `arguments`. The arguments can
//!   be a string that contains the object as JSON, and may be missing if the call has only a name.
//!   Other keys are ignored.
//! - White space around the JSON is ignored. Tags inside JSON strings are text.
//! - A call that is not JSON extends to the first of these: the next closing tag (inclusive), the
//!   next tag that opens a call or belongs to reasoning, the end of the text. A call without its
//!   closing tag is malformed even if its JSON is complete, because the completion was truncated.
//! - A closing tag without an opening tag is content.

use std::ops::Range;

use serde_json::Value;

use super::tags::parse_closing_tag;
use super::values::call_object_json;
use super::{
    CallBody, CallTrailer, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags,
    TagEffect, parse_call_object, unclosed_json_error,
};
use crate::{ToolCall, ToolSpec};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// The tool-call format of Hermes and Qwen.
pub(crate) struct Hermes;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[(OPEN, TagEffect::Call)],
    closes: &[CLOSE],
    tags: &[OPEN, CLOSE],
    how: "its name and its arguments as JSON between tags",
    sign: OPEN,
    example: "<tool_call>\n{\"name\": \"<tool>\", \"arguments\": {\"<parameter>\": <value>}}\n</tool_call>",
    ..SyntaxTags::NONE
};

impl Syntax for Hermes {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn locate_body(&self, _: &str, _: bool) -> CallBody {
        CallBody::Json(OPEN.len())
    }

    fn parse_trailer(&self, rest: &str, ended: bool) -> CallTrailer {
        parse_closing_tag(rest, CLOSE, ended)
    }

    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        _: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        let json = text.get(json?)?;
        let value = serde_json::from_str(json)
            .map_err(|error| format!("the call is not valid JSON: {error}"));
        let call = value.and_then(|value| parse_call_object(value, &["arguments"]));
        Some(vec![call.map_err(MalformedReason::from)])
    }

    fn explain_error(&self, text: &str, closed: bool, _: &[ToolSpec]) -> Option<String> {
        Some(unclosed_json_error(text.strip_prefix(OPEN).unwrap_or(text), CLOSE, closed))
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        let content = (!content.is_empty()).then(|| content.to_string());
        content.into_iter().chain(calls.iter().map(render_call)).collect::<Vec<_>>().join("\n")
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let tags = [format!("{OPEN}\n"), format!("\n{CLOSE}")];
        let tags = [tags[0].as_str(), tags[1].as_str()];
        Some(context.calls_grammar(["", "\n", ""], |at, tool| {
            context.object_rule((at, tool), "arguments", tags, &Value::Null)
        }))
    }
}

fn render_call(call: &ToolCall) -> String {
    format!("{OPEN}\n{}\n{CLOSE}", call_object_json(call, "arguments", ""))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::calls::CallFormat;
    use crate::calls::tests::{json_value, parse_completion};
    use crate::{MalformedCall, ParsedCompletion};

    fn parse(text: &str) -> ParsedCompletion {
        parse_completion(CallFormat::Hermes, text, &[])
    }

    fn malformed_reason(text: &str) -> String {
        let parsed = parse(text);
        assert_eq!(parsed.calls.len(), 1, "{text}");
        parsed.calls[0].clone().unwrap_err().why
    }

    fn parse_tool_calls(text: &str) -> Vec<(String, Value)> {
        parse(text)
            .calls
            .into_iter()
            .map(|call| call.unwrap())
            .map(|call| (call.name, Value::from(call.arguments)))
            .collect()
    }

    #[test]
    fn hermes_separates_calls_from_content() {
        let parsed = parse(
            "Let me see. <tool_call>\n{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n</tool_call>\n\
             <tool_call>{\"arguments\": {}, \"name\": \"b\"}</tool_call> Done. ",
        );
        assert_eq!(parsed.content, "Let me see.\nDone.");
        let calls: Vec<ToolCall> = parsed.calls.into_iter().map(Result::unwrap).collect();
        assert_eq!((calls[0].name.as_str(), calls[0].id.as_str()), ("a", "call_0"));
        assert_eq!(Value::from(calls[0].arguments.clone()), json!({"x": 1}));
        assert_eq!((calls[1].name.as_str(), calls[1].id.as_str()), ("b", "call_1"));
        assert_eq!(
            parse("No call </tool_call> here. "),
            ParsedCompletion {
                content: "No call </tool_call> here.".into(),
                ..ParsedCompletion::default()
            }
        );
        assert_eq!(parse(""), ParsedCompletion::default());
    }

    #[test]
    fn hermes_accepts_arguments_as_object_or_string() {
        assert_eq!(parse_tool_calls(&wrap_call(r#"{"name": "a"}"#)), [("a".into(), json!({}))]);
        assert_eq!(
            parse_tool_calls(&wrap_call(r#"{"name": "a", "arguments": "{\"x\": [1]}"}"#)),
            [("a".into(), json!({"x": [1]}))]
        );
        assert_eq!(
            parse_tool_calls(&wrap_call(r#"{"id": 3, "name": "a", "arguments": {}}"#)),
            [("a".into(), json!({}))]
        );
        let tags = r#"{"name": "a", "arguments": {"t": "</tool_call><tool_call>"}}"#;
        assert_eq!(
            parse_tool_calls(&wrap_call(tags)),
            [("a".into(), json!({"t": "</tool_call><tool_call>"}))]
        );
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "arguments": "x"}"#))
                .contains("a string that is not JSON")
        );
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "arguments": "[1]"}"#))
                .contains("holds [1]")
        );
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "arguments": [1]}"#))
                .contains("is [1], not an object")
        );
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "arguments": null}"#)).contains("is null")
        );
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "parameters": {}}"#))
                .contains("\"arguments\" is missing; the call has only \"parameters\"")
        );
    }

    fn wrap_call(json: &str) -> String {
        format!("<tool_call>{json}</tool_call>")
    }

    #[test]
    fn hermes_reports_malformed_calls() {
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a", "arguments": {"#))
                .contains("not valid JSON")
        );
        assert!(malformed_reason(&wrap_call("calculator(1+2)")).contains("not valid JSON"));
        assert!(malformed_reason(&wrap_call(" \n")).contains("nothing between the tags"));
        assert!(malformed_reason(&wrap_call("[]")).contains("not a JSON object"));
        assert!(
            malformed_reason(&wrap_call(r#"{"arguments": {}}"#)).contains("\"name\" is missing")
        );
        assert!(malformed_reason(&wrap_call(r#"{"name": 7}"#)).contains("\"name\" is 7"));
        assert!(malformed_reason(&wrap_call(r#"{"name": ""}"#)).contains("\"name\" is empty"));
        assert!(
            malformed_reason(&wrap_call(r#"{"name": "a"} and more"#)).contains("not valid JSON")
        );
        assert_eq!(malformed_reason(r#"<tool_call>{"name": "a"}"#), "</tool_call> is missing");
        assert_eq!(malformed_reason("<tool_call>"), "</tool_call> is missing");
    }

    #[test]
    fn unclosed_call_ends_at_next_call() {
        let parsed = parse("A <tool_call>{\"name\": \n<tool_call>{\"name\": \"b\"}</tool_call> C");
        assert_eq!(parsed.content, "A\nC");
        let broken = MalformedCall {
            why: "</tool_call> is missing".into(),
            raw: "<tool_call>{\"name\":".into(),
        };
        assert_eq!(parsed.calls[0], Err(broken));
        assert_eq!(parsed.calls[1].as_ref().unwrap().name, "b");
        let broken = parse("x <tool_call>{oops}</tool_call> y");
        assert_eq!(broken.content, "x\ny");
        assert_eq!(broken.calls[0].as_ref().unwrap_err().raw, "<tool_call>{oops}</tool_call>");
    }

    proptest! {
        #[test]
        fn hermes_parser_never_panics(parts in proptest::collection::vec(
            prop_oneof![
                Just("<tool_call>".to_string()), Just("</tool_call>".to_string()), Just("{\"name\": \"".to_string()),
                Just("\", \"arguments\": \
                      {".to_string()), Just("}}".to_string()), Just("\n".to_string()),
                any::<String>(),
            ],
            0..12,
        )) {
            let text = parts.concat();
            let parsed = parse(&text);
            // There is at most one call per opening tag, because tags within the JSON of another
            // call are text.
            prop_assert!(parsed.calls.len() <= text.matches(OPEN).count());
            prop_assert_eq!(parsed.calls.is_empty(), !text.contains(OPEN));
        }

        #[test]
        fn hermes_round_trips_rendered_calls(
            name in ".+",
            arguments in proptest::collection::vec((any::<String>(), json_value()), 0..4),
            content in "[^<]*",
        ) {
            let call = ToolCall { id: "call_0".into(), name, arguments: arguments.into_iter().collect::<serde_json::Map<_, _>>().into() };
            let parsed = parse(&Hermes.render_message(&content, std::slice::from_ref(&call)));
            prop_assert_eq!(parsed.content, content.trim());
            prop_assert_eq!(parsed.calls, vec![Ok(call)]);
        }
    }
}
