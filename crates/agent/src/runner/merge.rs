//! Merges the outcome of a runner's tool loop with the calls that the gateway recorded.

use levade_call::{CallRecord, Recording};
use levade_policy::FinishReason;
use levade_tree::{CallCounts, Finish, Outcome, TimedPart};

use super::wire::ToolTime;
use crate::program::find_rejection_finish;
use crate::recorded_calls::add_recorded_calls;
use crate::{Attempt, AttemptLimits};

/// Creates the attempt of a tool loop that ended with `outcome` on a runner. Turns, tokens and
/// drift come from the recording.
///
/// Over HTTP, the loop sees a limit of the gateway as a rejected call, and a full context as a
/// truncated completion. The recording contains the reason.
pub(super) fn merge_recording(
    agent: &str,
    limits: &AttemptLimits,
    (mut outcome, tool_times): (Outcome, Vec<ToolTime>),
    recorded: Recording,
) -> Attempt {
    let own: Vec<&CallRecord> = recorded
        .calls
        .iter()
        .filter(|call| !call.summary && call.agent == agent && call.error.is_none())
        .collect();
    // The loop counts its completions. The recorded conversation also counts summaries.
    let turns: Vec<u32> = own.iter().filter_map(|call| call.turn).collect();
    let recorded_turn = |index: u32| turns.get(index as usize).copied().unwrap_or(index);
    for (turn, _) in &mut outcome.calls_by_turn {
        *turn = recorded_turn(*turn);
    }
    for (turn, _) in &mut outcome.rewards_by_turn {
        *turn = recorded_turn(*turn);
    }
    // The loop received malformed calls as text.
    for (index, call) in own.iter().enumerate().filter(|(_, call)| call.malformed_calls > 0) {
        let malformed = call.malformed_calls as u32;
        let counts = CallCounts { malformed, ..CallCounts::default() };
        outcome.calls = outcome.calls.sum_with(&counts);
        let turn = recorded_turn(index as u32);
        match outcome.calls_by_turn.iter_mut().find(|(counted, _)| *counted == turn) {
            Some((_, counted)) => *counted = counted.sum_with(&counts),
            None => outcome.calls_by_turn.push((turn, counts)),
        }
    }
    for ToolTime { turn, index, result, interval } in tool_times {
        let turn = recorded_turn(turn);
        outcome.timings.add(TimedPart::Tool { turn, index, result }, interval);
    }
    let is_full = own.last().is_some_and(|call| call.finish == FinishReason::Context);
    let limit = match (&outcome.error, outcome.finish) {
        (None, Finish::MaxTokens) if is_full => Some(Finish::Context),
        // A first prompt that does not fit is an error, as in the trainer's own process.
        (Some(_), _) => find_rejection_finish(&recorded, limits, &own)
            .filter(|finish| *finish != Finish::Context || !own.is_empty()),
        _ => None,
    };
    if let Some(finish) = limit {
        outcome.finish = finish;
        outcome.error = None;
        outcome.warnings.retain(|warning| warning.source != "sampler");
    }
    add_recorded_calls(&mut outcome, &recorded);
    Attempt::new(recorded.trajectory, outcome)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::call_record;

    const LIMITS: AttemptLimits = AttemptLimits {
        max_turns: 3,
        max_tokens: 100,
        completion_timeout: Duration::from_secs(60),
        attempt_timeout: Duration::from_secs(60),
    };

    fn call(turn: u32, summary: bool, finish: FinishReason) -> CallRecord {
        CallRecord { finish, ..call_record(turn, summary) }
    }

    fn merged(outcome: Outcome, calls: Vec<CallRecord>, rejected: &str) -> Outcome {
        let rejected = [(rejected.to_owned(), 1)].into_iter().filter(|(kind, _)| !kind.is_empty());
        let recorded = Recording { calls, rejected: rejected.collect(), ..Recording::default() };
        merge_recording("solver", &LIMITS, (outcome, Vec::new()), recorded).outcome
    }

    #[test]
    fn turns_of_loop_become_recorded_turns() {
        let stop = FinishReason::StopId;
        let calls = vec![call(0, false, stop), call(1, true, stop), call(2, false, stop)];
        let outcome =
            Outcome { rewards_by_turn: vec![(0, 0.5), (1, 1.0)], ..Outcome::demonstrated("5") };
        let outcome = merged(outcome, calls, "");
        assert_eq!(outcome.rewards_by_turn, [(0, 0.5), (2, 1.0)]);
        assert_eq!((outcome.turns, outcome.sampled_tokens), (2, 14));
        assert_eq!(outcome.final_text, "5");
    }

    #[test]
    fn malformed_calls_are_counted_in_their_turn() {
        let stop = FinishReason::StopId;
        let malformed = CallRecord { malformed_calls: 2, ..call(2, false, stop) };
        let calls = vec![call(0, false, stop), call(1, true, stop), malformed];
        let ok = CallCounts { ok: 1, ..CallCounts::default() };
        let outcome = Outcome {
            calls: ok,
            calls_by_turn: vec![(0, ok)],
            ..Outcome::demonstrated("<tool_call>")
        };
        let outcome = merged(outcome, calls, "");
        let malformed = CallCounts { malformed: 2, ..CallCounts::default() };
        assert_eq!(outcome.calls, ok.sum_with(&malformed));
        assert_eq!(outcome.calls_by_turn, [(0, ok), (2, malformed)]);
    }

    #[test]
    fn limits_of_gateway_end_loop_without_error() {
        let failed = || {
            let mut outcome = Outcome { error: Some("rejected".into()), ..Outcome::initial() };
            outcome.add_warning("sampler", "rejected");
            outcome
        };
        let stop = FinishReason::StopId;
        let truncated = Outcome { finish: Finish::MaxTokens, ..Outcome::initial() };
        for (outcome, calls, rejected, want) in [
            (failed(), vec![call(0, false, stop)], "too_long", Finish::Context),
            (failed(), vec![call(0, false, stop)], "limit", Finish::MaxTokens),
            (truncated, vec![call(0, false, FinishReason::Context)], "", Finish::Context),
        ] {
            let outcome = merged(outcome, calls, rejected);
            assert_eq!((outcome.finish, &outcome.error), (want, &None), "{rejected}");
            assert!(outcome.warnings.is_empty());
        }
        for (calls, rejected) in [(vec![], "too_long"), (vec![call(0, false, stop)], "")] {
            let outcome = merged(failed(), calls, rejected);
            assert_eq!((outcome.finish, outcome.warnings.len()), (Finish::Failed, 1));
        }
    }
}
