//! Errors of calls to chat APIs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Error of a third-party chat API or an HTTP service. In JSON, `code` is the
/// [code](ExternalError::code) and `about` the fields. API keys are removed from server messages,
/// so no error contains a key.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "code", content = "about", rename_all = "snake_case")]
pub enum ExternalError {
    /// The options or the request are invalid. Contains the message.
    #[error("{0}")]
    Invalid(String),
    /// The environment variable that must contain an API key is missing or invalid.
    #[error(
        "the environment variable {variable} must contain the key of {endpoint}, but it is {found}"
    )]
    NoKey {
        /// Name of the environment variable.
        variable: String,
        /// Address of the server that the key is for.
        endpoint: String,
        /// State of the variable as text, such as "not set".
        found: String,
    },
    /// The server does not accept the API key, or the account that the key belongs to.
    #[error("{endpoint} does not accept the key (status {status}): {message}; {way_out}")]
    #[serde(rename = "unauthorised")]
    Unauthorized {
        /// Address of the server that rejected the key.
        endpoint: String,
        /// HTTP status of the response.
        status: u16,
        /// Error message of the server.
        message: String,
        /// Hint that names the place where the user can correct the key.
        way_out: String,
    },
    /// The server rejected the request, and would reject it again.
    #[error("{endpoint} rejected the request with status {status}: {message}")]
    #[serde(rename = "refused")]
    Rejected {
        /// Address of the server that rejected the request.
        endpoint: String,
        /// HTTP status of the response.
        status: u16,
        /// Error message of the server.
        message: String,
    },
    /// The server is overloaded, or the client exceeded a rate limit.
    #[error("{endpoint} is busy (status {status}): {message}; try again in {retry_after} s")]
    Busy {
        /// Address of the busy server.
        endpoint: String,
        /// HTTP status of the response.
        status: u16,
        /// Error message of the server.
        message: String,
        /// Seconds to wait before a retry: at least the time that the server requested, if any.
        retry_after: u64,
    },
    /// The server failed while it processed the request.
    #[error("{endpoint} failed with status {status}: {message}")]
    Failed {
        /// Address of the server that failed.
        endpoint: String,
        /// HTTP status of the response.
        status: u16,
        /// Error message of the server.
        message: String,
    },
    /// The server is unreachable.
    #[error("cannot connect to {endpoint}: {why}")]
    Connect {
        /// Address of the unreachable server.
        endpoint: String,
        /// Reason why the connection failed.
        why: String,
    },
    /// The response ended before it was complete.
    #[error("the response of {endpoint} broke off after {bytes} bytes: {why}")]
    Broken {
        /// Address of the server that sent the response.
        endpoint: String,
        /// Number of bytes of the response that had arrived.
        bytes: usize,
        /// Reason why the response ended.
        why: String,
    },
    /// The response does not have the expected format.
    #[error("the response of {endpoint} cannot be used: {why}")]
    Protocol {
        /// Address of the server that sent the response.
        endpoint: String,
        /// Description of the first problem in the response.
        why: String,
    },
    /// The response exceeds its maximum size.
    #[error("{what} of {endpoint} has more than {max} bytes; raise `{option}` to read it")]
    TooLarge {
        /// Address of the server that sent the response.
        endpoint: String,
        /// Name of the part of the response that is too large.
        what: String,
        /// Maximum size of this part, in bytes.
        max: usize,
        /// Name of the option that sets the maximum size.
        option: String,
    },
    /// All endpoints failed on the same call.
    #[error("no endpoint completed the call: \
             {}", .failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    All {
        /// Last failure of each endpoint. An endpoint that was not called in time has a
        /// [`Deadline`](ExternalError::Deadline) error.
        failures: Vec<ExternalError>,
    },
    /// An operation timed out.
    #[error("waited {waited:?} for {what} ({endpoint})")]
    Deadline {
        /// Addresses of the servers that were called, or that would have been called next.
        endpoint: String,
        /// Duration of the wait that timed out.
        waited: Duration,
        /// Description of the operation that was waited for.
        what: String,
    },
}

