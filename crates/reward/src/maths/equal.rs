//! Whether two answers are the same.

use super::answer::Answer;
use super::approximate::{self, Complex};
use super::expression::{Constant, Expr, Function};
use super::field::{Element, Point, rational};
use super::region;

/// How answers are compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    /// Decimals at which a number that is written with a point is compared with another one.
    pub decimals: Option<u32>,
    /// Whether 50% is also 50.
    pub percent_or_number: bool,
}

/// Points at which expressions are compared exactly, and in floating point.
const POINTS: [Point; 2] = [Point(0x5bd1_e995_7b93_d1a1), Point(0x2545_f491_4f6c_dd1d)];
const NEAR: [Point; 6] = [Point(4), Point(9), Point(16), Point(6), Point(11), Point(26)];

/// How many points in floating point must have values.
const ENOUGH: usize = 3;

impl Rules {
    /// Whether two answers are the same. Symmetric.
    pub fn same(self, a: &Answer, b: &Answer) -> bool {
        use Answer as A;
        if a == b {
            return true;
        }
        match (a, b) {
            (A::Value(a), A::Value(b)) => self.values(a, b),
            (A::Percent(a), A::Percent(b)) => self.values(a, b),
            (A::Percent(percent), A::Value(value)) | (A::Value(value), A::Percent(percent)) => {
                let part = Expr::Product(vec![percent.clone(), Expr::whole(100).inverted()]);
                self.values(&part, value) || (self.percent_or_number && self.values(percent, value))
            }
            (A::Words(a), A::Words(b)) => a == b,
            // Words that were taken for variables: \text{even} and even, \text{no} and n · o.
            (A::Words(words), A::Value(value)) | (A::Value(value), A::Words(words)) => {
                spelled(value).is_some_and(|spelled| spelled == *words)
            }
            (A::Matrix(a), A::Matrix(b)) => {
                let row = |a: &[Expr], b: &[Expr]| {
                    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.values(a, b))
                };
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| row(a, b))
            }
            (A::Relation(..), A::Relation(..)) => self.relations(a, b),
            (A::Tuple { items, .. }, A::List(list)) | (A::List(list), A::Tuple { items, .. })
                if self.in_order(items, list) =>
            {
                true
            }
            (A::Tuple { open, close, items }, A::Tuple { open: o, close: c, items: other }) => {
                open == o && close == c && self.in_order(items, other)
            }
            (A::List(a) | A::Set(a), A::List(b) | A::Set(b)) if self.in_any_order(a, b) => true,
            (A::Set(one), other @ A::Value(_)) | (other @ A::Value(_), A::Set(one)) => {
                matches!(&one[..], [one] if self.same(one, other))
            }
            _ => {
                if let (Some(a), Some(b)) = (region::of(a), region::of(b)) {
                    return a.same(&b, &|a, b| self.values(a, b));
                }
                match (&assigned(a)[..], &assigned(b)[..]) {
                    (values, []) => values.iter().any(|value| self.same(value, b)),
                    ([], values) => values.iter().any(|value| self.same(a, value)),
                    _ => false,
                }
            }
        }
    }

    fn in_order(self, a: &[Answer], b: &[Answer]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| self.same(a, b))
    }

    fn in_any_order(self, a: &[Answer], b: &[Answer]) -> bool {
        if a.len() != b.len() {
            return false;
        }
        let mut left: Vec<&Answer> = b.iter().collect();
        a.iter().all(|a| {
            let at = left.iter().position(|b| self.same(a, b));
            at.map(|at| left.swap_remove(at)).is_some()
        })
    }

    /// Whether two expressions have the same value.
    pub fn values(self, a: &Expr, b: &Expr) -> bool {
        if a == b {
            return true;
        }
        if let (Some(a), Some(b)) = (a.infinite(), b.infinite()) {
            return a == b;
        }
        if let (Some(x), Some(y)) = (rational(a), rational(b)) {
            return x == y || self.rounded(a, b);
        }
        match POINTS.map(|at| (at.value(a), at.value(b))) {
            [(Some(a1), Some(b1)), (Some(a2), Some(b2))] => (a1, a2) == (b1, b2) || self.rounded(a, b),
            _ => near(a, b) || self.rounded(a, b),
        }
    }

    /// Whether two numbers, one of them written with a point, are the same but for rounding.
    fn rounded(self, a: &Expr, b: &Expr) -> bool {
        let Some(decimals) = self.decimals else { return false };
        let is_decimal = |of: &Expr| of.any(&mut |of| matches!(of, Expr::Number(literal) if literal.decimal));
        let varies = |of: &Expr| of.any(&mut |of| matches!(of, Expr::Symbol(_) | Expr::Unit(_)));
        if !(is_decimal(a) || is_decimal(b)) || varies(a) || varies(b) {
            return false;
        }
        let real = |of| approximate::value(of, NEAR[0]).filter(|value| value.im == 0.0).map(|value| value.re);
        let (Some(a), Some(b)) = (real(a), real(b)) else { return false };
        let far = (a - b).abs();
        // A small number is not any other small number.
        far <= 0.5 * 10f64.powi(-(decimals as i32)) * (1.0 + 1e-9) && far <= 1e-3 * a.abs().max(b.abs())
    }

    fn relations(self, a: &Answer, b: &Answer) -> bool {
        let (Answer::Relation(p, r), Answer::Relation(q, s)) = (a, b) else { return false };
        if r == s && p.len() == q.len() && p.iter().zip(q).all(|(a, b)| self.values(a, b)) {
            return true;
        }
        if let (Some((x, value)), Some((y, other))) = (assignment(p, r), assignment(q, s))
            && x == y
        {
            return self.values(value, other);
        }
        if let (Some(a), Some(b)) = (region::of(a), region::of(b)) {
            return a.same(&b, &|a, b| self.values(a, b));
        }
        let ([left, right], [sign]) = (&p[..], &r[..]) else { return false };
        let ([other_left, other_right], [other_sign]) = (&q[..], &s[..]) else { return false };
        let Some(scale) = proportion(&difference(left, right), &difference(other_left, other_right)) else {
            return false;
        };
        let turned = match other_sign {
            '<' if scale < 0.0 => '>',
            '>' if scale < 0.0 => '<',
            '≤' if scale < 0.0 => '≥',
            '≥' if scale < 0.0 => '≤',
            sign => *sign,
        };
        turned == *sign
    }
}

