//! Counters of the server's requests, in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use levade_store::rollouts::RolloutStatistics;

/// Upper bounds of the histogram buckets for the duration of a request, in seconds.
const BUCKETS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Labels of a request counter: method, route and status.
pub(crate) type Labels = (String, String, u16);

/// Histogram of the durations of all requests with the same labels.
#[derive(Debug, Clone, Copy, Default)]
struct DurationHistogram {
    /// Number of requests in each bucket. Unlike in Prometheus, a bucket does not include the
    /// requests of smaller buckets.
    buckets: [u64; BUCKETS.len()],
    count: u64,
    seconds: f64,
}

/// Duration histograms of all requests since the server started, by their labels.
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics(Mutex<BTreeMap<Labels, DurationHistogram>>);

impl RequestMetrics {
    /// Counts a request with the labels `labels` that took `duration`.
    pub fn record(&self, labels: Labels, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let series = all.entry(labels).or_default();
        if let Some(bucket) = BUCKETS.iter().position(|bound| seconds <= *bound) {
            series.buckets[bucket] += 1;
        }
        series.count += 1;
        series.seconds += seconds;
    }

    /// Returns all metrics in the text format of Prometheus, including the number of rows in the
    /// store.
    pub fn to_prometheus_text(&self, rows: &RolloutStatistics) -> String {
        let mut out = String::new();
        for (name, help, value) in [
            ("levade_store_rollouts", "Rollouts in the store.", rows.rollouts),
            (
                "levade_store_rollouts_queued",
                "Rollouts that wait for a worker.",
                rows.queued_rollouts,
            ),
            (
                "levade_store_rollouts_active",
                "Rollouts with a try in progress.",
                rows.active_rollouts,
            ),
            ("levade_store_attempts", "Tries in the store.", rows.tries),
            ("levade_store_spans", "Spans in the store.", rows.spans),
            ("levade_store_resources", "Resources in the store.", rows.resources),
            ("levade_store_workers", "Workers that the store has seen.", rows.workers),
        ] {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
        let name = "levade_store_request_seconds";
        let _ = writeln!(out, "# HELP {name} Duration of requests.\n# TYPE {name} histogram");
        for ((method, path, status), series) in
            &*self.0.lock().unwrap_or_else(PoisonError::into_inner)
        {
            let labels = format!("method=\"{method}\",path=\"{path}\",status=\"{status}\"");
            let mut sum = 0;
            for (bound, count) in BUCKETS.iter().zip(series.buckets) {
                sum += count;
                let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
            }
            let DurationHistogram { count, seconds, .. } = series;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
            let _ =
                writeln!(out, "{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {count}");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prometheus_text_has_cumulative_buckets() {
        let metrics = RequestMetrics::default();
        for millis in [0, 3, 3, 60_000] {
            metrics.record(
                ("GET".into(), "/v1/agl/health".into(), 200),
                Duration::from_millis(millis),
            );
        }
        let text = metrics
            .to_prometheus_text(&RolloutStatistics { spans: 7, ..RolloutStatistics::default() });
        let labels = "method=\"GET\",path=\"/v1/agl/health\",status=\"200\"";
        for (bound, count) in [("0.0025", 1), ("0.005", 3), ("5", 3), ("+Inf", 4)] {
            let line =
                format!("levade_store_request_seconds_bucket{{{labels},le=\"{bound}\"}} {count}\n");
            assert!(text.contains(&line), "{line}\n{text}");
        }
        assert!(text.contains("\nlevade_store_spans 7\n"));
    }
}
