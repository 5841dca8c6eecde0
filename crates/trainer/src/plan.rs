//! Converts attempts and their rewards into the plan of a step: advantages, weights, updates.
//!
//! A plan contains the optimizer updates of a step. For each update it contains the sequences, a
//! weight and an advantage for each token, and the division into micro-batches, for the policy's
//! learner and for the critic. The plan is recorded before the step runs.
//!
//! # Guarantees
//! - **A plan is a pure function** of the attempts, the values of critic and reference, the recipe,
//!   and the learners' division into micro-batches.
//! - **All normalizers are in the weights**, so micro-batches change nothing but the order of sums.
//!   Denominators count rollouts, not sequences.

mod update;

use std::collections::HashMap;

use levade_policy::UpdateSequences;
use levade_recipe::{
    GroupBy, KlTarget, OverlongAttempts, RlKeys, TrainFilterKeys, Unit, ZeroVarianceGroups,
};
use levade_rl::{Counting, Normalizer, SequenceAdvantages, prepare};
use levade_store::{
    AppliedKlPenalty, Attempt, CreditTarget, HighEntropy, PerToken, PlannedSequence, PolicyPlan,
    Update,
};
use levade_tree::{
    AttemptId, AttemptSlot, Component, Kind, Segment, SegmentId, SequenceInput, Tokens, Trajectory,
    is_seat,
};

use crate::TrainerError;
use crate::agents::TokenLimits;
use crate::batch::{Targets, TokenCensus, TrainedSequence, TurnTokens, trained_sequences};
use crate::credit::{CreditedReward, EstimatorSample};
use crate::policies::PhaseModels;
use crate::random::shuffled_indices;
use crate::rewards::{is_sample, is_uninformative, rewarded_attempts, shaped_reward};
use crate::scoring::sum_of_components;
use crate::signals::SequenceSignals;
use update::{LossAveraging, plan_update};

/// Function that returns the signals (model values) of a sequence by attempt and leaf.
pub(crate) type SignalsOf<'a> = &'a dyn Fn(AttemptId, SegmentId) -> SequenceSignals;

/// An attempt that is being planned, with its sequences.
struct RolloutDraft<'a> {
    id: AttemptId,
    slot: AttemptSlot,
    trajectory: &'a Trajectory,
    sequences: Vec<SequenceDraft>,
    /// Whether the tokens of the attempt are trained. If not, the attempt still counts when
    /// advantages are computed within its group.
    trained: bool,
    /// Seats that are samples of the attempt although they did not act.
    silent_seats: Vec<String>,
}

/// A sequence of an attempt, with the weights and advantages that the plan assigns to its tokens.
struct SequenceDraft {
    sequence: TrainedSequence,
    signals: SequenceSignals,
    advantages: PerToken,
    returns: Option<PerToken>,
    /// Weight factor of each turn on the sequence. 0 if the turn is not trained.
    turn_weights: Vec<f32>,
}

impl SequenceDraft {
    fn token_weights(&self) -> impl Iterator<Item = f32> + '_ {
        self.scaled_token_weights(|_| 1.0)
    }

    /// Returns the weight of each token: the turn's weight, multiplied by `factor` of the turn's
    /// agent.
    fn scaled_token_weights<'a>(
        &'a self,
        factor: impl Fn(&str) -> f32 + 'a,
    ) -> impl Iterator<Item = f32> + 'a {
        self.sequence.turns.iter().zip(&self.turn_weights).flat_map(move |(action, weight)| {
            std::iter::repeat_n(*weight * factor(&action.agent), action.num_tokens())
        })
    }
}

impl<'a> RolloutDraft<'a> {
    fn new(attempt: &'a Attempt, targets: Targets<'_>, signals: Option<SignalsOf<'_>>) -> Self {
        let Attempt { id, slot, trajectory, .. } = attempt;
        let draft = |sequence: TrainedSequence| SequenceDraft {
            signals: signals.map(|signals_of| signals_of(*id, sequence.leaf)).unwrap_or_default(),
            turn_weights: vec![1.0; sequence.turns.len()],
            sequence,
            advantages: PerToken::uniform(0.0),
            returns: None,
        };
        RolloutDraft {
            id: *id,
            slot: *slot,
            trajectory,
            sequences: trained_sequences(trajectory, targets).into_iter().map(draft).collect(),
            trained: true,
            silent_seats: Vec::new(),
        }
    }

