use std::fmt::Write as _;

use levade_store::{Attempt, AttemptStart, Memory};
use levade_tree::{AttemptId, AttemptSlot, RunId};
use serde_json::{Value, json};

use super::*;

/// Metrics of a healthy step.
fn healthy() -> Value {
    json!({
        "phase": 0, "kind": "grpo",
        "training/zero_variance_groups": 0.2, "response_length/clip_ratio": 0.05,
        "response/late_ratio": 0.0, "response/aborted_ratio": 0.0, "response_length/mean": 50.0,
        "context/truncated_ratio": 0.0, "conversation/drift": 0.0,
        "training/logprob_mismatch": 0.0, "rollout_corr/log_diff_mean": 0.001,
        "rollout_corr/beyond_bounds": 0.0, "training/staleness/mean": 0.5,
        "actor/ppo_kl": 0.001, "actor/pg_clipfrac": 0.02, "actor/skipped_updates": 0.0,
        "actor/entropy": 0.8, "perf/idle_fraction": 0.2, "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.5, "tool_calls/ok": 9.0, "tool_calls/malformed": 1.0,
        "tools/calculator/calls": 2.0, "tools/calculator/errors": 0.1,
        "timing_s/step": 10.0, "timing_s/gen": 5.0, "timing_s/update_actor": 4.0,
    })
}

/// Returns 30 healthy steps. From the step `from` on, `change` replaces metrics.
fn history(from: u32, change: &Value) -> MetricsHistory {
    let mut text = String::new();
    for step in 1..=30 {
        let mut line = healthy();
        line["step"] = json!(step);
        if step >= from {
            for (name, value) in change.as_object().unwrap() {
                line[name] = value.clone();
            }
        }
        let _ = writeln!(text, "{line}");
    }
    MetricsHistory::parse(&text, None)
}

fn names(alarms: &[Alarm]) -> Vec<&str> {
    alarms.iter().map(|alarm| alarm.name.as_str()).collect()
}

#[test]
fn healthy_run_raises_no_alarm() {
    let history = history(99, &json!({}));
    for is_exact in [true, false] {
        assert_eq!(names(&find_metric_alarms(&history, is_exact)), [""; 0]);
    }
    let text = format_alarms(&[], &history, Style::default());
    assert_eq!(text, "no alarms in 30 steps of phase 0\n");
    let text = format_alarms(&[], &MetricsHistory::default(), Style::default());
    assert_eq!(text, "no alarms: no step is finished yet\n");
}

#[test]
fn each_alarm_rule_reports_its_problem() {
    for (name, change) in [
        ("zero_variance_groups", json!({"training/zero_variance_groups": 0.8})),
        ("truncated_attempts", json!({"response_length/clip_ratio": 0.5})),
        ("late_attempts", json!({"response/late_ratio": 0.3})),
        ("broken_attempts", json!({"response/aborted_ratio": 0.3})),
        ("truncated_context", json!({"context/truncated_ratio": 0.9})),
        ("drift", json!({"conversation/drift": 4.0})),
        ("sampler_mismatch", json!({"rollout_corr/log_diff_mean": 0.1})),
        ("beyond_bounds", json!({"rollout_corr/beyond_bounds": 0.3})),
        ("stale_tokens", json!({"training/staleness/mean": 9.0})),
        ("kl_tail", json!({"actor/ppo_kl": 0.5})),
        ("clipped_ratios", json!({"actor/pg_clipfrac": 0.5})),
        ("skipped_updates", json!({"actor/skipped_updates": 1.0})),
        ("idle_engine", json!({"perf/idle_fraction": 0.8})),
        ("tool_errors", json!({"tools/calculator/errors": 1.0})),
        ("malformed_calls", json!({"tool_calls/malformed": 5.0})),
        ("length_runaway", json!({"response_length/mean": 150.0})),
        ("entropy_collapse", json!({"actor/entropy": 0.01})),
        ("idle_learner", json!({"timing_s/gen": 9.0})),
        ("idle_samplers", json!({"timing_s/update_actor": 9.0})),
    ] {
        let history = history(11, &change);
        let alarms = find_metric_alarms(&history, false);
        assert_eq!(names(&alarms), [name]);
        let Alarm { since_step, figure, threshold, .. } = alarms[0];
        assert!((11..=20).contains(&since_step), "{name} since {since_step}");
        let exceeds =
            if name == "entropy_collapse" { figure < threshold } else { figure > threshold };
        assert!(exceeds, "{name}: {figure} and {threshold}");
    }
}

