//! Computes the forward pass of causal grouped-query attention over a sequence of segments.
//!
//! Sampling and training use the same blocks of keys and values ([`super::kv`]) and the same code.
//! Blocks are aligned to absolute positions of the sequence. For one query at position t:
//!
//! 1. scores s_j = Σ_d (q_d · scale) k_jd, one chain over d for each j ≤ t, −∞ for j before a
//!    sliding window;
//! 2. m = max s, e_j = exp(s_j − m), Σ e in lanes j mod 16;
//! 3. out_d = (Σ_j e_j v_jd) / Σ e, a chain over j for each stretch of [`STRETCH`] positions, and
//!    the sums of the stretches added in order.
//!
//! None of this depends on how the sequence was divided into prompts, chunks, nodes or turns, or on
//! which other queries are computed, including queries of other sequences that share blocks
//! (`attention_tiles`).
//!
//! A sliding window counts positions of the sequence. Stretches before the windows of all rows of a
//! tile are skipped: their scores are −∞, so they would add exactly nothing. The cache keeps their
//! keys and values, since another layer can attend to them.

use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::attention_amx;
use super::attention_tiles::{AttentionTile, QueryRun, STRETCH, divide_into_tiles};
use super::kv::{AttentionWindow, BLOCK, KeyValues, TokenSpan};
use crate::Compute;
use crate::buffer::{Buffer, SharedSlice};
use crate::gemm::lhs::LhsOperand;
use crate::gemm::shape::{ChainStart, RhsRows, STEP};
use crate::gemm::tile::tile as multiply;
use crate::gemm::{MAX_ROWS, Matrix, NR};
use crate::precision::{Kernel, SumOrder};
use crate::simd::{LANES, exp, fold_lanes, max, simd};

/// Maximum number of rows of a tile that prefetches its next key-value block. Such a tile finishes
/// a block before the next block arrives. Taller tiles process a prompt or train, and the previous
/// tile has read most of their blocks.
const FEW: usize = 16;

/// Scratch buffers for the attention of one tile.
#[derive(Default)]
struct AttentionScratch {
    /// Scaled queries, `[rows][head_dim]`. In bf16, `packed` holds the same queries packed as an
    /// lhs.
    queries: Buffer,
    packed: Buffer,
    /// Attention scores, which attention weights overwrite, `[rows][positions]`.
    scores: Buffer,
    /// Softmax normalizer of each row of the tile.
    stats: [RowStats; MAX_ROWS],
    /// In bf16, attention weights packed as lhs operands, one for each part.
    weights: Buffer,
    /// Weighted sums of values, `[rows][padded]`.
    sums: Buffer,
    /// Weighted sums of a stretch of positions that another part of the tile completes.
    open: Buffer,
    /// Addresses of the value blocks of a stretch of positions.
    starts: Vec<*const f32>,
}

thread_local! {
    static SCRATCH: RefCell<AttentionScratch> = RefCell::new(AttentionScratch::default());
}

/// Softmax normalizer of one query: the maximum score, and the sum of exp(score − maximum).
pub type RowStats = [f32; 2];

/// Writes keys and values of all rows into their blocks, then computes every row's attention over
/// its sequence.
///
/// `qkv` has rows of `shape.qkv_width()`, with rotary embedding applied; `out` has rows of
/// `shape.query_width()`. `stats`, if given, receives (max, Σ e) for every row and head, as the
/// backward pass needs them.
pub fn forward(
    compute: &Compute,
    keys_values: &KeyValues<'_>,
    attention_window: AttentionWindow,
    spans: &[TokenSpan],
    qkv: &[f32],
    out: &mut [f32],
    stats: Option<&mut [f32]>,
) {
    let shape = keys_values.shape;
    keys_values.store_keys_values(compute, spans, qkv);
    let width = shape.query_width();
    let group = shape.heads_per_key_head();
    let out = SharedSlice::new(out);
    let stats = stats.map(SharedSlice::new);
    // In decreasing order of cost for each key head, so that the last task to finish is a small
    // one.
    let mut tiles = divide_into_tiles(spans, group, compute.kernel().tile_rows());
    tiles.reverse();
    compute.pool.run(tiles.len() * shape.kv_heads, |task| {
        let tile = &tiles[task % tiles.len()];
        let head = task / tiles.len();
        SCRATCH.with_borrow_mut(|scratch| {
            compute_attention(
                compute.kernel(),
                keys_values,
                attention_window,
                spans,
                tile,
                head,
                qkv,
                scratch,
            );
            for (r, tile_row) in tile_rows(spans, &tile.runs, group).enumerate() {
                let query_head = head * group + tile_row.head_in_group;
                let [max, sum] = scratch.stats[r];
                // SAFETY: each (row, head) belongs to one tile.
                let to = unsafe {
                    out.slice(tile_row.row * width + query_head * shape.head_dim, shape.head_dim)
                };
                for (to, from) in to.iter_mut().zip(&scratch.sums[r * shape.padded_head_dim()..]) {
                    *to = from / sum;
                }
                if let Some(stats) = &stats {
                    // SAFETY: as above.
                    let to =
                        unsafe { stats.slice((tile_row.row * shape.heads + query_head) * 2, 2) };
                    to.copy_from_slice(&[max, sum]);
                }
            }
        });
    });
}

