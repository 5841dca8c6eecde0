//! Counts of the prompts of an attempt, by their origin.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Reason;

/// Numbers of recorded prompts by origin, and of tolerated differences.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Number of prompts that started a conversation.
    #[serde(rename = "began")]
    pub started: u32,
    /// Number of prompts that continued recorded history.
    pub continued: u32,
    /// Numbers of prompts that forked from recorded history, by the reason of the fork.
    pub forked: BTreeMap<Reason, u32>,
    /// Number of prompts with completions that matched only after white space around them was
    /// removed.
    pub trimmed: u32,
    /// Number of leading system messages that were joined with the first one, because the chat
    /// template accepts only one.
    #[serde(default)]
    pub joined_systems: u32,
    /// Number of system messages that were rendered in a user's turn or merged into the first
    /// system message, because the chat template does not render them at their position.
    #[serde(default)]
    pub moved_systems: u32,
    /// Number of prompts that continue a completion whose text next to its tool calls is missing,
    /// or whose arguments are written differently.
    #[serde(default)]
    pub altered: u32,
    /// Number of prompts that continue a completion to which the client has appended text.
    #[serde(default)]
    pub extended: u32,
}
