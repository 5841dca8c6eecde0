//! Filters of Jinja2 that convert one text to another.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, State, Value};

use super::arguments::{BoundArguments, Filter};
use super::format;
use super::limits::{self, mapping_pairs, spend_bytes, template_error};
use super::numbers::to_number;
use super::repr::{python_repr, python_str};
use super::strings;
use super::wrap::wrap_line;

/// Names of the text filters, each with its implementation.
pub(super) const FILTERS: [(&str, Filter); 19] = [
    ("upper", |state, value, _| map_text(state, value, str::to_uppercase)),
    ("lower", |state, value, _| map_text(state, value, str::to_lowercase)),
    ("capitalize", |state, value, _| map_text(state, value, strings::capitalize)),
    ("title", |state, value, _| map_text(state, value, title_case)),
    ("striptags", |state, value, _| map_text(state, value, strip_tags)),
    ("e", to_markup),
    ("escape", to_markup),
    ("forceescape", |state, value, _| map_text(state, value, escape_html).map(as_markup)),
    ("urlencode", urlencode_filter),
    ("wordcount", wordcount_filter),
    ("wordwrap", wordwrap_filter),
    ("trim", trim_filter),
    ("replace", replace_filter),
    ("center", center_filter),
    ("indent", indent_filter),
    ("truncate", truncate_filter),
    ("filesizeformat", file_size_filter),
    ("pprint", pprint_filter),
    ("format", format_filter),
];

pub(super) fn map_text(
    state: &mut State,
    value: Value,
    change: impl Fn(&str) -> String,
) -> Result<Value, Error> {
    let before = python_str(state, &value)?;
    limits::make_text(state, change(&before))
}

fn title_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = !(strings::is_space(c) || "-({[<".contains(c));
    }
    out
}

fn as_markup(value: Value) -> Value {
    Value::from_safe_string(value.as_str().unwrap_or_default().to_string())
}

fn to_markup(state: &mut State, value: Value, _: &[Value]) -> Result<Value, Error> {
    if value.is_safe() { Ok(value) } else { map_text(state, value, escape_html).map(as_markup) }
}

/// Escapes a text for HTML.
pub(crate) fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn strip_tags(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(open) = rest.find('<') {
        let Some(close) = rest[open..].find('>') else { break };
        out.push_str(&rest[..open]);
        rest = &rest[open + close + 1..];
    }
    out.push_str(rest);
    let words: Vec<&str> = out.split(strings::is_space).filter(|word| !word.is_empty()).collect();
    let joined = words.join(" ");
    [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&#34;", "\""),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ]
    .iter()
    .fold(joined, |text, (code, meant)| text.replace(code, meant))
}

fn urlencode_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("urlencode", &[], given)?;
    if value.kind() != ValueKind::Map {
        return map_text(state, value, |text| percent_encode(text, false));
    }
    let mut parts = Vec::new();
    for (key, item) in mapping_pairs(&value) {
        let key = python_str(state, &key)?;
        let item = python_str(state, &item)?;
        parts.push(format!("{}={}", percent_encode(&key, true), percent_encode(&item, true)));
    }
    limits::make_text(state, parts.join("&"))
}

fn percent_encode(text: &str, query: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte))
            }
            b'/' if !query => out.push('/'),
            b' ' if query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn wordcount_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("wordcount", &[], given)?;
    let text = python_str(state, &value)?;
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    Ok(Value::from(words.filter(|word| !word.is_empty()).count()))
}

fn wordwrap_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new(
        "wordwrap",
        &["width", "break_long_words", "wrapstring", "break_on_hyphens"],
        given,
    )?;
    let value = python_str(state, &value)?;
    let width = usize::try_from(bound.integer(0, 79)?).unwrap_or(0);
    let between = bound.text_or_none(2)?.unwrap_or("\n");
    let words = bound.truth(1, true);
    let hyphens = bound.truth(3, true);
    // There is at most one more line break than there are characters.
    spend_bytes(state, value.len().saturating_mul(between.len().saturating_add(1)))?;
    let wrapped = strings::split_lines(&value, false)
        .into_iter()
        .map(|line| wrap_line(line, width, words, hyphens).join(between));
    limits::make_text(state, wrapped.collect::<Vec<_>>().join(between))
}

fn trim_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("trim", &["chars"], given)?;
    let chars = bound.text_or_none(0)?;
    map_text(state, value, |text| strings::strip(text, chars, true, true).to_string())
}

