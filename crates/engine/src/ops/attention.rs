//! Computes causal grouped-query attention over a sequence of segments, forward.
//!
//! Sampling and training use the same blocks of keys and values ([`super::kv`]) and the same code. Blocks are
//! aligned to absolute positions of the sequence. For one query at position t:
//!
//! 1. scores s_j = Σ_d (q_d · scale) k_jd, one chain over d for each j ≤ t, −∞ for j before a sliding window;
//! 2. m = max s, e_j = exp(s_j − m), Σ e in lanes j mod 16;
//! 3. out_d = (Σ_j e_j v_jd) / Σ e, a chain over j for each [`STRETCH`] of the sequence, and these added up
//!    in order.
//!
//! None of this depends on how the sequence was divided into prompts, chunks, nodes or turns, or on which
//! other queries are computed, including queries of other sequences that share blocks (`attention_tiles`).
//!
//! A sliding window counts positions of the sequence. Stretches before the windows of all rows of a tile are
//! left out: their scores are −∞, so they would add exactly nothing. The cache keeps them, since another
//! layer can see them.

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

/// Rows up to which a tile is done with a block before the next one has come. Taller ones go over a prompt,
/// or train: the tile before has been over most of their blocks.
const FEW: usize = 16;

/// Scratch of one tile.
#[derive(Default)]
struct Scratch {
    /// Scaled queries, `[rows][head_dim]`, and in bf16 packed as a left operand.
    queries: Buffer,
    packed: Buffer,
    /// Scores, then weights, `[rows][positions]`.
    scores: Buffer,
    /// Normaliser of each row.
    stats: [RowStats; MAX_ROWS],
    /// In bf16, weights packed as left operands, one for each part.
    weights: Buffer,
    /// Weighted sums of values, `[rows][padded]`.
    sums: Buffer,
    /// Sums of a stretch that ends in another part.
    open: Buffer,
    /// Where the blocks of values of a stretch start.
    starts: Vec<*const f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
}

/// Normaliser of one query's weights: (max, Σ e).
pub type RowStats = [f32; 2];

/// Writes keys and values of all rows into their blocks, then computes every row's attention over its path.
///
/// `qkv` has rows of `shape.qkv()`, rotary embedding applied; `out` has rows of `shape.query()`. Where given,
/// `stats` receives (max, Σ e) for every row and head, as the backward pass needs them.
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
    // In falling order of cost for each key head, so that the last to finish is a small one.
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

/// Row of a tile: a query, and which of the heads that share a key head.
struct Place {
    /// Row in the batch.
    row: usize,
    /// Positions of its path that it sees.
    seen: usize,
    /// The head, within its group.
    member: usize,
}

/// The rows of a tile, or of a part of it, the query varying slowest.
fn places<'a>(spans: &'a [Span], runs: &'a [Run], group: usize) -> impl Iterator<Item = Place> + 'a {
    runs.iter().flat_map(move |run| {
        let span = &spans[run.span];
        (run.from..run.from + run.rows).map(move |r| {
            let query = r / group;
            Place { row: span.row + query, seen: span.position + query + 1, member: r % group }
        })
    })
}

/// Rows of a tile that go over the same part of a path.
struct Part<'a> {
    rows: Range<usize>,
    path: &'a [u32],
    /// Positions, from a whole block on.
    positions: Range<usize>,
    /// Whether other parts go on with its last stretch.
    goes_on: bool,
}

impl Part<'_> {
    /// Blocks of the tile, by their place on the path.
    fn blocks(&self) -> Range<usize> {
        self.positions.start / BLOCK..self.positions.end.div_ceil(BLOCK)
    }

    /// Stretches of the tile, or the parts of them that it has: where each starts and ends.
    fn stretches(&self) -> impl Iterator<Item = (usize, usize)> {
        let Range { start, end } = self.positions;
        let first = start / STRETCH * STRETCH;
        (first..end).step_by(STRETCH).map(move |from| (from.max(start), end.min(from + STRETCH)))
    }

    /// Words of its weights as a left operand.
    fn words(&self, kernel: Kernel) -> usize {
        kernel.left_words(self.rows.len(), self.positions.len())
    }
}

/// The stretch in which the first position lies that any row of a tile sees: where it starts.
fn first_seen(spans: &[Span], tile: &Tile, group: usize, sight: Sight) -> usize {
    let own = tile.runs.iter().map(|run| spans[run.span].position + run.from / group + 1).min();
    sight.first(own.unwrap_or(0)) / STRETCH * STRETCH
}

/// The parts of a tile from position `seen` on, where a stretch starts: all rows over what their paths share,
/// then each path's rows over what comes after it.
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

/// Attention of one tile and one key head. Leaves its results in `scratch.sums` and `scratch.stats`.
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
    // An odd number of cache lines, so that one position of many rows does not fall into one set of the
    // cache.
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
        // A whole matrix register is stored quicker than most of its rows. What is below is overwritten
        // later, or not looked at.
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
        // Stretches are added to those before them, of which nothing is seen.
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
            // A stretch in one part goes straight to the sums, one in two parts is one chain nevertheless.
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
                // SAFETY: weights, the blocks' values and the sums have these extents. Positions past a row's
                // own have weight 0 and were written (or lie in the cleared half of a word), so they add
                // exactly nothing.
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

/// A tile whose scores, from position `begin` on, are to become weights.
struct Weighed<'a> {
    spans: &'a [Span],
    tile: &'a Tile,
    group: usize,
    begin: usize,
}

impl Weighed<'_> {
    /// Makes weights of the scores of all rows, `stride` apart, and what normalises them: where the scores
    /// were, or, where that is returned, as left operands for AMX, one for each part.
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

    /// [`Weighed::weigh`] for AMX.
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
                // SAFETY: the order is that of AMX, which is available; a left operand has a step for every
                // block of positions.
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
    /// The largest score.
    fn largest(scores: &[f32]) -> f32 {
        max(scores)
    }
}

simd! {
    /// Overwrites scores with exp(s − max); returns (max, Σ e), the sum in lanes by position.
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
        // The rest as a whole chunk: what is past the end has no weight, and to add nothing changes no sum.
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
