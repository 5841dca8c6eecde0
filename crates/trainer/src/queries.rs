//! Queries models about sequences before they are trained: log-probabilities and values, token by
//! token.

use std::collections::HashMap;
use std::sync::Arc;

use levade_policy::{Learner, Predictions};
use levade_tree::{AttemptId, SegmentId, SequenceInput, TreeBatch};

use crate::TrainerError;

/// Identifies a sequence by its attempt and leaf.
pub(crate) type SequenceKey = (AttemptId, SegmentId);

/// Values that a query requests from a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelQuery {
    /// Log-probabilities of the trained tokens.
    Logprobs,
    /// Values that a critic assigns to the states before the trained tokens.
    Values,
}

/// Queries a model about every trained token of every sequence, in micro-batches. A micro-batch has
/// at most `budget` tokens, or a single longer sequence.
pub(crate) async fn query_in_micro_batches(
    learner: &dyn Learner,
    question: ModelQuery,
    sequences: &[(SequenceKey, SequenceInput)],
    budget: usize,
) -> Result<HashMap<SequenceKey, Vec<f32>>, TrainerError> {
    let mut found = HashMap::with_capacity(sequences.len());
    for batch_inputs in split_into_micro_batches(sequences, budget) {
        let inputs: Vec<SequenceInput> =
            batch_inputs.iter().map(|(_, input)| input.clone()).collect();
        let results = query_model(learner, question, &inputs).await?;
        found.extend(batch_inputs.iter().map(|(key, _)| *key).zip(results));
    }
    Ok(found)
}

/// Returns the log-probabilities, entropies and concentrations of a policy for every trained token
/// of every sequence, in the same micro-batches as [`query_in_micro_batches`].
pub(crate) async fn predict_in_micro_batches(
    learner: &dyn Learner,
    sequences: &[(SequenceKey, SequenceInput)],
    budget: usize,
) -> Result<HashMap<SequenceKey, Predictions>, TrainerError> {
    let mut found = HashMap::with_capacity(sequences.len());
    for batch_inputs in split_into_micro_batches(sequences, budget) {
        let inputs: Vec<SequenceInput> =
            batch_inputs.iter().map(|(_, input)| input.clone()).collect();
        let batch = Arc::new(TreeBatch::merge(&inputs)?);
        let Predictions { logprobs, entropies, concentrations } =
            learner.predictions(batch.clone()).await?;
        let [logprobs, entropies, concentrations] = [logprobs, entropies, concentrations]
            .map(|numbers| split_by_sequence(&batch, &numbers, inputs.len()));
        let results = logprobs.into_iter().zip(entropies).zip(concentrations);
        for ((key, _), ((logprobs, entropies), concentrations)) in batch_inputs.iter().zip(results)
        {
            found.insert(*key, Predictions { logprobs, entropies, concentrations });
        }
    }
    Ok(found)
}

/// Divides sequences into consecutive micro-batches. A micro-batch has at most `budget` tokens, or
/// a single longer sequence.
fn split_into_micro_batches(
    sequences: &[(SequenceKey, SequenceInput)],
    budget: usize,
) -> Vec<&[(SequenceKey, SequenceInput)]> {
    let mut found = Vec::new();
    let mut rest = sequences;
    while !rest.is_empty() {
        let mut tokens = 0;
        let fits = |(_, input): &(SequenceKey, SequenceInput)| {
            tokens += input.tokens.len();
            tokens <= budget
        };
        let count = rest.iter().map(fits).take_while(|fits| *fits).count().max(1);
        let (batch_inputs, remainder) = rest.split_at(count);
        found.push(batch_inputs);
        rest = remainder;
    }
    found
}

/// Queries a model about one batch of sequences. Returns one value per trained token, by sequence.
pub(crate) async fn query_model(
    learner: &dyn Learner,
    question: ModelQuery,
    inputs: &[SequenceInput],
) -> Result<Vec<Vec<f32>>, TrainerError> {
    let batch = Arc::new(TreeBatch::merge(inputs)?);
    let results = match question {
        ModelQuery::Logprobs => learner.logprobs(batch.clone()).await?,
        ModelQuery::Values => learner.values(batch.clone()).await?,
    };
    Ok(split_by_sequence(&batch, &results, inputs.len()))
}

/// Splits the values of a batch's targets by sequence, in the order of each sequence's targets.
fn split_by_sequence(batch: &TreeBatch, numbers: &[f32], num_sequences: usize) -> Vec<Vec<f32>> {
    let mut found = vec![Vec::new(); num_sequences];
    // Targets are sorted by packed index, which on any sequence is the order of its tokens.
    for (target, number) in batch.targets.iter().zip(numbers) {
        for term in batch.terms_of(target) {
            found[term.sequence as usize].push(*number);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use levade_tree::{SequenceTarget, Term};

    use super::*;

    #[test]
    fn split_by_sequence_maps_values_to_sequences() {
        let make_input = |tokens: &[u32], targets: &[u32]| SequenceInput {
            tokens: tokens.to_vec().into(),
            targets: targets
                .iter()
                .map(|&index| SequenceTarget { index, temperature: 1.0, term: Term::default() })
                .collect(),
        };
        let inputs = [
            make_input(&[1, 2, 3, 4], &[2, 3]),
            make_input(&[1, 2, 9], &[1, 2]),
            make_input(&[1, 2, 3, 4], &[3]),
        ];
        let batch = TreeBatch::merge(&inputs).unwrap();
        let tokens: Vec<f32> =
            batch.targets.iter().map(|t| batch.tokens[t.token as usize] as f32).collect();
        assert_eq!(
            split_by_sequence(&batch, &tokens, 3),
            [vec![3.0, 4.0], vec![2.0, 9.0], vec![4.0]]
        );
    }
}
