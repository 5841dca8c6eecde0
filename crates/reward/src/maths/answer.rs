//! Parses the shape of an answer: a value, list, set, tuple, interval, matrix, relation or words.

mod relations;

use self::relations::relation;
use super::approximate;
use super::expression::Expr;
use super::field::{Point, rational};
use super::lexer::{Token, tokens};
use super::matrix::{Rows, matrix};
use super::parser::{ITEMS, cells, closing, expression, rows, split};
use super::phrases::phrases;
use super::plus_minus::spread;
use super::quantity::{Quantity, quantity, strip_modifiers};
use super::time::{Ratio, ratio};
use crate::words::{self, About};

/// A parsed mathematical answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Value(Quantity),
    Words(String),
    /// Several answers, whose order does not matter.
    List(Vec<Answer>),
    Set(Vec<Answer>),
    /// Items in brackets `(` or `[`, whose order matters. A tuple of two items can be an interval.
    Tuple {
        open: char,
        close: char,
        items: Vec<Answer>,
    },
    /// An answer with the name before it: A(1, 2), "vertex (1, 2)", B: 4.
    Labeled(String, Box<Answer>),
    /// A tuple that names its members: (a, b) = (1, 2).
    Named(Vec<Expr>, Vec<Answer>),
    /// Sets that are combined by `∪`, `∩` or `∖`, or operands of a logical or other operator that
    /// is not evaluated.
    Combined(char, Vec<Answer>),
    /// Conditions that must all hold, as in a system of equations.
    All(Vec<Answer>),
    Matrix(Rows),
    /// A chain of expressions, with the relations `= ≈ < > ≤ ≥ ≠` between each expression and the
    /// next. `About` describes the last expression.
    Relation(Vec<Expr>, Vec<char>, About),
    Ratio(Ratio),
    /// A value modulo another value, such as 468 mod 1000.
    Residue(Expr, Expr),
}

/// Maximum nesting depth of a mathematical answer.
const DEPTH: u32 = 8;

/// Parses a text as a mathematical answer in every plausible way, in order of preference. If all
/// commas of the text can separate thousands, the first interpretation is a number. Otherwise a
/// comma before three digits separates either thousands or items. A letter in brackets at the start
/// names a choice, and the text after it may also be the answer.
pub(super) fn readings(text: &str) -> Vec<Answer> {
    let rewritten = with_outer_brackets(text);
    let text = rewritten.as_deref().unwrap_or(text);
    let mut read: Vec<Answer> = Vec::new();
    let mut add = |found: Option<Answer>| {
        if let Some(found) = found
            && !read.contains(&found)
        {
            read.push(found);
        }
    };
    for thousands in [true, false] {
        let Some(mut tokens) = tokens(text, thousands).map(phrases) else { continue };
        while tokens.last() == Some(&Token::Row) {
            tokens.pop();
        }
        add(answer(&tokens, 0));
        if let Some((letter, rest)) = choice(&tokens) {
            add(Some(letter));
            add(answer(rest, 0));
        }
        if !tokens.contains(&Token::Separator) {
            break;
        }
    }
    read
}

/// Rewrites an interval in the notation of ISO 80000-2, `]a, b[`, as `(a, b)`.
fn with_outer_brackets(text: &str) -> Option<String> {
    let plain = text.replace("\\left", "").replace("\\right", "");
    let inner = plain.trim().trim_matches('$').trim();
    let is_left_open = inner.starts_with(']');
    let is_right_open = inner.ends_with('[');
    let inner = inner.strip_prefix([']', '[', '('])?.strip_suffix(['[', ']', ')'])?;
    let is_one = !inner.contains(['[', ']']) && inner.contains([',', ';']);
    let closed = |is_open: bool, open: char, closed: char| if is_open { open } else { closed };
    ((is_left_open || is_right_open) && is_one).then(|| {
        format!("{}{inner}{}", closed(is_left_open, '(', '['), closed(is_right_open, ')', ']'))
    })
}

