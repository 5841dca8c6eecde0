//! Keys of a recipe, each declared once with its type, default and meaning.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use levade_agent::AttemptLimits;
use levade_agent::environments::{
    EnvironmentOptions, GymnasiumOptions, OpenEnvOptions, ReasoningGymOptions, VerifiersOptions,
};
use levade_policy::{Learner, Precision, Sampler, SamplingParams, TimeoutPolicy};
use levade_rl::Normalizer;
use levade_store::Location;
use levade_tasks::{ArithmeticOptions, FileOptions};
use levade_tree::RunId;
use serde::{Deserialize, Serialize};

use super::agent::AgentKeys;
use super::cluster::ClusterKeys;
use super::game::{GameKeys, SeedKeys};
use super::optimizer::OptimizerKeys;
use super::policy::{ModelKeys, PolicyKeys};
use super::prompt::PromptKeys;
use super::reward::RewardKeys;
use super::rl::RlKeys;
use super::runners::RunnersKeys;
use super::sessions::{SessionGatewayKeys, SessionKeys};
use super::tools::ToolKeys;
use super::user::UserKeys;

/// A complete recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name, seed, directory and store of the run.
    pub run: RunKeys,
    /// Model that the run starts from.
    pub model: ModelKeys,
    /// Policies by name. If none is given, the model is the only policy, and it is trained.
    #[serde(default)]
    pub policy: BTreeMap<String, PolicyKeys>,
    /// How this machine computes.
    #[serde(default)]
    pub engine: EngineKeys,
    /// Samplers and learners outside the embedded engine.
    #[serde(default, skip_serializing_if = "ClusterKeys::is_empty")]
    pub cluster: ClusterKeys,
    /// Runners, which make the attempts on this host or others. Without this table, this process
    /// makes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runners: Option<RunnersKeys>,
    /// Gateway at which agents of kind `session` start attempts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions: Option<SessionGatewayKeys>,
    /// Task sources. Tasks of several sources are trained on together.
    pub tasks: Vec<TaskSource>,
    /// Destinations of metrics in addition to `metrics.jsonl`.
    #[serde(default)]
    pub metrics: MetricsKeys,
    /// Toolboxes that agents can use.
    #[serde(default)]
    pub tool: Vec<ToolKeys>,
    /// The default agent.
    #[serde(default)]
    pub agent: AgentKeys,
    /// Additional agents by name, `[agent.NAME]` in a file.
    #[serde(default, rename = "$agents")]
    pub agents: BTreeMap<String, AgentKeys>,
    /// Simulated users by name, with whom agents talk.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub user: BTreeMap<String, UserKeys>,
    /// Game that the agents play.
    #[serde(default, skip_serializing_if = "GameKeys::is_empty")]
    pub game: GameKeys,
    /// How attempts are rewarded.
    #[serde(default)]
    pub reward: RewardKeys,
    /// How success is measured on held-out tasks.
    #[serde(default)]
    pub eval: EvalKeys,
    /// Training phases, in order.
    #[serde(default)]
    pub phase: Vec<Phase>,
}

/// `[run]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunKeys {
    /// Name of the run, not empty.
    pub name: String,
    /// Seed of every random choice. Two runs with the same recipe and seed end with the same
    /// weights, unless the order in which attempts finish decides what is trained on (`staleness`,
    /// `oversample`).
    #[serde(default = "one")]
    pub seed: u64,
    /// Output directory; by default `runs/<name>` in the working directory.
    #[serde(default)]
    pub folder: PathBuf,
    /// Store for attempts, step plans and evaluations; `sqlite:run.db` if empty.
    #[serde(default, skip_serializing_if = "Location::is_default")]
    pub store: Location,
    /// Interval between checkpoints in steps, in addition to the one at the end of each phase; 0
    /// for no others.
    #[serde(default = "ten")]
    pub checkpoint_every: u32,
    /// Number of these checkpoints that are kept, at least 1; the newest are kept. Checkpoints at
    /// the end of a phase are always kept.
    #[serde(default = "two")]
    pub keep: u32,
    /// Number of phases to skip, counted from the first: 1 for a model that was fine-tuned
    /// elsewhere. It is 0 in a resolved recipe, which contains only the phases that run.
    #[serde(default)]
    pub skip_phases: usize,
}

