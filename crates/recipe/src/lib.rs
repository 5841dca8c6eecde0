//! Declares, reads, checks and writes recipes: what a run trains, on what, and how.
//!
//! A recipe is one TOML file. Every key is declared once, as a field of a type in one of the `…Keys` modules,
//! with its type, its default and its meaning. [`Recipe::load`] reads a file: it makes paths absolute,
//! applies `--set` overrides, fills defaults that depend on other keys, and checks every value. Each agent,
//! scorer and tool has the keys of its kind only.
//!
//! # Guarantees
//! - **Named errors.** A key that is unknown, has the wrong type or a value out of range is an error that
//!   names the key by its path; for an unknown key, the nearest known one.
//! - **Paths.** Paths in a recipe are relative to the recipe's directory, paths in `--set` to the working
//!   directory.
//! - **Round trip.** [`Recipe::load`] reads what [`Recipe::to_toml`] writes as the same recipe.
//!
//! # Example
//! ```
//! use levade_recipe::{Override, Phase, Recipe};
//!
//! let dir = std::env::temp_dir().join(format!("levade-recipe-{}", std::process::id()));
//! std::fs::create_dir_all(&dir)?;
//! let file = dir.join("sums.toml");
//! std::fs::write(
//!     &file,
//!     r#"
//!     [run]
//!     name = "sums"
//!     [model]
//!     source = "Qwen/Qwen3-0.6B"
//!     [[tasks]]
//!     kind = "arithmetic"
//!     [[phase]]
//!     kind = "rl"
//!     steps = 10
//!     groups = 4
//!     group_size = 8
//!     learning_rate = 1e-5
//!     "#,
//! )?;
//! let recipe = Recipe::load(&file, &["phase.0.steps=20".parse::<Override>()?])?;
//! let Phase::Rl(keys) = &recipe.phase[0] else { unreachable!() };
//! assert_eq!((keys.steps, keys.group_size), (20, 8));
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Out of scope: running a recipe (`levade-trainer`), and choosing the parts that it names, such as models
//! and devices (the binary).

mod agent;
mod apart;
mod check;
mod check_agents;
mod check_args;
mod check_cluster;
mod check_helpers;
mod check_reward;
mod check_samplers;
mod check_sizes;
mod choice;
mod cluster;
mod compare;
mod context;
mod environments;
mod keys;
mod named;
mod optimiser;
mod policy;
mod read;
mod reference;
mod reward;
mod rl;
mod roles;
mod set;
mod settle;
mod tools;
mod write;

use std::path::{Path, PathBuf};

use levade_agent::environments::EnvironmentOptions;
use toml::{Table, Value};

pub use agent::{AgentKeys, AgentKind, MatchKeys, QUESTION, SamplingKeys};
pub use choice::{PolicyChoice, Share};
pub use cluster::{
    ClusterKeys, CorrectionDefault, InFlightKey, LearnerKeys, Placement, SamplersKeys, ServersKeys,
    TorchKeys, WeightsKey,
};
pub use compare::Difference;
pub use context::{ContextKeys, KeepKeys, SummariseKeys};
pub use keys::{
    ArithmeticKeys, EngineKeys, EvalKeys, MetricsKeys, Phase, Recipe, RunKeys, SftKeys, SourceKeys,
    TaskSource,
};
pub use optimiser::{OptimiserKeys, Schedule};
pub use policy::{ExternalKeys, ModelKeys, PolicyKeys, PolicyModel};
pub use read::ReadError;
pub use reward::{RewardKeys, ScorerKeys, Unscored, Values, WhenKeys};
pub use rl::{
    Algorithm, Charge, CriticKeys, Empty, GroupBy, KlKeys, OnlyKeys, Overlong, OversampleKeep, Prefer,
    Proximal, RlKeys, UniformGroups,
};
pub use set::{Override, SetError};
pub use tools::{Outage, ToolKeys};
pub use write::WriteError;

/// The longest time that a recipe may name, in seconds, which keeps it within what a duration can hold.
const MOST_SECONDS: f64 = 1e9;

