//! Random numbers that depend only on seed, purpose and index, never on earlier random numbers.

use levade_policy::uniform;

/// Purpose of a stream of random numbers. Streams with different purposes are independent even if
/// they have the same seed.
#[derive(Debug, Clone, Copy)]
pub(super) enum RngPurpose {
    /// Shuffles the rows of a file.
    Shuffle = 0x51,
    /// Generates a training task.
    Training = 0x52,
    /// Generates a held-out task.
    HeldOut = 0x53,
    /// Generates a held-out task with a held-out wording.
    HeldOutWording = 0x54,
}

/// A deterministic stream of random numbers for one item of a task source.
#[derive(Debug, Clone)]
pub(super) struct TaskRng {
    seed: u64,
    stream: u64,
    next: u64,
}

impl TaskRng {
    /// Creates the stream for item `index` (below 2⁵⁶) of a purpose.
    pub fn new(seed: u64, purpose: RngPurpose, index: u64) -> Self {
        TaskRng { seed, stream: (purpose as u64) << 56 | index & ((1 << 56) - 1), next: 0 }
    }

    /// Returns a uniform random number in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        self.next += 1;
        uniform(self.seed, self.stream, self.next - 1)
    }

    /// Returns a uniform random integer in 0..n. `n` must be far below 2⁵³.
    pub fn uniform_index(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    /// Shuffles `items` uniformly (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.uniform_index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_is_uniform_and_deterministic() {
        let mut counts = [[0usize; 4]; 4];
        for index in 0..4000 {
            let mut items = [0, 1, 2, 3];
            TaskRng::new(9, RngPurpose::Shuffle, index).shuffle(&mut items);
            items.iter().enumerate().for_each(|(position, &item)| counts[item][position] += 1);
        }
        assert!(counts.iter().flatten().all(|n| (850..1150).contains(n)), "{counts:?}");
        assert_eq!(shuffled(1), shuffled(1));
        assert_ne!(shuffled(1), shuffled(2));
    }

    fn shuffled(seed: u64) -> Vec<u32> {
        let mut items: Vec<u32> = (0..50).collect();
        TaskRng::new(seed, RngPurpose::Shuffle, 0).shuffle(&mut items);
        items
    }
}
