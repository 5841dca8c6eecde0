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
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{CallRecord, Cast, Recording};
use levade_conversation::{Fork, Origin};
use levade_policy::FinishReason;
use levade_tree::{CallCounts, ContextTruncation, Finish, Outcome};
use tracing::{Instrument, debug, debug_span};

use crate::cast::{Caller, PartyBuilder};
use crate::roster::{Agent, Player};
use crate::teacher_demonstrations::{
    ImitatingPolicy, TeacherCompletion, create_attempt, demonstrate_completions,
};
use crate::tool_loop::{LoopError, LoopLimits, ToolLoop, add_opening};
use crate::{AgentLoop, Attempt, AttemptContext};

/// Timeout for calls in flight to end after the loop has ended.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Makes one attempt. Its errors are in its outcome, with everything recorded before.
async fn run_attempt(context: AttemptContext) -> Attempt {
    let played = context.own_agent().and_then(|agent| Ok((agent, context.player(agent)?)));
    let (agent, player) = match played {
        Ok(played) => played,
        Err(why) => return Attempt::failed("policies", why),
    };
    let casting = match PartyBuilder::new(&context, Caller::ToolLoop) {
        Ok(casting) => casting,
        Err(why) => return Attempt::failed("teacher", why),
    };
    let party = match casting.party(agent, player) {
        Ok(party) => Arc::new(party),
        Err(why) => return Attempt::failed("policies", why),
    };
    let recorder = context.recorder(context.limits.max_tokens);
    let cast = Cast::new([party], Arc::clone(&recorder));
    let mut outcome = Outcome::initial();
    if agent.picker.is_some() {
        outcome.cast.insert(agent.name.clone(), player.policy.clone());
    }
    let result = open_and_loop(&context, (agent, player), &cast, &mut outcome).await;
    let recorded = recorder.close(CLOSE_TIMEOUT).await;
    add_recorded_calls(&mut outcome, &recorded);
    let is_taught = context.teacher.is_some();
    match result {
        Ok(finish) => outcome.finish = finish,
        Err(error) => {
            let source = if is_taught && matches!(error, LoopError::Call(_)) {
                "teacher"
            } else {
                error.source()
            };
            outcome.add_warning(source, error.to_string());
            outcome.error = Some(error.to_string());
        }
    }
    let Some(format) = player.format.clone().filter(|_| is_taught) else {
        return Attempt::new(recorded.trajectory, outcome);
    };
    let agent = agent.name.clone();
    let policy = player.policy.clone();
    create_attempt(outcome, move || {
        let pupil = ImitatingPolicy { format: &format, agent: &agent, policy: &policy };
        demonstrate_completions([(
            pupil,
            TeacherCompletion::from_calls(&recorded.external, &agent),
        )])
    })
    .await
}

/// Adds the recorded calls to the outcome of an attempt.
pub(crate) fn add_recorded_calls(outcome: &mut Outcome, recorded: &Recording) {
    let calls = recorded.calls.iter().filter(|call| !call.summary);
    let turns = calls.clone().filter(|call| {
        if call.external {
            call.error.is_none() && call.finish != FinishReason::Aborted
        } else {
            call.turn.is_some()
        }
    });
    outcome.turns = turns.count() as u32;
    outcome.sampled_tokens = calls.filter(|call| !call.external).map(|call| call.tokens).sum();
    outcome.context_truncations.extend(recorded.calls.iter().filter_map(to_context_cut));
    outcome.context_truncations.sort_by_key(|event| event.turn);
    if let Some(error) = &recorded.comparison_error {
        outcome.add_warning("chat template", error.as_str());
    }
    let helper_drift = std::mem::replace(&mut outcome.drift, recorded.drift.clone());
    outcome.drift.extend(helper_drift);
    outcome.timings.0.extend(recorded.timings().0);
}

/// Returns the outcome's entry for a call whose prompt a context policy truncated, or `None` for
/// other calls.
pub(crate) fn to_context_cut(call: &CallRecord) -> Option<ContextTruncation> {
    match call.origin {
        Some(Origin::Forked(Fork { reason, .. })) if reason.is_truncation() => {
            let turn = call.turn.unwrap_or_default();
            let why = reason.description().to_owned();
            Some(ContextTruncation { turn, agent: call.agent.clone(), message: why })
        }
        _ => None,
    }
}

/// Opens the tools of an attempt and runs its loop.
async fn open_and_loop(
    context: &AttemptContext,
    (agent, player): (&Agent, &Player),
    cast: &Cast,
    outcome: &mut Outcome,
) -> Result<Finish, LoopError> {
    debug!(messages = context.messages.len(), "attempt started");
    let timeout = context.limits.attempt_timeout;
    let mut messages = context.messages.clone();
    let mut tools = agent.tools.open(&context.tool_context(agent, timeout)).await?;
    add_opening(&mut messages, tools.opening());
    let specs = tools.specs().to_vec();
    let mut helped = CallCounts::default();
    let mut tool_loop = ToolLoop {
        agent: &agent.name,
        cast,
        specs: &specs,
        limits: LoopLimits { max_turns: context.limits.max_turns, opening: player.opening },
        outcome,
        helped: &mut helped,
        observer: None,
    };
    let result = player.wait_within(timeout, tool_loop.run(&mut messages, &mut tools)).await;
    let result = result.unwrap_or_else(|| {
        outcome.add_warning("attempt", format!("was not done within {timeout:?}"));
        Ok(Finish::Deadline)
    });
    outcome.calls = tools.counts().sum_with(&helped);
    let (scorer_input, missing) = tools.scorer_input().await;
    outcome.scorer_inputs = scorer_input;
    for error in missing {
        outcome.add_warning("tools", error.to_string());
    }
    if let Err(error) = tools.close().await {
        // The attempt itself is complete. An error of the loop takes precedence over one after it.
        outcome.add_warning("tools", error.to_string());
        outcome.error = Some(error.to_string());
    }
    result
}

#[cfg(test)]
#[path = "attempt_tests.rs"]
mod tests;
