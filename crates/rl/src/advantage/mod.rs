//! Computes advantages: for each sampled token, the return relative to a baseline.
//!
//! An estimator receives only *action tokens*, which are the tokens that the model sampled.
//! Prompts, tool results and the template's tokens between them are not part of its input, so they
//! do not count in discounting. The caller that builds a sequence assigns the reward of an
//! observation to the action token before it, so no reward is lost.
//!
//! All statistics are over rollouts; a rollout is one attempt at one task. If a rollout has several
//! sequences (an edited history, a sub-agent), it is still one sample for every estimator, and its
//! outcome is at the end of each of its sequences.

mod credit;
mod group;
mod optimal;

use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::moments::{Counting, Whitening};

pub use credit::{gae, returns};
pub use group::{Compare, GroupBaseline, GroupStats, STD_EPSILON, Singleton};
pub use optimal::Alignment;

/// One rollout of a task, as input of an advantage estimator.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rollout {
    /// Number of the rollout's group. Rollouts with the same number are compared with each other.
    pub group: u64,
    /// Score of the rollout: the sum of its rewards, each counted once.
    pub score: f64,
    /// Components of the rollout's score, for an estimator that normalizes them separately.
    pub components: Vec<f64>,
    /// Score of another policy (usually the greedy one) for the same task, for estimators that use
    /// it as a baseline. `None` if there is no such score.
    pub rival: Option<f64>,
    /// Upper bound of the rollout's advantage, for example 0 for a correct answer in a wrong
    /// format. `None` sets no bound.
    pub ceiling: Option<f64>,
    /// Sequences of the rollout that have trained tokens.
    pub sequences: Vec<Sequence>,
}

/// One sequence of a rollout. Lists have one entry per action token unless stated otherwise.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sequence {
    /// Number of action tokens in each turn, in order. The numbers sum to the length of the
    /// sequence.
    pub turns: Vec<usize>,
    /// Number of earlier turns of the sequence that are trained as part of another sequence of the
    /// rollout. `turns` does not contain them.
    pub turns_before: usize,
    /// Reward after each token: the token's immediate reward, and at the last token also the
    /// outcome.
    pub rewards: Vec<f64>,
    /// A critic's value of the state before each token, for [`Estimator::Gae`]; otherwise empty.
    pub values: Vec<f64>,
    /// A critic's value of the state after the last token, for [`Estimator::Gae`], if the sequence
    /// was truncated there. `None` if the sequence ended by itself.
    pub truncation_value: Option<f64>,
    /// Log-probability of each token under the policy that sampled it, for
    /// [`Estimator::OptimalToken`]; otherwise empty.
    pub behavior: Vec<f64>,
    /// Σ π² over the vocabulary before each token, for [`Estimator::OptimalToken`]; otherwise
    /// empty.
    pub concentration: Vec<f64>,
    /// Index of each token among the tokens after the prompt, for [`Alignment::Position`];
    /// otherwise empty.
    pub positions: Vec<usize>,
    /// Whether each token is masked: its rollout is part of the baseline, but the token is not
    /// trained, and whitening ignores the token. Empty if no token is masked.
    pub masked: Vec<bool>,
}

impl Sequence {
    /// Returns the number of action tokens in the sequence.
    pub fn len(&self) -> usize {
        self.rewards.len()
    }

    /// Returns whether the sequence has no action tokens.
    pub fn is_empty(&self) -> bool {
        self.rewards.is_empty()
    }

    /// Returns whether the action token at index `token` is trained, that is, not masked.
    fn is_trained(&self, token: usize) -> bool {
        !self.masked.get(token).copied().unwrap_or(false)
    }

    /// Returns the range of action tokens of each turn, in order.
    fn turn_ranges(&self) -> impl DoubleEndedIterator<Item = std::ops::Range<usize>> + '_ {
        let mut end = 0;
        let ends: Vec<_> = self
            .turns
            .iter()
            .map(|len| {
                end += len;
                end
            })
            .collect();
        ends.into_iter().zip(&self.turns).map(|(end, len)| end - len..end)
    }
}

/// Advantages of the action tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SequenceAdvantages {
    /// Advantage of every action token of the sequence.
    pub advantages: Vec<f64>,
    /// Targets of a critic's values, for estimators that use a critic; otherwise empty.
    pub returns: Vec<f64>,
}

