//! Parses the shape of an answer: a value, list, set, tuple, interval, matrix, relation or words.

mod relations;

use self::relations::parse_relation;
use super::approximate;
use super::expression::Expr;
use super::field::{EvaluationPoint, to_exact_rational};
use super::lexer::{Token, tokenize};
use super::matrix::{Rows, parse_matrix};
use super::parser::{
    ITEMS, closing_bracket_index, parse_expression, split_matrix_rows, split_outside_brackets,
    split_row_cells,
};
use super::phrases::replace_phrases;
use super::plus_minus::expand_plus_minus;
use super::quantity::{Quantity, parse_quantity, strip_modifiers};
use super::time::{Ratio, parse_ratio};
use crate::words::{self, NumberDescription};

/// A parsed mathematical answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ParsedAnswer {
    Value(Quantity),
    Words(String),
    /// Several answers, whose order does not matter.
    List(Vec<ParsedAnswer>),
    Set(Vec<ParsedAnswer>),
    /// Items in brackets `(` or `[`, whose order matters. A tuple of two items can be an interval.
    Tuple {
        open: char,
        close: char,
        items: Vec<ParsedAnswer>,
    },
    /// An answer with the name before it: A(1, 2), "vertex (1, 2)", B: 4.
    Labeled(String, Box<ParsedAnswer>),
    /// A tuple that names its members: (a, b) = (1, 2).
    Named(Vec<Expr>, Vec<ParsedAnswer>),
    /// Sets that are combined by `∪`, `∩` or `∖`, or operands of a logical or other operator that
    /// is not evaluated.
    Combined(char, Vec<ParsedAnswer>),
    /// Conditions that must all hold, as in a system of equations.
    All(Vec<ParsedAnswer>),
    Matrix(Rows),
    /// A chain of expressions, with the relations `= ≈ < > ≤ ≥ ≠` between each expression and the
    /// next. `NumberDescription` describes the last expression.
    Relation(Vec<Expr>, Vec<char>, NumberDescription),
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
pub(super) fn parse_interpretations(text: &str) -> Vec<ParsedAnswer> {
    let rewritten = rewrite_outer_brackets(text);
    let text = rewritten.as_deref().unwrap_or(text);
    let mut read: Vec<ParsedAnswer> = Vec::new();
    let mut add = |found: Option<ParsedAnswer>| {
        if let Some(found) = found
            && !read.contains(&found)
        {
            read.push(found);
        }
    };
    for thousands in [true, false] {
        let Some(mut tokens) = tokenize(text, thousands).map(replace_phrases) else { continue };
        while tokens.last() == Some(&Token::Row) {
            tokens.pop();
        }
        add(parse_answer(&tokens, 0));
        if let Some((letter, rest)) = split_choice(&tokens) {
            add(Some(letter));
            add(parse_answer(rest, 0));
        }
        if !tokens.contains(&Token::Separator) {
            break;
        }
    }
    read
}

