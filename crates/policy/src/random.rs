//! Counter-based random numbers (Philox): a number is a pure function of its purpose, not of the
//! time of the call.
//!
//! A sampled token depends on the seed of the run, the stream of its call (`calls`) and its
//! position in the sequence. An order of tasks depends on the seed and the epoch. The time of the
//! computation and concurrent work have no influence.

/// Returns a uniform number in [0, 1) with 53 random bits, as a pure function of (`seed`, `stream`,
/// `counter`).
///
/// The generator is Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as
/// 1, 2, 3", SC 2011). The key is the seed; the counter block is (stream, counter).
pub fn uniform(seed: u64, stream: u64, counter: u64) -> f64 {
    let [a, b, _, _] = philox(
        [seed as u32, (seed >> 32) as u32],
        [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32],
    );
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn philox(mut key: [u32; 2], mut block: [u32; 4]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key[0] = key[0].wrapping_add(0x9E37_79B9);
            key[1] = key[1].wrapping_add(0xBB67_AE85);
        }
        let first = u64::from(block[0]) * 0xD251_1F53;
        let second = u64::from(block[2]) * 0xCD9E_8D57;
        block = [
            (second >> 32) as u32 ^ block[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ block[3] ^ key[1],
            first as u32,
        ];
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known-answer vectors of the Random123 distribution.
    #[test]
    fn philox_matches_random123_vectors() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_stays_in_range_with_mean_half() {
        let samples: Vec<f64> = (0..10_000).map(|i| uniform(7, 3, i)).collect();
        assert!(samples.iter().all(|u| (0.0..1.0).contains(u)));
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert_ne!(uniform(7, 3, 0), uniform(7, 4, 0));
    }
}
