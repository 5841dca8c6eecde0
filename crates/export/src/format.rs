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

/// Key of a row: the first bytes of the SHA-256 hash of a part of the row. The size of a key does
/// not grow with the row.
pub type RowKey = [u8; 16];

/// Format of the exported rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One row per sequence, with everything that the store contains about the sequence.
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

/// Options that determine the content of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowOptions {
    /// Whether the rows contain the tokens.
    pub tokens: bool,
    /// Whether rows for supervised fine-tuning with TRL contain `prompt` and `completion` instead
    /// of `messages`.
    pub split_prompt: bool,
    /// Minimum difference between the two scores of a pair. Attempts with equal scores never form a
    /// pair.
    pub min_gap: f64,
}

/// Attempt of an export, with the sequences that are exported.
#[derive(Debug, Clone)]
pub struct ExportedAttempt {
    /// Id of the run that made the attempt.
    pub run: String,
    /// Recorded attempt.
    pub attempt: Attempt,
    /// Sequences of the attempt that are exported.
    pub sequences: Vec<Sequence>,
}

/// Rows of a group of attempts, with the reasons for missing rows.
#[derive(Debug, Default, PartialEq)]
pub struct Rows {
    /// Rows as JSON objects, whose fields are the columns of the format.
    pub rows: Vec<Value>,
    /// Reasons for missing rows: one reason for each attempt or sequence that has no row.
    pub skipped: Vec<String>,
}

impl Rows {
    /// Adds the reason why an attempt has no row.
    pub(crate) fn skip_attempt(&mut self, attempt: &Attempt, why: &str) {
        self.skipped.push(format!("{}: {why}", attempt.slot.name()));
    }
}

impl Format {
    /// Returns the columns of the format. Returns `None` if the rows of the format have no common
    /// columns and can be written only as JSON.
    pub fn columns(self, options: &RowOptions) -> Option<Vec<Column>> {
        match self {
            Format::Table => Some(table::columns(options)),
            Format::Verl => Some(verl::columns()),
            Format::VerlSft => Some(verl::sft_columns()),
            Format::TrlSft | Format::TrlPreference | Format::Atif => None,
        }
    }

    /// Converts the attempts of a group into rows of the format, in order.
    pub fn rows(self, group: &[ExportedAttempt], options: &RowOptions) -> Rows {
        match self {
            Format::Table => table::rows(group, options),
            Format::Verl => verl::rows(group),
            Format::VerlSft => verl::to_sft_rows(group),
            Format::TrlSft => trl::to_sft_rows(group, options),
            Format::TrlPreference => trl::to_preference_rows(group, options),
            Format::Atif => atif::rows(group, options),
        }
    }

    /// Returns whether the messages of the format must contain only text, as
    /// [`SequenceReader::new`] describes.
    ///
    /// [`SequenceReader::new`]: crate::SequenceReader::new
    pub fn needs_raw_messages(self) -> bool {
        self == Format::VerlSft
    }

    /// Returns whether the format keeps only the first of several rows with the same
    /// [`distinct_key`](Self::distinct_key).
    pub fn has_distinct_rows(self) -> bool {
        self == Format::Verl
    }

    /// Returns a key of the part of a row that distinguishes it from all other rows of a table.
    /// Returns `None` if the format keeps equal rows.
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

/// Converts messages to OpenAI's format. The content of each message is text.
pub fn to_json(messages: &[Message]) -> Value {
    Value::Array(messages.iter().map(message_to_json).collect())
}

fn message_to_json(message: &Message) -> Value {
    let mut value = serde_json::to_value(message).unwrap_or_default();
    value["content"] = message.content.as_str().into();
    value
}

/// Converts messages to OpenAI's format like [`to_json`], but with the arguments of tool calls as
/// objects, which chat templates of transformers expect.
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

/// Converts the tools of a sequence to OpenAI's format. Returns null if there are no tools.
pub fn tools_to_json(sequence: &Sequence) -> Value {
    if sequence.tools.is_empty() {
        return Value::Null;
    }
    Value::Array(sequence.tools.iter().map(levade_text::ToolSpec::to_openai).collect())
}
