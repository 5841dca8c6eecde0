//! Exact GELU (Hendrycks and Gimpel 2016): y = x Φ(x) = x / 2 · (1 + erf(x / √2)). Forward pass
//! only.

use super::for_rows;
use crate::Compute;
use crate::simd::{exp, simd};

simd! {
    fn forward_row(bias: &[f32], y: &mut [f32]) {
        for (y, b) in y.iter_mut().zip(bias) {
            let x = *y + b;
            *y = 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
        }
    }
}

/// Computes erf by Abramowitz and Stegun's formula 7.1.26, accurate to 1.5e-7.
#[inline(always)]
fn erf(x: f32) -> f32 {
    let size = x.abs();
    let t = 1.0 / 0.327_591_1f32.mul_add(size, 1.0);
    let mut p = 1.061_405_4f32;
    p = p.mul_add(t, -1.453_152);
    p = p.mul_add(t, 1.421_413_7);
    p = p.mul_add(t, -0.284_496_74);
    p = p.mul_add(t, 0.254_829_6);
    (1.0 - p * t * exp(-size * size)).copysign(x)
}

/// Computes `y[row] = gelu(y[row] + bias)` for `rows` rows as wide as `bias`.
pub fn forward(compute: &Compute, rows: usize, bias: &[f32], y: &mut [f32]) {
    for_rows(compute, rows, bias.len(), y, |_, y| forward_row(compute.isa, bias, y));
}

#[cfg(test)]
mod tests {
    use super::super::testing::assert_close;
    use super::*;
    use crate::precision::Precision;
    use crate::simd::Isa;

    #[test]
    fn gelu_matches_f64_on_every_isa() {
        let width = 1001;
        let x: Vec<f32> = (0..width).map(|i| (i as f32 - 500.0) / 40.0).collect();
        let bias = vec![0.25f32; width];
        let expected: Vec<f64> = x
            .iter()
            .map(|x| {
                let x = f64::from(*x) + 0.25;
                0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt()))
            })
            .collect();
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut y = x.clone();
            forward(&Compute::with_isa(1, isa, Precision::F32), 1, &bias, &mut y);
            assert_close(&y, &expected, 1e-6);
            assert_eq!(&y, first.get_or_insert_with(|| y.clone()), "{isa:?}");
        }
    }
}
