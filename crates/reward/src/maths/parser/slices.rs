//! Parts of a slice of tokens: brackets, lists, rows and cells.

use super::*;

/// Returns the index of the bracket that closes the bracket at the start of `tokens`.
pub(in crate::maths) fn closing(tokens: &[Token]) -> Option<usize> {
    let mut depth = 0i32;
    for (at, token) in tokens.iter().enumerate() {
        depth += nesting(token);
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Returns +1 if a token opens a bracket, −1 if it closes one, and 0 otherwise.
fn nesting(token: &Token) -> i32 {
    match token {
        Token::Open(_) | Token::GroupOpen | Token::Begin(_) => 1,
        Token::Close(_) | Token::GroupClose | Token::End => -1,
        _ => 0,
    }
}

/// Splits tokens at the separators outside of brackets for which `parts` returns true.
pub(in crate::maths) fn split(
    tokens: &[Token],
    mut parts: impl FnMut(&Token) -> bool,
) -> Vec<&[Token]> {
    let mut depth = 0;
    tokens
        .split(|token| {
            depth += nesting(token);
            depth == 0 && parts(token)
        })
        .collect()
}

/// Splits the tokens of a matrix into its rows, and returns the rows that are not empty.
pub(in crate::maths) fn rows(inner: &[Token]) -> impl Iterator<Item = &[Token]> {
    split(inner, |token| *token == Token::Row).into_iter().filter(|row| !row.is_empty())
}

/// Splits the tokens of a matrix row into its cells.
pub(in crate::maths) fn cells(row: &[Token]) -> Vec<&[Token]> {
    split(row, |token| *token == Token::Cell)
}
