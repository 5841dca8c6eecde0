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

/// `[[phase]] kind = "rl"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RlKeys {
    /// Preset for `advantage`, `loss` and `normalizer`. Each of the three can be set separately.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// Maximum number of steps, at least 1.
    pub steps: u32,
    /// Success rate, in 0..=1, at which the phase stops early; see `eval.every`. If `eval.select`
    /// reserves tasks for selection, their success counts.
    #[serde(default)]
    pub until: Option<f64>,
    /// Names of the policies that the phase trains; by default all trained policies.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Number of tasks in a step, at least 1. Each task is a group of attempts.
    pub groups: usize,
    /// Number of attempts at each task. At least 2 if advantages compare the attempts of a group.
    pub group_size: usize,
    /// Sampling temperature, in 0.01..=100.
    #[serde(default = "unit")]
    pub temperature: f32,
    /// Maximum age of a trained token, in weight versions. 0 alternates sampling and training; a
    /// larger value lets attempts run ahead of training.
    #[serde(default)]
    pub staleness: u32,
    /// Order in which a step selects complete groups if there are more than it needs.
    #[serde(default)]
    pub prefer: GroupOrder,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// Advantage estimator; by default that of the algorithm. The components that GDPO weighs are
    /// the score of the answer, the rest of the outcome, and the rewards of turns.
    #[serde(default)]
    pub advantage: Option<Estimator>,
    /// For `pass_k`: number k of attempts in best-of-k, at least 2; by default all attempts of the
    /// group.
    #[serde(default)]
    pub k: Option<usize>,
    /// Loss of a token; by default that of the algorithm.
    #[serde(default)]
    pub loss: Option<PolicyLoss>,
    /// How the loss of a step is averaged; by default as in the algorithm.
    #[serde(default)]
    #[serde(alias = "normaliser")]
    pub normalizer: Option<Normalizer>,
    /// For losses with a clip: the lower bound of the ratio is 1 − `clip_low`.
    #[serde(default)]
    pub clip_low: Option<f64>,
    /// For losses with a clip: the upper bound of the ratio is 1 + `clip_high`.
    #[serde(default)]
    pub clip_high: Option<f64>,
    /// For PPO's clip (dual clip): for a negative advantage A, the loss is at most −`clip_dual` ×
    /// A. It must be more than 1; by default there is no such bound.
    #[serde(default)]
    pub clip_dual: Option<f64>,
    /// KL penalty against a reference; none by default.
    #[serde(default)]
    pub kl: Option<KlKeys>,
    /// Coefficient of the entropy bonus; 0 for none.
    #[serde(default)]
    pub entropy: f64,
    /// Proximal policy: the denominator of the ratios in the loss.
    #[serde(default)]
    pub proximal: ProximalPolicy,
    /// Importance weights of tokens that were not sampled by the weights at the start of the step.
    /// It needs `proximal`; with `proximal`, the default is decoupled PPO's weight, at most 5 per
    /// token. Bounds of 1 and 1 disable the correction. The critic gives all tokens the same
    /// weight.
    #[serde(default)]
    pub correction: Option<Correction>,
    /// Bounds on the distance from the weights that sampled a token. A token outside any of them is
    /// not trained. It needs `proximal = "recompute"`.
    #[serde(default)]
    pub rejection: Vec<Rejection>,
    /// Treatment of groups whose rewards are all equal; by default that of the algorithm.
    #[serde(default)]
    #[serde(alias = "uniform_groups")]
    pub zero_variance_groups: Option<ZeroVarianceGroups>,
    /// Treatment of attempts that were truncated at a limit.
    #[serde(default)]
    pub overlong: OverlongAttempts,
    /// Treatment of attempts in which no token was sampled.
    #[serde(default)]
    pub empty: EmptyAttempts,
    /// Attempts that are compared with each other.
    #[serde(default)]
    pub group_by: GroupBy,
    /// Unit that averages over rollouts count as one rollout.
    #[serde(default)]
    pub unit: Unit,
    /// Number of attempts at each task that are started in addition to `group_size`.
    #[serde(default)]
    #[serde(alias = "spare")]
    pub oversample: usize,
    /// Selection of a group's attempts if more were started than it needs.
    #[serde(default)]
    pub oversample_keep: OversampleKeep,
    /// Selection of the training tasks. By default, every task is trained on once per epoch.
    #[serde(default)]
    pub curriculum: Option<CurriculumKeys>,
    /// Answers of earlier attempts of the group that the prompt of an attempt contains. By default,
    /// attempts are independent.
    #[serde(default)]
    pub experience: Option<ExperienceKeys>,
    /// Filter on the attempts that are trained. The remaining attempts still count in the
    /// baselines.
    #[serde(default)]
    pub only: TrainFilterKeys,
    /// Maximum number of turns of an attempt that are trained, chosen at random; their weights are
    /// scaled up for the turns that are left out. 0 trains all turns.
    #[serde(default)]
    #[serde(alias = "most_turns")]
    pub max_trained_turns: usize,
    /// Number of optimizer steps over the attempts of a step, each on its part of the groups. In
    /// 1..=`groups`. All but the first are off policy.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// Number of passes over the attempts of a step.
    #[serde(default = "one_epoch")]
    pub epochs: u32,
    /// Fraction of an update's tokens that keep their advantages: those with the highest entropy
    /// before the step. In 0..=1 but not 0; 1 keeps all. The loss is still averaged over all
    /// tokens, and a KL penalty still counts all tokens (Wang et al. 2025, "Beyond the 80/20 rule",
    /// with 0.2).
    #[serde(default = "unit_f64")]
    #[serde(alias = "high_entropy_share")]
    pub high_entropy_fraction: f64,
    /// Critic, for advantage estimators that need values.
    #[serde(default)]
    pub critic: CriticKeys,
    /// The optimiser.
    #[serde(default)]
    #[serde(alias = "optimiser")]
    pub optimizer: OptimizerKeys,
}

