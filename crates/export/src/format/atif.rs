//! Trajectories in the Agent Trajectory Interchange Format (ATIF) of Harbor, version 1.7.
//!
//! Source: RFC 0001 of Harbor, and its models `harbor.models.trajectories`. A trajectory is one
//! sequence. Sequences of one attempt share the `session_id`, which is the id of the attempt. A
//! completion that an earlier sequence contains is marked as copied context, so that it is not
//! trained on twice.

use levade_store::Attempt;
use levade_text::{Message, Role};
use serde_json::{Map, Value, json};

use crate::format::{ExportedAttempt, NO_MESSAGES, RowOptions, Rows, tools_to_json};
use crate::sequence::{Completion, Sequence};

/// Version of the Agent Trajectory Interchange Format that the rows have.
const SCHEMA_VERSION: &str = "ATIF-v1.7";

/// Converts a group of attempts into trajectories, one for each sequence.
pub fn rows(group: &[ExportedAttempt], options: &RowOptions) -> Rows {
    let mut rows = Rows::default();
    for exported in group {
        for (index, sequence) in exported.sequences.iter().enumerate() {
            match sequence.messages.as_deref() {
                Some(messages) if !messages.is_empty() => {
                    rows.rows.push(to_trajectory(exported, index, sequence, messages, options));
                }
                _ => rows.skip_attempt(&exported.attempt, NO_MESSAGES),
            }
        }
    }
    rows
}

fn to_trajectory(
    ExportedAttempt { run, attempt, .. }: &ExportedAttempt,
    index: usize,
    sequence: &Sequence,
    messages: &[Message],
    options: &RowOptions,
) -> Value {
    let Attempt { id, slot, number, score, reward, status, task, outcome, .. } = attempt;
    let mut agent = Map::new();
    agent.insert("name".into(), sequence.agent.as_str().into());
    agent.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    agent.insert("model_name".into(), sequence.policy.as_str().into());
    if !sequence.tools.is_empty() {
        agent.insert("tool_definitions".into(), tools_to_json(sequence));
    }
    let steps = to_steps(sequence, messages, options);
    let sum = |of: fn(&Completion) -> usize| sequence.completions.iter().map(of).sum::<usize>();
    json!({
        "schema_version": SCHEMA_VERSION,
        "session_id": id.to_string(),
        "trajectory_id": format!("{id}/{index}"),
        "agent": agent,
        "final_metrics": {
            "total_prompt_tokens": sum(|completion| completion.prompt_tokens),
            "total_completion_tokens": sum(|completion| completion.completion_tokens),
            "total_steps": steps.len(),
        },
        "steps": steps,
        "extra": {
            "run": run,
            "slot": slot.name(),
            "try": number,
            "status": status.name(),
            "score": score,
            "reward": reward,
            "components": outcome.components,
            "finish": outcome.finish,
            "task": task,
            "weight_versions": sequence.tokens.distinct_versions(),
            "problems": sequence.problems,
        },
    })
}

/// Returns the steps of a trajectory. The results of tool calls belong to the step whose completion
/// called the tools.
fn to_steps(sequence: &Sequence, messages: &[Message], options: &RowOptions) -> Vec<Value> {
    let mut steps: Vec<Value> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let text = message.content.as_str();
        if message.role == Role::Tool
            && let Some(step) = steps.last_mut().filter(|step| step["source"] == "agent")
        {
            let mut result = json!({ "content": text });
            if let Some(id) = &message.tool_call_id {
                result["source_call_id"] = id.as_str().into();
            }
            match step["observation"]["results"].as_array_mut() {
                Some(results) => results.push(result),
                None => step["observation"] = json!({ "results": [result] }),
            }
            continue;
        }
        let source = match message.role {
            Role::Assistant => "agent",
            Role::System | Role::Developer => "system",
            Role::User | Role::Tool => "user",
        };
        let mut step = json!({ "step_id": steps.len() + 1, "source": source, "message": text });
        if message.role == Role::Assistant {
            add_completion_fields(&mut step, sequence, (index, message), options);
        }
        steps.push(step);
    }
    steps
}

fn add_completion_fields(
    step: &mut Value,
    sequence: &Sequence,
    (index, message): (usize, &Message),
    options: &RowOptions,
) {
    if let Some(reasoning) = &message.reasoning_content {
        step["reasoning_content"] = reasoning.as_str().into();
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| {
            json!({
                "tool_call_id": call.id,
                "function_name": call.name,
                "arguments": *call.arguments,
            })
        });
        step["tool_calls"] = calls.collect();
    }
    let Some(completion) = sequence.completions.iter().find(|c| c.message == index) else {
        // The message was part of the prompt.
        step["is_copied_context"] = true.into();
        return;
    };
    if completion.is_repeated {
        step["is_copied_context"] = true.into();
    }
    let Completion { prompt_tokens, completion_tokens, .. } = *completion;
    let mut metrics =
        json!({ "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens });
    let range = prompt_tokens..prompt_tokens + completion_tokens;
    let tokens = &sequence.tokens;
    if options.tokens
        && let Some(ids) = tokens.ids.get(range.clone())
    {
        metrics["completion_token_ids"] = json!(ids);
        let logprobs: Option<Vec<f32>> = tokens.logprobs[range.clone()].iter().copied().collect();
        if let Some(logprobs) = logprobs.filter(|all| all.iter().all(|p| p.is_finite())) {
            metrics["logprobs"] = json!(logprobs);
        }
        metrics["extra"] = json!({
            "loss_mask": tokens.is_target[range.clone()],
            "token_versions": tokens.versions[range],
        });
    }
    step["metrics"] = metrics;
}
