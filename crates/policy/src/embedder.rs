//! Vectors of texts, for retrieval.

use async_trait::async_trait;

use crate::PolicyError;

/// Side of a retrieval that a text is on. Some models are told by a prefix (E5: `query: ` and `passage: `).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextRole {
    /// Looks for passages.
    Query,
    /// Is looked for.
    Passage,
}

/// Turns texts into vectors whose inner products say how much two texts have to do with each other.
#[async_trait]
pub trait Embedder: Send + Sync {
    /// Numbers of a vector.
    fn dimensions(&self) -> usize;

    /// Fingerprint of all that decides a vector: weights, tokenizer, pooling and prefixes. Vectors of
    /// different fingerprints must not be compared.
    fn fingerprint(&self) -> &str;

    /// The vector of each text, of length 1. Texts longer than the model's context count as far as it goes. A
    /// vector depends on its own text alone.
    ///
    /// # Errors
    /// When the model is away or its weights are damaged.
    async fn embed(&self, texts: &[String], role: TextRole) -> Result<Vec<Vec<f32>>, PolicyError>;
}

/// Texts as an encoder takes them.
pub trait TextIds: Send + Sync {
    /// The ids of a text, special tokens included, as many as the encoder takes: what is longer is cut before
    /// its closing token.
    ///
    /// # Errors
    /// When the tokenizer cannot read it.
    fn ids(&self, text: &str) -> Result<Vec<u32>, PolicyError>;
}