/// Splits an answer such as `(B) 5` or `B: 5` into the letter of the choice and the tokens after
/// it.
fn choice(tokens: &[Token]) -> Option<(Answer, &[Token])> {
    let (letter, rest) = match tokens {
        [Token::Open('('), Token::Letter(letter), Token::Close(')'), rest @ ..] => (letter, rest),
        [Token::Letter(letter), Token::Close(')') | Token::Sign(':'), rest @ ..] => (letter, rest),
        [Token::Text(word), Token::Letter(letter), Token::Sign(':'), rest @ ..]
            if ["option", "choice", "answer"].contains(&word.to_lowercase().as_str()) =>
        {
            (letter, rest)
        }
        _ => return None,
    };
    // Several labels are not a choice.
    let is_label = |three: &[Token]| {
        matches!(three, [sep, Token::Letter(_), Token::Sign(':')] | [sep, Token::Open('('), Token::Letter(_)]
            if sep.is_separator())
    };
    let is_one = !rest.windows(3).any(is_label);
    let is_choice = is_one && letter.len() == 1 && ("A"..="J").contains(&letter.as_str());
    is_choice.then(|| (Answer::Value(Quantity::plain(Expr::Symbol(letter.clone()))), rest))
}

fn answer(tokens: &[Token], depth: u32) -> Option<Answer> {
    if depth == DEPTH {
        return None;
    }
    // Braces around the complete answer.
    if let [Token::GroupOpen, inner @ .., Token::GroupClose] = tokens
        && closing(tokens)? + 1 == tokens.len()
    {
        return answer(inner, depth + 1);
    }
    let tokens = without_integer_condition(tokens);
    if let Some(words) = text(tokens) {
        return Some(Answer::Words(words));
    }
    // The order of quantifiers matters.
    let is_quantifier = |token: &Token| matches!(token, Token::Command(name) if name == "forall" || name == "exists");
    if tokens.iter().any(is_quantifier) {
        let token = |token: &Token| match token {
            Token::Number { digits, scale, .. } => format!("{digits}e{scale}"),
            other => format!("{other:?}"),
        };
        return Some(Answer::Words(tokens.iter().map(token).collect()));
    }
    // ℝ except for some points.
    if let [Token::Letter(reals), Token::Text(except), points @ ..] = tokens
        && reals == "\\mathbb{R}"
        && ["except", "but", "excluding", "without"].contains(&except.to_lowercase().as_str())
    {
        let points = match answer(points, depth + 1)? {
            Answer::List(points) | Answer::Set(points) => points,
            point => vec![point],
        };
        let reals = Answer::Value(Quantity::plain(Expr::Symbol(reals.clone())));
        return Some(Answer::Combined('∖', vec![reals, Answer::Set(points)]));
    }
    // All real numbers greater than 1.
    if let [Token::Letter(reals), bound @ ..] = tokens
        && reals == "\\mathbb{R}"
        && let Some(quantity) = quantity(bound)
        && quantity.about.bounds.len() == 1
    {
        return Some(Answer::Value(quantity));
    }
    // All real numbers x such that x > 1.
    if let [Token::Letter(reals), rest @ ..] = tokens
        && reals == "\\mathbb{R}"
        && matches!(
            rest,
            [Token::Letter(_), ..] | [Token::Text(_), Token::Text(_), Token::Letter(_), ..]
        )
    {
        let such = |pair: &[Token]| matches!(pair, [Token::Text(a), Token::Text(b)] if a == "such" && b == "that");
        let start = rest.windows(2).position(such).map_or(0, |at| at + 2);
        return answer(&rest[start..], depth + 1)
            .filter(|found| matches!(found, Answer::Relation(..) | Answer::All(_)));
    }
    let parts = split(tokens, Token::is_separator);
    if parts.len() == 1 {
        return item(tokens, depth);
    }
    // "1, 2, and 3" has an extra separator.
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    match parts[..] {
        [] => None,
        [one] => item(one, depth),
        _ if parts.len() > ITEMS => None,
        _ => {
            let items: Option<Vec<Answer>> = parts.iter().map(|part| item(part, depth)).collect();
            let flat = items?.into_iter().flat_map(|item| match item {
                Answer::List(items) => items,
                item => vec![item],
            });
            let items = with_name(flat.collect());
            let is_and = split(tokens, |token| *token == Token::And).len() == parts.len();
            let bounds =
                |item: &Answer| matches!(item, Answer::Relation(_, signs, _) if !equates(signs));
            let is_or = split(tokens, |token| *token == Token::Or).len() == parts.len();
            Some(match items.iter().all(bounds) {
                true if is_and => Answer::All(items),
                true if is_or => Answer::Combined('∪', items),
                _ => Answer::List(items),
            })
        }
    }
}