impl ExternalError {
    /// Returns the kind of the error as a code that stays the same across releases.
    pub fn code(&self) -> &'static str {
        match self {
            ExternalError::Invalid(_) => "invalid",
            ExternalError::NoKey { .. } => "no_key",
            ExternalError::Unauthorized { .. } => "unauthorised",
            ExternalError::Rejected { .. } => "refused",
            ExternalError::Busy { .. } => "busy",
            ExternalError::Failed { .. } => "failed",
            ExternalError::Connect { .. } => "connect",
            ExternalError::Broken { .. } => "broken",
            ExternalError::Protocol { .. } => "protocol",
            ExternalError::TooLarge { .. } => "too_large",
            ExternalError::All { .. } => "all",
            ExternalError::Deadline { .. } => "deadline",
        }
    }

    /// Returns the failures of the endpoints. An error other than [`ExternalError::All`] is its own
    /// only failure.
    pub fn failures(&self) -> &[ExternalError] {
        match self {
            ExternalError::All { failures } => failures,
            other => std::slice::from_ref(other),
        }
    }

    /// Returns whether the request is the cause of the error. Such an error does not count against
    /// the server.
    pub(crate) fn is_request_error(&self) -> bool {
        match self {
            ExternalError::Rejected { status, .. } => matches!(status, 400 | 413 | 414 | 422),
            ExternalError::Invalid(_) => true,
            _ => false,
        }
    }

    /// Returns whether the same call may succeed later although the caller changes nothing.
    pub fn may_pass(&self) -> bool {
        match self {
            ExternalError::Busy { .. }
            | ExternalError::Failed { .. }
            | ExternalError::Connect { .. }
            | ExternalError::Broken { .. }
            | ExternalError::Deadline { .. } => true,
            ExternalError::All { failures } => failures.iter().any(ExternalError::may_pass),
            ExternalError::Invalid(_)
            | ExternalError::NoKey { .. }
            | ExternalError::Unauthorized { .. }
            | ExternalError::Rejected { .. }
            | ExternalError::Protocol { .. }
            | ExternalError::TooLarge { .. } => false,
        }
    }

    /// Returns whether the call can safely be retried immediately, because the server cannot have
    /// executed it: the server rejected it as busy, was unreachable, or sent no byte of a response.
    pub(crate) fn is_safe_to_retry(&self) -> bool {
        match self {
            ExternalError::Busy { .. } | ExternalError::Connect { .. } => true,
            ExternalError::Broken { bytes, .. } => *bytes == 0,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_round_trip_through_json_with_codes() {
        let errors = [
            (ExternalError::Invalid("x".into()), false),
            (
                ExternalError::NoKey {
                    variable: "K".into(),
                    endpoint: endpoint(),
                    found: "not set".into(),
                },
                false,
            ),
            (
                ExternalError::Unauthorized {
                    endpoint: endpoint(),
                    status: 401,
                    message: message(),
                    way_out: "check K".into(),
                },
                false,
            ),
            (
                ExternalError::Rejected { endpoint: endpoint(), status: 400, message: message() },
                false,
            ),
            (
                ExternalError::Busy {
                    endpoint: endpoint(),
                    status: 429,
                    message: message(),
                    retry_after: 3,
                },
                true,
            ),
            (ExternalError::Failed { endpoint: endpoint(), status: 500, message: message() }, true),
            (ExternalError::Connect { endpoint: endpoint(), why: why() }, true),
            (ExternalError::Broken { endpoint: endpoint(), bytes: 3, why: why() }, true),
            (ExternalError::Protocol { endpoint: endpoint(), why: why() }, false),
            (
                ExternalError::TooLarge {
                    endpoint: endpoint(),
                    what: "the response".into(),
                    max: 9,
                    option: "max_bytes".into(),
                },
                false,
            ),
            (
                ExternalError::All {
                    failures: vec![
                        ExternalError::Rejected {
                            endpoint: endpoint(),
                            status: 400,
                            message: message(),
                        },
                        ExternalError::Protocol { endpoint: endpoint(), why: why() },
                    ],
                },
                false,
            ),
            (
                ExternalError::All {
                    failures: vec![
                        ExternalError::Rejected {
                            endpoint: endpoint(),
                            status: 400,
                            message: message(),
                        },
                        ExternalError::Failed {
                            endpoint: endpoint(),
                            status: 500,
                            message: message(),
                        },
                    ],
                },
                true,
            ),
            (
                ExternalError::Deadline {
                    endpoint: endpoint(),
                    waited: Duration::from_millis(1500),
                    what: "a response".into(),
                },
                true,
            ),
        ];
        let of_request = errors.iter().filter(|(error, _)| error.is_request_error());
        assert_eq!(
            of_request.map(|(error, _)| error.code()).collect::<Vec<_>>(),
            ["invalid", "refused"]
        );
        for (error, may_pass) in errors {
            let json = serde_json::to_value(&error).unwrap();
            assert_eq!(json["code"], error.code());
            assert_eq!(serde_json::from_value::<ExternalError>(json).unwrap(), error);
            assert_eq!(error.may_pass(), may_pass, "{error}");
            assert!(!error.is_safe_to_retry() || error.may_pass());
        }
    }

    fn endpoint() -> String {
        "https://a/v1".to_owned()
    }

    fn message() -> String {
        "m".to_owned()
    }

    fn why() -> String {
        "w".to_owned()
    }
}