    /// Returns the units that a loss normalizer counts in this attempt, by name: its agents or, if
    /// the complete attempt is one unit, a single empty name.
    fn unit_names(&self, unit: Unit) -> Vec<&str> {
        let actions = self.sequences.iter().flat_map(|draft| &draft.sequence.turns);
        let mut agents: Vec<&str> = Vec::new();
        if unit == Unit::Sample {
            let acting = actions.map(|action| action.agent.as_str());
            for agent in acting.chain(self.silent_seats.iter().map(String::as_str)) {
                if !agents.contains(&agent) {
                    agents.push(agent);
                }
            }
        }
        if agents.is_empty() { vec![""] } else { agents }
    }

    /// Returns the number of tokens of trained agents in the unit called `name`. Turns that
    /// `max_trained_turns` leaves out also count.
    fn count_trained_tokens(&self, only: &TrainFilterKeys, name: &str) -> u64 {
        let actions = self.sequences.iter().filter(|_| self.trained);
        let actions = actions.flat_map(|draft| &draft.sequence.turns);
        let counted = actions.filter(|action| {
            only.accepts_agent(&action.agent) && (name.is_empty() || action.agent == name)
        });
        counted.map(TurnTokens::num_tokens).sum::<usize>() as u64
    }

    /// Returns the KL penalty on each token of every sequence, and the mean KL divergence over the
    /// sequences. If the recipe does not apply the penalty to rewards, the lists are empty and the
    /// mean is 0.
    fn kl_penalty_rewards(&self, keys: &RlKeys, coefficient: f64) -> (Vec<Vec<f64>>, f64) {
        let Some(kl) = keys.kl.filter(|kl| kl.apply_to == KlTarget::Reward) else {
            return (vec![Vec::new(); self.sequences.len()], 0.0);
        };
        let penalty = levade_rl::KlPenalty { coefficient, ..kl.to_kl_penalty() };
        let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let mut rewards = Vec::new();
        let mut found = Vec::new();
        for draft in &self.sequences {
            let logprobs = wide(&draft.signals.logprobs);
            let reference = wide(&draft.signals.reference);
            let mut sequence_rewards = vec![0.0; draft.sequence.num_tokens()];
            found.push(penalty.apply_to_rewards(
                &mut sequence_rewards,
                &logprobs,
                &reference,
                Counting::Exact,
            ));
            rewards.push(sequence_rewards);
        }
        (rewards, Counting::Exact.mean(found.into_iter()))
    }

    /// Sets the weight factor of untrained turns to 0. If more than `max_turns` turns remain, keeps
    /// a random sample of `max_turns` turns, and scales their factors so that the total weight
    /// stays the same. `max_turns` = 0 disables the limit.
    fn select_turns(&mut self, only: &TrainFilterKeys, max_turns: usize, seed: u64) {
        let mut turn_weights: Vec<&mut f32> = Vec::new();
        for draft in &mut self.sequences {
            for (weight, action) in draft.turn_weights.iter_mut().zip(&draft.sequence.turns) {
                if only.accepts_agent(&action.agent) {
                    turn_weights.push(weight);
                } else {
                    *weight = 0.0;
                }
            }
        }
        let total = turn_weights.len();
        if max_turns == 0 || total <= max_turns {
            return;
        }
        let AttemptSlot { phase, step, group, sample, .. } = self.slot;
        let sampled_order = shuffled_indices(seed, "turns", &[phase, step, group, sample], total);
        for (weight, rank) in turn_weights.into_iter().zip(sampled_order) {
            *weight =
                if (rank as usize) < max_turns { total as f32 / max_turns as f32 } else { 0.0 };
        }
    }
}

