//! Outcomes of helpers as part of that of the attempt which they helped.

use dressage_tree::{CallCounts, ContextCut, Drift, Outcome};

/// Adds what happened in a helper's conversation, which is `first` turns after the beginning of the attempt's
/// record, to an outcome. Calls of its tools are counted in `calls`.
pub(crate) fn join(outcome: &mut Outcome, calls: &mut CallCounts, first: u32, helped: Outcome) {
    let Outcome { calls: own, calls_by_turn, earned_by_turn, tool_metrics, drift, cuts, troubles, .. } =
        helped;
    *calls = both(*calls, own);
    outcome.calls_by_turn.extend(calls_by_turn.into_iter().map(|(turn, counts)| (first + turn, counts)));
    outcome.earned_by_turn.extend(earned_by_turn.into_iter().map(|(turn, reward)| (first + turn, reward)));
    for (name, value) in tool_metrics {
        let sum = outcome.tool_metrics.entry(name).or_default();
        *sum = (*sum + value).clamp(f64::MIN, f64::MAX);
    }
    outcome.drift.extend(drift.into_iter().map(|drift| Drift { turn: first + drift.turn, ..drift }));
    outcome.cuts.extend(cuts.into_iter().map(|cut| ContextCut { turn: first + cut.turn, ..cut }));
    for trouble in troubles {
        outcome.trouble(trouble.source, trouble.why);
    }
}

/// Counts of two agents' calls together.
pub(crate) fn both(one: CallCounts, other: CallCounts) -> CallCounts {
    CallCounts {
        ok: one.ok + other.ok,
        malformed: one.malformed + other.malformed,
        unknown_tool: one.unknown_tool + other.unknown_tool,
        bad_arguments: one.bad_arguments + other.bad_arguments,
        failed: one.failed + other.failed,
        timeout: one.timeout + other.timeout,
        bare: one.bare + other.bare,
    }
}
