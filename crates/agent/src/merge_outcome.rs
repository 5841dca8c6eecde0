//! Merges the outcomes of helpers into the outcome of the attempt that called them.

use levade_tree::{CallCounts, ContextTruncation, Drift, Outcome};

/// Adds the events of a helper's conversation to the outcome of the attempt. The helper's
/// conversation starts `first` turns after the start of the attempt's recorded conversation. Calls
/// of the helper's tools are counted in `calls`.
pub(crate) fn merge_outcome(
    outcome: &mut Outcome,
    calls: &mut CallCounts,
    first: u32,
    helped: Outcome,
) {
    let Outcome {
        calls: own,
        calls_by_turn,
        rewards_by_turn: turn_rewards,
        tool_metrics,
        drift,
        context_truncations: truncations,
        warnings: failures,
        timings,
        ..
    } = helped;
    *calls = calls.sum_with(&own);
    outcome
        .calls_by_turn
        .extend(calls_by_turn.into_iter().map(|(turn, counts)| (first + turn, counts)));
    outcome
        .rewards_by_turn
        .extend(turn_rewards.into_iter().map(|(turn, reward)| (first + turn, reward)));
    for (name, value) in tool_metrics {
        let sum = outcome.tool_metrics.entry(name).or_default();
        *sum = clamp_finite(*sum + value);
    }
    outcome
        .drift
        .extend(drift.into_iter().map(|drift| Drift { turn: first + drift.turn, ..drift }));
    outcome.context_truncations.extend(
        truncations
            .into_iter()
            .map(|event| ContextTruncation { turn: first + event.turn, ..event }),
    );
    outcome.timings.0.extend(timings.as_branch(first));
    for failure in failures {
        outcome.add_warning(failure.source, failure.message);
    }
}

/// Clamps a sum to finite values, which the store requires. A sum of large numbers may be infinite.
pub(crate) fn clamp_finite(sum: f64) -> f64 {
    sum.clamp(f64::MIN, f64::MAX)
}
