//! Fences: markers in a judge's prompt around text from a model or a data set.

/// Returns a marker that does not occur in `prompt`: `=====`, sixteen hexadecimal digits, `=====`.
///
/// The marker depends only on the prompt, so that the same answer yields the same prompt and can be
/// cached. An answer cannot contain its own marker: the digits depend on each byte of the answer,
/// and digits that occur in the prompt are skipped.
pub(super) fn unique_fence(prompt: &str) -> String {
    let mut hash =
        prompt.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    loop {
        let digits = format!("{:016x}", mix_hash_bits(hash));
        if !prompt.contains(&digits) {
            return format!("====={digits}=====");
        }
        hash = hash.wrapping_add(1);
    }
}

/// Offset basis and prime of the 64-bit hash function FNV-1a.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// Mixes the bits of a hash with the finalizer of splitmix64, so that a small difference changes
/// all bits.
fn mix_hash_bits(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_is_deterministic_and_absent_from_prompt() {
        let first = unique_fence("5");
        assert_eq!((unique_fence("5"), first.len()), (first.clone(), 26));
        assert_ne!(unique_fence("6"), first);
        // The answer contains the markers of its own prefixes.
        let mut answer = String::from("5");
        for _ in 0..20 {
            let marker = unique_fence(&answer);
            assert!(!answer.contains(&marker));
            answer.push_str(&marker);
        }
    }

    /// No prompt is known that contains the digits of its own hash, so the retry of `unique_fence`
    /// is tested only through `mix_hash_bits`, which gives each retry other digits.
    #[test]
    fn mixed_hashes_are_distinct() {
        let mut all: Vec<u64> =
            (0..1000u64).map(|more| mix_hash_bits(OFFSET.wrapping_add(more))).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 1000);
    }
}
