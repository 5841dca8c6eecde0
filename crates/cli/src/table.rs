//! Formats evaluations as lines and as a table.

use levade_trainer::{
    BestCheckpoint, EvalResult, Interval, ScoreGain, TaskSliceResult, UncalledTools,
};

use crate::screen::Style;

/// Formats a fraction as a percentage, such as `62.5 %`.
fn format_percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}

/// Formats an evaluation on one line: the overall success with its interval, and the task slices
/// that are reported separately.
pub fn format_line(result: &EvalResult) -> String {
    let part = |slice: &TaskSliceResult, name: &str| {
        let TaskSliceResult { success, tasks, .. } = slice;
        let low = 100.0 * success.low;
        let high = 100.0 * success.high;
        format!("{name}{} of {tasks} (95 %: {low:.1}–{high:.1})", format_percent(success.estimate))
    };
    let mut line = part(&result.overall, "");
    if let Some(score) = result.overall.score {
        let Interval { estimate, low, high } = score;
        line.push_str(&format!(" · mean score {estimate:.3} (95 %: {low:.3}–{high:.3})"));
    }
    if result.overall.failed > 0 {
        line.push_str(&format!(" · {} broken, counted as wrong", result.overall.failed));
    }
    for slice in result.slices.iter().filter(|slice| slice.is_separate) {
        line.push_str(&part(slice, &format!(" · {} ", slice.name)));
    }
    for at in &result.overall.at {
        // maj@k is a mean score, which is a fraction only if answers are either right or wrong.
        let majority = match result.overall.score {
            Some(_) => format!("{:.3}", at.majority.estimate),
            None => format_percent(at.majority.estimate),
        };
        let pass = format_percent(at.pass.estimate);
        line.push_str(&format!(" · pass@{} {pass}, maj@{} {majority}", at.k, at.k));
    }
    let TaskSliceResult { answered, used_tool, .. } = result.overall;
    let uncalled = result
        .uncalled
        .as_ref()
        .map_or(String::new(), |completion| format!("\n{}", format_uncalled(completion)));
    let game = format_game(&result.overall);
    let game = if game.is_empty() { game } else { format!("\n{}", game.trim_end()) };
    format!(
        "{line} · answered {} · with a tool {}{game}{uncalled}",
        format_percent(answered),
        format_percent(used_tool)
    )
}

/// Formats the metrics of a game: the fraction of matches that each role won, and the legal
/// completions of each agent. If the game has no winners, shows the mean reward of each role
/// instead of the fraction. Returns an empty string if no game was played.
fn format_game(slice: &TaskSliceResult) -> String {
    let of = |metric: &str, is_role: bool| -> Vec<(String, Interval)> {
        let named = slice.game.iter().filter_map(|(name, interval)| {
            let name = name.strip_suffix(metric)?.strip_suffix('.')?;
            let role = name.strip_prefix("role.");
            (role.is_some() == is_role).then(|| (role.unwrap_or(name).to_owned(), *interval))
        });
        named.collect()
    };
    let fractions = |name: &str, values: Vec<(String, Interval)>| {
        let shown = values.iter().map(|(name, Interval { estimate, low, high })| {
            format!("{name} {} ({:.1}–{:.1})", format_percent(*estimate), 100.0 * low, 100.0 * high)
        });
        let shown: Vec<String> = shown.collect();
        if shown.is_empty() { String::new() } else { format!("  {name}: {}\n", shown.join(", ")) }
    };
    let won = of("won", true);
    let mut text = if won.is_empty() {
        let rewards = of("reward", true);
        let shown = rewards.iter().map(|(name, Interval { estimate, low, high })| {
            format!("{name} {estimate:+.3} ({low:+.3} to {high:+.3})")
        });
        let shown: Vec<String> = shown.collect();
        if shown.is_empty() { String::new() } else { format!("  reward: {}\n", shown.join(", ")) }
    } else {
        fractions("won", won)
    };
    text.push_str(&fractions("legal replies", of("legal", false)));
    text.push_str(&fractions("matches without a default move", of("no_default", false)));
    text
}

