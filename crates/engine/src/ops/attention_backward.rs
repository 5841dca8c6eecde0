//! Computes the backward pass of causal grouped-query attention.
//!
//! With P the normalized weights, D = rowsum(dO ∘ O) and dS = P ∘ (dO Vᵀ − D): dQ = scale · dS K,
//! dK = dSᵀ (scale · Q), dV = Pᵀ dO (Dao et al. 2022, appendix B). P is recomputed from the saved
//! (max, Σ e).
//!
//! Keys and values are read from their blocks, where the forward pass left them or
//! [`KeyValues::store_keys_values`] wrote them again. One task is a chunk of a span's queries and
//! one key head with all query heads that share it. The task processes the positions that the chunk
//! attends to and writes its partial sums of dK and dV to its own buffer. Partial sums are then
//! added per token in the order of spans and chunks, so the number of threads does not change the
//! result.

use std::cell::RefCell;
use std::ops::Range;

use super::kv::{AttentionShape, AttentionWindow, BLOCK, KeyValues, TokenSpan};
use super::scores::{QueryRow, ScoreRows};
use crate::Compute;
use crate::buffer::{Buffer, SharedSlice};
use crate::gemm::lhs::LhsOperand;
use crate::gemm::pack::{pack_columns, unpack_rows};
use crate::gemm::shape::{ChainStart, RhsRows};
use crate::gemm::tile::tile;
use crate::gemm::{MAX_ROWS, Matrix, NR};
use crate::precision::{Kernel, Precision, SumOrder};
use crate::simd::{LANES, dot, simd};

/// Number of query rows whose weights exist at a time: enough to amortize reading dK and dV, and
/// few enough to stay in the cache.
pub const QUERIES: usize = 3 * MAX_ROWS;
/// Maximum number of chunks into which the queries of a single span are divided, and approximate
/// maximum for all spans of a batch together. The chunks are part of the definition of the sum.
/// There are enough for the threads, but few, because each chunk needs its own partial sums.
const MAX_CHUNKS: [usize; 2] = [8, 16];
/// Maximum number of values of partial sums that exist at a time (64 MiB), unless one chunk needs
/// more.
const MAX_PARTIAL_SUMS: usize = 16 << 20;

/// Rows of a span's sequence in a batch, first to last, as (first row, number of rows). Positions
/// before the first row have no row in the batch.
pub type SequenceRows = Vec<(usize, usize)>;

/// Values that the forward pass of attention saved for the backward pass.
#[derive(Clone, Copy)]
pub struct ForwardValues<'a> {
    /// Queries, keys and values after the rotary embedding, rows of `shape.qkv_width()`; only
    /// queries are read.
    pub qkv: &'a [f32],
    /// Output of attention, rows of `shape.query_width()`.
    pub out: &'a [f32],
    /// Softmax normalizer (max, Σ e) of every row and head.
    pub stats: &'a [f32],
}

/// Returns the distance between rows of `positions` positions: up to the end of the last panel, and
/// an odd number of cache lines, so that one position of many rows does not map to a single cache
/// set.
fn row_stride(positions: usize) -> usize {
    positions.next_multiple_of(BLOCK) + LANES
}

/// Chunk of consecutive queries of one span.
struct QueryChunk {
    span: usize,
    /// Range of the queries, counted from the span's first row.
    queries: Range<usize>,
    /// Number of positions that the queries attend to: all positions of the sequence up to the last
    /// query.
    positions: usize,
    /// Offset of the chunk's partial sums. Each key head has `[padded][stride]` values for keys,
    /// then as many for values.
    partial_sums: usize,
}