fn unit() -> f32 {
    1.0
}

fn one() -> usize {
    1
}

fn one_epoch() -> u32 {
    1
}

/// KL penalty against a reference: the weights at the start of the phase, or those of an earlier
/// step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlKeys {
    /// Estimator of the divergence from one sample.
    pub estimator: KlEstimator,
    /// Coefficient β, more than 0.
    pub coefficient: f64,
    /// Whether each token's estimate is multiplied by its ratio, so that it is unbiased for tokens
    /// that older weights sampled (DeepSeek-V3.2). Only for a penalty in the loss. The ratio is
    /// that of the loss. With `proximal`, `correction` supplies the remaining weight, to the policy
    /// that sampled the token.
    #[serde(default)]
    pub importance_weighted: bool,
    /// Interval, in steps of the phase, at which the reference takes the current weights. With 0,
    /// the reference stays at the start of the phase.
    #[serde(default)]
    pub reference_every: u32,
    /// Where the penalty is applied: in the loss or in the reward.
    #[serde(default, alias = "charge")]
    pub apply_to: KlTarget,
    /// Controller that adapts β to reach a target divergence. Only for a penalty in the reward.
    #[serde(default)]
    pub adaptive: Option<AdaptiveKl>,
}

/// Target of a KL penalty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KlTarget {
    /// In the loss of every trained token.
    #[default]
    Loss,
    /// The penalty is subtracted from the reward of every token, before advantages are computed.
    Reward,
}

/// Order in which a step selects groups among the complete ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupOrder {
    /// Groups are trained on in task order.
    #[default]
    Oldest,
    /// In the order in which the groups were completed.
    FirstDone,
    /// Groups whose tokens were sampled by the newest weights are trained on first.
    Freshest,
}

/// Proximal policy: the denominator of the ratios in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProximalPolicy {
    /// The policy that sampled the token.
    #[default]
    #[serde(alias = "behaviour")]
    Behavior,
    /// The weights at the start of the step (decoupled PPO). It needs an additional forward pass if
    /// other weights sampled some of the tokens.
    Recompute,
    /// An interpolation, by age, between the policy that sampled the token and the current policy.
    /// It is computed in the loss, without an additional forward pass.
    Interpolate,
}

