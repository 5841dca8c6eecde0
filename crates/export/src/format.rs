//! Formats of rows, and the functions that several formats use.

mod atif;
mod table;
mod trl;
mod verl;

use levade_store::Attempt;
use levade_text::Message;
use serde_json::Value;

use crate::column::Column;
use crate::sequence::Sequence;

/// Start of the SHA-256 hash of a part of a row, so that memory does not grow with its size.
pub type RowKey = [u8; 16];

/// Format of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One row per sequence, with everything that the store contains about it.
    Table,
    /// Prompts for reinforcement learning with verl, one row per task.
    Verl,
    /// Conversations for supervised fine-tuning with verl.
    VerlSft,
    /// Conversations for supervised fine-tuning with TRL.
    TrlSft,
    /// Pairs of a better and a worse attempt at one task, for TRL.
    TrlPreference,
    /// Trajectories in the Agent Trajectory Interchange Format of Harbor.
    Atif,
}

/// Options that determine the rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowOptions {
    /// Whether the rows contain the tokens.
    pub tokens: bool,
    /// Whether rows for supervised fine-tuning with TRL have `prompt` and `completion` in place of
    /// `messages`.
    pub split_prompt: bool,
    /// Minimum difference of the two scores of a pair. A difference of 0 is never a pair.
    pub min_gap: f64,
}

/// An attempt with its sequences.
#[derive(Debug, Clone)]
pub struct ExportedAttempt {
    /// Id of the run.
    pub run: String,
    /// Recorded attempt.
    pub attempt: Attempt,
    /// The sequences that are exported.
    pub sequences: Vec<Sequence>,
}

/// The rows of a group of attempts.
#[derive(Debug, Default, PartialEq)]
pub struct Rows {
    /// JSON objects with the columns of the format.
    pub rows: Vec<Value>,
    /// Reasons for missing rows: one for each attempt or sequence that has no row.
    pub skipped: Vec<String>,
}

impl Rows {
    /// Notes that an attempt has no row.
    pub(crate) fn skip(&mut self, attempt: &Attempt, why: &str) {
        self.skipped.push(format!("{}: {why}", attempt.slot.name()));
    }
}

impl Format {
    /// Returns the columns of the format. `None` if its rows have no common columns, so that they
    /// can be written only as JSON.
    pub fn columns(self, options: &RowOptions) -> Option<Vec<Column>> {
        match self {
            Format::Table => Some(table::columns(options)),
            Format::Verl => Some(verl::columns()),
            Format::VerlSft => Some(verl::sft_columns()),
            Format::TrlSft | Format::TrlPreference | Format::Atif => None,
        }
    }

    /// Returns the rows of the attempts of a group, in order.
    pub fn rows(self, group: &[ExportedAttempt], options: &RowOptions) -> Rows {
        match self {
            Format::Table => table::rows(group, options),
            Format::Verl => verl::rows(group),
            Format::VerlSft => verl::sft_rows(group),
            Format::TrlSft => trl::sft_rows(group, options),
            Format::TrlPreference => trl::preference_rows(group, options),
            Format::Atif => atif::rows(group, options),
        }
    }

    /// Returns whether the messages must contain only text ([`SequenceReader::new`]).
    ///
    /// [`SequenceReader::new`]: crate::SequenceReader::new
    pub fn is_raw(self) -> bool {
        self == Format::VerlSft
    }

    /// Returns whether only the first of several rows with the same
    /// [`distinct_key`](Self::distinct_key) is kept.
    pub fn has_distinct_rows(self) -> bool {
        self == Format::Verl
    }

    /// Returns a key of the part of a row that distinguishes it from all other rows of a table.
    /// `None` if equal rows are kept.
    pub fn distinct_key(self, row: &Value) -> Option<RowKey> {
        self.has_distinct_rows().then(|| verl::distinct_key(row))
    }
}

/// Reason why a sequence without messages has no row in a format that consists of messages.
pub const NO_MESSAGES: &str = "the sequence has no messages";

/// Returns the number of messages before the first completion.
pub fn prompt_len(sequence: &Sequence) -> usize {
    sequence.completions.first().map_or(0, |completion| completion.message)
}

/// Returns messages in OpenAI's format. The content of each is text.
pub fn to_json(messages: &[Message]) -> Value {
    Value::Array(messages.iter().map(message_to_json).collect())
}

fn message_to_json(message: &Message) -> Value {
    let mut value = serde_json::to_value(message).unwrap_or_default();
    value["content"] = message.content.as_str().into();
    value
}

/// Returns messages like [`to_json`], but with the arguments of calls as objects, which chat
/// templates of transformers expect.
pub fn to_template_json(messages: &[Message]) -> Value {
    let mut value = to_json(messages);
    for (message, json) in messages.iter().zip(value.as_array_mut().into_iter().flatten()) {
        let calls = json.get_mut("tool_calls").and_then(Value::as_array_mut);
        for (call, json) in message.tool_calls.iter().zip(calls.into_iter().flatten()) {
            json["function"]["arguments"] = call.arguments.clone().into();
        }
    }
    value
}

/// Returns tools in OpenAI's format, or null if there are none.
pub fn tools_to_json(sequence: &Sequence) -> Value {
    if sequence.tools.is_empty() {
        return Value::Null;
    }
    Value::Array(sequence.tools.iter().map(levade_text::ToolSpec::to_openai).collect())
}
