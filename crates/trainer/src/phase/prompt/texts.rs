//! Messages to the editor of prompts, and how its completions are read.

use levade_recipe::PromptTarget;
use levade_store::Attempt;
use levade_traces::{CallTree, Chats};
use serde_json::json;

/// Maximum number of characters of one text (such as a completion or a tool result) in the
/// description of an attempt.
const MAX_TEXT_CHARS: usize = 2_000;

/// Tags that enclose the new prompt in the editor's completion.
const OPEN: &str = "<prompt>";
const CLOSE: &str = "</prompt>";

/// Instructions for critiques. Each critique samples one of them, in which [`EditorWording`] fills
/// the braces.
pub(super) const CRITIQUES: [&str; 3] = [
    "Below are the {subject} of an agent and several of its attempts at tasks, each with its \
     score from 0 to 1. List the weaknesses of the {noun} that explain the low scores, as short \
     bullet points. Name for each point the attempt that shows it, and what the {noun} should say \
     instead. Do not write a new {noun}.",
    "You review the {reviewed} of an agent. Read its attempts below. Compare what the agent did \
     with what earns a score of 1: which steps are missing, which are wrong, which rules of the \
     {noun} are ignored or misleading? Answer with concrete advice on how to change the {noun}, in \
     at most 300 words. Do not write a new {noun}.",
    "Judge the {subject} below by these criteria: {criteria}, does it prevent the mistakes that the \
     attempts show? Give one sentence of evidence and one sentence of advice for each criterion \
     that is not met. Do not write a new {noun}.",
];

/// Instructions for writing new prompts. Each request samples one of them, in which
/// [`EditorWording`] fills the braces.
pub(super) const EDITS: [&str; 2] = [
    "Rewrite the {subject} of an agent so that it follows the advice. Keep what works. State \
     general rules, and never solutions of single tasks.",
    "Improve the {subject} of an agent with one change: the one of the advice that matters \
     most. Leave the rest of the {noun} as it is, word for word.",
];

/// Words by which messages to the editor refer to the text that is improved.
pub(super) struct EditorWording {
    /// Name of the text, such as `system prompt`.
    subject: String,
    /// Name of the text in the instruction to review it, such as `instructions`.
    reviewed: String,
    /// Short noun for the text once its name has been mentioned, such as `prompt`.
    noun: &'static str,
    /// Criteria of a good text, as questions to the editor.
    criteria: &'static str,
}

impl EditorWording {
    /// Creates the wording for the text that `target` selects.
    pub fn new(target: &PromptTarget) -> Self {
        let subject = target.to_string();
        let (reviewed, noun, criteria) = match target {
            PromptTarget::System => (
                "instructions".to_owned(),
                "prompt",
                "is the task clear, is the format of the answer clear, does it say when and how to \
                 use tools",
            ),
            PromptTarget::SummaryInstruction => (
                subject.clone(),
                "instruction",
                "does it say what a summary of earlier turns must keep, what it can leave out, and \
                 which form it has",
            ),
            PromptTarget::Tool(tool) if tool.parameter.is_empty() => (
                subject.clone(),
                "description",
                "does it say what the tool does, when to call it and when not, and how to write its \
                 arguments",
            ),
            PromptTarget::Tool(_) => (
                subject.clone(),
                "description",
                "does it say what the argument means and which form it must have",
            ),
        };
        EditorWording { subject, reviewed, noun, criteria }
    }

    /// Fills the braces of an instruction template with these words.
    fn fill_template(&self, instruction: &str) -> String {
        instruction
            .replace("{subject}", &self.subject)
            .replace("{reviewed}", &self.reviewed)
            .replace("{noun}", self.noun)
            .replace("{criteria}", self.criteria)
    }

    /// Returns the title of the request's section that contains the text: the text's name with a
    /// capital letter.
    fn section_title(&self) -> String {
        let mut chars = self.subject.chars();
        let first = chars.next().map(|first| first.to_ascii_uppercase());
        first.into_iter().chain(chars).collect()
    }

    fn prompt_or_placeholder(&self, prompt: &str) -> String {
        match prompt.trim().is_empty() {
            true => format!("(The agent has no {}.)", self.subject),
            false => prompt.to_owned(),
        }
    }

    /// Builds the request for a critique of `prompt`, with descriptions of attempts that used it.
    pub fn critique_request(&self, instruction: &str, prompt: &str, attempts: &[String]) -> String {
        format!(
            "{}\n\n# {}\n\n{}\n\n# Attempts\n\n{}",
            self.fill_template(instruction),
            self.section_title(),
            self.prompt_or_placeholder(prompt),
            attempts.join("\n\n")
        )
    }

    /// Builds the request for a new version of `prompt` that follows `advice`.
    pub fn edit_request(&self, instruction: &str, prompt: &str, advice: &str) -> String {
        format!(
            "{}\n\n# {}\n\n{}\n\n# Advice\n\n{}\n\nReply with the complete new {} between \
             {OPEN} and {CLOSE}.",
            self.fill_template(instruction),
            self.section_title(),
            self.prompt_or_placeholder(prompt),
            advice.trim(),
            self.noun
        )
    }
}

