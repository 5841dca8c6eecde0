//! Rhs operands that are packed once for many matmuls.

use std::ops::Range;

use super::matrix::Matrix;
use super::pack::{pack_panel, pack_panels};
use super::shape::NR;
use crate::Compute;
use crate::buffer::{Buffer, SharedSlice};
use crate::precision::{Kernel, Precision, words};

/// Layout of a K × N operand in panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PackedShape {
    /// Precision of the packed words.
    precision: Precision,
    depth: usize,
    columns: usize,
    /// Number of packed words per column.
    words: usize,
}

impl PackedShape {
    fn new(precision: Precision, depth: usize, columns: usize) -> Self {
        PackedShape { precision, depth, columns, words: words(precision, depth) }
    }

    fn panels(self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Returns the number of words per panel.
    fn panel(self) -> usize {
        NR * self.words
    }

    /// Returns the number of words of the complete operand.
    fn size(self) -> usize {
        self.panels() * self.panel()
    }
}

/// Right operand (rhs) of matmuls, packed in panels and reused by many calls.
pub struct PackedMatrix {
    data: Buffer,
    shape: PackedShape,
}

impl PackedMatrix {
    /// Packs `b` (K × N) on the calling thread.
    pub fn new(compute: &Compute, b: Matrix<'_>) -> Self {
        let kernel = compute.kernel();
        let mut packed = PackedMatrix::zeroed(kernel.precision, b.rows, b.cols);
        let size = packed.shape.panel();
        for (panel, out) in packed.data.chunks_exact_mut(size.max(1)).enumerate() {
            pack_panel(kernel, b, 0, b.rows, panel * NR, out);
        }
        packed
    }

    /// Creates a packed matrix of `depth` (K) × `columns` (N) zeros.
    pub fn zeroed(precision: Precision, depth: usize, columns: usize) -> Self {
        let shape = PackedShape::new(precision, depth, columns);
        PackedMatrix { data: Buffer::zeroed(shape.size()), shape }
    }

    /// Creates several packed matrices of zeros in one piece of memory. Each shape is (K, N).
    pub fn zeroed_together(precision: Precision, shapes: &[(usize, usize)]) -> Vec<Self> {
        let shapes: Vec<PackedShape> =
            shapes.iter().map(|&(k, n)| PackedShape::new(precision, k, n)).collect();
        let sizes: Vec<usize> = shapes.iter().map(|shape| shape.size()).collect();
        Buffer::zeroed_together(&sizes)
            .into_iter()
            .zip(shapes)
            .map(|(data, shape)| PackedMatrix { data, shape })
            .collect()
    }

    /// Packs the operand again, in parallel, from its transpose: its columns one after the other.
    ///
    /// # Panics
    /// Panics if `columns` has another number of values, or `compute` another precision.
    pub fn repack_transposed(&mut self, compute: &Compute, columns: &[f32]) {
        let panels = self.panels();
        assert_eq!(columns.len(), panels.values(), "values of a packed operand");
        compute.pool.run(panels.num_panels(), |panel| {
            // SAFETY: each panel is packed by one task.
            unsafe { panels.pack(compute.kernel(), panel, &columns[panels.rows(panel)]) };
        });
    }

    /// Packs the operand again, in parallel, from `b` (K × N).
    ///
    /// # Panics
    /// Panics if `b` has another shape, or `compute` another precision.
    pub fn repack(&mut self, compute: &Compute, b: Matrix<'_>) {
        let kernel = compute.kernel();
        let shape = self.shape;
        assert_eq!((b.rows, b.cols), (shape.depth, shape.columns), "shape of a packed operand");
        assert_eq!(kernel.precision, shape.precision, "precision of a packed operand");
        let group = b.columns_together(NR);
        let data = SharedSlice::new(&mut self.data);
        compute.pool.run(shape.panels().div_ceil(group), |task| {
            let panels = task * group..shape.panels().min((task + 1) * group);
            // SAFETY: each panel is packed by one task.
            unsafe { pack_panels(kernel, b, panels, 0..shape.depth, &data) };
        });
    }

