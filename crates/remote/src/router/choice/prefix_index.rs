//! Index of the prefixes that replicas have cached, in full blocks of tokens.
//!
//! A block is identified by a hash of all tokens up to its end, so a sequence is a chain of hashes.
//! Replicas that share a prefix share entries: the index is a radix tree whose edges are blocks, stored
//! in one map. Among a billion prefixes, two share a hash with a probability of 3 %. A collision leads to
//! a worse choice of replica, never to a wrong token.
//!
//! Memory is bounded. The least recently used entries are evicted first. The end of a sequence counts as
//! used before its start, so sequences are truncated from their ends, and the remaining blocks can always
//! be found.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens per block, as in the prefix caches of inference servers.
pub(crate) const BLOCK: usize = 16;

/// Prefixes that replicas have cached.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    /// Maximum number of entries: pairs of a block and a replica that has it.
    most: usize,
    /// For each block, the replicas that have it, with the time of the last use.
    blocks: HashMap<u64, Vec<(usize, u64)>>,
    /// Entries in the order of their use, including stale ones, which were used again later.
    order: VecDeque<(u64, u64, usize)>,
    /// Number of entries of each replica.
    of_member: HashMap<usize, usize>,
    entries: usize,
    clock: u64,
}

/// Returns the hashes of all full blocks of a sequence. Each hash covers all tokens up to the block's
/// end.
fn chain(path: &[u32]) -> impl Iterator<Item = u64> {
    path.chunks_exact(BLOCK).scan(0u64, |before, block| {
        let mut hash = DefaultHasher::new();
        (*before, block).hash(&mut hash);
        *before = hash.finish();
        Some(*before)
    })
}

impl PrefixIndex {
    /// Creates an empty index of at most `most` entries.
    pub fn new(most: usize) -> Self {
        PrefixIndex {
            most,
            blocks: HashMap::new(),
            order: VecDeque::new(),
            of_member: HashMap::new(),
            entries: 0,
            clock: 0,
        }
    }

    /// Returns the number of entries of a replica.
    pub fn blocks_of(&self, member: usize) -> usize {
        self.of_member.get(&member).copied().unwrap_or_default()
    }

