//! Converts attempts and their rewards into the plan of a step: advantages, weights, updates.
//!
//! For every optimizer step, a plan has its sequences, a weight and an advantage for each token,
//! and the micro-batches into which the policy's learner and the critic divide them. It is recorded
//! before the step runs.
//!
//! # Guarantees
//! - **A plan is a pure function** of the attempts, the values of critic and reference, the recipe,
//!   and the learners' division into micro-batches.
//! - **All normalizers are in the weights**, so micro-batches change nothing but the order of sums.
//!   Denominators count rollouts, not sequences.

use std::collections::HashMap;

use levade_policy::UpdateSequences;
use levade_recipe::{GroupBy, KlTarget, OverlongAttempts, RlKeys, TrainFilterKeys, ZeroVarianceGroups};
use levade_rl::{Counting, Normalizer, PathAdvantages, RolloutTokens, prepare};
use levade_store::{Attempt, ChargedKl, HighEntropy, PerToken, PlannedPath, PolicyPlan, Update};
use levade_tree::{AttemptId, Component, Kind, PathInput, Placement, Segment, SegmentId, Tokens, Trajectory};

use crate::TrainerError;
use crate::agents::TokenLimits;
use crate::batch::{Action, Census, Paths, Targets, TrainedSequence, trained_paths};
use crate::credit::{Earnings, Sample};
use crate::policies::Models;
use crate::random::order;
use crate::rewards::{is_sample, is_uninformative, reward_of, rewarded};
use crate::signals::Signals;

/// Looks up the signals of a sequence by its attempt and leaf.
pub(crate) type SignalsOf<'a> = &'a dyn Fn(AttemptId, SegmentId) -> Signals;

/// An attempt as the plan uses it.
struct Rollout<'a> {
    id: AttemptId,
    placement: Placement,
    trajectory: &'a Trajectory,
    paths: Vec<Way>,
    /// Whether its tokens are trained. If not, the attempt still counts in the comparison with
    /// other attempts.
    trained: bool,
}

/// A sequence of a rollout.
struct Way {
    path: TrainedSequence,
    signals: Signals,
    advantages: PerToken,
    returns: Option<PerToken>,
    /// Factor of the token weights of each action. 0 if the action is not trained.
    shares: Vec<f32>,
}

impl Way {
    /// Returns the number of tokens of trained agents. Actions that the limit of trained turns
    /// leaves out are counted.
    fn tokens(&self, only: &TrainFilterKeys) -> u64 {
        let trained = self.path.turns.iter().filter(|action| only.accepts_agent(&action.agent));
        trained.map(Action::tokens).sum::<usize>() as u64
    }

    fn shares(&self) -> impl Iterator<Item = f32> + '_ {
        self.path
            .turns
            .iter()
            .zip(&self.shares)
            .flat_map(|(a, share)| std::iter::repeat_n(*share, a.tokens()))
    }
}

impl<'a> Rollout<'a> {
    fn new(attempt: &'a Attempt, targets: Targets<'_>, signals: Option<SignalsOf<'_>>) -> Self {
        let Attempt { id, placement, trajectory, .. } = attempt;
        let way = |path: TrainedSequence| Way {
            signals: signals.map(|of| of(*id, path.leaf)).unwrap_or_default(),
            shares: vec![1.0; path.turns.len()],
            path,
            advantages: PerToken::same(0.0),
            returns: None,
        };
        Rollout {
            id: *id,
            placement: *placement,
            trajectory,
            paths: trained_paths(trajectory, targets).into_iter().map(way).collect(),
            trained: true,
        }
    }

    /// Returns the KL penalty on the tokens of every sequence, and the KL divergence as a mean over
    /// sequences. Both are empty or 0 if the recipe does not apply the penalty to rewards.
    fn charged(&self, keys: &RlKeys, coefficient: f64) -> (Vec<Vec<f64>>, f64) {
        let Some(kl) = keys.kl.filter(|kl| kl.apply_to == KlTarget::Reward) else {
            return (vec![Vec::new(); self.paths.len()], 0.0);
        };
        let penalty = levade_rl::KlPenalty { coefficient, ..kl.penalty() };
        let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let (mut rewards, mut found) = (Vec::new(), Vec::new());
        for way in &self.paths {
            let (logprobs, reference) = (wide(&way.signals.logprobs), wide(&way.signals.reference));
            let mut of_path = vec![0.0; way.path.tokens()];
            found.push(penalty.charge(&mut of_path, &logprobs, &reference, Counting::Exact));
            rewards.push(of_path);
        }
        (rewards, Counting::Exact.mean(found.into_iter()))
    }

