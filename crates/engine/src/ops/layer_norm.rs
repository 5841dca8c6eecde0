//! Layer normalization (Ba, Kiros and Hinton 2016): y = w · (x − mean) / sqrt(var + ε) + b, over
//! rows. Forward pass only: encoders are not trained here.

use super::for_rows;
use crate::Compute;
use crate::simd::{LANES, fold_lanes, simd};

simd! {
    /// Adds `with` to a row, and normalizes the sum in place.
    fn forward_row(weight: &[f32], bias: &[f32], epsilon: f32, with: &[f32], y: &mut [f32]) {
        for (y, with) in y.iter_mut().zip(with) {
            *y += with;
        }
        let count = y.len() as f32;
        let mean = sum(y, |y| y) / count;
        let variance = sum(y, |y| (y - mean) * (y - mean)) / count;
        let inverse = 1.0 / (variance + epsilon).sqrt();
        for ((y, w), b) in y.iter_mut().zip(weight).zip(bias) {
            *y = ((*y - mean) * inverse).mul_add(*w, *b);
        }
    }
}

/// Computes Σ f(x) in fixed lanes.
#[inline(always)]
fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            lanes[i] += f(chunk[i]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(*x);
    }
    fold_lanes(lanes)
}

/// Computes `y[row] = layer_norm(y[row] + with[row])` for `rows` rows as wide as `weight`.
pub fn forward(
    compute: &Compute,
    rows: usize,
    (weight, bias): (&[f32], &[f32]),
    epsilon: f32,
    with: &[f32],
    y: &mut [f32],
) {
    let width = weight.len();
    for_rows(compute, rows, width, y, |row, y| {
        forward_row(compute.isa, weight, bias, epsilon, &with[row * width..][..width], y);
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise, widen};
    use super::*;
    use crate::precision::Precision;
    use crate::simd::Isa;

    fn reference_forward(x: &[f64], width: usize, w: &[f32], b: &[f32], epsilon: f64) -> Vec<f64> {
        let row = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let one = |(i, x): (usize, &f64)| {
                (x - mean) / (variance + epsilon).sqrt() * f64::from(w[i]) + f64::from(b[i])
            };
            row.iter().enumerate().map(one).collect::<Vec<_>>()
        };
        x.chunks(width).flat_map(row).collect()
    }

    #[test]
    fn layer_norm_matches_f64_on_every_isa() {
        let rows = 19;
        let width = 77;
        let x = noise(rows * width, 1, 8.0);
        let with = noise(rows * width, 2, 3.0);
        let w = noise(width, 3, 2.0);
        let b = noise(width, 4, 1.0);
        let sum: Vec<f64> = widen(&x).iter().zip(widen(&with)).map(|(x, y)| x + y).collect();
        let expected = reference_forward(&sum, width, &w, &b, 1e-12);
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut y = x.clone();
            forward(
                &Compute::with_isa(2, isa, Precision::F32),
                rows,
                (&w, &b),
                1e-12,
                &with,
                &mut y,
            );
            assert_close(&y, &expected, 1e-5);
            assert_eq!(&y, first.get_or_insert_with(|| y.clone()), "{isa:?}");
        }
    }
}
