//! Counters of a gateway, in the form that Prometheus reads.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets of durations, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];

/// Counters since the start.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub calls: AtomicU64,
    pub failed: AtomicU64,
    pub running: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub drawn_tokens: AtomicU64,
    pub aborted: AtomicU64,
    pub rejoined: AtomicU64,
    pub drifted: AtomicU64,
    pub forked: AtomicU64,
    pub cut: AtomicU64,
    pub summaries: AtomicU64,
    pub systems_joined: AtomicU64,
    pub systems_moved: AtomicU64,
    pub keywords_left_out: AtomicU64,
    pub first_token: Histogram,
    pub whole: Histogram,
}

/// Durations by buckets.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    buckets: [AtomicU64; BOUNDS.len()],
    count: AtomicU64,
    microseconds: AtomicU64,
}

impl Histogram {
    pub(crate) fn add(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        if let Some(at) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.buckets[at].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.microseconds.fetch_add(duration.as_micros() as u64, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bucket, bound) in self.buckets.iter().zip(BOUNDS) {
            sum += bucket.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let count = self.count.load(Ordering::Relaxed);
        let seconds = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _ =
            writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {seconds}\n{name}_count {count}");
    }
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Metrics {
    /// All counters as text. `waiting` calls wait for their turn.
    pub(crate) fn text(&self, waiting: u64) -> String {
        let mut out = String::new();
        let running = self.running.load(Ordering::Relaxed);
        for (name, help, value) in [
            ("levade_calls_running", "Calls being answered.", running),
            ("levade_calls_waiting", "Calls waiting for their turn.", waiting),
        ] {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
        for (name, help, counter) in [
            ("levade_calls_total", "Calls that were admitted.", &self.calls),
            ("levade_calls_failed_total", "Calls that failed or were refused.", &self.failed),
            ("levade_calls_aborted_total", "Calls whose client went away for good.", &self.aborted),
            ("levade_calls_rejoined_total", "Calls that a client asked for again.", &self.rejoined),
            ("levade_prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("levade_drawn_tokens_total", "Tokens that were sampled.", &self.drawn_tokens),
            ("levade_forks_total", "Prompts that left what was recorded.", &self.forked),
            ("levade_context_cuts_total", "Prompts that a context policy made shorter.", &self.cut),
            ("levade_context_summaries_total", "Summaries that a context policy asked for.", &self.summaries),
            (
                "levade_system_messages_joined_total",
                "Leading system messages that were joined, since the template takes one.",
                &self.systems_joined,
            ),
            (
                "levade_system_messages_moved_total",
                "Late system messages that were printed elsewhere, since the template does not print them.",
                &self.systems_moved,
            ),
            (
                "levade_schema_keywords_left_out_total",
                "Keywords of tools' schemas that the grammar of a call left out.",
                &self.keywords_left_out,
            ),
            ("levade_drift_total", "Prompts whose past the template prints otherwise.", &self.drifted),
        ] {
            let value = counter.load(Ordering::Relaxed);
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter\n{name} {value}");
        }
        self.first_token.write("levade_first_token_seconds", "Time to the first token.", &mut out);
        self.whole.write("levade_call_seconds", "Time of whole calls.", &mut out);
        out
    }
}
