//! Index of the prefixes that replicas have cached, in full blocks of tokens.
//!
//! A block is identified by a hash of all tokens up to its end, so a sequence is a chain of hashes.
//! Replicas that share a prefix share entries: the index is a radix tree whose edges are blocks,
//! stored in one map. Among a billion prefixes, two share a hash with a probability of 3 %. A
//! collision leads to a worse choice of replica, never to a wrong token.
//!
//! Memory is bounded. The least recently used entries are evicted first. The end of a sequence
//! counts as used before its start, so sequences are truncated from their ends, and the remaining
//! blocks can always be found.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Number of tokens per block, as in the prefix caches of inference servers.
pub(crate) const BLOCK: usize = 16;

/// Index of the token prefixes that replicas have cached.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    /// Maximum number of entries. An entry is a pair of a block and a replica that has cached it.
    max_blocks: usize,
    /// Replicas that have cached each block, with the logical time of the last use, by the block's
    /// hash.
    blocks: HashMap<u64, Vec<(usize, u64)>>,
    /// Last use, block hash and replica of the entries, in the order of their use. Includes
    /// outdated records of entries that were used again later.
    order: VecDeque<(u64, u64, usize)>,
    /// Number of entries of each replica.
    block_counts: HashMap<usize, usize>,
    entries: usize,
    clock: u64,
}

/// Returns the hashes of all full blocks of a token sequence. A block's hash covers all tokens from
/// the start of the sequence to the block's end.
fn hash_blocks(tokens: &[u32]) -> impl Iterator<Item = u64> {
    tokens.chunks_exact(BLOCK).scan(0u64, |before, block| {
        let mut hash = DefaultHasher::new();
        (*before, block).hash(&mut hash);
        *before = hash.finish();
        Some(*before)
    })
}

impl PrefixIndex {
    /// Creates an empty index with at most `max_blocks` entries.
    pub fn new(max_blocks: usize) -> Self {
        PrefixIndex {
            max_blocks,
            blocks: HashMap::new(),
            order: VecDeque::new(),
            block_counts: HashMap::new(),
            entries: 0,
            clock: 0,
        }
    }

    /// Returns the number of blocks that a replica has cached.
    pub fn num_blocks(&self, replica: usize) -> usize {
        self.block_counts.get(&replica).copied().unwrap_or_default()
    }

