//! Keys of simulated users: `[user.NAME]`.

use std::time::Duration;

use levade_agent::user::{SimulatedUser, Speaker, USER_GREETING, USER_PROMPT, UserAgent};
use levade_tools::{PythonUserKeys, PythonUsers};
use serde::{Deserialize, Serialize};

use super::keys::Recipe;

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

impl Recipe {
    /// Returns whether an agent plays a user, so that its tokens are never trained.
    pub fn plays_user(&self, agent: &str) -> bool {
        self.user.values().any(|keys| keys.agent() == Some(agent))
    }

    /// Returns the user named `name`, or `None` if the recipe has none. `python` starts a class in
    /// Python.
    pub fn simulated_user(
        &self,
        name: &str,
        python: impl FnOnce(&PythonUserKeys) -> PythonUsers,
    ) -> Option<SimulatedUser> {
        let UserKeys { opens, max_turns, stop, seconds, options } = self.user.get(name)?;
        let speaker = match options {
            UserKind::Python(keys) => Speaker::Python(python(keys).into()),
            UserKind::Agent(UserAgentKeys { agent, prompt, greeting, instruction }) => {
                Speaker::Agent(UserAgent {
                    agent: agent.clone(),
                    prompt: prompt.clone(),
                    greeting: greeting.clone(),
                    instruction: instruction.clone(),
                })
            }
        };
        Some(SimulatedUser {
            name: name.to_owned(),
            opens: *opens,
            max_turns: *max_turns,
            stop: stop.clone(),
            timeout: Duration::from_secs_f64(*seconds),
            speaker,
        })
    }
}