impl SequenceAdvantages {
    /// Creates advantages for `len` tokens that all equal `advantage`, without returns.
    fn constant(len: usize, advantage: f64) -> Self {
        SequenceAdvantages { advantages: vec![advantage; len], returns: Vec::new() }
    }
}

/// Estimator that computes the advantages of action tokens from rewards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Estimator {
    /// The advantage is the rollout's score, compared with the group's baseline. All tokens have
    /// the same advantage.
    Group(GroupBaseline),
    /// GRPO is applied to each component of the score. The advantages are summed with these
    /// weights, and divided by the standard deviation over the step's tokens (GDPO, Liu et al.
    /// 2026).
    Gdpo {
        /// Weight of each component of the score.
        weights: Vec<f64>,
        /// Baseline of each component of the score. Default: the mean, divided by the standard
        /// deviation.
        #[serde(default = "GroupBaseline::scaled")]
        baseline: GroupBaseline,
        /// Denominator of the means over tokens.
        #[serde(default)]
        counting: Counting,
        /// Whether the mean over tokens is subtracted from the advantages, too, as for
        /// [`Estimator::ReinforcePlusPlusBaseline`].
        #[serde(default)]
        #[serde(rename(serialize = "recentre"), alias = "recentre")]
        recenter: bool,
    },
    /// The advantage is the return from each token on, whitened over the step's tokens
    /// (REINFORCE++, Hu 2025).
    ReinforcePlusPlus {
        /// Discount factor per action token, in 0..=1.
        gamma: f64,
        /// Denominator of the means over tokens.
        #[serde(default)]
        counting: Counting,
        /// Whether the rewards of later turns are ignored, as in verl until 2026. Only the last
        /// turn then learns from the outcome.
        #[serde(default)]
        one_turn: bool,
    },
    /// The advantage is the outcome minus the group mean, divided by the standard deviation over
    /// the step's tokens (REINFORCE++-baseline, Hu 2025). Groups with equal outcomes count in the
    /// standard deviation, as in the paper, and have advantages of exactly 0.
    ReinforcePlusPlusBaseline {
        /// Advantage of a rollout that is the only one of its group.
        #[serde(default)]
        singleton: Singleton,
        /// Denominator of the means over tokens.
        #[serde(default)]
        counting: Counting,
        /// Whether the mean over tokens is subtracted from the advantages, too, as in verl. The
        /// mean over rollouts, which are compared within groups, is 0 already. The mean over tokens
        /// is not 0, and shifts the advantages of zero-variance groups by an amount that depends on
        /// the length of other groups. For comparisons only.
        #[serde(default)]
        #[serde(rename(serialize = "recentre"), alias = "recentre")]
        recenter: bool,
    },
    /// Generalized advantage estimation with a critic (Schulman et al. 2016).
    Gae {
        /// Discount factor per action token, in 0..=1.
        gamma: f64,
        /// Decay λ of later temporal differences, in 0..=1.
        lambda: f64,
        /// Denominator of means if advantages are whitened over the step's tokens. `None` disables
        /// the whitening.
        #[serde(default)]
        whiten: Option<Counting>,
    },
    /// The advantage is the return from each turn on, compared with the returns of the group's
    /// other rollouts that reached the same turn. After the last turn that another rollout reached,
    /// a rollout keeps the advantage of that turn.
    Turns {
        /// Discount factor per turn, in 0..=1.
        gamma: f64,
        /// Whether the advantage is divided by the standard deviation of the returns from the same
        /// turn on.
        #[serde(default)]
        scale_by_std: bool,
    },
    /// The advantage is the return from each token on, minus the score of another policy (ReMax, Li
    /// et al. 2024).
    ReMax,
    /// The advantage is the return from each token on, minus the group's baseline with minimum
    /// variance at each token.
    OptimalToken {
        /// Rule that determines which tokens of a group's sequences are compared with each other.
        #[serde(default)]
        alignment: Alignment,
        /// Whether tokens after the end of all other sequences of the group have no baseline.
        #[serde(default = "default_true")]
        bare_tail: bool,
    },
}

fn default_true() -> bool {
    true
}

impl Estimator {
    /// Returns whether the estimator needs a critic's values.
    pub fn needs_values(&self) -> bool {
        matches!(self, Estimator::Gae { .. })
    }

