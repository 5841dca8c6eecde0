//! The batch a learner eats: paths merged into a forest on token ids alone.

use serde::{Deserialize, Serialize};

use crate::tokens::Rest;
use crate::{Tokens, TreeError};

/// One path's reason to train one token. All normalisers (per token, per sequence, per group) are already
/// folded into `weight`, so the loss of a batch is the plain sum of weight × loss over its terms.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Term {
    /// The path that trains the token, by its place in the input of [`TreeBatch::merge`].
    pub path: u32,
    /// Explicit weight of this term in the sum.
    pub weight: f32,
    /// Advantage of the token; unused by cross-entropy.
    pub advantage: f32,
    /// Value that a critic should give the state before the token.
    #[serde(default)]
    pub returns: f32,
    /// Value that it gave when the batch was made, where a loss bounds its change.
    #[serde(default)]
    pub value: Option<f32>,
    /// Log-probability under the policy that sampled the token; `None` for demonstrations.
    pub behaviour: Option<f32>,
    /// Log-probability under the proximal policy, where a loss distinguishes it from the behaviour policy.
    pub proximal: Option<f32>,
    /// Log-probability under the frozen reference, where a loss has a KL term.
    pub reference: Option<f32>,
    /// Log-ratio of the whole path between the policy being trained and the old one, where a loss works with
    /// that.
    #[serde(default)]
    pub path_log_ratio: Option<f32>,
    /// Whether the token was singled out among those of its update, where a loss treats some in another way.
    #[serde(default)]
    pub marked: bool,
    /// Importance weight of the policy's part of the loss, where a correction gives one: a constant that
    /// penalties and bonuses are not multiplied by.
    #[serde(default)]
    pub correction: Option<f32>,
    /// Versions between the weights that sampled the token and those being trained.
    #[serde(default)]
    pub age: u32,
    /// The version of the weights that sampled the token.
    pub version: u64,
}

/// A token of a path that is to be trained.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PathTarget {
    /// Index of the target token on its path, at least 1.
    pub index: u32,
    /// Temperature that divides the logits before the softmax, more than 0.
    pub temperature: f32,
    /// Why and how strongly.
    pub term: Term,
}

/// A path as it enters a batch.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PathInput {
    /// All tokens from the root to the leaf.
    pub tokens: Tokens,
    /// The tokens to train, by rising index.
    pub targets: Vec<PathTarget>,
}

/// A run of tokens that the same paths share: `tokens[start .. start + len]` of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// The node this one continues, always earlier in the list; `None` at a root.
    pub parent: Option<u32>,
    /// First token in the packed batch.
    pub start: u32,
    /// Number of tokens, at least 1.
    pub len: u32,
    /// Position of the first token on its path: the number of tokens in all ancestors.
    pub depth: u32,
}

/// A packed token that is trained, with the range of its terms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Packed index of the target token itself.
    pub token: u32,
    /// Packed index of the token before it on the path, whose hidden state predicts it.
    pub predictor: u32,
    /// Temperature that divides the logits.
    pub temperature: f32,
    /// First of its terms.
    pub first_term: u32,
    /// Number of its terms, at least 1.
    pub terms: u32,
}

/// Merged paths: packed tokens, the forest over them, and what to train.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TreeBatch {
    /// Token ids of all nodes, in depth-first order.
    pub tokens: Vec<u32>,
    /// The nodes, parents before children, in depth-first order.
    pub nodes: Vec<Node>,
    /// The trained tokens, by rising (token, temperature).
    pub targets: Vec<Target>,
    /// The terms of all targets, those of one target together and in path order.
    pub terms: Vec<Term>,
    /// How many paths were merged.
    pub paths: u32,
    /// How many tokens the paths had before merging.
    pub path_tokens: u64,
}

/// A node while the trie is being built.
struct Building {
    tokens: Vec<u32>,
    children: Vec<usize>,
}

