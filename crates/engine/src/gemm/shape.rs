//! Shapes of tiles, their rhs, and the start of their chains.

/// Number of rows in a tile in vector registers: 12 × 32 accumulators fill 24 of the 32 AVX-512
/// registers.
pub(super) const VECTOR_ROWS: usize = 12;
/// Number of rows in the largest tile.
pub const MAX_ROWS: usize = 32;
/// Number of columns in a tile, and width of a panel: two AVX-512 registers, or four AVX2
/// registers.
pub const NR: usize = 32;
/// Number of rows in an AMX register.
pub(super) const HALF: usize = 16;
/// Number of words of k that one AMX instruction processes.
pub(crate) const STEP: usize = 16;

/// Number of values in a cache line.
pub(super) const LINE: usize = 16;

/// Right operand (rhs) of a tile: `depth` rows of [`NR`] words, `stride` apart, in one piece or in
/// blocks of `block` rows at arbitrary addresses.
#[derive(Clone, Copy)]
pub struct RhsRows<'a> {
    /// Address of the first word of each block.
    pub blocks: &'a [*const f32],
    /// Number of rows in a block; the last block can have fewer.
    pub block: usize,
    /// Total number of rows of the rhs, in all blocks.
    pub depth: usize,
    /// Distance between two rows of a block, in words.
    pub stride: usize,
    /// Memory that is read after this rhs, to prefetch.
    pub ahead: PrefetchTarget,
}

/// Memory that will be read later. Tiles that have time prefetch it; any address is allowed.
#[derive(Clone, Copy)]
pub struct PrefetchTarget {
    /// Next address to prefetch into the first-level cache.
    pub near: *const f32,
    /// Number of values to advance `near` per step.
    pub pace: usize,
    /// Address of a later read, to prefetch into the second-level cache.
    pub far: *const f32,
}

impl<'a> RhsRows<'a> {
    /// Creates an rhs that is in the caches, so that there is nothing to prefetch.
    pub fn cached(blocks: &'a [*const f32], block: usize, depth: usize, stride: usize) -> Self {
        RhsRows {
            blocks,
            block,
            depth,
            stride,
            ahead: PrefetchTarget { near: blocks[0], pace: 0, far: blocks[0] },
        }
    }

    /// Returns the start address and the number of rows of each block.
    #[inline(always)]
    pub(super) fn iter_blocks(&self) -> impl Iterator<Item = (*const f32, usize)> + 'a {
        let block = self.block;
        let depth = self.depth;
        self.blocks.iter().enumerate().map(move |(i, start)| (*start, block.min(depth - i * block)))
    }
}

/// Initial value of a tile's chain of multiply-adds, and treatment of the sum: overwrites C or is
/// added to C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainStart {
    /// The sum starts at 0, and C is overwritten.
    Set,
    /// The sum starts at 0 and is added to C. It does not start at C, because C can be large and
    /// every link would round at its magnitude.
    Add,
    /// The sum continues from the value that another tile left in C.
    Resume,
}

impl ChainStart {
    /// Returns a chain that starts at 0, and whose sum is added to C if `add` is true.
    pub const fn new(add: bool) -> Self {
        if add { ChainStart::Add } else { ChainStart::Set }
    }
}
