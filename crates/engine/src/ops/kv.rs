//! Keys and values, in blocks of [`BLOCK`] positions aligned to absolute positions on the path; a path is a
//! list of blocks.
//!
//! Sampling keeps them for as long as somebody may go on from there, training for as long as a layer needs
//! them; both in the layout of the products, so that attention reads them where they lie.

use crate::Compute;
use crate::buffer::{Buffer, Shared};
use crate::precision::{Kernel, Precision, words};
use crate::product::NR;
use crate::product::pack::{pack_columns, put_step};

/// Positions in a block: the width of a panel, so that a block's keys are a panel of the score product.
pub const BLOCK: usize = NR;
/// The shape of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Shape {
    /// Width of a row of queries.
    pub fn query(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of a row of keys, or of values.
    pub fn key(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of a row of queries, keys and values side by side.
    pub fn qkv(&self) -> usize {
        self.query() + 2 * self.key()
    }

    /// Width of a head, rounded up to whole panels.
    pub(crate) fn padded(&self) -> usize {
        self.head_dim.div_ceil(NR) * NR
    }

    /// Query heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Words of the keys of one block and head: `[words of head_dim][BLOCK]`.
    fn key_block(&self, precision: Precision) -> usize {
        words(precision, self.head_dim) * BLOCK
    }

    /// Words of one block of one key head: keys, then values as `[words of BLOCK][padded]`.
    fn head_block(&self, precision: Precision) -> usize {
        self.key_block(precision) + words(precision, BLOCK) * self.padded()
    }

    /// Bytes that the keys and values of a path of `positions` take in a model of `layers` layers, with the
    /// block more in which such a path parts from another.
    pub fn path_bytes(&self, layers: usize, precision: Precision, positions: usize) -> usize {
        let blocks = positions.div_ceil(BLOCK).saturating_add(1);
        blocks.saturating_mul(layers * self.block(precision) * size_of::<f32>())
    }

    /// Words of one block of one layer.
    pub fn block(&self, precision: Precision) -> usize {
        self.kv_heads * self.head_block(precision)
    }
}

/// How the queries of a layer look at keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sight {
    /// Factor of scores.
    pub scale: f32,
    /// Positions that a query sees at most: the last ones up to its own.
    pub window: usize,
}

impl Sight {
    /// The first position that a query sees which is the `own`th on its path, counted from 1.
    pub fn first(&self, own: usize) -> usize {
        own.saturating_sub(self.window)
    }

    /// Queries of heads `head_dim` wide that see their whole paths.
    #[cfg(test)]
    pub fn whole(head_dim: usize) -> Self {
        Sight { scale: 1.0 / (head_dim as f32).sqrt(), window: usize::MAX }
    }
}

/// Pieces that spans are cut into for each head, where threads may store one beside the other.
const PIECES: usize = 4;
/// Blocks that are asked for at a time, for the sake of huge pages; what is not used yet takes no memory.
const TOGETHER: usize = 32;

/// Memory for blocks of one layer or of all.
pub struct Blocks {
    blocks: Vec<Buffer>,
    /// Some more, in the same piece of memory as the last ones.
    spare: Vec<Buffer>,
    shape: Shape,
    layers: usize,
    precision: Precision,
}

impl Blocks {
    /// No blocks yet; each will hold `layers` layers.
    pub fn new(shape: Shape, layers: usize, precision: Precision) -> Self {
        Blocks { blocks: Vec::new(), spare: Vec::new(), shape, layers, precision }
    }

    /// Words of one block, all layers.
    pub fn block_words(&self) -> usize {
        self.layers * self.shape.block(self.precision)
    }

    /// Makes sure that there are at least `count` blocks.
    pub fn grow(&mut self, count: usize) {
        while self.blocks.len() < count {
            if self.spare.is_empty() {
                self.spare = Buffer::together(&[self.block_words(); TOGETHER]);
            }
            self.blocks.extend(self.spare.pop());
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are none.
    #[cfg(any(test, feature = "testing"))]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Copies all layers of block `from` to block `to`: what a fork in the middle of a block needs.
    pub fn copy(&mut self, from: u32, to: u32) {
        if let Ok([from, to]) = self.blocks.get_disjoint_mut([from as usize, to as usize]) {
            to.copy_from_slice(from);
        }
    }

    /// The blocks of one layer, to be written and read by the threads of the pool.
    pub fn layer(&mut self, layer: usize) -> KeyValues<'_> {
        let size = self.shape.block(self.precision);
        let starts = self.blocks.iter_mut().map(|b| Shared::new(&mut b[layer * size..][..size])).collect();
        KeyValues { blocks: starts, shape: self.shape, precision: self.precision }
    }
}

/// One layer's keys and values.
pub struct KeyValues<'a> {
    blocks: Vec<Shared<'a>>,
    pub(super) shape: Shape,
    precision: Precision,
}

impl<'a> KeyValues<'a> {
    /// Appends the blocks of `more` to these.
    pub fn and(mut self, more: KeyValues<'a>) -> Self {
        self.blocks.extend(more.blocks);
        self
    }

    /// Writes the keys and values of all rows (`qkv`: rows of `shape.qkv()`, rotary embedding applied) into
    /// the blocks of their spans.
    pub fn store(&self, compute: &Compute, spans: &[Span], qkv: &[f32]) {
        let pieces = if are_apart(spans) { spans.len().min(PIECES) } else { 1 };
        let heads = self.shape.kv_heads;
        compute.pool.run(heads * pieces, |task| {
            let (head, piece) = (task % heads, task / heads);
            for span in &spans[spans.len() * piece / pieces..spans.len() * (piece + 1) / pieces] {
                self.store_head(compute.kernel(), span, head, qkv);
            }
        });
    }

