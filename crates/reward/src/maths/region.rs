//! Sets of real numbers: intervals, their unions, intersections and differences, and equivalent
//! inequalities.

use std::cmp::Ordering;

use super::answer::ParsedAnswer;
use super::approximate;
use super::expression::{Expr, MathConstant, MathFunction};
use super::field::EvaluationPoint;

/// A subset of the real line: disjoint spans in ascending order.
#[derive(Debug)]
pub(super) struct Region {
    /// Name of the variable, or `None` if no inequality names one.
    variable: Option<String>,
    spans: Vec<RealSpan>,
}

/// A span of the real line between two ends, with whether each end belongs to the span.
#[derive(Debug, Clone)]
struct RealSpan {
    from: (Expr, bool),
    to: (Expr, bool),
}

/// Maximum number of spans of a region of the real line.
const MAX_SPANS: usize = 200;

impl Region {
    /// Returns whether two regions are equal. `same` compares the ends of their spans.
    pub fn equals_region(&self, other: &Region, same: &dyn Fn(&Expr, &Expr) -> bool) -> bool {
        let variables = self.variable.as_ref().zip(other.variable.as_ref());
        let end = |a: &(Expr, bool), b: &(Expr, bool)| a.1 == b.1 && same(&a.0, &b.0);
        variables.is_none_or(|(a, b)| a == b)
            && self.spans.len() == other.spans.len()
            && self
                .spans
                .iter()
                .zip(&other.spans)
                .all(|(a, b)| end(&a.from, &b.from) && end(&a.to, &b.to))
    }
}

/// Converts an answer to the region of the real line that it denotes, or returns `None` if it does
/// not denote a region.
pub(super) fn to_region(answer: &ParsedAnswer) -> Option<Region> {
    match answer {
        ParsedAnswer::Tuple { open, close, items } => {
            let [from, to] = &items[..] else { return None };
            let from = (single_value(from)?, *open == '[');
            let to = (single_value(to)?, *close == ']');
            Region::new(None, vec![RealSpan { from, to }])
        }
        // Points combined with intervals.
        ParsedAnswer::Set(items) => {
            let point = |item: &ParsedAnswer| {
                let end = (single_value(item)?, true);
                Some(RealSpan { from: end.clone(), to: end })
            };
            Region::new(None, items.iter().map(point).collect::<Option<_>>()?)
        }
        ParsedAnswer::Combined(sign, parts) => {
            let mut parts = parts.iter().map(to_region);
            let first = parts.next()??;
            parts.try_fold(first, |region, part| match sign {
                '∪' => region.union_with(part?),
                '∩' => region.intersect_with(part?),
                '∖' => region.intersect_with(part?.complement()?),
                _ => None,
            })
        }
        // "x < 1 or x > 3". If the union of all conditions is ℝ, all of them must hold: "x > 1, x <
        // 3".
        ParsedAnswer::List(parts) if parts.iter().all(is_condition) => {
            let any = combine(parts, Region::union_with)?;
            if any.is_real_line() { combine(parts, Region::intersect_with) } else { Some(any) }
        }
        // "x < 1 and x > 3" is the empty set.
        ParsedAnswer::All(parts) => combine(parts, Region::intersect_with),
        ParsedAnswer::Relation(parts, signs, about) if about.bounds.is_empty() => {
            relation_region(parts, signs)
        }
        ParsedAnswer::Value(quantity) if is_reals(&quantity.value) => Some(Region::real_line(None)),
        // At least 5.
        ParsedAnswer::Value(quantity) if quantity.value.is_fixed() && !quantity.percent => {
            let [bound @ ("≥" | "≤" | ">" | "<")] = quantity.about.bounds[..] else {
                return None;
            };
            let variable = Expr::Symbol("x".into());
            half_line_region(&variable, bound.chars().next()?, &quantity.value, "x")
        }
        ParsedAnswer::Labeled(_, answer) => to_region(answer),
        _ => None,
    }
}

fn is_reals(expr: &Expr) -> bool {
    matches!(expr, Expr::Symbol(name) if name == "\\mathbb{R}")
}

fn is_condition(answer: &ParsedAnswer) -> bool {
    matches!(answer, ParsedAnswer::Relation(..))
        || matches!(answer, ParsedAnswer::Value(of) if is_reals(&of.value))
}

fn combine(
    parts: &[ParsedAnswer],
    join: impl Fn(Region, Region) -> Option<Region>,
) -> Option<Region> {
    let mut parts = parts.iter().map(to_region);
    let first = parts.next()??;
    parts.try_fold(first, |region, part| join(region, part?))
}

fn single_value(answer: &ParsedAnswer) -> Option<Expr> {
    match answer {
        ParsedAnswer::Value(quantity) if !quantity.percent && quantity.about.bounds.is_empty() => {
            Some(quantity.value.clone())
        }
        _ => None,
    }
}

fn extended_real_value(expr: &Expr) -> Option<f64> {
    match expr.infinity_sign() {
        Some(sign) => Some(f64::INFINITY * f64::from(sign)),
        None => approximate::evaluate(expr, EvaluationPoint(4))
            .filter(|value| value.im == 0.0)
            .map(|value| value.re),
    }
}

