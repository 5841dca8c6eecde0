//! Formats of tool calls, a file for each: how a reply holds calls, how one is read, how one is written.
//!
//! A format is a [`Syntax`]: tags in the text, and where the body of a call lies between them. All of them
//! are read by one reader (`reader.rs`), as a whole and as they arrive.
//!
//! Guarantees, of every format: any text has a reading, and nothing of it is lost: a call that cannot be
//! understood keeps its text and says why. What [`Syntax::render`] writes reads back, as far as the format
//! can say it at all: if arguments stand between tags, a text cannot hold all tags of calls in all places.

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

pub(crate) use arguments::{arguments_of, call_from, not_closed_json, not_json};
pub(crate) use grammar::{Forms, Rule};
pub(crate) use json::{Json, Progress};
pub(crate) use tags::{Next, Table};

use crate::{ToolCall, ToolProtocol, ToolSpec};

/// Tags around the result of a call, where the template has none of its own.
pub(crate) const RESPONSE: [&str; 2] = ["<tool_response>", "</tool_response>"];

/// Content of a reply and the tools that it calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Parsed {
    /// The text outside of thoughts and calls: each stretch trimmed, joined by line breaks.
    pub content: String,
    /// Calls in the order they were written, with ids `call_0`, `call_1`, … counted over all of them.
    pub calls: Vec<Result<ToolCall, Malformed>>,
    /// Whether the calls were written without tags, in a format that has some.
    pub bare: bool,
}

/// A call that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Malformed {
    /// Fault, in words that help the one who wrote it.
    pub why: String,
    /// Text as it was written, with its tags.
    pub raw: String,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed tool call: {}", self.why)
    }
}

/// The most bytes of a call before its arguments; a longer header is none.
pub(crate) const LONGEST_HEADER: usize = 1024;

/// A format of calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallFormat {
    #[default]
    Hermes,
    QwenXml,
    Llama,
    /// Whether a call is written with `[ARGS]`.
    Mistral {
        named: bool,
    },
    /// Whether arguments are written in a fence.
    Deepseek {
        fenced: bool,
    },
    /// Whether each part of a call stands on a line of its own.
    Glm {
        lines: bool,
    },
    Kimi,
    Minimax,
    Harmony,
}

impl CallFormat {
    /// All formats, those with the most telling tags first.
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

    /// The name that people call it by.
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

    /// The one place that knows which file reads which format.
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

/// Effect of a tag on the text after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// Begins a thought.
    ThoughtOpen,
    /// Ends a thought.
    ThoughtClose,
    /// Begins a call.
    Call,
    /// Ends a call that has not ended by itself.
    Close,
    /// Begins a section that holds nothing but calls.
    Section,
    /// Ends such a section.
    SectionEnd,
    /// Says nothing.
    Silent,
}

/// Where the body of a call begins, or what the text is that begins like one; offsets from the tag on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    /// Not known before more text comes.
    More,
    /// JSON that ends by itself begins here.
    Json(usize),
    /// Text up to the closing tag begins here.
    Text(usize),
    /// Not a call but a thought, which begins here.
    Thought(usize),
    /// Not a call but speech, which begins here.
    Speech(usize),
    /// A call without a body.
    Missing,
}

/// Whether a tag is text of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    Yes,
    No,
    /// It is text if a closing tag that is none ends the call, before the next call begins.
    IfClosed,
}

impl From<bool> for Holds {
    fn from(holds: bool) -> Self {
        if holds { Holds::Yes } else { Holds::No }
    }
}

/// Text behind the JSON of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trailer {
    /// Not known before more text comes.
    More,
    /// The rest of the call, so many bytes.
    Whole(usize),
    /// Something that does not belong there.
    Broken,
}

/// How speech begins, in formats whose calls need no tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begins {
    /// Not known before more text comes.
    More,
    /// With what may be a call.
    Call,
    /// With so many bytes that say nothing.
    Silent(usize),
    /// With words.
    Speech,
}

/// Why a call is malformed, and the part of its text that is meant where that is not all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub why: String,
    pub raw: Option<String>,
}

impl From<String> for Fault {
    fn from(why: String) -> Self {
        Fault { why, raw: None }
    }
}