    /// Where a key head's keys start in a block: `[words of head_dim][BLOCK]`.
    pub(super) fn keys(&self, block: u32, head: usize) -> *mut f32 {
        self.blocks[block as usize].pointer(head * self.shape.head_block(self.precision))
    }

    /// Where its values start: `[words of BLOCK][padded]`.
    pub(super) fn values(&self, block: u32, head: usize) -> *mut f32 {
        let (shape, precision) = (self.shape, self.precision);
        self.blocks[block as usize].pointer(head * shape.head_block(precision) + shape.key_block(precision))
    }

    /// Has a key head's part of a block fetched to the second-level cache. Blocks lie anywhere, so the
    /// processor sees none of them coming.
    pub(super) fn fetch(&self, block: u32, head: usize) {
        #[cfg(target_arch = "x86_64")]
        for word in (0..self.shape.head_block(self.precision)).step_by(16) {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch accesses nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(self.keys(block, head).wrapping_add(word).cast_const().cast())
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (block, head);
    }

    /// Writes one key head of a span's rows into its blocks.
    fn store_head(&self, kernel: Kernel, span: &Span, head: usize, qkv: &[f32]) {
        let shape = self.shape;
        let (width, dim, padded) = (shape.qkv(), shape.head_dim, shape.padded());
        if let (Some(from), Some(&to)) = (span.inherits, span.blocks.get(span.position / BLOCK)) {
            // SAFETY: blocks of a layer are of one size; this thread alone touches this head of them, and a
            // node's first block is never its parent's.
            unsafe {
                let size = shape.head_block(self.precision);
                std::ptr::copy_nonoverlapping(self.keys(from, head), self.keys(to, head), size);
            }
        }
        let mut done = 0;
        while done < span.len {
            let position = span.position + done;
            let (block, at) = (span.blocks[position / BLOCK], position % BLOCK);
            let count = (BLOCK - at).min(span.len - done);
            let rows = &qkv[(span.row + done) * width..][..count * width];
            // SAFETY: keys and values of one head of one block; this thread alone touches this head.
            let (keys, values) = unsafe {
                let size = kernel.words(BLOCK) * padded;
                let keys =
                    std::slice::from_raw_parts_mut(self.keys(block, head), shape.key_block(self.precision));
                (keys, std::slice::from_raw_parts_mut(self.values(block, head), size))
            };
            pack_columns(
                kernel,
                &rows[shape.query() + head * dim..],
                width,
                count,
                dim,
                BLOCK,
                &mut keys[at..],
            );
            for (i, row) in rows.chunks_exact(width).enumerate() {
                let value = &row[shape.query() + shape.key() + head * dim..][..dim];
                put_step(kernel, at + i, value, padded, values);
            }
            done += count;
        }
    }
}

/// Whether no span writes to a block that another one writes to, or copies from: then their order is of no
/// matter.
fn are_apart(spans: &[Span]) -> bool {
    if spans.iter().any(|span| span.inherits.is_some()) {
        return false;
    }
    let written = spans.iter().flat_map(|span| span.blocks.iter().skip(span.position / BLOCK));
    let mut written: Vec<u32> = written.copied().collect();
    written.sort_unstable();
    written.windows(2).all(|two| two[0] != two[1])
}

/// Where the keys and values of a forward pass lie: blocks that hold all layers of the model, and after them,
/// in training, blocks that hold one at a time.
pub struct Places<'a> {
    /// All layers.
    pub stack: &'a mut Blocks,
    /// The layer at work.
    pub passing: Option<&'a mut Blocks>,
}

impl Places<'_> {
    /// Part that one layer of the model writes to and reads from.
    pub fn layer(&mut self, layer: usize) -> KeyValues<'_> {
        let stack = self.stack.layer(layer);
        match &mut self.passing {
            Some(passing) => stack.and(passing.layer(0)),
            None => stack,
        }
    }
}

/// A run of new tokens on one path.
#[derive(Debug, Clone, Default)]
pub struct Span {
    /// First of its rows in the batch.
    pub row: usize,
    /// Number of its rows.
    pub len: usize,
    /// Position of the first on the path; all earlier positions are in `blocks` already, or in an earlier
    /// span of the batch.
    pub position: usize,
    /// The path's blocks, as far as the last row of the span needs them.
    pub blocks: Vec<u32>,
    /// A block whose first positions must be copied into the span's first block before its own rows are
    /// written: the parent's, where a node starts in the middle of a block.
    pub inherits: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_apart_that_write_to_blocks_of_their_own() {
        let span = |position: usize, len: usize, blocks: &[u32]| Span {
            position,
            len,
            blocks: blocks.to_vec(),
            ..Span::default()
        };
        let (one, other) = (span(40, 1, &[0, 1]), span(70, 30, &[0, 2, 3, 4]));
        assert!(are_apart(&[]) && are_apart(&[one.clone(), other.clone()]), "what they share they only read");
        assert!(!are_apart(&[one.clone(), span(41, 5, &[0, 1])]), "the second goes on where the first ended");
        assert!(!are_apart(&[one, Span { inherits: Some(1), ..other }]), "what is copied must be there");
    }
}
