//! Markers around texts that others wrote, in the prompt of a judge.

/// Returns a marker that does not occur in `prompt`: `=====`, sixteen hexadecimal digits, `=====`.
///
/// It is a function of the prompt alone, so that the same answer makes the same prompt, which is judged once.
/// An answer cannot hold its own marker: the digits depend on each byte of it, and digits that occur are
/// passed over.
pub(super) fn fence(prompt: &str) -> String {
    let mut hash = prompt.bytes().fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    loop {
        let digits = format!("{:016x}", mixed(hash));
        if !prompt.contains(&digits) {
            return format!("====={digits}=====");
        }
        hash = hash.wrapping_add(1);
    }
}

/// Offset basis and prime of FNV-1a with 64 bits.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// The finalizer of splitmix64, which spreads a small difference over all bits.
fn mixed(state: u64) -> u64 {
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_occurs_nowhere_and_repeats() {
        let first = fence("5");
        assert_eq!((fence("5"), first.len()), (first.clone(), 26));
        assert_ne!(fence("6"), first);
        // An answer that holds the markers of its own beginnings.
        let mut answer = String::from("5");
        for _ in 0..20 {
            let marker = fence(&answer);
            assert!(!answer.contains(&marker));
            answer.push_str(&marker);
        }
    }

    /// Known digits that are in the text itself cannot be had from the hash, so the loop is tested by its
    /// parts.
    #[test]
    fn fence_differs_in_digits_for_each_hash() {
        let mut all: Vec<u64> = (0..1000u64).map(|more| mixed(OFFSET.wrapping_add(more))).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 1000);
    }
}
