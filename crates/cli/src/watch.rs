//! Displays the progress of a run: bars on standard error, and one line per step on standard
//! output.

use std::time::Duration;

use indicatif::ProgressBar;
use levade_policy::process_time::Clock;
use levade_trainer::{Event, Metrics, Observer};
use levade_tree::Purpose;

use crate::screen::{self, Style};
use crate::table;

/// Progress bar for the current activity of a run: rollouts, an evaluation or micro-batches.
#[derive(Default)]
pub struct ProgressBars {
    clock: Clock,
    activity: Option<Activity>,
    /// Time at which the current activity started. The first event of an activity arrives only when
    /// its first part is done.
    since: Duration,
}

struct Activity {
    name: &'static str,
    bar: ProgressBar,
    tokens: usize,
    /// Number of parts of the activity that were done before the bar appeared. Their duration is
    /// unknown.
    before: usize,
}

impl ProgressBars {
    /// Shows a spinner for an activity whose first part is not done yet.
    pub fn show_spinner(&mut self) {
        self.clear();
        let bar = screen::create_bar(0, "{spinner:>10} {elapsed}");
        bar.enable_steady_tick(Duration::from_millis(250));
        self.activity = Some(Activity { name: "", bar, tokens: 0, before: 0 });
    }

    /// Removes the progress bar. The next activity starts now.
    pub fn clear(&mut self) {
        if let Some(activity) = self.activity.take() {
            activity.bar.finish_and_clear();
        }
        self.since = self.clock.elapsed();
    }

    /// Writes a line to standard output, above the progress bar.
    fn print_line(&self, line: &str) {
        match &self.activity {
            Some(activity) => activity.bar.suspend(|| screen::print_line(line)),
            None => screen::print_line(line),
        }
    }

    /// Moves the progress bar to `done` of `total` parts. `tokens` is the number of tokens that
    /// were sampled since the last call. The text `run_progress` describes the progress of the
    /// entire run, and is appended to the message of the bar.
    fn update_bar(
        &mut self,
        name: &'static str,
        done: usize,
        total: usize,
        tokens: usize,
        run_progress: &str,
    ) {
        if self.activity.as_ref().is_none_or(|activity| activity.name != name) {
            let since = self.since;
            self.clear();
            self.since = since;
            let bar =
                screen::create_bar(total as u64, "{prefix:>10} {bar:20.green} {pos}/{len}  {msg}");
            bar.set_prefix(name);
            bar.enable_steady_tick(Duration::from_millis(250));
            self.activity = Some(Activity { name, bar, tokens: 0, before: done.saturating_sub(1) });
        }
        let Some(activity) = &mut self.activity else { return };
        activity.tokens += tokens;
        activity.bar.set_position(done as u64);
        let elapsed = self.clock.elapsed().saturating_sub(self.since);
        let parts_done = done.saturating_sub(activity.before).max(1);
        let remaining = elapsed.mul_f64(total.saturating_sub(done) as f64 / parts_done as f64);
        let rate = activity.tokens as f64 / elapsed.as_secs_f64().max(1e-3);
        let rate = if activity.tokens > 0 { format!("{rate:.0} tok/s, ") } else { String::new() };
        activity.bar.set_message(format!("{rate}{} left{run_progress}", screen::clock(remaining)));
        if done >= total {
            self.show_spinner();
        }
    }

    fn update(&mut self, event: &Event, run_progress: &str) {
        match *event {
            Event::Attempt { purpose, done, total, sampled_tokens } => {
                let name = if purpose == Purpose::Eval { "evaluating" } else { "sampling" };
                self.update_bar(name, done, total, sampled_tokens, run_progress);
            }
            Event::MicroBatch { done, total } => {
                self.update_bar("learning", done, total, 0, run_progress)
            }
            _ => {}
        }
    }
}

impl Observer for ProgressBars {
    fn event(&mut self, event: &Event) {
        self.update(event, "");
    }
}

/// Observer that displays a run on the terminal: progress bars, and a line for each completed item.
pub struct Watch {
    style: Style,
    bars: ProgressBars,
    /// Number of completed steps of the run, over all phases.
    done: u32,
    /// Total number of steps of the run, over all phases.
    steps: u32,
    /// Number of steps of the current phase that this process completed.
    own_steps: u32,
    /// Time at which this process started the current phase.
    start: Duration,
}