    /// Checks the parameters of the estimator.
    ///
    /// # Errors
    /// Returns an error that names the first parameter out of range.
    pub fn check(&self) -> Result<(), RlError> {
        match self {
            Estimator::Group(baseline) => baseline.check(),
            Estimator::Gdpo { weights, baseline, .. } => {
                baseline.check()?;
                let weight = weights.iter().find(|weight| !weight.is_finite());
                weight.map_or(Ok(()), |weight| {
                    RlError::check_range(false, "weight of a component", *weight, "finite")
                })
            }
            Estimator::ReinforcePlusPlus { gamma, .. } | Estimator::Turns { gamma, .. } => {
                RlError::check_fraction("gamma of the advantage", *gamma)
            }
            Estimator::Gae { gamma, lambda, .. } => {
                RlError::check_fraction("gamma of the advantage", *gamma)?;
                RlError::check_fraction("lambda of the advantage", *lambda)
            }
            Estimator::ReinforcePlusPlusBaseline { .. }
            | Estimator::ReMax
            | Estimator::OptimalToken { .. } => Ok(()),
        }
    }

    /// Computes the advantages of the rollouts of a step: for each rollout, one entry per sequence.
    ///
    /// # Errors
    /// Returns an error if a number is not finite, or if a rollout lacks values that the estimator
    /// needs.
    pub fn advantages(
        &self,
        rollouts: &[Rollout],
    ) -> Result<Vec<Vec<SequenceAdvantages>>, RlError> {
        check_rollouts(rollouts)?;
        match self {
            Estimator::Group(baseline) => {
                Ok(broadcast_advantages(rollouts, &outcome_advantages(baseline, rollouts)?))
            }
            Estimator::Gdpo { weights, baseline, counting, recenter } => {
                let mut sums = vec![0.0; rollouts.len()];
                for (part, weight) in weights.iter().enumerate() {
                    let parts: Vec<Rollout> = rollouts
                        .iter()
                        .map(|rollout| {
                            let needed = weights.len();
                            let found = rollout.components.len();
                            if needed != found {
                                return Err(RlError::Components { needed, found });
                            }
                            Ok(Rollout { score: rollout.components[part], ..rollout.clone() })
                        })
                        .collect::<Result<_, RlError>>()?;
                    for (sum, advantage) in
                        sums.iter_mut().zip(outcome_advantages(baseline, &parts)?)
                    {
                        *sum += weight * advantage;
                    }
                }
                Ok(whiten_advantages(
                    rollouts,
                    broadcast_advantages(rollouts, &sums),
                    *counting,
                    *recenter,
                ))
            }
            Estimator::ReinforcePlusPlus { gamma, counting, one_turn } => {
                let raw = map_sequences(rollouts, |sequence| {
                    credit::token_returns(sequence, *gamma, *one_turn)
                });
                Ok(whiten_advantages(rollouts, raw, *counting, true))
            }
            Estimator::ReinforcePlusPlusBaseline { singleton, counting, recenter } => {
                let baseline = GroupBaseline { singleton: *singleton, ..GroupBaseline::default() };
                let raw = broadcast_advantages(rollouts, &outcome_advantages(&baseline, rollouts)?);
                Ok(whiten_advantages(rollouts, raw, *counting, *recenter))
            }
            Estimator::Gae { gamma, lambda, whiten } => {
                if let Some(sequence) =
                    rollouts.iter().flat_map(|r| &r.sequences).find(|p| p.values.len() != p.len())
                {
                    return Err(RlError::Missing {
                        what: "values",
                        needed: sequence.len(),
                        found: sequence.values.len(),
                    });
                }
                let raw = map_sequences(rollouts, |sequence| {
                    gae(
                        &sequence.rewards,
                        &sequence.values,
                        sequence.truncation_value.unwrap_or(0.0),
                        *gamma,
                        *lambda,
                    )
                });
                Ok(match whiten {
                    Some(counting) => whiten_advantages(rollouts, raw, *counting, true),
                    None => raw,
                })
            }
            Estimator::Turns { gamma, scale_by_std } => {
                Ok(credit::turn_advantages(rollouts, *gamma, *scale_by_std))
            }
            Estimator::ReMax => rollouts.iter().map(credit::returns_minus_rival).collect(),
            Estimator::OptimalToken { alignment, bare_tail } => {
                optimal::optimal_baseline_advantages(rollouts, *alignment, *bare_tail)
            }
        }
    }
}