/// Rewrites an interval in the notation of ISO 80000-2, `]a, b[`, as `(a, b)`.
fn rewrite_outer_brackets(text: &str) -> Option<String> {
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
fn split_choice(tokens: &[Token]) -> Option<(ParsedAnswer, &[Token])> {
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
    is_choice
        .then(|| (ParsedAnswer::Value(Quantity::from_value(Expr::Symbol(letter.clone()))), rest))
}

fn parse_answer(tokens: &[Token], depth: u32) -> Option<ParsedAnswer> {
    if depth == DEPTH {
        return None;
    }
    // Braces around the complete answer.
    if let [Token::GroupOpen, inner @ .., Token::GroupClose] = tokens
        && closing_bracket_index(tokens)? + 1 == tokens.len()
    {
        return parse_answer(inner, depth + 1);
    }
    let tokens = strip_integer_condition(tokens);
    if let Some(words) = join_words(tokens) {
        return Some(ParsedAnswer::Words(words));
    }
    // The order of quantifiers matters.
    let is_quantifier = |token: &Token| matches!(token, Token::Command(name) if name == "forall" || name == "exists");
    if tokens.iter().any(is_quantifier) {
        let token = |token: &Token| match token {
            Token::Number { digits, scale, .. } => format!("{digits}e{scale}"),
            other => format!("{other:?}"),
        };
        return Some(ParsedAnswer::Words(tokens.iter().map(token).collect()));
    }
    // ℝ except for some points.
    if let [Token::Letter(reals), Token::Text(except), points @ ..] = tokens
        && reals == "\\mathbb{R}"
        && ["except", "but", "excluding", "without"].contains(&except.to_lowercase().as_str())
    {
        let points = match parse_answer(points, depth + 1)? {
            ParsedAnswer::List(points) | ParsedAnswer::Set(points) => points,
            point => vec![point],
        };
        let reals = ParsedAnswer::Value(Quantity::from_value(Expr::Symbol(reals.clone())));
        return Some(ParsedAnswer::Combined('∖', vec![reals, ParsedAnswer::Set(points)]));
    }
    // All real numbers greater than 1.
    if let [Token::Letter(reals), bound @ ..] = tokens
        && reals == "\\mathbb{R}"
        && let Some(quantity) = parse_quantity(bound)
        && quantity.about.bounds.len() == 1
    {
        return Some(ParsedAnswer::Value(quantity));
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
        return parse_answer(&rest[start..], depth + 1)
            .filter(|found| matches!(found, ParsedAnswer::Relation(..) | ParsedAnswer::All(_)));
    }
    let parts = split_outside_brackets(tokens, Token::is_separator);
    if parts.len() == 1 {
        return parse_item(tokens, depth);
    }
    // "1, 2, and 3" has an extra separator.
    let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    match parts[..] {
        [] => None,
        [one] => parse_item(one, depth),
        _ if parts.len() > ITEMS => None,
        _ => {
            let items: Option<Vec<ParsedAnswer>> =
                parts.iter().map(|part| parse_item(part, depth)).collect();
            let flat = items?.into_iter().flat_map(|item| match item {
                ParsedAnswer::List(items) => items,
                item => vec![item],
            });
            let items = distribute_name(flat.collect());
            let is_and =
                split_outside_brackets(tokens, |token| *token == Token::And).len() == parts.len();
            let bounds = |item: &ParsedAnswer| matches!(item, ParsedAnswer::Relation(_, signs, _) if !are_all_equalities(signs));
            let is_or =
                split_outside_brackets(tokens, |token| *token == Token::Or).len() == parts.len();
            Some(match items.iter().all(bounds) {
                true if is_and => ParsedAnswer::All(items),
                true if is_or => ParsedAnswer::Combined('∪', items),
                _ => ParsedAnswer::List(items),
            })
        }
    }
}

/// Removes the condition that a variable of the answer is an integer, as in
/// `2k\pi, k \in \mathbb{Z}`. An inequality keeps the condition, because it has other solutions
/// without it.
fn strip_integer_condition(tokens: &[Token]) -> &[Token] {
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
fn distribute_name(items: Vec<ParsedAnswer>) -> Vec<ParsedAnswer> {
    let Some((ParsedAnswer::Relation(parts, signs, _), values)) = items.split_first() else {
        return items;
    };
    let is_value = |item: &ParsedAnswer| matches!(item, ParsedAnswer::Value(_));
    let ([name @ Expr::Symbol(_), _], true, true) =
        (&parts[..], are_all_equalities(signs), !values.is_empty() && values.iter().all(is_value))
    else {
        return items;
    };
    let named = |item: &ParsedAnswer| match item {
        ParsedAnswer::Value(value) => ParsedAnswer::Relation(
            vec![name.clone(), value.value.clone()],
            vec!['='],
            value.about.clone(),
        ),
        other => other.clone(),
    };
    items[..1].iter().cloned().chain(values.iter().map(named)).collect()
}

/// Returns whether the signs of a relation make all of its sides equal.
pub(super) fn are_all_equalities(signs: &[char]) -> bool {
    signs.iter().all(|sign| matches!(sign, '=' | '≈'))
}

/// Returns the text of an answer that consists of words only.
fn join_words(tokens: &[Token]) -> Option<String> {
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
fn join_label_words(tokens: &[Token]) -> Option<String> {
    let word = |token: &Token| match token {
        Token::Text(word) => Some(word.to_lowercase()),
        Token::Letter(letter) => Some(letter.clone()),
        _ => None,
    };
    let words: Vec<String> = tokens.iter().map(word).collect::<Option<_>>()?;
    (!words.is_empty()).then(|| words.join(" "))
}

fn attach_label(name: Option<String>, answer: ParsedAnswer) -> ParsedAnswer {
    match name {
        Some(name) => ParsedAnswer::Labeled(name, Box::new(answer)),
        None => answer,
    }
}

/// Converts the lines of a LaTeX environment to a list:
/// `\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}`. A line that starts with a relation sign
/// continues the preceding line.
fn parse_environment_lines(name: &str, inner: &[Token]) -> Option<Vec<Token>> {
    let is_sign =
        |token: &Token| matches!(token, Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠'));
    let rows: Vec<&[Token]> = split_matrix_rows(inner).collect();
    let is_relation = |row: &&[Token]| row.iter().any(is_sign);
    let is_lines = match name {
        "aligned" | "align" | "gathered" | "gather" | "split" => true,
        "cases" | "array" => {
            rows.iter().all(|row| split_row_cells(row).len() == 1)
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

fn parse_item(tokens: &[Token], depth: u32) -> Option<ParsedAnswer> {
    if depth == DEPTH {
        return None;
    }
    if let [Token::GroupOpen, inner @ .., Token::GroupClose] = tokens
        && closing_bracket_index(tokens)? + 1 == tokens.len()
    {
        return parse_answer(inner, depth + 1);
    }
    if let Some(words) = join_words(tokens) {
        return Some(ParsedAnswer::Words(words));
    }
    if let [Token::Begin(name), inner @ .., Token::End] = tokens
        && closing_bracket_index(tokens)? + 1 == tokens.len()
        && let Some(lines) = parse_environment_lines(name, inner)
    {
        return parse_answer(&lines, depth + 1);
    }
    // 3 R 4: a quotient with its remainder.
    if let [quotient @ Token::Number { .. }, Token::Letter(sign) | Token::Text(sign), rest] = tokens
        && ["R", "r", "remainder"].contains(&sign.as_str())
        && matches!(rest, Token::Number { .. })
    {
        let items =
            [quotient, rest].map(|number| parse_item(std::slice::from_ref(number), depth + 1));
        let items = items.into_iter().collect::<Option<_>>()?;
        return Some(ParsedAnswer::Tuple { open: '(', close: ')', items });
    }
    if let [Token::Letter(name), Token::Sign(':'), value @ ..] = tokens
        && ("A"..="Z").contains(&name.as_str())
        && matches!(value.first(), Some(Token::Number { .. } | Token::Open(_) | Token::Sign('-')))
    {
        return Some(attach_label(Some(name.clone()), parse_item(value, depth + 1)?));
    }
    if let [Token::Sign('→'), value @ ..] = tokens {
        return parse_item(value, depth + 1);
    }
    // The premise is left of the sign. Between propositions only, the sign is a part of the answer.
    if let [first, .., last] =
        split_outside_brackets(tokens, |token| matches!(token, Token::Sign('⇒')))[..]
        && (first.is_empty()
            || first.iter().any(|t| !matches!(t, Token::Letter(_) | Token::Command(_))))
    {
        return parse_answer(last, depth + 1);
    }
    if let Some(found) = parse_logical_operands(tokens, depth) {
        return Some(found);
    }
    // The name of the value is outside of these tokens, in words or in another formula.
    if let [Token::Sign('=' | '≈'), value @ ..] = tokens {
        return parse_item(value, depth + 1);
    }
    if let [Token::Command(name)] = tokens
        && name == "emptyset"
    {
        return Some(ParsedAnswer::Set(vec![]));
    }
    // In `x \in [0, 1)`, the answer is the set.
    if let [first, .., last] =
        split_outside_brackets(tokens, |token| matches!(token, Token::Sign('∈')))[..]
    {
        let is_letter =
            |of: &[Token]| matches!(of, [Token::Letter(name)] if !name.starts_with('\\'));
        if is_letter(first) && is_letter(last) {
            let items = [first, last].map(|side| parse_item(side, depth + 1));
            return Some(ParsedAnswer::Combined('∈', items.into_iter().collect::<Option<_>>()?));
        }
        return parse_answer(last, depth + 1);
    }
    if let Some(found) = parse_set_operation(tokens, depth) {
        return Some(found);
    }
    if let Some(found) = parse_bracketed(tokens, depth) {
        let before = tokens.iter().position(|token| matches!(token, Token::Open(_))).unwrap_or(0);
        return Some(attach_label(join_label_words(&tokens[..before]), found));
    }
    if let Some(found) = parse_ratio(tokens) {
        return Some(ParsedAnswer::Ratio(found));
    }
    let is_relation =
        |token: &Token| matches!(token, Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠'));
    let sides = split_outside_brackets(tokens, is_relation);
    if sides.len() > 1 {
        return parse_relation(tokens, &sides, depth);
    }
    if let Some(rows) = parse_matrix(tokens) {
        return Some(ParsedAnswer::Matrix(rows));
    }
    if let Some(found) = parse_residue(tokens) {
        return Some(found);
    }
    let found = parse_quantity(tokens)?;
    let with = |value: Expr| ParsedAnswer::Value(Quantity { value, ..found.clone() });
    let mut several = expand_plus_minus(&found.value);
    Some(match several.len() {
        1 => with(several.remove(0)),
        _ => ParsedAnswer::List(several.into_iter().map(with).collect()),
    })
}

/// Parses a value modulo another value: `468 \pmod{1000}`, `468 (mod 1000)`.
fn parse_residue(tokens: &[Token]) -> Option<ParsedAnswer> {
    let modulus =
        |token: &Token| matches!(token, Token::Command(name) if name == "pmod" || name == "mod");
    let at = tokens.iter().position(modulus)?;
    let (value, modulus) = match (&tokens[..at], &tokens[at..]) {
        ([value @ .., Token::Open('(')], [_, modulus @ .., Token::Close(')')]) => (value, modulus),
        (value, [Token::Command(name), modulus @ ..]) if name == "pmod" => (value, modulus),
        _ => return None,
    };
    Some(ParsedAnswer::Residue(parse_quantity(value)?.value, parse_expression(modulus)?))
}

/// Parses the operands of a logical operator, of a relation between figures, or of an operation
/// that is not evaluated.
fn parse_logical_operands(tokens: &[Token], depth: u32) -> Option<ParsedAnswer> {
    ['⇒', '→', '∨', '∧', '≅', '∼', '∘', '⋆'].into_iter().find_map(|sign| {
        let parts = split_outside_brackets(tokens, |token| *token == Token::Sign(sign));
        let is_joined =
            (2..=ITEMS).contains(&parts.len()) && parts.iter().all(|part| !part.is_empty());
        let items =
            || parts.iter().map(|part| parse_item(part, depth + 1)).collect::<Option<Vec<_>>>();
        is_joined.then(items).flatten().map(|items| ParsedAnswer::Combined(sign, items))
    })
}

/// Parses sets combined by `∪`, `∩` or `∖`, from the left.
fn parse_set_operation(tokens: &[Token], depth: u32) -> Option<ParsedAnswer> {
    let is_reals =
        |tokens: &[Token]| matches!(tokens, [Token::Letter(name)] if name == "\\mathbb{R}");
    for sign in ['∪', '∩', '∖', '-'] {
        let parts = split_outside_brackets(tokens, |token| *token == Token::Sign(sign));
        let is_set = sign != '-'
            || (is_reals(parts[0])
                && parts[1..].iter().all(|p| p.first() == Some(&Token::Open('{'))));
        if parts.len() > 1 && parts.len() <= ITEMS && is_set {
            let mut parts: Vec<ParsedAnswer> =
                parts.iter().map(|part| parse_item(part, depth + 1)).collect::<Option<_>>()?;
            // Excluded points can be in plain braces: ℝ∖{2}.
            let is_difference = matches!(sign, '∖' | '-');
            for part in parts[1..].iter_mut().filter(|_| is_difference) {
                match part {
                    ParsedAnswer::Value(point) if point.value.is_fixed() => {
                        *part = ParsedAnswer::Set(vec![part.clone()])
                    }
                    ParsedAnswer::List(points) => *part = ParsedAnswer::Set(std::mem::take(points)),
                    _ => {}
                }
            }
            return Some(ParsedAnswer::Combined(if sign == '-' { '∖' } else { sign }, parts));
        }
    }
    None
}

/// Parses a set, a tuple or an interval, which is in brackets.
fn parse_bracketed(tokens: &[Token], depth: u32) -> Option<ParsedAnswer> {
    let tokens = find_bracketed_part(tokens)?;
    let (Token::Open(open), Some(Token::Close(close))) = (tokens.first()?, tokens.last()) else {
        return None;
    };
    if closing_bracket_index(tokens)? + 1 != tokens.len() {
        return None;
    }
    let inner = &tokens[1..tokens.len() - 1];
    if let ('{', Some(condition)) = (open, find_set_condition(inner)) {
        return match parse_answer(condition, depth + 1)? {
            ParsedAnswer::List(all) | ParsedAnswer::All(all) => Some(ParsedAnswer::All(all)),
            one @ ParsedAnswer::Relation(..) => Some(ParsedAnswer::All(vec![one])),
            other => Some(other),
        };
    }
    let parts = split_outside_brackets(inner, Token::is_separator);
    if parts.len() > ITEMS || depth + 1 >= DEPTH {
        return None;
    }
    let items = || parts.iter().map(|part| parse_item(part, depth + 1)).collect::<Option<Vec<_>>>();
    match (open, close) {
        ('{', '}') if inner.is_empty() => Some(ParsedAnswer::Set(vec![])),
        ('{', '}') => {
            let flat = items()?.into_iter().flat_map(|item| match item {
                ParsedAnswer::List(several) => several,
                item => vec![item],
            });
            Some(ParsedAnswer::Set(flat.collect()))
        }
        ('⟨', '⟨') => Some(ParsedAnswer::Tuple { open: '(', close: ')', items: items()? }),
        ('(' | '[', ')' | ']') if parts.len() > 1 => {
            Some(ParsedAnswer::Tuple { open: *open, close: *close, items: items()? })
        }
        _ => None,
    }
}

/// Returns the bracketed part of `the point (1, 2)`, `A(1, 2)` or `(1, 2) is the vertex`. Returns
/// all tokens if they have another form, and `None` if the words negate the bracket.
fn find_bracketed_part(tokens: &[Token]) -> Option<&[Token]> {
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
    let Some(length) = tokens.get(start..).and_then(closing_bracket_index).filter(|_| is_bracket)
    else {
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
        || (0..words.len()).any(|at| words::parse_bound(&words[at..], false).is_some());
    (!denies).then_some(inner)
}

/// Returns the condition of a set such as `\{x : x > 1\}` or `\{x \in \mathbb{R} \mid x > 1\}`.
fn find_set_condition(inner: &[Token]) -> Option<&[Token]> {
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
