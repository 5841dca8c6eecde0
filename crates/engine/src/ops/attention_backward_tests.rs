//! Tests of `attention_backward`.

use super::super::attention::forward;
use super::super::attention::tests::{forest, reference_forward};
use super::super::kv::Blocks;
use super::super::testing::{assert_close, central_differences, noise, widen};
use super::*;
use crate::simd::Isa;

fn run(
    precision: Precision,
    threads: usize,
    shape: AttentionShape,
    attention_window: AttentionWindow,
    nodes: &[(Option<usize>, usize)],
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (spans, sequences, count) = forest(nodes);
    let rows = sequences.len();
    let qkv = noise(rows * shape.qkv_width(), 1, 3.0);
    let dout = noise(rows * shape.query_width(), 2, 1.0);
    let compute = Compute::with_isa(threads, Isa::detect(), precision);
    let mut blocks = Blocks::new(shape, 1, precision);
    blocks.grow(count);
    let mut out = vec![0.0; rows * shape.query_width()];
    let mut stats = vec![0.0; rows * shape.heads * 2];
    let keys_values = blocks.layer(0);
    forward(&compute, &keys_values, attention_window, &spans, &qkv, &mut out, Some(&mut stats));
    let runs: Vec<SequenceRows> = spans
        .iter()
        .map(|s| sequences[s.row + s.len - 1].iter().map(|row| (*row, 1)).collect())
        .collect();
    let saved = ForwardValues { qkv: &qkv, out: &out, stats: &stats };
    let mut dqkv = noise(qkv.len(), 3, 9.0);
    let mut partial_sums = Buffer::default();
    backward(
        &compute,
        &keys_values,
        attention_window,
        &spans,
        &runs,
        saved,
        &dout,
        &mut partial_sums,
        &mut [],
        &mut dqkv,
    );
    (qkv, dout, dqkv)
}

#[test]
fn attention_gradient_matches_finite_differences_on_forest() {
    let nodes = [(None, 5), (Some(0), 3), (Some(1), 2), (Some(0), 4), (None, 3)];
    let shape = AttentionShape { heads: 4, kv_heads: 2, head_dim: 6 };
    let unlimited = AttentionWindow::unlimited(6);
    for attention_window in [unlimited, AttentionWindow { window: 3, scale: 0.5 }] {
        let (qkv, dout, dqkv) = run(Precision::F32, 2, shape, attention_window, &nodes);
        let (_, sequences, _) = forest(&nodes);
        assert_close(
            &dqkv,
            &central_differences(&widen(&qkv), |x| {
                reference_forward(shape, attention_window, &sequences, x)
                    .iter()
                    .zip(&dout)
                    .map(|(o, g)| o * f64::from(*g))
                    .sum::<f64>()
            }),
            1e-5,
        );
    }
}

/// Long sequences have several blocks, tiles and chunks. A sum over all gradients is compared
/// with a directional difference.
#[test]
fn gradient_of_long_sequences_matches_directional_difference() {
    let nodes = [(None, 70), (Some(0), 411), (Some(0), 20)];
    let shape = AttentionShape { heads: 3, kv_heads: 1, head_dim: 40 };
    let unlimited = AttentionWindow::unlimited(40);
    for attention_window in [
        unlimited,
        AttentionWindow { window: 7, ..unlimited },
        AttentionWindow { window: 150, ..unlimited },
    ] {
        let (qkv, dout, dqkv) = run(Precision::F32, 2, shape, attention_window, &nodes);
        let (_, sequences, _) = forest(&nodes);
        let direction = noise(qkv.len(), 5, 2.0);
        let along = |t: f64| {
            let x: Vec<f64> = qkv
                .iter()
                .zip(&direction)
                .map(|(x, d)| f64::from(*x) + t * f64::from(*d))
                .collect();
            reference_forward(shape, attention_window, &sequences, &x)
                .iter()
                .zip(&dout)
                .map(|(o, g)| o * f64::from(*g))
                .sum::<f64>()
        };
        let expected = (along(1e-4) - along(-1e-4)) / 2e-4;
        let found: f64 =
            dqkv.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        assert!(
            (found - expected).abs() < 1e-4 * (1.0 + expected.abs()),
            "{found} against {expected}"
        );
        let (.., single_threaded) = run(Precision::F32, 1, shape, attention_window, &nodes);
        assert!(
            dqkv.iter().zip(&single_threaded).all(|(a, b)| a.to_bits() == b.to_bits()),
            "threads changed a bit"
        );
        // Rounded to bf16 the gradient is close to this one, for all instruction sets.
        let (.., rounded) = run(Precision::Bf16, 2, shape, attention_window, &nodes);
        let [distance, size] = [&rounded, &vec![0.0; dqkv.len()]]
            .map(|x| dqkv.iter().zip(x).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt());
        assert!(
            distance < 0.05 * size,
            "{distance} of {size} at a window of {}",
            attention_window.window
        );
    }
}