/// Describes an attempt of `agent` for the editor: question, completions, tool calls, tool results
/// and score. Completions of other agents, such as summaries, are prefixed with the agent's name.
pub(super) fn describe_attempt(
    index: usize,
    question: &str,
    attempt: &Attempt,
    (agent, chats): (&str, &Chats),
) -> String {
    let mut text = format!("## Attempt {}\n\nTask: {}\n", index + 1, truncate_text(question));
    for call in CallTree::new(attempt, chats).calls {
        if !call.content.trim().is_empty() {
            let speaker = if call.agent == agent { "Agent" } else { &call.agent };
            text.push_str(&format!("{speaker}: {}\n", truncate_text(call.content.trim())));
        }
        for tool in call.tools {
            text.push_str(&format!(
                "Tool call: {} {}\n",
                tool.name,
                truncate_text(&tool.arguments)
            ));
            if let Some(result) = &tool.result {
                text.push_str(&format!("Tool result: {}\n", truncate_text(result.trim())));
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

/// Truncates a text to [`MAX_TEXT_CHARS`] characters and marks the truncation with `[…]`.
fn truncate_text(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{} […]", &text[..end]),
    }
}

/// Extracts the new prompt from the editor's completion: the text between the last pair of tags, or
/// the complete completion if it has no tag.
///
/// # Errors
/// Returns a message if the completion contains only one of the two tags, or if the prompt is not
/// valid for `target`.
pub(super) fn parse_prompt(completion: &str, target: &PromptTarget) -> Result<String, String> {
    let prompt = match (completion.rfind(CLOSE), completion.find(OPEN)) {
        (Some(end), _) => {
            let start = completion[..end]
                .rfind(OPEN)
                .ok_or_else(|| format!("the tag {OPEN} is missing"))?;
            &completion[start + OPEN.len()..end]
        }
        (None, Some(_)) => {
            return Err(format!("the completion was truncated before the tag {CLOSE}"));
        }
        (None, None) => completion,
    };
    let prompt = prompt.trim();
    target.rejection_reason(prompt).map_or_else(|| Ok(prompt.to_owned()), Err)
}

#[cfg(test)]
mod tests {
    use levade_recipe::ToolTarget;

    use super::*;

    #[test]
    fn parse_prompt_returns_last_tagged_text_or_complete_text() {
        let found = |completion: &str| parse_prompt(completion, &PromptTarget::System).unwrap();
        assert_eq!(found("Sure.\n<prompt>\nUse it.\n</prompt> Done."), "Use it.");
        assert_eq!(found("<prompt>a</prompt> or <prompt>b</prompt>"), "b");
        assert_eq!(found("  Just this.  "), "Just this.");
    }

    #[test]
    fn parse_prompt_rejects_empty_and_truncated_completions() {
        for (completion, why) in [
            ("", "is empty"),
            ("<prompt> </prompt>", "is empty"),
            ("<prompt>Use the", "was truncated"),
            ("Use the</prompt>", "is missing"),
        ] {
            let read = parse_prompt(completion, &PromptTarget::System);
            assert!(read.unwrap_err().contains(why), "{completion}");
        }
        let long = "x".repeat(8_001);
        assert!(parse_prompt(&long, &PromptTarget::System).is_ok());
        let too_long = parse_prompt(&long, &PromptTarget::SummaryInstruction).unwrap_err();
        assert!(too_long.contains("8001 characters"), "{too_long}");
    }

    #[test]
    fn requests_name_text_that_is_improved() {
        let tool = |parameter: &str| {
            let (name, parameter) = ("search".to_owned(), parameter.to_owned());
            PromptTarget::Tool(ToolTarget { name, parameter })
        };
        for (target, subject, title) in [
            (PromptTarget::System, "the system prompt of an agent", "# System prompt\n\nText."),
            (tool(""), "the description of the tool `search` of", "# Description of the tool"),
            (tool("query"), "of the parameter `query` of the tool `search`", "# Description of"),
            (
                PromptTarget::SummaryInstruction,
                "the instruction for summaries",
                "# Instruction for",
            ),
        ] {
            let wording = EditorWording::new(&target);
            let critiques = CRITIQUES.map(|text| wording.critique_request(text, "Text.", &[]));
            let edits = EDITS.map(|text| wording.edit_request(text, "Text.", "Advice."));
            assert!(critiques[0].starts_with("Below are the "), "{}", critiques[0]);
            for request in critiques.iter().chain(&edits) {
                assert!(!request.contains('{') && request.contains(title), "{request}");
            }
            assert!(edits.iter().all(|edit| edit.contains(subject)), "{edits:?}");
            let empty = wording.critique_request(CRITIQUES[0], "", &[]);
            assert!(empty.contains(&format!("(The agent has no {target}.)")), "{empty}");
        }
    }

    #[test]
    fn truncate_text_ends_at_character_boundary() {
        assert_eq!(truncate_text("ä"), "ä");
        let long = truncate_text(&"ä".repeat(MAX_TEXT_CHARS + 1));
        assert!(long.ends_with("ä […]") && long.chars().count() == MAX_TEXT_CHARS + 4);
    }
}
