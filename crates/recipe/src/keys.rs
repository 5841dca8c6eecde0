//! Every key of a recipe, declared once: its type, its default, what it means.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use levade_agent::Limits;
use levade_agent::environments::{
    EnvironmentOptions, GymnasiumOptions, OpenEnvOptions, ReasoningGymOptions, VerifiersOptions,
};
use levade_policy::{Learner, Precision, Sampler, SamplingParams, Timely};
use levade_rl::Normaliser;
use levade_store::Location;
use levade_tasks::{ArithmeticOptions, FileOptions};
use levade_tree::RunId;
use serde::{Deserialize, Serialize};

use super::agent::AgentKeys;
use super::cluster::ClusterKeys;
use super::optimiser::OptimiserKeys;
use super::policy::{ModelKeys, PolicyKeys};
use super::reward::RewardKeys;
use super::rl::RlKeys;
use super::tools::ToolKeys;

/// A whole recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The run itself: its name, its seed, its folder.
    pub run: RunKeys,
    /// The model it starts from.
    pub model: ModelKeys,
    /// Policies by name; where none is given the model is the only one, and trained.
    #[serde(default)]
    pub policy: BTreeMap<String, PolicyKeys>,
    /// How this machine is used.
    #[serde(default)]
    pub engine: EngineKeys,
    /// Parts that are elsewhere.
    #[serde(default, skip_serializing_if = "ClusterKeys::is_empty")]
    pub cluster: ClusterKeys,
    /// Where tasks come from; several sources are trained on together.
    pub tasks: Vec<TaskSource>,
    /// Where metrics go.
    #[serde(default)]
    pub metrics: MetricsKeys,
    /// Toolboxes that agents may have.
    #[serde(default)]
    pub tool: Vec<ToolKeys>,
    /// The agent loop.
    #[serde(default)]
    pub agent: AgentKeys,
    /// Further agents by name, `[agent.NAME]` in a file.
    #[serde(default, rename = "$agents")]
    pub agents: BTreeMap<String, AgentKeys>,
    /// Worth of an attempt.
    #[serde(default)]
    pub reward: RewardKeys,
    /// How success is measured.
    #[serde(default)]
    pub eval: EvalKeys,
    /// Phases, in order.
    #[serde(default)]
    pub phase: Vec<Phase>,
}

/// `[run]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunKeys {
    /// Name of the run.
    pub name: String,
    /// Decides every random choice. Two runs with the same recipe and seed end with the same weights, unless
    /// who ends first decides what is trained on (`staleness`, `spare`).
    #[serde(default = "one")]
    pub seed: u64,
    /// Where everything is written; `runs/<name>` under the working directory where not given.
    #[serde(default)]
    pub folder: PathBuf,
    /// Where attempts, step plans and evaluations are recorded; `sqlite:run.db` if empty.
    #[serde(default, skip_serializing_if = "Location::is_default")]
    pub store: Location,
    /// A checkpoint after every so many steps, besides the one at the end of each phase; 0 for none.
    #[serde(default = "ten")]
    pub checkpoint_every: u32,
    /// How many of these checkpoints are kept, the newest ones; those at the end of a phase always are.
    #[serde(default = "two")]
    pub keep: u32,
    /// Phases that are left out, counted from the first: 1 for a model that has imitated elsewhere. 0 once a
    /// recipe is resolved, which holds only the phases that are run.
    #[serde(default)]
    pub skip_phases: usize,
}

impl RunKeys {
    /// The name of the run in its record: the same whenever the recipe is run again with this seed, so that
    /// its attempts have the same names, too.
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

/// Sequences that are computed together where the recipe does not say how many attempts are under way: more
/// share the cost of reading the weights, but each needs memory for its keys and values.
const SEQUENCES: usize = 64;

/// `[engine]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineKeys {
    /// Threads that compute; 0 for one on each core. Results do not depend on it.
    pub threads: usize,
    /// Attempts under way at once, those that wait for a tool included; 0 for all of a step and of what may
    /// run ahead of it. Results do not depend on it.
    pub concurrency: usize,
    /// Tokens of a micro-batch after merging, at which the next one begins. It bounds memory; a single path
    /// that is longer is a micro-batch of its own, and goes through the model piece by piece.
    pub micro_batch_tokens: usize,
    /// Precision that the model is sampled and trained in: weights as they are learnt are f32 in any case.
    pub precision: Precision,
    /// Whether replies that are under way when the weights change go on from what they have computed under
    /// the older ones, instead of computing it again. That is faster where attempts run ahead, and what they
    /// sample from then on is not quite what training finds for it; the log-probability that is recorded is
    /// the one that it was sampled with.
    pub keep_cache: bool,
    /// Most memory to use, in MiB; 0 for what is free. Where it is short, training computes activations
    /// again, which takes longer. Results do not depend on it.
    pub memory_mb: usize,
    /// Longest wait for the model to do one thing other than to reply, in seconds: to take a micro-batch, to
    /// change its weights, to write or read them. Where it hangs for longer the run ends with an error, and
    /// can go on from its last checkpoint.
    pub call_seconds: f64,
}

