//! Compares the forward pass of attention with f64, and its bits with those of other batches.

use super::super::kv::{AttentionShape, Blocks};
use super::super::testing::{assert_close, noise, widen};
use super::*;
use std::collections::BTreeMap;

use crate::precision::Precision;
use crate::simd::Isa;

/// Computes attention of every row over its sequence (a list of row indices, the row itself last),
/// in f64.
pub fn reference_forward(
    shape: AttentionShape,
    attention_window: AttentionWindow,
    sequences: &[Vec<usize>],
    qkv: &[f64],
) -> Vec<f64> {
    let width = shape.qkv_width();
    let dim = shape.head_dim;
    let mut out = Vec::new();
    for (row, sequence) in sequences.iter().enumerate() {
        let sequence = &sequence[attention_window.first_position(sequence.len())..];
        for head in 0..shape.heads {
            let q = &qkv[row * width + head * dim..][..dim];
            let part = |j: usize, offset: usize| {
                &qkv[j * width + offset + head / shape.heads_per_key_head() * dim..][..dim]
            };
            let scores: Vec<f64> = sequence
                .iter()
                .map(|&j| {
                    let k = part(j, shape.query_width());
                    q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()
                        * f64::from(attention_window.scale)
                })
                .collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..dim).map(|d| {
                sequence
                    .iter()
                    .zip(&weights)
                    .map(|(&j, w)| w / total * part(j, shape.query_width() + shape.key_width())[d])
                    .sum::<f64>()
            }));
        }
    }
    out
}

/// Returns the spans of a forest given as (parent, length), their sequences in rows, and the number
/// of blocks.
pub fn forest(nodes: &[(Option<usize>, usize)]) -> (Vec<TokenSpan>, Vec<Vec<usize>>, usize) {
    let (mut spans, mut sequences, mut next): (Vec<TokenSpan>, Vec<Vec<usize>>, u32) =
        (Vec::new(), Vec::new(), 0);
    let mut row = 0;
    for &(parent, len) in nodes {
        let position = parent.map_or(0, |p| spans[p].position + spans[p].len);
        let full_blocks = position / BLOCK;
        let mut blocks: Vec<u32> =
            parent.map_or(Vec::new(), |p| spans[p].blocks[..full_blocks].to_vec());
        let inherits =
            parent.filter(|_| position % BLOCK > 0).map(|p| spans[p].blocks[full_blocks]);
        while blocks.len() * BLOCK < position + len {
            blocks.push(next);
            next += 1;
        }
        let mut sequence =
            parent.map_or(Vec::new(), |p| sequences[spans[p].row + spans[p].len - 1].clone());
        for i in 0..len {
            sequence.push(row + i);
            sequences.push(sequence.clone());
        }
        spans.push(TokenSpan { row, len, position, blocks, inherits });
        row += len;
    }
    (spans, sequences, next as usize)
}

/// Full attention, and windows that end within a block, that end within a stretch, and that skip
/// full stretches.
fn attention_windows(shape: AttentionShape) -> [AttentionWindow; 4] {
    let unlimited = AttentionWindow::unlimited(shape.head_dim);
    [
        unlimited,
        AttentionWindow { window: 5, scale: 0.3 },
        AttentionWindow { window: 70, ..unlimited },
        AttentionWindow { window: 300, ..unlimited },
    ]
}

#[test]
fn attention_forward_matches_f64_on_forest() {
    let nodes = [(None, 40), (Some(0), 3), (Some(1), 290), (Some(0), 25), (None, 33), (Some(4), 1)];
    let (spans, sequences, count) = forest(&nodes);
    for (shape, attention_window) in [
        AttentionShape { heads: 6, kv_heads: 2, head_dim: 16 },
        AttentionShape { heads: 9, kv_heads: 3, head_dim: 64 },
        AttentionShape { heads: 2, kv_heads: 2, head_dim: 40 },
    ]
    .into_iter()
    .flat_map(|shape| attention_windows(shape).map(|attention_window| (shape, attention_window)))
    {
        let qkv = noise(sequences.len() * shape.qkv_width(), 1, 6.0);
        for (precision, tolerance) in [(Precision::F32, 1e-5), (Precision::Bf16, 0.1)] {
            let compute = Compute::with_isa(2, Isa::detect(), precision);
            let mut blocks = Blocks::new(shape, 1, precision);
            blocks.grow(count);
            let mut out = vec![0.0; sequences.len() * shape.query_width()];
            forward(&compute, &blocks.layer(0), attention_window, &spans, &qkv, &mut out, None);
            // Scores reach ±50 here, so weights are accurate to about 1e-5 in f32, and to about 0.1
            // in bf16.
            assert_close(
                &out,
                &reference_forward(shape, attention_window, &sequences, &widen(&qkv)),
                tolerance,
            );
        }
    }
}

