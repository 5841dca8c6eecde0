//! From recorded trajectories to the paths that a learner eats.

use dressage_store::{PerToken, PlannedPath};
#[cfg(test)]
use dressage_tree::DEFAULT;
use dressage_tree::{Kind, Part, PathInput, PathTarget, Segment, SegmentId, Term, Trajectory};

use crate::TrainerError;

/// A leaf of a trajectory and what is trained on its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrainedPath {
    pub leaf: SegmentId,
    /// How many turns came before on the path, which an earlier leaf trains.
    pub turns_before: usize,
    /// Its actions, in order.
    pub turns: Vec<Action>,
}

/// The trained tokens of one turn on a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Action {
    /// The model call.
    pub turn: u32,
    /// Who acted.
    pub agent: String,
    /// Its segments with their tokens.
    pub segments: Vec<(SegmentId, usize)>,
}

impl Action {
    /// How many tokens it has.
    pub fn tokens(&self) -> usize {
        self.segments.iter().map(|(_, tokens)| tokens).sum()
    }
}

impl TrainedPath {
    /// How many tokens are trained.
    pub fn tokens(&self) -> usize {
        self.turns.iter().map(Action::tokens).sum()
    }
}

/// Whose tokens are targets: those of one policy, save what agents did with it that are not trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Targets<'a> {
    /// The policy.
    pub policy: &'a str,
    /// Agents that are not trained.
    pub untrained: &'a [String],
}

#[cfg(test)]
impl Targets<'static> {
    /// All tokens of the policy of a recipe that names none.
    pub const DEFAULT: Self = Targets { policy: DEFAULT, untrained: &[] };
}

impl Targets<'_> {
    /// Whether a segment holds tokens that the policy is to learn.
    pub fn contain(&self, segment: &Segment) -> bool {
        segment.kind != Kind::Given
            && segment.policy == self.policy
            && !self.untrained.contains(&segment.agent)
            && !segment.tokens.is_empty()
    }
}

/// The paths that train every sampled or demonstrated segment of the targets exactly once.
pub(crate) fn trained_paths(trajectory: &Trajectory, targets: Targets<'_>) -> Vec<TrainedPath> {
    let owners = trajectory.owners();
    let mut paths: Vec<TrainedPath> = Vec::new();
    for leaf in trajectory.leaves() {
        let on_path = trajectory.path(leaf);
        let owned = |part: &&Part<'_>| part.is_whole() && owners[part.segment.id.0 as usize] == leaf;
        let trained = || on_path.iter().filter(|part| targets.contain(part.segment));
        let mut turns: Vec<Action> = Vec::new();
        for Part { segment, .. } in trained().filter(owned) {
            let trained = (segment.id, segment.tokens.len());
            match turns.last_mut() {
                Some(last) if last.turn == segment.turn && last.agent == segment.agent => {
                    last.segments.push(trained);
                }
                _ => {
                    let (turn, agent) = (segment.turn, segment.agent.clone());
                    turns.push(Action { turn, agent, segments: vec![trained] });
                }
            }
        }
        let others = trained().filter(|part| !owned(part)).map(|part| part.segment);
        let mut before: Vec<(u32, &str)> = others.map(|s| (s.turn, s.agent.as_str())).collect();
        before.dedup();
        if !turns.is_empty() {
            paths.push(TrainedPath { leaf, turns_before: before.len(), turns });
        }
    }
    paths
}

