//! Keys of games: `[game]`, and tasks that are seeds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use levade_agent::game::DEFAULT_FORMAT;
use levade_tasks::Task;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// `[game]`: the game that agents of kind `game` play.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GameKeys {
    /// Name of a built-in game, or any name if `command` is set.
    pub name: String,
    /// Program that implements the rules of the game, with its arguments. Empty if the game is
    /// built in.
    pub command: Vec<String>,
    /// Working directory of the program; by default the directory of the recipe.
    pub folder: PathBuf,
    /// Names of environment variables that are passed to the program in addition to the usual ones.
    pub environment: Vec<String>,
    /// Maximum number of concurrent processes of the program, at least 1.
    pub workers: usize,
    /// Timeout for one request to the program, in seconds.
    pub seconds: f64,
    /// Options that the rules of the game define.
    pub options: Map<String, Value>,
    /// Name of the agent that plays a seat, by the seat's name, role or side. If several apply, the
    /// name precedes the role and the role the side. The agent under `other` plays the remaining
    /// seats; by default, it is the agent of `[agent]`.
    pub agents: BTreeMap<String, String>,
    /// Maximum number of further completions after a completion that is no legal move. After these,
    /// the default move of the rules is played.
    pub retries: u32,
    /// Reward of each completion that is no legal move.
    pub illegal: f64,
    /// Reward of each default move that replaces an illegal move.
    pub default: f64,
    /// Maximum number of sampled tokens per completion. 0 applies the limit of the agent.
    pub move_tokens: usize,
    /// Whether the sampler constrains completions to the JSON schema of the move. Completions of
    /// trained policies are never constrained.
    pub constrained: bool,
    /// Whether the output format that prompts describe has a field for private reasoning.
    pub reasoning: bool,
    /// Text that follows each request for a move. `{format}` is replaced by the description of the
    /// output format.
    pub format: String,
}

/// Key in [`GameKeys::agents`] of the agent that plays the remaining seats.
pub(super) const OTHER: &str = "other";

impl Default for GameKeys {
    fn default() -> Self {
        GameKeys {
            name: String::new(),
            command: Vec::new(),
            folder: PathBuf::new(),
            environment: Vec::new(),
            workers: 1,
            seconds: 60.0,
            options: Map::new(),
            agents: BTreeMap::new(),
            retries: 2,
            illegal: 0.0,
            default: -0.1,
            move_tokens: 0,
            constrained: false,
            reasoning: true,
            format: DEFAULT_FORMAT.to_owned(),
        }
    }
}

impl GameKeys {
    /// Returns whether the recipe defines no game.
    pub fn is_empty(&self) -> bool {
        *self == GameKeys::default()
    }

    /// Returns the options of the game as JSON.
    pub(super) fn options(&self) -> Value {
        Value::Object(self.options.clone())
    }
}

/// `[[tasks]] kind = "seeds"`: tasks that consist of a seed instead of a question. They start
/// matches of a game.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SeedKeys {
    /// Number of training seeds, counted from 0.
    pub train: u32,
    /// Name of the agent that leads the attempts. By default, it is the agent of `[agent]`.
    pub agent: String,
}

impl Default for SeedKeys {
    fn default() -> Self {
        SeedKeys { train: 300, agent: String::new() }
    }
}

/// Lowest possible held-out seed. All training seeds are lower.
const FIRST_HELD_OUT: u64 = 1 << 32;

impl SeedKeys {
    /// Name of the task source in tasks and metrics.
    pub(super) const SOURCE: &str = "seeds";

    /// Creates the training tasks of the source.
    pub fn training_tasks(&self) -> Vec<Task> {
        (0..u64::from(self.train)).map(|seed| self.task(seed)).collect()
    }

    /// Creates `count` held-out tasks of the source. Their seeds depend on `eval.split_seed`.
    pub fn held_out_tasks(&self, split_seed: u64, count: usize) -> Vec<Task> {
        let first = FIRST_HELD_OUT.wrapping_add(split_seed << 33) & (i64::MAX as u64);
        (0..count as u64).map(|index| self.task(first.max(FIRST_HELD_OUT) + index)).collect()
    }

    fn task(&self, seed: u64) -> Task {
        let row = Map::from_iter([("seed".to_owned(), json!(seed))]);
        Task {
            id: format!("seed-{seed}"),
            question: format!("seed {seed}"),
            source: Self::SOURCE.to_owned(),
            agent: (!self.agent.is_empty()).then(|| self.agent.clone()),
            row: row.into(),
            ..Task::default()
        }
    }
}
