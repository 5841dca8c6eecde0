//! Parses equations and other relations as answers.

use super::*;

/// Parses a chain of relations: the `sides`, which relation signs in `tokens` separate.
pub(super) fn parse_relation(
    tokens: &[Token],
    sides: &[&[Token]],
    depth: u32,
) -> Option<ParsedAnswer> {
    if sides.len() > ITEMS {
        return None;
    }
    let mut signs = Vec::with_capacity(sides.len() - 1);
    let mut at = 0;
    for side in &sides[..sides.len() - 1] {
        at += side.len();
        let Token::Sign(sign) = tokens[at] else { return None };
        signs.push(sign);
        at += 1;
    }
    let is_equal = are_all_equalities(&signs);
    let first = sides.first()?;
    let last = sides.last()?;
    // "Integers x > 0" is not an interval.
    let is_kind = |token: &Token| {
        matches!(token, Token::Text(word) if ["integer", "integers", "naturals", "整数", "自然数"]
            .contains(&word.to_lowercase().as_str()))
    };
    if !is_equal && tokens.iter().any(is_kind) {
        return None;
    }
    // (a, b) = (1, 2)
    if let (true, [_, _]) = (is_equal, sides)
        && let Some(ParsedAnswer::Tuple { items: names, .. }) = parse_bracketed(first, depth + 1)
    {
        let names: Option<Vec<Expr>> = names
            .into_iter()
            .map(|name| match name {
                ParsedAnswer::Value(name) if matches!(name.value, Expr::Symbol(_)) => {
                    Some(name.value)
                }
                _ => None,
            })
            .collect();
        return match (names, parse_item(last, depth + 1)?) {
            (Some(names), ParsedAnswer::Tuple { items, .. }) if names.len() == items.len() => {
                Some(ParsedAnswer::Named(names, items))
            }
            (None, _) => None,
            (_, other) => Some(other),
        };
    }
    if is_equal && parse_ratio(last).is_some() {
        return Some(match (parse_item(last, depth + 1)?, parse_ratio(first)) {
            (ParsedAnswer::Ratio(found), Some(names)) => {
                ParsedAnswer::Ratio(Ratio { names: names.parts, ..found })
            }
            (other, _) => other,
        });
    }
    let mut about = NumberDescription::default();
    let value = parse_quantity(last);
    // In `A = \{1, 2\}` and `f(x) = 5\%`, the answer is the right side.
    if is_equal && value.as_ref().is_none_or(|value| value.percent) {
        return Some(attach_label(join_label_words(first), parse_item(last, depth + 1)?));
    }
    let before = sides[..sides.len() - 1].iter();
    let parts: Option<Vec<Expr>> = before
        .map(|side| {
            let name = event_name(side).filter(|_| is_equal);
            name.or_else(|| {
                Some(strip_modifiers(parse_expression(side)?, &mut NumberDescription::default()))
            })
        })
        .collect();
    let mut parts = parts?;
    if let Some(value) = value {
        about = value.about;
        parts.push(value.value);
    } else {
        parts.push(strip_modifiers(parse_expression(last)?, &mut about));
    }
    // x = ±2 states two answers.
    let several = expand_plus_minus(parts.last()?);
    if is_equal && several.len() > 1 {
        let first = parts.swap_remove(0);
        let each = |value: Expr| {
            ParsedAnswer::Relation(vec![first.clone(), value], vec!['='], about.clone())
        };
        return Some(ParsedAnswer::List(several.into_iter().map(each).collect()));
    }
    is_consistent_chain(&parts, &signs).then_some(ParsedAnswer::Relation(parts, signs, about))
}

/// Returns the name that a value has in an equation with the left side `P(A \cap B)` or
/// `\frac{dy}{dx}`.
fn event_name(side: &[Token]) -> Option<Expr> {
    let is_letter = |token: &Token, name: &str| matches!(token, Token::Letter(own) if own == name);
    let is_event = match side {
        [Token::Letter(_), Token::Open('('), inner @ .., Token::Close(')')] => {
            inner.iter().any(|token| matches!(token, Token::Sign('∩' | '∪' | '|')))
                && closing_bracket_index(&side[1..])? + 2 == side.len()
        }
        [
            Token::Command(name),
            Token::GroupOpen,
            top,
            Token::Letter(_),
            Token::GroupClose,
            Token::GroupOpen,
            bottom,
            Token::Letter(_),
            Token::GroupClose,
        ] => name == "frac" && is_letter(top, "d") && is_letter(bottom, "d"),
        _ => false,
    };
    is_event.then(|| Expr::Symbol(format!("{side:?}")))
}

/// Returns whether a chain of equalities can hold: each value must equal the preceding value, up to
/// rounding.
fn is_consistent_chain(parts: &[Expr], signs: &[char]) -> bool {
    parts.windows(2).zip(signs).all(|(pair, sign)| {
        let [a, b] = pair else { return true };
        !matches!(sign, '=' | '≈')
            || !a.is_fixed()
            || !b.is_fixed()
            || can_be_rounded_to(a, b, *sign)
    })
}

/// Returns whether the number `written` can denote `exact`: they differ at most by rounding or
/// truncation.
fn can_be_rounded_to(exact: &Expr, written: &Expr, sign: char) -> bool {
    let both = to_exact_rational(exact).zip(to_exact_rational(written));
    if both.as_ref().is_some_and(|(a, b)| a == b) {
        return true;
    }
    let real = |expr: &Expr| {
        approximate::evaluate(expr, EvaluationPoint(4))
            .filter(|value| value.im == 0.0)
            .map(|value| value.re)
    };
    let (Some(a), Some(b)) = (real(exact), real(written)) else { return sign == '=' };
    let far = both.and_then(|(a, b)| a.minus(&b)).map_or((a - b).abs(), |far| far.to_f64().abs());
    let near = far / a.abs().max(b.abs());
    let size = b.abs();
    // Both values are exact, so only floating-point errors are allowed.
    let Some(unit) = last_digit_unit(written) else { return near <= 1e-10 };
    let truncates = size < a.abs() && far < unit;
    (far <= 0.5 * unit * (1.0 + 1e-9) || truncates) && (unit < 1.0 || near <= 0.005)
}

/// Returns the unit of the last digit of a number that is written with a decimal point or as a
/// multiple of a power of ten. The unit of an integer is 1. Returns `None` for other expressions.
fn last_digit_unit(expr: &Expr) -> Option<f64> {
    match expr {
        Expr::Number(literal) => Some(10f64.powi(literal.scale)),
        Expr::Negative(inner) => last_digit_unit(inner),
        Expr::Product(factors) => match &factors[..] {
            [Expr::Number(literal), power @ Expr::Power(base, _)]
                if **base == Expr::integer(10) =>
            {
                Some(10f64.powi(literal.scale) * to_exact_rational(power)?.to_f64())
            }
            _ => None,
        },
        _ => None,
    }
}
