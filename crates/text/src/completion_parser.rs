//! Parses a completion into content, reasoning and tool calls.
//!
//! [`CompletionParser`] processes complete and streamed completions.
//!
//! # Guarantees
//! - **Every text can be parsed**, and the result does not depend on how the text is split into
//!   deltas. The concatenated texts are the input.
//! - **Linear cost**: only a possibly incomplete tag, the header of a call and white space are
//!   examined again.
//! - **Reasoning contains neither content nor calls.** Unclosed reasoning extends to the end.

mod pending_call;

use std::ops::Range;

use crate::calls::{
    CallBody, CallTrailer, ContentStart, JsonProgress, JsonScanner, MalformedCall, MalformedReason,
    ParsedCall, ParsedCompletion, Syntax, TagEffect, TagInArgument, TagMatch, TagTable,
};
use crate::reasoning_tags::ReasoningTagSet;
use crate::{ToolCall, ToolSpec};

/// Kind of a stretch of a completion's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpanKind {
    /// Content of the assistant message, which is sent to the client.
    Speech,
    /// Text between reasoning tags.
    Reasoning,
    /// A tag that starts or ends reasoning.
    ReasoningTag,
    /// Part of a tool call in which tags are plain text.
    Call,
    /// Part of a tool call, or of the text around calls, in which tags count as tags.
    CallTag,
}

/// An event that the parser of a completion reports.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ParserEvent {
    /// Text of one kind. Consecutive texts of the same kind belong to one stretch.
    Text(SpanKind, String),
    /// A tool call, whose text has already been reported.
    Call(Result<ToolCall, MalformedCall>),
    /// The tag that was just reported closes reasoning that was never opened: all text before it
    /// was reasoning.
    Late,
}

/// Collects stretches of text. Each stretch is trimmed, and line breaks join the stretches.
#[derive(Default)]
struct StretchCollector {
    text: String,
    /// Text of the current, unfinished stretch.
    open: String,
}

impl StretchCollector {
    fn end_stretch(&mut self) {
        let stretch = self.open.trim();
        if !stretch.is_empty() {
            if !self.text.is_empty() {
                self.text.push('\n');
            }
            self.text.push_str(stretch);
        }
        self.open.clear();
    }

    fn into_text(mut self) -> String {
        self.end_stretch();
        self.text
    }
}

impl ParsedCompletion {
    /// Collects the content and the tool calls of a complete completion from the parser's events.
    pub(crate) fn from_events(found: Vec<ParserEvent>) -> Self {
        let mut content = StretchCollector::default();
        let mut calls = Vec::new();
        for found in found {
            match found {
                ParserEvent::Text(SpanKind::Speech, text) => content.open.push_str(&text),
                ParserEvent::Text(..) => content.end_stretch(),
                ParserEvent::Call(call) => calls.push(call),
                ParserEvent::Late => (content, calls) = (StretchCollector::default(), Vec::new()),
            }
        }
        for (index, call) in calls.iter_mut().enumerate() {
            if let Ok(call) = call {
                call.id = format!("call_{index}");
            }
        }
        ParsedCompletion { content: content.into_text(), calls, bare: false }
    }
}

/// Returns the reasoning of a complete completion from the parser's events.
pub(crate) fn collect_reasoning(found: &[ParserEvent]) -> String {
    let mut reasoning = StretchCollector::default();
    let mut all = String::new();
    for found in found {
        match found {
            ParserEvent::Text(SpanKind::ReasoningTag, _) => reasoning.end_stretch(),
            ParserEvent::Text(part, text) => {
                all.push_str(text);
                if *part == SpanKind::Reasoning {
                    reasoning.open.push_str(text)
                } else {
                    reasoning.end_stretch()
                }
            }
            ParserEvent::Call(_) => {}
            ParserEvent::Late => {
                reasoning = StretchCollector { text: String::new(), open: all.clone() };
                reasoning.end_stretch();
            }
        }
    }
    reasoning.into_text()
}