/// Returns the maximum number of values of partial sums for a batch of `rows` rows, with sequences
/// of at most `max_positions` positions.
pub fn max_partial_sums(shape: AttentionShape, rows: usize, max_positions: usize) -> usize {
    let position = 2 * shape.kv_heads * shape.padded_head_dim();
    let max_positions = row_stride(max_positions).saturating_mul(position);
    // The chunks of a sequence as long as the batch attend to half of it on average.
    let chunks = rows.div_ceil(QUERIES).min(MAX_CHUNKS[0]);
    (max_positions.saturating_mul(chunks + 1) / 2).min(MAX_PARTIAL_SUMS.max(max_positions))
}

impl QueryChunk {
    /// Divides all spans into chunks of queries, and the chunks into groups. Only the partial sums
    /// of one group exist at a time.
    fn split_into_groups(shape: AttentionShape, spans: &[TokenSpan]) -> Vec<Vec<QueryChunk>> {
        let mut groups: Vec<Vec<QueryChunk>> = Vec::new();
        let mut total = 0;
        let max_chunks = MAX_CHUNKS[0].min(MAX_CHUNKS[1].div_ceil(spans.len().max(1)));
        for (index, span) in spans.iter().enumerate() {
            let len = span.len.div_ceil(max_chunks).next_multiple_of(QUERIES);
            for first in (0..span.len).step_by(len) {
                let queries = first..span.len.min(first + len);
                let positions = span.position + queries.end;
                let size = shape.kv_heads * 2 * row_stride(positions) * shape.padded_head_dim();
                if groups.is_empty() || total + size > MAX_PARTIAL_SUMS {
                    groups.push(Vec::new());
                    total = 0;
                }
                let last = groups.len() - 1;
                groups[last].push(QueryChunk {
                    span: index,
                    queries,
                    positions,
                    partial_sums: total,
                });
                total += size;
            }
        }
        groups
    }

    /// Returns the number of values of the partial sums of a group of chunks.
    fn partial_sums_len(shape: AttentionShape, group: &[QueryChunk]) -> usize {
        group.last().map_or(0, |last| last.partial_sums_range(shape, shape.kv_heads - 1, 1).end)
    }

    /// Returns the range of the partial sums of a key head: of its keys if `part` is 0, of its
    /// values if `part` is 1.
    fn partial_sums_range(
        &self,
        shape: AttentionShape,
        kv_head: usize,
        part: usize,
    ) -> Range<usize> {
        let size = row_stride(self.positions) * shape.padded_head_dim();
        let start = self.partial_sums + (2 * kv_head + part) * size;
        start..start + size
    }
}

thread_local! {
    static SCRATCH: RefCell<BackwardScratch> = RefCell::new(BackwardScratch::default());
}

/// Scratch buffers of one task of attention's backward pass.
#[derive(Default)]
struct BackwardScratch {
    /// Values of the sequence, `[blocks][words of head_dim][BLOCK]`, and its keys, `[words of
    /// positions][padded]`: each the transpose of what its blocks hold.
    values_t: Buffer,
    keys: Buffer,
    /// One key-value block, unpacked to f32.
    unpacked: Buffer,
    /// Queries (scaled) and dO as rows, and in bf16 a tile of either, packed.
    queries: Buffer,
    grads: Buffer,
    packed: Buffer,
    /// Scores and dO Vᵀ, then P and dS, `[row][positions]`; in bf16 these as words, `[words of
    /// rows][positions]`.
    weights: Buffer,
    score_gradients: Buffer,
    weight_words: Buffer,
    gradient_words: Buffer,
    dqueries: Buffer,
    /// In bf16, a tile of dS, packed, and all tiles of queries or dO, transposed.
    lhs: Buffer,
    transposed: Vec<Buffer>,
}