/// Treatment of attempts in which no token was sampled, such as attempts that timed out before the
/// first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmptyAttempts {
    /// Their rewards count in the baselines of the remaining attempts.
    #[default]
    Keep,
    /// They are ignored completely.
    Drop,
}

/// Selection of a group's attempts if more were started than it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OversampleKeep {
    /// The first attempts that end with a reward; the remaining attempts are cancelled. Attempts
    /// that end first are short or had fast tools. If that correlates with success, the group is a
    /// biased sample.
    #[default]
    Ended,
    /// The attempts that started first. Later ones only replace attempts that broke.
    Started,
}

/// Attempts that are compared with each other by advantage estimators that compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBy {
    /// Attempts at the same task, with the same seed and the same seats.
    #[default]
    Task,
    /// Attempts at the same task, separately for each agent name, so that the mean reward of a role
    /// or a seat cancels out.
    Agent,
    /// All attempts of a step, for tasks of equal difficulty.
    Step,
}

/// Unit that averages over rollouts count as one rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// One attempt, even if several agents act in it.
    #[default]
    Attempt,
    /// The part of an attempt that belongs to one agent or one seat, so that all seats have equal
    /// weights.
    Sample,
}

/// `[phase.only]`: filter on what is trained
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainFilterKeys {
    /// Names of the agents that are trained, in all their seats; all if empty.
    pub agents: Vec<String>,
    /// Minimum reward of trained attempts; no minimum by default.
    pub reward_from: Option<f64>,
    /// Maximum reward of trained attempts; no maximum by default.
    pub reward_to: Option<f64>,
}

impl TrainFilterKeys {
    /// Returns whether an attempt with this reward is trained.
    pub fn accepts_reward(&self, reward: f64) -> bool {
        self.reward_from.is_none_or(|from| reward >= from)
            && self.reward_to.is_none_or(|to| reward <= to)
    }

    /// Returns whether the tokens of an agent with this recorded name are trained.
    pub fn accepts_agent(&self, name: &str) -> bool {
        self.agents.is_empty()
            || self.agents.iter().any(|agent| agent == name || agent == agent_of(name))
    }
}

/// Treatment of groups whose rewards are all equal. With group advantages, these groups have no
/// gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroVarianceGroups {
    /// They are trained as sampled, and count in the averages.
    #[default]
    Keep,
    /// Such attempts are left out of the averages.
    Drop,
    /// New groups are sampled in their place until the step is full, at most as many additional
    /// groups as the step has (dynamic sampling, DAPO).
    Refill,
}

/// Treatment of attempts that were truncated at a limit on tokens, turns, context or time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum OverlongAttempts {
    /// Truncated attempts are treated like all attempts.
    #[default]
    Keep,
    /// They count in the baselines, but are not trained.
    Mask,
    /// They are ignored completely.
    Drop,
    /// They are treated as unfinished: advantages include the critic's value of the last state as
    /// future reward. It needs a critic.
    Bootstrap,
    /// The reward of an attempt decreases as the attempt approaches the token limit (soft overlong
    /// punishment, DAPO).
    #[serde(alias = "penalise")]
    Penalize {
        /// Number of tokens below the limit at which the penalty starts, at least 1.
        buffer: u64,
        /// Penalty at the limit, in reward; 1 by default.
        #[serde(default = "unit_f64")]
        factor: f64,
    },
}

fn unit_f64() -> f64 {
    1.0
}

