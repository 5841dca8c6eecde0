//! Results of tool calls.

use std::collections::BTreeMap;

use levade_text::ContentPart;
use levade_tree::{Outcome, Trajectory};

/// Result of one tool call.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolOutput {
    /// Content of the tool result that the model reads.
    pub parts: Vec<ContentPart>,
    /// Kind of the error if the call failed, in which case `parts` explains the error to the model.
    /// `None` if the call succeeded.
    pub error: Option<CallError>,
    /// Reward for the turn that made the call, which must be finite. `None` gives no reward.
    pub reward: Option<f64>,
    /// Metrics by name, summed over all calls of the toolbox. Values must be finite. The names
    /// `calls` and `errors` are reserved for metrics that are counted for every toolbox.
    pub metrics: BTreeMap<String, f64>,
    /// Final answer of the attempt, which can be empty. If set, the attempt ends after this turn;
    /// `None` continues the attempt.
    pub ends: Option<String>,
    /// Conversations of the agents that the tool called. They are recorded with the attempt.
    pub branches: Vec<Branch>,
}

/// Conversation of an agent that a toolbox called.
#[derive(Debug, Clone, PartialEq)]
pub struct Branch {
    /// Name of the called agent.
    pub agent: String,
    /// All tokens of the conversation, with their origins.
    pub trajectory: Trajectory,
    /// Outcome of the conversation.
    pub outcome: Outcome,
}

/// Reason why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallError {
    /// The arguments violate the tool's schema, or request something impossible.
    BadArguments,
    /// The tool ran and its operation failed, for instance with a non-zero exit code or an HTTP
    /// error of a page.
    Failed,
    /// The call exceeded a timeout that the session itself enforces.
    Late,
    /// The tool itself does not work. The model cannot correct this, so it is reported as a failure
    /// of the tool.
    Unavailable,
}

impl ToolOutput {
    /// Creates the result of a successful call with one text part.
    pub fn text(text: impl Into<String>) -> Self {
        ToolOutput { parts: vec![ContentPart::Text(text.into())], ..ToolOutput::default() }
    }

    /// Creates the result of a failed call. The model reads `why`.
    pub fn error(error: CallError, why: impl Into<String>) -> Self {
        ToolOutput { error: Some(error), ..Self::text(why) }
    }

    /// Returns whether the call failed.
    pub fn is_error(&self) -> bool {
        self.error.is_some()
    }

    /// Returns the concatenated text of all parts. A part that is not text is replaced by a line
    /// with its type, so that a text-only model does not mistake the part for an empty result.
    pub(super) fn read(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                ContentPart::Text(more) => text.push_str(more),
                ContentPart::Other(_) => {
                    if !text.is_empty() && !text.ends_with('\n') {
                        text.push('\n');
                    }
                    text.push_str(&format!(
                        "[a part of type {:?}, which cannot be shown]\n",
                        part.kind()
                    ));
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn tool_output_text_names_parts_that_are_not_text() {
        let image = json!({ "type": "image_url", "image_url": { "url": "data:," } });
        let Value::Object(image) = image else { panic!() };
        assert_eq!(output_of(vec![text_part("a"), text_part("b\n")]).read(), "ab\n");
        assert_eq!(output_of(vec![]).read(), "");
        assert_eq!(
            output_of(vec![text_part("a"), ContentPart::Other(image), text_part("b")]).read(),
            "a\n[a part of type \"image_url\", which cannot be shown]\nb"
        );
    }

    fn text_part(text: &str) -> ContentPart {
        ContentPart::Text(text.into())
    }

    fn output_of(parts: Vec<ContentPart>) -> ToolOutput {
        ToolOutput { parts, ..ToolOutput::default() }
    }
}