/// Whether two expressions are near each other at every point where they have values, which are enough.
fn near(a: &Expr, b: &Expr) -> bool {
    let mut seen = 0;
    for at in NEAR {
        match (approximate::value(a, at), approximate::value(b, at)) {
            (Some(a), Some(b)) if a.is_near(b) => seen += 1,
            (None, None) => {}
            _ => return false,
        }
    }
    seen >= ENOUGH
}

fn difference(left: &Expr, right: &Expr) -> Expr {
    Expr::Sum(vec![left.clone(), Expr::Negative(Box::new(right.clone()))])
}

/// How many times one expression is another one, if that is the same number everywhere.
fn proportion(a: &Expr, b: &Expr) -> Option<f64> {
    let [p, q] = POINTS;
    let exact = |of: &Expr| Some([p.value(of)?, q.value(of)?]).filter(|of| !of.contains(&Element::ZERO));
    let is_so = match (exact(a), exact(b)) {
        (Some([ap, aq]), Some([bp, bq])) => ap.times(bq) == aq.times(bp),
        _ => {
            let ratios: Vec<f64> = NEAR.iter().filter_map(|at| ratio(a, b, *at)).collect();
            let first = Complex::real(*ratios.first()?);
            ratios.len() >= ENOUGH && ratios.iter().all(|ratio| Complex::real(*ratio).is_near(first))
        }
    };
    if is_so { NEAR.iter().find_map(|at| ratio(a, b, *at)).filter(|ratio| *ratio != 0.0) } else { None }
}

fn ratio(a: &Expr, b: &Expr, at: Point) -> Option<f64> {
    let (a, b) = (approximate::value(a, at)?, approximate::value(b, at)?);
    (a.im == 0.0 && b.im == 0.0 && b.re != 0.0).then_some(a.re / b.re)
}

/// Letters that mostly name a function.
const FUNCTIONS: [char; 10] = ['f', 'g', 'h', 'p', 'q', 'F', 'G', 'H', 'P', 'Q'];

/// Whether an expression is the name of something: a variable, words, the length of a segment, a function of
/// variables or of a number.
fn is_name(of: &Expr) -> bool {
    match of {
        Expr::Symbol(_) | Expr::Unit(_) => true,
        Expr::Call(Function::Abs, of) => of.iter().all(is_name),
        Expr::Product(factors) => factors.iter().all(is_name) || is_applied(factors),
        _ => false,
    }
}

/// Whether a product is a function of a number: f(2) is read as f · 2.
fn is_applied(factors: &[Expr]) -> bool {
    let is_number = |of: &Expr| match of {
        Expr::Negative(inner) => matches!(**inner, Expr::Number(_)),
        of => matches!(of, Expr::Number(_)),
    };
    match factors {
        [Expr::Symbol(name), of] => name.starts_with(FUNCTIONS) && is_number(of),
        _ => false,
    }
}

/// Whether signs say of all that they stand between that it is equal.
fn equates(signs: &[char]) -> bool {
    signs.iter().all(|sign| matches!(sign, '=' | '≈'))
}

/// The name and the value of `x = … = value`.
fn assignment<'a>(parts: &'a [Expr], signs: &[char]) -> Option<(&'a Expr, &'a Expr)> {
    let (name, value) = (parts.first()?, parts.last()?);
    (equates(signs) && is_name(name)).then_some((name, value))
}

/// The value of `x = 3`, of each in a list of such, of `2 + 3 = 5`; and what is only rounded at the end of
/// `x = 1/3 ≈ 0.333`.
fn assigned(answer: &Answer) -> Vec<Answer> {
    let Answer::Relation(parts, signs) = answer else { return Vec::new() };
    let [rest @ .., last] = &parts[..] else { return Vec::new() };
    let varies = |of: &Expr| of.any(&mut |of| matches!(of, Expr::Symbol(_) | Expr::Unit(_)));
    if !equates(signs) || !rest.first().is_some_and(|first| is_name(first) || !varies(first)) {
        return Vec::new();
    }
    let exact = rest.last().filter(|exact| signs.last() == Some(&'≈') && !is_name(exact));
    [Some(last), exact].into_iter().flatten().map(|value| Answer::Value(value.clone())).collect()
}

/// Letters of a value that is a product of variables.
fn spelled(value: &Expr) -> Option<String> {
    match value {
        Expr::Symbol(name) | Expr::Unit(name) => Some(name.to_lowercase()),
        Expr::Constant(Constant::E) => Some("e".into()),
        Expr::Constant(Constant::I) => Some("i".into()),
        Expr::Product(factors) => factors.iter().map(spelled).collect(),
        _ => None,
    }
}
