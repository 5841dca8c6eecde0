//! From attempts and their rewards to the plan of a step: advantages, weights, updates, micro-batches.
//!
//! Guarantees: a plan is a pure function of the attempts, what critic and reference say of them, and the recipe. All normalisers are in
//! the weights, so how an update is cut into micro-batches changes nothing but the order of sums. Denominators count rollouts,
//! not paths.

use dressage_agent::Finish;
use dressage_rl::{Counting, Normaliser, RolloutTokens, shaping};
use dressage_store::{Attempt, AttemptKey, ChargedKl, PerToken, PlannedPath, StepPlan, Update};
use dressage_tree::{PathInput, SegmentId, Trajectory, TreeBatch};

use crate::TrainerError;
use crate::batch::{TrainedPath, path_input, trained_paths};
use crate::random::order;
use crate::recipe::{Charge, Overlong, RlKeys, UniformGroups};
use crate::rollout::outcome_of;
use crate::survey::PathKey;

/// What is known of a path besides its record, a number for every trained token each; empty where not asked for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Signals {
    /// A critic's values.
    pub values: Vec<f32>,
    /// Log-probabilities under the weights at the beginning of the step.
    pub logprobs: Vec<f32>,
    /// Log-probabilities under the frozen reference.
    pub reference: Vec<f32>,
}

/// Where the signals of a path are looked up.
pub(crate) type SignalsOf<'a> = &'a dyn Fn(AttemptKey, SegmentId) -> Signals;

/// An attempt on its way into a plan.
struct Rollout<'a> {
    key: AttemptKey,
    trajectory: &'a Trajectory,
    paths: Vec<Way>,
    /// Whether its tokens are trained. If not, others are compared with it all the same.
    trained: bool,
}

/// One of its paths.
struct Way {
    path: TrainedPath,
    signals: Signals,
    advantages: PerToken,
    returns: Option<PerToken>,
    /// For each trained token, what its weight is multiplied by.
    shares: PerToken,
}

impl<'a> Rollout<'a> {
    fn new(key: AttemptKey, trajectory: &'a Trajectory, signals: Option<SignalsOf<'_>>) -> Self {
        let way = |path: TrainedPath| Way {
            signals: signals.map(|of| of(key, path.leaf)).unwrap_or_default(),
            path,
            advantages: PerToken::same(0.0),
            returns: None,
            shares: PerToken::same(1.0),
        };
        Rollout {
            key,
            trajectory,
            paths: trained_paths(trajectory).into_iter().map(way).collect(),
            trained: true,
        }
    }

    fn tokens(&self) -> u64 {
        self.paths.iter().map(|way| way.path.tokens()).sum()
    }

    /// As estimators know it, with the outcome at the end of every path.
    /// Also returns the divergence that was charged, a mean over its paths.
    fn described(
        &self,
        group: usize,
        reward: f64,
        keys: &RlKeys,
        coefficient: f64,
    ) -> (dressage_rl::Rollout, f64) {
        let mut charged = Vec::new();
        let mut path = |way: &Way| {
            let mut rewards = vec![0.0; way.path.tokens() as usize];
            if let Some(last) = rewards.last_mut() {
                *last = reward;
            }
            if let Some(kl) = keys.kl.filter(|kl| kl.charge == Charge::Reward) {
                let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
                let (logprobs, reference) = (wide(&way.signals.logprobs), wide(&way.signals.reference));
                let penalty = dressage_rl::KlPenalty { coefficient, ..kl.penalty() };
                charged.push(penalty.charge(&mut rewards, &logprobs, &reference, Counting::Exact));
            }
            dressage_rl::Path {
                turns: way.path.turns.clone(),
                rewards,
                values: way.signals.values.iter().map(|v| f64::from(*v)).collect(),
                ..dressage_rl::Path::default()
            }
        };
        let paths = self.paths.iter().map(&mut path).collect();
        let group = group as u64;
        let rollout = dressage_rl::Rollout { group, score: reward, paths, ..dressage_rl::Rollout::default() };
        (rollout, Counting::Exact.mean(charged.into_iter()))
    }