/// Row of a tile: a query, and one of the heads that share a key head.
struct TileRow {
    /// Row of the query in the batch.
    row: usize,
    /// Number of positions of its sequence that the query attends to.
    seen: usize,
    /// Index of the query head within its group.
    head_in_group: usize,
}

/// Returns the rows of a tile or of a part of it; the query varies slowest.
fn tile_rows<'a>(
    spans: &'a [TokenSpan],
    runs: &'a [QueryRun],
    group: usize,
) -> impl Iterator<Item = TileRow> + 'a {
    runs.iter().flat_map(move |run| {
        let span = &spans[run.span];
        (run.from..run.from + run.rows).map(move |r| {
            let query = r / group;
            TileRow {
                row: span.row + query,
                seen: span.position + query + 1,
                head_in_group: r % group,
            }
        })
    })
}

/// Rows of a tile that process the same positions of the same blocks.
struct TilePart<'a> {
    rows: Range<usize>,
    sequence_blocks: &'a [u32],
    /// Positions that the part processes. The first position starts a block.
    positions: Range<usize>,
    /// Whether other parts continue the last stretch of this part.
    continues: bool,
}

impl TilePart<'_> {
    /// Returns the blocks of the part, as indices into `sequence_blocks`.
    fn blocks(&self) -> Range<usize> {
        self.positions.start / BLOCK..self.positions.end.div_ceil(BLOCK)
    }

    /// Returns the start and the end of every stretch of positions, limited to the positions of the
    /// part.
    fn stretches(&self) -> impl Iterator<Item = (usize, usize)> {
        let Range { start, end } = self.positions;
        let first = start / STRETCH * STRETCH;
        (first..end).step_by(STRETCH).map(move |from| (from.max(start), end.min(from + STRETCH)))
    }

    /// Returns the number of words of the part's weights as an lhs.
    fn words(&self, kernel: Kernel) -> usize {
        kernel.lhs_words(self.rows.len(), self.positions.len())
    }
}

/// Returns the start of the stretch with the first position that any row of a tile attends to.
fn first_seen(
    spans: &[TokenSpan],
    tile: &AttentionTile,
    group: usize,
    attention_window: AttentionWindow,
) -> usize {
    let own = tile.runs.iter().map(|run| spans[run.span].position + run.from / group + 1).min();
    attention_window.first_position(own.unwrap_or(0)) / STRETCH * STRETCH
}

/// Returns the parts of a tile from position `seen` on, which starts a stretch: all rows over the
/// blocks that their sequences share, then each sequence's rows over its own blocks.
fn parts<'a>(
    spans: &'a [TokenSpan],
    tile: &'a AttentionTile,
    group: usize,
    seen: usize,
) -> impl Iterator<Item = TilePart<'a>> {
    let shared = tile.shared * BLOCK;
    let rows = tile.runs.iter().map(|run| run.rows).sum();
    let first = tile.runs.first().map(|run| &spans[run.span].blocks[..]).unwrap_or_default();
    let together = TilePart {
        rows: 0..rows,
        sequence_blocks: first,
        positions: seen..shared,
        continues: true,
    };
    let mut at = 0;
    let separate = tile.runs.iter().map(move |run| {
        let span = &spans[run.span];
        let from = at;
        at += run.rows;
        let end = span.position + (run.from + run.rows - 1) / group + 1;
        TilePart {
            rows: from..at,
            sequence_blocks: &span.blocks,
            positions: shared.max(seen)..end,
            continues: false,
        }
    });
    Some(together).filter(|_| shared > seen).into_iter().chain(separate)
}

