//! Executes the plan of a step: batches, gradients, optimizer steps.

use std::collections::HashMap;
use std::time::Instant;

use levade_policy::{
    ForwardBackward, Learner, MicroBatchPlan, OptimParams, TrainReport, TrainRequest, crash_point,
};
use levade_recipe::{OptimizerKeys, Phase, Recipe, Schedule};
use levade_rl::correction::Mismatch;
use levade_rl::{Loss, PolicyLoss, explained_variance};
use levade_store::{PlannedSequence, PolicyPlan, StepPlan, Update};
use levade_tree::{AttemptId, SequenceInput, Trajectory, TreeBatch};

use crate::TrainerError;
use crate::batch::{AttemptSequences, Targets};
use crate::metrics::Metrics;
use crate::mismatch::MismatchBreakdown;
use crate::observe::{Event, Observer};
use crate::origin::RunOrigin;
use crate::policies::PhaseModels;
use crate::prepare::{Inputs, UpdatePreparer};
use crate::queries::{ModelQuery, query_model};

/// Results of training a policy on the plan of one step: sums over all its optimizer steps.
#[derive(Debug, Clone, Default)]
pub(crate) struct UpdateOutcome {
    /// Sums of the policy's loss statistics over all updates.
    pub all: ForwardBackward,
    /// Sums of the policy's loss statistics over the first update, which is on policy.
    pub first: ForwardBackward,
    /// Number of optimizer steps that changed the weights.
    pub applied: u32,
    /// Number of optimizer steps that were skipped because the gradient was not finite.
    pub skipped: u32,
    /// Sum of the global gradient norms of the applied optimizer steps.
    grad_norms: f64,
    /// Number of tokens saved by merging sequences into trees.
    merged_tokens: u64,
    /// Time spent on the reference model's log-probabilities, in seconds.
    pub reference_seconds: f64,
    /// Time spent on forward passes before the training passes, in seconds.
    pub prepare_seconds: f64,
    /// Sums of the critic's loss statistics over all updates.
    values: ForwardBackward,
    /// Values that the critic predicted for all trained tokens, and the returns that these values
    /// should match.
    values_before: Vec<f64>,
    returns: Vec<f64>,
    /// Number of optimizer steps that changed the critic.
    critic_updates: u32,
    /// Sum of the global gradient norms of the critic's applied optimizer steps.
    critic_grad_norms: f64,
    /// Time spent on training the critic, in seconds.
    pub critic_seconds: f64,
    /// Time spent on the policy's optimizer steps, in seconds, without the times for reference,
    /// preparation and critic.
    pub update_seconds: f64,
    /// Mismatch between the policies that sampled the tokens and the weights at the start of the
    /// step. `None` if it was not computed.
    mismatch: Option<(Mismatch, MismatchBreakdown)>,
    /// Fraction of tokens whose importance ratio is beyond the bounds of the correction. `None` if
    /// it was not computed.
    out_of_bounds_fraction: Option<f64>,
    /// Number of tokens that an importance correction or a rejection left out of training.
    rejected: u64,
}

/// Returns the loss of a phase. A prompt phase trains no weights, so its loss is never requested.
pub(crate) fn phase_loss(phase: &Phase) -> Loss {
    match phase {
        Phase::Sft(_) | Phase::Prompt(_) => Loss::new(PolicyLoss::CrossEntropy),
        Phase::Rl(keys) => keys.loss(),
    }
}

/// Returns the optimizer's parameters for step `step` (from 0) of a phase with `steps` steps.
/// `peak` is the maximum learning rate of the schedule.
fn optim_params(keys: &OptimizerKeys, peak: f32, step: u32, steps: u32) -> OptimParams {
    OptimParams {
        learning_rate: peak * learning_rate_fraction(keys, step, steps),
        beta1: keys.beta1,
        beta2: keys.beta2,
        epsilon: keys.epsilon,
        weight_decay: keys.weight_decay,
        max_grad_norm: if keys.max_grad_norm == 0.0 { f32::INFINITY } else { keys.max_grad_norm },
    }
}

