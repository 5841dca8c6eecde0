//! Answers of tools.

use std::collections::BTreeMap;

use levade_text::ContentPart;
use levade_tree::{Outcome, Trajectory};

/// An answer to one call.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ToolOutput {
    /// Content that the model reads.
    pub parts: Vec<ContentPart>,
    /// Why this is no answer, where it is none; the parts then say what is wrong, in words for the model.
    pub error: Option<CallError>,
    /// A reward for the turn that made the call. It must be finite.
    pub reward: Option<f64>,
    /// Numbers to report, by name, which are added up over all calls of the toolbox. They must be finite, and
    /// their names neither `calls` nor `errors`: these are counted of every toolbox.
    pub metrics: BTreeMap<String, f64>,
    /// Ends the attempt after this turn, with this as its final answer (which may be empty).
    pub ends: Option<String>,
    /// Conversations of agents that were asked for the answer. They become part of the attempt's record.
    pub branches: Vec<Branch>,
}

/// Conversation of an agent that helped another one.
#[derive(Debug, Clone, PartialEq)]
pub struct Branch {
    /// Name of the agent.
    pub agent: String,
    /// Every token of it.
    pub trajectory: Trajectory,
    /// How it ended.
    pub outcome: Outcome,
}

/// Why a call has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallError {
    /// The arguments do not fit the tool's schema, or ask for what cannot be.
    BadArguments,
    /// The tool did what it was asked to, and that failed: an exit code, an error of a page.
    Failed,
    /// The tool did not answer within a deadline that the session itself keeps.
    Late,
    /// The tool itself does not work. It is nothing that the model could change, and is reported as trouble.
    Unavailable,
}

impl ToolOutput {
    /// An answer of text.
    pub fn text(text: impl Into<String>) -> Self {
        ToolOutput { parts: vec![ContentPart::Text(text.into())], ..ToolOutput::default() }
    }

    /// No answer; `why` is what the model reads.
    pub fn error(error: CallError, why: impl Into<String>) -> Self {
        ToolOutput { error: Some(error), ..Self::text(why) }
    }

    /// Whether it is none.
    pub fn is_error(&self) -> bool {
        self.error.is_some()
    }

    /// The text of all parts, one after the other. In place of a part that is no text stands a line that says
    /// so: a model that reads text alone must not take silence for an answer.
    pub(super) fn read(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                ContentPart::Text(more) => text.push_str(more),
                ContentPart::Other(_) => {
                    if !text.is_empty() && !text.ends_with('\n') {
                        text.push('\n');
                    }
                    text.push_str(&format!("[a part of type {:?}, which cannot be shown]\n", part.kind()));
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
    fn parts_that_are_no_text_are_named() {
        let image = json!({ "type": "image_url", "image_url": { "url": "data:," } });
        let Value::Object(image) = image else { panic!() };
        let text = |text: &str| ContentPart::Text(text.into());
        let output = |parts| ToolOutput { parts, ..ToolOutput::default() };
        assert_eq!(output(vec![text("a"), text("b\n")]).read(), "ab\n");
        assert_eq!(output(vec![]).read(), "");
        assert_eq!(
            output(vec![text("a"), ContentPart::Other(image), text("b")]).read(),
            "a\n[a part of type \"image_url\", which cannot be shown]\nb"
        );
    }
}
