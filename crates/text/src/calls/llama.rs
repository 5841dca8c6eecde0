//! Tool calls of Llama 3: a completion that is a JSON object with `name` and `parameters`, or
//! several of them separated by `;`. `<|python_tag|>` may precede them.
//!
//! - Without the tag, a completion is a call only if tools are available and it starts with an
//!   object that has a name and parameters, or only the name of a known tool. Any other completion
//!   is content; it is reported once that is certain.
//! - The arguments may also be called `arguments`, and the call may be nested in `function`, as in
//!   OpenAI's API.
//! - An incomplete object is a call only if it starts with the name of a known tool.

use std::ops::Range;

use serde_json::Value;

use super::values::call_object_json;
use super::{
    CallBody, ContentStart, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags,
    TagEffect, invalid_json_error, parse_call_object,
};
use crate::{ToolCall, ToolSpec, python_json};

const OPEN: &str = "<|python_tag|>";
/// Token that ends a completion that calls a tool and waits for the result.
const END: &str = "<|eom_id|>";

/// The tool-call format of Llama 3.
pub(crate) struct Llama;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[(OPEN, TagEffect::Call), (END, TagEffect::Silent)],
    tags: &[OPEN],
    stops: &[END],
    how: "nothing but its name and its parameters as JSON",
    sign: "{\"name\": …, \"parameters\": …}",
    example: "{\"name\": \"TOOL\", \"parameters\": {\"PARAMETER\": VALUE}}",
    ..SyntaxTags::NONE
};

impl Syntax for Llama {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn locate_body(&self, text: &str, _: bool) -> CallBody {
        CallBody::Json(if text.starts_with(OPEN) { OPEN.len() } else { 0 })
    }

    fn classify_start(
        &self,
        text: &str,
        called: bool,
        tools: &[ToolSpec],
        _: bool,
    ) -> ContentStart {
        match text.chars().next() {
            Some('{') if called || !tools.is_empty() => ContentStart::Call,
            Some(';') if called => ContentStart::Silent(1),
            _ => ContentStart::Speech,
        }
    }

    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        tools: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        let value = serde_json::from_str(&text[json?]);
        let value = value.map(|value| match value {
            Value::Object(mut fields) if fields.get("function").is_some_and(Value::is_object) => {
                fields.remove("function").unwrap_or_default()
            }
            value => value,
        });
        if !text.starts_with(OPEN) {
            let value = value.as_ref().ok()?;
            let name = value["name"].as_str()?;
            let has_arguments =
                ["parameters", "arguments"].iter().any(|key| value.get(key).is_some());
            if !has_arguments && tools.iter().all(|tool| tool.name != name) {
                return None;
            }
        }
        let call = value.map_err(|error| format!("the call is not valid JSON: {error}"));
        let call = call.and_then(|value| parse_call_object(value, &["parameters", "arguments"]));
        Some(vec![call.map_err(MalformedReason::from)])
    }

    fn explain_error(&self, text: &str, _: bool, tools: &[ToolSpec]) -> Option<String> {
        if let Some(rest) = text.strip_prefix(OPEN) {
            return Some(invalid_json_error(rest));
        }
        tools
            .iter()
            .find_map(|tool| {
                let rest = text.strip_prefix('{')?.trim_start().strip_prefix("\"name\"")?;
                let rest = rest.trim_start().strip_prefix(':')?.trim_start();
                rest.starts_with(&python_json::dumps(&Value::String(tool.name.clone())))
                    .then_some(())
            })
            .map(|()| invalid_json_error(text))
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        let call = |call| call_object_json(call, "parameters", "");
        let tag = if content.is_empty() || calls.is_empty() { "" } else { OPEN };
        format!("{content}{tag}{}", calls.iter().map(call).collect::<Vec<_>>().join("; "))
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        Some(context.calls_grammar(["", "; ", ""], |at, tool| {
            context.object_rule((at, tool), "parameters", ["", ""], &Value::Null)
        }))
    }
}