/// Faults of a recipe. All of them are the user's to put right.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("cannot read the recipe {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the recipe {} is not valid TOML: {message}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Words of the parser, with the line.
        message: String,
    },
    /// A key is not what it should be.
    #[error("{}: {source}", file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Which key, and what is wrong.
        source: ReadError,
    },
    /// A value is out of range.
    #[error("{}: `{key}` is {value}, but must be {range}", file.display())]
    Value {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// Value of the key.
        value: String,
        /// Values that it may have.
        range: String,
    },
    /// An override is not one.
    #[error("{0}")]
    Set(#[from] SetError),
    /// A value that TOML cannot hold.
    #[error("the recipe cannot be written down: {0}")]
    Write(#[from] WriteError),
}

impl Recipe {
    /// The environments among the sources of tasks.
    pub fn environments(&self) -> impl Iterator<Item = EnvironmentOptions> {
        self.tasks.iter().filter_map(TaskSource::environment)
    }

    /// Attempts under way at once: as many as `engine.concurrency` says, or all of the largest step and of
    /// what may run ahead of it.
    pub fn concurrency(&self) -> usize {
        let attempts = |phase: &Phase| match phase {
            Phase::Sft(_) => 0,
            Phase::Rl(keys) => (1 + keys.staleness as usize)
                .saturating_mul(keys.groups)
                .saturating_mul(keys.attempts_of_task()),
        };
        let needed = self.phase.iter().map(attempts).fold(self.engine.sequences(), usize::max);
        self.engine.attempts(needed)
    }

    /// Reads a recipe, applies the overrides in order, and checks every value.
    ///
    /// # Errors
    /// Names the file and the key.
    pub fn load(file: &Path, overrides: &[Override]) -> Result<Self, RecipeError> {
        let io = |source| RecipeError::Io { file: file.to_owned(), source };
        let text = std::fs::read_to_string(file).map_err(io)?;
        let mut table: Table = text.parse().map_err(|error: toml::de::Error| RecipeError::Syntax {
            file: file.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        })?;
        let here = std::env::current_dir().map_err(io)?;
        let folder = here.join(file.parent().unwrap_or(Path::new("")));
        // Paths are texts in a recipe, and another path would be read back.
        if [&here, &folder].iter().any(|path| path.to_str().is_none()) {
            let why = "the name of its folder, or of the working directory, is not UTF-8; rename it";
            return Err(io(std::io::Error::other(why)));
        }
        resolve(&mut table, &folder);
        for change in overrides {
            // Through a table of its own, so that only what it sets is taken relative to the working
            // directory.
            let mut change = change.clone();
            if let Some(base) = base_of(&change.path, &change.value, &here) {
                change.value = base;
            }
            change.apply(&mut table)?;
        }
        // Those of the file have their folders by now.
        resolve_parts(&mut table, &here);
        let wrong = |source| RecipeError::Key { file: file.to_owned(), source };
        named::split(&mut table).map_err(wrong)?;
        reward::split(&mut table).map_err(wrong)?;
        tools::split(&mut table);
        let mut recipe: Recipe = read::read(table).map_err(wrong)?;
        recipe.settle();
        if recipe.run.folder.as_os_str().is_empty() {
            recipe.check_name(file)?;
            recipe.run.folder = here.join("runs").join(&recipe.run.name);
        }
        // With all phases, so that errors count them as the file does.
        recipe.check(file)?;
        recipe.phase.drain(..std::mem::take(&mut recipe.run.skip_phases));
        Ok(recipe)
    }

    /// The recipe with every key written out.
    ///
    /// # Errors
    /// When a number is too large for TOML.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        let table = self.written()?;
        toml::to_string_pretty(&table).map_err(|error| RecipeError::Write(serde::ser::Error::custom(error)))
    }

    /// The first key in which two recipes differ so that one cannot continue the other's run.
    ///
    /// # Errors
    /// When a recipe cannot be written down.
    pub fn difference(&self, earlier: &Recipe) -> Result<Option<Difference>, RecipeError> {
        Ok(compare::difference(&earlier.written()?, &self.written()?))
    }

    /// All keys, as they stand in a file.
    fn written(&self) -> Result<Table, WriteError> {
        let mut table = write::write(self)?;
        named::join(&mut table);
        reward::join(&mut table);
        tools::join(&mut table);
        Ok(table)
    }
}

/// Makes the paths of a recipe absolute.
fn resolve(table: &mut Table, folder: &Path) {
    let mut keys = [["run", "folder"], ["model", "source"], ["model", "base"]]
        .map(|path| path.map(str::to_owned).to_vec())
        .to_vec();
    if let Some(Value::Table(policies)) = table.get("policy") {
        let of =
            |name: &String| ["source", "base"].map(|key| ["policy", name, key].map(str::to_owned).to_vec());
        keys.extend(policies.keys().flat_map(of));
    }
    if let Some(Value::Array(sources)) = table.get("tasks") {
        keys.extend((0..sources.len()).map(|i| vec!["tasks".to_owned(), i.to_string(), "path".to_owned()]));
    }
    resolve_parts(table, folder);
    for path in keys {
        if let Some(value) = find(table, &path).and_then(|value| base_of(&path, value, folder)) {
            // The path leads somewhere: it was just followed.
            let _ = Override { path, value }.apply(table);
        }
    }
}