/// Fills `dqkv` (rows of `shape.qkv_width()`) with the gradient of attention's input, given the
/// gradient `dout` of its output. `sequences[i]` are the rows of the sequence of `spans[i]`,
/// including the span's own rows. Gradients of the positions before these rows, which are the same
/// for all spans, are added to `above`: for each position its keys, then its values. `partial_sums`
/// is scratch.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    compute: &Compute,
    keys_values: &KeyValues<'_>,
    attention_window: AttentionWindow,
    spans: &[TokenSpan],
    sequences: &[SequenceRows],
    saved: ForwardValues<'_>,
    dout: &[f32],
    partial_sums: &mut Buffer,
    above: &mut [f32],
    dqkv: &mut [f32],
) {
    let shape = keys_values.shape;
    let width = shape.qkv_width();
    let dim = shape.head_dim;
    let first = above.len() / (2 * shape.key_width());
    let shared = SharedSlice::new(dqkv);
    let above = SharedSlice::new(above);
    compute.pool.run(spans.len(), |task| {
        let span = &spans[task];
        for row in span.row..span.row + span.len {
            // SAFETY: each row belongs to one span.
            unsafe { shared.slice(row * width + shape.query_width(), 2 * shape.key_width()) }
                .fill(0.0);
        }
    });
    for chunks in QueryChunk::split_into_groups(shape, spans) {
        let partial_sums =
            SharedSlice::new(partial_sums.reserve(QueryChunk::partial_sums_len(shape, &chunks)));
        // In decreasing order of cost, so that the last task to finish is a small one.
        let mut tasks: Vec<(&QueryChunk, usize)> = chunks
            .iter()
            .flat_map(|chunk| (0..shape.kv_heads).map(move |head| (chunk, head)))
            .collect();
        tasks.sort_by_key(|(chunk, _)| std::cmp::Reverse(chunk.positions * chunk.queries.len()));
        compute.pool.run(tasks.len(), |task| {
            let (chunk, kv_head) = tasks[task];
            // SAFETY: each range of partial sums belongs to one task.
            let partial_sum = [0, 1].map(|part| unsafe {
                let range = chunk.partial_sums_range(shape, kv_head, part);
                partial_sums.slice(range.start, range.len())
            });
            SCRATCH.with_borrow_mut(|scratch| {
                let span = &spans[chunk.span];
                scratch.process_chunk(
                    compute.kernel(),
                    keys_values,
                    attention_window,
                    span,
                    chunk,
                    kv_head,
                    saved,
                    dout,
                    partial_sum,
                    shared,
                );
            });
        });
        // A position's keys and values receive the partial sums of all chunks whose sequence
        // contains the position.
        compute.pool.run(shape.kv_heads * 2, |task| {
            let kv_head = task / 2;
            let part = task % 2;
            let column = part * shape.key_width() + kv_head * dim;
            for chunk in &chunks {
                let range = chunk.partial_sums_range(shape, kv_head, part);
                // SAFETY: the partial sums are only read from here on.
                let partial_sum = unsafe { partial_sums.slice(range.start, range.len()) };
                let rows =
                    sequences[chunk.span].iter().flat_map(|&(first, len)| first..first + len);
                let higher =
                    (0..first).map(|position| (&above, position * 2 * shape.key_width() + column));
                let here = rows.map(|row| (&shared, row * width + shape.query_width() + column));
                let mut destinations = higher.chain(here);
                let from = Matrix::with_stride(
                    partial_sum,
                    dim,
                    chunk.positions,
                    row_stride(chunk.positions),
                );
                SCRATCH.with_borrow_mut(|scratch| {
                    let rows = scratch.unpacked.reserve(BLOCK * dim);
                    for position in (0..chunk.positions).step_by(BLOCK) {
                        let count = BLOCK.min(chunk.positions - position);
                        transpose_back(compute.kernel(), from, position..position + count, rows);
                        for (from, (to, at)) in
                            rows[..count * dim].chunks_exact(dim).zip(&mut destinations)
                        {
                            // SAFETY: each (position or row, key head, part) belongs to one task.
                            let to = unsafe { to.slice(at, dim) };
                            for (to, from) in to.iter_mut().zip(from) {
                                *to += *from;
                            }
                        }
                    }
                });
            }
        });
    }
}

