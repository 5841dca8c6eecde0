//! Expands determinants, and sums and products over an index.

use num_traits::ToPrimitive;

use super::expression::{Expr, MathConstant, NumberLiteral};
use crate::Rational;

/// Maximum number of terms of an expanded sum or product.
const MAX_TERMS: i64 = 1000;

/// Maximum number of expression nodes in an expanded sum or product.
const MAX_SIZE: usize = 20_000;

/// Maximum number of rows of a determinant that is expanded.
const MAX_ROWS: usize = 4;

/// Returns the terms of a sum or product: `body` with the variable `index` replaced by each integer
/// of a range. Returns `None` if the bounds are not integers, if the range is empty, or if the
/// expansion is too large.
pub(super) fn expand_terms(
    body: &Expr,
    index: &str,
    from: &Rational,
    to: &Rational,
) -> Option<Vec<Expr>> {
    let to_integer = |expr: &Rational| expr.numerator().to_i64().filter(|_| expr.is_integer());
    let from = to_integer(from)?;
    let to = to_integer(to)?;
    let count = to.checked_sub(from)?.checked_add(1)?;
    if !(1..=MAX_TERMS).contains(&count) || count as usize * body.size() > MAX_SIZE {
        return None;
    }
    Some((from..=to).map(|value| substitute(body, index, value)).collect())
}

/// Replaces the variable `name` in an expression by an integer.
fn substitute(expr: &Expr, name: &str, value: i64) -> Expr {
    let is_index = match expr {
        Expr::Symbol(own) => own == name,
        // An index i is not the imaginary unit.
        Expr::Constant(MathConstant::I) => name == "i",
        _ => false,
    };
    if is_index {
        let number = Expr::Number(NumberLiteral::integer(value.unsigned_abs().to_string()));
        return if value < 0 { Expr::Negative(Box::new(number)) } else { number };
    }
    let with_value = |expr: &Expr| substitute(expr, name, value);
    match expr {
        Expr::Sum(parts) => Expr::Sum(parts.iter().map(with_value).collect()),
        Expr::Product(parts) => Expr::Product(parts.iter().map(with_value).collect()),
        Expr::Call(function, parts) => {
            Expr::Call(*function, parts.iter().map(with_value).collect())
        }
        Expr::Power(base, exponent) => {
            Expr::Power(Box::new(with_value(base)), Box::new(with_value(exponent)))
        }
        Expr::Negative(inner) => Expr::Negative(Box::new(with_value(inner))),
        Expr::PlusMinus(inner) => Expr::PlusMinus(Box::new(with_value(inner))),
        other => other.clone(),
    }
}

/// Returns the determinant of a square matrix of at most [`MAX_ROWS`] rows, by expansion along its
/// first row.
pub(super) fn determinant(rows: &[Vec<Expr>]) -> Option<Expr> {
    if rows.is_empty() || rows.len() > MAX_ROWS || rows.iter().any(|row| row.len() != rows.len()) {
        return None;
    }
    if let [row] = rows {
        return row.first().cloned();
    }
    let mut parts = Vec::new();
    for (at, first) in rows[0].iter().enumerate() {
        let minor: Vec<Vec<Expr>> =
            rows[1..].iter().map(|row| [&row[..at], &row[at + 1..]].concat()).collect();
        let part = Expr::Product(vec![first.clone(), determinant(&minor)?]);
        parts.push(if at % 2 == 1 { Expr::Negative(Box::new(part)) } else { part });
    }
    Some(Expr::Sum(parts))
}