    /// Returns how many blocks at the start of `path` each replica has. Replicas without any are left
    /// out.
    pub fn shared(&self, path: &[u32]) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for (i, hash) in chain(path).enumerate() {
            let Some(members) = self.blocks.get(&hash) else { break };
            let mut any = false;
            for (member, _) in members {
                let blocks = found.entry(*member).or_insert(0);
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

    /// Records that `member` has computed a sequence.
    pub fn insert(&mut self, member: usize, path: &[u32]) {
        let mut hashes: Vec<u64> = chain(path).collect();
        hashes.truncate(self.most);
        for hash in hashes.into_iter().rev() {
            self.clock += 1;
            let members = self.blocks.entry(hash).or_default();
            match members.iter_mut().find(|(known, _)| *known == member) {
                Some((_, used)) => *used = self.clock,
                None => {
                    members.push((member, self.clock));
                    self.entries += 1;
                    *self.of_member.entry(member).or_default() += 1;
                }
            }
            self.order.push_back((self.clock, hash, member));
        }
        while self.entries > self.most {
            self.drop_oldest();
        }
        // Remove stale entries of `order`, which would grow without bound.
        if self.order.len() > 2 * self.most {
            let blocks = &self.blocks;
            self.order.retain(|(used, hash, member)| {
                blocks.get(hash).is_some_and(|members| members.contains(&(*member, *used)))
            });
        }
    }

    fn drop_oldest(&mut self) {
        let Some((used, hash, member)) = self.order.pop_front() else { return };
        self.remove(hash, |entry| *entry == (member, used));
    }

    /// Removes the entries of a block for which `meant` returns true.
    fn remove(&mut self, hash: u64, meant: impl Fn(&(usize, u64)) -> bool) {
        let Some(members) = self.blocks.get_mut(&hash) else { return };
        for (member, _) in members.extract_if(.., |entry| meant(entry)) {
            self.entries -= 1;
            if let Some(count) = self.of_member.get_mut(&member) {
                *count -= 1;
            }
        }
        if members.is_empty() {
            self.blocks.remove(&hash);
        }
    }

    /// Removes all entries of a replica.
    pub fn forget(&mut self, member: usize) {
        let hashes: Vec<u64> = self.blocks.keys().copied().collect();
        for hash in hashes {
            self.remove(hash, |(known, _)| *known == member);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Counts the blocks that each replica shares with `path`, by comparing it with every recorded
    /// sequence.
    fn naive(paths: &[(usize, Vec<u32>)], path: &[u32]) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for (member, known) in paths {
            let common = known.iter().zip(path).take_while(|(a, b)| a == b).count();
            // Count full blocks only.
            let blocks = (0..=common / BLOCK).rev().find(|b| b * BLOCK <= common).unwrap_or(0);
            if blocks > 0 {
                let most = found.entry(*member).or_insert(0);
                *most = blocks.max(*most);
            }
        }
        found
    }

    /// Generates sequences of few distinct tokens that share prefixes.
    fn paths() -> impl Strategy<Value = Vec<(usize, Vec<u32>)>> {
        let path = prop::collection::vec(0u32..2, 0..6).prop_flat_map(|blocks| {
            let whole: Vec<u32> = blocks.iter().flat_map(|token| [*token; BLOCK]).collect();
            (Just(whole), prop::collection::vec(0u32..2, 0..BLOCK))
        });
        let path = path.prop_map(|(mut whole, rest)| {
            whole.extend(rest);
            whole
        });
        prop::collection::vec((0usize..4, path), 1..40)
    }

    proptest! {
        #[test]
        fn index_matches_naive_search(paths in paths(), forgotten in 0usize..8) {
            let mut index = PrefixIndex::new(100_000);
            let mut known = Vec::new();
            for (member, path) in &paths {
                prop_assert_eq!(index.shared(path), naive(&known, path));
                index.insert(*member, path);
                known.push((*member, path.clone()));
            }
            index.forget(forgotten);
            known.retain(|(member, _)| *member != forgotten);
            for (_, path) in &paths {
                prop_assert_eq!(index.shared(path), naive(&known, path));
            }
        }

        #[test]
        fn index_is_bounded_and_keeps_newest_sequence(paths in paths(), most in 1usize..12) {
            let mut index = PrefixIndex::new(most);
            let mut known = Vec::new();
            for (member, path) in &paths {
                index.insert(*member, path);
                known.push((*member, path.clone()));
                let counted: usize = index.blocks.values().map(Vec::len).sum();
                prop_assert_eq!(counted, index.entries);
                prop_assert_eq!(counted, (0..4).map(|member| index.blocks_of(member)).sum::<usize>());
                prop_assert!(counted <= most && index.order.len() <= 2 * most);
                let newest = index.shared(path).get(member).copied().unwrap_or(0);
                prop_assert_eq!(newest, (path.len() / BLOCK).min(most));
                // The index finds no block that was not inserted.
                let all = naive(&known, path);
                for (member, blocks) in index.shared(path) {
                    prop_assert!(blocks <= all[&member]);
                }
            }
        }
    }

    #[test]
    fn index_evicts_least_recently_used_blocks() {
        let path = |token: u32| vec![token; 2 * BLOCK];
        let mut index = PrefixIndex::new(4);
        index.insert(0, &path(1));
        index.insert(0, &path(2));
        index.insert(0, &path(1));
        index.insert(1, &path(3));
        assert_eq!(index.shared(&path(1)), [(0, 2)].into());
        assert_eq!(index.shared(&path(2)), [].into());
        index.insert(1, &path(4)[..BLOCK]);
        assert_eq!(index.shared(&path(1)), [(0, 1)].into(), "its end is gone, its beginning is not");
    }
}
