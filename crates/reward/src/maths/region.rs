//! Sets of real numbers: intervals, their unions, and the inequalities that say the same.

use super::answer::Answer;
use super::approximate;
use super::equal::infinite;
use super::expression::{Constant, Expr};
use super::field::Point;

/// Spans of the real line, apart from each other and in order.
#[derive(Debug)]
pub(super) struct Region {
    /// The variable, where inequalities name one.
    variable: Option<String>,
    spans: Vec<Span>,
}

/// From one end to another, each with whether it belongs to the span.
#[derive(Debug, Clone)]
struct Span {
    from: (Expr, bool),
    to: (Expr, bool),
}

impl Region {
    /// Whether two regions are the same, where ends are the `same`.
    pub fn same(&self, other: &Region, same: &dyn Fn(&Expr, &Expr) -> bool) -> bool {
        let variables = self.variable.as_ref().zip(other.variable.as_ref());
        let end = |a: &(Expr, bool), b: &(Expr, bool)| a.1 == b.1 && same(&a.0, &b.0);
        variables.is_none_or(|(a, b)| a == b)
            && self.spans.len() == other.spans.len()
            && self.spans.iter().zip(&other.spans).all(|(a, b)| end(&a.from, &b.from) && end(&a.to, &b.to))
    }
}

/// The region that an answer says, if it says one.
pub(super) fn of(answer: &Answer) -> Option<Region> {
    let mut region = Region { variable: None, spans: Vec::new() };
    collect(answer, &mut region)?;
    // In order, and joined where they overlap.
    let mut spans: Vec<(f64, Span)> = Vec::new();
    for span in std::mem::take(&mut region.spans) {
        spans.push((size(&span.from.0)?, span));
    }
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (from, span) in spans {
        if let Some(last) = region.spans.last_mut() {
            let (end, next) = (size(&last.to.0)?, size(&span.to.0)?);
            let joins = end > from || (end == from && (last.to.1 || span.from.1));
            if joins {
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

fn size(of: &Expr) -> Option<f64> {
    match infinite(of) {
        Some(sign) => Some(f64::INFINITY * f64::from(sign)),
        None => approximate::value(of, Point(4)).filter(|value| value.im == 0.0).map(|value| value.re),
    }
}

fn collect(answer: &Answer, region: &mut Region) -> Option<()> {
    let value = |answer: &Answer| match answer {
        Answer::Value(value) => Some(value.clone()),
        _ => None,
    };
    match answer {
        Answer::Tuple { open, close, items } => {
            let [from, to] = &items[..] else { return None };
            let (from, to) = ((value(from)?, *open == '['), (value(to)?, *close == ']'));
            region.spans.push(Span { from, to });
        }
        // Points beside intervals.
        Answer::Set(items) => {
            for item in items {
                let end = (value(item)?, true);
                region.spans.push(Span { from: end.clone(), to: end });
            }
        }
        Answer::Union(parts) => parts.iter().try_for_each(|part| collect(part, region))?,
        // "x < 1 or x > 3"
        Answer::List(parts) if parts.iter().all(|part| matches!(part, Answer::Relation(..))) => {
            parts.iter().try_for_each(|part| collect(part, region))?;
        }
        Answer::Relation(parts, signs) => relation(parts, signs, region)?,
        Answer::Value(Expr::Symbol(name)) if name == "\\mathbb{R}" => {
            region.spans.push(Span { from: (minus_infinity(), false), to: (infinity(), false) });
        }
        _ => return None,
    }
    Some(())
}

fn infinity() -> Expr {
    Expr::Constant(Constant::Infinity)
}

fn minus_infinity() -> Expr {
    Expr::Negative(Box::new(infinity()))
}

fn relation(parts: &[Expr], signs: &[char], region: &mut Region) -> Option<()> {
    let is_closed = |sign: char| matches!(sign, '≤' | '≥');
    let is_less = |sign: char| matches!(sign, '<' | '≤');
    let turned = |sign: char| match sign {
        '<' => '>',
        '>' => '<',
        '≤' => '≥',
        '≥' => '≤',
        other => other,
    };
    let fixed = |of: &Expr| !of.any(&mut |of| matches!(of, Expr::Symbol(_) | Expr::Unit(_)));
    let mut named = |name: &String| {
        let is_same = region.variable.as_ref().is_none_or(|before| before == name);
        region.variable = Some(name.clone());
        is_same.then_some(())
    };
    match (parts, signs) {
        ([from, Expr::Symbol(name), to], [first, second]) if fixed(from) && fixed(to) => {
            named(name)?;
            let (low, high) = ((from.clone(), is_closed(*first)), (to.clone(), is_closed(*second)));
            match (*first, *second) {
                ('<' | '≤', '<' | '≤') => region.spans.push(Span { from: low, to: high }),
                ('>' | '≥', '>' | '≥') => region.spans.push(Span { from: high, to: low }),
                _ => return None,
            }
        }
        ([Expr::Symbol(name), end], [sign]) | ([end, Expr::Symbol(name)], [sign]) if fixed(end) => {
            named(name)?;
            let is_first = matches!(&parts[0], Expr::Symbol(_));
            let sign = if is_first { *sign } else { turned(*sign) };
            let end = (end.clone(), is_closed(sign));
            let (least, most) = ((minus_infinity(), false), (infinity(), false));
            match sign {
                '≠' => {
                    region.spans.push(Span { from: least, to: end.clone() });
                    region.spans.push(Span { from: end, to: most });
                }
                '=' | '≈' => return None,
                sign if is_less(sign) => region.spans.push(Span { from: least, to: end }),
                _ => region.spans.push(Span { from: end, to: most }),
            }
        }
        _ => return None,
    }
    Some(())
}
