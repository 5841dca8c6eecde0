//! Writes the text of a new recipe and of the files in its directory.

use std::fmt::Write as _;
use std::path::Path;

use super::{RecipeChoices, Scorer, TaskInput, Tool};
use crate::screen;

/// Initial content of `tools.py`, which defines one example tool.
pub const TOOLS: &str = r#""""Every public function here is a tool; the model sees its signature and docstring."""


def count_letters(word: str, letter: str) -> int:
    """Counts how often a letter occurs in a word.

    Args:
        word: The word.
        letter: One letter.
    """
    return word.lower().count(letter.lower())
"#;

/// Initial content of `score.py`, which defines one example scorer.
pub const SCORE: &str = r#""""What an answer is worth: a number, or a dict with `score` and further numbers."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if str(ground_truth).strip().lower() in solution_str.strip().lower() else 0.0
"#;

/// Quotes a string for TOML. TOML accepts all escapes of JSON, and requires an additional one for
/// U+007F.
fn quote_toml(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default().replace('\u{7f}', "\\u007F")
}

/// Returns the text of the new `recipe.toml`.
pub fn render_recipe(choices: &RecipeChoices) -> String {
    let RecipeChoices { name, model, context, tasks, tools, scorer, options, algorithm } = choices;
    let mut text = String::new();
    let mut add = |part: &str| {
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "{}\n", part.trim_matches('\n'));
    };
    add(&format!(
        r#"
# Written by `levade new recipe`. All keys, with their defaults: docs/recipe.md.

[run]
name = {}
# Decides every random choice: equal recipes and seeds end with equal weights.
seed = 1
# Steps between checkpoints; a stopped run resumes from the newest one (--resume).
checkpoint_every = 10

[model]
source = {}
# Maximum sequence length, in tokens; a larger one takes more memory.
context = {context}
# An adapter instead of all weights: needs far less memory, and ten times the learning rate.
# lora = {{ rank = 16 }}
"#,
        quote_toml(name),
        quote_toml(model)
    ));
    add(&render_tasks(tasks));
    add(&render_agent(tools, *scorer, *context));
    for tool in tools {
        match tool {
            Tool::Sandbox => add(
                "[[tool]]\nkind = \"sandbox\"\n# Timeout for a call's code in seconds, and maximum \
                 memory of its processes in MiB.\nseconds = 10\nmemory_mb = 512",
            ),
            Tool::Python => add(
                "[[tool]]\nkind = \"python\"\n# Every public function of the file is a tool. For a \
                 separate environment: python = \".venv/bin/python\"\nfile = \"tools.py\"",
            ),
            Tool::Calculator | Tool::None => {}
        }
    }
    add(&render_reward(*scorer, *options));
    add("[eval]\n# Held-out tasks that success is measured on, before training and after each \
         phase.\ntasks = 100");
    let demonstrated = *tasks == TaskInput::Arithmetic && tools.contains(&Tool::Calculator);
    if demonstrated {
        add(r#"
# A few demonstrations show the format of a tool call; the tasks provide them.
[[phase]]
kind = "sft"
demonstrations = 7
batch = 4
epochs = 3
learning_rate = 1e-4
"#);
    }
    add(&render_phase(algorithm));
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn render_tasks(tasks: &TaskInput) -> String {
    match tasks {
        TaskInput::Arithmetic => r#"[[tasks]]
# A generator. To use a file: kind = "file", path = "train.jsonl", held_out = 200 (docs/data.md).
kind = "arithmetic"
operands = 3
min_digits = 2
max_digits = 3
# Fraction of tasks in words; stories, which do not name the operations, are harder.
words = 0.5
stories = false"#
            .to_owned(),
        TaskInput::File { path, question, answer, held_out } => format!(
            r#"[[tasks]]
kind = "file"
# A file, a directory, a pattern such as "train-*.parquet", or a list of these.
path = {}
# Fields of a row; a path such as "extra_info.question" selects a nested field, and a template
# such as "{{Body}} {{Question}}" builds a question from several.
question = {}
answer = {}
# Number of questions that are never trained on, to measure success.
held_out = {held_out}"#,
            quote_toml(path),
            quote_toml(question),
            quote_toml(answer)
        ),
    }
}

fn render_agent(tools: &[Tool], scorer: Scorer, context: usize) -> String {
    let names: Vec<&str> = tools
        .iter()
        .filter_map(|tool| match tool {
            Tool::None => None,
            Tool::Calculator => Some("\"calculator\""),
            Tool::Sandbox => Some("\"sandbox\""),
            Tool::Python => Some("\"python\""),
        })
        .collect();
    let instruction = match scorer {
        Scorer::Numeric => "End with the answer, a number.",
        Scorer::Maths => "Put the final answer into \\boxed{}.",
        Scorer::Answer => {
            "Put the final answer between <answer> and </answer>, without any other words there."
        }
        Scorer::Choice => {
            "End with a line \"Answer: X\", where X is the letter of the right option."
        }
        Scorer::Code => {
            "Write a Python program. Put it into one block of code between ``` and ```."
        }
        Scorer::Python => "Answer in a few words.",
    };
    let tokens = (context / 4).clamp(32, 512);
    format!(
        r#"[agent]
# Instructions: how the scorer below finds the answer.
system = {}
# Toolboxes by name or kind (docs/tools.md).
tools = [{}]
# Maximum number of completions of an attempt, and of tokens that it samples over all of them.
max_turns = {}
max_tokens = {tokens}
# Maximum number of retries of a failed attempt.
retries = 2"#,
        quote_toml(instruction),
        names.join(", "),
        if names.is_empty() { 1 } else { 4 },
    )
}

fn render_reward(scorer: Scorer, options: Option<usize>) -> String {
    let several = options.map(|options| format!("{{ kind = \"choice\", options = {options} }}"));
    let kind = match scorer {
        Scorer::Numeric => "{ kind = \"numeric\" }",
        Scorer::Maths => "{ kind = \"maths\" }",
        Scorer::Answer => "{ kind = \"answer\" }",
        Scorer::Choice => several.as_deref().unwrap_or("{ kind = \"choice\" }"),
        Scorer::Code => "{ kind = \"code\", value = \"fraction\", seconds = 5 }",
        Scorer::Python => "{ kind = \"python\", file = \"score.py\" }",
    };
    format!(
        "[reward]\n# Scorer of attempts; for several scorers with weights, see \
         docs/scorers.md.\nscorer = {kind}"
    )
}

fn render_phase(algorithm: &str) -> String {
    format!(
        r#"# Learns from success alone: each step makes `group_size` attempts at each of `groups`
# tasks, and compares each attempt with the other attempts at its task.
[[phase]]
kind = "rl"
algorithm = {}
steps = 50
groups = 8
group_size = 8
temperature = 1.0
learning_rate = 2e-6
[phase.optimizer]
schedule = "cosine"
warmup = 2
min_lr_ratio = 0.1"#,
        quote_toml(algorithm)
    )
}

/// Returns the text of the new `README.md`. `dir` is the directory of the recipe, which the
/// commands in the text name.
pub fn render_readme(choices: &RecipeChoices, dir: &Path) -> String {
    let RecipeChoices { name, model, tasks, tools, scorer, algorithm, .. } = choices;
    let tasks = match tasks {
        TaskInput::Arithmetic => "generated arithmetic".to_owned(),
        TaskInput::File { path, held_out, .. } => {
            format!("`{path}`, of which {held_out} are held out")
        }
    };
    let tools = match &tools[..] {
        [] => "no tools".to_owned(),
        tools => tools
            .iter()
            .map(|tool| format!("{tool:?}").to_lowercase())
            .collect::<Vec<_>>()
            .join(", "),
    };
    let scorer = format!("{scorer:?}").to_lowercase();
    let dir = screen::quoted(&dir.display());
    format!(
        "# {name}\n\n\
         | | |\n|---|---|\n| model | `{model}` |\n| tasks | {tasks} |\n| tools | {tools} |\n\
         | scorer | {scorer} |\n\
         | algorithm | {algorithm} |\n\n\
         ```sh\nlevade check {dir}      # everything that would fail, in seconds\n\
         levade train {dir}      # --resume resumes a stopped run\n\
         levade inspect runs/{name} --worst\n```\n\n\
         ## What it gives\n\n\
         Success on held-out tasks before and after, n and interval, as `train` prints it at the \
         end.\n"
    )
}
