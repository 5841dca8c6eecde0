//! Caches keys and values in blocks that sequences with the same prefix share.
//!
//! A sequence holds references to its blocks. A new sequence reuses, by reference, the full blocks
//! of the longest prefix that is in the tree (`radix`). If the sequences fork inside a block, it
//! copies that one block. Prompts enter the tree when they are computed, completions when they are
//! done. Their blocks stay until the memory is needed. The next turn of the same attempt, and the
//! other attempts at the same task, start from there.

use crate::ops::kv::{AttentionShape, BLOCK, Blocks};
use crate::precision::Precision;
use crate::radix::{Prefix, RadixTrees};

/// Cache of keys and values in blocks with reference counts. A radix tree finds the blocks of known
/// prefixes.
pub struct KvCache {
    /// Memory of the cache's blocks of keys and values.
    pub blocks: Blocks,
    limit: usize,
    /// Number of running sequences that use each block. `kept` counts the references of the radix
    /// tree.
    running: Vec<u32>,
    kept: Vec<u32>,
    free: Vec<u32>,
    in_use: usize,
    tree: RadixTrees,
}

impl KvCache {
    /// Creates a cache of at most `bytes` bytes, and at least one block, for `layers` layers of
    /// `shape`.
    pub fn new(shape: AttentionShape, layers: usize, precision: Precision, bytes: usize) -> Self {
        let blocks = Blocks::new(shape, layers, precision);
        KvCache {
            limit: (bytes / (blocks.block_words() * size_of::<f32>())).max(1),
            blocks,
            running: Vec::new(),
            kept: Vec::new(),
            free: Vec::new(),
            in_use: 0,
            tree: RadixTrees::default(),
        }
    }

    /// Returns the maximum number of token positions that the cache can hold.
    pub fn capacity(&self) -> usize {
        self.limit * BLOCK
    }

    /// Returns the number of blocks that no running sequence uses. All these blocks can be
    /// allocated, because a block that only the radix tree holds can be evicted.
    pub fn available_blocks(&self) -> usize {
        self.limit.saturating_sub(self.in_use)
    }

    /// Returns the fraction of the capacity that running sequences use, and the fraction that holds
    /// any keys and values.
    pub fn occupancy(&self) -> [f64; 2] {
        let filled = self.blocks.len() - self.free.len();
        [self.in_use, filled].map(|blocks| blocks as f64 / self.limit as f64)
    }

    /// Returns how many of `blocks` no running sequence uses.
    pub fn unused_among(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|b| self.running[**b as usize] == 0).count()
    }

    /// Returns the longest prefix of `tokens`, of at most `max_len` tokens, whose keys and values
    /// `policy` has computed.
    pub fn longest_prefix(&mut self, policy: u32, tokens: &[u32], max_len: usize) -> Prefix {
        self.tree.longest_prefix(policy, tokens, max_len)
    }

    /// Allocates the blocks of a running sequence that starts from `prefix`. If the prefix ends
    /// inside a block, the last block is a copy. The caller ensures that enough blocks are
    /// available.
    pub fn fork(&mut self, prefix: &Prefix) -> Vec<u32> {
        let full_blocks = prefix.len / BLOCK;
        let mut blocks = prefix.blocks[..full_blocks].to_vec();
        blocks.iter().for_each(|b| self.add_running_reference(*b));
        if !prefix.len.is_multiple_of(BLOCK) {
            // Referenced while a block for the copy is allocated, so that the source is not
            // evicted.
            let from = prefix.blocks[full_blocks];
            self.add_running_reference(from);
            let to = self.allocate_block();
            self.blocks.copy_block(from, to);
            self.release(&[from]);
            blocks.push(to);
        }
        blocks
    }

    /// Allocates a block for a running sequence. The caller ensures that a block is available.
    ///
    /// # Panics
    /// Panics if no block is available: a sequence was admitted without room for it.
    pub fn allocate_block(&mut self) -> u32 {
        while self.free.is_empty() && self.blocks.len() >= self.limit && self.evict() {}
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.blocks.len();
                assert!(
                    block < self.limit,
                    "running sequences use all {} blocks of the cache",
                    self.limit
                );
                self.blocks.grow(block + 1);
                self.running.push(0);
                self.kept.push(0);
                block as u32
            }
        };
        self.add_running_reference(block);
        block
    }

    /// Adds `tokens` to the radix tree for reuse. A running sequence of `policy` has computed their
    /// keys and values in `blocks`.
    pub fn insert_prefix(&mut self, policy: u32, tokens: &[u32], blocks: &[u32]) {
        let kept = &mut self.kept;
        self.tree.insert(policy, tokens, blocks, |block| kept[block as usize] += 1);
    }

    /// Releases a running sequence's references to `blocks`.
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

    /// Removes all prefixes of `policy` from the tree, because its weights have changed.
    pub fn remove_prefixes(&mut self, policy: u32) {
        let KvCache { tree, kept, running, free, .. } = self;
        tree.remove_prefixes(policy, |block| drop_tree_reference(kept, running, free, block));
    }

    fn add_running_reference(&mut self, block: u32) {
        let count = &mut self.running[block as usize];
        self.in_use += usize::from(*count == 0);
        *count += 1;
    }

    /// Evicts the least recently used leaf of the tree. Returns whether there was a leaf to evict.
    fn evict(&mut self) -> bool {
        let KvCache { tree, kept, running, free, .. } = self;
        let dropped = tree.evict(|blocks| blocks.iter().any(|block| running[*block as usize] == 0));
        // A block that a running sequence has copied can be above a leaf whose blocks are all in
        // use.
        let dropped = dropped.or_else(|| tree.evict(|_| true));
        let found = dropped.is_some();
        dropped
            .into_iter()
            .flatten()
            .for_each(|block| drop_tree_reference(kept, running, free, block));
        found
    }
}

