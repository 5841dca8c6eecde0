//! Methods of Python's `str`.

use std::collections::HashSet;

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use unicode_categories::UnicodeCategories;

use super::arguments::BoundArguments;
use super::format;
use super::limits::{self, spend_bytes, template_error};

/// Calls the method `text.method(*arguments)` of a Python string.
///
/// # Errors
/// Returns [`ErrorKind::UnknownMethod`] if `str` has no such method, and the errors of the method
/// itself.
pub(crate) fn call_string_method(
    state: &mut State,
    text: &str,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let bound = |names: &'static [&'static str]| BoundArguments::new(method, names, arguments);
    match method {
        "upper" => bound(&[]).and_then(|_| limits::make_text(state, text.to_uppercase())),
        "lower" => bound(&[]).and_then(|_| limits::make_text(state, text.to_lowercase())),
        "casefold" => bound(&[])
            .and_then(|_| limits::make_text(state, text.to_lowercase().replace('ß', "ss"))),
        "title" => bound(&[]).and_then(|_| limits::make_text(state, title_case(text))),
        "capitalize" => bound(&[]).and_then(|_| limits::make_text(state, capitalize(text))),
        "swapcase" => bound(&[]).and_then(|_| limits::make_text(state, swapcase(text))),
        "strip" | "lstrip" | "rstrip" => {
            let bound = bound(&["chars"])?;
            let text = strip(text, bound.text_or_none(0)?, method != "rstrip", method != "lstrip");
            limits::make_text(state, text.to_string())
        }
        "removeprefix" => {
            let bound = bound(&["prefix"])?;
            limits::make_text(state, text.strip_prefix(bound.text(0)?).unwrap_or(text).to_string())
        }
        "removesuffix" => {
            let bound = bound(&["suffix"])?;
            limits::make_text(state, text.strip_suffix(bound.text(0)?).unwrap_or(text).to_string())
        }
        "replace" => {
            let bound = bound(&["old", "new", "count"])?;
            replace(state, text, bound.text(0)?, bound.text(1)?, bound.integer(2, -1)?)
        }
        "split" | "rsplit" => {
            let bound = bound(&["sep", "maxsplit"])?;
            let max_splits = usize::try_from(bound.integer(1, -1)?).unwrap_or(usize::MAX);
            let parts = split_text(text, bound.text_or_none(0)?, max_splits, method == "rsplit")?;
            make_text_list(state, &parts)
        }
        "splitlines" => {
            let bound = bound(&["keepends"])?;
            make_text_list(state, &split_lines(text, bound.truth(0, false)))
        }
        "partition" | "rpartition" => {
            let bound = bound(&["sep"])?;
            let separator = bound.text(0)?;
            if separator.is_empty() {
                return Err(template_error(format!("{method}: the separator is empty")));
            }
            spend_bytes(state, text.len())?;
            let found = if method == "partition" {
                text.split_once(separator)
            } else {
                text.rsplit_once(separator)
            };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "join" => {
            let bound = bound(&["iterable"])?;
            let mut out = String::new();
            for (index, item) in bound.required(0)?.try_iter()?.enumerate() {
                let Some(item) = item.as_str() else {
                    return Err(template_error(format!(
                        "join: item {index} is of kind {}, but must be a string",
                        item.kind()
                    )));
                };
                spend_bytes(state, item.len() + text.len())?;
                if index > 0 {
                    out.push_str(text);
                }
                out.push_str(item);
            }
            limits::make_text(state, out)
        }
        "startswith" | "endswith" => {
            let bound = bound(&["prefix", "start", "end"])?;
            let part = search_range(text, &bound, 1)?;
            let wanted = bound.required(0)?;
            let affixes =
                if wanted.is_tuple() { wanted.try_iter()?.collect() } else { vec![wanted.clone()] };
            for affix in affixes {
                let Some(affix) = affix.as_str() else {
                    let kind = affix.kind();
                    return Err(template_error(format!(
                        "{method} requires a string or a tuple of strings, not a value of kind \
                         {kind}"
                    )));
                };
                if part.is_some_and(|(_, part)| match method {
                    "startswith" => part.starts_with(affix),
                    _ => part.ends_with(affix),
                }) {
                    return Ok(Value::from(true));
                }
            }
            Ok(Value::from(false))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let bound = bound(&["sub", "start", "end"])?;
            let wanted = bound.text(0)?;
            let found = search_range(text, &bound, 1)?.and_then(|(skipped, part)| {
                let at =
                    if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
                at.map(|at| skipped + part[..at].chars().count())
            });
            match found {
                Some(at) => Ok(Value::from(at)),
                None if method.ends_with("find") => Ok(Value::from(-1)),
                None => Err(template_error(format!("{method}: {wanted:?} is not in the string"))),
            }
        }
        "count" => {
            let bound = bound(&["sub", "start", "end"])?;
            let wanted = bound.text(0)?;
            Ok(Value::from(search_range(text, &bound, 1)?.map_or(0, |(_, part)| match wanted {
                "" => part.chars().count() + 1,
                wanted => part.matches(wanted).count(),
            })))
        }
        "center" | "ljust" | "rjust" => {
            let bound = bound(&["width", "fillchar"])?;
            let fill = bound.text_or_none(1)?.unwrap_or(" ");
            let mut chars = fill.chars();
            let (Some(fill), None) = (chars.next(), chars.next()) else {
                return Err(template_error(format!(
                    "{method}: fillchar is {fill:?}, but must be one character"
                )));
            };
            bound.required(0)?;
            let align = match method {
                "center" => '^',
                "ljust" => '<',
                _ => '>',
            };
            format::justify(state, text, bound.integer(0, 0)?, fill, align).map(Value::from)
        }
        "zfill" => {
            let bound = bound(&["width"])?;
            bound.required(0)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let width = bound.integer(0, 0)?.saturating_sub(i64::try_from(sign.len()).unwrap_or(0));
            format::justify(state, digits, width, '0', '>')
                .map(|digits| Value::from(format!("{sign}{digits}")))
        }
        "expandtabs" => {
            let bound = bound(&["tabsize"])?;
            let size = usize::try_from(bound.integer(0, 8)?).unwrap_or(0);
            spend_bytes(
                state,
                text.len().saturating_add(text.matches('\t').count().saturating_mul(size)),
            )?;
            Ok(Value::from(expand_tabs(text, size)))
        }
        "encode" => {
            let bound = bound(&["encoding", "errors"])?;
            match bound.text_or_none(0)?.unwrap_or("utf-8").to_lowercase().as_str() {
                "utf-8" | "utf8" => {}
                "ascii" if text.is_ascii() => {}
                other => {
                    return Err(template_error(format!(
                        "encode: {other:?} is not supported for this text; use utf-8"
                    )));
                }
            }
            spend_bytes(state, text.len())?;
            Ok(Value::from_bytes(text.as_bytes().to_vec()))
        }
        "format" => format::str_format(state, text, arguments).map(Value::from),
        "format_map" => {
            let bound = bound(&["mapping"])?;
            let mapping = bound.required(0)?;
            if mapping.kind() != ValueKind::Map {
                return Err(template_error(format!(
                    "format_map: the argument is of the type {}, but must be a mapping",
                    mapping.kind()
                )));
            }
            let named = limits::mapping_pairs(mapping)
                .filter_map(|(key, item)| Some((key.as_str()?.to_string(), item)));
            let named = Value::from(named.collect::<minijinja::value::Kwargs>());
            format::str_format(state, text, &[named]).map(Value::from)
        }
        _ => match evaluate_predicate(text, method) {
            Some(holds) => bound(&[]).map(|_| Value::from(holds)),
            None => Err(Error::from(ErrorKind::UnknownMethod)),
        },
    }
}