/// Computes attention of one tile and one key head. Results are left in `scratch.sums` and
/// `scratch.stats`.
#[allow(clippy::too_many_arguments)]
fn compute_attention(
    kernel: Kernel,
    keys_values: &KeyValues<'_>,
    attention_window: AttentionWindow,
    spans: &[TokenSpan],
    tile: &AttentionTile,
    head: usize,
    qkv: &[f32],
    scratch: &mut AttentionScratch,
) {
    let shape = keys_values.shape;
    let dim = shape.head_dim;
    let padded = shape.padded_head_dim();
    let group = shape.heads_per_key_head();
    let first_position = first_seen(spans, tile, group, attention_window);
    let rows: usize = tile.runs.iter().map(|run| run.rows).sum();
    let max_position =
        parts(spans, tile, group, first_position).map(|part| part.positions.end).max().unwrap_or(0);
    // An odd number of cache lines, so that one position of many rows does not map to a single
    // cache set.
    let stride = max_position.next_multiple_of(BLOCK) + LANES;
    let AttentionScratch { queries, packed, scores, stats, weights, sums, open, starts } = scratch;
    let queries = queries.reserve(rows * dim);
    let scores = scores.reserve((rows + kernel.lhs_rows(1)) * stride);
    let [sums, open] = [sums, open].map(|buffer| buffer.reserve(rows * padded));

    for (tile_row, to) in tile_rows(spans, &tile.runs, group).zip(queries.chunks_exact_mut(dim)) {
        let from = &qkv
            [tile_row.row * shape.qkv_width() + (head * group + tile_row.head_in_group) * dim..];
        for (to, q) in to.iter_mut().zip(from) {
            *to = q * attention_window.scale;
        }
    }
    for part in parts(spans, tile, group, first_position) {
        let first = part.rows.start;
        let rows = part.rows.len();
        let queries = Matrix::new(queries, first + rows, dim);
        let a = LhsOperand::pack(kernel, queries, part.rows.clone(), 0..dim, packed);
        // A complete matrix register is stored faster than most of its rows. Scores in the rows
        // below are overwritten later or never read.
        let high = kernel.lhs_rows(rows);
        let stored = if 4 * rows >= 3 * high { high } else { rows };
        for i in part.blocks() {
            let keys = [keys_values.keys(part.sequence_blocks[i], head).cast_const()];
            if rows <= FEW
                && let Some(next) = part.sequence_blocks.get(i + 1)
            {
                keys_values.prefetch_block(*next, head);
            }
            let depth = kernel.words(dim);
            let b = RhsRows::cached(&keys, depth, depth, BLOCK);
            let to = scores[first * stride + i * BLOCK..].as_mut_ptr();
            // SAFETY: queries, the block's keys and the scores have these extents.
            unsafe { multiply(kernel, stored, a, b, to, stride, BLOCK, ChainStart::Set) };
        }
    }
    if attention_window.window < max_position {
        for (tile_row, row) in
            tile_rows(spans, &tile.runs, group).zip(scores.chunks_exact_mut(stride))
        {
            row[first_position..attention_window.first_position(tile_row.seen).max(first_position)]
                .fill(f32::NEG_INFINITY);
        }
    }
    let all = ScoreTile { spans, tile, group, first_position };
    let packed = all.compute_weights(kernel, (scores, stride), weights, stats);
    if first_position > 0 {
        // Stretches are added to the stretches before them, to which no row attends.
        sums.fill(0.0);
    }
    let mut before = 0;
    for part in parts(spans, tile, group, first_position) {
        let first = part.rows.start;
        let rows = part.rows.len();
        let start = part.positions.start;
        let a = match packed {
            Some(packed) => LhsOperand::from_packed(kernel, packed.wrapping_add(before), rows),
            None => {
                let scores = Matrix::new(scores, first + rows, stride);
                LhsOperand::pack(kernel, scores, part.rows.clone(), part.positions.clone(), weights)
            }
        };
        before += part.words(kernel);
        for (from, to) in part.stretches() {
            let a = a.skip_words(kernel.words(from - start));
            // A stretch in one part is added directly to the sums. A stretch in two parts is still
            // one chain.
            let starts_stretch = from.is_multiple_of(STRETCH);
            let ends = to.is_multiple_of(STRETCH) || !part.continues;
            let (out, chain) = match (starts_stretch, ends) {
                (true, true) => (&mut *sums, ChainStart::new(from > 0)),
                (true, false) => (&mut *open, ChainStart::Set),
                (false, _) => (&mut *open, ChainStart::Resume),
            };
            for column in (0..padded).step_by(NR) {
                starts.clear();
                starts.extend(part.sequence_blocks[from / BLOCK..to.div_ceil(BLOCK)].iter().map(
                    |block| keys_values.values(*block, head).wrapping_add(column).cast_const(),
                ));
                let depth = kernel.words(to - from);
                let block = kernel.words(BLOCK);
                let b = RhsRows::cached(starts, block, depth, padded);
                let to = out[first * padded + column..].as_mut_ptr();
                // SAFETY: weights, the blocks' values and the sums have these extents. Positions
                // past a row's own have weight 0 and were written (or are in the cleared half of a
                // word), so they add exactly nothing.
                unsafe { multiply(kernel, rows, a, b, to, padded, NR, chain) };
            }
            if !starts_stretch && ends {
                let these = first * padded..(first + rows) * padded;
                for (sum, open) in sums[these.clone()].iter_mut().zip(&open[these]) {
                    *sum = if from < STRETCH { *open } else { *sum + open };
                }
            }
        }
    }
}

