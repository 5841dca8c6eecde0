//! Implements Python's `%` operator and `str.format`. Numbers are printed by the engine, which
//! supports their formats.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, State, Value};

use super::arguments::{integer, split_arguments};
use super::limits::{TEXT, spend_bytes, template_error};
use super::repr::{is_printable, python_repr, python_str};

/// Maximum number of printed digits of a float. No 64-bit float has more than 1074 digits after its
/// point.
const DIGITS: usize = 4096;

/// Implements Python's string formatting `template % arguments`.
pub(crate) fn printf(
    state: &mut State,
    template: &str,
    arguments: &Value,
) -> Result<String, Error> {
    let mapping = arguments.kind() == ValueKind::Map;
    let values: Vec<Value> = if arguments.is_tuple() {
        arguments.try_iter()?.collect()
    } else {
        vec![arguments.clone()]
    };
    let mut values = values.into_iter();
    let mut out = String::new();
    let mut rest = template;
    let mut named = false;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let mut value = None;
        if let Some(keyed) = rest.strip_prefix('(') {
            let (key, after) = keyed.split_once(')').ok_or_else(|| {
                template_error(format!("{template:?} has a key without a closing parenthesis"))
            })?;
            if !mapping {
                return Err(template_error(format!(
                    "{template:?} uses the key {key:?}, which requires a mapping"
                )));
            }
            let item = arguments.get_item(&Value::from(key))?;
            if item.is_undefined() {
                return Err(template_error(format!(
                    "{template:?} uses the key {key:?}, which is missing"
                )));
            }
            (value, rest, named) = (Some(item), after, true);
        }
        let mut next = || {
            values.next().ok_or_else(|| {
                template_error(format!("{template:?} requires more values than are given"))
            })
        };
        let after = rest.trim_start_matches(['#', '0', '-', ' ', '+']);
        let flags = &rest[..rest.len() - after.len()];
        rest = after;
        let mut left = flags.contains('-');
        let mut width = parse_count(&mut rest, &mut next)?.unwrap_or(0);
        if width < 0 {
            (left, width) = (true, width.saturating_neg());
        }
        let precision = match rest.strip_prefix('.') {
            None => None,
            Some(after) => {
                rest = after;
                Some(parse_count(&mut rest, &mut next)?.unwrap_or(0).max(0))
            }
        };
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let Some(conversion) = rest.chars().next() else {
            return Err(template_error(format!("{template:?} ends within a field")));
        };
        rest = &rest[conversion.len_utf8()..];
        if conversion == '%' {
            out.push('%');
            continue;
        }
        let value = match value {
            Some(value) => value,
            None => next()?,
        };
        let width = spend_width(state, width)?;
        let precision = precision.map(|precision| spend_width(state, precision)).transpose()?;
        let body = match conversion {
            's' | 'r' | 'a' => {
                let body = match (conversion, value.as_str()) {
                    ('s', Some(value)) => value.to_string(),
                    ('s', None) => python_str(state, &value)?,
                    ('r', _) => python_repr(state, &value)?,
                    _ => escape_non_ascii(&python_repr(state, &value)?),
                };
                precision.map_or(body.clone(), |precision| body.chars().take(precision).collect())
            }
            'd' | 'i' | 'u' | 'o' | 'x' | 'X' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'c' => {
                let decimal = matches!(conversion, 'd' | 'i' | 'u');
                let value = match value.kind() {
                    ValueKind::Bool => Value::from(i64::from(value.is_true())),
                    ValueKind::Number if decimal && !value.is_integer() => {
                        Value::from(to_integer(f64::try_from(value.clone()).unwrap_or(f64::NAN))?)
                    }
                    ValueKind::Number => value,
                    ValueKind::String if conversion == 'c' => value,
                    kind => {
                        return Err(template_error(format!(
                            "%{conversion} needs a number, not a value of kind {kind}"
                        )));
                    }
                };
                let signs: String = flags.chars().filter(|flag| *flag != '-').collect();
                let zeros = signs.contains('0') && !left;
                let signs = signs.replace('0', "");
                let precision = match precision {
                    Some(_) if value.is_integer() && !"eEfFgG".contains(conversion) => {
                        return Err(template_error(format!(
                            "{template:?} sets a precision for an integer"
                        )));
                    }
                    Some(precision) => format!(".{}", check_precision(precision)?),
                    None => String::new(),
                };
                let width = if zeros && width > 0 { format!("0{width}") } else { String::new() };
                let conversion = if decimal { 'd' } else { conversion };
                format(
                    FormatStyle::Printf,
                    &format!("%{signs}{width}{precision}{conversion}"),
                    &[value],
                )?
            }
            other => {
                return Err(template_error(format!("{template:?} has the unknown field %{other}")));
            }
        };
        pad(&mut out, &body, ' ', width, if left { '<' } else { '>' });
        spend_bytes(state, width.max(body.len()))?;
    }
    out.push_str(rest);
    if !mapping && !named && values.next().is_some() {
        return Err(template_error(format!("{template:?} does not print all of its values")));
    }
    spend_bytes(state, out.len())?;
    Ok(out)
}

