//! Compiles regular expressions that are constants.

use regex::Regex;

/// Compiles a constant regular expression, for a `LazyLock`.
///
/// # Panics
/// Panics if `expression` is not a regular expression. The tests of each file compile its
/// constants.
pub(crate) fn pattern(expression: &str) -> Regex {
    Regex::new(expression).unwrap_or_else(|error| panic!("{expression}: {error}"))
}