    /// Returns whether two operands hold the same words.
    #[cfg(test)]
    pub fn has_same_words(&self, other: &PackedMatrix) -> bool {
        self.shape == other.shape
            && self.data.iter().zip(&other.data[..]).all(|(a, b)| a.to_bits() == b.to_bits())
    }

    /// Returns the panels of the matrix, which several tasks can pack in parallel.
    pub fn panels(&mut self) -> Panels<'_> {
        Panels { data: SharedSlice::new(&mut self.data), shape: self.shape }
    }

    /// Returns the precision of the packed words.
    pub fn precision(&self) -> Precision {
        self.shape.precision
    }

    /// Returns K, the number of rows of the unpacked matrix.
    pub fn depth(&self) -> usize {
        self.shape.depth
    }

    /// Returns N, the number of columns of the unpacked matrix.
    pub fn columns(&self) -> usize {
        self.shape.columns
    }

    /// Returns the distance between the starts of two panels, in words.
    pub fn panel_distance(&self) -> usize {
        self.shape.panel()
    }

    /// Returns the panel with index `index`, which has the shape `[words of K][NR]`.
    pub fn panel(&self, index: usize) -> &[f32] {
        let size = self.shape.panel();
        &self.data[index * size..][..size]
    }
}

/// Panels of a [`PackedMatrix`], which can be packed separately.
pub struct Panels<'a> {
    data: SharedSlice<'a>,
    shape: PackedShape,
}

impl Panels<'_> {
    /// Returns the number of panels of the matrix.
    pub fn num_panels(&self) -> usize {
        self.shape.panels()
    }

    /// Returns the number of values in the complete operand, without padding.
    pub fn values(&self) -> usize {
        self.shape.columns * self.shape.depth
    }

    /// Returns the range of values of the operand's transpose from which panel `index` is packed.
    pub fn rows(&self, index: usize) -> Range<usize> {
        let PackedShape { depth, columns, .. } = self.shape;
        index * NR * depth..columns.min((index + 1) * NR) * depth
    }

    /// Packs panel `index` from `values`.
    ///
    /// # Panics
    /// Panics if the kernel has another precision than the operand.
    ///
    /// # Safety
    /// No other thread may use this panel at the same time.
    pub unsafe fn pack(&self, kernel: Kernel, index: usize, values: &[f32]) {
        assert_eq!(kernel.precision, self.shape.precision, "precision of a packed operand");
        let size = self.shape.panel();
        let depth = self.shape.depth;
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.data.slice(index * size, size) };
        let columns = Matrix::new(values, values.len() / depth, depth);
        pack_panel(kernel, columns.transposed(), 0, depth, 0, out);
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::Isa;
    use crate::gemm::{GemmScratch, OutputMode, RhsOperand, gemm};

    /// An operand in bf16 is half as long as in f32: confusing the two would read past its end.
    #[test]
    fn operand_of_other_precision_panics() {
        let both = [Precision::F32, Precision::Bf16];
        let [f32, bf16] = both.map(|precision| Compute::with_isa(1, Isa::detect(), precision));
        let a = [1.0; 3 * 40];
        let b = [1.0; 40 * 50];
        for (own, other) in [(&f32, &bf16), (&bf16, &f32)] {
            let mut packed = PackedMatrix::new(own, Matrix::new(&b, 40, 50));
            let multiply = |packed: &PackedMatrix, compute: &Compute| {
                let a = Matrix::new(&a, 3, 40);
                let mut c = [0.0; 3 * 50];
                let rhs = RhsOperand::Packed(packed);
                gemm(compute, &mut GemmScratch::default(), a, rhs, &mut c, 50, OutputMode::Set);
            };
            multiply(&packed, own);
            assert!(catch_unwind(AssertUnwindSafe(|| multiply(&packed, other))).is_err());
            assert!(
                catch_unwind(AssertUnwindSafe(|| packed.repack_transposed(other, &b))).is_err()
            );
        }
    }
}
