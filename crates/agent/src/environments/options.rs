//! Options of environments, one type for each kind.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Options of the processes that an environment runs in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerOptions {
    /// Python interpreter, as a name or path: the interpreter of the virtual environment that has
    /// the packages.
    pub python: String,
    /// Working directory, from which modules are imported. Default: the directory of the recipe.
    #[serde(rename = "folder")]
    pub dir: PathBuf,
    /// Names of environment variables that a process receives in addition to the [usual
    /// ones](levade_policy::environment::CHILD_VARIABLES).
    pub environment: Vec<String>,
    /// Maximum number of processes.
    pub processes: usize,
    /// Maximum number of concurrent attempts per process.
    pub attempts: usize,
    /// Timeout for loading the environment and listing 100 of its tasks, and for scoring an answer,
    /// in seconds.
    pub seconds: f64,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        WorkerOptions {
            python: "python3".into(),
            dir: PathBuf::new(),
            environment: Vec::new(),
            processes: 1,
            attempts: 32,
            seconds: 300.0,
        }
    }
}

/// `kind = "reasoning_gym"`: tasks of reasoning-gym's data sets, which also score the answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningGymOptions {
    /// Name of the source. Empty for `reasoning_gym`.
    #[serde(default)]
    pub name: String,
    /// Data sets among which the tasks are divided.
    pub datasets: Vec<DatasetOptions>,
    /// Number of training tasks.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// Seed of the training tasks. `None` derives it from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// Seed of the held-out tasks. `None` derives it from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Name of the tag that contains the answer, `<answer>…</answer>`. If empty, the entire
    /// completion is the answer.
    #[serde(default = "answer")]
    pub tag: String,
    /// Template of demonstrations, in which `{answer}` is replaced by the data set's own answer. If
    /// empty, there are no demonstrations.
    #[serde(default)]
    pub demonstration: String,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Processes that generate and score the tasks.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// Data set of reasoning-gym.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetOptions {
    /// Name of the data set in reasoning-gym.
    pub name: String,
    /// Weight of the data set's tasks, relative to the weights of the other data sets.
    #[serde(default = "one")]
    #[serde(alias = "share")]
    pub weight: f64,
    /// Options of the data set.
    #[serde(default)]
    pub config: Map<String, Value>,
}

/// `kind = "verifiers"`: an environment of verifiers, which leads its attempts and scores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifiersOptions {
    /// Name of the source. Empty for the value of `environment`.
    #[serde(default)]
    pub name: String,
    /// Id of the taskset by which `verifiers` names the environment.
    pub environment: String,
    /// Configuration of the environment, as in the table `env` of verifiers' recipes.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Maximum number of training tasks.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Processes that the environment runs in.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// `kind = "gymnasium"`: a text environment, whose actions are completions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GymnasiumOptions {
    /// Name of the source. Empty for the value of `environment`.
    #[serde(default)]
    pub name: String,
    /// Id of the environment. The prefix `module:` imports a module that registers the environment.
    pub environment: String,
    /// Additional arguments of `gymnasium.make`.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Names of the actions, in order, if the actions are numbers. Empty if the model writes the
    /// numbers.
    #[serde(default)]
    pub actions: Vec<String>,
    /// Name of the tag that contains an action. If empty, the entire completion is the action.
    #[serde(default)]
    pub tag: String,
    /// Field of an observation that the model reads. If empty, the model reads the entire
    /// observation.
    #[serde(default)]
    pub observation: String,
    /// Number of seeds to train on.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Number of held-out seeds.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on. `None` derives it from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First held-out seed. `None` derives it from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Processes that the environment runs in.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// `kind = "openenv"`: a server of OpenEnv, whose actions are completions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenEnvOptions {
    /// Name of the source. Empty for `openenv`.
    #[serde(default)]
    pub name: String,
    /// URL of the server, with `http://` or `https://`.
    pub url: String,
    /// Tasks: arguments of `reset`, one table for each task. If empty, each task is a `seed`.
    #[serde(default)]
    pub resets: Vec<Map<String, Value>>,
    /// Name of the tag that contains an action. If empty, the entire completion is the action.
    #[serde(default)]
    pub tag: String,
    /// Field of an observation that the model reads. If empty, the model reads the entire
    /// observation.
    #[serde(default)]
    pub observation: String,
    /// Maximum number of training tasks.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on. `None` derives it from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First held-out seed. `None` derives it from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Processes that connect to the server.
    #[serde(default)]
    pub worker: WorkerOptions,
}

fn thousand() -> usize {
    1000
}

fn one() -> f64 {
    1.0
}

fn answer() -> String {
    "answer".to_owned()
}

/// Options of an environment of any kind.
#[derive(Debug, Clone, PartialEq)]
pub enum EnvironmentOptions {
    /// Data sets of reasoning-gym.
    ReasoningGym(ReasoningGymOptions),
    /// An environment of the package verifiers.
    Verifiers(VerifiersOptions),
    /// An environment of the package gymnasium.
    Gymnasium(GymnasiumOptions),
    /// A server of OpenEnv.
    OpenEnv(OpenEnvOptions),
}

/// Options that environments of all kinds have.
#[derive(Debug, Clone, Copy)]
pub struct CommonOptions<'o> {
    /// Name of the source.
    pub name: &'o str,
    /// Maximum number of training tasks.
    pub train: usize,
    /// Number of held-out tasks.
    pub held_out: usize,
    /// Seeds of the training tasks and of the held-out tasks. `None` derives the seed.
    pub seeds: [Option<u32>; 2],
    /// Agent that solves the tasks. Empty for the agent of `[agent]`.
    pub agent: &'o str,
    /// Options of the processes.
    pub worker: &'o WorkerOptions,
}

