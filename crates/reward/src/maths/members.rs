//! Named members of lists and tuples: 3 boys and 4 girls, a = 1 and b = 2, (a, b) = (1, 2).

use super::answer::{Answer, equates};
use super::expression::{Expr, Function};
use super::quantity::Quantity;

/// The name of a member of an answer.
#[derive(Debug, Clone, PartialEq)]
enum Name {
    Variable(Expr),
    /// Words and units.
    Words(Vec<String>),
}

/// A member of an answer, with the member's name.
pub(super) type Member = (NameOf, Answer);

/// The name of an answer's member, without the words that also occur in the names of other members.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NameOf(Name);

/// Returns the members of an answer with their names, or `None` unless all members have distinct
/// names.
pub(super) fn named_members(answer: &Answer) -> Option<Vec<Member>> {
    let found: Option<Vec<(Name, Answer)>> = match answer {
        Answer::Named(names, items) => Some(
            names
                .iter()
                .map(|name| Name::Variable(name.clone()))
                .zip(items.iter().cloned())
                .collect(),
        ),
        Answer::List(items) | Answer::Set(items) => items.iter().map(named_member).collect(),
        _ => None,
    };
    let found = found.filter(|found| found.len() > 1)?;
    let is_shared = |at: usize, word: &String| {
        found.iter().enumerate().any(|(other, (name, _))| {
            other != at && matches!(name, Name::Words(words) if words.contains(word))
        })
    };
    let mut members = Vec::new();
    for (at, (name, value)) in found.iter().enumerate() {
        let name = match name {
            Name::Words(words) => {
                let own: Vec<String> =
                    words.iter().filter(|word| !is_shared(at, word)).cloned().collect();
                if own.is_empty() {
                    return None;
                }
                Name::Words(own)
            }
            name => name.clone(),
        };
        // x = 3 or x = -3: both have the same name.
        if members.iter().any(|(other, _): &Member| other.0 == name) {
            return None;
        }
        members.push((NameOf(name), value.clone()));
    }
    Some(members)
}

/// Sorts a list of equations by their variables, which is the order of an unnamed tuple: y = 1, x =
/// 2 is (2, 1).
pub(super) fn by_variable(list: &[Answer]) -> Vec<Answer> {
    let variable = |item: &Answer| match named_member(item)?.0 {
        Name::Variable(Expr::Symbol(name)) => Some(name),
        _ => None,
    };
    let mut sorted = list.to_vec();
    if list.iter().all(|item| variable(item).is_some()) {
        sorted.sort_by_key(variable);
    }
    sorted
}

fn named_member(item: &Answer) -> Option<(Name, Answer)> {
    match item {
        Answer::Value(quantity) => {
            let units = quantity.about.units.iter().map(|(unit, power)| format!("{unit}^{power}"));
            let directions = quantity.about.directions.iter().map(|(_, word)| (*word).to_owned());
            let names: Vec<String> =
                quantity.about.names.iter().cloned().chain(units).chain(directions).collect();
            (!names.is_empty()).then(|| (Name::Words(names), item.clone()))
        }
        Answer::Labeled(name, value) => {
            let name = match name.chars().nth(1) {
                None => Name::Variable(Expr::Symbol(name.clone())),
                Some(_) => Name::Words(name.split(' ').map(str::to_owned).collect()),
            };
            Some((name, (**value).clone()))
        }
        Answer::Relation(parts, signs, _) => {
            let (name, _) = assignment(parts, signs)?;
            Some((Name::Variable(name.clone()), item.clone()))
        }
        _ => None,
    }
}

/// Pairs the members of two answers by name. If no names match, pairs them in order. Returns `None`
/// if only some names match.
pub(super) fn pairs(a: &[Member], b: &[Member]) -> Option<Vec<(Answer, Answer)>> {
    if a.len() != b.len() {
        return None;
    }
    let is_same = |a: &NameOf, b: &NameOf| match (&a.0, &b.0) {
        (Name::Words(a), Name::Words(b)) => a.iter().any(|word| b.contains(word)),
        (Name::Variable(a), Name::Variable(b)) => a == b,
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
fn unnamed_value(member: &Answer) -> Answer {
    match member {
        Answer::Relation(parts, signs, about) => match assignment(parts, signs) {
            Some((_, value)) => {
                Answer::Value(Quantity { about: about.clone(), ..Quantity::plain(value.clone()) })
            }
            None => member.clone(),
        },
        other => other.clone(),
    }
}

/// Letters that usually name a function.
const FUNCTIONS: [char; 10] = ['f', 'g', 'h', 'p', 'q', 'F', 'G', 'H', 'P', 'Q'];

/// Returns whether an expression is a name: a variable, words, the length of a segment, or a
/// function of variables or of a number.
pub(super) fn is_name(expr: &Expr) -> bool {
    match expr {
        Expr::Symbol(_) | Expr::Unit(_) => true,
        Expr::Call(Function::Abs, arguments) => arguments.iter().all(is_name),
        Expr::Product(factors) => factors.iter().all(is_name) || is_applied(factors),
        _ => false,
    }
}

/// Returns whether a product is the application of a function to a number: f(2) is parsed as f · 2.
fn is_applied(factors: &[Expr]) -> bool {
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
pub(super) fn assignment<'a>(parts: &'a [Expr], signs: &[char]) -> Option<(&'a Expr, &'a Expr)> {
    let name = parts.first()?;
    let value = parts.last()?;
    (equates(signs) && is_name(name)).then_some((name, value))
}
