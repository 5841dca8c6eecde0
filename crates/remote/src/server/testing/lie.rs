//! Replies that cannot be, as a server gives them that is broken or somebody else's.

use serde_json::{Value, json};

/// Lie of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// A last token of another vocabulary.
    Stranger,
    /// Three tokens more than were asked for.
    Endless,
    /// Three tokens fewer, for their number.
    Short,
    /// A stop token ended it that is not there.
    Stops,
    /// No number for the third token.
    NoNumber,
    /// Half of an event, and then the end of the connection.
    Half,
    /// The end of the connection after a whole event.
    Ends,
    /// No labels of the last two tokens.
    FewLabels,
    /// Labels of some tokens twice.
    Overlap,
}

impl Lie {
    /// Tokens that are drawn where so many were asked for.
    pub fn most(self, most: usize) -> usize {
        match self {
            Lie::Endless => most + 3,
            Lie::Short | Lie::Stops => most - 3,
            _ => most,
        }
    }

    /// Labels that are told at the end, of which the last token is the one of this number, from 0.
    pub fn spans(self, label: &str, last: usize) -> Option<Value> {
        let span = |start: usize, end: usize| json!({ "version": label, "start": start, "end": end });
        match self {
            Lie::FewLabels => Some(json!([span(0, last - 1)])),
            Lie::Overlap => Some(json!([span(0, last), span(last - 1, last + 1)])),
            _ => None,
        }
    }
}
