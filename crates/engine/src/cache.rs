//! The cache of keys and values: blocks shared by the sequences that need the same prefix.
//!
//! A sequence holds the blocks of its path. A new one takes over, by reference, the whole blocks of the
//! longest prefix that is in the tree (`radix`), and copies at most one block, the one the paths part in.
//! Prompts enter the tree when they are computed, replies when they are done; what is in it stays until its
//! blocks are needed: the next turn of the same attempt, and the other attempts at the same task, start from
//! there.

use crate::ops::kv::{BLOCK, Blocks, Shape};
use crate::precision::Precision;
use crate::radix::{Prefix, Radix};

/// Blocks, and who uses them.
pub struct Cache {
    /// The memory.
    pub blocks: Blocks,
    limit: usize,
    /// References of running sequences and of the tree.
    running: Vec<u32>,
    kept: Vec<u32>,
    free: Vec<u32>,
    in_use: usize,
    tree: Radix,
}

impl Cache {
    /// A cache of at most `bytes` for a model with `layers` layers of `shape`; at least one block.
    pub fn new(shape: Shape, layers: usize, precision: Precision, bytes: usize) -> Self {
        let blocks = Blocks::new(shape, layers, precision);
        Cache {
            limit: (bytes / (blocks.block_words() * size_of::<f32>())).max(1),
            blocks,
            running: Vec::new(),
            kept: Vec::new(),
            free: Vec::new(),
            in_use: 0,
            tree: Radix::default(),
        }
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.limit * BLOCK
    }

    /// Blocks that running sequences do not use. All of them can be had: whatever the tree holds can be
    /// dropped.
    pub fn available(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }

    /// Shares of the capacity that running sequences use, and that hold anything at all.
    pub fn occupancy(&self) -> [f64; 2] {
        let held = self.blocks.len() - self.free.len();
        [self.in_use, held].map(|blocks| blocks as f64 / self.limit as f64)
    }

    /// How many of `blocks` no running sequence uses yet.
    pub fn unused_among(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|b| self.running[**b as usize] == 0).count()
    }

    /// The longest prefix of `tokens`, of at most `most` tokens, that was computed by `policy`.
    pub fn longest(&mut self, policy: u32, tokens: &[u32], most: usize) -> Prefix {
        self.tree.longest(policy, tokens, most)
    }

    /// Makes a running sequence that starts from `prefix`: its blocks, of which the last is a copy where the
    /// prefix ends inside it. The caller has made sure that enough blocks are available.
    pub fn fork(&mut self, prefix: &Prefix) -> Vec<u32> {
        let whole = prefix.len / BLOCK;
        let mut blocks = prefix.blocks[..whole].to_vec();
        blocks.iter().for_each(|b| self.hold(*b));
        if !prefix.len.is_multiple_of(BLOCK) {
            // Held while a block is found for the copy, lest it be evicted for it.
            let from = prefix.blocks[whole];
            self.hold(from);
            let to = self.take();
            self.blocks.copy(from, to);
            self.release(&[from]);
            blocks.push(to);
        }
        blocks
    }

    /// A block for a running sequence. The caller has made sure that one is available.
    ///
    /// # Panics
    /// When none is: a sequence was let in without room for it.
    pub fn take(&mut self) -> u32 {
        while self.free.is_empty() && self.blocks.len() >= self.limit && self.evict() {}
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.blocks.len();
                assert!(block < self.limit, "running sequences use all {} blocks of the cache", self.limit);
                self.blocks.grow(block + 1);
                self.running.push(0);
                self.kept.push(0);
                block as u32
            }
        };
        self.hold(block);
        block
    }

    /// Lets others start from what a running sequence of `policy` has computed: `tokens`, in `blocks`.
    pub fn keep(&mut self, policy: u32, tokens: &[u32], blocks: &[u32]) {
        let kept = &mut self.kept;
        self.tree.insert(policy, tokens, blocks, |block| kept[block as usize] += 1);
    }

    /// Ends a running sequence's use of `blocks`.
    pub fn release(&mut self, blocks: &[u32]) {
        for &block in blocks {
            let count = &mut self.running[block as usize];
            *count -= 1;
            if *count == 0 {
                self.in_use -= 1;
                if self.kept[block as usize] == 0 {
                    self.free.push(block);
                }
            }
        }
    }

    /// Forgets everything that `policy` has computed: its weights have changed.
    pub fn forget(&mut self, policy: u32) {
        let Cache { tree, kept, running, free, .. } = self;
        tree.forget(policy, |block| drop_one(kept, running, free, block));
    }

    fn hold(&mut self, block: u32) {
        let count = &mut self.running[block as usize];
        self.in_use += usize::from(*count == 0);
        *count += 1;
    }

    /// Drops what was used longest ago; false when there is nothing left to drop.
    fn evict(&mut self) -> bool {
        let Cache { tree, kept, running, free, .. } = self;
        let dropped = tree.evict(|blocks| blocks.iter().any(|block| running[*block as usize] == 0));
        // A block that a running sequence has copied can lie above a leaf that it uses all of.
        let dropped = dropped.or_else(|| tree.evict(|_| true));
        let found = dropped.is_some();
        dropped.into_iter().flatten().for_each(|block| drop_one(kept, running, free, block));
        found
    }
}

