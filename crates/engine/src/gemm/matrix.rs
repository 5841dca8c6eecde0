//! Views of matrices in memory.

use std::ops::Range;

/// Number of values of a contiguous row that are read together: 12 cache lines.
const TOGETHER: usize = 192;
/// View of a matrix of f32 with strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub(super) data: &'a [f32],
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Number of columns of the matrix.
    pub cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view of a row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// Creates a view of a row-major matrix whose rows start `stride` values apart.
    ///
    /// # Panics
    /// Panics if `data` is too short.
    pub fn with_stride(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        let needed = if rows == 0 { 0 } else { (rows - 1) * stride + cols };
        assert!(
            needed <= data.len() && cols <= stride.max(1),
            "{} values are no {rows} x {cols} matrix",
            data.len()
        );
        Matrix { data, rows, cols, row_stride: stride, col_stride: 1 }
    }

    /// Returns a view of the transposed matrix.
    pub fn transposed(self) -> Self {
        Matrix {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Returns how many pieces of `width` columns should be read together: several if rows are
    /// contiguous, because each piece alone would use only part of an open DRAM row.
    pub fn columns_together(&self, width: usize) -> usize {
        if self.col_stride == 1 && self.cols > width { (TOGETHER / width).max(1) } else { 1 }
    }

    /// Returns whether the values of a row are contiguous in memory.
    pub fn has_contiguous_rows(&self) -> bool {
        self.col_stride == 1
    }

    /// Returns the matrix's values from the first row of `rows` and the first column of `columns`
    /// on, with the distances between rows and between columns.
    ///
    /// # Panics
    /// Panics if the matrix ends before `rows` or `columns` do.
    pub fn submatrix(self, rows: Range<usize>, columns: Range<usize>) -> (&'a [f32], usize, usize) {
        assert!(
            rows.end <= self.rows && columns.end <= self.cols,
            "part of a {} x {} matrix",
            self.rows,
            self.cols
        );
        let first = rows.start * self.row_stride + columns.start * self.col_stride;
        (&self.data[first..], self.row_stride, self.col_stride)
    }

    /// Returns the element in row `row` and column `col`.
    pub fn element(&self, row: usize, col: usize) -> f32 {
        self.data[row * self.row_stride + col * self.col_stride]
    }
}
