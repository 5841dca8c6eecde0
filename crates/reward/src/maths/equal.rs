//! Decides whether an answer equals the expected answer.

use super::answer::{Answer, equates};
use super::approximate::{self, Complex};
use super::expression::{Constant, Expr};
use super::field::{Element, Point, rational};
use super::members::{self, is_name};
use super::quantity::Quantity;
use super::region::{self, reversed_sign};
use super::time::Ratio;

/// Rules by which two mathematical answers are compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Number of decimals at which a number with a decimal point is compared with another number.
    /// `None` requires exact equality.
    pub decimals: Option<u32>,
    /// Whether 50% equals 50, in addition to 0.5.
    pub percent_or_number: bool,
    /// Whether the units and names of two values must be equal.
    pub units: bool,
}

/// Points at which two expressions are compared in a finite field.
const POINTS: [Point; 2] = [Point(0x5bd1_e995_7b93_d1a1), Point(0x2545_f491_4f6c_dd1d)];
/// Points at which two expressions are compared in floating point.
const NEAR: [Point; 6] = [Point(4), Point(9), Point(16), Point(6), Point(11), Point(26)];

/// Minimum number of points at which two expressions must have floating-point values to be
/// compared.
const ENOUGH: usize = 3;

impl Rules {
    /// Returns whether an answer means the same as the expected answer `gold`. The comparison is
    /// symmetric except for two rules. The expected answer decides whether 1:15 is a time or a
    /// ratio. Only an answer may state its value by an equation of several variables, such as `m +
    /// n = 204`.
    pub fn same(self, gold: &Answer, answer: &Answer) -> bool {
        use Answer as A;
        if gold == answer {
            return true;
        }
        match (gold, answer) {
            (A::Labeled(_, gold), answer) => self.same(gold, answer),
            (gold, A::Labeled(_, answer)) => self.same(gold, answer),
            (A::Value(a), A::Value(b)) => self.quantities(a, b),
            (A::Words(a), A::Words(b)) => a == b,
            // Words that were parsed as variables: \text{even} and even, \text{no} and n · o.
            (A::Words(words), A::Value(value)) | (A::Value(value), A::Words(words)) => {
                spelled_letters(&value.value).is_some_and(|spelled| spelled == *words)
            }
            (A::Matrix(a), A::Matrix(b)) => {
                let row = |a: &[Expr], b: &[Expr]| {
                    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.values(a, b))
                };
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| row(a, b))
            }
            (A::Relation(..), A::Relation(..)) => self.relations(gold, answer),
            (A::Ratio(gold), A::Ratio(answer)) => self.ratios(gold, answer),
            // A time is not a quotient: 2:30 is neither 1/15 nor 2/30, but 3:00 equals 3 o'clock. A
            // time whose minutes are not a multiple of 5, such as 9:49, can be a ratio if the
            // answer is the fraction of exactly these numbers.
            (A::Ratio(Ratio { parts, clock: Some(clock), .. }), A::Value(value)) => {
                let hour = parts.first().filter(|_| clock % 3600 == 0);
                hour.is_some_and(|hour| self.quantities(&Quantity::plain(hour.clone()), value))
                    || (clock % 300 != 0
                        && matches!(&parts[..], [a, b] if *value == Quantity::plain(Expr::quotient(a, b))))
            }
            (A::Ratio(ratio), A::Value(value)) | (A::Value(value), A::Ratio(ratio)) => {
                match &ratio.parts[..] {
                    [a, b] if !ratio.is_in_words => {
                        let quotient = Quantity::plain(Expr::quotient(a, b));
                        self.quantities(&quotient, value)
                    }
                    _ => false,
                }
            }
            (A::Residue(a, by), A::Residue(b, other)) => {
                let quotient = difference(a, b);
                self.values(by, other)
                    && (self.values(a, b)
                        || rational(&Expr::Product(vec![quotient, by.clone().inverse()]))
                            .is_some_and(|quotient| quotient.is_integer()))
            }
            (A::Residue(a, _), other @ A::Value(_)) => {
                self.same(&A::Value(Quantity::plain(a.clone())), other)
            }
            (other @ A::Value(_), A::Residue(b, _)) => {
                self.same(other, &A::Value(Quantity::plain(b.clone())))
            }
            (A::Named(_, items), A::Tuple { items: other, .. } | A::List(other))
            | (A::Tuple { items: other, .. } | A::List(other), A::Named(_, items))
                if members::named_members(gold).is_none()
                    || members::named_members(answer).is_none() =>
            {
                self.is_same_in_order(items, other)
            }
            (A::Named(..) | A::List(_) | A::Set(_), A::Named(..) | A::List(_) | A::Set(_)) => {
                self.several(gold, answer)
            }
            // A matrix as a list of rows.
            (A::Matrix(rows), A::Tuple { open: '[', items, .. })
            | (A::Tuple { open: '[', items, .. }, A::Matrix(rows)) => {
                let value = |of: &Expr| A::Value(Quantity::plain(of.clone()));
                let is_row = |(row, item): (&Vec<Expr>, &Answer)| {
                    let row: Vec<Answer> = row.iter().map(value).collect();
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
                    && self.is_same_in_order(items, &members::by_variable(list)) =>
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
                matches!(&one[..], [one] if self.same(one, other))
            }
            (other @ A::Value(_), A::Set(one)) => {
                matches!(&one[..], [one] if self.same(other, one))
            }
            _ => {
                if let Some(same) = self.regions(gold, answer) {
                    return same;
                }
                match (&assigned_values(gold)[..], &assigned_values(answer)[..]) {
                    ([], []) => {
                        matches!(gold, A::Value(_) | A::Ratio(_)) && {
                            defined_value(answer).is_some_and(|value| self.same(gold, &value))
                        }
                    }
                    (values, []) => values.iter().any(|value| self.same(value, answer)),
                    ([], values) => values.iter().any(|value| self.same(gold, value)),
                    _ => false,
                }
            }
        }
    }

    fn regions(self, a: &Answer, b: &Answer) -> Option<bool> {
        let units = |answer: &Answer| {
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
        Some(a.same(&b, &|a, b| self.values(a, b)))
    }

    /// Returns whether two lists or sets are equal: by name if the members of both have names,
    /// otherwise in any order.
    fn several(self, a: &Answer, b: &Answer) -> bool {
        if let (Some(named), Some(other)) = (members::named_members(a), members::named_members(b)) {
            return members::pairs(&named, &other)
                .is_some_and(|pairs| pairs.iter().all(|(one, other)| self.same(one, other)));
        }
        let items = |answer: &Answer| match answer {
            Answer::List(items) | Answer::Set(items) | Answer::Named(_, items) => items.clone(),
            _ => vec![],
        };
        self.is_same_in_any_order(&items(a), &items(b)) || self.regions(a, b).unwrap_or(false)
    }

    fn ratios(self, gold: &Ratio, answer: &Ratio) -> bool {
        if gold.clock.is_some() {
            return gold.clock == answer.clock && gold.about.agrees(&answer.about);
        }
        let a = &gold.parts;
        let b = &answer.parts;
        if !gold.names.is_empty() && !answer.names.is_empty() && gold.names != answer.names {
            return false;
        }
        if gold.is_in_words && answer.is_in_words {
            return a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.values(a, b));
        }
        let across = |one: &Expr, other: &Expr| Expr::Product(vec![one.clone(), other.clone()]);
        a.len() == b.len()
            && a.first().zip(b.first()).is_some_and(|(first, other)| {
                a.iter().zip(b).all(|(a, b)| self.values(&across(a, other), &across(b, first)))
            })
            // 0 : 1 is not a multiple of 0 : 0.
            && !b.iter().all(|part| rational(part) == Some(0.into()))
    }

    fn quantities(self, a: &Quantity, b: &Quantity) -> bool {
        let is_same = !self.units || (a.about.is_written_as(&b.about));
        if !is_same || !a.about.agrees(&b.about) {
            return false;
        }
        let (percent, other) = match (a.percent, b.percent) {
            (true, false) => (a, b),
            (false, true) => (b, a),
            _ => return self.values(&a.value, &b.value),
        };
        let part = Expr::Product(vec![percent.value.clone(), Expr::integer(100).inverse()]);
        other.about.units.is_empty()
            && (self.values(&part, &other.value)
                || (self.percent_or_number && self.values(&percent.value, &other.value)))
    }

    fn is_same_in_order(self, a: &[Answer], b: &[Answer]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.same(a, b))
    }

    fn is_same_in_any_order(self, a: &[Answer], b: &[Answer]) -> bool {
        if a.len() != b.len() {
            return false;
        }
        let mut remaining: Vec<&Answer> = b.iter().collect();
        a.iter().all(|a| {
            let at = remaining.iter().position(|b| self.same(a, b));
            at.map(|at| remaining.swap_remove(at)).is_some()
        })
    }

    /// Returns whether two expressions have the same value.
    pub fn values(self, a: &Expr, b: &Expr) -> bool {
        if a == b {
            return true;
        }
        if let (Some(a), Some(b)) = (a.infinity_sign(), b.infinity_sign()) {
            return a == b;
        }
        if let (Some(x), Some(y)) = (rational(a), rational(b)) {
            return x == y || self.rounded(a, b);
        }
        match POINTS.map(|at| (at.value(a), at.value(b))) {
            [(Some(a1), Some(b1)), (Some(a2), Some(b2))] => {
                (a1, a2) == (b1, b2) || self.rounded(a, b)
            }
            _ => is_near(a, b) || self.rounded(a, b),
        }
    }

    /// Returns whether two numbers are equal up to rounding. At least one of them must have a
    /// decimal point.
    fn rounded(self, a: &Expr, b: &Expr) -> bool {
        let Some(decimals) = self.decimals else { return false };
        let is_decimal = |expr: &Expr| {
            expr.any(&mut |of| matches!(of, Expr::Number(literal) if literal.decimal))
        };
        if !(is_decimal(a) || is_decimal(b)) || !a.is_fixed() || !b.is_fixed() {
            return false;
        }
        let bound = 0.5 * 10f64.powi(-(decimals as i32)) * (1.0 + 1e-9);
        let real = |expr| {
            approximate::value(expr, NEAR[0]).filter(|value| value.im == 0.0).map(|value| value.re)
        };
        let (Some(x), Some(y)) = (real(a), real(b)) else { return false };
        let size = x.abs().max(y.abs());
        let exact = rational(a).zip(rational(b)).and_then(|(a, b)| a.minus(&b));
        // For a large number, floating point does not represent these decimals.
        let far = match exact {
            Some(far) => far.to_f64().abs(),
            None if size * 1e-15 > bound => return false,
            None => (x - y).abs(),
        };
        // The relative bound distinguishes small numbers from each other.
        far <= bound && far <= 1e-3 * size
    }

    fn relations(self, a: &Answer, b: &Answer) -> bool {
        let (Answer::Relation(p, r, about), Answer::Relation(q, s, other)) = (a, b) else {
            return false;
        };
        if !about.agrees(other) || (self.units && !about.is_written_as(other)) {
            return false;
        }
        if r == s && p.len() == q.len() && p.iter().zip(q).all(|(a, b)| self.values(a, b)) {
            return true;
        }
        // a > b > c equals c < b < a.
        let is_turned =
            r.iter().eq(s.iter().rev().map(|sign| reversed_sign(*sign)).collect::<Vec<_>>().iter());
        if is_turned && p.iter().zip(q.iter().rev()).all(|(a, b)| self.values(a, b)) {
            return true;
        }
        if let (Some((x, value)), Some((y, other))) =
            (members::assignment(p, r), members::assignment(q, s))
            && x == y
        {
            return self.values(value, other);
        }
        if let Some(same) = self.regions(a, b) {
            return same;
        }
        let ([left, right], [sign]) = (&p[..], &r[..]) else { return false };
        let ([other_left, other_right], [other_sign]) = (&q[..], &s[..]) else { return false };
        let Some(scale) =
            proportion(&difference(left, right), &difference(other_left, other_right))
        else {
            return false;
        };
        *sign == if scale < 0.0 { reversed_sign(*other_sign) } else { *other_sign }
    }
}

