//! Text embeddings for retrieval: the trait [`Embedder`].

use async_trait::async_trait;

use crate::PolicyError;

/// Side of a retrieval that a text is on. Some models need it as a prefix (E5: `query: ` and
/// `passage: `).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextRole {
    /// A text that searches for passages.
    Query,
    /// A text that is searched.
    Passage,
}

/// Embeds texts as vectors whose inner products measure the similarity of two texts.
#[async_trait]
pub trait Embedder: Send + Sync {
    /// Returns the number of dimensions of a vector.
    fn dimensions(&self) -> usize;

    /// Returns a fingerprint of all that determines a vector: weights, tokenizer, pooling and
    /// prefixes. Vectors of different fingerprints must not be compared.
    fn fingerprint(&self) -> &str;

    /// Returns the vector of each text, normalized to length 1. Texts longer than the model's
    /// context are truncated. A vector depends only on its own text.
    ///
    /// # Errors
    /// Returns an error if the model is unavailable or its weights are damaged.
    async fn embed(&self, texts: &[String], role: TextRole) -> Result<Vec<Vec<f32>>, PolicyError>;
}

/// Tokenizes texts for an encoder.
pub trait TextIds: Send + Sync {
    /// Returns the token ids of a text, including special tokens. A text that is too long for the
    /// encoder is truncated before its closing token.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot encode the text.
    fn ids(&self, text: &str) -> Result<Vec<u32>, PolicyError>;
}
