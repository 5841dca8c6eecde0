//! Right operands that are packed once, for many products.

use std::ops::Range;

use super::matrix::Matrix;
use super::pack::{pack_panel, pack_panels};
use super::shape::NR;
use crate::Compute;
use crate::buffer::{Buffer, Shared};
use crate::precision::{Kernel, Precision, words};

/// How a K × N operand lies in panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Precision of the words.
    precision: Precision,
    depth: usize,
    columns: usize,
    /// Words that a column takes.
    words: usize,
}

impl Shape {
    fn new(precision: Precision, depth: usize, columns: usize) -> Self {
        Shape { precision, depth, columns, words: words(precision, depth) }
    }

    fn panels(self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Words of a panel.
    fn panel(self) -> usize {
        NR * self.words
    }

    /// Words of the whole operand.
    fn size(self) -> usize {
        self.panels() * self.panel()
    }
}

/// A right operand in panels, ready for many products.
pub struct Packed {
    data: Buffer,
    shape: Shape,
}

impl Packed {
    /// Packs `b` (K × N) on the calling thread.
    pub fn new(compute: &Compute, b: Matrix<'_>) -> Self {
        let kernel = compute.kernel();
        let mut packed = Packed::empty(kernel.precision, b.rows, b.cols);
        let size = packed.shape.panel();
        for (panel, out) in packed.data.chunks_exact_mut(size.max(1)).enumerate() {
            pack_panel(kernel, b, 0, b.rows, panel * NR, out);
        }
        packed
    }

    /// Room for a K × N operand, all zero.
    pub fn empty(precision: Precision, depth: usize, columns: usize) -> Self {
        let shape = Shape::new(precision, depth, columns);
        Packed { data: Buffer::zeroed(shape.size()), shape }
    }

    /// Room for several operands, each given as (K, N), in one piece of memory.
    pub fn together(precision: Precision, shapes: &[(usize, usize)]) -> Vec<Self> {
        let shapes: Vec<Shape> = shapes.iter().map(|&(k, n)| Shape::new(precision, k, n)).collect();
        let sizes: Vec<usize> = shapes.iter().map(|shape| shape.size()).collect();
        Buffer::together(&sizes).into_iter().zip(shapes).map(|(data, shape)| Packed { data, shape }).collect()
    }

    /// Packs the operand again, in parallel, from its transpose: its columns one after the other.
    ///
    /// # Panics
    /// When its shape or precision is another.
    pub fn refresh(&mut self, compute: &Compute, columns: &[f32]) {
        let panels = self.panels();
        assert_eq!(columns.len(), panels.values(), "values of a packed operand");
        compute.pool.run(panels.count(), |panel| {
            // SAFETY: each panel is packed by one task.
            unsafe { panels.pack(compute.kernel(), panel, &columns[panels.rows(panel)]) };
        });
    }

    /// Packs the operand again, in parallel, from `b` (K × N).
    ///
    /// # Panics
    /// When its shape or precision is another.
    pub fn replace(&mut self, compute: &Compute, b: Matrix<'_>) {
        let (kernel, shape) = (compute.kernel(), self.shape);
        assert_eq!((b.rows, b.cols), (shape.depth, shape.columns), "shape of a packed operand");
        assert_eq!(kernel.precision, shape.precision, "precision of a packed operand");
        let (group, data) = (b.columns_together(NR), Shared::new(&mut self.data));
        compute.pool.run(shape.panels().div_ceil(group), |task| {
            let panels = task * group..shape.panels().min((task + 1) * group);
            // SAFETY: each panel is packed by one task.
            unsafe { pack_panels(kernel, b, panels, 0..shape.depth, &data) };
        });
    }

    /// Whether two operands hold the same words.
    #[cfg(test)]
    pub fn same(&self, other: &Packed) -> bool {
        self.shape == other.shape
            && self.data.iter().zip(&other.data[..]).all(|(a, b)| a.to_bits() == b.to_bits())
    }

    /// The panels, to be packed by several tasks.
    pub fn panels(&mut self) -> Panels<'_> {
        Panels { data: Shared::new(&mut self.data), shape: self.shape }
    }

    /// Precision of the words.
    pub fn precision(&self) -> Precision {
        self.shape.precision
    }

    /// K.
    pub fn depth(&self) -> usize {
        self.shape.depth
    }

    /// N.
    pub fn columns(&self) -> usize {
        self.shape.columns
    }

    /// Values between the starts of two panels.
    pub fn distance(&self) -> usize {
        self.shape.panel()
    }

    /// Panel `index`, `[words of K][NR]`.
    pub fn panel(&self, index: usize) -> &[f32] {
        let size = self.shape.panel();
        &self.data[index * size..][..size]
    }
}

/// The panels of a [`Packed`], each packed by itself.
pub struct Panels<'a> {
    data: Shared<'a>,
    shape: Shape,
}

impl Panels<'_> {
    /// Their number.
    pub fn count(&self) -> usize {
        self.shape.panels()
    }

    /// Values of the whole operand.
    pub fn values(&self) -> usize {
        self.shape.columns * self.shape.depth
    }

    /// Which values of the operand's transpose panel `index` is packed from.
    pub fn rows(&self, index: usize) -> Range<usize> {
        let Shape { depth, columns, .. } = self.shape;
        index * NR * depth..columns.min((index + 1) * NR) * depth
    }

    /// Packs panel `index` from these values.
    ///
    /// # Panics
    /// When the kernel's precision is another than the operand's.
    ///
    /// # Safety
    /// Nobody else may use this panel meanwhile.
    pub unsafe fn pack(&self, kernel: Kernel, index: usize, values: &[f32]) {
        assert_eq!(kernel.precision, self.shape.precision, "precision of a packed operand");
        let (size, depth) = (self.shape.panel(), self.shape.depth);
        // SAFETY: the caller's promise.
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
    use crate::product::{Mode, Right, Scratch, product};

    /// An operand in bf16 is half as long as one in f32: to take one for the other would be to read past its
    /// end.
    #[test]
    fn an_operand_of_another_precision_is_refused() {
        let both = [Precision::F32, Precision::Bf16];
        let [f32, bf16] = both.map(|precision| Compute::with(1, Isa::detect(), precision));
        let (a, b) = ([1.0; 3 * 40], [1.0; 40 * 50]);
        for (own, other) in [(&f32, &bf16), (&bf16, &f32)] {
            let mut packed = Packed::new(own, Matrix::new(&b, 40, 50));
            let multiply = |packed: &Packed, compute: &Compute| {
                let (a, mut c) = (Matrix::new(&a, 3, 40), [0.0; 3 * 50]);
                let right = Right::Packed(packed);
                product(compute, &mut Scratch::default(), a, right, &mut c, 50, Mode::Set);
            };
            multiply(&packed, own);
            assert!(catch_unwind(AssertUnwindSafe(|| multiply(&packed, other))).is_err());
            assert!(catch_unwind(AssertUnwindSafe(|| packed.refresh(other, &b))).is_err());
        }
    }
}
