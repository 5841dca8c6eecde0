//! Converts recorded trajectories into the sequences that a learner trains on.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_store::{PerToken, PlannedSequence};

#[cfg(test)]
use levade_tree::DEFAULT;
use levade_tree::{
    MaskReason, Part, Segment, SegmentId, SequenceInput, SequenceTarget, Term, Trajectory, agent_of,
};

/// A sequence of a trajectory (root to leaf), with the tokens that are trained on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrainedSequence {
    pub leaf: SegmentId,
    /// Number of earlier turns of this sequence that are trained on another leaf's sequence.
    pub turns_before: usize,
    /// Trained turns of the sequence, in order.
    pub turns: Vec<TurnTokens>,
}

/// The trained tokens of one turn on a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TurnTokens {
    /// Index of the turn (model call) within the attempt.
    pub turn: u32,
    /// Agent that sampled the tokens.
    pub agent: String,
    /// Trained segments of the turn, each with its number of tokens.
    pub segments: Vec<(SegmentId, usize)>,
}

impl TurnTokens {
    /// Returns the number of trained tokens in this turn.
    pub fn num_tokens(&self) -> usize {
        self.segments.iter().map(|(_, tokens)| tokens).sum()
    }
}

impl TrainedSequence {
    /// Returns the number of trained tokens on this sequence.
    pub fn num_tokens(&self) -> usize {
        self.turns.iter().map(TurnTokens::num_tokens).sum()
    }
}

/// Selects the training targets of a step: the tokens of one policy, except the tokens of untrained
/// agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Targets<'a> {
    /// Name of the policy whose tokens are targets.
    pub policy: &'a str,
    /// Names of the agents that are not trained, whichever seat they take in a game.
    pub untrained: &'a [String],
    /// Whether an attempt counts as a sample of the policy only if the policy acted in the attempt.
    /// False in runs that an earlier build started.
    pub requires_acting: bool,
}

#[cfg(test)]
impl Targets<'static> {
    /// Targets of a recipe that names no policies: all tokens of the default policy.
    pub const DEFAULT: Self = Targets { policy: DEFAULT, untrained: &[], requires_acting: true };
}

impl Targets<'_> {
    /// Returns whether sampled tokens in `segment` would be training targets, by the segment's
    /// policy and agent.
    pub fn accepts_segment(&self, segment: &Segment) -> bool {
        let is_untrained =
            |name: &String| *name == segment.agent || name == agent_of(&segment.agent);
        segment.policy == self.policy && !self.untrained.iter().any(is_untrained)
    }

    /// Returns whether `segment` contains training targets.
    pub fn contains_targets(&self, segment: &Segment) -> bool {
        segment.is_target() && self.accepts_segment(segment)
    }
}

/// Number of segments, and the total number of their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SegmentCount {
    pub segments: u64,
    pub tokens: u64,
}

/// Numbers of trainable tokens and, by reason, of recorded tokens that are masked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCensus {
    pub trainable: SegmentCount,
    pub masked: BTreeMap<MaskReason, SegmentCount>,
}

impl TokenCensus {
    /// Counts the trainable and the masked tokens of the segments for which `trained` returns true.
    pub fn count_segments<'a>(
        trajectories: impl Iterator<Item = &'a Trajectory>,
        trained: impl Fn(&Segment) -> bool,
    ) -> Self {
        let mut found = TokenCensus::default();
        for segment in
            trajectories.flat_map(Trajectory::segments).filter(|segment| trained(segment))
        {
            let count = match segment.mask_reason() {
                Some(why) if !segment.tokens.is_empty() => found.masked.entry(why).or_default(),
                None if segment.is_target() => &mut found.trainable,
                _ => continue,
            };
            count.segments += 1;
            count.tokens += segment.tokens.len() as u64;
        }
        found
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &TokenCensus) {
        self.trainable.add(other.trainable);
        for (why, count) in &other.masked {
            self.masked.entry(*why).or_default().add(*count);
        }
    }

    /// Returns a list of the mask reasons, each with its number of tokens, if masks leave no
    /// trainable token. Returns `None` if there are trainable tokens or if nothing is masked.
    pub fn describe_masks(&self) -> Option<String> {
        if self.trainable.segments > 0 || self.masked.is_empty() {
            return None;
        }
        let reasons = self.masked.iter().map(|(why, SegmentCount { segments, tokens })| {
            format!("{tokens} were {why} (segments: {segments})")
        });
        Some(reasons.collect::<Vec<_>>().join(", "))
    }
}

impl SegmentCount {
    fn add(&mut self, other: SegmentCount) {
        self.segments += other.segments;
        self.tokens += other.tokens;
    }
}

