//! Tool calls of GLM 4.5 and later: the tool's name, then a tag for each argument name and each
//! value, between `<tool_call>` and `</tool_call>`.
//!
//! - Values are typed by the tool's schema (`values.rs`) and are used unchanged, including white
//!   space.
//! - A call ends with `</tool_call>`, or where the next call starts. A call without its closing tag
//!   is malformed.
//! - No token ends a turn: `<|observation|>` starts the results of its calls, `<|user|>` the next
//!   question.
//! - A value ends with the last `</arg_value>` before the next name or the end of the call. It may
//!   therefore contain that tag, and `<arg_key>` if no name follows, and the tags of calls in the
//!   middle of a line.
//! - Quotation marks around names are removed. A JSON call between the tags is also parsed.

use std::ops::Range;

use serde_json::Value;

use super::values::{make_typed_call, split_between, strip_quotes, write_tagged};
use super::{
    CallBody, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags, TagEffect,
    TagInArgument, parse_call_object,
};
use crate::excerpt::excerpt;
use crate::{ToolCall, ToolSpec};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const KEY: [&str; 2] = ["<arg_key>", "</arg_key>"];
const VALUE: [&str; 2] = ["<arg_value>", "</arg_value>"];
/// Token that ends a turn with tool calls and precedes the tool results.
const RESULTS: &str = "<|observation|>";

/// The tool-call format of GLM. `lines` is whether each part of a call is on its own line, as in
/// GLM 4.5 but not in 4.7.
pub(crate) struct Glm {
    pub lines: bool,
}

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[(OPEN, TagEffect::Call)],
    closes: &[CLOSE],
    tags: &[OPEN, CLOSE, KEY[0], KEY[1], VALUE[0], VALUE[1]],
    stops: &[RESULTS, "<|user|>"],
    how: "its name, and the name and value of each argument between tags",
    sign: OPEN,
    example: "<tool_call>TOOL\n<arg_key>PARAMETER</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    ..SyntaxTags::NONE
};

impl Syntax for Glm {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn turn_end_token(&self, calls: bool) -> Option<&'static str> {
        calls.then_some(RESULTS)
    }

    fn locate_body(&self, _: &str, _: bool) -> CallBody {
        CallBody::Text(OPEN.len())
    }

    fn tag_in_argument(&self, before: &str, _: &str) -> TagInArgument {
        let tail = before.trim_end();
        let is_text = before.contains(VALUE[0])
            && ![VALUE[1], CLOSE].iter().any(|close| tail.ends_with(close))
            && !before.trim_end_matches([' ', '\t']).ends_with('\n');
        is_text.into()
    }

    fn parse_calls(
        &self,
        text: &str,
        _: Option<Range<usize>>,
        tools: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        Some(vec![parse_call(text, tools).map_err(MalformedReason::from)])
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        let mut parts: Vec<String> =
            Some(content.to_owned()).filter(|text| !text.is_empty()).into_iter().collect();
        for call in calls {
            let line = if self.lines { "\n" } else { "" };
            let arguments = write_tagged(call, line, |key, value| {
                format!("{}{key}{}{line}{}{value}{}{line}", KEY[0], KEY[1], VALUE[0], VALUE[1])
            });
            parts.push(format!("{OPEN}{}{line}{arguments}{CLOSE}", call.name));
        }
        parts.join(if self.lines { "\n" } else { "" })
    }

    fn is_variant_of(&self, printed: &str) -> bool {
        printed.contains(KEY[0]) && self.lines == printed.contains("\n<arg_key>")
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let line = if self.lines { "\n" } else { "" };
        let close = format!("{}{line}", VALUE[1]);
        Some(context.calls_grammar(["", line, ""], |at, tool| {
            context.parameters_rule(
                (at, tool),
                &format!("{OPEN}{}{line}", tool.name),
                |key| format!("{}{key}{}{line}{}", KEY[0], KEY[1], VALUE[0]),
                &close,
                CLOSE,
            )
        }))
    }
}

fn parse_call(text: &str, tools: &[ToolSpec]) -> Result<ParsedCall, String> {
    let inner = text.strip_prefix(OPEN).unwrap_or(text);
    let inner = inner.strip_suffix(CLOSE).ok_or(format!("{CLOSE} is missing"))?;
    if let Ok(value @ Value::Object(_)) = serde_json::from_str(inner) {
        return parse_call_object(value, &["arguments", "parameters"]);
    }
    let end = inner.find(KEY[0]).unwrap_or(inner.len());
    let (name, mut rest) = inner.split_at(end);
    let name = strip_quotes(name);
    if name.is_empty() || name.contains(['\n', '<']) {
        return Err(format!("expected a tool's name after {OPEN}, but found {:?}", excerpt(name)));
    }
    let mut arguments = Vec::new();
    while !rest.trim().is_empty() {
        let (key, after) = split_between(rest, KEY[0], KEY[1])
            .ok_or_else(|| misplaced_text_error(rest, KEY[0]))?;
        let end = after
            .match_indices(KEY[0])
            .map(|(at, _)| at)
            .find(|at| {
                let parts = split_between(&after[*at..], KEY[0], KEY[1]);
                parts.is_some_and(|(key, rest)| {
                    !key.contains('<') && rest.trim_start().starts_with(VALUE[0])
                })
            })
            .unwrap_or(after.len());
        let value = after[..end].trim_start().strip_prefix(VALUE[0]);
        let (value, behind) = value
            .and_then(|value| value.rsplit_once(VALUE[1]))
            .ok_or_else(|| misplaced_text_error(after, VALUE[0]))?;
        if !behind.trim().is_empty() {
            return Err(misplaced_text_error(behind, KEY[0]));
        }
        arguments.push((strip_quotes(key), value));
        rest = &after[end..];
    }
    Ok(make_typed_call(name, arguments, tools))
}

fn misplaced_text_error(rest: &str, tag: &str) -> String {
    format!("expected {tag}, but found {:?}", excerpt(rest.trim()))
}
