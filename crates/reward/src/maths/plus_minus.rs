//! Expands ± into its values.

use super::expression::Expr;

/// Returns the values of an expression: one value, or several values if it contains ±.
pub(super) fn expand_plus_minus(value: &Expr) -> Vec<Expr> {
    let mut several = vec![value.clone()];
    // At most three signs are expanded, into eight values.
    for _ in 0..3 {
        let both: Vec<Option<[Expr; 2]>> = several.iter().map(expand_first_plus_minus).collect();
        if both.iter().all(Option::is_none) {
            break;
        }
        several = several
            .into_iter()
            .zip(both)
            .flat_map(|(one, both)| both.map_or_else(|| vec![one], |both| both.to_vec()))
            .collect();
    }
    several
}

/// Returns the two expressions that result from the first ± of an expression. Returns `None` if the
/// expression contains no ±.
fn expand_first_plus_minus(expression: &Expr) -> Option<[Expr; 2]> {
    let among = |parts: &[Expr], made: &dyn Fn(Vec<Expr>) -> Expr| {
        let (at, both) = parts
            .iter()
            .enumerate()
            .find_map(|(at, part)| Some((at, expand_first_plus_minus(part)?)))?;
        Some(both.map(|one| {
            let mut parts = parts.to_vec();
            parts[at] = one;
            made(parts)
        }))
    };
    match expression {
        Expr::PlusMinus(inner) => Some([(**inner).clone(), Expr::Negative(inner.clone())]),
        Expr::Negative(inner) => {
            expand_first_plus_minus(inner).map(|both| both.map(|one| Expr::Negative(Box::new(one))))
        }
        Expr::Sum(parts) => among(parts, &Expr::Sum),
        Expr::Product(parts) => among(parts, &Expr::Product),
        Expr::Power(base, exponent) => {
            let both = expand_first_plus_minus(base)?;
            Some(both.map(|one| Expr::Power(Box::new(one), exponent.clone())))
        }
        _ => None,
    }
}