impl Region {
    /// Creates a region from its spans: sorts them, joins overlapping spans, and removes empty
    /// spans. Returns `None` if a span has its ends in the wrong order, or if there are too many
    /// spans.
    fn new(variable: Option<String>, spans: Vec<RealSpan>) -> Option<Self> {
        if spans.len() > MAX_SPANS {
            return None;
        }
        let mut sized: Vec<(f64, RealSpan)> = Vec::new();
        for span in spans {
            sized.push((extended_real_value(&span.from.0)?, span));
        }
        sized.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.from.1.cmp(&a.1.from.1)));
        let mut region = Region { variable, spans: Vec::new() };
        for (from, span) in sized {
            let next = extended_real_value(&span.to.0)?;
            if next < from || (next == from && !(span.from.1 && span.to.1)) {
                // An interval with its ends in the wrong order is not a region.
                if next < from {
                    return None;
                }
                continue;
            }
            if let Some(last) = region.spans.last_mut() {
                let end = extended_real_value(&last.to.0)?;
                if end > from || (end == from && (last.to.1 || span.from.1)) {
                    if next > end {
                        last.to = span.to;
                    } else if next == end {
                        last.to.1 |= span.to.1;
                    }
                    continue;
                }
            }
            region.spans.push(span);
        }
        Some(region)
    }

    fn real_line(variable: Option<String>) -> Self {
        let span = RealSpan { from: (minus_infinity(), false), to: (infinity(), false) };
        Region { variable, spans: vec![span] }
    }

    fn is_real_line(&self) -> bool {
        matches!(&self.spans[..], [span] if span.from.0.infinity_sign() == Some(-1) && span.to.0.infinity_sign() == Some(1))
    }

    /// Returns the common variable of two regions, or `None` if their variables differ.
    fn common_variable(&self, other: &Region) -> Option<Option<String>> {
        match (&self.variable, &other.variable) {
            (Some(a), Some(b)) => (a == b).then(|| Some(a.clone())),
            (a, b) => Some(a.clone().or_else(|| b.clone())),
        }
    }

    fn union_with(self, other: Region) -> Option<Region> {
        let variable = self.common_variable(&other)?;
        Region::new(variable, self.spans.into_iter().chain(other.spans).collect())
    }

    fn intersect_with(self, other: Region) -> Option<Region> {
        let variable = self.common_variable(&other)?;
        let mut spans = Vec::new();
        for a in &self.spans {
            for b in &other.spans {
                let from = tighter_end(&a.from, &b.from, Ordering::Greater)?;
                let to = tighter_end(&a.to, &b.to, Ordering::Less)?;
                if extended_real_value(&from.0)? <= extended_real_value(&to.0)? {
                    spans.push(RealSpan { from, to });
                }
            }
        }
        Region::new(variable, spans)
    }

    fn complement(self) -> Option<Region> {
        let mut from = (minus_infinity(), false);
        let mut spans = Vec::new();
        for span in self.spans {
            if span.from.0.infinity_sign() != Some(-1) {
                spans.push(RealSpan { from, to: (span.from.0, !span.from.1) });
            }
            from = (span.to.0, !span.to.1);
        }
        if from.0.infinity_sign() != Some(1) {
            spans.push(RealSpan { from, to: (infinity(), false) });
        }
        Region::new(self.variable, spans)
    }
}

/// Returns the tighter of two ends of spans: the larger of two lower ends (`inner` is `Greater`),
/// or the smaller of two upper ends (`Less`).
fn tighter_end(a: &(Expr, bool), b: &(Expr, bool), inner: Ordering) -> Option<(Expr, bool)> {
    Some(match extended_real_value(&a.0)?.partial_cmp(&extended_real_value(&b.0)?)? {
        Ordering::Equal => (a.0.clone(), a.1 && b.1),
        order if order == inner => a.clone(),
        _ => b.clone(),
    })
}

fn infinity() -> Expr {
    Expr::Constant(MathConstant::Infinity)
}

fn minus_infinity() -> Expr {
    Expr::Negative(Box::new(infinity()))
}

/// Returns the sign of a relation after its sides are exchanged: `>` for `<`.
pub(super) fn reversed_sign(sign: char) -> char {
    match sign {
        '<' => '>',
        '>' => '<',
        '≤' => '≥',
        '≥' => '≤',
        other => other,
    }
}