impl RunKeys {
    /// Returns the ID of the run in its store. It depends only on name and seed, so that attempts
    /// have the same IDs when the recipe runs again.
    pub fn id(&self) -> RunId {
        RunId(format!("{}-{}", self.name, self.seed))
    }
}

fn one() -> u64 {
    1
}

fn two() -> u32 {
    2
}

fn ten() -> u32 {
    10
}

/// Default number of sequences computed together if the recipe does not set the number of
/// concurrent attempts. A larger batch spreads the cost of reading the weights, but each sequence
/// needs memory for its keys and values.
const DEFAULT_SEQUENCES: usize = 64;

/// `[engine]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineKeys {
    /// Number of compute threads; 0 for one per core. Results do not depend on it.
    pub threads: usize,
    /// Maximum number of attempts in flight, including those that wait for a tool. 0 allows all
    /// attempts of a step and those that may run ahead of it. Results do not depend on it.
    pub concurrency: usize,
    /// Maximum number of tokens of a micro-batch after merging shared prefixes, at least 1. It
    /// bounds memory. A longer sequence is a micro-batch of its own, which is computed in chunks.
    pub micro_batch_tokens: usize,
    /// Precision of sampling and training. The trained weights are always f32.
    pub precision: Precision,
    /// Whether a completion in flight keeps its KV cache when the weights change. Otherwise the
    /// cache is recomputed with the new weights. Keeping the cache is faster if attempts run ahead.
    /// Log-probabilities computed in training then differ slightly from those of sampling; the
    /// recorded log-probability is the one of sampling.
    pub keep_cache: bool,
    /// Maximum memory to use, in MiB; 0 for the free memory. If memory is short, training
    /// recomputes activations, which takes longer. Results do not depend on it.
    pub memory_mb: usize,
    /// Memory for the keys and values of sequences in sampling, in MiB, of each engine; 0 for a
    /// quarter of the memory, at most 1024. The cache always holds a sequence of the full context.
    pub kv_memory_mb: usize,
    /// Timeout for calls of the model other than completions, in seconds: computing a micro-batch,
    /// changing its weights, writing or reading them. If a call times out, the run ends with an
    /// error and can be resumed from its last checkpoint.
    pub call_seconds: f64,
}

impl EngineKeys {
    /// Returns the maximum number of sequences that the engine computes together. It is the number
    /// of concurrent attempts if the recipe sets one.
    pub fn sequences(&self) -> usize {
        self.attempts(DEFAULT_SEQUENCES)
    }

    /// Wraps `sampler` so that its calls time out after `call_seconds`.
    pub fn sampler(&self, sampler: Arc<dyn Sampler>) -> Arc<dyn Sampler> {
        Arc::new(TimeoutPolicy::new(sampler, self.max_call_timeout()))
    }

    /// Wraps `learner` so that its calls time out after `call_seconds`.
    pub fn learner(&self, learner: Arc<dyn Learner>) -> Arc<dyn Learner> {
        Arc::new(TimeoutPolicy::new(learner, self.max_call_timeout()))
    }

    /// Returns the timeout for a call of a policy.
    pub fn max_call_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.call_seconds)
    }

    /// Returns the maximum number of attempts in flight. `needed` is used if the recipe sets none.
    pub fn attempts(&self, needed: usize) -> usize {
        if self.concurrency > 0 { self.concurrency } else { needed }
    }
}

impl Default for EngineKeys {
    fn default() -> Self {
        EngineKeys {
            threads: 0,
            concurrency: 0,
            micro_batch_tokens: 2048,
            precision: Precision::F32,
            keep_cache: false,
            memory_mb: 0,
            kv_memory_mb: 0,
            call_seconds: 3600.0,
        }
    }
}

/// `[[tasks]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskSource {
    /// Generated arithmetic, in symbols or words, without end.
    Arithmetic(ArithmeticKeys),
    /// Rows of files (JSON Lines, Parquet and others).
    #[serde(alias = "jsonl")]
    File(FileOptions),
    /// Data sets of the reasoning-gym library.
    ReasoningGym(ReasoningGymOptions),
    /// An environment of the verifiers library.
    Verifiers(VerifiersOptions),
    /// A text environment of gymnasium.
    Gymnasium(GymnasiumOptions),
    /// An OpenEnv server.
    #[serde(rename = "openenv")]
    OpenEnv(OpenEnvOptions),
    /// Seeds of a game.
    Seeds(SeedKeys),
    /// Recorded sessions of agents that run elsewhere.
    Sessions(SessionKeys),
}

