//! Random names, which no other process chooses.

/// Returns `bytes` random bytes of the operating system as hexadecimal digits.
///
/// # Panics
/// Panics if the operating system returns no random bytes. The hash maps of the standard library,
/// without which no command of this program starts, panic in the same case.
pub fn random_hex(bytes: usize) -> String {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random)
        .unwrap_or_else(|error| panic!("the operating system returned no random bytes: {error}"));
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_hex_has_two_digits_per_byte_and_never_repeats() {
        let [one, other] = [(); 2].map(|()| random_hex(32));
        assert!(one.len() == 64 && one.bytes().all(|digit| digit.is_ascii_hexdigit()), "{one}");
        assert_ne!(one, other);
    }
}