/// Returns the reward of the greedy attempt that serves as the group's baseline. The reward is
/// computed like the rewards of samples, except that the attempt counts whatever its length and
/// whichever policies acted in it. Returns `None` if the attempt failed, or if another policy was
/// selected for it.
fn baseline_reward(plan_input: &PlanInput<'_>, baseline: &Attempt) -> Option<f64> {
    let keys = plan_input.keys;
    // Without a baseline, the complete group would be left out.
    let targets = Targets { requires_acting: false, ..plan_input.targets };
    match keys.overlong {
        _ if !is_sample(baseline, targets) => None,
        OverlongAttempts::Drop => baseline.reward,
        _ => shaped_reward(baseline, keys, plan_input.limits).map(|(reward, _)| reward),
    }
}

/// Inputs for the plan of an RL step, in addition to the attempts.
pub(crate) struct PlanInput<'a> {
    /// Selects the tokens on which the policy is trained.
    pub targets: Targets<'a>,
    /// Weight version of the policy before the step.
    pub version: u64,
    pub keys: &'a RlKeys,
    /// Seed of the run.
    pub seed: u64,
    /// Maximum number of sampled tokens per attempt, by agent.
    pub limits: &'a TokenLimits,
    /// Maximum number of sampled tokens per attempt: the largest limit among the agents of the
    /// training tasks. Some algorithms divide the sum over an attempt's tokens by this constant.
    pub constant_length: usize,
    /// Coefficient of the KL penalty. It has no effect unless the recipe applies the penalty to
    /// rewards.
    pub kl_coefficient: f64,
    /// The greedy baseline attempt of each group. `None` if a group has no baseline.
    pub baselines: &'a [Option<Attempt>],
    /// Returns the values that critic, policy and reference computed for a sequence.
    pub signals: SignalsOf<'a>,
}

/// Counts the trainable and the masked tokens of a policy in attempts that have a reward.
pub(crate) fn count_target_tokens<'a>(
    attempts: impl Iterator<Item = &'a Attempt>,
    targets: Targets<'_>,
    keys: &RlKeys,
) -> TokenCensus {
    let rewarded = attempts.filter(|attempt| attempt.reward.is_some());
    let trained = |segment: &Segment| {
        targets.accepts_segment(segment) && keys.only.accepts_agent(&segment.agent)
    };
    TokenCensus::count_segments(rewarded.map(|attempt| &attempt.trajectory), trained)
}

/// The attempts of a step, grouped for the advantage estimator.
#[derive(Default)]
struct GroupedSamples<'a> {
    groups: Vec<Vec<RolloutDraft<'a>>>,
    /// The advantage estimator's samples of each attempt, in order. An attempt has one or several
    /// samples.
    samples: Vec<Vec<EstimatorSample>>,
    /// All samples as the estimator's input.
    rollouts: Vec<levade_rl::Rollout>,
    /// Mean KL divergence from the reference in each attempt.
    divergences: Vec<f64>,
    /// Group number of each agent within each group, for `group_by = "agent"`.
    agents: HashMap<(usize, String), u64>,
}

impl<'a> GroupedSamples<'a> {
    /// Adds a group of attempts. Skips a group without training signal, and a group without the
    /// baseline that the estimator needs.
    fn add_group(&mut self, plan_input: &PlanInput<'_>, group: usize, attempts: &'a [Attempt]) {
        let keys = plan_input.keys;
        if belongs_to_other_policies(attempts, plan_input.targets) {
            return;
        }
        let baseline = plan_input.baselines.get(group).and_then(Option::as_ref);
        let rival = baseline.and_then(|baseline| baseline_reward(plan_input, baseline));
        if keys.needs_baseline() && rival.is_none() {
            return;
        }
        let samples = attempts.iter().filter(|attempt| is_sample(attempt, plan_input.targets));
        let found = rewarded_attempts(samples, keys, plan_input.limits);
        if is_uninformative(keys, &found) && keys.zero_variance_groups() != ZeroVarianceGroups::Keep
        {
            return;
        }
        let agents = match keys.group_by {
            GroupBy::Agent => trained_agents(
                found.iter().map(|(attempt, ..)| &attempt.trajectory),
                plan_input.targets,
            ),
            GroupBy::Task | GroupBy::Step => Vec::new(),
        };
        let rollouts = found
            .into_iter()
            .map(|(attempt, reward, trained)| {
                let trained = trained && keys.only.accepts_reward(reward);
                self.add_attempt(plan_input, (group, &agents, rival), attempt, reward, trained)
            })
            .collect();
        self.groups.push(rollouts);
    }

