//! Computes the inputs of an update's loss that a single token does not determine.
//!
//! Most losses need only the values of one token. Some losses need more:
//! - GSPO: the ratio of a complete sequence,
//! - KL-Cov: the tokens of an update with the highest covariance,
//! - decoupled PPO: the proximal policy,
//! - corrections: importance weights for tokens that older weights sampled.
//!
//! These values are computed from the log-probabilities of a forward pass. If the current weights
//! sampled the tokens, the recorded log-probabilities are used instead, because they are bitwise
//! equal (except with `engine.keep_cache`). The values are stored in the terms, so that an update
//! is one call of [`Learner::train`], wherever the learner runs.
//!
//! Corrections change the weights of the policy's loss only. The critic learns from the unchanged
//! plan.

use std::collections::HashMap;

use levade_policy::{Learner, uniform};
use levade_recipe::{ProximalPolicy, RlKeys};
use levade_rl::correction::Mismatch;
use levade_rl::{Counting, Loss, Point, PolicyLoss, prepare};
use levade_tree::{SequenceInput, SequenceTarget, Term};

use crate::TrainerError;
use crate::mismatch::MismatchBreakdown;
use crate::queries::{ModelQuery, SequenceKey, query_model};

/// The sequences of one micro-batch, as inputs of the learner.
pub(crate) type Inputs = Vec<(SequenceKey, SequenceInput)>;

/// Computes the inputs that the losses of a step's updates need: proximal log-probabilities,
/// importance weights, and selections of tokens.
pub(crate) struct UpdatePreparer<'a> {
    keys: &'a RlKeys,
    learner: &'a dyn Learner,
    /// Log-probabilities of each sequence's trained tokens under the weights at the start of the
    /// step.
    proximal: HashMap<SequenceKey, Vec<f32>>,
    /// Seed of the run and random stream of the step, from which tokens are selected.
    random: (u64, u64),
    /// Whether the log-probabilities that the sampler recorded are bitwise equal to those that the
    /// learner computes with the same weights. They differ if a completion continues after an
    /// update with the keys and values of the earlier weights.
    exact: bool,
    /// Proximal and behavior log-probability of each trained token, by sequence.
    pairs: Vec<Vec<(f64, f64)>>,
    /// Mismatch between proximal and behavior policy, by age and position of the token.
    breakdown: MismatchBreakdown,
    /// Number of trained tokens that an importance correction or a rejection left out.
    pub rejected: u64,
}

impl<'a> UpdatePreparer<'a> {
    pub fn new(
        keys: &'a RlKeys,
        learner: &'a dyn Learner,
        random: (u64, u64),
        exact: bool,
    ) -> Self {
        UpdatePreparer {
            keys,
            learner,
            proximal: HashMap::new(),
            random,
            exact,
            pairs: Vec::new(),
            breakdown: MismatchBreakdown::default(),
            rejected: 0,
        }
    }

    /// Returns whether the recorded log-probabilities can replace the learner's log-probabilities
    /// at the start of the step: they are bitwise exact, and the current weights sampled every
    /// token.
    fn can_reuse_recorded(&self, inputs: &[SequenceInput]) -> bool {
        let terms =
            || inputs.iter().flat_map(|input| input.targets.iter().map(|target| &target.term));
        self.exact && terms().all(|term| term.age == 0 && term.behavior.is_some())
    }