/// Truncates a float to an integer. Returns an error if the integer does not fit into 128 bits.
pub(super) fn to_integer(value: f64) -> Result<i128, Error> {
    let range = -(2f64.powi(127))..2f64.powi(127);
    if range.contains(&value) {
        Ok(value.trunc() as i128)
    } else {
        Err(template_error(format!("{value} is not an integer of 128 bits")))
    }
}

/// Checks the precision with which a float is printed. Returns an error if it exceeds [`DIGITS`].
fn check_precision(precision: usize) -> Result<usize, Error> {
    if precision > DIGITS {
        return Err(template_error(format!(
            "a precision is {precision}; at most {DIGITS} digits are printed"
        )));
    }
    Ok(precision)
}

/// Parses a width or precision of a `%` field: digits, or `*` for the next value.
fn parse_count(
    rest: &mut &str,
    next: &mut impl FnMut() -> Result<Value, Error>,
) -> Result<Option<i64>, Error> {
    if let Some(after) = rest.strip_prefix('*') {
        *rest = after;
        let value = next()?;
        return integer(&value).map(Some).ok_or_else(|| template_error("* requires an integer"));
    }
    let after = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &rest[..rest.len() - after.len()];
    *rest = after;
    match digits {
        "" => Ok(None),
        digits => Ok(Some(digits.parse().unwrap_or(i64::MAX))),
    }
}

/// Charges the width of a field to the rendering's budget, and returns the width.
fn spend_width(state: &mut State, width: i64) -> Result<usize, Error> {
    let width = usize::try_from(width).unwrap_or(TEXT + 1);
    spend_bytes(state, width)?;
    Ok(width)
}

/// Appends `body` to `out`, padded to `width` characters.
fn pad(out: &mut String, body: &str, fill: char, width: usize, align: char) {
    let missing = width.saturating_sub(body.chars().count());
    let before = match align {
        '>' => missing,
        '^' => missing / 2,
        _ => 0,
    };
    out.extend(std::iter::repeat_n(fill, before));
    out.push_str(body);
    out.extend(std::iter::repeat_n(fill, missing - before));
}

fn escape_non_ascii(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii() { c.to_string() } else { escape_char(c) }).collect()
}

fn escape_char(c: char) -> String {
    match u32::from(c) {
        code @ 0..=0xFF => format!("\\x{code:02x}"),
        code @ 0x100..=0xFFFF => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    }
}

/// Implements Python's string formatting `template.format(*arguments)`.
pub(crate) fn str_format(
    state: &mut State,
    template: &str,
    arguments: &[Value],
) -> Result<String, Error> {
    let (positional, named) = split_arguments(arguments)?;
    let mut fields = ReplacementFields { positional, named, automatic: 0, numbered: false };
    let mut out = String::new();
    fields.format(state, template, &mut out, 0)?;
    spend_bytes(state, out.len())?;
    Ok(out)
}

