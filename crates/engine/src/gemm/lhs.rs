//! Lhs of a tile: location and layout of its words.

use super::matrix::Matrix;
use super::shape::{HALF, MAX_ROWS, STEP, VECTOR_ROWS};
use crate::precision::{Kernel, Precision, SumOrder};
use crate::simd::Isa;

/// Minimum number of lhs rows for which packing pays although the rows could be read in place.
const MANY_ROWS: usize = 64;

impl Kernel {
    /// Returns the number of rows in a tile, a multiple of the steps in a word.
    pub const fn tile_rows(self) -> usize {
        match self.order() {
            SumOrder::Chained => VECTOR_ROWS,
            SumOrder::Tiled => MAX_ROWS,
        }
    }

    /// Returns the number of rows that `rows` rows of a tile take in a packed lhs, including
    /// padding.
    pub const fn lhs_rows(self, rows: usize) -> usize {
        match self.order() {
            SumOrder::Chained => rows,
            SumOrder::Tiled => rows.next_multiple_of(HALF),
        }
    }

    /// Returns the number of words of a packed lhs with `rows` rows (at most a tile's) and `k`
    /// steps.
    pub const fn lhs_words(self, rows: usize, k: usize) -> usize {
        self.lhs_rows(rows) * self.lhs_depth(self.words(k))
    }

    /// Returns the number of words that `words` words of a row take in a packed lhs, including
    /// split links and padding.
    pub const fn lhs_depth(self, words: usize) -> usize {
        match self.order() {
            SumOrder::Chained => words * self.links_per_word(),
            SumOrder::Tiled => words.next_multiple_of(STEP),
        }
    }

    /// Returns the number of words into which packing splits a word of the lhs: one for each link
    /// of its chain, the first link first. It is 2 in bf16 if no instruction multiplies bf16,
    /// because otherwise a tile would repeat the split for every panel.
    pub const fn links_per_word(self) -> usize {
        match (self.precision, self.isa) {
            (Precision::F32, _) | (_, Isa::Amx | Isa::Avx512Bf16) => 1,
            _ => 2,
        }
    }

    /// Returns whether a tile reads the rows of `a` in place. In f32, rows need no rounding, and
    /// reading twelve rows side by side costs less than packing them. Processors with AMX read one
    /// stream faster than twelve streams, which outweighs the cost of packing if there are many
    /// rows.
    pub fn reads_rows(self, a: Matrix<'_>) -> bool {
        let packs = self.isa == Isa::Amx && a.rows >= MANY_ROWS;
        self.precision == Precision::F32 && a.has_contiguous_rows() && !packs
    }
}

/// Memory location of the left operand (lhs) of a tile. The user of the value must respect the
/// operand's extents.
#[derive(Debug, Clone, Copy)]
pub enum LhsOperand {
    /// The lhs is stored word after word: word k of row i is at `start[k * stride + i]`. If words
    /// are [split into links](Kernel::links_per_word), the second link is `stride / 2` after the
    /// first. With AMX, the layout is that of `amx::pack_lhs`.
    Steps {
        /// Address of the first word of the lhs.
        start: *const f32,
        /// Distance between the starts of two consecutive words k, in words.
        stride: usize,
    },
    /// The lhs is stored row after row: value k of row i is at `start[i * stride + k]`. Used only
    /// in f32.
    Rows {
        /// Address of the first value of the lhs.
        start: *const f32,
        /// Distance between the starts of two rows, in values.
        stride: usize,
    },
}

impl LhsOperand {
    /// Creates an lhs from contiguous rows, as returned by [`Matrix::submatrix`].
    pub fn from_rows((data, stride, _): (&[f32], usize, usize)) -> Self {
        LhsOperand::Rows { start: data.as_ptr(), stride }
    }

    /// Creates the lhs that `pack_tile` wrote to `start` for `rows` rows.
    pub fn from_packed(kernel: Kernel, start: *const f32, rows: usize) -> Self {
        LhsOperand::Steps { start, stride: kernel.lhs_rows(rows) * kernel.links_per_word() }
    }

    /// Returns the rest of the lhs from word `word` on. With AMX, `word` must start a step of an
    /// instruction.
    pub fn skip_words(self, word: usize) -> Self {
        match self {
            LhsOperand::Steps { start, stride } => {
                LhsOperand::Steps { start: start.wrapping_add(word * stride), stride }
            }
            LhsOperand::Rows { start, stride } => {
                LhsOperand::Rows { start: start.wrapping_add(word), stride }
            }
        }
    }

    /// Returns the rest of the lhs from row `row` on.
    pub fn skip_rows(self, row: usize) -> Self {
        match self {
            LhsOperand::Steps { start, stride } => {
                LhsOperand::Steps { start: start.wrapping_add(row), stride }
            }
            LhsOperand::Rows { start, stride } => {
                LhsOperand::Rows { start: start.wrapping_add(row * stride), stride }
            }
        }
    }

    /// Divides the first `words` words of the next tile into `parts` equal parts and returns the
    /// address of part `i`. Tiles have `rows` rows; packed tiles are `depth` words deep.
    pub fn next_tile_part(
        self,
        rows: usize,
        depth: usize,
        words: usize,
        i: usize,
        parts: usize,
    ) -> *const f32 {
        match self {
            LhsOperand::Steps { start, .. } => {
                start.wrapping_add(rows * (depth + words * i / parts))
            }
            LhsOperand::Rows { start, stride } => {
                start.wrapping_add((rows + rows * i / parts) * stride)
            }
        }
    }
}

/// Iterator over the steps of an lhs. It holds one pointer for every four rows, so that few
/// registers hold the positions of twelve rows.
#[derive(Clone, Copy)]
pub(super) struct LhsSteps<const IN_ROWS: bool> {
    starts: [*const f32; VECTOR_ROWS / 4],
    stride: usize,
}

impl<const IN_ROWS: bool> LhsSteps<IN_ROWS> {
    #[inline(always)]
    pub fn new(start: *const f32, stride: usize) -> Self {
        LhsSteps { starts: std::array::from_fn(|i| start.wrapping_add(4 * i * stride)), stride }
    }

    /// Returns the word of row `i` at this step.
    ///
    /// # Safety
    /// The lhs must have this word.
    #[inline(always)]
    pub unsafe fn word(&self, i: usize) -> f32 {
        let at = if IN_ROWS {
            self.starts[i / 4].wrapping_add(i % 4 * self.stride)
        } else {
            self.starts[0].wrapping_add(i)
        };
        // SAFETY: guaranteed by the caller.
        unsafe { *at }
    }

    /// Advances the pointers to the next step of the lhs.
    #[inline(always)]
    pub fn step(&mut self) {
        let step = if IN_ROWS { 1 } else { self.stride };
        self.starts = self.starts.map(|start| start.wrapping_add(step));
    }
}
