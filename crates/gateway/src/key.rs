//! Keys of attempts: random, and compared by their hashes.

use levade_policy::random_hex;
use sha2::{Digest, Sha256};

/// Prefix of the API keys of attempts.
const PREFIX: &str = "levade-";
/// Prefix of attempts' API keys from before the project was called Levade.
const LEGACY_PREFIX: &str = "dressage-";

/// API key of an attempt. It contains the attempt's name and 128 random bits.
pub(crate) struct AttemptKey {
    text: String,
    hash: [u8; 32],
}

impl AttemptKey {
    /// Creates a random API key for the attempt named `attempt`.
    pub(crate) fn new(attempt: &str) -> Self {
        let text = format!("{PREFIX}{attempt}-{}", random_hex(16));
        let hash = hash_key(&text);
        AttemptKey { text, hash }
    }

    /// Returns the key as the text that clients send.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether `text` equals this key. Compares hashes, so that the duration of the
    /// comparison reveals nothing about the key.
    pub(crate) fn matches(&self, text: &str) -> bool {
        hash_key(text) == self.hash
    }
}

fn hash_key(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

/// Returns the name of the attempt that an API key contains, whether or not the key is valid.
/// Returns `None` if `key` does not have the format of an attempt's key.
pub(crate) fn attempt_name(key: &str) -> Option<&str> {
    let (attempt, secret) =
        key.strip_prefix(PREFIX).or_else(|| key.strip_prefix(LEGACY_PREFIX))?.rsplit_once('-')?;
    let is_secret = secret.len() == 32 && secret.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_secret && !attempt.is_empty()).then_some(attempt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_contain_attempt_name() {
        let one = AttemptKey::new("a-1");
        let other = AttemptKey::new("a-1");
        assert!(
            one.matches(one.text()) && !one.matches(other.text()) && one.text() != other.text()
        );
        assert_eq!(attempt_name(one.text()), Some("a-1"));
        let older = one.text().replacen("levade-", "dressage-", 1);
        assert_eq!(attempt_name(&older), Some("a-1"));
        for foreign in ["sk-test", "", "levade-", "levade-a", "levade-a-xyz", "levade--"] {
            assert_eq!(attempt_name(foreign), None, "{foreign}");
        }
    }
}