/// The tree holds `block` once less.
fn drop_one(kept: &mut [u32], running: &[u32], free: &mut Vec<u32>, block: u32) {
    let at = block as usize;
    kept[at] -= 1;
    if kept[at] == 0 && running[at] == 0 {
        free.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(blocks: usize) -> Cache {
        let shape = Shape { heads: 1, kv_heads: 1, head_dim: 4 };
        Cache::new(shape, 1, Precision::F32, blocks * shape.block(Precision::F32) * 4)
    }

    fn sequence(cache: &mut Cache, len: usize) -> Vec<u32> {
        (0..len.div_ceil(BLOCK)).map(|_| cache.take()).collect()
    }

    /// A sequence that ran and is done.
    fn finished(cache: &mut Cache, tokens: &[u32]) -> Vec<u32> {
        let blocks = sequence(cache, tokens.len());
        cache.keep(0, tokens, &blocks);
        cache.release(&blocks);
        blocks
    }

    #[test]
    fn a_fork_shares_whole_blocks_and_copies_one() {
        let mut cache = cache(8);
        let tokens: Vec<u32> = (0..70).collect();
        let blocks = finished(&mut cache, &tokens);
        assert_eq!(cache.available(), 8, "what nobody runs on is available");
        assert_eq!(cache.occupancy(), [0.0, 3.0 / 8.0]);
        let prefix = cache.longest(0, &[&tokens[..66], &[7; 10]].concat(), 75);
        assert_eq!(prefix, Prefix { len: 66, blocks: blocks.clone() });
        assert_eq!(cache.unused_among(&prefix.blocks), 3);
        let fork = cache.fork(&prefix);
        assert_eq!(fork[..2], blocks[..2]);
        assert_ne!(fork[2], blocks[2]);
        assert_eq!(cache.available(), 5);
        cache.release(&fork);
        assert_eq!(cache.longest(0, &[5, 6], 2), Prefix::default());
        assert_eq!(cache.longest(1, &tokens, 70), Prefix::default(), "another policy");
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let mut cache = cache(4);
        let [old, new] = [100, 200].map(|first| (first..first + 64).collect::<Vec<u32>>());
        finished(&mut cache, &old);
        finished(&mut cache, &new);
        assert_eq!(cache.longest(0, &old, 64).len, 64);
        let taken = sequence(&mut cache, 33);
        assert_eq!(cache.longest(0, &new, 64).len, 0, "evicted: used before the other");
        assert_eq!(cache.longest(0, &old, 64).len, 64);
        cache.release(&taken);
        cache.forget(0);
        assert_eq!(cache.longest(0, &old, 64).len, 0);
        assert_eq!((cache.available(), cache.free.len()), (4, 4));
    }

    /// The parting of two paths leaves a block that nobody uses above blocks that are all in use: it is to be
    /// had, too.
    #[test]
    fn every_block_that_no_sequence_uses_can_be_had() {
        let mut cache = cache(4);
        let tokens: Vec<u32> = (0..70).collect();
        finished(&mut cache, &tokens[..40]);
        let fork = cache.longest(0, &tokens, 69);
        let mut blocks = cache.fork(&fork);
        blocks.push(cache.take());
        cache.keep(0, &tokens, &blocks);
        assert_eq!((cache.available(), cache.blocks.len(), cache.free.len()), (1, 4, 0));
        blocks.push(cache.take());
        assert_eq!((cache.available(), cache.blocks.len()), (0, 4));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.take())).is_err());
        cache.release(&blocks);
        assert_eq!(cache.available(), 4);
    }

    #[test]
    fn what_a_running_sequence_computed_is_shared_and_outlives_it() {
        let mut cache = cache(8);
        let tokens: Vec<u32> = (0..80).collect();
        let mut blocks = sequence(&mut cache, 40);
        cache.keep(0, &tokens[..40], &blocks);
        let fork = cache.longest(0, &tokens, 79);
        assert_eq!(fork.len, 40);
        let other = cache.fork(&fork);
        assert_eq!((other[0], other.len(), cache.available()), (blocks[0], 2, 5));
        cache.release(&other);
        blocks.push(cache.take());
        cache.keep(0, &tokens, &blocks);
        cache.release(&blocks);
        assert_eq!(cache.longest(0, &tokens, 80), Prefix { len: 80, blocks });
        cache.forget(0);
        assert_eq!(cache.free.len(), cache.blocks.len());
    }
}
