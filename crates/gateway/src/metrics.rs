//! `GET /metrics`: counters in the text format of Prometheus.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use levade_call::CallMetrics;

/// Returns all counters as text. `waiting` is the number of calls that wait for a permit, and
/// `rejoined` the number of calls that were repeated so far.
pub(crate) fn text(metrics: &CallMetrics, waiting: u64, rejoined: u64) -> String {
    let mut out = String::new();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    for (name, help, value) in [
        ("levade_calls_running", "Calls being answered.", load(&metrics.running)),
        ("levade_calls_waiting", "Calls waiting for their turn.", waiting),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    for (name, help, value) in [
        ("levade_calls_total", "Calls that were admitted.", load(&metrics.calls)),
        ("levade_calls_failed_total", "Calls that failed or were refused.", load(&metrics.failed)),
        (
            "levade_calls_aborted_total",
            "Calls whose client went away for good.",
            load(&metrics.aborted),
        ),
        ("levade_calls_rejoined_total", "Calls that a client asked for again.", rejoined),
        ("levade_prompt_tokens_total", "Tokens of prompts.", load(&metrics.prompt_tokens)),
        (
            "levade_generation_tokens_total",
            "Tokens that were sampled.",
            load(&metrics.sampled_tokens),
        ),
        ("levade_forks_total", "Prompts that left what was recorded.", load(&metrics.forked)),
        (
            "levade_context_cuts_total",
            "Prompts that a context policy made shorter.",
            load(&metrics.truncated),
        ),
        (
            "levade_context_summaries_total",
            "Summaries that a context policy asked for.",
            load(&metrics.summaries),
        ),
        (
            "levade_system_messages_joined_total",
            "Leading system messages that were joined, since the template takes one.",
            load(&metrics.systems_joined),
        ),
        (
            "levade_system_messages_moved_total",
            "Late system messages that were printed elsewhere, since the template does not print them.",
            load(&metrics.systems_moved),
        ),
        (
            "levade_schema_keywords_left_out_total",
            "Keywords of tools' schemas that the grammar of a call left out.",
            load(&metrics.ignored_keywords),
        ),
        (
            "levade_drift_total",
            "Prompts whose past the template prints otherwise.",
            load(&metrics.drifted),
        ),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
    }
    metrics.first_token.write("levade_first_token_seconds", "Time to the first token.", &mut out);
    metrics.duration.write("levade_call_seconds", "Time of whole calls.", &mut out);
    out
}
