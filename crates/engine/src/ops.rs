//! Operations of a transformer other than matmul, each with a forward and a backward pass.
//!
//! Each operation works on rows (tokens) independently of other rows. Only attention reads other
//! rows: the keys and values of the row's own sequence. Reductions run in fixed lanes or in the
//! order of rows. So the operations keep the batch invariance of [matmul](crate::gemm). There is no
//! automatic differentiation.
//!
//! # Adding an operation
//! An operation is a file of this module with the following parts, in this order. `gated.rs` is the
//! shortest example.
//!
//! 1. **Forward**, over rows: `for_rows` assigns each row to one task. Inner loops are plain Rust
//!    in the macro `simd!`, which compiles them once per instruction set. A sum over a row runs in
//!    16 fixed lanes (`simd::dot`, `simd::fold_lanes`), never in a loop that the compiler may
//!    reorder, and never over rows. `exp` is `simd::exp`. Batch invariance requires no more: an
//!    output depends on its own row, by operations written in one order.
//! 2. **Backward**: computes the gradient of the input from the gradient of the output, row by row.
//!    It adds the gradients of parameters in the order of rows; threads split columns
//!    (`for_columns`, `add_column_sums`).
//! 3. **Tests**: a naive version in f64 as reference for the forward pass; its finite differences
//!    (`central_differences`) as reference for the backward pass; equal bits on every instruction
//!    set, in other batches, and on other numbers of threads.
//! 4. **Calls**: in `Transformer::forward_state` or `forward_layer`, which sampling and training
//!    share, and mirrored in `RowGradients::run_layer`. A value that the backward pass needs
//!    becomes a field of `LayerState` and a term of `MemoryPlan`. A value that the backward pass
//!    can recompute from these fields is not stored.
//! 5. **Tests of the model**: `learning.rs` compares loss and gradients of small models of every
//!    family with f64; `tests/engine/parity.rs` checks that sampling and training compute the same
//!    bits; `conformance/gradients.py` compares with PyTorch.
//!
//! If the order of operations of an existing kernel changes, `KERNELS` in `engine.rs` is
//! incremented.
//!
//! Matmul is shared code: `product()` takes operands that are packed for each call, `tile()` takes
//! operands in blocks. Both take words (`precision.rs`), so an operation built on them works in
//! both precisions.

pub mod adamw;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_amx;
pub mod attention_backward;
pub mod attention_full;
pub mod attention_tiles;
pub mod gated;
pub mod gelu;
pub mod kv;
pub mod layer_norm;
pub mod norm;
pub mod rope;
mod score_gradients;
mod scores;
pub mod softmax;

use crate::Compute;
use crate::buffer::SharedSlice;

/// Number of rows in one task of an elementwise operation.
const ROWS_PER_TASK: usize = 16;

/// Calls `body(row, out)` for every row of `out` (`rows` × `width`), in parallel.
pub(crate) fn for_rows(
    compute: &Compute,
    rows: usize,
    width: usize,
    out: &mut [f32],
    body: impl Fn(usize, &mut [f32]) + Sync,
) {
    for_groups(compute, rows, ROWS_PER_TASK, width, out, body);
}

/// Calls `body(row, out)` for every row of `out` like [`for_rows`], with `group` rows per task.
pub(crate) fn for_groups(
    compute: &Compute,
    rows: usize,
    group: usize,
    width: usize,
    out: &mut [f32],
    body: impl Fn(usize, &mut [f32]) + Sync,
) {
    let out = SharedSlice::new(out);
    compute.pool.run(rows.div_ceil(group), |task| {
        for row in task * group..rows.min((task + 1) * group) {
            // SAFETY: each row belongs to one task.
            body(row, unsafe { out.slice(row * width, width) });
        }
    });
}

/// Copies `values` into every row of `out`.
pub fn fill_rows(compute: &Compute, rows: usize, values: &[f32], out: &mut [f32]) {
    for_rows(compute, rows, values.len(), out, |_, row| row.copy_from_slice(values));
}

/// Computes `out[row] += x[row]` for `rows` rows of `width` values.
pub fn add_rows(compute: &Compute, rows: usize, width: usize, x: &[f32], out: &mut [f32]) {
    for_rows(compute, rows, width, out, |row, out| {
        out.iter_mut().zip(&x[row * width..]).for_each(|(out, x)| *out += x);
    });
}

/// Calls `body(first, sums)` for ranges of columns of `sums`, in parallel. Used for sums over rows,
/// each of which runs in the order of rows.
pub(crate) fn for_columns(
    compute: &Compute,
    sums: &mut [f32],
    body: impl Fn(usize, &mut [f32]) + Sync,
) {
    const COLUMNS: usize = 64;
    let width = sums.len();
    let shared = SharedSlice::new(sums);
    compute.pool.run(width.div_ceil(COLUMNS), |task| {
        let first = task * COLUMNS;
        // SAFETY: each range of columns belongs to one task.
        body(first, unsafe { shared.slice(first, COLUMNS.min(width - first)) });
    });
}

/// Computes `sums[j] += Σ_rows x[row][j]`, in the order of rows: the gradient of a bias.
pub fn add_column_sums(compute: &Compute, rows: usize, x: &[f32], sums: &mut [f32]) {
    let width = sums.len();
    for_columns(compute, sums, |first, sums| {
        for row in 0..rows {
            for (sum, value) in sums.iter_mut().zip(&x[row * width + first..]) {
                *sum += value;
            }
        }
    });
}

/// Helpers for the tests of operations.
#[cfg(test)]
pub(crate) mod testing {
    /// Returns reproducible values in ±`scale`/2.
    pub fn noise(len: usize, seed: u64, scale: f32) -> Vec<f32> {
        (0..len as u64).map(|i| (levade_policy::uniform(seed, 9, i) as f32 - 0.5) * scale).collect()
    }

    /// Converts the values to f64.
    pub fn widen(x: &[f32]) -> Vec<f64> {
        x.iter().map(|v| f64::from(*v)).collect()
    }

    /// Asserts |a − b| ≤ tolerance · (1 + |b|) everywhere.
    pub fn assert_close(a: &[f32], b: &[f64], tolerance: f64) {
        assert_eq!(a.len(), b.len());
        for (i, (x, y)) in a.iter().zip(b).enumerate() {
            assert!(
                (f64::from(*x) - y).abs() <= tolerance * (1.0 + y.abs()),
                "element {i}: {x} against {y}"
            );
        }
    }

    /// Computes the gradient of `f` at `x` by central differences in f64.
    pub fn central_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        let step = 1e-5;
        let mut x = x.to_vec();
        (0..x.len())
            .map(|i| {
                let at = x[i];
                x[i] = at + step;
                let up = f(&x);
                x[i] = at - step;
                let down = f(&x);
                x[i] = at;
                (up - down) / (2.0 * step)
            })
            .collect()
    }
}
