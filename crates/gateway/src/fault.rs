//! Reasons for a call to fail, in no API's shape.

use std::time::Duration;

use axum::http::StatusCode;
use levade_conversation::ConversationError;
use levade_policy::PolicyError;
use levade_text::TextError;

/// Kinds of faults. Each API has a status and names of its own for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is not understood, or asks for something that there is not.
    Invalid,
    /// The prompt does not fit the context.
    TooLong,
    /// The body is larger than bodies may be.
    TooLarge,
    /// No key, or a wrong one.
    Unauthorised,
    /// A right key that is not for this.
    Forbidden,
    /// A limit of the attempt is reached.
    Limit,
    /// No such path, model or earlier response.
    NotFound,
    /// The path has no such method.
    Method,
    /// The body is of a type, or in an encoding, that is not read.
    MediaType,
    /// The attempt is over.
    Gone,
    /// More waits than may wait; worth another try after this time.
    Busy(Duration),
    /// The sampler is away; worth another try.
    Unavailable,
    /// A deadline passed.
    Deadline,
    /// A fault of ours.
    Internal,
}

impl Kind {
    /// Status of HTTP, alike in all APIs.
    pub fn status(self) -> StatusCode {
        match self {
            // A status that clients ask again for would cost them time: nothing changes by asking.
            Kind::Invalid | Kind::TooLong | Kind::Limit => StatusCode::BAD_REQUEST,
            Kind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::Unauthorised => StatusCode::UNAUTHORIZED,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
            Kind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Kind::Gone => StatusCode::GONE,
            Kind::Busy(_) => StatusCode::TOO_MANY_REQUESTS,
            Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Deadline => StatusCode::GATEWAY_TIMEOUT,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// A word for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::TooLong => "too_long",
            Kind::TooLarge => "too_large",
            Kind::Unauthorised => "unauthorised",
            Kind::Forbidden => "forbidden",
            Kind::Limit => "limit",
            Kind::NotFound => "not_found",
            Kind::Method => "method",
            Kind::MediaType => "media_type",
            Kind::Gone => "gone",
            Kind::Busy(_) => "busy",
            Kind::Unavailable => "unavailable",
            Kind::Deadline => "deadline",
            Kind::Internal => "internal",
        }
    }
}

impl Kind {
    /// Whether a client that asks again gets the same answer in any case.
    pub(crate) fn is_final(self) -> bool {
        matches!(self, Kind::Limit | Kind::Gone)
    }
}

/// A call that failed: the thing, its value, the way out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// Kind of the fault.
    pub kind: Kind,
    /// Explanation in a sentence.
    pub message: String,
    /// The field of the request that it is about.
    pub param: Option<String>,
}

impl Fault {
    /// A fault of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Fault { kind, message: message.into(), param: None }
    }

    /// A field that cannot be used.
    pub fn field(param: &str, message: impl Into<String>) -> Self {
        Fault { kind: Kind::Invalid, message: message.into(), param: Some(param.to_owned()) }
    }
}

impl From<PolicyError> for Fault {
    fn from(error: PolicyError) -> Self {
        let kind = match &error {
            PolicyError::Invalid(_) => Kind::Invalid,
            PolicyError::PromptTooLong { .. } => Kind::TooLong,
            PolicyError::Deadline(..) => Kind::Deadline,
            error if error.may_pass() => Kind::Unavailable,
            _ => Kind::Internal,
        };
        Fault::new(kind, error.to_string())
    }
}

impl From<ConversationError> for Fault {
    fn from(error: ConversationError) -> Self {
        match error {
            ConversationError::Text(error) => error.into(),
            drift => Fault::field("messages", drift.to_string()),
        }
    }
}

impl From<TextError> for Fault {
    fn from(error: TextError) -> Self {
        match error {
            TextError::TooLong { .. } => Fault::new(Kind::TooLong, error.to_string()),
            error => Fault::field("messages", error.to_string()),
        }
    }
}
