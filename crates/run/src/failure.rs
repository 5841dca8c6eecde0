//! Errors that the user can put right.

use std::fmt;

/// Something that the user gave cannot be used. The text names it and a way out.
#[derive(Debug)]
pub struct Unusable(pub String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unusable {}

/// Creates an error that the user can put right.
pub fn unusable(text: impl Into<String>) -> anyhow::Error {
    Unusable(text.into()).into()
}
