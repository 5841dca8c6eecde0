//! Outcome of an attempt: reported by its agent, used by scoring and training.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Component, Timings};

/// Reason why an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its turn without calling a tool.
    Answered,
    /// A tool or a simulated user ended the attempt: a game is over, an answer was submitted, or
    /// the user has nothing more to say.
    Ended,
    /// The last allowed completion called a tool.
    MaxTurns,
    /// The attempt was truncated at the limit of sampled tokens.
    MaxTokens,
    /// The model's context is full, so that the model cannot continue.
    Context,
    /// The attempt exceeded its time limit.
    Deadline,
    /// Something other than the model failed; see [`Outcome::error`].
    Failed,
}

impl Finish {
    /// Returns whether the attempt ended by itself, not by a limit or a failure.
    pub fn is_complete(self) -> bool {
        matches!(self, Finish::Answered | Finish::Ended)
    }
}

/// The end of an attempt: its final answer, rewards, counts and failures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Text of the final answer, or of the answer that was accepted by the tool that ended the
    /// attempt. Empty if the attempt did not end with an answer: truncated text, or text next to a
    /// tool call, is not an answer.
    pub final_text: String,
    /// Reasoning of the final completion, which is not part of `final_text`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[serde(rename = "thought")]
    pub reasoning: String,
    /// Components of the reward that scorers returned, in the scorers' order. The components with a
    /// weight add up to the attempt's score.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The part of the final text that was parsed as the answer, from the first scorer that reports
    /// it. `None` if no scorer does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
    /// Reason why the attempt ended.
    pub finish: Finish,
    /// Number of completions that were sampled in the attempt.
    pub turns: u32,
    /// Number of tokens that were sampled in the attempt.
    pub sampled_tokens: usize,
    /// Counts of the attempt's tool calls by result.
    pub calls: CallCounts,
    /// Counts of tool calls by turn, for the turns that contain calls, well-formed or malformed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls_by_turn: Vec<(u32, CallCounts)>,
    /// Sums of rewards from tools by turn, for the turns that have such rewards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "earned_by_turn")]
    pub rewards_by_turn: Vec<(u32, f64)>,
    /// Sums of the metrics of each toolbox, as `TOOLBOX/NAME`: the number of calls (`calls`), the
    /// number of failed calls (`errors`), and metrics that tools report.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tool_metrics: BTreeMap<String, f64>,
    /// Data for scorers that toolboxes returned before they were closed, by toolbox name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[serde(rename = "evidence")]
    pub scorer_inputs: Map<String, Value>,
    /// Positions at which the chat template renders recorded history differently, each with the
    /// turn that follows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<Drift>,
    /// Whether the task's prompt was too long and was truncated.
    #[serde(default, skip_serializing_if = "is_false")]
    #[serde(rename = "prompt_cut")]
    pub prompt_truncated: bool,
    /// Prompts of the attempt that the context policy shortened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "cuts")]
    pub context_truncations: Vec<ContextTruncation>,
    /// Policy that was selected for each agent that several policies can play, by the agent's name.
    /// Empty in records of older versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cast: BTreeMap<String, String>,
    /// Message of the error that ended the attempt. `None` if no error ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Failures of tools, scorers or other parts of the run during the attempt. Only the first few
    /// are kept.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "troubles")]
    pub warnings: Vec<AttemptWarning>,
    /// Times of the attempt's parts, in the process that made the attempt. Never recorded.
    #[serde(skip)]
    pub timings: Timings,
}

impl Outcome {
    /// Creates the initial outcome of an attempt. `finish` is `Failed` until the attempt ends.
    pub fn initial() -> Self {
        Outcome {
            final_text: String::new(),
            reasoning: String::new(),
            components: Vec::new(),
            extracted: None,
            finish: Finish::Failed,
            turns: 0,
            sampled_tokens: 0,
            calls: CallCounts::default(),
            calls_by_turn: Vec::new(),
            rewards_by_turn: Vec::new(),
            tool_metrics: BTreeMap::new(),
            scorer_inputs: Map::new(),
            drift: Vec::new(),
            prompt_truncated: false,
            context_truncations: Vec::new(),
            cast: BTreeMap::new(),
            error: None,
            warnings: Vec::new(),
            timings: Timings::default(),
        }
    }

    /// Creates the outcome of a demonstrated conversation whose final answer is `final_answer`.
    pub fn demonstrated(final_answer: impl Into<String>) -> Self {
        Outcome { final_text: final_answer.into(), finish: Finish::Answered, ..Outcome::initial() }
    }

    /// Adds a failure to the outcome, unless the maximum number of failures is recorded already.
    pub fn add_warning(&mut self, source: impl Into<String>, why: impl Into<String>) {
        if self.warnings.len() < MAX_WARNINGS {
            self.warnings.push(AttemptWarning { source: source.into(), message: why.into() });
        }
    }
}

/// A turn before which the chat template renders the recorded conversation differently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drift {
    /// Number of the turn before which the rendering differs.
    pub turn: u32,
    /// Recorded text, from the first difference on.
    pub recorded: String,
    /// Text that the template renders instead of the recorded text, or its error if it renders
    /// nothing.
    pub printed: String,
    /// Whether the turn was sampled from the template's rendering, in a fork of the conversation.
    #[serde(default, skip_serializing_if = "is_false")]
    pub forked: bool,
}

/// A prompt that exceeded its agent's context limit, and was shortened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextTruncation {
    /// Number of the turn that the prompt starts.
    pub turn: u32,
    /// Name of the agent whose prompt was shortened.
    pub agent: String,
    /// Description of how the prompt was shortened.
    #[serde(rename = "why")]
    pub message: String,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Maximum number of failures that are recorded for an attempt.
const MAX_WARNINGS: usize = 8;

/// A failure of a tool, a scorer or another component during an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptWarning {
    /// Source of the failure: the name of a tool, the scorer, or the attempt itself.
    pub source: String,
    /// Message of the failure.
    #[serde(rename = "why")]
    pub message: String,
}

/// Counts of an attempt's tool calls by result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CallCounts {
    /// Number of calls that returned a result.
    pub ok: u32,
    /// Number of calls that could not be parsed.
    pub malformed: u32,
    /// Number of calls of a tool that does not exist.
    pub unknown_tool: u32,
    /// Number of calls whose arguments do not match the tool's parameters.
    pub bad_arguments: u32,
    /// Number of calls that failed in the tool.
    pub failed: u32,
    /// Number of calls that timed out.
    pub timeout: u32,
    /// Number of calls, of all the kinds above, that the model wrote without tags.
    #[serde(default, skip_serializing_if = "is_0")]
    pub bare: u32,
}

fn is_0(count: &u32) -> bool {
    *count == 0
}

impl CallCounts {
    /// Returns the counts of the calls that were added since `before`.
    pub fn subtract(&self, before: &Self) -> Self {
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

    /// Returns the sums of the two counts, field by field.
    #[must_use]
    pub fn sum_with(&self, other: &Self) -> Self {
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

    /// Returns the number of all tool calls.
    pub fn total(&self) -> u32 {
        self.ok + self.errors()
    }

    /// Returns the number of tool calls that returned no result.
    pub fn errors(&self) -> u32 {
        self.malformed + self.unknown_tool + self.bad_arguments + self.failed + self.timeout
    }
}