/// Splits a text that was written rather than sampled, such as a demonstration, into plain text and
/// tags. A tag counts even if it does not start a valid call.
pub(crate) fn split_at_tags(
    tags: &TagTables,
    text: &str,
    in_reasoning: bool,
) -> Vec<(SpanKind, String)> {
    let (found, _) = CompletionParser::parse_complete(tags, text, in_reasoning, &[]);
    let mut spans = Vec::new();
    for found in found {
        match found {
            ParserEvent::Text(SpanKind::Speech | SpanKind::CallTag, text) => {
                let mut at = 0;
                while let TagMatch::Tag(tag, _) = tags.written.find_tag(&text, at, true) {
                    spans.push((SpanKind::Call, text[at..tag.start].to_owned()));
                    spans.push((SpanKind::CallTag, text[tag.clone()].to_owned()));
                    at = tag.end;
                }
                spans.push((SpanKind::Call, text[at..].to_owned()));
            }
            ParserEvent::Text(part, text) => spans.push((part, text)),
            ParserEvent::Call(_) | ParserEvent::Late => {}
        }
    }
    spans.retain(|(_, span)| !span.is_empty());
    spans
}

/// Tag tables of a model, one for each state of the completion parser.
#[derive(Debug, Clone)]
pub(crate) struct TagTables {
    pub syntax: &'static dyn Syntax,
    speech: TagTable,
    reasoning: TagTable,
    call: TagTable,
    /// Tags that the model writes as special tokens.
    written: TagTable,
}

impl std::fmt::Debug for dyn Syntax {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.syntax_tags().sign)
    }
}

impl TagTables {
    pub(crate) fn new(reasoning: &ReasoningTagSet, syntax: &'static dyn Syntax) -> Self {
        // A format that defines how reasoning is written handles the reasoning tags itself.
        let pairs =
            if syntax.syntax_tags().reasoning_tags.is_some() { &[] } else { reasoning.pairs() };
        let opens = || pairs.iter().map(|tags| (tags.open.as_str(), TagEffect::ReasoningOpen));
        let closes = || pairs.iter().map(|tags| (tags.close.as_str(), TagEffect::ReasoningClose));
        let marks = || syntax.syntax_tags().marks.iter().copied();
        let ends = syntax.syntax_tags().closes.iter().map(|&tag| (tag, TagEffect::Close));
        TagTables {
            syntax,
            speech: TagTable::new(marks().chain(opens()).chain(closes())),
            reasoning: TagTable::new(
                closes().chain(syntax.syntax_tags().in_reasoning.iter().copied()),
            ),
            call: TagTable::new(ends.chain(marks()).chain(opens()).chain(closes())),
            written: TagTable::new(
                syntax.syntax_tags().tags.iter().map(|&tag| (tag, TagEffect::Silent)),
            ),
        }
    }
}

/// A tool call that is being parsed.
#[derive(Debug, Clone)]
struct PendingCall {
    body: CallBody,
    json: JsonScanner,
    /// Offsets of the end of the JSON, and of the end of the white space after it. `None` until the
    /// JSON is complete.
    ended: Option<(usize, usize)>,
    broken: bool,
    /// The tag that ends the call's body. `None` until the tag is found.
    tag: Option<(Range<usize>, TagEffect)>,
    /// The first tag that ends the call's body unless a later closing tag ends it. `None` if there
    /// is no such tag.
    doubtful: Option<(Range<usize>, TagEffect)>,
    /// Offset up to which the text was searched for the tag that ends the body.
    searched: usize,
    /// Length of the call's text that was already reported, in bytes.
    reported: usize,
    /// Whether the call started without a tag.
    bare: bool,
}

impl PendingCall {
    fn new(bare: bool) -> Self {
        PendingCall {
            body: CallBody::More,
            json: JsonScanner::new(),
            ended: None,
            broken: false,
            tag: None,
            doubtful: None,
            searched: 0,
            reported: 0,
            bare,
        }
    }
}

