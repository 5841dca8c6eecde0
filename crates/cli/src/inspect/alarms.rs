//! Finds what is wrong with a run: rules over its metrics and its record, each with a threshold and
//! advice.
//!
//! Most rules compare a trailing mean over [`WINDOW`] steps of the phase with a threshold, so that
//! one odd step raises no alarm. `docs/commands.md` lists all rules.

use std::fmt::Write as _;

use anyhow::Context as _;
use levade_run::dir::RunDir;
use levade_store::{Status, Store};
use levade_tree::Purpose;
use serde::Serialize;

use super::history::{MetricSeries, MetricsHistory};
use super::rules::{AlarmRule, RULES};
use crate::failure::unusable;
use crate::screen::{self, Style};

/// Number of steps over which a trailing mean is computed.
const WINDOW: usize = 10;
/// Minimum number of steps before a trailing mean raises an alarm.
const MIN_STEPS: usize = 3;

/// Severity of an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The run learns something wrong, or nothing.
    Critical,
    /// The run wastes time or learns less than it could.
    Warning,
}

/// Problem of a run, with the measured evidence and advice.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Alarm {
    /// Name of the rule that raises the alarm.
    pub name: String,
    pub severity: Severity,
    /// Index of the phase, from 0.
    pub phase: u32,
    /// Number of the first step since which the alarm has held, counted from 1 as in metrics.
    pub since_step: u32,
    /// Measured value that raises the alarm.
    pub figure: f64,
    /// Value beyond which the rule raises an alarm.
    pub threshold: f64,
    /// Description of the problem.
    pub message: String,
    /// Advice to the user: a key to change, or something to inspect.
    pub action: String,
    /// Page of the documentation that explains the alarm.
    pub page: String,
}

/// Finds the alarms of a phase of a run. Formats the alarms as sentences, or as JSON. If `phase` is
/// `None`, takes the last phase that has steps.
///
/// # Errors
/// Returns an error if the run has no such phase, or if its files cannot be read.
pub async fn format_phase_alarms(
    run: &RunDir,
    store: &dyn Store,
    phase: Option<u32>,
    as_json: bool,
) -> anyhow::Result<String> {
    let metrics = run.root().join("metrics.jsonl");
    let text = match std::fs::read_to_string(&metrics) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.with_context(|| format!("cannot read {}", metrics.display()))?,
    };
    let recipe = run.recipe()?;
    let num_phases = recipe.phase.len();
    if let Some(phase) = phase
        && phase as usize >= num_phases
    {
        let num_phases = screen::plural(num_phases as u32, "phase");
        return Err(unusable(format!(
            "--phase is {phase}, but the run has {num_phases}, numbered from 0; name one of them"
        )));
    }
    let history = MetricsHistory::parse(&text, phase);
    let cluster = recipe.cluster;
    let is_exact = cluster.samplers.is_none() && cluster.learner.is_none();
    let alarms = find_alarms(&history, store, is_exact).await?;
    if as_json {
        let steps = history.steps.len();
        let found = serde_json::json!({ "phase": history.phase, "steps": steps, "alarms": alarms });
        return Ok(format!("{found}\n"));
    }
    Ok(format_alarms(&alarms, &history, Style::stdout()))
}

/// Finds the alarms of a run, and returns the most urgent alarm first. `is_exact` is whether the
/// embedded engine both samples and trains, so that sampling and training must compute the same
/// bits.
pub async fn find_alarms(
    history: &MetricsHistory,
    store: &dyn Store,
    is_exact: bool,
) -> anyhow::Result<Vec<Alarm>> {
    let mut alarms = find_metric_alarms(history, is_exact);
    for purpose in [Purpose::Train, Purpose::Eval] {
        let summaries = store.summaries(purpose).await?;
        let unscored = summaries.iter().filter(|summary| summary.status == Status::Unscored);
        let slots: Vec<_> = unscored.map(|summary| summary.slot).collect();
        let Some(first) = slots.iter().min_by_key(|slot| (slot.phase, slot.step)) else { continue };
        alarms.push(Alarm {
            name: "unscored".into(),
            severity: Severity::Warning,
            phase: first.phase,
            since_step: first.step + 1,
            figure: slots.len() as f64,
            threshold: 0.0,
            message: format!(
                "{} of {} attempts for {} have no score: a scorer or a judge did not respond",
                slots.len(),
                summaries.len(),
                purpose.name()
            ),
            action: "start the scorer and resume the run, or set `unscored` of the scorer".into(),
            page: "docs/train.md#missing-scores".into(),
        });
    }
    alarms.sort_by_key(|alarm| (alarm.severity, alarm.phase, alarm.since_step));
    Ok(alarms)
}

