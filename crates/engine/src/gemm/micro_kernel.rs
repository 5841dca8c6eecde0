//! A strip of a matmul: one tile of A and neighboring panels of B. `tile` has the code that
//! multiplies it.

use super::lhs::LhsOperand;
use super::shape::{LINE, NR, PrefetchTarget};

/// Number of parts in which a group of panels is prefetched. Each part except the first is fetched
/// by one of the last tiles that process the group before. Parts overlap, because what was fetched
/// first has been evicted by then.
pub const PREFETCH_PARTS: usize = 16;

/// Arguments of a micro-kernel call, which multiplies one tile of A by several panels of B.
#[derive(Clone, Copy)]
pub struct MicroKernelArgs {
    /// Number of rows in the tile of the left operand A.
    pub rows: usize,
    /// Location of the tile of the left operand A.
    pub lhs: LhsOperand,
    /// Number of words of the inner dimension k.
    pub words: usize,
    /// Address of the first panel of the right operand B.
    pub panels: *const f32,
    /// Distance between the starts of two panels of B, in words.
    pub distance: usize,
    /// Number of columns in all panels; the last panel can be narrower.
    pub columns: usize,
    /// Whether other tiles of A process the same panels of B.
    pub shared: bool,
    /// Whether C should be written past the caches, if this kernel can. A store fence
    /// must follow.
    pub non_temporal: bool,
    /// Number of rows of the next tile, and number of words of a packed row, if the next tile is
    /// read after this one; `None` if another panel is read instead.
    pub next: Option<(usize, usize)>,
    /// Index of the part of the following panels that is prefetched into the second-level cache, if
    /// any.
    pub prefetch_part: Option<usize>,
}

impl MicroKernelArgs {
    /// Returns the number of panels of B.
    pub fn num_panels(&self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Returns the number of columns in panel `panel`.
    pub fn panel_columns(&self, panel: usize) -> usize {
        NR.min(self.columns - panel * NR)
    }

    /// Returns the address of panel `panel` from word `word` on.
    pub fn panel(&self, panel: usize, word: usize) -> *const f32 {
        self.panels.wrapping_add(panel * self.distance + word * NR)
    }

    /// Returns where C continues after `panel`, if it starts at `c`: at the next panel, or at the
    /// tile below.
    pub fn next_output(&self, panel: usize, c: *mut f32, c_stride: usize) -> *mut f32 {
        if panel + 1 < self.num_panels() {
            c.wrapping_add((panel + 1) * NR)
        } else {
            c.wrapping_add(self.rows * c_stride)
        }
    }

    /// Returns the memory to prefetch during `words` words from `word` on of a panel: the next
    /// panel, or a part of the next tile; then a part of the following panels.
    pub fn prefetch_target(&self, panel: usize, word: usize, words: usize) -> PrefetchTarget {
        let (near, pace) = match self.next {
            None => (self.panel(panel + 1, word), LINE),
            // A quarter of the lines is enough: a tile has fewer words than a panel.
            Some((rows, depth)) => (
                self.lhs.skip_words(word).next_tile_part(
                    rows,
                    depth,
                    words,
                    panel,
                    self.num_panels(),
                ),
                LINE / 4,
            ),
        };
        let far = match self.prefetch_part {
            None => self.panel(panel, word),
            Some(part) => {
                self.panel(self.num_panels() + panel, (part * self.words + word) / PREFETCH_PARTS)
            }
        };
        PrefetchTarget { near, pace, far }
    }
}