/// Result of searching for the end of a tool call. Lengths are in bytes.
enum CallEnd {
    /// The end of the call is not found yet. The length is the part of the text that certainly
    /// belongs to the call.
    Open(usize),
    /// The call is complete. It has this length, and its JSON has this range if its body is JSON.
    Complete(usize, Option<Range<usize>>),
    /// The call is malformed. It has this length, and the flag is whether its closing tag is
    /// present.
    Broken(usize, bool),
    /// The text is not a call, but a header of this length before reasoning or content.
    Header(usize, ParserState),
}

#[derive(Debug, Clone, Default)]
enum ParserState {
    #[default]
    Speech,
    Reasoning,
    Call(Box<PendingCall>),
}

/// Incremental parser of a completion's reasoning, content and tool calls.
#[derive(Debug, Clone, Default)]
pub(crate) struct CompletionParser {
    state: ParserState,
    /// Buffered text of the completion. The part from `at` on has not been reported yet.
    text: String,
    at: usize,
    /// Number of tool calls that were parsed so far.
    calls: usize,
    /// Whether content followed the last call. After content, no call without a tag can start.
    spoken: bool,
    /// The number of calls before the current section, and the text in the section that is not a
    /// call. `None` outside of a section.
    section: Option<(usize, String)>,
}

impl CompletionParser {
    /// Creates a parser of a completion. `in_reasoning` is whether the prompt has already opened
    /// the reasoning.
    pub(crate) fn new(in_reasoning: bool) -> Self {
        CompletionParser {
            state: if in_reasoning { ParserState::Reasoning } else { ParserState::Speech },
            ..CompletionParser::default()
        }
    }

    /// Parses a complete completion. Also returns whether the completion ends inside reasoning.
    pub(crate) fn parse_complete(
        tags: &TagTables,
        text: &str,
        in_reasoning: bool,
        tools: &[ToolSpec],
    ) -> (Vec<ParserEvent>, bool) {
        let mut reader = CompletionParser::new(in_reasoning);
        let mut found = Vec::new();
        reader.push(tags, tools, text, &mut found);
        reader.finish(tags, tools, &mut found);
        (found, matches!(reader.state, ParserState::Reasoning))
    }

    /// Parses more text of the completion, and appends its events to `found`.
    pub(crate) fn push(
        &mut self,
        tags: &TagTables,
        tools: &[ToolSpec],
        text: &str,
        found: &mut Vec<ParserEvent>,
    ) {
        self.text.push_str(text);
        self.advance(tags, tools, false, found);
        // The text of a call is kept until the call ends.
        let kept = if let ParserState::Call(pending) = &self.state { pending.reported } else { 0 };
        self.text.drain(..self.at - kept);
        self.at = kept;
    }

    /// Parses the text that was held back, at the end of the completion.
    pub(crate) fn finish(
        &mut self,
        tags: &TagTables,
        tools: &[ToolSpec],
        found: &mut Vec<ParserEvent>,
    ) {
        self.advance(tags, tools, true, found);
        self.report_gap(found);
        self.end_section(found);
    }

    fn advance(
        &mut self,
        tags: &TagTables,
        tools: &[ToolSpec],
        ended: bool,
        found: &mut Vec<ParserEvent>,
    ) {
        loop {
            let continues = match &mut self.state {
                ParserState::Speech => self.parse_content(tags, tools, ended, found),
                ParserState::Reasoning => self.parse_reasoning(tags, ended, found),
                ParserState::Call(_) => self.parse_call(tags, tools, ended, found),
            };
            if !continues {
                return;
            }
        }
    }

    /// Reports the text up to offset `end` as text of kind `part`.
    fn report_text(&mut self, part: SpanKind, end: usize, found: &mut Vec<ParserEvent>) {
        if end > self.at {
            found.push(ParserEvent::Text(part, self.text[self.at..end].to_owned()));
            self.at = end;
        }
    }

