//! `[[tasks]] kind = "sessions"`: recorded sessions of agents that run elsewhere.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[[tasks]] kind = "sessions"`: tasks whose attempts are copies of recorded sessions. Nothing is
/// sampled for them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionKeys {
    /// Directory into which `levade serve --record` has written the sessions.
    pub path: PathBuf,
    /// Name of the agent to which the sessions are attributed; by default the agent of `[agent]`.
    pub agent: String,
}