/// Returns the region of a relation in one variable: between two linear expressions, with a linear
/// expression between two numbers, or between the absolute value of a linear expression and a
/// number.
fn relation_region(parts: &[Expr], signs: &[char]) -> Option<Region> {
    let mut variables = Vec::new();
    parts.iter().for_each(|part| part.variables(&mut variables));
    let [name] = variables[..] else { return None };
    let variable = Some(name.to_owned());
    let rays = match (parts, signs) {
        ([from, middle, to], [first, second]) if from.is_fixed() && to.is_fixed() => {
            let same = matches!((first, second), ('<' | '≤', '<' | '≤') | ('>' | '≥', '>' | '≥'));
            if !same {
                return None;
            }
            // An infinite end is not a bound.
            return match (from.infinity_sign(), to.infinity_sign()) {
                (None, None) => half_line_region(middle, reversed_sign(*first), from, name)?
                    .intersect_with(half_line_region(middle, *second, to, name)?)?,
                (Some(_), None) => half_line_region(middle, *second, to, name)?,
                (None, Some(_)) => half_line_region(middle, reversed_sign(*first), from, name)?,
                _ => Region::real_line(None),
            }
            .with_variable(variable);
        }
        ([Expr::Call(MathFunction::Abs, arguments), bound], [sign]) if bound.is_fixed() => {
            distance_region(arguments.first()?, *sign, bound, name)?
        }
        ([bound, Expr::Call(MathFunction::Abs, arguments)], [sign]) if bound.is_fixed() => {
            distance_region(arguments.first()?, reversed_sign(*sign), bound, name)?
        }
        ([left, right], [sign]) => {
            let difference = Expr::Sum(vec![left.clone(), Expr::Negative(Box::new(right.clone()))]);
            half_line_region(&difference, *sign, &Expr::integer(0), name)?
        }
        _ => return None,
    };
    rays.with_variable(variable)
}

impl Region {
    fn with_variable(self, variable: Option<String>) -> Option<Region> {
        Some(Region { variable, ..self })
    }
}

/// Returns the region in which `linear` has the relation `sign` to the number `bound`.
fn half_line_region(linear: &Expr, sign: char, bound: &Expr, name: &str) -> Option<Region> {
    let (factor, rest) = self::split_linear(linear, name)?;
    let by = extended_real_value(&factor)?;
    let end = Expr::Product(vec![
        Expr::Sum(vec![bound.clone(), Expr::Negative(Box::new(rest))]),
        factor.inverse(),
    ]);
    let sign = if by < 0.0 { reversed_sign(sign) } else { sign };
    let end = (end, matches!(sign, '≤' | '≥'));
    let below = |end| RealSpan { from: (minus_infinity(), false), to: end };
    let above = |end| RealSpan { from: end, to: (infinity(), false) };
    match sign {
        '≠' => Region::new(None, vec![below(end.clone()), above(end)]),
        '<' | '≤' => Region::new(None, vec![below(end)]),
        '>' | '≥' => Region::new(None, vec![above(end)]),
        _ => None,
    }
}

/// Returns the region in which the absolute value of `linear` has the relation `sign` to the
/// positive number `bound`.
fn distance_region(linear: &Expr, sign: char, bound: &Expr, name: &str) -> Option<Region> {
    if extended_real_value(bound)? <= 0.0 {
        return None;
    }
    let high = half_line_region(linear, sign, bound, name)?;
    let low = half_line_region(
        linear,
        reversed_sign(sign),
        &Expr::Negative(Box::new(bound.clone())),
        name,
    )?;
    match sign {
        '<' | '≤' => high.intersect_with(low),
        '>' | '≥' => high.union_with(low),
        _ => None,
    }
}

/// Splits an expression of the form factor · variable + rest into the factor and the rest. Returns
/// `None` if it has another form or if the factor is 0.
fn split_linear(expr: &Expr, name: &str) -> Option<(Expr, Expr)> {
    let (factor, rest) = split_variable_part(expr, name)?;
    let factor =
        factor.filter(|factor| extended_real_value(factor).is_some_and(|size| size != 0.0))?;
    Some((factor, rest))
}

/// Splits an expression into the factor of the variable `name` and the rest. The factor is `None`
/// if the variable does not occur.
fn split_variable_part(expr: &Expr, name: &str) -> Option<(Option<Expr>, Expr)> {
    let negative = |expr: Expr| Expr::Negative(Box::new(expr));
    if expr.is_fixed() {
        return Some((None, expr.clone()));
    }
    match expr {
        Expr::Symbol(own) if own == name => Some((Some(Expr::integer(1)), Expr::integer(0))),
        Expr::Negative(inner) => {
            let (factor, rest) = split_variable_part(inner, name)?;
            Some((factor.map(negative), negative(rest)))
        }
        Expr::Sum(terms) => {
            let mut factors = Vec::new();
            let mut rests = Vec::new();
            for term in terms {
                let (factor, rest) = split_variable_part(term, name)?;
                factors.extend(factor);
                rests.push(rest);
            }
            Some((Some(Expr::Sum(factors)), Expr::Sum(rests)))
        }
        Expr::Product(factors) => {
            let (fixed, varying): (Vec<&Expr>, Vec<&Expr>) =
                factors.iter().partition(|factor| factor.is_fixed());
            let [varying] = varying[..] else { return None };
            let times =
                |expr: Expr| Expr::Product(fixed.iter().copied().cloned().chain([expr]).collect());
            let (factor, rest) = split_variable_part(varying, name)?;
            Some((factor.map(times), times(rest)))
        }
        _ => None,
    }
}