    fn parse_content(
        &mut self,
        tags: &TagTables,
        tools: &[ToolSpec],
        ended: bool,
        found: &mut Vec<ParserEvent>,
    ) -> bool {
        if !self.spoken && self.section.is_none() {
            let rest = &self.text[self.at..];
            let start = self.at + rest.len() - rest.trim_start().len();
            let content_start =
                tags.syntax.classify_start(&self.text[start..], self.calls > 0, tools, ended);
            match content_start {
                _ if start == self.text.len() => {}
                ContentStart::More => {
                    self.report_text(SpanKind::Speech, start, found);
                    return false;
                }
                ContentStart::Call => {
                    self.report_text(SpanKind::Speech, start, found);
                    self.state = ParserState::Call(Box::new(PendingCall::new(true)));
                    return true;
                }
                ContentStart::Silent(len) => {
                    self.report_text(SpanKind::Speech, start, found);
                    self.report_text(SpanKind::CallTag, start + len, found);
                    return true;
                }
                ContentStart::Speech => {}
            }
        }
        let next = tags.speech.find_tag(&self.text, self.at, ended);
        let (tag, effect) = match next {
            TagMatch::Tag(tag, effect) => (tag, effect),
            TagMatch::Partial(at) => {
                self.report_content(at, found);
                return false;
            }
            TagMatch::None => {
                self.report_content(self.text.len(), found);
                return false;
            }
        };
        let outside = self.section.is_none() && tags.syntax.syntax_tags().only_in_sections;
        if (effect == TagEffect::Call && outside)
            || (effect == TagEffect::SectionEnd && self.section.is_none())
        {
            self.report_content(tag.end, found);
            return true;
        }
        self.report_content(tag.start, found);
        self.report_gap(found);
        match effect {
            TagEffect::ReasoningOpen => {
                self.report_text(SpanKind::ReasoningTag, tag.end, found);
                self.state = ParserState::Reasoning;
            }
            TagEffect::ReasoningClose => {
                self.report_text(SpanKind::ReasoningTag, tag.end, found);
                found.push(ParserEvent::Late);
            }
            TagEffect::Call => self.state = ParserState::Call(Box::new(PendingCall::new(false))),
            TagEffect::Section => {
                self.end_section(found);
                self.report_text(SpanKind::CallTag, tag.end, found);
                self.section = Some((self.calls, String::new()));
            }
            TagEffect::SectionEnd => {
                self.report_text(SpanKind::CallTag, tag.end, found);
                self.end_section(found);
            }
            TagEffect::Silent | TagEffect::Close => {
                self.report_text(SpanKind::CallTag, tag.end, found)
            }
        }
        true
    }

    /// Reports the text up to offset `end` as content. Within a section of calls, the text is
    /// collected as a gap between calls instead.
    fn report_content(&mut self, end: usize, found: &mut Vec<ParserEvent>) {
        let text = &self.text[self.at..end];
        match &mut self.section {
            Some((_, gap)) => {
                gap.push_str(text);
                self.report_text(SpanKind::CallTag, end, found);
            }
            None => {
                self.spoken |= !text.trim().is_empty();
                self.report_text(SpanKind::Speech, end, found);
            }
        }
    }

    /// Reports the text between two calls of a section as a malformed call.
    fn report_gap(&mut self, found: &mut Vec<ParserEvent>) {
        let Some((_, gap)) = &mut self.section else { return };
        let raw = std::mem::take(gap).trim().to_owned();
        if !raw.is_empty() {
            let why = "this section must contain only calls, but contains other text".into();
            self.report_calls(vec![Err(MalformedReason { why, raw: Some(raw) })], "", found);
        }
    }

    /// Ends a section of calls. Reports a malformed call if the section contained no calls.
    fn end_section(&mut self, found: &mut Vec<ParserEvent>) {
        if let Some((before, _)) = self.section.take()
            && before == self.calls
        {
            self.report_calls(
                vec![Err(MalformedReason::from("there is no call between the tags".to_owned()))],
                "",
                found,
            );
        }
    }

