//! Keys and values, in blocks of [`BLOCK`] positions aligned to absolute positions of the sequence.
//! A sequence is a list of blocks.
//!
//! Sampling keeps blocks while a sequence may continue from them, training while a layer needs
//! them. Both use the layout of matmul operands, so that attention reads blocks in place.

use crate::Compute;
use crate::buffer::{Buffer, SharedSlice};
use crate::gemm::NR;
use crate::gemm::pack::{pack_columns, put_step};
use crate::precision::{Kernel, Precision, words};

/// Number of positions in a block: the width of a panel, so that a block's keys are a panel of the
/// matmul that computes scores.
pub const BLOCK: usize = NR;
/// Shape of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Returns the width of a row of queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the width of a row of keys, or of values.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the width of a row of queries, keys and values side by side.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.key_width()
    }

    /// Returns the width of a head, rounded up to full panels.
    pub(crate) fn padded_head_dim(&self) -> usize {
        self.head_dim.div_ceil(NR) * NR
    }

    /// Returns the number of query heads that share a key head.
    pub(crate) fn heads_per_key_head(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of words of the keys of one block and head: `[words of head_dim][BLOCK]`.
    fn key_block_words(&self, precision: Precision) -> usize {
        words(precision, self.head_dim) * BLOCK
    }

    /// Returns the number of words of one block of one key head: keys, then values as `[words of
    /// BLOCK][padded]`.
    fn head_block_words(&self, precision: Precision) -> usize {
        self.key_block_words(precision) + words(precision, BLOCK) * self.padded_head_dim()
    }

    /// Returns the number of bytes of keys and values for a sequence of `positions` positions in a
    /// model with `layers` layers. Includes one more block for a fork inside a block.
    pub fn sequence_bytes(&self, layers: usize, precision: Precision, positions: usize) -> usize {
        let blocks = positions.div_ceil(BLOCK).saturating_add(1);
        blocks.saturating_mul(layers * self.block(precision) * size_of::<f32>())
    }

    /// Returns the number of words of one block of one layer.
    pub fn block(&self, precision: Precision) -> usize {
        self.kv_heads * self.head_block_words(precision)
    }
}

/// Scale and window of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionWindow {
    /// Factor by which attention scores are multiplied.
    pub scale: f32,
    /// Maximum number of positions that a query attends to: the last ones up to its own.
    pub window: usize,
}

impl AttentionWindow {
    /// Returns the first position that the `own`th query of a sequence, counted from 1, attends to.
    pub fn first_position(&self, own: usize) -> usize {
        own.saturating_sub(self.window)
    }

    /// Returns full attention for heads with width `head_dim`.
    #[cfg(test)]
    pub fn unlimited(head_dim: usize) -> Self {
        AttentionWindow { scale: 1.0 / (head_dim as f32).sqrt(), window: usize::MAX }
    }
}

/// Maximum number of groups into which spans are divided for each head, so that threads store them
/// in parallel. Spans that depend on each other's blocks are not divided.
const MAX_CHUNKS: usize = 4;
/// Number of blocks allocated at a time, to get huge pages; unused blocks take no physical memory.
const TOGETHER: usize = 32;

/// Memory for key-value blocks. Each block holds one layer or all layers.
pub struct Blocks {
    blocks: Vec<Buffer>,
    /// Allocated blocks that are not in use yet, in the same mapping as the last blocks in use.
    unused: Vec<Buffer>,
    shape: AttentionShape,
    layers: usize,
    precision: Precision,
}

impl Blocks {
    /// Creates an empty set of blocks; each block will hold `layers` layers.
    pub fn new(shape: AttentionShape, layers: usize, precision: Precision) -> Self {
        Blocks { blocks: Vec::new(), unused: Vec::new(), shape, layers, precision }
    }

    /// Returns the number of words of one block, for all layers.
    pub fn block_words(&self) -> usize {
        self.layers * self.shape.block(self.precision)
    }

