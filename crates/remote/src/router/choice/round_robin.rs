//! Selects each replica in turn.

use super::{ReplicaCandidate, ReplicaSelector};

/// Strategy that selects the replicas in rotation: the next candidate after the replica that was
/// selected last.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    next: usize,
}

impl RoundRobin {
    /// Selects the next of `candidates` in rotation. `candidates` must not be empty.
    pub fn select_next(&mut self, candidates: impl Iterator<Item = usize> + Clone) -> usize {
        let after = candidates.clone().filter(|replica| *replica >= self.next).min();
        let chosen = after.or_else(|| candidates.min()).unwrap_or_default();
        self.next = chosen + 1;
        chosen
    }
}

impl ReplicaSelector for RoundRobin {
    fn choose(&mut self, _prompt: &[u32], candidates: &[ReplicaCandidate]) -> usize {
        self.select_next(candidates.iter().map(|candidate| candidate.replica))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_alternates_among_changing_replicas() {
        let mut round_robin = RoundRobin::default();
        let mut among = |replicas: &[usize]| round_robin.select_next(replicas.iter().copied());
        assert_eq!(
            [among(&[0, 1, 2]), among(&[0, 1, 2]), among(&[0, 1, 2]), among(&[0, 1, 2])],
            [0, 1, 2, 0]
        );
        assert_eq!([among(&[0, 2]), among(&[0, 2]), among(&[1])], [2, 0, 1]);
    }
}
