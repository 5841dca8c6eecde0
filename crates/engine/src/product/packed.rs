//! Right operands that are packed once, for many products.

use std::ops::Range;

use super::pack::{Matrix, pack_panel};
use super::tile::NR;
use crate::Compute;
use crate::buffer::{Buffer, Shared};
use crate::precision::{Kernel, Precision, words};

/// A right operand in panels, ready for many products.
pub struct Packed {
    data: Buffer,
    depth: usize,
    words: usize,
    columns: usize,
}

impl Packed {
    /// Packs `b` (K × N) on the calling thread.
    pub fn new(kernel: Kernel, b: Matrix<'_>) -> Self {
        let mut packed = Packed::empty(kernel.precision, b.rows, b.cols);
        let size = NR * packed.words;
        for (panel, out) in packed.data.chunks_exact_mut(size.max(1)).enumerate() {
            pack_panel(kernel, b, 0, b.rows, panel * NR, out);
        }
        packed
    }

    /// Room for a K × N operand, all zero.
    pub fn empty(precision: Precision, depth: usize, columns: usize) -> Self {
        Packed::within(Buffer::zeroed(Packed::size(precision, depth, columns)), precision, depth, columns)
    }

    /// Room for several operands, each given as (K, N), in one piece of memory.
    pub fn together(precision: Precision, shapes: &[(usize, usize)]) -> Vec<Self> {
        let sizes: Vec<usize> = shapes.iter().map(|&(k, n)| Packed::size(precision, k, n)).collect();
        let within = |(data, &(k, n))| Packed::within(data, precision, k, n);
        Buffer::together(&sizes).into_iter().zip(shapes).map(within).collect()
    }

    fn within(data: Buffer, precision: Precision, depth: usize, columns: usize) -> Self {
        Packed { data, depth, words: words(precision, depth), columns }
    }

    /// Words that a K × N operand takes.
    fn size(precision: Precision, depth: usize, columns: usize) -> usize {
        columns.div_ceil(NR) * NR * words(precision, depth)
    }

    /// Packs the operand again, in parallel, from its transpose: its columns one after the other.
    ///
    /// # Panics
    /// When its shape is another.
    pub fn refresh(&mut self, compute: &Compute, columns: &[f32]) {
        let panels = self.panels();
        assert_eq!(columns.len(), panels.values(), "values of a packed operand");
        compute.pool.run(panels.count(), |panel| {
            // SAFETY: each panel is packed by one task.
            unsafe { panels.pack(compute.kernel(), panel, &columns[panels.rows(panel)]) };
        });
    }

    /// The panels, to be packed by several tasks.
    pub fn panels(&mut self) -> Panels<'_> {
        let Packed { depth, words, columns, .. } = *self;
        Panels { data: Shared::new(&mut self.data), depth, words, columns }
    }

    /// K.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// N.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Values between the starts of two panels.
    pub fn distance(&self) -> usize {
        NR * self.words
    }

    /// Panel `index`, `[words of K][NR]`.
    pub fn panel(&self, index: usize) -> &[f32] {
        &self.data[index * NR * self.words..][..NR * self.words]
    }
}

/// The panels of a [`Packed`], each packed by itself.
pub struct Panels<'a> {
    data: Shared<'a>,
    depth: usize,
    words: usize,
    columns: usize,
}

impl Panels<'_> {
    /// Their number.
    pub fn count(&self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Values of the whole operand.
    pub fn values(&self) -> usize {
        self.columns * self.depth
    }

    /// Which values of the operand's transpose panel `index` is packed from.
    pub fn rows(&self, index: usize) -> Range<usize> {
        index * NR * self.depth..self.columns.min((index + 1) * NR) * self.depth
    }

    /// Packs panel `index` from these values.
    ///
    /// # Safety
    /// Nobody else may use this panel meanwhile.
    pub unsafe fn pack(&self, kernel: Kernel, index: usize, values: &[f32]) {
        let size = NR * self.words;
        // SAFETY: the caller's promise.
        let out = unsafe { self.data.slice(index * size, size) };
        let columns = Matrix::new(values, values.len() / self.depth, self.depth);
        pack_panel(kernel, columns.transposed(), 0, self.depth, 0, out);
    }
}