impl TreeBatch {
    /// Merges paths wherever their token ids agree from the root on. Roots and children keep the order in
    /// which the paths first need them, so the result depends on nothing but the input.
    ///
    /// # Errors
    /// When a path is empty or a target lies outside `1..len` of its path.
    pub fn merge(paths: &[PathInput]) -> Result<Self, TreeError> {
        let mut arena: Vec<Building> = Vec::new();
        let mut roots: Vec<usize> = Vec::new();
        for (path, input) in paths.iter().enumerate() {
            if input.tokens.is_empty() {
                return Err(TreeError::EmptyPath { path });
            }
            if let Some(target) =
                input.targets.iter().find(|t| t.index == 0 || t.index as usize >= input.tokens.len())
            {
                return Err(TreeError::Target { path, index: target.index, len: input.tokens.len() });
            }
            insert(&mut arena, &mut roots, input.tokens.rest());
        }

        let mut batch = TreeBatch {
            paths: paths.len() as u32,
            path_tokens: paths.iter().map(|p| p.tokens.len() as u64).sum(),
            ..TreeBatch::default()
        };
        // Depth-first, so that a node's ancestors are the ones still on the stack.
        let mut place = vec![0u32; arena.len()];
        let mut stack: Vec<(usize, Option<u32>, u32)> = roots.iter().rev().map(|&r| (r, None, 0)).collect();
        while let Some((at, parent, depth)) = stack.pop() {
            let node = batch.nodes.len() as u32;
            let len = arena[at].tokens.len() as u32;
            batch.nodes.push(Node { parent, start: batch.tokens.len() as u32, len, depth });
            place[at] = node;
            batch.tokens.extend_from_slice(&arena[at].tokens);
            stack.extend(arena[at].children.iter().rev().map(|&child| (child, Some(node), depth + len)));
        }

        // (target token, temperature bits, path order): equal keys become one target with several terms.
        let mut wanted: Vec<(u32, u32, u32, PathTarget)> = Vec::new();
        for (path, input) in paths.iter().enumerate() {
            let packed = batch.packed_path(&arena, &roots, &place, &input.tokens);
            for target in &input.targets {
                let token = packed[target.index as usize];
                let predictor = packed[target.index as usize - 1];
                let term = Term { path: path as u32, ..target.term };
                wanted.push((token, target.temperature.to_bits(), predictor, PathTarget { term, ..*target }));
            }
        }
        wanted.sort_by_key(|&(token, temperature, _, ref target)| (token, temperature, target.term.path));
        for (token, temperature, predictor, target) in wanted {
            match batch.targets.last_mut() {
                Some(last) if last.token == token && last.temperature.to_bits() == temperature => {
                    last.terms += 1;
                }
                _ => batch.targets.push(Target {
                    token,
                    predictor,
                    temperature: target.temperature,
                    first_term: batch.terms.len() as u32,
                    terms: 1,
                }),
            }
            batch.terms.push(target.term);
        }
        Ok(batch)
    }

