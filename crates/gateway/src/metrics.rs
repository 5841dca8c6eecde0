//! `GET /metrics`: counters in the text format of Prometheus.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use levade_call::CallMetrics;

/// Returns all counters in the text format of Prometheus. `waiting` is the number of calls that
/// wait for a permit, and `rejoined` the number of repeated calls that joined an earlier call.
pub(crate) fn text(metrics: &CallMetrics, waiting: u64, rejoined: u64) -> String {
    let mut out = String::new();
    for (name, help, value) in [
        ("levade_calls_running", "Calls in progress.", load(&metrics.running)),
        ("levade_calls_waiting", "Calls waiting in the queue.", waiting),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    for (name, help, value) in [
        ("levade_calls_total", "Calls that were admitted.", load(&metrics.calls)),
        ("levade_calls_failed_total", "Calls that failed or were rejected.", load(&metrics.failed)),
        (
            "levade_calls_aborted_total",
            "Calls whose client disconnected and did not return.",
            load(&metrics.aborted),
        ),
        ("levade_calls_rejoined_total", "Repeated requests that joined an earlier call.", rejoined),
        ("levade_prompt_tokens_total", "Prompt tokens.", load(&metrics.prompt_tokens)),
        ("levade_generation_tokens_total", "Sampled tokens.", load(&metrics.sampled_tokens)),
        (
            "levade_forks_total",
            "Prompts that forked from the recorded conversation.",
            load(&metrics.forked),
        ),
        (
            "levade_context_cuts_total",
            "Prompts that a context policy truncated.",
            load(&metrics.truncated),
        ),
        (
            "levade_context_summaries_total",
            "Summaries that a context policy requested.",
            load(&metrics.summaries),
        ),
        (
            "levade_system_messages_joined_total",
            "Leading system messages that were joined because the template accepts only one.",
            load(&metrics.systems_joined),
        ),
        (
            "levade_system_messages_moved_total",
            "Later system messages that were moved because the template does not render them in \
             place.",
            load(&metrics.systems_moved),
        ),
        (
            "levade_schema_keywords_left_out_total",
            "Keywords of tool schemas that the grammar of tool calls does not enforce.",
            load(&metrics.ignored_keywords),
        ),
        (
            "levade_drift_total",
            "Prompts whose recorded history the template renders differently.",
            load(&metrics.drifted),
        ),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
    }
    metrics.first_token.write(
        "levade_first_token_seconds",
        "Time to the first token, in seconds.",
        &mut out,
    );
    metrics.duration.write("levade_call_seconds", "Duration of calls, in seconds.", &mut out);
    out
}

fn load(counter: &std::sync::atomic::AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
