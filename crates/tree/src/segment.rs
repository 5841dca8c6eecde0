//! Segments and trajectories: the tokens of an attempt, their origins and their order.
//!
//! A [`Segment`] is a run of token ids with one origin ([`Kind`]): context for the model, sampled
//! by it (with log-probability and weight version of every token), or demonstrated to it. Every
//! segment has the names of its agent and its policy. A [`Trajectory`] is a forest of segments; the
//! common prefix of conversations is stored once.
//!
//! # Guarantees
//! - **Append only.** Segments are added and never change. A fork within a segment states the
//!   number of its tokens that precede the fork.
//! - **Ids first.** Text is derived from token ids, never the reverse.
//! - **Masked tokens are not targets.** A segment whose tokens were sampled greedily or from a
//!   changed distribution is part of its sequences but not a target ([`Segment::is_target`]). Plans
//!   and batches both use this rule. A training step counts such tokens by reason, and fails with
//!   these reasons if it has no other token.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DEFAULT, TreeError};

/// Index of a segment in its trajectory, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SegmentId(pub u32);

/// Origin of the tokens of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The tokens are context of the model: prompt, tool result, template boundary. They are never
    /// trained on.
    #[serde(rename = "given")]
    Context,
    /// The tokens were sampled from the model, each with a log-probability and a weight version.
    Sampled,
    /// The tokens were written by another author, to be imitated: targets of cross-entropy, never
    /// of a policy loss.
    Demonstrated,
}

/// Reason why sampled tokens are not trained on: their log-probabilities do not describe the
/// distribution that they were sampled from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MaskReason {
    /// The tokens were decoded greedily, at temperature 0.
    Greedy,
    /// The tokens were sampled from a restricted or changed distribution: filters, penalties,
    /// biases.
    Filtered,
}

impl MaskReason {
    /// All reasons why sampled tokens are not trained on.
    pub const ALL: [MaskReason; 2] = [MaskReason::Greedy, MaskReason::Filtered];

    /// Returns the name of the reason in metrics.
    pub fn name(self) -> &'static str {
        match self {
            MaskReason::Greedy => "greedy",
            MaskReason::Filtered => "filtered",
        }
    }
}

impl fmt::Display for MaskReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MaskReason::Greedy => "decoded greedily",
            MaskReason::Filtered => "sampled with a filter, a penalty or a bias",
        })
    }
}

/// Consecutive tokens that were sampled under one version of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    /// Version of the weights that sampled the tokens.
    pub version: u64,
    /// Number of consecutive tokens that were sampled under this version.
    pub len: u32,
}

/// Consecutive tokens with one origin: context, sampled or demonstrated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// Index of the segment in its trajectory.
    pub id: SegmentId,
    /// Segment that this segment continues. `None` for a root.
    pub parent: Option<SegmentId>,
    /// Number of parent tokens that precede the fork. `None` if the segment continues at the
    /// parent's end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u32>,
    /// Origin of the segment's tokens.
    pub kind: Kind,
    /// Token ids of the segment.
    pub tokens: Vec<u32>,
    /// Behavior log-probability of each token, in nats: log-softmax(logits / temperature) over the
    /// full vocabulary. Empty unless the kind is `Sampled`.
    pub logprobs: Vec<f32>,
    /// Sampling temperature; 1 unless the kind is `Sampled`. 0 means greedy decoding, for which the
    /// log-probabilities are at temperature 1.
    pub temperature: f32,
    /// Whether sampling was restricted (top-p, top-k, min-p) or changed (penalties, biases), so
    /// that `logprobs` does not describe the distribution of the tokens. Such a segment is not
    /// trained on.
    pub filtered: bool,
    /// Weight versions of the tokens, in order. Empty unless the kind is `Sampled`.
    pub versions: Vec<VersionRun>,
    /// Name of the agent whose conversation contains the segment.
    pub agent: String,
    /// Name of the policy that was called. `versions` counts versions of its weights, and `tokens`
    /// are ids of its vocabulary.
    pub policy: String,
    /// Model call that the segment belongs to, counted from 0 within the attempt.
    pub turn: u32,
}

impl Segment {
    /// Creates a context segment for [`Trajectory::push`], which sets its `id`.
    pub fn context(parent: Option<SegmentId>, tokens: Vec<u32>, turn: u32) -> Self {
        Self::with_kind(parent, Kind::Context, tokens, turn)
    }

    /// Creates a demonstrated segment for [`Trajectory::push`], which sets its `id`.
    pub fn demonstrated(parent: Option<SegmentId>, tokens: Vec<u32>, turn: u32) -> Self {
        Self::with_kind(parent, Kind::Demonstrated, tokens, turn)
    }

