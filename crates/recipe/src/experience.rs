//! Keys of attempts that learn from each other: `[phase.experience]`.

use serde::{Deserialize, Serialize};

/// `[phase.experience]`: makes the attempts of a group one after another, so that the prompt of
/// each attempt contains the final answers of earlier attempts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExperienceKeys {
    /// Maximum number of earlier attempts in a prompt, at least 1. The newest attempts are used.
    pub attempts: usize,
    /// Whether the prompt contains the scores of the earlier attempts.
    pub scores: bool,
    /// Maximum number of characters of each final answer in the prompt, at least 1. The middle of a
    /// longer answer is omitted.
    pub max_characters: usize,
    /// Text that precedes the earlier attempts in the prompt.
    pub instruction: String,
}

impl Default for ExperienceKeys {
    fn default() -> Self {
        ExperienceKeys {
            attempts: 4,
            scores: true,
            max_characters: 2000,
            instruction: "Earlier attempts at this task:".to_owned(),
        }
    }
}
