//! Models that are served, by name.

use std::sync::Arc;

use levade_conversation::Format;
use levade_policy::{Sampler, SamplingParams};

use crate::external::Responder;
use crate::fault::Fault;

/// A model that answers calls.
#[derive(Clone)]
pub struct Model {
    /// Name that clients use.
    pub name: String,
    /// The name of its policy, which the segments of its replies bear.
    pub policy: String,
    /// Whoever writes its replies.
    pub backend: Backend,
    /// Seconds since 1970 at which it was made.
    pub created: u64,
}

/// Whoever writes the replies of a model.
#[derive(Clone)]
pub enum Backend {
    /// A sampler, every token of which is recorded.
    Tokens(TokenModel),
    /// An API of others, which takes and gives messages.
    Messages(Arc<dyn Responder>),
}

/// A model that is asked in token ids.
#[derive(Clone)]
pub struct TokenModel {
    /// Draws the replies.
    pub sampler: Arc<dyn Sampler>,
    /// How conversations with it are written.
    pub format: Arc<Format>,
    /// Tokens that prompt and reply can have together.
    pub context: usize,
    /// Sampling where a client is silent.
    pub sampling: SamplingParams,
}

impl Model {
    /// The model behind it, where it is asked in token ids.
    ///
    /// # Errors
    /// When it is an API of others.
    pub(crate) fn tokens(&self) -> Result<&TokenModel, Fault> {
        match &self.backend {
            Backend::Tokens(model) => Ok(model),
            Backend::Messages(_) => {
                let message = format!(
                    "the model {:?} is behind an API that takes messages alone; ask it at /v1/chat/completions, \
                     /v1/responses or /v1/messages, without log-probabilities and token ids",
                    self.name
                );
                Err(Fault::field("model", message))
            }
        }
    }
}