    /// Computes the log-probabilities under the weights at the start of the step. Must be called
    /// before the first update. If the current weights sampled the tokens, their recorded
    /// log-probabilities are used instead, because they are bitwise equal.
    pub async fn compute_proximal(&mut self, batches: &[Inputs]) -> Result<(), TrainerError> {
        if self.keys.proximal != ProximalPolicy::Recompute {
            return Ok(());
        }
        for batch in batches {
            let fresh: Vec<&(SequenceKey, SequenceInput)> =
                batch.iter().filter(|(key, _)| !self.proximal.contains_key(key)).collect();
            if fresh.is_empty() {
                continue;
            }
            let inputs: Vec<SequenceInput> = fresh.iter().map(|(_, input)| input.clone()).collect();
            let found = if self.can_reuse_recorded(&inputs) {
                inputs.iter().map(behavior_logprobs).collect()
            } else {
                query_model(self.learner, ModelQuery::Logprobs, &inputs).await?
            };
            for ((key, input), logprobs) in fresh.into_iter().zip(found) {
                let both = logprobs.iter().zip(behavior_logprobs(input)).zip(&input.targets);
                let mut pairs = Vec::with_capacity(input.targets.len());
                for ((&proximal, behavior), target) in
                    both.filter(|(_, target)| target.term.weight != 0.0)
                {
                    let pair = (f64::from(proximal), f64::from(behavior));
                    self.breakdown.add(target.term.age, target.index, (pair.0 - pair.1).abs());
                    pairs.push(pair);
                }
                self.pairs.push(pairs);
                self.proximal.insert(*key, logprobs);
            }
        }
        Ok(())
    }

    /// Returns the mismatch between the policies that sampled the step's tokens and the proximal
    /// policy, overall and by class of tokens. Returns `None` if the recipe does not recompute the
    /// proximal policy.
    pub fn mismatch(&self) -> Option<(Mismatch, MismatchBreakdown)> {
        (self.keys.proximal == ProximalPolicy::Recompute)
            .then(|| (Mismatch::new(&self.pairs, Counting::Exact), self.breakdown.clone()))
    }

    /// Returns the fraction of tokens whose ratio of proximal to behavior probability is beyond the
    /// bounds of the importance correction. Returns `None` if the recipe has no correction, or does
    /// not recompute the proximal policy.
    pub fn out_of_bounds_fraction(&self) -> Option<f64> {
        let correction =
            self.keys.correction().filter(|_| self.keys.proximal == ProximalPolicy::Recompute)?;
        let sequences = self.pairs.iter();
        let log_ratios: Vec<Vec<f64>> =
            sequences.map(|pairs| pairs.iter().map(|(p, b)| p - b).collect()).collect();
        correction.out_of_bounds_fraction(&log_ratios)
    }

    /// Adds to the sequences of an update the values that its loss needs. `first` is true if no
    /// update has changed the weights since the start of the step.
    pub async fn prepare_update(
        &mut self,
        batches: &mut [Inputs],
        first: bool,
        update: usize,
    ) -> Result<(), TrainerError> {
        for (key, input) in batches.iter_mut().flatten() {
            for (target, logprob) in
                input.targets.iter_mut().zip(self.proximal.get(key).into_iter().flatten())
            {
                target.term.proximal = Some(*logprob);
            }
        }
        let loss = self.keys.loss();
        let needs_current_logprobs = matches!(
            loss.policy,
            PolicyLoss::Gspo { .. }
                | PolicyLoss::GeometricMean { .. }
                | PolicyLoss::KlCov { .. }
                | PolicyLoss::ClipCov { .. }
        );
        let mut current_logprobs: Vec<Vec<f32>> = Vec::new();
        if needs_current_logprobs {
            for batch in batches.iter() {
                let inputs: Vec<SequenceInput> =
                    batch.iter().map(|(_, input)| input.clone()).collect();
                if first && self.can_reuse_recorded(&inputs) {
                    current_logprobs.extend(inputs.iter().map(behavior_logprobs));
                } else {
                    current_logprobs
                        .extend(query_model(self.learner, ModelQuery::Logprobs, &inputs).await?);
                }
            }
        }
        let mut inputs: Vec<&mut SequenceInput> =
            batches.iter_mut().flatten().map(|(_, input)| input).collect();
        self.apply_correction(&mut inputs);
        let mut points: Vec<Vec<Point>> = inputs
            .iter()
            .zip(&current_logprobs)
            .map(|(input, logps)| loss_points(&loss, input, logps))
            .collect();
        match loss.policy {
            PolicyLoss::Gspo { .. } => {
                points.iter_mut().for_each(|sequence| prepare::set_sequence_ratios(sequence))
            }
            PolicyLoss::GeometricMean { low, high } => {
                points
                    .iter_mut()
                    .for_each(|sequence| prepare::set_geometric_means(sequence, low, high));
            }
            PolicyLoss::KlCov { fraction, .. } => {
                update_points(&mut points, |all| prepare::mark_covarying(all, fraction))
            }
            PolicyLoss::ClipCov { fraction, lower, upper, .. } => {
                let (seed, stream) = self.random;
                let random = |i: usize| uniform(seed, stream, (update as u64) << 32 | i as u64);
                update_points(&mut points, |all| {
                    let clipped = |point: &Point| loss.at(point).clipped;
                    for i in prepare::select_covarying(all, clipped, fraction, lower, upper, random)
                    {
                        all[i].marked = true;
                    }
                });
            }
            _ => return Ok(()),
        }
        for (input, points) in inputs.into_iter().zip(points) {
            for (target, point) in input.targets.iter_mut().zip(points) {
                target.term.sequence_log_ratio = point.sequence_log_ratio.map(|x| x as f32);
                target.term.selected = point.marked;
                target.term.advantage = point.advantage as f32;
            }
        }
        Ok(())
    }

