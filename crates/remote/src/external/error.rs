//! Errors between a caller and a chat API.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Errors of external policies. As JSON they carry their [code](ExternalError::code), and what it is about as
/// `about`. None holds a key: what servers say is searched for it first.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "code", content = "about", rename_all = "snake_case")]
pub enum ExternalError {
    /// Settings, or a request, that cannot be used as they stand.
    #[error("{0}")]
    Invalid(String),
    /// A key that is not there.
    #[error("the environment variable {variable} is to hold the key of {endpoint}, but it is {found}")]
    NoKey {
        /// Name of the variable.
        variable: String,
        /// Address that the key is for.
        endpoint: String,
        /// State of the variable.
        found: String,
    },
    /// A key, or the account behind it, that is not accepted.
    #[error("{endpoint} does not accept the key (status {status}): {message}; {way_out}")]
    Unauthorised {
        /// Address that was asked.
        endpoint: String,
        /// Status of the answer.
        status: u16,
        /// Reason that the server gave.
        message: String,
        /// Place of the key.
        way_out: String,
    },
    /// A request that the server will not serve as it stands.
    #[error("{endpoint} refused the request with status {status}: {message}")]
    Refused {
        /// Address that was asked.
        endpoint: String,
        /// Status of the answer.
        status: u16,
        /// Reason that the server gave.
        message: String,
    },
    /// A server that has too much to do, or a caller who has asked too much of it.
    #[error("{endpoint} is busy (status {status}): {message}; try again in {retry_after} s")]
    Busy {
        /// Address that was asked.
        endpoint: String,
        /// Status of the answer.
        status: u16,
        /// Reason that the server gave.
        message: String,
        /// Seconds after which to come back, by the server's word or a guess.
        retry_after: u64,
    },
    /// A server that failed over the request.
    #[error("{endpoint} failed with status {status}: {message}")]
    Failed {
        /// Address that was asked.
        endpoint: String,
        /// Status of the answer.
        status: u16,
        /// Reason that the server gave.
        message: String,
    },
    /// A server that cannot be reached.
    #[error("cannot connect to {endpoint}: {why}")]
    Connect {
        /// Address that was asked.
        endpoint: String,
        /// Reason.
        why: String,
    },
    /// An answer that ended too early.
    #[error("the answer of {endpoint} broke off after {bytes} bytes: {why}")]
    Broken {
        /// Address that was asked.
        endpoint: String,
        /// Bytes of the answer that came.
        bytes: usize,
        /// Reason.
        why: String,
    },
    /// An answer of another form than was asked for.
    #[error("the answer of {endpoint} cannot be used: {why}")]
    Protocol {
        /// Address that was asked.
        endpoint: String,
        /// First thing that is wrong with it.
        why: String,
    },
    /// An answer that is larger than it may be.
    #[error("{what} of {endpoint} has more than {most} bytes; raise `{option}` if it is to be read")]
    TooLarge {
        /// Address that was asked.
        endpoint: String,
        /// Part of the answer.
        what: String,
        /// Bytes that it may have.
        most: usize,
        /// Option that says so.
        option: String,
    },
    /// A call that each endpoint failed over.
    #[error("no endpoint replied: {}", .failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    All {
        /// Last failure of each endpoint that was asked.
        failures: Vec<ExternalError>,
    },
    /// A wait that passed its deadline.
    #[error("waited {waited:?} for {what} ({endpoint})")]
    Deadline {
        /// Addresses that were, or would have been, asked.
        endpoint: String,
        /// Length of the wait.
        waited: Duration,
        /// Object of the wait.
        what: String,
    },
}

impl ExternalError {
    /// The kind of the error, as programs tell it.
    pub fn code(&self) -> &'static str {
        match self {
            ExternalError::Invalid(_) => "invalid",
            ExternalError::NoKey { .. } => "no_key",
            ExternalError::Unauthorised { .. } => "unauthorised",
            ExternalError::Refused { .. } => "refused",
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

    /// Returns the failure of each endpoint, or the error itself if it is one.
    pub fn failures(&self) -> &[ExternalError] {
        match self {
            ExternalError::All { failures } => failures,
            other => std::slice::from_ref(other),
        }
    }

    /// Returns whether the request itself cannot be served by the endpoint, which is then no worse than
    /// before.
    pub(crate) fn is_of_request(&self) -> bool {
        match self {
            ExternalError::Refused { status, .. } => matches!(status, 400 | 413 | 414 | 422),
            ExternalError::Invalid(_) => true,
            _ => false,
        }
    }

    /// Whether the same call may succeed later with nothing changed by its caller.
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
            | ExternalError::Unauthorised { .. }
            | ExternalError::Refused { .. }
            | ExternalError::Protocol { .. }
            | ExternalError::TooLarge { .. } => false,
        }
    }

    /// Whether the call can be made again at once without doing anything twice: it was turned away, or never
    /// arrived, or nothing of the answer came.
    pub(crate) fn repeats_nothing(&self) -> bool {
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
    fn errors_survive_json_with_their_codes() {
        let (endpoint, message, why) = (|| "https://a/v1".to_owned(), || "m".to_owned(), || "w".to_owned());
        let errors = [
            (ExternalError::Invalid("x".into()), false),
            (
                ExternalError::NoKey { variable: "K".into(), endpoint: endpoint(), found: "not set".into() },
                false,
            ),
            (
                ExternalError::Unauthorised {
                    endpoint: endpoint(),
                    status: 401,
                    message: message(),
                    way_out: "check K".into(),
                },
                false,
            ),
            (ExternalError::Refused { endpoint: endpoint(), status: 400, message: message() }, false),
            (
                ExternalError::Busy { endpoint: endpoint(), status: 429, message: message(), retry_after: 3 },
                true,
            ),
            (ExternalError::Failed { endpoint: endpoint(), status: 500, message: message() }, true),
            (ExternalError::Connect { endpoint: endpoint(), why: why() }, true),
            (ExternalError::Broken { endpoint: endpoint(), bytes: 3, why: why() }, true),
            (ExternalError::Protocol { endpoint: endpoint(), why: why() }, false),
            (
                ExternalError::TooLarge {
                    endpoint: endpoint(),
                    what: "the answer".into(),
                    most: 9,
                    option: "most_bytes".into(),
                },
                false,
            ),
            (
                ExternalError::All {
                    failures: vec![
                        ExternalError::Refused { endpoint: endpoint(), status: 400, message: message() },
                        ExternalError::Protocol { endpoint: endpoint(), why: why() },
                    ],
                },
                false,
            ),
            (
                ExternalError::All {
                    failures: vec![
                        ExternalError::Refused { endpoint: endpoint(), status: 400, message: message() },
                        ExternalError::Failed { endpoint: endpoint(), status: 500, message: message() },
                    ],
                },
                true,
            ),
            (
                ExternalError::Deadline {
                    endpoint: endpoint(),
                    waited: Duration::from_millis(1500),
                    what: "an answer".into(),
                },
                true,
            ),
        ];
        let of_request = errors.iter().filter(|(error, _)| error.is_of_request());
        assert_eq!(of_request.map(|(error, _)| error.code()).collect::<Vec<_>>(), ["invalid", "refused"]);
        for (error, may_pass) in errors {
            let json = serde_json::to_value(&error).unwrap();
            assert_eq!(json["code"], error.code());
            assert_eq!(serde_json::from_value::<ExternalError>(json).unwrap(), error);
            assert_eq!(error.may_pass(), may_pass, "{error}");
            assert!(!error.repeats_nothing() || error.may_pass());
        }
    }
}