/// Appends the units of all values in an answer to `units`.
fn collect_units(answer: &Answer, units: &mut Vec<(&'static str, i32)>) {
    match answer {
        Answer::Value(quantity) => units.extend(&quantity.about.units),
        Answer::Relation(_, _, about) => units.extend(&about.units),
        Answer::Labeled(_, inner) => collect_units(inner, units),
        Answer::List(items)
        | Answer::Set(items)
        | Answer::Tuple { items, .. }
        | Answer::Named(_, items)
        | Answer::Combined(_, items)
        | Answer::All(items) => items.iter().for_each(|item| collect_units(item, units)),
        Answer::Words(_) | Answer::Matrix(_) | Answer::Ratio(_) | Answer::Residue(..) => {}
    }
}

/// Returns whether two expressions are close at every point at which they have values, and whether
/// there are enough such points.
fn is_near(a: &Expr, b: &Expr) -> bool {
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
        match (approximate::value(a, at), approximate::value(b, at)) {
            (Some(a), Some(b)) if a.is_near(b, bound) => seen += 1,
            (None, None) => {}
            _ => return false,
        }
    }
    seen >= ENOUGH
}

fn difference(left: &Expr, right: &Expr) -> Expr {
    Expr::Sum(vec![left.clone(), Expr::Negative(Box::new(right.clone()))])
}

