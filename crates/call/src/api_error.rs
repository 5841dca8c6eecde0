//! Errors of calls, independent of any API's format.

use std::time::Duration;

use levade_conversation::ConversationError;
use levade_policy::PolicyError;
use levade_text::TextError;

/// Kind of an [`ApiError`]. Each HTTP API has its own status codes and names for these kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is malformed, or refers to an object that does not exist.
    Invalid,
    /// The prompt does not fit into the model's context.
    TooLong,
    /// The request body exceeds the size limit.
    TooLarge,
    /// The API key is missing or wrong.
    Unauthorized,
    /// The API key is valid, but does not permit this request.
    Forbidden,
    /// A limit of the attempt, such as its number of calls, is reached.
    Limit,
    /// The URL path, the model or an earlier response does not exist.
    NotFound,
    /// The URL path does not support the HTTP method.
    Method,
    /// The content type or encoding of the request body is not supported.
    MediaType,
    /// The attempt that the request belongs to has already ended.
    AttemptEnded,
    /// The queue of calls is full. A retry after the contained duration may succeed.
    Busy(Duration),
    /// The model is unavailable. The client can repeat the call later.
    Unavailable,
    /// A timeout has expired before the call was complete.
    Deadline,
    /// The server failed because of a defect of this program.
    Internal,
}

impl ErrorKind {
    /// Returns the name of the error kind in logs, metrics and records.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::Invalid => "invalid",
            ErrorKind::TooLong => "too_long",
            ErrorKind::TooLarge => "too_large",
            ErrorKind::Unauthorized => "unauthorised",
            ErrorKind::Forbidden => "forbidden",
            ErrorKind::Limit => "limit",
            ErrorKind::NotFound => "not_found",
            ErrorKind::Method => "method",
            ErrorKind::MediaType => "media_type",
            ErrorKind::AttemptEnded => "gone",
            ErrorKind::Busy(_) => "busy",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Deadline => "deadline",
            ErrorKind::Internal => "internal",
        }
    }

    /// Returns whether every retry of the request fails in the same way.
    pub fn is_final(self) -> bool {
        matches!(self, ErrorKind::Limit | ErrorKind::AttemptEnded)
    }
}

/// Error of an API call. Its message names the problem, the wrong value and a remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// Description of the problem and a remedy, in one sentence.
    pub message: String,
    /// Request field with the wrong value. `None` if the error is not about a single field.
    pub param: Option<String>,
}

impl ApiError {
    /// Creates an error that is not about a single field of the request.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        ApiError { kind, message: message.into(), param: None }
    }

    /// Creates an [`ErrorKind::Invalid`] error about the request field `param`.
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        ApiError {
            kind: ErrorKind::Invalid,
            message: message.into(),
            param: Some(param.to_owned()),
        }
    }
}

impl From<PolicyError> for ApiError {
    fn from(error: PolicyError) -> Self {
        let kind = match &error {
            PolicyError::Invalid(_) => ErrorKind::Invalid,
            PolicyError::PromptTooLong { .. } => ErrorKind::TooLong,
            PolicyError::Deadline(..) => ErrorKind::Deadline,
            error if error.is_transient() => ErrorKind::Unavailable,
            _ => ErrorKind::Internal,
        };
        ApiError::new(kind, error.to_string())
    }
}

impl From<ConversationError> for ApiError {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Text(error) => error.into(),
            drift => ApiError::field("messages", drift.to_string()),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::TooLong { .. } => ApiError::new(ErrorKind::TooLong, error.to_string()),
            error => ApiError::field("messages", error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_errors_map_to_kinds() {
        for (error, kind) in [
            (PolicyError::Invalid("x".into()), ErrorKind::Invalid),
            (PolicyError::PromptTooLong { prompt: 9, context: 8 }, ErrorKind::TooLong),
            (PolicyError::Deadline(Duration::from_secs(1), "x".into()), ErrorKind::Deadline),
            (PolicyError::Stopped("x".into()), ErrorKind::Unavailable),
            (PolicyError::NotFinite { position: 7 }, ErrorKind::Internal),
        ] {
            let message = error.to_string();
            assert_eq!(ApiError::from(error), ApiError::new(kind, message));
        }
    }

    #[test]
    fn is_final_holds_only_for_limit_and_ended_attempt() {
        assert!(ErrorKind::Limit.is_final() && ErrorKind::AttemptEnded.is_final());
        let retried = [
            ErrorKind::NotFound,
            ErrorKind::Busy(std::time::Duration::ZERO),
            ErrorKind::Unavailable,
            ErrorKind::Deadline,
            ErrorKind::Internal,
        ];
        assert!(retried.iter().all(|kind| !kind.is_final()));
    }

    #[test]
    fn conversation_errors_map_to_kinds() {
        let drift = ConversationError::Drift { turn: 1, recorded: "a".into(), printed: "b".into() };
        let message = drift.to_string();
        assert_eq!(ApiError::from(drift), ApiError::field("messages", message));
        let text = TextError::Template("no such role".into());
        assert_eq!(
            ApiError::from(ConversationError::Text(text)).param.as_deref(),
            Some("messages")
        );
    }
}