    fn report_calls(
        &mut self,
        calls: Vec<Result<ParsedCall, MalformedReason>>,
        text: &str,
        found: &mut Vec<ParserEvent>,
    ) {
        for call in calls {
            found.push(ParserEvent::Call(match call {
                Ok((name, arguments)) => Ok(ToolCall {
                    id: format!("call_{}", self.calls),
                    name,
                    arguments: arguments.into(),
                }),
                Err(MalformedReason { why, raw }) => Err(MalformedCall {
                    why,
                    raw: raw.unwrap_or_else(|| text.trim_end().to_owned()),
                }),
            }));
            self.calls += 1;
            self.spoken = false;
        }
    }

    fn parse_reasoning(
        &mut self,
        tags: &TagTables,
        ended: bool,
        found: &mut Vec<ParserEvent>,
    ) -> bool {
        match tags.reasoning.find_tag(&self.text, self.at, ended) {
            TagMatch::Tag(tag, effect) => {
                self.report_text(SpanKind::Reasoning, tag.start, found);
                if effect == TagEffect::Call {
                    self.state = ParserState::Call(Box::new(PendingCall::new(false)));
                } else {
                    self.report_text(SpanKind::ReasoningTag, tag.end, found);
                    self.state = ParserState::Speech;
                }
                true
            }
            TagMatch::Partial(at) => {
                self.report_text(SpanKind::Reasoning, at, found);
                false
            }
            TagMatch::None => {
                self.report_text(SpanKind::Reasoning, self.text.len(), found);
                false
            }
        }
    }

    fn parse_call(
        &mut self,
        tags: &TagTables,
        tools: &[ToolSpec],
        ended: bool,
        found: &mut Vec<ParserEvent>,
    ) -> bool {
        let ParserState::Call(pending) = &mut self.state else { return true };
        let start = self.at - pending.reported;
        let text = &self.text[start..];
        let syntax = tags.syntax;
        let (len, calls, json) = match pending.find_end(tags, text, ended) {
            CallEnd::Open(sure) if pending.bare || sure <= pending.reported => return false,
            CallEnd::Open(sure) => {
                found.push(ParserEvent::Text(
                    SpanKind::CallTag,
                    text[pending.reported..sure].to_owned(),
                ));
                pending.reported = sure;
                self.at = start + sure;
                return false;
            }
            CallEnd::Header(len, state) => {
                let part = if matches!(state, ParserState::Reasoning) {
                    SpanKind::ReasoningTag
                } else {
                    SpanKind::CallTag
                };
                self.state = state;
                self.report_text(part, start + len, found);
                return true;
            }
            CallEnd::Complete(len, json) => {
                (len, syntax.parse_calls(&text[..len], json.clone(), tools), json)
            }
            CallEnd::Broken(len, closed) => {
                let problem = syntax.explain_error(&text[..len], closed, tools);
                (len, problem.map(|why| vec![Err(MalformedReason::from(why))]), None)
            }
        };
        let calls = match calls {
            Some(calls) => calls,
            None if pending.bare => {
                (self.state, self.spoken) = (ParserState::Speech, true);
                return true;
            }
            None => vec![Err(MalformedReason::from("the text is not a call".to_owned()))],
        };
        let reported = pending.reported;
        let raw = text[..len].to_owned();
        self.state = ParserState::Speech;
        match json.filter(|_| reported == 0) {
            Some(json) => {
                self.report_text(SpanKind::CallTag, start + json.start, found);
                self.report_text(SpanKind::Call, start + json.end, found);
                self.report_text(SpanKind::CallTag, start + len, found);
            }
            None => self.report_text(SpanKind::CallTag, start + len, found),
        }
        self.report_calls(calls, &raw, found);
        true
    }
}