/// `[phase.critic]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticKeys {
    /// Peak learning rate of the critic.
    pub learning_rate: f32,
    /// Maximum change of a value from its old estimate, beyond which the loss has no gradient; 0
    /// for no bound.
    pub clip: f64,
    /// Number of steps at the start of the phase in which only the critic is trained.
    pub warmup: u32,
    /// Optimizer of the critic.
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
    /// Returns the advantage estimator.
    pub fn estimator(&self) -> Estimator {
        self.advantage.clone().unwrap_or_else(|| self.algorithm.estimator(self.k))
    }

    /// Returns the loss of the policy.
    pub fn loss(&self) -> Loss {
        let policy = self
            .loss
            .unwrap_or_else(|| self.algorithm.loss(self.clip_low, self.clip_high, self.clip_dual));
        let kl = self.kl.filter(|kl| kl.apply_to == KlTarget::Loss).map(|kl| kl.penalty());
        let interpolated = self
            .correction()
            .filter(|_| self.proximal == ProximalPolicy::Interpolate)
            .map(|correction| InterpolatedProximal {
                by: Interpolation::LogLinear,
                bound: correction.bound,
            });
        Loss { policy, kl, entropy: self.entropy, interpolated }
    }

    /// Returns the importance weights from the policy that sampled the tokens to the proximal
    /// policy, or `None` if the two are the same.
    pub fn correction(&self) -> Option<Correction> {
        (self.proximal != ProximalPolicy::Behavior)
            .then(|| self.correction.unwrap_or(Correction::DECOUPLED))
    }

    /// Returns the loss of the critic.
    pub fn value_loss(&self) -> Loss {
        Loss::new(PolicyLoss::Value { clip: (self.critic.clip > 0.0).then_some(self.critic.clip) })
    }

    /// Returns how the loss of a step is averaged. `max_tokens` is the maximum number of sampled
    /// tokens of an attempt.
    pub fn normalizer(&self, max_tokens: usize) -> Normalizer {
        self.normalizer.unwrap_or_else(|| self.algorithm.normalizer(max_tokens))
    }

    /// Returns the treatment of zero-variance groups.
    pub fn zero_variance_groups(&self) -> ZeroVarianceGroups {
        self.zero_variance_groups.unwrap_or(match self.algorithm {
            Algorithm::Dapo => ZeroVarianceGroups::Refill,
            _ => ZeroVarianceGroups::Keep,
        })
    }

    /// Returns whether a reference is needed.
    pub fn needs_reference(&self) -> bool {
        self.kl.is_some()
    }

    /// Returns whether training needs the entropies or the squared probabilities of the policy's
    /// predictions.
    pub fn needs_predictions(&self) -> bool {
        self.high_entropy_fraction < 1.0
            || matches!(self.estimator(), Estimator::OptimalToken { .. })
    }

    /// Returns the number of attempts at each task of a step: the attempts of the group, the
    /// oversampled attempts, and the greedy baseline.
    pub fn attempts_of_task(&self) -> usize {
        self.group_size + self.oversample + usize::from(self.needs_baseline())
    }

    /// Returns whether a greedy attempt at each task is needed.
    pub fn needs_baseline(&self) -> bool {
        self.estimator() == Estimator::ReMax
    }

    /// Returns whether a critic is needed.
    pub fn needs_critic(&self) -> bool {
        self.estimator().needs_values()
    }

    /// Returns whether a group has no gradient if all its attempts have the same reward.
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
            Estimator::ReinforcePlusPlusBaseline { recenter: recentre, .. } => recentre,
            _ => false,
        };
        self.compares_attempts() && self.group_by != GroupBy::Step && !in_reward && !can_vary
    }

    /// Returns whether the estimator depends on where in an attempt each part of its reward was
    /// earned.
    pub fn uses_reward_components(&self) -> bool {
        let uses_total_reward = matches!(
            self.estimator(),
            Estimator::Group(_) | Estimator::ReinforcePlusPlusBaseline { .. }
        );
        !uses_total_reward || self.group_by == GroupBy::Agent
    }

    /// Returns whether attempts are compared with other attempts of their group.
    pub fn compares_attempts(&self) -> bool {
        !matches!(
            self.estimator(),
            Estimator::Gae { .. } | Estimator::ReinforcePlusPlus { .. } | Estimator::ReMax
        )
    }
}

impl KlKeys {
    /// Returns the penalty as `levade_rl` represents it.
    pub fn penalty(&self) -> KlPenalty {
        let KlKeys { estimator, coefficient, importance_weighted, .. } = *self;
        KlPenalty { estimator, coefficient, importance_weighted }
    }
}