/// Returns the sequences of `trajectory` that together train every target segment exactly once.
/// Masked segments stay as context for later tokens, but are not targets, as in
/// [`AttemptSequences::build_input`].
pub(crate) fn trained_sequences(
    trajectory: &Trajectory,
    targets: Targets<'_>,
) -> Vec<TrainedSequence> {
    let owners = trajectory.owners();
    let mut sequences: Vec<TrainedSequence> = Vec::new();
    for leaf in trajectory.leaves() {
        let parts = trajectory.sequence(leaf);
        let owned =
            |part: &&Part<'_>| part.is_complete() && owners[part.segment.id.0 as usize] == leaf;
        let trained = || parts.iter().filter(|part| targets.contains_targets(part.segment));
        let mut turns: Vec<TurnTokens> = Vec::new();
        for Part { segment, .. } in trained().filter(owned) {
            let trained = (segment.id, segment.tokens.len());
            match turns.last_mut() {
                Some(last) if last.turn == segment.turn && last.agent == segment.agent => {
                    last.segments.push(trained);
                }
                _ => {
                    let turn = segment.turn;
                    let agent = segment.agent.clone();
                    turns.push(TurnTokens { turn, agent, segments: vec![trained] });
                }
            }
        }
        let earlier = trained().filter(|part| !owned(part)).map(|part| part.segment);
        let mut before: Vec<(u32, &str)> = earlier.map(|s| (s.turn, s.agent.as_str())).collect();
        before.dedup();
        if !turns.is_empty() {
            sequences.push(TrainedSequence { leaf, turns_before: before.len(), turns });
        }
    }
    sequences
}

/// The sequences of one trajectory. They share the trajectory's tokens in memory.
pub(crate) struct AttemptSequences<'a> {
    trajectory: &'a Trajectory,
    /// Leaf of the sequence that trains each segment, by segment index.
    owners: Vec<SegmentId>,
    /// Token ids of each segment, by segment index.
    tokens: Vec<Arc<[u32]>>,
}

impl<'a> AttemptSequences<'a> {
    pub fn from_trajectory(trajectory: &'a Trajectory) -> Self {
        let tokens = trajectory.segments().iter().map(|segment| segment.tokens.as_slice().into());
        AttemptSequences { trajectory, owners: trajectory.owners(), tokens: tokens.collect() }
    }

