//! Causal grouped-query attention over a path of segments, forward.
//!
//! Sampling and training use the same blocks of keys and values ([`super::kv`]) and the same code. For one
//! query at position t:
//!
//! 1. scores s_j = Σ_d (q_d · scale) k_jd, one chain over d for each j ≤ t;
//! 2. m = max s, e_j = exp(s_j − m), Σ e in lanes j mod 16;
//! 3. out_d = (Σ_j e_j v_jd) / Σ e, a chain over j for each [`STRETCH`] of the path, and these added up in
//!    order.
//!
//! None of this depends on how the path was cut into prompts, chunks or nodes, or on what other queries are
//! computed: not on those of other paths either, with which a query goes over what they share
//! (`attention_tiles`).

use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::attention_amx;
use super::attention_tiles::{Run, STRETCH, Tile, tiles};
use super::kv::{BLOCK, KeyValues, Span};
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
            attend(compute.kernel(), keys_values, spans, tile, head, qkv, scratch);
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

/// The parts of a tile: all rows over what their paths share, then each path's rows over what comes after it.
fn parts<'a>(spans: &'a [Span], tile: &'a Tile, group: usize) -> impl Iterator<Item = Part<'a>> {
    let shared = tile.shared * BLOCK;
    let rows = tile.runs.iter().map(|run| run.rows).sum();
    let first = tile.runs.first().map(|run| &spans[run.span].blocks[..]).unwrap_or_default();
    let together = Part { rows: 0..rows, path: first, positions: 0..shared, goes_on: true };
    let mut at = 0;
    let alone = tile.runs.iter().map(move |run| {
        let (span, from) = (&spans[run.span], at);
        at += run.rows;
        let seen = span.position + (run.from + run.rows - 1) / group + 1;
        Part { rows: from..at, path: &span.blocks, positions: shared..seen, goes_on: false }
    });
    Some(together).filter(|_| shared > 0).into_iter().chain(alone)
}