/// Finds the alarms that need only the metrics of the run.
pub fn find_metric_alarms(history: &MetricsHistory, is_exact: bool) -> Vec<Alarm> {
    let mut alarms = Vec::new();
    for rule in RULES {
        // Servers and external learners round differently from each other.
        if (rule.needs_exact && !is_exact) || (rule.unless_solved && is_solved(history)) {
            continue;
        }
        for series in history.metric_series(rule.metric) {
            alarms.extend(apply_rule(rule, &series, history.phase));
        }
    }
    alarms.extend(find_tool_errors(history));
    alarms.extend(find_unparsed_calls(history));
    if !is_exact {
        alarms.extend(find_idle_side(history));
    }
    alarms.extend(find_useless_growth(history));
    alarms.extend(find_collapsed_entropy(history));
    alarms.extend(find_reward_without_success(history));
    alarms
}

/// Applies a rule to the values of a metric. Returns an alarm if the rule is violated.
fn apply_rule(rule: &AlarmRule, series: &MetricSeries, phase: u32) -> Option<Alarm> {
    let means = compute_trailing_means(&series.values);
    let (_, figure) = *means.last()?;
    if figure <= rule.warning || (!rule.needs_exact && means.len() < MIN_STEPS) {
        return None;
    }
    let is_critical = rule.critical.is_some_and(|critical| figure > critical);
    let since_step = find_start(&means, |mean| mean > rule.warning);
    let of = series.policy.as_ref().map_or(String::new(), |policy| format!("policy {policy}: "));
    Some(Alarm {
        name: rule.name.into(),
        severity: if is_critical { Severity::Critical } else { Severity::Warning },
        phase,
        since_step,
        figure,
        threshold: rule.warning,
        message: format!("{of}{}", (rule.message)(figure)),
        action: rule.action.into(),
        page: rule.page.into(),
    })
}

/// Returns, for each step, the mean of the last [`WINDOW`] values.
fn compute_trailing_means(values: &[(u32, f64)]) -> Vec<(u32, f64)> {
    let means = values.iter().enumerate().map(|(end, (step, _))| {
        let window = &values[end.saturating_sub(WINDOW - 1)..=end];
        (*step, window.iter().map(|(_, value)| value).sum::<f64>() / window.len() as f64)
    });
    means.collect()
}

/// Returns the first step since which the condition `holds` has been true without interruption.
fn find_start(means: &[(u32, f64)], holds: impl Fn(f64) -> bool) -> u32 {
    let holding = means.iter().rev().take_while(|(_, mean)| holds(*mean));
    holding.last().map_or(0, |(step, _)| *step)
}

/// Finds toolboxes of which more than 30 % of the calls fail.
fn find_tool_errors(history: &MetricsHistory) -> Vec<Alarm> {
    const MAX_ERRORS: f64 = 0.3;
    let boxes = history.metric_names().filter_map(|name| {
        let toolbox = name.strip_prefix("tools/")?.strip_suffix("/errors")?;
        let errors = history.values(name);
        let calls = history.values(&format!("tools/{toolbox}/calls"));
        let rates = divide_means(&errors, &calls);
        let (_, figure) = *rates.last()?;
        (figure > MAX_ERRORS && rates.len() >= MIN_STEPS).then(|| Alarm {
            name: "tool_errors".into(),
            severity: if figure > 0.8 { Severity::Critical } else { Severity::Warning },
            phase: history.phase,
            since_step: find_start(&rates, |rate| rate > MAX_ERRORS),
            figure,
            threshold: MAX_ERRORS,
            message: format!("{:.0} % of the calls of the tool {toolbox} fail", 100.0 * figure),
            action: format!(
                "read failed calls (`levade inspect RUN --worst`), and call the tool yourself \
                 (`levade tools RECIPE --call {toolbox}`)"
            ),
            page: "docs/tools.md".into(),
        })
    });
    boxes.collect()
}

/// Finds out whether more than a fifth of the tool calls in completions cannot be parsed.
fn find_unparsed_calls(history: &MetricsHistory) -> Option<Alarm> {
    const MAX_MALFORMED: f64 = 0.2;
    let kinds = ["ok", "malformed", "unknown_tool", "bad_arguments", "failed", "timeout"];
    let counts = kinds.map(|kind| history.values(&format!("tool_calls/{kind}")));
    let total: Vec<(u32, f64)> = counts[0]
        .iter()
        .enumerate()
        .map(|(at, (step, _))| {
            (*step, counts.iter().map(|count| count.get(at).map_or(0.0, |(_, value)| *value)).sum())
        })
        .collect();
    let rates = divide_means(&counts[1], &total);
    let (_, figure) = *rates.last()?;
    (figure > MAX_MALFORMED && rates.len() >= MIN_STEPS).then(|| Alarm {
        name: "malformed_calls".into(),
        severity: Severity::Warning,
        phase: history.phase,
        since_step: find_start(&rates, |rate| rate > MAX_MALFORMED),
        figure,
        threshold: MAX_MALFORMED,
        message: format!("{:.0} % of the tool calls cannot be parsed", 100.0 * figure),
        action: "set agent.protocol to the format in which the model was trained, or imitate \
                 demonstrations first"
            .into(),
        page: "docs/tools.md".into(),
    })
}

