//! Keys of simulated users: `[user.NAME]`.

use levade_agent::user::{USER_GREETING, USER_PROMPT};
use levade_tools::PythonUserKeys;
use serde::{Deserialize, Serialize};

/// `[user.NAME]`: keys of every simulated user, and the options of its kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserKeys {
    /// Whether the user writes the first message, and the agent never sees the task's question. If
    /// not, the task's question is the user's first message.
    #[serde(default = "yes")]
    pub opens: bool,
    /// Maximum number of the user's messages in an attempt, at least 1.
    #[serde(default = "ten")]
    pub max_turns: u32,
    /// Text whose occurrence in a message of the user ends the attempt. Empty for none.
    #[serde(default = "stop")]
    pub stop: String,
    /// Timeout of a message of the user, in seconds.
    #[serde(default = "seconds")]
    pub seconds: f64,
    /// Options of the user's kind.
    #[serde(rename = "$options")]
    pub options: UserKind,
}

/// What plays a user, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UserKind {
    /// An agent of the recipe, with a policy of any kind.
    Agent(UserAgentKeys),
    /// A class in Python.
    Python(PythonUserKeys),
}

/// `[user.NAME] kind = "agent"`: an agent that plays the user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserAgentKeys {
    /// Name of the agent: `NAME` of an `[agent.NAME]`. Its policy, sampling parameters and
    /// `max_tokens` apply; its own prompts and tools do not. It is never trained.
    pub agent: String,
    /// System prompt; `{instruction}` and `{stop}` are replaced.
    #[serde(default = "prompt")]
    pub prompt: String,
    /// First message that the agent reads, as if the trained agent had written it.
    #[serde(default = "greeting")]
    pub greeting: String,
    /// Field of the task's row with the user's instruction; the task's question if empty.
    #[serde(default)]
    pub instruction: String,
}

fn yes() -> bool {
    true
}

fn ten() -> u32 {
    10
}

fn stop() -> String {
    "###STOP###".to_owned()
}

fn seconds() -> f64 {
    120.0
}

fn prompt() -> String {
    USER_PROMPT.to_owned()
}

fn greeting() -> String {
    USER_GREETING.to_owned()
}

impl UserKeys {
    /// Returns the name of the agent that plays the user, if an agent plays it.
    pub fn agent(&self) -> Option<&str> {
        match &self.options {
            UserKind::Agent(keys) => Some(&keys.agent),
            UserKind::Python(_) => None,
        }
    }
}
