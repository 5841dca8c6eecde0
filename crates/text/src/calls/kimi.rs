//! Tool calls of Kimi K2: special tokens around each call, and around all calls of a turn. A call
//! starts with an id, `functions.NAME:INDEX`, followed by its JSON arguments.
//!
//! Tags inside JSON strings are text. A call that is not JSON ends at the next tag.

use std::ops::Range;

use super::tags::{find_header_end, parse_closing_tag};
use super::values::arguments_json;
use super::{
    CallBody, CallTrailer, GrammarContext, MalformedReason, ParsedCall, Rule, Syntax, SyntaxTags,
    TagEffect, parse_arguments, unclosed_json_error,
};
use crate::{ToolCall, ToolSpec};

const SECTION: [&str; 2] = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"];
const OPEN: &str = "<|tool_call_begin|>";
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";
const CLOSE: &str = "<|tool_call_end|>";

/// The tool-call format of Kimi K2.
pub(crate) struct Kimi;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[
        (SECTION[0], TagEffect::Section),
        (SECTION[1], TagEffect::SectionEnd),
        (OPEN, TagEffect::Call),
    ],
    closes: &[CLOSE],
    tags: &[SECTION[0], SECTION[1], OPEN, ARGUMENTS, CLOSE],
    how: "its name with a number and its arguments as JSON between tags",
    sign: OPEN,
    example: "<|tool_calls_section_begin|><|tool_call_begin|>functions.TOOL:0<|tool_call_argument_begin|>\
         {\"PARAMETER\": VALUE}<|tool_call_end|><|tool_calls_section_end|>",
    ..SyntaxTags::NONE
};

impl Syntax for Kimi {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn locate_body(&self, text: &str, ended: bool) -> CallBody {
        match find_header_end(text, &[ARGUMENTS], ended) {
            Some(Some((at, tag))) => CallBody::Json(at + tag.len()),
            Some(None) => CallBody::Missing,
            None => CallBody::More,
        }
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
        let json = json?;
        let id = text[OPEN.len()..json.start].trim().trim_end_matches(ARGUMENTS).trim();
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = match name.rsplit_once(':') {
            Some((name, index))
                if !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()) =>
            {
                name
            }
            _ => name,
        };
        Some(vec![parse_arguments(name, &text[json]).map_err(MalformedReason::from)])
    }

    fn explain_error(&self, text: &str, closed: bool, _: &[ToolSpec]) -> Option<String> {
        let Some((_, rest)) = text.split_once(ARGUMENTS) else {
            return Some(format!("{ARGUMENTS} is missing"));
        };
        Some(unclosed_json_error(rest, CLOSE, closed))
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        if calls.is_empty() {
            return content.to_owned();
        }
        let calls = calls.iter().enumerate().map(|(index, call)| {
            format!(
                "{OPEN}{}{ARGUMENTS}{}{CLOSE}",
                make_call_id(&call.name, index),
                arguments_json(call)
            )
        });
        format!("{content}{}{}{}", SECTION[0], calls.collect::<String>(), SECTION[1])
    }

    fn call_id(&self, name: &str, index: usize) -> Option<String> {
        Some(make_call_id(name, index))
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        Some(context.calls_grammar([SECTION[0], "", SECTION[1]], |at, tool| {
            let numbered_start = Rule::default()
                .append(context.terms_for_text(&format!("{OPEN}functions.{}:", tool.name)));
            let numbered = numbered_start.append_rule(&format!("index_{at}"), "/[0-9]{1,4}/");
            let Rule { terms, rules } = context.arguments_rule(at, tool, ARGUMENTS, CLOSE);
            Rule { rules: numbered.rules + &rules, terms: numbered.terms + &terms }
        }))
    }
}

fn make_call_id(name: &str, index: usize) -> String {
    format!("functions.{name}:{index}")
}
