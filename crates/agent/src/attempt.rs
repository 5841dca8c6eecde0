//! Attempts of the tool loop: a model and its tools act in turn on one task.
//!
//! # Guarantees
//! - Every token that the model saw or sampled is in the trajectory. A completion that a timeout
//!   interrupts is in it with the tokens sampled so far.
//! - Every wait has a timeout. Time in which the sampler's device trains does not count.
//! - Tool sessions are closed in any case, even if the attempt fails.
//! - An attempt never fails other attempts: its errors are in its [`Outcome`].
//! - No text of a model breaks an attempt. If the chat template renders recorded history
//!   differently, the drift is counted, and the conversation forks if the format requires it.
//!
//! A teacher can answer in place of the trained policy (`taught`). Rewards and the selection of
//! tasks are out of scope.

use std::sync::Arc;

use async_trait::async_trait;
use levade_call::Cast;
use levade_text::Message;
use levade_tools::OpenTools;
use levade_tree::{CallCounts, Finish, Outcome};
use tracing::{Instrument, debug, debug_span};

use crate::cast::{CallerKind, PartyBuilder};
use crate::merge_outcome::merge_outcome;
use crate::recorded_calls::{CLOSE_TIMEOUT, add_recorded_calls};
use crate::roster::{Agent, Player};
use crate::teacher_demonstrations::{ImitatingPolicy, create_attempt};
use crate::tool_loop::{ToolLoop, ToolLoopError, ToolLoopLimits, add_opening};
use crate::user::{EndedUser, UserSession};
use crate::{AgentLoop, Attempt, AttemptContext};

/// Agent loop of agents that are not programs: the tool loop.
#[derive(Debug, Clone, Copy, Default)]
pub struct BuiltInLoop;

#[async_trait]
impl AgentLoop for BuiltInLoop {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let span = debug_span!("attempt", id = %context.name);
        let attempt = run_attempt(context).instrument(span.clone()).await;
        let Outcome { turns, sampled_tokens, finish, error, .. } = &attempt.outcome;
        span.in_scope(|| debug!(turns, sampled_tokens, ?finish, error, "attempt ended"));
        attempt
    }

    fn can_be_taught(&self, agent: &Agent) -> bool {
        // Agents that tools call would act by their own policies.
        agent.tools.helpers().is_empty()
    }
}

/// Makes one attempt of the tool loop. A failure becomes the error of the outcome; everything that
/// was recorded before is kept.
async fn run_attempt(context: AttemptContext) -> Attempt {
    let played =
        context.find_own_agent().and_then(|agent| Ok((agent, context.select_player(agent)?)));
    let (agent, player) = match played {
        Ok(played) => played,
        Err(why) => return Attempt::failed("policies", why),
    };
    let casting = match PartyBuilder::new(&context, CallerKind::ToolLoop) {
        Ok(casting) => casting,
        Err(why) => return Attempt::failed("teacher", why),
    };
    let party = match casting.create_party(agent, player) {
        Ok(party) => Arc::new(party),
        Err(why) => return Attempt::failed("policies", why),
    };
    let recorder = context.create_recorder(context.limits.max_tokens);
    let cast = Cast::new([party], Arc::clone(&recorder));
    let mut outcome = Outcome::initial();
    if agent.picker.is_some() {
        outcome.cast.insert(agent.name.clone(), player.policy.clone());
    }
    let result =
        open_tools_and_run_loop(&context, (agent, player), &casting, &cast, &mut outcome).await;
    let recorded = recorder.close(CLOSE_TIMEOUT).await;
    add_recorded_calls(&mut outcome, &recorded);
    let is_taught = context.teacher.is_some();
    match result {
        Ok(finish) => outcome.finish = finish,
        Err(error) => {
            let source = if is_taught && matches!(error, ToolLoopError::Call(_)) {
                "teacher"
            } else {
                error.failed_component()
            };
            outcome.add_warning(source, error.to_string());
            outcome.error = Some(error.to_string());
        }
    }
    match ImitatingPolicy::new(&agent.name, player).filter(|_| is_taught) {
        Some(policy) => create_attempt(outcome, vec![policy], recorded.external).await,
        None => Attempt::new(recorded.trajectory, outcome),
    }
}

