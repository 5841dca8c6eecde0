//! Shapes of answers: values, lists, sets, tuples and intervals, matrices, relations, words.

use super::expression::{Constant, Expr};
use super::lexer::{Token, tokens};
use super::parser::{closing, expression, split};

/// Answer as it was read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Value(Expr),
    /// A value that was written in percent.
    Percent(Expr),
    Words(String),
    /// Several answers, in any order.
    List(Vec<Answer>),
    Set(Vec<Answer>),
    /// Items in order, in brackets: `(` or `[`. With two items it may be an interval.
    Tuple {
        open: char,
        close: char,
        items: Vec<Answer>,
    },
    Union(Vec<Answer>),
    Matrix(Vec<Vec<Expr>>),
    /// Expressions and the relations between each and the next: `= ≈ < > ≤ ≥ ≠`.
    Relation(Vec<Expr>, Vec<char>),
}

/// How deep answers are within answers.
const DEPTH: u32 = 8;

/// Most items of an answer.
pub(super) const ITEMS: usize = 100;

/// Ways to read a text as an answer, best first. A comma before three digits parts thousands or items; a
/// letter in brackets at the beginning names a choice, the rest of which may be the answer, too.
pub(super) fn readings(text: &str, units: bool) -> Vec<Answer> {
    let turned = inwards(text);
    let text = turned.as_deref().unwrap_or(text);
    let mut read: Vec<Answer> = Vec::new();
    let mut add = |found: Option<Answer>| {
        if let Some(found) = found
            && !read.contains(&found)
        {
            read.push(found);
        }
    };
    for thousands in [true, false] {
        let Some(tokens) = tokens(text, thousands) else { continue };
        add(answer(&tokens, units, 0));
        if let Some((letter, rest)) = choice(&tokens) {
            add(Some(letter));
            add(answer(rest, units, 0));
        }
    }
    read
}

/// An interval with its brackets inwards, `(a, b)`, where it is written `]a, b[` (ISO 80000-2).
fn inwards(text: &str) -> Option<String> {
    let plain = text.replace("\\left", "").replace("\\right", "");
    let inner = plain.trim().trim_matches('$').trim();
    let (opens, closes) = (inner.starts_with(']'), inner.ends_with('['));
    let inner = inner.strip_prefix([']', '[', '('])?.strip_suffix(['[', ']', ')'])?;
    let is_one = !inner.contains(['[', ']']) && inner.contains([',', ';']);
    let closed = |is_open: bool, open: char, closed: char| if is_open { open } else { closed };
    ((opens || closes) && is_one)
        .then(|| format!("{}{inner}{}", closed(opens, '(', '['), closed(closes, ')', ']')))
}

/// A choice such as `(B) 5` or `B: 5`: the letter, and what stands behind it.
fn choice(tokens: &[Token]) -> Option<(Answer, &[Token])> {
    let (letter, rest) = match tokens {
        [Token::Open('('), Token::Letter(letter), Token::Close(')'), rest @ ..] => (letter, rest),
        [Token::Letter(letter), Token::Close(')') | Token::Sign(':'), rest @ ..] => (letter, rest),
        _ => return None,
    };
    let is_choice = letter.len() == 1 && ("A"..="J").contains(&letter.as_str());
    is_choice.then(|| (Answer::Value(Expr::Symbol(letter.clone())), rest))
}

fn answer(tokens: &[Token], units: bool, depth: u32) -> Option<Answer> {
    if depth == DEPTH {
        return None;
    }
    if let Some(words) = words(tokens) {
        return Some(Answer::Words(words));
    }
    let parts = split(tokens, |token| *token == Token::Separator);
    if parts.len() == 1 {
        return item(tokens, units, depth);
    }
    // "1, 2, and 3" has one separator too many.
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    match parts[..] {
        [] => None,
        [one] => item(one, units, depth),
        _ if parts.len() > ITEMS => None,
        _ => {
            let items: Option<Vec<Answer>> = parts.iter().map(|part| item(part, units, depth)).collect();
            let flat = items?.into_iter().flat_map(|item| match item {
                Answer::List(items) => items,
                item => vec![item],
            });
            Some(Answer::List(flat.collect()))
        }
    }
}