/// Formats a warning about the first completion of an evaluation in which no tool answered a call,
/// with the reason.
fn format_uncalled(UncalledTools { attempt, completion, reason: why }: &UncalledTools) -> String {
    const MAX_CHARS: usize = 400;
    let end = completion.char_indices().nth(MAX_CHARS).map_or(completion.len(), |(end, _)| end);
    let more = if end < completion.len() { " …" } else { "" };
    let shown = format!("{}{more}", &completion[..end]);
    let shown: Vec<String> = shown.lines().map(|line| format!("  | {line}\n")).collect();
    format!("  no tool returned a result; first completion of {attempt}: {why}\n{}", shown.concat())
}

/// Formats evaluations as tables with one row for each evaluation: first a table of the overall
/// results, and then one table for each slice.
pub fn format_table(evals: &[&EvalResult], style: Style) -> String {
    let Some(first) = evals.first() else { return String::new() };
    let width = evals.iter().map(|eval| eval.label.chars().count()).max().unwrap_or(0).max(16);
    let head = format!(
        "{:width$}  {:>8}  {:>15}  {:>9}  {:>8}  {:>11}  {:>14}",
        "held-out tasks",
        "success",
        "95 % interval",
        "correct",
        "answered",
        "with a tool",
        "tokens sampled"
    );
    let mut text = format!("{}\n", style.bold(&head));
    for eval in evals {
        text.push_str(&format_row(&eval.label, &eval.overall, width, style));
        text.push_str(&format_game(&eval.overall));
        text.push_str(&eval.uncalled.as_ref().map_or(String::new(), format_uncalled));
    }
    // A single slice that counts would repeat the overall result.
    let counted = first.slices.iter().filter(|slice| !slice.is_separate).count();
    for slice in first.slices.iter().filter(|slice| slice.is_separate || counted > 1) {
        let note = match (slice.selects, slice.is_separate) {
            (true, _) => " (separate: these select the best checkpoint)",
            (_, true) => " (separate: not in the result above)",
            _ => "",
        };
        text.push_str(&format!("\n{}\n", style.bold(&format!("{}{note}", slice.name))));
        for eval in evals {
            if let Some(same) = eval.slices.iter().find(|other| other.name == slice.name) {
                text.push_str(&format_row(&eval.label, same, width, style));
            }
        }
    }
    text
}

/// Formats the gain in success of each phase, one line per phase.
pub fn format_gains(gains: &[ScoreGain]) -> String {
    let mut text = String::new();
    for ScoreGain { from, to, difference: Interval { estimate, low, high }, graded } in gains {
        let by = if *graded {
            format!("{estimate:+.3} in score (95 %: {low:+.3} to {high:+.3})")
        } else {
            let [estimate, low, high] = [estimate, low, high].map(|fraction| 100.0 * fraction);
            format!("{estimate:+.1} points (95 %: {low:+.1} to {high:+.1})")
        };
        text.push_str(&format!("{to} against {from}: {by}, task by task\n"));
    }
    text
}

/// Formats the best checkpoint and its success. Adds whether the selection of the checkpoint biases
/// this result.
pub fn format_best(best: &BestCheckpoint) -> String {
    let BestCheckpoint {
        label, candidates: of, success, uses_selection_tasks: is_separate, ..
    } = best;
    let by = if *is_separate {
        "selected on other tasks"
    } else {
        "selected on these tasks: biased upwards"
    };
    format!("{label}, {}; best of {of} checkpoints, {by}", format_percent(success.estimate))
}