    /// Leaves all but `most` turns out, drawn by the seed, and gives their weight to the others.
    fn cap_turns(&mut self, most: usize, seed: u64) {
        let total: usize = self.paths.iter().map(|way| way.path.turns.len()).sum();
        if most == 0 || total <= most {
            return;
        }
        let AttemptKey { phase, step, group, sample, .. } = self.key;
        let drawn = order(seed, "turns", &[phase, step, group, sample], total);
        let kept: Vec<bool> = drawn.iter().map(|place| (*place as usize) < most).collect();
        let share = total as f32 / most as f32;
        let mut turn = kept.iter();
        for way in &mut self.paths {
            let shares = way.path.turns.iter().flat_map(|len| {
                let kept = turn.next().is_some_and(|kept| *kept);
                std::iter::repeat_n(if kept { share } else { 0.0 }, *len)
            });
            way.shares = PerToken::new(shares);
        }
    }
}

/// The reward of an attempt and what becomes of it, by the recipe's way with long ones.
fn reward_of(attempt: &Attempt, keys: &RlKeys, most_tokens: usize) -> Option<(f64, bool)> {
    let reward = attempt.reward?;
    let cut = || outcome_of(attempt).is_some_and(|o| !matches!(o.finish, Finish::Answered | Finish::Failed));
    match keys.overlong {
        Overlong::Keep => Some((reward, true)),
        Overlong::Mask => Some((reward, !cut())),
        Overlong::Drop => (!cut()).then_some((reward, true)),
        Overlong::Penalise { buffer, factor } => {
            let tokens = attempt.trajectory.sampled_tokens() as u64;
            Some((reward + shaping::overlong(tokens, most_tokens as u64, buffer, factor), true))
        }
    }
}

/// What a step of reinforcement is planned from, besides the attempts.
pub(crate) struct Setting<'a> {
    pub phase: u32,
    pub step: u32,
    pub keys: &'a RlKeys,
    /// Seed of the run.
    pub seed: u64,
    /// Most tokens of a micro-batch.
    pub budget: usize,
    /// Most sampled tokens of an attempt.
    pub most_tokens: usize,
    /// Coefficient of a divergence charged to the reward.
    pub kl_coefficient: f64,
    /// What critic, policy and reference say of a path.
    pub signals: SignalsOf<'a>,
}

/// Every path of the attempts that can be trained on, with all of its targets.
///
/// # Errors
/// When an attempt cannot be trained on.
pub(crate) fn every_path(groups: &[&[Attempt]]) -> Result<Vec<(PathKey, PathInput)>, TrainerError> {
    let mut found = Vec::new();
    for attempt in groups.iter().copied().flatten().filter(|attempt| attempt.reward.is_some()) {
        for path in trained_paths(&attempt.trajectory) {
            let planned = PlannedPath {
                attempt: attempt.key,
                leaf: path.leaf,
                advantage: PerToken::same(0.0),
                weight: PerToken::same(0.0),
                returns: None,
                values: None,
            };
            found.push(((attempt.key, path.leaf), path_input(&attempt.trajectory, &planned, 0)?));
        }
    }
    Ok(found)
}

