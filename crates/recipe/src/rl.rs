//! `[[phase]] kind = "rl"`: reinforcement learning, with its algorithms and their parameters.

mod algorithm;

use levade_rl::correction::{Correction, Rejection};
use levade_rl::{
    AdaptiveKl, Compare, Counting, Estimator, GroupBaseline, InterpolatedProximal, Interpolation,
    KlEstimator, KlPenalty, Loss, Normalizer, PolicyLoss, Singleton, TrustRegion,
};
use levade_tree::agent_of;
use serde::{Deserialize, Serialize};

use super::curriculum::CurriculumKeys;
use super::experience::ExperienceKeys;
use super::optimizer::OptimizerKeys;
pub use algorithm::Algorithm;

/// `[[phase]] kind = "rl"`: reinforcement learning.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RlKeys {
    /// Preset for `advantage`, `loss` and `normalizer`. Each of the three keys can override it.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// Maximum number of steps, at least 1.
    pub steps: u32,
    /// Success rate, in 0..=1, at which the phase stops early (see `eval.every`). If `eval.select`
    /// reserves selection tasks, their success rate counts. `None` disables early stopping.
    #[serde(default)]
    pub until: Option<f64>,
    /// Names of the policies that the phase trains. All trained policies if empty.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Number of groups in a step, at least 1. A group consists of the attempts at one task.
    pub groups: usize,
    /// Number of attempts in a group. It must be at least 2 if advantages compare the attempts of a
    /// group.
    pub group_size: usize,
    /// Sampling temperature, in 0.01..=100.
    #[serde(default = "default_temperature")]
    pub temperature: f32,
    /// Maximum age of a trained token, in weight versions. 0 alternates sampling and training. With
    /// a larger value, attempts can run ahead of training.
    #[serde(default)]
    pub staleness: u32,
    /// Which of the complete groups a step takes first, if there are more than it needs.
    #[serde(default)]
    pub prefer: GroupOrder,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// Advantage estimator. `None` uses the estimator of the algorithm. The components that GDPO
    /// weighs are the score of the answer, the rest of the outcome, and the rewards of turns.
    #[serde(default)]
    pub advantage: Option<Estimator>,
    /// Number k of attempts in best-of-k for the algorithm `pass_k`, at least 2. `None` uses all
    /// attempts of the group.
    #[serde(default)]
    pub k: Option<usize>,
    /// Policy loss of a token. `None` uses the loss of the algorithm.
    #[serde(default)]
    pub loss: Option<PolicyLoss>,
    /// How the loss is averaged over a step. `None` uses the normalizer of the algorithm.
    #[serde(default)]
    #[serde(alias = "normaliser")]
    pub normalizer: Option<Normalizer>,
    /// Lower clipping range, for losses with a clip: the lower bound of the ratio is 1 −
    /// `clip_low`. `None` uses the value of the algorithm.
    #[serde(default)]
    pub clip_low: Option<f64>,
    /// Upper clipping range, for losses with a clip: the upper bound of the ratio is 1 +
    /// `clip_high`. `None` uses the value of the algorithm.
    #[serde(default)]
    pub clip_high: Option<f64>,
    /// Dual-clip bound of PPO's clip, more than 1: for a negative advantage A, the loss is at most
    /// −`clip_dual` × A. `None` disables the bound.
    #[serde(default)]
    pub clip_dual: Option<f64>,
    /// KL penalty against a reference policy. `None` for no penalty.
    #[serde(default)]
    pub kl: Option<KlKeys>,
    /// Coefficient of the entropy bonus. 0 disables the bonus.
    #[serde(default)]
    pub entropy: f64,
    /// Proximal policy, which is the denominator of the ratios in the loss.
    #[serde(default)]
    pub proximal: ProximalPolicy,
    /// Importance correction for tokens that were not sampled by the weights at the start of the
    /// step. It requires `proximal`. With `proximal`, the default is the weight of decoupled PPO,
    /// at most 5 per token. Bounds of 1 and 1 disable the correction. The critic gives all tokens
    /// the same weight.
    #[serde(default)]
    pub correction: Option<Correction>,
    /// Bounds on the distance between the current weights and those that sampled a token. A token
    /// outside of any bound is not trained. They require `proximal = "recompute"`.
    #[serde(default)]
    pub rejection: Vec<Rejection>,
    /// What happens to groups whose rewards are all equal. `None` uses the setting of the
    /// algorithm.
    #[serde(default)]
    #[serde(alias = "uniform_groups")]
    pub zero_variance_groups: Option<ZeroVarianceGroups>,
    /// What happens to attempts that were truncated at a limit.
    #[serde(default)]
    pub overlong: OverlongAttempts,
    /// What happens to attempts in which no token was sampled.
    #[serde(default)]
    pub empty: EmptyAttempts,
    /// Which attempts advantages compare with each other.
    #[serde(default)]
    pub group_by: GroupBy,
    /// Unit that counts as one rollout in averages over rollouts.
    #[serde(default)]
    pub unit: Unit,
    /// Number of attempts that are started for each group in addition to `group_size`.
    #[serde(default)]
    #[serde(alias = "spare")]
    pub oversample: usize,
    /// Which attempts form a group, if more attempts were started than the group needs.
    #[serde(default)]
    pub oversample_keep: OversampleKeep,
    /// Curriculum that selects the training tasks. `None` trains on every task once per epoch.
    #[serde(default)]
    pub curriculum: Option<CurriculumKeys>,
    /// How the prompt of an attempt shows the answers of earlier attempts of the group. `None`
    /// makes independent attempts.
    #[serde(default)]
    pub experience: Option<ExperienceKeys>,
    /// Filter that selects the attempts and agents to train. Attempts that are not trained still
    /// count in the baselines.
    #[serde(default)]
    pub only: TrainFilterKeys,
    /// Maximum number of turns per attempt that are trained. The turns are selected at random, and
    /// their weights are scaled up to compensate for the others. 0 trains all turns.
    #[serde(default)]
    #[serde(alias = "most_turns")]
    pub max_trained_turns: usize,
    /// Number of optimizer steps per training step, in 1..=`groups`. Each trains on a part of the
    /// groups. All optimizer steps except the first are off-policy.
    #[serde(default = "default_mini_batches")]
    pub mini_batches: usize,
    /// Number of passes over the attempts of a step.
    #[serde(default = "default_epochs")]
    pub epochs: u32,
    /// Fraction of an update's tokens that keep their advantages, in 0..=1 but not 0. The tokens
    /// with the highest entropy before the step are kept, and 1 keeps all tokens. The loss is still
    /// averaged over all tokens, and a KL penalty still counts all tokens (Wang et al. 2025,
    /// "Beyond the 80/20 rule", with 0.2).
    #[serde(default = "default_factor")]
    #[serde(alias = "high_entropy_share")]
    pub high_entropy_fraction: f64,
    /// Settings of the critic, for advantage estimators that need values.
    #[serde(default)]
    pub critic: CriticKeys,
    /// Settings of the optimizer.
    #[serde(default)]
    #[serde(alias = "optimiser")]
    pub optimizer: OptimizerKeys,
}

