//! Computes the backward pass of causal grouped-query attention.
//!
//! With P the normalized weights, D = rowsum(dO ∘ O) and dS = P ∘ (dO Vᵀ − D): dQ = scale · dS K, dK =
//! dSᵀ (scale · Q), dV = Pᵀ dO (Dao et al. 2022, appendix B). P is recomputed from the saved (max, Σ
//! e).
//!
//! Keys and values are read from their blocks, where the forward pass left them or [`KeyValues::store`]
//! wrote them again. One task is a piece of a span and one key head with all query heads that share it.
//! It processes the positions that the piece attends to and writes its partial sums of dK and dV to its
//! own buffer. Partial sums are then added per token in the order of spans and pieces, so the number of
//! threads does not change the result.

use std::cell::RefCell;
use std::ops::Range;

use super::kv::{BLOCK, KeyValues, Shape, Sight, Span};
use super::scores::{Row, Scores};
use crate::Compute;
use crate::buffer::{Buffer, Shared};
use crate::precision::{Kernel, Order, Precision};
use crate::product::left::Left;
use crate::product::pack::{pack_columns, unpack_rows};
use crate::product::shape::{Chain, Rows};
use crate::product::tile::tile;
use crate::product::{MAX_ROWS, Matrix, NR};
use crate::simd::{LANES, dot, simd};

/// Number of query rows whose weights exist at a time: enough to amortize reading dK and dV, and few
/// enough to stay in the cache.
pub const QUERIES: usize = 3 * MAX_ROWS;
/// Number of pieces that spans are divided into, which is part of the definition of the sum: enough for
/// the threads, and few because each piece needs its own partial sums. A single span makes up to the
/// first number of pieces, several spans together about the second.
const PIECES: [usize; 2] = [8, 16];
/// Maximum number of values of partial sums that exist at a time (64 MiB), unless one piece needs more.
const SHARES: usize = 16 << 20;

/// Rows of a span's sequence, first to last, as (first row, number of rows). Positions before them have
/// no row in the batch.
pub type PathRows = Vec<(usize, usize)>;

/// Values that the forward pass saved.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    /// Queries, keys and values after the rotary embedding, rows of `shape.qkv()`; only queries are
    /// read.
    pub qkv: &'a [f32],
    /// Output, rows of `shape.query()`.
    pub out: &'a [f32],
    /// (max, Σ e) for every row and head.
    pub stats: &'a [f32],
}

/// Returns the distance between rows of `positions` positions: up to the end of the last panel, and an
/// odd number of cache lines, so that one position of many rows does not map to a single cache set.
fn stride(positions: usize) -> usize {
    positions.next_multiple_of(BLOCK) + LANES
}

/// Some queries of one span.
struct Piece {
    span: usize,
    /// Queries, counted from the span's first row.
    queries: Range<usize>,
    /// Number of positions that they attend to: those of the sequence up to the last query.
    positions: usize,
    /// Offset of the partial sums of its key heads: for each, `[padded][stride]` for keys, then for
    /// values.
    shares: usize,
}

/// Returns the maximum number of values of partial sums for a batch of `rows` rows, with sequences of
/// at most `longest` positions.
pub fn shares_at_most(shape: Shape, rows: usize, longest: usize) -> usize {
    let position = 2 * shape.kv_heads * shape.padded();
    let longest = stride(longest).saturating_mul(position);
    // The pieces of a sequence as long as the batch attend to half of it on average.
    let pieces = rows.div_ceil(QUERIES).min(PIECES[0]);
    (longest.saturating_mul(pieces + 1) / 2).min(SHARES.max(longest))
}

