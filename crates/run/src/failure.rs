//! Errors that the user can fix.

use std::fmt;

/// Error that is caused by unusable input of the user. The text names the input and a remedy.
#[derive(Debug)]
pub struct Unusable(pub String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unusable {}

/// Creates an error whose cause the user can correct.
pub fn unusable(text: impl Into<String>) -> anyhow::Error {
    Unusable(text.into()).into()
}