fn replace_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("replace", &["old", "new", "count"], given)?;
    let old = python_str(state, bound.required(0)?)?;
    let new = python_str(state, bound.required(1)?)?;
    let value = python_str(state, &value)?;
    strings::replace(state, &value, &old, &new, bound.integer(2, -1)?)
}

fn center_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("center", &["width"], given)?;
    let value = python_str(state, &value)?;
    format::justify(state, &value, bound.integer(0, 80)?, ' ', '^').map(Value::from)
}

fn indent_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("indent", &["width", "first", "blank"], given)?;
    let Some(value) = value.as_str() else {
        return Err(template_error(format!(
            "indent: the value is of kind {}, but must be a string",
            value.kind()
        )));
    };
    let width = match bound.text_or_none(0) {
        Ok(Some(text)) => text.to_string(),
        _ => {
            let width = usize::try_from(bound.integer(0, 4)?).unwrap_or(0);
            spend_bytes(state, width)?;
            " ".repeat(width)
        }
    };
    let first = bound.truth(1, false);
    let blank = bound.truth(2, false);
    let full = format!("{value}\n");
    let lines = strings::split_lines(&full, false);
    spend_bytes(state, full.len().saturating_add(lines.len().saturating_mul(width.len())))?;
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn truncate_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("truncate", &["length", "killwords", "end", "leeway"], given)?;
    let value = python_str(state, &value)?;
    let end = bound.text_or_none(2)?.unwrap_or("...");
    let length = usize::try_from(bound.integer(0, 255)?).unwrap_or(0);
    let leeway = usize::try_from(bound.integer(3, 5)?).unwrap_or(0);
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(template_error(format!(
            "truncate: {length} characters have no room for {end:?}"
        )));
    };
    if value.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::from(value));
    }
    let truncated: String = value.chars().take(kept).collect();
    let truncated = if bound.truth(1, false) {
        &truncated
    } else {
        truncated.rsplit_once(' ').map_or(truncated.as_str(), |(words, _)| words)
    };
    limits::make_text(state, format!("{truncated}{end}"))
}

fn file_size_filter(_: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let bound = BoundArguments::new("filesizeformat", &["binary"], given)?;
    let binary = bound.truth(0, false);
    let (base, middle) = if binary { (1024.0, "iB") } else { (1000.0, "B") };
    let bytes = to_number(&value)
        .ok_or_else(|| template_error(format!("filesizeformat: {value} is not a number")))?;
    if bytes < base {
        return Ok(Value::from(if bytes == 1.0 {
            "1 Byte".into()
        } else {
            format!("{} Bytes", bytes.trunc())
        }));
    }
    let units = [if binary { "K" } else { "k" }, "M", "G", "T", "P", "E", "Z", "Y"];
    let mut size = bytes / base;
    let mut unit = units[0];
    for next in &units[1..] {
        if size < base {
            break;
        }
        (size, unit) = (size / base, next);
    }
    Ok(Value::from(format!("{size:.1} {unit}{middle}")))
}

/// Implements the filter `pprint`, Python's `pprint.pformat`, for values that fit on one line.
fn pprint_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    BoundArguments::new("pprint", &[], given)?;
    let sorted = match value.kind() {
        ValueKind::Map => {
            let mut items: Vec<_> = mapping_pairs(&value).collect();
            items.sort_by(|a, b| a.0.cmp(&b.0));
            Value::from_pairs(items)
        }
        _ => value,
    };
    let line = python_repr(state, &sorted)?;
    if line.chars().count() > 80 {
        return Err(template_error(
            "pprint: the value needs more than one line, which Levade does not support; use tojson",
        ));
    }
    Ok(Value::from(line))
}

fn format_filter(state: &mut State, value: Value, given: &[Value]) -> Result<Value, Error> {
    let (positional, named) = super::arguments::split_arguments(given)?;
    let template = python_str(state, &value)?;
    let arguments = match named.args().next() {
        None => Value::from(Tuple::from(positional)),
        Some(_) if !positional.is_empty() => {
            return Err(template_error(
                "format takes either positional or keyword arguments, not both",
            ));
        }
        Some(_) => {
            let names: Vec<String> = named.args().map(str::to_string).collect();
            let named = names.into_iter().map(|name| {
                named.peek::<Value>(&name).map(|value| (Value::from(name.as_str()), value))
            });
            Value::from_pairs(named.collect::<Result<Vec<_>, Error>>()?)
        }
    };
    format::printf(state, &template, &arguments).map(Value::from)
}
