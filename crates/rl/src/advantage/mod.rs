//! Advantages: how much better than expected each sampled token turned out.
//!
//! An estimator sees *action tokens* alone: what the model sampled. Prompts, tool results and template
//! boundaries between them do not exist here, so they cost no discount and no reward can get lost on one:
//! whoever describes a path attaches a reward that an observation earned to the action token before it.
//!
//! The unit of all statistics is the rollout: one attempt at one task. A rollout that was cut into several
//! paths (an edited history, a sub-agent) is one sample for every estimator, and its outcome belongs to the
//! end of each of its paths.

mod credit;
mod group;
mod optimal;

use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::moments::{Counting, Whitening};

pub use credit::{gae, returns};
pub use group::{Compare, GroupBaseline, GroupStats, STD_EPSILON, Singleton};
pub use optimal::Alignment;

/// One rollout, to an estimator.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rollout {
    /// Whom it is compared with: rollouts of equal numbers.
    pub group: u64,
    /// Worth of all of it: the sum of its rewards, each counted once.
    pub score: f64,
    /// The score by parts, for an estimator that normalises them one by one.
    pub components: Vec<f64>,
    /// Score of another policy (usually the greedy one) at the task, for estimators that compare with it.
    pub rival: Option<f64>,
    /// The most that its advantage may be: 0 for an answer that is right but badly written, say.
    pub ceiling: Option<f64>,
    /// Paths with trained tokens.
    pub paths: Vec<Path>,
}

/// One path of a rollout, an entry per action token unless said otherwise.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Path {
    /// How many action tokens each turn has, in order; they sum to the length of the path.
    pub turns: Vec<usize>,
    /// How many turns came before these on the path, and belong to another path of the rollout.
    pub turns_before: usize,
    /// Reward after each token: what it earned at once, and at the last one the outcome.
    pub rewards: Vec<f64>,
    /// A critic's value of the state before each token, for [`Estimator::Gae`]; else empty.
    pub values: Vec<f64>,
    /// A critic's value of the state after the last token, for [`Estimator::Gae`], where the path was cut
    /// there and might have gone on; `None` where it ended.
    pub cut: Option<f64>,
    /// Log-probability under the policy that drew each token, for [`Estimator::OptimalToken`]; else empty.
    pub behaviour: Vec<f64>,
    /// Σ π² over the vocabulary before each token, for [`Estimator::OptimalToken`]; else empty.
    pub concentration: Vec<f64>,
    /// Place of each token among the tokens after the prompt, for [`Alignment::Position`]; else empty.
    pub positions: Vec<usize>,
    /// Whether each token is masked: others are compared with it, but it is not trained, and whitening does
    /// not count it. Empty where none is.
    pub masked: Vec<bool>,
}

impl Path {
    /// Action tokens.
    pub fn len(&self) -> usize {
        self.rewards.len()
    }

    /// Whether nothing of it is trained.
    pub fn is_empty(&self) -> bool {
        self.rewards.is_empty()
    }

    /// Whether a token is trained.
    fn trains(&self, token: usize) -> bool {
        !self.masked.get(token).copied().unwrap_or(false)
    }

    /// (first, past the last) action token of each turn.
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

/// Advantages of one path.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PathAdvantages {
    /// Advantage of every action token.
    pub advantages: Vec<f64>,
    /// Targets of a critic's values, for estimators that use one; else empty.
    pub returns: Vec<f64>,
}