    /// Sets the factor of untrained actions to 0. If more than `most` turns remain, keeps a random
    /// sample of `most` turns and scales their factors by `total / most`, so that the total weight
    /// stays the same. 0 disables the limit.
    fn select(&mut self, only: &TrainFilterKeys, most: usize, seed: u64) {
        let mut shares: Vec<&mut f32> = Vec::new();
        for way in &mut self.paths {
            for (share, action) in way.shares.iter_mut().zip(&way.path.turns) {
                if only.accepts_agent(&action.agent) {
                    shares.push(share);
                } else {
                    *share = 0.0;
                }
            }
        }
        let total = shares.len();
        if most == 0 || total <= most {
            return;
        }
        let Placement { phase, step, group, sample, .. } = self.placement;
        let drawn = order(seed, "turns", &[phase, step, group, sample], total);
        for (share, place) in shares.into_iter().zip(drawn) {
            *share = if (place as usize) < most { total as f32 / most as f32 } else { 0.0 };
        }
    }
}

/// Returns the reward of the greedy attempt that serves as a baseline. It is computed like the
/// rewards of samples, except that its length does not exclude it. Returns `None` if the attempt
/// failed, or if another policy made it.
fn rival_of(setting: &Setting<'_>, baseline: &Attempt) -> Option<f64> {
    let keys = setting.keys;
    match keys.overlong {
        _ if !is_sample(baseline, setting.targets) => None,
        OverlongAttempts::Drop => baseline.reward,
        _ => reward_of(baseline, keys, setting.limits).map(|(reward, _)| reward),
    }
}

/// Inputs of an RL step's plan other than the attempts.
pub(crate) struct Setting<'a> {
    /// Selects the tokens that are trained.
    pub targets: Targets<'a>,
    /// Version of the policy's weights.
    pub version: u64,
    pub keys: &'a RlKeys,
    /// Seed of the run.
    pub seed: u64,
    /// Maximum number of sampled tokens per attempt, by agent.
    pub limits: &'a TokenLimits,
    /// Largest of these limits among the agents of the training tasks. Some algorithms divide the
    /// sum over an attempt's tokens by this constant.
    pub constant_length: usize,
    /// Coefficient of a KL penalty that is applied to the reward.
    pub kl_coefficient: f64,
    /// The greedy attempt of each group, if the advantage estimator uses one.
    pub baselines: &'a [Option<Attempt>],
    /// Looks up the numbers that critic, policy and reference computed for a sequence.
    pub signals: SignalsOf<'a>,
}

/// Counts the tokens of attempts with a reward that could be targets, in a phase with these keys.
pub(crate) fn census<'a>(
    attempts: impl Iterator<Item = &'a Attempt>,
    targets: Targets<'_>,
    keys: &RlKeys,
) -> Census {
    let rewarded = attempts.filter(|attempt| attempt.reward.is_some());
    let trained = |segment: &Segment| targets.are_of(segment) && keys.only.accepts_agent(&segment.agent);
    Census::of(rewarded.map(|attempt| &attempt.trajectory), trained)
}

/// The attempts of a step, collected for the advantage estimator.
#[derive(Default)]
struct Gathered<'a> {
    groups: Vec<Vec<Rollout<'a>>>,
    /// The estimator's samples of each rollout, in order. A rollout has one or several.
    samples: Vec<Vec<Sample>>,
    /// All samples as the estimator's input.
    described: Vec<levade_rl::Rollout>,
    /// KL divergence of each rollout from the reference.
    divergences: Vec<f64>,
    /// Numbers of the groups by agent, for `group_by = "agent"`.
    agents: HashMap<(usize, String), u64>,
}

