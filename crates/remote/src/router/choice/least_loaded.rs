//! Selects the replica with the fewest calls.

use super::round_robin::RoundRobin;
use super::{ReplicaCandidate, ReplicaSelector};

/// Strategy that selects the replica with the fewest running calls. Slow replicas keep calls for
/// longer, and so get fewer calls.
#[derive(Debug, Default)]
pub(crate) struct LeastLoaded {
    round_robin: RoundRobin,
}

impl ReplicaSelector for LeastLoaded {
    fn choose(&mut self, _prompt: &[u32], candidates: &[ReplicaCandidate]) -> usize {
        let min_running = candidates.iter().map(|candidate| candidate.running).min();
        self.round_robin.select_next(
            candidates.iter().filter(|c| Some(c.running) == min_running).map(|c| c.replica),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_loaded_selects_fewest_calls_in_turn() {
        let mut choice = LeastLoaded::default();
        let mut among = |running: [usize; 3]| {
            let candidates: Vec<ReplicaCandidate> = (0..3)
                .map(|replica| ReplicaCandidate { replica, running: running[replica] })
                .collect();
            choice.choose(&[], &candidates)
        };
        assert_eq!(
            [among([2, 1, 3]), among([1, 1, 1]), among([1, 1, 1]), among([0, 1, 0])],
            [1, 2, 0, 2]
        );
    }
}
