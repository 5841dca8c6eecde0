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

/// A complete recipe: all settings of a training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name, seed, directory and store of the run.
    pub run: RunKeys,
    /// Model from whose weights the run starts.
    pub model: ModelKeys,
    /// Policies by name. If empty, the model is the only policy, and it is trained.
    #[serde(default)]
    pub policy: BTreeMap<String, PolicyKeys>,
    /// Compute settings of the embedded engine on this machine.
    #[serde(default)]
    pub engine: EngineKeys,
    /// Samplers and learners outside of the embedded engine.
    #[serde(default, skip_serializing_if = "ClusterKeys::is_empty")]
    pub cluster: ClusterKeys,
    /// Settings of the runners that make the attempts, on this host or other hosts. `None` if this
    /// process makes the attempts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runners: Option<RunnersKeys>,
    /// Settings of the gateway at which agents of kind `session` start attempts. `None` for no
    /// gateway.
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
    /// Settings of the default agent, and defaults for additional agents.
    #[serde(default)]
    pub agent: AgentKeys,
    /// Additional agents by name (`[agent.NAME]` in a recipe file).
    #[serde(default, rename = "$agents")]
    pub agents: BTreeMap<String, AgentKeys>,
    /// Simulated users by name, who talk with agents.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub user: BTreeMap<String, UserKeys>,
    /// Game that agents of kind `game` play.
    #[serde(default, skip_serializing_if = "GameKeys::is_empty")]
    pub game: GameKeys,
    /// How attempts are scored and rewarded.
    #[serde(default)]
    pub reward: RewardKeys,
    /// How success is measured on held-out tasks.
    #[serde(default)]
    pub eval: EvalKeys,
    /// Training phases, in order.
    #[serde(default)]
    pub phase: Vec<Phase>,
}

/// `[run]`: name, seed, directory, store and checkpoints of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunKeys {
    /// Name of the run, not empty.
    pub name: String,
    /// Seed of every random choice. Two runs with the same recipe and seed end with the same
    /// weights, unless the order in which attempts finish decides what is trained on (`staleness`,
    /// `oversample`).
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Output directory; by default `runs/<name>` in the working directory.
    #[serde(default)]
    pub folder: PathBuf,
    /// Store for attempts, step plans and evaluations; `sqlite:run.db` if empty.
    #[serde(default, skip_serializing_if = "Location::is_default")]
    pub store: Location,
    /// Interval between checkpoints, in steps. 0 writes no checkpoints in addition to those at the
    /// end of each phase.
    #[serde(default = "default_checkpoint_every")]
    pub checkpoint_every: u32,
    /// Number of newest checkpoints to keep, at least 1. Checkpoints at the end of a phase are
    /// always kept in addition.
    #[serde(default = "default_keep")]
    pub keep: u32,
    /// Number of phases to skip at the start, for example 1 if the model was fine-tuned elsewhere.
    /// In a resolved recipe, it is 0, because that recipe contains only the phases that run.
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

fn default_seed() -> u64 {
    1
}

fn default_keep() -> u32 {
    2
}

fn default_checkpoint_every() -> u32 {
    10
}

/// Default number of sequences that the engine computes together, if the recipe does not set the
/// number of concurrent attempts. A larger batch spreads the cost of reading the weights, but each
/// sequence needs memory for its keys and values.
const DEFAULT_SEQUENCES: usize = 64;

/// `[engine]`: compute settings of the embedded engine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineKeys {
    /// Number of compute threads. 0 starts one thread per core. Results do not depend on this
    /// number.
    pub threads: usize,
    /// Maximum number of attempts in flight, including those that wait for a tool. 0 allows all
    /// attempts of a step and those that may run ahead of it. Results do not depend on it.
    pub concurrency: usize,
    /// Maximum number of tokens of a micro-batch after merging shared prefixes, at least 1. It
    /// bounds the memory of training. A longer sequence forms a separate micro-batch, which is
    /// computed in chunks.
    pub micro_batch_tokens: usize,
    /// Precision of sampling and training. The trained weights are always f32.
    pub precision: Precision,
    /// Whether a completion in flight keeps its KV cache when the weights change. Otherwise the
    /// cache is recomputed with the new weights. Keeping the cache is faster if attempts run ahead.
    /// Log-probabilities computed in training then differ slightly from those of sampling; the
    /// recorded log-probability is the one of sampling.
    pub keep_cache: bool,
    /// Maximum memory of the engine, in MiB. 0 uses the free memory. If memory is short, training
    /// recomputes activations, which takes longer. Results do not depend on this limit.
    pub memory_mb: usize,
    /// Memory of the KV cache in sampling, in MiB per engine. 0 uses a quarter of the memory, at
    /// most 1024 MiB. The cache always fits one sequence of the full context.
    pub kv_memory_mb: usize,
    /// Timeout for model calls other than completions, in seconds: computing a micro-batch, or
    /// changing, writing or reading weights. If a call times out, the run ends with an error and
    /// can be resumed from its last checkpoint.
    pub call_seconds: f64,
}