/// Creates a list of texts, after charging it to the budget of the rendering.
fn make_text_list(state: &mut State, parts: &[&str]) -> Result<Value, Error> {
    spend_bytes(state, parts.iter().map(|part| part.len() + size_of::<Value>()).sum())?;
    Ok(parts.iter().copied().map(Value::from).collect())
}

/// Returns the result of `text.isalpha()` and similar predicates of Python strings, or `None` if
/// there is no such predicate.
fn evaluate_predicate(text: &str, method: &str) -> Option<bool> {
    let all = |holds: fn(char) -> bool| !text.is_empty() && text.chars().all(holds);
    let cased = |wanted: fn(char) -> bool, other: fn(char) -> bool| {
        text.chars().any(wanted) && !text.chars().any(other)
    };
    Some(match method {
        "isalpha" => all(UnicodeCategories::is_letter),
        "isalnum" => all(|c| c.is_letter() || c.is_number()),
        "isdigit" => all(is_digit),
        "isdecimal" => all(UnicodeCategories::is_number_decimal_digit),
        "isnumeric" => all(UnicodeCategories::is_number),
        "isspace" => all(is_space),
        "islower" => cased(char::is_lowercase, |c| c.is_uppercase() || c.is_letter_titlecase()),
        "isupper" => cased(char::is_uppercase, |c| c.is_lowercase() || c.is_letter_titlecase()),
        "istitle" => is_title(text),
        "isascii" => text.is_ascii(),
        "isprintable" => format::all_printable(text),
        "isidentifier" => super::lexer::is_name(text),
        _ => return None,
    })
}

/// Returns whether `c` is a decimal digit, or a superscript, subscript or circled digit, which
/// Python counts as digits, too.
fn is_digit(c: char) -> bool {
    let sign = matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⓪' | '❶'..='❾' | '➀'..='➈');
    sign || c.is_number_decimal_digit()
}

