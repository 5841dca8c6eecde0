//! Queries the models about the sequences of a step before it is planned: a critic's values,
//! log-probabilities of a reference, entropies of the policy.
//!
//! Advantage estimators need these numbers in addition to rewards. The greedy baseline attempt
//! (ReMax) is sampled alongside the other attempts.

use std::collections::HashMap;

use levade_recipe::{KlTarget, OverlongAttempts, RlKeys};
use levade_store::{Attempt, PerToken, PlannedSequence};
use levade_tree::{AttemptId, SegmentId, SequenceInput, SequenceTarget, Term, Trajectory};

use crate::TrainerError;
use crate::batch::{AttemptSequences, Targets, trained_sequences};
use crate::policies::PhaseModels;
use crate::queries::{ModelQuery, SequenceKey, predict_in_micro_batches, query_in_micro_batches};
use crate::rewards::is_truncated;

/// Values that models computed for a sequence, one per trained token in each list. A list is empty
/// if the loss does not need it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SequenceSignals {
    /// Values that the critic predicted.
    pub values: Vec<f32>,
    /// Value that the critic predicted for the state in which the sequence was truncated. `None` if
    /// the sequence was not truncated or no critic is used.
    pub truncation_value: Option<f32>,
    /// Log-probabilities under the policy's weights at the start of the step.
    pub logprobs: Vec<f32>,
    /// Log-probabilities under the reference model.
    pub reference: Vec<f32>,
    /// Entropies of the predicted distributions under the policy's weights at the start of the
    /// step, in nats.
    pub entropies: Vec<f32>,
    /// Sums of squared probabilities Σ p² of the same distributions.
    pub concentrations: Vec<f32>,
}

/// The model values of all sequences of a step, by sequence.
#[derive(Default)]
pub(crate) struct SignalTable(HashMap<SequenceKey, SequenceSignals>);

impl SignalTable {
    /// Queries the models for the values that the advantage estimator needs. `context` is the
    /// maximum sequence length of the models, and `budget` the maximum number of tokens per
    /// micro-batch.
    ///
    /// # Errors
    /// Returns an error if a model fails.
    pub async fn query(
        keys: &RlKeys,
        models: PhaseModels<'_>,
        targets: Targets<'_>,
        groups: &[&[Attempt]],
        context: usize,
        budget: usize,
    ) -> Result<Self, TrainerError> {
        let charged = keys.kl.is_some_and(|kl| kl.apply_to == KlTarget::Reward);
        let mut heard = SignalTable::default();
        if !charged && models.critic.is_none() && !keys.needs_predictions() {
            return Ok(heard);
        }
        let sequences = trainable_sequences(groups, targets);
        if let Some(critic) = models.critic {
            for (key, values) in
                query_in_micro_batches(critic, ModelQuery::Values, &sequences, budget).await?
            {
                heard.entry_mut(key).values = values;
            }
            if keys.overlong == OverlongAttempts::Bootstrap {
                heard.query_truncation_values(critic, targets, groups, context, budget).await?;
            }
        }
        if let Some(reference) = models.reference.filter(|_| charged) {
            for (key, logprobs) in
                query_in_micro_batches(models.policy, ModelQuery::Logprobs, &sequences, budget)
                    .await?
            {
                heard.entry_mut(key).logprobs = logprobs;
            }
            for (key, logprobs) in
                query_in_micro_batches(reference, ModelQuery::Logprobs, &sequences, budget).await?
            {
                heard.entry_mut(key).reference = logprobs;
            }
        }
        if keys.needs_predictions() {
            for (key, found) in predict_in_micro_batches(models.policy, &sequences, budget).await? {
                let signals = heard.entry_mut(key);
                (signals.logprobs, signals.entropies) = (found.logprobs, found.entropies);
                signals.concentrations = found.concentrations;
            }
        }
        Ok(heard)
    }

    /// Returns the model values of one sequence. The lists are empty if there are none.
    pub fn get(&self, attempt: AttemptId, leaf: SegmentId) -> SequenceSignals {
        self.0.get(&(attempt, leaf)).cloned().unwrap_or_default()
    }

    fn entry_mut(&mut self, key: SequenceKey) -> &mut SequenceSignals {
        self.0.entry(key).or_default()
    }