/// Returns the learning rate at `step` (from 0) of `steps`, as a fraction of the peak learning
/// rate. The rate rises linearly and reaches its peak in the last warm-up step. Then it follows the
/// schedule, which would reach its end one step after the last step.
fn learning_rate_fraction(keys: &OptimizerKeys, step: u32, steps: u32) -> f32 {
    if step < keys.warmup {
        return (f64::from(step + 1) / f64::from(keys.warmup)) as f32;
    }
    let falling = f64::from(steps.saturating_sub(keys.warmup).max(1));
    let progress = f64::from(step - keys.warmup) / falling;
    let remaining = match keys.schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => 1.0 - progress,
        Schedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
    };
    let last = if keys.schedule == Schedule::Constant { 0.0 } else { f64::from(keys.min_lr_ratio) };
    (last + (1.0 - last) * remaining) as f32
}

/// Parameters with which [`run_plan`] executes a plan.
pub(crate) struct UpdateSettings<'a> {
    pub phase: &'a Phase,
    /// Selects the tokens on which the policy is trained.
    pub targets: Targets<'a>,
    /// Random stream of the step, for random choices such as which tokens a loss selects.
    pub stream: u64,
    /// Optimizer parameters of the policy. `None` while only the critic is trained.
    pub policy: Option<OptimParams>,
    /// Optimizer parameters of the critic. `None` if there is no critic.
    pub critic: Option<OptimParams>,
    /// Weight version of the policy at the start of the step.
    pub version: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Whether the log-probabilities that the sampler recorded are bitwise equal to those that
    /// training computes with the same weights.
    pub exact: bool,
}

