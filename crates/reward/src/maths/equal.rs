//! Decides whether an answer equals the expected answer.

use super::answer::{ParsedAnswer, are_all_equalities};
use super::approximate::{self, Complex};
use super::expression::{Expr, MathConstant};
use super::field::{EvaluationPoint, FieldElement, to_exact_rational};
use super::members::{self, is_name_expression};
use super::quantity::Quantity;
use super::region::{self, reversed_sign};
use super::time::Ratio;

/// Rules by which two mathematical answers are compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct ComparisonRules {
    /// Number of decimals at which a number with a decimal point is compared with another number.
    /// `None` requires exact equality.
    pub decimals: Option<u32>,
    /// Whether 50% equals 50, in addition to 0.5.
    pub percent_or_number: bool,
    /// Whether the units and names of two values must be equal.
    pub units: bool,
}

/// Points at which two expressions are compared in a finite field.
const POINTS: [EvaluationPoint; 2] =
    [EvaluationPoint(0x5bd1_e995_7b93_d1a1), EvaluationPoint(0x2545_f491_4f6c_dd1d)];
/// Points at which two expressions are compared in floating point.
const NEAR: [EvaluationPoint; 6] = [
    EvaluationPoint(4),
    EvaluationPoint(9),
    EvaluationPoint(16),
    EvaluationPoint(6),
    EvaluationPoint(11),
    EvaluationPoint(26),
];

/// Minimum number of points at which two expressions must have floating-point values to be
/// compared.
const ENOUGH: usize = 3;