    /// Allocates blocks until there are at least `count`.
    pub fn grow(&mut self, count: usize) {
        while self.blocks.len() < count {
            if self.unused.is_empty() {
                self.unused = Buffer::zeroed_together(&[self.block_words(); TOGETHER]);
            }
            self.blocks.extend(self.unused.pop());
        }
    }

    /// Returns the number of blocks in use.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns whether no block is in use.
    #[cfg(any(test, feature = "testing"))]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Copies all layers of block `from` to block `to`, as a fork in the middle of a block needs.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        if let Ok([from, to]) = self.blocks.get_disjoint_mut([from as usize, to as usize]) {
            to.copy_from_slice(from);
        }
    }

    /// Returns the blocks of one layer, which the threads of the pool write and read.
    pub fn layer(&mut self, layer: usize) -> KeyValues<'_> {
        let size = self.shape.block(self.precision);
        let starts = self
            .blocks
            .iter_mut()
            .map(|b| SharedSlice::new(&mut b[layer * size..][..size]))
            .collect();
        KeyValues { blocks: starts, shape: self.shape, precision: self.precision }
    }
}

/// Keys and values of one layer.
pub struct KeyValues<'a> {
    blocks: Vec<SharedSlice<'a>>,
    pub(super) shape: AttentionShape,
    precision: Precision,
}

impl<'a> KeyValues<'a> {
    /// Appends the blocks of `more` to these blocks.
    pub fn with_blocks(mut self, more: KeyValues<'a>) -> Self {
        self.blocks.extend(more.blocks);
        self
    }

    /// Writes the keys and values of all rows (`qkv`: rows of `shape.qkv_width()`, with rotary
    /// embedding applied) into the blocks of their spans.
    pub fn store_keys_values(&self, compute: &Compute, spans: &[TokenSpan], qkv: &[f32]) {
        let chunks = if are_disjoint(spans) { spans.len().min(MAX_CHUNKS) } else { 1 };
        let heads = self.shape.kv_heads;
        compute.pool.run(heads * chunks, |task| {
            let head = task % heads;
            let chunk = task / heads;
            for span in &spans[spans.len() * chunk / chunks..spans.len() * (chunk + 1) / chunks] {
                self.store_head(compute.kernel(), span, head, qkv);
            }
        });
    }

    /// Returns the address of the keys of head `head` in a block: `[words of head_dim][BLOCK]`.
    pub(super) fn keys(&self, block: u32, head: usize) -> *mut f32 {
        self.blocks[block as usize].pointer(head * self.shape.head_block_words(self.precision))
    }

    /// Returns the address of the values of head `head` in a block: `[words of BLOCK][padded]`.
    pub(super) fn values(&self, block: u32, head: usize) -> *mut f32 {
        let shape = self.shape;
        let precision = self.precision;
        self.blocks[block as usize]
            .pointer(head * shape.head_block_words(precision) + shape.key_block_words(precision))
    }

    /// Prefetches the keys and values of one head of a block into the second-level cache. Blocks
    /// have arbitrary addresses, which the processor's own prefetcher does not predict.
    pub(super) fn prefetch_block(&self, block: u32, head: usize) {
        #[cfg(target_arch = "x86_64")]
        for word in (0..self.shape.head_block_words(self.precision)).step_by(16) {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            // SAFETY: a prefetch accesses nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T1>(
                    self.keys(block, head).wrapping_add(word).cast_const().cast(),
                )
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (block, head);
    }