/// Computes one advantage per rollout, group by group.
fn outcome_advantages(baseline: &GroupBaseline, rollouts: &[Rollout]) -> Result<Vec<f64>, RlError> {
    let mut advantages = vec![0.0; rollouts.len()];
    // Number of rollouts in groups with a nonzero advantage.
    let mut informative = 0;
    for group_indices in group_rollouts(rollouts) {
        let group_rollouts: Vec<&Rollout> = group_indices.iter().map(|i| &rollouts[*i]).collect();
        let group_advantages = baseline.group_advantages(&group_rollouts)?;
        informative +=
            if group_advantages.iter().any(|a| *a != 0.0) { group_indices.len() } else { 0 };
        for (i, advantage) in group_indices.iter().zip(group_advantages) {
            advantages[*i] = advantage;
        }
    }
    let counted = match baseline.compare {
        Compare::MeanOfInformative => informative,
        Compare::MeanOfNonzero => rollouts.iter().filter(|rollout| rollout.score != 0.0).count(),
        _ => return Ok(advantages),
    };
    let scale = rollouts.len() as f64 / counted.max(1) as f64;
    advantages.iter_mut().for_each(|advantage| *advantage *= scale);
    Ok(advantages)
}

/// Returns the indices of the rollouts of each group. Groups are in the order of their first
/// rollouts.
fn group_rollouts(rollouts: &[Rollout]) -> Vec<Vec<usize>> {
    let mut groups: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut at = std::collections::HashMap::new();
    for (i, rollout) in rollouts.iter().enumerate() {
        let position = *at.entry(rollout.group).or_insert_with(|| {
            groups.push((rollout.group, Vec::new()));
            groups.len() - 1
        });
        groups[position].1.push(i);
    }
    groups.into_iter().map(|(_, group_indices)| group_indices).collect()
}

/// Creates advantages in which every token has the advantage of its rollout.
fn broadcast_advantages(rollouts: &[Rollout], advantages: &[f64]) -> Vec<Vec<SequenceAdvantages>> {
    rollouts
        .iter()
        .zip(advantages)
        .map(|(rollout, advantage)| {
            let sequences = rollout.sequences.iter();
            sequences.map(|s| SequenceAdvantages::constant(s.len(), *advantage)).collect()
        })
        .collect()
}

fn map_sequences(
    rollouts: &[Rollout],
    estimate: impl Fn(&Sequence) -> SequenceAdvantages,
) -> Vec<Vec<SequenceAdvantages>> {
    rollouts.iter().map(|rollout| rollout.sequences.iter().map(&estimate).collect()).collect()
}

/// Whitens advantages by the mean and standard deviation of trained tokens; masked tokens are
/// mapped, too. Without `center`, advantages are only divided by the standard deviation.
fn whiten_advantages(
    rollouts: &[Rollout],
    mut all: Vec<Vec<SequenceAdvantages>>,
    counting: Counting,
    center: bool,
) -> Vec<Vec<SequenceAdvantages>> {
    let sequences = rollouts.iter().flat_map(|rollout| &rollout.sequences);
    let trained = sequences.zip(all.iter().flatten()).flat_map(|(sequence, found)| {
        found
            .advantages
            .iter()
            .enumerate()
            .filter(|(token, _)| sequence.is_trained(*token))
            .map(|(_, a)| *a)
    });
    let whitening = Whitening::from_values(&trained.collect::<Vec<_>>(), counting);
    let whitening = if center { whitening } else { whitening.without_mean() };
    let advantages = all.iter_mut().flatten().flat_map(|sequence| sequence.advantages.iter_mut());
    advantages.for_each(|advantage| *advantage = whitening.apply(*advantage));
    all
}

fn check_rollouts(rollouts: &[Rollout]) -> Result<(), RlError> {
    for (index, rollout) in rollouts.iter().enumerate() {
        let numbers = [rollout.score].into_iter().chain(rollout.components.iter().copied());
        let numbers = numbers.chain(rollout.rival).chain(rollout.ceiling);
        let sequence_numbers = rollout.sequences.iter().flat_map(|sequence| {
            let numbers = sequence.rewards.iter().chain(&sequence.values).chain(&sequence.behavior);
            numbers.chain(&sequence.concentration).chain(&sequence.truncation_value).copied()
        });
        for value in numbers.chain(sequence_numbers) {
            if !value.is_finite() {
                return Err(RlError::Score { index, value });
            }
        }
        for sequence in &rollout.sequences {
            let needed = sequence.len();
            let found = sequence.turns.iter().sum();
            if needed != found {
                return Err(RlError::Missing { what: "tokens of its turns", needed, found });
            }
            let found = sequence.masked.len();
            if found != 0 && needed != found {
                return Err(RlError::Missing { what: "masks", needed, found });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
