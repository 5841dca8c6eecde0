//! Shuffles by counter-based random numbers.

use levade_policy::uniform;

/// Purpose of a random number in a game. Random streams with the same seed and different purposes
/// are independent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// The random numbers deal cards or roles at the start of a match.
    Deal = 0x61,
    /// The random number decides a tie.
    Tie = 0x62,
}

/// Shuffles `items` with the algorithm of Fisher and Yates, as a function of the seed.
pub fn shuffle<T>(seed: u64, items: &mut [T]) {
    for last in (1..items.len()).rev() {
        items.swap(last, random_index(seed, Purpose::Deal, last as u64, last + 1));
    }
}

/// Returns a random index in `0..n`, the one with number `counter` in the stream of `seed` and
/// `purpose`. `n` must be at least 1.
pub(crate) fn random_index(seed: u64, purpose: Purpose, counter: u64, n: usize) -> usize {
    (uniform(seed, (purpose as u64) << 56, counter) * n as f64) as usize
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn shuffle_reaches_all_orders_equally_often() {
        let mut counts: BTreeMap<[u8; 3], u32> = BTreeMap::new();
        for seed in 0..6000 {
            let mut items = [0, 1, 2];
            shuffle(seed, &mut items);
            *counts.entry(items).or_default() += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
