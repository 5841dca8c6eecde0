use proptest::prelude::*;

use super::*;

fn evaluate_text(text: &str) -> String {
    match evaluate(text) {
        Ok(value) => value.to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn evaluate_follows_operator_precedence() {
    for (text, want) in [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("2 - 3 - 4", "-5"),
        ("100 / 10 / 2", "5"),
        ("2 ^ 3 ^ 2", "512"),
        ("2**10", "1024"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("2^-2", "0.25"),
        ("--3", "3"),
        ("2 - -3", "5"),
        ("2 * -3", "-6"),
        ("+5", "5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("2/3", "0.6666666667"),
        ("-2/3", "-0.6666666667"),
        ("1/3 * 3", "1"),
        ("10 / 4", "2.5"),
        ("1.50 * 2", "3"),
        (".5 + 3.", "3.5"),
        ("1,234 + 1,000,000", "1001234"),
        ("12 × 3 ÷ 4 − 1", "8"),
        ("12x3", "36"),
        ("12 X 3 · 2", "72"),
        ("1.5e3 + 2E-1", "1500.2"),
        ("1/700000", "0.000001428571429"),
        ("1/16", "0.0625"),
        ("99999999999999999999 + 1", "100000000000000000000"),
        ("2^200", "1.606938044e60"),
        ("2^-200", "6.223015278e-61"),
        ("2^0.5", "1.4142135624"),
        ("4^0.5", "2"),
        ("0^0", "1"),
        ("(-1)^1000001", "-1"),
        ("1^99999999999", "1"),
        ("0 * -1", "0"),
        ("123456789012345678901234567890123456789012345 * 2", "2.46913578e44"),
        ("\t1\n+ 1 ", "2"),
        ("1e-40 * 1e40", "1"),
        ("100000000000000000000 / 3", "33333333333333333333.3333333333"),
        ("99999999999999999999999999999999999999 / 7", "1.428571429e37"),
    ] {
        assert_eq!(evaluate_text(text), want, "{text}");
    }
}

#[test]
fn evaluate_reports_error_and_position() {
    for (text, want) in [
        ("", "the expression is empty"),
        ("  ", "the expression is empty"),
        ("2 + 3)", "unexpected ')' at character 6: an operator or the end is expected"),
        ("2 + )", "unexpected ')' at character 5: a number or '(' is expected"),
        ("2 +", "the expression ends where a number or '(' is expected"),
        ("3 * (2 + 1", "'(' at character 5 is never closed"),
        ("(2 3)", "unexpected '3' at character 4: an operator or ')' is expected"),
        ("2(3)", "unexpected '(' at character 2: an operator or the end is expected"),
        ("48/2=24", "unexpected '=' at character 5: an operator or the end is expected"),
        ("20% * 5", "unexpected '%' at character 3: an operator or the end is expected"),
        ("$5 + 1", "unexpected '$' at character 1: a number or '(' is expected"),
        ("1,23", "unexpected ',' at character 2: an operator or the end is expected"),
        ("two", "unexpected 't' at character 1: a number or '(' is expected"),
        ("1.2.3", "unexpected '.' at character 4: an operator or the end is expected"),
        (".", "unexpected '.' at character 1: a number or '(' is expected"),
        ("5 // 2", "unexpected '/' at character 4: a number or '(' is expected"),
        ("1 / (2 - 2)", "division by zero at character 3"),
        ("0 ^ -1", "division by zero at character 3"),
        ("(-8) ^ 0.5", "the power at character 6 has no real value"),
        ("10 ^ 400", "the result at character 4 is too large"),
        ("1e999", "the result at character 1 is too large"),
        ("×2", "unexpected '×' at character 1: a number or '(' is expected"),
    ] {
        assert_eq!(evaluate_text(text), want, "{text}");
    }
}

#[test]
fn evaluate_bounds_depth_and_length() {
    assert_eq!(evaluate_text(&nested(MAX_DEPTH)), "1");
    let at = MAX_DEPTH + 2;
    assert_eq!(evaluate(&nested(MAX_DEPTH + 1)), Err(ExpressionError::TooDeep { at }));
    for start in ["(", "-", "2^"] {
        let text = start.repeat(400);
        assert!(matches!(evaluate(&text), Err(ExpressionError::TooDeep { .. })), "{start}");
    }
    assert_eq!(evaluate(&"(".repeat(100_000)), Err(ExpressionError::TooLong { length: 100_000 }));
    // A long sum without parentheses has the same depth as a short sum.
    assert_eq!(evaluate_text(&format!("1{}", "+1".repeat(499))), "500");
}

fn nested(n: usize) -> String {
    format!("{}1{}", "(".repeat(n), ")".repeat(n))
}

/// An expression tree with an independent evaluation in f64.
#[derive(Debug, Clone)]
enum Tree {
    Number(u32, u32),
    Negative(Box<Tree>),
    Binary(char, Box<Tree>, Box<Tree>),
    Square(Box<Tree>),
}

impl Tree {
    fn value(&self) -> f64 {
        match self {
            Tree::Number(units, cents) => f64::from(*units) + f64::from(*cents) / 100.0,
            Tree::Negative(inner) => -inner.value(),
            Tree::Square(inner) => inner.value().powi(2),
            Tree::Binary(operator, lhs, rhs) => match operator {
                '+' => lhs.value() + rhs.value(),
                '-' => lhs.value() - rhs.value(),
                '*' => lhs.value() * rhs.value(),
                _ => lhs.value() / rhs.value(),
            },
        }
    }

    /// Precedence of the tree's outermost operation: sums 1, products 2, signs 3, powers 4, atoms
    /// 5.
    fn level(&self) -> u8 {
        match self {
            Tree::Number(..) => 5,
            Tree::Negative(_) => 3,
            Tree::Square(_) => 4,
            Tree::Binary('+' | '-', ..) => 1,
            Tree::Binary(..) => 2,
        }
    }

    /// Writes the tree with parentheses only if it needs them, so that precedence decides the
    /// structure.
    fn text(&self) -> String {
        match self {
            Tree::Number(units, 0) => units.to_string(),
            Tree::Number(units, cents) => format!("{units}.{cents:02}"),
            Tree::Negative(inner) => format!("-{}", write_operand(inner, 3)),
            Tree::Square(inner) => format!("{}^2", write_operand(inner, 5)),
            Tree::Binary(operator, lhs, rhs) => {
                let level = self.level();
                format!(
                    "{} {operator} {}",
                    write_operand(lhs, level),
                    write_operand(rhs, level + 1)
                )
            }
        }
    }
}

fn write_operand(tree: &Tree, level: u8) -> String {
    if tree.level() < level { format!("({})", tree.text()) } else { tree.text() }
}

fn trees() -> impl Strategy<Value = Tree> {
    (0u32..1000, 0u32..100).prop_map(|(w, c)| Tree::Number(w, c)).prop_recursive(
        5,
        32,
        2,
        |inner| {
            prop_oneof![
                inner.clone().prop_map(|t| Tree::Negative(Box::new(t))),
                inner.clone().prop_map(|t| Tree::Square(Box::new(t))),
                (prop::sample::select(vec!['+', '-', '*', '/']), inner.clone(), inner)
                    .prop_map(|(o, l, r)| Tree::Binary(o, Box::new(l), Box::new(r))),
            ]
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn evaluate_matches_f64_reference(tree in trees()) {
        let (text, want) = (tree.text(), tree.value());
        match evaluate(&text) {
            Ok(got) => {
                // Cancellation loses digits in the f64 evaluation, but not in the exact one.
                let got = got.to_f64();
                let scale = magnitude(&tree).max(1.0);
                prop_assume!(want.is_finite() && scale.is_finite());
                prop_assert!((got - want).abs() <= 1e-9 * scale, "{text}: {got}, expected {want}");
            }
            Err(ExpressionError::DivisionByZero { .. }) => {
                // The f64 evaluation of the same divisor is zero up to rounding.
                prop_assert!(!want.is_finite() || divides_by_almost_zero(&tree), "{text}: {want}");
            }
            Err(ExpressionError::TooLarge { .. }) => prop_assert!(!want.is_finite() || want.abs() > 1e300),
            Err(error) => prop_assert!(false, "{text}: {error}"),
        }
    }

    #[test]
    fn decimal_numbers_round_trip(whole in -1_000_000_000i64..1_000_000_000, decimals in 0u32..10_000) {
        let text = format!("{whole}.{decimals:04}");
        let printed = evaluate_text(&text);
        prop_assert_eq!(Rational::parse(&printed), Rational::parse(&text));
        prop_assert!(!printed.contains('.') || !printed.ends_with('0'));
    }

    #[test]
    fn evaluate_never_panics(text in "[-0-9.,()+*/^xe ×÷−]{0,60}") {
        if let Ok(value) = evaluate(&text) {
            prop_assert!(value.to_f64().is_finite());
        }
    }
}

/// Returns an upper bound of every intermediate value and of the error amplification of divisions.
fn magnitude(tree: &Tree) -> f64 {
    match tree {
        Tree::Number(..) => tree.value().abs(),
        Tree::Negative(inner) => magnitude(inner),
        Tree::Square(inner) => magnitude(inner).powi(2),
        Tree::Binary('+' | '-', lhs, rhs) => magnitude(lhs) + magnitude(rhs),
        Tree::Binary('*', lhs, rhs) => magnitude(lhs) * magnitude(rhs),
        Tree::Binary(_, lhs, rhs) => {
            let divisor = rhs.value().abs();
            (magnitude(lhs) / divisor) * (magnitude(rhs) / divisor).max(1.0)
        }
    }
}

fn divides_by_almost_zero(tree: &Tree) -> bool {
    match tree {
        Tree::Number(..) => false,
        Tree::Negative(inner) | Tree::Square(inner) => divides_by_almost_zero(inner),
        Tree::Binary(operator, lhs, rhs) => {
            let tiny = rhs.value().abs() <= 1e-9 * magnitude(rhs).max(1.0);
            (*operator == '/' && tiny) || divides_by_almost_zero(lhs) || divides_by_almost_zero(rhs)
        }
    }
}
