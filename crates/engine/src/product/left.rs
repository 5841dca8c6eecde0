//! The left operand of a tile: where its words lie.

use super::matrix::Matrix;
use super::shape::{HALF, MAX_ROWS, STEP, VECTOR_ROWS};
use crate::precision::{Kernel, Order, Precision};
use crate::simd::Isa;

/// Rows that are worth packing although they could be read where they lie.
const MANY_ROWS: usize = 64;

impl Kernel {
    /// Rows of a tile, a multiple of the steps of a word.
    pub const fn tile_rows(self) -> usize {
        match self.order() {
            Order::Chained => VECTOR_ROWS,
            Order::Tiled => MAX_ROWS,
        }
    }

    /// Rows that `rows` rows of a tile take when packed as a left operand.
    pub const fn left_rows(self, rows: usize) -> usize {
        match self.order() {
            Order::Chained => rows,
            Order::Tiled => rows.next_multiple_of(HALF),
        }
    }

    /// Words that a left operand of `rows` rows, at most a tile's, and `k` steps takes when packed.
    pub const fn left_words(self, rows: usize, k: usize) -> usize {
        self.left_rows(rows) * self.left_depth(self.words(k))
    }

    /// Words that `words` words of a row take there.
    pub const fn left_depth(self, words: usize) -> usize {
        match self.order() {
            Order::Chained => words * self.links(),
            Order::Tiled => words.next_multiple_of(STEP),
        }
    }

    /// Into how many words a word of a left operand is taken apart as it is packed, one for each link of the
    /// chain it stands for and the first link first: two in bf16 where no instruction multiplies bf16, since
    /// a tile would do it again for every panel.
    pub const fn links(self) -> usize {
        match (self.precision, self.isa) {
            (Precision::F32, _) | (_, Isa::Amx | Isa::Avx512Bf16) => 1,
            _ => 2,
        }
    }

    /// Whether a tile reads the rows of `a` where they lie: in f32 they need no rounding, and to read twelve
    /// of them side by side costs less than to pack them. Processors with AMX are faster with one run than
    /// with twelve, which makes up for packing where rows are many.
    pub fn reads_rows(self, a: Matrix<'_>) -> bool {
        let packs = self.isa == Isa::Amx && a.rows >= MANY_ROWS;
        self.precision == Precision::F32 && a.has_rows() && !packs
    }
}

/// Where a tile finds its left operand. The extents are its user's to keep.
#[derive(Debug, Clone, Copy)]
pub enum Left {
    /// Word after word: word k of row i at `start[k * stride + i]`. Where words are [taken
    /// apart](Kernel::links), the second link `stride / 2` after the first. With AMX, as `amx::pack_left`
    /// leaves it.
    Steps {
        /// The first word.
        start: *const f32,
        /// Distance between words.
        stride: usize,
    },
    /// Row after row: value k of row i at `start[i * stride + k]`, in f32 alone.
    Rows {
        /// The first value.
        start: *const f32,
        /// Distance between rows.
        stride: usize,
    },
}

impl Left {
    /// Contiguous rows, as [`Matrix::part`] gives them.
    pub fn rows((data, stride, _): (&[f32], usize, usize)) -> Self {
        Left::Rows { start: data.as_ptr(), stride }
    }

    /// Left operand that `pack_tile` left at `start` for `rows` rows.
    pub fn packed(kernel: Kernel, start: *const f32, rows: usize) -> Self {
        Left::Steps { start, stride: kernel.left_rows(rows) * kernel.links() }
    }

    /// Rest of it from word `word` on; with AMX `word` begins an instruction's.
    pub fn after(self, word: usize) -> Self {
        match self {
            Left::Steps { start, stride } => Left::Steps { start: start.wrapping_add(word * stride), stride },
            Left::Rows { start, stride } => Left::Rows { start: start.wrapping_add(word), stride },
        }
    }

    /// Rest of it from row `row` on.
    pub fn below(self, row: usize) -> Self {
        match self {
            Left::Steps { start, stride } => Left::Steps { start: start.wrapping_add(row), stride },
            Left::Rows { start, stride } => Left::Rows { start: start.wrapping_add(row * stride), stride },
        }
    }

    /// Where share `i` of `shares` begins of the `words` words that the tile after this one has where these
    /// are; tiles are `rows` high, packed ones `depth` words deep.
    pub fn share_of_next(
        self,
        rows: usize,
        depth: usize,
        words: usize,
        i: usize,
        shares: usize,
    ) -> *const f32 {
        match self {
            Left::Steps { start, .. } => start.wrapping_add(rows * (depth + words * i / shares)),
            Left::Rows { start, stride } => start.wrapping_add((rows + rows * i / shares) * stride),
        }
    }
}

/// Goes over a left operand step by step, four rows to a pointer: so few registers hold where twelve rows
/// are.
#[derive(Clone, Copy)]
pub(super) struct Walk<const IN_ROWS: bool> {
    starts: [*const f32; VECTOR_ROWS / 4],
    stride: usize,
}

impl<const IN_ROWS: bool> Walk<IN_ROWS> {
    #[inline(always)]
    pub fn new(start: *const f32, stride: usize) -> Self {
        Walk { starts: std::array::from_fn(|i| start.wrapping_add(4 * i * stride)), stride }
    }

    /// The word of row `i` at this step.
    ///
    /// # Safety
    /// The operand must have it.
    #[inline(always)]
    pub unsafe fn word(&self, i: usize) -> f32 {
        let at = match IN_ROWS {
            true => self.starts[i / 4].wrapping_add(i % 4 * self.stride),
            false => self.starts[0].wrapping_add(i),
        };
        // SAFETY: the caller vouches for it.
        unsafe { *at }
    }

    /// Goes on to the next step.
    #[inline(always)]
    pub fn step(&mut self) {
        let step = if IN_ROWS { 1 } else { self.stride };
        self.starts = self.starts.map(|start| start.wrapping_add(step));
    }
}