    /// Adds importance weights to trained tokens, and sets the weights of rejected tokens to 0.
    /// Does nothing if the proximal policy is only approximated, because the loss then corrects
    /// each token.
    fn apply_correction(&mut self, inputs: &mut [&mut SequenceInput]) {
        let Some(correction) =
            self.keys.correction().filter(|_| self.keys.proximal == ProximalPolicy::Recompute)
        else {
            return;
        };
        let log_ratio = |term: &Term| match (term.proximal, term.behavior) {
            (Some(proximal), Some(behavior)) => f64::from(proximal) - f64::from(behavior),
            _ => 0.0,
        };
        let mut sequences: Vec<Vec<&mut Term>> =
            inputs.iter_mut().map(|input| trained_terms(&mut input.targets).collect()).collect();
        let log_ratios_of =
            |sequence: &Vec<&mut Term>| sequence.iter().map(|term| log_ratio(term)).collect();
        let log_ratios: Vec<Vec<f64>> = sequences.iter().map(log_ratios_of).collect();
        let weights = correction.weights(&log_ratios, Counting::Exact);
        for (term, weight) in sequences.iter_mut().flatten().zip(weights.into_iter().flatten()) {
            term.correction = Some(weight as f32);
        }
        for rejection in &self.keys.rejection {
            let kept = rejection.kept_tokens(&log_ratios, Counting::Exact);
            for (term, kept) in sequences.iter_mut().flatten().zip(kept.into_iter().flatten()) {
                term.weight = if kept { term.weight } else { 0.0 };
            }
        }
        let is_rejected = |term: &&mut Term| term.weight == 0.0 || term.correction == Some(0.0);
        self.rejected += sequences.iter().flatten().filter(|term| is_rejected(term)).count() as u64;
    }
}

/// Returns the loss terms of the trained tokens, whose weights are not 0.
fn trained_terms(targets: &mut [SequenceTarget]) -> impl Iterator<Item = &mut Term> {
    targets.iter_mut().map(|target| &mut target.term).filter(|term| term.weight != 0.0)
}

fn behavior_logprobs(input: &SequenceInput) -> Vec<f32> {
    input.targets.iter().map(|target| target.term.behavior.unwrap_or(0.0)).collect()
}

fn loss_points(loss: &Loss, input: &SequenceInput, logps: &[f32]) -> Vec<Point> {
    input.targets.iter().zip(logps).map(|(target, logp)| loss.point(*logp, &target.term)).collect()
}

/// Applies `choose` once to the points of all sequences, joined into one list.
fn update_points(sequences: &mut [Vec<Point>], choose: impl FnOnce(&mut [Point])) {
    let mut all = sequences.concat();
    choose(&mut all);
    let mut rest = all.into_iter();
    for sequence in sequences {
        let len = sequence.len();
        *sequence = rest.by_ref().take(len).collect();
    }
}

#[cfg(test)]
#[path = "prepare_tests.rs"]
mod tests;