/// A tile whose scores, from position `first_position` on, are converted to weights.
struct ScoreTile<'a> {
    spans: &'a [TokenSpan],
    tile: &'a AttentionTile,
    group: usize,
    first_position: usize,
}

impl ScoreTile<'_> {
    /// Converts the scores of all rows, `stride` apart, to weights, and computes their normalizers.
    /// The weights overwrite the scores. For AMX they are instead packed as lhs operands, one for
    /// each part, and their address is returned.
    fn compute_weights(
        &self,
        kernel: Kernel,
        (scores, stride): (&mut [f32], usize),
        weights: &mut Buffer,
        stats: &mut [RowStats; MAX_ROWS],
    ) -> Option<*const f32> {
        let ScoreTile { spans, tile, group, first_position } = *self;
        #[cfg(target_arch = "x86_64")]
        if kernel.order() == SumOrder::Tiled {
            let words =
                parts(spans, tile, group, first_position).map(|part| part.words(kernel)).sum();
            let weights = weights.reserve(words);
            self.weigh_packed(kernel, (scores, stride), weights, stats);
            return Some(weights.as_ptr());
        }
        for (r, tile_row) in tile_rows(spans, &tile.runs, group).enumerate() {
            let row = &mut scores[r * stride..][..stride];
            stats[r] = compute_weights(kernel.isa, &mut row[first_position..tile_row.seen]);
            row[tile_row.seen..].fill(0.0);
        }
        None
    }

    /// Implements [`ScoreTile::compute_weights`] for AMX.
    #[cfg(target_arch = "x86_64")]
    fn weigh_packed(
        &self,
        kernel: Kernel,
        (scores, stride): (&[f32], usize),
        weights: &mut [f32],
        stats: &mut [RowStats; MAX_ROWS],
    ) {
        let ScoreTile { spans, tile, group, first_position } = *self;
        let mut seen = [0; MAX_ROWS];
        let mut sums = [[0.0; LANES]; MAX_ROWS];
        for (r, tile_row) in tile_rows(spans, &tile.runs, group).enumerate() {
            seen[r] = tile_row.seen;
            stats[r][0] =
                max_score(kernel.isa, &scores[r * stride..][first_position..tile_row.seen]);
        }
        let mut before = 0;
        for part in parts(spans, tile, group, first_position) {
            let start = part.positions.start;
            let positions = part.positions.len();
            let words = part.words(kernel);
            let step = kernel.lhs_rows(part.rows.len()) * STEP;
            let to = &mut weights[before..before + words];
            for (at, r) in part.rows.enumerate() {
                let scores = &scores[r * stride + start..][..positions.next_multiple_of(BLOCK)];
                let seen = seen[r].saturating_sub(start);
                let to = to[at * STEP..].as_mut_ptr();
                // SAFETY: the order is AMX's, which is available; an lhs has a step for every block
                // of positions.
                unsafe {
                    attention_amx::compute_weights(
                        scores,
                        seen,
                        stats[r][0],
                        &mut sums[r],
                        to,
                        step,
                    )
                };
            }
            before += words;
        }
        for (stats, sums) in stats.iter_mut().zip(sums) {
            stats[1] = fold_lanes(sums);
        }
    }
}

simd! {
    /// Returns the largest attention score.
    fn max_score(scores: &[f32]) -> f32 {
        max(scores)
    }
}

simd! {
    /// Overwrites scores with exp(s − max); returns (max, Σ e), with the sum in lanes by position.
    fn compute_weights(scores: &mut [f32]) -> RowStats {
        let max = max(scores);
        let mut sums = [0.0f32; LANES];
        let mut chunks = scores.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            for i in 0..LANES {
                chunk[i] = exp(chunk[i] - max);
                sums[i] += chunk[i];
            }
        }
        // The rest is processed as a full chunk: positions past the end have weight 0, and adding 0
        // changes no sum.
        let rest = chunks.into_remainder();
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        for i in 0..LANES {
            last[i] = exp(last[i] - max);
            sums[i] += last[i];
        }
        rest.copy_from_slice(&last[..rest.len()]);
        [max, fold_lanes(sums)]
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
pub(crate) mod tests;