/// How rewards become advantages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Estimator {
    /// The outcome against the others of its group, the same for every token.
    Group(GroupBaseline),
    /// GRPO for each part of the score, summed with these weights and divided by the deviation over the
    /// step's tokens (GDPO, Liu et al. 2026).
    Gdpo {
        /// Weight of every component.
        weights: Vec<f64>,
        /// How each component is compared: over its deviation, where this is not given.
        #[serde(default = "GroupBaseline::scaled")]
        baseline: GroupBaseline,
        /// Denominator of means.
        #[serde(default)]
        counting: Counting,
        /// Subtracts the mean over tokens as well, as for [`Estimator::ReinforcePlusPlusBaseline`].
        #[serde(default)]
        recentre: bool,
    },
    /// Rewards to come, whitened over the step's tokens (REINFORCE++, Hu 2025).
    ReinforcePlusPlus {
        /// Discount for each action token.
        gamma: f64,
        /// Denominator of means.
        #[serde(default)]
        counting: Counting,
        /// Forgets the rewards of later turns, as verl did until 2026: only the last turn learns from the
        /// outcome.
        #[serde(default)]
        one_turn: bool,
    },
    /// Outcome less group mean, over the deviation of the step's tokens (REINFORCE++-baseline, Hu 2025).
    /// Groups of equal outcomes count in the deviation, as they do for its authors, and get exact zeros.
    ReinforcePlusPlusBaseline {
        /// Advantage of a rollout that is alone in its group.
        #[serde(default)]
        singleton: Singleton,
        /// Denominator of means.
        #[serde(default)]
        counting: Counting,
        /// Subtracts the mean over tokens as well, as verl does. Over rollouts, which are compared by groups
        /// before, that mean is 0 already; over tokens it is not, and moves groups that teach nothing by how
        /// long the others are. For comparisons only.
        #[serde(default)]
        recentre: bool,
    },
    /// Generalised advantage estimation with a critic (Schulman et al. 2016).
    Gae {
        /// Discount for each action token.
        gamma: f64,
        /// Decay of later temporal differences.
        lambda: f64,
        /// Where given, advantages are whitened over the step's tokens.
        #[serde(default)]
        whiten: Option<Counting>,
    },
    /// Rewards to come by turns, against those of the others of the group that got to the same turn. A
    /// rollout that no other followed so far keeps the advantage of the last turn at which it had company.
    Turns {
        /// Discount for each turn.
        gamma: f64,
        /// Whether to divide by the deviation of the returns from the same turn on.
        #[serde(default)]
        scale_by_std: bool,
    },
    /// Rewards to come, less what the rival got (ReMax, Li et al. 2024).
    ReMax,
    /// Rewards to come, less the group's baseline of least variance at each token.
    OptimalToken {
        /// Which tokens of a group are compared.
        #[serde(default)]
        alignment: Alignment,
        /// Tokens past the end of all others of the group have no baseline.
        #[serde(default = "yes")]
        bare_tail: bool,
    },
}

fn yes() -> bool {
    true
}

impl Estimator {
    /// Whether it needs a critic's values.
    pub fn needs_values(&self) -> bool {
        matches!(self, Estimator::Gae { .. })
    }

    /// Checks its parameters.
    ///
    /// # Errors
    /// Names the first that is out of range.
    pub fn check(&self) -> Result<(), RlError> {
        match self {
            Estimator::Group(baseline) => baseline.check(),
            Estimator::Gdpo { weights, baseline, .. } => {
                baseline.check()?;
                let weight = weights.iter().find(|weight| !weight.is_finite());
                weight.map_or(Ok(()), |weight| {
                    RlError::range(false, "weight of a component", *weight, "finite")
                })
            }
            Estimator::ReinforcePlusPlus { gamma, .. } | Estimator::Turns { gamma, .. } => {
                RlError::share("gamma of the advantage", *gamma)
            }
            Estimator::Gae { gamma, lambda, .. } => {
                RlError::share("gamma of the advantage", *gamma)?;
                RlError::share("lambda of the advantage", *lambda)
            }
            Estimator::ReinforcePlusPlusBaseline { .. }
            | Estimator::ReMax
            | Estimator::OptimalToken { .. } => Ok(()),
        }
    }

    /// Advantages of the rollouts of a step: for each rollout, one entry for each of its paths.
    ///
    /// # Errors
    /// When a number is not finite, or a rollout lacks what the estimator needs.
    pub fn advantages(&self, rollouts: &[Rollout]) -> Result<Vec<Vec<PathAdvantages>>, RlError> {
        check(rollouts)?;
        match self {
            Estimator::Group(baseline) => Ok(broadcast(rollouts, &outcomes(baseline, rollouts)?)),
            Estimator::Gdpo { weights, baseline, counting, recentre } => {
                let mut sums = vec![0.0; rollouts.len()];
                for (part, weight) in weights.iter().enumerate() {
                    let of_part = |rollout: &Rollout| {
                        let (needed, found) = (weights.len(), rollout.components.len());
                        if needed != found {
                            return Err(RlError::Components { needed, found });
                        }
                        Ok(Rollout { score: rollout.components[part], ..rollout.clone() })
                    };
                    let parts = rollouts.iter().map(of_part).collect::<Result<Vec<_>, RlError>>()?;
                    for (sum, advantage) in sums.iter_mut().zip(outcomes(baseline, &parts)?) {
                        *sum += weight * advantage;
                    }
                }
                Ok(whitened(rollouts, broadcast(rollouts, &sums), *counting, *recentre))
            }
            Estimator::ReinforcePlusPlus { gamma, counting, one_turn } => {
                let raw = each_path(rollouts, |path| credit::token_returns(path, *gamma, *one_turn));
                Ok(whitened(rollouts, raw, *counting, true))
            }
            Estimator::ReinforcePlusPlusBaseline { singleton, counting, recentre } => {
                let baseline = GroupBaseline { singleton: *singleton, ..GroupBaseline::default() };
                let raw = broadcast(rollouts, &outcomes(&baseline, rollouts)?);
                Ok(whitened(rollouts, raw, *counting, *recentre))
            }
            Estimator::Gae { gamma, lambda, whiten } => {
                if let Some(path) = rollouts.iter().flat_map(|r| &r.paths).find(|p| p.values.len() != p.len())
                {
                    return Err(RlError::Missing {
                        what: "values",
                        needed: path.len(),
                        found: path.values.len(),
                    });
                }
                let of_path =
                    |path: &Path| gae(&path.rewards, &path.values, path.cut.unwrap_or(0.0), *gamma, *lambda);
                let raw = each_path(rollouts, of_path);
                Ok(match whiten {
                    Some(counting) => whitened(rollouts, raw, *counting, true),
                    None => raw,
                })
            }
            Estimator::Turns { gamma, scale_by_std } => Ok(credit::by_turns(rollouts, *gamma, *scale_by_std)),
            Estimator::ReMax => rollouts.iter().map(credit::less_rival).collect(),
            Estimator::OptimalToken { alignment, bare_tail } => {
                optimal::advantages(rollouts, *alignment, *bare_tail)
            }
        }
    }
}

