//! Named members of lists and tuples: 3 boys and 4 girls, a = 1 and b = 2, (a, b) = (1, 2).

use super::answer::{ParsedAnswer, are_all_equalities};
use super::expression::{Expr, MathFunction};
use super::quantity::Quantity;

/// The name of a member of an answer.
#[derive(Debug, Clone, PartialEq)]
enum MemberName {
    Variable(Expr),
    /// Words and units.
    Words(Vec<String>),
}

/// A member of an answer, with the member's name.
pub(super) type Member = (DistinctName, ParsedAnswer);

/// The name of an answer's member, without the words that also occur in the names of other members.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DistinctName(MemberName);

/// Returns the members of an answer with their names, or `None` unless all members have distinct
/// names.
pub(super) fn named_members(answer: &ParsedAnswer) -> Option<Vec<Member>> {
    let found: Option<Vec<(MemberName, ParsedAnswer)>> = match answer {
        ParsedAnswer::Named(names, items) => Some(
            names
                .iter()
                .map(|name| MemberName::Variable(name.clone()))
                .zip(items.iter().cloned())
                .collect(),
        ),
        ParsedAnswer::List(items) | ParsedAnswer::Set(items) => {
            items.iter().map(parse_named_member).collect()
        }
        _ => None,
    };
    let found = found.filter(|found| found.len() > 1)?;
    let is_shared = |at: usize, word: &String| {
        found.iter().enumerate().any(|(other, (name, _))| {
            other != at && matches!(name, MemberName::Words(words) if words.contains(word))
        })
    };
    let mut members = Vec::new();
    for (at, (name, value)) in found.iter().enumerate() {
        let name = match name {
            MemberName::Words(words) => {
                let own: Vec<String> =
                    words.iter().filter(|word| !is_shared(at, word)).cloned().collect();
                if own.is_empty() {
                    return None;
                }
                MemberName::Words(own)
            }
            name => name.clone(),
        };
        // x = 3 or x = -3: both have the same name.
        if members.iter().any(|(other, _): &Member| other.0 == name) {
            return None;
        }
        members.push((DistinctName(name), value.clone()));
    }
    Some(members)
}

/// Sorts a list of equations by their variables, which is the order of an unnamed tuple: y = 1, x =
/// 2 is (2, 1).
pub(super) fn sort_by_variable(list: &[ParsedAnswer]) -> Vec<ParsedAnswer> {
    let variable = |item: &ParsedAnswer| match parse_named_member(item)?.0 {
        MemberName::Variable(Expr::Symbol(name)) => Some(name),
        _ => None,
    };
    let mut sorted = list.to_vec();
    if list.iter().all(|item| variable(item).is_some()) {
        sorted.sort_by_key(variable);
    }
    sorted
}

fn parse_named_member(item: &ParsedAnswer) -> Option<(MemberName, ParsedAnswer)> {
    match item {
        ParsedAnswer::Value(quantity) => {
            let units = quantity.about.units.iter().map(|(unit, power)| format!("{unit}^{power}"));
            let directions = quantity.about.directions.iter().map(|(_, word)| (*word).to_owned());
            let names: Vec<String> =
                quantity.about.names.iter().cloned().chain(units).chain(directions).collect();
            (!names.is_empty()).then(|| (MemberName::Words(names), item.clone()))
        }
        ParsedAnswer::Labeled(name, value) => {
            let name = match name.chars().nth(1) {
                None => MemberName::Variable(Expr::Symbol(name.clone())),
                Some(_) => MemberName::Words(name.split(' ').map(str::to_owned).collect()),
            };
            Some((name, (**value).clone()))
        }
        ParsedAnswer::Relation(parts, signs, _) => {
            let (name, _) = split_assignment(parts, signs)?;
            Some((MemberName::Variable(name.clone()), item.clone()))
        }
        _ => None,
    }
}

/// Pairs the members of two answers by name. If no names match, pairs them in order. Returns `None`
/// if only some names match.
pub(super) fn pair_members(
    a: &[Member],
    b: &[Member],
) -> Option<Vec<(ParsedAnswer, ParsedAnswer)>> {
    if a.len() != b.len() {
        return None;
    }
    let is_same = |a: &DistinctName, b: &DistinctName| match (&a.0, &b.0) {
        (MemberName::Words(a), MemberName::Words(b)) => a.iter().any(|word| b.contains(word)),
        (MemberName::Variable(a), MemberName::Variable(b)) => a == b,
        _ => false,
    };
    let mut found = Vec::new();
    for (name, value) in a {
        let partners: Vec<&Member> = b.iter().filter(|(other, _)| is_same(name, other)).collect();
        if let [(_, other)] = partners[..] {
            found.push((unnamed_value(value), unnamed_value(other)));
        }
    }
    match found.len() {
        0 => Some(
            a.iter().zip(b).map(|((_, a), (_, b))| (unnamed_value(a), unnamed_value(b))).collect(),
        ),
        found_all if found_all == a.len() => Some(found),
        _ => None,
    }
}

/// Returns the value of an answer's member without the member's name.
fn unnamed_value(member: &ParsedAnswer) -> ParsedAnswer {
    match member {
        ParsedAnswer::Relation(parts, signs, about) => match split_assignment(parts, signs) {
            Some((_, value)) => ParsedAnswer::Value(Quantity {
                about: about.clone(),
                ..Quantity::from_value(value.clone())
            }),
            None => member.clone(),
        },
        other => other.clone(),
    }
}

/// Letters that usually name a function.
const FUNCTIONS: [char; 10] = ['f', 'g', 'h', 'p', 'q', 'F', 'G', 'H', 'P', 'Q'];

/// Returns whether an expression is a name: a variable, words, the length of a segment, or a
/// function of variables or of a number.
pub(super) fn is_name_expression(expr: &Expr) -> bool {
    match expr {
        Expr::Symbol(_) | Expr::Unit(_) => true,
        Expr::Call(MathFunction::Abs, arguments) => arguments.iter().all(is_name_expression),
        Expr::Product(factors) => {
            factors.iter().all(is_name_expression) || is_function_application(factors)
        }
        _ => false,
    }
}

/// Returns whether a product is the application of a function to a number: f(2) is parsed as f · 2.
fn is_function_application(factors: &[Expr]) -> bool {
    let is_number = |expr: &Expr| match expr {
        Expr::Negative(inner) => matches!(**inner, Expr::Number(_)),
        expr => matches!(expr, Expr::Number(_)),
    };
    match factors {
        [Expr::Symbol(name), expr] => name.starts_with(FUNCTIONS) && is_number(expr),
        _ => false,
    }
}

/// Returns the name and the value of a chain of equations `x = … = value`.
pub(super) fn split_assignment<'a>(
    parts: &'a [Expr],
    signs: &[char],
) -> Option<(&'a Expr, &'a Expr)> {
    let name = parts.first()?;
    let value = parts.last()?;
    (are_all_equalities(signs) && is_name_expression(name)).then_some((name, value))
}
