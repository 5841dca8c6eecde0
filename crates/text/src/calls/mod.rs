//! Formats of tool calls, one per file.
//!
//! A format implements [`Syntax`]: the tags in the text, how the body of a call is found between
//! them, and how calls are parsed and written. One parser (`completion_parser.rs`) uses all
//! formats, for complete and streamed completions.
//!
//! # Guarantees
//! - **Every text can be parsed**, and no text is lost: a malformed call keeps its text and an
//!   explanation.
//! - **Round trip**: calls that [`Syntax::render_message`] writes can be parsed again, if the
//!   format can represent them. If arguments stand between tags, a value cannot contain every call
//!   tag in every position.

mod arguments;
mod deepseek;
mod glm;
mod grammar;
mod harmony;
mod hermes;
mod json;
mod kimi;
mod llama;
mod minimax;
mod mistral;
mod python;
mod qwen_xml;
mod tags;
mod values;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub(crate) use arguments::{
    invalid_json_error, parse_arguments, parse_call_object, unclosed_json_error,
};
pub(crate) use grammar::{GrammarContext, Rule};
pub(crate) use json::{JsonProgress, JsonScanner};
pub(crate) use tags::{TagMatch, TagTable};

use crate::{ToolCall, ToolProtocol, ToolSpec};

/// Tags around a tool result, for chat templates that print no tags of their own.
pub(crate) const RESPONSE: [&str; 2] = ["<tool_response>", "</tool_response>"];

/// Content and tool calls that were parsed from a completion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedCompletion {
    /// Text outside of reasoning and calls. Each stretch of the text is trimmed, and line breaks
    /// join the stretches.
    pub content: String,
    /// Tool calls in the order of the text. Their ids `call_0`, `call_1`, … are indices in this
    /// list, which includes malformed calls.
    pub calls: Vec<Result<ToolCall, MalformedCall>>,
    /// Whether the calls were written without tags, although the call format has tags.
    pub bare: bool,
}

/// A tool call that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MalformedCall {
    /// Explanation of the mistake, for the model that wrote the call.
    pub why: String,
    /// Original text of the malformed call, with its tags.
    pub raw: String,
}

impl fmt::Display for MalformedCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed tool call: {}", self.why)
    }
}

/// Maximum length of a call's text before its arguments, in bytes. A call with a longer header is
/// rejected.
pub(crate) const MAX_HEADER: usize = 1024;

/// Tool-call format in which a model writes its calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallFormat {
    #[default]
    Hermes,
    QwenXml,
    Llama,
    /// Mistral's format. `named` is whether `[ARGS]` separates a call's name from its arguments.
    Mistral {
        named: bool,
    },
    /// DeepSeek's format. `fenced` is whether arguments are written in a code fence.
    Deepseek {
        fenced: bool,
    },
    /// GLM's format. `lines` is whether each part of a call is on its own line.
    Glm {
        lines: bool,
    },
    Kimi,
    Minimax,
    Harmony,
}

impl CallFormat {
    /// All tool-call formats, the formats with the most distinctive tags first.
    pub(crate) const ALL: [CallFormat; 12] = [
        CallFormat::Harmony,
        CallFormat::Minimax,
        CallFormat::Kimi,
        CallFormat::Deepseek { fenced: true },
        CallFormat::Deepseek { fenced: false },
        CallFormat::Mistral { named: true },
        CallFormat::Mistral { named: false },
        CallFormat::QwenXml,
        CallFormat::Glm { lines: true },
        CallFormat::Glm { lines: false },
        CallFormat::Hermes,
        CallFormat::Llama,
    ];

    /// Returns the name of the tool-call format in the configuration.
    pub(crate) fn protocol(self) -> ToolProtocol {
        match self {
            CallFormat::Hermes => ToolProtocol::Hermes,
            CallFormat::QwenXml => ToolProtocol::QwenXml,
            CallFormat::Llama => ToolProtocol::Llama,
            CallFormat::Mistral { .. } => ToolProtocol::Mistral,
            CallFormat::Deepseek { .. } => ToolProtocol::Deepseek,
            CallFormat::Glm { .. } => ToolProtocol::Glm,
            CallFormat::Kimi => ToolProtocol::Kimi,
            CallFormat::Minimax => ToolProtocol::Minimax,
            CallFormat::Harmony => ToolProtocol::Harmony,
        }
    }

