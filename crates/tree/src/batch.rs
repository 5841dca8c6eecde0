//! The batch that a learner trains on: sequences merged into a forest by their token ids.

use serde::{Deserialize, Serialize};

use crate::tokens::TokenCursor;
use crate::{Tokens, TreeError};

/// The contribution of one sequence to the loss of one token. All normalizers (per token, per
/// sequence, per group) are folded into `weight`, so the loss of a batch is the sum of weight ×
/// loss over its terms.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Term {
    /// Index of the sequence that trains the token, in the input of [`TreeBatch::merge`].
    #[serde(rename = "path")]
    pub sequence: u32,
    /// Weight of this term in the batch's loss.
    pub weight: f32,
    /// Advantage of the token. Cross-entropy does not use it.
    pub advantage: f32,
    /// Target of a critic's value of the state before the token.
    #[serde(default)]
    pub returns: f32,
    /// Critic's value of the state before the token when the batch was built. `None` unless a loss
    /// bounds the change of the value.
    #[serde(default)]
    pub value: Option<f32>,
    /// Log-probability of the token under the policy that sampled it. `None` for demonstrations.
    #[serde(rename = "behaviour")]
    pub behavior: Option<f32>,
    /// Log-probability of the token under the proximal policy. `None` unless a loss distinguishes
    /// it from the behavior policy.
    pub proximal: Option<f32>,
    /// Log-probability of the token under the frozen reference. `None` unless a loss has a KL term.
    pub reference: Option<f32>,
    /// Log-ratio of the complete sequence between the policy being trained and the old one. `None`
    /// unless a loss uses it.
    #[serde(default)]
    #[serde(rename = "path_log_ratio")]
    pub sequence_log_ratio: Option<f32>,
    /// Whether the token was selected among the tokens of its update, for losses that treat some
    /// tokens differently.
    #[serde(default)]
    #[serde(rename = "marked")]
    pub selected: bool,
    /// Importance weight of the policy part of the loss: a constant that does not multiply
    /// penalties and bonuses. `None` without a correction.
    #[serde(default)]
    pub correction: Option<f32>,
    /// Number of versions between the weights that sampled the token and those being trained.
    #[serde(default)]
    pub age: u32,
    /// Version of the weights that sampled the token.
    pub version: u64,
}

/// A token of a sequence to train on, with its loss term.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SequenceTarget {
    /// Index of the token in its sequence, at least 1, because nothing predicts the first token.
    pub index: u32,
    /// Temperature that divides the logits before the softmax, greater than 0.
    pub temperature: f32,
    /// Loss term of the token: its weight, advantage and log-probabilities.
    pub term: Term,
}

/// A sequence of tokens with the tokens to train on, as input of [`TreeBatch::merge`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SequenceInput {
    /// All tokens of the sequence, from the root to the leaf.
    pub tokens: Tokens,
    /// Tokens to train on, by ascending index in the sequence.
    pub targets: Vec<SequenceTarget>,
}

/// A run of tokens that belong to the same sequences: `tokens[start .. start + len]` of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Index of the node that this node continues, always smaller than this node's own index.
    /// `None` for a root.
    pub parent: Option<u32>,
    /// Index of the node's first token in the packed batch.
    pub start: u32,
    /// Number of tokens of the node, at least 1.
    pub len: u32,
    /// Position of the node's first token in its sequences: the number of tokens in all ancestors.
    pub depth: u32,
}

/// A token of the packed batch to train on, with the range of its loss terms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// Index of the target token in the packed batch.
    pub token: u32,
    /// Packed index of the token before the target in its sequence. The hidden state of this token
    /// predicts the target.
    pub predictor: u32,
    /// Temperature that divides the logits before the softmax, greater than 0.
    pub temperature: f32,
    /// Index of the target's first term in the batch's terms.
    pub first_term: u32,
    /// Number of the target's terms, at least 1.
    pub terms: u32,
}

