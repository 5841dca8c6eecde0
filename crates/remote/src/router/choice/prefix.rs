//! Selects the replica that has cached the longest prefix of a prompt.
//!
//! Replicas with many more calls than the least loaded replica are excluded: with more than
//! `ratio` (1.5) × the calls of the least loaded replica + `slack` (8). Among the remaining
//! replicas, the rule selects the replica whose recorded sequences share the longest prefix with
//! the prompt. On a tie, it selects the replica with the fewest calls, and on a further tie the
//! replica with the fewest blocks in the index. The size of the index is bounded.
//!
//! So attempts at one task and turns of one conversation go to the replica that has cached their
//! prefix. A burst of such calls spreads when waiting would cost more than computing the prefix
//! again, and prompts that are new to all replicas go to the least loaded replica.

use super::prefix_index::PrefixIndex;
use super::{ReplicaCandidate, ReplicaSelector};

/// Limits of the strategy [`Choice::Prefix`](super::Choice::Prefix).
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixOptions {
    /// Bound on a replica's load, as a multiple of the calls on the least loaded replica. A replica
    /// with more calls than `ratio` times this number plus `slack` is not selected.
    pub ratio: f64,
    /// Number of calls that is added to the bound.
    pub slack: usize,
    /// Maximum number of entries in the index of prefixes. An entry is a block of 16 tokens that
    /// one replica has cached, and takes at most 200 bytes.
    pub max_blocks: usize,
}

impl Default for PrefixOptions {
    fn default() -> Self {
        PrefixOptions { ratio: 1.5, slack: 8, max_blocks: 1 << 18 }
    }
}

/// Strategy that selects the replica with the longest cached prefix of the prompt.
#[derive(Debug)]
pub(crate) struct Prefix {
    options: PrefixOptions,
    index: PrefixIndex,
}

impl Prefix {
    pub fn new(options: PrefixOptions) -> Self {
        Prefix { index: PrefixIndex::new(options.max_blocks), options }
    }
}

impl ReplicaSelector for Prefix {
    fn choose(&mut self, prompt: &[u32], candidates: &[ReplicaCandidate]) -> usize {
        let min_running =
            candidates.iter().map(|candidate| candidate.running).min().unwrap_or_default();
        let max_running = min_running as f64 * self.options.ratio + self.options.slack as f64;
        let shared_blocks = self.index.count_shared_blocks(prompt);
        let near = candidates.iter().filter(|candidate| candidate.running as f64 <= max_running);
        near.max_by_key(|candidate| {
            let ReplicaCandidate { replica, running } = **candidate;
            let reversed_load =
                std::cmp::Reverse((running, self.index.num_blocks(replica), replica));
            (shared_blocks.get(&replica).copied().unwrap_or_default(), reversed_load)
        })
        .map(|candidate| candidate.replica)
        .unwrap_or_default()
    }

    fn record_tokens(&mut self, replica: usize, tokens: &[u32]) {
        self.index.insert(replica, tokens);
    }

    fn forget_replica(&mut self, replica: usize) {
        self.index.remove_replica(replica);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn among(choice: &mut Prefix, prompt: &[u32], running: [usize; 3]) -> usize {
        let candidates: Vec<ReplicaCandidate> =
            (0..3).map(|replica| ReplicaCandidate { replica, running: running[replica] }).collect();
        choice.choose(prompt, &candidates)
    }

    #[test]
    fn prefix_choice_prefers_longest_prefix_within_load_bound() {
        let mut choice = Prefix::new(PrefixOptions::default());
        let prompt: Vec<u32> = (0..100).collect();
        choice.record_tokens(1, &prompt[..40]);
        choice.record_tokens(2, &prompt[..80]);
        assert_eq!(among(&mut choice, &prompt, [0, 0, 8]), 2);
        assert_eq!(among(&mut choice, &prompt, [0, 0, 9]), 1, "the next longest one");
        assert_eq!(among(&mut choice, &prompt, [0, 9, 9]), 0);
        assert_eq!(among(&mut choice, &prompt, [10, 24, 23]), 2, "10 x 1.5 + 8 = 23");
        assert_eq!(among(&mut choice, &prompt, [10, 23, 24]), 1);
        choice.forget_replica(2);
        assert_eq!(among(&mut choice, &prompt, [0, 0, 0]), 1);
    }

    #[test]
    fn unknown_prompt_goes_to_least_loaded_replica() {
        let mut choice = Prefix::new(PrefixOptions::default());
        choice.record_tokens(0, &[7; 64]);
        assert_eq!(among(&mut choice, &[1; 64], [2, 1, 3]), 1);
        assert_eq!(among(&mut choice, &[1; 64], [1, 1, 1]), 1, "fewer blocks than the first");
    }
}
