//! Computes the forward pass of causal grouped-query attention over a sequence of segments.
//!
//! Sampling and training use the same blocks of keys and values ([`super::kv`]) and the same code.
//! Blocks are aligned to absolute positions of the sequence. For one query at position t:
//!
//! 1. scores s_j = Σ_d (q_d · scale) k_jd, one chain over d for each j ≤ t, −∞ for j before a sliding
//!    window;
//! 2. m = max s, e_j = exp(s_j − m), Σ e in lanes j mod 16;
//! 3. out_d = (Σ_j e_j v_jd) / Σ e, a chain over j for each stretch of [`STRETCH`] positions, and the
//!    sums of the stretches added in order.
//!
//! None of this depends on how the sequence was divided into prompts, chunks, nodes or turns, or on
//! which other queries are computed, including queries of other sequences that share blocks
//! (`attention_tiles`).
//!
//! A sliding window counts positions of the sequence. Stretches before the windows of all rows of a
//! tile are skipped: their scores are −∞, so they would add exactly nothing. The cache keeps their keys
//! and values, since another layer can attend to them.

use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::attention_amx;
use super::attention_tiles::{Run, STRETCH, Tile, tiles};
use super::kv::{BLOCK, KeyValues, Sight, Span};
use crate::Compute;
use crate::buffer::{Buffer, Shared};
use crate::precision::{Kernel, Order};
use crate::product::left::Left;
use crate::product::shape::{Chain, Rows, STEP};
use crate::product::tile::tile as multiply;
use crate::product::{MAX_ROWS, Matrix, NR};
use crate::simd::{LANES, exp, fold, max, simd};

/// Maximum number of rows for which a tile prefetches the next block, because it finishes a block
/// before the next one arrives. Taller tiles process a prompt or train, and the tile before has read
/// most of their blocks.
const FEW: usize = 16;

/// Scratch of one tile.
#[derive(Default)]
struct Scratch {
    /// Scaled queries, `[rows][head_dim]`, and in bf16 the same packed as an lhs.
    queries: Buffer,
    packed: Buffer,
    /// Scores, then weights, `[rows][positions]`.
    scores: Buffer,
    /// Softmax normalizer of each row.
    stats: [RowStats; MAX_ROWS],
    /// In bf16, weights packed as lhs operands, one for each part.
    weights: Buffer,
    /// Weighted sums of values, `[rows][padded]`.
    sums: Buffer,
    /// Sums of a stretch that another part completes.
    open: Buffer,
    /// Addresses of the value blocks of a stretch.
    starts: Vec<*const f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Softmax normalizer of one query: (max, Σ e).
pub type RowStats = [f32; 2];

/// Writes keys and values of all rows into their blocks, then computes every row's attention over its
/// sequence.
///
/// `qkv` has rows of `shape.qkv()`, with rotary embedding applied; `out` has rows of `shape.query()`.
/// `stats`, if given, receives (max, Σ e) for every row and head, as the backward pass needs them.
pub fn forward(
    compute: &Compute,
    keys_values: &KeyValues<'_>,
    sight: Sight,
    spans: &[Span],
    qkv: &[f32],
    out: &mut [f32],
    stats: Option<&mut [f32]>,
) {
    let shape = keys_values.shape;
    keys_values.store(compute, spans, qkv);
    let (width, group) = (shape.query(), shape.group());
    let out = Shared::new(out);
    let stats = stats.map(Shared::new);
    // In decreasing order of cost for each key head, so that the last task to finish is a small one.
    let mut tiles = tiles(spans, group, compute.kernel().tile_rows());
    tiles.reverse();
    compute.pool.run(tiles.len() * shape.kv_heads, |task| {
        let (tile, head) = (&tiles[task % tiles.len()], task / tiles.len());
        SCRATCH.with_borrow_mut(|scratch| {
            attend(compute.kernel(), keys_values, sight, spans, tile, head, qkv, scratch);
            for (r, place) in places(spans, &tile.runs, group).enumerate() {
                let (query_head, [max, sum]) = (head * group + place.member, scratch.stats[r]);
                // SAFETY: each (row, head) belongs to one tile.
                let to =
                    unsafe { out.slice(place.row * width + query_head * shape.head_dim, shape.head_dim) };
                for (to, from) in to.iter_mut().zip(&scratch.sums[r * shape.padded()..]) {
                    *to = from / sum;
                }
                if let Some(stats) = &stats {
                    // SAFETY: as above.
                    let to = unsafe { stats.slice((place.row * shape.heads + query_head) * 2, 2) };
                    to.copy_from_slice(&[max, sum]);
                }
            }
        });
    });
}

/// Row of a tile: a query, and one of the heads that share a key head.
struct Place {
    /// Row in the batch.
    row: usize,
    /// Number of positions of its sequence that it attends to.
    seen: usize,
    /// Index of the head within its group.
    member: usize,
}

/// Returns the rows of a tile or of a part of it; the query varies slowest.
fn places<'a>(spans: &'a [Span], runs: &'a [Run], group: usize) -> impl Iterator<Item = Place> + 'a {
    runs.iter().flat_map(move |run| {
        let span = &spans[run.span];
        (run.from..run.from + run.rows).map(move |r| {
            let query = r / group;
            Place { row: span.row + query, seen: span.position + query + 1, member: r % group }
        })
    })
}

/// Rows of a tile that process the same positions of the same blocks.
struct Part<'a> {
    rows: Range<usize>,
    path: &'a [u32],
    /// Positions; the first starts a block.
    positions: Range<usize>,
    /// Whether other parts continue its last stretch.
    goes_on: bool,
}