impl TaskSource {
    /// Returns the environment's options, or `None` if this source is not an environment.
    pub fn environment(&self) -> Option<EnvironmentOptions> {
        match self {
            TaskSource::Arithmetic(_)
            | TaskSource::File(_)
            | TaskSource::Seeds(_)
            | TaskSource::Sessions(_) => None,
            TaskSource::ReasoningGym(options) => {
                Some(EnvironmentOptions::ReasoningGym(options.clone()))
            }
            TaskSource::Verifiers(options) => Some(EnvironmentOptions::Verifiers(options.clone())),
            TaskSource::Gymnasium(options) => Some(EnvironmentOptions::Gymnasium(options.clone())),
            TaskSource::OpenEnv(options) => Some(EnvironmentOptions::OpenEnv(options.clone())),
        }
    }
}

/// `[[tasks]] kind = "arithmetic"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArithmeticKeys {
    /// Number of operands in an expression, 2 to 6.
    pub operands: u32,
    /// Minimum number of digits of an operand, at least 1.
    pub min_digits: u32,
    /// Maximum number of digits of an operand, at most 6.
    pub max_digits: u32,
    /// Fraction of tasks in words, in 0..=1; the remaining tasks are in symbols.
    pub words: f64,
    /// Whether a task in words may be a story, which does not name the operations.
    pub stories: bool,
    /// Number of different training tasks.
    pub train: u32,
}

impl Default for ArithmeticKeys {
    fn default() -> Self {
        let ArithmeticOptions { operands, min_digits, max_digits, words, stories } =
            ArithmeticOptions::default();
        ArithmeticKeys { operands, min_digits, max_digits, words, stories, train: 100_000 }
    }
}

impl ArithmeticKeys {
    /// Returns the options of the generator.
    pub fn options(&self) -> ArithmeticOptions {
        let ArithmeticKeys { operands, min_digits, max_digits, words, stories, .. } = *self;
        ArithmeticOptions { operands, min_digits, max_digits, words, stories }
    }
}

/// `[metrics]`: destinations of metrics in addition to `metrics.jsonl`
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsKeys {
    /// Whether to write event files for TensorBoard to the directory `tensorboard` of the run.
    pub tensorboard: bool,
    /// URL of an MLflow server, such as `http://127.0.0.1:5000`; none if empty. The experiment has
    /// the run's name.
    pub mlflow: String,
    /// Project in Weights & Biases; none if empty. Metrics are written to the directory `wandb` of
    /// the run, which `wandb sync` uploads.
    pub wandb: String,
    /// Traces of attempts, for a collector of OpenTelemetry.
    pub traces: TracesKeys,
}

/// `[metrics.traces]`: traces of attempts, with their model calls, tool calls and scores
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TracesKeys {
    /// URL to which traces are sent as OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`.
    /// `mlflow` is the server of `metrics.mlflow`, in the experiment of the run. None if empty.
    pub otlp: String,
    /// Further headers of the requests, by name.
    pub headers: BTreeMap<String, String>,
    /// Environment variable with further headers, as `NAME=VALUE,NAME=VALUE`; for secrets.
    pub headers_env: String,
    /// Whether traces contain the text of prompts, completions, tool calls and results.
    pub text: bool,
    /// Maximum number of characters of each text in a trace.
    pub max_text_chars: usize,
}

impl Default for TracesKeys {
    fn default() -> Self {
        TracesKeys {
            otlp: String::new(),
            headers: BTreeMap::new(),
            headers_env: "OTEL_EXPORTER_OTLP_HEADERS".to_owned(),
            text: true,
            max_text_chars: 16_384,
        }
    }
}

impl TracesKeys {
    /// Value of `otlp` for the server of `metrics.mlflow`.
    pub const MLFLOW: &str = "mlflow";
}

