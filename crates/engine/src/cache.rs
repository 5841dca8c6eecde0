//! The cache of keys and values: blocks shared by the sequences that need the same prefix.
//!
//! A sequence holds the blocks of its path. A new one takes over, by reference, the whole blocks of the longest prefix that
//! any other has computed, and copies at most one block, the one the paths part in. What a finished sequence computed is
//! kept until its blocks are needed: the next turn of the same attempt, and the other attempts at the same task, start
//! from there.

use crate::ops::kv::{BLOCK, Blocks, Shape};
use crate::precision::Precision;

/// A finished sequence whose keys and values are still there.
struct Retained {
    tokens: Vec<u32>,
    blocks: Vec<u32>,
    last_use: u64,
}

/// What a new sequence can take over.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Positions that need not be computed.
    pub len: usize,
    /// The blocks that hold them; the last one is to be copied where `len` ends inside it.
    pub blocks: Vec<u32>,
}

/// Blocks, who uses them, and what finished sequences left.
pub struct Cache {
    /// The memory.
    pub blocks: Blocks,
    limit: usize,
    /// References of running sequences and of retained ones.
    running: Vec<u32>,
    kept: Vec<u32>,
    free: Vec<u32>,
    in_use: usize,
    retained: Vec<Retained>,
    clock: u64,
}

/// Number of leading tokens that two sequences share.
pub fn shared_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
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
            retained: Vec::new(),
            clock: 0,
        }
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.limit * BLOCK
    }

    /// Blocks that running sequences do not use.
    pub fn available(&self) -> usize {
        self.limit - self.in_use
    }

    /// How many of `blocks` no running sequence uses yet.
    pub fn unused_among(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|b| self.running[**b as usize] == 0).count()
    }

    /// The longest prefix of `tokens`, of at most `most` tokens, that finished sequences left.
    pub fn longest_retained(&mut self, tokens: &[u32], most: usize) -> Prefix {
        self.clock += 1;
        let best = self
            .retained
            .iter_mut()
            .map(|r| (shared_prefix(&r.tokens, tokens).min(most), r))
            .max_by_key(|(len, r)| (*len, r.last_use));
        match best {
            Some((len, retained)) if len > 0 => {
                retained.last_use = self.clock;
                Prefix { len, blocks: retained.blocks[..len.div_ceil(BLOCK)].to_vec() }
            }
            _ => Prefix::default(),
        }
    }

    /// Makes a running sequence that starts from `prefix`: its blocks, of which the last is a copy where the prefix ends
    /// inside it. The caller has made sure that enough blocks are available.
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
    pub fn take(&mut self) -> u32 {
        while self.free.is_empty() && self.blocks.len() >= self.limit && self.evict() {}
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.blocks.len();
                self.blocks.grow(block + 1);
                self.running.push(0);
                self.kept.push(0);
                block as u32
            }
        };
        self.hold(block);
        block
    }

    /// Ends a running sequence whose first `tokens` are computed; keeps what it computed for others.
    pub fn finish(&mut self, tokens: &[u32], blocks: Vec<u32>) {
        let used = tokens.len().div_ceil(BLOCK);
        if used > 0 {
            self.clock += 1;
            // What is a prefix of this sequence has nothing to offer any more.
            let mut index = 0;
            while index < self.retained.len() {
                if tokens.starts_with(&self.retained[index].tokens) {
                    self.drop_retained(index);
                } else {
                    index += 1;
                }
            }
            blocks[..used].iter().for_each(|b| self.kept[*b as usize] += 1);
            let kept =
                Retained { tokens: tokens.to_vec(), blocks: blocks[..used].to_vec(), last_use: self.clock };
            self.retained.push(kept);
        }
        self.release(&blocks);
    }

    /// Ends a running sequence without keeping anything.
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

    /// Forgets everything that finished sequences left: the weights have changed.
    pub fn forget(&mut self) {
        while !self.retained.is_empty() {
            self.drop_retained(0);
        }
    }

    fn hold(&mut self, block: u32) {
        let count = &mut self.running[block as usize];
        self.in_use += usize::from(*count == 0);
        *count += 1;
    }

    /// Drops what was used longest ago; false when there is nothing left to drop.
    fn evict(&mut self) -> bool {
        let oldest = (0..self.retained.len()).min_by_key(|i| self.retained[*i].last_use);
        if let Some(index) = oldest {
            self.drop_retained(index);
        }
        oldest.is_some()
    }

    fn drop_retained(&mut self, index: usize) {
        for block in self.retained.swap_remove(index).blocks {
            let at = block as usize;
            self.kept[at] -= 1;
            if self.kept[at] == 0 && self.running[at] == 0 {
                self.free.push(block);
            }
        }
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

    #[test]
    fn a_fork_shares_whole_blocks_and_copies_one() {
        let mut cache = cache(8);
        let tokens: Vec<u32> = (0..70).collect();
        let blocks = sequence(&mut cache, 70);
        cache.finish(&tokens, blocks.clone());
        assert_eq!(cache.available(), 8, "retained blocks are available");
        let prefix = cache.longest_retained(&[&tokens[..66], &[7; 10]].concat(), 75);
        assert_eq!(prefix, Prefix { len: 66, blocks: blocks.clone() });
        assert_eq!(cache.unused_among(&prefix.blocks), 3);
        let fork = cache.fork(&prefix);
        assert_eq!(fork[..2], blocks[..2]);
        assert_ne!(fork[2], blocks[2]);
        assert_eq!(cache.available(), 5);
        cache.release(&fork);
        assert_eq!(cache.longest_retained(&[5, 6], 2), Prefix::default());
    }

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let mut cache = cache(4);
        for first in [100, 200] {
            let tokens: Vec<u32> = (first..first + 64).collect();
            let blocks = sequence(&mut cache, 64);
            cache.finish(&tokens, blocks);
        }
        let old: Vec<u32> = (100..164).collect();
        let new: Vec<u32> = (200..264).collect();
        assert_eq!(cache.longest_retained(&old, 64).len, 64);
        let taken = sequence(&mut cache, 33);
        assert_eq!(cache.longest_retained(&new, 64).len, 0, "evicted: used before the other");
        assert_eq!(cache.longest_retained(&old, 64).len, 64);
        cache.release(&taken);
        cache.forget();
        assert_eq!(cache.longest_retained(&old, 64).len, 0);
        assert_eq!((cache.available(), cache.free.len()), (4, 4));
    }

    #[test]
    fn a_longer_sequence_replaces_its_own_beginning() {
        let mut cache = cache(8);
        let tokens: Vec<u32> = (0..80).collect();
        let blocks = sequence(&mut cache, 40);
        cache.finish(&tokens[..40], blocks);
        let prefix = cache.longest_retained(&tokens, 79);
        let mut longer = cache.fork(&prefix);
        longer.push(cache.take());
        cache.finish(&tokens, longer);
        assert_eq!(cache.retained.len(), 1);
        assert_eq!(cache.free.len() + 3, cache.blocks.len());
    }
}