async fn open_tools_and_run_loop(
    context: &AttemptContext,
    (agent, player): (&Agent, &Player),
    parties: &PartyBuilder<'_>,
    cast: &Cast,
    outcome: &mut Outcome,
) -> Result<Finish, ToolLoopError> {
    debug!(messages = context.messages.len(), "attempt started");
    let timeout = context.limits.attempt_timeout;
    let mut user = match &agent.user {
        Some(user) => {
            Some(UserSession::open(user, context, parties).await.map_err(ToolLoopError::User)?)
        }
        None => None,
    };
    let mut tools = agent.tools.open(&context.create_tool_context(agent, timeout)).await?;
    let mut helped = CallCounts::default();
    let talking =
        run_conversation(context, player, (&mut user, &mut tools), cast, (outcome, &mut helped));
    let result = player.wait_within(timeout, talking).await;
    let result = result.unwrap_or_else(|| {
        if let Some(why) = user.as_ref().and_then(UserSession::timeout_error) {
            return Err(ToolLoopError::User(why));
        }
        outcome.add_warning("attempt", format!("was not done within {timeout:?}"));
        Ok(Finish::Deadline)
    });
    outcome.calls = tools.counts().sum_with(&helped);
    let (scorer_input, missing) = tools.scorer_input().await;
    outcome.scorer_inputs = scorer_input;
    let mut result = result;
    if let Some(user) = user
        && let Err(error) = close_user(user, player, cast, outcome).await
    {
        result = result.and(Err(error));
    }
    for error in missing {
        outcome.add_warning("tools", error.to_string());
    }
    if let Err(error) = tools.close().await {
        // The attempt itself is complete. An error of the loop takes precedence over a later error.
        outcome.add_warning("tools", error.to_string());
        outcome.error = Some(error.to_string());
    }
    result
}

/// Runs the tool loop of an attempt. If the attempt has a user who opens the conversation, the
/// user's first message precedes the loop.
async fn run_conversation(
    context: &AttemptContext,
    player: &Player,
    (user, tools): (&mut Option<UserSession<'_>>, &mut OpenTools),
    cast: &Cast,
    (outcome, helped): (&mut Outcome, &mut CallCounts),
) -> Result<Finish, ToolLoopError> {
    let mut messages = context.messages.clone();
    if let Some(user) = user.as_mut().filter(|user| user.opens()) {
        messages.retain(|message| message.role.instructs());
        messages
            .push(Message::user(user.request_opening(player).await.map_err(ToolLoopError::User)?));
    }
    add_opening(&mut messages, tools.opening());
    let specs = tools.specs().to_vec();
    let mut tool_loop = ToolLoop {
        agent: &context.agent,
        cast,
        specs: &specs,
        limits: ToolLoopLimits { max_turns: context.limits.max_turns, opening: player.opening },
        outcome,
        helped,
        observer: None,
        user: user.as_mut().map(|user| (user, player)),
    };
    tool_loop.run(&mut messages, tools).await
}

/// Ends the user of an attempt, and adds the user's conversation to the recorded one.
///
/// # Errors
/// Returns an error if the conversation cannot be added.
async fn close_user(
    user: UserSession<'_>,
    player: &Player,
    cast: &Cast,
    outcome: &mut Outcome,
) -> Result<(), ToolLoopError> {
    let EndedUser { recorded, scorer_input, warning } = user.close(player).await;
    outcome.scorer_inputs.insert("user".to_owned(), scorer_input);
    if let Some(why) = warning {
        outcome.add_warning("user", why);
    }
    if let Some((trajectory, ended)) = recorded {
        let first = cast.recorder().append_trajectory(&trajectory)?;
        outcome.cast.extend(ended.cast.clone());
        merge_outcome(outcome, &mut CallCounts::default(), first, ended);
    }
    Ok(())
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
