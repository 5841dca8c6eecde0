//! Implements `levade rescore`, which scores the record of a run again with other scorers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use levade_agent::environments::Environments;
use levade_recipe::{Override, Recipe};
use levade_run::dir::RunDir;
use levade_run::scorers;
use levade_trainer::{
    Checkpoint, RescoredRun, ScoreDivergence, Scorers, checkpoints, rescore, rescoring_keys,
};
use serde_json::{Value, json};

use crate::lines::LinesFile;
use crate::screen::{self, Style, quoted};
use crate::{host, recipe};

/// Score the recorded attempts of a run again, and find the step from which the scores part
///
/// Samples nothing and changes nothing in the run. From the named step on, the recorded scores are
/// too high compared with the new ones, as after a reward hack. An attempt that the new scorers
/// cannot decide is unscored, and excluded from the comparison.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade rescore runs/calculator --reward honest.toml
  levade rescore runs/calculator --reward honest.toml --json --out scores.jsonl")]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// Recipe with the new table `reward`; its other tables are ignored and can be missing
    #[arg(long, value_name = "RECIPE")]
    reward: PathBuf,

    /// Override a key of the recipe that --reward names; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Write one line of JSON per attempt: its old and its new score, or the reason why it has no
    /// new score
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(rescore_run(args))
}