/// A call as it was written: the tool's name and the arguments.
pub(crate) type Written = (String, Map<String, Value>);

/// Tags and texts of a format.
#[derive(Debug)]
pub(crate) struct Spelling {
    /// Tags that mean something in speech.
    pub marks: &'static [(&'static str, Mark)],
    /// Tags that end a call which has not ended by itself.
    pub closes: &'static [&'static str],
    /// Tags that end a thought of this format, besides those that are known of the model.
    pub in_thought: &'static [(&'static str, Mark)],
    /// All texts that are written as special tokens where the model has such.
    pub tags: &'static [&'static str],
    /// Tokens that end a reply in this format, besides those that the template and the tokenizer name.
    pub stops: &'static [&'static str],
    /// Tokens that end a message but not the reply.
    pub goes_on: &'static [&'static str],
    /// Tags around a thought, where the format says how thoughts are written.
    pub thought_tags: Option<[&'static str; 2]>,
    /// Whether calls are looked for between thoughts only in sections.
    pub only_in_sections: bool,
    /// How a call is written, in words.
    pub how: &'static str,
    /// A call with names in the place of values, for a model that learns the format from its prompt.
    pub example: &'static str,
    /// The tag that tells people where a call begins, or what they look for in its place.
    pub sign: &'static str,
}

impl Spelling {
    /// A format without tags, which the rows of formats start from.
    pub(crate) const NONE: Self = Self {
        marks: &[],
        closes: &[],
        in_thought: &[],
        tags: &[],
        stops: &[],
        goes_on: &[],
        thought_tags: None,
        only_in_sections: false,
        how: "",
        example: "",
        sign: "",
    };
}

/// A format of calls.
pub(crate) trait Syntax: Sync {
    /// The tags and texts of the format.
    fn spelling(&self) -> &'static Spelling;

    /// The token that ends a turn with or without calls, where it is another than the template prints in the
    /// past.
    fn end(&self, calls: bool) -> Option<&'static str> {
        let _ = calls;
        None
    }

    /// The id of the call of a tool at this place in a conversation, where templates of this format accept no
    /// other.
    fn id(&self, name: &str, index: usize) -> Option<String> {
        let _ = (name, index);
        None
    }

    /// Where the body lies in a text that begins with a tag of kind [`Mark::Call`]. `ended` says that no
    /// more text comes.
    fn body(&self, text: &str, ended: bool) -> Body;

    /// Whether a tag that would end a call is text of an argument, given the text of the call before it.
    fn holds(&self, before: &str, tag: &str) -> Holds {
        let _ = (before, tag);
        Holds::No
    }

    /// Reads what stands behind the JSON of a call, and behind white space.
    fn trailer(&self, rest: &str, ended: bool) -> Trailer {
        let _ = (rest, ended);
        Trailer::Whole(0)
    }

    /// How speech begins at the beginning of a reply, behind thoughts and behind calls (`called`).
    fn begins(&self, text: &str, called: bool, tools: &[ToolSpec], ended: bool) -> Begins {
        let _ = (text, called, tools, ended);
        Begins::Speech
    }

    /// Reads the calls of a text that has its tags, and its JSON at `json` where it is of such. `None` where
    /// the text is speech after all, which only a text without a tag may turn out to be.
    fn read(
        &self,
        text: &str,
        json: Option<Range<usize>>,
        tools: &[ToolSpec],
    ) -> Option<Vec<Result<Written, Fault>>>;

    /// Says what is wrong with a call whose body is not the JSON that it should be; `closed` says whether its
    /// closing tag is there. `None` as in [`read`](Self::read).
    fn fault(&self, text: &str, closed: bool, tools: &[ToolSpec]) -> Option<String> {
        let _ = (text, closed, tools);
        None
    }

    /// Text of an assistant's turn: its content, then its calls.
    fn render(&self, content: &str, calls: &[ToolCall]) -> String;

    /// A grammar, in the Lark dialect of llguidance, of replies that call these tools and say nothing else.
    fn grammar(&self, forms: &Forms<'_>) -> Option<String> {
        let _ = forms;
        None
    }

    /// Whether a call that a template printed is written in this variant of the format.
    fn writes(&self, printed: &str) -> bool {
        let _ = printed;
        true
    }
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
