//! Declares, reads, checks and writes recipes, which describe a run: its model, tasks, agents and
//! training phases.
//!
//! A recipe is a TOML file. Every key is declared once, as a field of a type in one of the `…Keys`
//! modules, with its type, default and meaning. [`Recipe::load`] reads a file: it makes paths
//! absolute, applies `--set` overrides, fills defaults that depend on other keys, and checks every
//! value. An agent, scorer or tool accepts only the keys of its kind.
//!
//! # Guarantees
//! - **Named errors.** If a key is unknown, has the wrong type or is out of range, the error
//!   contains the key's full path. For an unknown key, the error suggests the nearest known key.
//! - **Paths.** Paths in a recipe file are relative to the file's directory. Paths in `--set` are
//!   relative to the working directory.
//! - **Round trip.** The output of [`Recipe::to_toml`] loads with [`Recipe::load`] as the same
//!   recipe.
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
//! Out of scope: running a recipe (`levade-trainer`), and loading the models and choosing the
//! devices that the recipe names (the binary).

mod agent;
mod bounds;
mod check;
mod check_agents;
mod check_args;
mod check_cluster;
mod check_curriculum;
mod check_experience;
mod check_game;
mod check_helpers;
mod check_prompt;
mod check_reward;
mod check_runners;
mod check_samplers;
mod check_sessions;
mod check_sizes;
mod check_user;
mod choice;
mod cluster;
mod compare;
mod context;
mod curriculum;
mod defaults;
mod environments;
mod experience;
mod game;
mod keys;
mod named;
mod optimizer;
mod paths;
mod patterns;
mod policy;
mod prompt;
mod read;
mod reference;
mod reward;
mod rl;
mod roles;
mod runners;
mod sessions;
mod set;
mod tools;
mod user;
mod write;

use std::path::{Path, PathBuf};

use levade_agent::environments::EnvironmentOptions;
use levade_store::Location;
use toml::{Table, Value};

pub use agent::{AgentKeys, AgentKind, MatchKeys, QUESTION, SamplingKeys};
pub use choice::{PolicyChoice, PolicyWeight};
pub use cluster::{
    ClusterKeys, CorrectionDefault, InFlightKey, LearnerKeys, Placement, SamplersKeys, ServersKeys,
    TorchKeys, WeightsKey,
};
pub use compare::Difference;
pub use context::{ContextKeys, KeepKeys, SummarizeKeys};
pub use curriculum::CurriculumKeys;
pub use experience::ExperienceKeys;
pub use game::{GameKeys, SeedKeys};
pub use keys::{
    ArithmeticKeys, EngineKeys, EvalKeys, MetricsKeys, Phase, Recipe, RunKeys, SftKeys, SourceKeys,
    TaskSource, TracesKeys,
};
pub use optimizer::{OptimizerKeys, Schedule};
pub use policy::{ExternalKeys, ModelKeys, PastDraw, PastKeys, PolicyKeys, PolicyModel};
pub use prompt::{PromptAlgorithm, PromptKeys, PromptTarget, ToolTarget};
pub use read::ReadError;
pub use reward::{RewardKeys, ScorerKeys, UnscoredEffect, Values, WhenKeys};
pub use rl::{
    Algorithm, CriticKeys, EmptyAttempts, GroupBy, GroupOrder, KlKeys, KlTarget, OverlongAttempts,
    OversampleKeep, ProximalPolicy, RlKeys, TrainFilterKeys, Unit, ZeroVarianceGroups,
};
pub use runners::RunnersKeys;
pub use sessions::{SessionGatewayKeys, SessionKeys};
pub use set::{Override, SetError};
pub use tools::{ToolFailureEffect, ToolKeys};
pub use user::{UserAgentKeys, UserKeys, UserKind};
pub use write::WriteError;

/// Maximum duration that a recipe can set, in seconds. It stays within the range of
/// [`std::time::Duration`].
const MAX_SECONDS: f64 = 1e9;

