//! Cutting an update into micro-batches: everything that decides the order of its sums.
//!
//! A learner says how it would cut an update, that is recorded, and then it trains so or refuses: the same
//! update in the same cut has the same bits, also when it is done again after a kill.

use levade_tree::{PathInput, Tokens, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// The paths of an update before it is cut.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Uncut {
    /// Token ids of the paths, in groups whose paths begin alike: it is best to keep these together.
    pub groups: Vec<Vec<Tokens>>,
    /// Most merged tokens of a micro-batch, unless a single path is longer.
    pub micro_batch_tokens: usize,
}

/// An update as a learner cuts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// Ranks that train it, each with a copy or a share of the weights.
    pub world_size: u32,
    /// The micro-batches. Those of one rank run one after another, in this order.
    pub micro_batches: Vec<MicroBatch>,
}

/// Paths that go through the model together.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MicroBatch {
    /// The rank that runs it.
    pub rank: u32,
    /// Indices into the paths of the update, in the order of merging. None where a rank only keeps step with
    /// others.
    pub paths: Vec<u32>,
}

/// Nothing to train, on one rank.
impl Default for Cut {
    fn default() -> Self {
        Cut { world_size: 1, micro_batches: Vec::new() }
    }
}

impl Cut {
    /// A cut on one rank, by the numbers of paths in its micro-batches.
    pub fn of_sizes(sizes: impl IntoIterator<Item = usize>) -> Self {
        let mut next = 0..;
        let micro_batch =
            |size: usize| MicroBatch { rank: 0, paths: next.by_ref().take(size).collect::<Vec<u32>>() };
        Cut { world_size: 1, micro_batches: sizes.into_iter().map(micro_batch).collect() }
    }

    /// Fills micro-batches on one rank in order, up to as many merged tokens as the update allows. A group
    /// stays together where it fits into one. Where it does not, it is cut between paths; a path that is
    /// longer goes alone.
    ///
    /// # Errors
    /// When a path is empty.
    pub fn filled(update: &Uncut) -> Result<Self, PolicyError> {
        let most = update.micro_batch_tokens;
        let mut pieces: Vec<&[Tokens]> = Vec::new();
        for group in &update.groups {
            if merged(group)? <= most {
                pieces.push(group);
            } else {
                pieces.extend(group.chunks(1));
            }
        }
        let mut filled: Vec<Vec<&Tokens>> = Vec::new();
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            if let Some(last) = filled.last_mut()
                && merged(last.iter().copied().chain(piece))? <= most
            {
                last.extend(piece);
                continue;
            }
            filled.push(piece.iter().collect());
        }
        Ok(Cut::of_sizes(filled.into_iter().map(|paths| paths.len())))
    }

    /// Checks that a learner of `world_size` ranks can follow the cut of an update of `paths` paths.
    ///
    /// # Errors
    /// [`PolicyError::Cut`] names the first difference: another number of ranks, a rank that does not exist,
    /// a path that does not, or one that is not in it exactly once.
    pub fn check(&self, paths: usize, world_size: u32) -> Result<(), PolicyError> {
        let refused = |why: String| Err(PolicyError::Cut(why));
        if self.world_size != world_size {
            return refused(format!("it was made for {} ranks, and there are {world_size}", self.world_size));
        }
        let mut seen = vec![false; paths];
        for (i, MicroBatch { rank, paths: of_batch }) in self.micro_batches.iter().enumerate() {
            if *rank >= world_size {
                return refused(format!("micro-batch {i} is for rank {rank} of {world_size}"));
            }
            for &path in of_batch {
                match seen.get_mut(path as usize) {
                    None => {
                        return refused(format!("micro-batch {i} has path {path}, but there are {paths}"));
                    }
                    Some(true) => {
                        return refused(format!("micro-batch {i} has path {path}, which came before"));
                    }
                    Some(seen) => *seen = true,
                }
            }
        }
        match seen.iter().position(|seen| !seen) {
            Some(path) => refused(format!("path {path} is in no micro-batch")),
            None => Ok(()),
        }
    }

    /// The items of its micro-batches, in order, from one for each path of the update; none of a path that
    /// does not exist.
    pub fn apply<'a, T>(&'a self, paths: &'a [T]) -> impl Iterator<Item = Vec<&'a T>> + 'a {
        self.micro_batches
            .iter()
            .map(|batch| batch.paths.iter().filter_map(|path| paths.get(*path as usize)).collect())
    }
}

/// How many tokens paths have once merged.
fn merged<'a>(paths: impl IntoIterator<Item = &'a Tokens>) -> Result<usize, PolicyError> {
    let input = |tokens: &Tokens| PathInput { tokens: tokens.clone(), targets: Vec::new() };
    let paths: Vec<PathInput> = paths.into_iter().map(input).collect();
    let batch = TreeBatch::merge(&paths).map_err(|error| PolicyError::Invalid(error.to_string()))?;
    Ok(batch.tokens.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(batches: &[&[u32]]) -> Cut {
        let batch = |paths: &&[u32]| MicroBatch { rank: 0, paths: paths.to_vec() };
        Cut { world_size: 1, micro_batches: batches.iter().map(batch).collect() }
    }

    #[test]
    fn groups_stay_together_where_they_fit() {
        let group =
            |first: u32| [vec![first, 1, 2], vec![first, 1, 3], vec![first, 4]].map(Tokens::from).to_vec();
        let filled = |micro_batch_tokens| {
            Cut::filled(&Uncut { groups: vec![group(10), Vec::new(), group(20)], micro_batch_tokens })
        };
        // Merged, a group has 5 tokens.
        assert_eq!(filled(10).unwrap(), cut(&[&[0, 1, 2, 3, 4, 5]]));
        assert_eq!(filled(9).unwrap(), cut(&[&[0, 1, 2], &[3, 4, 5]]));
        assert_eq!(filled(4).unwrap(), cut(&[&[0, 1], &[2], &[3, 4], &[5]]));
        assert_eq!(filled(1).unwrap(), cut(&[&[0], &[1], &[2], &[3], &[4], &[5]]));
        let empty = Cut::filled(&Uncut { groups: vec![vec![Tokens::default()]], micro_batch_tokens: 9 });
        assert!(empty.is_err());
        assert_eq!(Cut::filled(&Uncut::default()).unwrap(), Cut::default());
    }

    #[test]
    fn differences_have_names() {
        let whole = cut(&[&[1, 0], &[], &[2]]);
        whole.check(3, 1).unwrap();
        assert_eq!(whole.apply(&["a", "b", "c"]).collect::<Vec<_>>(), [vec![&"b", &"a"], vec![], vec![&"c"]]);
        let why = |cut: &Cut, paths, ranks| cut.check(paths, ranks).unwrap_err().to_string();
        assert!(why(&whole, 3, 4).contains("made for 1 ranks, and there are 4"));
        assert!(why(&whole, 4, 1).contains("path 3 is in no micro-batch"));
        assert!(why(&whole, 2, 1).contains("micro-batch 2 has path 2, but there are 2"));
        assert!(why(&cut(&[&[0], &[1, 0]]), 2, 1).contains("micro-batch 1 has path 0, which came before"));
        let other = MicroBatch { rank: 2, paths: vec![0] };
        let far = Cut { world_size: 2, micro_batches: vec![other] };
        assert!(why(&far, 1, 2).contains("micro-batch 0 is for rank 2 of 2"));
    }
}
