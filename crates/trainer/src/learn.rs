//! Running the plan of a step: batches, gradients, optimiser steps.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use dressage_policy::{ForwardBackward, Learner, OptimParams, crash_point};
use dressage_rl::{Loss, PolicyLoss};
use dressage_store::{AttemptKey, PlannedPath, StepPlan};
use dressage_tree::{Trajectory, TreeBatch};

use crate::TrainerError;
use crate::batch::path_input;
use crate::metrics::Metrics;
use crate::observe::{Event, Observer};
use crate::recipe::{OptimiserKeys, Phase, Schedule};

/// What the optimiser steps of a step found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Learned {
    /// Sums over all updates.
    pub all: ForwardBackward,
    /// Sums over the first update, which is on policy.
    pub first: ForwardBackward,
    /// Optimiser steps that changed the weights.
    pub applied: u32,
    /// Optimiser steps skipped because the gradient was not finite.
    pub skipped: u32,
    /// Global gradient norm, summed over optimiser steps with a finite one.
    grad_norms: f64,
    /// Tokens that merging saved.
    merged_away: u64,
    /// Seconds that log-probabilities of the reference took.
    pub reference_seconds: f64,
}

/// The loss of a phase.
pub(crate) fn loss_of(phase: &Phase) -> Loss {
    match phase {
        Phase::Sft(_) => Loss::of(PolicyLoss::CrossEntropy),
        Phase::Grpo(keys) => Loss {
            policy: PolicyLoss::Clip {
                low: keys.clip_low,
                high: keys.clip_high,
                dual: keys.clip_dual,
                trust: None,
                keep: None,
            },
            kl: keys.kl,
            entropy: 0.0,
        },
    }
}

/// The optimiser's numbers for one step.
pub(crate) fn optim_params(phase: &Phase, step: u32, steps: u32) -> OptimParams {
    let keys = phase.optimiser();
    OptimParams {
        learning_rate: phase.learning_rate() * share_of_peak(keys, step, steps),
        beta1: keys.beta1,
        beta2: keys.beta2,
        epsilon: keys.epsilon,
        weight_decay: keys.weight_decay,
        max_grad_norm: if keys.max_grad_norm == 0.0 { f32::INFINITY } else { keys.max_grad_norm },
    }
}

/// The share of the peak learning rate at `step`, from 0, of `steps`: a linear rise over the warm-up, whose last step has
/// the peak, then the schedule, which would reach its end one step after the last.
fn share_of_peak(keys: &OptimiserKeys, step: u32, steps: u32) -> f32 {
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
    let last = if keys.schedule == Schedule::Constant { 0.0 } else { f64::from(keys.final_share) };
    (last + (1.0 - last) * remaining) as f32
}

/// Runs a plan. `trajectories` holds every attempt that it names.
///
/// # Errors
/// When an attempt is missing or cannot be trained on, or the learner fails.
pub(crate) async fn run_plan(
    plan: &StepPlan,
    trajectories: &HashMap<AttemptKey, &Trajectory>,
    learner: &dyn Learner,
    reference: Option<&dyn Learner>,
    loss: Loss,
    params: OptimParams,
    observer: &mut dyn Observer,
) -> Result<Learned, TrainerError> {
    let mut learned = Learned::default();
    let total: usize = plan.updates.iter().map(|update| update.micro_batches.len()).sum();
    let mut done = 0;
    for (i, update) in plan.updates.iter().enumerate() {
        if update.micro_batches.is_empty() {
            // Nothing to learn: an optimiser step would only let its momentum and decay move the weights.
            continue;
        }
        for paths in &update.micro_batches {
            let mut batch = batch_of(paths, trajectories)?;
            if let (Some(reference), true) = (reference, loss.kl.is_some()) {
                let start = Instant::now();
                add_reference(&mut batch, reference).await?;
                learned.reference_seconds += start.elapsed().as_secs_f64();
            }
            learned.merged_away += batch.path_tokens - batch.tokens.len() as u64;
            let sums = learner.forward_backward(Arc::new(batch), loss).await?;
            learned.all.merge(&sums);
            if i == 0 {
                learned.first.merge(&sums);
            }
            done += 1;
            observer.event(&Event::MicroBatch { done, total });
            crash_point("micro_batch");
        }
        crash_point("before_optim_step");
        let report = learner.optim_step(params).await?;
        crash_point("after_optim_step");
        if report.applied {
            learned.applied += 1;
            learned.grad_norms += report.grad_norm;
        } else {
            learned.skipped += 1;
        }
    }
    Ok(learned)
}