    /// Queries the critic for the values of the states in which attempts were truncated.
    async fn query_truncation_values(
        &mut self,
        critic: &dyn levade_policy::Learner,
        targets: Targets<'_>,
        groups: &[&[Attempt]],
        context: usize,
        budget: usize,
    ) -> Result<(), TrainerError> {
        let mut fitting = Vec::new();
        let is_truncated_attempt =
            |attempt: &&Attempt| attempt.reward.is_some() && is_truncated(attempt);
        for attempt in groups.iter().copied().flatten().filter(is_truncated_attempt) {
            let Some((leaf, input)) = end_input(&attempt.trajectory, targets) else { continue };
            let key = (attempt.id, leaf);
            if input.tokens.len() <= context {
                fitting.push((key, input));
            } else {
                // No state follows a full context, so the last value is used instead.
                let signals = self.entry_mut(key);
                signals.truncation_value = signals.values.last().copied();
            }
        }
        for (key, values) in
            query_in_micro_batches(critic, ModelQuery::Values, &fitting, budget).await?
        {
            self.entry_mut(key).truncation_value = values.first().copied();
        }
        Ok(())
    }
}

/// Returns the learner's input for every trainable sequence of attempts that have a reward, with
/// all targets.
pub(crate) fn trainable_sequences(
    groups: &[&[Attempt]],
    targets: Targets<'_>,
) -> Vec<(SequenceKey, SequenceInput)> {
    let mut found = Vec::new();
    for attempt in groups.iter().copied().flatten().filter(|attempt| attempt.reward.is_some()) {
        let sequences = AttemptSequences::from_trajectory(&attempt.trajectory);
        for sequence in trained_sequences(&attempt.trajectory, targets) {
            let planned = PlannedSequence {
                attempt: attempt.id,
                leaf: sequence.leaf,
                advantage: PerToken::uniform(0.0),
                weight: PerToken::uniform(0.0),
                returns: None,
                values: None,
            };
            found.push(((attempt.id, sequence.leaf), sequences.build_input(&planned, targets, 0)));
        }
    }
    found
}

/// Returns the sequence of an attempt that contains the last target, extended by one token as the
/// only target. The critic's value of this token is the value of the state in which the attempt
/// ended. Returns `None` if nothing was sampled.
fn end_input(trajectory: &Trajectory, targets: Targets<'_>) -> Option<(SegmentId, SequenceInput)> {
    let sequence = trained_sequences(trajectory, targets).into_iter().max_by_key(|sequence| {
        sequence.turns.iter().flat_map(|action| &action.segments).map(|(segment, _)| *segment).max()
    })?;
    let mut tokens = trajectory.sequence_tokens(sequence.leaf);
    let index = tokens.len() as u32;
    // The token does not matter: only the state before it is evaluated.
    tokens.push(*tokens.last()?);
    let target = SequenceTarget { index, temperature: 1.0, term: Term::default() };
    Some((sequence.leaf, SequenceInput { tokens: tokens.into(), targets: vec![target] }))
}

#[cfg(test)]
mod tests {
    use levade_tree::{Kind, Segment, VersionRun};

    use super::*;

    #[test]
    fn end_input_extends_sequence_of_last_action() {
        let mut t = Trajectory::new();
        let sampled = |parent, token: u32| Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0],
            versions: vec![VersionRun { version: 0, len: 1 }],
            ..Segment::context(Some(SegmentId(parent)), vec![token], 0)
        };
        assert_eq!(end_input(&t, Targets::DEFAULT).map(|(leaf, _)| leaf), None);
        t.push(Segment::context(None, vec![1, 2], 0)).unwrap();
        assert_eq!(end_input(&t, Targets::DEFAULT).map(|(leaf, _)| leaf), None);
        t.push(sampled(0, 3)).unwrap();
        t.push(sampled(0, 4)).unwrap();
        // The observation after the last action is part of the final state.
        t.push(Segment::context(Some(SegmentId(2)), vec![5, 6], 1)).unwrap();
        let (leaf, input) = end_input(&t, Targets::DEFAULT).unwrap();
        assert_eq!((leaf, input.tokens), (SegmentId(3), vec![1, 2, 4, 5, 6, 6].into()));
        let [target] = &input.targets[..] else { panic!() };
        assert_eq!(target.index, 5);
    }
}