impl EngineKeys {
    /// Sequences that the engine computes together at most: as many as there are attempts, where the recipe
    /// says how many.
    pub fn sequences(&self) -> usize {
        self.attempts(SEQUENCES)
    }

    /// `sampler`, no call of which takes longer than `call_seconds`.
    pub fn sampler(&self, sampler: Arc<dyn Sampler>) -> Arc<dyn Sampler> {
        Arc::new(Timely::new(sampler, self.longest_call()))
    }

    /// `learner`, no call of which takes longer than `call_seconds`.
    pub fn learner(&self, learner: Arc<dyn Learner>) -> Arc<dyn Learner> {
        Arc::new(Timely::new(learner, self.longest_call()))
    }

    /// Longest time that a call of a policy may take.
    pub fn longest_call(&self) -> Duration {
        Duration::from_secs_f64(self.call_seconds)
    }

    /// Attempts under way at once, where `needed` would be best.
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
            call_seconds: 3600.0,
        }
    }
}

/// `[[tasks]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskSource {
    /// Arithmetic in symbols and words, from a generator without end.
    Arithmetic(ArithmeticKeys),
    /// Rows of files.
    #[serde(alias = "jsonl")]
    File(FileOptions),
    /// Data sets of reasoning-gym.
    ReasoningGym(ReasoningGymOptions),
    /// An environment of verifiers.
    Verifiers(VerifiersOptions),
    /// A text world of gymnasium.
    Gymnasium(GymnasiumOptions),
    /// A server of OpenEnv.
    #[serde(rename = "openenv")]
    OpenEnv(OpenEnvOptions),
}

impl TaskSource {
    /// The environment that it is, where it is one.
    pub fn environment(&self) -> Option<EnvironmentOptions> {
        match self {
            TaskSource::Arithmetic(_) | TaskSource::File(_) => None,
            TaskSource::ReasoningGym(options) => Some(EnvironmentOptions::ReasoningGym(options.clone())),
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
    /// Numbers in an expression, 2 to 6.
    pub operands: u32,
    /// Fewest digits of a number, at least 1.
    pub min_digits: u32,
    /// Most digits of a number, at most 6.
    pub max_digits: u32,
    /// Share of tasks put in words; the others are in symbols.
    pub words: f64,
    /// Whether words may be a story, in which the operations go unnamed.
    pub stories: bool,
    /// How many different tasks there are to train on.
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
    /// The options of the generator.
    pub fn options(&self) -> ArithmeticOptions {
        let ArithmeticKeys { operands, min_digits, max_digits, words, stories, .. } = *self;
        ArithmeticOptions { operands, min_digits, max_digits, words, stories }
    }
}

/// `[metrics]`: where metrics go besides `metrics.jsonl`
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsKeys {
    /// Whether event files for TensorBoard are written, into the folder `tensorboard` of the run.
    pub tensorboard: bool,
    /// Address of an MLflow server, such as `http://127.0.0.1:5000`; none where empty. The experiment has the
    /// run's name.
    pub mlflow: String,
    /// A project of Weights & Biases; none where empty. What is measured goes into the folder `wandb` of the
    /// run, which `wandb sync` uploads.
    pub wandb: String,
}

/// `[eval]`: held-out tasks, before the first phase and after each; greedily, unless told otherwise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalKeys {
    /// Tasks from each source; for a file at most as many as it holds out. 0 for no evaluations at all.
    pub tasks: usize,
    /// The share of these tasks that only chooses `checkpoints/best`, and is reported apart. The others then
    /// say without bias how good the best is; with 0 all choose it, and what they say of it is biased
    /// upwards.
    pub select: f64,
    /// Tasks in wordings never seen in training, from each generator; reported apart.
    pub unseen_wordings: usize,
    /// Decides which questions are held out, over all sources together. Apart from the run's seed, so that
    /// runs that differ in it are measured on the same tasks, and none is trained on what another is measured
    /// on.
    pub split_seed: u64,
    /// Also after every so many steps of a phase; 0 for only at its end.
    pub every: u32,
    /// Whether also before training.
    pub before: bool,
    /// Attempts at each task.
    pub samples: u32,
    /// Sampling temperature; 0 takes the most likely token, for one attempt at each task.
    pub temperature: f32,
    /// Only the most likely tokens are sampled, until their probability reaches this; 1 leaves all.
    pub top_p: f32,
    /// Only so many of the most likely tokens are sampled; 0 leaves all.
    pub top_k: usize,
    /// Only tokens at least this likely relative to the most likely one are sampled; 0 leaves all.
    pub min_p: f32,
    /// Most replies of an attempt; 0 for those of `agent.max_turns`.
    pub max_turns: u32,
    /// Most sampled tokens of an attempt; 0 for those of `agent.max_tokens`.
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
    /// How attempts are sampled.
    pub fn params(&self) -> SamplingParams {
        let EvalKeys { temperature, top_p, top_k, min_p, .. } = *self;
        SamplingParams { temperature, top_p, top_k, min_p, ..SamplingParams::default() }
    }

    /// Where attempts end, of which those for training end at `limits`.
    pub fn limits(&self, limits: Limits) -> Limits {
        Limits {
            turns: if self.max_turns == 0 { limits.turns } else { self.max_turns },
            tokens: if self.max_tokens == 0 { limits.tokens } else { self.max_tokens },
            ..limits
        }
    }
}

/// `[[phase]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Imitate demonstrations.
    Sft(SftKeys),
    /// Reinforce what is rewarded.
    Rl(Box<RlKeys>),
}

