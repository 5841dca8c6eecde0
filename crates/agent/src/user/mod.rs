//! Simulated users: parties that play the user in the conversations of an agent of the tool loop.
//!
//! When the agent replies without a tool call, the user answers, and the loop continues. A user is
//! played by an agent of the run, with a policy of any kind, or by a class in Python.
//!
//! # Guarantees
//! - **The user's tokens are never trained.** They are recorded in conversations of their own,
//!   under the name of the user's agent.
//! - **An end.** The conversation ends if the user ends it, at the limit of the user's messages, or
//!   at a limit of the agent.
//! - **A user that fails breaks the attempt.** The error names the user, its policy and the reason:
//!   no response in time, a failed server, an empty message, or a message without an end. Such an
//!   attempt has no reward.

mod session;

use std::sync::Arc;
use std::time::Duration;

use levade_tasks::Task;
use levade_tools::PythonUsers;
use serde_json::Value;

pub(crate) use session::{EndedUser, UserResponse, UserSession};

/// Default of [`UserAgent::prompt`].
pub const USER_PROMPT: &str = "You are a customer who talks to a service agent. This is what you \
know and want:\n{instruction}\nWrite one short message at a time, as a customer would. Give a \
detail only when the agent asks for it, and never invent one. When the agent has done what you \
want, or cannot do it, write only {stop}";

/// Default of [`UserAgent::greeting`].
pub const USER_GREETING: &str = "Hello, how can I help you?";

/// Placeholder in [`UserAgent::prompt`] that is replaced by the user's instruction.
pub const INSTRUCTION: &str = "{instruction}";

/// Placeholder in [`UserAgent::prompt`] that is replaced by the stop mark.
pub const STOP: &str = "{stop}";

/// Simulated user with whom an agent converses.
pub struct SimulatedUser {
    /// Name of the user in the recipe.
    pub name: String,
    /// Whether the user writes the first message. The agent then never sees the task's question.
    pub opens: bool,
    /// Maximum number of the user's messages in a conversation, at least 1.
    pub max_turns: u32,
    /// Stop mark: the conversation ends if a message of the user contains this text. If empty, no
    /// message ends the conversation.
    pub stop: String,
    /// Timeout of one message of the user.
    pub timeout: Duration,
    /// Agent or Python class that plays the user.
    pub speaker: UserSpeaker,
}

/// Source of a simulated user's messages.
pub enum UserSpeaker {
    /// An agent of the run writes the messages.
    Agent(UserAgent),
    /// A Python class writes the messages.
    Python(Arc<PythonUsers>),
}

/// Agent that plays a simulated user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserAgent {
    /// Name of the agent. The agent's policy, sampling parameters and `max_tokens` apply, but its
    /// own prompts and tools do not.
    pub agent: String,
    /// System prompt with the placeholders [`INSTRUCTION`] and [`STOP`].
    pub prompt: String,
    /// First message that the user's policy reads, as if the agent had written it.
    pub greeting: String,
    /// Name of the field of the task's row that contains the user's instruction. If empty, the
    /// task's question is the instruction.
    pub instruction: String,
}

impl UserAgent {
    /// Returns the instruction of the simulated user for a task.
    ///
    /// # Errors
    /// Returns a message if the row of the task lacks the field.
    pub fn find_instruction(&self, task: &Task) -> Result<String, String> {
        match self.instruction.as_str() {
            "" => Ok(task.question.clone()),
            field => match task.row.field(field) {
                Some(Value::String(text)) => Ok(text.clone()),
                Some(Value::Null) | None => {
                    Err(format!("the row of the task {} has no field `{field}`", task.id))
                }
                Some(other) => Ok(other.to_string()),
            },
        }
    }
}

impl SimulatedUser {
    /// Returns whether the user's message contains the stop mark, and therefore ends the
    /// conversation.
    fn contains_stop_mark(&self, message: &str) -> bool {
        !self.stop.is_empty() && message.contains(&self.stop)
    }
}
