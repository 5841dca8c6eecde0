//! Algorithms: named sets of defaults for the keys of an RL phase.

use super::*;

/// A published RL algorithm: a combination of advantage estimator, loss and normalizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// GRPO: advantages relative to the group's mean and standard deviation, PPO's clip, mean over
    /// tokens (Shao et al. 2024, as used since).
    #[default]
    Grpo,
    /// Dr. GRPO: divides neither by the standard deviation nor by the length, but by
    /// `agent.max_tokens` (Liu et al. 2025).
    DrGrpo,
    /// DAPO: GRPO with a higher upper clip, and with new groups sampled in place of zero-variance
    /// groups (Yu et al. 2025). The paper's length penalty is not included. To add it, set
    /// `overlong` with a buffer of a fifth of the limit and a factor of 1.
    Dapo,
    /// RLOO: the baseline is the mean reward of the other attempts of the group (leave-one-out;
    /// Ahmadian et al. 2024). Sums over an attempt's tokens are divided by `agent.max_tokens`. This
    /// only scales the gradient; without it, `optimizer.max_grad_norm` would clip every step.
    Rloo,
    /// REINFORCE++: REINFORCE with whitened returns and PPO's clip (Hu 2025).
    ReinforcePlusPlus,
    /// REINFORCE++ with baseline: first subtracts the group's mean reward (Hu 2025).
    ReinforcePlusPlusBaseline,
    /// OPO: the baseline is the group's mean reward weighted by length (Hao et al. 2025).
    Opo,
    /// ReMax: the baseline is the reward of a greedy attempt at the same task, which is sampled in
    /// addition to the group (Li et al. 2024).
    Remax,
    /// GPG: plain policy gradient with group baselines (Chu et al. 2025).
    Gpg,
    /// Pass@k: reinforces the best of `k` attempts by its margin over the second best (Walder and
    /// Karkhanis 2025).
    PassK,
    /// GSPO: PPO's clip on the ratio of a complete sequence (Zheng et al. 2025).
    Gspo,
    /// GMPO: geometric mean of clipped token ratios (Zhao et al. 2025).
    Gmpo,
    /// CISPO: REINFORCE weighted by clipped ratios (MiniMax 2025).
    Cispo,
    /// SAPO: a sigmoid gate in place of PPO's clip (Gao et al. 2025).
    Sapo,
    /// MiniRL: REINFORCE weighted by ratios within a trust region, with a leave-one-out baseline;
    /// normalized like `rloo`.
    Minirl,
    /// PPO: critic, generalized advantage estimation, PPO's clip (Schulman et al. 2017).
    Ppo,
}

impl Algorithm {
    /// Returns the name of the algorithm in messages and metrics.
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

    /// Returns whether the algorithm's loss uses the clip parameter with the recipe key `key`.
    pub(crate) fn uses_key(self, key: &str) -> bool {
        match self.loss(None, None, None) {
            PolicyLoss::Clip { .. } => true,
            PolicyLoss::Gspo { .. }
            | PolicyLoss::GeometricMean { .. }
            | PolicyLoss::Cispo { .. }
            | PolicyLoss::MiniRl { .. } => key != "clip_dual",
            _ => false,
        }
    }

    pub(super) fn estimator(self, k: Option<usize>) -> Estimator {
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
            Algorithm::Rloo | Algorithm::Minirl => group(Compare::LeaveOneOut, false),
            Algorithm::Opo => group(Compare::LengthWeightedMean, false),
            Algorithm::Remax => Estimator::ReMax,
            Algorithm::Gpg => group(Compare::MeanOfInformative, false),
            Algorithm::PassK => group(Compare::SecondBest { k }, true),
            Algorithm::ReinforcePlusPlus => Estimator::ReinforcePlusPlus {
                gamma: 1.0,
                counting: Counting::Exact,
                one_turn: false,
            },
            Algorithm::ReinforcePlusPlusBaseline => {
                let singleton = Singleton::Zero;
                let counting = Counting::Exact;
                Estimator::ReinforcePlusPlusBaseline { singleton, counting, recenter: false }
            }
            Algorithm::Ppo => {
                Estimator::Gae { gamma: 1.0, lambda: 0.95, whiten: Some(Counting::Exact) }
            }
        }
    }

    pub(super) fn loss(self, low: Option<f64>, high: Option<f64>, dual: Option<f64>) -> PolicyLoss {
        let bounds =
            |default_low, default_high| (low.unwrap_or(default_low), high.unwrap_or(default_high));
        let (low, high) = match self {
            Algorithm::Dapo => bounds(0.2, 0.28),
            // Bounds of the ratio of a complete sequence, of the order of magnitude in the paper.
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

    pub(super) fn normalizer(self, max_tokens: usize) -> Normalizer {
        match self {
            // Means over attempts of token means: the losses of these algorithms are derived with
            // this average.
            Algorithm::Gspo | Algorithm::Gmpo | Algorithm::Sapo => Normalizer::RolloutMean,
            // The divisor is constant, so a longer attempt has more weight. The scale is the scale
            // of a mean over tokens.
            Algorithm::DrGrpo | Algorithm::Rloo | Algorithm::Remax | Algorithm::Minirl => {
                Normalizer::RolloutSumOver { length: max_tokens as f64 }
            }
            _ => Normalizer::TokenMean,
        }
    }
}
