//! Demonstrations by a teacher: a chat API acts in place of a trained policy.
//!
//! The loop is the same as for any attempt ([`can_be_taught`](crate::AgentLoop::can_be_taught)), over a
//! party whose backend is the teacher. A teacher returns messages. Each of its completions is then
//! rendered as the trained policy would have written it after its own prompt: reasoning, text and tool
//! calls in the format of its chat, encoded by its tokenizer. These tokens are
//! [demonstrated](levade_tree::Kind::Demonstrated), in a tree like that of any attempt, and trained
//! like any demonstration.

use std::sync::Arc;

use levade_call::ExternalCall;
use levade_conversation::{Conversation, Format, Request};
use levade_policy::FinishReason;
use levade_text::{Message, ToolSpec};
use levade_tree::{Finish, Outcome, Trajectory};

use crate::agent_loop::Attempt;
use crate::demonstrate::DemonstrationError;

/// Completion of a teacher, with its prompt.
pub(crate) struct Exchange {
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
    pub reply: Message,
}

impl Exchange {
    /// Returns the complete responses among the external calls of an agent.
    pub(crate) fn of(calls: &[ExternalCall], agent: &str) -> Vec<Exchange> {
        let full_history = |call: &ExternalCall| {
            call.agent == agent && call.fault.is_none() && call.finish == FinishReason::StopId
        };
        let exchange = |at: usize| {
            let mut messages = ExternalCall::history(calls, at);
            let reply = messages.pop()?;
            Some(Exchange { messages, tools: ExternalCall::tools(calls, at).to_vec(), reply })
        };
        (0..calls.len()).filter(|&at| full_history(&calls[at])).filter_map(exchange).collect()
    }
}

/// Trained policy that imitates a teacher: its chat format, and the names of agent and policy.
pub(crate) struct Pupil<'a> {
    pub format: &'a Arc<Format>,
    pub agent: &'a str,
    pub policy: &'a str,
}

/// Renders completions of teachers as demonstrations for the given pupils. Returns the trajectory, and
/// the number of demonstrated tokens.
///
/// # Errors
/// Returns an error if a conversation cannot be rendered in the format of its pupil.
pub(crate) fn taught<'a>(
    lessons: impl IntoIterator<Item = (Pupil<'a>, Vec<Exchange>)>,
) -> Result<(Trajectory, usize), DemonstrationError> {
    let (mut conversation, mut count) = (Conversation::new(), 0);
    for (Pupil { format, agent, policy }, exchanges) in lessons {
        for Exchange { messages, tools, reply } in exchanges {
            let request = Request { agent, policy, format, messages: &messages, tools: &tools };
            let prepared = conversation.prepare(&request)?;
            let opened = format.chat().opened_reasoning(&messages, &tools)?;
            let said = format.chat().assistant(&reply, opened)?;
            count += said.len();
            conversation.demonstrate(prepared, said)?;
        }
    }
    Ok((conversation.into_trajectory(), count))
}

/// Creates the attempt from an outcome and the demonstrations that `written` renders. Rendering takes
/// time, so it runs outside of the async workers.
pub(crate) async fn finished(
    mut outcome: Outcome,
    written: impl FnOnce() -> Result<(Trajectory, usize), DemonstrationError> + Send + 'static,
) -> Attempt {
    let written = match tokio::task::spawn_blocking(written).await {
        Ok(written) => written.map_err(|error| error.to_string()),
        Err(error) => Err(format!("rendering came to no end: {error}")),
    };
    match written {
        Ok((trajectory, tokens)) => {
            outcome.sampled_tokens = tokens;
            Attempt { trajectory, outcome }
        }
        Err(why) => {
            outcome.add_warning("chat template", why.clone());
            (outcome.error, outcome.finish) = (Some(why), Finish::Failed);
            Attempt { trajectory: Trajectory::new(), outcome }
        }
    }
}

#[cfg(test)]
#[path = "taught_tests.rs"]
mod tests;