fn default_temperature() -> f32 {
    1.0
}

fn default_mini_batches() -> usize {
    1
}

fn default_epochs() -> u32 {
    1
}

/// KL penalty against a reference policy: the weights at the start of the phase, or the weights at
/// an earlier step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlKeys {
    /// Estimator of the KL divergence from one sampled token.
    pub estimator: KlEstimator,
    /// Coefficient β of the penalty, more than 0.
    pub coefficient: f64,
    /// Whether each token's estimate is multiplied by the ratio of the loss, so that it is unbiased
    /// for tokens that older weights sampled (DeepSeek-V3.2). It applies only to a penalty in the
    /// loss. With `proximal`, `correction` provides the remaining importance weight.
    #[serde(default)]
    pub importance_weighted: bool,
    /// Interval, in steps of the phase, at which the reference takes the current weights. If 0, the
    /// reference keeps the weights from the start of the phase.
    #[serde(default)]
    pub reference_every: u32,
    /// Whether the penalty is applied in the loss or in the reward.
    #[serde(default, alias = "charge")]
    pub apply_to: KlTarget,
    /// Controller that adapts β to reach a target divergence. It applies only to a penalty in the
    /// reward. `None` keeps β constant.
    #[serde(default)]
    pub adaptive: Option<AdaptiveKl>,
}

/// Where a KL penalty is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlTarget {
    /// The penalty is added to the loss of every trained token.
    #[default]
    Loss,
    /// The penalty is subtracted from the reward of every token, before advantages are computed.
    Reward,
}

/// Which of the complete groups a step takes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOrder {
    /// Groups are trained on in the order of their tasks.
    #[default]
    Oldest,
    /// Groups are trained on in the order in which they were completed.
    FirstDone,
    /// Groups whose tokens were sampled by the newest weights are trained on first.
    Freshest,
}

/// Proximal policy, which is the denominator of the ratios in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProximalPolicy {
    /// The policy that sampled the token (behavior policy).
    #[default]
    #[serde(alias = "behaviour")]
    Behavior,
    /// The weights at the start of the step (decoupled PPO). This needs an additional forward pass
    /// if other weights sampled some of the tokens.
    Recompute,
    /// An interpolation, by age of the token, between the policy that sampled the token and the
    /// current policy. The loss computes it without an additional forward pass.
    Interpolate,
}

