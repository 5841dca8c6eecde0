//! Options of environments, one type for each kind.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Options of the worker processes that run an environment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerOptions {
    /// Name or path of the Python interpreter. Use the interpreter of the virtual environment that
    /// has the packages.
    pub python: String,
    /// Working directory, from which modules are imported. Default: the directory of the recipe.
    #[serde(rename = "folder")]
    pub dir: PathBuf,
    /// Names of environment variables that a process receives in addition to the [usual
    /// ones](levade_policy::environment::CHILD_VARIABLES).
    pub environment: Vec<String>,
    /// Maximum number of worker processes.
    pub processes: usize,
    /// Maximum number of concurrent attempts per process.
    pub attempts: usize,
    /// Timeout for one request to a worker process, in seconds: for loading the environment and
    /// listing 100 of its tasks, or for scoring an answer.
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

/// Options of `kind = "reasoning_gym"`: the tasks come from data sets of reasoning-gym, which also
/// score the answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningGymOptions {
    /// Name of the source of the tasks. Empty for `reasoning_gym`.
    #[serde(default)]
    pub name: String,
    /// Data sets of reasoning-gym. The number of tasks is divided among them.
    pub datasets: Vec<DatasetOptions>,
    /// Number of training tasks.
    #[serde(default = "default_task_count")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// Seed of the training tasks. If `None`, the seed is derived from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// Seed of the held-out tasks. If `None`, the seed is derived from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Name of the tag that contains the answer, `<answer>…</answer>`. If empty, the entire
    /// completion is the answer.
    #[serde(default = "default_answer_tag")]
    pub tag: String,
    /// Template of demonstrations, in which `{answer}` is replaced by the data set's own answer. If
    /// empty, there are no demonstrations.
    #[serde(default)]
    pub demonstration: String,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Options of the processes that generate and score the tasks.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// Options of one data set of reasoning-gym.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetOptions {
    /// Name of the data set in reasoning-gym.
    pub name: String,
    /// Weight of the data set's tasks, relative to the weights of the other data sets.
    #[serde(default = "default_weight")]
    #[serde(alias = "share")]
    pub weight: f64,
    /// Options with which reasoning-gym creates the data set.
    #[serde(default)]
    pub config: Map<String, Value>,
}

/// Options of `kind = "verifiers"`: an environment of the package verifiers, which leads its
/// attempts and scores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifiersOptions {
    /// Name of the source of the tasks. Empty for the value of `environment`.
    #[serde(default)]
    pub name: String,
    /// Id of the taskset by which `verifiers` names the environment.
    pub environment: String,
    /// Configuration of the environment, as in the table `env` of verifiers' recipes.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Maximum number of training tasks.
    #[serde(default = "default_task_count")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Options of the processes that run the environment.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// Options of `kind = "gymnasium"`: a text environment of gymnasium, in which each completion is an
/// action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GymnasiumOptions {
    /// Name of the source of the tasks. Empty for the value of `environment`.
    #[serde(default)]
    pub name: String,
    /// Id of the environment. The prefix `module:` imports a module that registers the environment.
    pub environment: String,
    /// Additional arguments of `gymnasium.make`, by name.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Names of the actions, in the order of their numbers, if the environment's actions are
    /// numbers. If empty, the model writes the numbers.
    #[serde(default)]
    pub actions: Vec<String>,
    /// Name of the tag that contains an action. If empty, the entire completion is the action.
    #[serde(default)]
    pub tag: String,
    /// Name of the field of an observation that the model reads. If empty, the model reads the
    /// entire observation.
    #[serde(default)]
    pub observation: String,
    /// Number of seeds to train on. Each seed is a task.
    #[serde(default = "default_task_count")]
    pub train: usize,
    /// Number of held-out seeds, which only evaluations use. Each seed is a task.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on. If `None`, the seed is derived from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First held-out seed. If `None`, the seed is derived from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Options of the processes that run the environment.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// Options of `kind = "openenv"`: a server of OpenEnv, to which each completion is sent as an
/// action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenEnvOptions {
    /// Name of the source of the tasks. Empty for `openenv`.
    #[serde(default)]
    pub name: String,
    /// URL of the OpenEnv server, with `http://` or `https://`.
    pub url: String,
    /// Arguments of `reset`, one table for each task. If empty, each task is a `seed`.
    #[serde(default)]
    pub resets: Vec<Map<String, Value>>,
    /// Name of the tag that contains an action. If empty, the entire completion is the action.
    #[serde(default)]
    pub tag: String,
    /// Name of the field of an observation that the model reads. If empty, the model reads the
    /// entire observation.
    #[serde(default)]
    pub observation: String,
    /// Maximum number of training tasks.
    #[serde(default = "default_task_count")]
    pub train: usize,
    /// Number of held-out tasks.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on. If `None`, the seed is derived from the run's seed.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First held-out seed. If `None`, the seed is derived from `eval.split_seed`.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// Agent that solves these tasks. Empty for the agent of `[agent]`.
    #[serde(default)]
    pub agent: String,
    /// Options of the processes that connect to the server.
    #[serde(default)]
    pub worker: WorkerOptions,
}

fn default_task_count() -> usize {
    1000
}

fn default_weight() -> f64 {
    1.0
}

fn default_answer_tag() -> String {
    "answer".to_owned()
}

/// Options of an environment of any kind.
#[derive(Debug, Clone, PartialEq)]
pub enum EnvironmentOptions {
    /// The environment generates tasks from data sets of reasoning-gym.
    ReasoningGym(ReasoningGymOptions),
    /// The environment comes from the package verifiers.
    Verifiers(VerifiersOptions),
    /// The environment comes from the package gymnasium.
    Gymnasium(GymnasiumOptions),
    /// The environment is a server of OpenEnv.
    OpenEnv(OpenEnvOptions),
}

/// Options that environments of all kinds have.
#[derive(Debug, Clone, Copy)]
pub struct CommonOptions<'o> {
    /// Name of the environment, which is the source of its tasks.
    pub name: &'o str,
    /// Maximum number of training tasks.
    pub train: usize,
    /// Number of held-out tasks.
    pub held_out: usize,
    /// Seed of the training tasks and seed of the held-out tasks. A seed that is `None` is derived
    /// from the run's seed or from `eval.split_seed`.
    pub seeds: [Option<u32>; 2],
    /// Agent that solves the tasks. Empty for the agent of `[agent]`.
    pub agent: &'o str,
    /// Options of the worker processes.
    pub worker: &'o WorkerOptions,
}

/// Maximum number of tasks of an environment. If two first seeds are derived from different seeds
/// of runs, their difference is a multiple of this number.
pub(super) const MAX_TASKS: usize = 1_000_000;

impl EnvironmentOptions {
    /// Returns the options that environments of all kinds have.
    pub fn common_options(&self) -> CommonOptions<'_> {
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

    /// Returns whether the environment generates its tasks from seeds. Other environments list
    /// their tasks.
    pub(super) fn is_seeded(&self) -> bool {
        match self {
            EnvironmentOptions::ReasoningGym(_) | EnvironmentOptions::Gymnasium(_) => true,
            EnvironmentOptions::OpenEnv(options) => options.resets.is_empty(),
            EnvironmentOptions::Verifiers(_) => false,
        }
    }

    /// Returns the JSON object of options that the environment's worker process receives.
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

    /// Returns the first option whose value is out of range: its key, its value, and the valid
    /// range. Returns `None` if all values are valid.
    pub fn find_range_error(&self) -> Option<(&'static str, String, &'static str)> {
        let CommonOptions { train, held_out, worker, .. } = self.common_options();
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
