//! From a tree batch to the rows, spans and paths that the kernels work on.

use dressage_policy::PolicyError;
use dressage_tree::TreeBatch;

use crate::ops::attention::{BLOCK, Span};
use crate::ops::attention_backward::PathRows;

/// How a batch lies in the model: one span a node, rows in packed order.
#[derive(Debug, Default)]
pub struct Packing {
    /// Position of every row.
    pub positions: Vec<u32>,
    /// One span for every node.
    pub spans: Vec<Span>,
    /// The rows on each span's path, its own included.
    pub paths: Vec<PathRows>,
    /// How many blocks of keys and values the spans name.
    pub blocks: usize,
}

impl Packing {
    /// Lays out `batch` for a model with `context` positions and `vocabulary` tokens.
    ///
    /// # Errors
    /// When a path is longer than the context, or a token lies outside the vocabulary.
    pub fn new(batch: &TreeBatch, context: usize, vocabulary: usize) -> Result<Self, PolicyError> {
        if let Some(token) = batch.tokens.iter().find(|t| **t as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "token {token} is outside the model's vocabulary of {vocabulary}; was the batch made with another tokenizer?"
            )));
        }
        let mut packing = Packing::default();
        for node in &batch.nodes {
            let (start, len, depth) = (node.start as usize, node.len as usize, node.depth as usize);
            if depth + len > context {
                return Err(PolicyError::Invalid(format!(
                    "a path of {} tokens does not fit the context of {context}; raise the context or shorten the rollouts",
                    depth + len
                )));
            }
            packing.positions.extend((depth..depth + len).map(|p| p as u32));
            let whole = depth / BLOCK;
            let parent = node.parent.map(|p| p as usize);
            // Whole blocks of the ancestors are read where they are; a block that the node starts inside is copied.
            let mut blocks = parent.map_or(Vec::new(), |p| packing.spans[p].blocks[..whole].to_vec());
            let inherits = parent.filter(|_| depth % BLOCK > 0).map(|p| packing.spans[p].blocks[whole]);
            while blocks.len() * BLOCK < depth + len {
                blocks.push(packing.blocks as u32);
                packing.blocks += 1;
            }
            let mut path = parent.map_or(Vec::new(), |p| packing.paths[p].clone());
            path.push((start, len));
            packing.spans.push(Span { row: start, len, position: depth, blocks, inherits });
            packing.paths.push(path);
        }
        Ok(packing)
    }

    /// Positions on all spans' paths together: what the backward pass of attention needs room for.
    pub fn path_positions(&self) -> usize {
        self.spans.iter().map(|s| s.position + s.len).sum()
    }
}