    /// Builds the learner's input from a planned sequence. The input ends at the last target,
    /// because later tokens have no effect. `version` is the weight version before the update.
    pub fn build_input(
        &self,
        planned: &PlannedSequence,
        targets: Targets<'_>,
        version: u64,
    ) -> SequenceInput {
        let AttemptSequences { trajectory, owners, tokens } = self;
        let mut input = SequenceInput::default();
        let mut end = 0;
        let mut weights = planned.weight.iter();
        let mut advantages = planned.advantage.iter();
        let mut returns = planned.returns.iter().flat_map(PerToken::iter);
        let mut values = planned.values.iter().flat_map(PerToken::iter);
        for part in trajectory.sequence(planned.leaf) {
            let segment = part.segment;
            let owned = part.is_complete() && owners[segment.id.0 as usize] == planned.leaf;
            if targets.contains_targets(segment) && owned {
                let versions = segment.token_versions().map(Some).chain(std::iter::repeat(None));
                for (i, sampled_version) in (0..segment.tokens.len()).zip(versions) {
                    let term = Term {
                        weight: weights.next().unwrap_or(0.0),
                        advantage: advantages.next().unwrap_or(0.0),
                        returns: returns.next().unwrap_or(0.0),
                        value: values.next(),
                        behavior: segment.logprobs.get(i).copied(),
                        age: sampled_version.map_or(0, |sampled_version| {
                            version.saturating_sub(sampled_version) as u32
                        }),
                        version: sampled_version.unwrap_or(0),
                        ..Term::default()
                    };
                    let index = (input.tokens.len() + i) as u32;
                    input.targets.push(SequenceTarget {
                        index,
                        temperature: segment.temperature,
                        term,
                    });
                }
                end = input.tokens.len() + segment.tokens.len();
            }
            input.tokens.push(tokens[segment.id.0 as usize].clone(), part.len);
        }
        input.tokens.truncate(end);
        input
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::{AttemptId, Kind, VersionRun};
    use proptest::prelude::*;

    use super::*;

    fn planned(leaf: u32) -> PlannedSequence {
        PlannedSequence {
            attempt: AttemptId::from_bytes([7; 16]),
            leaf: SegmentId(leaf),
            advantage: PerToken::uniform(0.5),
            weight: PerToken::uniform(0.25),
            returns: None,
            values: None,
        }
    }

    fn sampled(parent: u32, tokens: &[u32]) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: tokens.iter().map(|&t| -(t as f32)).collect(),
            versions: vec![VersionRun { version: 7, len: tokens.len() as u32 }],
            temperature: 0.8,
            ..Segment::context(Some(SegmentId(parent)), tokens.to_vec(), 0)
        }
    }

    /// Segments 0 (context) and 1 (sampled). Below segment 1: 2 (context), 3 (sampled), 4
    /// (context); and 5 (sampled).
    fn forked() -> Trajectory {
        let mut t = Trajectory::new();
        t.push(Segment::context(None, vec![1, 2], 0)).unwrap();
        t.push(sampled(0, &[3, 4])).unwrap();
        t.push(Segment::context(Some(SegmentId(1)), vec![5], 1)).unwrap();
        t.push(sampled(2, &[6])).unwrap();
        t.push(Segment::context(Some(SegmentId(3)), vec![7, 8], 2)).unwrap();
        t.push(sampled(1, &[9])).unwrap();
        t
    }

    #[test]
    fn trained_sequences_contain_each_sampled_token_once() {
        let trajectory = forked();
        let sequences = trained_sequences(&trajectory, Targets::DEFAULT);
        let action = |segments: &[(u32, usize)]| {
            let segments = segments.iter().map(|(id, tokens)| (SegmentId(*id), *tokens)).collect();
            TurnTokens { turn: 0, agent: DEFAULT.into(), segments }
        };
        assert_eq!(
            sequences,
            [
                TrainedSequence {
                    leaf: SegmentId(4),
                    turns_before: 0,
                    turns: vec![action(&[(1, 2), (3, 1)])]
                },
                TrainedSequence {
                    leaf: SegmentId(5),
                    turns_before: 1,
                    turns: vec![action(&[(5, 1)])]
                },
            ]
        );
        let first = AttemptSequences::from_trajectory(&trajectory).build_input(
            &planned(4),
            Targets::DEFAULT,
            9,
        );
        // Context tokens after the last completion are not part of the sequence.
        assert_eq!(first.tokens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(first.targets.iter().map(|t| t.index).collect::<Vec<_>>(), [2, 3, 5]);
        let term = first.targets[2].term;
        assert_eq!((term.behavior, term.version, term.age), (Some(-6.0), 7, 2));
        assert_eq!((term.weight, term.advantage), (0.25, 0.5));
        assert_eq!(first.targets[2].temperature, 0.8);
        let second = AttemptSequences::from_trajectory(&trajectory).build_input(
            &planned(5),
            Targets::DEFAULT,
            9,
        );
        assert_eq!(second.tokens, [1, 2, 3, 4, 9]);
        assert_eq!(second.targets.iter().map(|t| t.index).collect::<Vec<_>>(), [4]);
    }

    /// Tokens of an opponent and of an untrained agent belong to a sequence, but are not targets of
    /// it.
    #[test]
    fn targets_exclude_other_policies_and_untrained_agents() {
        let mut trajectory = Trajectory::new();
        let by = |parent, token, agent: &str, policy: &str| {
            let agent = agent.into();
            let policy = policy.into();
            Segment { agent, policy, ..sampled(parent, &[token]) }
        };
        trajectory.push(Segment::context(None, vec![1], 0)).unwrap();
        for (parent, (agent, policy)) in
            [("x", "a"), ("y", "b"), ("x", "a"), ("z", "a"), ("y", "b")].into_iter().enumerate()
        {
            let parent = parent as u32;
            trajectory.push(by(parent, 10 + parent, agent, policy)).unwrap();
        }
        let indices = |targets: Targets<'_>| {
            let [sequence] = &trained_sequences(&trajectory, targets)[..] else { panic!() };
            let input = AttemptSequences::from_trajectory(&trajectory).build_input(
                &planned(sequence.leaf.0),
                targets,
                9,
            );
            assert_eq!(sequence.num_tokens(), input.targets.len());
            (input.targets.iter().map(|t| t.index).collect::<Vec<_>>(), input.tokens.to_vec())
        };
        let untrained = ["z".to_owned()];
        let of = |policy, untrained| indices(Targets { policy, untrained, requires_acting: true });
        assert_eq!(of("a", &[]), (vec![1, 3, 4], vec![1, 10, 11, 12, 13]));
        assert_eq!(of("a", &untrained), (vec![1, 3], vec![1, 10, 11, 12]));
        assert_eq!(of("b", &untrained), (vec![2, 5], vec![1, 10, 11, 12, 13, 14]));
        assert_eq!(trained_sequences(&trajectory, Targets::DEFAULT), []);
    }

    #[test]
    fn demonstration_targets_have_no_behavior_logprobs() {
        let mut t = Trajectory::new();
        let root = t.push(Segment::context(None, vec![1], 0)).unwrap();
        t.push(Segment::demonstrated(Some(root), vec![2, 3], 0)).unwrap();
        let input =
            AttemptSequences::from_trajectory(&t).build_input(&planned(1), Targets::DEFAULT, 9);
        assert!(input.targets.iter().all(|t| t.term.behavior.is_none() && t.temperature == 1.0));
        assert_eq!(input.targets.len(), 2);
    }

    /// Segments that cannot be trained on precede targets without being targets. A step without any
    /// other segment reports the reason.
    #[test]
    fn greedy_and_filtered_segments_are_masked_and_counted() {
        let mut t = Trajectory::new();
        t.push(Segment::context(None, vec![1], 0)).unwrap();
        t.push(Segment { temperature: 0.0, ..sampled(0, &[2, 3]) }).unwrap();
        t.push(Segment { filtered: true, agent: "b".into(), ..sampled(1, &[4]) }).unwrap();
        assert_eq!(trained_sequences(&t, Targets::DEFAULT), []);
        let all = |t: &Trajectory| TokenCensus::count_segments(std::iter::once(t), |_| true);
        let why = all(&t).describe_masks().unwrap();
        assert_eq!(
            why,
            "2 were decoded greedily (segments: 1), 1 were sampled with a filter, a penalty or a \
             bias (segments: 1)"
        );
        t.push(sampled(2, &[5, 6])).unwrap();
        let sequences = trained_sequences(&t, Targets::DEFAULT);
        assert_eq!(
            (sequences.len(), sequences[0].turns_before, sequences[0].num_tokens()),
            (1, 0, 2)
        );
        let input =
            AttemptSequences::from_trajectory(&t).build_input(&planned(3), Targets::DEFAULT, 9);
        assert_eq!(input.tokens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(input.targets.iter().map(|t| t.index).collect::<Vec<_>>(), [4, 5]);
        let TokenCensus { trainable, masked } = all(&t);
        assert_eq!(trainable, SegmentCount { segments: 1, tokens: 2 });
        assert_eq!(masked[&MaskReason::Greedy], SegmentCount { segments: 1, tokens: 2 });
        assert_eq!(masked[&MaskReason::Filtered], SegmentCount { segments: 1, tokens: 1 });
        assert_eq!(all(&t).describe_masks(), None);
        // Nothing was sampled, so masking is not the reason.
        assert_eq!(all(&Trajectory::new()).describe_masks(), None);
        // Untrained agents are not counted.
        let of_b = TokenCensus::count_segments(std::iter::once(&t), |segment| segment.agent == "b");
        assert_eq!((of_b.trainable, of_b.masked.len()), (SegmentCount::default(), 1));
    }

    proptest! {
        /// Plans count exactly the tokens that become targets, in order, and every target segment
        /// is on one sequence.
        #[test]
        fn plan_and_batch_targets_match(
            shape in prop::collection::vec((0u32..9, 0usize..4, 0u8..5, any::<bool>()), 1..14)
        ) {
            let mut t = Trajectory::new();
            t.push(Segment::context(None, vec![1, 2], 0)).unwrap();
            for (i, (parent, len, kind, _)) in shape.iter().enumerate() {
                let parent = parent % (i as u32 + 1);
                let tokens: Vec<u32> = (0..*len as u32).map(|token| 10 * i as u32 + token).collect();
                let segment = match kind {
                    0 => Segment::context(Some(SegmentId(parent)), tokens, 0),
                    1 => Segment { filtered: true, ..sampled(parent, &tokens) },
                    2 => Segment { temperature: 0.0, ..sampled(parent, &tokens) },
                    _ => sampled(parent, &tokens),
                };
                let of_parent = t.segments()[parent as usize].tokens.len() as u32;
                let after = (shape[i].3 && of_parent > 1).then(|| of_parent - 1);
                t.push(Segment { after, ..segment }).unwrap();
            }
            let mut seen = Vec::new();
            for path in trained_sequences(&t, Targets::DEFAULT) {
                let planned = planned(path.leaf.0);
                let sequences = AttemptSequences::from_trajectory(&t);
                let input = sequences.build_input(&planned, Targets::DEFAULT, 9);
                let segments = path.turns.iter().flat_map(|action| &action.segments);
                let wanted: Vec<u32> =
                    segments.clone().flat_map(|(id, _)| t.segments()[id.0 as usize].tokens.clone()).collect();
                let tokens = input.tokens.to_vec();
                let found: Vec<u32> = input.targets.iter().map(|t| tokens[t.index as usize]).collect();
                prop_assert_eq!(found.len(), path.num_tokens());
                prop_assert_eq!(found, wanted);
                seen.extend(segments.map(|(id, _)| *id));
            }
            seen.sort_unstable();
            let targets: Vec<SegmentId> = t.segments().iter().filter(|s| s.is_target()).map(|s| s.id).collect();
            prop_assert_eq!(seen, targets);
        }
    }
}