/// What happens to attempts in which no token was sampled, such as attempts that timed out before
/// the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyAttempts {
    /// The rewards of such attempts count in the baselines of the other attempts.
    #[default]
    Keep,
    /// Such attempts are ignored completely.
    Drop,
}

/// Which attempts form a group, if more attempts were started than the group needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OversampleKeep {
    /// The first attempts that end with a reward. The remaining attempts are cancelled. Attempts
    /// that end first are short or had fast tools. If that correlates with success, the group is a
    /// biased sample.
    #[default]
    Ended,
    /// The attempts that were started first. Attempts that were started later only replace failed
    /// attempts.
    Started,
}

/// Which attempts advantage estimators compare with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBy {
    /// Attempts at the same task, with the same seed and seats.
    #[default]
    Task,
    /// Attempts at the same task, separately for each agent name. The mean reward of a role or a
    /// seat thereby cancels out.
    Agent,
    /// All attempts of a step. This is meant for tasks of equal difficulty.
    Step,
}

/// Unit that counts as one rollout in averages over rollouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A complete attempt, even if several agents act in it.
    #[default]
    Attempt,
    /// The part of an attempt that belongs to one agent or one seat. All seats thereby have equal
    /// weights.
    Sample,
}

/// `[phase.only]`: filter that selects the agents and attempts to train.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainFilterKeys {
    /// Names of the agents that are trained, in all their seats. If empty, all agents are trained.
    pub agents: Vec<String>,
    /// Minimum reward of attempts that are trained. `None` for no minimum.
    pub reward_from: Option<f64>,
    /// Maximum reward of attempts that are trained. `None` for no maximum.
    pub reward_to: Option<f64>,
}

impl TrainFilterKeys {
    /// Returns whether attempts with this reward are trained.
    pub fn accepts_reward(&self, reward: f64) -> bool {
        self.reward_from.is_none_or(|from| reward >= from)
            && self.reward_to.is_none_or(|to| reward <= to)
    }

    /// Returns whether the tokens of an agent are trained. `name` is the agent's recorded name,
    /// which can include a seat.
    pub fn accepts_agent(&self, name: &str) -> bool {
        self.agents.is_empty()
            || self.agents.iter().any(|agent| agent == name || agent == agent_of(name))
    }
}

/// What happens to groups whose rewards are all equal. With group advantages, such groups have no
/// gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVarianceGroups {
    /// Such groups are trained like other groups, and count in averages.
    #[default]
    Keep,
    /// Such groups are left out, and do not count in averages.
    Drop,
    /// New groups replace such groups until the step is full (dynamic sampling, as in DAPO). At
    /// most as many additional groups are sampled as a step has.
    Refill,
}

/// What happens to attempts that were truncated at a limit on tokens, turns, context or time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OverlongAttempts {
    /// Truncated attempts are treated like other attempts.
    #[default]
    Keep,
    /// Truncated attempts count in the baselines, but are not trained.
    Mask,
    /// Truncated attempts are ignored completely.
    Drop,
    /// Truncated attempts are treated as unfinished: their advantages include the critic's value of
    /// the last state as future reward. This requires a critic.
    Bootstrap,
    /// The reward of an attempt decreases as its length approaches the token limit (soft overlong
    /// punishment, as in DAPO).
    #[serde(alias = "penalise")]
    Penalize {
        /// Length of the range below the token limit in which the penalty rises, in tokens, at
        /// least 1.
        buffer: u64,
        /// Penalty at the token limit, in units of reward (default 1).
        #[serde(default = "default_factor")]
        factor: f64,
    },
}

fn default_factor() -> f64 {
    1.0
}

/// `[phase.critic]`: the critic of a phase and its optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticKeys {
    /// Peak learning rate of the critic.
    pub learning_rate: f32,
    /// Maximum change of a predicted value from its old estimate. Beyond it, the loss has no
    /// gradient. 0 disables the bound.
    pub clip: f64,
    /// Number of steps at the start of the phase in which only the critic is trained.
    pub warmup: u32,
    /// Optimizer settings of the critic.
    #[serde(alias = "optimiser")]
    pub optimizer: OptimizerKeys,
}

impl Default for CriticKeys {
    fn default() -> Self {
        CriticKeys {
            learning_rate: 1e-5,
            clip: 0.5,
            warmup: 0,
            optimizer: OptimizerKeys::default(),
        }
    }
}

impl RlKeys {
    /// Returns the advantage estimator of the phase: the one in the recipe, or else the algorithm's
    /// default.
    pub fn estimator(&self) -> Estimator {
        self.advantage.clone().unwrap_or_else(|| self.algorithm.estimator(self.k))
    }