    fn add_attempt(
        &mut self,
        plan_input: &PlanInput<'_>,
        (group, agents, rival): (usize, &[String], Option<f64>),
        attempt: &'a Attempt,
        reward: f64,
        trained: bool,
    ) -> RolloutDraft<'a> {
        let keys = plan_input.keys;
        let mut rollout = RolloutDraft::new(attempt, plan_input.targets, Some(plan_input.signals));
        rollout.trained = trained;
        let (kl_penalty_rewards, divergence) =
            rollout.kl_penalty_rewards(keys, plan_input.kl_coefficient);
        let sequences: Vec<TrainedSequence> =
            rollout.sequences.iter().map(|draft| draft.sequence.clone()).collect();
        // The final part of the score: the components of turns, agents or segments are credited
        // earlier, as part of `attempt.earned`.
        let components = &attempt.outcome.components;
        let early: f64 = components
            .iter()
            .filter(|c| c.credit_target.is_some())
            .map(Component::weighted_value)
            .sum();
        // In a game, the score can be the score of one agent only, but the sum contains parts of
        // every seat.
        let score = attempt.score.unwrap_or(0.0);
        let is_game = components.iter().any(|component| match &component.credit_target {
            Some(CreditTarget::Agent(name)) => is_seat(name),
            _ => false,
        });
        let total = if is_game { sum_of_components(components) } else { score };
        let credited = CreditedReward::new(
            &attempt.trajectory,
            &sequences,
            (reward + (total - score), total - early),
            &attempt.step_rewards,
            keys.group_by,
        );
        let signals: Vec<SequenceSignals> =
            rollout.sequences.iter().map(|draft| draft.signals.clone()).collect();
        let masked = |agent: &str| !trained || !keys.only.accepts_agent(agent);
        // If several policies play an agent that did not act, the outcome names the policy that was
        // selected for it.
        let cast = |agent: &&String| {
            attempt.outcome.cast.get(*agent).is_none_or(|cast| cast == plan_input.targets.policy)
        };
        let agents: Vec<String> = agents.iter().filter(cast).cloned().collect();
        let samples = credited.samples(&sequences, keys.group_by, &agents);
        for sample in &samples {
            let group = self.group_number(keys.group_by, group, sample);
            let rollout_input = credited.to_rollout(
                sample,
                group,
                &sequences,
                &kl_penalty_rewards,
                &signals,
                masked,
            );
            self.rollouts.push(levade_rl::Rollout { rival, ..rollout_input });
        }
        let silent = samples.iter().filter(|sample| sample.tokens.is_empty());
        rollout.silent_seats = silent.filter_map(|sample| sample.agent.clone()).collect();
        self.samples.push(samples);
        self.divergences.push(divergence);
        rollout.select_turns(&keys.only, keys.max_trained_turns, plan_input.seed);
        rollout
    }

    /// Returns the number of the group within which the advantage estimator compares `sample`.
    fn group_number(&mut self, by: GroupBy, group: usize, sample: &EstimatorSample) -> u64 {
        match (by, &sample.agent) {
            (GroupBy::Step, _) => 0,
            (GroupBy::Agent, Some(agent)) => {
                let next = self.agents.len() as u64;
                *self.agents.entry((group, agent.clone())).or_insert(next)
            }
            _ => group as u64,
        }
    }

    /// Assigns the advantages and returns that the estimator computed to the tokens of the
    /// sequences.
    fn set_advantages(&mut self, found: Vec<Vec<SequenceAdvantages>>) {
        let mut found = found.into_iter();
        for (rollout, samples) in self.groups.iter_mut().flatten().zip(&self.samples) {
            let drafts = rollout.sequences.iter();
            let mut advantages: Vec<Vec<f32>> =
                drafts.map(|draft| vec![0.0; draft.sequence.num_tokens()]).collect();
            let mut returns = advantages.clone();
            for sample in samples {
                for ((sequence, tokens), found) in
                    sample.tokens.iter().zip(found.next().unwrap_or_default())
                {
                    for (i, token) in tokens.iter().enumerate() {
                        advantages[*sequence][*token] = found.advantages[i] as f32;
                        returns[*sequence][*token] =
                            found.returns.get(i).map_or(0.0, |r| *r as f32);
                    }
                }
            }
            for ((draft, advantages), returns) in
                rollout.sequences.iter_mut().zip(advantages).zip(returns)
            {
                draft.advantages = PerToken::new(advantages);
                draft.returns = (!draft.signals.values.is_empty()).then(|| PerToken::new(returns));
            }
        }
    }
}

