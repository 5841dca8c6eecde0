//! Segments and trajectories: what was sampled, what was given, and in which order.

use serde::{Deserialize, Serialize};

use crate::TreeError;

/// The place of a segment in its trajectory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SegmentId(pub u32);

/// Where the tokens of a segment came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Put before the model: prompt, tool result, template boundary. Never a target.
    Given,
    /// Drawn from the model by a sampler, with a log-probability and a weight version for every token.
    Sampled,
    /// Written for the model by somebody else, to be imitated: a target of cross-entropy, never of a policy loss.
    Demonstrated,
}

/// A run of tokens sampled under one version of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    /// The version of the weights.
    pub version: u64,
    /// How many consecutive tokens it drew.
    pub len: u32,
}

/// A run of tokens with one origin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// Its place in the trajectory.
    pub id: SegmentId,
    /// The segment it continues; `None` at a root.
    pub parent: Option<SegmentId>,
    /// Where the tokens came from.
    pub kind: Kind,
    /// The token ids.
    pub tokens: Vec<u32>,
    /// Behaviour log-probabilities, natural log, one per token: log-softmax(logits / temperature) over the full
    /// vocabulary. Empty unless sampled.
    pub logprobs: Vec<f32>,
    /// The temperature the tokens were drawn at; 1 unless sampled. 0 marks greedy decoding, whose log-probabilities
    /// are taken at temperature 1.
    pub temperature: f32,
    /// Whether the draw was restricted (top-p, top-k, min-p, penalties), so that `logprobs` is not the distribution
    /// the tokens came from. Such a segment cannot be trained on.
    pub filtered: bool,
    /// Which weights drew which tokens, in order. Empty unless sampled.
    pub versions: Vec<VersionRun>,
    /// Who acted: the name of the agent, empty where there is only one.
    pub agent: String,
    /// The model call this segment belongs to, counted from 0 within the attempt.
    pub turn: u32,
}

impl Segment {
    /// A given segment, to be pushed onto a trajectory (which sets its `id`).
    pub fn given(parent: Option<SegmentId>, tokens: Vec<u32>, turn: u32) -> Self {
        Self::plain(parent, Kind::Given, tokens, turn)
    }

    /// A demonstrated segment, to be pushed onto a trajectory (which sets its `id`).
    pub fn demonstrated(parent: Option<SegmentId>, tokens: Vec<u32>, turn: u32) -> Self {
        Self::plain(parent, Kind::Demonstrated, tokens, turn)
    }

    fn plain(parent: Option<SegmentId>, kind: Kind, tokens: Vec<u32>, turn: u32) -> Self {
        Segment {
            id: SegmentId(0),
            parent,
            kind,
            tokens,
            logprobs: Vec::new(),
            temperature: 1.0,
            filtered: false,
            versions: Vec::new(),
            agent: String::new(),
            turn,
        }
    }

    /// The version of the weights that drew each token, one per token; empty unless sampled.
    pub fn token_versions(&self) -> impl Iterator<Item = u64> + '_ {
        self.versions.iter().flat_map(|run| std::iter::repeat_n(run.version, run.len as usize))
    }
}

/// The forest of segments of one attempt, parents before children.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Trajectory {
    segments: Vec<Segment>,
}

impl Trajectory {
    /// An empty trajectory.
    pub fn new() -> Self {
        Self::default()
    }

    /// All segments; a segment's id is its index.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Appends a segment, setting its id.
    ///
    /// # Errors
    /// When the parent is not there yet, or the per-token records do not match the tokens and the kind.
    pub fn push(&mut self, mut segment: Segment) -> Result<SegmentId, TreeError> {
        let id = self.segments.len() as u32;
        if let Some(SegmentId(parent)) = segment.parent
            && parent >= id
        {
            return Err(TreeError::NoParent { segment: id, parent, len: self.segments.len() });
        }
        let sampled = if segment.kind == Kind::Sampled { segment.tokens.len() } else { 0 };
        let check = |found: usize, what| {
            if found == sampled {
                Ok(())
            } else {
                Err(TreeError::Length { segment: id, tokens: segment.tokens.len(), found, what })
            }
        };
        check(segment.logprobs.len(), "log-probabilities")?;
        check(segment.versions.iter().map(|run| run.len as usize).sum(), "token versions")?;
        segment.id = SegmentId(id);
        self.segments.push(segment);
        Ok(SegmentId(id))
    }