/// A planned path with its tokens, up to the last of the targets: what comes after has no effect. `version` is that of the weights
/// which are trained.
///
/// # Errors
/// When a segment's log-probabilities do not describe the distribution it was drawn from.
pub(crate) fn path_input(
    trajectory: &Trajectory,
    planned: &PlannedPath,
    targets: Targets<'_>,
    version: u64,
) -> Result<PathInput, TrainerError> {
    let owners = trajectory.owners();
    let mut input = PathInput::default();
    let mut end = 0;
    let mut weights = planned.weight.iter();
    let mut advantages = planned.advantage.iter();
    let mut returns = planned.returns.iter().flat_map(PerToken::iter);
    let mut values = planned.values.iter().flat_map(PerToken::iter);
    for part in trajectory.path(planned.leaf) {
        let segment = part.segment;
        let owned = part.is_whole() && owners[segment.id.0 as usize] == planned.leaf;
        if targets.contain(segment) && owned {
            refuse_untrainable(segment, planned)?;
            let versions = segment.token_versions().map(Some).chain(std::iter::repeat(None));
            for (i, drawn_by) in (0..segment.tokens.len()).zip(versions) {
                let term = Term {
                    weight: weights.next().unwrap_or(0.0),
                    advantage: advantages.next().unwrap_or(0.0),
                    returns: returns.next().unwrap_or(0.0),
                    value: values.next(),
                    behaviour: segment.logprobs.get(i).copied(),
                    age: drawn_by.map_or(0, |drawn_by| version.saturating_sub(drawn_by) as u32),
                    version: drawn_by.unwrap_or(0),
                    ..Term::default()
                };
                let index = (input.tokens.len() + i) as u32;
                input.targets.push(PathTarget { index, temperature: segment.temperature, term });
            }
            end = input.tokens.len() + segment.tokens.len();
        }
        input.tokens.extend(part.tokens());
    }
    input.tokens.truncate(end);
    Ok(input)
}

fn refuse_untrainable(segment: &Segment, planned: &PlannedPath) -> Result<(), TrainerError> {
    let why = if segment.kind != Kind::Sampled {
        return Ok(());
    } else if segment.filtered {
        "it was sampled with a filter (top-p, top-k, min-p or a penalty), so its log-probabilities are not those of the \
         distribution it was drawn from; sample for training without filters"
    } else if segment.temperature <= 0.0 {
        "it was decoded greedily, which is for evaluation; sample for training at a temperature above 0"
    } else {
        return Ok(());
    };
    Err(TrainerError::Untrainable { attempt: planned.attempt, segment: segment.id.0, why })
}

#[cfg(test)]
mod tests {
    use dressage_tree::{AttemptId, VersionRun};

    use super::*;

    fn planned(leaf: u32) -> PlannedPath {
        PlannedPath {
            attempt: AttemptId::from_bytes([7; 16]),
            leaf: SegmentId(leaf),
            advantage: PerToken::same(0.5),
            weight: PerToken::same(0.25),
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
            ..Segment::given(Some(SegmentId(parent)), tokens.to_vec(), 0)
        }
    }

    /// 0 given, 1 sampled; below it 2 given, 3 sampled, 4 given; and 5 sampled.
    fn forked() -> Trajectory {
        let mut t = Trajectory::new();
        t.push(Segment::given(None, vec![1, 2], 0)).unwrap();
        t.push(sampled(0, &[3, 4])).unwrap();
        t.push(Segment::given(Some(SegmentId(1)), vec![5], 1)).unwrap();
        t.push(sampled(2, &[6])).unwrap();
        t.push(Segment::given(Some(SegmentId(3)), vec![7, 8], 2)).unwrap();
        t.push(sampled(1, &[9])).unwrap();
        t
    }

