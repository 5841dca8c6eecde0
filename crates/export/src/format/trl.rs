//! Rows of TRL in its conversational formats: supervised fine-tuning, and preferences.

use serde_json::{Value, json};

use crate::format::{
    ExportedAttempt, NO_MESSAGES, RowOptions, Rows, prompt_len, to_template_json, tools_to_json,
};
use crate::sequence::Sequence;

/// Converts a group of attempts into conversations, one for each sequence. A conversation has the
/// field `messages`, or the fields `prompt` and `completion`.
pub fn to_sft_rows(group: &[ExportedAttempt], options: &RowOptions) -> Rows {
    let mut rows = Rows::default();
    for ExportedAttempt { attempt, sequences, .. } in group {
        for sequence in sequences {
            let Some(messages) = sequence.messages.as_deref() else {
                rows.skip_attempt(attempt, NO_MESSAGES);
                continue;
            };
            let row = if options.split_prompt {
                let (prompt, completion) = messages.split_at(prompt_len(sequence));
                json!({
                    "prompt": to_template_json(prompt),
                    "completion": to_template_json(completion),
                })
            } else {
                json!({ "messages": to_template_json(messages) })
            };
            rows.rows.push(add_tools(row, sequence));
        }
    }
    rows
}

/// Creates a preference pair from the attempts with the highest and the lowest score of the group.
/// Of attempts with equal scores, the first is used.
///
/// There is no pair if the scores differ by 0 or by less than the minimum gap, or if the two
/// attempts had different prompts.
pub fn to_preference_rows(group: &[ExportedAttempt], options: &RowOptions) -> Rows {
    let mut rows = Rows::default();
    let scored = group.iter().filter_map(|exported| Some((exported.attempt.score?, exported)));
    let mut best: Option<(f64, &ExportedAttempt)> = None;
    let mut worst = best;
    for (score, exported) in scored {
        if best.is_none_or(|(highest, _)| score > highest) {
            best = Some((score, exported));
        }
        if worst.is_none_or(|(lowest, _)| score < lowest) {
            worst = Some((score, exported));
        }
    }
    let (Some((high, best)), Some((low, worst))) = (best, worst) else {
        if let Some(first) = group.first() {
            rows.skip_attempt(&first.attempt, "no attempt of the group has a score");
        }
        return rows;
    };
    if high - low <= 0.0 || high - low < options.min_gap {
        rows.skip_attempt(&best.attempt, "the scores of the group do not differ enough");
        return rows;
    }
    let (Some((prompt, chosen, sequence)), Some((other, rejected, _))) =
        (find_final_turns(best), find_final_turns(worst))
    else {
        rows.skip_attempt(&best.attempt, NO_MESSAGES);
        return rows;
    };
    if prompt != other {
        rows.skip_attempt(&best.attempt, "the attempts of the pair have different prompts");
        return rows;
    }
    let row = json!({
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "score_chosen": high,
        "score_rejected": low,
    });
    rows.rows.push(add_tools(row, sequence));
    rows
}

/// Returns the prompt and the turns of an attempt's last sequence that has completions. Returns
/// `None` if the attempt has no such sequence, or if its messages could not be parsed.
fn find_final_turns(exported: &ExportedAttempt) -> Option<(Value, Value, &Sequence)> {
    let sequence = exported.sequences.iter().rev().find(|s| !s.completions.is_empty())?;
    let messages = sequence.messages.as_deref()?;
    let (prompt, turns) = messages.split_at(prompt_len(sequence));
    Some((to_template_json(prompt), to_template_json(turns), sequence))
}

/// Adds the column `tools` to a row if the prompt of the sequence describes tools.
fn add_tools(mut row: Value, sequence: &Sequence) -> Value {
    let tools = tools_to_json(sequence);
    if !tools.is_null() {
        row["tools"] = tools;
    }
    row
}