impl Part<'_> {
    /// Returns the blocks of the part, as indices into `path`.
    fn blocks(&self) -> Range<usize> {
        self.positions.start / BLOCK..self.positions.end.div_ceil(BLOCK)
    }

    /// Returns start and end of each stretch, or of what the part has of it.
    fn stretches(&self) -> impl Iterator<Item = (usize, usize)> {
        let Range { start, end } = self.positions;
        let first = start / STRETCH * STRETCH;
        (first..end).step_by(STRETCH).map(move |from| (from.max(start), end.min(from + STRETCH)))
    }

    /// Returns the number of words of the part's weights as an lhs.
    fn words(&self, kernel: Kernel) -> usize {
        kernel.left_words(self.rows.len(), self.positions.len())
    }
}

/// Returns the start of the stretch with the first position that any row of a tile attends to.
fn first_seen(spans: &[Span], tile: &Tile, group: usize, sight: Sight) -> usize {
    let own = tile.runs.iter().map(|run| spans[run.span].position + run.from / group + 1).min();
    sight.first(own.unwrap_or(0)) / STRETCH * STRETCH
}

/// Returns the parts of a tile from position `seen` on, which starts a stretch: all rows over the
/// blocks that their sequences share, then each sequence's rows over its own blocks.
fn parts<'a>(spans: &'a [Span], tile: &'a Tile, group: usize, seen: usize) -> impl Iterator<Item = Part<'a>> {
    let shared = tile.shared * BLOCK;
    let rows = tile.runs.iter().map(|run| run.rows).sum();
    let first = tile.runs.first().map(|run| &spans[run.span].blocks[..]).unwrap_or_default();
    let together = Part { rows: 0..rows, path: first, positions: seen..shared, goes_on: true };
    let mut at = 0;
    let alone = tile.runs.iter().map(move |run| {
        let (span, from) = (&spans[run.span], at);
        at += run.rows;
        let end = span.position + (run.from + run.rows - 1) / group + 1;
        Part { rows: from..at, path: &span.blocks, positions: shared.max(seen)..end, goes_on: false }
    });
    Some(together).filter(|_| shared > seen).into_iter().chain(alone)
}