/// Errors in a recipe file or in its overrides. The user can fix each of them.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("cannot read the recipe {}: {source}", file.display())]
    Io {
        /// Path of the recipe file.
        file: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("the recipe {} is not valid TOML: {message}", file.display())]
    Syntax {
        /// Path of the recipe file.
        file: PathBuf,
        /// Message of the TOML parser, with the line number.
        message: String,
    },
    /// A key is unknown, missing or of the wrong type.
    #[error("{}: {source}", file.display())]
    Key {
        /// Path of the recipe file.
        file: PathBuf,
        /// Path of the key, and a description of the problem.
        source: ReadError,
    },
    /// A value is out of range.
    #[error("{}: `{key}` is {value}, but must be {range}", file.display())]
    Value {
        /// Path of the recipe file.
        file: PathBuf,
        /// Path of the key.
        key: String,
        /// Invalid value, as the message shows it.
        value: String,
        /// Description of the allowed values.
        range: String,
    },
    /// An override (`--set`) is malformed, or its path does not exist.
    #[error("{0}")]
    Set(#[from] SetError),
    /// A value cannot be represented in TOML.
    #[error("cannot write the recipe as TOML: {0}")]
    Write(#[from] WriteError),
}

impl Recipe {
    /// Returns the options of the task sources that are environments.
    pub fn environments(&self) -> impl Iterator<Item = EnvironmentOptions> {
        self.tasks.iter().filter_map(TaskSource::environment)
    }

    /// Returns the maximum number of attempts in flight: `engine.concurrency` or, if it is 0,
    /// enough for the largest step and the attempts that may run ahead of it.
    pub fn concurrency(&self) -> usize {
        let attempts = |phase: &Phase| match phase {
            Phase::Sft(_) => 0,
            Phase::Prompt(keys) => keys.num_new_prompts().saturating_mul(keys.gradient_tasks),
            Phase::Rl(keys) => (1 + keys.staleness as usize)
                .saturating_mul(keys.groups)
                .saturating_mul(keys.attempts_per_task()),
        };
        let needed = self.phase.iter().map(attempts).fold(self.engine.max_sequences(), usize::max);
        self.engine.max_attempts_or(needed)
    }

    /// Reads a recipe file, applies the overrides in order, and checks every value.
    ///
    /// # Errors
    /// Returns [`RecipeError`] with the file and the key if the recipe is invalid, and an error if
    /// the file cannot be read.
    pub fn load(file: &Path, overrides: &[Override]) -> Result<Self, RecipeError> {
        Self::load_over(None, file, overrides)
    }

    /// Reads a recipe for its `[reward]`. If the file contains only `[reward]`, the other tables
    /// come from the recipe in `base`.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn load_reward(
        file: &Path,
        base: &Path,
        overrides: &[Override],
    ) -> Result<Self, RecipeError> {
        Self::load_over(Some(base), file, overrides)
    }

    /// Reads the recipe in `file`. If `base` is `Some` and the file contains only `[reward]`, the
    /// other tables come from the recipe in `base`.
    fn load_over(
        base: Option<&Path>,
        file: &Path,
        overrides: &[Override],
    ) -> Result<Self, RecipeError> {
        let io = |source| RecipeError::Io { file: file.to_owned(), source };
        let mut table = read_table(file)?;
        let here = std::env::current_dir().map_err(io)?;
        let dir = here.join(file.parent().unwrap_or(Path::new("")));
        // Paths are strings in a recipe. A path that is not UTF-8 would be read back as another
        // path.
        if [&here, &dir].iter().any(|path| path.to_str().is_none()) {
            let why =
                "the path of its directory, or of the working directory, is not UTF-8; rename it";
            return Err(io(std::io::Error::other(why)));
        }
        paths::resolve_paths(&mut table, &dir);
        if let Some(base) = base
            && table.len() == 1
            && let Some(reward) = table.remove("reward")
        {
            table = read_table(base)?;
            paths::resolve_paths(&mut table, &here.join(base.parent().unwrap_or(Path::new(""))));
            table.insert("reward".to_owned(), reward);
        }
        for change in overrides {
            paths::apply_override(change, &mut table, &here)?;
        }
        // The parts of the file already have their directories; this sets the directories of parts
        // from overrides.
        paths::resolve_component_paths(&mut table, &here);
        Self::from_table(table, file, &here)
    }

    /// Parses a recipe that was resolved on another host. Paths below `runners.folder`, the
    /// recipe's directory on that host, are replaced by paths below `dir`. `name` names the recipe
    /// in errors.
    ///
    /// # Errors
    /// Returns [`RecipeError`] with the key if the recipe is invalid.
    pub fn from_other_host(text: &str, name: &Path, dir: &Path) -> Result<Self, RecipeError> {
        let mut table = parse_table(text, name)?;
        let folder = table.get("runners").and_then(|keys| keys.get("folder"));
        if let Some(folder) = folder.and_then(Value::as_str).map(str::to_owned) {
            paths::relocate_paths(&mut table, Path::new(&folder), dir);
        }
        Self::from_table(table, name, dir)
    }

    /// Parses and checks a recipe whose paths are absolute. `here` is the working directory.
    fn from_table(mut table: Table, file: &Path, here: &Path) -> Result<Self, RecipeError> {
        let wrong = |source| RecipeError::Key { file: file.to_owned(), source };
        reward::check_scorer_keys(&table).map_err(wrong)?;
        named::split_named_agents(&mut table);
        let mut recipe: Recipe = read::read(table).map_err(wrong)?;
        recipe.apply_defaults();
        if recipe.run.folder.as_os_str().is_empty() {
            recipe.check_name(file)?;
            recipe.run.folder = here.join("runs").join(&recipe.run.name);
        }
        // Before skipped phases are removed, so that the phase numbers in errors are those of the
        // file.
        recipe.check(file)?;
        recipe.phase.drain(..std::mem::take(&mut recipe.run.skip_phases));
        Ok(recipe)
    }

    /// Reads only the location of the run's store from a recipe. Other keys are not checked,
    /// because they may name files that do not exist on this machine.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not TOML, or if its `run.store` is not a
    /// valid location.
    pub fn store_location(file: &Path) -> Result<Location, RecipeError> {
        let table = read_table(file)?;
        let store = table.get("run").and_then(|run| run.get("store"));
        store.and_then(Value::as_str).unwrap_or_default().parse().map_err(|why: String| {
            RecipeError::Key {
                file: file.to_owned(),
                source: ReadError::at_path(["run", "store"], why),
            }
        })
    }

    /// Returns the recipe as TOML with every key, including keys with default values.
    ///
    /// # Errors
    /// Returns an error if a number is too large for TOML.
    pub fn to_toml(&self) -> Result<String, RecipeError> {
        let table = self.to_table()?;
        toml::to_string_pretty(&table)
            .map_err(|error| RecipeError::Write(write::to_write_error(error)))
    }

    /// Returns the first key whose difference prevents this recipe from resuming a run of the
    /// recipe `earlier`. Returns `None` if the run can resume.
    ///
    /// # Errors
    /// Returns an error if a recipe cannot be written as TOML.
    pub fn difference(&self, earlier: &Recipe) -> Result<Option<Difference>, RecipeError> {
        Ok(compare::difference(&earlier.to_table()?, &self.to_table()?))
    }

    /// Returns the first key whose difference prevents this recipe from resuming a run of the
    /// recipe `earlier` at an earlier step. In addition to the keys that a resumed run may change,
    /// all keys of `[reward]` and `run.store` may differ.
    ///
    /// # Errors
    /// Returns an error if a recipe cannot be written as TOML.
    pub fn difference_from_step(
        &self,
        earlier: &Recipe,
    ) -> Result<Option<Difference>, RecipeError> {
        Ok(compare::difference_from_step(&earlier.to_table()?, &self.to_table()?))
    }

    /// Returns an override for `--set` that gives another recipe the reward of this recipe. It
    /// contains only keys that differ from their defaults.
    ///
    /// # Errors
    /// Returns an error if a number is too large for TOML.
    pub fn reward_override(&self) -> Result<String, RecipeError> {
        let reward_of = |recipe: &Recipe| {
            let reward = recipe.to_table()?.remove("reward");
            Ok::<_, WriteError>(reward.and_then(|value| value.as_table().cloned()))
        };
        let mut reward = reward_of(self)?.unwrap_or_default();
        let plain = Recipe { reward: RewardKeys::default(), ..self.clone() };
        let defaults = reward_of(&plain)?.unwrap_or_default();
        reward.retain(|key, value| defaults.get(key) != Some(value));
        Ok(format!("reward={}", Value::Table(reward)))
    }

    /// Converts the recipe to a TOML table with all keys, in the layout of a recipe file.
    fn to_table(&self) -> Result<Table, WriteError> {
        let mut table = write::write(self)?;
        named::join_named_agents(&mut table);
        reward::remove_unused_scorer_key(&mut table);
        Ok(table)
    }
}

/// Reads a TOML file into a table.
fn read_table(file: &Path) -> Result<Table, RecipeError> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|source| RecipeError::Io { file: file.to_owned(), source })?;
    parse_table(&text, file)
}

/// Parses TOML text into a table. `file` names the text in errors.
fn parse_table(text: &str, file: &Path) -> Result<Table, RecipeError> {
    text.parse().map_err(|error: toml::de::Error| RecipeError::Syntax {
        file: file.to_owned(),
        message: error.to_string().trim_end().to_owned(),
    })
}

#[cfg(test)]
mod tests;