async fn rescore_run(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    let store = run.open_store().await?;
    let recipe = recipe::load_reward(&args.reward, &run, &args.overrides)?;
    let mut out = args.out.as_deref().map(LinesFile::create).transpose()?;
    let keys = rescoring_keys(&recipe.reward);
    let host = host::create_host()?;
    let environments = Environments::new(recipe.environments(), host.supervisor());
    let scorers = Scorers::new(&keys, scorers::custom_scorers(&keys, &environments, &host)?);
    let concurrency = recipe.engine.max_sequences();
    let mut progress = |done: usize, total: usize| {
        if done == total || done.is_multiple_of(100) {
            eprintln!("scored {done} of {total} groups");
        }
    };
    let found = rescore(&*store, &scorers, concurrency, 0, &mut progress).await?;
    if let Some(out) = &mut out {
        found.attempts.iter().try_for_each(|attempt| out.write(&json!(attempt)))?;
        out.finish()?;
    }
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for attempt in found.attempts.iter().filter(|attempt| attempt.new.is_none()) {
        let reason = attempt.error.as_deref().unwrap_or("the scorers gave no reason");
        *reasons.entry(reason).or_default() += 1;
    }
    let unscored: u64 = reasons.values().sum();
    let compared = num_compared(&found);
    let steps = compute_step_means(&found);
    let before = match &found.divergence {
        Some(divergence) => find_checkpoint_before(&args, &found, divergence)?,
        None => None,
    };
    let command = match &before {
        Some(checkpoint) => Some(format_continue_command(&args, &recipe, checkpoint)?),
        None => None,
    };
    let dir = before.map(|checkpoint| checkpoint.dir.display().to_string());
    if args.json {
        let divergence = found.divergence.map(|divergence| {
            let name = |index: usize| {
                let (phase, step) = found.steps[index];
                json!({ "phase": phase, "step": step })
            };
            json!({
                "at": name(divergence.step), "low": name(divergence.low),
                "high": name(divergence.high), "change": divergence.change,
                "p_value": divergence.p_value, "checkpoint": dir, "command": command,
            })
        });
        let attempts = found.attempts.len();
        let document = json!({
            "attempts": attempts, "unscored": unscored, "compared": compared, "steps": steps,
            "parting": divergence,
        });
        screen::print_line(&document.to_string());
    } else {
        for step in &steps {
            screen::print_line(&format!(
                "phase {} step {:>5}  old {:.3}  new {:.3}  of {} attempts",
                step["phase"],
                step["step"].as_u64().unwrap_or(0),
                step["old"].as_f64().unwrap_or(0.0),
                step["new"].as_f64().unwrap_or(0.0),
                step["attempts"]
            ));
        }
        screen::print_line(&describe_conclusion(&found, dir.as_deref().zip(command.as_deref())));
    }
    for note in describe_missing_scores(&reasons) {
        eprintln!("{} {note}", Style::stderr().dim("note:"));
    }
    // Scores that were not compared say nothing about a hack.
    Ok(if compared == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Maximum number of reasons for missing scores that are printed.
const MAX_REASONS: usize = 5;

/// Describes the attempts without a new score, one sentence for each reason, the most frequent
/// reason first. Reasons can name tasks, so there can be as many reasons as tasks.
fn describe_missing_scores(reasons: &BTreeMap<&str, u64>) -> Vec<String> {
    let mut sorted: Vec<(&str, u64)> = reasons.iter().map(|(why, count)| (*why, *count)).collect();
    sorted.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let (shown, remaining) = sorted.split_at(sorted.len().min(MAX_REASONS));
    let mut notes: Vec<String> = shown
        .iter()
        .map(|(reason, count)| format!("{count} without a new score: {reason}"))
        .collect();
    if !remaining.is_empty() {
        notes.push(format!(
            "{} without a new score for {} other reasons; --out FILE writes the reason of each",
            remaining.iter().map(|(_, count)| count).sum::<u64>(),
            remaining.len()
        ));
    }
    notes
}

/// Returns the number of attempts that have both an old and a new score.
fn num_compared(found: &RescoredRun) -> usize {
    found.attempts.iter().filter(|it| it.old.is_some() && it.new.is_some()).count()
}

/// Computes the mean old score and the mean new score of each step, over the attempts that have
/// both.
fn compute_step_means(found: &RescoredRun) -> Vec<Value> {
    let mut sums: BTreeMap<(u32, u32), (f64, f64, u32)> = BTreeMap::new();
    for attempt in &found.attempts {
        if let (Some(old), Some(new)) = (attempt.old, attempt.new) {
            let sum = sums.entry((attempt.phase, attempt.step)).or_default();
            *sum = (sum.0 + old, sum.1 + new, sum.2 + 1);
        }
    }
    let steps = sums.into_iter().map(|((phase, step), (old, new, n))| {
        let [old, new] = [old, new].map(|sum| sum / f64::from(n));
        json!({ "phase": phase, "step": step, "old": old, "new": new, "attempts": n })
    });
    steps.collect()
}

/// Finds the newest checkpoint that was trained on no step of the interval in which the scores
/// diverge, and on no later step. Returns `None` if there is no such checkpoint.
fn find_checkpoint_before(
    args: &Args,
    found: &RescoredRun,
    divergence: &ScoreDivergence,
) -> anyhow::Result<Option<Checkpoint>> {
    let first = found.steps[divergence.low];
    Ok(checkpoints(&args.run)?.into_iter().rfind(|c| (c.position.phase, c.position.step) <= first))
}

/// Returns the command that continues the run from a checkpoint with the new reward.
fn format_continue_command(
    args: &Args,
    recipe: &Recipe,
    checkpoint: &Checkpoint,
) -> anyhow::Result<String> {
    Ok(format!(
        "{} train {} --resume --from {} --set {}",
        screen::program_name(),
        quoted(&args.run.to_string_lossy()),
        checkpoint.position.global_step,
        quoted(&recipe.reward_override()?)
    ))
}

fn describe_conclusion(found: &RescoredRun, way_back: Option<(&str, &str)>) -> String {
    let (compared, all) = (num_compared(found), found.attempts.len());
    if compared == 0 {
        return format!(
            "nothing was compared: none of {all} attempts has an old and a new score, so nothing \
             is known about a hack; correct the reward by the notes, and repeat the command"
        );
    }
    let Some(ScoreDivergence { step, low, high, change, p_value }) = found.divergence else {
        return format!(
            "the scores do not part: no step is named, from {compared} of {all} attempts with both \
             scores"
        );
    };
    let name =
        |index: usize| format!("phase {} step {}", found.steps[index].0, found.steps[index].1);
    let back = match way_back {
        Some((dir, command)) => format!(
            "the last checkpoint before it is {dir}; to go on from there with the new reward:\n  \
             {command}"
        ),
        None => "no checkpoint before it exists; start a new run with the new reward".into(),
    };
    format!(
        "the scores part from {} on (95 %: {} to {}; p = {p_value}): at equal old scores, new ones \
         change by {change:.3}\n{back}",
        name(step),
        name(low),
        name(high)
    )
}

#[cfg(test)]
mod tests {
    use levade_trainer::RescoredAttempt;
    use levade_tree::AttemptId;

    use super::*;

    fn found(scores: &[(Option<f64>, Option<f64>)]) -> RescoredRun {
        let attempt = |(index, (old, new)): (usize, &(Option<f64>, Option<f64>))| RescoredAttempt {
            id: AttemptId::from_bytes([index as u8; 16]),
            attempt: format!("train/0/0/0/{index}"),
            phase: 0,
            step: 0,
            old: *old,
            new: *new,
            error: new.is_none().then(|| format!("task {index}: no answer")),
        };
        let attempts = scores.iter().enumerate().map(attempt).collect();
        RescoredRun { attempts, steps: Vec::new(), divergence: None }
    }

    #[test]
    fn conclusion_without_new_scores_claims_nothing() {
        let text = describe_conclusion(&found(&[(Some(1.0), None), (None, Some(1.0))]), None);
        assert!(text.starts_with("nothing was compared: none of 2 attempts"), "{text}");
        let text = describe_conclusion(&found(&[(Some(1.0), Some(1.0)), (Some(1.0), None)]), None);
        assert!(text.contains("no step is named, from 1 of 2 attempts"), "{text}");
    }

    #[test]
    fn missing_scores_list_most_common_reasons_first() {
        let names: Vec<String> = (0..9).map(|index| format!("task {index}")).collect();
        let mut reasons: BTreeMap<&str, u64> = names.iter().map(|it| (it.as_str(), 2)).collect();
        reasons.insert("the service does not respond", 7);
        let notes = describe_missing_scores(&reasons);
        assert_eq!(notes.len(), MAX_REASONS + 1);
        assert_eq!(notes[0], "7 without a new score: the service does not respond");
        assert!(notes[5].starts_with("10 without a new score for 5 other reasons"), "{notes:?}");
        assert!(super::describe_missing_scores(&BTreeMap::new()).is_empty());
    }
}