/// `[eval]`: evaluation on held-out tasks, before the first phase and after each phase; greedy by
/// default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalKeys {
    /// Number of tasks from each source. A file contributes at most the tasks that it holds out. 0
    /// disables evaluations.
    pub tasks: usize,
    /// Fraction of these tasks that are used only to select `checkpoints/best`, in 0..1, and are
    /// reported separately. The remaining tasks then give an unbiased estimate for the best
    /// checkpoint. With 0, all tasks select the checkpoint, and the estimate is biased upwards.
    pub select: f64,
    /// Number of tasks from each generator in wordings that never occur in training; reported
    /// separately.
    pub unseen_wordings: usize,
    /// Seed of the choice of held-out questions, over all sources together. It is separate from the
    /// run's seed. Runs with different seeds are therefore measured on the same tasks, and no run
    /// trains on a task that another run is measured on.
    pub split_seed: u64,
    /// Interval between evaluations in steps of a phase; 0 evaluates only at the end of a phase.
    pub every: u32,
    /// Whether to evaluate before training.
    pub before: bool,
    /// Number of attempts at each task, at least 1.
    pub samples: u32,
    /// Sampling temperature, in 0.01..=100 or 0. 0 takes the most likely token and needs `samples =
    /// 1`.
    pub temperature: f32,
    /// Nucleus sampling: samples from the most likely tokens whose probabilities add up to this
    /// value, in 0..=1 but not 0; 1 keeps all tokens.
    pub top_p: f32,
    /// Number of most likely tokens to sample from; 0 keeps all tokens.
    pub top_k: usize,
    /// Minimum probability of a token relative to the most likely token, in 0..=1; 0 keeps all
    /// tokens.
    pub min_p: f32,
    /// Maximum number of completions in an attempt; 0 for `agent.max_turns`.
    pub max_turns: u32,
    /// Maximum number of sampled tokens in an attempt; 0 for `agent.max_tokens`.
    pub max_tokens: usize,
}

impl Default for EvalKeys {
    fn default() -> Self {
        EvalKeys {
            tasks: 200,
            select: 0.0,
            unseen_wordings: 0,
            split_seed: 1,
            every: 0,
            before: true,
            samples: 1,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            max_turns: 0,
            max_tokens: 0,
        }
    }
}

impl EvalKeys {
    /// Returns the sampling parameters of evaluation attempts.
    pub fn params(&self) -> SamplingParams {
        let EvalKeys { temperature, top_p, top_k, min_p, .. } = *self;
        SamplingParams { temperature, top_p, top_k, min_p, ..SamplingParams::default() }
    }

    /// Returns the limits of evaluation attempts, given the `limits` of training attempts.
    pub fn limits(&self, limits: AttemptLimits) -> AttemptLimits {
        AttemptLimits {
            max_turns: if self.max_turns == 0 { limits.max_turns } else { self.max_turns },
            max_tokens: if self.max_tokens == 0 { limits.max_tokens } else { self.max_tokens },
            ..limits
        }
    }
}

/// `[[phase]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Supervised fine-tuning on demonstrations.
    Sft(SftKeys),
    /// Reinforcement learning.
    Rl(Box<RlKeys>),
    /// Improvement of a system prompt.
    Prompt(PromptKeys),
}