impl EngineKeys {
    /// Returns the maximum number of sequences that the engine computes together: the number of
    /// concurrent attempts if the recipe sets it, otherwise a default.
    pub fn max_sequences(&self) -> usize {
        self.max_attempts_or(DEFAULT_SEQUENCES)
    }

    /// Wraps `sampler` so that calls other than completions time out after `call_seconds`.
    pub fn wrap_sampler(&self, sampler: Arc<dyn Sampler>) -> Arc<dyn Sampler> {
        Arc::new(TimeoutPolicy::new(sampler, self.max_call_timeout()))
    }

    /// Wraps `learner` so that each call times out after `call_seconds`.
    pub fn wrap_learner(&self, learner: Arc<dyn Learner>) -> Arc<dyn Learner> {
        Arc::new(TimeoutPolicy::new(learner, self.max_call_timeout()))
    }

    /// Returns the timeout for calls of a policy other than completions.
    pub fn max_call_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.call_seconds)
    }

    /// Returns the maximum number of attempts in flight, or `needed` if the recipe sets none.
    pub fn max_attempts_or(&self, needed: usize) -> usize {
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

/// `[[tasks]]`: a source of tasks, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskSource {
    /// Generated arithmetic problems, in symbols or words.
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
    /// Seeds for matches of a game.
    Seeds(SeedKeys),
    /// Recorded sessions of agents that run elsewhere.
    Sessions(SessionKeys),
}

impl TaskSource {
    /// Returns the options of the environment that provides the tasks, or `None` if this source is
    /// not an environment.
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

/// `[[tasks]] kind = "arithmetic"`: generated arithmetic problems.
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
    /// Number of distinct training tasks to generate.
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
    /// Returns the options of the arithmetic generator.
    pub fn options(&self) -> ArithmeticOptions {
        let ArithmeticKeys { operands, min_digits, max_digits, words, stories, .. } = *self;
        ArithmeticOptions { operands, min_digits, max_digits, words, stories }
    }
}

/// `[metrics]`: destinations of metrics in addition to `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsKeys {
    /// Whether to write TensorBoard event files into the directory `tensorboard` of the run.
    pub tensorboard: bool,
    /// URL of an MLflow server to which metrics are sent, such as `http://127.0.0.1:5000`. The
    /// experiment has the run's name. Disabled if empty.
    pub mlflow: String,
    /// Project name for Weights & Biases. Metrics are written into the directory `wandb` of the
    /// run, which `wandb sync` uploads. Disabled if empty.
    pub wandb: String,
    /// Traces of attempts, which are sent to an OpenTelemetry collector.
    pub traces: TracesKeys,
}

/// `[metrics.traces]`: traces of attempts, with their model calls, tool calls and scores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TracesKeys {
    /// URL to which traces are sent as OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`.
    /// The value `mlflow` selects the server of `metrics.mlflow` and the experiment of the run.
    /// Disabled if empty.
    pub otlp: String,
    /// Additional HTTP headers of the requests, by name.
    pub headers: BTreeMap<String, String>,
    /// Name of an environment variable that contains additional headers, as
    /// `NAME=VALUE,NAME=VALUE`. It is meant for secrets.
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
    /// Value of `metrics.traces.otlp` that selects the server of `metrics.mlflow`.
    pub const MLFLOW: &str = "mlflow";
}

/// `[eval]`: evaluations on held-out tasks, before the first phase and after each phase. Sampling
/// is greedy by default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalKeys {
    /// Number of evaluation tasks from each source. A file provides at most the tasks that it holds
    /// out. 0 disables evaluations.
    pub tasks: usize,
    /// Fraction of the evaluation tasks that only select `checkpoints/best`, in 0..1, and are
    /// reported separately. The remaining tasks then give an unbiased estimate for the best
    /// checkpoint. If 0, all tasks select the checkpoint, and the estimate is biased upwards.
    pub select: f64,
    /// Number of tasks per generator in wordings that never occur in training. They are reported
    /// separately.
    pub unseen_wordings: usize,
    /// Seed that selects the held-out questions, over all sources together. It is independent of
    /// the run's seed: runs with different seeds are evaluated on the same tasks, and no run trains
    /// on an evaluation task of another run.
    pub split_seed: u64,
    /// Interval between evaluations, in steps of a phase. 0 evaluates only at the end of each
    /// phase.
    pub every: u32,
    /// Whether to evaluate before the first phase.
    pub before: bool,
    /// Number of attempts at each evaluation task, at least 1.
    pub samples: u32,
    /// Sampling temperature, 0 or in 0.01..=100. 0 is greedy sampling, which requires
    /// `samples = 1`.
    pub temperature: f32,
    /// Nucleus sampling: samples from the most likely tokens whose probabilities add up to this
    /// value, in 0..=1 but not 0; 1 keeps all tokens.
    pub top_p: f32,
    /// Number of most likely tokens to sample from; 0 keeps all tokens.
    pub top_k: usize,
    /// Minimum probability of a token relative to the most likely token, in 0..=1; 0 keeps all
    /// tokens.
    pub min_p: f32,
    /// Maximum number of completions in an evaluation attempt. 0 applies `agent.max_turns`.
    pub max_turns: u32,
    /// Maximum number of sampled tokens in an evaluation attempt. 0 applies `agent.max_tokens`.
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

