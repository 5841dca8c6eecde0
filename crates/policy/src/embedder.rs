//! Text embeddings for retrieval: the trait [`Embedder`].

use async_trait::async_trait;

use crate::PolicyError;

/// Role of a text in retrieval: query or passage. Some models need the role as a prefix of the text
/// (E5: `query: ` and `passage: `).
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
    /// Returns the number of dimensions of an embedding vector.
    fn dimensions(&self) -> usize;

    /// Returns a fingerprint of everything that determines an embedding vector: weights, tokenizer,
    /// pooling and prefixes. Vectors with different fingerprints must not be compared.
    fn fingerprint(&self) -> &str;

    /// Returns the embedding vector of each text, normalized to length 1. Texts longer than the
    /// model's context are truncated. A vector depends only on its own text and the role.
    ///
    /// # Errors
    /// Returns an error if the model is unavailable or its weights are damaged.
    async fn embed(&self, texts: &[String], role: TextRole) -> Result<Vec<Vec<f32>>, PolicyError>;
}

/// Tokenizer that converts texts to token ids for an encoder.
pub trait TextIds: Send + Sync {
    /// Returns the token ids of a text, including special tokens. A text that is too long for the
    /// encoder is truncated before its closing token.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot encode the text.
    fn ids(&self, text: &str) -> Result<Vec<u32>, PolicyError>;
}