    /// Checks that nodes, targets and terms fit together as [`TreeBatch::merge`] makes them: for batches that
    /// come from elsewhere.
    ///
    /// # Errors
    /// When they do not, with the first that does not.
    pub fn check(&self) -> Result<(), TreeError> {
        let malformed = |what: String| Err(TreeError::Malformed(what));
        let end_of = |node: &Node| u64::from(node.start) + u64::from(node.len);
        // The nodes on the way down to the one at hand.
        let mut above: Vec<u32> = Vec::new();
        let mut end = 0;
        for (index, node) in self.nodes.iter().enumerate() {
            if node.len == 0 || u64::from(node.start) != end {
                let Node { start, len, .. } = node;
                return malformed(format!("node {index} has {len} tokens from {start}, but {end} is next"));
            }
            end = end_of(node);
            while above.last().copied() != node.parent && above.pop().is_some() {}
            let Some(depth) = node.parent.map_or(Some(0), |parent| {
                above
                    .last()
                    .map(|_| self.nodes[parent as usize])
                    .and_then(|above| above.depth.checked_add(above.len))
            }) else {
                return malformed(format!("node {index} does not follow its parent {:?}", node.parent));
            };
            if node.depth != depth {
                return malformed(format!("node {index} lies at {}, its parent ends at {depth}", node.depth));
            }
            above.push(index as u32);
        }
        if end != self.tokens.len() as u64 {
            return malformed(format!("its nodes have {end} tokens of {}", self.tokens.len()));
        }
        for (index, target) in self.targets.iter().enumerate() {
            let Target { token, predictor, first_term, terms, .. } = *target;
            let at = self.nodes.partition_point(|node| end_of(node) <= u64::from(token));
            let before = self.nodes.get(at).and_then(|node| match node.parent {
                _ if token > node.start => Some(token - 1),
                Some(parent) => Some(end_of(&self.nodes[parent as usize]) as u32 - 1),
                None => None,
            });
            if before != Some(predictor) {
                return malformed(format!(
                    "target {index} is token {token}, which {predictor} does not precede"
                ));
            }
            if terms == 0 || u64::from(first_term) + u64::from(terms) > self.terms.len() as u64 {
                let has = self.terms.len();
                return malformed(format!(
                    "target {index} has {terms} terms from {first_term}, but there are {has}"
                ));
            }
        }
        Ok(())
    }

    /// The terms of a target.
    pub fn terms_of(&self, target: &Target) -> &[Term] {
        let first = target.first_term as usize;
        &self.terms[first..first + target.terms as usize]
    }

    /// The nodes from a root down to `node`, in that order.
    pub fn ancestry(&self, node: u32) -> Vec<u32> {
        let mut path = vec![node];
        while let Some(parent) = self.nodes[path[path.len() - 1] as usize].parent {
            path.push(parent);
        }
        path.reverse();
        path
    }

    /// Packed indices of a path's tokens: its way down the trie, which has a node end wherever a path ends.
    fn packed_path(&self, arena: &[Building], roots: &[usize], place: &[u32], tokens: &Tokens) -> Vec<u32> {
        let mut packed = Vec::with_capacity(tokens.len());
        let mut candidates = roots;
        let mut rest = tokens.rest();
        while let Some(next) = rest.first() {
            let Some(&at) = candidates.iter().find(|&&c| arena[c].tokens[0] == next) else { break };
            let start = self.nodes[place[at] as usize].start;
            packed.extend((start..).take(rest.step_along(&arena[at].tokens)));
            candidates = &arena[at].children;
        }
        packed
    }
}