/// Text of an answer in words alone.
fn words(tokens: &[Token]) -> Option<String> {
    let word = |token: &Token| match token {
        Token::Text(word) => Some(word.to_lowercase()),
        Token::Letter(letter) if ["a", "A", "I"].contains(&letter.as_str()) => Some(letter.to_lowercase()),
        Token::Separator => Some(String::new()),
        _ => None,
    };
    let words: Option<Vec<String>> = tokens.iter().map(word).collect();
    let is_text = tokens.iter().any(|token| matches!(token, Token::Text(_)));
    let words = words.filter(|_| is_text)?;
    Some(words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" "))
}

fn item(tokens: &[Token], units: bool, depth: u32) -> Option<Answer> {
    if let Some(words) = words(tokens) {
        return Some(Answer::Words(words));
    }
    // The name of the value went before, in words or in another formula.
    if let [Token::Sign('=' | '≈'), value @ ..] = tokens {
        return item(value, units, depth);
    }
    if let [Token::Command(name)] = tokens
        && name == "emptyset"
    {
        return Some(Answer::Set(vec![]));
    }
    // `x \in [0, 1)` says where, and `x \to 5`, how.
    if let [.., last] = split(tokens, |token| matches!(token, Token::Sign('∈')))[..]
        && last.len() < tokens.len()
    {
        return answer(last, units, depth + 1);
    }
    let united = split(tokens, |token| *token == Token::Sign('∪'));
    if united.len() > 1 && united.len() <= ITEMS {
        let parts: Option<Vec<_>> = united.iter().map(|part| item(part, units, depth + 1)).collect();
        return parts.map(Answer::Union);
    }
    if let Some(found) = bracketed(tokens, units, depth) {
        return Some(found);
    }
    if let [Token::Begin(name), inner @ .., Token::End] = tokens {
        return matrix(name, inner, units);
    }
    let is_relation = |token: &Token| matches!(token, Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠'));
    let sides = split(tokens, is_relation);
    if sides.len() > 1 {
        return relation(tokens, &sides, is_relation, units, depth);
    }
    if let [value @ .., Token::Sign('%')] = tokens {
        return Some(Answer::Percent(stripped(expression(value)?, units)));
    }
    Some(spread(stripped(expression(tokens)?, units)))
}

/// A set, a tuple or an interval.
fn bracketed(tokens: &[Token], units: bool, depth: u32) -> Option<Answer> {
    let (Token::Open(open), Some(Token::Close(close))) = (tokens.first()?, tokens.last()) else {
        return None;
    };
    if closing(tokens)? + 1 != tokens.len() {
        return None;
    }
    let inner = &tokens[1..tokens.len() - 1];
    let parts = split(inner, |token| *token == Token::Separator);
    if parts.len() > ITEMS || depth + 1 >= DEPTH {
        return None;
    }
    let items = || parts.iter().map(|part| item(part, units, depth + 1)).collect::<Option<Vec<_>>>();
    match (open, close) {
        ('{', '}') if inner.is_empty() => Some(Answer::Set(vec![])),
        ('{', '}') => items().map(Answer::Set),
        ('⟨', '⟨') => Some(Answer::Tuple { open: '(', close: ')', items: items()? }),
        ('(' | '[', ')' | ']') if parts.len() > 1 => {
            Some(Answer::Tuple { open: *open, close: *close, items: items()? })
        }
        _ => None,
    }
}

fn matrix(name: &str, inner: &[Token], units: bool) -> Option<Answer> {
    if !["pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"].contains(&name) {
        return None;
    }
    let rows = split(inner, |token| *token == Token::Row).into_iter().filter(|row| !row.is_empty());
    let rows: Option<Vec<Vec<Expr>>> = rows
        .map(|row| {
            let cells = split(row, |token| *token == Token::Cell);
            cells.into_iter().map(|cell| Some(stripped(expression(cell)?, units))).collect()
        })
        .collect();
    rows.map(Answer::Matrix)
}

fn relation(
    tokens: &[Token],
    sides: &[&[Token]],
    is_relation: impl Fn(&Token) -> bool,
    units: bool,
    depth: u32,
) -> Option<Answer> {
    if sides.len() > ITEMS {
        return None;
    }
    let mut signs = Vec::with_capacity(sides.len() - 1);
    let mut at = 0;
    for side in &sides[..sides.len() - 1] {
        at += side.len();
        let Token::Sign(sign) = tokens[at] else { return None };
        debug_assert!(is_relation(&tokens[at]));
        signs.push(sign);
        at += 1;
    }
    // `A = \{1, 2\}`, `f(x) = 5\%`: the answer is the right side.
    let is_equal = signs.iter().all(|sign| matches!(sign, '=' | '≈'));
    let last = sides.last()?;
    if is_equal && expression(last).is_none_or(|_| last.last() == Some(&Token::Sign('%'))) {
        return item(last, units, depth + 1);
    }
    let parts: Option<Vec<Expr>> =
        sides.iter().map(|side| Some(stripped(expression(side)?, units))).collect();
    let mut parts = parts?;
    // x = ±2 are two answers.
    if is_equal && let Answer::List(several) = spread(parts.last()?.clone()) {
        let first = parts.swap_remove(0);
        let each = several.into_iter().filter_map(|answer| match answer {
            Answer::Value(value) => Some(Answer::Relation(vec![first.clone(), value], vec!['='])),
            _ => None,
        });
        return Some(Answer::List(each.collect()));
    }
    Some(Answer::Relation(parts, signs))
}

/// An expression without the words that say what its value is of, unless it is nothing but words.
fn stripped(expression: Expr, units: bool) -> Expr {
    if units {
        return expression;
    }
    match expression {
        Expr::Negative(inner) => Expr::Negative(Box::new(stripped(*inner, units))),
        Expr::Sum(parts) => Expr::Sum(parts.into_iter().map(|part| stripped(part, units)).collect()),
        Expr::Product(factors) => {
            let mut kept: Vec<Expr> = factors
                .iter()
                .filter(|factor| !is_unit(factor))
                .map(|f| stripped(f.clone(), units))
                .collect();
            match kept.len() {
                0 => Expr::Product(factors),
                1 => kept.remove(0),
                _ => Expr::Product(kept),
            }
        }
        other => other,
    }
}

fn is_unit(expression: &Expr) -> bool {
    match expression {
        Expr::Unit(_) | Expr::Constant(Constant::Degree) => true,
        Expr::Power(base, _) => is_unit(base),
        Expr::Product(factors) => factors.iter().all(is_unit),
        _ => false,
    }
}

/// A value, or several where ± stands for both.
fn spread(expression: Expr) -> Answer {
    let mut several = vec![expression];
    // Three of them make eight values.
    for _ in 0..3 {
        let both: Vec<Option<[Expr; 2]>> = several.iter().map(first_of_both).collect();
        if both.iter().all(Option::is_none) {
            break;
        }
        several = several
            .into_iter()
            .zip(both)
            .flat_map(|(one, both)| both.map_or_else(|| vec![one], |both| both.to_vec()))
            .collect();
    }
    match several.len() {
        1 => Answer::Value(several.remove(0)),
        _ => Answer::List(several.into_iter().map(Answer::Value).collect()),
    }
}

/// The two values of the first ±.
fn first_of_both(expression: &Expr) -> Option<[Expr; 2]> {
    let among = |parts: &[Expr], made: &dyn Fn(Vec<Expr>) -> Expr| {
        let (at, both) = parts.iter().enumerate().find_map(|(at, part)| Some((at, first_of_both(part)?)))?;
        Some(both.map(|one| {
            let mut parts = parts.to_vec();
            parts[at] = one;
            made(parts)
        }))
    };
    match expression {
        Expr::PlusMinus(inner) => Some([(**inner).clone(), Expr::Negative(inner.clone())]),
        Expr::Negative(inner) => {
            first_of_both(inner).map(|both| both.map(|one| Expr::Negative(Box::new(one))))
        }
        Expr::Sum(parts) => among(parts, &Expr::Sum),
        Expr::Product(parts) => among(parts, &Expr::Product),
        Expr::Power(base, exponent) => {
            let both = first_of_both(base)?;
            Some(both.map(|one| Expr::Power(Box::new(one), exponent.clone())))
        }
        _ => None,
    }
}
