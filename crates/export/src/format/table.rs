//! The table of all sequences: one row per sequence, with everything that the store contains.
//!
//! Values whose fields differ from row to row (the task, the outcome, tools, the arguments of
//! calls) are JSON text, so that every reader of tables sees the same columns in all rows.

use levade_store::Attempt;
use serde_json::{Value, json};

use crate::column::ColumnType::{Boolean, Double, Float, Integer, Text};
use crate::column::{Column, column, list, list_of, message};
use crate::format::{ExportedAttempt, RowOptions, Rows, to_json, tools_to_json};
use crate::sequence::Sequence;

/// Version of the table's columns. The version rises if the meaning of a column changes or a column
/// is removed.
const SCHEMA: u32 = 1;

/// Returns the columns of the table of sequences.
pub fn columns(options: &RowOptions) -> Vec<Column> {
    let component = vec![column("name", Text), column("value", Double), column("weight", Double)];
    let mut columns = vec![
        column("schema", Integer),
        column("run", Text),
        column("attempt", Text),
        column("slot", Text),
        column("purpose", Text),
        column("phase", Integer),
        column("step", Integer),
        column("group", Integer),
        column("sample", Integer),
        column("try", Integer),
        column("status", Text),
        column("task_id", Text),
        column("task_json", Text),
        column("sequence", Integer),
        column("sequences", Integer),
        column("agent", Text),
        column("policy", Text),
        column("messages", list(message())),
        column("tools_json", Text),
        column("text", Text),
        column("problems", list(Text)),
        column("score", Double),
        column("reward", Double),
        column("components", list_of(component)),
        column("step_rewards_json", Text),
        column("final_text", Text),
        column("extracted", Text),
        column("finish", Text),
        column("error", Text),
        column("turns", Integer),
        column("tokens", Integer),
        column("target_tokens", Integer),
        column("weight_versions", list(Integer)),
        column("outcome_json", Text),
    ];
    if options.tokens {
        columns.extend([
            column("token_ids", list(Integer)),
            column("loss_mask", list(Boolean)),
            column("logprobs", list(Float)),
            column("token_versions", list(Integer)),
        ]);
    }
    columns
}

/// Converts a group of attempts into rows, one for each sequence. An attempt without sequences has
/// one row without messages.
pub fn rows(group: &[ExportedAttempt], options: &RowOptions) -> Rows {
    let mut rows = Rows::default();
    for exported in group {
        let none = Sequence::default();
        let sequences = match &exported.sequences[..] {
            [] => std::slice::from_ref(&none),
            all => all,
        };
        for (index, sequence) in sequences.iter().enumerate() {
            rows.rows.push(to_row(exported, index, sequence, options));
        }
    }
    rows
}

fn to_row(
    ExportedAttempt { run, attempt, sequences }: &ExportedAttempt,
    index: usize,
    sequence: &Sequence,
    options: &RowOptions,
) -> Value {
    let Attempt { id, slot, number, task, outcome, score, reward, status, .. } = attempt;
    let components = outcome.components.iter();
    let components = components
        .map(|part| json!({ "name": part.name, "value": part.value, "weight": part.weight }));
    let text_of = |value: &Value| (!value.is_null()).then(|| value.to_string());
    let name = |name: &'_ str| (!name.is_empty()).then(|| name.to_owned());
    let tokens = &sequence.tokens;
    let mut row = json!({
        "schema": SCHEMA,
        "run": run,
        "attempt": id.to_string(),
        "slot": slot.name(),
        "purpose": slot.purpose.name(),
        "phase": slot.phase,
        "step": slot.step,
        "group": slot.group,
        "sample": slot.sample,
        "try": number,
        "status": status.name(),
        "task_id": task.get("id").and_then(Value::as_str),
        "task_json": task.to_string(),
        "sequence": index,
        "sequences": sequences.len(),
        "agent": name(&sequence.agent),
        "policy": name(&sequence.policy),
        "messages": sequence.messages.as_deref().map(to_json),
        "tools_json": text_of(&tools_to_json(sequence)),
        "text": sequence.text,
        "problems": sequence.problems,
        "score": score,
        "reward": reward,
        "components": components.collect::<Vec<_>>(),
        "step_rewards_json": json!(attempt.step_rewards).to_string(),
        "final_text": outcome.final_text,
        "extracted": outcome.extracted,
        "finish": outcome.finish,
        "error": outcome.error,
        "turns": outcome.turns,
        "tokens": tokens.ids.len(),
        "target_tokens": tokens.is_target.iter().filter(|target| **target).count(),
        "weight_versions": tokens.distinct_versions(),
        "outcome_json": json!(outcome).to_string(),
    });
    if options.tokens {
        row["token_ids"] = json!(tokens.ids);
        row["loss_mask"] = json!(tokens.is_target);
        row["logprobs"] = json!(tokens.logprobs);
        row["token_versions"] = json!(tokens.versions);
    }
    row
}
