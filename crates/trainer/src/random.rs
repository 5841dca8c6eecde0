//! Streams and orders: every random choice of a run is a function of its seed and of what the choice is for.

use levade_policy::uniform;
use levade_tree::Placement;
use sha2::{Digest, Sha256};

/// The stream of random numbers for something in a run: the first 8 bytes of the SHA-256 of its name and
/// numbers. Two of a million streams coincide with a probability of 3 in 10⁸.
fn stream(name: &str, numbers: &[u32]) -> u64 {
    let mut hash = Sha256::new();
    hash.update(name.as_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    hash.finalize().iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The stream that the tokens of a try at a place in the run are sampled from, before which `failed` tries
/// failed.
pub(crate) fn try_stream(place: &Placement, failed: u32) -> u64 {
    let Placement { purpose, phase, step, group, sample } = *place;
    let numbers = [phase, step, group, sample, failed];
    stream(purpose.name(), if failed == 0 { &numbers[..4] } else { &numbers })
}

/// A random order of `0..n` (Fisher & Yates, as in Knuth 3.4.2 P), for the given use.
pub(crate) fn order(seed: u64, name: &str, numbers: &[u32], n: usize) -> Vec<u32> {
    let stream = stream(name, numbers);
    let mut order: Vec<u32> = (0..n as u32).collect();
    for i in (1..n).rev() {
        // 53 random bits for fewer than 2³² places: the bias is below 2⁻²¹.
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
    fn orders_are_permutations_and_differ_by_use() {
        let first = order(1, "tasks", &[0, 0], 50);
        let mut sorted = first.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        assert_eq!(first, order(1, "tasks", &[0, 0], 50));
        assert_ne!(first, order(1, "tasks", &[0, 1], 50));
        assert_ne!(first, order(2, "tasks", &[0, 0], 50));
        assert!(order(1, "tasks", &[], 0).is_empty());
    }

    /// Recorded runs depend on these numbers.
    #[test]
    fn streams_are_for_ever() {
        let place = Placement { purpose: Purpose::Train, phase: 1, step: 2, group: 3, sample: 4 };
        let first = try_stream(&place, 0);
        assert_ne!(first, try_stream(&Placement { sample: 5, ..place }, 0));
        assert_ne!(first, try_stream(&Placement { purpose: Purpose::Eval, ..place }, 0));
        assert_ne!(first, try_stream(&place, 1));
        assert_ne!(try_stream(&place, 2), try_stream(&place, 1));
        assert_eq!(stream("x", &[1]), 16_210_320_079_259_542_897);
    }
}