/// Removes one of the radix tree's references to `block`, and frees the block if no reference is
/// left.
fn drop_tree_reference(kept: &mut [u32], running: &[u32], free: &mut Vec<u32>, block: u32) {
    let at = block as usize;
    kept[at] -= 1;
    if kept[at] == 0 && running[at] == 0 {
        free.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small_cache(blocks: usize) -> KvCache {
        let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 4 };
        KvCache::new(shape, 1, Precision::F32, blocks * shape.block(Precision::F32) * 4)
    }

    fn run_sequence(cache: &mut KvCache, len: usize) -> Vec<u32> {
        (0..len.div_ceil(BLOCK)).map(|_| cache.allocate_block()).collect()
    }

    /// Runs and finishes a sequence; returns its blocks.
    fn finish_sequence(cache: &mut KvCache, tokens: &[u32]) -> Vec<u32> {
        let blocks = run_sequence(cache, tokens.len());
        cache.insert_prefix(0, tokens, &blocks);
        cache.release(&blocks);
        blocks
    }

    #[test]
    fn fork_shares_full_blocks_and_copies_one() {
        let mut cache = small_cache(8);
        let tokens: Vec<u32> = (0..70).collect();
        let blocks = finish_sequence(&mut cache, &tokens);
        assert_eq!(cache.available_blocks(), 8, "what nobody runs on is available");
        assert_eq!(cache.occupancy(), [0.0, 3.0 / 8.0]);
        let prefix = cache.longest_prefix(0, &[&tokens[..66], &[7; 10]].concat(), 75);
        assert_eq!(prefix, Prefix { len: 66, blocks: blocks.clone() });
        assert_eq!(cache.unused_among(&prefix.blocks), 3);
        let fork = cache.fork(&prefix);
        assert_eq!(fork[..2], blocks[..2]);
        assert_ne!(fork[2], blocks[2]);
        assert_eq!(cache.available_blocks(), 5);
        cache.release(&fork);
        assert_eq!(cache.longest_prefix(0, &[5, 6], 2), Prefix::default());
        assert_eq!(cache.longest_prefix(1, &tokens, 70), Prefix::default(), "another policy");
    }

    #[test]
    fn least_recently_used_prefix_is_evicted() {
        let mut cache = small_cache(4);
        let [old, new] = [100, 200].map(|first| (first..first + 64).collect::<Vec<u32>>());
        finish_sequence(&mut cache, &old);
        finish_sequence(&mut cache, &new);
        assert_eq!(cache.longest_prefix(0, &old, 64).len, 64);
        let taken = run_sequence(&mut cache, 33);
        assert_eq!(cache.longest_prefix(0, &new, 64).len, 0, "evicted: used before the other");
        assert_eq!(cache.longest_prefix(0, &old, 64).len, 64);
        cache.release(&taken);
        cache.remove_prefixes(0);
        assert_eq!(cache.longest_prefix(0, &old, 64).len, 0);
        assert_eq!((cache.available_blocks(), cache.free.len()), (4, 4));
    }

    /// A fork leaves an unused block above blocks that are all in use. It must be possible to
    /// allocate that block.
    #[test]
    fn every_unused_cache_block_can_be_allocated() {
        let mut cache = small_cache(4);
        let tokens: Vec<u32> = (0..70).collect();
        finish_sequence(&mut cache, &tokens[..40]);
        let fork = cache.longest_prefix(0, &tokens, 69);
        let mut blocks = cache.fork(&fork);
        blocks.push(cache.allocate_block());
        cache.insert_prefix(0, &tokens, &blocks);
        assert_eq!((cache.available_blocks(), cache.blocks.len(), cache.free.len()), (1, 4, 0));
        blocks.push(cache.allocate_block());
        assert_eq!((cache.available_blocks(), cache.blocks.len()), (0, 4));
        assert!(
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cache.allocate_block()))
                .is_err()
        );
        cache.release(&blocks);
        assert_eq!(cache.available_blocks(), 4);
    }

    #[test]
    fn cached_prefix_is_shared_and_outlives_its_sequence() {
        let mut cache = small_cache(8);
        let tokens: Vec<u32> = (0..80).collect();
        let mut blocks = run_sequence(&mut cache, 40);
        cache.insert_prefix(0, &tokens[..40], &blocks);
        let fork = cache.longest_prefix(0, &tokens, 79);
        assert_eq!(fork.len, 40);
        let other = cache.fork(&fork);
        assert_eq!((other[0], other.len(), cache.available_blocks()), (blocks[0], 2, 5));
        cache.release(&other);
        blocks.push(cache.allocate_block());
        cache.insert_prefix(0, &tokens, &blocks);
        cache.release(&blocks);
        assert_eq!(cache.longest_prefix(0, &tokens, 80), Prefix { len: 80, blocks });
        cache.remove_prefixes(0);
        assert_eq!(cache.free.len(), cache.blocks.len());
    }
}