impl<'a> UpdateSettings<'a> {
    /// Creates the parameters for one step of a phase. `origin` is the record of the run's inputs,
    /// or `None` if there is no such record.
    pub fn new(
        (index, phase): (u32, &'a Phase),
        step: u32,
        origin: Option<&RunOrigin>,
        targets: Targets<'a>,
        version: u64,
        recipe: &Recipe,
    ) -> Self {
        let exact = recipe.cluster.is_one_engine() && !recipe.engine.keep_cache;
        let seed = recipe.run.seed;
        let stream = u64::from(index) << 32 | u64::from(step);
        // Schedules use the number of steps that the phase had when the step was planned.
        let steps = phase.steps();
        let steps = origin.map_or(steps, |origin| origin.scheduled_steps(index, step, steps));
        let optimizer = phase.optimizer();
        let policy = optimizer.map(|(keys, peak)| optim_params(keys, peak, step, steps));
        let Phase::Rl(keys) = phase else {
            return UpdateSettings {
                phase,
                targets,
                stream,
                policy,
                critic: None,
                version,
                seed,
                exact,
            };
        };
        let needed = keys.needs_critic();
        let critic = optim_params(&keys.critic.optimizer, keys.critic.learning_rate, step, steps);
        UpdateSettings {
            phase,
            targets,
            stream,
            policy: policy.filter(|_| step >= keys.critic.warmup || !needed),
            critic: needed.then_some(critic),
            version,
            seed,
            exact,
        }
    }
}

/// Number of micro-batches that a step has processed, and the total number over all its policies.
pub(crate) struct MicroBatchProgress {
    done: usize,
    total: usize,
}

impl MicroBatchProgress {
    /// Creates the progress of a step that has not processed a micro-batch yet.
    pub fn new(plan: &StepPlan) -> Self {
        let updates = plan.policies.iter().flat_map(|policy| &policy.updates);
        MicroBatchProgress {
            done: 0,
            total: updates.map(|update| update.micro_batch_plan.micro_batches.len()).sum(),
        }
    }
}

/// Trains one policy by executing its part of a step plan. `trajectories` must contain every
/// attempt that the plan names.
///
/// # Errors
/// Returns an error if an attempt is missing, or if the learner fails.
pub(crate) async fn run_plan(
    plan: &PolicyPlan,
    trajectories: &HashMap<AttemptId, &Trajectory>,
    models: PhaseModels<'_>,
    settings: &UpdateSettings<'_>,
    progress: &mut MicroBatchProgress,
    observer: &mut dyn Observer,
) -> Result<UpdateOutcome, TrainerError> {
    let mut outcome = UpdateOutcome::default();
    let started = Instant::now();
    let loss = phase_loss(settings.phase);
    let mut preparer = match settings.phase {
        Phase::Rl(keys) => Some(UpdatePreparer::new(
            keys,
            models.policy,
            (settings.seed, settings.stream),
            settings.exact,
        )),
        Phase::Sft(_) | Phase::Prompt(_) => None,
    };
    if let Some(preparer) = &mut preparer {
        let start = Instant::now();
        for update in &plan.updates {
            preparer.compute_proximal(&micro_batch_inputs(update, trajectories, settings)?).await?;
        }
        outcome.prepare_seconds += start.elapsed().as_secs_f64();
    }
    for (i, update) in plan.updates.iter().enumerate() {
        if update.sequences.is_empty() {
            // There is nothing to learn: an optimizer step would only let momentum and weight decay
            // move the weights.
            continue;
        }
        let mut inputs = micro_batch_inputs(update, trajectories, settings)?;
        let batches = update.micro_batch_plan.micro_batches.len();
        let mut after = |done: &mut usize| {
            *done += 1;
            progress.done += 1;
            observer.event(&Event::MicroBatch { done: progress.done, total: progress.total });
            crash_point("micro_batch");
            if *done == batches {
                crash_point("before_optim_step");
            }
        };
        let mut done = 0;
        if let (Some(critic), Some(params), Some(critic_plan), Phase::Rl(keys)) =
            (models.critic, settings.critic, &update.critic_plan, settings.phase)
        {
            let start = Instant::now();
            // As planned: corrections for the policy that sampled a token do not concern the
            // critic's values.
            let sequences: Vec<SequenceInput> =
                sort_inputs(&update.micro_batch_plan, inputs.clone());
            for sequences in critic_plan.apply(&sequences) {
                let sequences: Vec<SequenceInput> = sequences.into_iter().cloned().collect();
                let batch = TreeBatch::merge(&sequences)?;
                let trained = batch.terms.iter().filter(|term| term.weight != 0.0);
                for (value, term) in trained.filter_map(|term| Some((term.value?, term))) {
                    outcome.values_before.push(value.into());
                    outcome.returns.push(term.returns.into());
                }
            }
            let trains_only_critic = settings.policy.is_none();
            let tokens = count_tokens(&sequences);
            let request = TrainRequest { sequences, loss: keys.value_loss(), params };
            let mut count = || {
                if trains_only_critic {
                    after(&mut done)
                }
            };
            let TrainReport { sums, step } = critic.train(request, critic_plan, &mut count).await?;
            sums.iter().for_each(|sums| outcome.values.merge(sums));
            if trains_only_critic {
                outcome.merged_tokens +=
                    tokens.saturating_sub(sums.iter().map(|sums| sums.tokens).sum());
            }
            outcome.critic_grad_norms += if step.applied { step.grad_norm } else { 0.0 };
            outcome.critic_updates += u32::from(step.applied);
            outcome.critic_seconds += start.elapsed().as_secs_f64();
        }
        if let Some(params) = settings.policy {
            if let Some(preparer) = &mut preparer {
                let start = Instant::now();
                preparer.prepare_update(&mut inputs, i == 0, i).await?;
                outcome.prepare_seconds += start.elapsed().as_secs_f64();
            }
            if let (Some(reference), true) = (models.reference, loss.kl.is_some()) {
                let start = Instant::now();
                for inputs in &mut inputs {
                    add_reference_logprobs(inputs, reference).await?;
                }
                outcome.reference_seconds += start.elapsed().as_secs_f64();
            }
            let sequences = sort_inputs(&update.micro_batch_plan, inputs);
            let tokens = count_tokens(&sequences);
            let request = TrainRequest { sequences, loss, params };
            let TrainReport { sums, step } = models
                .policy
                .train(request, &update.micro_batch_plan, &mut || after(&mut done))
                .await?;
            for sums in &sums {
                outcome.all.merge(sums);
                if i == 0 {
                    outcome.first.merge(sums);
                }
            }
            outcome.merged_tokens +=
                tokens.saturating_sub(sums.iter().map(|sums| sums.tokens).sum());
            if step.applied {
                outcome.applied += 1;
                outcome.grad_norms += step.grad_norm;
            } else {
                outcome.skipped += 1;
            }
        }
        crash_point("after_optim_step");
    }
    if let Some(preparer) = preparer {
        outcome.mismatch = preparer.mismatch();
        outcome.out_of_bounds_fraction = preparer.out_of_bounds_fraction();
        outcome.rejected = preparer.rejected;
    }
    let other_seconds =
        outcome.reference_seconds + outcome.prepare_seconds + outcome.critic_seconds;
    outcome.update_seconds = started.elapsed().as_secs_f64() - other_seconds;
    Ok(outcome)
}

/// Returns the learner's inputs for an update, grouped by micro-batch.
fn micro_batch_inputs(
    update: &Update,
    trajectories: &HashMap<AttemptId, &Trajectory>,
    settings: &UpdateSettings<'_>,
) -> Result<Vec<Inputs>, TrainerError> {
    let mut sequences_of: HashMap<AttemptId, AttemptSequences> = HashMap::new();
    let mut input = |sequence: &PlannedSequence| {
        let trajectory = trajectories
            .get(&sequence.attempt)
            .ok_or(TrainerError::Unrecorded(sequence.attempt))?;
        let sequences = sequences_of
            .entry(sequence.attempt)
            .or_insert_with(|| AttemptSequences::from_trajectory(trajectory));
        Ok((
            (sequence.attempt, sequence.leaf),
            sequences.build_input(sequence, settings.targets, settings.version),
        ))
    };
    update
        .micro_batches()
        .into_iter()
        .map(|sequences| sequences.into_iter().map(&mut input).collect())
        .collect()
}

/// Returns the sequences of all micro-batches in the order in which the update lists them.
fn sort_inputs(plan: &MicroBatchPlan, batches: Vec<Inputs>) -> Vec<SequenceInput> {
    let indices = plan.micro_batches.iter().flat_map(|batch| &batch.paths);
    let inputs = batches.into_iter().flatten().map(|(_, input)| input);
    let mut indexed: Vec<(u32, SequenceInput)> = indices.copied().zip(inputs).collect();
    indexed.sort_by_key(|(index, _)| *index);
    indexed.into_iter().map(|(_, input)| input).collect()
}

fn count_tokens(sequences: &[SequenceInput]) -> u64 {
    sequences.iter().map(|sequence| sequence.tokens.len() as u64).sum()
}

async fn add_reference_logprobs(
    inputs: &mut Inputs,
    reference: &dyn Learner,
) -> Result<(), TrainerError> {
    let sequences: Vec<SequenceInput> = inputs.iter().map(|(_, input)| input.clone()).collect();
    let found = query_model(reference, ModelQuery::Logprobs, &sequences).await?;
    for ((_, input), logprobs) in inputs.iter_mut().zip(found) {
        for (target, logprob) in input.targets.iter_mut().zip(logprobs) {
            target.term.reference = Some(logprob);
        }
    }
    Ok(())
}

impl UpdateOutcome {
    /// Adds the results to the metrics of a step, under verl's metric names if they exist.
    pub(crate) fn report(&self, phase: &Phase, params: Option<OptimParams>, metrics: &mut Metrics) {
        let all = &self.all;
        let updates = self.applied + self.skipped;
        metrics.add("actor/lr", params.map_or(0.0, |params| f64::from(params.learning_rate)));
        metrics.add("actor/grad_norm", mean_or_zero(self.grad_norms, u64::from(self.applied)));
        metrics.add("actor/updates", f64::from(self.applied));
        metrics.add("actor/skipped_updates", f64::from(self.skipped));
        metrics.add("actor/entropy", mean_or_zero(all.entropy, all.terms));
        match phase {
            Phase::Sft(_) | Phase::Prompt(_) => {
                metrics.add("train/loss", mean_per_update(all.loss, updates));
                metrics.add("train/nll", mean_or_zero(all.nll, all.terms));
            }
            Phase::Rl(keys) => {
                let loss = keys.loss();
                // With a penalty or a bonus, the sum contains all parts.
                let plain = loss.kl.is_none() && loss.entropy == 0.0;
                let name = if plain { "actor/pg_loss" } else { "actor/loss" };
                metrics.add(name, mean_per_update(all.loss, updates));
                metrics.add("actor/pg_clipfrac", mean_or_zero(all.clipped as f64, all.terms));
                if matches!(loss.policy, PolicyLoss::Clip { dual: Some(_), .. }) {
                    metrics.add(
                        "actor/pg_clipfrac_lower",
                        mean_or_zero(all.dual_clipped as f64, all.terms),
                    );
                }
                metrics.add("actor/ratio", mean_or_zero(all.ratio, all.behavior_terms));
                metrics.add("actor/ppo_kl", mean_or_zero(all.drift, all.behavior_terms));
                if loss.kl.is_some() {
                    metrics.add("actor/kl_loss", mean_or_zero(all.kl, all.terms));
                }
                if keys.needs_critic() {
                    metrics.add(
                        "critic/vf_loss",
                        mean_per_update(self.values.loss, self.critic_updates),
                    );
                    metrics.add(
                        "critic/vf_explained_var",
                        explained_variance(&self.returns, &self.values_before),
                    );
                    metrics.add_spread("critic/values", self.values_before.iter().copied());
                    metrics.add_spread("critic/returns", self.returns.iter().copied());
                    metrics.add(
                        "critic/vf_clipfrac",
                        mean_or_zero(self.values.clipped as f64, self.values.terms),
                    );
                    metrics.add(
                        "critic/grad_norm",
                        mean_or_zero(self.critic_grad_norms, self.critic_updates.into()),
                    );
                }
                if let Some((mismatch, breakdown)) = &self.mismatch {
                    report_mismatch(mismatch, metrics);
                    breakdown.report(metrics);
                    metrics.add(
                        "rollout_corr/beyond_bounds",
                        self.out_of_bounds_fraction.unwrap_or_default(),
                    );
                    metrics.add("rollout_corr/rejected_tokens", self.rejected as f64);
                }
                // Both must be 0 on policy: the training forward pass reproduces the sampled
                // log-probabilities, bit for bit.
                metrics.add("training/logprob_mismatch", self.first.mismatched as f64);
                metrics.add("training/logprob_mismatch_max", f64::from(self.first.max_mismatch));
            }
        }
        metrics.add("training/targets", all.targets as f64);
        metrics.add("training/forward_tokens", all.tokens as f64);
        metrics.add("training/merged_away_tokens", self.merged_tokens as f64);
    }
}

/// Adds the divergence between the policies that sampled the tokens and the policy at the start of
/// the step, under verl's metric names.
fn report_mismatch(found: &Mismatch, metrics: &mut Metrics) {
    for (name, value) in [
        ("rollout_corr/kl", found.kl),
        ("rollout_corr/k3_kl", found.k3_kl),
        ("rollout_corr/log_diff_mean", found.log_diff_mean),
        ("rollout_corr/log_diff_max", found.log_diff_max),
        ("rollout_corr/training_ppl", found.training_ppl),
        ("rollout_corr/rollout_ppl", found.rollout_ppl),
        ("rollout_corr/log_ppl_diff", found.log_ppl_diff),
        ("rollout_corr/log_ppl_abs_diff", found.log_ppl_abs_diff),
        ("rollout_corr/ppl_ratio", found.ppl_ratio),
        ("rollout_corr/chi2_token", found.chi2_token),
        ("rollout_corr/chi2_seq", found.chi2_seq),
        ("rollout_corr/rollout_is_eff_sample_size", found.effective_sample_size),
        ("training/rollout_probs_diff_max", found.probs_diff_max),
        ("training/rollout_probs_diff_mean", found.probs_diff_mean),
        ("training/rollout_probs_diff_std", found.probs_diff_std),
        ("training/rollout_actor_probs_pearson_corr", found.probs_correlation),
    ] {
        metrics.add(name, value);
    }
}

/// Returns the mean loss per update. Each update's loss covers only a fraction of the attempts.
fn mean_per_update(sum: f64, updates: u32) -> f64 {
    sum / f64::from(updates.max(1))
}

fn mean_or_zero(sum: f64, count: u64) -> f64 {
    if count == 0 { 0.0 } else { sum / count as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learning_rate_follows_warmup_and_schedule() {
        for (schedule, warmup, min_lr_ratio, expected) in [
            (Schedule::Constant, 2, 0.5, &[0.5f32, 1.0, 1.0, 1.0][..]),
            (Schedule::Linear, 0, 0.0, &[1.0, 0.75, 0.5, 0.25]),
            (Schedule::Linear, 1, 0.2, &[1.0, 1.0, 0.8, 0.6, 0.4]),
            (Schedule::Cosine, 0, 0.0, &[1.0, 0.854, 0.5, 0.146]),
            // A warm-up longer than the phase never reaches the peak.
            (Schedule::Cosine, 4, 0.0, &[0.25, 0.5]),
        ] {
            let keys = OptimizerKeys { schedule, warmup, min_lr_ratio, ..Default::default() };
            let steps = expected.len() as u32;
            let found: Vec<f32> = (0..steps)
                .map(|step| (1000.0 * learning_rate_fraction(&keys, step, steps)).round() / 1000.0)
                .collect();
            assert_eq!(found, expected, "{keys:?}");
        }
    }

    /// Returns a recipe whose critic differs from its policy in every number.
    fn recipe_with_critic() -> (tempfile::TempDir, Recipe) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let text = "
            run = { name = 'x' }
            model = { source = './model' }
            tasks = [{ kind = 'arithmetic' }]
            [[phase]]
            kind = 'rl'
            algorithm = 'ppo'
            steps = 4
            groups = 1
            group_size = 1
            learning_rate = 0.25
            optimizer = { max_grad_norm = 0.5, weight_decay = 0.125 }
            critic = { learning_rate = 0.75, clip = 0.2, warmup = 2, optimiser = { max_grad_norm = 3.0 } }
        ";
        std::fs::write(&file, text).unwrap();
        let recipe = Recipe::load(&file, &[]).unwrap();
        (dir, recipe)
    }

    fn settings_of_step(recipe: &Recipe, step: u32) -> UpdateSettings<'_> {
        UpdateSettings::new((0, &recipe.phase[0]), step, None, Targets::DEFAULT, 0, recipe)
    }