struct ReplacementFields<'a> {
    positional: &'a [Value],
    named: Kwargs,
    /// Number of fields without a name or number that were formatted so far.
    automatic: usize,
    /// Whether any field of the template has a number.
    numbered: bool,
}

impl ReplacementFields<'_> {
    fn format(
        &mut self,
        state: &mut State,
        template: &str,
        out: &mut String,
        depth: usize,
    ) -> Result<(), Error> {
        let mut rest = template;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let (brace, after) = rest[at..].split_at(1);
            rest = after;
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(template_error(format!("{template:?} has a single }}")));
            }
            // A nested field in a format specification has its own braces.
            let mut open = 1;
            let end = rest.char_indices().find(|(_, c)| {
                match c {
                    '{' => open += 1,
                    '}' => open -= 1,
                    _ => {}
                }
                open == 0
            });
            let (end, _) =
                end.ok_or_else(|| template_error(format!("{template:?} has a {{ without a }}")))?;
            let (field, spec) = rest[..end].split_once(':').unwrap_or((&rest[..end], ""));
            rest = &rest[end + 1..];
            let (name, conversion) = field.split_once('!').unwrap_or((field, ""));
            let value = self.field_value(name)?;
            let mut inner = String::new();
            if depth < 2 {
                self.format(state, spec, &mut inner, depth + 1)?;
            }
            let value = match conversion {
                "" => value,
                "s" => Value::from(python_str(state, &value)?),
                "r" => Value::from(python_repr(state, &value)?),
                "a" => Value::from(escape_non_ascii(&python_repr(state, &value)?)),
                other => {
                    return Err(template_error(format!(
                        "{template:?} has the unknown conversion !{other}"
                    )));
                }
            };
            out.push_str(&format_value(state, &value, &inner)?);
        }
        out.push_str(rest);
        Ok(())
    }

    fn field_value(&mut self, name: &str) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let missing = || template_error(format!("format: there is no value for {{{name}}}"));
        let by_number = first.parse::<usize>();
        self.automatic += usize::from(first.is_empty());
        self.numbered |= by_number.is_ok();
        if self.numbered && self.automatic > 0 {
            return Err(template_error("format: some fields have numbers and others have none"));
        }
        let mut value = if first.is_empty() {
            self.positional.get(self.automatic - 1).cloned().ok_or_else(missing)?
        } else if let Ok(index) = by_number {
            self.positional.get(index).cloned().ok_or_else(missing)?
        } else {
            self.named.peek::<Value>(first).map_err(|_| missing())?
        };
        while !path.is_empty() {
            let (key, rest) = match path.strip_prefix('[') {
                Some(inner) => inner.split_once(']').ok_or_else(missing)?,
                None => {
                    let inner = path.strip_prefix('.').ok_or_else(missing)?;
                    inner.split_at(inner.find(['.', '[']).unwrap_or(inner.len()))
                }
            };
            let key = key.parse::<i64>().map_or_else(|_| Value::from(key), Value::from);
            value = value.get_item(&key)?;
            if value.is_undefined() {
                return Err(missing());
            }
            path = rest;
        }
        Ok(value)
    }
}

