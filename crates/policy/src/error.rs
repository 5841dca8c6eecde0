//! Errors between a caller and a policy.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Errors of samplers and learners. As JSON they carry their [code](PolicyError::code), and what it is about
/// as `about`.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "code", content = "about", rename_all = "snake_case")]
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
    /// A sampler cannot draw from weights that were published.
    #[error("cannot adopt the published weights: {0}")]
    NotAdopted(String),
    /// A sampler has older weights than a request may be answered with, and does not wait for newer ones.
    #[error(
        "the request asks for version {least} of {policy} or later, but the sampler has version {version}"
    )]
    Behind {
        /// The policy.
        policy: String,
        /// The least version that was asked for.
        least: u64,
        /// The version that there is.
        version: u64,
    },
    /// There is more to do than may wait.
    #[error("{what}; try again in {retry_after} s")]
    Busy {
        /// Who is busy, and with how much.
        what: String,
        /// Seconds after which to come back: a guess, at least 1.
        retry_after: u64,
    },
    /// A wait passed its deadline.
    #[error("waited {0:?} for {1}")]
    Deadline(Duration, String),
    /// The other side is gone.
    #[error("{0} stopped; see its log for the reason")]
    Stopped(Cow<'static, str>),
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
    /// The learner does not report the losses of single terms.
    #[error("this learner does not report the losses of single tokens; only the engine of this machine does")]
    NoTerms,
}

impl PolicyError {
    /// The kind of the error, as programs tell it.
    pub fn code(&self) -> &'static str {
        match self {
            PolicyError::Invalid(_) => "invalid",
            PolicyError::PromptTooLong { .. } => "prompt_too_long",
            PolicyError::NotFinite { .. } => "not_finite",
            PolicyError::Cut(_) => "cut",
            PolicyError::NotAdopted(_) => "not_adopted",
            PolicyError::Behind { .. } => "behind",
            PolicyError::Busy { .. } => "busy",
            PolicyError::Deadline(..) => "deadline",
            PolicyError::Stopped(_) => "stopped",
            PolicyError::Storage(_) => "storage",
            PolicyError::NoValueHead => "no_value_head",
            PolicyError::NoPredictions => "no_predictions",
            PolicyError::NoTerms => "no_terms",
        }
    }

    /// Whether the same call may succeed later, or elsewhere, with nothing changed by its caller.
    pub fn may_pass(&self) -> bool {
        match self {
            PolicyError::Busy { .. }
            | PolicyError::Deadline(..)
            | PolicyError::Stopped(_)
            | PolicyError::Behind { .. } => true,
            PolicyError::Invalid(_)
            | PolicyError::PromptTooLong { .. }
            | PolicyError::NotFinite { .. }
            | PolicyError::Cut(_)
            | PolicyError::NotAdopted(_)
            | PolicyError::Storage(_)
            | PolicyError::NoValueHead
            | PolicyError::NoPredictions
            | PolicyError::NoTerms => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_survive_json_with_their_codes() {
        let errors = [
            (PolicyError::Invalid("x".into()), false),
            (PolicyError::PromptTooLong { prompt: 9, context: 8 }, false),
            (PolicyError::NotFinite { position: 3 }, false),
            (PolicyError::Cut("path 1 is in no micro-batch".into()), false),
            (PolicyError::NotAdopted("a: no".into()), false),
            (PolicyError::Behind { policy: "p".into(), least: 4, version: 3 }, true),
            (PolicyError::Busy { what: "8 requests run".into(), retry_after: 2 }, true),
            (PolicyError::Deadline(Duration::from_millis(1500), "a reply".into()), true),
            (PolicyError::Stopped("the engine".into()), true),
            (PolicyError::Storage("full".into()), false),
            (PolicyError::NoValueHead, false),
            (PolicyError::NoPredictions, false),
            (PolicyError::NoTerms, false),
        ];
        for (error, may_pass) in errors {
            let json = serde_json::to_value(&error).unwrap();
            assert_eq!(json["code"], error.code());
            let back: PolicyError = serde_json::from_value(json).unwrap();
            assert_eq!((&back, back.to_string()), (&error, error.to_string()));
            assert_eq!(error.may_pass(), may_pass, "{error}");
        }
    }
}
