//! Options of environments, one kind each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The process that an environment runs in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerOptions {
    /// The interpreter, by its name or path: that of the virtual environment with the packages.
    pub python: String,
    /// The folder that it runs in, and imports from; that of the recipe where not given.
    pub folder: PathBuf,
    /// Names of environment variables that it gets besides the [usual
    /// ones](levade_policy::environment::PASSED).
    pub environment: Vec<String>,
    /// Most processes.
    pub processes: usize,
    /// Most attempts that a process has at once.
    pub attempts: usize,
    /// Longest time to load the environment and list 100 tasks of it, or to score an answer, in seconds.
    pub seconds: f64,
}

impl Default for WorkerOptions {
    fn default() -> Self {
        WorkerOptions {
            python: "python3".into(),
            folder: PathBuf::new(),
            environment: Vec::new(),
            processes: 1,
            attempts: 32,
            seconds: 300.0,
        }
    }
}

/// `kind = "reasoning_gym"`: tasks of reasoning-gym's data sets, scored by these.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningGymOptions {
    /// The name of the source, `reasoning_gym` where empty.
    #[serde(default)]
    pub name: String,
    /// The data sets that share the tasks.
    pub datasets: Vec<DatasetOptions>,
    /// Tasks to train on.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Tasks that are kept apart.
    #[serde(default)]
    pub held_out: usize,
    /// Seed of the tasks to train on; follows from the run's seed where not given.
    #[serde(default)]
    pub seed: Option<u32>,
    /// Seed of the tasks that are kept apart; follows from `eval.split_seed` where not given.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// The tag that the answer stands in, `<answer>…</answer>`; the whole reply where empty.
    #[serde(default = "answer")]
    pub tag: String,
    /// Demonstrations for imitation, where `{answer}` stands for the data set's own answer; none where empty.
    #[serde(default)]
    pub demonstration: String,
    /// The agent that does these tasks; that of `[agent]` where empty.
    #[serde(default)]
    pub agent: String,
    /// The process that makes and scores them.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// A data set of reasoning-gym.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetOptions {
    /// Name in reasoning-gym.
    pub name: String,
    /// The share of the tasks that it makes, relative to those of the others.
    #[serde(default = "one")]
    pub share: f64,
    /// Options of the data set.
    #[serde(default)]
    pub config: Map<String, Value>,
}

/// `kind = "verifiers"`: an environment of verifiers, which leads its attempts and scores them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifiersOptions {
    /// The name of the source, `environment` where empty.
    #[serde(default)]
    pub name: String,
    /// The environment, as `verifiers` calls it: the id of its taskset.
    pub environment: String,
    /// Configuration of the environment, as in the table `env` of verifiers' recipes.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Most tasks to train on.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Tasks that are kept apart.
    #[serde(default)]
    pub held_out: usize,
    /// The agent that does these tasks; that of `[agent]` where empty.
    #[serde(default)]
    pub agent: String,
    /// The process that it runs in.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// `kind = "gymnasium"`: a text world, stepped by replies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GymnasiumOptions {
    /// The name of the source, `environment` where empty.
    #[serde(default)]
    pub name: String,
    /// The environment's id, after `module:` where a module must be imported that registers it.
    pub environment: String,
    /// Further arguments of `gymnasium.make`.
    #[serde(default)]
    pub config: Map<String, Value>,
    /// Words for the actions, in order, where these are numbers; the numbers themselves where empty.
    #[serde(default)]
    pub actions: Vec<String>,
    /// The tag that an action stands in; the whole reply where empty.
    #[serde(default)]
    pub tag: String,
    /// The field of an observation that the model reads; all of it where empty.
    #[serde(default)]
    pub observation: String,
    /// Seeds to train on.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Seeds that are kept apart.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on; follows from the run's seed where not given.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First seed that is kept apart; follows from `eval.split_seed` where not given.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// The agent that does these tasks; that of `[agent]` where empty.
    #[serde(default)]
    pub agent: String,
    /// The process that it runs in.
    #[serde(default)]
    pub worker: WorkerOptions,
}

/// `kind = "openenv"`: a server of OpenEnv, stepped by replies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenEnvOptions {
    /// The name of the source, `openenv` where empty.
    #[serde(default)]
    pub name: String,
    /// Where the server is.
    pub url: String,
    /// The tasks: arguments of `reset`, a table each; a `seed` each where there are none.
    #[serde(default)]
    pub resets: Vec<Map<String, Value>>,
    /// The tag that an action stands in; the whole reply where empty.
    #[serde(default)]
    pub tag: String,
    /// The field of an observation that the model reads; all of it where empty.
    #[serde(default)]
    pub observation: String,
    /// Most tasks to train on.
    #[serde(default = "thousand")]
    pub train: usize,
    /// Tasks that are kept apart.
    #[serde(default)]
    pub held_out: usize,
    /// First seed to train on; follows from the run's seed where not given.
    #[serde(default)]
    pub seed: Option<u32>,
    /// First seed that is kept apart; follows from `eval.split_seed` where not given.
    #[serde(default)]
    pub held_out_seed: Option<u32>,
    /// The agent that does these tasks; that of `[agent]` where empty.
    #[serde(default)]
    pub agent: String,
    /// The process that talks to it.
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
    /// An environment of verifiers.
    Verifiers(VerifiersOptions),
    /// A world of gymnasium.
    Gymnasium(GymnasiumOptions),
    /// A server of OpenEnv.
    OpenEnv(OpenEnvOptions),
}

