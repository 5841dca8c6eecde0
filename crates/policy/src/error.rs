//! Errors that samplers and learners return to their callers.

use std::borrow::Cow;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Errors of samplers and learners. Their JSON form has the [code](PolicyError::code) as `code` and
/// the variant's content as `about`.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "code", content = "about", rename_all = "snake_case")]
pub enum PolicyError {
    /// The request is invalid. The message names the value and how to correct it.
    #[error("{0}")]
    Invalid(String),
    /// The prompt leaves no room for a completion in the model's context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; shorten the prompt or \
         raise the context"
    )]
    PromptTooLong {
        /// Number of tokens in the prompt.
        prompt: usize,
        /// Context length of the model, in tokens.
        context: usize,
    },
    /// The logits are not finite, so that no token can be sampled.
    #[error(
        "the logits after {position} tokens are not finite: the weights have diverged (lower the \
         learning rate, and resume from an earlier checkpoint), or are damaged"
    )]
    NotFinite {
        /// Number of tokens in the sequence before the token whose sampling failed.
        position: usize,
    },
    /// The learner cannot divide an update into micro-batches as the recorded plan prescribes.
    #[error("the recorded micro-batch plan does not match the update: {0}")]
    #[serde(rename = "cut")]
    PlanMismatch(String),
    /// The sampler cannot load published weights.
    #[error("cannot load the published weights: {0}")]
    #[serde(rename = "not_adopted")]
    WeightsNotLoaded(String),
    /// The sampler's weights are older than the request requires, and the sampler does not wait for
    /// newer ones.
    #[error(
        "the request requires version {min_version} of {policy} or later, but the sampler has \
         version {version}"
    )]
    Behind {
        /// Name of the policy.
        policy: String,
        /// Minimum version that the request requires.
        #[serde(rename = "least")]
        min_version: u64,
        /// Version of the sampler's weights.
        version: u64,
    },
    /// The queue of the sampler is full.
    #[error("{what}; try again in {retry_after} s")]
    Busy {
        /// Description of the busy component and its load.
        what: String,
        /// Estimated seconds until a retry can succeed, at least 1.
        retry_after: u64,
    },
    /// A wait exceeded its deadline. The fields are the deadline and the operation that was waited
    /// for.
    #[error("waited {0:?} for {1}")]
    Deadline(Duration, String),
    /// The named component has stopped.
    #[error("{0} stopped; see its log for the reason")]
    Stopped(Cow<'static, str>),
    /// Weights could not be read or written.
    #[error("{0}")]
    Storage(String),
    /// The policy has no value head, although values are requested or trained.
    #[error("this policy has no value head; add one before you request or train values")]
    NoValueHead,
    /// The learner does not report entropies, although they are requested.
    #[error(
        "this learner does not report entropies and sums of squared probabilities of its \
         predictions; use a learner that does, or remove the options that need them"
    )]
    NoPredictions,
    /// The learner does not report the losses of single terms, although they are requested.
    #[error(
        "this learner does not report the losses of single tokens; only the engine in this process \
         does"
    )]
    NoTerms,
}

impl PolicyError {
    /// Returns the code of the error in its JSON form, such as `prompt_too_long`.
    pub fn code(&self) -> &'static str {
        match self {
            PolicyError::Invalid(_) => "invalid",
            PolicyError::PromptTooLong { .. } => "prompt_too_long",
            PolicyError::NotFinite { .. } => "not_finite",
            PolicyError::PlanMismatch(_) => "cut",
            PolicyError::WeightsNotLoaded(_) => "not_adopted",
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

    /// Returns whether the same call may succeed later, or on another replica, without a change by
    /// its caller.
    pub fn is_transient(&self) -> bool {
        match self {
            PolicyError::Busy { .. }
            | PolicyError::Deadline(..)
            | PolicyError::Stopped(_)
            | PolicyError::Behind { .. } => true,
            PolicyError::Invalid(_)
            | PolicyError::PromptTooLong { .. }
            | PolicyError::NotFinite { .. }
            | PolicyError::PlanMismatch(_)
            | PolicyError::WeightsNotLoaded(_)
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
    fn policy_errors_round_trip_through_json_with_codes() {
        let errors = [
            (PolicyError::Invalid("x".into()), false),
            (PolicyError::PromptTooLong { prompt: 9, context: 8 }, false),
            (PolicyError::NotFinite { position: 3 }, false),
            (PolicyError::PlanMismatch("sequence 1 is in no micro-batch".into()), false),
            (PolicyError::WeightsNotLoaded("a: no".into()), false),
            (PolicyError::Behind { policy: "p".into(), min_version: 4, version: 3 }, true),
            (PolicyError::Busy { what: "8 requests run".into(), retry_after: 2 }, true),
            (PolicyError::Deadline(Duration::from_millis(1500), "a completion".into()), true),
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
            assert_eq!(error.is_transient(), may_pass, "{error}");
        }
    }
}
