//! Tool calls of Qwen3-Coder and Qwen 3.5: tags for the tool and for each parameter, between
//! `<tool_call>` and `</tool_call>`.
//!
//! - Values are typed by the tool's schema (`values.rs`), without the line breaks around them.
//! - A call ends with `</tool_call>`, or where the next call starts. The tags around it may be
//!   missing, because these models often forget them; `</function>` may be missing before
//!   `</tool_call>`.
//! - A parameter ends with the first `</parameter>` that is followed by another parameter or the
//!   end of the call, so its value may contain these tags. An unclosed parameter ends where a line
//!   starts with the next one. A call whose last parameter is unclosed is malformed, because it may
//!   be truncated.
//! - A value may contain `<function=`, unless only white space separates it from `</parameter>` or
//!   `</function>`. It may contain `<tool_call>` in the middle of a line. It may contain
//!   `</tool_call>` if a closed parameter and `</tool_call>` follow before the next call.
//! - A name must end on its line and must not contain `<`; otherwise the call is malformed.
//! - Quotation marks around names are removed. A JSON call between the tags is also parsed.

use std::ops::Range;

use serde_json::Value;

use super::tags::match_opening_tag;
use super::values::{
    make_typed_call, parameter_names, split_between, split_parameter_value, strip_quotes,
    write_tagged,
};
use super::{
    CallBody, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags, TagEffect,
    TagInArgument, parse_call_object,
};
use crate::excerpt::excerpt;
use crate::{ToolCall, ToolSpec};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// The tool-call format of Qwen3-Coder.
pub(crate) struct QwenXml;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[(OPEN, TagEffect::Call), (FUNCTION, TagEffect::Call)],
    closes: &[CLOSE],
    tags: &[OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END],
    how: "its name and its arguments between tags",
    sign: OPEN,
    example: "<tool_call>\n<function=TOOL>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    ..SyntaxTags::NONE
};

impl Syntax for QwenXml {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn locate_body(&self, text: &str, ended: bool) -> CallBody {
        match text.strip_prefix(OPEN) {
            None => CallBody::Text(FUNCTION.len()),
            Some(rest) => match_opening_tag(rest, FUNCTION, ended)
                .map_or(CallBody::More, |len| CallBody::Text(OPEN.len() + len.unwrap_or(0))),
        }
    }

    fn tag_in_argument(&self, before: &str, tag: &str) -> TagInArgument {
        let tail = before.trim_end();
        let starts_line = before.trim_end_matches([' ', '\t']).ends_with('\n');
        let is_closed = |tail: &str| tail.ends_with(PARAMETER_END) || !before.contains(PARAMETER);
        if tag == CLOSE && !is_closed(tail.strip_suffix(FUNCTION_END).unwrap_or(tail).trim_end()) {
            return if starts_line || tail.ends_with(FUNCTION_END) {
                TagInArgument::IfClosed
            } else {
                TagInArgument::Yes
            };
        }
        let is_outside =
            [PARAMETER_END, FUNCTION_END, CLOSE].iter().any(|close| tail.ends_with(close));
        if tag == CLOSE || is_outside || !before.contains(PARAMETER) {
            return TagInArgument::No;
        }
        (tag == FUNCTION || !starts_line).into()
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
        let mut text = content.to_owned();
        for (index, call) in calls.iter().enumerate() {
            text.push_str(match (index, content.is_empty()) {
                (0, true) => "",
                (0, false) => "\n\n",
                _ => "\n",
            });
            let arguments = write_tagged(call, "\n", |key, value| {
                format!("{PARAMETER}{key}>\n{value}\n{PARAMETER_END}\n")
            });
            text.push_str(&format!(
                "{OPEN}\n{FUNCTION}{}>\n{arguments}{FUNCTION_END}\n{CLOSE}",
                call.name
            ));
        }
        text
    }

    fn is_variant_of(&self, printed: &str) -> bool {
        printed.contains(FUNCTION)
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let close = format!("\n{PARAMETER_END}\n");
        let after = format!("{FUNCTION_END}\n{CLOSE}");
        Some(context.calls_grammar(["", "\n", ""], |at, tool| {
            let before = format!("{OPEN}\n{FUNCTION}{}>\n", tool.name);
            context.parameters_rule(
                (at, tool),
                &before,
                |key| format!("{PARAMETER}{key}>\n"),
                &close,
                &after,
            )
        }))
    }
}