/// Finds out whether the learner or the samplers of a run are idle most of the time. Only runs with
/// external learners or samplers are examined.
fn find_idle_side(history: &MetricsHistory) -> Vec<Alarm> {
    const MAX_FRACTION: f64 = 0.7;
    let step = history.values("timing_s/step");
    let sides = [
        (
            "idle_learner",
            "timing_s/gen",
            "the learner waits for attempts",
            "add samplers, raise \
          engine.concurrency, or set staleness = 1",
        ),
        (
            "idle_samplers",
            "timing_s/update_actor",
            "the samplers wait for the learner",
            "set \
          staleness = 1, or give the learner more devices",
        ),
    ];
    let sides = sides.into_iter().filter_map(|(name, metric, message, action)| {
        let fractions = divide_means(&history.values(metric), &step);
        let (_, figure) = *fractions.last()?;
        (figure > MAX_FRACTION && fractions.len() >= MIN_STEPS).then(|| Alarm {
            name: name.into(),
            severity: Severity::Warning,
            phase: history.phase,
            since_step: find_start(&fractions, |fraction| fraction > MAX_FRACTION),
            figure,
            threshold: MAX_FRACTION,
            message: format!("in {:.0} % of a step's time {message}", 100.0 * figure),
            action: action.into(),
            page: "docs/cluster.md".into(),
        })
    });
    sides.collect()
}

/// Divides the trailing means of two metrics. Steps whose divisor is 0 are left out.
fn divide_means(of: &[(u32, f64)], to: &[(u32, f64)]) -> Vec<(u32, f64)> {
    let means = compute_trailing_means(of).into_iter().zip(compute_trailing_means(to));
    let ratios = means.filter(|(_, (_, to))| *to > 0.0);
    ratios.map(|((step, of), (_, to))| (step, of / to)).collect()
}

/// Finds out whether completions have become more than twice as long without a larger reward.
fn find_useless_growth(history: &MetricsHistory) -> Option<Alarm> {
    const MAX_GROWTH: f64 = 2.0;
    let growth = compute_growth(&history.values("response_length/mean"))?;
    let (_, figure) = *growth.last()?;
    let [first, last] = compute_end_means(&history.values("critic/rewards/mean"))?;
    (figure > MAX_GROWTH && last <= first).then(|| Alarm {
        name: "length_runaway".into(),
        severity: Severity::Warning,
        phase: history.phase,
        since_step: find_start(&growth, |growth| growth > MAX_GROWTH),
        figure,
        threshold: MAX_GROWTH,
        message: format!(
            "completions are {figure:.1} times as long as at the start, but the reward has not \
             risen ({first:.3} before, {last:.3} now)"
        ),
        action: "penalize length with `overlong = { kind = \"penalize\", buffer = … }`, or train \
                 with `algorithm = \"dr_grpo\"`, which does not favor long wrong answers"
            .into(),
        page: "docs/train.md#truncated-attempts".into(),
    })
}

/// Returns whether the policy solves its tasks: the mean score is at least 0.8, and no score is
/// above 1. In this case, most groups have equal rewards and the entropy is low, and neither is a
/// problem.
fn is_solved(history: &MetricsHistory) -> bool {
    const SOLVED: f64 = 0.8;
    let is_rate = history.values("critic/score/max").iter().all(|(_, max)| *max <= 1.0);
    let score = compute_trailing_means(&history.values("critic/score/mean"));
    is_rate && score.last().is_some_and(|(_, score)| *score >= SOLVED)
}

/// Returns whether the mean score has risen within the last [`WINDOW`] steps.
fn is_learning(history: &MetricsHistory) -> bool {
    const MIN_RISE: f64 = 0.01;
    let means = compute_trailing_means(&history.values("critic/score/mean"));
    let before = means.len().checked_sub(WINDOW + 1).map(|at| means[at].1);
    before.zip(means.last()).is_some_and(|(before, (_, now))| now - before > MIN_RISE)
}

