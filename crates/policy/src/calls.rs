//! Streams of random numbers for the calls of an attempt.
//!
//! Guarantees: a call's stream is fixed when it is admitted, and is kept when the call is continued. It
//! depends on the attempt, the agent, the prompt and how often that agent has asked the same, and on nothing
//! else: two agents, or two calls at equal positions, never share draws, and the order in which parallel
//! calls arrive does not matter.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

/// Hands out the streams of an attempt's calls.
#[derive(Debug, Clone)]
pub struct CallStreams {
    /// The stream of the attempt.
    attempt: u64,
    /// How often each agent has asked each prompt.
    asked: HashMap<[u8; 32], u32>,
}

impl CallStreams {
    /// Streams for the calls of the attempt whose own stream, which no other attempt of the run has, is
    /// `attempt`.
    pub fn new(attempt: u64) -> Self {
        CallStreams { attempt, asked: HashMap::new() }
    }

    /// The stream of the next call in which `agent` asks for a continuation of `prompt`: the first 8 bytes of
    /// the SHA-256 of attempt, agent, prompt and the number of equal calls before. Two of a million streams
    /// coincide with a probability of 3 in 10⁸.
    pub fn admit(&mut self, agent: &str, prompt: &[u32]) -> u64 {
        let mut hash = Sha256::new();
        hash.update(self.attempt.to_le_bytes());
        hash.update(agent.as_bytes());
        // A byte that no text holds: the end of a name is not the beginning of a prompt.
        hash.update([0xFF]);
        for token in prompt {
            hash.update(token.to_le_bytes());
        }
        let call: [u8; 32] = hash.finalize().into();
        let ordinal = self.asked.entry(call).or_insert(0);
        let stream = Sha256::new().chain_update(call).chain_update(ordinal.to_le_bytes()).finalize();
        *ordinal += 1;
        stream.iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_call_has_a_stream_of_its_own() {
        let calls =
            [("a", &[1, 2][..]), ("a", &[1, 2]), ("b", &[1, 2]), ("a", &[1]), ("a", &[]), ("", &[1, 2])];
        let mut streams = CallStreams::new(7);
        let all: Vec<u64> = calls.iter().map(|(agent, prompt)| streams.admit(agent, prompt)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), calls.len());
        assert!(!all.contains(&CallStreams::new(8).admit("a", &[1, 2])));
        // In whatever order they arrive; of equal ones the first is the first.
        let mut again = CallStreams::new(7);
        let mut reversed: Vec<u64> =
            calls.iter().rev().map(|(agent, prompt)| again.admit(agent, prompt)).collect();
        reversed.reverse();
        reversed.swap(0, 1);
        assert_eq!(reversed, all);
    }

    /// Recorded runs depend on these numbers.
    #[test]
    fn streams_are_for_ever() {
        let mut streams = CallStreams::new(1);
        let found = [streams.admit("default", &[1, 2, 3]), streams.admit("default", &[1, 2, 3])];
        assert_eq!(found, [12_693_513_636_235_724_291, 7_330_053_605_925_622_207]);
    }
}
