//! Micro-batch plans: the division of an update, which determines the order of its sums.
//!
//! A learner proposes a plan for an update, and the caller records it. The learner then trains
//! exactly as planned, or rejects the plan. An update with the same plan has the same bits, even if
//! it is repeated after the process was killed.

use levade_tree::{SequenceInput, Tokens, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// Sequences of an update before the learner divides them into micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct UpdateSequences {
    /// Token ids of the sequences, grouped by common prefix. A group should stay in one
    /// micro-batch.
    pub groups: Vec<Vec<Tokens>>,
    /// Maximum number of merged tokens of a micro-batch, unless a single sequence is longer.
    pub micro_batch_tokens: usize,
}

/// Plan of how a learner divides an update into micro-batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MicroBatchPlan {
    /// Number of ranks that train the update, each with a copy or a shard of the weights.
    pub world_size: u32,
    /// Micro-batches of the update. Micro-batches of one rank run one after another, in this order.
    pub micro_batches: Vec<MicroBatch>,
}

/// Micro-batch of an update: sequences that go through the model together.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MicroBatch {
    /// Rank that runs the micro-batch.
    pub rank: u32,
    /// Indices of sequences of the update, in the order in which they are merged. Empty if the rank
    /// runs the micro-batch only to stay in step with other ranks.
    #[serde(rename = "paths")]
    pub paths: Vec<u32>,
}

/// Plan of an empty update on one rank.
impl Default for MicroBatchPlan {
    fn default() -> Self {
        MicroBatchPlan { world_size: 1, micro_batches: Vec::new() }
    }
}

impl MicroBatchPlan {
    /// Creates a plan for one rank from the numbers of sequences in its micro-batches.
    pub fn from_sizes(sizes: impl IntoIterator<Item = usize>) -> Self {
        let mut next = 0..;
        MicroBatchPlan {
            world_size: 1,
            micro_batches: sizes
                .into_iter()
                .map(|size: usize| MicroBatch {
                    rank: 0,
                    paths: next.by_ref().take(size).collect::<Vec<u32>>(),
                })
                .collect(),
        }
    }

    /// Packs the sequences into micro-batches for one rank in order, with at most
    /// `micro_batch_tokens` merged tokens each. A group that fits into one micro-batch stays
    /// together; a larger group is divided between sequences. A sequence that exceeds the limit
    /// gets its own micro-batch.
    ///
    /// # Errors
    /// Returns an error if a sequence is empty.
    pub fn pack(update: &UpdateSequences) -> Result<Self, PolicyError> {
        let max_tokens = update.micro_batch_tokens;
        let mut chunks: Vec<&[Tokens]> = Vec::new();
        for group in &update.groups {
            if count_merged_tokens(group)? <= max_tokens {
                chunks.push(group);
            } else {
                chunks.extend(group.chunks(1));
            }
        }
        let mut filled: Vec<Vec<&Tokens>> = Vec::new();
        for chunk in chunks.into_iter().filter(|chunk| !chunk.is_empty()) {
            if let Some(last) = filled.last_mut()
                && count_merged_tokens(last.iter().copied().chain(chunk))? <= max_tokens
            {
                last.extend(chunk);
                continue;
            }
            filled.push(chunk.iter().collect());
        }
        Ok(MicroBatchPlan::from_sizes(filled.into_iter().map(|sequences| sequences.len())))
    }

    /// Checks that a learner of `world_size` ranks can follow the plan for an update of
    /// `num_sequences` sequences.
    ///
    /// # Errors
    /// Returns [`PolicyError::PlanMismatch`] with the first difference if the number of ranks
    /// differs, a rank or sequence does not exist, or a sequence is not in the plan exactly once.
    pub fn check(&self, num_sequences: usize, world_size: u32) -> Result<(), PolicyError> {
        if self.world_size != world_size {
            return mismatch_error(format!(
                "the plan is for {} ranks, but the learner has {world_size}",
                self.world_size
            ));
        }
        let mut seen = vec![false; num_sequences];
        for (i, MicroBatch { rank, paths: batch_sequences }) in
            self.micro_batches.iter().enumerate()
        {
            if *rank >= world_size {
                return mismatch_error(format!(
                    "micro-batch {i} is for rank {rank}, but the learner has {world_size} ranks"
                ));
            }
            for &sequence in batch_sequences {
                match seen.get_mut(sequence as usize) {
                    None => {
                        return mismatch_error(format!(
                            "micro-batch {i} has sequence {sequence}, but the update has \
                             {num_sequences} sequences"
                        ));
                    }
                    Some(true) => {
                        return mismatch_error(format!(
                            "micro-batch {i} has sequence {sequence}, which an earlier position of \
                             the plan already has"
                        ));
                    }
                    Some(seen) => *seen = true,
                }
            }
        }
        match seen.iter().position(|seen| !seen) {
            Some(sequence) => mismatch_error(format!("sequence {sequence} is in no micro-batch")),
            None => Ok(()),
        }
    }