/// Removes the condition that a variable of the answer is an integer, as in
/// `2k\pi, k \in \mathbb{Z}`. An inequality keeps the condition, because it has other solutions
/// without it.
fn without_integer_condition(tokens: &[Token]) -> &[Token] {
    let is_set = |set: &str| ["\\mathbb{Z}", "Z", "ℤ"].contains(&set);
    let is_article = |word: &str| word == "an";
    let (body, name) = match tokens {
        [body @ .., name, Token::Sign('∈'), Token::Letter(set)] if is_set(set) => (body, name),
        [
            body @ ..,
            Token::Open('('),
            name,
            Token::Sign('∈'),
            Token::Letter(set),
            Token::Close(')'),
        ] if is_set(set) => (body, name),
        [body @ .., name, Token::Text(is), Token::Text(an), Token::Text(kind)]
            if is == "is" && is_article(an) && kind == "integer" =>
        {
            (body, name)
        }
        [body @ .., name, Token::Text(an), Token::Text(kind)]
            if is_article(an) && kind == "integer" =>
        {
            (body, name)
        }
        _ => return tokens,
    };
    let body = match body {
        [body @ .., Token::Separator] => body,
        [body @ .., Token::Text(word)] if ["for", "where", "with"].contains(&word.as_str()) => body,
        body => body,
    };
    let is_bound = |token: &Token| matches!(token, Token::Sign('<' | '>' | '≤' | '≥' | '≠'));
    let is_variable = matches!(name, Token::Letter(_)) && body.contains(name);
    if is_variable && !body.iter().any(is_bound) { body } else { tokens }
}

/// Adds the name in an equation to the values after it: the list x = 1, 2 becomes x = 1, x = 2.
fn with_name(items: Vec<Answer>) -> Vec<Answer> {
    let Some((Answer::Relation(parts, signs, _), values)) = items.split_first() else {
        return items;
    };
    let is_value = |item: &Answer| matches!(item, Answer::Value(_));
    let ([name @ Expr::Symbol(_), _], true, true) =
        (&parts[..], equates(signs), !values.is_empty() && values.iter().all(is_value))
    else {
        return items;
    };
    let named = |item: &Answer| match item {
        Answer::Value(value) => Answer::Relation(
            vec![name.clone(), value.value.clone()],
            vec!['='],
            value.about.clone(),
        ),
        other => other.clone(),
    };
    items[..1].iter().cloned().chain(values.iter().map(named)).collect()
}

/// Returns whether the signs of a relation make all of its sides equal.
pub(super) fn equates(signs: &[char]) -> bool {
    signs.iter().all(|sign| matches!(sign, '=' | '≈'))
}

/// Returns the text of an answer that consists of words only.
fn text(tokens: &[Token]) -> Option<String> {
    let word = |token: &Token| match token {
        Token::Text(word) => Some(word.to_lowercase()),
        Token::Letter(letter) if ["a", "A", "I"].contains(&letter.as_str()) => {
            Some(letter.to_lowercase())
        }
        Token::Or => Some("or".into()),
        token if token.is_separator() => Some(String::new()),
        _ => None,
    };
    let words: Option<Vec<String>> = tokens.iter().map(word).collect();
    let is_text = tokens.iter().any(|token| matches!(token, Token::Text(_)));
    let words = words.filter(|_| is_text)?;
    let words: Vec<String> = words.into_iter().filter(|word| !word.is_empty()).collect();
    let article = usize::from(words.len() > 1 && ["a", "an", "the"].contains(&words[0].as_str()));
    let words = words[article..].join(" ");
    Some(if words == "dne" { "does not exist".into() } else { words })
}