/// Implements Python's function `format(value, spec)`.
fn format_value(state: &mut State, value: &Value, spec: &str) -> Result<String, Error> {
    if spec.is_empty() {
        return python_str(state, value);
    }
    let value = match value.kind() {
        ValueKind::Number | ValueKind::Bool | ValueKind::String => value.clone(),
        kind => {
            return Err(template_error(format!(
                "format: {spec:?} does not apply to a value of kind {kind}"
            )));
        }
    };
    let layout = FormatSpec::parse(spec);
    spend_bytes(state, layout.width)?;
    if let Some((_, precision)) = layout.body.split_once('.') {
        let end = precision.find(|c: char| !c.is_ascii_digit()).unwrap_or(precision.len());
        if value.as_str().is_none() {
            check_precision(precision[..end].parse().unwrap_or(usize::MAX))?;
        }
    }
    if let (Some(body), Ok(number)) = (layout.body.strip_suffix('%'), f64::try_from(value.clone()))
    {
        let body = format(
            FormatStyle::StrFormat,
            &format!("{{:{body}f}}"),
            &[Value::from(number * 100.0)],
        )?;
        return Ok(layout.apply_layout(&(body + "%")));
    }
    if spec.contains('=') && layout.align == Some('=') {
        let body = format(FormatStyle::StrFormat, &format!("{{:{}}}", layout.body), &[value])?;
        return Ok(layout.apply_layout(&body));
    }
    format(FormatStyle::StrFormat, &format!("{{:{spec}}}"), &[value])
}

/// A parsed format specification: the padding, and the remaining specification.
struct FormatSpec {
    fill: char,
    align: Option<char>,
    width: usize,
    /// Sign, grouping, precision and type of the format specification.
    body: String,
}

impl FormatSpec {
    fn parse(spec: &str) -> Self {
        let mut chars = spec.chars();
        let first = chars.next();
        let second = chars.next();
        let (fill, align) = match (first, second.filter(is_alignment), first.filter(is_alignment)) {
            (Some(fill), Some(align), _) => (Some(fill), Some(align)),
            (_, _, align) => (None, align),
        };
        let prefix_len = fill.map_or(0, char::len_utf8) + align.map_or(0, char::len_utf8);
        let rest = &spec[prefix_len..];
        let signs = rest.len() - rest.trim_start_matches(['+', '-', ' ', '#']).len();
        let (signs, rest) = rest.split_at(signs);
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (width, rest) = rest.split_at(digits);
        let zeros = width.starts_with('0') && align.is_none();
        FormatSpec {
            fill: fill.unwrap_or(if width.starts_with('0') { '0' } else { ' ' }),
            align: if zeros { Some('=') } else { align },
            width: if width.is_empty() { 0 } else { width.parse().unwrap_or(TEXT + 1) },
            body: format!("{signs}{rest}"),
        }
    }

    /// Pads a formatted number to the width of its field. The alignment `=` inserts the padding
    /// after the sign.
    fn apply_layout(&self, body: &str) -> String {
        let mut out = String::new();
        match self.align {
            Some('=') => {
                let (sign, digits) = body.split_at(usize::from(body.starts_with(['+', '-', ' '])));
                out.push_str(sign);
                pad(&mut out, digits, self.fill, self.width.saturating_sub(sign.len()), '>');
            }
            align => pad(&mut out, body, self.fill, self.width, align.unwrap_or('>')),
        }
        out
    }
}

fn is_alignment(c: &char) -> bool {
    "<>=^".contains(*c)
}

/// Implements Python's `str.center`, `str.ljust` and `str.rjust`.
pub(crate) fn justify(
    state: &mut State,
    text: &str,
    width: i64,
    fill: char,
    align: char,
) -> Result<String, Error> {
    let width = usize::try_from(width.max(0)).unwrap_or(TEXT + 1);
    spend_bytes(state, width.saturating_mul(fill.len_utf8()).saturating_add(text.len()))?;
    let mut out = String::new();
    if align == '^' {
        // If the width is odd, Python puts the extra character before the text.
        let missing = width.saturating_sub(text.chars().count());
        let before = missing / 2 + (missing & width & 1);
        out.extend(std::iter::repeat_n(fill, before));
        out.push_str(text);
        out.extend(std::iter::repeat_n(fill, missing - before));
    } else {
        pad(&mut out, text, fill, width, align);
    }
    Ok(out)
}

/// Implements Python's `str.isprintable`.
pub(crate) fn all_printable(text: &str) -> bool {
    text.chars().all(is_printable)
}