impl<'a> Gathered<'a> {
    /// Adds a group. Skips it if it carries no training signal, or if it needs a baseline and has
    /// none.
    fn add_group(&mut self, setting: &Setting<'_>, group: usize, attempts: &'a [Attempt]) {
        let keys = setting.keys;
        if belongs_to_others(attempts, setting.targets) {
            return;
        }
        let baseline = setting.baselines.get(group).and_then(Option::as_ref);
        let rival = baseline.and_then(|baseline| rival_of(setting, baseline));
        if keys.needs_baseline() && rival.is_none() {
            return;
        }
        let samples = attempts.iter().filter(|attempt| is_sample(attempt, setting.targets));
        let found = rewarded(samples, keys, setting.limits);
        if is_uninformative(keys, &found) && keys.zero_variance_groups() != ZeroVarianceGroups::Keep {
            return;
        }
        let agents = match keys.group_by {
            GroupBy::Agent => {
                agents_of(found.iter().map(|(attempt, ..)| &attempt.trajectory), setting.targets)
            }
            GroupBy::Task | GroupBy::Step => Vec::new(),
        };
        let members = found
            .into_iter()
            .map(|(attempt, reward, trained)| {
                let trained = trained && keys.only.accepts_reward(reward);
                self.add(setting, (group, &agents, rival), attempt, reward, trained)
            })
            .collect();
        self.groups.push(members);
    }

    fn add(
        &mut self,
        setting: &Setting<'_>,
        (group, agents, rival): (usize, &[String], Option<f64>),
        attempt: &'a Attempt,
        reward: f64,
        trained: bool,
    ) -> Rollout<'a> {
        let keys = setting.keys;
        let mut rollout = Rollout::new(attempt, setting.targets, Some(setting.signals));
        rollout.trained = trained;
        let (charged, divergence) = rollout.charged(keys, setting.kl_coefficient);
        let paths: Vec<TrainedSequence> = rollout.paths.iter().map(|way| way.path.clone()).collect();
        // The final part of the score: the components of turns, agents or segments are credited
        // earlier, as part of `attempt.earned`.
        let early: f64 =
            attempt.outcome.components.iter().filter(|c| c.on.is_some()).map(Component::share).sum();
        let answer = attempt.score.unwrap_or(0.0) - early;
        let earnings = Earnings::new(&attempt.trajectory, &paths, reward, answer, &attempt.earned);
        let signals: Vec<Signals> = rollout.paths.iter().map(|way| way.signals.clone()).collect();
        let masked = |agent: &str| !trained || !keys.only.accepts_agent(agent);
        // If several policies play an agent that did not act, the outcome names the policy that was
        // selected for it.
        let cast = |agent: &&String| {
            attempt.outcome.cast.get(*agent).is_none_or(|cast| cast == setting.targets.policy)
        };
        let agents: Vec<String> = agents.iter().filter(cast).cloned().collect();
        let samples = earnings.samples(&paths, keys.group_by, &agents);
        for sample in &samples {
            let group = self.number(keys.group_by, group, sample);
            let described = earnings.rollout(sample, group, &paths, &charged, &signals, masked);
            self.described.push(levade_rl::Rollout { rival, ..described });
        }
        self.samples.push(samples);
        self.divergences.push(divergence);
        rollout.select(&keys.only, keys.max_trained_turns, setting.seed);
        rollout
    }

    /// Returns the number of the group in which a sample is compared.
    fn number(&mut self, by: GroupBy, group: usize, sample: &Sample) -> u64 {
        match (by, &sample.agent) {
            (GroupBy::Step, _) => 0,
            (GroupBy::Agent, Some(agent)) => {
                let next = self.agents.len() as u64;
                *self.agents.entry((group, agent.clone())).or_insert(next)
            }
            _ => group as u64,
        }
    }

    /// Assigns the estimator's advantages and returns of the samples to the tokens of the rollouts.
    fn give(&mut self, found: Vec<Vec<PathAdvantages>>) {
        let mut found = found.into_iter();
        for (rollout, samples) in self.groups.iter_mut().flatten().zip(&self.samples) {
            let zeros = |way: &Way| vec![0.0f32; way.path.tokens()];
            let mut advantages: Vec<Vec<f32>> = rollout.paths.iter().map(zeros).collect();
            let mut returns = advantages.clone();
            for sample in samples {
                for ((path, tokens), found) in sample.tokens.iter().zip(found.next().unwrap_or_default()) {
                    for (i, token) in tokens.iter().enumerate() {
                        advantages[*path][*token] = found.advantages[i] as f32;
                        returns[*path][*token] = found.returns.get(i).map_or(0.0, |r| *r as f32);
                    }
                }
            }
            for ((way, advantages), returns) in rollout.paths.iter_mut().zip(advantages).zip(returns) {
                way.advantages = PerToken::new(advantages);
                way.returns = (!way.signals.values.is_empty()).then(|| PerToken::new(returns));
            }
        }
    }
}

