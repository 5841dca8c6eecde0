//! Impossible responses, as from a broken server or from another program.

use serde_json::{Value, json};

/// An impossible response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// The last token is not in the vocabulary.
    Stranger,
    /// Three tokens more than requested.
    Endless,
    /// Three tokens fewer than requested, with the finish reason `length`.
    Short,
    /// The finish reason names a stop token that does not occur.
    Stops,
    /// The third token has no log-probability.
    NoNumber,
    /// The connection closes in the middle of an event.
    Half,
    /// The connection closes after a complete event, without a finish reason.
    Ends,
    /// The last two tokens have no labels.
    FewLabels,
    /// Some tokens have two labels.
    Overlap,
}

impl Lie {
    /// Returns the number of tokens to sample if `limit` were requested.
    pub fn limit(self, limit: usize) -> usize {
        match self {
            Lie::Endless => limit + 3,
            Lie::Short | Lie::Stops => limit - 3,
            _ => limit,
        }
    }

    /// Returns the final weight labels of a completion whose last token has index `last`.
    pub fn spans(self, label: &str, last: usize) -> Option<Value> {
        let span =
            |start: usize, end: usize| json!({ "version": label, "start": start, "end": end });
        match self {
            Lie::FewLabels => Some(json!([span(0, last - 1)])),
            Lie::Overlap => Some(json!([span(0, last), span(last - 1, last + 1)])),
            _ => None,
        }
    }
}
