//! Tool calls of DeepSeek V3, R1 and V3.1: special tokens around each call, and around all calls of
//! a turn.
//!
//! - V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments below it in a JSON code fence.
//!   V3.1 writes `NAME<｜tool▁sep｜>` and the arguments. Both variants are parsed. Calls are written
//!   in the variant that the model's template prints.
//! - Tags inside JSON strings are text. A call that is not JSON ends at the next tag.

use std::ops::Range;

use super::tags::{find_header_end, match_opening_tag, skip_blank};
use super::values::arguments_json;
use super::{
    CallBody, CallTrailer, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags,
    TagEffect, parse_arguments,
};
use crate::{ToolCall, ToolSpec};

const SECTION: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const OPEN: &str = "<｜tool▁call▁begin｜>";
const CLOSE: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
const FENCE: [&str; 2] = ["```json", "```"];

/// The tool-call format of DeepSeek. `fenced` selects the variant whose arguments are in a code
/// fence.
pub(crate) struct Deepseek {
    pub fenced: bool,
}

const SPELLING: SyntaxTags = SyntaxTags {
    marks: &[
        (SECTION[0], TagEffect::Section),
        (SECTION[1], TagEffect::SectionEnd),
        (OPEN, TagEffect::Call),
    ],
    closes: &[CLOSE],
    tags: &[SECTION[0], SECTION[1], OPEN, CLOSE, SEPARATOR],
    how: "its name and its arguments as JSON between tags",
    sign: OPEN,
    example: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>TOOL\n```json\n\
                 {\"PARAMETER\": VALUE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ..SyntaxTags::NONE
};

static SPELLINGS: [SyntaxTags; 2] = [
    SyntaxTags {
        example: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>TOOL<｜tool▁sep｜>{\"PARAMETER\": VALUE}\
                 <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ..SPELLING
    },
    SPELLING,
];

impl Syntax for Deepseek {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLINGS[usize::from(self.fenced)]
    }

    fn locate_body(&self, text: &str, ended: bool) -> CallBody {
        let from = match find_header_end(text, &[SEPARATOR], ended) {
            Some(Some((at, tag))) => at + tag.len(),
            Some(None) => return CallBody::Missing,
            None => return CallBody::More,
        };
        let rest = &text[from..];
        let Some(blank) = skip_blank(rest) else { return CallBody::Missing };
        match rest[blank..].chars().next() {
            Some('{') => return CallBody::Json(from + blank),
            None if !ended => return CallBody::More,
            _ => {}
        }
        let line = match find_header_end(&rest[blank..], &["\n"], ended) {
            Some(Some((at, _))) => blank + at,
            Some(None) => return CallBody::Missing,
            None => return CallBody::More,
        };
        match match_opening_tag(&rest[line..], FENCE[0], ended) {
            Some(len) => CallBody::Json(from + line + len.unwrap_or(0)),
            None => CallBody::More,
        }
    }

    fn parse_trailer(&self, rest: &str, ended: bool) -> CallTrailer {
        let after = rest.strip_prefix(FENCE[1]).unwrap_or(rest);
        let before = rest.len() - after.len();
        match match_opening_tag(after, CLOSE, ended) {
            Some(Some(len)) => CallTrailer::Complete(before + len),
            Some(None) if !ended && before == 0 && is_proper_prefix(FENCE[1], rest) => {
                CallTrailer::More
            }
            Some(None) => CallTrailer::Broken,
            None => CallTrailer::More,
        }
    }

    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        _: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        let json = json?;
        let (kind, name) = text[OPEN.len()..json.start].split_once(SEPARATOR)?;
        let name = name.trim().trim_end_matches(FENCE[0]).trim();
        let name = if name.is_empty() { kind.trim() } else { name };
        Some(vec![parse_arguments(name, &text[json]).map_err(MalformedReason::from)])
    }

    fn explain_error(&self, text: &str, closed: bool, _: &[ToolSpec]) -> Option<String> {
        let Some((_, rest)) = text.split_once(SEPARATOR) else {
            return Some(format!("{SEPARATOR} is missing"));
        };
        if !closed {
            return Some(format!("{CLOSE} is missing"));
        }
        let rest = rest.strip_suffix(CLOSE).unwrap_or(rest);
        Some(super::invalid_json_error(
            rest.find('{').map_or("", |at| &rest[at..]).trim_end().trim_end_matches(FENCE[1]),
        ))
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        if calls.is_empty() {
            return content.to_owned();
        }
        let calls = calls.iter().map(|call| {
            let name = &call.name;
            let arguments = arguments_json(call);
            if self.fenced {
                format!(
                    "{OPEN}function{SEPARATOR}{name}\n{}\n{arguments}\n{}{CLOSE}",
                    FENCE[0], FENCE[1]
                )
            } else {
                format!("{OPEN}{name}{SEPARATOR}{arguments}{CLOSE}")
            }
        });
        let between = if self.fenced { "\n" } else { "" };
        format!("{content}{}{}{}", SECTION[0], calls.collect::<Vec<_>>().join(between), SECTION[1])
    }

    fn is_variant_of(&self, printed: &str) -> bool {
        self.fenced == printed.contains(FENCE[0])
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let (before, after): (fn(&str) -> String, String) = if self.fenced {
            (
                |name| format!("{OPEN}function{SEPARATOR}{name}\n{}\n", FENCE[0]),
                format!("\n{}{CLOSE}", FENCE[1]),
            )
        } else {
            (|name| format!("{OPEN}{name}{SEPARATOR}"), CLOSE.to_owned())
        };
        let between = if self.fenced { "\n" } else { "" };
        Some(context.calls_grammar([SECTION[0], between, SECTION[1]], |at, tool| {
            context.arguments_rule(at, tool, &before(&tool.name), &after)
        }))
    }
}

fn is_proper_prefix(tag: &str, text: &str) -> bool {
    text.len() < tag.len() && tag.starts_with(text)
}