impl Piece {
    /// Divides all spans into groups of pieces. The partial sums of one group exist at a time.
    fn cut(shape: Shape, spans: &[Span]) -> Vec<Vec<Piece>> {
        let mut groups: Vec<Vec<Piece>> = Vec::new();
        let mut total = 0;
        let most = PIECES[0].min(PIECES[1].div_ceil(spans.len().max(1)));
        for (index, span) in spans.iter().enumerate() {
            let len = span.len.div_ceil(most).next_multiple_of(QUERIES);
            for first in (0..span.len).step_by(len) {
                let queries = first..span.len.min(first + len);
                let positions = span.position + queries.end;
                let size = shape.kv_heads * 2 * stride(positions) * shape.padded();
                if groups.is_empty() || total + size > SHARES {
                    groups.push(Vec::new());
                    total = 0;
                }
                let last = groups.len() - 1;
                groups[last].push(Piece { span: index, queries, positions, shares: total });
                total += size;
            }
        }
        groups
    }

    /// Returns the number of values of a group's partial sums.
    fn shares(shape: Shape, group: &[Piece]) -> usize {
        group.last().map_or(0, |last| last.share(shape, shape.kv_heads - 1, 1).end)
    }

    /// Returns the range of the partial sums of `part` (0: keys, 1: values) of a key head.
    fn share(&self, shape: Shape, kv_head: usize, part: usize) -> Range<usize> {
        let size = stride(self.positions) * shape.padded();
        let start = self.shares + (2 * kv_head + part) * size;
        start..start + size
    }
}

thread_local! {
    static SCRATCH: RefCell<Task> = RefCell::new(Task::default());
}

/// Scratch of one task.
#[derive(Default)]
struct Task {
    /// Values of the sequence, `[blocks][words of head_dim][BLOCK]`, and its keys, `[words of
    /// positions][padded]`: each the transpose of what its blocks hold.
    values_t: Buffer,
    keys: Buffer,
    /// One block in f32.
    unpacked: Buffer,
    /// Queries (scaled) and dO as rows, and in bf16 a tile of either, packed.
    queries: Buffer,
    grads: Buffer,
    packed: Buffer,
    /// Scores and dO Vᵀ, then P and dS, `[row][positions]`; in bf16 these as words, `[words of
    /// rows][positions]`.
    weights: Buffer,
    slopes: Buffer,
    weight_words: Buffer,
    slope_words: Buffer,
    dqueries: Buffer,
    /// In bf16, a tile of dS, packed, and all tiles of queries or dO, transposed.
    left: Buffer,
    turned: Vec<Buffer>,
}