/// Returns the name in an opening tag such as `<function=NAME>`, without quotation marks.
fn parse_name<'a>(text: &'a str, tag: &str) -> Result<&'a str, String> {
    let name = strip_quotes(text);
    if name.is_empty() {
        return Err(format!("the name after {tag} is empty"));
    }
    if name.contains(['\n', '<']) {
        return Err(format!("the name after {tag} must end with \">\": {:?}", excerpt(name)));
    }
    Ok(name)
}

fn parse_call(text: &str, tools: &[ToolSpec]) -> Result<ParsedCall, String> {
    let inner = text.strip_prefix(OPEN).unwrap_or(text).trim();
    let (inner, closed) = inner.strip_suffix(CLOSE).map_or((inner, false), |inner| (inner, true));
    if closed && let Ok(value @ Value::Object(_)) = serde_json::from_str(inner) {
        return parse_call_object(value, &["arguments", "parameters"]);
    }
    let (name, rest) = split_between(inner, FUNCTION, ">")
        .ok_or_else(|| format!("{FUNCTION}NAME> is missing after {OPEN}"))?;
    let name = parse_name(name, FUNCTION)?;
    let mut rest = match rest.rsplit_once(FUNCTION_END) {
        Some((rest, after)) if after.trim().is_empty() => rest,
        // The closing tag is part of a value.
        Some((_, after)) if closed && after.contains(PARAMETER_END) => rest,
        Some((_, after)) => {
            return Err(format!("unexpected text {:?} after {FUNCTION_END}", after.trim()));
        }
        None if closed => rest,
        None => return Err(format!("{FUNCTION_END} is missing")),
    };
    let known = parameter_names(name, tools);
    let mut arguments = Vec::new();
    while !rest.trim().is_empty() {
        let (key, value) = split_between(rest, PARAMETER, ">").ok_or_else(|| {
            format!("expected {PARAMETER}NAME>, but found {:?}", excerpt(rest.trim()))
        })?;
        if !value.contains(PARAMETER_END) {
            return Err(format!("{PARAMETER_END} is missing after {PARAMETER}{}>", excerpt(key)));
        }
        let (value, after) = split_parameter_value(value, [PARAMETER, PARAMETER_END], |key| {
            known.as_ref().is_none_or(|known| known.contains(&key))
        });
        let value = value.strip_prefix('\n').unwrap_or(value);
        arguments.push((parse_name(key, PARAMETER)?, value.strip_suffix('\n').unwrap_or(value)));
        rest = after;
    }
    Ok(make_typed_call(name, arguments, tools))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::CallFormat;
    use super::super::tests::parse_completion;

    const ONE: &str = "<tool_call>\n<function=write>\n<parameter=text>\n";
    const END: &str = "\n</parameter>\n</function>\n</tool_call>";

    #[test]
    fn qwen_xml_values_may_contain_closing_tags() {
        for value in [
            "x\n</tool_call>\nmore",
            "</tool_call>",
            "</tool_call>\nmore",
            "</function>\n</tool_call>\nmore\n</tool_call>\n",
            "a </parameter> b\n</tool_call>",
        ] {
            let completion = format!("{ONE}{value}{END}\nSo.\n{ONE}1{END}");
            let parsed = parse_completion(CallFormat::QwenXml, &completion, &[]);
            let texts: Vec<_> = parsed
                .calls
                .iter()
                .map(|call| call.as_ref().unwrap().arguments["text"].clone())
                .collect();
            assert_eq!(
                (texts, parsed.content.as_str()),
                (vec![json!(value), json!(1)], "So."),
                "{completion}"
            );
        }
    }

    #[test]
    fn call_without_end_of_last_parameter_is_malformed() {
        // The malformed call does not extend into the next call either.
        for rest in ["</tool_call>\nSo.", "</function>\n</tool_call>\nSo."] {
            let parsed =
                parse_completion(CallFormat::QwenXml, &format!("{ONE}1\n{rest}\n{ONE}1{END}"), &[]);
            assert_eq!(
                parsed.calls.iter().map(Result::is_ok).collect::<Vec<_>>(),
                [false, true],
                "{parsed:?}"
            );
            assert_eq!(parsed.content, "So.");
            let parsed = parse_completion(CallFormat::QwenXml, &format!("{ONE}1\n{rest}"), &[]);
            assert!(
                parsed.calls[0].as_ref().is_err_and(|call| call.raw.ends_with("</tool_call>")),
                "{parsed:?}"
            );
            assert_eq!((parsed.calls.len(), parsed.content.as_str()), (1, "So."));
        }
    }
}
