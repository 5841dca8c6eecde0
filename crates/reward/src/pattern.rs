//! Regular expressions that are constants of the program.

use regex::Regex;

/// Compiles a constant expression, for a `LazyLock`.
///
/// # Panics
/// Panics if `expression` is none. Each constant is compiled by a test of its file.
pub(crate) fn pattern(expression: &str) -> Regex {
    Regex::new(expression).unwrap_or_else(|error| panic!("{expression}: {error}"))
}
