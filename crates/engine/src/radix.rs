//! Radix tree over tokens: the prefixes in the cache, and the blocks that hold them.
//!
//! An edge holds a run of tokens and the blocks with their positions. If sequences fork inside a
//! block, each child has its own copy of that block, which also holds the positions of its
//! ancestors in it. So for every index, the block of a sequence is that of the deepest node that
//! has one. Out of scope: the memory of the blocks, and their use by running sequences (`cache`).

use std::collections::HashMap;

use crate::ops::kv::BLOCK;

/// Index of a node in the radix trees.
type NodeId = usize;

struct RadixNode {
    parent: Option<NodeId>,
    /// Children by the first token of their edge.
    children: HashMap<u32, NodeId>,
    /// Position in the sequence of the first token of the edge.
    start: usize,
    tokens: Vec<u32>,
    /// Blocks `start / BLOCK ..` of the sequence, up to the end of the edge.
    blocks: Vec<u32>,
    last_use: u64,
}

/// Cached prefix of a new sequence, whose keys and values the sequence can reuse.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Prefix {
    /// Number of positions of the prefix, which need not be computed again.
    pub len: usize,
    /// Blocks that hold these positions. The last one must be copied if `len` ends inside it.
    pub blocks: Vec<u32>,
}

/// Radix trees of cached token prefixes, one for each root (policy).
#[derive(Default)]
pub struct RadixTrees {
    nodes: HashMap<NodeId, RadixNode>,
    roots: HashMap<u32, HashMap<u32, NodeId>>,
    next: NodeId,
    clock: u64,
}

impl RadixTrees {
    /// Returns the longest cached prefix of `tokens` under `root`, of at most `max_len` tokens, and
    /// marks it as used.
    pub fn longest_prefix(&mut self, root: u32, tokens: &[u32], max_len: usize) -> Prefix {
        self.clock += 1;
        let mut prefix = Prefix::default();
        let tokens = &tokens[..max_len.min(tokens.len())];
        let mut children = self.roots.get(&root);
        while let Some(id) = tokens.get(prefix.len).and_then(|token| children?.get(token)).copied()
        {
            let Some(node) = self.nodes.get_mut(&id) else { break };
            node.last_use = self.clock;
            let shared = shared_prefix_len(&node.tokens, &tokens[prefix.len..]);
            prefix.len += shared;
            prefix.blocks.truncate(node.start / BLOCK);
            let needed = prefix.len.div_ceil(BLOCK) - node.start / BLOCK;
            prefix.blocks.extend(&node.blocks[..needed]);
            if shared < node.tokens.len() {
                break;
            }
            children = self.nodes.get(&id).map(|node| &node.children);
        }
        prefix
    }

    /// Inserts a sequence and its blocks under `root`. Calls `kept` for every block to which the
    /// tree adds a reference.
    pub fn insert(&mut self, root: u32, tokens: &[u32], blocks: &[u32], mut kept: impl FnMut(u32)) {
        self.clock += 1;
        let mut parent = None;
        let mut done = 0;
        while done < tokens.len() {
            let children = match parent {
                None => self.roots.entry(root).or_default(),
                Some(id) => match self.nodes.get_mut(&id) {
                    Some(node) => &mut node.children,
                    None => return,
                },
            };
            let Some(&id) = children.get(&tokens[done]) else {
                let id = self.next;
                self.next += 1;
                children.insert(tokens[done], id);
                let blocks = blocks[done / BLOCK..tokens.len().div_ceil(BLOCK)].to_vec();
                blocks.iter().for_each(|block| kept(*block));
                let tokens = tokens[done..].to_vec();
                let last_use = self.clock;
                self.nodes.insert(
                    id,
                    RadixNode {
                        parent,
                        children: HashMap::new(),
                        start: done,
                        tokens,
                        blocks,
                        last_use,
                    },
                );
                return;
            };
            let Some(node) = self.nodes.get_mut(&id) else { return };
            node.last_use = self.clock;
            let shared = shared_prefix_len(&node.tokens, &tokens[done..]);
            done += shared;
            if shared < node.tokens.len() && done < tokens.len() {
                self.split(id, shared, &mut kept);
            }
            parent = Some(id);
        }
    }

    /// Splits a node's edge after `at` tokens. The node keeps its upper part; a new node below it
    /// gets the rest.
    fn split(&mut self, id: NodeId, at: usize, kept: &mut impl FnMut(u32)) {
        let lower = self.next;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.next += 1;
        let start = node.start + at;
        let rest = node.tokens.split_off(at);
        let blocks = node.blocks[start / BLOCK - node.start / BLOCK..].to_vec();
        node.blocks.truncate(start.div_ceil(BLOCK) - node.start / BLOCK);
        if !start.is_multiple_of(BLOCK) {
            // Both parts have positions in the block that is split.
            kept(blocks[0]);
        }
        let children = std::mem::replace(&mut node.children, HashMap::from([(rest[0], lower)]));
        let last_use = node.last_use;
        for child in children.values() {
            if let Some(child) = self.nodes.get_mut(child) {
                child.parent = Some(lower);
            }
        }
        self.nodes.insert(
            lower,
            RadixNode { parent: Some(id), children, start, tokens: rest, blocks, last_use },
        );
    }

