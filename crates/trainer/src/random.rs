//! Streams and orders: every random choice of a run is a function of its seed and of what the choice is for.

use dressage_policy::uniform;
use dressage_store::AttemptKey;
use sha2::{Digest, Sha256};

/// The stream of random numbers for something in a run: the first 8 bytes of the SHA-256 of its name and numbers. Two of
/// a million streams coincide with a probability of 3 in 10⁸.
fn stream(name: &str, numbers: &[u32]) -> u64 {
    let mut hash = Sha256::new();
    hash.update(name.as_bytes());
    for number in numbers {
        hash.update(number.to_le_bytes());
    }
    hash.finalize().iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// The stream that an attempt's tokens are drawn from.
pub(crate) fn attempt_stream(key: &AttemptKey) -> u64 {
    stream(key.purpose.name(), &[key.phase, key.step, key.group, key.sample])
}

/// The stream that it is drawn from when it is made again, for the `retry`-th time.
pub(crate) fn retry_stream(key: &AttemptKey, retry: u32) -> u64 {
    stream(key.purpose.name(), &[key.phase, key.step, key.group, key.sample, retry])
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
    use dressage_store::Purpose;

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
        let key = AttemptKey { purpose: Purpose::Train, phase: 1, step: 2, group: 3, sample: 4 };
        assert_eq!(attempt_stream(&key), attempt_stream(&key));
        assert_ne!(attempt_stream(&key), attempt_stream(&AttemptKey { sample: 5, ..key }));
        assert_ne!(attempt_stream(&key), attempt_stream(&AttemptKey { purpose: Purpose::Eval, ..key }));
        assert_eq!(stream("x", &[1]), 16_210_320_079_259_542_897);
    }
}
