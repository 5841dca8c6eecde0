//! Implements `levade score`, which scores existing completions with the scorers of a recipe.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::process::ExitCode;

use levade_agent::environments::Environments;
use levade_recipe::{Override, Recipe, TaskSource};
use levade_run::scorers;
use levade_store::Attempt;
use levade_tasks::{FileOptions, FileRow, QuestionKey, Task};
use levade_trainer::{
    Interval, ScoredCompletions, Scorers, Tasks, TrainerError, score_completions,
};
use serde_json::{Value, json};

use crate::failure::unusable;
use crate::lines::{LinesFile, attempt_line};
use crate::screen::{self, Style};
use crate::{host, recipe};

/// Default names of the field that contains a row's completion, in search order.
const COMPLETION_FIELDS: [&str; 6] =
    ["reply", "response", "completion", "output", "prediction", "text"];

/// Score existing completions with the scorers of a recipe
///
/// Each row of FILE (JSON lines, JSON, CSV or Parquet) contains a completion and its task: the `id`
/// of a task in the recipe, as `eval --out` writes it, or a question and an expected answer. No
/// model is needed. A completion that a scorer cannot score counts neither as right nor as wrong.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade score replies.jsonl --recipe recipes/gsm8k
  levade score replies.jsonl --recipe recipes/gsm8k --set 'reward.scorer={kind=\"maths\"}' --out \
  scored.jsonl")]
pub struct Args {
    /// File with the completions, one in each row
    file: PathBuf,

    /// Recipe with the scorers: a TOML file, or a directory that contains recipe.toml
    #[arg(long)]
    recipe: PathBuf,

    /// Field that contains the completion [default: the first of reply, response, completion,
    /// output, prediction, text]
    #[arg(long, alias = "reply", value_name = "FIELD")]
    completion: Option<String>,

