//! Errors of HTTP requests.

use std::time::Duration;

/// Reason why a request has no complete response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The URL, a host pattern or the TLS configuration is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The host or its address is not allowed.
    #[error("{0}")]
    Denied(String),
    /// The connection to the host failed.
    #[error("cannot connect to {host}: {why}")]
    Connect {
        /// Host and port.
        host: String,
        /// Error and its causes, outermost first.
        why: String,
    },
    /// The connection broke before the response was complete.
    #[error("the answer of {host} broke off: {why}")]
    Broken {
        /// Host and port.
        host: String,
        /// Error and its causes, outermost first.
        why: String,
    },
    /// The response was not complete before the deadline.
    #[error("{host} did not answer within {after:?}")]
    Late {
        /// Host and port.
        host: String,
        /// Deadline.
        after: Duration,
    },
    /// The response body is too large.
    #[error("the answer of {host} is longer than {max} bytes")]
    TooLarge {
        /// Host and port.
        host: String,
        /// Maximum size in bytes.
        max: usize,
    },
    /// The response has a content encoding that was not requested and cannot be decoded.
    #[error("the answer of {host} cannot be unpacked: its content-encoding is {encoding:?}")]
    Packed {
        /// Host and port.
        host: String,
        /// Value of the response's `Content-Encoding`.
        encoding: String,
    },
    /// The request was redirected too often.
    #[error("{host} redirects more than {max} times, last to {to}")]
    Redirects {
        /// Host and port of the first request.
        host: String,
        /// Maximum number of redirects.
        max: u32,
        /// Target of the last redirect.
        to: String,
    },
}

impl HttpError {
    /// Returns whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            HttpError::Connect { .. } | HttpError::Broken { .. } | HttpError::Late { .. }
        )
    }
}

/// Returns an error with its causes, outermost first.
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut all = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some errors include their cause in their own text.
        let text = error.to_string();
        if !all.contains(&text) {
            all += &format!(": {text}");
        }
        cause = error.source();
    }
    all
}