/// One advantage for each rollout, by groups.
fn outcomes(baseline: &GroupBaseline, rollouts: &[Rollout]) -> Result<Vec<f64>, RlError> {
    let mut advantages = vec![0.0; rollouts.len()];
    // Rollouts of groups that have a gradient.
    let mut informative = 0;
    for members in groups(rollouts) {
        let members_of: Vec<&Rollout> = members.iter().map(|i| &rollouts[*i]).collect();
        let of_group = baseline.of_group(&members_of)?;
        informative += if of_group.iter().any(|a| *a != 0.0) { members.len() } else { 0 };
        for (i, advantage) in members.iter().zip(of_group) {
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

/// Places of the rollouts of each group, groups in the order in which they first come.
fn groups(rollouts: &[Rollout]) -> Vec<Vec<usize>> {
    let mut groups: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut at = std::collections::HashMap::new();
    for (i, rollout) in rollouts.iter().enumerate() {
        let place = *at.entry(rollout.group).or_insert_with(|| {
            groups.push((rollout.group, Vec::new()));
            groups.len() - 1
        });
        groups[place].1.push(i);
    }
    groups.into_iter().map(|(_, members)| members).collect()
}

/// Gives every token of a rollout its advantage.
fn broadcast(rollouts: &[Rollout], advantages: &[f64]) -> Vec<Vec<PathAdvantages>> {
    let path =
        |path: &Path, advantage| PathAdvantages { advantages: vec![advantage; path.len()], returns: vec![] };
    let rollout =
        |(rollout, advantage): (&Rollout, &f64)| rollout.paths.iter().map(|p| path(p, *advantage)).collect();
    rollouts.iter().zip(advantages).map(rollout).collect()
}

fn each_path(rollouts: &[Rollout], estimate: impl Fn(&Path) -> PathAdvantages) -> Vec<Vec<PathAdvantages>> {
    rollouts.iter().map(|rollout| rollout.paths.iter().map(&estimate).collect()).collect()
}

/// Whitens by the tokens that are trained; masked ones go along. Without `centre` advantages are only divided
/// by the deviation.
fn whitened(
    rollouts: &[Rollout],
    mut all: Vec<Vec<PathAdvantages>>,
    counting: Counting,
    centre: bool,
) -> Vec<Vec<PathAdvantages>> {
    let paths = rollouts.iter().flat_map(|rollout| &rollout.paths);
    let trained = paths.zip(all.iter().flatten()).flat_map(|(path, found)| {
        found.advantages.iter().enumerate().filter(|(token, _)| path.trains(*token)).map(|(_, a)| *a)
    });
    let by = Whitening::of(&trained.collect::<Vec<_>>(), counting);
    let by = if centre { by } else { by.without_mean() };
    let advantages = all.iter_mut().flatten().flat_map(|path| path.advantages.iter_mut());
    advantages.for_each(|advantage| *advantage = by.apply(*advantage));
    all
}

fn check(rollouts: &[Rollout]) -> Result<(), RlError> {
    for (index, rollout) in rollouts.iter().enumerate() {
        let numbers = [rollout.score].into_iter().chain(rollout.components.iter().copied());
        let numbers = numbers.chain(rollout.rival).chain(rollout.ceiling);
        let of_path = |path: &'_ Path| {
            let all = path.rewards.iter().chain(&path.values).chain(&path.behaviour);
            all.chain(&path.concentration).chain(&path.cut).copied().collect::<Vec<f64>>()
        };
        for value in numbers.chain(rollout.paths.iter().flat_map(of_path)) {
            if !value.is_finite() {
                return Err(RlError::Score { index, value });
            }
        }
        for path in &rollout.paths {
            let (needed, found) = (path.len(), path.turns.iter().sum());
            if needed != found {
                return Err(RlError::Missing { what: "tokens of its turns", needed, found });
            }
            let found = path.masked.len();
            if found != 0 && needed != found {
                return Err(RlError::Missing { what: "masks", needed, found });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
