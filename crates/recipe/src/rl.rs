//! `[[phase]] kind = "rl"`: what is reinforced, and how.

use levade_rl::correction::{Correction, Rejection};
use levade_rl::{
    AdaptiveKl, Compare, Counting, Estimator, GroupBaseline, Interpolated, Interpolation, KlEstimator,
    KlPenalty, Loss, Normaliser, PolicyLoss, Singleton, TrustRegion,
};
use serde::{Deserialize, Serialize};

use super::optimiser::OptimiserKeys;

/// `[[phase]] kind = "rl"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RlKeys {
    /// A name for `advantage`, `loss` and `normaliser` together; each can be given apart.
    #[serde(default)]
    pub algorithm: Algorithm,
    /// How many steps, at most.
    pub steps: u32,
    /// The success of an evaluation, in 0..=1, that ends the phase when it is reached; see `eval.every`.
    /// Where `eval.select` sets tasks apart to choose by, their success counts.
    #[serde(default)]
    pub until: Option<f64>,
    /// The policies that it trains, by name; all that are trained where not given.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Tasks in a step.
    pub groups: usize,
    /// Attempts at each task.
    pub group_size: usize,
    /// Sampling temperature, more than 0.
    #[serde(default = "unit")]
    pub temperature: f32,
    /// How many versions old a token may be when it is trained: 0 samples and trains by turns, more lets
    /// attempts run ahead.
    #[serde(default)]
    pub staleness: u32,
    /// Which of the groups that are complete a step takes, where it may choose.
    #[serde(default)]
    pub prefer: Prefer,
    /// Peak learning rate.
    pub learning_rate: f32,
    /// How rewards become advantages, in place of the algorithm's way. The components that GDPO weighs are
    /// the score of the answer, the rest of the outcome, and what turns earned.
    #[serde(default)]
    pub advantage: Option<Estimator>,
    /// For `pass_k`: how many of a group's attempts the best is chosen among, at least 2; all of them where
    /// not given.
    #[serde(default)]
    pub k: Option<usize>,
    /// The loss of a token, in place of the algorithm's.
    #[serde(default)]
    pub loss: Option<PolicyLoss>,
    /// How the loss of a step is averaged, in place of the algorithm's way.
    #[serde(default)]
    pub normaliser: Option<Normaliser>,
    /// For losses that clip: the ratio is clipped below at 1 − this.
    #[serde(default)]
    pub clip_low: Option<f64>,
    /// For losses that clip: the ratio is clipped above at 1 + this.
    #[serde(default)]
    pub clip_high: Option<f64>,
    /// For PPO's clip: for a negative advantage A the loss is at most −this × A; more than 1 where given.
    #[serde(default)]
    pub clip_dual: Option<f64>,
    /// A penalty for leaving a reference.
    #[serde(default)]
    pub kl: Option<KlKeys>,
    /// Coefficient of a bonus for entropy.
    #[serde(default)]
    pub entropy: f64,
    /// Policy that ratios are taken to.
    #[serde(default)]
    pub proximal: Proximal,
    /// Importance weights of tokens that other weights sampled than those at the beginning of the step. Needs
    /// `proximal`, which without this takes decoupled PPO's, at most 5 a token; bounds of 1 and 1 leave it
    /// away. The critic learns from all tokens alike.
    #[serde(default)]
    pub correction: Option<Correction>,
    /// Bounds beyond which tokens are left out as too far from the weights that sampled them. A token must be
    /// within all of them. Needs `proximal = "recompute"`.
    #[serde(default)]
    pub rejection: Vec<Rejection>,
    /// Treatment of groups whose rewards are all equal, in place of the algorithm's way.
    #[serde(default)]
    pub uniform_groups: Option<UniformGroups>,
    /// Treatment of attempts that were cut for their length.
    #[serde(default)]
    pub overlong: Overlong,
    /// Treatment of attempts in which not one token was sampled.
    #[serde(default)]
    pub empty: Empty,
    /// Attempts that are compared with each other.
    #[serde(default)]
    pub group_by: GroupBy,
    /// Number of attempts at each task that are started beyond `group_size`.
    #[serde(default)]
    pub spare: usize,
    /// Which of the attempts that are started make the group.
    #[serde(default)]
    pub oversample_keep: OversampleKeep,
    /// Part of the attempts that is trained; others are compared with the rest all the same.
    #[serde(default)]
    pub only: OnlyKeys,
    /// The most turns of an attempt that are trained, chosen at random; the others' weight goes to them. 0
    /// for all.
    #[serde(default)]
    #[serde(alias = "most_turns")]
    pub max_trained_turns: usize,
    /// Optimiser steps over the attempts of a step, each on its share of the groups. With more than one, all
    /// but the first are off policy.
    #[serde(default = "one")]
    pub mini_batches: usize,
    /// How often the attempts of a step are gone through.
    #[serde(default = "one_epoch")]
    pub epochs: u32,
    /// The share of an update's tokens that keep their advantages: those with the highest entropy before the
    /// step; 1 for all. The loss is averaged over all tokens nevertheless, and a KL penalty counts all
    /// (Wang et al. 2025, "Beyond the 80/20 rule", with 0.2).
    #[serde(default = "unit_f64")]
    pub high_entropy_share: f64,
    /// The critic, for advantages that need one.
    #[serde(default)]
    pub critic: CriticKeys,
    /// The optimiser.
    #[serde(default)]
    pub optimiser: OptimiserKeys,
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