/// Makes the paths absolute of parts that are programs, or have files of their own.
fn resolve_parts(table: &mut Table, folder: &Path) {
    resolve_scorers(table, folder);
    resolve_programs(table, folder);
    resolve_tools(table, folder);
    TorchKeys::resolve(table, folder);
    environments::resolve(table, folder);
    SamplersKeys::resolve(table, folder);
}

/// Makes paths of a table absolute. An interpreter without a folder is looked for where programs are.
fn absolute(keys: &mut Table, names: &[&str], folder: &Path) {
    for name in names {
        let path = keys.get(*name).and_then(Value::as_str).filter(|path| !path.is_empty());
        let path = path.filter(|path| *name != PYTHON || path.contains('/'));
        if let Some(path) = path.map(|path| folder.join(path).display().to_string()) {
            keys.insert((*name).into(), Value::String(path));
        }
    }
}

/// Key of an interpreter.
const PYTHON: &str = "python";

/// Makes the paths of scorers absolute, which are told from the folder of the recipe: the folder that a
/// program runs in, which is that of the recipe where it is not given, and files that are named.
fn resolve_scorers(table: &mut Table, folder: &Path) {
    let Some(Value::Table(reward)) = table.get_mut("reward") else { return };
    let resolve = |scorer: &mut Value| {
        let Value::Table(keys) = scorer else { return };
        let (key, always) = match keys.get("kind").and_then(Value::as_str) {
            Some("command") => ("folder", true),
            Some("python") => {
                absolute(keys, &[PYTHON], folder);
                ("file", false)
            }
            Some("sql") => ("databases", false),
            Some("code") => return absolute(keys, &[PYTHON], folder),
            _ => return,
        };
        let given = keys.get(key).and_then(Value::as_str);
        if let Some(given) = given.or(always.then_some("")) {
            let whole = Value::String(folder.join(given).display().to_string());
            keys.insert(key.into(), whole);
        }
    };
    reward.get_mut("scorer").into_iter().for_each(resolve);
    if let Some(Value::Array(scorers)) = reward.get_mut("scorers") {
        scorers.iter_mut().for_each(resolve);
    }
}

/// Makes the folders absolute that agents' programs run in, in the same way.
fn resolve_programs(table: &mut Table, folder: &Path) {
    let Some(Value::Table(agent)) = table.get_mut("agent") else { return };
    resolve_program(agent, folder);
    agent
        .iter_mut()
        .filter_map(|(_, value)| value.as_table_mut())
        .for_each(|named| resolve_program(named, folder));
}

/// Makes the folders absolute that the processes of tools run in, in the same way, and files that tools are
/// read from.
fn resolve_tools(table: &mut Table, folder: &Path) {
    let Some(Value::Array(tools)) = table.get_mut("tool") else { return };
    for tool in tools.iter_mut().filter_map(Value::as_table_mut) {
        resolve_program(tool, folder);
        absolute(tool, &["file", "config", "index", PYTHON], folder);
    }
}

fn resolve_program(keys: &mut Table, folder: &Path) {
    let is_named = keys.get("command").and_then(Value::as_array).is_some_and(|command| !command.is_empty());
    if is_named {
        let given = keys.get("folder").and_then(Value::as_str).unwrap_or_default();
        keys.insert("folder".into(), Value::String(folder.join(given).display().to_string()));
    }
}

fn find<'a>(table: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    rest.iter().try_fold(table.get(first)?, |value, key| match value {
        Value::Table(table) => table.get(key),
        Value::Array(items) => items.get(key.parse::<usize>().ok()?),
        _ => None,
    })
}

/// The value of a key that holds a path, made absolute; `None` for other keys, and for what is no relative
/// path.
fn base_of(path: &[String], value: &Value, folder: &Path) -> Option<Value> {
    if let (["tasks", _, "path"], Value::Array(items)) =
        (&path.iter().map(String::as_str).collect::<Vec<_>>()[..], value)
    {
        let absolute = |item: &Value| base_of(path, item, folder).unwrap_or_else(|| item.clone());
        return Some(Value::Array(items.iter().map(absolute).collect()));
    }
    let text = value.as_str()?;
    let joined = folder.join(text);
    let is_path = match path.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", "folder"] | ["tasks", _, "path"] | ["tasks", _, "path", _] => !text.is_empty(),
        // Names of models look like paths; only what is there, or is marked as one, is taken for one.
        ["model", "source" | "base"] | ["policy", _, "source" | "base"] => {
            text.starts_with('.') || joined.exists()
        }
        _ => false,
    };
    is_path.then(|| Value::String(joined.components().collect::<PathBuf>().to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests;