/// Finds policies whose entropy has fallen to less than a tenth of its first values. Returns no
/// alarm if the run solves its tasks or is still learning.
fn find_collapsed_entropy(history: &MetricsHistory) -> Vec<Alarm> {
    const MIN_REMAINING: f64 = 0.1;
    if is_solved(history) || is_learning(history) {
        return Vec::new();
    }
    let policies = history.metric_series("actor/entropy").into_iter().filter_map(|series| {
        let remaining = compute_growth(&series.values)?;
        let (_, figure) = *remaining.last()?;
        let of = series.policy.map_or(String::new(), |policy| format!("policy {policy}: "));
        (figure < MIN_REMAINING).then(|| Alarm {
            name: "entropy_collapse".into(),
            severity: Severity::Critical,
            phase: history.phase,
            since_step: find_start(&remaining, |growth| growth < MIN_REMAINING),
            figure,
            threshold: MIN_REMAINING,
            message: format!(
                "{of}the entropy of the policy is {:.0} % of its value at the start: attempts at \
                 a task are nearly equal, and little is left to learn from",
                100.0 * figure
            ),
            action: "raise clip_high (DAPO: 0.28), set `entropy`, or lower learning_rate; go back \
                     to a checkpoint before this step"
                .into(),
            page: "docs/recipe.md".into(),
        })
    });
    policies.collect()
}

/// Returns the mean of the first values and the mean of the last values. Returns `None` if the
/// first and the last values overlap.
fn compute_end_means(values: &[(u32, f64)]) -> Option<[f64; 2]> {
    const ENDS: usize = 5;
    let mean = |values: &[(u32, f64)]| {
        values.iter().map(|(_, value)| value).sum::<f64>() / values.len() as f64
    };
    let start = values.first_chunk::<ENDS>()?;
    let end = values.last_chunk::<ENDS>()?;
    (values.len() >= 2 * ENDS).then(|| [mean(start), mean(end)])
}

/// Returns the trailing means, divided by the mean of the first values.
fn compute_growth(values: &[(u32, f64)]) -> Option<Vec<(u32, f64)>> {
    let [first, _] = compute_end_means(values)?;
    let means = compute_trailing_means(values).into_iter();
    (first > 0.0).then(|| means.map(|(step, mean)| (step, mean / first)).collect())
}

/// Finds out whether the reward rises while the success on held-out tasks falls. The policy then
/// learns to satisfy the scorer, or memorizes the training tasks.
fn find_reward_without_success(history: &MetricsHistory) -> Option<Alarm> {
    const MIN_RISE: f64 = 0.05;
    let best = history.evals.iter().max_by(|a, b| a.low.total_cmp(&b.low))?;
    let last = history.evals.last()?;
    let [first_score, last_score] = compute_end_means(&history.values("critic/score/mean"))?;
    let rise = last_score - first_score;
    (rise > MIN_RISE && last.high < best.low).then(|| Alarm {
        name: "reward_without_success".into(),
        severity: Severity::Critical,
        phase: last.phase,
        since_step: best.step + 1,
        figure: last.success,
        threshold: best.low,
        message: format!(
            "the score in training has risen by {rise:.2}, but success on held-out tasks has \
             fallen from {:.1} % to {:.1} %, beyond the 95 % intervals: the policy may exploit the \
             scorer or know the training tasks by heart",
            100.0 * best.success,
            100.0 * last.success
        ),
        action:
            "read attempts with large rewards (`levade inspect RUN --best`), and continue from \
                 checkpoints/best with another reward or more tasks"
                .into(),
        page: "docs/train.md#evaluations".into(),
    })
}

/// Formats alarms as sentences for the terminal.
pub fn format_alarms(alarms: &[Alarm], history: &MetricsHistory, style: Style) -> String {
    if alarms.is_empty() {
        return match history.steps.len() {
            0 => "no alarms: no step is finished yet\n".to_owned(),
            steps => {
                let steps = screen::plural(steps as u32, "step");
                format!("no alarms in {steps} of phase {}\n", history.phase)
            }
        };
    }
    let mut text = String::new();
    for alarm in alarms {
        let severity = match alarm.severity {
            Severity::Critical => style.red("critical"),
            Severity::Warning => "warning ".to_owned(),
        };
        let (name, phase, step) = (style.bold(&alarm.name), alarm.phase, alarm.since_step);
        let _ = writeln!(text, "{severity}  {name}, since step {step} of phase {phase}");
        let (figure, threshold) = (format_number(alarm.figure), format_number(alarm.threshold));
        let _ = writeln!(text, "  {} ({figure}, threshold {threshold})", alarm.message);
        let _ = writeln!(text, "  to do: {}; see {}", alarm.action, alarm.page);
    }
    text
}

/// Formats a number with three significant digits, or as an integer.
fn format_number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.3}") }
}

#[cfg(test)]
#[path = "alarms_tests.rs"]
mod tests;
