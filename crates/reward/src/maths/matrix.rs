//! Parses matrices: environments and bracketed arrays, scaled by factors, added and transposed.

use super::expression::Expr;
use super::lexer::Token;
use super::parser::{
    ITEMS, closing_bracket_index, parse_expression, split_matrix_rows, split_row_cells,
};
use super::quantity::strip_modifiers;
use crate::words::NumberDescription;

/// Rows of a matrix, each a list of cells.
pub(super) type Rows = Vec<Vec<Expr>>;

/// Returns whether a token starts a LaTeX matrix. (A determinant is a number.)
fn starts_matrix(token: &Token) -> bool {
    let names = [
        "pmatrix",
        "bmatrix",
        "matrix",
        "Bmatrix",
        "smallmatrix",
        "array",
        "psmallmatrix",
        "bsmallmatrix",
    ];
    matches!(token, Token::Begin(name) if names.contains(&name.as_str()))
}

/// Parses tokens that are a matrix or a sum of matrices, and returns the value as rows. Returns
/// `None` for any other tokens.
pub(super) fn parse_matrix(tokens: &[Token]) -> Option<Rows> {
    if !tokens.iter().any(starts_matrix) {
        return None;
    }
    let mut sum: Option<Rows> = None;
    for (negative, term) in split_terms(tokens) {
        let mut rows = parse_scaled_matrix(term)?;
        if negative {
            rows = map_cells(rows, |cell| Expr::Negative(Box::new(cell)));
        }
        sum = Some(match sum {
            None => rows,
            Some(sum) => add_matrices(sum, rows)?,
        });
    }
    sum
}

/// Splits a sum of matrices into its terms, each with whether it is subtracted.
fn split_terms(tokens: &[Token]) -> Vec<(bool, &[Token])> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut negative = false;
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            Token::Open(_) | Token::GroupOpen | Token::Begin(_) => {
                at += closing_bracket_index(&tokens[at..]).unwrap_or(tokens.len() - at - 1);
            }
            Token::Sign(sign @ ('+' | '-'))
                if !matches!(at.checked_sub(1).map(|at| &tokens[at]), Some(Token::Sign(_))) =>
            {
                if at > start {
                    found.push((negative, &tokens[start..at]));
                    negative = false;
                }
                (start, negative) = (at + 1, negative ^ (*sign == '-'));
            }
            _ => {}
        }
        at += 1;
    }
    found.push((negative, &tokens[start..]));
    found
}

/// Parses a matrix together with the factors before and after it.
fn parse_scaled_matrix(term: &[Token]) -> Option<Rows> {
    let matrix_start = term.iter().position(starts_matrix)?;
    let is_open =
        |at: usize| matches!(term.get(at), Some(Token::Open('(' | '[') | Token::GroupOpen));
    // A bracket that contains only the matrix.
    let bracket = matrix_start.checked_sub(1).filter(|at| {
        let end = matrix_start + closing_bracket_index(&term[matrix_start..]).unwrap_or(0);
        is_open(*at) && closing_bracket_index(&term[*at..]) == Some(end + 1 - at)
    });
    let start = bracket.unwrap_or(matrix_start);
    let end = start + closing_bracket_index(&term[start..])?;
    let inner = &term[matrix_start + 1..if bracket.is_some() { end - 1 } else { end }];
    let before = &term[..start];
    let after = &term[end + 1..];
    let mut found = parse_rows(inner)?;
    let after = match after {
        [Token::Sign('^'), rest @ ..] => {
            found = transpose(found);
            strip_transpose_exponent(rest)?
        }
        after => after,
    };
    let before = match before {
        [before @ .., Token::Sign('*')] => before,
        before => before,
    };
    if !before.is_empty() {
        let factor = parse_expression(before)?;
        found = map_cells(found, |cell| Expr::Product(vec![factor.clone(), cell]));
    }
    let factor = match after {
        [] => return Some(found),
        [Token::Sign('/'), rest @ ..] => parse_expression(rest)?.inverse(),
        [Token::Sign('*'), rest @ ..] => parse_expression(rest)?,
        rest => parse_expression(rest)?,
    };
    Some(map_cells(found, |cell| Expr::Product(vec![cell, factor.clone()])))
}

/// Returns the tokens after an exponent that denotes transposition, or `None` for any other
/// exponent.
fn strip_transpose_exponent(tokens: &[Token]) -> Option<&[Token]> {
    let is_mark = |token: &Token| match token {
        Token::Letter(name) | Token::Text(name) => name == "T" || name == "t",
        Token::Command(name) => name == "top" || name == "intercal",
        _ => false,
    };
    match tokens {
        [mark, rest @ ..] if is_mark(mark) => Some(rest),
        [Token::GroupOpen, mark, Token::GroupClose, rest @ ..] if is_mark(mark) => Some(rest),
        _ => None,
    }
}

fn transpose(matrix: Rows) -> Rows {
    let width = matrix.iter().map(Vec::len).min().unwrap_or(0);
    (0..width).map(|at| matrix.iter().map(|row| row[at].clone()).collect()).collect()
}

fn parse_rows(inner: &[Token]) -> Option<Rows> {
    let rows: Option<Rows> = split_matrix_rows(inner)
        .map(|row| {
            let cell = |tokens| {
                Some(strip_modifiers(parse_expression(tokens)?, &mut NumberDescription::default()))
            };
            split_row_cells(row).into_iter().map(cell).collect()
        })
        .collect();
    rows.filter(|rows| rows.len() <= ITEMS && rows.iter().all(|row| row.len() == rows[0].len()))
}

fn map_cells(rows: Rows, change: impl Fn(Expr) -> Expr) -> Rows {
    rows.into_iter().map(|row| row.into_iter().map(&change).collect()).collect()
}

fn add_matrices(a: Rows, b: Rows) -> Option<Rows> {
    let fits = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.len() == b.len());
    fits.then(|| {
        let cells = |(a, b): (Vec<Expr>, Vec<Expr>)| {
            a.into_iter().zip(b).map(|(a, b)| Expr::Sum(vec![a, b])).collect()
        };
        a.into_iter().zip(b).map(cells).collect()
    })
}
