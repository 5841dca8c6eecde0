//! Finds stop strings in the bytes of tokens as they arrive, since servers that exchange tokens see
//! no text.

use levade_policy::TokenBytes;

/// Search for stop strings in a completion, token by token.
pub(super) struct StopStringSearch<'a> {
    strings: Vec<&'a [u8]>,
    bytes: Option<&'a dyn TokenBytes>,
    /// Last bytes of the completion, fewer than the longest stop string has.
    tail: Vec<u8>,
    max_len: usize,
}

impl<'a> StopStringSearch<'a> {
    /// Creates a search for the stop strings `strings`. Empty strings are ignored.
    pub fn new(strings: &'a [String], bytes: Option<&'a dyn TokenBytes>) -> Self {
        let strings: Vec<&[u8]> =
            strings.iter().map(String::as_bytes).filter(|s| !s.is_empty()).collect();
        let max_len = strings.iter().map(|string| string.len()).max().unwrap_or(0);
        StopStringSearch { strings, bytes, tail: Vec::new(), max_len }
    }

    /// Appends `token` to the completion. Returns whether the token completes a stop string.
    pub fn push_token(&mut self, token: u32) -> bool {
        if self.max_len == 0 {
            return false;
        }
        let Some(bytes) = self.bytes.and_then(|bytes| bytes.token_bytes(token)) else {
            // No string spans a special token.
            self.tail.clear();
            return false;
        };
        self.tail.extend_from_slice(bytes);
        let found = self
            .strings
            .iter()
            .any(|string| self.tail.windows(string.len()).any(|at| at == *string));
        let kept = self.tail.len().saturating_sub(self.max_len - 1);
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
    fn stop_string_spans_ordinary_but_not_special_tokens() {
        assert_eq!(first_end("aab", &[0, 1, 2]), Some(1));
        assert_eq!(first_end("bc", &[1, 0, 1, 2]), Some(3));
        assert_eq!(first_end("c", &[1, 2]), Some(1), "in the middle of a token");
        assert_eq!(first_end("\n\n", &[2, 9, 2, 3]), Some(3));
        assert_eq!(first_end("aab", &[0, 9, 1]), None);
    }

    fn first_end(string: &str, tokens: &[u32]) -> Option<usize> {
        let strings = [string.to_owned(), String::new()];
        let mut stops = StopStringSearch::new(&strings, Some(&Letters));
        tokens.iter().position(|token| stops.push_token(*token))
    }
}
