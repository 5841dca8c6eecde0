//! Divides a tree batch into units that go through the model at once.
//!
//! A batch that fits goes through as a whole. A larger batch is traversed depth-first, one
//! [`BatchUnit`] at a time, with the keys and values of the sequence above the unit on a stack. On
//! the way down, nodes run forward only. On the way up from the leaves, they run forward again and
//! backward, and each unit adds the gradient of its ancestors' keys and values to the stack. So
//! memory is bounded by the unit and the sequence length, for any size of the tree. Every token
//! goes through the model forward at most twice and backward once.

use std::ops::Range;

use levade_policy::PolicyError;
use levade_tree::TreeBatch;

use crate::ops::attention_backward::SequenceRows;
use crate::ops::kv::{BLOCK, TokenSpan};

/// Contiguous part of a batch whose tokens continue one sequence or branch from it. A unit goes
/// through the model at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchUnit {
    /// Range of the unit's tokens in the packed order of the batch.
    pub tokens: Range<usize>,
    /// Number of positions that precede the unit in its sequence.
    pub above: usize,
}

#[cfg(any(test, feature = "testing"))]
impl BatchUnit {
    /// Returns one unit with all tokens of the batch.
    pub fn from_batch(batch: &TreeBatch) -> Self {
        BatchUnit { tokens: 0..batch.tokens.len(), above: 0 }
    }
}

/// Step of the traversal of a batch, which processes one unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleStep {
    /// Run a unit forward and push its keys and values onto the stack. The unit is a piece of one
    /// node.
    Push(BatchUnit),
    /// Run a unit forward and backward. It has no descendants outside the unit.
    Train(BatchUnit),
    /// Run the unit on top of the stack forward again, then backward with the gradients that its
    /// descendants added, and pop it.
    Pop(BatchUnit),
}

/// Returns the order in which a batch is trained with at most `max_tokens` tokens at a time.
pub fn schedule(batch: &TreeBatch, max_tokens: usize) -> Vec<ScheduleStep> {
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); batch.nodes.len()];
    let mut roots = Vec::new();
    for (index, node) in batch.nodes.iter().enumerate() {
        match node.parent {
            Some(parent) => children[parent as usize].push(index),
            None => roots.push(index),
        }
    }
    // In depth-first order a subtree is a run of tokens, which ends at the next node that is not a
    // descendant.
    let mut ends: Vec<usize> = batch.nodes.iter().map(|n| (n.start + n.len) as usize).collect();
    for index in (0..batch.nodes.len()).rev() {
        if let Some(parent) = batch.nodes[index].parent {
            ends[parent as usize] = ends[parent as usize].max(ends[index]);
        }
    }
    let mut steps = Vec::new();
    StepSchedule { batch, children, ends, max_tokens: max_tokens.max(1), steps: &mut steps }
        .schedule_siblings(&roots);
    steps
}

struct StepSchedule<'a> {
    batch: &'a TreeBatch,
    children: Vec<Vec<usize>>,
    ends: Vec<usize>,
    max_tokens: usize,
    steps: &'a mut Vec<ScheduleStep>,
}

impl StepSchedule<'_> {
    fn schedule_siblings(&mut self, nodes: &[usize]) {
        let mut rest = nodes;
        while let [first, ..] = rest {
            let start = self.batch.nodes[*first].start as usize;
            let fitting =
                rest.iter().take_while(|node| self.ends[**node] - start <= self.max_tokens).count();
            if fitting > 0 {
                let tokens = start..self.ends[rest[fitting - 1]];
                let above = self.batch.nodes[*first].depth as usize;
                self.steps.push(ScheduleStep::Train(BatchUnit { tokens, above }));
            } else {
                self.schedule_large(*first);
            }
            rest = &rest[fitting.max(1)..];
        }
    }

    /// Schedules a node whose subtree exceeds the limit of one unit.
    fn schedule_large(&mut self, index: usize) {
        let node = self.batch.nodes[index];
        let start = node.start as usize;
        let len = node.len as usize;
        let depth = node.depth as usize;
        // Pieces of about equal size, so that no small piece remains.
        let size = len.div_ceil(len.div_ceil(self.max_tokens));
        let mut chunks: Vec<BatchUnit> = (0..len)
            .step_by(size)
            .map(|at| BatchUnit {
                tokens: start + at..start + len.min(at + size),
                above: depth + at,
            })
            .collect();
        let children = std::mem::take(&mut self.children[index]);
        let last = if children.is_empty() { chunks.pop() } else { None };
        self.steps.extend(chunks.iter().cloned().map(ScheduleStep::Push));
        self.steps.extend(last.map(ScheduleStep::Train));
        self.schedule_siblings(&children);
        self.steps.extend(chunks.into_iter().rev().map(ScheduleStep::Pop));
    }
}