impl Watch {
    /// Creates a display of a run that is about to start.
    pub fn new(clock: Clock) -> Self {
        let style = Style::stdout();
        let start = clock.elapsed();
        let bars = ProgressBars { clock, since: start, activity: None };
        Watch { style, bars, done: 0, steps: 0, own_steps: 0, start }
    }

    /// Removes the progress bar.
    pub fn clear(&mut self) {
        self.bars.clear();
    }

    /// Formats the current step of the run and the estimated remaining time. The estimate assumes
    /// that the remaining steps take as long as the steps of this phase. Before the first step of
    /// the phase, the time is left out.
    fn format_run_progress(&self) -> String {
        match self.bars.clock.elapsed().saturating_sub(self.start).checked_div(self.own_steps) {
            Some(step_duration) => {
                let remaining = screen::clock(step_duration * self.steps.saturating_sub(self.done));
                format!(" · step {}/{}, {remaining} left", self.done + 1, self.steps)
            }
            None => format!(" · step {}/{}", self.done + 1, self.steps),
        }
    }
}

impl Observer for Watch {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Started { from, done, steps } => {
                (self.done, self.steps) = (*done, *steps);
                if let Some(path) = from {
                    self.bars.print_line(&format!(
                        "resuming from {} (step {done} of {steps})",
                        screen::path(path)
                    ));
                }
                self.bars.show_spinner();
            }
            Event::PhaseStarted { phase, kind, done, steps } => {
                self.bars.clear();
                let before =
                    if *done > 0 { format!(", {done} of them done") } else { String::new() };
                let steps = screen::plural(*steps, "step");
                self.bars.print_line(
                    &self.style.bold(&format!("phase {phase}: {kind}, {steps}{before}")),
                );
                (self.own_steps, self.start) = (0, self.bars.clock.elapsed());
                self.bars.show_spinner();
            }
            Event::Attempt { purpose: Purpose::Eval, .. } => self.bars.update(event, ""),
            Event::Attempt { .. } | Event::MicroBatch { .. } => {
                let run_progress = self.format_run_progress();
                self.bars.update(event, &run_progress);
            }
            Event::Step { kind, step, steps, metrics, .. } => {
                self.bars.clear();
                self.done += 1;
                self.own_steps += 1;
                self.bars.print_line(&step_line(kind, *step, *steps, metrics));
                self.bars.show_spinner();
            }
            Event::Evaluated(result) => {
                self.bars.clear();
                let label = self.style.bold(&format!("{}:", result.label));
                self.bars.print_line(&format!("{label} {}", table::format_line(result)));
                self.bars.show_spinner();
            }
            Event::Checkpoint(path) => {
                self.bars
                    .print_line(&self.style.dim(&format!("checkpoint {}", screen::path(path))));
                self.bars.show_spinner();
            }
            Event::Note(note) => self.bars.print_line(&format!("note: {note}")),
        }
    }
}

/// Returns the values of a metric for all policies of a step. If the step trains several policies,
/// the names of each policy's metrics have the prefix `POLICY/`.
fn policy_values<'a>(metrics: &'a Metrics, name: &'a str) -> impl Iterator<Item = f64> + 'a {
    let is_of_policy = move |full: &str| {
        full.strip_suffix(name).is_some_and(|prefix| prefix.is_empty() || prefix.ends_with('/'))
    };
    metrics.iter().filter(move |(full, _)| is_of_policy(full)).map(|(_, value)| value)
}

/// Sums a metric over the policies of a step. Returns `None` if no policy has a value.
fn sum_over_policies(metrics: &Metrics, name: &str) -> Option<f64> {
    policy_values(metrics, name).reduce(|sum, value| sum + value)
}

/// Formats the mean score of a step. If all scores are between 0 and 1, the text is a success rate,
/// and otherwise a number.
fn format_score(metrics: &Metrics, mean: f64) -> String {
    let exceeds = |name: &str, is: fn(f64) -> bool| metrics.get(name).is_some_and(is);
    if exceeds("critic/score/min", |min| min < 0.0) || exceeds("critic/score/max", |max| max > 1.0)
    {
        format!("score {mean:>6.3}")
    } else {
        format!("success {:>5.1} %", 100.0 * mean)
    }
}

