//! Rows of verl: prompts for reinforcement learning, and conversations for supervised fine-tuning.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::column::ColumnType::{Double, Integer, Struct, Text};
use crate::column::{Column, column, list};
use crate::format::{ExportedAttempt, NO_MESSAGES, RowKey, Rows, prompt_len, to_json};

/// Returns the columns of rows with prompts for verl.
pub fn columns() -> Vec<Column> {
    let prompt = vec![column("role", Text), column("content", Text)];
    let reward_model = vec![column("style", Text), column("ground_truth", Text)];
    let extra_info = vec![
        column("split", Text),
        column("index", Text),
        column("attempt", Text),
        column("task_json", Text),
    ];
    vec![
        column("data_source", Text),
        column("prompt", list(Struct(prompt))),
        column("ability", Text),
        column("reward_model", Struct(reward_model)),
        column("extra_info", Struct(extra_info)),
    ]
}

/// Converts a group of attempts into prompts for verl: one row for each task of the attempts.
pub fn rows(group: &[ExportedAttempt]) -> Rows {
    let mut rows = Rows::default();
    let mut tasks = BTreeSet::new();
    for exported in group {
        let attempt = &exported.attempt;
        let task = &attempt.task;
        if tasks.contains(&task.to_string()) {
            continue;
        }
        let prompt = exported.sequences.iter().find_map(|sequence| {
            let messages = sequence.messages.as_deref()?;
            messages.get(..prompt_len(sequence)).filter(|prompt| !prompt.is_empty())
        });
        let Some(prompt) = prompt else {
            rows.skip_attempt(attempt, "no sequence starts with a prompt of messages");
            continue;
        };
        tasks.insert(task.to_string());
        let text = |name: &str| task.get(name).and_then(Value::as_str);
        let answer = task.get("answer").map(|answer| match answer {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        rows.rows.push(json!({
            "data_source": text("source"),
            "prompt": to_json(prompt),
            "ability": text("kind"),
            "reward_model": { "style": "rule", "ground_truth": answer },
            "extra_info": {
                "split": if attempt.slot.purpose.name() == "train" { "train" } else { "test" },
                "index": text("id"),
                "attempt": attempt.id.to_string(),
                "task_json": task.to_string(),
            },
        }));
    }
    rows
}

/// Returns the key of a prompt's row, which distinguishes the task of the row.
pub fn distinct_key(row: &Value) -> RowKey {
    let task = row["extra_info"]["task_json"].as_str().unwrap_or_default();
    let digest = Sha256::digest(task.as_bytes());
    std::array::from_fn(|at| digest[at])
}

/// Returns the columns of rows with conversations for verl.
pub fn sft_columns() -> Vec<Column> {
    vec![
        column("messages", list(Struct(vec![column("role", Text), column("content", Text)]))),
        column("attempt", Text),
        column("sequence", Integer),
        column("score", Double),
        column("reward", Double),
    ]
}

/// Converts a group of attempts into conversations for verl, one for each sequence. verl renders
/// each message separately, so the messages must contain all text, including calls and descriptions
/// of tools.
pub fn to_sft_rows(group: &[ExportedAttempt]) -> Rows {
    let mut rows = Rows::default();
    for ExportedAttempt { attempt, sequences, .. } in group {
        for (index, sequence) in sequences.iter().enumerate() {
            let Some(messages) = sequence.messages.as_deref() else {
                rows.skip_attempt(attempt, NO_MESSAGES);
                continue;
            };
            rows.rows.push(json!({
                "messages": to_json(messages),
                "attempt": attempt.id.to_string(),
                "sequence": index,
                "score": attempt.score,
                "reward": attempt.reward,
            }));
        }
    }
    rows
}