    /// Removes the least recently used leaf for whose blocks `worth` returns true, and returns its
    /// blocks.
    pub fn evict(&mut self, worth: impl Fn(&[u32]) -> bool) -> Option<Vec<u32>> {
        let leaves =
            self.nodes.iter().filter(|(_, node)| node.children.is_empty() && worth(&node.blocks));
        let (&id, _) = leaves.min_by_key(|(id, node)| (node.last_use, **id))?;
        self.remove(id)
    }

    /// Removes all prefixes under `root`; calls `dropped` for every reference to a block that the
    /// tree gives up.
    pub fn remove_prefixes(&mut self, root: u32, mut dropped: impl FnMut(u32)) {
        let mut pending: Vec<NodeId> =
            self.roots.remove(&root).into_iter().flat_map(HashMap::into_values).collect();
        while let Some(id) = pending.pop() {
            if let Some(node) = self.nodes.remove(&id) {
                node.blocks.into_iter().for_each(&mut dropped);
                pending.extend(node.children.into_values());
            }
        }
    }

    fn remove(&mut self, id: NodeId) -> Option<Vec<u32>> {
        let node = self.nodes.remove(&id)?;
        let first = node.tokens[0];
        match node.parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            Some(parent) => {
                parent.children.remove(&first);
            }
            None => {
                for children in self.roots.values_mut() {
                    if children.get(&first) == Some(&id) {
                        children.remove(&first);
                    }
                }
            }
        }
        Some(node.blocks)
    }
}

/// Returns the number of leading tokens that two sequences share.
pub fn shared_prefix_len(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Model of blocks that records their contents: all tokens up to the end of the block.
    #[derive(Default)]
    struct Model {
        contents: Vec<Vec<u32>>,
        kept: HashMap<u32, i32>,
    }

    impl Model {
        fn blocks(&mut self, tokens: &[u32]) -> Vec<u32> {
            (0..tokens.len().div_ceil(BLOCK))
                .map(|i| {
                    self.contents.push(tokens[..tokens.len().min((i + 1) * BLOCK)].to_vec());
                    self.contents.len() as u32 - 1
                })
                .collect()
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        /// Finds the longest prefix of all inserted sequences that were not evicted, in blocks that
        /// hold it. Reference counts of blocks return to zero.
        #[test]
        fn longest_prefix_returns_matching_blocks(
            paths in prop::collection::vec(
                (prop::collection::vec(0u32..2, 0..4), 0usize..70, 0u32..3), 1..12),
            evictions in 0usize..6,
        ) {
            // Long runs of one token, so that sequences fork in the middle of blocks.
            let paths: Vec<Vec<u32>> = paths
                .into_iter()
                .map(|(turns, run, last)| {
                    let mut tokens: Vec<u32> = turns.iter().flat_map(|t| vec![*t; 23]).collect();
                    tokens.extend(vec![last; run]);
                    tokens
                })
                .collect();
            let (mut radix, mut model) = (RadixTrees::default(), Model::default());
            for (i, path) in paths.iter().enumerate() {
                let found = radix.longest_prefix(1, path, path.len());
                let expected = paths[..i].iter().map(|p| shared_prefix_len(p, path)).max().unwrap_or(0);
                prop_assert_eq!(found.len, expected);
                prop_assert_eq!(found.blocks.len(), expected.div_ceil(BLOCK));
                for (index, block) in found.blocks.iter().enumerate() {
                    let stored = &model.contents[*block as usize];
                    let wanted = &path[..found.len.min((index + 1) * BLOCK)];
                    prop_assert!(stored.starts_with(wanted), "block {} of {:?}", index, found);
                }
                let blocks = model.blocks(path);
                let kept = &mut model.kept;
                radix.insert(1, path, &blocks, |block| *kept.entry(block).or_default() += 1);
            }
            prop_assert_eq!(radix.longest_prefix(2, &paths[0], 100).len, 0);
            for _ in 0..evictions {
                for block in radix.evict(|_| true).unwrap_or_default() {
                    *model.kept.entry(block).or_default() -= 1;
                }
            }
            radix.remove_prefixes(1, |block| *model.kept.entry(block).or_default() -= 1);
            prop_assert!(model.kept.values().all(|count| *count == 0) && radix.nodes.is_empty());
        }
    }
}
