//! Keys of a prompt phase: `[[phase]] kind = "prompt"`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::agent::AgentKeys;
use super::context::ContextKeys;

/// Search algorithm by which a prompt phase improves prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptAlgorithm {
    /// Beam search with textual gradients, as in Automatic Prompt Optimization. The prompts with
    /// the best mean scores are kept.
    #[default]
    Apo,
    /// Reflective evolution, as in GEPA. Every prompt that is the best at some task can have
    /// children, and a child is kept if it beats its parent at the tasks of its critique.
    Gepa,
}

impl PromptAlgorithm {
    /// Returns the name of the algorithm in recipes and metrics.
    pub fn name(self) -> &'static str {
        match self {
            PromptAlgorithm::Apo => "apo",
            PromptAlgorithm::Gepa => "gepa",
        }
    }
}

/// Which text of an agent a prompt phase improves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptTarget {
    /// The system prompt of the agent (recipe key `system`).
    #[default]
    System,
    /// The instruction for summaries of earlier turns (recipe key `context.instruction`).
    SummaryInstruction,
    /// The description of a tool or of a tool parameter (recipe key `tool_descriptions`).
    Tool(ToolTarget),
}

/// The tool or tool parameter whose description a prompt phase improves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolTarget {
    /// Name of the tool, as the model calls it.
    pub name: String,
    /// Name of the tool's parameter whose description is improved. If empty, the description of
    /// the tool itself is improved.
    #[serde(default)]
    pub parameter: String,
}

impl PromptTarget {
    /// Returns the recipe key, within an agent's table, that sets the text.
    pub fn key(&self) -> &'static str {
        match self {
            PromptTarget::System => "system",
            PromptTarget::SummaryInstruction => "instruction",
            PromptTarget::Tool(_) => "tool_descriptions",
        }
    }

    /// Returns the maximum number of characters of the text. A tool description must be shorter
    /// than a system prompt, because every prompt also contains the descriptions of other tools.
    pub fn max_chars(&self) -> usize {
        match self {
            PromptTarget::System => 32_000,
            PromptTarget::SummaryInstruction | PromptTarget::Tool(_) => 8_000,
        }
    }

    /// Returns why `text` cannot be a candidate prompt: it is empty or too long. Returns `None` if
    /// it is acceptable.
    pub fn rejection_reason(&self, text: &str) -> Option<String> {
        if text.trim().is_empty() {
            return Some("it is empty".into());
        }
        let (chars, max) = (text.chars().count(), self.max_chars());
        (chars > max).then(|| format!("it has {chars} characters; the maximum is {max}"))
    }

    /// Sets the text in an agent's keys. Does nothing if the text is the summary instruction and
    /// the agent writes no summaries.
    pub fn set(&self, keys: &mut AgentKeys, text: &str) {
        let text = text.to_owned();
        match self {
            PromptTarget::System => keys.system = text,
            PromptTarget::SummaryInstruction => {
                if let ContextKeys::Summarize(summaries) = &mut keys.context {
                    summaries.instruction = text;
                }
            }
            PromptTarget::Tool(ToolTarget { name, parameter }) => {
                let texts = keys.tool_descriptions.entry(name.clone()).or_default();
                if parameter.is_empty() {
                    texts.description = Some(text);
                } else {
                    texts.parameters.insert(parameter.clone(), text);
                }
            }
        }
    }
}

impl fmt::Display for PromptTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PromptTarget::System => write!(f, "system prompt"),
            PromptTarget::SummaryInstruction => write!(f, "instruction for summaries"),
            PromptTarget::Tool(ToolTarget { name, parameter }) if parameter.is_empty() => {
                write!(f, "description of the tool `{name}`")
            }
            PromptTarget::Tool(ToolTarget { name, parameter }) => {
                write!(f, "description of the parameter `{parameter}` of the tool `{name}`")
            }
        }
    }
}