/// Returns whether Python's `str.strip` removes `c`. This includes the ASCII separators U+001C to
/// U+001F.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || c.is_letter_titlecase()
}

fn is_title(text: &str) -> bool {
    let mut any = false;
    let mut inside = false;
    for c in text.chars() {
        let starts_word = c.is_uppercase() || c.is_letter_titlecase();
        if (starts_word && inside) || (c.is_lowercase() && !inside) {
            return false;
        }
        inside = is_cased(c);
        any |= inside;
    }
    any
}

/// Implements Python's `str.title`.
pub(crate) fn title_case(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = is_cased(c);
    }
    out
}

/// Implements Python's `str.capitalize`.
pub(crate) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase).collect::<String>();
    first + &chars.as_str().to_lowercase()
}

fn swapcase(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_uppercase() { out.extend(c.to_lowercase()) } else { out.extend(c.to_uppercase()) }
    }
    out
}

/// Implements Python's `str.strip`, `str.lstrip` and `str.rstrip`. `start` and `end` select the
/// sides.
pub(crate) fn strip<'a>(text: &'a str, chars: Option<&str>, start: bool, end: bool) -> &'a str {
    let set: Option<HashSet<char>> = chars.map(|chars| chars.chars().collect());
    let goes = |c: char| set.as_ref().map_or_else(|| is_space(c), |set| set.contains(&c));
    let text = if start { text.trim_start_matches(goes) } else { text };
    if end { text.trim_end_matches(goes) } else { text }
}

/// Implements Python's `str.replace` with at most `count` replacements. A negative `count` sets no
/// limit.
pub(crate) fn replace(
    state: &mut State,
    text: &str,
    old: &str,
    new: &str,
    count: i64,
) -> Result<Value, Error> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let found = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() }
        .min(count);
    spend_bytes(state, text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(Value::from(text.replacen(old, new, count)))
}

/// Implements Python's `str.split` and `str.rsplit`.
fn split_text<'a>(
    text: &'a str,
    separator: Option<&str>,
    max_splits: usize,
    from_end: bool,
) -> Result<Vec<&'a str>, Error> {
    let Some(separator) = separator else { return Ok(split_spaces(text, max_splits, from_end)) };
    if separator.is_empty() {
        return Err(template_error("split: the separator is empty"));
    }
    let max_splits = max_splits.saturating_add(1);
    Ok(if from_end {
        let mut parts: Vec<_> = text.rsplitn(max_splits, separator).collect();
        parts.reverse();
        parts
    } else {
        text.splitn(max_splits, separator).collect()
    })
}

/// Splits a text at white space into words, with at most `max_splits` splits. If words remain
/// unsplit, the last part keeps the white space within it and on its outer side.
fn split_spaces(text: &str, max_splits: usize, from_end: bool) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = strip(text, None, !from_end, from_end);
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| words.len() < max_splits) else {
            words.push(rest);
            break;
        };
        let space = rest[at..].chars().next().map_or(1, char::len_utf8);
        let before = &rest[..at];
        let after = &rest[at + space..];
        let (word, remaining) = if from_end { (after, before) } else { (before, after) };
        words.push(word);
        rest = strip(remaining, None, !from_end, from_end);
    }
    if from_end {
        words.reverse();
    }
    words
}

/// Implements Python's `str.splitlines`.
pub(crate) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = [
        '\n', '\r', '\u{B}', '\u{C}', '\u{1C}', '\u{1D}', '\u{1E}', '\u{85}', '\u{2028}',
        '\u{2029}',
    ];
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        out.push(if keep_ends { &rest[..at + end] } else { &rest[..at] });
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    out
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let width = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', width));
                column += width;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

/// Returns the characters from argument `start` up to argument `start + 1`, and the number of
/// characters before them. Returns `None` if the start is after the end, so that not even an empty
/// text is found there.
fn search_range<'a>(
    text: &'a str,
    bound: &BoundArguments<'_>,
    start: usize,
) -> Result<Option<(usize, &'a str)>, Error> {
    if bound.value(start).is_none() && bound.value(start + 1).is_none() {
        return Ok(Some((0, text)));
    }
    let length = i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let clamp = |bound: i64| if bound < 0 { bound.saturating_add(length).max(0) } else { bound };
    let from = clamp(bound.integer(start, 0)?);
    let to = clamp(bound.integer(start + 1, length)?).min(length);
    if from > to {
        return Ok(None);
    }
    let from = usize::try_from(from).unwrap_or(0);
    let to = usize::try_from(to).unwrap_or(0);
    let byte = |chars: usize| text.char_indices().nth(chars).map_or(text.len(), |(at, _)| at);
    Ok(Some((from, &text[byte(from)..byte(to)])))
}
