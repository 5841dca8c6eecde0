//! Adds the calls that a recorder has recorded to the outcome of an attempt.

use std::time::Duration;

use levade_call::{CallRecord, Recording};
use levade_conversation::{Fork, Origin};
use levade_policy::FinishReason;
use levade_tree::{ContextTruncation, Outcome};

/// Timeout for calls in flight to end after an agent loop has ended.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Adds the number of turns and the measurements of recorded model calls to an attempt's outcome.
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
    outcome.context_truncations.extend(recorded.calls.iter().filter_map(to_context_truncation));
    outcome.context_truncations.sort_by_key(|event| event.turn);
    if let Some(error) = &recorded.comparison_error {
        outcome.add_warning("chat template", error.as_str());
    }
    let helper_drift = std::mem::replace(&mut outcome.drift, recorded.drift.clone());
    outcome.drift.extend(helper_drift);
    outcome.timings.0.extend(recorded.timings().0);
}

/// Returns the context truncation of a recorded call, or `None` if no context policy truncated the
/// prompt of the call.
pub(crate) fn to_context_truncation(call: &CallRecord) -> Option<ContextTruncation> {
    match call.origin {
        Some(Origin::Forked(Fork { reason, .. })) if reason.is_truncation() => {
            let turn = call.turn.unwrap_or_default();
            let why = reason.description().to_owned();
            Some(ContextTruncation { turn, agent: call.agent.clone(), message: why })
        }
        _ => None,
    }
}