    #[test]
    fn max_grad_norm_follows_recipe() {
        let (_dir, recipe) = recipe_with_critic();
        let settings = settings_of_step(&recipe, 3);
        let norms = [settings.policy, settings.critic].map(|params| params.unwrap().max_grad_norm);
        assert_eq!(norms, [0.5, 3.0]);
        let unclipped = OptimizerKeys { max_grad_norm: 0.0, ..OptimizerKeys::default() };
        assert_eq!(optim_params(&unclipped, 1.0, 0, 1).max_grad_norm, f32::INFINITY);
    }

    #[test]
    fn critic_has_separate_rate_clip_and_warmup() {
        let (_dir, recipe) = recipe_with_critic();
        let rates = |step| {
            let settings = settings_of_step(&recipe, step);
            [settings.policy, settings.critic]
                .map(|params| params.map(|params| params.learning_rate))
        };
        // Only the critic learns in the first two steps.
        assert_eq!([0, 1].map(rates), [[None, Some(0.75)]; 2]);
        assert_eq!([2, 3].map(rates), [[Some(0.25), Some(0.75)]; 2]);
        let Phase::Rl(keys) = &recipe.phase[0] else { panic!() };
        assert_eq!(keys.value_loss(), Loss::new(PolicyLoss::Value { clip: Some(0.2) }));
        let free = levade_recipe::CriticKeys { clip: 0.0, ..keys.critic.clone() };
        let free = levade_recipe::RlKeys { critic: free, ..(**keys).clone() };
        assert_eq!(free.value_loss(), Loss::new(PolicyLoss::Value { clip: None }));
    }
}