/// Returns whether other policies acted in a group of attempts that contains no target of this
/// policy. Such a group does not count for this policy.
fn belongs_to_other_policies(attempts: &[Attempt], targets: Targets<'_>) -> bool {
    let segments = || attempts.iter().flat_map(|attempt| attempt.trajectory.segments());
    let is_generated = |kind| kind != Kind::Context;
    segments().any(|s| is_generated(s.kind) && s.policy != targets.policy)
        && !segments().any(|s| targets.contains_targets(s))
}

/// Returns the names of the agents that are trained in any of the attempts, in the order of their
/// first turns.
fn trained_agents<'a>(
    attempts: impl Iterator<Item = &'a Trajectory>,
    targets: Targets<'_>,
) -> Vec<String> {
    let mut agents: Vec<String> = Vec::new();
    let sequences = attempts.flat_map(|trajectory| trained_sequences(trajectory, targets));
    for action in sequences.flat_map(|sequence| sequence.turns) {
        if !agents.contains(&action.agent) {
            agents.push(action.agent);
        }
    }
    agents
}

/// A step plan for one policy whose updates are not yet divided into micro-batches.
pub(crate) struct PlanDraft {
    /// The plan, with an empty list of updates.
    plan: PolicyPlan,
    /// Sequences of each optimizer step of one epoch, by group.
    updates: Vec<Vec<GroupSequences>>,
    epochs: u32,
}

/// Sequences of one group: each as the plan records it, and as input of the learner.
type GroupSequences = Vec<(PlannedSequence, SequenceInput)>;

impl PlanDraft {
    /// Completes the plan: the models that are trained divide its updates into micro-batches.
    /// `budget` is the maximum number of tokens per micro-batch.
    ///
    /// # Errors
    /// Returns an error if a learner fails, or if its micro-batches do not cover the update.
    pub async fn into_plan(
        self,
        models: PhaseModels<'_>,
        budget: usize,
    ) -> Result<PolicyPlan, TrainerError> {
        let mut epoch_updates = Vec::with_capacity(self.updates.len());
        for groups in self.updates {
            let mut sequences = Vec::new();
            let mut tokens = |group: GroupSequences| -> Vec<Tokens> {
                let tokens = group.into_iter().map(|(planned, input)| {
                    sequences.push(planned);
                    input.tokens
                });
                tokens.collect()
            };
            let groups = groups.into_iter().map(&mut tokens).collect();
            let update_sequences = UpdateSequences { groups, micro_batch_tokens: budget };
            let micro_batch_plan = models.policy.plan(&update_sequences).await?;
            micro_batch_plan.check(sequences.len(), micro_batch_plan.world_size)?;
            let critic = match models.critic {
                Some(critic) => Some(critic.plan(&update_sequences).await?),
                None => None,
            };
            if let Some(micro_batch_plan) = &critic {
                micro_batch_plan.check(sequences.len(), micro_batch_plan.world_size)?;
            }
            epoch_updates.push(Update { sequences, micro_batch_plan, critic_plan: critic });
        }
        let updates = (0..self.epochs).flat_map(|_| epoch_updates.iter().cloned()).collect();
        Ok(PolicyPlan { updates, ..self.plan })
    }
}