/// Attention of one tile and one key head. Leaves its results in `scratch.sums` and `scratch.stats`.
fn attend(
    kernel: Kernel,
    keys_values: &KeyValues<'_>,
    spans: &[Span],
    tile: &Tile,
    head: usize,
    qkv: &[f32],
    scratch: &mut Scratch,
) {
    let shape = keys_values.shape;
    let (dim, padded, group) = (shape.head_dim, shape.padded(), shape.group());
    let scale = 1.0 / (dim as f32).sqrt();
    let rows: usize = tile.runs.iter().map(|run| run.rows).sum();
    let longest = parts(spans, tile, group).map(|part| part.positions.end).max().unwrap_or(0);
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
            *to = q * scale;
        }
    }
    for part in parts(spans, tile, group) {
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
    let packed = weigh_all(kernel, spans, tile, group, (scores, stride), weights, stats);
    let mut before = 0;
    for part in parts(spans, tile, group) {
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

/// Makes weights of the scores of all rows of a tile, `stride` apart, and what normalises them: where the
/// scores were, or, where that is returned, as left operands for AMX, one for each part.
fn weigh_all(
    kernel: Kernel,
    spans: &[Span],
    tile: &Tile,
    group: usize,
    (scores, stride): (&mut [f32], usize),
    weights: &mut Buffer,
    stats: &mut [RowStats; MAX_ROWS],
) -> Option<*const f32> {
    #[cfg(target_arch = "x86_64")]
    if kernel.order() == Order::Tiled {
        let weights = weights.reserve(parts(spans, tile, group).map(|part| part.words(kernel)).sum());
        weigh_packed(kernel, spans, tile, group, (scores, stride), weights, stats);
        return Some(weights.as_ptr());
    }
    for (r, place) in places(spans, &tile.runs, group).enumerate() {
        let row = &mut scores[r * stride..][..stride];
        stats[r] = weigh(kernel.isa, &mut row[..place.seen]);
        row[place.seen..].fill(0.0);
    }
    None
}

/// [`weigh_all`] for AMX.
#[cfg(target_arch = "x86_64")]
fn weigh_packed(
    kernel: Kernel,
    spans: &[Span],
    tile: &Tile,
    group: usize,
    (scores, stride): (&[f32], usize),
    weights: &mut [f32],
    stats: &mut [RowStats; MAX_ROWS],
) {
    let mut seen = [0; MAX_ROWS];
    let mut sums = [[0.0; LANES]; MAX_ROWS];
    for (r, place) in places(spans, &tile.runs, group).enumerate() {
        seen[r] = place.seen;
        stats[r][0] = largest(kernel.isa, &scores[r * stride..][..place.seen]);
    }
    let mut before = 0;
    for part in parts(spans, tile, group) {
        let (start, positions) = (part.positions.start, part.positions.len());
        let words = part.words(kernel);
        let step = kernel.left_rows(part.rows.len()) * STEP;
        let to = &mut weights[before..before + words];
        for (at, r) in part.rows.enumerate() {
            let scores = &scores[r * stride + start..][..positions.next_multiple_of(BLOCK)];
            let seen = seen[r].saturating_sub(start);
            let to = to[at * STEP..].as_mut_ptr();
            // SAFETY: the order is that of AMX, which is available; a left operand has a step for every block
            // of positions.
            unsafe { attention_amx::weigh(scores, seen, stats[r][0], &mut sums[r], to, step) };
        }
        before += words;
    }
    for (stats, sums) in stats.iter_mut().zip(sums) {
        stats[1] = fold(sums);
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
pub(crate) mod tests {
    use super::super::kv::{Blocks, Shape};
    use super::super::testing::{close, noise, wide};
    use super::*;
    use std::collections::BTreeMap;

    use crate::precision::Precision;
    use crate::simd::Isa;

    /// Attention of every row over its path (a list of row indices, the row itself last), in f64.
    pub fn naive(shape: Shape, paths: &[Vec<usize>], qkv: &[f64]) -> Vec<f64> {
        let (width, dim) = (shape.qkv(), shape.head_dim);
        let mut out = Vec::new();
        for (row, path) in paths.iter().enumerate() {
            for head in 0..shape.heads {
                let q = &qkv[row * width + head * dim..][..dim];
                let part =
                    |j: usize, offset: usize| &qkv[j * width + offset + head / shape.group() * dim..][..dim];
                let scores: Vec<f64> = path
                    .iter()
                    .map(|&j| {
                        let k = part(j, shape.query());
                        q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (dim as f64).sqrt()
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                out.extend((0..dim).map(|d| {
                    path.iter()
                        .zip(&weights)
                        .map(|(&j, w)| w / total * part(j, shape.query() + shape.key())[d])
                        .sum::<f64>()
                }));
            }
        }
        out
    }

    /// Spans of a forest given as (parent, length), with their paths in rows.
    pub fn forest(nodes: &[(Option<usize>, usize)]) -> (Vec<Span>, Vec<Vec<usize>>, usize) {
        let (mut spans, mut paths, mut next): (Vec<Span>, Vec<Vec<usize>>, u32) = (Vec::new(), Vec::new(), 0);
        let mut row = 0;
        for &(parent, len) in nodes {
            let position = parent.map_or(0, |p| spans[p].position + spans[p].len);
            let whole = position / BLOCK;
            let mut blocks: Vec<u32> = parent.map_or(Vec::new(), |p| spans[p].blocks[..whole].to_vec());
            let inherits = parent.filter(|_| position % BLOCK > 0).map(|p| spans[p].blocks[whole]);
            while blocks.len() * BLOCK < position + len {
                blocks.push(next);
                next += 1;
            }
            let mut path = parent.map_or(Vec::new(), |p| paths[spans[p].row + spans[p].len - 1].clone());
            for i in 0..len {
                path.push(row + i);
                paths.push(path.clone());
            }
            spans.push(Span { row, len, position, blocks, inherits });
            row += len;
        }
        (spans, paths, next as usize)
    }

    #[test]
    fn matches_f64_on_a_forest() {
        let nodes = [(None, 40), (Some(0), 3), (Some(1), 70), (Some(0), 25), (None, 33), (Some(4), 1)];
        let (spans, paths, count) = forest(&nodes);
        for shape in [
            Shape { heads: 6, kv_heads: 2, head_dim: 16 },
            Shape { heads: 9, kv_heads: 3, head_dim: 64 },
            Shape { heads: 2, kv_heads: 2, head_dim: 40 },
        ] {
            let qkv = noise(paths.len() * shape.qkv(), 1, 6.0);
            for (precision, tolerance) in [(Precision::F32, 1e-5), (Precision::Bf16, 0.1)] {
                let compute = Compute::with(2, Isa::detect(), precision);
                let mut blocks = Blocks::new(shape, 1, precision);
                blocks.grow(count);
                let mut out = vec![0.0; paths.len() * shape.query()];
                forward(&compute, &blocks.layer(0), &spans, &qkv, &mut out, None);
                // Scores reach ±50 here, so weights are good to about 1e-5 in f32, to a tenth in bf16.
                close(&out, &naive(shape, &paths, &wide(&qkv)), tolerance);
            }
        }
    }

    /// Weights made as operands of AMX are those that would have been packed, to the bit, and are normalised
    /// alike.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn weights_for_amx_are_those_that_would_be_packed() {
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        let kernel = Kernel { isa: Isa::Amx, precision: Precision::Bf16 };
        let span = |position, own: u32| {
            let blocks = (0..40).map(|i| if i < 20 { i } else { own * 100 + i }).collect();
            Span { row: 0, len: 1, position, blocks, inherits: None }
        };
        let spans = [span(600, 1), span(777, 2), span(640, 3)];
        let group = 3;
        for tile in tiles(&spans, group, kernel.tile_rows()) {
            let rows: usize = tile.runs.iter().map(|run| run.rows).sum();
            let stride = 800 + LANES;
            let scores = noise(rows * stride, 4, 9.0);
            let (mut made, mut packed) = (Buffer::default(), Buffer::default());
            let mut stats = [[0.0; 2]; MAX_ROWS];
            let mut kept = scores.clone();
            let at =
                weigh_all(kernel, &spans, &tile, group, (&mut kept, stride), &mut made, &mut stats).unwrap();
            assert_eq!(at, made.as_ptr());
            let mut weights = scores;
            for (r, place) in places(&spans, &tile.runs, group).enumerate() {
                let row = &mut weights[r * stride..][..stride];
                assert_eq!(weigh(kernel.isa, &mut row[..place.seen]), stats[r]);
                row[place.seen..].fill(0.0);
            }
            let mut before = 0;
            for part in parts(&spans, &tile, group) {
                let words = part.words(kernel);
                let matrix = Matrix::new(&weights, rows, stride);
                Left::of(kernel, matrix, part.rows.clone(), part.positions.clone(), &mut packed);
                let high = kernel.left_rows(part.rows.len()) * STEP;
                let of = part.rows.len() * STEP;
                for (a, b) in packed[..words].chunks(high).zip(made[before..before + words].chunks(high)) {
                    assert!(a[..of].iter().zip(&b[..of]).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
                before += words;
            }
            assert!(tile.shared > 0 && before > 0);
        }
    }

    /// Queries of paths that share a prompt give the bits that each gives alone.
    #[test]
    fn company_does_not_change_a_bit() {
        let shape = Shape { heads: 6, kv_heads: 2, head_dim: 48 };
        let nodes = [
            (None, 600),
            (Some(0), 1),
            (Some(0), 40),
            (Some(2), 1),
            (Some(0), 300),
            (Some(4), 2),
            (Some(4), 1),
        ];
        let (spans, paths, count) = forest(&nodes);
        let qkv = noise(paths.len() * shape.qkv(), 3, 4.0);
        for (isa, precision) in
            Isa::available().into_iter().flat_map(|isa| [(isa, Precision::F32), (isa, Precision::Bf16)])
        {
            let compute = Compute::with(2, isa, precision);
            let mut blocks = Blocks::new(shape, 1, precision);
            blocks.grow(count);
            let run = |blocks: &mut Blocks, spans: &[Span]| {
                let mut out = vec![0.0; paths.len() * shape.query()];
                forward(&compute, &blocks.layer(0), spans, &qkv, &mut out, None);
                spans
                    .iter()
                    .flat_map(|span| out[span.row * shape.query()..][..span.len * shape.query()].to_vec())
                    .map(f32::to_bits)
                    .collect::<Vec<_>>()
            };
            let alone: Vec<u32> =
                spans.iter().flat_map(|span| run(&mut blocks, std::slice::from_ref(span))).collect();
            assert!(run(&mut blocks, &spans) == alone, "{precision}, {isa:?}");
            // As in sampling: only the last queries, whose paths share the prompt.
            let last: Vec<Span> = spans.iter().filter(|span| span.len < 3).cloned().collect();
            let tiles = tiles(&last, shape.group(), compute.kernel().tile_rows());
            assert!(
                tiles.iter().any(|tile| !(tile.shared * BLOCK).is_multiple_of(STRETCH)),
                "what is shared ends within a stretch"
            );
            let alone: Vec<u32> =
                last.iter().flat_map(|span| run(&mut blocks, std::slice::from_ref(span))).collect();
            assert!(run(&mut blocks, &last) == alone, "{precision}, {isa:?}, together");
        }
    }

    /// One path in one span, in chunks, and token by token gives the same bits, on every instruction path.
    #[test]
    fn chunking_does_not_change_a_bit() {
        let shape = Shape { heads: 6, kv_heads: 2, head_dim: 48 };
        let len = 101;
        let qkv = noise(len * shape.qkv(), 7, 4.0);
        for precision in [Precision::F32, Precision::Bf16] {
            let mut firsts: BTreeMap<Order, Vec<u32>> = BTreeMap::new();
            let cases =
                Isa::available().into_iter().flat_map(|isa| [len, 32, 7, 1].map(|chunk| (isa, chunk)));
            for (isa, chunk) in cases {
                let mut blocks = Blocks::new(shape, 1, precision);
                blocks.grow(len.div_ceil(BLOCK));
                let mut out = vec![0.0; len * shape.query()];
                let compute = Compute::with(1 + chunk % 2, isa, precision);
                for position in (0..len).step_by(chunk) {
                    let part = chunk.min(len - position);
                    let span = Span {
                        row: 0,
                        len: part,
                        position,
                        blocks: (0..(position + part).div_ceil(BLOCK) as u32).collect(),
                        inherits: None,
                    };
                    let rows = &qkv[position * shape.qkv()..][..part * shape.qkv()];
                    let to = &mut out[position * shape.query()..][..part * shape.query()];
                    forward(&compute, &blocks.layer(0), &[span], rows, to, None);
                }
                let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                assert_eq!(
                    firsts.entry(compute.kernel().order()).or_insert_with(|| bits.clone()),
                    &bits,
                    "{precision}, {isa:?}, chunks of {chunk}"
                );
            }
        }
    }
}
