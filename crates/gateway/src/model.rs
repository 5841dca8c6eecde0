//! Models that are served, by name.

use std::sync::Arc;

use dressage_conversation::Format;
use dressage_policy::{Sampler, SamplingParams};

/// A model that answers calls.
#[derive(Clone)]
pub struct Model {
    /// Name that clients use.
    pub name: String,
    /// The name of its policy, which the segments of its replies bear.
    pub policy: String,
    /// Draws the replies.
    pub sampler: Arc<dyn Sampler>,
    /// How conversations with it are written.
    pub format: Arc<Format>,
    /// Tokens that prompt and reply can have together.
    pub context: usize,
    /// Sampling where a client is silent.
    pub sampling: SamplingParams,
    /// Seconds since 1970 at which it was made.
    pub created: u64,
}
