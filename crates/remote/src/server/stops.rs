//! Stop strings, found in the bytes of tokens as they come: servers that are asked in tokens know no text.

use levade_policy::TokenBytes;

/// Looks for the end of a reply.
pub(super) struct Stops<'a> {
    strings: Vec<&'a [u8]>,
    bytes: Option<&'a dyn TokenBytes>,
    /// The last bytes, fewer than the longest string has.
    tail: Vec<u8>,
    longest: usize,
}

impl<'a> Stops<'a> {
    /// Looks for these strings.
    pub fn new(strings: &'a [String], bytes: Option<&'a dyn TokenBytes>) -> Self {
        let strings: Vec<&[u8]> = strings.iter().map(String::as_bytes).filter(|s| !s.is_empty()).collect();
        let longest = strings.iter().map(|string| string.len()).max().unwrap_or(0);
        Stops { strings, bytes, tail: Vec::new(), longest }
    }

    /// Whether `token` completes one.
    pub fn completes(&mut self, token: u32) -> bool {
        if self.longest == 0 {
            return false;
        }
        let Some(bytes) = self.bytes.and_then(|bytes| bytes.token_bytes(token)) else {
            // A special token stands between texts.
            self.tail.clear();
            return false;
        };
        self.tail.extend_from_slice(bytes);
        let found = self.strings.iter().any(|string| self.tail.windows(string.len()).any(|at| at == *string));
        let kept = self.tail.len().saturating_sub(self.longest - 1);
        self.tail.drain(..kept);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Letters;

    impl TokenBytes for Letters {
        fn token_bytes(&self, id: u32) -> Option<&[u8]> {
            const TEXTS: [&[u8]; 4] = [b"a", b"ab", b"c\n", b"\n\n"];
            TEXTS.get(id as usize).copied()
        }
    }

    #[test]
    fn a_string_is_found_across_tokens_and_not_across_special_ones() {
        let ends = |string: &str, tokens: &[u32]| {
            let strings = [string.to_owned(), String::new()];
            let mut stops = Stops::new(&strings, Some(&Letters));
            tokens.iter().position(|token| stops.completes(*token))
        };
        assert_eq!(ends("aab", &[0, 1, 2]), Some(1));
        assert_eq!(ends("bc", &[1, 0, 1, 2]), Some(3));
        assert_eq!(ends("c", &[1, 2]), Some(1), "in the middle of a token");
        assert_eq!(ends("\n\n", &[2, 9, 2, 3]), Some(3));
        assert_eq!(ends("aab", &[0, 9, 1]), None);
    }
}
