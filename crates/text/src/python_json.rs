//! Prints JSON like Python's `json.dumps`, which chat templates use and models were trained on.
//!
//! A decimal number for which Python would print another value is printed as written.

use serde_json::Value;

use crate::decimal::exact_float;

/// Style in which JSON is printed. The default equals the style of `apply_chat_template`: one line,
/// ", " and ": " as separators, no escapes beyond ASCII.
#[derive(Debug, Clone, Default)]
pub(crate) struct JsonStyle {
    /// Whether all non-ASCII characters except `guard` are escaped.
    pub ensure_ascii: bool,
    /// Character that is printed unescaped even with `ensure_ascii`. `None` makes no exception.
    pub guard: Option<char>,
    /// Text that indents each nesting level. `None` prints on one line.
    pub indent: Option<String>,
    /// Separators between items, and between a key and its value. `None` selects the separators of
    /// Python's `json.dumps`.
    pub separators: Option<(String, String)>,
    /// Whether keys of objects are sorted by their code points.
    pub sort_keys: bool,
}

/// Prints `value` as JSON on one line, as a model sees it.
pub(crate) fn dumps(value: &Value) -> String {
    JsonStyle::default().dumps(value)
}

impl JsonStyle {
    /// Prints `value` as JSON in this style.
    pub(crate) fn dumps(&self, value: &Value) -> String {
        let mut out = String::new();
        self.write_value(value, 0, &mut out);
        out
    }

    fn write_value(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(true) => out.push_str("true"),
            Value::Bool(false) => out.push_str("false"),
            Value::Number(number) => match exact_float(number) {
                Some(value) => out.push_str(&format_float(value)),
                None => out.push_str(number.as_str()),
            },
            Value::String(text) => self.write_string(text, out),
            Value::Array(items) => {
                self.write_items('[', ']', items.iter(), depth, out, |item, out| {
                    self.write_value(item, depth + 1, out)
                });
            }
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(b.0));
                }
                let colon = self.separators.as_ref().map_or(": ", |(_, colon)| colon);
                self.write_items('{', '}', entries.into_iter(), depth, out, |(key, item), out| {
                    self.write_string(key, out);
                    out.push_str(colon);
                    self.write_value(item, depth + 1, out);
                });
            }
        }
    }

    fn write_items<T>(
        &self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(T, &mut String),
    ) {
        out.push(open);
        let count = items.len();
        let comma = match (&self.separators, &self.indent) {
            (Some((comma, _)), _) => comma,
            (None, Some(_)) => ",",
            (None, None) => ", ",
        };
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent.as_ref().filter(|_| count > 0) {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        for (at, item) in items.enumerate() {
            if at > 0 {
                out.push_str(comma);
            }
            new_line(depth + 1, out);
            write(item, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn write_string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~' && Some(c) != self.guard) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Returns the shortest decimal that reads back as the same float. Uses an exponent where Python's
/// `repr` does: below 1e-4 and from 1e16 on.
pub(crate) fn format_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_output_matches_python_dumps() {
        // Expected strings are those of CPython's `json.dumps(…, ensure_ascii=False)`.
        let value = json!({"a": [1, 2.0, 1e-5, 1e16, 0.1, -0.0], "b": {}, "c": "é\"\\\n\u{7f}\u{1}", "d": null, "e": true});
        let expected = "{\"a\": [1, 2.0, 1e-05, 1e+16, 0.1, -0.0], \"b\": {}, \"c\": \"é\\\"\\\\\\n\u{7f}\\u0001\", \"d\": null, \"e\": true}";
        assert_eq!(dumps(&value), expected);
    }

    #[test]
    fn json_output_supports_indent_escapes_and_separators() {
        let value = json!({"b": [1, []], "a": "é😀"});
        let style = JsonStyle {
            indent: Some("  ".into()),
            sort_keys: true,
            ensure_ascii: true,
            ..JsonStyle::default()
        };
        assert_eq!(
            style.dumps(&value),
            "{\n  \"a\": \"\\u00e9\\ud83d\\ude00\",\n  \"b\": [\n    1,\n    []\n  ]\n}"
        );
        let style =
            JsonStyle { separators: Some((",".into(), ":".into())), ..JsonStyle::default() };
        assert_eq!(style.dumps(&value), "{\"b\":[1,[]],\"a\":\"é😀\"}");
    }
}
