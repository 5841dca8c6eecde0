//! Keys of a prompt phase: `[[phase]] kind = "prompt"`.

use serde::{Deserialize, Serialize};

/// Search algorithm of a prompt phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptAlgorithm {
    /// Beam search with textual gradients, as in Automatic Prompt Optimization: the prompts with
    /// the best mean scores are kept.
    #[default]
    Apo,
    /// Reflective evolution, as in GEPA: every prompt that is the best at some task can have
    /// children, and a child is kept if it beats its parent at the tasks of its critique.
    Gepa,
}

impl PromptAlgorithm {
    /// Returns the name in recipes and metrics.
    pub fn name(self) -> &'static str {
        match self {
            PromptAlgorithm::Apo => "apo",
            PromptAlgorithm::Gepa => "gepa",
        }
    }
}

/// `[[phase]] kind = "prompt"`: improves the system prompt of an agent. No weights change.
///
/// The first step scores the given prompts at the selection tasks. Each further step makes new
/// prompts: the agent attempts some training tasks with a parent prompt, the editor criticizes the
/// prompt in view of these attempts, and then rewrites it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromptKeys {
    /// Name of the policy that criticizes and rewrites prompts.
    pub editor: String,
    /// Name of the agent whose system prompt is improved; by default the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Search algorithm.
    #[serde(default)]
    pub algorithm: PromptAlgorithm,
    /// Prompts that compete from the start with the one that the agent has then.
    #[serde(default)]
    pub candidates: Vec<String>,
    /// Number of steps that make new prompts; 0 to only select the best of the given prompts.
    #[serde(default = "three")]
    pub rounds: u32,
    /// Number of prompts that a step of `apo` keeps as parents.
    #[serde(default = "four")]
    pub beam_width: usize,
    /// Number of new prompts: of each parent in `apo`, of a step in `gepa`.
    #[serde(default = "four")]
    pub branch_factor: usize,
    /// Number of attempts that a critique is based on, each at another training task.
    #[serde(default = "four")]
    pub gradient_tasks: usize,
    /// Number of training tasks that are reserved to score prompts. Critiques never see them.
    #[serde(default = "sixteen")]
    pub selection_tasks: usize,
    /// Sampling temperature of the agent and of the editor.
    #[serde(default = "unit")]
    pub temperature: f32,
    /// Maximum number of tokens of a critique or a new prompt.
    #[serde(default = "long")]
    pub max_tokens: usize,
    /// Success rate, in 0..=1, at which the phase stops early; see `eval.every`.
    #[serde(default)]
    pub until: Option<f64>,
}

impl PromptKeys {
    /// Returns the number of steps: one that scores the given prompts, and the rounds.
    pub fn steps(&self) -> u32 {
        self.rounds.saturating_add(1)
    }

    /// Returns the number of new prompts of a round.
    pub fn children(&self) -> usize {
        match self.algorithm {
            PromptAlgorithm::Apo => self.beam_width.saturating_mul(self.branch_factor),
            PromptAlgorithm::Gepa => self.branch_factor,
        }
    }
}

fn three() -> u32 {
    3
}

fn four() -> usize {
    4
}

fn sixteen() -> usize {
    16
}

fn unit() -> f32 {
    1.0
}

fn long() -> usize {
    2048
}
