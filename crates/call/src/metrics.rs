//! Counters of calls, shared by all recorders of a process.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maximum number of distinct names of ignored request fields that are counted.
const MAX_IGNORED_FIELDS: usize = 1000;

/// Upper bounds of the buckets of a [`Histogram`], in seconds.
const BUCKET_BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0];

/// Counters since the start of the process, and a generator of call ids.
#[derive(Debug)]
pub struct CallMetrics {
    /// Number of calls that were admitted.
    pub calls: AtomicU64,
    /// Number of calls that failed or were rejected.
    pub failed: AtomicU64,
    /// Number of calls in flight.
    pub running: AtomicU64,
    /// Number of prompt tokens.
    pub prompt_tokens: AtomicU64,
    /// Number of sampled tokens.
    pub sampled_tokens: AtomicU64,
    /// Number of calls that were aborted because no reader was left.
    pub aborted: AtomicU64,
    /// Number of prompts in which the chat template renders recorded history differently.
    pub drifted: AtomicU64,
    /// Number of prompts that forked from the recorded conversation.
    pub forked: AtomicU64,
    /// Number of prompts that a context policy truncated.
    pub truncated: AtomicU64,
    /// Number of summaries that a context policy requested.
    pub summaries: AtomicU64,
    /// Number of leading system messages that were joined with the first one.
    pub systems_joined: AtomicU64,
    /// Number of later system messages that were moved to a position that the chat template
    /// supports.
    pub systems_moved: AtomicU64,
    /// Number of keywords of tool schemas that grammars omitted.
    pub ignored_keywords: AtomicU64,
    /// Durations from the start of a call to its first token.
    pub first_token: Histogram,
    /// Durations from the start of a call to its end, including failed calls.
    pub duration: Histogram,
    /// Number of occurrences of each ignored request field.
    ignored_fields: Mutex<BTreeMap<String, u64>>,
    /// Number of call ids that were created so far.
    ids: AtomicU64,
    /// Start of the process in microseconds since 1970, which distinguishes the call ids of
    /// different processes.
    started: u64,
}

impl Default for CallMetrics {
    fn default() -> Self {
        let started =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        CallMetrics {
            calls: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            running: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            sampled_tokens: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            drifted: AtomicU64::new(0),
            forked: AtomicU64::new(0),
            truncated: AtomicU64::new(0),
            summaries: AtomicU64::new(0),
            systems_joined: AtomicU64::new(0),
            systems_moved: AtomicU64::new(0),
            ignored_keywords: AtomicU64::new(0),
            first_token: Histogram::default(),
            duration: Histogram::default(),
            ignored_fields: Mutex::default(),
            ids: AtomicU64::new(0),
            started,
        }
    }
}

impl CallMetrics {
    /// Creates a call id that is unique across all processes.
    pub fn next_id(&self) -> String {
        let count = self.ids.fetch_add(1, Ordering::Relaxed);
        format!("{:x}{count:06x}", self.started)
    }

    /// Counts a request field that is ignored, and logs its first occurrence.
    pub fn count_ignored_field(&self, api: &str, field: &str) {
        let name = format!("{api}.{field}");
        let mut ignored = self.ignored_fields.lock().unwrap_or_else(PoisonError::into_inner);
        // The names come from clients, so their number must be bounded.
        if ignored.len() >= MAX_IGNORED_FIELDS && !ignored.contains_key(&name) {
            return;
        }
        let count = ignored.entry(name).or_default();
        *count += 1;
        if *count == 1 {
            tracing::warn!(api, field, "ignored an unknown request field");
        }
    }

    /// Returns the names of ignored request fields, each with the number of its occurrences.
    pub fn ignored_fields(&self) -> BTreeMap<String, u64> {
        self.ignored_fields.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Adds `count` to a counter, with relaxed ordering.
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKET_BOUNDS.len()],
    count: AtomicU64,
    microseconds: AtomicU64,
}

impl Histogram {
    /// Adds a duration to the histogram.
    pub(crate) fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        if let Some(bucket) = BUCKET_BOUNDS.iter().position(|bound| seconds <= *bound) {
            add(&self.buckets[bucket], 1);
        }
        add(&self.count, 1);
        add(&self.microseconds, duration.as_micros() as u64);
    }

    /// Appends the histogram named `name` to `out` in the text format of Prometheus.
    pub fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bucket, bound) in self.buckets.iter().zip(BUCKET_BOUNDS) {
            sum += bucket.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let count = self.count.load(Ordering::Relaxed);
        let seconds = self.microseconds.load(Ordering::Relaxed) as f64 / 1e6;
        let _ = writeln!(
            out,
            "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {seconds}\n{name}_count {count}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_durations_up_to_each_bound() {
        let histogram = Histogram::default();
        // The second is at a bound, and the last above all.
        for milliseconds in [1.5, 250.0, 251.0, 700_000.0] {
            histogram.observe(Duration::from_micros((milliseconds * 1000.0) as u64));
        }
        let mut out = String::new();
        histogram.write("name", "Help.", &mut out);
        let want = "# HELP name Help.\n# TYPE name histogram\n\
                    name_bucket{le=\"0.001\"} 0\nname_bucket{le=\"0.0025\"} 1\n\
                    name_bucket{le=\"0.005\"} 1\n\
                    name_bucket{le=\"0.01\"} 1\nname_bucket{le=\"0.025\"} 1\n\
                    name_bucket{le=\"0.05\"} 1\n\
                    name_bucket{le=\"0.1\"} 1\nname_bucket{le=\"0.25\"} 2\n\
                    name_bucket{le=\"0.5\"} 3\n\
                    name_bucket{le=\"1\"} 3\nname_bucket{le=\"2.5\"} 3\nname_bucket{le=\"10\"} 3\n\
                    name_bucket{le=\"60\"} 3\nname_bucket{le=\"600\"} 3\n\
                    name_bucket{le=\"+Inf\"} 4\n\
                    name_sum 700.5025\nname_count 4\n";
        assert_eq!(out, want);
    }

    #[test]
    fn names_of_ignored_fields_are_bounded() {
        let metrics = CallMetrics::default();
        for index in 0..MAX_IGNORED_FIELDS + 5 {
            metrics.count_ignored_field("chat", &format!("field{index}"));
        }
        // A known name still counts.
        metrics.count_ignored_field("chat", "field7");
        let ignored = metrics.ignored_fields();
        assert_eq!(ignored.len(), MAX_IGNORED_FIELDS);
        assert_eq!((ignored["chat.field7"], ignored["chat.field8"]), (2, 1));
    }

    #[test]
    fn call_ids_are_unique() {
        let metrics = CallMetrics::default();
        let ids: std::collections::BTreeSet<String> = (0..100).map(|_| metrics.next_id()).collect();
        assert_eq!(ids.len(), 100);
    }
}