    /// Returns the implementation of the tool-call format. This is the only function that maps
    /// formats to files.
    pub(crate) fn syntax(self) -> &'static dyn Syntax {
        match self {
            CallFormat::Hermes => &hermes::Hermes,
            CallFormat::QwenXml => &qwen_xml::QwenXml,
            CallFormat::Llama => &llama::Llama,
            CallFormat::Mistral { named: true } => &mistral::Mistral { named: true },
            CallFormat::Mistral { named: false } => &mistral::Mistral { named: false },
            CallFormat::Deepseek { fenced: true } => &deepseek::Deepseek { fenced: true },
            CallFormat::Deepseek { fenced: false } => &deepseek::Deepseek { fenced: false },
            CallFormat::Glm { lines: true } => &glm::Glm { lines: true },
            CallFormat::Glm { lines: false } => &glm::Glm { lines: false },
            CallFormat::Kimi => &kimi::Kimi,
            CallFormat::Minimax => &minimax::Minimax,
            CallFormat::Harmony => &harmony::Harmony,
        }
    }
}

/// Effect of a tag on the text of a completion after the tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagEffect {
    /// The tag starts reasoning.
    ReasoningOpen,
    /// The tag ends reasoning.
    ReasoningClose,
    /// The tag starts a call.
    Call,
    /// The tag ends a call that has not ended by itself.
    Close,
    /// The tag starts a section that contains only calls.
    Section,
    /// The tag ends a section of calls.
    SectionEnd,
    /// The tag has no effect.
    Silent,
}

/// Location of a call's body in its text, or the kind of the text if it is not a call. Offsets are
/// relative to the start of the call's tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallBody {
    /// More text is needed to locate the body.
    More,
    /// The body is JSON, which ends by itself. It starts at this offset.
    Json(usize),
    /// The body is the text up to the closing tag. It starts at this offset.
    Text(usize),
    /// The text is not a call but reasoning, which starts at this offset.
    Reasoning(usize),
    /// The text is not a call but content, which starts at this offset.
    Speech(usize),
    /// The call has no body.
    Missing,
}

/// Whether a tag inside a call's argument is plain text of the argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TagInArgument {
    Yes,
    No,
    /// The tag is text if a later closing tag ends the call before the next call starts.
    IfClosed,
}

impl From<bool> for TagInArgument {
    fn from(holds: bool) -> Self {
        if holds { TagInArgument::Yes } else { TagInArgument::No }
    }
}

/// Result of parsing the text after the JSON of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallTrailer {
    /// More text is needed to decide.
    More,
    /// The rest of the call is complete, with this length in bytes.
    Complete(usize),
    /// The text does not belong to the call, which is therefore malformed.
    Broken,
}

/// Kind of text at the start of a completion's content, in formats whose calls need no tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentStart {
    /// More text is needed to decide.
    More,
    /// The text may be a call.
    Call,
    /// This number of bytes has no meaning and is skipped.
    Silent(usize),
    /// The text is content.
    Speech,
}

/// Reason why a call is malformed, with the malformed part of its text. `raw` is `None` if the
/// complete text is malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MalformedReason {
    pub why: String,
    pub raw: Option<String>,
}

impl From<String> for MalformedReason {
    fn from(why: String) -> Self {
        MalformedReason { why, raw: None }
    }
}

/// A parsed call: the tool's name and its arguments.
pub(crate) type ParsedCall = (String, Map<String, Value>);

