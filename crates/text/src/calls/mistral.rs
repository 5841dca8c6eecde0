//! Tool calls of Mistral's models.
//!
//! `[TOOL_CALLS]` is followed by a JSON array of calls. In newer models, it is followed by a tool's
//! name, `[ARGS]` and the arguments, and each call has its own tag. `[CALL_ID]` and an id may stand
//! between name and arguments.
//!
//! There is no closing tag: calls end with their JSON. Invalid JSON ends at the next tag, or with
//! the completion. Tags inside JSON strings are text.

use std::ops::Range;

use serde_json::{Value, json};

use super::tags::{find_header_end, skip_blank};
use super::values::{arguments_json, call_object_json};
use super::{
    CallBody, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags, TagEffect,
    invalid_json_error, parse_arguments, parse_call_object,
};
use crate::{ToolCall, ToolSpec, python_json};

const OPEN: &str = "[TOOL_CALLS]";
const ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

/// The tool-call format of Mistral. `named` selects the variant in which `[ARGS]` separates the
/// tool's name from the arguments.
pub(crate) struct Mistral {
    pub named: bool,
}

const SPELLING: SyntaxTags = SyntaxTags {
    marks: &[(OPEN, TagEffect::Call)],
    tags: &[OPEN, ID, ARGUMENTS],
    how: "a tag, its name and its arguments as JSON",
    sign: OPEN,
    example: "[TOOL_CALLS]TOOL[ARGS]{\"PARAMETER\": VALUE}",
    ..SyntaxTags::NONE
};

static SPELLINGS: [SyntaxTags; 2] = [
    SyntaxTags {
        example: "[TOOL_CALLS][{\"name\": \"TOOL\", \"arguments\": {\"PARAMETER\": VALUE}}]",
        ..SPELLING
    },
    SPELLING,
];

impl Syntax for Mistral {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLINGS[usize::from(self.named)]
    }

    fn locate_body(&self, text: &str, ended: bool) -> CallBody {
        let rest = &text[OPEN.len()..];
        let Some(blank) = skip_blank(rest) else { return CallBody::Missing };
        let after = &rest[blank..];
        let start = OPEN.len() + blank;
        let tagged = |tag: &str| after.starts_with(tag) || (tag.starts_with(after) && !ended);
        match after.chars().next() {
            Some('{') => return CallBody::Json(start),
            Some('[') if !tagged(ID) && !tagged(ARGUMENTS) => return CallBody::Json(start),
            _ => {}
        }
        match find_header_end(rest, &[ARGUMENTS, "{"], ended) {
            Some(Some((at, "{"))) => CallBody::Json(OPEN.len() + at),
            Some(Some((at, tag))) => CallBody::Json(OPEN.len() + at + tag.len()),
            Some(None) => CallBody::Missing,
            None => CallBody::More,
        }
    }

    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        _: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        let json = json?;
        let head = text[OPEN.len()..json.start].trim();
        let head = head.strip_suffix(ARGUMENTS).unwrap_or(head);
        let name = head.split(ID).next().unwrap_or_default().trim();
        if !name.is_empty() {
            return Some(vec![parse_arguments(name, &text[json]).map_err(MalformedReason::from)]);
        }
        let calls = match serde_json::from_str(&text[json]) {
            Ok(Value::Array(calls)) => calls,
            Ok(call) => vec![call],
            Err(error) => {
                return Some(vec![Err(format!("the call is not valid JSON: {error}").into())]);
            }
        };
        if calls.is_empty() {
            return Some(vec![Err(format!("there is no call after {OPEN}").into())]);
        }
        Some(
            calls
                .into_iter()
                .map(|call| {
                    let raw = Some(python_json::dumps(&call));
                    parse_call_object(call, &["arguments", "parameters"])
                        .map_err(|why| MalformedReason { why, raw })
                })
                .collect(),
        )
    }

    fn explain_error(&self, text: &str, _: bool, _: &[ToolSpec]) -> Option<String> {
        let rest = &text[OPEN.len().min(text.len())..];
        Some(match rest.find(['[', '{']) {
            None if rest.trim().is_empty() => format!("there is no call after {OPEN}"),
            None => {
                format!(
                    "{ARGUMENTS} and the arguments are missing after {:?}",
                    crate::excerpt::excerpt(rest)
                )
            }
            Some(_) => {
                let json = rest.split_once(ARGUMENTS).map_or(rest, |(_, json)| json);
                invalid_json_error(&json[json.find(['[', '{']).unwrap_or(0)..])
            }
        })
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        let mut text = content.to_owned();
        match calls {
            [] => {}
            calls if self.named => {
                for call in calls {
                    text.push_str(&format!(
                        "{OPEN}{}{ARGUMENTS}{}",
                        call.name,
                        arguments_json(call)
                    ));
                }
            }
            calls => {
                let calls: Vec<String> = calls
                    .iter()
                    .enumerate()
                    .map(|(index, call)| {
                        call_object_json(
                            call,
                            "arguments",
                            &format!(", \"id\": \"{}\"", make_call_id(index)),
                        )
                    })
                    .collect();
                text.push_str(&format!("{OPEN}[{}]", calls.join(", ")));
            }
        }
        text
    }

    fn call_id(&self, _: &str, index: usize) -> Option<String> {
        Some(make_call_id(index))
    }

    fn is_variant_of(&self, printed: &str) -> bool {
        let array =
            printed.split_once(OPEN).is_some_and(|(_, call)| call.trim_start().starts_with('['));
        self.named != array
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        if self.named {
            return Some(context.calls_grammar(["", "", ""], |at, tool| {
                context.arguments_rule(at, tool, &format!("{OPEN}{}{ARGUMENTS}", tool.name), "")
            }));
        }
        let id = json!({ "id": { "type": "string", "pattern": "^[a-zA-Z0-9]{9}$" } });
        let open = format!("{OPEN}[");
        Some(context.calls_grammar([&open, ", ", "]"], |at, tool| {
            context.object_rule((at, tool), "arguments", ["", ""], &id)
        }))
    }
}

/// Returns the id of the call at `index`: nine letters and digits, as Mistral's templates require.
fn make_call_id(index: usize) -> String {
    format!("call{:05}", index % 100_000)
}
