//! Fits requests that exceed their model's context, by a context policy.
//!
//! A truncated request is matched, rendered and recorded like any other. The store therefore
//! contains the prompt that the model saw, and the truncation is the recorded reason of the fork.
//! The truncation is stored with the messages for which it was made. Later requests that continue
//! these messages are truncated in the same way, so they continue the fork and render only new
//! messages.

use std::borrow::Cow;

use levade_text::{Message, ToolSpec};

use super::{Conversation, PreparedPrompt, Request};
use crate::canonical::{CanonicalForm, Key};
use crate::origin::{Fork, Origin};
use crate::window::{Budget, Overflow, Truncation, opening, transcript};

/// A request whose messages are being truncated until its prompt fits the budget.
#[derive(Debug, Clone)]
pub struct ContextFitter<'a> {
    messages: &'a [Message],
    tools: &'a [ToolSpec],
    budget: Budget,
    truncation: Truncation,
    /// Whether this request was truncated more than the earlier requests that it continues.
    fresh: bool,
}

/// Result of comparing a prompt with its token budget.
#[derive(Debug)]
pub enum FitResult {
    /// The prompt is within the budget.
    Fits(Box<PreparedPrompt>),
    /// The messages were truncated, and must be rendered again.
    Rerender,
    /// The messages in the contained transcript were omitted. The caller must pass a summary of the
    /// transcript to [`ContextFitter::set_summary`].
    Summarize(String),
    /// The prompt exceeds the budget, and no further message can be shortened or omitted.
    TooLong(Box<PreparedPrompt>),
}

/// Truncation of a prompt, with a hash of the messages that were truncated.
#[derive(Debug, Clone)]
pub(crate) struct AppliedTruncation {
    key: Key,
    truncation: Truncation,
}

/// Returns the hash of a message history that consists of the history with the hash `key` and one
/// more message.
fn extend_key(key: Key, message: &Message) -> Key {
    let form = CanonicalForm::from_message(message);
    xxhash_rust::xxh3::xxh3_128(&[key.to_le_bytes(), form.loose.to_le_bytes()].concat())
}

impl Conversation {
    /// Starts to fit a request into the budget, with the truncation of the earlier requests that it
    /// continues. This is fast, because each message is hashed only once.
    pub fn start_fitting<'a>(&self, request: &Request<'a>, budget: Budget) -> ContextFitter<'a> {
        let Request { agent, policy, messages, tools, .. } = *request;
        let party = self.parties.get(&(agent.to_owned(), policy.to_owned()));
        let truncations = party.and_then(|party| self.truncations.get(party));
        let mut truncation = None;
        if let Some(truncations) = truncations {
            let mut key = 0;
            for message in messages {
                key = extend_key(key, message);
                truncation = truncations.get(&key).or(truncation);
            }
        }
        ContextFitter {
            messages,
            tools,
            budget,
            truncation: truncation.cloned().unwrap_or_default(),
            fresh: false,
        }
    }

    /// Stores the truncation of a recorded prompt, for later requests that continue it.
    pub(super) fn store_truncation(
        &mut self,
        party: crate::index::Party,
        fitted: AppliedTruncation,
    ) {
        self.truncations.entry(party).or_default().insert(fitted.key, fitted.truncation);
    }
}

impl<'a> ContextFitter<'a> {
    /// Returns the messages to render: the request's messages after truncation.
    pub fn messages(&self) -> Cow<'a, [Message]> {
        if self.truncation.is_none() {
            Cow::Borrowed(self.messages)
        } else {
            Cow::Owned(self.truncation.apply(self.messages))
        }
    }

    /// Compares the prompt of the current messages with the budget. If the prompt is too long,
    /// truncates the messages further.
    pub fn judge(&mut self, prepared: PreparedPrompt) -> FitResult {
        let found = prepared.prompt.len();
        if found <= self.budget.max_tokens {
            return FitResult::Fits(Box::new(self.with_origin(prepared)));
        }
        if self.budget.overflow == Overflow::Fail {
            return FitResult::TooLong(Box::new(prepared));
        }
        let Some((omitted, half)) =
            self.truncation.extend(self.messages, self.tools, found, &self.budget)
        else {
            return FitResult::TooLong(Box::new(prepared));
        };
        self.fresh = true;
        if self.budget.overflow == Overflow::Summarize && !omitted.is_empty() {
            return FitResult::Summarize(transcript(
                self.truncation.summary.as_deref(),
                &self.messages[omitted],
                half,
            ));
        }
        FitResult::Rerender
    }

    /// Sets the summary that replaces all omitted messages. If `summary` is empty, no text replaces
    /// them.
    pub fn set_summary(&mut self, summary: &str) {
        self.truncation.summary =
            Some(summary.trim()).filter(|summary| !summary.is_empty()).map(str::to_owned);
    }

    fn with_origin(&self, mut prepared: PreparedPrompt) -> PreparedPrompt {
        if self.fresh {
            let at = opening(self.messages);
            prepared.origin = Origin::Forked(Fork { at, reason: self.budget.overflow.reason() });
        }
        if !self.truncation.is_none() {
            let key = self.messages.iter().fold(0, extend_key);
            prepared.fitted =
                Some(Box::new(AppliedTruncation { key, truncation: self.truncation.clone() }));
        }
        prepared
    }
}

#[cfg(test)]
#[path = "fitting_tests.rs"]
mod tests;
