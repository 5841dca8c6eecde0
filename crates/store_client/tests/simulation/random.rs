//! Random numbers of a simulation, all from its seed.

use std::ops::Range;
use std::time::Duration;

/// Generator of random numbers (SplitMix64, Steele et al. 2014).
pub struct Random(u64);

impl Random {
    /// Creates the generator of a seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns an integer of `range`, which must not be empty.
    pub fn integer(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// Returns a time of `range`, in milliseconds.
    pub fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.integer(range))
    }

    /// Returns `true` with a probability of `percent`.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.integer(0..100) < percent
    }
}