    /// Returns the number of blocks at the start of `tokens` that each replica has cached, by the
    /// replica's index. Replicas without any of these blocks are omitted.
    pub fn count_shared_blocks(&self, tokens: &[u32]) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for (i, hash) in hash_blocks(tokens).enumerate() {
            let Some(replicas) = self.blocks.get(&hash) else { break };
            let mut any = false;
            for (replica, _) in replicas {
                let blocks = found.entry(*replica).or_insert(0);
                if *blocks == i {
                    (*blocks, any) = (i + 1, true);
                }
            }
            if !any {
                break;
            }
        }
        found.retain(|_, blocks| *blocks > 0);
        found
    }

    /// Records that `replica` has computed, and so cached, a token sequence.
    pub fn insert(&mut self, replica: usize, tokens: &[u32]) {
        let mut hashes: Vec<u64> = hash_blocks(tokens).collect();
        hashes.truncate(self.max_blocks);
        for hash in hashes.into_iter().rev() {
            self.clock += 1;
            let replicas = self.blocks.entry(hash).or_default();
            match replicas.iter_mut().find(|(known, _)| *known == replica) {
                Some((_, used)) => *used = self.clock,
                None => {
                    replicas.push((replica, self.clock));
                    self.entries += 1;
                    *self.block_counts.entry(replica).or_default() += 1;
                }
            }
            self.order.push_back((self.clock, hash, replica));
        }
        while self.entries > self.max_blocks {
            self.drop_oldest();
        }
        // Remove stale entries of `order`, which would grow without bound.
        if self.order.len() > 2 * self.max_blocks {
            let blocks = &self.blocks;
            self.order.retain(|(used, hash, replica)| {
                blocks.get(hash).is_some_and(|replicas| replicas.contains(&(*replica, *used)))
            });
        }
    }

    fn drop_oldest(&mut self) {
        let Some((used, hash, replica)) = self.order.pop_front() else { return };
        self.remove_entries(hash, |entry| *entry == (replica, used));
    }

    /// Removes the entries of the block `hash` for which `meant` returns true.
    fn remove_entries(&mut self, hash: u64, meant: impl Fn(&(usize, u64)) -> bool) {
        let Some(replicas) = self.blocks.get_mut(&hash) else { return };
        for (replica, _) in replicas.extract_if(.., |entry| meant(entry)) {
            self.entries -= 1;
            if let Some(count) = self.block_counts.get_mut(&replica) {
                *count -= 1;
            }
        }
        if replicas.is_empty() {
            self.blocks.remove(&hash);
        }
    }

    /// Removes all entries of a replica from the index.
    pub fn remove_replica(&mut self, replica: usize) {
        let hashes: Vec<u64> = self.blocks.keys().copied().collect();
        for hash in hashes {
            self.remove_entries(hash, |(known, _)| *known == replica);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Counts the blocks that each replica shares with `tokens`, by comparing it with every
    /// recorded sequence.
    fn naive(sequences: &[(usize, Vec<u32>)], tokens: &[u32]) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for (replica, known) in sequences {
            let common = known.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            // Count full blocks only.
            let blocks = (0..=common / BLOCK).rev().find(|b| b * BLOCK <= common).unwrap_or(0);
            if blocks > 0 {
                let max_blocks = found.entry(*replica).or_insert(0);
                *max_blocks = blocks.max(*max_blocks);
            }
        }
        found
    }

    /// Generates sequences of few distinct tokens that share prefixes.
    fn sequences() -> impl Strategy<Value = Vec<(usize, Vec<u32>)>> {
        let tokens = prop::collection::vec(0u32..2, 0..6).prop_flat_map(|blocks| {
            let tokens: Vec<u32> = blocks.iter().flat_map(|token| [*token; BLOCK]).collect();
            (Just(tokens), prop::collection::vec(0u32..2, 0..BLOCK))
        });
        let tokens = tokens.prop_map(|(mut tokens, rest)| {
            tokens.extend(rest);
            tokens
        });
        prop::collection::vec((0usize..4, tokens), 1..40)
    }

    proptest! {
        #[test]
        fn prefix_index_matches_naive_search(paths in sequences(), forgotten in 0usize..8) {
            let mut index = PrefixIndex::new(100_000);
            let mut known = Vec::new();
            for (member, path) in &paths {
                prop_assert_eq!(index.count_shared_blocks(path), naive(&known, path));
                index.insert(*member, path);
                known.push((*member, path.clone()));
            }
            index.remove_replica(forgotten);
            known.retain(|(member, _)| *member != forgotten);
            for (_, path) in &paths {
                prop_assert_eq!(index.count_shared_blocks(path), naive(&known, path));
            }
        }

        #[test]
        fn prefix_index_is_bounded_and_keeps_newest_sequence(
            paths in sequences(),
            max_blocks in 1usize..12,
        ) {
            let mut index = PrefixIndex::new(max_blocks);
            let mut known = Vec::new();
            for (member, path) in &paths {
                index.insert(*member, path);
                known.push((*member, path.clone()));
                let counted: usize = index.blocks.values().map(Vec::len).sum();
                prop_assert_eq!(counted, index.entries);
                prop_assert_eq!(
                    counted,
                    (0..4).map(|member| index.num_blocks(member)).sum::<usize>()
                );
                prop_assert!(counted <= max_blocks && index.order.len() <= 2 * max_blocks);
                let newest = index.count_shared_blocks(path).get(member).copied().unwrap_or(0);
                prop_assert_eq!(newest, (path.len() / BLOCK).min(max_blocks));
                // The index finds no block that was not inserted.
                let all = naive(&known, path);
                for (member, blocks) in index.count_shared_blocks(path) {
                    prop_assert!(blocks <= all[&member]);
                }
            }
        }
    }

    #[test]
    fn prefix_index_evicts_least_recently_used_blocks() {
        let mut index = PrefixIndex::new(4);
        index.insert(0, &two_blocks(1));
        index.insert(0, &two_blocks(2));
        index.insert(0, &two_blocks(1));
        index.insert(1, &two_blocks(3));
        assert_eq!(index.count_shared_blocks(&two_blocks(1)), [(0, 2)].into());
        assert_eq!(index.count_shared_blocks(&two_blocks(2)), [].into());
        index.insert(1, &two_blocks(4)[..BLOCK]);
        assert_eq!(
            index.count_shared_blocks(&two_blocks(1)),
            [(0, 1)].into(),
            "its end is gone, its beginning is not"
        );
    }

    fn two_blocks(token: u32) -> Vec<u32> {
        vec![token; 2 * BLOCK]
    }
}
