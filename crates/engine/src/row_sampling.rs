//! Converts rows of logits to tokens: samples the next token of a sequence, or computes the
//! log-probability of a token in a scored prompt.

use std::sync::PoisonError;

use levade_policy::{PolicyError, uniform};

use crate::buffer::SharedSlice;
use crate::sequence::Sequence;
use crate::token_sampling::{SampledToken, sample_token, score_token};
use crate::transformer::Transformer;

/// Minimum value for the limit on rows whose logits exist at the same time. More running sequences
/// raise the limit.
const CHUNK: usize = 64;

/// Returns the maximum number of rows whose logits exist at the same time, for steps of `rows` rows
/// and `running` sequences. A scored prompt needs the logits of all its rows.
pub fn max_logits_rows(running: usize, rows: usize) -> usize {
    running.max(CHUNK).min(rows)
}

/// A row of a batch whose logits are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitsRow {
    /// Index among the running sequences.
    pub sequence: usize,
    /// Row of the batch.
    pub row: usize,
    /// Position in the sequence.
    pub position: usize,
}

/// Samples or scores a token for each of the `needed` rows. `logits` holds one row of the
/// vocabulary for each and is modified in place. Tokens of a prompt are scored; tokens after the
/// end of a sequence are sampled. Grammar constraints are evaluated in the same tasks, so that a
/// slow one delays the step as little as possible.
pub fn sample_or_score(
    model: &Transformer,
    running: &[Sequence],
    needed: &[LogitsRow],
    logits: &mut [f32],
) -> Vec<Result<SampledToken, PolicyError>> {
    let vocabulary = model.weights.config.vocabulary;
    let logits = SharedSlice::new(&mut logits[..needed.len() * vocabulary]);
    let mut found: Vec<Option<Result<SampledToken, PolicyError>>> = vec![None; needed.len()];
    let results = SharedSlice::new(&mut found);
    model.compute.pool.run(needed.len(), |task| {
        let LogitsRow { sequence, position, .. } = needed[task];
        // SAFETY: each row belongs to one task.
        let (row, result) =
            unsafe { (logits.slice(task * vocabulary, vocabulary), results.slice(task, 1)) };
        result[0] = Some(sample_or_score_row(model, &running[sequence], position, row));
    });
    found.into_iter().flatten().collect()
}

fn sample_or_score_row(
    model: &Transformer,
    sequence: &Sequence,
    position: usize,
    row: &mut [f32],
) -> Result<SampledToken, PolicyError> {
    let isa = model.compute.isa;
    let params = &sequence.params;
    let not_finite = || PolicyError::NotFinite { position: position + 1 };
    if let Some(&known) = sequence.tokens.get(position + 1) {
        let top = params.prompt_logprobs.unwrap_or(0);
        return score_token(isa, row, params.behavior_temperature(), known, top)
            .ok_or_else(not_finite);
    }
    let u = uniform(sequence.seed, sequence.stream, sequence.tokens.len() as u64);
    let history = (&sequence.tokens[..], sequence.completion_len());
    let Some(constraint) = &sequence.constraint else {
        return sample_token(isa, row, params, history, None, u).ok_or_else(not_finite);
    };
    // No other task has this sequence's row, so the lock is free.
    let mut constraint = constraint.lock().unwrap_or_else(PoisonError::into_inner);
    let allowed = params.allowed(&mut **constraint, row.len())?;
    let sampled =
        sample_token(isa, row, params, history, Some(&allowed), u).ok_or_else(not_finite)?;
    if !params.stop_ids.contains(&sampled.token) {
        constraint.push(sampled.token)?;
    }
    Ok(sampled)
}