impl Phase {
    /// Returns the name in messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Sft(_) => "sft",
            Phase::Rl(keys) => keys.algorithm.name(),
            Phase::Prompt(keys) => keys.algorithm.name(),
        }
    }

    /// Returns the name of the policy that the phase imitates, or of the policy that edits its
    /// prompts. Returns `None` if there is neither.
    pub fn teacher(&self) -> Option<&str> {
        match self {
            Phase::Sft(keys) => keys.source.as_ref().and_then(|source| source.policy.as_deref()),
            Phase::Rl(_) => None,
            Phase::Prompt(keys) => Some(&keys.editor),
        }
    }

    /// Returns the number of steps if the phase does not stop early.
    pub fn steps(&self) -> u32 {
        u32::try_from(self.all_steps()).unwrap_or(u32::MAX)
    }

    /// Returns the number of steps without the cap of `u32`, which no run can exceed.
    pub(super) fn all_steps(&self) -> u64 {
        match self {
            Phase::Sft(keys) => {
                let steps_per_epoch = keys.demonstrations.div_ceil(keys.batch.max(1)) as u64;
                steps_per_epoch.saturating_mul(keys.epochs.into())
            }
            Phase::Rl(keys) => keys.steps.into(),
            Phase::Prompt(keys) => keys.steps().into(),
        }
    }

    /// Returns the optimizer of the phase and its peak learning rate, or `None` if the phase trains
    /// no weights.
    pub fn optimizer(&self) -> Option<(&OptimizerKeys, f32)> {
        match self {
            Phase::Sft(keys) => Some((&keys.optimizer, keys.learning_rate)),
            Phase::Rl(keys) => Some((&keys.optimizer, keys.learning_rate)),
            Phase::Prompt(_) => None,
        }
    }

    /// Returns the names of the policies that the phase trains; empty for all trained policies.
    /// Returns `None` if the phase trains no weights.
    pub fn policies(&self) -> Option<&[String]> {
        match self {
            Phase::Sft(keys) => Some(&keys.policies),
            Phase::Rl(keys) => Some(&keys.policies),
            Phase::Prompt(_) => None,
        }
    }

    /// Returns the success rate at which the phase stops early, or `None`.
    pub fn early_stop_success(&self) -> Option<f64> {
        match self {
            Phase::Sft(keys) => keys.until,
            Phase::Rl(keys) => keys.until,
            Phase::Prompt(keys) => keys.until,
        }
    }
}

/// `[[phase]] kind = "sft"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftKeys {
    /// Number of demonstrations, at least 1. They are sampled evenly over all kinds of training
    /// tasks that have one, or made by `source`.
    pub demonstrations: usize,
    /// Origin of demonstrations if they do not come with the tasks.
    #[serde(default)]
    pub source: Option<SourceKeys>,
    /// System prompt with which the completions of `source` are imitated, in place of the one with
    /// which they were made. The agent uses it from the first step on.
    #[serde(default)]
    pub system: Option<String>,
    /// Maximum number of passes over the demonstrations.
    #[serde(default = "one_epoch")]
    pub epochs: u32,
    /// Success rate, in 0..=1, at which the phase stops early; see `eval.every`. If `eval.select`
    /// reserves tasks for selection, their success counts.
    #[serde(default)]
    pub until: Option<f64>,
    /// Names of the policies that the phase trains; by default all trained policies.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Number of demonstrations in a step.
    pub batch: usize,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// How the loss of a step is averaged; by default the mean over tokens.
    #[serde(default)]
    #[serde(alias = "normaliser")]
    pub normalizer: Normalizer,
    /// The optimiser.
    #[serde(default)]
    #[serde(alias = "optimiser")]
    pub optimizer: OptimizerKeys,
}

/// `[phase.source]`: origin of the demonstrations: an external policy that acts in place of the
/// trained policies, a trained policy itself, completions in the rows of tasks, or recorded
/// sessions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceKeys {
    /// Name of a policy of kind `external`, or of the trained policy of the agent.
    #[serde(default)]
    pub policy: Option<String>,
    /// Instead of `policy`: the field of a task's row that contains the completions of an attempt,
    /// in order.
    #[serde(default)]
    pub field: Option<String>,
    /// Instead of `policy`: whether the completions of recorded sessions are imitated, the tasks of
    /// kind `sessions`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sessions: bool,
    /// Minimum score of an attempt whose completions are imitated.
    #[serde(default = "full_score")]
    #[serde(alias = "least_score")]
    pub min_score: f64,
    /// Maximum number of tasks to try; 0 for four per demonstration, or for all sessions.
    #[serde(default)]
    pub tasks: usize,
}

fn full_score() -> f64 {
    1.0
}

impl fmt::Display for SourceKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.policy, &self.field) {
            (Some(policy), _) => write!(f, "the policy {policy}"),
            (None, None) if self.sessions => write!(f, "the sessions"),
            (None, field) => write!(f, "the field {}", field.as_deref().unwrap_or_default()),
        }
    }
}

impl SourceKeys {
    /// Returns the maximum number of tasks to try for `demonstrations` demonstrations.
    pub fn max_tasks(&self, demonstrations: usize) -> usize {
        match self.tasks {
            0 if self.sessions => usize::MAX,
            0 => demonstrations.saturating_mul(4),
            tasks => tasks,
        }
    }
}

fn one_epoch() -> u32 {
    1
}
