//! Counts of the prompts of an attempt, by their origin.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Reason;

/// Numbers of prompts by origin, and of accepted differences.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Prompts that started a conversation.
    #[serde(rename = "began")]
    pub started: u32,
    /// Prompts that continued recorded history.
    pub continued: u32,
    /// Prompts that forked from recorded history, by reason.
    pub forked: BTreeMap<Reason, u32>,
    /// Prompts with completions that matched only after white space around them was removed.
    pub trimmed: u32,
    /// Leading system messages that were joined with the first one, because the template accepts
    /// only one.
    #[serde(default)]
    pub joined_systems: u32,
    /// System messages that were rendered in a user's turn or merged into the first one, because
    /// the template does not render them at their position.
    #[serde(default)]
    pub moved_systems: u32,
    /// Prompts that continue a completion whose text next to its tool calls is missing, or whose
    /// arguments are written differently.
    #[serde(default)]
    pub altered: u32,
    /// Number of prompts that continue a completion to which the client has appended text.
    #[serde(default)]
    pub extended: u32,
}
