//! Random streams and permutations. Every random choice of a run is a function of its seed and its
//! purpose.

use levade_policy::uniform;
use levade_tree::AttemptSlot;
use sha2::{Digest, Sha256};

/// Returns the random stream of a purpose, which is given by a name and numbers: the first 8 bytes
/// of their SHA-256. The probability that two of a million streams coincide is 3 in 10⁸.
fn purpose_stream(name: &str, numbers: &[u32]) -> u64 {
    let mut hash = Sha256::new();
    hash.update(name.as_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    hash.finalize().iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Returns the random stream from which a try samples its tokens. `failed` is the number of failed
/// tries before it in the same attempt slot.
pub(crate) fn try_random_stream(index: &AttemptSlot, failed: u32) -> u64 {
    let AttemptSlot { purpose, phase, step, group, sample } = *index;
    let numbers = [phase, step, group, sample, failed];
    purpose_stream(purpose.name(), if failed == 0 { &numbers[..4] } else { &numbers })
}

/// Returns the random stream that all attempts of a group share.
pub(crate) fn group_random_stream(index: &AttemptSlot) -> u64 {
    let AttemptSlot { purpose, phase, step, group, .. } = *index;
    purpose_stream(purpose.name(), &[phase, step, group])
}

/// Returns the random stream from which the curriculum of a phase samples tasks.
pub(crate) fn curriculum_random_stream(phase: u32) -> u64 {
    purpose_stream("curriculum", &[phase])
}

/// Returns the random counter at which a pool selects a past version, in the random stream of an
/// attempt. The counter is in the upper half of the range, above all token positions.
pub(crate) fn pool_random_counter(name: &str) -> u64 {
    purpose_stream(&format!("past {name}"), &[]) | 1 << 63
}

/// Returns a random permutation of `0..n`. The seed, the purpose `name` and `numbers` determine it
/// (Fisher–Yates, as in Knuth 3.4.2 P).
pub(crate) fn shuffled_indices(seed: u64, name: &str, numbers: &[u32], n: usize) -> Vec<u32> {
    let stream = purpose_stream(name, numbers);
    let mut order: Vec<u32> = (0..n as u32).collect();
    for i in (1..n).rev() {
        // 53 random bits for fewer than 2³² positions: the bias is below 2⁻²¹.
        let j = (uniform(seed, stream, i as u64) * (i + 1) as f64) as usize;
        order.swap(i, j.min(i));
    }
    order
}

#[cfg(test)]
mod tests {
    use levade_tree::Purpose;

    use super::*;

    #[test]
    fn shuffled_indices_are_permutation_by_purpose() {
        let first = shuffled_indices(1, "tasks", &[0, 0], 50);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(first, shuffled_indices(1, "tasks", &[0, 0], 50));
        assert_ne!(first, shuffled_indices(1, "tasks", &[0, 1], 50));
        assert_ne!(first, shuffled_indices(2, "tasks", &[0, 0], 50));
        assert!(shuffled_indices(1, "tasks", &[], 0).is_empty());
    }

    /// Recorded runs depend on these numbers.
    #[test]
    fn streams_match_recorded_runs() {
        let index = AttemptSlot { purpose: Purpose::Train, phase: 1, step: 2, group: 3, sample: 4 };
        let first = try_random_stream(&index, 0);
        assert_ne!(first, try_random_stream(&AttemptSlot { sample: 5, ..index }, 0));
        assert_ne!(first, try_random_stream(&AttemptSlot { purpose: Purpose::Eval, ..index }, 0));
        assert_ne!(first, try_random_stream(&index, 1));
        assert_ne!(try_random_stream(&index, 2), try_random_stream(&index, 1));
        assert_eq!(purpose_stream("x", &[1]), 16_210_320_079_259_542_897);
    }
}