/// Returns the quotient of two expressions if the quotient is the same number at every point.
fn proportion(a: &Expr, b: &Expr) -> Option<f64> {
    let [p, q] = POINTS;
    let exact = |values: &Expr| {
        Some([p.value(values)?, q.value(values)?]).filter(|of| !of.contains(&Element::ZERO))
    };
    let is_so = match (exact(a), exact(b)) {
        (Some([ap, aq]), Some([bp, bq])) => ap.times(bq) == aq.times(bp),
        _ => {
            let ratios: Vec<f64> = NEAR.iter().filter_map(|at| ratio(a, b, *at)).collect();
            let first = Complex::real(*ratios.first()?);
            ratios.len() >= ENOUGH
                && ratios.iter().all(|ratio| Complex::real(*ratio).is_near(first, 1e-10))
        }
    };
    if is_so {
        NEAR.iter().find_map(|at| ratio(a, b, *at)).filter(|ratio| *ratio != 0.0)
    } else {
        None
    }
}

fn ratio(a: &Expr, b: &Expr, at: Point) -> Option<f64> {
    let a = approximate::value(a, at)?;
    let b = approximate::value(b, at)?;
    (a.im == 0.0 && b.im == 0.0 && b.re != 0.0).then_some(a.re / b.re)
}

/// Returns the value of an equation such as `x = 3` or `2 + 3 = 5`. For `x = 1/3 ≈ 0.333`, returns
/// both the rounded and the exact value.
fn assigned_values(answer: &Answer) -> Vec<Answer> {
    let Answer::Relation(parts, signs, about) = answer else { return Vec::new() };
    let [rest @ .., last] = &parts[..] else { return Vec::new() };
    if !equates(signs) || !rest.first().is_some_and(|first| is_name(first) || first.is_fixed()) {
        return Vec::new();
    }
    let exact = rest.last().filter(|exact| signs.last() == Some(&'≈') && !is_name(exact));
    let value = |value: &Expr| {
        Answer::Value(Quantity { about: about.clone(), ..Quantity::plain(value.clone()) })
    };
    [Some(last), exact].into_iter().flatten().map(value).collect()
}

/// Returns the value of an equation of several variables: 204 for `m + n = 204`.
fn defined_value(answer: &Answer) -> Option<Answer> {
    let Answer::Relation(parts, signs, about) = answer else { return None };
    let first = parts.first()?;
    let last = parts.last()?;
    let mut variables = Vec::new();
    first.variables(&mut variables);
    let is_value = equates(signs) && variables.len() > 1 && last.is_fixed();
    is_value
        .then(|| Answer::Value(Quantity { about: about.clone(), ..Quantity::plain(last.clone()) }))
}

/// Returns the letters of a product of variables, in the order in which they are written.
fn spelled_letters(value: &Expr) -> Option<String> {
    match value {
        Expr::Symbol(name) | Expr::Unit(name) => Some(name.to_lowercase()),
        Expr::Constant(Constant::E) => Some("e".into()),
        Expr::Constant(Constant::I) => Some("i".into()),
        Expr::Product(factors) => factors.iter().map(spelled_letters).collect(),
        _ => None,
    }
}
