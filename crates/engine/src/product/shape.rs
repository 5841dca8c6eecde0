//! Shapes of tiles, their right operand, and where their chains begin.

/// Rows of a tile in vector registers: 12 × 32 accumulators fill 24 of the 32 AVX-512 registers.
pub(super) const VECTOR_ROWS: usize = 12;
/// Rows of the largest tile.
pub const MAX_ROWS: usize = 32;
/// Columns of a tile and width of a panel: two AVX-512 registers, four AVX2 ones.
pub const NR: usize = 32;
/// Rows that a matrix register of AMX holds.
pub(super) const HALF: usize = 16;
/// Words of k that an instruction of AMX goes over.
pub(crate) const STEP: usize = 16;

/// Values of a cache line.
pub(super) const LINE: usize = 16;

/// The right operand of a tile: `depth` rows of [`NR`] words, `stride` apart, in one piece or in blocks of
/// `block` rows that lie anywhere.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Where each block starts.
    pub blocks: &'a [*const f32],
    /// Rows of a block; the last one may have fewer.
    pub block: usize,
    /// Rows in all.
    pub depth: usize,
    /// Distance between rows of a block.
    pub stride: usize,
    /// Memory that is read after this.
    pub ahead: Ahead,
}

/// Memory that will be read later, to be fetched meanwhile by tiles that have time for it; any address will
/// do.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// Next address, to the first-level cache.
    pub near: *const f32,
    /// Values of it for every step.
    pub pace: usize,
    /// Address of long after, to the second-level cache.
    pub far: *const f32,
}

impl<'a> Rows<'a> {
    /// Blocks after which nothing comes from afar.
    pub fn at_hand(blocks: &'a [*const f32], block: usize, depth: usize, stride: usize) -> Self {
        Rows { blocks, block, depth, stride, ahead: Ahead { near: blocks[0], pace: 0, far: blocks[0] } }
    }

    /// Start and number of rows of each block.
    #[inline(always)]
    pub(super) fn pieces(&self) -> impl Iterator<Item = (*const f32, usize)> + 'a {
        let (block, depth) = (self.block, self.depth);
        self.blocks.iter().enumerate().map(move |(i, start)| (*start, block.min(depth - i * block)))
    }
}

/// Where the chain of a tile begins and what becomes of its sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chain {
    /// The sum begins at 0, and C is overwritten.
    Set,
    /// The sum begins at 0 and is added to what C held: C can be large, and every link would round at its
    /// size.
    Add,
    /// The sum goes on from where another tile left it in C.
    Resume,
}

impl Chain {
    /// A chain from 0.
    pub const fn new(add: bool) -> Self {
        if add { Chain::Add } else { Chain::Set }
    }
}
