//! A strip of a product: one tile of A and neighbouring panels of B. How it is multiplied is `tile`'s.

use super::left::Left;
use super::shape::{Ahead, LINE, NR};

/// Shares of a group of panels that is fetched ahead, each but the first by one of the last tiles that go
/// over the group before. Shares overlap, since what was fetched first is pushed out again by then.
pub const SHARES: usize = 16;

/// The operands of a strip.
#[derive(Clone, Copy)]
pub struct Strip {
    /// Rows of the tile of A.
    pub rows: usize,
    /// The tile.
    pub left: Left,
    /// Words of k.
    pub words: usize,
    /// The first panel.
    pub panels: *const f32,
    /// Distance between panels.
    pub distance: usize,
    /// Columns of all panels; the last one may be cut short.
    pub columns: usize,
    /// Whether other tiles go over the same panels.
    pub shared: bool,
    /// Whether C had better be written past the caches, as far as this kernel can; [`Strip::settle`] comes
    /// after.
    pub past: bool,
    /// The tile after this one, where that is what will be read next and not another panel: rows of a tile
    /// and words of a packed row.
    pub next: Option<(usize, usize)>,
    /// Which share of the panels after these is fetched to the second-level cache, if any.
    pub share: Option<usize>,
}

impl Strip {
    /// Number of panels.
    pub fn count(&self) -> usize {
        self.columns.div_ceil(NR)
    }

    /// Columns of a panel.
    pub fn columns_of(&self, panel: usize) -> usize {
        NR.min(self.columns - panel * NR)
    }

    /// Panel `panel` from word `word` on.
    pub fn panel(&self, panel: usize, word: usize) -> *const f32 {
        self.panels.wrapping_add(panel * self.distance + word * NR)
    }

    /// Where C goes on after `panel`, if it starts at `c`: at the next panel, or at the tile below.
    pub fn after(&self, panel: usize, c: *mut f32, c_stride: usize) -> *mut f32 {
        match panel + 1 < self.count() {
            true => c.wrapping_add((panel + 1) * NR),
            false => c.wrapping_add(self.rows * c_stride),
        }
    }

    /// Memory to fetch after `words` words from `word` on of a panel: that of the next panel, or a share of
    /// the next tile; then a share of the panels after these.
    pub fn ahead(&self, panel: usize, word: usize, words: usize) -> Ahead {
        let (near, pace) = match self.next {
            None => (self.panel(panel + 1, word), LINE),
            // So many lines are enough: a tile has fewer words than a panel.
            Some((rows, depth)) => {
                (self.left.after(word).share_of_next(rows, depth, words, panel, self.count()), LINE / 4)
            }
        };
        let far = match self.share {
            None => self.panel(panel, word),
            Some(share) => self.panel(self.count() + panel, (share * self.words + word) / SHARES),
        };
        Ahead { near, pace, far }
    }
}