    /// Write one line of JSON per completion: its task, and its score or the reason why it has no
    /// score
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Print one JSON object instead of a line
    #[arg(long)]
    json: bool,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load(&args.recipe, &args.overrides)?;
    if let Some(out) = &args.out
        && let Ok(existing) = out.canonicalize()
        && args.file.canonicalize().is_ok_and(|file| file == existing)
    {
        return Err(unusable(format!(
            "--out {} is the file of completions; name another file",
            out.display()
        )));
    }
    let mut out = args.out.as_deref().map(LinesFile::create).transpose()?;
    let ScoredCompletions { attempts, success, score } =
        crate::create_runtime()?.block_on(score_file(&args, &recipe))?;
    if let Some(out) = &mut out {
        attempts
            .iter()
            .try_for_each(|attempt| out.write(&attempt_line(source(attempt), attempt)))?;
        out.finish()?;
    }
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for attempt in attempts.iter().filter(|attempt| attempt.score.is_none()) {
        *reasons
            .entry(attempt.outcome.error.as_deref().unwrap_or("no reason was given"))
            .or_default() += 1;
    }
    let unscored: u64 = reasons.values().sum();
    if args.json {
        screen::print_line(
            &json!({
                "replies": attempts.len(),
                "unscored": unscored,
                "success": success,
                "score": score,
            })
            .to_string(),
        );
    } else {
        screen::print_line(&format_summary(attempts.len() as u64 - unscored, success, score));
    }
    for (reason, count) in &reasons {
        eprintln!("{} {count} without a score: {reason}", Style::stderr().dim("note:"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats the success rate and the mean score of the scored completions, on one line.
fn format_summary(scored: u64, success: Option<Interval>, score: Option<Interval>) -> String {
    let Some(success) = success else { return "no completion has a score".into() };
    let [estimate, low, high] =
        [success.estimate, success.low, success.high].map(|fraction| 100.0 * fraction);
    let mut line = format!("{estimate:.1} % right of {scored} (95 %: {low:.1}–{high:.1})");
    if let Some(score) = score {
        line += &format!(
            " · mean score {:.3} (95 %: {:.3}–{:.3})",
            score.estimate, score.low, score.high
        );
    }
    line
}

fn source(attempt: &Attempt) -> &str {
    attempt.task["source"].as_str().unwrap_or_default()
}

async fn score_file(args: &Args, recipe: &Recipe) -> anyhow::Result<ScoredCompletions> {
    let host = host::create_host()?;
    let environments = Environments::new(recipe.environments(), host.supervisor());
    let known = read_recipe_tasks(recipe, &environments).await;
    let mut completions = Vec::new();
    let mut own_ids = RowTaskIds::default();
    for row in read_rows(args, recipe)? {
        let completion = find_completion(args, recipe, &row)?;
        let id = match row.fields.get("id") {
            Some(Value::String(id)) => Some(id.clone()),
            Some(Value::Number(id)) => Some(id.to_string()),
            _ => None,
        };
        let recipe_tasks = id.as_ref().and_then(|id| known.get(id)).map_or(&[][..], Vec::as_slice);
        let task = match (find_known_task(recipe_tasks, &row)?, row.task) {
            (Some(known), _) => known.clone(),
            (None, Ok(task)) => own_ids.with_final_id(task, id),
            (None, Err(error)) => {
                let unknown = id.filter(|_| row.fields.get("question").is_none()).map(|id| {
                    format!(
                        "{}: no task of the recipe has the id {id:?}, and the row does not define \
                         a task: ",
                        row.id
                    )
                });
                return Err(unusable(format!("{}{error}", unknown.unwrap_or_default())));
            }
        };
        completions.push((task, completion));
    }
    let scorers = Scorers::new(
        &recipe.reward,
        scorers::custom_scorers(&recipe.reward, &environments, &host)?,
    );
    Ok(score_completions(&scorers, completions, recipe.engine.max_sequences()).await?)
}

/// Ids of the tasks that rows themselves define. Rows with the same task share an id and form a
/// group.
#[derive(Default)]
struct RowTaskIds {
    by_task: HashMap<(Option<String>, String, String, QuestionKey), String>,
    taken: HashSet<String>,
}

impl RowTaskIds {
    /// Returns a task with its final id: the id of an earlier row with the same task, or otherwise
    /// `id`. If `id` is `None` or belongs to another task, the task keeps its own id.
    fn with_final_id(&mut self, task: Task, id: Option<String>) -> Task {
        let known = (id.clone(), task.question.clone(), task.answer.to_string(), task.context());
        let taken = &mut self.taken;
        let name = self.by_task.entry(known).or_insert_with(|| {
            let name = id.filter(|id| !taken.contains(id)).unwrap_or_else(|| task.id.clone());
            taken.insert(name.clone());
            name
        });
        Task { id: name.clone(), ..task }
    }
}

/// Finds the task of a row among the recipe's tasks with the row's id. Returns `None` if none of
/// these tasks has the row's question. Ids are row numbers of a file, so two different tasks can
/// have the same id.
///
/// # Errors
/// Returns an error if several tasks have the id and the row contains no question to choose by.
fn find_known_task<'t>(same_id: &'t [Task], row: &FileRow) -> anyhow::Result<Option<&'t Task>> {
    let question = row.task.as_ref().ok().map(|task| &*task.question);
    let question = question.or_else(|| row.fields.get("question")?.as_str());
    let Some(question) = question else {
        return match same_id {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            [first, ..] => Err(unusable(format!(
                "{}: {} tasks of the recipe have the id {}; add the question to the row",
                row.id,
                same_id.len(),
                first.id
            ))),
        };
    };
    Ok(same_id.iter().find(|task| task.question.trim() == question.trim()))
}

/// Returns the tasks of the recipe by their ids. Several tasks share an id if two files have the
/// same name.
///
/// If the tasks cannot be read, prints a note and returns none of them: rows that contain an
/// expected answer can be scored without the files of the recipe.
async fn read_recipe_tasks(
    recipe: &Recipe,
    environments: &Environments,
) -> HashMap<String, Vec<Task>> {
    let mut known: HashMap<String, Vec<Task>> = HashMap::new();
    let mut loaded = Tasks::load(recipe, environments).await;
    if matches!(loaded, Err(TrainerError::NoHeldOutTasks)) {
        // Nothing is evaluated here: tasks to train on can be scored, too.
        let mut recipe = recipe.clone();
        recipe.eval.tasks = 0;
        loaded = Tasks::load(&recipe, environments).await;
    }
    match loaded {
        Ok(tasks) => {
            for task in tasks.all() {
                let same_id = known.entry(task.id.clone()).or_default();
                if !same_id.contains(&task) {
                    same_id.push(task);
                }
            }
        }
        Err(error) => {
            let note = Style::stderr().dim("note:");
            eprintln!(
                "{note} the tasks of the recipe cannot be read, so each row needs its own expected \
                 answer: {error}"
            );
        }
    }
    known
}

/// Reads the rows of the file. Each row is parsed as a task with the fields of the recipe's first
/// file source. A row that is not a task with these fields is parsed with the fields `question` and
/// `answer`.
fn read_rows(args: &Args, recipe: &Recipe) -> anyhow::Result<Vec<FileRow>> {
    let plain = FileOptions::new(args.file.clone());
    let read = match find_file_source(recipe) {
        Some(options) => FileOptions { path: plain.path.clone(), ..options.clone() }.rows(),
        None => plain.rows(),
    };
    let (mut rows, notes) = read.map_err(|error| unusable(error.to_string()))?;
    if rows.iter().any(|row| row.task.is_err())
        && let Ok((plain, _)) = plain.rows()
    {
        for (row, plain) in rows.iter_mut().zip(plain).filter(|(row, _)| row.task.is_err()) {
            if plain.task.is_ok() {
                row.task = plain.task;
            }
        }
    }
    for note in notes {
        eprintln!("{} {note}", Style::stderr().dim("note:"));
    }
    Ok(rows)
}

/// Returns the recipe's first task source that reads files, or `None` if there is none.
fn find_file_source(recipe: &Recipe) -> Option<&FileOptions> {
    recipe.tasks.iter().find_map(|source| match source {
        TaskSource::File(options) => Some(options),
        _ => None,
    })
}

/// Returns the completion in a row. Fields that contain the question or the expected answer are
/// skipped, unless the user names one of them.
fn find_completion(args: &Args, recipe: &Recipe, row: &FileRow) -> anyhow::Result<String> {
    let is_task_field =
        |field: &&str| find_file_source(recipe).is_some_and(|options| options.uses(field));
    let fields: Vec<&str> = match &args.completion {
        Some(field) => vec![field],
        None => COMPLETION_FIELDS.into_iter().filter(|field| !is_task_field(field)).collect(),
    };
    let found = fields.iter().find_map(|field| row.field(field).filter(|value| !value.is_null()));
    match found {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        Some(other) => {
            Err(unusable(format!("{}: the completion is {other}, but must be a string", row.id)))
        }
        None => Err(unusable(format!(
            "{} has no completion in {}; its fields are {}: name the field of the completion with \
             --completion",
            row.id,
            fields.join(", "),
            row.fields.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(id: &str, question: &str, context: &str) -> Task {
        let row = json!({ "context": context });
        let Value::Object(row) = row else { panic!("{row}") };
        Task {
            id: id.into(),
            question: question.into(),
            answer: "1".into(),
            row: row.into(),
            ..Task::default()
        }
    }

    #[test]
    fn equal_row_tasks_share_an_id() {
        let mut ids = RowTaskIds::default();
        let mut named =
            |task: Task, id: Option<&str>| ids.with_final_id(task, id.map(str::to_owned)).id;
        assert_eq!(named(task("f-1", "a?", "x"), None), "f-1");
        assert_eq!(named(task("f-2", "a?", "x"), None), "f-1");
        assert_eq!(named(task("f-3", "a?", "y"), None), "f-3", "another context");
        assert_eq!(named(task("f-4", "b?", "x"), Some("7")), "7");
        assert_eq!(named(task("f-5", "b?", "x"), Some("7")), "7");
        assert_eq!(named(task("f-6", "c?", "x"), Some("7")), "f-6", "another question with the id");
        assert_eq!(named(task("f-7", "c?", "x"), Some("7")), "f-6");
    }
}
