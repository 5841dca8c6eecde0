//! Counts of the prompts of an attempt, by how they came about.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Reason;

/// Prompts by how they came about.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Conversations that began.
    pub began: u32,
    /// Prompts that continued what was recorded.
    pub continued: u32,
    /// Prompts that left it, by reason.
    pub forked: BTreeMap<Reason, u32>,
    /// Prompts for which messages were recognised only after white space around them was left out.
    pub trimmed: u32,
    /// Leading system messages that were joined with the first one, since the template takes only one.
    #[serde(default)]
    pub joined_systems: u32,
    /// System messages that were printed in a user's turn or merged into the first one, since the template
    /// does not print them where they stand.
    #[serde(default)]
    pub moved_systems: u32,
    /// Prompts that continue a reply without the text beside its calls, or with arguments that are written
    /// otherwise.
    #[serde(default)]
    pub altered: u32,
    /// Prompts that continue a reply to which the client has appended text.
    #[serde(default)]
    pub extended: u32,
}
