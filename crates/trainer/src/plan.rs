//! From attempts and their rewards to the plan of a step: advantages, weights, updates, micro-batches.
//!
//! Guarantees: a plan is a pure function of the attempts and the recipe. All normalisers are in the weights, so how an
//! update is cut into micro-batches changes nothing but the order of sums. Denominators count rollouts, not paths.

use dressage_rl::{GroupBaseline, Normaliser, RolloutTokens};
use dressage_store::{Attempt, AttemptKey, PlannedPath, StepPlan, Update};
use dressage_tree::{PathInput, Trajectory, TreeBatch};

use crate::TrainerError;
use crate::batch::{TrainedPath, path_input, trained_paths};
use crate::recipe::GrpoKeys;

/// An attempt on its way into a plan.
struct Rollout<'a> {
    key: AttemptKey,
    trajectory: &'a Trajectory,
    paths: Vec<TrainedPath>,
    advantage: f32,
}

impl<'a> Rollout<'a> {
    fn new(key: AttemptKey, trajectory: &'a Trajectory, advantage: f32) -> Self {
        Rollout { key, trajectory, paths: trained_paths(trajectory), advantage }
    }

    fn tokens(&self) -> u64 {
        self.paths.iter().map(|path| path.tokens).sum()
    }
}

/// Advantages of a group's attempts, `None` for those left out.
fn advantages(attempts: &[Attempt], keys: &GrpoKeys) -> Result<Vec<Option<f32>>, TrainerError> {
    let rewards: Vec<f64> = attempts.iter().filter_map(|attempt| attempt.reward).collect();
    let uniform = rewards.windows(2).all(|pair| pair[0] == pair[1]);
    if keys.drop_uniform_groups && uniform {
        return Ok(vec![None; attempts.len()]);
    }
    let baseline = GroupBaseline { scale_by_std: keys.scale_by_std, ..GroupBaseline::default() };
    let mut advantages = baseline.advantages(&rewards)?.into_iter();
    Ok(attempts
        .iter()
        .map(|attempt| attempt.reward.and_then(|_| advantages.next()).map(|a| a as f32))
        .collect())
}

/// The plan of a GRPO step over the groups of attempts, each in order.
///
/// # Errors
/// When a reward is not finite or an attempt cannot be trained on.
pub(crate) fn grpo(
    phase: u32,
    step: u32,
    groups: &[&[Attempt]],
    keys: &GrpoKeys,
    budget: usize,
) -> Result<StepPlan, TrainerError> {
    let mut rollouts: Vec<Vec<Rollout>> = Vec::with_capacity(groups.len());
    for attempts in groups {
        let advantages = advantages(attempts, keys)?;
        let kept = attempts.iter().zip(advantages).filter_map(|(attempt, advantage)| {
            Some(Rollout::new(attempt.key, &attempt.trajectory, advantage?))
        });
        rollouts.push(kept.collect());
    }
    let n = rollouts.len();
    let share = |i: usize| i * n / keys.mini_batches;
    let once = (0..keys.mini_batches)
        .map(|i| update(&rollouts[share(i)..share(i + 1)], keys.normaliser, keys.kl.is_some(), budget))
        .collect::<Result<Vec<_>, _>>()?;
    let updates = (0..keys.epochs).flat_map(|_| once.iter().cloned()).collect();
    Ok(StepPlan { phase, step, updates })
}

/// The plan of a step that imitates demonstrations.
///
/// # Errors
/// When a demonstration cannot be trained on.
pub(crate) fn sft(
    phase: u32,
    step: u32,
    demonstrations: &[(AttemptKey, &Trajectory)],
    normaliser: Normaliser,
    budget: usize,
) -> Result<StepPlan, TrainerError> {
    let groups: Vec<Vec<Rollout>> =
        demonstrations.iter().map(|(key, trajectory)| vec![Rollout::new(*key, trajectory, 0.0)]).collect();
    // Cross-entropy has a gradient whatever the advantage.
    Ok(StepPlan { phase, step, updates: vec![update(&groups, normaliser, true, budget)?] })
}

/// One optimiser step. Rollouts without advantage are left out unless something else gives them a gradient
/// (`all_learn`); they count in the denominators all the same.
fn update(
    groups: &[Vec<Rollout>],
    normaliser: Normaliser,
    all_learn: bool,
    budget: usize,
) -> Result<Update, TrainerError> {
    let counts: Vec<RolloutTokens> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, rollouts)| {
            rollouts
                .iter()
                .map(move |rollout| RolloutTokens { group: group as u64, tokens: rollout.tokens() })
        })
        .collect();
    let mut weights = normaliser.weights(&counts).into_iter();
    let mut pieces = Vec::with_capacity(groups.len());
    for rollouts in groups {
        let mut group = Vec::new();
        for (rollout, weight) in rollouts.iter().zip(&mut weights) {
            if rollout.advantage == 0.0 && !all_learn {
                continue;
            }
            for path in &rollout.paths {
                let planned = PlannedPath {
                    attempt: rollout.key,
                    leaf: path.leaf,
                    advantage: rollout.advantage,
                    weight: weight as f32,
                };
                group.push((planned, path_input(rollout.trajectory, &planned)?));
            }
        }
        pieces.push(group);
    }
    Ok(Update { micro_batches: micro_batches(pieces, budget)? })
}

type Piece = Vec<(PlannedPath, PathInput)>;

/// Fills micro-batches in order up to `budget` merged tokens. A group stays together where it fits into one: its paths
/// share their prompt. Where it does not, it is cut between paths; a path that is longer goes alone.
fn micro_batches(groups: Vec<Piece>, budget: usize) -> Result<Vec<Vec<PlannedPath>>, TrainerError> {
    let mut pieces: Vec<Piece> = Vec::new();
    for group in groups {
        if merged(&[&group])? <= budget {
            pieces.push(group);
        } else {
            pieces.extend(group.into_iter().map(|path| vec![path]));
        }
    }
    let mut filled: Vec<Vec<Piece>> = Vec::new();
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        if let Some(last) = filled.last_mut() {
            let together: Vec<&Piece> = last.iter().chain([&piece]).collect();
            if merged(&together)? <= budget {
                last.push(piece);
                continue;
            }
        }
        filled.push(vec![piece]);
    }
    let planned = |pieces: Vec<Piece>| pieces.into_iter().flatten().map(|(planned, _)| planned).collect();
    Ok(filled.into_iter().map(planned).collect())
}

/// How many tokens the paths have once merged.
fn merged(pieces: &[&Piece]) -> Result<usize, TrainerError> {
    let paths: Vec<PathInput> = pieces
        .iter()
        .flat_map(|piece| {
            piece.iter().map(|(_, input)| PathInput { tokens: input.tokens.clone(), targets: Vec::new() })
        })
        .collect();
    Ok(TreeBatch::merge(&paths)?.tokens.len())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