/// Returns the name that tokens spell, or `None` unless all of them are words or letters.
fn label(tokens: &[Token]) -> Option<String> {
    let word = |token: &Token| match token {
        Token::Text(word) => Some(word.to_lowercase()),
        Token::Letter(letter) => Some(letter.clone()),
        _ => None,
    };
    let words: Vec<String> = tokens.iter().map(word).collect::<Option<_>>()?;
    (!words.is_empty()).then(|| words.join(" "))
}

fn with_label(name: Option<String>, answer: Answer) -> Answer {
    match name {
        Some(name) => Answer::Labeled(name, Box::new(answer)),
        None => answer,
    }
}

/// Converts the lines of a LaTeX environment to a list:
/// `\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}`. A line that starts with a relation sign
/// continues the preceding line.
fn lines(name: &str, inner: &[Token]) -> Option<Vec<Token>> {
    let is_sign =
        |token: &Token| matches!(token, Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠'));
    let rows: Vec<&[Token]> = rows(inner).collect();
    let is_relation = |row: &&[Token]| row.iter().any(is_sign);
    let is_lines = match name {
        "aligned" | "align" | "gathered" | "gather" | "split" => true,
        "cases" | "array" => {
            rows.iter().all(|row| cells(row).len() == 1)
                && (rows.len() == 1 || rows.iter().all(is_relation))
        }
        _ => false,
    };
    let mut joined = Vec::new();
    for row in rows {
        let mut line = row.iter().filter(|token| **token != Token::Cell).peekable();
        if !joined.is_empty() && !line.peek().is_some_and(|token| is_sign(token)) {
            joined.push(Token::Separator);
        }
        joined.extend(line.cloned());
    }
    is_lines.then_some(joined)
}

fn item(tokens: &[Token], depth: u32) -> Option<Answer> {
    if depth == DEPTH {
        return None;
    }
    if let [Token::GroupOpen, inner @ .., Token::GroupClose] = tokens
        && closing(tokens)? + 1 == tokens.len()
    {
        return answer(inner, depth + 1);
    }
    if let Some(words) = text(tokens) {
        return Some(Answer::Words(words));
    }
    if let [Token::Begin(name), inner @ .., Token::End] = tokens
        && closing(tokens)? + 1 == tokens.len()
        && let Some(lines) = lines(name, inner)
    {
        return answer(&lines, depth + 1);
    }
    // 3 R 4: a quotient with its remainder.
    if let [quotient @ Token::Number { .. }, Token::Letter(sign) | Token::Text(sign), rest] = tokens
        && ["R", "r", "remainder"].contains(&sign.as_str())
        && matches!(rest, Token::Number { .. })
    {
        let items = [quotient, rest].map(|number| item(std::slice::from_ref(number), depth + 1));
        let items = items.into_iter().collect::<Option<_>>()?;
        return Some(Answer::Tuple { open: '(', close: ')', items });
    }
    if let [Token::Letter(name), Token::Sign(':'), value @ ..] = tokens
        && ("A"..="Z").contains(&name.as_str())
        && matches!(value.first(), Some(Token::Number { .. } | Token::Open(_) | Token::Sign('-')))
    {
        return Some(with_label(Some(name.clone()), item(value, depth + 1)?));
    }
    if let [Token::Sign('→'), value @ ..] = tokens {
        return item(value, depth + 1);
    }
    // The premise is left of the sign. Between propositions only, the sign is a part of the answer.
    if let [first, .., last] = split(tokens, |token| matches!(token, Token::Sign('⇒')))[..]
        && (first.is_empty()
            || first.iter().any(|t| !matches!(t, Token::Letter(_) | Token::Command(_))))
    {
        return answer(last, depth + 1);
    }
    if let Some(found) = logical(tokens, depth) {
        return Some(found);
    }
    // The name of the value is outside of these tokens, in words or in another formula.
    if let [Token::Sign('=' | '≈'), value @ ..] = tokens {
        return item(value, depth + 1);
    }
    if let [Token::Command(name)] = tokens
        && name == "emptyset"
    {
        return Some(Answer::Set(vec![]));
    }
    // In `x \in [0, 1)`, the answer is the set.
    if let [first, .., last] = split(tokens, |token| matches!(token, Token::Sign('∈')))[..] {
        let is_letter =
            |of: &[Token]| matches!(of, [Token::Letter(name)] if !name.starts_with('\\'));
        if is_letter(first) && is_letter(last) {
            let items = [first, last].map(|side| item(side, depth + 1));
            return Some(Answer::Combined('∈', items.into_iter().collect::<Option<_>>()?));
        }
        return answer(last, depth + 1);
    }
    if let Some(found) = combined(tokens, depth) {
        return Some(found);
    }
    if let Some(found) = bracketed(tokens, depth) {
        let before = tokens.iter().position(|token| matches!(token, Token::Open(_))).unwrap_or(0);
        return Some(with_label(label(&tokens[..before]), found));
    }
    if let Some(found) = ratio(tokens) {
        return Some(Answer::Ratio(found));
    }
    let is_relation =
        |token: &Token| matches!(token, Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠'));
    let sides = split(tokens, is_relation);
    if sides.len() > 1 {
        return relation(tokens, &sides, depth);
    }
    if let Some(rows) = matrix(tokens) {
        return Some(Answer::Matrix(rows));
    }
    if let Some(found) = residue(tokens) {
        return Some(found);
    }
    let found = quantity(tokens)?;
    let with = |value: Expr| Answer::Value(Quantity { value, ..found.clone() });
    let mut several = spread(&found.value);
    Some(match several.len() {
        1 => with(several.remove(0)),
        _ => Answer::List(several.into_iter().map(with).collect()),
    })
}

/// Parses a value modulo another value: `468 \pmod{1000}`, `468 (mod 1000)`.
fn residue(tokens: &[Token]) -> Option<Answer> {
    let modulus =
        |token: &Token| matches!(token, Token::Command(name) if name == "pmod" || name == "mod");
    let at = tokens.iter().position(modulus)?;
    let (value, modulus) = match (&tokens[..at], &tokens[at..]) {
        ([value @ .., Token::Open('(')], [_, modulus @ .., Token::Close(')')]) => (value, modulus),
        (value, [Token::Command(name), modulus @ ..]) if name == "pmod" => (value, modulus),
        _ => return None,
    };
    Some(Answer::Residue(quantity(value)?.value, expression(modulus)?))
}

/// Parses the operands of a logical operator, of a relation between figures, or of an operation
/// that is not evaluated.
fn logical(tokens: &[Token], depth: u32) -> Option<Answer> {
    ['⇒', '→', '∨', '∧', '≅', '∼', '∘', '⋆'].into_iter().find_map(|sign| {
        let parts = split(tokens, |token| *token == Token::Sign(sign));
        let is_joined =
            (2..=ITEMS).contains(&parts.len()) && parts.iter().all(|part| !part.is_empty());
        let items = || parts.iter().map(|part| item(part, depth + 1)).collect::<Option<Vec<_>>>();
        is_joined.then(items).flatten().map(|items| Answer::Combined(sign, items))
    })
}

/// Parses sets combined by `∪`, `∩` or `∖`, from the left.
fn combined(tokens: &[Token], depth: u32) -> Option<Answer> {
    let is_reals =
        |tokens: &[Token]| matches!(tokens, [Token::Letter(name)] if name == "\\mathbb{R}");
    for sign in ['∪', '∩', '∖', '-'] {
        let parts = split(tokens, |token| *token == Token::Sign(sign));
        let is_set = sign != '-'
            || (is_reals(parts[0])
                && parts[1..].iter().all(|p| p.first() == Some(&Token::Open('{'))));
        if parts.len() > 1 && parts.len() <= ITEMS && is_set {
            let mut parts: Vec<Answer> =
                parts.iter().map(|part| item(part, depth + 1)).collect::<Option<_>>()?;
            // Excluded points can be in plain braces: ℝ∖{2}.
            let is_difference = matches!(sign, '∖' | '-');
            for part in parts[1..].iter_mut().filter(|_| is_difference) {
                match part {
                    Answer::Value(point) if point.value.is_fixed() => {
                        *part = Answer::Set(vec![part.clone()])
                    }
                    Answer::List(points) => *part = Answer::Set(std::mem::take(points)),
                    _ => {}
                }
            }
            return Some(Answer::Combined(if sign == '-' { '∖' } else { sign }, parts));
        }
    }
    None
}

/// Parses a set, a tuple or an interval, which is in brackets.
fn bracketed(tokens: &[Token], depth: u32) -> Option<Answer> {
    let tokens = bracket_of(tokens)?;
    let (Token::Open(open), Some(Token::Close(close))) = (tokens.first()?, tokens.last()) else {
        return None;
    };
    if closing(tokens)? + 1 != tokens.len() {
        return None;
    }
    let inner = &tokens[1..tokens.len() - 1];
    if let ('{', Some(condition)) = (open, condition(inner)) {
        return match answer(condition, depth + 1)? {
            Answer::List(all) | Answer::All(all) => Some(Answer::All(all)),
            one @ Answer::Relation(..) => Some(Answer::All(vec![one])),
            other => Some(other),
        };
    }
    let parts = split(inner, Token::is_separator);
    if parts.len() > ITEMS || depth + 1 >= DEPTH {
        return None;
    }
    let items = || parts.iter().map(|part| item(part, depth + 1)).collect::<Option<Vec<_>>>();
    match (open, close) {
        ('{', '}') if inner.is_empty() => Some(Answer::Set(vec![])),
        ('{', '}') => {
            let flat = items()?.into_iter().flat_map(|item| match item {
                Answer::List(several) => several,
                item => vec![item],
            });
            Some(Answer::Set(flat.collect()))
        }
        ('⟨', '⟨') => Some(Answer::Tuple { open: '(', close: ')', items: items()? }),
        ('(' | '[', ')' | ']') if parts.len() > 1 => {
            Some(Answer::Tuple { open: *open, close: *close, items: items()? })
        }
        _ => None,
    }
}

/// Returns the bracketed part of `the point (1, 2)`, `A(1, 2)` or `(1, 2) is the vertex`. Returns
/// all tokens if they have another form, and `None` if the words negate the bracket.
fn bracket_of(tokens: &[Token]) -> Option<&[Token]> {
    let is_word = |token: &&Token| matches!(token, Token::Text(_));
    let before = tokens.iter().take_while(is_word).count();
    let name = match tokens.get(before..) {
        Some([Token::Letter(name), Token::Open('('), ..]) => {
            usize::from(name.len() == 1 && ("A"..="Z").contains(&name.as_str()))
        }
        _ => 0,
    };
    let start = before + name;
    let is_bracket = matches!(tokens.get(start), Some(Token::Open('(' | '[')));
    let Some(length) = tokens.get(start..).and_then(closing).filter(|_| is_bracket) else {
        return Some(tokens);
    };
    let inner = &tokens[start..=start + length];
    let after = &tokens[start + length + 1..];
    let is_several = inner.iter().any(Token::is_separator);
    if !is_several || !after.iter().all(|token| is_word(&token)) {
        return Some(tokens);
    }
    let words: Vec<&str> = tokens[..before]
        .iter()
        .chain(after)
        .filter_map(|token| if let Token::Text(word) = token { Some(word.as_str()) } else { None })
        .collect();
    let denies = words.iter().any(|word| word.eq_ignore_ascii_case("outside"))
        || (0..words.len()).any(|at| words::bound(&words[at..], false).is_some());
    (!denies).then_some(inner)
}

/// Returns the condition of a set such as `\{x : x > 1\}` or `\{x \in \mathbb{R} \mid x > 1\}`.
fn condition(inner: &[Token]) -> Option<&[Token]> {
    let (before, condition) = match inner {
        [before @ Token::Letter(_), Token::Sign(':' | '|'), condition @ ..] => (before, condition),
        [
            before @ Token::Letter(_),
            Token::Sign('∈'),
            Token::Letter(reals),
            Token::Sign(':' | '|'),
            condition @ ..,
        ] if reals == "\\mathbb{R}" => (before, condition),
        [before @ Token::Letter(_), Token::Text(such), Token::Text(that), condition @ ..]
            if such == "such" && that == "that" =>
        {
            (before, condition)
        }
        [before @ Token::Letter(_), Token::Text(with), condition @ ..]
            if with == "where" || with == "with" =>
        {
            (before, condition)
        }
        _ => return None,
    };
    condition.contains(before).then_some(condition)
}