    fn with_kind(parent: Option<SegmentId>, kind: Kind, tokens: Vec<u32>, turn: u32) -> Self {
        Segment {
            id: SegmentId(0),
            parent,
            after: None,
            kind,
            tokens,
            logprobs: Vec::new(),
            temperature: 1.0,
            filtered: false,
            versions: Vec::new(),
            agent: DEFAULT.into(),
            policy: DEFAULT.into(),
            turn,
        }
    }

    /// Returns why the segment's sampled tokens are not trained on. Returns `None` if they are
    /// trained on, and for segments of other kinds.
    pub fn mask_reason(&self) -> Option<MaskReason> {
        if self.kind != Kind::Sampled {
            None
        } else if self.temperature <= 0.0 {
            Some(MaskReason::Greedy)
        } else {
            self.filtered.then_some(MaskReason::Filtered)
        }
    }

    /// Returns whether the segment has tokens to train on: demonstrated tokens, or sampled tokens
    /// whose log-probabilities describe the distribution that they were sampled from.
    pub fn is_target(&self) -> bool {
        self.kind != Kind::Context && !self.tokens.is_empty() && self.mask_reason().is_none()
    }

    /// Sets the id of the segment to `id`, after checking the segment against its parent, which has
    /// `parent_len` tokens.
    ///
    /// # Errors
    /// Returns an error if the parent does not precede the segment or has too few tokens, or if the
    /// per-token data does not match the tokens and the kind.
    pub fn validate(&mut self, id: u32, parent_len: usize) -> Result<(), TreeError> {
        if let Some(SegmentId(parent)) = self.parent
            && parent >= id
        {
            return Err(TreeError::NoParent { segment: id, parent, len: id as usize });
        }
        let parent_len = self.parent.map_or(0, |_| parent_len);
        match self.after.map(|fork_offset| fork_offset as usize) {
            Some(fork_offset) if fork_offset == parent_len && fork_offset > 0 => self.after = None,
            Some(fork_offset) if fork_offset == 0 || fork_offset > parent_len => {
                return Err(TreeError::Fork { segment: id, after: fork_offset, len: parent_len });
            }
            _ => {}
        }
        let sampled = if self.kind == Kind::Sampled { self.tokens.len() } else { 0 };
        let check = |found: usize, what| {
            if found == sampled {
                Ok(())
            } else {
                Err(TreeError::Length { segment: id, tokens: self.tokens.len(), found, what })
            }
        };
        check(self.logprobs.len(), "log-probabilities")?;
        check(self.versions.iter().map(|run| run.len as usize).sum(), "token versions")?;
        self.id = SegmentId(id);
        Ok(())
    }

    /// Returns the weight version of each of the segment's tokens. Empty unless the kind is
    /// `Sampled`.
    pub fn token_versions(&self) -> impl Iterator<Item = u64> + '_ {
        self.versions.iter().flat_map(|run| std::iter::repeat_n(run.version, run.len as usize))
    }
}

/// The tokens of a segment that belong to a sequence: all of them, or the tokens before a fork.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Part<'a> {
    /// The segment that contains the tokens.
    pub segment: &'a Segment,
    /// Number of the segment's tokens that belong to the sequence.
    pub len: usize,
}

impl<'a> Part<'a> {
    /// Returns the tokens of the segment that belong to the sequence.
    pub fn tokens(&self) -> &'a [u32] {
        &self.segment.tokens[..self.len]
    }

    /// Returns whether all tokens of the segment belong to the sequence.
    pub fn is_complete(&self) -> bool {
        self.len == self.segment.tokens.len()
    }
}

/// The forest of segments of one attempt, with parents before children. Segments are added, but
/// never changed or removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Trajectory {
    segments: Vec<Segment>,
}

impl Trajectory {
    /// Creates an empty trajectory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all segments of the trajectory. A segment's id is its index.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Appends a segment to the trajectory, and sets its id. The existing segments do not change.
    ///
    /// # Errors
    /// Returns an error if the parent is not in the trajectory or has too few tokens, or if the
    /// per-token data does not match the tokens and the kind.
    pub fn push(&mut self, mut segment: Segment) -> Result<SegmentId, TreeError> {
        let id = self.segments.len() as u32;
        let parent = segment.parent.and_then(|parent| self.segments.get(parent.0 as usize));
        segment.validate(id, parent.map_or(0, |parent| parent.tokens.len()))?;
        self.segments.push(segment);
        Ok(SegmentId(id))
    }

