//! What can go wrong between a caller and a policy.

use std::time::Duration;

/// Errors of samplers and learners.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PolicyError {
    /// The request cannot be served as it stands; the message names the value and the way out.
    #[error("{0}")]
    Invalid(String),
    /// The prompt leaves no room in the model's context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; shorten the prompt or raise the context"
    )]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// There is no distribution to draw from.
    #[error(
        "the logits after {position} tokens are not finite: the weights have diverged (lower the learning rate, and go on from an \
         earlier checkpoint), or were damaged"
    )]
    NotFinite {
        /// Tokens on the path so far.
        position: usize,
    },
    /// A learner cannot train an update as it was to be cut.
    #[error("the recorded cut of the update cannot be followed: {0}")]
    Cut(String),
    /// A wait passed its deadline.
    #[error("waited {0:?} for {1}")]
    Deadline(Duration, String),
    /// The other side is gone.
    #[error("{0} stopped; see its log for the reason")]
    Stopped(&'static str),
    /// Reading or writing weights failed.
    #[error("{0}")]
    Storage(String),
    /// Values are asked for, or trained, without anything that gives them.
    #[error("this policy has no value head; give it one before values are asked for or trained")]
    NoValueHead,
    /// Entropies are asked of a learner that does not tell them.
    #[error(
        "this learner does not tell how spread out its predictions are (entropies, sums of squared \
         probabilities); train with one that does, or without what needs them"
    )]
    NoPredictions,
}
