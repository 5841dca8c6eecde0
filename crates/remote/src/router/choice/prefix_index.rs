//! An index of the beginnings that members have computed, in whole blocks.
//!
//! A block is known by a hash of all tokens up to its end, so a path is a chain of hashes, and members that
//! share a beginning share entries: a radix tree whose edges are blocks, laid out in one map. Two beginnings
//! of a billion share a hash with a probability of 3 %, and cost a detour, never a wrong token.
//!
//! Memory is bounded. What was used longest ago is forgotten first; a path's end is older than its beginning,
//! so paths are cut from their ends and what is left can always be found.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens of a block, as in caches of inference servers.
pub(crate) const BLOCK: usize = 16;

/// The beginnings that members have.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    /// Most entries: pairs of a block and a member that has it.
    most: usize,
    /// For each block the members that have it, with the time of the last use.
    blocks: HashMap<u64, Vec<(usize, u64)>>,
    /// Entries in the order of their use; stale ones, which were used again since, included.
    order: VecDeque<(u64, u64, usize)>,
    /// Entries of each member.
    of_member: HashMap<usize, usize>,
    entries: usize,
    clock: u64,
}

/// Hashes of all whole blocks of a path, each of all tokens up to its end.
fn chain(path: &[u32]) -> impl Iterator<Item = u64> {
    path.chunks_exact(BLOCK).scan(0u64, |before, block| {
        let mut hash = DefaultHasher::new();
        (*before, block).hash(&mut hash);
        *before = hash.finish();
        Some(*before)
    })
}

impl PrefixIndex {
    /// An empty index of at most `most` entries.
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

    /// Entries of a member.
    pub fn blocks_of(&self, member: usize) -> usize {
        self.of_member.get(&member).copied().unwrap_or_default()
    }

    /// How many blocks at the beginning of `path` each member has; members without any are left out.
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

    /// Records that `member` has a path.
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
        // Uses that were followed by others take memory, too.
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

    /// Removes the entries of a block that are meant.
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

    /// Removes all that a member had.
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

    /// Blocks that each member shares with `path`, by comparing it with every recorded path.
    fn naive(paths: &[(usize, Vec<u32>)], path: &[u32]) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for (member, known) in paths {
            let common = known.iter().zip(path).take_while(|(a, b)| a == b).count();
            // Whole blocks of both.
            let blocks = (0..=common / BLOCK).rev().find(|b| b * BLOCK <= common).unwrap_or(0);
            if blocks > 0 {
                let most = found.entry(*member).or_insert(0);
                *most = blocks.max(*most);
            }
        }
        found
    }

    /// Paths over few tokens that share beginnings.
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
        fn prefixes_are_those_of_a_search_through_all_paths(paths in paths(), forgotten in 0usize..8) {
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
        fn memory_is_bounded_and_the_newest_path_is_whole(paths in paths(), most in 1usize..12) {
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
                // Nothing is found that is not there.
                let all = naive(&known, path);
                for (member, blocks) in index.shared(path) {
                    prop_assert!(blocks <= all[&member]);
                }
            }
        }
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
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
