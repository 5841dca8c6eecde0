//! Prints values like Python's `str` and `repr`.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

use super::limits::{self, DEPTH, TEXT, mapping_pairs, template_error};
use crate::python_json;

/// Returns Python's `str(value)`, and charges its length to the budget of the rendering.
pub(crate) fn python_str(state: &mut State, value: &Value) -> Result<String, Error> {
    let mut printer = ReprPrinter::new(state);
    if let Some(text) = value.as_str() {
        printer.out.push_str(text)
    } else {
        printer.print_value(value, 0)?
    }
    let text = printer.out;
    limits::spend_bytes(state, text.len())?;
    Ok(text)
}

/// Returns Python's `repr(value)`, and charges its length to the budget of the rendering.
pub(crate) fn python_repr(state: &mut State, value: &Value) -> Result<String, Error> {
    let mut printer = ReprPrinter::new(state);
    printer.print_value(value, 0)?;
    let text = printer.out;
    limits::spend_bytes(state, text.len())?;
    Ok(text)
}

struct ReprPrinter {
    out: String,
    guard: Option<char>,
}

impl ReprPrinter {
    fn new(state: &State) -> Self {
        ReprPrinter { out: String::new(), guard: super::guard(state) }
    }

    fn print_value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH || self.out.len() > TEXT {
            return Err(template_error(format!(
                "a printed value is nested deeper than {DEPTH} or longer than {TEXT} bytes"
            )));
        }
        match value.kind() {
            ValueKind::Undefined if depth == 0 => {}
            ValueKind::Undefined => self.out.push_str("Undefined"),
            ValueKind::Number if !value.is_integer() => {
                self.out
                    .push_str(&f64::try_from(value.clone()).map_or(String::new(), format_float));
            }
            ValueKind::String => self.write_quoted(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                self.out.push('{');
                for (index, (key, item)) in mapping_pairs(value).enumerate() {
                    self.write_comma(index);
                    self.print_value(&key, depth + 1)?;
                    self.out.push_str(": ");
                    self.print_value(&item, depth + 1)?;
                }
                self.out.push('}');
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
                self.out.push(open);
                let mut count = 0;
                for (index, item) in value.try_iter()?.enumerate() {
                    self.write_comma(index);
                    self.print_value(&item, depth + 1)?;
                    count += 1;
                }
                if value.is_tuple() && count == 1 {
                    self.out.push(',');
                }
                self.out.push(close);
            }
            _ => write!(self.out, "{value}").unwrap_or_default(),
        }
        Ok(())
    }

    fn write_comma(&mut self, index: usize) {
        if index > 0 {
            self.out.push_str(", ");
        }
    }

    fn write_quoted(&mut self, text: &str) {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                c if c == quote || c == '\\' => self.out.extend(['\\', c]),
                c if Some(c) == self.guard || is_printable(c) => self.out.push(c),
                c => {
                    let code = u32::from(c);
                    let escaped = match code {
                        0..=0xFF => format!("\\x{code:02x}"),
                        0x100..=0xFFFF => format!("\\u{code:04x}"),
                        _ => format!("\\U{code:08x}"),
                    };
                    self.out.push_str(&escaped);
                }
            }
        }
        self.out.push(quote);
    }
}

/// Returns Python's `str(value)` for a float.
pub(crate) fn format_float(value: f64) -> String {
    match value {
        value if value.is_nan() => "nan".into(),
        value if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.into(),
        value => python_json::format_float(value),
    }
}

/// Returns whether Python's `str.isprintable` holds for a character.
pub(crate) fn is_printable(c: char) -> bool {
    // Rust escapes a combining character at the start of a text, but not after a letter. After a
    // letter, Rust and Python follow the same rule.
    c.is_ascii_graphic()
        || c == ' '
        || (!c.is_ascii() && format!("a{c}").escape_debug().count() == 2)
}