    #[test]
    fn every_sampled_token_is_trained_once() {
        let trajectory = forked();
        let paths = trained_paths(&trajectory, Targets::DEFAULT);
        let action = |segments: &[(u32, usize)]| {
            let segments = segments.iter().map(|(id, tokens)| (SegmentId(*id), *tokens)).collect();
            Action { turn: 0, agent: DEFAULT.into(), segments }
        };
        assert_eq!(
            paths,
            [
                TrainedPath { leaf: SegmentId(4), turns_before: 0, turns: vec![action(&[(1, 2), (3, 1)])] },
                TrainedPath { leaf: SegmentId(5), turns_before: 1, turns: vec![action(&[(5, 1)])] },
            ]
        );
        let first = path_input(&trajectory, &planned(4), Targets::DEFAULT, 9).unwrap();
        // What was given after the last reply is left out.
        assert_eq!(first.tokens, [1, 2, 3, 4, 5, 6]);
        assert_eq!(first.targets.iter().map(|t| t.index).collect::<Vec<_>>(), [2, 3, 5]);
        let term = first.targets[2].term;
        assert_eq!((term.behaviour, term.version, term.age), (Some(-6.0), 7, 2));
        assert_eq!((term.weight, term.advantage), (0.25, 0.5));
        assert_eq!(first.targets[2].temperature, 0.8);
        let second = path_input(&trajectory, &planned(5), Targets::DEFAULT, 9).unwrap();
        assert_eq!(second.tokens, [1, 2, 3, 4, 9]);
        assert_eq!(second.targets.iter().map(|t| t.index).collect::<Vec<_>>(), [4]);
    }

    /// Tokens of an opponent, and of an agent that is not trained, are part of a path and no targets on it.
    #[test]
    fn the_tokens_of_others_are_not_trained() {
        let mut trajectory = Trajectory::new();
        let by = |parent, token, agent: &str, policy: &str| {
            let (agent, policy) = (agent.into(), policy.into());
            Segment { agent, policy, ..sampled(parent, &[token]) }
        };
        trajectory.push(Segment::given(None, vec![1], 0)).unwrap();
        for (parent, (agent, policy)) in
            [("x", "a"), ("y", "b"), ("x", "a"), ("z", "a"), ("y", "b")].into_iter().enumerate()
        {
            let parent = parent as u32;
            trajectory.push(by(parent, 10 + parent, agent, policy)).unwrap();
        }
        let indices = |targets: Targets<'_>| {
            let [path] = &trained_paths(&trajectory, targets)[..] else { panic!() };
            let input = path_input(&trajectory, &planned(path.leaf.0), targets, 9).unwrap();
            assert_eq!(path.tokens(), input.targets.len());
            (input.targets.iter().map(|t| t.index).collect::<Vec<_>>(), input.tokens)
        };
        let untrained = ["z".to_owned()];
        let of = |policy, untrained| indices(Targets { policy, untrained });
        assert_eq!(of("a", &[]), (vec![1, 3, 4], vec![1, 10, 11, 12, 13]));
        assert_eq!(of("a", &untrained), (vec![1, 3], vec![1, 10, 11, 12]));
        assert_eq!(of("b", &untrained), (vec![2, 5], vec![1, 10, 11, 12, 13, 14]));
        assert_eq!(trained_paths(&trajectory, Targets::DEFAULT), []);
    }

    #[test]
    fn demonstrations_have_no_behaviour() {
        let mut t = Trajectory::new();
        let root = t.push(Segment::given(None, vec![1], 0)).unwrap();
        t.push(Segment::demonstrated(Some(root), vec![2, 3], 0)).unwrap();
        let input = path_input(&t, &planned(1), Targets::DEFAULT, 9).unwrap();
        assert!(input.targets.iter().all(|t| t.term.behaviour.is_none() && t.temperature == 1.0));
        assert_eq!(input.targets.len(), 2);
    }

    #[test]
    fn what_its_logprobs_do_not_describe_is_refused() {
        for (change, want) in [
            (Segment { filtered: true, ..sampled(0, &[3]) }, "sampled with a filter"),
            (Segment { temperature: 0.0, ..sampled(0, &[3]) }, "decoded greedily"),
        ] {
            let mut t = Trajectory::new();
            t.push(Segment::given(None, vec![1], 0)).unwrap();
            t.push(change).unwrap();
            let error = path_input(&t, &planned(1), Targets::DEFAULT, 9).unwrap_err();
            assert!(!error.is_user_error());
            let error = error.to_string();
            assert!(error.contains(want), "{error}");
            assert!(error.contains("attempt 07070707070707070707070707070707, segment 1"), "{error}");
        }
    }
}
