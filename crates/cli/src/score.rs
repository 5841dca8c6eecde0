//! `dressage score`: scores replies that exist, with the scorers of a recipe.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::ExitCode;

use dressage_agent::Keeper;
use dressage_agent::environments::Environments;
use dressage_agent::tasks::{FileOptions, Task};
use dressage_store::Attempt;
use dressage_trainer::recipe::{Override, Recipe, TaskSource};
use dressage_trainer::{Interval, ScoredReplies, Scorers, Tasks, score_replies};
use serde_json::{Value, json};

use crate::failure::unusable;
use crate::lines::{LinesFile, attempt_line};
use crate::screen::{self, Style};
use crate::{recipe, scorers};

/// Names of the field with the reply, in the order in which they are looked for.
const REPLY_FIELDS: [&str; 6] = ["reply", "response", "completion", "output", "prediction", "text"];

/// Score replies that exist, with the scorers of a recipe
///
/// Each row of FILE (JSON lines, JSON, CSV or Parquet) has a reply and its task: the `id` of a task of
/// the recipe, as `eval --out` writes it, or else a question and an answer of its own. No model is
/// needed. A reply that a scorer cannot decide has no score, and counts neither as right nor as wrong.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  dressage score replies.jsonl --recipe recipes/gsm8k
  dressage score replies.jsonl --recipe recipes/gsm8k --set 'reward.scorer={kind=\"maths\"}' --out scored.jsonl")]
pub struct Args {
    /// File of replies
    file: PathBuf,

    /// Recipe whose scorers are used: a TOML file, or a folder that holds recipe.toml
    #[arg(long)]
    recipe: PathBuf,

    /// Field with the reply [default: the first of reply, response, completion, output, prediction, text]
    #[arg(long, value_name = "FIELD")]
    reply: Option<String>,

    /// Write a line of JSON for each reply: its task, score, and why it has none
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Change a key of the recipe. Can be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load(&args.recipe, &args.overrides)?;
    let mut out = args.out.as_deref().map(LinesFile::create).transpose()?;
    let ScoredReplies { attempts, success, score } =
        crate::runtime()?.block_on(score_file(&args, &recipe))?;
    if let Some(out) = &mut out {
        attempts.iter().try_for_each(|attempt| out.write(&attempt_line(source(attempt), attempt)))?;
        out.finish()?;
    }
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for attempt in attempts.iter().filter(|attempt| attempt.score.is_none()) {
        *reasons.entry(attempt.outcome.error.as_deref().unwrap_or("no reason was given")).or_default() += 1;
    }
    let unscored: u64 = reasons.values().sum();
    if args.json {
        screen::say(
            &json!({
                "replies": attempts.len(),
                "unscored": unscored,
                "success": success,
                "score": score,
            })
            .to_string(),
        );
    } else {
        screen::say(&summary(attempts.len() as u64 - unscored, success, score));
    }
    for (reason, count) in &reasons {
        eprintln!("{} {count} without a score: {reason}", Style::stderr().dim("note:"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns one line: success and mean score of the replies that have a score.
fn summary(scored: u64, success: Option<Interval>, score: Option<Interval>) -> String {
    let Some(success) = success else { return "no reply has a score".into() };
    let percent = |fraction: f64| 100.0 * fraction;
    let mut line = format!(
        "{:.1} % right of {scored} (95 %: {:.1}–{:.1})",
        percent(success.estimate),
        percent(success.low),
        percent(success.high)
    );
    if let Some(score) = score {
        line += &format!(" · mean score {:.3} (95 %: {:.3}–{:.3})", score.estimate, score.low, score.high);
    }
    line
}

fn source(attempt: &Attempt) -> &str {
    attempt.task["source"].as_str().unwrap_or_default()
}

async fn score_file(args: &Args, recipe: &Recipe) -> anyhow::Result<ScoredReplies> {
    let environments = Environments::new(recipe.environments(), &Keeper::this()?);
    let known = known_tasks(recipe, &environments).await;
    let rows = rows(args, recipe)?;
    let mut replies = Vec::with_capacity(rows.len());
    for task in rows {
        let reply = reply(args, &task)?;
        let id = task.row.get("id").and_then(Value::as_str).map(str::to_owned);
        let task = match id.as_ref().and_then(|id| known.get(id)) {
            Some(known) => known.clone(),
            None => Task { id: id.unwrap_or_else(|| task.id.clone()), ..task },
        };
        replies.push((task, reply));
    }
    let scorers = Scorers::new(&recipe.reward, scorers::asking(&recipe.reward, &environments)?);
    Ok(score_replies(&scorers, replies, recipe.engine.sequences()).await?)
}

/// Returns the tasks of the recipe by id. A recipe whose files are not on this machine still scores rows
/// that have an answer of their own, so that an error is a note.
async fn known_tasks(recipe: &Recipe, environments: &Environments) -> HashMap<String, Task> {
    match Tasks::load(recipe, environments).await {
        Ok(tasks) => tasks.all().map(|task| (task.id.clone(), task)).collect(),
        Err(error) => {
            let note = Style::stderr().dim("note:");
            eprintln!(
                "{note} the tasks of the recipe cannot be read, so replies need answers of their own: {error}"
            );
            HashMap::new()
        }
    }
}

/// Returns the rows of the file as tasks. They are read with the fields of the recipe's first source of
/// files, or else with `question` and `answer`.
fn rows(args: &Args, recipe: &Recipe) -> anyhow::Result<Vec<Task>> {
    let plain = FileOptions::new(args.file.clone());
    let of_recipe = recipe.tasks.iter().find_map(|source| match source {
        TaskSource::File(options) => {
            let FileOptions { path, held_out, repeat, limit, .. } = plain.clone();
            Some(FileOptions { path, held_out, repeat, limit, ..options.clone() })
        }
        _ => None,
    });
    let loaded = match of_recipe.map(|options| options.load(0)) {
        Some(Ok(loaded)) => loaded,
        Some(Err(error)) => plain.load(0).map_err(|_| unusable(error.to_string()))?,
        None => plain.load(0).map_err(|error| unusable(error.to_string()))?,
    };
    for note in &loaded.notes {
        eprintln!("{} {note}", Style::stderr().dim("note:"));
    }
    if loaded.repeated > 0 {
        let note = Style::stderr().dim("note:");
        eprintln!("{note} {} rows repeat an earlier row and are left out", loaded.repeated);
    }
    Ok(loaded.rest)
}

/// Returns the reply of a row.
fn reply(args: &Args, task: &Task) -> anyhow::Result<String> {
    let named = args.reply.as_deref();
    let found = match named {
        Some(field) => task.row.get(field),
        None => REPLY_FIELDS.iter().find_map(|field| task.row.get(*field)),
    };
    match found {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(unusable(format!("{}: the reply is {other}, but it must be a text", task.id))),
        None => {
            let fields: Vec<&str> = task.row.keys().map(String::as_str).collect();
            let wanted = named.map_or_else(|| REPLY_FIELDS.join(", "), str::to_owned);
            Err(unusable(format!(
                "{} has no reply in {wanted}; its fields are {}: name the one with the reply, with --reply",
                task.id,
                fields.join(", ")
            )))
        }
    }
}
