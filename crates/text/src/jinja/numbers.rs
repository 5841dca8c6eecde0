//! Parses numbers in a text like Python.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::strings;

/// Converts a value like Python's `float(value)`, or returns `None` if the conversion fails.
pub(super) fn to_number(value: &Value) -> Option<f64> {
    match value.as_str() {
        Some(text) => {
            let text = strings::strip(text, None, true, true);
            let digits = strip_underscores(text)?;
            let known = digits.trim_start_matches(['+', '-']).to_lowercase();
            let is_word = ["inf", "infinity", "nan"].contains(&known.as_str());
            let is_number = known.starts_with(|c: char| c.is_ascii_digit() || c == '.');
            digits.parse().ok().filter(|_| is_word || is_number)
        }
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    }
}

/// Removes the underscores that Python allows between two digits of a number. Returns `None` if an
/// underscore stands anywhere else.
pub(super) fn strip_underscores(text: &str) -> Option<String> {
    text.match_indices('_')
        .all(|(at, _)| {
            is_digit(text[..at].chars().next_back()) && is_digit(text[at + 1..].chars().next())
        })
        .then(|| text.replace('_', ""))
}

fn is_digit(c: Option<char>) -> bool {
    c.is_some_and(char::is_alphanumeric)
}
