//! Operands of a product, and their packing into panels and tiles.

use super::tile::{MR, NR};
use crate::buffer::Buffer;
use crate::simd::{Isa, simd};

/// A view of a matrix with strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows start `stride` values apart.
    ///
    /// # Panics
    /// When `data` is too short.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        let needed = if rows == 0 { 0 } else { (rows - 1) * stride + cols };
        assert!(
            needed <= data.len() && cols <= stride.max(1),
            "{} values are no {rows} x {cols} matrix",
            data.len()
        );
        Matrix { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// The transpose.
    pub fn transposed(self) -> Self {
        Matrix {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// One element.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.data[row * self.row_stride + col * self.col_stride]
    }
}

/// A right operand in panels, ready for many products.
pub struct Packed {
    data: Buffer,
    depth: usize,
    columns: usize,
}

impl Packed {
    /// Packs `b` (K × N) on the calling thread.
    pub fn new(isa: Isa, b: Matrix<'_>) -> Self {
        let mut packed = Packed::empty(b.rows, b.cols);
        for panel in 0..packed.panels() {
            let depth = packed.depth;
            pack_panel(isa, b, 0, depth, panel * NR, &mut packed.data[panel * NR * depth..][..NR * depth]);
        }
        packed
    }

    /// Room for a K × N operand, all zero.
    pub fn empty(depth: usize, columns: usize) -> Self {
        Packed { data: Buffer::zeroed(columns.div_ceil(NR) * NR * depth), depth, columns }
    }

    /// Packs `b` again, in parallel.
    ///
    /// # Panics
    /// When its shape is another.
    pub fn refresh(&mut self, compute: &crate::Compute, b: Matrix<'_>) {
        assert_eq!((b.rows, b.cols), (self.depth, self.columns), "shape of a packed operand");
        let (depth, panels) = (self.depth, self.panels());
        let data = crate::buffer::Shared::new(&mut self.data);
        compute.pool.run(panels, |panel| {
            // SAFETY: each panel is packed by one task.
            let out = unsafe { data.slice(panel * NR * depth, NR * depth) };
            pack_panel(compute.isa, b, 0, depth, panel * NR, out);
        });
    }

    /// K.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// N.
    pub fn columns(&self) -> usize {
        self.columns
    }

    fn panels(&self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Panel `index`, `[K][NR]`.
    pub fn panel(&self, index: usize) -> &[f32] {
        &self.data[index * NR * self.depth..][..NR * self.depth]
    }
}

/// Packs columns `column ..` of rows `k0 .. k0 + depth` of `b` into `out`, `[depth][NR]`, with zeros past the last column.
pub fn pack_panel(isa: Isa, b: Matrix<'_>, k0: usize, depth: usize, column: usize, out: &mut [f32]) {
    let columns = NR.min(b.cols - column);
    if columns < NR {
        out.fill(0.0);
    }
    let data = &b.data[k0 * b.row_stride + column * b.col_stride..];
    if b.col_stride == 1 {
        gather_rows(isa, data, b.row_stride, columns, depth, NR, out);
    } else {
        transpose(isa, data, b.col_stride, columns, depth, NR, out);
    }
}

/// Packs rows `row .. row + rows` and columns `k0 .. k0 + depth` of `a` into `out`, `[depth][rows]`.
pub fn pack_tile(isa: Isa, a: Matrix<'_>, row: usize, rows: usize, k0: usize, depth: usize, out: &mut [f32]) {
    debug_assert!(rows <= MR);
    let data = &a.data[row * a.row_stride + k0 * a.col_stride..];
    if a.col_stride == 1 {
        transpose(isa, data, a.row_stride, rows, depth, rows, out);
    } else {
        gather_rows(isa, data, a.col_stride, rows, depth, rows, out);
    }
}

simd! {
    /// `out[k * out_stride + i] = data[k * stride + i]` for i below `width`.
    fn gather_rows(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        if width == NR && out_stride == NR {
            for k in 0..depth {
                let (from, to) = (&data[k * stride..][..NR], &mut out[k * NR..][..NR]);
                to.copy_from_slice(from);
            }
        } else if width == MR && out_stride == MR {
            for k in 0..depth {
                let (from, to) = (&data[k * stride..][..MR], &mut out[k * MR..][..MR]);
                to.copy_from_slice(from);
            }
        } else {
            for k in 0..depth {
                out[k * out_stride..][..width].copy_from_slice(&data[k * stride..][..width]);
            }
        }
    }
}

simd! {
    /// `out[k * out_stride + i] = data[i * stride + k]` for i below `width` and k below `depth`, in blocks of 4 × 16: one cache line of four source
    /// rows at a time.
    pub fn transpose(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        const BLOCK: usize = 16;
        let whole = depth / BLOCK * BLOCK;
        for k in (0..whole).step_by(BLOCK) {
            let mut i = 0;
            while i + 4 <= width {
                let row = |r: usize| &data[(i + r) * stride + k..][..BLOCK];
                let rows = [row(0), row(1), row(2), row(3)];
                let to = &mut out[k * out_stride + i..][..(BLOCK - 1) * out_stride + 4];
                transpose_4x16(rows, out_stride, to);
                i += 4;
            }
            while i < width {
                let row = &data[i * stride + k..][..BLOCK];
                for (step, value) in row.iter().enumerate() {
                    out[(k + step) * out_stride + i] = *value;
                }
                i += 1;
            }
        }
        for k in whole..depth {
            for i in 0..width {
                out[k * out_stride + i] = data[i * stride + k];
            }
        }
    }
}

/// Four runs of 16 values become 16 runs of four, `out_stride` apart.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_4x16(rows: [&[f32]; 4], out_stride: usize, out: &mut [f32]) {
    use std::arch::x86_64::*;
    assert!(rows.iter().all(|r| r.len() >= 16) && out.len() >= 15 * out_stride + 4);
    for k in (0..16).step_by(4) {
        // SAFETY: SSE2 is part of x86-64, and all accesses lie within the lengths asserted above.
        unsafe {
            let [a, b, c, d] = rows.map(|row| _mm_loadu_ps(row.as_ptr().add(k)));
            let (ab_low, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
            let (cd_low, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
            let to = out.as_mut_ptr().add(k * out_stride);
            _mm_storeu_ps(to, _mm_movelh_ps(ab_low, cd_low));
            _mm_storeu_ps(to.add(out_stride), _mm_movehl_ps(cd_low, ab_low));
            _mm_storeu_ps(to.add(2 * out_stride), _mm_movelh_ps(ab_high, cd_high));
            _mm_storeu_ps(to.add(3 * out_stride), _mm_movehl_ps(cd_high, ab_high));
        }
    }
}

/// Four runs of 16 values become 16 runs of four, `out_stride` apart.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose_4x16(rows: [&[f32]; 4], out_stride: usize, out: &mut [f32]) {
    for k in 0..16 {
        for (i, row) in rows.iter().enumerate() {
            out[k * out_stride + i] = row[k];
        }
    }
}
