//! Errors of HTTP requests.

use std::time::Duration;

/// Reason why an HTTP request has no complete response.
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
        /// Host and port of the server.
        host: String,
        /// Error of the connection and its causes, outermost first.
        why: String,
    },
    /// The connection broke before the response was complete.
    #[error("the response of {host} broke off: {why}")]
    Broken {
        /// Host and port of the server.
        host: String,
        /// Error of the connection and its causes, outermost first.
        why: String,
    },
    /// The response was not complete before the deadline.
    #[error("{host} sent no complete response within {after:?}")]
    Late {
        /// Host and port of the server.
        host: String,
        /// Maximum time for the complete response.
        after: Duration,
    },
    /// The response body exceeds the maximum size.
    #[error("the response of {host} exceeds the maximum size of {max} bytes")]
    TooLarge {
        /// Host and port of the server.
        host: String,
        /// Maximum size of the response body, in bytes.
        max: usize,
    },
    /// The response has a content encoding that was not requested and cannot be decoded.
    #[error("the response of {host} cannot be decompressed: its Content-Encoding is {encoding:?}")]
    Packed {
        /// Host and port of the server.
        host: String,
        /// Value of the response's `Content-Encoding`.
        encoding: String,
    },
    /// The request was redirected more than `max` times.
    #[error("the request to {host} was redirected more than {max} times, last to {to}")]
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
    /// Returns whether the same request may succeed later without a change.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            HttpError::Connect { .. } | HttpError::Broken { .. } | HttpError::Late { .. }
        )
    }
}

/// Formats an error and its causes as text, outermost first.
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