/// Layout of a unit for the model: one span for every node with tokens in the unit, rows in packed
/// order.
#[derive(Debug, Default)]
pub struct UnitPacking {
    /// Position of every row in its sequence.
    pub positions: Vec<u32>,
    /// Spans of the unit, one for every node with tokens in the unit.
    pub spans: Vec<TokenSpan>,
    /// Rows of each span's sequence, including its own.
    pub sequences: Vec<SequenceRows>,
    /// Number of key-value blocks that the unit needs in addition to the blocks of the stack.
    pub blocks: usize,
}

impl UnitPacking {
    /// Packs a unit into rows. Blocks with an index below `stack` hold the sequence above the unit:
    /// block i holds positions `i * BLOCK ..`. A unit `on_stack` writes into these blocks. Other
    /// units start with a copy of the last block if they start inside it.
    pub fn new(batch: &TreeBatch, unit: &BatchUnit, stack: usize, on_stack: bool) -> Self {
        let mut packing = UnitPacking::default();
        let first =
            batch.nodes.partition_point(|n| ((n.start + n.len) as usize) <= unit.tokens.start);
        for node in &batch.nodes[first..] {
            let start = node.start as usize;
            let end = (node.start + node.len) as usize;
            if start >= unit.tokens.end {
                break;
            }
            let tokens = start.max(unit.tokens.start)..end.min(unit.tokens.end);
            let row = tokens.start - unit.tokens.start;
            let len = tokens.len();
            let position = node.depth as usize + tokens.start - start;
            packing.positions.extend((position..position + len).map(|p| p as u32));

            let parent = node
                .parent
                .and_then(|p| (p as usize).checked_sub(first))
                .filter(|_| tokens.start == start);
            let full_blocks = position / BLOCK;
            // Full blocks of the ancestors are read in place; a block that the node starts inside
            // is copied.
            let (mut blocks, inherits) = match parent {
                Some(parent) => {
                    let above = &packing.spans[parent].blocks;
                    (
                        above[..full_blocks].to_vec(),
                        (!position.is_multiple_of(BLOCK)).then(|| above[full_blocks]),
                    )
                }
                None => (
                    (0..full_blocks as u32).collect(),
                    (!position.is_multiple_of(BLOCK)).then_some(full_blocks as u32),
                ),
            };
            while blocks.len() * BLOCK < position + len {
                if on_stack {
                    blocks.push(blocks.len() as u32);
                } else {
                    blocks.push((stack + packing.blocks) as u32);
                    packing.blocks += 1;
                }
            }
            let mut sequence = parent.map_or(Vec::new(), |p| packing.sequences[p].clone());
            sequence.push((row, len));
            let inherits = inherits.filter(|_| !on_stack);
            packing.spans.push(TokenSpan { row, len, position, blocks, inherits });
            packing.sequences.push(sequence);
        }
        packing
    }
}