/// Weights computed as AMX operands equal packed weights bit for bit, with equal normalizers.
#[test]
#[cfg(target_arch = "x86_64")]
fn amx_attention_weights_match_packed_weights() {
    if !Isa::available().contains(&Isa::Amx) {
        return;
    }
    let kernel = Kernel { isa: Isa::Amx, precision: Precision::Bf16 };
    let spans = [span_at(600, 1), span_at(777, 2), span_at(640, 3)];
    let group = 3;
    for tile in divide_into_tiles(&spans, group, kernel.tile_rows()) {
        let rows: usize = tile.runs.iter().map(|run| run.rows).sum();
        let stride = 800 + LANES;
        let scores = noise(rows * stride, 4, 9.0);
        let mut made = Buffer::default();
        let mut packed = Buffer::default();
        let mut stats = [[0.0; 2]; MAX_ROWS];
        let mut kept = scores.clone();
        let at = ScoreTile { spans: &spans, tile: &tile, group, first_position: 0 }
            .compute_weights(kernel, (&mut kept, stride), &mut made, &mut stats)
            .unwrap();
        assert_eq!(at, made.as_ptr());
        let mut weights = scores;
        for (r, tile_row) in tile_rows(&spans, &tile.runs, group).enumerate() {
            let row = &mut weights[r * stride..][..stride];
            assert_eq!(compute_weights(kernel.isa, &mut row[..tile_row.seen]), stats[r]);
            row[tile_row.seen..].fill(0.0);
        }
        let mut before = 0;
        for part in parts(&spans, &tile, group, 0) {
            let words = part.words(kernel);
            let matrix = Matrix::new(&weights, rows, stride);
            LhsOperand::pack(
                kernel,
                matrix,
                part.rows.clone(),
                part.positions.clone(),
                &mut packed,
            );
            let high = kernel.lhs_rows(part.rows.len()) * STEP;
            let of = part.rows.len() * STEP;
            for (a, b) in
                packed[..words].chunks(high).zip(made[before..before + words].chunks(high))
            {
                assert!(a[..of].iter().zip(&b[..of]).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            before += words;
        }
        assert!(tile.shared > 0 && before > 0);
    }
}

fn span_at(position: usize, own: u32) -> TokenSpan {
    let blocks = (0..40).map(|i| if i < 20 { i } else { own * 100 + i }).collect();
    TokenSpan { row: 0, len: 1, position, blocks, inherits: None }
}

/// Queries of sequences that share a prompt compute the same bits together and separately.
#[test]
fn attention_is_batch_invariant() {
    let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 48 };
    let nodes = [
        (None, 600),
        (Some(0), 1),
        (Some(0), 40),
        (Some(2), 1),
        (Some(0), 300),
        (Some(4), 2),
        (Some(4), 1),
    ];
    let (spans, sequences, count) = forest(&nodes);
    let qkv = noise(sequences.len() * shape.qkv_width(), 3, 4.0);
    let cases = Isa::available()
        .into_iter()
        .flat_map(|isa| [(isa, Precision::F32), (isa, Precision::Bf16)]);
    for ((isa, precision), attention_window) in cases
        .flat_map(|case| attention_windows(shape).map(|attention_window| (case, attention_window)))
    {
        let compute = Compute::with_isa(2, isa, precision);
        let mut blocks = Blocks::new(shape, 1, precision);
        blocks.grow(count);
        let run = |blocks: &mut Blocks, spans: &[TokenSpan]| {
            let mut out = vec![0.0; sequences.len() * shape.query_width()];
            forward(&compute, &blocks.layer(0), attention_window, spans, &qkv, &mut out, None);
            spans
                .iter()
                .flat_map(|span| {
                    out[span.row * shape.query_width()..][..span.len * shape.query_width()].to_vec()
                })
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        };
        let separate: Vec<u32> =
            spans.iter().flat_map(|span| run(&mut blocks, std::slice::from_ref(span))).collect();
        assert!(run(&mut blocks, &spans) == separate, "{precision}, {isa:?}");
        // As in sampling: only the last queries, whose sequences share the prompt.
        let last: Vec<TokenSpan> = spans.iter().filter(|span| span.len < 3).cloned().collect();
        let tiles =
            divide_into_tiles(&last, shape.heads_per_key_head(), compute.kernel().tile_rows());
        assert!(
            tiles.iter().any(|tile| !(tile.shared * BLOCK).is_multiple_of(STRETCH)),
            "what is shared ends within a stretch"
        );
        let separate: Vec<u32> =
            last.iter().flat_map(|span| run(&mut blocks, std::slice::from_ref(span))).collect();
        assert!(run(&mut blocks, &last) == separate, "{precision}, {isa:?}, together");
    }
}

/// One sequence computes the same bits in one span, in chunks, and token by token, on every
/// instruction set.
#[test]
fn attention_is_independent_of_chunking() {
    let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 48 };
    let len = 601;
    let qkv = noise(len * shape.qkv_width(), 7, 4.0);
    for precision in [Precision::F32, Precision::Bf16] {
        let mut firsts: BTreeMap<(SumOrder, usize), Vec<u32>> = BTreeMap::new();
        let cases =
            Isa::available().into_iter().flat_map(|isa| [len, 32, 7, 1].map(|chunk| (isa, chunk)));
        for ((isa, chunk), attention_window) in cases.flat_map(|case| {
            attention_windows(shape).map(|attention_window| (case, attention_window))
        }) {
            let mut blocks = Blocks::new(shape, 1, precision);
            blocks.grow(len.div_ceil(BLOCK));
            let mut out = vec![0.0; len * shape.query_width()];
            let compute = Compute::with_isa(1 + chunk % 2, isa, precision);
            for position in (0..len).step_by(chunk) {
                let part = chunk.min(len - position);
                let span = TokenSpan {
                    row: 0,
                    len: part,
                    position,
                    blocks: (0..(position + part).div_ceil(BLOCK) as u32).collect(),
                    inherits: None,
                };
                let rows = &qkv[position * shape.qkv_width()..][..part * shape.qkv_width()];
                let to = &mut out[position * shape.query_width()..][..part * shape.query_width()];
                forward(&compute, &blocks.layer(0), attention_window, &[span], rows, to, None);
            }
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert_eq!(
                firsts
                    .entry((compute.kernel().order(), attention_window.window))
                    .or_insert_with(|| bits.clone()),
                &bits,
                "{precision}, {isa:?}, chunks of {chunk}"
            );
        }
    }
}