impl ComparisonRules {
    /// Returns whether an answer means the same as the expected answer `gold`. The comparison is
    /// symmetric except for two rules. The expected answer decides whether 1:15 is a time or a
    /// ratio. Only an answer may state its value by an equation of several variables, such as `m +
    /// n = 204`.
    pub fn is_same_answer(self, gold: &ParsedAnswer, answer: &ParsedAnswer) -> bool {
        use ParsedAnswer as A;
        if gold == answer {
            return true;
        }
        match (gold, answer) {
            (A::Labeled(_, gold), answer) => self.is_same_answer(gold, answer),
            (gold, A::Labeled(_, answer)) => self.is_same_answer(gold, answer),
            (A::Value(a), A::Value(b)) => self.compare_quantities(a, b),
            (A::Words(a), A::Words(b)) => a == b,
            // Words that were parsed as variables: \text{even} and even, \text{no} and n · o.
            (A::Words(words), A::Value(value)) | (A::Value(value), A::Words(words)) => {
                spelled_letters(&value.value).is_some_and(|spelled| spelled == *words)
            }
            (A::Matrix(a), A::Matrix(b)) => {
                let row = |a: &[Expr], b: &[Expr]| {
                    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.are_equal_values(a, b))
                };
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| row(a, b))
            }
            (A::Relation(..), A::Relation(..)) => self.compare_relations(gold, answer),
            (A::Ratio(gold), A::Ratio(answer)) => self.compare_ratios(gold, answer),
            // A time is not a quotient: 2:30 is neither 1/15 nor 2/30, but 3:00 equals 3 o'clock. A
            // time whose minutes are not a multiple of 5, such as 9:49, can be a ratio if the
            // answer is the fraction of exactly these numbers.
            (A::Ratio(Ratio { parts, clock: Some(clock), .. }), A::Value(value)) => {
                let hour = parts.first().filter(|_| clock % 3600 == 0);
                hour.is_some_and(|hour| {
                    self.compare_quantities(&Quantity::from_value(hour.clone()), value)
                }) || (clock % 300 != 0
                    && matches!(&parts[..], [a, b] if *value == Quantity::from_value(Expr::quotient(a, b))))
            }
            (A::Ratio(ratio), A::Value(value)) | (A::Value(value), A::Ratio(ratio)) => {
                match &ratio.parts[..] {
                    [a, b] if !ratio.is_in_words => {
                        let quotient = Quantity::from_value(Expr::quotient(a, b));
                        self.compare_quantities(&quotient, value)
                    }
                    _ => false,
                }
            }
            (A::Residue(a, by), A::Residue(b, other)) => {
                let quotient = difference_of(a, b);
                self.are_equal_values(by, other)
                    && (self.are_equal_values(a, b)
                        || to_exact_rational(&Expr::Product(vec![quotient, by.clone().inverse()]))
                            .is_some_and(|quotient| quotient.is_integer()))
            }
            (A::Residue(a, _), other @ A::Value(_)) => {
                self.is_same_answer(&A::Value(Quantity::from_value(a.clone())), other)
            }
            (other @ A::Value(_), A::Residue(b, _)) => {
                self.is_same_answer(other, &A::Value(Quantity::from_value(b.clone())))
            }
            (A::Named(_, items), A::Tuple { items: other, .. } | A::List(other))
            | (A::Tuple { items: other, .. } | A::List(other), A::Named(_, items))
                if members::named_members(gold).is_none()
                    || members::named_members(answer).is_none() =>
            {
                self.is_same_in_order(items, other)
            }
            (A::Named(..) | A::List(_) | A::Set(_), A::Named(..) | A::List(_) | A::Set(_)) => {
                self.compare_collections(gold, answer)
            }
            // A matrix as a list of rows.
            (A::Matrix(rows), A::Tuple { open: '[', items, .. })
            | (A::Tuple { open: '[', items, .. }, A::Matrix(rows)) => {
                let value = |of: &Expr| A::Value(Quantity::from_value(of.clone()));
                let is_row = |(row, item): (&Vec<Expr>, &ParsedAnswer)| {
                    let row: Vec<ParsedAnswer> = row.iter().map(value).collect();
                    matches!(item, A::Tuple { open: '[', items, .. }
                        if self.is_same_in_order(&row, items))
                };
                rows.len() == items.len() && rows.iter().zip(items).all(is_row)
            }
            // A half-open or closed interval is not a list.
            (A::Tuple { items, open, close }, A::List(list))
            | (A::List(list), A::Tuple { items, open, close })
                if (*open == '(') == (*close == ')')
                    && (*open == '(' || items.len() != 2)
                    && self.is_same_in_order(items, &members::sort_by_variable(list)) =>
            {
                true
            }
            (A::Tuple { open, close, items }, A::Tuple { open: o, close: c, items: other }) => {
                open == o && close == c && self.is_same_in_order(items, other)
            }
            (A::All(a), A::All(b)) if self.is_same_in_any_order(a, b) => true,
            (A::Combined(sign, a), A::Combined(other, b))
                if sign == other
                    && (self.is_same_in_order(a, b)
                        || ("∪∩∧∨≅∼".contains(*sign) && self.is_same_in_any_order(a, b))) =>
            {
                true
            }
            (A::Set(one), other @ A::Value(_)) => {
                matches!(&one[..], [one] if self.is_same_answer(one, other))
            }
            (other @ A::Value(_), A::Set(one)) => {
                matches!(&one[..], [one] if self.is_same_answer(other, one))
            }
            _ => {
                if let Some(same) = self.compare_regions(gold, answer) {
                    return same;
                }
                match (&assigned_values(gold)[..], &assigned_values(answer)[..]) {
                    ([], []) => {
                        matches!(gold, A::Value(_) | A::Ratio(_)) && {
                            defined_value(answer)
                                .is_some_and(|value| self.is_same_answer(gold, &value))
                        }
                    }
                    (values, []) => values.iter().any(|value| self.is_same_answer(value, answer)),
                    ([], values) => values.iter().any(|value| self.is_same_answer(gold, value)),
                    _ => false,
                }
            }
        }
    }

    fn compare_regions(self, a: &ParsedAnswer, b: &ParsedAnswer) -> Option<bool> {
        let units = |answer: &ParsedAnswer| {
            let mut units = Vec::new();
            collect_units(answer, &mut units);
            units.sort_unstable();
            units.dedup();
            units
        };
        if self.units && units(a) != units(b) {
            return Some(false);
        }
        let a = region::to_region(a)?;
        let b = region::to_region(b)?;
        Some(a.equals_region(&b, &|a, b| self.are_equal_values(a, b)))
    }

    /// Returns whether two lists or sets are equal: by name if the members of both have names,
    /// otherwise in any order.
    fn compare_collections(self, a: &ParsedAnswer, b: &ParsedAnswer) -> bool {
        if let (Some(named), Some(other)) = (members::named_members(a), members::named_members(b)) {
            return members::pair_members(&named, &other).is_some_and(|pairs| {
                pairs.iter().all(|(one, other)| self.is_same_answer(one, other))
            });
        }
        let items = |answer: &ParsedAnswer| match answer {
            ParsedAnswer::List(items)
            | ParsedAnswer::Set(items)
            | ParsedAnswer::Named(_, items) => items.clone(),
            _ => vec![],
        };
        self.is_same_in_any_order(&items(a), &items(b))
            || self.compare_regions(a, b).unwrap_or(false)
    }

    fn compare_ratios(self, gold: &Ratio, answer: &Ratio) -> bool {
        if gold.clock.is_some() {
            return gold.clock == answer.clock && gold.about.agrees_with(&answer.about);
        }
        let a = &gold.parts;
        let b = &answer.parts;
        if !gold.names.is_empty() && !answer.names.is_empty() && gold.names != answer.names {
            return false;
        }
        if gold.is_in_words && answer.is_in_words {
            return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.are_equal_values(a, b));
        }
        let across = |one: &Expr, other: &Expr| Expr::Product(vec![one.clone(), other.clone()]);
        a.len() == b.len()
            && a.first().zip(b.first()).is_some_and(|(first, other)| {
                a.iter().zip(b).all(|(a, b)| self.are_equal_values(&across(a, other), &across(b, first)))
            })
            // 0 : 1 is not a multiple of 0 : 0.
            && !b.iter().all(|part| to_exact_rational(part) == Some(0.into()))
    }

    fn compare_quantities(self, a: &Quantity, b: &Quantity) -> bool {
        let is_same = !self.units || (a.about.is_written_as(&b.about));
        if !is_same || !a.about.agrees_with(&b.about) {
            return false;
        }
        let (percent, other) = match (a.percent, b.percent) {
            (true, false) => (a, b),
            (false, true) => (b, a),
            _ => return self.are_equal_values(&a.value, &b.value),
        };
        let part = Expr::Product(vec![percent.value.clone(), Expr::integer(100).inverse()]);
        other.about.units.is_empty()
            && (self.are_equal_values(&part, &other.value)
                || (self.percent_or_number && self.are_equal_values(&percent.value, &other.value)))
    }

    fn is_same_in_order(self, a: &[ParsedAnswer], b: &[ParsedAnswer]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.is_same_answer(a, b))
    }

    fn is_same_in_any_order(self, a: &[ParsedAnswer], b: &[ParsedAnswer]) -> bool {
        if a.len() != b.len() {
            return false;
        }
        let mut remaining: Vec<&ParsedAnswer> = b.iter().collect();
        a.iter().all(|a| {
            let at = remaining.iter().position(|b| self.is_same_answer(a, b));
            at.map(|at| remaining.swap_remove(at)).is_some()
        })
    }

    /// Returns whether two expressions have the same value.
    pub fn are_equal_values(self, a: &Expr, b: &Expr) -> bool {
        if a == b {
            return true;
        }
        if let (Some(a), Some(b)) = (a.infinity_sign(), b.infinity_sign()) {
            return a == b;
        }
        if let (Some(x), Some(y)) = (to_exact_rational(a), to_exact_rational(b)) {
            return x == y || self.are_equal_after_rounding(a, b);
        }
        match POINTS.map(|at| (at.evaluate(a), at.evaluate(b))) {
            [(Some(a1), Some(b1)), (Some(a2), Some(b2))] => {
                (a1, a2) == (b1, b2) || self.are_equal_after_rounding(a, b)
            }
            _ => are_near(a, b) || self.are_equal_after_rounding(a, b),
        }
    }

    /// Returns whether two numbers are equal up to rounding. At least one of them must have a
    /// decimal point.
    fn are_equal_after_rounding(self, a: &Expr, b: &Expr) -> bool {
        let Some(decimals) = self.decimals else { return false };
        let is_decimal = |expr: &Expr| {
            expr.any(&mut |of| matches!(of, Expr::Number(literal) if literal.decimal))
        };
        if !(is_decimal(a) || is_decimal(b)) || !a.is_fixed() || !b.is_fixed() {
            return false;
        }
        let bound = 0.5 * 10f64.powi(-(decimals as i32)) * (1.0 + 1e-9);
        let real = |expr| {
            approximate::evaluate(expr, NEAR[0])
                .filter(|value| value.im == 0.0)
                .map(|value| value.re)
        };
        let (Some(x), Some(y)) = (real(a), real(b)) else { return false };
        let size = x.abs().max(y.abs());
        let exact = to_exact_rational(a).zip(to_exact_rational(b)).and_then(|(a, b)| a.minus(&b));
        // For a large number, floating point does not represent these decimals.
        let far = match exact {
            Some(far) => far.to_f64().abs(),
            None if size * 1e-15 > bound => return false,
            None => (x - y).abs(),
        };
        // The relative bound distinguishes small numbers from each other.
        far <= bound && far <= 1e-3 * size
    }

    fn compare_relations(self, a: &ParsedAnswer, b: &ParsedAnswer) -> bool {
        let (ParsedAnswer::Relation(p, r, about), ParsedAnswer::Relation(q, s, other)) = (a, b)
        else {
            return false;
        };
        if !about.agrees_with(other) || (self.units && !about.is_written_as(other)) {
            return false;
        }
        if r == s && p.len() == q.len() && p.iter().zip(q).all(|(a, b)| self.are_equal_values(a, b))
        {
            return true;
        }
        // a > b > c equals c < b < a.
        let is_turned =
            r.iter().eq(s.iter().rev().map(|sign| reversed_sign(*sign)).collect::<Vec<_>>().iter());
        if is_turned && p.iter().zip(q.iter().rev()).all(|(a, b)| self.are_equal_values(a, b)) {
            return true;
        }
        if let (Some((x, value)), Some((y, other))) =
            (members::split_assignment(p, r), members::split_assignment(q, s))
            && x == y
        {
            return self.are_equal_values(value, other);
        }
        if let Some(same) = self.compare_regions(a, b) {
            return same;
        }
        let ([left, right], [sign]) = (&p[..], &r[..]) else { return false };
        let ([other_left, other_right], [other_sign]) = (&q[..], &s[..]) else { return false };
        let Some(scale) =
            constant_quotient(&difference_of(left, right), &difference_of(other_left, other_right))
        else {
            return false;
        };
        *sign == if scale < 0.0 { reversed_sign(*other_sign) } else { *other_sign }
    }
}

