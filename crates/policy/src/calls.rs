//! Random number streams for the model calls of an attempt.
//!
//! # Guarantees
//! - A call's stream is fixed when the call is admitted, and is kept when the call is continued.
//! - The stream depends only on the attempt, the agent, the prompt, and the number of earlier calls
//!   of that agent with the same prompt. Two agents, or two calls at equal positions, never share
//!   random numbers, and the order in which parallel calls arrive does not matter.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

/// Assigns random number streams to the calls of an attempt.
#[derive(Debug, Clone)]
pub struct CallStreams {
    /// Random number stream of the attempt.
    attempt: u64,
    /// Number of model calls so far for each hash of attempt, agent and prompt.
    call_counts: HashMap<[u8; 32], u32>,
}

impl CallStreams {
    /// Creates the random number streams for the calls of an attempt. `attempt` is the attempt's
    /// own stream, unique in the run.
    pub fn new(attempt: u64) -> Self {
        CallStreams { attempt, call_counts: HashMap::new() }
    }

    /// Returns the random number stream of the next call in which `agent` continues `prompt`: the
    /// first 8 bytes of the SHA-256 of attempt, agent, prompt and the number of equal calls before.
    /// Among a million streams, the probability that two coincide is 3 in 10⁸.
    pub fn next_stream(&mut self, agent: &str, prompt: &[u32]) -> u64 {
        let mut hash = Sha256::new();
        hash.update(self.attempt.to_le_bytes());
        hash.update(agent.as_bytes());
        // This byte does not occur in UTF-8, so it separates the agent's name from the prompt.
        hash.update([0xFF]);
        for token in prompt {
            hash.update(token.to_le_bytes());
        }
        let call: [u8; 32] = hash.finalize().into();
        let ordinal = self.call_counts.entry(call).or_insert(0);
        let stream =
            Sha256::new().chain_update(call).chain_update(ordinal.to_le_bytes()).finalize();
        *ordinal += 1;
        stream.iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn call_streams_are_distinct_in_any_order() {
        let calls = [
            ("a", &[1, 2][..]),
            ("a", &[1, 2]),
            ("b", &[1, 2]),
            ("a", &[1]),
            ("a", &[]),
            ("", &[1, 2]),
        ];
        let mut streams = CallStreams::new(7);
        let all: Vec<u64> =
            calls.iter().map(|(agent, prompt)| streams.next_stream(agent, prompt)).collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), calls.len());
        assert!(!all.contains(&CallStreams::new(8).next_stream("a", &[1, 2])));
        // The order of arrival does not matter, except among equal calls.
        let mut again = CallStreams::new(7);
        let mut reversed: Vec<u64> =
            calls.iter().rev().map(|(agent, prompt)| again.next_stream(agent, prompt)).collect();
        reversed.reverse();
        reversed.swap(0, 1);
        assert_eq!(reversed, all);
    }

    /// Recorded runs depend on these numbers.
    #[test]
    fn call_streams_match_recorded_streams() {
        let mut streams = CallStreams::new(1);
        let found = [
            streams.next_stream("default", &[1, 2, 3]),
            streams.next_stream("default", &[1, 2, 3]),
        ];
        assert_eq!(found, [12_693_513_636_235_724_291, 7_330_053_605_925_622_207]);
    }
}
