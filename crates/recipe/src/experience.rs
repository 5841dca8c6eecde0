//! Keys of attempts that learn from each other: `[phase.experience]`.

use serde::{Deserialize, Serialize};

/// `[phase.experience]`: the attempts of a group are made one after another, and each reads the
/// final answers of earlier ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExperienceKeys {
    /// Maximum number of earlier attempts that an attempt reads, the newest ones; at least 1.
    pub attempts: usize,
    /// Whether an attempt reads the scores of the earlier ones.
    pub scores: bool,
    /// Maximum number of characters of each final answer; the middle of a longer one is omitted. At
    /// least 1.
    pub max_characters: usize,
    /// Text before the earlier attempts.
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