/// Walks `tokens` down the trie, splitting the node where they part from it.
fn insert(arena: &mut Vec<Building>, roots: &mut Vec<usize>, mut rest: Rest<'_>) {
    let mut parent: Option<usize> = None;
    while let Some(next) = rest.first() {
        let siblings = parent.map_or(&*roots, |p| &arena[p].children);
        let Some(&at) = siblings.iter().find(|&&s| arena[s].tokens[0] == next) else {
            let leaf = arena.len();
            arena.push(Building { tokens: rest.to_vec(), children: Vec::new() });
            match parent {
                Some(p) => arena[p].children.push(leaf),
                None => roots.push(leaf),
            }
            return;
        };
        let shared = rest.step_along(&arena[at].tokens);
        if shared < arena[at].tokens.len() {
            let tail = arena[at].tokens.split_off(shared);
            let children = std::mem::take(&mut arena[at].children);
            let lower = arena.len();
            arena.push(Building { tokens: tail, children });
            arena[at].children.push(lower);
        }
        parent = Some(at);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(tokens: &[u32], targets: &[u32]) -> PathInput {
        PathInput {
            tokens: tokens.to_vec().into(),
            targets: targets
                .iter()
                .map(|&index| PathTarget { index, temperature: 1.0, term: Term::default() })
                .collect(),
        }
    }

    /// Merged batches are sound; with anything in one moved it is not, and no check of it panics.
    #[test]
    fn what_does_not_fit_together_is_found() {
        type Change = Box<dyn Fn(&mut TreeBatch)>;
        let paths = [path(&[1, 2, 3, 4, 5], &[2, 4]), path(&[1, 2, 6], &[2]), path(&[7, 8], &[1])];
        let batch = TreeBatch::merge(&paths).unwrap();
        assert_eq!(batch.check(), Ok(()));
        let mut changes: Vec<(&str, Change)> = vec![
            ("a token less", Box::new(|b| b.tokens.truncate(b.tokens.len() - 1))),
            ("a term less", Box::new(|b| b.terms.truncate(b.terms.len() - 1))),
            ("a node less", Box::new(|b| b.nodes.truncate(b.nodes.len() - 1))),
        ];
        for value in [0, 1, 3, 9, u32::MAX] {
            for i in 0..batch.nodes.len() {
                changes.push(("a start", Box::new(move |b| b.nodes[i].start = value)));
                changes.push(("a length", Box::new(move |b| b.nodes[i].len = value)));
                changes.push(("a depth", Box::new(move |b| b.nodes[i].depth = value)));
                changes.push(("a parent", Box::new(move |b| b.nodes[i].parent = Some(value))));
            }
            for i in 0..batch.targets.len() {
                changes.push(("a token", Box::new(move |b| b.targets[i].token = value)));
                changes.push(("a predictor", Box::new(move |b| b.targets[i].predictor = value)));
            }
        }
        for value in [4, 9, u32::MAX] {
            changes.push(("a first term", Box::new(move |b| b.targets[0].first_term = value)));
            changes.push(("terms", Box::new(move |b| b.targets[0].terms = value.wrapping_add(1))));
        }
        for (what, change) in changes {
            let mut other = batch.clone();
            change(&mut other);
            assert!(other == batch || other.check().is_err(), "{what}: {other:?}");
        }
    }

    /// The golden tree of the reference: three sequences, ten merged tokens.
    #[test]
    fn merges_the_golden_tree() {
        let batch = TreeBatch::merge(&[
            path(&[1, 2, 3, 4, 5], &[2, 3, 4]),
            path(&[1, 2, 3, 6, 7, 8], &[2, 3, 4, 5]),
            path(&[1, 2, 9, 10], &[3]),
        ])
        .unwrap();
        assert_eq!(batch.tokens, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let shape: Vec<_> = batch.nodes.iter().map(|n| (n.parent, n.start, n.len, n.depth)).collect();
        assert_eq!(
            shape,
            [(None, 0, 2, 0), (Some(0), 2, 1, 2), (Some(1), 3, 2, 3), (Some(1), 5, 3, 3), (Some(0), 8, 2, 2)]
        );
        let targets: Vec<_> = batch.targets.iter().map(|t| (t.token, t.predictor, t.terms)).collect();
        assert_eq!(targets, [(2, 1, 2), (3, 2, 1), (4, 3, 1), (5, 2, 1), (6, 5, 1), (7, 6, 1), (9, 8, 1)]);
        assert_eq!(batch.terms_of(&batch.targets[0]).iter().map(|t| t.path).collect::<Vec<_>>(), [0, 1]);
        assert_eq!((batch.paths, batch.path_tokens), (3, 15));
        assert_eq!(batch.ancestry(3), [0, 1, 3]);
    }

    #[test]
    fn refuses_what_cannot_be_predicted() {
        assert_eq!(
            TreeBatch::merge(&[path(&[1, 2], &[0])]),
            Err(TreeError::Target { path: 0, index: 0, len: 2 })
        );
        assert_eq!(TreeBatch::merge(&[path(&[], &[])]), Err(TreeError::EmptyPath { path: 0 }));
        let beyond = [path(&[3, 4], &[1]), path(&[1, 2], &[1, 2])];
        assert_eq!(TreeBatch::merge(&beyond), Err(TreeError::Target { path: 1, index: 2, len: 2 }));
    }

    /// A token that paths share is one target for each temperature, with the terms of its paths in their
    /// order, as they came.
    #[test]
    fn terms_stay_with_their_path_and_temperature() {
        let trained = |temperature, weight| {
            let mut path = path(&[1, 2, 3], &[2]);
            path.targets[0].temperature = temperature;
            path.targets[0].term = Term { path: 99, weight, advantage: -weight, age: 4, ..Term::default() };
            path
        };
        let paths = [trained(1.0, 0.5), trained(0.7, 0.25), trained(1.0, 0.125)];
        let batch = TreeBatch::merge(&paths).unwrap();
        assert_eq!((batch.nodes.len(), &batch.tokens[..]), (1, &[1, 2, 3][..]));
        let of = |target: &Target| -> Vec<(u32, f32, f32, u32)> {
            batch.terms_of(target).iter().map(|t| (t.path, t.weight, t.advantage, t.age)).collect()
        };
        let [cool, warm] = &batch.targets[..] else { panic!("{:?}", batch.targets) };
        assert_eq!((cool.temperature, warm.temperature), (0.7, 1.0));
        assert_eq!((cool.token, cool.predictor, warm.token, warm.predictor), (2, 1, 2, 1));
        assert_eq!(of(cool), [(1, 0.25, -0.25, 4)]);
        assert_eq!(of(warm), [(0, 0.5, -0.5, 4), (2, 0.125, -0.125, 4)]);
    }

    /// A path that ends within another, and one that goes on where another ended.
    #[test]
    fn paths_end_within_each_other() {
        let batch = TreeBatch::merge(&[path(&[1, 2], &[1]), path(&[1, 2, 3, 4], &[1, 3]), path(&[1], &[])]);
        let batch = batch.unwrap();
        let shape: Vec<_> = batch.nodes.iter().map(|n| (n.parent, n.start, n.len, n.depth)).collect();
        assert_eq!(shape, [(None, 0, 1, 0), (Some(0), 1, 1, 1), (Some(1), 2, 2, 2)]);
        let targets: Vec<_> = batch.targets.iter().map(|t| (t.token, t.predictor, t.terms)).collect();
        assert_eq!(targets, [(1, 0, 2), (3, 2, 1)]);
        assert_eq!((batch.path_tokens, batch.ancestry(2), batch.ancestry(0)), (7, vec![0, 1, 2], vec![0]));
    }

    proptest! {
        /// Every path can be read back off the tree, with its targets where they were.
        #[test]
        fn every_path_is_in_the_tree(
            inputs in prop::collection::vec(prop::collection::vec(0u32..3, 1..12), 1..10),
        ) {
            let paths: Vec<_> = inputs
                .iter()
                .map(|tokens| path(tokens, &(1..tokens.len() as u32).collect::<Vec<_>>()))
                .collect();
            let batch = TreeBatch::merge(&paths).unwrap();
            let total: usize = batch.targets.iter().map(|t| t.terms as usize).sum();
            prop_assert_eq!(total, batch.terms.len());
            // Siblings start with different tokens: nothing that could be merged was left apart.
            for (i, a) in batch.nodes.iter().enumerate() {
                for b in &batch.nodes[i + 1..] {
                    let first = |n: &Node| batch.tokens[n.start as usize];
                    prop_assert!(a.parent != b.parent || first(a) != first(b));
                }
            }
            for (p, tokens) in inputs.iter().enumerate() {
                let mine: Vec<_> = batch
                    .targets
                    .iter()
                    .filter(|t| batch.terms_of(t).iter().any(|term| term.path == p as u32))
                    .collect();
                prop_assert_eq!(mine.len(), tokens.len() - 1);
                for (index, target) in mine.iter().enumerate() {
                    prop_assert_eq!(batch.tokens[target.token as usize], tokens[index + 1]);
                    prop_assert_eq!(batch.tokens[target.predictor as usize], tokens[index]);
                }
            }
        }
    }
}