    /// Returns the items of each micro-batch, in order. `sequences` has one item per sequence of
    /// the update. Indices beyond its end are ignored.
    pub fn apply<'a, T>(&'a self, sequences: &'a [T]) -> impl Iterator<Item = Vec<&'a T>> + 'a {
        self.micro_batches.iter().map(|batch| {
            batch.paths.iter().filter_map(|sequence| sequences.get(*sequence as usize)).collect()
        })
    }
}

fn mismatch_error(why: String) -> Result<(), PolicyError> {
    Err(PolicyError::PlanMismatch(why))
}

/// Returns the number of tokens of the sequences after merging.
fn count_merged_tokens<'a>(
    sequences: impl IntoIterator<Item = &'a Tokens>,
) -> Result<usize, PolicyError> {
    let sequences: Vec<SequenceInput> = sequences
        .into_iter()
        .map(|tokens| SequenceInput { tokens: tokens.clone(), targets: Vec::new() })
        .collect();
    let batch =
        TreeBatch::merge(&sequences).map_err(|error| PolicyError::Invalid(error.to_string()))?;
    Ok(batch.tokens.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(batches: &[&[u32]]) -> MicroBatchPlan {
        let batch = |sequences: &&[u32]| MicroBatch { rank: 0, paths: sequences.to_vec() };
        MicroBatchPlan { world_size: 1, micro_batches: batches.iter().map(batch).collect() }
    }

    #[test]
    fn pack_keeps_fitting_groups_together() {
        // A group has 5 tokens after merging.
        assert_eq!(filled(10).unwrap(), plan(&[&[0, 1, 2, 3, 4, 5]]));
        assert_eq!(filled(9).unwrap(), plan(&[&[0, 1, 2], &[3, 4, 5]]));
        assert_eq!(filled(4).unwrap(), plan(&[&[0, 1], &[2], &[3, 4], &[5]]));
        assert_eq!(filled(1).unwrap(), plan(&[&[0], &[1], &[2], &[3], &[4], &[5]]));
        let empty = MicroBatchPlan::pack(&UpdateSequences {
            groups: vec![vec![Tokens::default()]],
            micro_batch_tokens: 9,
        });
        assert!(empty.is_err());
        assert_eq!(
            MicroBatchPlan::pack(&UpdateSequences::default()).unwrap(),
            MicroBatchPlan::default()
        );
    }

    fn filled(micro_batch_tokens: usize) -> Result<MicroBatchPlan, PolicyError> {
        MicroBatchPlan::pack(&UpdateSequences {
            groups: vec![group(10), Vec::new(), group(20)],
            micro_batch_tokens,
        })
    }

    fn group(first: u32) -> Vec<Tokens> {
        [vec![first, 1, 2], vec![first, 1, 3], vec![first, 4]].map(Tokens::from).to_vec()
    }

    #[test]
    fn plan_check_reports_first_difference() {
        let complete = plan(&[&[1, 0], &[], &[2]]);
        complete.check(3, 1).unwrap();
        assert_eq!(
            complete.apply(&["a", "b", "c"]).collect::<Vec<_>>(),
            [vec![&"b", &"a"], vec![], vec![&"c"]]
        );
        assert!(
            mismatch_text(&complete, 3, 4)
                .contains("the plan is for 1 ranks, but the learner has 4")
        );
        assert!(mismatch_text(&complete, 4, 1).contains("sequence 3 is in no micro-batch"));
        assert!(
            mismatch_text(&complete, 2, 1)
                .contains("micro-batch 2 has sequence 2, but the update has 2")
        );
        assert!(
            mismatch_text(&plan(&[&[0], &[1, 0]]), 2, 1)
                .contains("micro-batch 1 has sequence 0, which an earlier position")
        );
        let other = MicroBatch { rank: 2, paths: vec![0] };
        let far = MicroBatchPlan { world_size: 2, micro_batches: vec![other] };
        assert!(
            mismatch_text(&far, 1, 2)
                .contains("micro-batch 0 is for rank 2, but the learner has 2 ranks")
        );
    }

    fn mismatch_text(plan: &MicroBatchPlan, sequences: usize, ranks: u32) -> String {
        plan.check(sequences, ranks).unwrap_err().to_string()
    }
}
