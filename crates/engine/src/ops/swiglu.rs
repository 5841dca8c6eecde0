//! The gated feed-forward activation (Shazeer 2020): h = silu(g) · u, with g and u side by side in one row.

use super::{ROWS_PER_TASK, for_groups, for_rows};
use crate::Compute;
use crate::buffer::Shared;
use crate::simd::{exp, simd};

/// Values that are worth a task: some microseconds, so that the few rows of decoding make several.
const LEAST_VALUES: usize = 4096;

simd! {
    fn forward_row(gate: &[f32], up: &[f32], h: &mut [f32]) {
        for ((h, g), u) in h.iter_mut().zip(gate).zip(up) {
            *h = g / (1.0 + exp(-g)) * u;
        }
    }
}

simd! {
    /// Overwrites gate and up with their gradients, given `dh`, which it overwrites with h.
    fn backward_row(gate: &mut [f32], up: &mut [f32], dh: &mut [f32]) {
        for ((d, g), u) in dh.iter_mut().zip(gate).zip(up) {
            let sigmoid = 1.0 / (1.0 + exp(-*g));
            let silu = *g * sigmoid;
            let h = silu * *u;
            let slope = sigmoid * (1.0 + *g * (1.0 - sigmoid));
            *g = *d * *u * slope;
            *u = *d * silu;
            *d = h;
        }
    }
}

/// `h[row] = silu(gate) · up`; `gate_up` has rows of 2 × `width`, `h` of `width`.
pub fn forward(compute: &Compute, rows: usize, width: usize, gate_up: &[f32], h: &mut [f32]) {
    let group = (LEAST_VALUES / width.max(1)).clamp(1, ROWS_PER_TASK);
    for_groups(compute, rows, group, width, h, |row, h| {
        let (gate, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
        forward_row(compute.isa, gate, up, h);
    });
}

/// Overwrites `gate_up` with its gradient and `dh` with `h` itself, which the gradient of the next projection
/// needs.
pub fn backward(compute: &Compute, rows: usize, width: usize, gate_up: &mut [f32], dh: &mut [f32]) {
    let dh = Shared::new(dh);
    for_rows(compute, rows, 2 * width, gate_up, |row, gate_up| {
        let (gate, up) = gate_up.split_at_mut(width);
        // SAFETY: each row belongs to one task.
        backward_row(compute.isa, gate, up, unsafe { dh.slice(row * width, width) });
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, differences, noise, wide};
    use super::*;

    fn naive(gate_up: &[f64], width: usize) -> Vec<f64> {
        gate_up
            .chunks(2 * width)
            .flat_map(|row| {
                (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i]).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn matches_f64_and_its_differences() {
        let (rows, width) = (17, 23);
        let compute = Compute::new(2);
        let (x, dh) = (noise(rows * 2 * width, 1, 12.0), noise(rows * width, 2, 1.0));
        let mut h = vec![0.0; rows * width];
        forward(&compute, rows, width, &x, &mut h);
        close(&h, &naive(&wide(&x), width), 1e-6);

        let (mut dx, mut again) = (x.clone(), dh.clone());
        backward(&compute, rows, width, &mut dx, &mut again);
        close(&again, &wide(&h), 1e-6);
        let objective =
            |x: &[f64]| naive(x, width).iter().zip(&dh).map(|(h, g)| h * f64::from(*g)).sum::<f64>();
        close(&dx, &differences(&wide(&x), objective), 1e-5);
    }
}
