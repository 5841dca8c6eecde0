//! Parties: the backends that answer the calls of agents, with their limits and sampling rules.

use std::sync::Arc;
use std::time::Duration;

use levade_conversation::{Budget, Format};
use levade_policy::{Sampler, SamplingParams};
use levade_tree::{parse_seat, seat_name};

use crate::api_error::ApiError;
use crate::chat_api::ChatApi;

/// Model backend that answers the calls of an agent, with its limits and sampling rule.
#[derive(Clone)]
pub struct Party {
    /// Name of the agent in recorded segments. Empty for calls outside of attempts.
    pub agent: String,
    /// Name of the policy in recorded segments.
    pub policy: String,
    /// Name of the model in API responses.
    pub model: String,
    /// Sampler or chat API that generates the completions.
    pub backend: Backend,
    /// Chat format (template and tokenizer) of the conversations. Always present for
    /// [`Backend::Tokens`]. For [`Backend::Messages`], present only if completions are recorded as
    /// demonstrations for a trained policy.
    pub format: Option<Arc<Format>>,
    /// Limits of each call.
    pub limits: PartyLimits,
    /// Sampling parameters, and the rule whether the recipe or the client sets them.
    pub sampling: SamplingRule,
    /// Maximum number of prompt tokens, and the policy for longer prompts.
    pub budget: Budget,
    /// Party that summarizes turns that no longer fit into the context. `None` if the policy in
    /// `budget` requests no summaries.
    pub summarizer: Option<Arc<Summarizer>>,
}

/// Source of a party's completions: a sampler or a chat API.
#[derive(Clone)]
pub enum Backend {
    /// A sampler. All tokens that it samples are recorded.
    Tokens(Arc<dyn Sampler>),
    /// A chat API, which receives messages and returns messages.
    Messages(Arc<dyn ChatApi>),
}

/// Limits of one call of a party.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartyLimits {
    /// Maximum number of prompt and completion tokens of a call. `usize::MAX` leaves the limit to
    /// the sampler, which then ends a completion with
    /// [`FinishReason::Context`](levade_policy::FinishReason::Context).
    pub context: usize,
    /// Timeout for the backend to accept a request, and again for its completion.
    pub timeout: Duration,
}

/// Rule that determines whether the recipe or the client sets the sampling parameters of a party.
#[derive(Debug, Clone, PartialEq)]
pub enum SamplingRule {
    /// The recipe sets the contained parameters. A request can only lower `max_tokens` and add stop
    /// strings, stop tokens and `top_logprobs`.
    Fixed(SamplingParams),
    /// The client sets the parameters. The contained values are the defaults for parameters that a
    /// request does not set.
    Default(SamplingParams),
}

/// Party that summarizes omitted turns of a conversation, with its instruction.
#[derive(Clone)]
pub struct Summarizer {
    /// Party that writes the summaries.
    pub party: Arc<Party>,
    /// Maximum number of tokens of a summary.
    pub max_tokens: usize,
    /// Text before the turns in the request for a summary.
    pub instruction: String,
}

/// Parts of a party whose backend is a sampler ([`Backend::Tokens`]).
#[derive(Clone, Copy)]
pub struct TokenBackend<'a> {
    /// Sampler that generates the completions.
    pub sampler: &'a Arc<dyn Sampler>,
    /// Chat format of the conversations.
    pub format: &'a Arc<Format>,
    /// Maximum number of prompt and completion tokens of a call.
    pub context: usize,
}

impl Party {
    /// Returns the party under the recorded name of the seat `seat`, counted from 1. Its summarizer
    /// also gets the seat's name, so that the histories of two seats remain separate.
    pub fn in_seat(&self, seat: usize) -> Party {
        let summarizer = self.summarizer.as_ref().map(|summarizer| {
            let party = Party {
                agent: seat_name(&summarizer.party.agent, seat),
                ..(*summarizer.party).clone()
            };
            Arc::new(Summarizer { party: Arc::new(party), ..(**summarizer).clone() })
        });
        Party { agent: seat_name(&self.agent, seat), summarizer, ..self.clone() }
    }

    /// Returns whether `name` is the name of the party's agent or of a seat of this agent.
    pub fn answers_as(&self, name: &str) -> bool {
        name == self.agent || parse_seat(name).is_some_and(|(agent, _)| agent == self.agent)
    }

    /// Creates a party for calls outside of attempts, whose policy and model have the same name. It
    /// has no agent and no context policy.
    pub fn new(
        name: &str,
        backend: Backend,
        format: Option<Arc<Format>>,
        limits: PartyLimits,
        sampling: SamplingRule,
    ) -> Self {
        Party {
            agent: String::new(),
            policy: name.to_owned(),
            model: name.to_owned(),
            backend,
            format,
            limits,
            sampling,
            budget: Budget::NONE,
            summarizer: None,
        }
    }

    /// Returns the sampler, the chat format and the context length of a party with
    /// [`Backend::Tokens`].
    ///
    /// # Errors
    /// Returns an [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) error if the backend is a chat
    /// API, which has no tokens.
    pub fn tokens(&self) -> Result<TokenBackend<'_>, ApiError> {
        match (&self.backend, &self.format) {
            (Backend::Tokens(sampler), Some(format)) => {
                Ok(TokenBackend { sampler, format, context: self.limits.context })
            }
            _ => {
                let message = format!(
                    "the model {:?} is served by an external API that accepts only messages; \
                     call it at /v1/chat/completions, /v1/responses or /v1/messages, without \
                     log-probabilities and token ids",
                    self.model
                );
                Err(ApiError::field("model", message))
            }
        }
    }

    /// Returns the sampling parameters that the recipe fixes, or `None` if the client sets them.
    pub fn fixed_params(&self) -> Option<&SamplingParams> {
        match &self.sampling {
            SamplingRule::Fixed(params) => Some(params),
            SamplingRule::Default(_) => None,
        }
    }
}
