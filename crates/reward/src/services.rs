//! Interfaces to network services that scorers call. `levade-reward` has no network client; the
//! program that assembles a run provides the implementations.

use std::fmt::Debug;

use async_trait::async_trait;
use levade_tree::Component;
use serde_json::Value;

use crate::{ScoreError, Scorer, ScorerInput};

/// A service that accepts JSON requests and returns JSON responses.
#[async_trait]
pub trait Service: Debug + Send + Sync {
    /// Sends a request to the service, and repeats it if a retry can help.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unavailable`] if the service is unreachable, and
    /// [`ScoreError::Unusable`] if it rejects the request or returns something other than JSON.
    async fn request(&self, request: &Value) -> Result<Value, ScoreError>;
}

/// A completion of a language model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChatText {
    /// Text of the completion, without the model's reasoning.
    pub text: String,
    /// Whether the completion reached its maximum number of tokens, or was partly withheld.
    pub is_truncated: bool,
}

/// A language model that completes prompts.
#[async_trait]
pub trait Chat: Debug + Send + Sync {
    /// Requests a completion of a prompt from the model. Repeats the request, or uses another
    /// endpoint, if that can help.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unavailable`] if no endpoint responds now, and
    /// [`ScoreError::Unusable`] if the prompt is rejected.
    async fn complete(&self, system: &str, prompt: &str, seed: u64)
    -> Result<ChatText, ScoreError>;
}

/// Scorer of a kind that needs an external service or a sandbox, but was created without one.
/// Scoring always fails.
#[derive(Debug)]
pub(crate) struct UnconnectedScorer(pub &'static str);

#[async_trait]
impl Scorer for UnconnectedScorer {
    async fn score(&self, _input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let UnconnectedScorer(kind) = self;
        Err(ScoreError::Unusable(format!(
            "a scorer of kind {kind} needs a service or a sandbox, but none was connected"
        )))
    }
}

/// Parses score components from a JSON number, or from an object with `score` and other numeric
/// fields.
///
/// # Errors
/// Returns a description of the value if it is neither.
pub(crate) fn parse_components(response: &Value) -> Result<Vec<Component>, String> {
    let (score, extra) = match response {
        Value::Number(number) => (number.as_f64(), None),
        Value::Object(map) => (map.get(Component::SCORE).and_then(Value::as_f64), Some(map)),
        _ => (None, None),
    };
    let Some(score) = score else {
        let shown = crate::scorer::excerpt(&response.to_string());
        return Err(format!("{shown:?}, which is neither a number nor {{\"score\": number, …}}"));
    };
    let extra = extra.into_iter().flatten().filter(|(name, _)| *name != Component::SCORE);
    let extra =
        extra.filter_map(|(name, value)| Some(Component::new(name.clone(), value.as_f64()?)));
    Ok([Component::score(score)].into_iter().chain(extra).collect())
}
