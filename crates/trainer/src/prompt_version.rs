//! System prompts that phases have improved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of a system prompt.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PromptVersion {
    /// Number of the version in its phase. 0 is the prompt with which a prompt phase started, or
    /// for an SFT phase the prompt of the recipe.
    pub version: u32,
    /// Text of the prompt.
    pub text: String,
}

/// Improved system prompts, by agent.
pub(crate) type Prompts = BTreeMap<String, PromptVersion>;