/// Maximum number of tasks of a source. First seeds that are derived from different seeds of runs
/// are a multiple of it apart.
pub(super) const MAX_TASKS: usize = 1_000_000;

impl EnvironmentOptions {
    /// Returns the options that environments of all kinds have.
    pub fn common(&self) -> CommonOptions<'_> {
        fn name_or<'o>(name: &'o str, or: &'o str) -> &'o str {
            if name.is_empty() { or } else { name }
        }
        macro_rules! common {
            ($options:expr, $or:expr, $seeds:expr) => {
                CommonOptions {
                    name: name_or(&$options.name, $or),
                    train: $options.train,
                    held_out: $options.held_out,
                    seeds: $seeds,
                    agent: &$options.agent,
                    worker: &$options.worker,
                }
            };
        }
        match self {
            EnvironmentOptions::ReasoningGym(o) => {
                common!(o, "reasoning_gym", [o.seed, o.held_out_seed])
            }
            EnvironmentOptions::Verifiers(o) => common!(o, o.environment.as_str(), [None, None]),
            EnvironmentOptions::Gymnasium(o) => {
                common!(o, o.environment.as_str(), [o.seed, o.held_out_seed])
            }
            EnvironmentOptions::OpenEnv(o) => common!(o, "openenv", [o.seed, o.held_out_seed]),
        }
    }

    /// Returns whether the environment leads its attempts. If so, their agent is of kind
    /// `environment`.
    pub fn leads_attempts(&self) -> bool {
        !matches!(self, EnvironmentOptions::ReasoningGym(_))
    }

    /// Returns whether tasks are generated from seeds, as opposed to listed.
    pub(super) fn is_seeded(&self) -> bool {
        match self {
            EnvironmentOptions::ReasoningGym(_) | EnvironmentOptions::Gymnasium(_) => true,
            EnvironmentOptions::OpenEnv(options) => options.resets.is_empty(),
            EnvironmentOptions::Verifiers(_) => false,
        }
    }

    /// Returns the options that the environment's process receives.
    pub(super) fn worker_options(&self) -> Value {
        match self {
            EnvironmentOptions::ReasoningGym(o) => {
                json!({ "kind": "reasoning_gym", "datasets": o.datasets })
            }
            EnvironmentOptions::Verifiers(o) => {
                json!({ "kind": "verifiers", "environment": o.environment, "config": o.config })
            }
            EnvironmentOptions::Gymnasium(o) => json!({
                "kind": "gymnasium",
                "environment": o.environment,
                "config": o.config,
                "actions": o.actions,
                "tag": o.tag,
                "observation": o.observation,
            }),
            EnvironmentOptions::OpenEnv(o) => json!({
                "kind": "openenv",
                "url": o.url,
                "resets": o.resets,
                "tag": o.tag,
                "observation": o.observation,
            }),
        }
    }

    /// Returns the first value that is out of range: its key, the value, and the valid range.
    pub fn range_error(&self) -> Option<(&'static str, String, &'static str)> {
        let CommonOptions { train, held_out, worker, .. } = self.common();
        let wrong = |ok: bool, key, value: String, range| (!ok).then_some((key, value, range));
        let counts = "at least 1 and at most 1000000";
        let all = [
            wrong((1..=MAX_TASKS).contains(&train), "train", train.to_string(), counts),
            wrong(held_out <= MAX_TASKS, "held_out", held_out.to_string(), "at most 1000000"),
            wrong(
                !worker.python.is_empty(),
                "worker.python",
                "empty".into(),
                "the name or path of a Python interpreter",
            ),
            wrong(
                (1..=256).contains(&worker.processes),
                "worker.processes",
                worker.processes.to_string(),
                "in 1..=256",
            ),
            wrong(
                (1..=4096).contains(&worker.attempts),
                "worker.attempts",
                worker.attempts.to_string(),
                "in 1..=4096",
            ),
            wrong(
                worker.seconds > 0.0 && worker.seconds <= 1e9,
                "worker.seconds",
                worker.seconds.to_string(),
                "more than 0 and at most 1e9",
            ),
        ];
        let of_kind = match self {
            EnvironmentOptions::ReasoningGym(o) => {
                let weights = o.datasets.iter().all(|d| d.weight > 0.0 && d.weight.is_finite());
                let mut names: Vec<&str> = o.datasets.iter().map(|d| d.name.as_str()).collect();
                names.sort_unstable();
                let twice = names.windows(2).any(|pair| pair[0] == pair[1]);
                wrong(
                    !o.datasets.is_empty() && weights && !twice,
                    "datasets",
                    json!(o.datasets).to_string(),
                    "a list of datasets with different names and weights of more than 0",
                )
                .or_else(|| {
                    wrong(
                        o.demonstration.is_empty() || o.demonstration.contains(super::ANSWER),
                        "demonstration",
                        format!("{:?}", o.demonstration),
                        "a text that contains {answer}",
                    )
                })
            }
            EnvironmentOptions::Verifiers(VerifiersOptions { environment, .. })
            | EnvironmentOptions::Gymnasium(GymnasiumOptions { environment, .. }) => wrong(
                !environment.is_empty(),
                "environment",
                "empty".into(),
                "the name of an environment",
            ),
            EnvironmentOptions::OpenEnv(o) => wrong(
                o.url.starts_with("http://") || o.url.starts_with("https://"),
                "url",
                format!("{:?}", o.url),
                "a URL that starts with http:// or https://",
            ),
        };
        all.into_iter().flatten().next().or(of_kind)
    }
}