/// Returns whether other policies acted in a group of attempts and no segment is a target of this
/// policy. Such a group trains other policies, and does not count for this one.
fn belongs_to_others(attempts: &[Attempt], targets: Targets<'_>) -> bool {
    let segments = || attempts.iter().flat_map(|attempt| attempt.trajectory.segments());
    let is_acted = |kind| kind != Kind::Given;
    segments().any(|s| is_acted(s.kind) && s.policy != targets.policy)
        && !segments().any(|s| targets.contain(s))
}

/// Returns the agents that are trained in any of the attempts, in the order of their first actions.
fn agents_of<'a>(attempts: impl Iterator<Item = &'a Trajectory>, targets: Targets<'_>) -> Vec<String> {
    let mut agents: Vec<String> = Vec::new();
    let paths = attempts.flat_map(|trajectory| trained_paths(trajectory, targets));
    for action in paths.flat_map(|path| path.turns) {
        if !agents.contains(&action.agent) {
            agents.push(action.agent);
        }
    }
    agents
}

/// A plan whose updates are not yet divided into micro-batches.
pub(crate) struct Draft {
    /// The plan without its updates.
    plan: PolicyPlan,
    /// The optimizer steps of one epoch, by groups.
    updates: Vec<Vec<GroupSequences>>,
    epochs: u32,
}

/// The sequences of a group.
type GroupSequences = Vec<(PlannedPath, PathInput)>;

impl Draft {
    /// Returns the plan, with the updates divided into micro-batches by the models that learn from
    /// them. `budget` is the maximum number of tokens in a micro-batch.
    ///
    /// # Errors
    /// Returns an error if a learner fails, or if its division does not cover the update.
    pub async fn cut(self, models: Models<'_>, budget: usize) -> Result<PolicyPlan, TrainerError> {
        let mut once = Vec::with_capacity(self.updates.len());
        for groups in self.updates {
            let mut paths = Vec::new();
            let mut tokens = |group: GroupSequences| -> Vec<Tokens> {
                let tokens = group.into_iter().map(|(planned, input)| {
                    paths.push(planned);
                    input.tokens
                });
                tokens.collect()
            };
            let groups = groups.into_iter().map(&mut tokens).collect();
            let uncut = UpdateSequences { groups, micro_batch_tokens: budget };
            let cut = models.policy.plan(&uncut).await?;
            cut.check(paths.len(), cut.world_size)?;
            let critic = match models.critic {
                Some(critic) => Some(critic.plan(&uncut).await?),
                None => None,
            };
            if let Some(cut) = &critic {
                cut.check(paths.len(), cut.world_size)?;
            }
            once.push(Update { paths, cut, critic });
        }
        let updates = (0..self.epochs).flat_map(|_| once.iter().cloned()).collect();
        Ok(PolicyPlan { updates, ..self.plan })
    }
}

/// Returns the plan of an RL step for one policy, over groups of attempts, each in order.
///
/// # Errors
/// Returns an error if a reward is not finite.
pub(crate) fn rl(setting: &Setting<'_>, groups: &[&[Attempt]]) -> Result<Draft, TrainerError> {
    let Setting { keys, kl_coefficient, targets, version, .. } = *setting;
    let mut gathered = Gathered::default();
    for (group, attempts) in groups.iter().copied().enumerate() {
        gathered.add_group(setting, group, attempts);
    }
    let advantages = keys.estimator().advantages(&gathered.described)?;
    gathered.give(advantages);
    let Gathered { mut groups, divergences, .. } = gathered;

    let kl = keys.kl.filter(|kl| kl.apply_to == KlTarget::Reward).map(|_| ChargedKl {
        coefficient: kl_coefficient,
        found: Counting::Exact.mean(divergences.iter().copied()),
        rollouts: divergences.len() as u64,
    });
    let n = groups.len();
    let share = |i: usize| i * n / keys.mini_batches;
    // A critic learns from every rollout, whatever its advantage.
    let all_learn = keys.loss().moves_without_advantage() || keys.needs_critic();
    let normalizer = keys.normalizer(setting.constant_length);
    let mut high_entropy = (keys.high_entropy_share < 1.0).then(HighEntropy::default);
    let mut once = Vec::with_capacity(keys.mini_batches);
    for i in 0..keys.mini_batches {
        let of_update = &mut groups[share(i)..share(i + 1)];
        if let Some(found) = &mut high_entropy {
            keep_high_entropy(of_update, keys.high_entropy_share, found);
        }
        once.push(update(of_update, targets, normalizer, &keys.only, all_learn));
    }
    let policy = targets.policy.to_owned();
    let plan = PolicyPlan { policy, version, kl, high_entropy, updates: Vec::new() };
    Ok(Draft { plan, updates: once, epochs: keys.epochs })
}

