//! Each member in turn.

use super::{Candidate, Choose};

/// A turn that goes round: the next candidate after the one that was chosen last.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    next: usize,
}

impl RoundRobin {
    /// The next in turn of `candidates`, of which there is at least one.
    pub fn turn(&mut self, candidates: impl Iterator<Item = usize> + Clone) -> usize {
        let after = candidates.clone().filter(|member| *member >= self.next).min();
        let chosen = after.or_else(|| candidates.min()).unwrap_or_default();
        self.next = chosen + 1;
        chosen
    }
}

impl Choose for RoundRobin {
    fn choose(&mut self, _prompt: &[u32], candidates: &[Candidate]) -> usize {
        self.turn(candidates.iter().map(|candidate| candidate.member))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_turn_whoever_is_there() {
        let mut turns = RoundRobin::default();
        let mut among = |members: &[usize]| turns.turn(members.iter().copied());
        assert_eq!(
            [among(&[0, 1, 2]), among(&[0, 1, 2]), among(&[0, 1, 2]), among(&[0, 1, 2])],
            [0, 1, 2, 0]
        );
        assert_eq!([among(&[0, 2]), among(&[0, 2]), among(&[1])], [2, 0, 1]);
    }
}
