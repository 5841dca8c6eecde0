//! Tool calls of MiniMax M2: `<invoke name="…">` with a tag for each parameter. All calls of a turn
//! are between `<minimax:tool_call>` and `</minimax:tool_call>`.
//!
//! - Values are typed by the tool's schema (`values.rs`) and are used unchanged, including white
//!   space.
//! - Calls are searched only between the tags of a section. Other text there is a malformed call.
//! - A call ends with `</invoke>`. Without it, the call ends where the next one starts or where the
//!   section ends, and is malformed.
//! - A parameter ends with the first `</parameter>` that is followed by another parameter or the
//!   end of the call, so its value may contain that tag. The value may also contain `<invoke name=`
//!   and `</invoke>`, unless only white space separates them from `</parameter>` or `</invoke>`,
//!   but not the tags of sections.

use std::ops::Range;

use super::values::{
    make_typed_call, split_between, split_parameter_value, strip_quotes, write_tagged,
};
use super::{
    CallBody, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags, TagEffect,
    TagInArgument,
};
use crate::excerpt::excerpt;
use crate::{ToolCall, ToolSpec};

const SECTION: [&str; 2] = ["<minimax:tool_call>", "</minimax:tool_call>"];
const INVOKE: &str = "<invoke name=";
const INVOKE_END: &str = "</invoke>";
const PARAMETER: &str = "<parameter name=";
const PARAMETER_END: &str = "</parameter>";

/// The tool-call format of MiniMax M2.
pub(crate) struct Minimax;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[
        (SECTION[0], TagEffect::Section),
        (SECTION[1], TagEffect::SectionEnd),
        (INVOKE, TagEffect::Call),
    ],
    closes: &[INVOKE_END],
    tags: &[SECTION[0], SECTION[1], INVOKE, INVOKE_END, PARAMETER, PARAMETER_END],
    only_in_sections: true,
    how: "its name and its arguments between tags",
    sign: SECTION[0],
    example: "<minimax:tool_call>\n<invoke name=\"TOOL\">\n\
              <parameter name=\"PARAMETER\">VALUE</parameter>\n</invoke>\n\
         </minimax:tool_call>",
    ..SyntaxTags::NONE
};

impl Syntax for Minimax {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn locate_body(&self, _: &str, _: bool) -> CallBody {
        CallBody::Text(INVOKE.len())
    }

    fn tag_in_argument(&self, before: &str, tag: &str) -> TagInArgument {
        let tail = before.trim_end();
        let is_text = [INVOKE, INVOKE_END].contains(&tag)
            && before.contains(PARAMETER)
            && ![PARAMETER_END, INVOKE_END].iter().any(|close| tail.ends_with(close));
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
        if calls.is_empty() {
            return content.to_owned();
        }
        let mut text = format!("{content}\n{}\n", SECTION[0]);
        if content.is_empty() {
            text.remove(0);
        }
        for call in calls {
            let arguments = write_tagged(call, "\n", |key, value| {
                format!("{PARAMETER}\"{key}\">{value}{PARAMETER_END}\n")
            });
            text.push_str(&format!("{INVOKE}\"{}\">\n{arguments}{INVOKE_END}\n", call.name));
        }
        text + SECTION[1]
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let open = format!("{}\n", SECTION[0]);
        let end = format!("\n{}", SECTION[1]);
        let close = format!("{PARAMETER_END}\n");
        Some(context.calls_grammar([&open, "\n", &end], |at, tool| {
            let before = format!("{INVOKE}\"{}\">\n", tool.name);
            context.parameters_rule(
                (at, tool),
                &before,
                |key| format!("{PARAMETER}\"{key}\">"),
                &close,
                INVOKE_END,
            )
        }))
    }
}

/// Removes the quotation marks around a name. Returns an error if the name is empty.
fn parse_name(text: &str) -> Result<&str, String> {
    let name = strip_quotes(text);
    if name.is_empty() { Err("a name is empty".into()) } else { Ok(name) }
}

fn parse_call(text: &str, tools: &[ToolSpec]) -> Result<ParsedCall, String> {
    let inner =
        text.trim_end().strip_suffix(INVOKE_END).ok_or(format!("{INVOKE_END} is missing"))?;
    let (name, mut rest) =
        split_between(inner, INVOKE, ">").ok_or(format!("{INVOKE}…> is not closed"))?;
    let name = parse_name(name)?;
    let mut arguments = Vec::new();
    while !rest.trim().is_empty() {
        let (key, value) = split_between(rest, PARAMETER, ">").ok_or_else(|| {
            format!("expected {PARAMETER}\"…\">, but found {:?}", excerpt(rest.trim()))
        })?;
        if !value.contains(PARAMETER_END) {
            return Err(format!("{PARAMETER_END} is missing after the value of {key}"));
        }
        let (value, after) = split_parameter_value(value, [PARAMETER, PARAMETER_END], |_| false);
        arguments.push((parse_name(key)?, value));
        rest = after;
    }
    Ok(make_typed_call(name, arguments, tools))
}
