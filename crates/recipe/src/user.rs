//! Keys of simulated users: `[user.NAME]`.

use levade_agent::user::{USER_GREETING, USER_PROMPT};
use levade_tools::PythonUserKeys;
use serde::{Deserialize, Serialize};

/// `[user.NAME]`: a simulated user, with the keys of all kinds and the options of its kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserKeys {
    /// Whether the user writes the first message and the agent never sees the task's question. If
    /// false, the task's question is the user's first message.
    #[serde(default = "default_opens")]
    pub opens: bool,
    /// Maximum number of messages that the user writes in an attempt, at least 1.
    #[serde(default = "default_max_turns")]
    pub max_turns: u32,
    /// Text that ends the attempt when it occurs in a message of the user. If empty, no text ends
    /// the attempt.
    #[serde(default = "default_stop")]
    pub stop: String,
    /// Timeout for each message of the user, in seconds.
    #[serde(default = "default_seconds")]
    pub seconds: f64,
    /// Kind of the user, with its options.
    #[serde(rename = "$options")]
    pub options: UserKind,
}

/// What plays a simulated user, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UserKind {
    /// An agent of the recipe plays the user, with a policy of any kind.
    Agent(UserAgentKeys),
    /// A Python class plays the user.
    Python(PythonUserKeys),
}

/// `[user.NAME] kind = "agent"`: an agent that plays the user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserAgentKeys {
    /// Name of the agent that plays the user: `NAME` of an `[agent.NAME]`. The agent's policy,
    /// sampling parameters and `max_tokens` apply, but its prompts and tools do not. The agent is
    /// never trained.
    pub agent: String,
    /// System prompt of the agent. The placeholders `{instruction}` and `{stop}` are replaced.
    #[serde(default = "default_prompt")]
    pub prompt: String,
    /// First message that the agent reads, as if the trained agent had written the message.
    #[serde(default = "default_greeting")]
    pub greeting: String,
    /// Field of the task's row that contains the user's instruction. If empty, the instruction is
    /// the task's question.
    #[serde(default)]
    pub instruction: String,
}

fn default_opens() -> bool {
    true
}

fn default_max_turns() -> u32 {
    10
}

fn default_stop() -> String {
    "###STOP###".to_owned()
}

fn default_seconds() -> f64 {
    120.0
}

fn default_prompt() -> String {
    USER_PROMPT.to_owned()
}

fn default_greeting() -> String {
    USER_GREETING.to_owned()
}

impl UserKeys {
    /// Returns the name of the agent that plays the user, or `None` if a Python class plays the
    /// user.
    pub fn agent(&self) -> Option<&str> {
        match &self.options {
            UserKind::Agent(keys) => Some(&keys.agent),
            UserKind::Python(_) => None,
        }
    }
}