/// Returns the plan of a step that imitates demonstrations, for one policy.
pub(crate) fn sft(
    targets: Targets<'_>,
    version: u64,
    demonstrations: &[&Attempt],
    normalizer: Normalizer,
) -> Draft {
    let groups: Vec<Vec<Rollout>> =
        demonstrations.iter().map(|attempt| vec![Rollout::new(attempt, targets, None)]).collect();
    // Cross-entropy has a gradient whatever the advantage.
    let updates = vec![update(&groups, targets, normalizer, &TrainFilterKeys::default(), true)];
    let plan = PolicyPlan { policy: targets.policy.to_owned(), version, ..PolicyPlan::default() };
    Draft { plan, updates, epochs: 1 }
}

/// Keeps the advantages of the fraction `share` of an update's trained tokens with the highest
/// entropies, and sets the remaining ones to 0. Denominators, penalties and a critic still count
/// all tokens.
fn keep_high_entropy(groups: &mut [Vec<Rollout>], share: f64, found: &mut HighEntropy) {
    let trained = |way: &Way| {
        let of_way = way.signals.entropies.iter().zip(way.shares().collect::<Vec<_>>());
        of_way.filter(|(_, share)| *share != 0.0).map(|(entropy, _)| f64::from(*entropy)).collect::<Vec<_>>()
    };
    let rollouts = || groups.iter().flatten().filter(|rollout| rollout.trained);
    let entropies: Vec<f64> = rollouts().flat_map(|rollout| &rollout.paths).flat_map(trained).collect();
    if entropies.is_empty() {
        return;
    }
    let threshold = prepare::entropy_threshold(&entropies, share);
    found.tokens += entropies.len() as u64;
    found.kept += entropies.iter().filter(|entropy| **entropy >= threshold).count() as u64;
    found.thresholds.push(threshold);
    for way in groups.iter_mut().flatten().flat_map(|rollout| &mut rollout.paths) {
        let of_way = way.advantages.iter().zip(&way.signals.entropies);
        let kept =
            of_way.map(|(advantage, entropy)| if f64::from(*entropy) >= threshold { advantage } else { 0.0 });
        way.advantages = PerToken::new(kept.collect::<Vec<_>>());
    }
}

/// Returns one optimizer step. Rollouts without advantage are left out unless they have another
/// source of gradient (`all_learn`), but still count in the denominators. Untrained rollouts do not
/// count.
fn update(
    groups: &[Vec<Rollout>],
    targets: Targets<'_>,
    normalizer: Normalizer,
    only: &TrainFilterKeys,
    all_learn: bool,
) -> Vec<GroupSequences> {
    let tokens = |rollout: &Rollout| {
        rollout.paths.iter().filter(|_| rollout.trained).map(|way| way.tokens(only)).sum()
    };
    let counts: Vec<RolloutTokens> = groups
        .iter()
        .enumerate()
        .flat_map(|(group, rollouts)| {
            rollouts.iter().map(move |rollout| RolloutTokens { group: group as u64, tokens: tokens(rollout) })
        })
        .collect();
    let mut weights = normalizer.weights(&counts).into_iter();
    let mut group_sequences = Vec::with_capacity(groups.len());
    for rollouts in groups {
        let mut group = Vec::new();
        for (rollout, weight) in rollouts.iter().zip(&mut weights) {
            let mut paths = None;
            for way in rollout.paths.iter().filter(|_| rollout.trained) {
                let uninformative = !all_learn && way.advantages.distinct().all(|advantage| advantage == 0.0);
                if uninformative || way.shares.iter().all(|share| *share == 0.0) {
                    continue;
                }
                let weight = weight as f32;
                let planned = PlannedPath {
                    attempt: rollout.id,
                    leaf: way.path.leaf,
                    advantage: way.advantages.clone(),
                    weight: PerToken::new(way.shares().map(|share| share * weight)),
                    returns: way.returns.clone(),
                    values: way.returns.is_some().then(|| PerToken::new(way.signals.values.iter().copied())),
                };
                let paths = paths.get_or_insert_with(|| Paths::of(rollout.trajectory));
                let input = paths.input(&planned, targets, 0);
                group.push((planned, input));
            }
        }
        group_sequences.push(group);
    }
    group_sequences
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