    /// Returns the policy loss of the phase, with its bounds, penalty and entropy bonus.
    pub fn loss(&self) -> Loss {
        let policy = self
            .loss
            .unwrap_or_else(|| self.algorithm.loss(self.clip_low, self.clip_high, self.clip_dual));
        let kl = self.kl.filter(|kl| kl.apply_to == KlTarget::Loss).map(|kl| kl.to_kl_penalty());
        let interpolated = self
            .correction()
            .filter(|_| self.proximal == ProximalPolicy::Interpolate)
            .map(|correction| InterpolatedProximal {
                by: Interpolation::LogLinear,
                bound: correction.bound,
            });
        Loss { policy, kl, entropy: self.entropy, interpolated }
    }

    /// Returns the importance correction from the policy that sampled a token to the proximal
    /// policy, or `None` if the two policies are the same.
    pub fn correction(&self) -> Option<Correction> {
        (self.proximal != ProximalPolicy::Behavior)
            .then(|| self.correction.unwrap_or(Correction::DECOUPLED))
    }

    /// Returns the value loss with which the critic is trained.
    pub fn value_loss(&self) -> Loss {
        Loss::new(PolicyLoss::Value { clip: (self.critic.clip > 0.0).then_some(self.critic.clip) })
    }

    /// Returns how the loss is averaged over a step. `max_tokens` is the maximum number of sampled
    /// tokens per attempt.
    pub fn normalizer(&self, max_tokens: usize) -> Normalizer {
        self.normalizer.unwrap_or_else(|| self.algorithm.normalizer(max_tokens))
    }

    /// Returns what happens to groups whose rewards are all equal: the setting in the recipe, or
    /// else the algorithm's default.
    pub fn zero_variance_groups(&self) -> ZeroVarianceGroups {
        self.zero_variance_groups.unwrap_or(match self.algorithm {
            Algorithm::Dapo => ZeroVarianceGroups::Refill,
            _ => ZeroVarianceGroups::Keep,
        })
    }

    /// Returns whether the phase needs a reference model.
    pub fn needs_reference(&self) -> bool {
        self.kl.is_some()
    }

    /// Returns whether the phase needs the entropies or the squared probabilities of the policy's
    /// predictions.
    pub fn needs_predictions(&self) -> bool {
        self.high_entropy_fraction < 1.0
            || matches!(self.estimator(), Estimator::OptimalToken { .. })
    }

    /// Returns the number of attempts at each task of a step: the attempts of the group, the
    /// oversampled attempts, and the greedy baseline if there is one.
    pub fn attempts_per_task(&self) -> usize {
        self.group_size + self.oversample + usize::from(self.needs_baseline())
    }

    /// Returns whether the advantage estimator needs a greedy attempt at each task.
    pub fn needs_baseline(&self) -> bool {
        self.estimator() == Estimator::ReMax
    }

    /// Returns whether the advantage estimator needs a critic.
    pub fn needs_critic(&self) -> bool {
        self.estimator().needs_values()
    }

    /// Returns whether a group whose attempts all have the same reward has no gradient.
    pub fn zero_variance_has_no_gradient(&self) -> bool {
        let in_reward = self.kl.is_some_and(|kl| kl.apply_to == KlTarget::Reward);
        let can_vary = match self.estimator() {
            // Equal sums can have different components.
            Estimator::Gdpo { .. } => true,
            // With a discount, the same outcome is worth less after more turns.
            Estimator::Turns { gamma, .. } => gamma < 1.0,
            // The end of the longest attempt has no baseline.
            Estimator::OptimalToken { bare_tail, .. } => bare_tail,
            // The mean over tokens of other groups shifts the advantages of this group.
            Estimator::ReinforcePlusPlusBaseline { recenter, .. } => recenter,
            _ => false,
        };
        self.compares_attempts() && self.group_by != GroupBy::Step && !in_reward && !can_vary
    }

    /// Returns whether the advantage estimator depends on which part of an attempt earned each part
    /// of its reward.
    pub fn uses_reward_components(&self) -> bool {
        let uses_total_reward = matches!(
            self.estimator(),
            Estimator::Group(_) | Estimator::ReinforcePlusPlusBaseline { .. }
        );
        !uses_total_reward || self.group_by == GroupBy::Agent
    }

    /// Returns whether the advantage estimator compares attempts with other attempts of their
    /// group.
    pub fn compares_attempts(&self) -> bool {
        !matches!(
            self.estimator(),
            Estimator::Gae { .. } | Estimator::ReinforcePlusPlus { .. } | Estimator::ReMax
        )
    }
}

impl KlKeys {
    /// Converts the keys to the penalty type of `levade_rl`.
    pub fn to_kl_penalty(&self) -> KlPenalty {
        let KlKeys { estimator, coefficient, importance_weighted, .. } = *self;
        KlPenalty { estimator, coefficient, importance_weighted }
    }
}
