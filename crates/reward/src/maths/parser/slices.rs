//! Parts of a slice of tokens: brackets, lists, rows and cells.

use super::*;

/// Returns the index of the bracket that closes the bracket at the start of `tokens`.
pub(in crate::maths) fn closing_bracket_index(tokens: &[Token]) -> Option<usize> {
    let mut depth = 0i32;
    for (at, token) in tokens.iter().enumerate() {
        depth += nesting_change(token);
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Returns +1 if a token opens a bracket, −1 if it closes one, and 0 otherwise.
fn nesting_change(token: &Token) -> i32 {
    match token {
        Token::Open(_) | Token::GroupOpen | Token::Begin(_) => 1,
        Token::Close(_) | Token::GroupClose | Token::End => -1,
        _ => 0,
    }
}

/// Splits tokens at the separators outside of brackets for which `parts` returns true.
pub(in crate::maths) fn split_outside_brackets(
    tokens: &[Token],
    mut parts: impl FnMut(&Token) -> bool,
) -> Vec<&[Token]> {
    let mut depth = 0;
    tokens
        .split(|token| {
            depth += nesting_change(token);
            depth == 0 && parts(token)
        })
        .collect()
}

/// Splits the tokens of a matrix into its rows, and returns the rows that are not empty.
pub(in crate::maths) fn split_matrix_rows(inner: &[Token]) -> impl Iterator<Item = &[Token]> {
    split_outside_brackets(inner, |token| *token == Token::Row)
        .into_iter()
        .filter(|row| !row.is_empty())
}

/// Splits the tokens of a matrix row into its cells.
pub(in crate::maths) fn split_row_cells(row: &[Token]) -> Vec<&[Token]> {
    split_outside_brackets(row, |token| *token == Token::Cell)
}
