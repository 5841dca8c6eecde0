//! From rows of logits to tokens: one is drawn after the end of a path; one of a prompt that is scored gets
//! its log-probability.

use std::sync::PoisonError;

use levade_policy::{PolicyError, uniform};

use crate::buffer::Shared;
use crate::choose::{Chosen, choose, score};
use crate::sequence::Sequence;
use crate::transformer::Transformer;

/// Rows whose logits exist at the same time, unless more sequences than that are drawn for at once.
const CHUNK: usize = 64;

/// Most rows whose logits exist at the same time, in steps of `rows` rows for `running` sequences. A prompt
/// that is scored wants the logits of all its rows.
pub fn logits_at_most(running: usize, rows: usize) -> usize {
    running.max(CHUNK).min(rows)
}

/// A row of a batch whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Index of the sequence among the running ones.
    pub sequence: usize,
    /// Row of the batch.
    pub row: usize,
    /// Position on the path.
    pub position: usize,
}

/// Reads or draws from `logits`, a row of the vocabulary for each of the `wanted`; they are changed in place.
/// Tokens of a prompt keep their place and get a log-probability, the others are drawn. What grammars allow
/// is found out in the same tasks, so that a slow one holds up as little as it can.
pub fn read(
    model: &Transformer,
    running: &[Sequence],
    wanted: &[Wanted],
    logits: &mut [f32],
) -> Vec<Result<Chosen, PolicyError>> {
    let vocabulary = model.weights.config.vocabulary;
    let logits = Shared::new(&mut logits[..wanted.len() * vocabulary]);
    let mut found: Vec<Option<Result<Chosen, PolicyError>>> = vec![None; wanted.len()];
    let results = Shared::new(&mut found);
    model.compute.pool.run(wanted.len(), |task| {
        let Wanted { sequence, position, .. } = wanted[task];
        // SAFETY: each row belongs to one task.
        let (row, result) = unsafe { (logits.slice(task * vocabulary, vocabulary), results.slice(task, 1)) };
        result[0] = Some(read_row(model, &running[sequence], position, row));
    });
    found.into_iter().flatten().collect()
}

fn read_row(
    model: &Transformer,
    sequence: &Sequence,
    position: usize,
    row: &mut [f32],
) -> Result<Chosen, PolicyError> {
    let (isa, params) = (model.compute.isa, &sequence.params);
    let not_finite = || PolicyError::NotFinite { position: position + 1 };
    if let Some(&known) = sequence.tokens.get(position + 1) {
        let top = params.prompt_logprobs.unwrap_or(0);
        return score(isa, row, params.behaviour_temperature(), known, top).ok_or_else(not_finite);
    }
    let u = uniform(sequence.seed, sequence.stream, sequence.tokens.len() as u64);
    let path = (&sequence.tokens[..], sequence.reply());
    let Some(constraint) = &sequence.constraint else {
        return choose(isa, row, params, path, None, u).ok_or_else(not_finite);
    };
    // No other task has this sequence's row: nobody waits here.
    let mut constraint = constraint.lock().unwrap_or_else(PoisonError::into_inner);
    let allowed = params.allowed(&mut **constraint, row.len())?;
    let chosen = choose(isa, row, params, path, Some(&allowed), u).ok_or_else(not_finite)?;
    if !params.stop_ids.contains(&chosen.token) {
        constraint.push(chosen.token)?;
    }
    Ok(chosen)
}