impl Phase {
    /// Name in messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Sft(_) => "sft",
            Phase::Rl(keys) => keys.algorithm.name(),
        }
    }

    /// The policy of others that it imitates, by name.
    pub fn teacher(&self) -> Option<&str> {
        match self {
            Phase::Sft(keys) => keys.source.as_ref().and_then(|source| source.policy.as_deref()),
            Phase::Rl(_) => None,
        }
    }

    /// How many steps it has, if nothing ends it before.
    pub fn steps(&self) -> u32 {
        u32::try_from(self.all_steps()).unwrap_or(u32::MAX)
    }

    /// How many steps it would have, also where no run can have so many.
    pub(super) fn all_steps(&self) -> u64 {
        match self {
            Phase::Sft(keys) => {
                let a_pass = keys.demonstrations.div_ceil(keys.batch.max(1)) as u64;
                a_pass.saturating_mul(keys.epochs.into())
            }
            Phase::Rl(keys) => keys.steps.into(),
        }
    }

    /// Optimiser of the phase.
    pub fn optimiser(&self) -> &OptimiserKeys {
        match self {
            Phase::Sft(keys) => &keys.optimiser,
            Phase::Rl(keys) => &keys.optimiser,
        }
    }

    /// The policies that it trains, by name; all where empty.
    pub fn policies(&self) -> &[String] {
        match self {
            Phase::Sft(keys) => &keys.policies,
            Phase::Rl(keys) => &keys.policies,
        }
    }

    /// The success of an evaluation that ends it before its last step.
    pub fn until(&self) -> Option<f64> {
        match self {
            Phase::Sft(keys) => keys.until,
            Phase::Rl(keys) => keys.until,
        }
    }

    /// Peak learning rate.
    pub fn learning_rate(&self) -> f32 {
        match self {
            Phase::Sft(keys) => keys.learning_rate,
            Phase::Rl(keys) => keys.learning_rate,
        }
    }
}

/// `[[phase]] kind = "sft"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SftKeys {
    /// How many demonstrations, sampled from the training tasks that have one, from all kinds of tasks alike;
    /// or made by `source`.
    pub demonstrations: usize,
    /// Whoever makes demonstrations, where it is not the tasks that bring them.
    #[serde(default)]
    pub source: Option<SourceKeys>,
    /// How often each is seen, at most.
    #[serde(default = "one_epoch")]
    pub epochs: u32,
    /// The success of an evaluation, in 0..=1, that ends the phase when it is reached; see `eval.every`.
    /// Where `eval.select` sets tasks apart to choose by, their success counts.
    #[serde(default)]
    pub until: Option<f64>,
    /// The policies that it trains, by name; all that are trained where not given.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Demonstrations in a step.
    pub batch: usize,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// How the loss of a step is averaged.
    #[serde(default)]
    pub normaliser: Normaliser,
    /// The optimiser.
    #[serde(default)]
    pub optimiser: OptimiserKeys,
}

/// `[phase.source]`: whoever acts in the place of the trained policies, to be imitated: a policy of others,
/// or replies that rows of tasks have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceKeys {
    /// The policy, by name; one of kind `external`.
    #[serde(default)]
    pub policy: Option<String>,
    /// In its place: the field of a task's row with the replies of an attempt at it, in order.
    #[serde(default)]
    pub field: Option<String>,
    /// The least score of an attempt whose replies are imitated.
    #[serde(default = "whole_score")]
    pub least_score: f64,
    /// Most tasks that it tries; 0 for four for each demonstration.
    #[serde(default)]
    pub tasks: usize,
}

fn whole_score() -> f64 {
    1.0
}

impl fmt::Display for SourceKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.policy, &self.field) {
            (Some(policy), _) => write!(f, "the policy {policy}"),
            (None, field) => write!(f, "the field {}", field.as_deref().unwrap_or_default()),
        }
    }
}

impl SourceKeys {
    /// Most tasks that are tried for so many demonstrations.
    pub fn most_tasks(&self, demonstrations: usize) -> usize {
        if self.tasks == 0 { demonstrations.saturating_mul(4) } else { self.tasks }
    }
}

fn one_epoch() -> u32 {
    1
}