    /// Writes one key head of a span's rows into its blocks.
    fn store_head(&self, kernel: Kernel, span: &TokenSpan, head: usize, qkv: &[f32]) {
        let shape = self.shape;
        let width = shape.qkv_width();
        let dim = shape.head_dim;
        let padded = shape.padded_head_dim();
        if let (Some(from), Some(&to)) = (span.inherits, span.blocks.get(span.position / BLOCK)) {
            // SAFETY: blocks of a layer have one size; only this thread accesses this head of them,
            // and a node's first block is never its parent's.
            unsafe {
                let size = shape.head_block_words(self.precision);
                std::ptr::copy_nonoverlapping(self.keys(from, head), self.keys(to, head), size);
            }
        }
        let mut done = 0;
        while done < span.len {
            let position = span.position + done;
            let block = span.blocks[position / BLOCK];
            let at = position % BLOCK;
            let count = (BLOCK - at).min(span.len - done);
            let rows = &qkv[(span.row + done) * width..][..count * width];
            // SAFETY: keys and values of one head of one block; only this thread accesses this
            // head.
            let (keys, values) = unsafe {
                let size = kernel.words(BLOCK) * padded;
                let keys = std::slice::from_raw_parts_mut(
                    self.keys(block, head),
                    shape.key_block_words(self.precision),
                );
                (keys, std::slice::from_raw_parts_mut(self.values(block, head), size))
            };
            pack_columns(
                kernel,
                &rows[shape.query_width() + head * dim..],
                width,
                count,
                dim,
                BLOCK,
                &mut keys[at..],
            );
            for (i, row) in rows.chunks_exact(width).enumerate() {
                let value = &row[shape.query_width() + shape.key_width() + head * dim..][..dim];
                put_step(kernel, at + i, value, padded, values);
            }
            done += count;
        }
    }
}

/// Returns whether no span writes to a block that another span writes to or copies from, so that
/// their order does not matter.
fn are_disjoint(spans: &[TokenSpan]) -> bool {
    if spans.iter().any(|span| span.inherits.is_some()) {
        return false;
    }
    let written = spans.iter().flat_map(|span| span.blocks.iter().skip(span.position / BLOCK));
    let mut written: Vec<u32> = written.copied().collect();
    written.sort_unstable();
    written.windows(2).all(|two| two[0] != two[1])
}

/// Key-value blocks that a forward pass uses: blocks that hold all layers of the model, and after
/// them, in training, blocks that hold one layer at a time.
pub struct KvBlocks<'a> {
    /// Blocks that hold all layers of the model.
    pub stack: &'a mut Blocks,
    /// Blocks that hold only the current layer; `None` for sampling, which keeps all layers.
    pub passing: Option<&'a mut Blocks>,
}

impl KvBlocks<'_> {
    /// Returns the blocks of one layer of the model.
    pub fn layer(&mut self, layer: usize) -> KeyValues<'_> {
        let stack = self.stack.layer(layer);
        match &mut self.passing {
            Some(passing) => stack.with_blocks(passing.layer(0)),
            None => stack,
        }
    }
}

/// Contiguous run of new tokens of one sequence in a batch.
#[derive(Debug, Clone, Default)]
pub struct TokenSpan {
    /// Index of the span's first row in the batch.
    pub row: usize,
    /// Number of rows in the span.
    pub len: usize,
    /// Position of the first token in the sequence. All earlier positions are in `blocks` already,
    /// or in an earlier span of the batch.
    pub position: usize,
    /// Blocks of the sequence, up to the last row of the span.
    pub blocks: Vec<u32>,
    /// Block whose first positions must be copied into the span's first block before its own rows
    /// are written: the parent's block, if a node starts in the middle of a block.
    pub inherits: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn are_disjoint_detects_blocks_shared_by_writers() {
        let one = span(40, 1, &[0, 1]);
        let other = span(70, 30, &[0, 2, 3, 4]);
        assert!(
            are_disjoint(&[]) && are_disjoint(&[one.clone(), other.clone()]),
            "what they share they only read"
        );
        assert!(
            !are_disjoint(&[one.clone(), span(41, 5, &[0, 1])]),
            "the second goes on where the first ended"
        );
        assert!(
            !are_disjoint(&[one, TokenSpan { inherits: Some(1), ..other }]),
            "what is copied must be there"
        );
    }

    fn span(position: usize, len: usize, blocks: &[u32]) -> TokenSpan {
        TokenSpan { position, len, blocks: blocks.to_vec(), ..TokenSpan::default() }
    }
}