/// A known combination of advantage, loss and normaliser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Advantages over the group's deviation, PPO's clip, mean over tokens (Shao et al. 2024, as used since).
    #[default]
    Grpo,
    /// GRPO without dividing by the deviation, and by `agent.max_tokens` in place of the length (Liu et al.
    /// 2025).
    DrGrpo,
    /// GRPO with a higher upper clip, and others sampled in place of groups that teach nothing (Yu et al.
    /// 2025). The paper's penalty for length is `overlong`, which keeps all attempts as they are unless set:
    /// its buffer is a fifth of the limit, its factor 1.
    Dapo,
    /// Each against the mean of the others of its group (Ahmadian et al. 2024). Sums over an attempt's tokens
    /// are divided by `agent.max_tokens`: it scales the gradient alone, which `optimiser.max_grad_norm` would
    /// else cut at every step.
    Rloo,
    /// REINFORCE with whitened returns and PPO's clip (Hu 2025).
    ReinforcePlusPlus,
    /// REINFORCE++ less the group's mean.
    ReinforcePlusPlusBaseline,
    /// The baseline weighted by length (Hao et al. 2025).
    Opo,
    /// Each against a greedy attempt at its task (Li et al. 2024), which is sampled besides.
    Remax,
    /// Plain policy gradient over groups (Chu et al. 2025).
    Gpg,
    /// The best of `k` attempts is reinforced, by how much it beats the second (Walder and Karkhanis 2025).
    PassK,
    /// PPO's clip on the ratio of whole attempts (Zheng et al. 2025).
    Gspo,
    /// The geometric mean of clipped ratios (Zhao et al. 2025).
    Gmpo,
    /// Clipped ratios as weights of REINFORCE (MiniMax 2025).
    Cispo,
    /// A sigmoid in place of the clip (Gao et al. 2025).
    Sapo,
    /// Ratios as weights of REINFORCE in a trust region, each against the mean of the others; averaged as by
    /// `rloo`.
    Minirl,
    /// A critic, generalised advantages, PPO's clip (Schulman et al. 2017).
    Ppo,
}