#[test]
fn mismatch_is_an_alarm_of_exact_runs_only() {
    let history = history(30, &json!({"training/logprob_mismatch": 1.0}));
    assert_eq!(names(&find_metric_alarms(&history, true)), ["mismatch"]);
    assert_eq!(names(&find_metric_alarms(&history, false)), [""; 0]);
}

#[test]
fn one_odd_step_and_converged_policy_raise_no_alarm() {
    let mut odd = history(30, &json!({"response_length/clip_ratio": 1.0, "actor/ppo_kl": 0.5}));
    assert_eq!(names(&find_metric_alarms(&odd, false)), [""; 0]);
    // One step is too few for a trailing mean.
    odd.steps.drain(..29);
    assert_eq!(names(&find_metric_alarms(&odd, false)), [""; 0]);
    let solved = json!({"actor/entropy": 0.01, "critic/score/mean": 0.97,
        "training/zero_variance_groups": 0.8});
    assert_eq!(names(&find_metric_alarms(&history(11, &solved), false)), [""; 0]);
    // Scores above 1 are no success rates: 0.97 may be little.
    let mut points = solved.clone();
    points["critic/score/max"] = json!(30.0);
    let found = find_metric_alarms(&history(11, &points), false);
    assert_eq!(names(&found), ["zero_variance_groups", "entropy_collapse"]);
    let rewarded = json!({"response_length/mean": 150.0, "critic/rewards/mean": 0.8});
    assert_eq!(names(&find_metric_alarms(&history(11, &rewarded), false)), [""; 0]);
}

#[test]
fn low_entropy_is_no_alarm_while_the_score_rises() {
    let mut rising = history(11, &json!({"actor/entropy": 0.01}));
    for (step, metrics) in &mut rising.steps {
        let score = 0.2 + 0.01 * f64::from(*step);
        let mut line = serde_json::Map::from(metrics.clone());
        line.insert("critic/score/mean".into(), json!(score));
        *metrics = levade_trainer::Metrics::from(line);
    }
    assert_eq!(names(&find_metric_alarms(&rising, false)), [""; 0]);
}

#[test]
fn policies_raise_their_own_alarms() {
    let change = json!({"writer/actor/ppo_kl": 2.0, "critic/actor/ppo_kl": 0.0});
    let alarms = find_metric_alarms(&history(1, &change), false);
    assert_eq!(names(&alarms), ["kl_tail"]);
    assert!(alarms[0].message.starts_with("policy writer: "), "{}", alarms[0].message);
    assert_eq!(alarms[0].severity, Severity::Critical);
}

#[test]
fn falling_success_with_rising_score_is_critical() {
    let mut history = history(11, &json!({"critic/score/mean": 0.8}));
    let eval = |step, success: f64| super::super::history::Evaluation {
        phase: 0,
        step,
        success,
        low: success - 0.05,
        high: success + 0.05,
    };
    history.evals = vec![eval(0, 0.5), eval(10, 0.6), eval(30, 0.55)];
    // The intervals overlap.
    assert_eq!(names(&find_metric_alarms(&history, false)), [""; 0]);
    history.evals.push(eval(30, 0.4));
    let alarms = find_metric_alarms(&history, false);
    assert_eq!(names(&alarms), ["reward_without_success"]);
    assert_eq!(alarms[0].since_step, 11);
    let text = format_alarms(&alarms, &history, Style::default());
    assert!(
        text.starts_with("critical  reward_without_success, since step 11 of phase 0\n  the score"),
        "{text}"
    );
    assert!(text.contains("fallen from 60.0 % to 40.0 %"), "{text}");
}

#[tokio::test]
async fn attempts_without_a_score_are_counted() {
    let run = RunId("r".into());
    let store = Memory::new(run.clone());
    for sample in 0..3 {
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 4, group: 0, sample };
        let start =
            AttemptStart { id: AttemptId::new(&run, &slot, 0), slot, number: 0, task: json!({}) };
        let status = if sample == 0 { Status::Completed } else { Status::Unscored };
        let score = (sample == 0).then_some(1.0);
        let attempt = Attempt { status, score, reward: score, ..Attempt::from_start(&start) };
        store.record_attempt(&attempt).await.unwrap();
    }
    let alarms = find_alarms(&history(99, &json!({})), &store, true).await.unwrap();
    assert_eq!(names(&alarms), ["unscored"]);
    assert_eq!((alarms[0].since_step, alarms[0].figure), (5, 2.0));
    assert!(alarms[0].message.starts_with("2 of 3 attempts for train"), "{}", alarms[0].message);
}