/// Fills `dqkv` (rows of `shape.qkv()`) with the gradient, given the gradient `dout` of the output.
/// `paths[i]` are the rows of the sequence of `spans[i]`, including its own. Gradients of the positions
/// before these rows, which are the same for all spans, are added to `above`: for each position its
/// keys, then its values. `shares` is scratch.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    compute: &Compute,
    keys_values: &KeyValues<'_>,
    sight: Sight,
    spans: &[Span],
    paths: &[PathRows],
    saved: Saved<'_>,
    dout: &[f32],
    shares: &mut Buffer,
    above: &mut [f32],
    dqkv: &mut [f32],
) {
    let shape = keys_values.shape;
    let (width, dim) = (shape.qkv(), shape.head_dim);
    let first = above.len() / (2 * shape.key());
    let (shared, above) = (Shared::new(dqkv), Shared::new(above));
    compute.pool.run(spans.len(), |task| {
        let span = &spans[task];
        for row in span.row..span.row + span.len {
            // SAFETY: each row belongs to one span.
            unsafe { shared.slice(row * width + shape.query(), 2 * shape.key()) }.fill(0.0);
        }
    });
    for pieces in Piece::cut(shape, spans) {
        let shares = Shared::new(shares.reserve(Piece::shares(shape, &pieces)));
        // In decreasing order of cost, so that the last task to finish is a small one.
        let mut tasks: Vec<(&Piece, usize)> =
            pieces.iter().flat_map(|piece| (0..shape.kv_heads).map(move |head| (piece, head))).collect();
        tasks.sort_by_key(|(piece, _)| std::cmp::Reverse(piece.positions * piece.queries.len()));
        compute.pool.run(tasks.len(), |task| {
            let (piece, kv_head) = tasks[task];
            // SAFETY: each range of partial sums belongs to one task.
            let share = [0, 1].map(|part| unsafe {
                let range = piece.share(shape, kv_head, part);
                shares.slice(range.start, range.len())
            });
            SCRATCH.with_borrow_mut(|scratch| {
                let span = &spans[piece.span];
                scratch.run(
                    compute.kernel(),
                    keys_values,
                    sight,
                    span,
                    piece,
                    kv_head,
                    saved,
                    dout,
                    share,
                    shared,
                );
            });
        });
        // Adds the partial sums. A position's keys and values receive those of all pieces whose
        // sequence contains it.
        compute.pool.run(shape.kv_heads * 2, |task| {
            let (kv_head, part) = (task / 2, task % 2);
            let column = part * shape.key() + kv_head * dim;
            for piece in &pieces {
                let range = piece.share(shape, kv_head, part);
                // SAFETY: the partial sums are only read from here on.
                let share = unsafe { shares.slice(range.start, range.len()) };
                let rows = paths[piece.span].iter().flat_map(|&(first, len)| first..first + len);
                let higher = (0..first).map(|position| (&above, position * 2 * shape.key() + column));
                let here = rows.map(|row| (&shared, row * width + shape.query() + column));
                let mut places = higher.chain(here);
                let from = Matrix::strided(share, dim, piece.positions, stride(piece.positions));
                SCRATCH.with_borrow_mut(|scratch| {
                    let rows = scratch.unpacked.reserve(BLOCK * dim);
                    for position in (0..piece.positions).step_by(BLOCK) {
                        let count = BLOCK.min(piece.positions - position);
                        turn_back(compute.kernel(), from, position..position + count, rows);
                        for (from, (to, at)) in rows[..count * dim].chunks_exact(dim).zip(&mut places) {
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

impl Task {
    /// Processes one piece and one key head: fills the rows of its queries in `dqkv`, and its partial
    /// sums (dK, dV).
    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        kernel: Kernel,
        keys_values: &KeyValues<'_>,
        sight: Sight,
        span: &Span,
        piece: &Piece,
        kv_head: usize,
        saved: Saved<'_>,
        dout: &[f32],
        share: [&mut [f32]; 2],
        dqkv: Shared<'_>,
    ) {
        let shape = keys_values.shape;
        let (width, dim, padded) = (shape.qkv(), shape.head_dim, shape.padded());
        let most = kernel.tile_rows();
        let stride = stride(piece.positions);
        // Number of leading blocks that neither the `own`th query of the sequence nor a later query attends
        // to.
        let unseen = |own: usize| sight.first(own) / BLOCK;
        self.turn(kernel, keys_values, &span.blocks, kv_head, piece.positions);
        let queries = self.queries.reserve(QUERIES * padded);
        let grads = self.grads.reserve(QUERIES * padded);
        let weights = self.weights.reserve(QUERIES * stride);
        let slopes = self.slopes.reserve(QUERIES * stride);
        let word_rows = if kernel.precision == Precision::Bf16 { kernel.words(QUERIES) } else { 0 };
        let weight_words = self.weight_words.reserve(word_rows * stride);
        let slope_words = self.slope_words.reserve(word_rows * stride);
        let dqueries = self.dqueries.reserve(most * padded);
        let depth = kernel.words(dim);
        let [dkeys, dvalues] = share;
        // Tiles of transposed queries and dO, of about equal height.
        let high = padded.div_ceil(padded.div_ceil(most));
        self.turned.resize_with(padded.div_ceil(high), Buffer::default);
        let (mut lefts, mut of_rows) = (Vec::new(), Vec::with_capacity(most));
        // The first queries overwrite the partial sums of positions to which they attend.
        let written = span.position + piece.queries.end.min(piece.queries.start + QUERIES);
        for row in dkeys.chunks_exact_mut(stride).chain(dvalues.chunks_exact_mut(stride)) {
            row[..unseen(span.position + piece.queries.start + 1) * BLOCK].fill(0.0);
            row[written.next_multiple_of(NR)..].fill(0.0);
        }

        for (first, head) in piece.queries.clone().step_by(QUERIES).flat_map(|first| {
            (kv_head * shape.group()..(kv_head + 1) * shape.group()).map(move |h| (first, h))
        }) {
            let rows = QUERIES.min(piece.queries.end - first);
            // Number of positions before the first of these rows.
            let before = span.position + first;
            let begin = unseen(before + 1) * BLOCK;
            for r in 0..rows {
                let row = span.row + first + r;
                let q = &saved.qkv[row * width + head * dim..][..dim];
                let g = &dout[row * shape.query() + head * dim..][..dim];
                for (to, q) in queries[r * padded..].iter_mut().zip(q) {
                    *to = q * sight.scale;
                }
                grads[r * padded..][..dim].copy_from_slice(g);
            }
            // All values are computed for a tile of rows, up to the last position of its last row.
            for tile_at in (0..rows).step_by(most) {
                let tile_rows = most.min(rows - tile_at);
                let seen = before + tile_at + tile_rows;
                for (from, of_keys, to) in [(&*queries, true, &mut *weights), (&*grads, false, &mut *slopes)]
                {
                    let from = &from[tile_at * padded..];
                    let from = Matrix::strided(from, tile_rows, dim, padded);
                    let a = Left::of(kernel, from, 0..tile_rows, 0..dim, &mut self.packed);
                    for block in begin / BLOCK..seen.div_ceil(BLOCK) {
                        let start = [if of_keys {
                            keys_values.keys(span.blocks[block], kv_head).cast_const()
                        } else {
                            self.values_t[block * depth * BLOCK..].as_ptr()
                        }];
                        let b = Rows::at_hand(&start, depth, depth, BLOCK);
                        let to = to[tile_at * stride + block * BLOCK..].as_mut_ptr();
                        // SAFETY: the rows, a block and the scores have these extents.
                        unsafe { tile(kernel, tile_rows, a, b, to, stride, BLOCK, Chain::Set) };
                    }
                }
                let of_row = |r: usize| {
                    let row = span.row + first + tile_at + r;
                    let stats = &saved.stats[(row * shape.heads + head) * 2..][..2];
                    let o = &saved.out[row * shape.query() + head * dim..][..dim];
                    let mean = mean_slope(kernel.isa, o, &grads[(tile_at + r) * padded..][..dim]);
                    let own = before + tile_at + r + 1;
                    Row { max: stats[0], inverse: 1.0 / stats[1], mean, first: sight.first(own), own }
                };
                of_rows.clear();
                of_rows.extend((0..tile_rows).map(of_row));
                let words = if word_rows > 0 { kernel.words(tile_at) * stride } else { 0 };
                let scores = Scores {
                    rows: &of_rows,
                    begin,
                    seen,
                    stride,
                    p: &mut weights[tile_at * stride..],
                    s: &mut slopes[tile_at * stride..],
                    pairs: [&mut *weight_words, &mut *slope_words].map(|words_of| &mut words_of[words..]),
                };
                // dQ = scale · dS K.
                let a = scores.make(kernel, &mut self.left);
                for column in (0..padded).step_by(NR) {
                    let start = [self.keys[kernel.words(begin) * padded + column..].as_ptr()];
                    let depth = kernel.words(seen - begin);
                    let b = Rows::at_hand(&start, depth, depth, padded);
                    let to = dqueries[column..].as_mut_ptr();
                    // SAFETY: score gradients, keys and the tile have these extents.
                    unsafe { tile(kernel, tile_rows, a, b, to, padded, NR, Chain::Set) };
                }
                for r in 0..tile_rows {
                    let row = span.row + first + tile_at + r;
                    // SAFETY: each (row, query head) belongs to one task.
                    let to = unsafe { dqkv.slice(row * width + head * dim, dim) };
                    for (to, from) in to.iter_mut().zip(&dqueries[r * padded..]) {
                        *to = from * sight.scale;
                    }
                }
            }
            // dKᵀ += Qᵀ dS and dVᵀ += dOᵀ P: positions are the columns of these matmuls, and queries
            // their inner dimension, from the first tile of queries that attends to any of a panel's
            // positions.
            let seen = before + rows;
            let is_first = first == piece.queries.start && head == kv_head * shape.group();
            let (of_weights, of_slopes) = match kernel.precision {
                Precision::F32 => (&*weights, &*slopes),
                Precision::Bf16 => (&*weight_words, &*slope_words),
            };
            for (from, with, to) in
                [(of_slopes, &*queries, &mut *dkeys), (of_weights, &*grads, &mut *dvalues)]
            {
                let with = Matrix::strided(with, rows, padded, padded).transposed();
                lefts.clear();
                for (i, above) in (0..padded).step_by(high).enumerate() {
                    let part = above..padded.min(above + high);
                    lefts.push((part.clone(), Left::of(kernel, with, part, 0..rows, &mut self.turned[i])));
                }
                let mut multiply = |position: usize, part: &Range<usize>, a: Left| {
                    let skipped = kernel.words(position.saturating_sub(before) / most * most);
                    let depth = kernel.words(rows) - skipped;
                    let start = [from[skipped * stride + position..].as_ptr()];
                    let b = Rows::at_hand(&start, depth, depth, stride);
                    let to = to[part.start * stride + position..].as_mut_ptr();
                    // SAFETY: queries, scores and the partial sums have these extents.
                    unsafe {
                        tile(kernel, part.len(), a.after(skipped), b, to, stride, NR, Chain::new(!is_first))
                    };
                };
                let positions = (begin..seen).step_by(NR);
                match kernel.order() {
                    // A panel stays in the first-level cache for all the low tiles.
                    Order::Chained => {
                        positions.for_each(|at| lefts.iter().for_each(|(part, a)| multiply(at, part, *a)))
                    }
                    // Two tiles: the processor's prefetcher follows the positions.
                    Order::Tiled => lefts
                        .iter()
                        .for_each(|(part, a)| positions.clone().for_each(|at| multiply(at, part, *a))),
                }
            }
        }
    }

    /// Transposes values and keys of one head for the first `positions` positions of a sequence.
    fn turn(
        &mut self,
        kernel: Kernel,
        keys_values: &KeyValues<'_>,
        path: &[u32],
        kv_head: usize,
        positions: usize,
    ) {
        let shape = keys_values.shape;
        let (dim, padded) = (shape.head_dim, shape.padded());
        let (of_dim, of_block) = (kernel.words(dim), kernel.words(BLOCK));
        let used = positions.div_ceil(BLOCK);
        let values_t = self.values_t.reserve(used * of_dim * BLOCK);
        let keys = self.keys.reserve(used * of_block * padded);
        for (i, &block) in path[..used].iter().enumerate() {
            // SAFETY: the extents of one head's keys and values in a block; no thread writes to them at
            // the same time.
            let (from_keys, from_values) = unsafe {
                (
                    std::slice::from_raw_parts(keys_values.keys(block, kv_head), of_dim * BLOCK),
                    std::slice::from_raw_parts(keys_values.values(block, kv_head), of_block * padded),
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
fn turn_back(kernel: Kernel, from: Matrix<'_>, positions: Range<usize>, to: &mut [f32]) {
    let kernel = Kernel { precision: Precision::F32, ..kernel };
    let (count, high) = (positions.len(), from.rows);
    let (data, stride, _) = from.part(0..high, positions);
    pack_columns(kernel, data, stride, high, count, high, to);
}

simd! {
    /// Computes D = dO · O.
    fn mean_slope(out: &[f32], dout: &[f32]) -> f32 {
        dot(out, dout)
    }
}

#[cfg(test)]
mod tests {
    use super::super::attention::forward;
    use super::super::attention::tests::{forest, naive};
    use super::super::kv::Blocks;
    use super::super::testing::{close, differences, noise, wide};
    use super::*;
    use crate::simd::Isa;

    fn run(
        precision: Precision,
        threads: usize,
        shape: Shape,
        sight: Sight,
        nodes: &[(Option<usize>, usize)],
    ) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let (spans, paths, count) = forest(nodes);
        let rows = paths.len();
        let qkv = noise(rows * shape.qkv(), 1, 3.0);
        let dout = noise(rows * shape.query(), 2, 1.0);
        let compute = Compute::with(threads, Isa::detect(), precision);
        let mut blocks = Blocks::new(shape, 1, precision);
        blocks.grow(count);
        let mut out = vec![0.0; rows * shape.query()];
        let mut stats = vec![0.0; rows * shape.heads * 2];
        let keys_values = blocks.layer(0);
        forward(&compute, &keys_values, sight, &spans, &qkv, &mut out, Some(&mut stats));
        let runs: Vec<PathRows> =
            spans.iter().map(|s| paths[s.row + s.len - 1].iter().map(|row| (*row, 1)).collect()).collect();
        let saved = Saved { qkv: &qkv, out: &out, stats: &stats };
        let mut dqkv = noise(qkv.len(), 3, 9.0);
        let mut shares = Buffer::default();
        backward(&compute, &keys_values, sight, &spans, &runs, saved, &dout, &mut shares, &mut [], &mut dqkv);
        (qkv, dout, dqkv)
    }

    #[test]
    fn gradient_matches_finite_differences_on_forest() {
        let nodes = [(None, 5), (Some(0), 3), (Some(1), 2), (Some(0), 4), (None, 3)];
        let shape = Shape { heads: 4, kv_heads: 2, head_dim: 6 };
        let whole = Sight::whole(6);
        for sight in [whole, Sight { window: 3, scale: 0.5 }] {
            let (qkv, dout, dqkv) = run(Precision::F32, 2, shape, sight, &nodes);
            let (_, paths, _) = forest(&nodes);
            let objective = |x: &[f64]| {
                naive(shape, sight, &paths, x).iter().zip(&dout).map(|(o, g)| o * f64::from(*g)).sum::<f64>()
            };
            close(&dqkv, &differences(&wide(&qkv), objective), 1e-5);
        }
    }

    /// Long sequences have several blocks, tiles and pieces. A sum over all gradients is compared with
    /// a directional difference.
    #[test]
    fn gradient_of_long_sequences_matches_directional_difference() {
        let nodes = [(None, 70), (Some(0), 411), (Some(0), 20)];
        let shape = Shape { heads: 3, kv_heads: 1, head_dim: 40 };
        let whole = Sight::whole(40);
        for sight in [whole, Sight { window: 7, ..whole }, Sight { window: 150, ..whole }] {
            let (qkv, dout, dqkv) = run(Precision::F32, 2, shape, sight, &nodes);
            let (_, paths, _) = forest(&nodes);
            let direction = noise(qkv.len(), 5, 2.0);
            let along = |t: f64| {
                let x: Vec<f64> =
                    qkv.iter().zip(&direction).map(|(x, d)| f64::from(*x) + t * f64::from(*d)).collect();
                naive(shape, sight, &paths, &x).iter().zip(&dout).map(|(o, g)| o * f64::from(*g)).sum::<f64>()
            };
            let expected = (along(1e-4) - along(-1e-4)) / 2e-4;
            let found: f64 = dqkv.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
            assert!((found - expected).abs() < 1e-4 * (1.0 + expected.abs()), "{found} against {expected}");
            let (.., alone) = run(Precision::F32, 1, shape, sight, &nodes);
            assert!(
                dqkv.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()),
                "threads changed a bit"
            );
            // Rounded to bf16 the gradient is close to this one, for all instruction sets.
            let (.., rounded) = run(Precision::Bf16, 2, shape, sight, &nodes);
            let [apart, size] = [&rounded, &vec![0.0; dqkv.len()]]
                .map(|x| dqkv.iter().zip(x).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt());
            assert!(apart < 0.05 * size, "{apart} of {size} at a window of {}", sight.window);
        }
    }
}
