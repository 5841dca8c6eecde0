//! Token ids of a sequence, stored as chunks that sequences share.
//!
//! Sequences of one attempt share its tokens in memory, from step plan to learner: a hundred forks
//! of a long conversation store it once.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Token ids of a sequence from its root, stored in chunks. Sequences of one trajectory share the
/// chunks of its segments. The tokens compare and serialize like a flat list.
#[derive(Clone, Default)]
pub struct Tokens {
    /// Chunks of token ids, none of them empty.
    chunks: Vec<TokenChunk>,
    len: usize,
}

/// The first `len` tokens of a shared allocation of token ids.
#[derive(Clone)]
struct TokenChunk {
    tokens: Arc<[u32]>,
    len: usize,
}

impl TokenChunk {
    fn tokens(&self) -> &[u32] {
        &self.tokens[..self.len]
    }
}

impl Tokens {
    /// Returns the number of tokens in the sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the sequence has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends the first `len` tokens of a chunk, or all if it has fewer. Shares the allocation
    /// instead of copying the tokens.
    pub fn push(&mut self, tokens: Arc<[u32]>, len: usize) {
        let len = len.min(tokens.len());
        if len > 0 {
            self.len += len;
            self.chunks.push(TokenChunk { tokens, len });
        }
    }

    /// Keeps the first `len` tokens. Has no effect if there are fewer.
    pub fn truncate(&mut self, len: usize) {
        while self.len > len
            && let Some(last) = self.chunks.last_mut()
        {
            let beyond = self.len - len;
            if beyond < last.len {
                last.len -= beyond;
                self.len = len;
            } else {
                self.len -= last.len;
                self.chunks.pop();
            }
        }
    }

    /// Returns the token ids in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.chunks.iter().flat_map(|chunk| chunk.tokens().iter().copied())
    }

    /// Returns the token ids as one flat list.
    pub fn to_vec(&self) -> Vec<u32> {
        self.iter().collect()
    }

    /// Returns a cursor at the first token of the sequence.
    pub(crate) fn cursor(&self) -> TokenCursor<'_> {
        TokenCursor { chunks: &self.chunks, offset: 0 }
    }
}

/// A cursor over the tokens of a sequence that remain to be read.
#[derive(Clone, Copy)]
pub(crate) struct TokenCursor<'a> {
    /// Chunks of the sequence, starting with the chunk that contains the next token.
    chunks: &'a [TokenChunk],
    /// Offset of the next token in the first of `chunks`.
    offset: usize,
}

impl<'a> TokenCursor<'a> {
    /// Returns the next token without advancing, or `None` at the end of the sequence.
    pub fn first(&self) -> Option<u32> {
        self.chunks.first().map(|chunk| chunk.tokens[self.offset])
    }

    /// Advances past the tokens that are equal to a prefix of `other_tokens`. Returns the number of
    /// tokens passed.
    pub fn skip_common_prefix(&mut self, other_tokens: &[u32]) -> usize {
        let mut common_len = 0;
        while let Some(chunk) = self.chunks.first() {
            let own_tokens = &chunk.tokens()[self.offset..];
            let other_tokens = &other_tokens[common_len..];
            let common = own_tokens.iter().zip(other_tokens).take_while(|(a, b)| a == b).count();
            common_len += common;
            self.offset += common;
            if self.offset < chunk.len {
                break;
            }
            (self.chunks, self.offset) = (&self.chunks[1..], 0);
        }
        common_len
    }

    /// Returns all remaining tokens of the sequence.
    pub fn to_vec(self) -> Vec<u32> {
        let mut skip = self.offset;
        let mut tokens = Vec::new();
        for chunk in self.chunks {
            tokens.extend_from_slice(&chunk.tokens()[std::mem::take(&mut skip)..]);
        }
        tokens
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(tokens: Vec<u32>) -> Self {
        tokens.into_iter().collect()
    }
}

impl FromIterator<u32> for Tokens {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        let mut all = Tokens::default();
        all.extend(tokens);
        all
    }
}

/// Appends the tokens as one chunk.
impl Extend<u32> for Tokens {
    fn extend<I: IntoIterator<Item = u32>>(&mut self, tokens: I) {
        let tokens: Arc<[u32]> = tokens.into_iter().collect();
        let len = tokens.len();
        self.push(tokens, len);
    }
}

impl PartialEq for Tokens {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl Eq for Tokens {}

impl<const N: usize> PartialEq<[u32; N]> for Tokens {
    fn eq(&self, other: &[u32; N]) -> bool {
        self.iter().eq(other.iter().copied())
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Serialize for Tokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A list of tokens in chunks, some of which have more tokens than the sequence uses.
    fn chunked_tokens(chunks: &[(Vec<u32>, usize)]) -> (Tokens, Vec<u32>) {
        let mut tokens = Tokens::default();
        let mut plain = Vec::new();
        for (chunk, len) in chunks {
            tokens.push(chunk.as_slice().into(), *len);
            plain.extend(chunk.iter().take(*len));
        }
        (tokens, plain)
    }

    fn chunk_lists() -> impl Strategy<Value = Vec<(Vec<u32>, usize)>> {
        prop::collection::vec((prop::collection::vec(0..3u32, 0..5), 0..6usize), 0..6)
    }

    proptest! {
        /// Chunks are read, truncated, compared and serialized like the flat list.
        #[test]
        fn token_chunks_behave_like_flat_list(ours in chunk_lists(), theirs in chunk_lists(), keep in 0..20usize) {
            let (mut tokens, mut plain) = chunked_tokens(&ours);
            let (other, other_plain) = chunked_tokens(&theirs);
            prop_assert_eq!(tokens == other, plain == other_plain);
            tokens.truncate(keep);
            plain.truncate(keep);
            prop_assert_eq!(tokens.to_vec(), plain.clone());
            prop_assert_eq!((tokens.len(), tokens.is_empty()), (plain.len(), plain.is_empty()));
            prop_assert_eq!(tokens.iter().next_back(), plain.last().copied());
            prop_assert_eq!(format!("{tokens:?}"), format!("{plain:?}"));
            prop_assert_eq!(serde_json::to_string(&tokens).unwrap(), serde_json::to_string(&plain).unwrap());
            prop_assert_eq!(serde_json::from_str::<Tokens>(&serde_json::to_string(&plain).unwrap()).unwrap(), tokens);
        }

        /// The cursor advances past the common prefix, and keeps the remaining tokens.
        #[test]
        fn cursor_keeps_tokens_after_common_prefix(ours in chunk_lists(), theirs in prop::collection::vec(0..3u32, 0..12)) {
            let (tokens, plain) = chunked_tokens(&ours);
            let mut rest = tokens.cursor();
            let shared = plain.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
            prop_assert_eq!(rest.skip_common_prefix(&theirs), shared);
            prop_assert_eq!(rest.first(), plain.get(shared).copied());
            prop_assert_eq!(rest.to_vec(), &plain[shared..]);
        }
    }

    /// Sequences with the same chunks share their memory.
    #[test]
    fn sequences_share_chunks() {
        let chunk: Arc<[u32]> = vec![1, 2, 3].into();
        let mut one = Tokens::default();
        let mut two = Tokens::default();
        one.push(chunk.clone(), 3);
        two.push(chunk.clone(), 2);
        assert_eq!(Arc::strong_count(&chunk), 3);
        assert_eq!((one.to_vec(), two.clone().to_vec()), (vec![1, 2, 3], vec![1, 2]));
    }
}