impl BackwardScratch {
    /// Processes one chunk of queries and one key head: fills the rows of the queries in `dqkv`,
    /// and the chunk's partial sums (dK, dV).
    #[allow(clippy::too_many_arguments)]
    fn process_chunk(
        &mut self,
        kernel: Kernel,
        keys_values: &KeyValues<'_>,
        attention_window: AttentionWindow,
        span: &TokenSpan,
        chunk: &QueryChunk,
        kv_head: usize,
        saved: ForwardValues<'_>,
        dout: &[f32],
        partial_sum: [&mut [f32]; 2],
        dqkv: SharedSlice<'_>,
    ) {
        let shape = keys_values.shape;
        let width = shape.qkv_width();
        let dim = shape.head_dim;
        let padded = shape.padded_head_dim();
        let max_tile_rows = kernel.tile_rows();
        let stride = row_stride(chunk.positions);
        // Number of leading blocks that neither the `own`th query of the sequence nor a later query
        // attends to.
        let unseen = |own: usize| attention_window.first_position(own) / BLOCK;
        self.transpose(kernel, keys_values, &span.blocks, kv_head, chunk.positions);
        let queries = self.queries.reserve(QUERIES * padded);
        let grads = self.grads.reserve(QUERIES * padded);
        let weights = self.weights.reserve(QUERIES * stride);
        let score_gradients = self.score_gradients.reserve(QUERIES * stride);
        let word_rows = if kernel.precision == Precision::Bf16 { kernel.words(QUERIES) } else { 0 };
        let weight_words = self.weight_words.reserve(word_rows * stride);
        let gradient_words = self.gradient_words.reserve(word_rows * stride);
        let dqueries = self.dqueries.reserve(max_tile_rows * padded);
        let depth = kernel.words(dim);
        let [dkeys, dvalues] = partial_sum;
        // Tiles of transposed queries and dO, of about equal height.
        let high = padded.div_ceil(padded.div_ceil(max_tile_rows));
        self.transposed.resize_with(padded.div_ceil(high), Buffer::default);
        let mut lhs_tiles = Vec::new();
        let mut of_rows = Vec::with_capacity(max_tile_rows);
        // The first queries overwrite the partial sums of positions to which they attend.
        let written = span.position + chunk.queries.end.min(chunk.queries.start + QUERIES);
        for row in dkeys.chunks_exact_mut(stride).chain(dvalues.chunks_exact_mut(stride)) {
            row[..unseen(span.position + chunk.queries.start + 1) * BLOCK].fill(0.0);
            row[written.next_multiple_of(NR)..].fill(0.0);
        }

        for (first, head) in chunk.queries.clone().step_by(QUERIES).flat_map(|first| {
            (kv_head * shape.heads_per_key_head()..(kv_head + 1) * shape.heads_per_key_head())
                .map(move |h| (first, h))
        }) {
            let rows = QUERIES.min(chunk.queries.end - first);
            // Number of positions before the first of these rows.
            let before = span.position + first;
            let first_position = unseen(before + 1) * BLOCK;
            for r in 0..rows {
                let row = span.row + first + r;
                let q = &saved.qkv[row * width + head * dim..][..dim];
                let g = &dout[row * shape.query_width() + head * dim..][..dim];
                for (to, q) in queries[r * padded..].iter_mut().zip(q) {
                    *to = q * attention_window.scale;
                }
                grads[r * padded..][..dim].copy_from_slice(g);
            }
            // All values are computed for a tile of rows, up to the last position of its last row.
            for tile_at in (0..rows).step_by(max_tile_rows) {
                let tile_rows = max_tile_rows.min(rows - tile_at);
                let seen = before + tile_at + tile_rows;
                for (from, of_keys, to) in
                    [(&*queries, true, &mut *weights), (&*grads, false, &mut *score_gradients)]
                {
                    let from = &from[tile_at * padded..];
                    let from = Matrix::with_stride(from, tile_rows, dim, padded);
                    let a = LhsOperand::pack(kernel, from, 0..tile_rows, 0..dim, &mut self.packed);
                    for block in first_position / BLOCK..seen.div_ceil(BLOCK) {
                        let start = [if of_keys {
                            keys_values.keys(span.blocks[block], kv_head).cast_const()
                        } else {
                            self.values_t[block * depth * BLOCK..].as_ptr()
                        }];
                        let b = RhsRows::cached(&start, depth, depth, BLOCK);
                        let to = to[tile_at * stride + block * BLOCK..].as_mut_ptr();
                        // SAFETY: the rows, a block and the scores have these extents.
                        unsafe {
                            tile(kernel, tile_rows, a, b, to, stride, BLOCK, ChainStart::Set)
                        };
                    }
                }
                let of_row = |r: usize| {
                    let row = span.row + first + tile_at + r;
                    let stats = &saved.stats[(row * shape.heads + head) * 2..][..2];
                    let o = &saved.out[row * shape.query_width() + head * dim..][..dim];
                    let mean =
                        mean_gradient(kernel.isa, o, &grads[(tile_at + r) * padded..][..dim]);
                    let own = before + tile_at + r + 1;
                    QueryRow {
                        max: stats[0],
                        inverse: 1.0 / stats[1],
                        mean,
                        first: attention_window.first_position(own),
                        own,
                    }
                };
                of_rows.clear();
                of_rows.extend((0..tile_rows).map(of_row));
                let words = if word_rows > 0 { kernel.words(tile_at) * stride } else { 0 };
                let scores = ScoreRows {
                    rows: &of_rows,
                    first_position,
                    seen,
                    stride,
                    p: &mut weights[tile_at * stride..],
                    s: &mut score_gradients[tile_at * stride..],
                    pairs: [&mut *weight_words, &mut *gradient_words]
                        .map(|buffer| &mut buffer[words..]),
                };
                // dQ = scale · dS K.
                let a = scores.compute(kernel, &mut self.lhs);
                for column in (0..padded).step_by(NR) {
                    let start =
                        [self.keys[kernel.words(first_position) * padded + column..].as_ptr()];
                    let depth = kernel.words(seen - first_position);
                    let b = RhsRows::cached(&start, depth, depth, padded);
                    let to = dqueries[column..].as_mut_ptr();
                    // SAFETY: score gradients, keys and the tile have these extents.
                    unsafe { tile(kernel, tile_rows, a, b, to, padded, NR, ChainStart::Set) };
                }
                for r in 0..tile_rows {
                    let row = span.row + first + tile_at + r;
                    // SAFETY: each (row, query head) belongs to one task.
                    let to = unsafe { dqkv.slice(row * width + head * dim, dim) };
                    for (to, from) in to.iter_mut().zip(&dqueries[r * padded..]) {
                        *to = from * attention_window.scale;
                    }
                }
            }
            // dKᵀ += Qᵀ dS and dVᵀ += dOᵀ P: positions are the columns of these matmuls, and
            // queries their inner dimension, from the first tile of queries that attends to any of
            // a panel's positions.
            let seen = before + rows;
            let is_first =
                first == chunk.queries.start && head == kv_head * shape.heads_per_key_head();
            let (weight_operand, gradient_operand) = match kernel.precision {
                Precision::F32 => (&*weights, &*score_gradients),
                Precision::Bf16 => (&*weight_words, &*gradient_words),
            };
            for (from, with, to) in [
                (gradient_operand, &*queries, &mut *dkeys),
                (weight_operand, &*grads, &mut *dvalues),
            ] {
                let with = Matrix::with_stride(with, rows, padded, padded).transposed();
                lhs_tiles.clear();
                for (i, above) in (0..padded).step_by(high).enumerate() {
                    let part = above..padded.min(above + high);
                    lhs_tiles.push((
                        part.clone(),
                        LhsOperand::pack(kernel, with, part, 0..rows, &mut self.transposed[i]),
                    ));
                }
                let mut multiply = |position: usize, part: &Range<usize>, a: LhsOperand| {
                    let skipped = kernel
                        .words(position.saturating_sub(before) / max_tile_rows * max_tile_rows);
                    let depth = kernel.words(rows) - skipped;
                    let start = [from[skipped * stride + position..].as_ptr()];
                    let b = RhsRows::cached(&start, depth, depth, stride);
                    let to = to[part.start * stride + position..].as_mut_ptr();
                    // SAFETY: queries, scores and the partial sums have these extents.
                    unsafe {
                        tile(
                            kernel,
                            part.len(),
                            a.skip_words(skipped),
                            b,
                            to,
                            stride,
                            NR,
                            ChainStart::new(!is_first),
                        )
                    };
                };
                let positions = (first_position..seen).step_by(NR);
                match kernel.order() {
                    // A panel stays in the first-level cache for all the low tiles.
                    SumOrder::Chained => positions.for_each(|at| {
                        lhs_tiles.iter().for_each(|(part, a)| multiply(at, part, *a))
                    }),
                    // Two tiles: the processor's prefetcher follows the positions.
                    SumOrder::Tiled => lhs_tiles.iter().for_each(|(part, a)| {
                        positions.clone().for_each(|at| multiply(at, part, *a))
                    }),
                }
            }
        }
    }