fn format_row(label: &str, slice: &TaskSliceResult, width: usize, style: Style) -> String {
    let success = style.bold(&format!("{:>8}", format_percent(slice.success.estimate)));
    let interval =
        format!("{:.1} – {:.1} %", 100.0 * slice.success.low, 100.0 * slice.success.high);
    let correct = format!("{}/{}", slice.correct, slice.attempts());
    let answered = format_percent(slice.answered);
    let tool = format_percent(slice.used_tool);
    let tokens = slice.sampled_tokens;
    let score =
        slice.score.map_or(String::new(), |score| format!("  mean score {:.3}", score.estimate));
    let broken = if slice.failed > 0 {
        format!("  {} broken, counted as wrong", slice.failed)
    } else {
        String::new()
    };
    format!(
        "{label:width$}  {success}  {interval:>15}  {correct:>9}  {answered:>8}  {tool:>11}  \
         {tokens:>14.1}{score}{broken}\n"
    )
}

#[cfg(test)]
mod tests {
    use levade_trainer::{MetricsAtK, milestone_evals};
    use serde_json::json;

    use super::*;

    fn slice(name: &str, is_separate: bool, correct: u64, tasks: u64) -> serde_json::Value {
        let fraction = correct as f64 / tasks as f64;
        json!({
            "name": name, "apart": is_separate, "tasks": tasks, "correct": correct,
            "success": {"estimate": fraction, "low": fraction / 2.0, "high": (1.0 + fraction) / 2.0},
            "answered": 1.0, "used_tool": 0.5, "sampled_tokens": 31.25,
        })
    }