/// Computes attention of one tile and one key head. Results are left in `scratch.sums` and
/// `scratch.stats`.
#[allow(clippy::too_many_arguments)]
fn attend(
    kernel: Kernel,
    keys_values: &KeyValues<'_>,
    sight: Sight,
    spans: &[Span],
    tile: &Tile,
    head: usize,
    qkv: &[f32],
    scratch: &mut Scratch,
) {
    let shape = keys_values.shape;
    let (dim, padded, group) = (shape.head_dim, shape.padded(), shape.group());
    let begin = first_seen(spans, tile, group, sight);
    let rows: usize = tile.runs.iter().map(|run| run.rows).sum();
    let longest = parts(spans, tile, group, begin).map(|part| part.positions.end).max().unwrap_or(0);
    // An odd number of cache lines, so that one position of many rows does not map to a single cache
    // set.
    let stride = longest.next_multiple_of(BLOCK) + LANES;
    let Scratch { queries, packed, scores, stats, weights, sums, open, starts } = scratch;
    let queries = queries.reserve(rows * dim);
    let scores = scores.reserve((rows + kernel.left_rows(1)) * stride);
    let [sums, open] = [sums, open].map(|buffer| buffer.reserve(rows * padded));

    for (place, to) in places(spans, &tile.runs, group).zip(queries.chunks_exact_mut(dim)) {
        let from = &qkv[place.row * shape.qkv() + (head * group + place.member) * dim..];
        for (to, q) in to.iter_mut().zip(from) {
            *to = q * sight.scale;
        }
    }
    for part in parts(spans, tile, group, begin) {
        let (first, rows) = (part.rows.start, part.rows.len());
        let queries = Matrix::new(queries, first + rows, dim);
        let a = Left::of(kernel, queries, part.rows.clone(), 0..dim, packed);
        // A complete matrix register is stored faster than most of its rows. Scores in the rows below
        // are overwritten later or never read.
        let high = kernel.left_rows(rows);
        let stored = if 4 * rows >= 3 * high { high } else { rows };
        for i in part.blocks() {
            let keys = [keys_values.keys(part.path[i], head).cast_const()];
            if rows <= FEW
                && let Some(next) = part.path.get(i + 1)
            {
                keys_values.fetch(*next, head);
            }
            let depth = kernel.words(dim);
            let b = Rows::at_hand(&keys, depth, depth, BLOCK);
            let to = scores[first * stride + i * BLOCK..].as_mut_ptr();
            // SAFETY: queries, the block's keys and the scores have these extents.
            unsafe { multiply(kernel, stored, a, b, to, stride, BLOCK, Chain::Set) };
        }
    }
    if sight.window < longest {
        for (place, row) in places(spans, &tile.runs, group).zip(scores.chunks_exact_mut(stride)) {
            row[begin..sight.first(place.seen).max(begin)].fill(f32::NEG_INFINITY);
        }
    }
    let all = Weighed { spans, tile, group, begin };
    let packed = all.weigh(kernel, (scores, stride), weights, stats);
    if begin > 0 {
        // Stretches are added to the stretches before them, to which no row attends.
        sums.fill(0.0);
    }
    let mut before = 0;
    for part in parts(spans, tile, group, begin) {
        let (first, rows, start) = (part.rows.start, part.rows.len(), part.positions.start);
        let a = match packed {
            Some(packed) => Left::packed(kernel, packed.wrapping_add(before), rows),
            None => {
                let scores = Matrix::new(scores, first + rows, stride);
                Left::of(kernel, scores, part.rows.clone(), part.positions.clone(), weights)
            }
        };
        before += part.words(kernel);
        for (from, to) in part.stretches() {
            let a = a.after(kernel.words(from - start));
            // A stretch in one part is added directly to the sums. A stretch in two parts is still one
            // chain.
            let (begins, ends) = (from.is_multiple_of(STRETCH), to.is_multiple_of(STRETCH) || !part.goes_on);
            let (out, chain) = match (begins, ends) {
                (true, true) => (&mut *sums, Chain::new(from > 0)),
                (true, false) => (&mut *open, Chain::Set),
                (false, _) => (&mut *open, Chain::Resume),
            };
            for column in (0..padded).step_by(NR) {
                starts.clear();
                starts.extend(
                    part.path[from / BLOCK..to.div_ceil(BLOCK)]
                        .iter()
                        .map(|block| keys_values.values(*block, head).wrapping_add(column).cast_const()),
                );
                let depth = kernel.words(to - from);
                let block = kernel.words(BLOCK);
                let b = Rows::at_hand(starts, block, depth, padded);
                let to = out[first * padded + column..].as_mut_ptr();
                // SAFETY: weights, the blocks' values and the sums have these extents. Positions past a
                // row's own have weight 0 and were written (or are in the cleared half of a word), so
                // they add exactly nothing.
                unsafe { multiply(kernel, rows, a, b, to, padded, NR, chain) };
            }
            if !begins && ends {
                let these = first * padded..(first + rows) * padded;
                for (sum, open) in sums[these.clone()].iter_mut().zip(&open[these]) {
                    *sum = if from < STRETCH { *open } else { *sum + open };
                }
            }
        }
    }
}