/// Appends the units of all values in an answer to `units`.
fn collect_units(answer: &ParsedAnswer, units: &mut Vec<(&'static str, i32)>) {
    match answer {
        ParsedAnswer::Value(quantity) => units.extend(&quantity.about.units),
        ParsedAnswer::Relation(_, _, about) => units.extend(&about.units),
        ParsedAnswer::Labeled(_, inner) => collect_units(inner, units),
        ParsedAnswer::List(items)
        | ParsedAnswer::Set(items)
        | ParsedAnswer::Tuple { items, .. }
        | ParsedAnswer::Named(_, items)
        | ParsedAnswer::Combined(_, items)
        | ParsedAnswer::All(items) => items.iter().for_each(|item| collect_units(item, units)),
        ParsedAnswer::Words(_)
        | ParsedAnswer::Matrix(_)
        | ParsedAnswer::Ratio(_)
        | ParsedAnswer::Residue(..) => {}
    }
}

/// Returns whether two expressions are close at every point at which they have values, and whether
/// there are enough such points.
fn are_near(a: &Expr, b: &Expr) -> bool {
    // Numbers with more digits must be closer. With as many digits as floating point has, they
    // cannot be distinguished.
    let mut digits = 0;
    for expr in [a, b] {
        expr.any(&mut |expr| {
            if let Expr::Number(literal) = expr {
                digits = digits.max(literal.digits.trim_matches('0').len() as i32);
            }
            false
        });
    }
    if digits > 13 {
        return false;
    }
    let bound = 1e-10f64.min(10f64.powi(-digits - 1));
    let mut seen = 0;
    for at in NEAR {
        match (approximate::evaluate(a, at), approximate::evaluate(b, at)) {
            (Some(a), Some(b)) if a.is_near(b, bound) => seen += 1,
            (None, None) => {}
            _ => return false,
        }
    }
    seen >= ENOUGH
}

fn difference_of(left: &Expr, right: &Expr) -> Expr {
    Expr::Sum(vec![left.clone(), Expr::Negative(Box::new(right.clone()))])
}

/// Returns the quotient of two expressions if the quotient is the same number at every point.
fn constant_quotient(a: &Expr, b: &Expr) -> Option<f64> {
    let [p, q] = POINTS;
    let exact = |values: &Expr| {
        Some([p.evaluate(values)?, q.evaluate(values)?])
            .filter(|of| !of.contains(&FieldElement::ZERO))
    };
    let is_so = match (exact(a), exact(b)) {
        (Some([ap, aq]), Some([bp, bq])) => ap.times(bq) == aq.times(bp),
        _ => {
            let ratios: Vec<f64> = NEAR.iter().filter_map(|at| quotient_at(a, b, *at)).collect();
            let first = Complex::from_real(*ratios.first()?);
            ratios.len() >= ENOUGH
                && ratios.iter().all(|ratio| Complex::from_real(*ratio).is_near(first, 1e-10))
        }
    };
    if is_so {
        NEAR.iter().find_map(|at| quotient_at(a, b, *at)).filter(|ratio| *ratio != 0.0)
    } else {
        None
    }
}

fn quotient_at(a: &Expr, b: &Expr, at: EvaluationPoint) -> Option<f64> {
    let a = approximate::evaluate(a, at)?;
    let b = approximate::evaluate(b, at)?;
    (a.im == 0.0 && b.im == 0.0 && b.re != 0.0).then_some(a.re / b.re)
}

/// Returns the value of an equation such as `x = 3` or `2 + 3 = 5`. For `x = 1/3 ≈ 0.333`, returns
/// both the rounded and the exact value.
fn assigned_values(answer: &ParsedAnswer) -> Vec<ParsedAnswer> {
    let ParsedAnswer::Relation(parts, signs, about) = answer else { return Vec::new() };
    let [rest @ .., last] = &parts[..] else { return Vec::new() };
    if !are_all_equalities(signs)
        || !rest.first().is_some_and(|first| is_name_expression(first) || first.is_fixed())
    {
        return Vec::new();
    }
    let exact =
        rest.last().filter(|exact| signs.last() == Some(&'≈') && !is_name_expression(exact));
    let value = |value: &Expr| {
        ParsedAnswer::Value(Quantity {
            about: about.clone(),
            ..Quantity::from_value(value.clone())
        })
    };
    [Some(last), exact].into_iter().flatten().map(value).collect()
}

/// Returns the value of an equation of several variables: 204 for `m + n = 204`.
fn defined_value(answer: &ParsedAnswer) -> Option<ParsedAnswer> {
    let ParsedAnswer::Relation(parts, signs, about) = answer else { return None };
    let first = parts.first()?;
    let last = parts.last()?;
    let mut variables = Vec::new();
    first.variables(&mut variables);
    let is_value = are_all_equalities(signs) && variables.len() > 1 && last.is_fixed();
    is_value.then(|| {
        ParsedAnswer::Value(Quantity { about: about.clone(), ..Quantity::from_value(last.clone()) })
    })
}

/// Returns the letters of a product of variables, in the order in which they are written.
fn spelled_letters(value: &Expr) -> Option<String> {
    match value {
        Expr::Symbol(name) | Expr::Unit(name) => Some(name.to_lowercase()),
        Expr::Constant(MathConstant::E) => Some("e".into()),
        Expr::Constant(MathConstant::I) => Some("i".into()),
        Expr::Product(factors) => factors.iter().map(spelled_letters).collect(),
        _ => None,
    }
}
