//! Parses matrices: environments and bracketed arrays, scaled by factors, added and transposed.

use super::expression::Expr;
use super::lexer::Token;
use super::parser::{ITEMS, cells, closing, expression, rows};
use super::quantity::strip_modifiers;
use crate::words::About;

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
pub(super) fn matrix(tokens: &[Token]) -> Option<Rows> {
    if !tokens.iter().any(starts_matrix) {
        return None;
    }
    let mut sum: Option<Rows> = None;
    for (negative, term) in terms(tokens) {
        let mut rows = scaled_matrix(term)?;
        if negative {
            rows = map(rows, |cell| Expr::Negative(Box::new(cell)));
        }
        sum = Some(match sum {
            None => rows,
            Some(sum) => add(sum, rows)?,
        });
    }
    sum
}

/// Splits a sum of matrices into its terms, each with whether it is subtracted.
fn terms(tokens: &[Token]) -> Vec<(bool, &[Token])> {
    let mut found = Vec::new();
    let mut start = 0;
    let mut negative = false;
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            Token::Open(_) | Token::GroupOpen | Token::Begin(_) => {
                at += closing(&tokens[at..]).unwrap_or(tokens.len() - at - 1);
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
fn scaled_matrix(term: &[Token]) -> Option<Rows> {
    let matrix_start = term.iter().position(starts_matrix)?;
    let is_open =
        |at: usize| matches!(term.get(at), Some(Token::Open('(' | '[') | Token::GroupOpen));
    // A bracket that contains only the matrix.
    let bracket = matrix_start.checked_sub(1).filter(|at| {
        let end = matrix_start + closing(&term[matrix_start..]).unwrap_or(0);
        is_open(*at) && closing(&term[*at..]) == Some(end + 1 - at)
    });
    let start = bracket.unwrap_or(matrix_start);
    let end = start + closing(&term[start..])?;
    let inner = &term[matrix_start + 1..if bracket.is_some() { end - 1 } else { end }];
    let before = &term[..start];
    let after = &term[end + 1..];
    let mut found = parse_rows(inner)?;
    let after = match after {
        [Token::Sign('^'), rest @ ..] => {
            found = transpose(found);
            transposes(rest)?
        }
        after => after,
    };
    let before = match before {
        [before @ .., Token::Sign('*')] => before,
        before => before,
    };
    if !before.is_empty() {
        let factor = expression(before)?;
        found = map(found, |cell| Expr::Product(vec![factor.clone(), cell]));
    }
    let factor = match after {
        [] => return Some(found),
        [Token::Sign('/'), rest @ ..] => expression(rest)?.inverse(),
        [Token::Sign('*'), rest @ ..] => expression(rest)?,
        rest => expression(rest)?,
    };
    Some(map(found, |cell| Expr::Product(vec![cell, factor.clone()])))
}

/// Returns the tokens after an exponent that denotes transposition, or `None` for any other
/// exponent.
fn transposes(tokens: &[Token]) -> Option<&[Token]> {
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
    let rows: Option<Rows> = rows(inner)
        .map(|row| {
            let cell = |tokens| Some(strip_modifiers(expression(tokens)?, &mut About::default()));
            cells(row).into_iter().map(cell).collect()
        })
        .collect();
    rows.filter(|rows| rows.len() <= ITEMS && rows.iter().all(|row| row.len() == rows[0].len()))
}

fn map(rows: Rows, change: impl Fn(Expr) -> Expr) -> Rows {
    rows.into_iter().map(|row| row.into_iter().map(&change).collect()).collect()
}

fn add(a: Rows, b: Rows) -> Option<Rows> {
    let fits = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.len() == b.len());
    fits.then(|| {
        let cells = |(a, b): (Vec<Expr>, Vec<Expr>)| {
            a.into_iter().zip(b).map(|(a, b)| Expr::Sum(vec![a, b])).collect()
        };
        a.into_iter().zip(b).map(cells).collect()
    })
}