    fn eval(phase: u32, step: u32, label: &str, correct: u64) -> EvalResult {
        let value = json!({
            "phase": phase, "step": step, "label": label, "overall": slice("overall", false, correct, 8),
            "slices": [slice("arithmetic", false, correct, 8), slice("unseen", true, 1, 4)],
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn table_shows_ends_of_phases_and_separate_slices() {
        let evals = [
            eval(0, 0, "before training", 0),
            eval(0, 5, "sft, step 5", 1),
            eval(0, 9, "after sft", 2),
            eval(1, 5, "grpo, step 5", 3),
            eval(1, 9, "after grpo", 8),
        ];
        let picked = milestone_evals(&evals);
        let labels: Vec<&str> = picked.iter().map(|eval| eval.label.as_str()).collect();
        assert_eq!(labels, ["before training", "after sft", "after grpo"]);
        let text = format_table(&picked, Style::default());
        let rows: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows[1],
            "before training 0.0 % 0.0 – 50.0 % 0/8 100.0 % 50.0 % 31.2"
                .split(' ')
                .collect::<Vec<_>>()
        );
        assert_eq!(rows[3][..4], ["after", "grpo", "100.0", "%"]);
        // The only slice that counts is not repeated. The other slice is reported separately.
        assert!(!text.contains("\narithmetic"), "{text}");
        assert_eq!(rows[5][..2], ["unseen", "(separate:"]);
        assert_eq!(rows[6][2..4], ["25.0", "%"]);
        assert_eq!(rows.len(), 9);
        assert_eq!(milestone_evals(&[]).len(), 0);
        assert_eq!(format_table(&[], Style::default()), "");
    }

    #[test]
    fn format_best_states_selection_bias() {
        let success = Interval { estimate: 0.915, low: 0.87, high: 0.95 };
        let chosen = |is_separate| BestCheckpoint {
            checkpoint: "x".into(),
            label: "grpo, step 50".into(),
            candidates: 6,
            success,
            uses_selection_tasks: is_separate,
        };
        assert_eq!(
            format_best(&chosen(false)),
            "grpo, step 50, 91.5 %; best of 6 checkpoints, selected on these tasks: biased upwards"
        );
        assert!(
            format_best(&chosen(true)).ends_with("best of 6 checkpoints, selected on other tasks")
        );
    }

    #[test]
    fn table_and_line_explain_missing_tool_calls() {
        let mut result = eval(0, 0, "before training", 2);
        let completion = format!("one\ntwo{}", "x".repeat(500));
        result.uncalled = Some(UncalledTools {
            attempt: "eval/0/0/0/0".into(),
            completion,
            reason: "the completion does not contain <tool_call>".into(),
        });
        for text in [format_table(&[&result], Style::default()), format_line(&result)] {
            let at = text
                .find("  no tool returned a result; first completion of eval/0/0/0/0: the comp")
                .unwrap();
            let lines: Vec<&str> = text[at..].lines().collect();
            assert_eq!(lines[1], "  | one");
            assert!(
                lines[2].starts_with("  | twox")
                    && lines[2].ends_with("x …")
                    && lines[2].len() < 410,
                "{text}"
            );
        }
    }

    #[test]
    fn line_counts_broken_attempts() {
        let mut result = eval(0, 0, "before training", 2);
        result.overall.failed = 3;
        assert!(
            format_line(&result)
                .starts_with("25.0 % of 8 (95 %: 12.5–62.5) · 3 broken, counted as wrong · unseen")
        );
    }

    #[test]
    fn line_shows_graded_scores_as_numbers() {
        let mut result = eval(0, 0, "before training", 12);
        let interval =
            |estimate: f64| Interval { estimate, low: estimate - 0.25, high: estimate + 0.25 };
        result.overall.at = vec![MetricsAtK {
            k: 2,
            pass: interval(0.75),
            best: interval(0.5),
            majority: interval(-0.75),
        }];
        assert!(
            format_line(&result).contains(" · pass@2 75.0 %, maj@2 -75.0 %"),
            "{}",
            format_line(&result)
        );
        result.overall.score = Some(interval(-0.5));
        let shown = format_line(&result);
        assert!(shown.contains(" · mean score -0.500 (95 %: -0.750–-0.250) · "), "{shown}");
        assert!(shown.contains(" · pass@2 75.0 %, maj@2 -0.750 · "), "{shown}");
        // The count is over two attempts at each of 8 tasks.
        assert!(format_table(&[&result], Style::default()).contains(" 12/16 "));
        let gain = |graded| ScoreGain {
            from: "a".into(),
            to: "b".into(),
            difference: interval(1.5),
            graded,
        };
        assert_eq!(
            format_gains(&[gain(false), gain(true)]),
            "b against a: +150.0 points (95 %: +125.0 to +175.0), task by task\n\
             b against a: +1.500 in score (95 %: +1.250 to +1.750), task by task\n"
        );
    }

    #[test]
    fn roles_and_legal_moves_follow_rows_of_games() {
        let mut result = eval(0, 0, "before training", 2);
        let interval = |estimate| Interval { estimate, low: 0.125, high: 0.875 };
        let mut add = |name: &str, value| {
            result.overall.game.insert(name.to_owned(), interval(value));
        };
        add("role.wolf.reward", 0.25);
        add("wolf.reward", 0.25);
        add("wolf.legal", 0.5);
        add("wolf.no_default", 0.25);
        let shown = |result: &EvalResult| {
            let (table, line) = (format_table(&[result], Style::default()), format_line(result));
            (table.replace("\n", " | "), line.replace("\n", " | "))
        };
        let legal = "  legal replies: wolf 50.0 % (12.5–87.5) |   matches without a default \
                     move: wolf 25.0 % (12.5–87.5)";
        let chips = format!(" |   reward: wolf +0.250 (+0.125 to +0.875) | {legal}");
        let (table, line) = shown(&result);
        assert!(table.contains(&chips) && line.ends_with(&chips), "{table}\n{line}");
        for role in ["wolf", "seer"] {
            result.overall.game.insert(format!("role.{role}.won"), interval(0.75));
        }
        let won = format!(" |   won: seer 75.0 % (12.5–87.5), wolf 75.0 % (12.5–87.5) | {legal}");
        let (table, line) = shown(&result);
        assert!(table.contains(&won) && line.ends_with(&won), "{table}\n{line}");
    }

    #[test]
    fn line_formats_evaluation() {
        assert_eq!(
            format_line(&eval(0, 0, "before training", 2)),
            "25.0 % of 8 (95 %: 12.5–62.5) · unseen 25.0 % of 4 (95 %: 12.5–62.5) · answered \
             100.0 % · with a tool 50.0 %"
        );
    }
}
