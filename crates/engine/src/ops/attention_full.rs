//! Computes bidirectional attention, in which every position attends to all positions of its text,
//! as in encoders. Forward pass only.
//!
//! Texts are short, so the scores of one position are computed and used at once. An output depends
//! only on its own text, whatever else is in the batch.

use std::ops::Range;

use super::for_groups;
use crate::Compute;
use crate::buffer::SharedSlice;
use crate::simd::{dot, exp, max, simd};

/// Shape of the attention heads of an encoder.
#[derive(Debug, Clone, Copy)]
pub struct FullHeads {
    /// Number of heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

simd! {
    /// Computes the output of one head at one position, from `query` and the keys and values of a
    /// text (`stride` values apart). `scores` is scratch with one value per position.
    fn compute_attention(
        query: &[f32], keys: &[f32], values: &[f32], stride: usize, scale: f32, scores: &mut [f32],
        out: &mut [f32]
    ) {
        let width = query.len();
        for (at, score) in scores.iter_mut().enumerate() {
            *score = dot(query, &keys[at * stride..][..width]) * scale;
        }
        let max_score = max(scores);
        let mut total = 0.0f32;
        for score in scores.iter_mut() {
            *score = exp(*score - max_score);
            total += *score;
        }
        out.fill(0.0);
        for (at, weight) in scores.iter().enumerate() {
            for (o, v) in out.iter_mut().zip(&values[at * stride..][..width]) {
                *o = weight.mul_add(*v, *o);
            }
        }
        let inverse = 1.0 / total;
        for o in out.iter_mut() {
            *o *= inverse;
        }
    }
}

/// Computes `out[row]`, as wide as all heads, from `qkv[row]`: queries, keys and values of all
/// heads, one after the other. `texts` are ranges of rows; `scores` is scratch with one value per
/// row and head.
pub fn forward(
    compute: &Compute,
    shape: FullHeads,
    texts: &[Range<usize>],
    qkv: &[f32],
    scores: &mut [f32],
    out: &mut [f32],
) {
    let FullHeads { heads, head_dim } = shape;
    let width = heads * head_dim;
    let stride = 3 * heads * head_dim;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let scores = SharedSlice::new(scores);
    // A task is one head of a text, so that its keys and values stay in the first-level cache.
    let out = SharedSlice::new(out);
    let tasks = texts.len() * heads;
    compute.pool.run(tasks, |task| {
        let text = texts[task / heads].clone();
        let head = task % heads;
        let rows = text.len();
        let part = |of: usize| &qkv[text.start * stride + of * width + head * head_dim..];
        // SAFETY: rows of texts do not overlap, so each task has its own scores.
        let scores = unsafe { scores.slice(text.start * heads + head * rows, rows) };
        for row in 0..rows {
            let query = &part(0)[row * stride..][..head_dim];
            // SAFETY: each task has one head of its rows.
            let out = unsafe { out.slice((text.start + row) * width + head * head_dim, head_dim) };
            compute_attention(compute.isa, query, part(1), part(2), stride, scale, scores, out);
        }
    });
}

/// Pools each text to a vector of length 1: the mean of its rows, or its first row if `mean` is
/// false.
pub fn pool_texts(
    compute: &Compute,
    texts: &[Range<usize>],
    mean: bool,
    x: &[f32],
    width: usize,
    out: &mut [f32],
) {
    for_groups(compute, texts.len(), 1, width, out, |at, out| {
        let rows = if mean { texts[at].clone() } else { texts[at].start..texts[at].start + 1 };
        out.fill(0.0);
        for row in rows.clone() {
            for (o, x) in out.iter_mut().zip(&x[row * width..][..width]) {
                *o += x;
            }
        }
        let norm = out.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        // Normalization cancels the number of rows, so the sum serves as the mean.
        let inverse = (1.0 / norm.max(1e-12)) as f32;
        for o in out.iter_mut() {
            *o *= inverse;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise, widen};
    use super::*;

    fn reference_forward(shape: FullHeads, texts: &[Range<usize>], qkv: &[f64]) -> Vec<f64> {
        let FullHeads { heads, head_dim } = shape;
        let width = heads * head_dim;
        let mut out = vec![0.0; texts.last().unwrap().end * width];
        let at = |row: usize, of: usize, head: usize, i: usize| {
            qkv[row * 3 * width + of * width + head * head_dim + i]
        };
        for text in texts {
            for (row, head) in text.clone().flat_map(|row| (0..heads).map(move |head| (row, head)))
            {
                let score = |other: usize| {
                    let sum: f64 =
                        (0..head_dim).map(|i| at(row, 0, head, i) * at(other, 1, head, i)).sum();
                    (sum / (head_dim as f64).sqrt()).exp()
                };
                let total: f64 = text.clone().map(score).sum();
                for i in 0..head_dim {
                    let sum: f64 =
                        text.clone().map(|other| score(other) * at(other, 2, head, i)).sum();
                    out[row * width + head * head_dim + i] = sum / total;
                }
            }
        }
        out
    }

    #[test]
    fn encoder_attention_matches_f64_and_is_batch_invariant() {
        let shape = FullHeads { heads: 3, head_dim: 20 };
        let texts = [0..1, 1..18, 18..40];
        let width = 60;
        let rows = 40;
        let qkv = noise(rows * 3 * width, 5, 4.0);
        let mut scores = vec![0.0; rows * 3];
        let mut out = vec![0.0; rows * width];
        let compute = Compute::new(2);
        forward(&compute, shape, &texts, &qkv, &mut scores, &mut out);
        assert_close(&out, &reference_forward(shape, &texts, &widen(&qkv)), 1e-5);
        let mut separate = vec![0.0; 17 * width];
        let its = &qkv[3 * width..18 * 3 * width];
        forward(&compute, shape, std::slice::from_ref(&(0..17)), its, &mut scores, &mut separate);
        assert_eq!(separate, out[width..18 * width]);
    }

    #[test]
    fn pooled_vectors_have_unit_length() {
        let x = noise(5 * 7, 6, 2.0);
        let mut out = vec![0.0; 2 * 7];
        for mean in [true, false] {
            pool_texts(&Compute::new(1), &[0..2, 2..5], mean, &x, 7, &mut out);
            for (text, out) in [0..2usize, 2..5].into_iter().zip(out.chunks(7)) {
                let rows = if mean { text } else { text.start..text.start + 1 };
                let sums: Vec<f64> = (0..7)
                    .map(|i| rows.clone().map(|row| f64::from(x[row * 7 + i])).sum::<f64>())
                    .collect();
                let norm = sums.iter().map(|x| x * x).sum::<f64>().sqrt();
                assert_close(out, &sums.iter().map(|x| x / norm).collect::<Vec<_>>(), 1e-6);
            }
        }
    }
}
