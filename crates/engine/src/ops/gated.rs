//! Gated feed-forward activation (Shazeer 2020): h = f(g) · u with f = silu or gelu, and with g and
//! u side by side in one row.

use levade_model::Activation;

use super::{ROWS_PER_TASK, for_groups, for_rows};
use crate::Compute;
use crate::buffer::SharedSlice;
use crate::simd::{exp, simd};

/// Minimum number of values per task: some microseconds, so that the few rows of decoding make
/// several tasks.
const MIN_VALUES: usize = 4096;

simd! {
    fn silu_row(gate: &[f32], up: &[f32], h: &mut [f32]) {
        for ((h, g), u) in h.iter_mut().zip(gate).zip(up) {
            *h = g / (1.0 + exp(-g)) * u;
        }
    }
}

simd! {
    /// Overwrites `gate` and `up` with their gradients. `dh` is the gradient of h and is
    /// overwritten with h.
    fn silu_backward_row(gate: &mut [f32], up: &mut [f32], dh: &mut [f32]) {
        for ((d, g), u) in dh.iter_mut().zip(gate).zip(up) {
            let sigmoid = 1.0 / (1.0 + exp(-*g));
            let silu = *g * sigmoid;
            let h = silu * *u;
            let derivative = sigmoid * (1.0 + *g * (1.0 - sigmoid));
            *g = *d * *u * derivative;
            *u = *d * silu;
            *d = h;
        }
    }
}

/// Factor √(2/π) in the tanh approximation of GELU.
const ROOT: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// Computes 1 / (1 + exp(−2z)) = (1 + tanh z) / 2 with z = √(2/π) (g + 0.044715 g³): gelu(g) is g
/// times this.
#[inline(always)]
fn gelu_factor(g: f32) -> f32 {
    let z = ROOT * g * (CUBIC * g * g + 1.0);
    1.0 / (1.0 + exp(-2.0 * z))
}

simd! {
    fn gelu_row(gate: &[f32], up: &[f32], h: &mut [f32]) {
        for ((h, g), u) in h.iter_mut().zip(gate).zip(up) {
            *h = g * gelu_factor(*g) * u;
        }
    }
}

simd! {
    /// Computes the gradient of gelu like `silu_backward_row`.
    fn gelu_backward_row(gate: &mut [f32], up: &mut [f32], dh: &mut [f32]) {
        for ((d, g), u) in dh.iter_mut().zip(gate).zip(up) {
            let factor = gelu_factor(*g);
            let gelu = *g * factor;
            let h = gelu * *u;
            let inner = 2.0 * ROOT * (3.0 * CUBIC * *g * *g + 1.0);
            let derivative = factor * (1.0 + *g * (1.0 - factor) * inner);
            *g = *d * *u * derivative;
            *u = *d * gelu;
            *d = h;
        }
    }
}

/// Computes `h[row] = f(gate) · up`; `gate_up` has rows of 2 × `width`, `h` of `width`.
pub fn forward(
    compute: &Compute,
    activation: Activation,
    rows: usize,
    width: usize,
    gate_up: &[f32],
    h: &mut [f32],
) {
    let group = (MIN_VALUES / width.max(1)).clamp(1, ROWS_PER_TASK);
    for_groups(compute, rows, group, width, h, |row, h| {
        let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
        match activation {
            Activation::Silu => silu_row(compute.isa, gate, up, h),
            Activation::GeluTanh => gelu_row(compute.isa, gate, up, h),
        }
    });
}

/// Overwrites `gate_up` with its gradient, and `dh` with `h` itself, which the gradient of the next
/// projection needs.
pub fn backward(
    compute: &Compute,
    activation: Activation,
    rows: usize,
    width: usize,
    gate_up: &mut [f32],
    dh: &mut [f32],
) {
    let dh = SharedSlice::new(dh);
    for_rows(compute, rows, 2 * width, gate_up, |row, gate_up| {
        let (gate, up) = gate_up.split_at_mut(width);
        // SAFETY: each row belongs to one task.
        let dh = unsafe { dh.slice(row * width, width) };
        match activation {
            Activation::Silu => silu_backward_row(compute.isa, gate, up, dh),
            Activation::GeluTanh => gelu_backward_row(compute.isa, gate, up, dh),
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, central_differences, noise, widen};
    use super::*;

    fn reference_forward(activation: Activation, gate_up: &[f64], width: usize) -> Vec<f64> {
        let gate = |g: f64| match activation {
            Activation::Silu => g / (1.0 + (-g).exp()),
            Activation::GeluTanh => {
                0.5 * g
                    * (1.0
                        + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g)).tanh())
            }
        };
        gate_up
            .chunks(2 * width)
            .flat_map(|row| (0..width).map(|i| gate(row[i]) * row[width + i]).collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn gated_activation_matches_f64_and_finite_differences() {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let rows = 17;
            let width = 23;
            let compute = Compute::new(2);
            let x = noise(rows * 2 * width, 1, 12.0);
            let dh = noise(rows * width, 2, 1.0);
            let mut h = vec![0.0; rows * width];
            forward(&compute, activation, rows, width, &x, &mut h);
            assert_close(&h, &reference_forward(activation, &widen(&x), width), 1e-6);

            let mut dx = x.clone();
            let mut again = dh.clone();
            backward(&compute, activation, rows, width, &mut dx, &mut again);
            assert_close(&again, &widen(&h), 1e-6);
            let objective = |x: &[f64]| {
                reference_forward(activation, x, width)
                    .iter()
                    .zip(&dh)
                    .map(|(h, g)| h * f64::from(*g))
                    .sum::<f64>()
            };
            assert_close(&dx, &central_differences(&widen(&x), objective), 1e-5);
        }
    }
}