impl Algorithm {
    /// Name in messages and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Grpo => "grpo",
            Algorithm::DrGrpo => "dr_grpo",
            Algorithm::Dapo => "dapo",
            Algorithm::Rloo => "rloo",
            Algorithm::ReinforcePlusPlus => "reinforce_plus_plus",
            Algorithm::ReinforcePlusPlusBaseline => "reinforce_plus_plus_baseline",
            Algorithm::Opo => "opo",
            Algorithm::Remax => "remax",
            Algorithm::Gpg => "gpg",
            Algorithm::PassK => "pass_k",
            Algorithm::Gspo => "gspo",
            Algorithm::Gmpo => "gmpo",
            Algorithm::Cispo => "cispo",
            Algorithm::Sapo => "sapo",
            Algorithm::Minirl => "minirl",
            Algorithm::Ppo => "ppo",
        }
    }

    /// Whether its loss has a bound of this name.
    pub(super) fn uses(self, key: &str) -> bool {
        match self.loss(None, None, None) {
            PolicyLoss::Clip { .. } => true,
            PolicyLoss::Gspo { .. }
            | PolicyLoss::GeometricMean { .. }
            | PolicyLoss::Cispo { .. }
            | PolicyLoss::MiniRl { .. } => key != "clip_dual",
            _ => false,
        }
    }

    fn estimator(self, k: Option<usize>) -> Estimator {
        let group = |compare, scale_by_std| {
            Estimator::Group(GroupBaseline { compare, scale_by_std, ..GroupBaseline::default() })
        };
        match self {
            Algorithm::Grpo
            | Algorithm::Dapo
            | Algorithm::Gspo
            | Algorithm::Gmpo
            | Algorithm::Cispo
            | Algorithm::Sapo => group(Compare::Mean, true),
            Algorithm::DrGrpo => group(Compare::Mean, false),
            Algorithm::Rloo | Algorithm::Minirl => group(Compare::Others, false),
            Algorithm::Opo => group(Compare::LengthWeightedMean, false),
            Algorithm::Remax => Estimator::ReMax,
            Algorithm::Gpg => group(Compare::MeanOfInformative, false),
            Algorithm::PassK => group(Compare::SecondBest { k }, true),
            Algorithm::ReinforcePlusPlus => {
                Estimator::ReinforcePlusPlus { gamma: 1.0, counting: Counting::Exact, one_turn: false }
            }
            Algorithm::ReinforcePlusPlusBaseline => {
                let (singleton, counting) = (Singleton::Zero, Counting::Exact);
                Estimator::ReinforcePlusPlusBaseline { singleton, counting, recentre: false }
            }
            Algorithm::Ppo => Estimator::Gae { gamma: 1.0, lambda: 0.95, whiten: Some(Counting::Exact) },
        }
    }

    fn loss(self, low: Option<f64>, high: Option<f64>, dual: Option<f64>) -> PolicyLoss {
        let bounds = |default_low, default_high| (low.unwrap_or(default_low), high.unwrap_or(default_high));
        let (low, high) = match self {
            Algorithm::Dapo => bounds(0.2, 0.28),
            // Bounds of the ratio of a whole attempt, of the paper's order.
            Algorithm::Gspo => bounds(3e-4, 4e-4),
            Algorithm::Gmpo => bounds(0.4, 0.4),
            Algorithm::Cispo => bounds(1.0, 0.28),
            Algorithm::Minirl => bounds(0.2, 0.3),
            _ => bounds(0.2, 0.2),
        };
        match self {
            Algorithm::Gspo => PolicyLoss::Gspo { low, high },
            Algorithm::Gmpo => PolicyLoss::GeometricMean { low, high },
            Algorithm::Cispo => PolicyLoss::Cispo { low, high },
            Algorithm::Sapo => PolicyLoss::SoftGate { positive: 1.0, negative: 1.05 },
            Algorithm::Minirl => {
                let trust = TrustRegion { strict: true, ..TrustRegion::default() };
                PolicyLoss::MiniRl { low, high, trust }
            }
            Algorithm::Gpg => PolicyLoss::Reinforce,
            Algorithm::Rloo | Algorithm::Remax => PolicyLoss::ImportanceSampling,
            _ => PolicyLoss::Clip { low, high, dual, trust: None, keep: None },
        }
    }

    fn normaliser(self, most_tokens: usize) -> Normaliser {
        match self {
            // Means over attempts of means over their tokens, which these are derived with.
            Algorithm::Gspo | Algorithm::Gmpo | Algorithm::Sapo => Normaliser::RolloutMean,
            // A constant, so that a long attempt weighs more, at the scale of a mean over tokens.
            Algorithm::DrGrpo | Algorithm::Rloo | Algorithm::Remax | Algorithm::Minirl => {
                Normaliser::RolloutSumOver { length: most_tokens as f64 }
            }
            _ => Normaliser::TokenMean,
        }
    }
}

/// A penalty for leaving a reference: the weights that the phase began with, or those of some steps ago.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlKeys {
    /// How the divergence is estimated from one sample.
    pub estimator: KlEstimator,
    /// Coefficient β.
    pub coefficient: f64,
    /// Multiplies each token's estimate by its ratio, so that it is unbiased for tokens that older weights
    /// sampled (DeepSeek-V3.2). Only for a penalty in the loss. The ratio is that of the loss: with
    /// `proximal`, a `correction` weighs the rest of the way.
    #[serde(default)]
    pub importance_weighted: bool,
    /// Moves the reference to the present weights after every so many steps of the phase; 0 leaves it where
    /// the phase began.
    #[serde(default)]
    pub reference_every: u32,
    /// Where the penalty stands: in the loss, or in the reward.
    #[serde(default, alias = "charge")]
    pub apply_to: Charge,
    /// Changes β until the divergence is what is wanted. Only for a penalty in the reward.
    #[serde(default)]
    pub adaptive: Option<AdaptiveKl>,
}