/// A batch of sequences that are merged where they share a prefix: packed tokens, the forest over
/// them, and the tokens to train on.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TreeBatch {
    /// Token ids of all nodes, in depth-first order.
    pub tokens: Vec<u32>,
    /// Nodes in depth-first order, parents before children.
    pub nodes: Vec<Node>,
    /// Tokens to train on, by ascending token index and temperature.
    pub targets: Vec<Target>,
    /// Terms of all targets, contiguous for each target and in the order of the sequences.
    pub terms: Vec<Term>,
    /// Number of merged sequences.
    #[serde(rename = "paths")]
    pub sequences: u32,
    /// Total number of tokens of all sequences before merging.
    #[serde(rename = "path_tokens")]
    pub sequence_tokens: u64,
}

/// A node of the trie, while the trie is built.
struct NodeBuilder {
    tokens: Vec<u32>,
    children: Vec<usize>,
}

impl TreeBatch {
    /// Merges the common prefixes of sequences, by token ids. Roots and children are in the order
    /// in which the sequences first reach them, so the result depends only on the input.
    ///
    /// # Errors
    /// Returns an error if a sequence is empty, or if a target's index is not in `1..len` of its
    /// sequence.
    pub fn merge(sequences: &[SequenceInput]) -> Result<Self, TreeError> {
        let mut arena: Vec<NodeBuilder> = Vec::new();
        let mut roots: Vec<usize> = Vec::new();
        for (sequence, input) in sequences.iter().enumerate() {
            if input.tokens.is_empty() {
                return Err(TreeError::EmptySequence { sequence });
            }
            if let Some(target) = input
                .targets
                .iter()
                .find(|t| t.index == 0 || t.index as usize >= input.tokens.len())
            {
                return Err(TreeError::Target {
                    sequence,
                    index: target.index,
                    len: input.tokens.len(),
                });
            }
            insert_sequence(&mut arena, &mut roots, input.tokens.cursor());
        }

        let mut batch = TreeBatch {
            sequences: sequences.len() as u32,
            sequence_tokens: sequences.iter().map(|p| p.tokens.len() as u64).sum(),
            ..TreeBatch::default()
        };
        // Depth-first order: the node's ancestors are still on the stack.
        let mut node_indices = vec![0u32; arena.len()];
        let mut stack: Vec<(usize, Option<u32>, u32)> =
            roots.iter().rev().map(|&r| (r, None, 0)).collect();
        while let Some((at, parent, depth)) = stack.pop() {
            let node = batch.nodes.len() as u32;
            let len = arena[at].tokens.len() as u32;
            batch.nodes.push(Node { parent, start: batch.tokens.len() as u32, len, depth });
            node_indices[at] = node;
            batch.tokens.extend_from_slice(&arena[at].tokens);
            stack.extend(
                arena[at].children.iter().rev().map(|&child| (child, Some(node), depth + len)),
            );
        }

        // Sorted by target token, temperature bits and sequence: equal tokens and temperatures
        // become one target with several terms.
        let mut sorted_targets: Vec<(u32, u32, u32, SequenceTarget)> = Vec::new();
        for (sequence, input) in sequences.iter().enumerate() {
            let packed = batch.packed_sequence(&arena, &roots, &node_indices, &input.tokens);
            for target in &input.targets {
                let token = packed[target.index as usize];
                let predictor = packed[target.index as usize - 1];
                let term = Term { sequence: sequence as u32, ..target.term };
                sorted_targets.push((
                    token,
                    target.temperature.to_bits(),
                    predictor,
                    SequenceTarget { term, ..*target },
                ));
            }
        }
        sorted_targets.sort_by_key(|&(token, temperature, _, ref target)| {
            (token, temperature, target.term.sequence)
        });
        for (token, temperature, predictor, target) in sorted_targets {
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

    /// Checks that nodes, targets and terms are consistent, as [`TreeBatch::merge`] builds them.
    /// Learners call this function for batches from other sources, such as a client.
    ///
    /// # Errors
    /// Returns [`TreeError::Malformed`] with the first inconsistency, if there is one.
    pub fn check(&self) -> Result<(), TreeError> {
        // Nodes from the root to the current node.
        let mut ancestors: Vec<u32> = Vec::new();
        let mut end = 0;
        for (index, node) in self.nodes.iter().enumerate() {
            if node.len == 0 || u64::from(node.start) != end {
                let Node { start, len, .. } = node;
                return malformed_error(format!(
                    "node {index} has {len} tokens from position {start}, but must be non-empty \
                     and start at {end}"
                ));
            }
            end = node_end(node);
            while ancestors.last().copied() != node.parent && ancestors.pop().is_some() {}
            let Some(depth) = node.parent.map_or(Some(0), |parent| {
                ancestors
                    .last()
                    .map(|_| self.nodes[parent as usize])
                    .and_then(|ancestors| ancestors.depth.checked_add(ancestors.len))
            }) else {
                return malformed_error(format!(
                    "the parent of node {index}, {:?}, is not an ancestor of the preceding node",
                    node.parent
                ));
            };
            if node.depth != depth {
                return malformed_error(format!(
                    "node {index} starts at depth {}, but its parent ends at depth {depth}",
                    node.depth
                ));
            }
            ancestors.push(index as u32);
        }
        if end != self.tokens.len() as u64 {
            return malformed_error(format!(
                "its nodes have {end} tokens, but the batch has {}",
                self.tokens.len()
            ));
        }
        for (index, target) in self.targets.iter().enumerate() {
            let Target { token, predictor, first_term, terms, .. } = *target;
            let at = self.nodes.partition_point(|node| node_end(node) <= u64::from(token));
            let before = self.nodes.get(at).and_then(|node| match node.parent {
                _ if token > node.start => Some(token - 1),
                Some(parent) => Some(node_end(&self.nodes[parent as usize]) as u32 - 1),
                None => None,
            });
            if before != Some(predictor) {
                return malformed_error(format!(
                    "target {index} is token {token}, but its predictor {predictor} is not the \
                     token before it"
                ));
            }
            if terms == 0 || u64::from(first_term) + u64::from(terms) > self.terms.len() as u64 {
                let has = self.terms.len();
                return malformed_error(format!(
                    "target {index} has {terms} terms from {first_term}, but there are {has}"
                ));
            }
        }
        Ok(())
    }

    /// Returns the loss terms of a target.
    pub fn terms_of(&self, target: &Target) -> &[Term] {
        let first = target.first_term as usize;
        &self.terms[first..first + target.terms as usize]
    }

    /// Returns the nodes on the path from a root to `node`, both included, in that order.
    pub fn ancestry(&self, node: u32) -> Vec<u32> {
        let mut sequence = vec![node];
        while let Some(parent) = self.nodes[sequence[sequence.len() - 1] as usize].parent {
            sequence.push(parent);
        }
        sequence.reverse();
        sequence
    }

    /// Returns the packed indices of a sequence's tokens. Every sequence ends at the end of a trie
    /// node.
    fn packed_sequence(
        &self,
        arena: &[NodeBuilder],
        roots: &[usize],
        node_indices: &[u32],
        tokens: &Tokens,
    ) -> Vec<u32> {
        let mut packed = Vec::with_capacity(tokens.len());
        let mut candidates = roots;
        let mut cursor = tokens.cursor();
        while let Some(next) = cursor.first() {
            let Some(&at) = candidates.iter().find(|&&c| arena[c].tokens[0] == next) else { break };
            let start = self.nodes[node_indices[at] as usize].start;
            packed.extend((start..).take(cursor.skip_common_prefix(&arena[at].tokens)));
            candidates = &arena[at].children;
        }
        packed
    }
}

fn malformed_error(what: String) -> Result<(), TreeError> {
    Err(TreeError::Malformed(what))
}

fn node_end(node: &Node) -> u64 {
    u64::from(node.start) + u64::from(node.len)
}

/// Inserts the remaining tokens of a sequence into the trie. Splits a node at the first token that
/// differs.
fn insert_sequence(
    arena: &mut Vec<NodeBuilder>,
    roots: &mut Vec<usize>,
    mut cursor: TokenCursor<'_>,
) {
    let mut parent: Option<usize> = None;
    while let Some(next) = cursor.first() {
        let siblings = parent.map_or(&*roots, |p| &arena[p].children);
        let Some(&at) = siblings.iter().find(|&&s| arena[s].tokens[0] == next) else {
            let leaf = arena.len();
            arena.push(NodeBuilder { tokens: cursor.to_vec(), children: Vec::new() });
            match parent {
                Some(p) => arena[p].children.push(leaf),
                None => roots.push(leaf),
            }
            return;
        };
        let common_len = cursor.skip_common_prefix(&arena[at].tokens);
        if common_len < arena[at].tokens.len() {
            let tail = arena[at].tokens.split_off(common_len);
            let children = std::mem::take(&mut arena[at].children);
            let lower = arena.len();
            arena.push(NodeBuilder { tokens: tail, children });
            arena[at].children.push(lower);
        }
        parent = Some(at);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn make_input(tokens: &[u32], targets: &[u32]) -> SequenceInput {
        SequenceInput {
            tokens: tokens.to_vec().into(),
            targets: targets
                .iter()
                .map(|&index| SequenceTarget { index, temperature: 1.0, term: Term::default() })
                .collect(),
        }
    }

    /// Merged batches pass the check. If one of their parts is changed, the check fails, without a
    /// panic.
    #[test]
    fn check_rejects_inconsistent_batches() {
        type Change = Box<dyn Fn(&mut TreeBatch)>;
        let sequences = [
            make_input(&[1, 2, 3, 4, 5], &[2, 4]),
            make_input(&[1, 2, 6], &[2]),
            make_input(&[7, 8], &[1]),
        ];
        let batch = TreeBatch::merge(&sequences).unwrap();
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

    /// The tree of the golden reference: three sequences, ten merged tokens.
    #[test]
    fn merge_matches_golden_tree() {
        let batch = TreeBatch::merge(&[
            make_input(&[1, 2, 3, 4, 5], &[2, 3, 4]),
            make_input(&[1, 2, 3, 6, 7, 8], &[2, 3, 4, 5]),
            make_input(&[1, 2, 9, 10], &[3]),
        ])
        .unwrap();
        assert_eq!(batch.tokens, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let shape: Vec<_> =
            batch.nodes.iter().map(|n| (n.parent, n.start, n.len, n.depth)).collect();
        assert_eq!(
            shape,
            [
                (None, 0, 2, 0),
                (Some(0), 2, 1, 2),
                (Some(1), 3, 2, 3),
                (Some(1), 5, 3, 3),
                (Some(0), 8, 2, 2)
            ]
        );
        let targets: Vec<_> =
            batch.targets.iter().map(|t| (t.token, t.predictor, t.terms)).collect();
        assert_eq!(
            targets,
            [(2, 1, 2), (3, 2, 1), (4, 3, 1), (5, 2, 1), (6, 5, 1), (7, 6, 1), (9, 8, 1)]
        );
        assert_eq!(
            batch.terms_of(&batch.targets[0]).iter().map(|t| t.sequence).collect::<Vec<_>>(),
            [0, 1]
        );
        assert_eq!((batch.sequences, batch.sequence_tokens), (3, 15));
        assert_eq!(batch.ancestry(3), [0, 1, 3]);
    }

    #[test]
    fn merge_rejects_unpredictable_targets() {
        assert_eq!(
            TreeBatch::merge(&[make_input(&[1, 2], &[0])]),
            Err(TreeError::Target { sequence: 0, index: 0, len: 2 })
        );
        assert_eq!(
            TreeBatch::merge(&[make_input(&[], &[])]),
            Err(TreeError::EmptySequence { sequence: 0 })
        );
        let beyond = [make_input(&[3, 4], &[1]), make_input(&[1, 2], &[1, 2])];
        assert_eq!(
            TreeBatch::merge(&beyond),
            Err(TreeError::Target { sequence: 1, index: 2, len: 2 })
        );
    }

    /// A token that sequences share is one target for each temperature, with the terms of its
    /// sequences unchanged and in their order.
    #[test]
    fn terms_keep_sequence_and_temperature() {
        let sequences =
            [trained_input(1.0, 0.5), trained_input(0.7, 0.25), trained_input(1.0, 0.125)];
        let batch = TreeBatch::merge(&sequences).unwrap();
        assert_eq!((batch.nodes.len(), &batch.tokens[..]), (1, &[1, 2, 3][..]));
        let terms_of_target = |target: &Target| -> Vec<(u32, f32, f32, u32)> {
            batch
                .terms_of(target)
                .iter()
                .map(|t| (t.sequence, t.weight, t.advantage, t.age))
                .collect()
        };
        let [cool, warm] = &batch.targets[..] else { panic!("{:?}", batch.targets) };
        assert_eq!((cool.temperature, warm.temperature), (0.7, 1.0));
        assert_eq!((cool.token, cool.predictor, warm.token, warm.predictor), (2, 1, 2, 1));
        assert_eq!(terms_of_target(cool), [(1, 0.25, -0.25, 4)]);
        assert_eq!(terms_of_target(warm), [(0, 0.5, -0.5, 4), (2, 0.125, -0.125, 4)]);
    }

    fn trained_input(temperature: f32, weight: f32) -> SequenceInput {
        let mut sequence = make_input(&[1, 2, 3], &[2]);
        sequence.targets[0].temperature = temperature;
        sequence.targets[0].term =
            Term { sequence: 99, weight, advantage: -weight, age: 4, ..Term::default() };
        sequence
    }

    /// A sequence that ends within another one, and a sequence that continues at the end of another
    /// one.
    #[test]
    fn sequences_can_end_within_longer_sequences() {
        let batch = TreeBatch::merge(&[
            make_input(&[1, 2], &[1]),
            make_input(&[1, 2, 3, 4], &[1, 3]),
            make_input(&[1], &[]),
        ]);
        let batch = batch.unwrap();
        let shape: Vec<_> =
            batch.nodes.iter().map(|n| (n.parent, n.start, n.len, n.depth)).collect();
        assert_eq!(shape, [(None, 0, 1, 0), (Some(0), 1, 1, 1), (Some(1), 2, 2, 2)]);
        let targets: Vec<_> =
            batch.targets.iter().map(|t| (t.token, t.predictor, t.terms)).collect();
        assert_eq!(targets, [(1, 0, 2), (3, 2, 1)]);
        assert_eq!(
            (batch.sequence_tokens, batch.ancestry(2), batch.ancestry(0)),
            (7, vec![0, 1, 2], vec![0])
        );
    }

    proptest! {
        /// Every sequence can be restored from the tree, with its targets at their positions.
        #[test]
        fn tree_contains_every_sequence(
            inputs in prop::collection::vec(prop::collection::vec(0u32..3, 1..12), 1..10),
        ) {
            let paths: Vec<_> = inputs
                .iter()
                .map(|tokens| make_input(tokens, &(1..tokens.len() as u32).collect::<Vec<_>>()))
                .collect();
            let batch = TreeBatch::merge(&paths).unwrap();
            let total: usize = batch.targets.iter().map(|t| t.terms as usize).sum();
            prop_assert_eq!(total, batch.terms.len());
            // Siblings start with different tokens: everything that could be merged is merged.
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
                    .filter(|t| batch.terms_of(t).iter().any(|term| term.sequence == p as u32))
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