    /// Sets the name of the agent of a segment. Has no effect if the segment does not exist.
    pub fn assign(&mut self, segment: SegmentId, agent: &str) {
        if let Some(segment) = self.segments.get_mut(segment.0 as usize) {
            agent.clone_into(&mut segment.agent);
        }
    }

    /// Sets the names of the agent and the policy of all segments.
    #[must_use]
    pub fn with_names(mut self, agent: &str, policy: &str) -> Self {
        for segment in &mut self.segments {
            (segment.agent, segment.policy) = (agent.to_owned(), policy.to_owned());
        }
        self
    }

    /// Returns the parts of segments that form the sequence from a root to the end of `leaf`. Empty
    /// if `leaf` is not in the trajectory.
    pub fn sequence(&self, leaf: SegmentId) -> Vec<Part<'_>> {
        let mut sequence = Vec::new();
        let mut next = Some((leaf, None));
        while let Some((id, fork_offset)) = next
            && let Some(segment) = self.segments.get(id.0 as usize)
        {
            sequence.push(Part {
                segment,
                len: fork_offset
                    .map_or(segment.tokens.len(), |fork_offset: u32| fork_offset as usize),
            });
            next = segment.parent.map(|parent| (parent, segment.after));
        }
        sequence.reverse();
        sequence
    }

    /// Returns the leaves of the trajectory: the segments that no other segment continues at their
    /// end, in order.
    pub fn leaves(&self) -> Vec<SegmentId> {
        let mut continued = vec![false; self.segments.len()];
        for segment in &self.segments {
            if let (Some(parent), None) = (segment.parent, segment.after) {
                continued[parent.0 as usize] = true;
            }
        }
        (0..self.segments.len() as u32)
            .filter(|&id| !continued[id as usize])
            .map(SegmentId)
            .collect()
    }

    /// Returns, for each segment, the first leaf whose sequence contains the segment completely.
    /// The run time grows with the number of segments, not with their depth.
    pub fn owners(&self) -> Vec<SegmentId> {
        let mut owners: Vec<Option<SegmentId>> = vec![None; self.segments.len()];
        for leaf in self.leaves() {
            let mut next = Some((leaf, true));
            while let Some((id, is_complete)) = next {
                let owner = &mut owners[id.0 as usize];
                // The segments above already have an owner.
                if owner.is_some() && is_complete {
                    break;
                }
                if is_complete {
                    *owner = Some(leaf);
                }
                let segment = &self.segments[id.0 as usize];
                next = segment.parent.map(|parent| (parent, segment.after.is_none()));
            }
        }
        // No segment continues at the end of a leaf, and every other end leads to a leaf.
        owners
            .into_iter()
            .enumerate()
            .map(|(id, owner)| owner.unwrap_or(SegmentId(id as u32)))
            .collect()
    }

    /// Returns the token ids of the sequence from a root to the end of `leaf`.
    pub fn sequence_tokens(&self, leaf: SegmentId) -> Vec<u32> {
        self.sequence(leaf).iter().flat_map(|part| part.tokens().iter().copied()).collect()
    }

    /// Returns the number of sampled tokens in the trajectory.
    pub fn sampled_tokens(&self) -> usize {
        self.segments.iter().filter(|s| s.kind == Kind::Sampled).map(|s| s.tokens.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trajectory_forks_on_edited_history() {
        let mut trajectory = Trajectory::new();
        let root = trajectory.push(Segment::context(None, vec![1, 2], 0)).unwrap();
        let completion = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5],
            versions: vec![VersionRun { version: 3, len: 1 }],
            ..Segment::context(Some(root), vec![7], 0)
        };
        let first = trajectory.push(completion.clone()).unwrap();
        let second = trajectory.push(completion).unwrap();
        assert_eq!(trajectory.sequence_tokens(first), [1, 2, 7]);
        assert_eq!(trajectory.leaves(), [first, second]);
        assert_eq!(trajectory.sampled_tokens(), 2);
        assert_eq!(trajectory.segments()[1].token_versions().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn fork_must_be_within_parent() {
        let mut trajectory = Trajectory::new();
        let root = trajectory.push(Segment::context(None, vec![1, 2, 3], 0)).unwrap();
        for (parent, fork_offset, len) in
            [(Some(root), 0, 3), (Some(root), 4, 3), (None, 1, 0), (None, 0, 0)]
        {
            let expected_error = TreeError::Fork { segment: 1, after: fork_offset as usize, len };
            assert_eq!(trajectory.push(fork(parent, fork_offset)), Err(expected_error));
        }
        let within = trajectory.push(fork(Some(root), 2)).unwrap();
        let at_end = trajectory.push(fork(Some(root), 3)).unwrap();
        assert_eq!(
            (trajectory.sequence_tokens(within), trajectory.sequence_tokens(at_end)),
            (vec![1, 2, 9], vec![1, 2, 3, 9])
        );
        assert_eq!(trajectory.segments()[at_end.0 as usize].after, None);
        let parts: Vec<(u32, usize, bool)> = trajectory
            .sequence(within)
            .iter()
            .map(|part| (part.segment.id.0, part.len, part.is_complete()))
            .collect();
        assert_eq!(parts, [(0, 2, false), (1, 1, true)]);
        assert_eq!(trajectory.leaves(), [within, at_end]);
    }

    fn fork(parent: Option<SegmentId>, fork_offset: u32) -> Segment {
        Segment { after: Some(fork_offset), ..Segment::context(parent, vec![9], 1) }
    }

    #[test]
    fn every_segment_has_an_owner() {
        let mut trajectory = Trajectory::new();
        let mut push = |parent: Option<u32>, fork_offset| {
            let segment = Segment {
                after: fork_offset,
                ..Segment::context(parent.map(SegmentId), vec![1, 2, 3], 0)
            };
            trajectory.push(segment).unwrap().0
        };
        let root = push(None, None);
        let completion = push(Some(root), None);
        let fork = push(Some(completion), Some(1));
        let below = push(Some(fork), None);
        let end = push(Some(completion), None);
        let other = push(Some(end), Some(2));
        let second = push(Some(end), Some(2));
        let owners: Vec<u32> = trajectory.owners().iter().map(|owner| owner.0).collect();
        // The sequence of `below` contains the root, but only part of the completion.
        assert_eq!(owners, [below, end, below, below, end, other, second]);
    }

    #[test]
    fn push_rejects_mismatched_token_data() {
        let mut trajectory = Trajectory::new();
        let orphan = trajectory.push(Segment::context(Some(SegmentId(4)), vec![1], 0));
        assert_eq!(orphan, Err(TreeError::NoParent { segment: 0, parent: 4, len: 0 }));
        let bare = Segment { kind: Kind::Sampled, ..Segment::context(None, vec![1], 0) };
        assert!(matches!(
            trajectory.push(bare),
            Err(TreeError::Length { what: "log-probabilities", .. })
        ));
        let itself = trajectory.push(Segment::context(Some(SegmentId(0)), vec![1], 0));
        assert_eq!(itself, Err(TreeError::NoParent { segment: 0, parent: 0, len: 0 }));
        for len in [0, 1, 3] {
            let what = "token versions";
            let expected_error =
                Err(TreeError::Length { segment: 0, tokens: 2, found: len as usize, what });
            assert_eq!(trajectory.push(sampled(len)), expected_error);
        }
        // Segments that were not sampled must have no log-probabilities, even one per token.
        let context = Segment { kind: Kind::Context, ..sampled(2) };
        let expected_error =
            TreeError::Length { segment: 0, tokens: 2, found: 2, what: "log-probabilities" };
        assert_eq!(trajectory.push(context), Err(expected_error));
        assert_eq!(trajectory.segments(), []);
        assert_eq!(trajectory.push(sampled(2)), Ok(SegmentId(0)));
    }

    fn sampled(len: u32) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5, -0.7],
            versions: vec![VersionRun { version: 1, len }],
            ..Segment::context(None, vec![1, 2], 0)
        }
    }

    #[test]
    fn path_starts_at_root_with_token_versions() {
        let mut trajectory = Trajectory::new();
        let root = trajectory.push(Segment::demonstrated(None, vec![1, 2], 4)).unwrap();
        let sampled = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5; 3],
            versions: vec![VersionRun { version: 3, len: 1 }, VersionRun { version: 5, len: 2 }],
            ..Segment::context(Some(root), vec![7, 8, 9], 5)
        };
        let leaf = trajectory.push(sampled).unwrap();
        let ids: Vec<SegmentId> =
            trajectory.sequence(leaf).iter().map(|part| part.segment.id).collect();
        assert_eq!(ids, [root, leaf]);
        assert_eq!(trajectory.sequence_tokens(leaf), [1, 2, 7, 8, 9]);
        assert!(trajectory.sequence(SegmentId(2)).is_empty());
        assert_eq!(trajectory.leaves(), [leaf]);
        let [first, second] = trajectory.segments() else { panic!() };
        assert_eq!((first.kind, first.turn, second.turn), (Kind::Demonstrated, 4, 5));
        assert_eq!(first.token_versions().count(), 0);
        assert_eq!(second.token_versions().collect::<Vec<_>>(), [3, 5, 5]);
        assert_eq!(trajectory.sampled_tokens(), 3);
    }
}