    /// Puts `tokens` in the place of the path to `leaf`: below what the two begin with, the rest is given as
    /// a new branch. A segment in which they part is split there, so ids of later segments change. Returns
    /// the segment that the new path ends with; `None` without tokens.
    ///
    /// # Errors
    /// Errors are those of [`push`](Self::push).
    pub fn branch(
        &mut self,
        leaf: SegmentId,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        let path: Vec<SegmentId> = self.path(leaf).iter().map(|segment| segment.id).collect();
        let (mut parent, mut rest) = (None, tokens);
        for id in path {
            let own = &self.segments[id.0 as usize].tokens;
            let same = own.iter().zip(rest).take_while(|(a, b)| a == b).count();
            let whole = same == own.len();
            if same > 0 {
                if !whole {
                    self.split(id, same);
                }
                parent = Some(id);
                rest = &rest[same..];
            }
            if !whole {
                break;
            }
        }
        if rest.is_empty() {
            return Ok(parent);
        }
        self.push(Segment::given(parent, rest.to_vec(), turn)).map(Some)
    }

    /// Makes two segments of one: its first `at` tokens, and the others below them, which its children then
    /// continue.
    fn split(&mut self, id: SegmentId, at: usize) {
        for segment in &mut self.segments {
            segment.id.0 += u32::from(segment.id > id);
            if let Some(parent) = &mut segment.parent {
                parent.0 += u32::from(*parent >= id);
            }
        }
        let first = &mut self.segments[id.0 as usize];
        let mut second = first.clone();
        (second.id.0, second.parent) = (id.0 + 1, Some(id));
        second.tokens = first.tokens.split_off(at);
        second.logprobs = first.logprobs.split_off(at.min(first.logprobs.len()));
        let mut left = at as u32;
        first.versions.clear();
        for run in std::mem::take(&mut second.versions) {
            let mine = run.len.min(left);
            left -= mine;
            let parts = [(&mut first.versions, mine), (&mut second.versions, run.len - mine)];
            for (versions, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
                versions.push(VersionRun { len, ..run });
            }
        }
        self.segments.insert(id.0 as usize + 1, second);
    }

    /// The segments from a root down to `leaf`, in that order. Empty when `leaf` is not in the trajectory.
    pub fn path(&self, leaf: SegmentId) -> Vec<&Segment> {
        let mut path = Vec::new();
        let mut next = Some(leaf);
        while let Some(segment) = next.and_then(|id| self.segments.get(id.0 as usize)) {
            path.push(segment);
            next = segment.parent;
        }
        path.reverse();
        path
    }

    /// The segments that no other segment continues, in order.
    pub fn leaves(&self) -> Vec<SegmentId> {
        let mut continued = vec![false; self.segments.len()];
        for segment in &self.segments {
            if let Some(parent) = segment.parent {
                continued[parent.0 as usize] = true;
            }
        }
        (0..self.segments.len() as u32).filter(|&id| !continued[id as usize]).map(SegmentId).collect()
    }

    /// The token ids on the path to `leaf`.
    pub fn path_tokens(&self, leaf: SegmentId) -> Vec<u32> {
        self.path(leaf).iter().flat_map(|segment| segment.tokens.iter().copied()).collect()
    }

