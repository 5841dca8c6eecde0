//! Views of matrices.

use std::ops::Range;

/// Values of a row that are read together where they are contiguous: 12 cache lines.
const TOGETHER: usize = 192;
/// A view of a matrix with strides.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub(super) data: &'a [f32],
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
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

    /// How many pieces of `width` columns are best read together: several where rows are contiguous, and each
    /// piece would take but a part of what the memory has open.
    pub fn columns_together(&self, width: usize) -> usize {
        if self.col_stride == 1 && self.cols > width { (TOGETHER / width).max(1) } else { 1 }
    }

    /// Whether rows are contiguous.
    pub fn has_rows(&self) -> bool {
        self.col_stride == 1
    }

    /// The values from the first of `rows` and `columns` on, and the distances between rows and between
    /// columns.
    ///
    /// # Panics
    /// When the matrix ends before these do.
    pub fn part(self, rows: Range<usize>, columns: Range<usize>) -> (&'a [f32], usize, usize) {
        assert!(
            rows.end <= self.rows && columns.end <= self.cols,
            "part of a {} x {} matrix",
            self.rows,
            self.cols
        );
        let first = rows.start * self.row_stride + columns.start * self.col_stride;
        (&self.data[first..], self.row_stride, self.col_stride)
    }

    /// One element.
    pub fn at(&self, row: usize, col: usize) -> f32 {
        self.data[row * self.row_stride + col * self.col_stride]
    }
}
