//! RMS normalization (Zhang & Sennrich 2019): y = w · x / sqrt(mean(x²) + ε), over the rows of a
//! matrix or over the heads within a row.

use super::{for_columns, for_rows};
use crate::Compute;
use crate::buffer::SharedSlice;
use crate::simd::{LANES, dot, fold_lanes, simd};

/// Maximum width of a head, limited by scratch on the stack. The model is checked against it before
/// it is loaded.
pub const MAX_HEAD: usize = 512;

simd! {
    /// Normalizes one row into `y`.
    fn forward_row(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
        let inverse = inverse(x, epsilon);
        for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
            *y = w * (x * inverse);
        }
    }
}

simd! {
    /// Adds the gradient of one row: `dx += inverse · (w dy − x · inverse² · mean(w dy x))`;
    /// returns `inverse`.
    fn backward_row(x: &[f32], weight: &[f32], epsilon: f32, dy: &[f32], dx: &mut [f32]) -> f32 {
        let inverse = inverse(x, epsilon);
        let pull = triple_dot(dy, weight, x) / x.len() as f32 * inverse * inverse;
        for (((d, g), w), x) in dx.iter_mut().zip(dy).zip(weight).zip(x) {
            *d += inverse * (g * w - x * pull);
        }
        inverse
    }
}

/// Computes the inverse RMS of a row: 1 / sqrt(mean(x²) + ε).
#[inline(always)]
fn inverse(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + epsilon).sqrt()
}

/// Computes Σ x y z over three slices of equal length, in fixed lanes.
#[inline(always)]
fn triple_dot(x: &[f32], y: &[f32], z: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let full = x.len() / LANES * LANES;
    for start in (0..full).step_by(LANES) {
        let x = &x[start..][..LANES];
        let y = &y[start..][..LANES];
        let z = &z[start..][..LANES];
        for i in 0..LANES {
            lanes[i] = (x[i] * y[i]).mul_add(z[i], lanes[i]);
        }
    }
    for i in full..x.len() {
        lanes[i - full] = (x[i] * y[i]).mul_add(z[i], lanes[i - full]);
    }
    fold_lanes(lanes)
}

/// Computes `y[row] = rms_norm(x[row]) · weight` for `rows` rows as wide as `weight`.
pub fn forward(
    compute: &Compute,
    rows: usize,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    y: &mut [f32],
) {
    let width = weight.len();
    for_rows(compute, rows, width, y, |row, y| {
        forward_row(compute.isa, &x[row * width..][..width], weight, epsilon, y);
    });
}

/// Adds the gradient with respect to `x` to `dx`, and the gradient with respect to `weight`, summed
/// in the order of rows, to `dweight`. `inverses` is scratch with one value per row.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    compute: &Compute,
    rows: usize,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    dy: &[f32],
    inverses: &mut [f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let width = weight.len();
    let shared = SharedSlice::new(&mut inverses[..rows]);
    for_rows(compute, rows, width, dx, |row, dx| {
        let x = &x[row * width..][..width];
        let dy = &dy[row * width..][..width];
        let inverse = backward_row(compute.isa, x, weight, epsilon, dy, dx);
        // SAFETY: each row belongs to one task.
        let slot = unsafe { shared.slice(row, 1) };
        slot[0] = inverse;
    });
    weight_gradient(compute, rows, x, dy, inverses, dweight);
}

/// Computes `dweight[j] += Σ_rows dy[row][j] · x[row][j] · inverse[row]`, in the order of rows.
fn weight_gradient(
    compute: &Compute,
    rows: usize,
    x: &[f32],
    dy: &[f32],
    inverses: &[f32],
    dweight: &mut [f32],
) {
    let width = dweight.len();
    for_columns(compute, dweight, |first, sums| {
        for (row, inverse) in inverses[..rows].iter().enumerate() {
            let at = row * width + first;
            add_products(compute.isa, &x[at..], &dy[at..], *inverse, sums);
        }
    });
}

simd! {
    fn add_products(x: &[f32], dy: &[f32], inverse: f32, sums: &mut [f32]) {
        for ((s, x), g) in sums.iter_mut().zip(x).zip(dy) {
            *s = g.mul_add(x * inverse, *s);
        }
    }
}

/// Location of heads in the rows of a matrix: `heads` runs of `head_dim` values from `offset` on,
/// with rows `stride` apart.
#[derive(Debug, Clone, Copy)]
pub struct HeadLayout {
    /// Distance between the starts of two rows, in values.
    pub stride: usize,
    /// Index of the first value of the first head in a row.
    pub offset: usize,
    /// Number of heads in a row.
    pub heads: usize,
    /// Width of a head, and of the weight.
    pub head_dim: usize,
}

/// Normalizes every head of `x` in place with the same `weight` (Qwen3's query and key norms).
pub fn forward_heads(
    compute: &Compute,
    rows: usize,
    at: HeadLayout,
    weight: &[f32],
    epsilon: f32,
    x: &mut [f32],
) {
    for_rows(compute, rows, at.stride, x, |_, row| {
        for head in row[at.offset..][..at.heads * at.head_dim].chunks_exact_mut(at.head_dim) {
            let mut before = [0.0f32; MAX_HEAD];
            let before = &mut before[..at.head_dim];
            before.copy_from_slice(head);
            forward_row(compute.isa, before, weight, epsilon, head);
        }
    });
}

