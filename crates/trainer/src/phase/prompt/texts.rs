//! Messages to the editor of prompts, and how its completions are read.

use levade_store::Attempt;
use levade_traces::{CallTree, Chats};
use serde_json::json;

/// Maximum number of characters of one text of an attempt in a critique.
const MAX_TEXT_CHARS: usize = 2_000;
/// Maximum number of characters of a prompt.
pub(super) const MAX_PROMPT_CHARS: usize = 32_000;

/// Tags around a new prompt in the editor's completion.
const OPEN: &str = "<prompt>";
const CLOSE: &str = "</prompt>";

/// Instructions for critiques, from which each critique samples one.
pub(super) const CRITIQUES: [&str; 3] = [
    "Below are the system prompt of an agent and several of its attempts at tasks, each with its \
     score from 0 to 1. List the weaknesses of the prompt that explain the low scores, as short \
     bullet points. Name for each point the attempt that shows it, and what the prompt should say \
     instead. Do not write a new prompt.",
    "You review the instructions of an agent. Read its attempts below. Compare what the agent did \
     with what earns a score of 1: which steps are missing, which are wrong, which rules of the \
     prompt are ignored or misleading? Answer with concrete advice on how to change the prompt, in \
     at most 300 words. Do not write a new prompt.",
    "Judge the system prompt below by these criteria: is the task clear, is the format of the \
     answer clear, does it say when and how to use tools, does it prevent the mistakes that the \
     attempts show? Give one sentence of evidence and one sentence of advice for each criterion \
     that is not met. Do not write a new prompt.",
];

/// Instructions for new prompts, from which each edit samples one.
pub(super) const EDITS: [&str; 2] = [
    "Rewrite the system prompt of an agent so that it follows the advice. Keep what works. State \
     general rules, and never solutions of single tasks.",
    "Improve the system prompt of an agent with one change: the one of the advice that matters \
     most. Leave the rest of the prompt as it is, word for word.",
];

/// Returns the request for a critique of `prompt` in view of attempts with it.
pub(super) fn critique(instruction: &str, prompt: &str, attempts: &[String]) -> String {
    let attempts = attempts.join("\n\n");
    format!("{instruction}\n\n# System prompt\n\n{}\n\n# Attempts\n\n{attempts}", shown(prompt))
}

/// Returns the request for a new prompt that follows `advice`.
pub(super) fn edit(instruction: &str, prompt: &str, advice: &str) -> String {
    format!(
        "{instruction}\n\n# System prompt\n\n{}\n\n# Advice\n\n{}\n\nReply with the complete new \
         prompt between {OPEN} and {CLOSE}.",
        shown(prompt),
        advice.trim()
    )
}

fn shown(prompt: &str) -> &str {
    if prompt.trim().is_empty() { "(The agent has no system prompt.)" } else { prompt }
}

/// Describes an attempt for a critique: its question, completions, tool calls, results and score.
pub(super) fn describe(index: usize, question: &str, attempt: &Attempt, chats: &Chats) -> String {
    let mut text = format!("## Attempt {}\n\nTask: {}\n", index + 1, truncated(question));
    for call in CallTree::new(attempt, chats).calls {
        if !call.content.trim().is_empty() {
            text.push_str(&format!("Agent: {}\n", truncated(call.content.trim())));
        }
        for tool in call.tools {
            text.push_str(&format!("Tool call: {} {}\n", tool.name, truncated(&tool.arguments)));
            if let Some(result) = &tool.result {
                text.push_str(&format!("Tool result: {}\n", truncated(result.trim())));
            }
        }
    }
    let finish = json!(attempt.outcome.finish);
    text.push_str(&format!("End: {}\n", finish.as_str().unwrap_or_default()));
    match attempt.score {
        Some(score) => text.push_str(&format!("Score: {score}")),
        None => text.push_str("Score: none"),
    }
    text
}

/// Returns the beginning of a text that is too long, with a note.
fn truncated(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{} […]", &text[..end]),
    }
}

/// Returns the new prompt in the editor's completion: the text between the last pair of tags, or
/// the whole completion if it has no tag.
///
/// # Errors
/// Returns a message if the prompt is empty, too long, or truncated.
pub(super) fn read_prompt(completion: &str) -> Result<String, String> {
    let prompt = match (completion.rfind(CLOSE), completion.find(OPEN)) {
        (Some(end), _) => {
            let start =
                completion[..end].rfind(OPEN).ok_or_else(|| format!("{OPEN} is missing"))?;
            &completion[start + OPEN.len()..end]
        }
        (None, Some(_)) => return Err(format!("{CLOSE} is missing: the completion was truncated")),
        (None, None) => completion,
    };
    let prompt = prompt.trim();
    if prompt.is_empty() {
        return Err("the prompt is empty".into());
    }
    match prompt.chars().count() {
        0..=MAX_PROMPT_CHARS => Ok(prompt.to_owned()),
        chars => Err(format!("it has {chars} characters; the maximum is {MAX_PROMPT_CHARS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_prompt_returns_last_tagged_text_or_complete_text() {
        let found = |completion: &str| read_prompt(completion).unwrap();
        assert_eq!(found("Sure.\n<prompt>\nUse it.\n</prompt> Done."), "Use it.");
        assert_eq!(found("<prompt>a</prompt> or <prompt>b</prompt>"), "b");
        assert_eq!(found("  Just this.  "), "Just this.");
    }

    #[test]
    fn read_prompt_rejects_empty_and_truncated_completions() {
        for (completion, why) in [
            ("", "is empty"),
            ("<prompt> </prompt>", "is empty"),
            ("<prompt>Use the", "was truncated"),
            ("Use the</prompt>", "is missing"),
        ] {
            assert!(read_prompt(completion).unwrap_err().contains(why), "{completion}");
        }
        let long = "x".repeat(MAX_PROMPT_CHARS + 1);
        assert!(read_prompt(&long).unwrap_err().contains("32001 characters"));
    }

    #[test]
    fn truncated_ends_at_character_boundary() {
        assert_eq!(truncated("ä"), "ä");
        let long = truncated(&"ä".repeat(MAX_TEXT_CHARS + 1));
        assert!(long.ends_with("ä […]") && long.chars().count() == MAX_TEXT_CHARS + 4);
    }
}