/// `[[phase]] kind = "prompt"`: improves a text that an agent reads, such as its system prompt. No
/// weights change.
///
/// The first step scores the prompts of the recipe on the selection tasks. Each further step makes
/// new prompts: the agent attempts some training tasks with a parent prompt, then the editor
/// criticizes the prompt in view of these attempts, and rewrites it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptKeys {
    /// Name of the policy that criticizes and rewrites prompts.
    pub editor: String,
    /// Name of the agent whose text is improved. By default, it is the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Which text of the agent is improved.
    #[serde(default)]
    pub target: PromptTarget,
    /// Search algorithm of the phase.
    #[serde(default)]
    pub algorithm: PromptAlgorithm,
    /// Candidate prompts that compete from the start with the agent's current prompt.
    #[serde(default)]
    pub candidates: Vec<String>,
    /// Number of steps that make new prompts. If 0, the phase only selects the best of the given
    /// prompts.
    #[serde(default = "default_rounds")]
    pub rounds: u32,
    /// Number of prompts that the algorithm `apo` keeps as parents in a step.
    #[serde(default = "default_breadth")]
    pub beam_width: usize,
    /// Number of new prompts: per parent with the algorithm `apo`, per step with `gepa`.
    #[serde(default = "default_breadth")]
    pub branch_factor: usize,
    /// Number of attempts on which a critique is based. Each is made at another training task.
    #[serde(default = "default_breadth")]
    pub gradient_tasks: usize,
    /// Number of training tasks that are reserved to score prompts. Critiques never see them.
    #[serde(default = "default_selection_tasks")]
    pub selection_tasks: usize,
    /// Sampling temperature of the agent and of the editor.
    #[serde(default = "default_temperature")]
    pub temperature: f32,
    /// Maximum number of tokens of a critique or a new prompt.
    #[serde(default = "default_max_tokens")]
    pub max_tokens: usize,
    /// Success rate, in 0..=1, at which the phase stops early (see `eval.every`). `None` disables
    /// early stopping.
    #[serde(default)]
    pub until: Option<f64>,
}

impl PromptKeys {
    /// Returns the number of steps: one step that scores the given prompts, and one step per round.
    pub fn steps(&self) -> u32 {
        self.rounds.saturating_add(1)
    }

    /// Returns the number of new prompts per round.
    pub fn num_new_prompts(&self) -> usize {
        match self.algorithm {
            PromptAlgorithm::Apo => self.beam_width.saturating_mul(self.branch_factor),
            PromptAlgorithm::Gepa => self.branch_factor,
        }
    }
}

fn default_rounds() -> u32 {
    3
}

fn default_breadth() -> usize {
    4
}

fn default_selection_tasks() -> usize {
    16
}

fn default_temperature() -> f32 {
    1.0
}

fn default_max_tokens() -> usize {
    2048
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(parameter: &str) -> PromptTarget {
        PromptTarget::Tool(ToolTarget { name: "search".into(), parameter: parameter.into() })
    }

    #[test]
    fn set_changes_only_text_of_target() {
        let mut keys = AgentKeys::default();
        PromptTarget::SummaryInstruction.set(&mut keys, "Sum up.");
        assert_eq!(keys, AgentKeys::default(), "the agent writes no summaries");
        keys.context = ContextKeys::Summarize(Default::default());
        for (target, text) in [
            (PromptTarget::System, "Be brief."),
            (PromptTarget::SummaryInstruction, "Sum up."),
            (tool(""), "Searches."),
            (tool("query"), "Two words."),
        ] {
            target.set(&mut keys, text);
        }
        let ContextKeys::Summarize(summaries) = &keys.context else { panic!() };
        assert_eq!(
            (keys.system.as_str(), summaries.instruction.as_str()),
            ("Be brief.", "Sum up.")
        );
        let texts = &keys.tool_descriptions["search"];
        assert_eq!(texts.description.as_deref(), Some("Searches."));
        assert_eq!(texts.parameters["query"], "Two words.");
        assert_eq!(
            tool("query").to_string(),
            "description of the parameter `query` of the tool `search`"
        );
    }

    #[test]
    fn rejection_depends_on_target() {
        let long = "x".repeat(8_001);
        for target in [PromptTarget::System, PromptTarget::SummaryInstruction, tool("")] {
            assert_eq!(target.rejection_reason(" \n").as_deref(), Some("it is empty"));
            assert_eq!(target.rejection_reason("Use it."), None);
            let why = target.rejection_reason(&long);
            assert_eq!(why.is_none(), target == PromptTarget::System, "{target}: {why:?}");
        }
        let why = PromptTarget::System.rejection_reason(&"x".repeat(32_001)).unwrap();
        assert!(why.contains("32001 characters"), "{why}");
    }
}
