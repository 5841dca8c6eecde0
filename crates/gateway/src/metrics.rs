//! `GET /metrics`: counters in the text format of Prometheus.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use levade_call::CallMetrics;

/// Returns all counters in the text format of Prometheus. `waiting` is the number of calls that
/// wait for a permit, and `rejoined` the number of repeated calls that joined an earlier call.
pub(crate) fn format_metrics(metrics: &CallMetrics, waiting: u64, rejoined: u64) -> String {
    let mut out = String::new();
    for (name, help, value) in [
        ("levade_calls_running", "Calls in progress.", read_counter(&metrics.running)),
        ("levade_calls_waiting", "Calls waiting in the queue.", waiting),
    ] {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
    }
    for (name, help, value) in [
        ("levade_calls_total", "Calls that were admitted.", read_counter(&metrics.calls)),
        (
            "levade_calls_failed_total",
            "Calls that failed or were rejected.",
            read_counter(&metrics.failed),
        ),
        (
            "levade_calls_aborted_total",
            "Calls whose client disconnected and did not return.",
            read_counter(&metrics.aborted),
        ),
        ("levade_calls_rejoined_total", "Repeated requests that joined an earlier call.", rejoined),
        ("levade_prompt_tokens_total", "Prompt tokens.", read_counter(&metrics.prompt_tokens)),
        (
            "levade_generation_tokens_total",
            "Sampled tokens.",
            read_counter(&metrics.sampled_tokens),
        ),
        (
            "levade_forks_total",
            "Prompts that forked from the recorded conversation.",
            read_counter(&metrics.forked),
        ),
        (
            "levade_context_cuts_total",
            "Prompts that a context policy truncated.",
            read_counter(&metrics.truncated),
        ),
        (
            "levade_context_summaries_total",
            "Summaries that a context policy requested.",
            read_counter(&metrics.summaries),
        ),
        (
            "levade_system_messages_joined_total",
            "Leading system messages that were joined because the template accepts only one.",
            read_counter(&metrics.systems_joined),
        ),
        (
            "levade_system_messages_moved_total",
            "Later system messages that were moved because the template does not render them in \
             place.",
            read_counter(&metrics.systems_moved),
        ),
        (
            "levade_schema_keywords_left_out_total",
            "Keywords of tool schemas that the grammar of tool calls does not enforce.",
            read_counter(&metrics.ignored_keywords),
        ),
        (
            "levade_drift_total",
            "Prompts whose recorded history the template renders differently.",
            read_counter(&metrics.drifted),
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

fn read_counter(counter: &std::sync::atomic::AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