    /// Transposes values and keys of one head for the first `positions` positions of a sequence.
    fn transpose(
        &mut self,
        kernel: Kernel,
        keys_values: &KeyValues<'_>,
        sequence_blocks: &[u32],
        kv_head: usize,
        positions: usize,
    ) {
        let shape = keys_values.shape;
        let dim = shape.head_dim;
        let padded = shape.padded_head_dim();
        let of_dim = kernel.words(dim);
        let of_block = kernel.words(BLOCK);
        let used = positions.div_ceil(BLOCK);
        let values_t = self.values_t.reserve(used * of_dim * BLOCK);
        let keys = self.keys.reserve(used * of_block * padded);
        for (i, &block) in sequence_blocks[..used].iter().enumerate() {
            // SAFETY: the extents of one head's keys and values in a block; no thread writes to
            // them at the same time.
            let (from_keys, from_values) = unsafe {
                (
                    std::slice::from_raw_parts(keys_values.keys(block, kv_head), of_dim * BLOCK),
                    std::slice::from_raw_parts(
                        keys_values.values(block, kv_head),
                        of_block * padded,
                    ),
                )
            };
            let to = &mut values_t[i * of_dim * BLOCK..][..of_dim * BLOCK];
            let from = unpack_rows(kernel, from_values, padded, &mut self.unpacked);
            pack_columns(kernel, from, padded, BLOCK, dim, BLOCK, to);
            let to = &mut keys[i * of_block * padded..][..of_block * padded];
            let from = unpack_rows(kernel, from_keys, BLOCK, &mut self.unpacked);
            pack_columns(kernel, from, BLOCK, dim, BLOCK, padded, to);
        }
    }
}

/// Transposes the columns `positions` of a matrix to `[positions][rows of the matrix]`.
fn transpose_back(kernel: Kernel, from: Matrix<'_>, positions: Range<usize>, to: &mut [f32]) {
    let kernel = Kernel { precision: Precision::F32, ..kernel };
    let count = positions.len();
    let high = from.rows;
    let (data, stride, _) = from.submatrix(0..high, positions);
    pack_columns(kernel, data, stride, high, count, high, to);
}

simd! {
    /// Computes D = dO · O for one query and head, which is the mean of dO · V over the attention
    /// weights.
    fn mean_gradient(out: &[f32], dout: &[f32]) -> f32 {
        dot(out, dout)
    }
}

#[cfg(test)]
#[path = "attention_backward_tests.rs"]
mod tests;
