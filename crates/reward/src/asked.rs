//! Whoever a scorer asks over a network. Rooms below know no client; whoever puts a run together does.

use std::fmt::Debug;

use async_trait::async_trait;
use levade_tree::Component;
use serde_json::Value;

use crate::{Evidence, ScoreError, Scorer};

/// A service that answers JSON with JSON.
#[async_trait]
pub trait Service: Debug + Send + Sync {
    /// Asks a question, again where that may help.
    ///
    /// # Errors
    /// [`ScoreError::Unavailable`] where the service is away; [`ScoreError::Unusable`] where it refuses, or
    /// answers something else.
    async fn ask(&self, question: &Value) -> Result<Value, ScoreError>;
}

/// The reply of a language model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChatText {
    /// Text without the model's reasoning.
    pub text: String,
    /// Whether the reply ended at its maximum number of tokens, or was withheld in part.
    pub is_truncated: bool,
}

/// A language model that answers in words.
#[async_trait]
pub trait Chat: Debug + Send + Sync {
    /// Asks for the reply to a prompt, again and elsewhere where that may help.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unavailable`] if no endpoint replies now, and [`ScoreError::Unusable`] if the
    /// prompt is rejected.
    async fn reply(&self, system: &str, prompt: &str, seed: u64) -> Result<ChatText, ScoreError>;
}

/// A scorer that asks others, in a program that has given it nobody to ask.
#[derive(Debug)]
pub(crate) struct Unwired(pub &'static str);

#[async_trait]
impl Scorer for Unwired {
    async fn score(&self, _evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        let Unwired(kind) = self;
        Err(ScoreError::Unusable(format!(
            "a scorer of kind {kind} asks a service or a sandbox, and was given none"
        )))
    }
}

/// Components that a number says, or an object with `score` and other numbers.
///
/// # Errors
/// When it is something else, in words.
pub(crate) fn components(said: &Value) -> Result<Vec<Component>, String> {
    let (score, extra) = match said {
        Value::Number(number) => (number.as_f64(), None),
        Value::Object(map) => (map.get(Component::SCORE).and_then(Value::as_f64), Some(map)),
        _ => (None, None),
    };
    let Some(score) = score else {
        let shown = crate::scorer::shown(&said.to_string());
        return Err(format!("{shown:?}, which is neither a number nor {{\"score\": number, …}}"));
    };
    let extra = extra.into_iter().flatten().filter(|(name, _)| *name != Component::SCORE);
    let extra = extra.filter_map(|(name, value)| Some(Component::new(name.clone(), value.as_f64()?)));
    Ok([Component::score(score)].into_iter().chain(extra).collect())
}