/// Tags and descriptive texts of a tool-call format.
#[derive(Debug)]
pub(crate) struct SyntaxTags {
    /// Tags that have an effect within content, each with its effect.
    pub marks: &'static [(&'static str, TagEffect)],
    /// Tags that end a call which has not ended by itself.
    pub closes: &'static [&'static str],
    /// Tags that have an effect within this format's reasoning, in addition to the model's
    /// reasoning tags.
    pub in_reasoning: &'static [(&'static str, TagEffect)],
    /// All texts of the format that are written as special tokens if the model has them.
    pub tags: &'static [&'static str],
    /// Tokens that end a completion in this format, in addition to the stop tokens of the template
    /// and the tokenizer.
    pub stops: &'static [&'static str],
    /// Tokens that end a message, but do not end the completion.
    pub message_ends: &'static [&'static str],
    /// Tags around reasoning. `None` if the format does not define how reasoning is written.
    pub reasoning_tags: Option<[&'static str; 2]>,
    /// Whether calls are recognized only within sections of calls.
    pub only_in_sections: bool,
    /// Description of how a call is written, for the system prompt.
    pub how: &'static str,
    /// Example call with placeholders for values, for a model that learns the format from its
    /// prompt.
    pub example: &'static str,
    /// Tag that starts a call, or the characteristic text of a call without tags. Shown in messages
    /// to the user.
    pub sign: &'static str,
}

impl SyntaxTags {
    /// A format without tags and texts. The formats set only the fields in which they differ.
    pub(crate) const NONE: Self = Self {
        marks: &[],
        closes: &[],
        in_reasoning: &[],
        tags: &[],
        stops: &[],
        message_ends: &[],
        reasoning_tags: None,
        only_in_sections: false,
        how: "",
        example: "",
        sign: "",
    };
}

/// Implementation of a tool-call format: parses and writes calls.
pub(crate) trait Syntax: Sync {
    /// Returns the tags and texts of the tool-call format.
    fn syntax_tags(&self) -> &'static SyntaxTags;

    /// Returns the token that ends a turn with calls (`calls`) or without calls. Returns `None` if
    /// it is the token that the template prints in the history.
    fn turn_end_token(&self, calls: bool) -> Option<&'static str> {
        let _ = calls;
        None
    }

    /// Returns the id of call number `index` of a conversation, a call of the tool `name`. Returns
    /// `None` if templates of this format accept any id.
    fn call_id(&self, name: &str, index: usize) -> Option<String> {
        let _ = (name, index);
        None
    }

    /// Locates the body of a call in a text that starts with a tag of kind [`TagEffect::Call`].
    /// `ended` is whether the text is complete.
    fn locate_body(&self, text: &str, ended: bool) -> CallBody;

    /// Returns whether a tag that would end a call is text of an argument. `before` is the text of
    /// the call before the tag.
    fn tag_in_argument(&self, before: &str, tag: &str) -> TagInArgument {
        let _ = (before, tag);
        TagInArgument::No
    }

    /// Parses the text after the JSON of a call and the white space that follows the JSON. `ended`
    /// is whether the text is complete.
    fn parse_trailer(&self, rest: &str, ended: bool) -> CallTrailer {
        let _ = (rest, ended);
        CallTrailer::Complete(0)
    }

    /// Classifies the text at the start of a completion, after reasoning or after calls (`called`).
    /// `ended` is whether the text is complete.
    fn classify_start(
        &self,
        text: &str,
        called: bool,
        tools: &[ToolSpec],
        ended: bool,
    ) -> ContentStart {
        let _ = (text, called, tools, ended);
        ContentStart::Speech
    }

    /// Parses the calls in a text that includes their tags. `json` is the range of the JSON, if the
    /// body is JSON. Returns `None` if the text is content after all, which is possible only for a
    /// text without a tag.
    fn parse_calls(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        tools: &[ToolSpec],
    ) -> Option<Vec<Result<ParsedCall, MalformedReason>>>;

    /// Explains what is wrong with a call whose body is not valid JSON. `closed` is whether the
    /// call's closing tag is present. Returns `None` in the same case as
    /// [`parse_calls`](Self::parse_calls).
    fn explain_error(&self, text: &str, closed: bool, tools: &[ToolSpec]) -> Option<String> {
        let _ = (text, closed, tools);
        None
    }

    /// Returns the text of an assistant message: its content, then its calls in this format.
    fn render_message(&self, content: &str, calls: &[ToolCall]) -> String;

    /// Returns a grammar of completions that consist only of calls of these tools, in the Lark
    /// dialect of llguidance. Returns `None` if the format has no grammar.
    fn call_grammar(&self, context: &GrammarContext<'_>) -> Option<String> {
        let _ = context;
        None
    }

    /// Returns whether a call that a template printed is in this variant of the tool-call format.
    fn is_variant_of(&self, printed: &str) -> bool {
        let _ = printed;
        true
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