/// Checks a batch against a model with `context` positions and `vocabulary` tokens.
///
/// # Errors
/// Returns an error if the batch is malformed, a sequence is longer than the context, a token is
/// outside the vocabulary, or a target has no finite temperature above 0.
pub fn check(batch: &TreeBatch, context: usize, vocabulary: usize) -> Result<(), PolicyError> {
    let reject = |message: String| Err(PolicyError::Invalid(message));
    if let Err(error) = batch.check() {
        return reject(error.to_string());
    }
    if let Some(token) = batch.tokens.iter().find(|t| **t as usize >= vocabulary) {
        return reject(format!(
            "token {token} is outside the model's vocabulary of {vocabulary}; was the batch made \
             with another tokenizer?"
        ));
    }
    if let Some(len) =
        batch.nodes.iter().map(|n| (n.depth + n.len) as usize).find(|len| *len > context)
    {
        return reject(format!(
            "a sequence of {len} tokens does not fit the context of {context}; raise the context \
             or shorten the rollouts"
        ));
    }
    match batch.targets.iter().find(|t| !(t.temperature > 0.0 && t.temperature.is_finite())) {
        None => Ok(()),
        Some(target) => reject(format!(
            "a target has temperature {}, but training needs a temperature above 0: do not train \
             on greedily sampled segments",
            target.temperature
        )),
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::SequenceInput;

    use super::*;

    fn batch(sequences: &[&[u32]]) -> TreeBatch {
        let sequences: Vec<SequenceInput> = sequences
            .iter()
            .map(|tokens| SequenceInput { tokens: tokens.to_vec().into(), targets: vec![] })
            .collect();
        TreeBatch::merge(&sequences).unwrap_or_default()
    }

    /// Every token is trained once, units do not exceed the limit, and the sequence above a unit is
    /// on the stack.
    #[test]
    fn schedule_trains_every_token_once() {
        let long: Vec<u32> = (0..50).collect();
        let other: Vec<u32> = (0..30).chain(100..125).collect();
        let third: Vec<u32> = (0..30).chain(100..110).chain(200..203).collect();
        let batch = batch(&[&long, &other, &third, &[7, 8, 9], &[7, 8, 10]]);
        for max_tokens in [1, 2, 3, 5, 8, 20, 40, 64, 1000] {
            let mut trained = vec![0; batch.tokens.len()];
            // (first token, number of tokens) of the units on the stack.
            let mut stack: Vec<(usize, usize)> = Vec::new();
            let depth = |stack: &[(usize, usize)]| stack.iter().map(|(_, len)| len).sum::<usize>();
            for step in schedule(&batch, max_tokens) {
                let (ScheduleStep::Push(unit)
                | ScheduleStep::Train(unit)
                | ScheduleStep::Pop(unit)) = &step;
                assert!(unit.tokens.len() <= max_tokens);
                let unit_range = (unit.tokens.start, unit.tokens.len());
                if matches!(step, ScheduleStep::Pop(_)) {
                    assert_eq!(stack.pop(), Some(unit_range));
                }
                assert_eq!(depth(&stack), unit.above);
                if matches!(step, ScheduleStep::Push(_)) {
                    stack.push(unit_range);
                } else {
                    trained[unit.tokens.clone()].iter_mut().for_each(|count| *count += 1);
                    let packing =
                        UnitPacking::new(&batch, unit, 9, matches!(step, ScheduleStep::Pop(_)));
                    for (span, sequence) in packing.spans.iter().zip(&packing.sequences) {
                        let rows: Vec<usize> =
                            sequence.iter().flat_map(|(row, len)| *row..row + len).collect();
                        assert_eq!(unit.above + rows.len(), span.position + span.len);
                        assert_eq!(rows[rows.len() - 1], span.row + span.len - 1);
                        assert_eq!(span.blocks.len(), (span.position + span.len).div_ceil(BLOCK));
                    }
                }
            }
            assert!(
                stack.is_empty() && trained.iter().all(|count| *count == 1),
                "{max_tokens}: {trained:?}"
            );
        }
        assert_eq!(schedule(&batch, 1000), [ScheduleStep::Train(BatchUnit::from_batch(&batch))]);
    }
}