fn batch_of(
    paths: &[PlannedPath],
    trajectories: &HashMap<AttemptKey, &Trajectory>,
) -> Result<TreeBatch, TrainerError> {
    let inputs = paths
        .iter()
        .map(|path| {
            let trajectory = trajectories.get(&path.attempt).ok_or(TrainerError::Unrecorded(path.attempt))?;
            path_input(trajectory, path)
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(TreeBatch::merge(&inputs)?)
}

async fn add_reference(batch: &mut TreeBatch, reference: &dyn Learner) -> Result<(), TrainerError> {
    let shared = Arc::new(std::mem::take(batch));
    let logprobs = reference.logprobs(shared.clone()).await?;
    *batch = Arc::unwrap_or_clone(shared);
    for (target, logprob) in batch.targets.iter().zip(logprobs) {
        let first = target.first_term as usize;
        for term in &mut batch.terms[first..first + target.terms as usize] {
            term.reference = Some(logprob);
        }
    }
    Ok(())
}

impl Learned {
    /// Adds what was learned to the metrics of a step.
    pub(crate) fn report(&self, phase: &Phase, params: OptimParams, metrics: &mut Metrics) {
        let all = &self.all;
        let mean = |sum: f64, count: u64| if count == 0 { 0.0 } else { sum / count as f64 };
        metrics.add("actor/lr", f64::from(params.learning_rate));
        metrics.add("actor/grad_norm", mean(self.grad_norms, u64::from(self.applied)));
        metrics.add("actor/updates", f64::from(self.applied));
        metrics.add("actor/skipped_updates", f64::from(self.skipped));
        metrics.add("actor/entropy", mean(all.entropy, all.targets));
        match phase {
            Phase::Sft(_) => {
                metrics.add("train/loss", all.loss);
                metrics.add("train/nll", mean(all.nll, all.targets));
            }
            Phase::Grpo(keys) => {
                // With a penalty the sum holds both parts.
                metrics.add(if keys.kl.is_some() { "actor/loss" } else { "actor/pg_loss" }, all.loss);
                metrics.add("actor/pg_clipfrac", mean(all.clipped as f64, all.terms));
                metrics.add("actor/ratio", mean(all.ratio, all.behaviour_terms));
                if keys.kl.is_some() {
                    metrics.add("actor/kl_loss", mean(all.kl, all.terms));
                }
                // On policy both must be 0: the training forward gives the sampled log-probabilities, bit for bit.
                metrics.add("training/logprob_mismatch", self.first.mismatched as f64);
                metrics.add("training/logprob_mismatch_max", f64::from(self.first.max_mismatch));
            }
        }
        metrics.add("training/targets", all.targets as f64);
        metrics.add("training/forward_tokens", all.tokens as f64);
        metrics.add("training/merged_away_tokens", self.merged_away as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules() {
        let keys = |schedule, warmup, final_share| OptimiserKeys {
            schedule,
            warmup,
            final_share,
            ..Default::default()
        };
        let shares = |keys: &OptimiserKeys, steps| -> Vec<f32> {
            (0..steps).map(|step| (1000.0 * share_of_peak(keys, step, steps)).round() / 1000.0).collect()
        };
        assert_eq!(shares(&keys(Schedule::Constant, 2, 0.5), 4), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(shares(&keys(Schedule::Linear, 0, 0.0), 4), [1.0, 0.75, 0.5, 0.25]);
        assert_eq!(shares(&keys(Schedule::Linear, 1, 0.2), 5), [1.0, 1.0, 0.8, 0.6, 0.4]);
        assert_eq!(shares(&keys(Schedule::Cosine, 0, 0.0), 4), [1.0, 0.854, 0.5, 0.146]);
        // A warm-up longer than the phase never gets to the peak.
        assert_eq!(shares(&keys(Schedule::Cosine, 4, 0.0), 2), [0.25, 0.5]);
    }
}
