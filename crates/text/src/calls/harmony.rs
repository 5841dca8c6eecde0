//! Completions of gpt-oss, which consist of messages.
//!
//! A message starts with a header up to `<|message|>`: a channel, and a recipient if it calls a
//! tool. Its body is reasoning (channel `analysis`), content, or the JSON arguments of a call.
//!
//! - The prompt ends with `<|start|>assistant`, so a completion starts with a channel or with `
//!   to=`.
//! - A message with a recipient is a call, whatever its channel. The prefix `functions.` of its
//!   tool is removed.
//! - `<|call|>` ends a call and the completion, `<|return|>` ends the completion, and `<|end|>`
//!   ends a message that is followed by another one.
//! - Arguments that are not JSON end at the next tag. Tags inside JSON strings are text.

use std::ops::Range;

use super::tags::find_header_end;
use super::values::arguments_json;
use super::{
    CallBody, ContentStart, GrammarContext, MalformedReason, ParsedCall, Syntax, SyntaxTags,
    TagEffect, invalid_json_error, parse_arguments,
};
use crate::{ToolCall, ToolSpec};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";
const RECIPIENT: &str = "to=";
/// Tags around reasoning in demonstrations, in the Harmony format.
pub(crate) const REASONING_TAGS: [&str; 2] =
    ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant"];

/// The tool-call format Harmony of gpt-oss.
pub(crate) struct Harmony;

static SPELLING: SyntaxTags = SyntaxTags {
    marks: &[
        (START, TagEffect::Call),
        (CHANNEL, TagEffect::Call),
        (MESSAGE, TagEffect::Silent),
        (CONSTRAIN, TagEffect::Silent),
        (END, TagEffect::Silent),
        (RETURN, TagEffect::Silent),
        (CALL, TagEffect::Silent),
    ],
    closes: &[CALL, END, RETURN],
    in_reasoning: &[
        (START, TagEffect::Call),
        (CHANNEL, TagEffect::Call),
        (END, TagEffect::ReasoningClose),
        (RETURN, TagEffect::ReasoningClose),
        (CALL, TagEffect::ReasoningClose),
    ],
    tags: &[START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL],
    stops: &[RETURN, CALL],
    message_ends: &[END],
    reasoning_tags: Some(REASONING_TAGS),
    how: "a message to it on the commentary channel",
    sign: "to=functions.",
    example: "<|channel|>commentary to=functions.TOOL \
              <|constrain|>json<|message|>{\"PARAMETER\": VALUE}<|call|>",
    ..SyntaxTags::NONE
};

impl Syntax for Harmony {
    fn syntax_tags(&self) -> &'static SyntaxTags {
        &SPELLING
    }

    fn turn_end_token(&self, calls: bool) -> Option<&'static str> {
        Some(if calls { CALL } else { RETURN })
    }

    fn locate_body(&self, text: &str, ended: bool) -> CallBody {
        let at = match find_header_end(text, &[MESSAGE], ended) {
            Some(Some((at, _))) => at,
            Some(None) => return CallBody::Missing,
            None => return CallBody::More,
        };
        let header = &text[..at];
        let from = at + MESSAGE.len();
        if parse_recipient(header).is_some() {
            return CallBody::Json(from);
        }
        match header
            .split_once(CHANNEL)
            .map(|(_, channel)| channel.trim_start().starts_with("analysis"))
        {
            Some(true) => CallBody::Reasoning(from),
            _ => CallBody::Speech(from),
        }
    }

    fn classify_start(
        &self,
        text: &str,
        called: bool,
        _: &[ToolSpec],
        ended: bool,
    ) -> ContentStart {
        if text.starts_with(RECIPIENT) && !called {
            ContentStart::Call
        } else if RECIPIENT.starts_with(text) && !ended && !called {
            ContentStart::More
        } else {
            ContentStart::Speech
        }
    }

    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        _: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>> {
        let json = json?;
        let name = parse_recipient(&text[..json.start])?;
        Some(vec![parse_arguments(name, &text[json]).map_err(MalformedReason::from)])
    }

    fn explain_error(&self, text: &str, _: bool, _: &[ToolSpec]) -> Option<String> {
        let Some((header, body)) = text.split_once(MESSAGE) else {
            let tagged = text.starts_with("<|");
            return tagged.then(|| {
                format!("{MESSAGE} is missing after {:?}", crate::excerpt::excerpt(text))
            });
        };
        parse_recipient(header)?;
        let body =
            SPELLING.closes.iter().find_map(|close| body.strip_suffix(close)).unwrap_or(body);
        Some(invalid_json_error(body))
    }

    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String {
        // Reasoning, or a completion as it was sampled, already contains its tags.
        let (reasoning, message) = match content.rfind(REASONING_TAGS[1]) {
            Some(at) => content.split_at(at + REASONING_TAGS[1].len()),
            None => ("", content),
        };
        let is_written = message.trim_start().starts_with(CHANNEL)
            || message.trim_start().starts_with(RECIPIENT);
        let mut text = match (message, calls) {
            _ if is_written => content.to_owned(),
            (message, []) => format!("{reasoning}{CHANNEL}final{MESSAGE}{message}"),
            (message, _) if message.trim().is_empty() => reasoning.to_owned(),
            (message, _) => {
                format!("{reasoning}{CHANNEL}commentary{MESSAGE}{message}{END}{START}assistant")
            }
        };
        for (index, call) in calls.iter().enumerate() {
            if index > 0 {
                text.push_str(&format!("{CALL}{START}assistant"));
            }
            let name = &call.name;
            let arguments = arguments_json(call);
            text.push_str(&format!(
                "{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{arguments}"
            ));
        }
        text
    }

    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        // A completion ends with its first call. Reasoning may precede it.
        let context = &GrammarContext { several: false, ..*context };
        let mut text = context.calls_grammar(["", "", ""], |at, tool| {
            let header =
                format!("{CHANNEL}commentary to=functions.{} {CONSTRAIN}json{MESSAGE}", tool.name);
            context.arguments_rule(at, tool, &header, "")
        });
        let reasoning = context.text_rule("thought", REASONING_TAGS[1]);
        text = text.replacen(
            "start: ",
            &format!(
                "start: ({} {})? ",
                context.terms_for_text(REASONING_TAGS[0]),
                reasoning.terms
            ),
            1,
        );
        Some(text + &reasoning.rules)
    }
}

/// Returns the name of the tool to which a message's header is addressed, or `None` if the message
/// is not a call.
fn parse_recipient(header: &str) -> Option<&str> {
    let (before, to) = header.split_once(RECIPIENT)?;
    if !before.is_empty() && !before.ends_with([' ', '>', '\n']) {
        return None;
    }
    let end = to.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(to.len());
    let name = to[..end].strip_prefix("functions.").unwrap_or(&to[..end]);
    (!["", "assistant", "user", "all"].contains(&name)).then_some(name)
}
