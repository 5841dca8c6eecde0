//! What can go wrong, and where.

use std::time::Duration;

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// Something was set that cannot be.
    #[error("{0}")]
    Invalid(String),
    /// A host that may not be asked.
    #[error("{0}")]
    Denied(String),
    /// Nobody could be connected to.
    #[error("cannot connect to {host}: {why}")]
    Connect {
        /// Host and port.
        host: String,
        /// Reasons, from the outside in.
        why: String,
    },
    /// The connection broke before the answer was whole.
    #[error("the answer of {host} broke off: {why}")]
    Broken {
        /// Host and port.
        host: String,
        /// Reasons, from the outside in.
        why: String,
    },
    /// The answer did not come in time.
    #[error("{host} did not answer within {after:?}")]
    Late {
        /// Host and port.
        host: String,
        /// Deadline.
        after: Duration,
    },
    /// The answer is longer than it may be.
    #[error("the answer of {host} is longer than {most} bytes")]
    TooLarge {
        /// Host and port.
        host: String,
        /// Most bytes.
        most: usize,
    },
    /// The answer is packed in a way that nobody asked for.
    #[error("the answer of {host} cannot be unpacked: its content-encoding is {encoding:?}")]
    Packed {
        /// Host and port.
        host: String,
        /// Encoding that the answer says it has.
        encoding: String,
    },
    /// One redirect too many.
    #[error("{host} redirects more than {most} times, last to {to}")]
    Redirects {
        /// Host and port that was asked first.
        host: String,
        /// Most redirects.
        most: u32,
        /// Last target.
        to: String,
    },
}

impl HttpError {
    /// Whether the same question may be answered later.
    pub fn may_pass(&self) -> bool {
        matches!(self, HttpError::Connect { .. } | HttpError::Broken { .. } | HttpError::Late { .. })
    }
}

/// The reasons of an error, from the outside in.
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut all = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some print their cause themselves.
        let text = error.to_string();
        if !all.contains(&text) {
            all += &format!(": {text}");
        }
        cause = error.source();
    }
    all
}
