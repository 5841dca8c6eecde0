//! Demonstrations by a teacher: a chat API acts in place of a trained policy.
//!
//! The loop is the same as for any attempt ([`can_be_taught`](crate::AgentLoop::can_be_taught)),
//! over a party whose backend is the teacher. A teacher returns messages. Each of its completions
//! is then rendered as the trained policy would have written it after its own prompt: reasoning,
//! text and tool calls in the format of its chat, encoded by its tokenizer. These tokens are
//! [demonstrated](levade_tree::Kind::Demonstrated), in a tree like that of any attempt, and trained
//! like any demonstration.

use std::sync::Arc;

use levade_call::{Backend, ExternalCall};
use levade_conversation::{Conversation, Format, Request};
use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use levade_tree::{Finish, Outcome, Trajectory};

use crate::agent_loop::Attempt;
use crate::demonstrate::DemonstrationError;
use crate::roster::Player;

/// Completion of a teacher, with its prompt.
pub(crate) struct TeacherCompletion {
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
    pub message: Message,
}

impl TeacherCompletion {
    /// Returns the completions of an agent from its external calls. Calls without a complete
    /// response are left out.
    pub(crate) fn from_calls(calls: &[ExternalCall], agent: &str) -> Vec<TeacherCompletion> {
        let full_history = |call: &ExternalCall| {
            call.agent == agent && call.error.is_none() && call.finish == FinishReason::StopId
        };
        let exchange = |at: usize| {
            let mut messages = ExternalCall::history(calls, at);
            let message = messages.pop()?;
            Some(TeacherCompletion {
                messages,
                tools: ExternalCall::tools(calls, at).to_vec(),
                message,
            })
        };
        (0..calls.len()).filter(|&at| full_history(&calls[at])).filter_map(exchange).collect()
    }
}

/// Policy that imitates a teacher: its chat format, its name, and the name of its agent.
pub(crate) struct ImitatingPolicy {
    format: Arc<Format>,
    agent: String,
    policy: String,
}

impl ImitatingPolicy {
    /// Creates the imitating policy of an agent that `player` plays. Returns `None` if the player
    /// does not sample tokens.
    pub(crate) fn new(agent: &str, player: &Player) -> Option<Self> {
        let Backend::Tokens(_) = player.backend else { return None };
        let format = player.format.clone()?;
        Some(ImitatingPolicy { format, agent: agent.to_owned(), policy: player.policy.clone() })
    }
}

/// Renders a teacher's external calls as demonstrations for the policies that the teacher replaced.
/// Returns the trajectory of the demonstrations, and the number of demonstrated tokens.
///
/// # Errors
/// Returns an error if a conversation cannot be rendered in the chat format of its policy.
fn demonstrate_calls(
    policies: &[ImitatingPolicy],
    calls: &[ExternalCall],
) -> Result<(Trajectory, usize), DemonstrationError> {
    let mut conversation = Conversation::new();
    let mut count = 0;
    for ImitatingPolicy { format, agent, policy } in policies {
        let exchanges = TeacherCompletion::from_calls(calls, agent);
        for TeacherCompletion { messages, tools, message } in exchanges {
            let request = Request { agent, policy, format, messages: &messages, tools: &tools };
            let prepared = conversation.prepare(&request)?;
            let opened = format.chat().opened_reasoning(&messages, &tools)?;
            let tokens = format.chat().assistant(&message, opened)?;
            count += tokens.len();
            conversation.demonstrate(prepared, tokens)?;
        }
    }
    Ok((conversation.into_trajectory(), count))
}

/// Creates the attempt that a teacher has made, from the attempt's outcome and the teacher's
/// external calls. Rendering the calls takes time, so it runs outside of the async workers.
pub(crate) async fn create_attempt(
    mut outcome: Outcome,
    policies: Vec<ImitatingPolicy>,
    calls: Vec<ExternalCall>,
) -> Attempt {
    let render = move || demonstrate_calls(&policies, &calls);
    let rendered = match tokio::task::spawn_blocking(render).await {
        Ok(rendered) => rendered.map_err(|error| error.to_string()),
        Err(error) => Err(format!("the teacher's completions cannot be rendered: {error}")),
    };
    match rendered {
        Ok((trajectory, tokens)) => {
            outcome.sampled_tokens = tokens;
            Attempt::new(trajectory, outcome)
        }
        Err(why) => {
            outcome.add_warning("chat template", why.clone());
            (outcome.error, outcome.finish) = (Some(why), Finish::Failed);
            Attempt::new(Trajectory::new(), outcome)
        }
    }
}

#[cfg(test)]
#[path = "teacher_demonstrations_tests.rs"]
mod tests;