/// `[[phase]]`: one part of the training, by `kind`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Supervised fine-tuning on demonstrations.
    Sft(SftKeys),
    /// Reinforcement learning.
    Rl(Box<RlKeys>),
    /// Improvement of a prompt, such as the system prompt of an agent.
    Prompt(PromptKeys),
}

impl Phase {
    /// Returns the name of the phase's kind in messages and metrics, such as `sft` or `grpo`.
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

    /// Returns the number of steps of the phase if it does not stop early.
    pub fn steps(&self) -> u32 {
        u32::try_from(self.exact_steps()).unwrap_or(u32::MAX)
    }

    /// Returns the exact number of steps, which can exceed `u32::MAX` in an unchecked recipe.
    pub(super) fn exact_steps(&self) -> u64 {
        match self {
            Phase::Sft(keys) => {
                let steps_per_epoch = keys.demonstrations.div_ceil(keys.batch.max(1)) as u64;
                steps_per_epoch.saturating_mul(keys.epochs.into())
            }
            Phase::Rl(keys) => keys.steps.into(),
            Phase::Prompt(keys) => keys.steps().into(),
        }
    }

    /// Returns the optimizer settings of the phase and the peak learning rate, or `None` if the
    /// phase trains no weights.
    pub fn optimizer(&self) -> Option<(&OptimizerKeys, f32)> {
        match self {
            Phase::Sft(keys) => Some((&keys.optimizer, keys.learning_rate)),
            Phase::Rl(keys) => Some((&keys.optimizer, keys.learning_rate)),
            Phase::Prompt(_) => None,
        }
    }

    /// Returns the names of the policies that the phase trains. An empty list selects all trained
    /// policies. Returns `None` if the phase trains no weights.
    pub fn policies(&self) -> Option<&[String]> {
        match self {
            Phase::Sft(keys) => Some(&keys.policies),
            Phase::Rl(keys) => Some(&keys.policies),
            Phase::Prompt(_) => None,
        }
    }

    /// Returns the success rate at which the phase stops early, or `None` if it never stops early.
    pub fn early_stop_success(&self) -> Option<f64> {
        match self {
            Phase::Sft(keys) => keys.until,
            Phase::Rl(keys) => keys.until,
            Phase::Prompt(keys) => keys.until,
        }
    }
}

/// `[[phase]] kind = "sft"`: supervised fine-tuning on demonstrations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftKeys {
    /// Number of demonstrations, at least 1. They are sampled evenly over all kinds of training
    /// tasks that have demonstrations, or they come from `source`.
    pub demonstrations: usize,
    /// Origin of the demonstrations. `None` uses the worked solutions of the tasks.
    #[serde(default)]
    pub source: Option<SourceKeys>,
    /// System prompt with which the completions of `source` are imitated, in place of the one with
    /// which they were made. The agent uses it from the first step on. `None` keeps the original.
    #[serde(default)]
    pub system: Option<String>,
    /// Maximum number of passes over the demonstrations.
    #[serde(default = "default_epochs")]
    pub epochs: u32,
    /// Success rate, in 0..=1, at which the phase stops early (see `eval.every`). If `eval.select`
    /// reserves selection tasks, their success rate counts. `None` disables early stopping.
    #[serde(default)]
    pub until: Option<f64>,
    /// Names of the policies that the phase trains. All trained policies if empty.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Number of demonstrations in a step.
    pub batch: usize,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// How the loss is averaged over a step. The default is the mean over tokens.
    #[serde(default)]
    #[serde(alias = "normaliser")]
    pub normalizer: Normalizer,
    /// Settings of the optimizer.
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
    /// Name of the field in a task's row that contains the completions of an attempt, in order.
    /// Excludes `policy`.
    #[serde(default)]
    pub field: Option<String>,
    /// Whether the completions of recorded sessions are imitated, which are tasks of kind
    /// `sessions`. Excludes `policy`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sessions: bool,
    /// Minimum score of an attempt that is used as a demonstration.
    #[serde(default = "default_min_score")]
    #[serde(alias = "least_score")]
    pub min_score: f64,
    /// Maximum number of tasks to try. 0 tries four tasks per demonstration, or all sessions.
    #[serde(default)]
    pub tasks: usize,
}

fn default_min_score() -> f64 {
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

fn default_epochs() -> u32 {
    1
}
