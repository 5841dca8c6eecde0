//! Normalizers as explicit per-token weights, so that a loss is a plain sum, independent of
//! packing.
//!
//! The input has the number of trained tokens and the group of each rollout of a step. The result
//! is one weight per rollout, for each of its tokens. Denominators count rollouts, not the parts
//! (sequences, micro-batches) into which a rollout is split. Rollouts without trained tokens have
//! no loss and do not count.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::moments::Counting;

/// Number of trained tokens of a rollout, and the rollout's group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RolloutTokens {
    /// Number of the rollout's group. Rollouts of a group have the same number.
    pub group: u64,
    /// Number of trained tokens, over all sequences of the rollout.
    pub tokens: u64,
}

/// Normalizer that distributes a step's loss over rollouts and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Normalizer {
    /// The loss is the mean over the tokens of the step (DAPO, Yu et al. 2025, equation 8): long
    /// rollouts have larger weights.
    #[default]
    TokenMean,
    /// The loss is the sum over the tokens of the step.
    TokenSum,
    /// The loss is the mean over rollouts of the sum over their tokens: the unbiased policy
    /// gradient of an episode.
    RolloutSum,
    /// The loss is the mean over rollouts of the mean over their tokens (GRPO, Shao et al. 2024,
    /// equation 3). All rollouts have equal weights, so a token of a long rollout has a smaller
    /// weight.
    RolloutMean,
    /// The loss is the mean over rollouts of the sum over their tokens, divided by a constant
    /// (Dr.GRPO, Liu et al. 2025): no length bias, with the scale of a mean.
    RolloutSumOver {
        /// The constant by which the sums are divided, usually the maximum completion length in
        /// tokens. Greater than 0, and its reciprocal must be positive and finite in single
        /// precision, the type of a token's weight.
        length: f64,
    },
    /// The loss is the mean over groups of the mean over the tokens of the group: all tasks have
    /// equal weights, independent of the number and length of their rollouts.
    GroupTokenMean,
    /// The loss is the mean over groups of the mean over rollouts of the mean over tokens.
    GroupRolloutMean,
}

impl Normalizer {
    /// Checks the parameters of the normalizer.
    ///
    /// # Errors
    /// Returns an error if the length is not greater than 0, or if it is so small or large that
    /// weights are infinite or 0.
    pub fn check(&self) -> Result<(), RlError> {
        let Normalizer::RolloutSumOver { length } = *self else { return Ok(()) };
        let name = "length of the normalizer";
        RlError::check_positive(name, length)?;
        let weight = length.recip() as f32;
        let range = "in a range where 1 / length is finite and greater than 0 in single precision";
        RlError::check_range(weight > 0.0 && weight.is_finite(), name, length, range)
    }

    /// Returns the weight of each trained token of each rollout, in the order of the input. The
    /// weight is 0 for a rollout without trained tokens.
    pub fn weights(&self, rollouts: &[RolloutTokens]) -> Vec<f64> {
        self.weights_counted(rollouts, Counting::Exact)
    }

    /// Returns the weights of [`Normalizer::weights`], with a choice of the denominator of means
    /// over a rollout's tokens.
    pub fn weights_counted(&self, rollouts: &[RolloutTokens], counting: Counting) -> Vec<f64> {
        let mut total = 0u64;
        let mut counted = 0u64;
        // Number of tokens and rollouts of each group.
        let mut groups: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for rollout in rollouts.iter().filter(|r| r.tokens > 0) {
            total += rollout.tokens;
            counted += 1;
            let group = groups.entry(rollout.group).or_default();
            group.0 += rollout.tokens;
            group.1 += 1;
        }
        let each = |rollout: &RolloutTokens| {
            let (group_tokens, group_rollouts) = *groups.get(&rollout.group)?;
            if rollout.tokens == 0 {
                return None;
            }
            let tokens = counting.denominator(rollout.tokens as f64);
            Some(match *self {
                Normalizer::TokenSum => 1.0,
                Normalizer::TokenMean => total as f64,
                Normalizer::RolloutSum => counted as f64,
                Normalizer::RolloutMean => counted as f64 * tokens,
                Normalizer::RolloutSumOver { length } => counted as f64 * length,
                Normalizer::GroupTokenMean => groups.len() as f64 * group_tokens as f64,
                Normalizer::GroupRolloutMean => {
                    groups.len() as f64 * group_rollouts as f64 * tokens
                }
            })
        };
        rollouts.iter().map(|r| each(r).map_or(0.0, f64::recip)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Normalizer; 7] = [
        Normalizer::TokenSum,
        Normalizer::TokenMean,
        Normalizer::RolloutSum,
        Normalizer::RolloutMean,
        Normalizer::RolloutSumOver { length: 10.0 },
        Normalizer::GroupTokenMean,
        Normalizer::GroupRolloutMean,
    ];

    #[test]
    fn group_normalizers_weight_groups_equally() {
        let rollouts = [(5, 2), (9, 4), (9, 0), (9, 12)]
            .map(|(group, tokens)| RolloutTokens { group, tokens });
        let weights = Normalizer::GroupTokenMean.weights(&rollouts);
        assert_eq!(weights, [1.0 / 4.0, 1.0 / 32.0, 0.0, 1.0 / 32.0]);
        let weights = Normalizer::GroupRolloutMean.weights(&rollouts);
        assert_eq!(weights, [1.0 / 4.0, 1.0 / 16.0, 0.0, 1.0 / 48.0]);
        for normalizer in ALL {
            assert_eq!(normalizer.weights(&[RolloutTokens { group: 1, tokens: 0 }]), [0.0]);
            assert!(normalizer.weights(&[]).is_empty());
        }
    }

    #[test]
    fn normalizer_check_rejects_nonpositive_length() {
        for normalizer in ALL {
            assert_eq!(normalizer.check(), Ok(()));
        }
        for length in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-39, 1e300] {
            let found = Normalizer::RolloutSumOver { length }.check();
            assert!(matches!(found, Err(RlError::Parameter { .. })), "{length}: {found:?}");
        }
    }

    proptest! {
        /// The weights of all tokens of a mean sum to 1.
        #[test]
        fn mean_weights_sum_to_one(counts in prop::collection::vec((0u64..4, 0u64..50), 1..20)) {
            let rollouts: Vec<_> =
                counts.iter().map(|&(group, tokens)| RolloutTokens { group, tokens }).collect();
            prop_assume!(rollouts.iter().any(|r| r.tokens > 0));
            for normalizer in [
                Normalizer::TokenMean,
                Normalizer::RolloutMean,
                Normalizer::GroupTokenMean,
                Normalizer::GroupRolloutMean,
            ] {
                let weights = normalizer.weights(&rollouts);
                let sum: f64 = weights.iter().zip(&rollouts).map(|(w, r)| w * r.tokens as f64).sum();
                prop_assert!((sum - 1.0).abs() < 1e-12, "{:?}: {}", normalizer, sum);
            }
        }
    }
}
