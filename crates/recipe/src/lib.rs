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
mod bounds;
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
mod paths;
mod patterns;
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
use levade_store::Location;
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
        let mut table = read_table(file)?;
        let here = std::env::current_dir().map_err(io)?;
        let folder = here.join(file.parent().unwrap_or(Path::new("")));
        // Paths are texts in a recipe, and another path would be read back.
        if [&here, &folder].iter().any(|path| path.to_str().is_none()) {
            let why = "the name of its folder, or of the working directory, is not UTF-8; rename it";
            return Err(io(std::io::Error::other(why)));
        }
        paths::resolve(&mut table, &folder);
        for change in overrides {
            paths::apply(change, &mut table, &here)?;
        }
        // Those of the file have their folders by now.
        paths::resolve_parts(&mut table, &here);
        let wrong = |source| RecipeError::Key { file: file.to_owned(), source };
        reward::check_alone(&table).map_err(wrong)?;
        named::split(&mut table);
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

    /// Reads no more of a recipe than where its run is recorded: the rest may name files that are not on this
    /// machine.
    ///
    /// # Errors
    /// Returns an error if the file is no TOML, or if its `run.store` names no location.
    pub fn store_location(file: &Path) -> Result<Location, RecipeError> {
        let table = read_table(file)?;
        let store = table.get("run").and_then(|run| run.get("store"));
        store.and_then(Value::as_str).unwrap_or_default().parse().map_err(|why: String| RecipeError::Key {
            file: file.to_owned(),
            source: ReadError::at(["run", "store"], why),
        })
    }

    /// The recipe with every key written out.
    ///
    /// # Errors
    /// When a number is too large for TOML.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        let table = self.written()?;
        toml::to_string_pretty(&table).map_err(|error| RecipeError::Write(write::unwritable(error)))
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
        reward::leave_used(&mut table);
        Ok(table)
    }
}

/// Reads a file of TOML.
fn read_table(file: &Path) -> Result<Table, RecipeError> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|source| RecipeError::Io { file: file.to_owned(), source })?;
    text.parse().map_err(|error: toml::de::Error| RecipeError::Syntax {
        file: file.to_owned(),
        message: error.to_string().trim_end().to_owned(),
    })
}

#[cfg(test)]
mod tests;