/// The plan of a step over groups of attempts, each in order.
///
/// # Errors
/// When a reward is not finite or an attempt cannot be trained on.
pub(crate) fn rl(setting: &Setting<'_>, groups: &[&[Attempt]]) -> Result<StepPlan, TrainerError> {
    let Setting { phase, step, keys, seed, budget, most_tokens, kl_coefficient, signals } = *setting;
    let mut rollouts: Vec<Vec<Rollout>> = Vec::with_capacity(groups.len());
    let (mut described, mut divergences) = (Vec::new(), Vec::new());
    for (group, attempts) in groups.iter().enumerate() {
        let found: Vec<(&Attempt, f64, bool)> = attempts
            .iter()
            .filter_map(|attempt| {
                reward_of(attempt, keys, most_tokens).map(|(r, trained)| (attempt, r, trained))
            })
            .collect();
        let uniform = found.windows(2).all(|pair| pair[0].1 == pair[1].1);
        if uniform && keys.compares() && keys.uniform_groups() != UniformGroups::Keep {
            continue;
        }
        let mut members = Vec::with_capacity(found.len());
        for (attempt, reward, trained) in found {
            let mut rollout = Rollout::new(attempt.key, &attempt.trajectory, Some(signals));
            rollout.trained = trained;
            let (known, divergence) = rollout.described(group, reward, keys, kl_coefficient);
            described.push(known);
            divergences.push(divergence);
            rollout.cap_turns(keys.most_turns, seed);
            members.push(rollout);
        }
        rollouts.push(members);
    }
    let mut found = keys.estimator().advantages(&described)?.into_iter();
    for rollout in rollouts.iter_mut().flatten() {
        for (way, path) in rollout.paths.iter_mut().zip(found.next().unwrap_or_default()) {
            way.advantages = PerToken::new(path.advantages.iter().map(|a| *a as f32));
            if !way.signals.values.is_empty() {
                way.returns = Some(PerToken::new(path.returns.iter().map(|r| *r as f32)));
            }
        }
    }
    let kl = keys.kl.filter(|kl| kl.charge == Charge::Reward).map(|_| ChargedKl {
        coefficient: kl_coefficient,
        found: Counting::Exact.mean(divergences.iter().copied()),
        rollouts: divergences.len() as u64,
    });
    let n = rollouts.len();
    let share = |i: usize| i * n / keys.mini_batches;
    // A penalty, a bonus or a critic gives a gradient whatever the advantage.
    let loss = keys.loss();
    let all_learn = loss.kl.is_some() || loss.entropy != 0.0 || keys.needs_critic();
    let once = (0..keys.mini_batches)
        .map(|i| update(&rollouts[share(i)..share(i + 1)], keys.normaliser(), all_learn, budget))
        .collect::<Result<Vec<_>, _>>()?;
    let updates = (0..keys.epochs).flat_map(|_| once.iter().cloned()).collect();
    Ok(StepPlan { phase, step, places: Vec::new(), kl, updates })
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
        demonstrations.iter().map(|(key, trajectory)| vec![Rollout::new(*key, trajectory, None)]).collect();
    // Cross-entropy has a gradient whatever the advantage.
    let updates = vec![update(&groups, normaliser, true, budget)?];
    Ok(StepPlan { phase, step, places: Vec::new(), kl: None, updates })
}

/// One optimiser step. Rollouts without advantage are left out unless something else gives them a gradient
/// (`all_learn`); they count in the denominators all the same. Those that are not trained do not.
fn update(
    groups: &[Vec<Rollout>],
    normaliser: Normaliser,
    all_learn: bool,
    budget: usize,
) -> Result<Update, TrainerError> {
    let tokens = |rollout: &Rollout| if rollout.trained { rollout.tokens() } else { 0 };
    let counts: Vec<RolloutTokens> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, rollouts)| {
            rollouts.iter().map(move |rollout| RolloutTokens { group: group as u64, tokens: tokens(rollout) })
        })
        .collect();
    let mut weights = normaliser.weights(&counts).into_iter();
    let mut pieces = Vec::with_capacity(groups.len());
    for rollouts in groups {
        let mut group = Vec::new();
        for (rollout, weight) in rollouts.iter().zip(&mut weights) {
            for way in rollout.paths.iter().filter(|_| rollout.trained) {
                if !all_learn && way.advantages.distinct().all(|advantage| advantage == 0.0) {
                    continue;
                }
                let weight = weight as f32;
                let planned = PlannedPath {
                    attempt: rollout.key,
                    leaf: way.path.leaf,
                    advantage: way.advantages.clone(),
                    weight: way.shares.map(|share| share * weight),
                    returns: way.returns.clone(),
                    values: way.returns.is_some().then(|| PerToken::new(way.signals.values.iter().copied())),
                };
                let input = path_input(rollout.trajectory, &planned, 0)?;
                group.push((planned, input));
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
