use levade_tree::Kind;
use proptest::prelude::*;

use super::*;

const OWNER: TokenOwner<'static> = TokenOwner { party: 0, agent: "a", policy: "p" };

fn push_completion(
    trajectory: &mut Trajectory,
    parent: Option<SegmentId>,
    tokens: &[u32],
) -> SegmentId {
    let base_segment = Segment::context(parent, tokens.to_vec(), 9);
    let versions = vec![levade_tree::VersionRun { version: 0, len: tokens.len() as u32 }];
    let segment = Segment {
        kind: Kind::Sampled,
        logprobs: vec![0.0; tokens.len()],
        versions,
        ..base_segment
    };
    trajectory.push(segment).unwrap()
}

#[test]
fn prompts_share_common_prefixes() {
    let mut trajectory = Trajectory::new();
    let mut context_tokens = ContextTokens::default();
    let mut give = |tokens: &[u32]| {
        context_tokens.add(&mut trajectory, OWNER, None, tokens, 0).unwrap().unwrap()
    };
    let first = give(&[1, 2, 3, 4]);
    assert_eq!(give(&[1, 2, 3, 4]), first);
    let longer = give(&[1, 2, 3, 4, 5]);
    let other = give(&[1, 2, 9, 9]);
    assert_eq!(give(&[1, 2, 9, 9]), other);
    assert_eq!(give(&[1, 2, 3, 4, 5]), longer);
    // Prompts that end within another one.
    let short = give(&[1, 2, 3]);
    let shorter = give(&[1, 2]);
    let one = give(&[1]);
    assert_eq!((give(&[1, 2, 3]), give(&[1, 2]), give(&[1])), (short, shorter, one));
    let stored: usize = trajectory.segments().iter().map(|segment| segment.tokens.len()).sum();
    assert_eq!(stored, 4 + 1 + 2 + 3);
    for (end, tokens) in [
        (first, &[1, 2, 3, 4][..]),
        (longer, &[1, 2, 3, 4, 5]),
        (other, &[1, 2, 9, 9]),
        (short, &[1, 2, 3]),
        (shorter, &[1, 2]),
        (one, &[1]),
    ] {
        assert_eq!(trajectory.sequence_tokens(end), tokens);
    }
    assert!(
        trajectory.segments().iter().all(|segment| segment.agent == "a" && segment.policy == "p")
    );
    // Another party has its own roots.
    let mut give = |party, tokens: &[u32]| {
        let owner = TokenOwner { party, ..OWNER };
        context_tokens.add(&mut trajectory, owner, None, tokens, 0).unwrap()
    };
    let theirs = give(1, &[1, 2, 3, 4]).unwrap();
    assert_eq!(give(1, &[]), None);
    assert_eq!(trajectory.segments()[theirs.0 as usize].parent, None);
    assert_eq!(trajectory.sequence_tokens(theirs), [1, 2, 3, 4]);
}

#[test]
fn branch_shares_prefix_of_sequence() {
    let paths = [
        &[1, 2, 7, 6][..],
        &[1, 2, 7, 8, 9],
        &[1, 2, 7, 8, 9, 5, 5],
        &[1, 3],
        &[4],
        &[1, 2, 7],
        &[1, 2],
    ];
    let full_tokens = [1, 2, 7, 8, 9, 5];
    for tokens in paths {
        let mut trajectory = Trajectory::new();
        let mut context_tokens = ContextTokens::default();
        let root = context_tokens.add(&mut trajectory, OWNER, None, &[1, 2], 0).unwrap();
        let leaf = push_completion(&mut trajectory, root, &[7, 8, 9]);
        let leaf =
            context_tokens.add(&mut trajectory, OWNER, Some((leaf, 3)), &[5], 1).unwrap().unwrap();
        let before = trajectory.segments().to_vec();
        let new = context_tokens.branch(&mut trajectory, OWNER, leaf, tokens, 1).unwrap().unwrap();
        assert_eq!(trajectory.sequence_tokens(new), tokens);
        // Recorded segments do not change.
        assert_eq!(trajectory.segments()[..before.len()], before);
        assert_eq!(trajectory.sequence_tokens(leaf), full_tokens);
        let common_length = tokens.iter().zip(full_tokens).take_while(|(a, b)| **a == *b).count();
        let shares_no_tail = usize::from(tokens == [1, 2, 7]);
        assert_eq!(
            num_stored_tokens(&trajectory),
            6 + tokens.len() - common_length + shares_no_tail,
            "{tokens:?}"
        );
        // The same branch again adds nothing.
        let count = num_stored_tokens(&trajectory);
        assert_eq!(
            context_tokens.branch(&mut trajectory, OWNER, leaf, tokens, 2).unwrap(),
            Some(new)
        );
        assert_eq!(num_stored_tokens(&trajectory), count);
        // A branch of the branch.
        let second =
            context_tokens.branch(&mut trajectory, OWNER, new, &[1, 2, 7, 8], 2).unwrap().unwrap();
        assert_eq!(trajectory.sequence_tokens(second), [1, 2, 7, 8]);
    }
    let mut trajectory = Trajectory::new();
    let mut context_tokens = ContextTokens::default();
    let leaf = context_tokens.add(&mut trajectory, OWNER, None, &[1, 2], 0).unwrap().unwrap();
    assert_eq!(context_tokens.branch(&mut trajectory, OWNER, leaf, &[], 0).unwrap(), None);
}

fn num_stored_tokens(trajectory: &Trajectory) -> usize {
    trajectory.segments().iter().map(|s| s.tokens.len()).sum::<usize>()
}

proptest! {
    /// Compared with a list of all sequences: each is stored, and no two context segments at the
    /// same position start with the same token.
    #[test]
    fn sequences_are_stored_once(steps in proptest::collection::vec(
        (any::<prop::sample::Index>(), proptest::collection::vec(0u32..3, 0..6), any::<bool>(), any::<bool>()), 1..30,
    )) {
        let (mut trajectory, mut given) = (Trajectory::new(), ContextTokens::default());
        let mut paths: Vec<(Option<SegmentId>, Vec<u32>)> = vec![(None, Vec::new())];
        for (above, tokens, samples, replaces) in steps {
            let (end, path) = above.get(&paths).clone();
            let (new, path) = match end {
                Some(end) if samples => {
                    (Some(push_completion(&mut trajectory, Some(end), &tokens)), [path, tokens].concat())
                }
                Some(end) if replaces => {
                    // The prefix of the sequence, at most as long as `tokens`, and then `tokens`.
                    let tokens = [&path[..path.len().min(tokens.len())], &tokens].concat();
                    (given.branch(&mut trajectory, OWNER, end, &tokens, 0).unwrap(), tokens)
                }
                _ => {
                    let position = end.map(|end| {
                        (end, trajectory.segments()[end.0 as usize].tokens.len() as u32)
                    });
                    let new = given.add(&mut trajectory, OWNER, position, &tokens, 0).unwrap();
                    (new, [path, tokens].concat())
                }
            };
            paths.push((new, path));
        }
        for (end, path) in &paths {
            prop_assert_eq!(&end.map_or(Vec::new(), |end| trajectory.sequence_tokens(end)), path);
        }
        let mut starts = std::collections::HashSet::new();
        let ends: Vec<SegmentId> = given.ends.values().copied().collect();
        for segment in trajectory.segments() {
            if segment.kind == Kind::Context && !ends.contains(&segment.id) {
                prop_assert!(starts.insert((segment.parent, segment.after, segment.tokens[0])));
            }
        }
    }
}
