//! The metrics of a run over its steps, read from `metrics.jsonl`.

use std::collections::BTreeSet;

use levade_trainer::Metrics;
use serde_json::{Map, Value};

/// Metrics of the finished steps of a phase, and the evaluations of its run.
#[derive(Debug, Clone, Default)]
pub struct MetricsHistory {
    /// Index of the phase whose steps are included, from 0.
    pub phase: u32,
    /// Numbers of the steps, from 1, each with the metrics of the step.
    pub steps: Vec<(u32, Metrics)>,
    /// Evaluations of all phases of the run, in order.
    pub evals: Vec<Evaluation>,
}

/// Result of an evaluation: the success on held-out tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// Index of the evaluated phase, from 0.
    pub phase: u32,
    /// Number of steps of the phase that were finished before the evaluation.
    pub step: u32,
    /// Fraction of successful attempts. `low` and `high` are the ends of its 95 % interval.
    pub success: f64,
    pub low: f64,
    pub high: f64,
}

/// Values of a metric at the steps of a phase.
#[derive(Debug, Clone, PartialEq)]
pub struct MetricSeries {
    /// Policy that the metric describes. `None` if the run trains only one policy.
    pub policy: Option<String>,
    /// Step numbers, each with the value at the step. Values that are not finite are left out.
    pub values: Vec<(u32, f64)>,
}

impl MetricsHistory {
    /// Parses the lines of a metrics file. Reads the steps of `phase`; if it is `None`, of the last
    /// phase that has steps. Incomplete lines are skipped, because a process may be writing the
    /// file.
    pub fn parse(text: &str, phase: Option<u32>) -> Self {
        let mut history = MetricsHistory::default();
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let lines: Vec<Map<String, Value>> = lines.collect();
        let number = |line: &Map<String, Value>, key: &str| line.get(key).and_then(Value::as_u64);
        let last = lines
            .iter()
            .filter(|line| line.contains_key("kind"))
            .filter_map(|line| number(line, "phase"))
            .max();
        history.phase = phase.unwrap_or(last.unwrap_or_default() as u32);
        for line in lines {
            let (Some(phase), Some(step)) = (number(&line, "phase"), number(&line, "step")) else {
                continue;
            };
            let (phase, step) = (phase as u32, step as u32);
            if line.contains_key("eval") {
                let metrics = Metrics::from(line);
                let [success, low, high] = ["", "_low", "_high"]
                    .map(|suffix| metrics.get(&format!("eval/success{suffix}")));
                if let (Some(success), Some(low), Some(high)) = (success, low, high) {
                    history.evals.push(Evaluation { phase, step, success, low, high });
                }
            } else if phase == history.phase {
                history.steps.push((step, Metrics::from(line)));
            }
        }
        history
    }

    /// Returns the names of all recorded metrics.
    pub fn metric_names(&self) -> impl Iterator<Item = &str> {
        let names = self.steps.iter().flat_map(|(_, metrics)| metrics.iter());
        names.map(|(name, _)| name).collect::<BTreeSet<_>>().into_iter()
    }

    /// Returns the values of a metric, each with the number of its step.
    pub fn values(&self, name: &str) -> Vec<(u32, f64)> {
        let values = self.steps.iter().filter_map(|(step, metrics)| {
            metrics.get(name).filter(|value| value.is_finite()).map(|value| (*step, value))
        });
        values.collect()
    }

    /// Returns the values of a metric for each policy. If a run trains several policies, the names
    /// of their metrics have the prefix `POLICY/`.
    pub fn metric_series(&self, metric: &str) -> Vec<MetricSeries> {
        let policies = self.metric_names().filter_map(|name| {
            let prefix = name.strip_suffix(metric)?;
            let policy = match prefix.strip_suffix('/') {
                None if prefix.is_empty() => None,
                // A longer name is another metric, such as `tools/x/training/…`.
                Some(policy) if !policy.contains('/') => Some(policy.to_owned()),
                _ => return None,
            };
            Some(MetricSeries { policy, values: self.values(name) })
        });
        policies.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_selects_last_phase_and_evaluations() {
        let text = r#"{"phase":0,"step":0,"eval":"before","eval/success":0.5,"eval/success_low":0.4,"eval/success_high":0.6}
{"phase":0,"kind":"sft","step":1,"x":1.0}
{"phase":1,"kind":"grpo","step":1,"x":2.0,"a/actor/entropy":1.0,"b/actor/entropy":2.0}
{"phase":1,"kind":"grpo","step":2,"x":null}
{"phase":1,"kind":"gr"#;
        let history = MetricsHistory::parse(text, None);
        assert_eq!((history.phase, history.steps.len(), history.evals.len()), (1, 2, 1));
        assert_eq!(history.values("x"), [(1, 2.0)]);
        let policies: Vec<_> = history
            .metric_series("actor/entropy")
            .into_iter()
            .map(|series| series.policy)
            .collect();
        assert_eq!(policies, [Some("a".to_owned()), Some("b".to_owned())]);
        assert_eq!(MetricsHistory::parse(text, Some(0)).values("x"), [(1, 1.0)]);
    }
}