/// Formats the number of tokens whose log-probability in training differs in any bit from the
/// sampled log-probability, and the maximum difference.
fn format_mismatch(metrics: &Metrics, tokens: f64) -> String {
    match policy_values(metrics, "training/logprob_mismatch_max").reduce(f64::max) {
        Some(max_difference) if max_difference > 0.0 => {
            format!("mismatch {tokens:.0} (up to {max_difference:.1e})")
        }
        _ => format!("mismatch {tokens:.0}"),
    }
}

/// Formats the metrics of a step on one line. Metrics that were not measured are left out.
fn step_line(kind: &str, step: u32, steps: u32, metrics: &Metrics) -> String {
    let width = steps.to_string().len();
    let mut line = format!("{kind} {step:>width$}/{steps}");
    let mut append = |value: Option<f64>, format: &dyn Fn(f64) -> String| {
        if let Some(value) = value {
            line.push_str(" · ");
            line.push_str(&format(value));
        }
    };
    let first = |names: &[&str]| names.iter().find_map(|name| metrics.get(name));
    append(first(&["critic/rewards/mean"]), &|v| format!("reward {v:>6.3}"));
    append(first(&["critic/score/mean"]), &|v| format_score(metrics, v));
    append(first(&["actor/loss", "actor/pg_loss", "train/loss"]), &|v| format!("loss {v:>8.4}"));
    append(first(&["actor/kl_loss"]), &|v| format!("KL {v:.4}"));
    append(first(&["actor/grad_norm"]), &|v| format!("grad {v:>6.3}"));
    append(sum_over_policies(metrics, "training/logprob_mismatch"), &|v| {
        format_mismatch(metrics, v)
    });
    append(first(&["perf/throughput"]), &|v| format!("{v:>5.0} tok/s"));
    append(first(&["timing_s/step"]), &|v| format!("{v:.1} s"));
    if sum_over_policies(metrics, "actor/skipped_updates").is_some_and(|skipped| skipped > 0.0) {
        line.push_str(" · the gradient was not finite, the step was skipped");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_line_formats_available_metrics() {
        let mut metrics = Metrics::default();
        for (name, value) in [
            ("critic/rewards/mean", 0.4375),
            ("critic/score/mean", 0.5),
            ("actor/pg_loss", -0.0125),
            ("actor/grad_norm", 0.75),
            ("training/logprob_mismatch", 0.0),
            ("perf/throughput", 1234.5),
            ("timing_s/step", 9.87),
        ] {
            metrics.add(name, value);
        }
        assert_eq!(
            step_line("grpo", 7, 120, &metrics),
            "grpo   7/120 · reward  0.438 · success  50.0 % · loss  -0.0125 · grad  0.750 · \
             mismatch 0 ·  1234 tok/s · 9.9 s"
        );
        let mut metrics = Metrics::default();
        metrics.add("train/loss", 1.5);
        metrics.add("actor/skipped_updates", 1.0);
        assert!(step_line("sft", 1, 4, &metrics).ends_with("the step was skipped"));
        // Scores outside of 0 to 1, such as chips won and lost, are not success rates.
        for scores in [[-1.0, 0.0], [0.0, 2.0]] {
            let mut metrics = Metrics::default();
            metrics.add_spread("critic/score", scores);
            let line = step_line("grpo", 1, 4, &metrics);
            assert_eq!(line, format!("grpo 1/4 · score {:>6.3}", (scores[0] + scores[1]) / 2.0));
        }
        // Mismatches of several policies are added up.
        let mut metrics = Metrics::default();
        for (name, value) in
            [("a/training/logprob_mismatch", 2.0), ("b/training/logprob_mismatch", 1.0)]
        {
            metrics.add(name, value);
        }
        assert_eq!(step_line("grpo", 1, 4, &metrics), "grpo 1/4 · mismatch 3");
        metrics.add("a/training/logprob_mismatch_max", 0.0);
        metrics.add("b/training/logprob_mismatch_max", 3.5e-5);
        assert_eq!(step_line("grpo", 1, 4, &metrics), "grpo 1/4 · mismatch 3 (up to 3.5e-5)");
        metrics.add("b/actor/skipped_updates", 1.0);
        assert!(step_line("grpo", 1, 4, &metrics).ends_with("the step was skipped"));
    }
}