/// Plans an RL step for one policy. `groups` are the groups of attempts that the step trains on.
///
/// # Errors
/// Returns an error if a reward is not finite.
pub(crate) fn draft_rl(
    plan_input: &PlanInput<'_>,
    groups: &[&[Attempt]],
) -> Result<PlanDraft, TrainerError> {
    let PlanInput { keys, kl_coefficient, targets, version, .. } = *plan_input;
    let mut grouped_samples = GroupedSamples::default();
    for (group, attempts) in groups.iter().copied().enumerate() {
        grouped_samples.add_group(plan_input, group, attempts);
    }
    let advantages = keys.estimator().advantages(&grouped_samples.rollouts)?;
    grouped_samples.set_advantages(advantages);
    let GroupedSamples { mut groups, divergences, .. } = grouped_samples;

    let kl = keys.kl.filter(|kl| kl.apply_to == KlTarget::Reward).map(|_| AppliedKlPenalty {
        coefficient: kl_coefficient,
        found: Counting::Exact.mean(divergences.iter().copied()),
        rollouts: divergences.len() as u64,
    });
    let n = groups.len();
    let group_start = |i: usize| i * n / keys.mini_batches;
    // A critic learns from every rollout, whatever its advantage.
    let train_all = keys.loss().has_gradient_without_advantage() || keys.needs_critic();
    let normalizer = keys.normalizer(plan_input.constant_length);
    let mut high_entropy = (keys.high_entropy_fraction < 1.0).then(HighEntropy::default);
    let mut epoch_updates = Vec::with_capacity(keys.mini_batches);
    for i in 0..keys.mini_batches {
        let update_groups = &mut groups[group_start(i)..group_start(i + 1)];
        if let Some(found) = &mut high_entropy {
            keep_high_entropy(update_groups, keys.high_entropy_fraction, found);
        }
        let counting = LossAveraging { normalizer, unit: keys.unit, only: &keys.only };
        epoch_updates.push(plan_update(update_groups, targets, counting, train_all));
    }
    let policy = targets.policy.to_owned();
    let plan = PolicyPlan { policy, version, kl, high_entropy, updates: Vec::new() };
    Ok(PlanDraft { plan, updates: epoch_updates, epochs: keys.epochs })
}

/// Plans a step that imitates demonstrations, for one policy.
pub(crate) fn draft_sft(
    targets: Targets<'_>,
    version: u64,
    demonstrations: &[&Attempt],
    normalizer: Normalizer,
) -> PlanDraft {
    let groups: Vec<Vec<RolloutDraft>> = demonstrations
        .iter()
        .map(|attempt| vec![RolloutDraft::new(attempt, targets, None)])
        .collect();
    // Cross-entropy has a gradient even if the advantage is 0.
    let only = &TrainFilterKeys::default();
    let counting = LossAveraging { normalizer, unit: Unit::Attempt, only };
    let updates = vec![plan_update(&groups, targets, counting, true)];
    let plan = PolicyPlan { policy: targets.policy.to_owned(), version, ..PolicyPlan::default() };
    PlanDraft { plan, updates, epochs: 1 }
}

/// Keeps the advantages of the trained tokens with the highest entropies, and sets the advantages
/// of the other tokens to 0. `fraction` is the fraction of an update's tokens that keep their
/// advantages. Denominators, penalties and a critic still count all tokens.
fn keep_high_entropy(groups: &mut [Vec<RolloutDraft>], fraction: f64, found: &mut HighEntropy) {
    let trained = |draft: &SequenceDraft| {
        let entropies_and_weights =
            draft.signals.entropies.iter().zip(draft.token_weights().collect::<Vec<_>>());
        entropies_and_weights
            .filter(|(_, turn_weight)| *turn_weight != 0.0)
            .map(|(entropy, _)| f64::from(*entropy))
            .collect::<Vec<_>>()
    };
    let rollouts = || groups.iter().flatten().filter(|rollout| rollout.trained);
    let entropies: Vec<f64> =
        rollouts().flat_map(|rollout| &rollout.sequences).flat_map(trained).collect();
    if entropies.is_empty() {
        return;
    }
    let threshold = prepare::entropy_threshold(&entropies, fraction);
    found.tokens += entropies.len() as u64;
    found.kept += entropies.iter().filter(|entropy| **entropy >= threshold).count() as u64;
    found.thresholds.push(threshold);
    for draft in groups.iter_mut().flatten().flat_map(|rollout| &mut rollout.sequences) {
        let entropies_and_weights = draft.advantages.iter().zip(&draft.signals.entropies);
        let kept = entropies_and_weights.map(|(advantage, entropy)| {
            if f64::from(*entropy) >= threshold { advantage } else { 0.0 }
        });
        draft.advantages = PerToken::new(kept.collect::<Vec<_>>());
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
