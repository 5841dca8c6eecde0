//! How an attempt ended, as its agent tells it and as scoring and training read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Component;

/// The reason for which an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its turn without calling a tool.
    Answered,
    /// A tool ended it: a game that is over, an answer that was handed in.
    Ended,
    /// Called a tool in the last reply it had.
    MaxTurns,
    /// Was cut at the limit of sampled tokens.
    MaxTokens,
    /// The context was full.
    Context,
    /// Took too long.
    Deadline,
    /// Something outside the model broke; see [`Outcome::error`].
    Failed,
}

impl Finish {
    /// Whether it came to its own end: neither cut by a limit nor broken.
    pub fn is_whole(self) -> bool {
        matches!(self, Finish::Answered | Finish::Ended)
    }
}

/// The end of an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The text of the final answer, or what the tool that ended the attempt took for it. Empty unless the
    /// attempt ended with one: text that was cut, or that came with a call, is not an answer.
    pub final_text: String,
    /// The thoughts of the final reply, which are no part of that text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub thought: String,
    /// Components that scorers gave, in their order; those with a weight add up to the score.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The part of the final text that the first scorer that says so took for the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
    /// Why it ended.
    pub finish: Finish,
    /// How many replies were sampled.
    pub turns: u32,
    /// How many tokens were sampled.
    pub sampled_tokens: usize,
    /// How the tool calls went.
    pub calls: CallCounts,
    /// Counts of each reply that was followed by calls or their like.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls_by_turn: Vec<(u32, CallCounts)>,
    /// Rewards that tools gave for the calls of a turn, added up, where they gave any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earned_by_turn: Vec<(u32, f64)>,
    /// Numbers of the calls of each toolbox, as `TOOLBOX/NAME`, added up: how many there were (`calls`), how
    /// many of these were not answered (`errors`), and what tools measured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tool_metrics: BTreeMap<String, f64>,
    /// Knowledge that toolboxes handed over for the scoring before they were closed, by the toolbox's name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub evidence: Map<String, Value>,
    /// Places where the template prints the past otherwise than it was recorded, by the turn that comes next.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<Drift>,
    /// Whether the prompt was too long, and was cut.
    #[serde(default, skip_serializing_if = "is_false")]
    pub prompt_cut: bool,
    /// Prompts that the context policy made shorter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cuts: Vec<ContextCut>,
    /// The policy that was cast for each agent that several policies play, by the name of the agent. Empty in
    /// records of older builds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cast: BTreeMap<String, String>,
    /// The error that broke it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Things that went wrong around the model, the first few.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
}

impl Outcome {
    /// Outcome of an attempt that has not come anywhere yet.
    pub fn begun() -> Self {
        Outcome {
            final_text: String::new(),
            thought: String::new(),
            components: Vec::new(),
            extracted: None,
            finish: Finish::Failed,
            turns: 0,
            sampled_tokens: 0,
            calls: CallCounts::default(),
            calls_by_turn: Vec::new(),
            earned_by_turn: Vec::new(),
            tool_metrics: BTreeMap::new(),
            evidence: Map::new(),
            drift: Vec::new(),
            prompt_cut: false,
            cuts: Vec::new(),
            cast: BTreeMap::new(),
            error: None,
            troubles: Vec::new(),
        }
    }

    /// Outcome of a conversation that somebody else wrote, and that ends with this answer.
    pub fn demonstrated(answer: impl Into<String>) -> Self {
        Outcome { final_text: answer.into(), finish: Finish::Answered, ..Outcome::begun() }
    }

    /// Writes a trouble down.
    pub fn trouble(&mut self, source: impl Into<String>, why: impl Into<String>) {
        if self.troubles.len() < TROUBLES {
            self.troubles.push(Trouble { source: source.into(), why: why.into() });
        }
    }
}

/// A turn before which the template prints the conversation otherwise than it was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drift {
    /// The turn.
    pub turn: u32,
    /// The recorded text, from where the two differ.
    pub recorded: String,
    /// Text that the template prints there, or why it prints nothing.
    pub printed: String,
    /// Whether the turn was sampled from what the template prints, on a branch of its own.
    #[serde(default, skip_serializing_if = "is_false")]
    pub forked: bool,
}

/// A prompt that was longer than its agent may see, and was made shorter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextCut {
    /// Number of the turn.
    pub turn: u32,
    /// Agent that asked.
    pub agent: String,
    /// How it was made shorter, in words.
    pub why: String,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// How many troubles of an attempt are written down.
const TROUBLES: usize = 8;

/// Something that went wrong around the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// Where: a tool by its name, the scorer, the attempt itself.
    pub source: String,
    /// Reason of the break.
    pub why: String,
}

/// How the calls of an attempt went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CallCounts {
    /// Answered.
    pub ok: u32,
    /// Not readable as a call.
    pub malformed: u32,
    /// Named no tool.
    pub unknown_tool: u32,
    /// Had arguments that do not fit.
    pub bad_arguments: u32,
    /// Could not be answered.
    pub failed: u32,
    /// Were not answered in time.
    pub timeout: u32,
    /// How many of all these were written without tags.
    #[serde(default, skip_serializing_if = "is_0")]
    pub bare: u32,
}

fn is_0(count: &u32) -> bool {
    *count == 0
}

impl CallCounts {
    /// Counts that were added to `before`.
    pub fn since(&self, before: &Self) -> Self {
        CallCounts {
            ok: self.ok - before.ok,
            malformed: self.malformed - before.malformed,
            unknown_tool: self.unknown_tool - before.unknown_tool,
            bad_arguments: self.bad_arguments - before.bad_arguments,
            failed: self.failed - before.failed,
            timeout: self.timeout - before.timeout,
            bare: self.bare - before.bare,
        }
    }

    /// Counts of two together.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        CallCounts {
            ok: self.ok + other.ok,
            malformed: self.malformed + other.malformed,
            unknown_tool: self.unknown_tool + other.unknown_tool,
            bad_arguments: self.bad_arguments + other.bad_arguments,
            failed: self.failed + other.failed,
            timeout: self.timeout + other.timeout,
            bare: self.bare + other.bare,
        }
    }

    /// All calls.
    pub fn total(&self) -> u32 {
        self.ok + self.errors()
    }

    /// All calls that were not answered.
    pub fn errors(&self) -> u32 {
        self.malformed + self.unknown_tool + self.bad_arguments + self.failed + self.timeout
    }
}