/// Where a KL penalty stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Charge {
    /// In the loss.
    #[default]
    Loss,
    /// In the reward of every token, before advantages.
    Reward,
}

/// Which groups a step takes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Prefer {
    /// In the order of tasks.
    #[default]
    Oldest,
    /// In the order in which they were complete.
    FirstDone,
    /// Groups that the newest weights sampled.
    Freshest,
}

/// Policy that ratios are taken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Proximal {
    /// The policy that sampled the token.
    #[default]
    Behaviour,
    /// The weights at the beginning of the step: a forward pass more where they did not sample everything
    /// (decoupled PPO).
    Recompute,
    /// A guess between the policy that sampled the token and the present one, by age, made as the loss is
    /// evaluated, without that pass.
    Interpolate,
}

/// Treatment of attempts in which not one token was sampled: hung before the first, say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Empty {
    /// Others are compared with their reward.
    #[default]
    Keep,
    /// Leaves them out of everything.
    Drop,
}

/// Which attempts make a group, if more are started than it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OversampleKeep {
    /// The first that end with a reward; the others are given up. The first to end are short, or lucky with
    /// their tools: if that goes with success, the group is a biased sample.
    #[default]
    Ended,
    /// The first that started, save those that broke; the later ones only replace these.
    Started,
}

/// Attempts that are compared with each other, where an advantage compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBy {
    /// Attempts at the same task: its seed and its seats included.
    #[default]
    Task,
    /// In these, each agent with those of its name alone: what a role or a seat is worth cancels out.
    Agent,
    /// All attempts of a step, for tasks that are alike.
    Step,
}

/// `[phase.only]`: what is trained
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OnlyKeys {
    /// Names of agents; all where empty.
    pub agents: Vec<String>,
    /// Attempts with at least this reward.
    pub reward_from: Option<f64>,
    /// Attempts with at most this reward.
    pub reward_to: Option<f64>,
}

impl OnlyKeys {
    /// Whether an attempt of this reward is trained.
    pub fn reward(&self, reward: f64) -> bool {
        self.reward_from.is_none_or(|from| reward >= from) && self.reward_to.is_none_or(|to| reward <= to)
    }

    /// Whether what an agent of this name did is trained.
    pub fn agent(&self, name: &str) -> bool {
        self.agents.is_empty() || self.agents.iter().any(|agent| agent == name)
    }
}

/// Treatment of groups whose rewards are all equal, which have no gradient under advantages by group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UniformGroups {
    /// Counts them in the averages, as they are sampled.
    #[default]
    Keep,
    /// Left out of the averages.
    Drop,
    /// Others are sampled in their place until the step is full, at most as many again as it has (dynamic
    /// sampling, DAPO).
    Refill,
}

/// Treatment of attempts that were cut for their length, in tokens, turns, context or time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Overlong {
    /// Treats them like all others.
    #[default]
    Keep,
    /// Others are compared with them, but they are not trained on.
    Mask,
    /// Leaves them out of everything.
    Drop,
    /// Treated as if they might have gone on: advantages count what the critic says of the state in which
    /// they were cut as still to come. Needs a critic.
    Bootstrap,
    /// Attempts lose reward as they come near the limit of tokens (soft overlong punishment, DAPO).
    Penalise {
        /// From how many tokens below the limit.
        buffer: u64,
        /// How much at the limit.
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
    /// Peak learning rate.
    pub learning_rate: f32,
    /// How far a value may move from what it was before the loss stops pulling; 0 for any.
    pub clip: f64,
    /// Steps in which only the critic learns, at the beginning.
    pub warmup: u32,
    /// The optimiser.
    pub optimiser: OptimiserKeys,
}

impl Default for CriticKeys {
    fn default() -> Self {
        CriticKeys { learning_rate: 1e-5, clip: 0.5, warmup: 0, optimiser: OptimiserKeys::default() }
    }
}