/// Options that all kinds have.
#[derive(Debug, Clone, Copy)]
pub struct Common<'o> {
    /// The name of the source.
    pub name: &'o str,
    /// Tasks to train on, at most.
    pub train: usize,
    /// Tasks that are kept apart.
    pub held_out: usize,
    /// Seeds of both, where given.
    pub seeds: [Option<u32>; 2],
    /// The agent that does the tasks; empty for that of `[agent]`.
    pub agent: &'o str,
    /// The process.
    pub worker: &'o WorkerOptions,
}

/// The most tasks of a source: seeds of two sources are so far apart.
pub(super) const MOST: usize = 1_000_000;

impl EnvironmentOptions {
    /// Options that all kinds have.
    pub fn common(&self) -> Common<'_> {
        fn named<'o>(name: &'o str, or: &'o str) -> &'o str {
            if name.is_empty() { or } else { name }
        }
        macro_rules! common {
            ($options:expr, $or:expr, $seeds:expr) => {
                Common {
                    name: named(&$options.name, $or),
                    train: $options.train,
                    held_out: $options.held_out,
                    seeds: $seeds,
                    agent: &$options.agent,
                    worker: &$options.worker,
                }
            };
        }
        match self {
            EnvironmentOptions::ReasoningGym(o) => common!(o, "reasoning_gym", [o.seed, o.held_out_seed]),
            EnvironmentOptions::Verifiers(o) => common!(o, o.environment.as_str(), [None, None]),
            EnvironmentOptions::Gymnasium(o) => {
                common!(o, o.environment.as_str(), [o.seed, o.held_out_seed])
            }
            EnvironmentOptions::OpenEnv(o) => common!(o, "openenv", [o.seed, o.held_out_seed]),
        }
    }

    /// Whether it leads its attempts: then their agent is of kind `environment`.
    pub fn leads(&self) -> bool {
        !matches!(self, EnvironmentOptions::ReasoningGym(_))
    }

    /// Whether tasks are made from seeds, and not listed one by one.
    pub(super) fn is_seeded(&self) -> bool {
        match self {
            EnvironmentOptions::ReasoningGym(_) | EnvironmentOptions::Gymnasium(_) => true,
            EnvironmentOptions::OpenEnv(options) => options.resets.is_empty(),
            EnvironmentOptions::Verifiers(_) => false,
        }
    }

    /// The source as its process is told of it.
    pub(super) fn told(&self) -> Value {
        match self {
            EnvironmentOptions::ReasoningGym(o) => json!({ "kind": "reasoning_gym", "datasets": o.datasets }),
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

    /// The first value that is out of range: its key, the value, and the values that it may have.
    pub fn wrong(&self) -> Option<(&'static str, String, &'static str)> {
        let Common { train, held_out, worker, .. } = self.common();
        let wrong = |ok: bool, key, value: String, range| (!ok).then_some((key, value, range));
        let counts = "at least 1 and at most 1000000";
        let all = [
            wrong((1..=MOST).contains(&train), "train", train.to_string(), counts),
            wrong(held_out <= MOST, "held_out", held_out.to_string(), "at most 1000000"),
            wrong(!worker.python.is_empty(), "worker.python", "empty".into(), "the name or path of a Python"),
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
                let shares = o.datasets.iter().all(|d| d.share > 0.0 && d.share.is_finite());
                let mut names: Vec<&str> = o.datasets.iter().map(|d| d.name.as_str()).collect();
                names.sort_unstable();
                let twice = names.windows(2).any(|pair| pair[0] == pair[1]);
                wrong(
                    !o.datasets.is_empty() && shares && !twice,
                    "datasets",
                    json!(o.datasets).to_string(),
                    "a list of data sets of different names, whose shares are more than 0",
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
            | EnvironmentOptions::Gymnasium(GymnasiumOptions { environment, .. }) => {
                wrong(!environment.is_empty(), "environment", "empty".into(), "the name of an environment")
            }
            EnvironmentOptions::OpenEnv(o) => wrong(
                o.url.starts_with("http://") || o.url.starts_with("https://"),
                "url",
                format!("{:?}", o.url),
                "an address that begins with http:// or https://",
            ),
        };
        all.into_iter().flatten().next().or(of_kind)
    }
}