    /// How many tokens were sampled in the whole trajectory.
    pub fn sampled_tokens(&self) -> usize {
        self.segments.iter().filter(|s| s.kind == Kind::Sampled).map(|s| s.tokens.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_appends_and_an_edit_forks() {
        let mut trajectory = Trajectory::new();
        let root = trajectory.push(Segment::given(None, vec![1, 2], 0)).unwrap();
        let reply = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5],
            versions: vec![VersionRun { version: 3, len: 1 }],
            ..Segment::given(Some(root), vec![7], 0)
        };
        let first = trajectory.push(reply.clone()).unwrap();
        let second = trajectory.push(reply).unwrap();
        assert_eq!(trajectory.path_tokens(first), [1, 2, 7]);
        assert_eq!(trajectory.leaves(), [first, second]);
        assert_eq!(trajectory.sampled_tokens(), 2);
        assert_eq!(trajectory.segments()[1].token_versions().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn a_branch_shares_what_it_begins_with() {
        let run = |version, len| VersionRun { version, len };
        let conversation = || {
            let mut trajectory = Trajectory::new();
            let root = trajectory.push(Segment::given(None, vec![1, 2], 0)).unwrap();
            let reply = Segment {
                kind: Kind::Sampled,
                logprobs: vec![-0.5, -1.5, -2.5],
                versions: vec![run(3, 2), run(4, 1)],
                ..Segment::given(Some(root), vec![7, 8, 9], 0)
            };
            let reply = trajectory.push(reply).unwrap();
            let leaf = trajectory.push(Segment::given(Some(reply), vec![5], 1)).unwrap();
            (trajectory, leaf)
        };
        for tokens in [&[1, 2, 7, 6][..], &[1, 2, 7, 8, 9], &[1, 2, 7, 8, 9, 5, 5], &[1, 3], &[4], &[1, 2, 7]]
        {
            let (mut trajectory, leaf) = conversation();
            let new = trajectory.branch(leaf, tokens, 1).unwrap().unwrap();
            assert_eq!(trajectory.path_tokens(new), tokens);
            let segments = trajectory.segments();
            assert!(segments.iter().enumerate().all(|(i, s)| s.id.0 as usize == i));
            assert!(segments.iter().all(|s| s.parent.is_none_or(|parent| parent < s.id)));
            assert!(segments.iter().all(|s| !s.tokens.is_empty()));
            // What was recorded is still there as it was.
            let old = segments.iter().rposition(|s| s.tokens == [5] && s.kind == Kind::Given).unwrap();
            let old = trajectory.path(SegmentId(old as u32));
            let sampled = || old.iter().filter(|s| s.kind == Kind::Sampled);
            if !tokens.ends_with(&[5]) {
                assert_eq!(old.iter().flat_map(|s| s.tokens.clone()).collect::<Vec<_>>(), [1, 2, 7, 8, 9, 5]);
                assert_eq!(
                    sampled().flat_map(|s| s.logprobs.clone()).collect::<Vec<_>>(),
                    [-0.5, -1.5, -2.5]
                );
                assert_eq!(sampled().flat_map(|s| s.token_versions()).collect::<Vec<_>>(), [3, 3, 4]);
            }
            // The tokens of the longest common beginning are there once.
            let shared = tokens.iter().zip([1, 2, 7, 8, 9, 5]).take_while(|(a, b)| **a == *b).count();
            let all: usize = segments.iter().map(|s| s.tokens.len()).sum();
            assert_eq!(all, 6 + tokens.len() - shared, "{tokens:?}");
        }
        let (mut trajectory, leaf) = conversation();
        assert_eq!(trajectory.branch(leaf, &[], 1), Ok(None));
    }

    #[test]
    fn records_must_match_the_tokens() {
        let mut trajectory = Trajectory::new();
        let orphan = trajectory.push(Segment::given(Some(SegmentId(4)), vec![1], 0));
        assert_eq!(orphan, Err(TreeError::NoParent { segment: 0, parent: 4, len: 0 }));
        let bare = Segment { kind: Kind::Sampled, ..Segment::given(None, vec![1], 0) };
        assert!(matches!(trajectory.push(bare), Err(TreeError::Length { what: "log-probabilities", .. })));
        let itself = trajectory.push(Segment::given(Some(SegmentId(0)), vec![1], 0));
        assert_eq!(itself, Err(TreeError::NoParent { segment: 0, parent: 0, len: 0 }));
        let sampled = |len| Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5, -0.7],
            versions: vec![VersionRun { version: 1, len }],
            ..Segment::given(None, vec![1, 2], 0)
        };
        for len in [0, 1, 3] {
            let what = "token versions";
            let refused = Err(TreeError::Length { segment: 0, tokens: 2, found: len as usize, what });
            assert_eq!(trajectory.push(sampled(len)), refused);
        }
        // Who did not sample has no such records, not even as many as tokens.
        let given = Segment { kind: Kind::Given, ..sampled(2) };
        let refused = TreeError::Length { segment: 0, tokens: 2, found: 2, what: "log-probabilities" };
        assert_eq!(trajectory.push(given), Err(refused));
        assert_eq!(trajectory.segments(), []);
        assert_eq!(trajectory.push(sampled(2)), Ok(SegmentId(0)));
    }

    #[test]
    fn paths_lead_from_the_root_and_tokens_know_their_version() {
        let mut trajectory = Trajectory::new();
        let root = trajectory.push(Segment::demonstrated(None, vec![1, 2], 4)).unwrap();
        let sampled = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5; 3],
            versions: vec![VersionRun { version: 3, len: 1 }, VersionRun { version: 5, len: 2 }],
            ..Segment::given(Some(root), vec![7, 8, 9], 5)
        };
        let leaf = trajectory.push(sampled).unwrap();
        let ids: Vec<SegmentId> = trajectory.path(leaf).iter().map(|segment| segment.id).collect();
        assert_eq!(ids, [root, leaf]);
        assert_eq!(trajectory.path_tokens(leaf), [1, 2, 7, 8, 9]);
        assert!(trajectory.path(SegmentId(2)).is_empty());
        assert_eq!(trajectory.leaves(), [leaf]);
        let [first, second] = trajectory.segments() else { panic!() };
        assert_eq!((first.kind, first.turn, second.turn), (Kind::Demonstrated, 4, 5));
        assert_eq!(first.token_versions().count(), 0);
        assert_eq!(second.token_versions().collect::<Vec<_>>(), [3, 5, 5]);
        assert_eq!(trajectory.sampled_tokens(), 3);
    }
}