/// A tile whose scores, from position `begin` on, are converted to weights.
struct Weighed<'a> {
    spans: &'a [Span],
    tile: &'a Tile,
    group: usize,
    begin: usize,
}

impl Weighed<'_> {
    /// Converts the scores of all rows, `stride` apart, to weights, and computes their normalizers. The
    /// weights overwrite the scores. For AMX they are instead packed as lhs operands, one for each
    /// part, and their address is returned.
    fn weigh(
        &self,
        kernel: Kernel,
        (scores, stride): (&mut [f32], usize),
        weights: &mut Buffer,
        stats: &mut [RowStats; MAX_ROWS],
    ) -> Option<*const f32> {
        let Weighed { spans, tile, group, begin } = *self;
        #[cfg(target_arch = "x86_64")]
        if kernel.order() == Order::Tiled {
            let words = parts(spans, tile, group, begin).map(|part| part.words(kernel)).sum();
            let weights = weights.reserve(words);
            self.weigh_packed(kernel, (scores, stride), weights, stats);
            return Some(weights.as_ptr());
        }
        for (r, place) in places(spans, &tile.runs, group).enumerate() {
            let row = &mut scores[r * stride..][..stride];
            stats[r] = weigh(kernel.isa, &mut row[begin..place.seen]);
            row[place.seen..].fill(0.0);
        }
        None
    }

    /// Implements [`Weighed::weigh`] for AMX.
    #[cfg(target_arch = "x86_64")]
    fn weigh_packed(
        &self,
        kernel: Kernel,
        (scores, stride): (&[f32], usize),
        weights: &mut [f32],
        stats: &mut [RowStats; MAX_ROWS],
    ) {
        let Weighed { spans, tile, group, begin } = *self;
        let mut seen = [0; MAX_ROWS];
        let mut sums = [[0.0; LANES]; MAX_ROWS];
        for (r, place) in places(spans, &tile.runs, group).enumerate() {
            seen[r] = place.seen;
            stats[r][0] = largest(kernel.isa, &scores[r * stride..][begin..place.seen]);
        }
        let mut before = 0;
        for part in parts(spans, tile, group, begin) {
            let (start, positions) = (part.positions.start, part.positions.len());
            let words = part.words(kernel);
            let step = kernel.left_rows(part.rows.len()) * STEP;
            let to = &mut weights[before..before + words];
            for (at, r) in part.rows.enumerate() {
                let scores = &scores[r * stride + start..][..positions.next_multiple_of(BLOCK)];
                let seen = seen[r].saturating_sub(start);
                let to = to[at * STEP..].as_mut_ptr();
                // SAFETY: the order is AMX's, which is available; an lhs has a step for every block of
                // positions.
                unsafe { attention_amx::weigh(scores, seen, stats[r][0], &mut sums[r], to, step) };
            }
            before += words;
        }
        for (stats, sums) in stats.iter_mut().zip(sums) {
            stats[1] = fold(sums);
        }
    }
}

simd! {
    /// Returns the largest score.
    fn largest(scores: &[f32]) -> f32 {
        max(scores)
    }
}

simd! {
    /// Overwrites scores with exp(s − max); returns (max, Σ e), with the sum in lanes by position.
    fn weigh(scores: &mut [f32]) -> RowStats {
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
        [max, fold(sums)]
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
pub(crate) mod tests;