impl RlKeys {
    /// How rewards become advantages.
    pub fn estimator(&self) -> Estimator {
        self.advantage.clone().unwrap_or_else(|| self.algorithm.estimator(self.k))
    }

    /// Loss that the policy minimises.
    pub fn loss(&self) -> Loss {
        let policy =
            self.loss.unwrap_or_else(|| self.algorithm.loss(self.clip_low, self.clip_high, self.clip_dual));
        let kl = self.kl.filter(|kl| kl.apply_to == Charge::Loss).map(|kl| kl.penalty());
        let interpolated = self
            .correction()
            .filter(|_| self.proximal == Proximal::Interpolate)
            .map(|correction| Interpolated { by: Interpolation::LogLinear, bound: correction.bound });
        Loss { policy, kl, entropy: self.entropy, interpolated }
    }

    /// Weights from the policy that sampled the tokens to the proximal one; `None` where these are the same.
    pub fn correction(&self) -> Option<Correction> {
        (self.proximal != Proximal::Behaviour).then(|| self.correction.unwrap_or(Correction::DECOUPLED))
    }

    /// Loss that the critic minimises.
    pub fn value_loss(&self) -> Loss {
        Loss::of(PolicyLoss::Value { clip: (self.critic.clip > 0.0).then_some(self.critic.clip) })
    }

    /// How the loss of a step is averaged, where an attempt has at most `most_tokens` sampled tokens.
    pub fn normaliser(&self, most_tokens: usize) -> Normaliser {
        self.normaliser.unwrap_or_else(|| self.algorithm.normaliser(most_tokens))
    }

    /// Treatment of groups that teach nothing.
    pub fn uniform_groups(&self) -> UniformGroups {
        self.uniform_groups.unwrap_or(match self.algorithm {
            Algorithm::Dapo => UniformGroups::Refill,
            _ => UniformGroups::Keep,
        })
    }

    /// Whether a reference is needed.
    pub fn needs_reference(&self) -> bool {
        self.kl.is_some()
    }

    /// Whether the entropies of what the policy predicts are needed, or its squared probabilities.
    pub fn needs_predictions(&self) -> bool {
        self.high_entropy_share < 1.0 || matches!(self.estimator(), Estimator::OptimalToken { .. })
    }

    /// Attempts at each task of a step: those of its group, spare ones, and the one that others are compared
    /// with.
    pub fn attempts_of_task(&self) -> usize {
        self.group_size + self.spare + usize::from(self.needs_baseline())
    }

    /// Whether a greedy attempt at each task is needed.
    pub fn needs_baseline(&self) -> bool {
        self.estimator() == Estimator::ReMax
    }

    /// Whether a critic is needed.
    pub fn needs_critic(&self) -> bool {
        self.estimator().needs_values()
    }

    /// Whether a group has no gradient where all its attempts earned the same.
    pub fn uniform_is_idle(&self) -> bool {
        let charged = self.kl.is_some_and(|kl| kl.apply_to == Charge::Reward);
        let differs = match self.estimator() {
            // Equal sums can have parts that differ.
            Estimator::Gdpo { .. } => true,
            // The same outcome is worth less to those that took more turns.
            Estimator::Turns { gamma, .. } => gamma < 1.0,
            // The end of the longest is compared with nothing.
            Estimator::OptimalToken { bare_tail, .. } => bare_tail,
            // The mean over tokens of other groups moves this one.
            Estimator::ReinforcePlusPlusBaseline { recentre, .. } => recentre,
            _ => false,
        };
        self.compares() && self.group_by != GroupBy::Step && !charged && !differs
    }

    /// Whether it matters which part of a reward was earned where.
    pub fn sees_parts(&self) -> bool {
        let whole =
            matches!(self.estimator(), Estimator::Group(_) | Estimator::ReinforcePlusPlusBaseline { .. });
        !whole || self.group_by == GroupBy::Agent
    }

    /// Whether attempts are compared with others of their group.
    pub fn compares(&self) -> bool {
        !matches!(
            self.estimator(),
            Estimator::Gae { .. } | Estimator::ReinforcePlusPlus { .. } | Estimator::ReMax
        )
    }
}

impl KlKeys {
    /// Penalty in the form that `rl` knows.
    pub fn penalty(&self) -> KlPenalty {
        let KlKeys { estimator, coefficient, importance_weighted, .. } = *self;
        KlPenalty { estimator, coefficient, importance_weighted }
    }
}