/// Computes the gradient of [`forward_heads`]: replaces `d`, the gradient with respect to its
/// output, with the gradient with respect to its input `x`, and adds the weight's gradient to
/// `dweight`, in the order of rows and heads.
#[allow(clippy::too_many_arguments)]
pub fn backward_heads(
    compute: &Compute,
    rows: usize,
    at: HeadLayout,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    d: &mut [f32],
    dweight: &mut [f32],
) {
    // The weight is one head wide, which is too little to distribute. So the calling thread sums
    // its gradient first, while `d` still holds the gradient of the output.
    for row in 0..rows {
        for head in 0..at.heads {
            let first = row * at.stride + at.offset + head * at.head_dim;
            let x = &x[first..][..at.head_dim];
            let d = &d[first..][..at.head_dim];
            let inverse = inverse_rms(compute.isa, x, epsilon);
            add_products(compute.isa, x, d, inverse, dweight);
        }
    }
    for_rows(compute, rows, at.stride, d, |row, d| {
        for head in 0..at.heads {
            let first = at.offset + head * at.head_dim;
            let x = &x[row * at.stride + first..][..at.head_dim];
            let d = &mut d[first..][..at.head_dim];
            let mut dy = [0.0f32; MAX_HEAD];
            let dy = &mut dy[..at.head_dim];
            dy.copy_from_slice(d);
            d.fill(0.0);
            backward_row(compute.isa, x, weight, epsilon, dy, d);
        }
    });
}

simd! {
    fn inverse_rms(x: &[f32], epsilon: f32) -> f32 {
        inverse(x, epsilon)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, central_differences, noise, widen};
    use super::*;

    const EPSILON: f32 = 1e-5;

    fn reference_forward(x: &[f64], w: &[f64]) -> Vec<f64> {
        x.chunks(w.len())
            .flat_map(|row| {
                let mean = row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
                row.iter()
                    .zip(w)
                    .map(move |(v, w)| w * v / (mean + f64::from(EPSILON)).sqrt())
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn rms_norm_matches_f64_and_finite_differences() {
        let rows = 19;
        let width = 37;
        let compute = Compute::new(2);
        let x = noise(rows * width, 1, 4.0);
        let w = noise(width, 2, 2.0);
        let dy = noise(rows * width, 3, 1.0);
        let mut y = vec![0.0; x.len()];
        forward(&compute, rows, &x, &w, EPSILON, &mut y);
        assert_close(&y, &reference_forward(&widen(&x), &widen(&w)), 1e-6);

        let objective = |x: &[f64], w: &[f64]| {
            reference_forward(x, w).iter().zip(widen(&dy)).map(|(y, g)| y * g).sum::<f64>()
        };
        let mut dx = vec![0.0; x.len()];
        let mut dw = vec![0.0; width];
        backward(&compute, rows, &x, &w, EPSILON, &dy, &mut vec![0.0; rows], &mut dx, &mut dw);
        assert_close(&dx, &central_differences(&widen(&x), |x| objective(x, &widen(&w))), 1e-5);
        assert_close(&dw, &central_differences(&widen(&w), |w| objective(&widen(&x), w)), 1e-5);

        // Heads within rows are the same operation on narrower rows.
        let at = HeadLayout { stride: 3 * width, offset: width, heads: 2, head_dim: width };
        let rows = 6;
        let x = noise(rows * at.stride, 4, 2.0);
        let d = noise(x.len(), 5, 1.0);
        let mut y = x.clone();
        forward_heads(&compute, rows, at, &w, EPSILON, &mut y);
        let mut dx = d.clone();
        let mut dw = vec![0.0; width];
        backward_heads(&compute, rows, at, &x, &w, EPSILON, &mut dx, &mut dw);
        let flat = |m: &[f32]| -> Vec<f32> {
            m.chunks(at.stride).flat_map(|row| row[at.offset..].to_vec()).collect()
        };
        let fx = flat(&x);
        let fd = flat(&d);
        let mut expected = vec![0.0; fx.len()];
        forward(&compute, rows * 2, &fx, &w, EPSILON, &mut expected);
        assert_eq!(flat(&y), expected);
        let mut dx_flat = vec![0.0; fx.len()];
        let mut dw_flat = vec![0.0; width];
        let mut inverses = vec![0.0; rows * 2];
        backward(
            &compute,
            rows * 2,
            &fx,
            &w,
            EPSILON,
            &fd,
            &mut inverses,
            &mut dx_flat,
            &mut dw_flat,
        );
        assert_eq!(flat(&dx), dx_flat);
        assert_close(&dw, &widen(&dw_flat), 1e-6);
        assert_eq!(y[..at.offset], x[..at.offset], "other columns are left alone");
    }
}
