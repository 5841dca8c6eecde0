//! Parses Python literals that models write instead of JSON: `['a', 'b']`, `{'a': True}`, `+5`,
//! `.5`.
//!
//! Accepts what `ast.literal_eval`, `int` and `float` accept and JSON can represent: strings,
//! numbers, lists, tuples, dictionaries with string keys, `True`, `False` and `None`. JSON's
//! `true`, `false` and `null` are also accepted inside them. Anything else, such as a function call
//! or NaN, is not a literal.

use serde_json::{Map, Value};

/// Maximum nesting depth of lists and dictionaries.
const MAX_NESTING: usize = 64;

/// Parses a Python list, tuple or dictionary, or returns `None` if the text is none of these.
pub(crate) fn parse_container(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text.trim_start() };
    let value = parser.rest.starts_with(['[', '{', '(']).then(|| parser.parse_value(0))??;
    parser.rest.trim().is_empty().then_some(value)
}

/// Parses a number in Python's notation: with a sign, with leading zeros, without digits before or
/// after the point, with `_` between digits.
pub(crate) fn parse_number(text: &str) -> Option<Value> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(rest) => (if text.starts_with('-') { "-" } else { "" }, rest),
        None => ("", text),
    };
    let at = digits.find(['e', 'E']).unwrap_or(digits.len());
    let (mantissa, exponent) = digits.split_at(at);
    let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let [integer, fraction] = [strip_digit_separators(integer)?, strip_digit_separators(fraction)?];
    if integer.is_empty() && fraction.is_empty() {
        return None;
    }
    let integer =
        Some(integer.trim_start_matches('0')).filter(|integer| !integer.is_empty()).unwrap_or("0");
    let mut json = format!("{sign}{integer}");
    if mantissa.contains('.') {
        json += &format!(".{}", if fraction.is_empty() { "0" } else { &fraction });
    }
    if let Some(exponent) = exponent.strip_prefix(['e', 'E']) {
        let power = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let power = Some(strip_digit_separators(power)?).filter(|power| !power.is_empty())?;
        json += &format!("e{}{power}", if exponent.starts_with('-') { "-" } else { "" });
    }
    serde_json::from_str(&json).ok()
}

/// Returns digits without the `_` between them, or `None` if the text contains any other character.
fn strip_digit_separators(text: &str) -> Option<String> {
    let is_plain = !text.starts_with('_') && !text.ends_with('_') && !text.contains("__");
    let digits: String = text.chars().filter(|c| *c != '_').collect();
    (is_plain && digits.bytes().all(|byte| byte.is_ascii_digit())).then_some(digits)
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    /// Skips white space and the following `token`. Returns whether `token` follows the white
    /// space.
    fn skip_token(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        self.rest.strip_prefix(token).map(|rest| self.rest = rest).is_some()
    }

    fn parse_value(&mut self, depth: usize) -> Option<Value> {
        self.rest = self.rest.trim_start();
        let depth = Some(depth + 1).filter(|depth| *depth <= MAX_NESTING)?;
        match self.rest.chars().next()? {
            '[' => self.parse_items(depth, "]").map(|(items, _)| items.into()),
            '(' => match self.parse_items(depth, ")")? {
                // Parentheses around one value are not a tuple.
                (mut items, false) if items.len() == 1 => items.pop(),
                (items, _) => Some(items.into()),
            },
            '{' => self.parse_fields(depth).map(Value::Object),
            '"' | '\'' => self.parse_string().map(Value::String),
            'r' | 'u' | 'R' | 'U' if self.rest[1..].starts_with(['"', '\'']) => {
                self.parse_string().map(Value::String)
            }
            _ => self.parse_word(),
        }
    }

    /// Parses the items of a container up to `close`. Also returns whether a comma follows the last
    /// item.
    fn parse_items(&mut self, depth: usize, close: &str) -> Option<(Vec<Value>, bool)> {
        self.rest = &self.rest[1..];
        let mut items = Vec::new();
        let mut comma = true;
        while !self.skip_token(close) {
            if !comma {
                return None;
            }
            items.push(self.parse_value(depth)?);
            comma = self.skip_token(",");
        }
        Some((items, comma))
    }

    fn parse_fields(&mut self, depth: usize) -> Option<Map<String, Value>> {
        self.rest = &self.rest[1..];
        let mut fields = Map::new();
        let mut comma = true;
        while !self.skip_token("}") {
            let Value::String(key) = self.parse_value(depth).filter(|_| comma)? else {
                return None;
            };
            if !self.skip_token(":") {
                return None;
            }
            let value = self.parse_value(depth)?;
            fields.insert(key, value);
            comma = self.skip_token(",");
        }
        Some(fields)
    }

    fn parse_word(&mut self) -> Option<Value> {
        let end = self.rest.find(|c: char| !(c.is_alphanumeric() || "+-._".contains(c)));
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        match word {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(Value::Null),
            word => parse_number(word),
        }
    }

    /// Parses a Python string in single or triple quotation marks.
    fn parse_string(&mut self) -> Option<String> {
        let raw = self.rest.starts_with(['r', 'R']);
        self.rest = self.rest.trim_start_matches(['r', 'u', 'R', 'U']);
        let mark = &self.rest[..1];
        let triple = mark.repeat(3);
        let mark = if self.rest.starts_with(&triple) { triple.as_str() } else { mark };
        let mut rest = &self.rest[mark.len()..];
        let mut text = String::new();
        loop {
            if let Some(after) = rest.strip_prefix(mark) {
                self.rest = after;
                return Some(text);
            }
            let c = rest.chars().next()?;
            rest = &rest[c.len_utf8()..];
            match c {
                '\n' if mark.len() == 1 => return None,
                '\\' if !raw => rest = parse_escape(rest, &mut text)?,
                c => text.push(c),
            }
        }
    }
}

/// Parses a Python escape sequence after its backslash: appends its character to `text`, and
/// returns the remaining text.
fn parse_escape<'a>(rest: &'a str, text: &mut String) -> Option<&'a str> {
    let c = rest.chars().next()?;
    let after = &rest[c.len_utf8()..];
    let length = match c {
        'n' => return push_char(text, '\n', after),
        't' => return push_char(text, '\t', after),
        'r' => return push_char(text, '\r', after),
        'b' => return push_char(text, '\u{8}', after),
        'f' => return push_char(text, '\u{c}', after),
        '\\' | '\'' | '"' | '/' => return push_char(text, c, after),
        '\n' => return Some(after),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        // Python keeps the backslash of an unknown escape.
        _ => {
            text.push('\\');
            return push_char(text, c, after);
        }
    };
    let mut found = parse_hex(after, length)?;
    let mut after = &after[length..];
    // A surrogate pair, as JSON writes characters beyond 16 bits.
    if let (0xD800..0xDC00, Some(low @ 0xDC00..0xE000)) =
        (found, after.strip_prefix("\\u").and_then(|low| parse_hex(low, 4)))
    {
        found = 0x10000 + ((found - 0xD800) << 10) + (low - 0xDC00);
        after = &after[6..];
    }
    push_char(text, char::from_u32(found)?, after)
}

fn parse_hex(text: &str, length: usize) -> Option<u32> {
    u32::from_str_radix(text.get(..length)?, 16).ok()
}

fn push_char<'a>(text: &mut String, c: char, after: &'a str) -> Option<&'a str> {
    text.push(c);
    Some(after)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Parses a JSON number, keeping its exponent.
    fn parse_literal(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn python_containers_parse_like_python() {
        for (text, want) in [
            ("['a', 'b']", json!(["a", "b"])),
            (" [ 'a' , \"b\" , ] ", json!(["a", "b"])),
            ("{'a': True}", json!({ "a": true })),
            (
                "{'a': {'b': [None, False]}, \"c\": -1.5e3,}",
                json!({ "a": { "b": [null, false] }, "c": parse_literal("-1.5e3") }),
            ),
            ("{'a': true, 'b': null}", json!({ "a": true, "b": null })),
            ("(1, 2)", json!([1, 2])),
            ("(1,)", json!([1])),
            ("[(1), ()]", json!([1, []])),
            ("[]", json!([])),
            ("{}", json!({})),
            (
                "['it\\'s', \"a\\tb\", '\\x41\\u00e9\\U0001F600\\ud83d\\ude00', '\\d']",
                json!(["it's", "a\tb", "Aé😀😀", "\\d"]),
            ),
            ("[r'\\d+', u'x', '''a\n'b' ''']", json!(["\\d+", "x", "a\n'b' "])),
            ("[+5, .5, 5., 1_000, 007, 1e3]", json!([5, 0.5, 5.0, 1000, 7, parse_literal("1e3")])),
            ("['é', '日本']", json!(["é", "日本"])),
        ] {
            assert_eq!(parse_container(text), Some(want), "{text}");
        }
    }

    #[test]
    fn python_container_rejects_other_texts() {
        for text in [
            "",
            "a",
            "5",
            "'a'",
            "['a'",
            "['a' 'b' 'c'",
            "[a]",
            "{'a'}",
            "{1: 2}",
            "{'a': }",
            "[1,,2]",
            "[,]",
            "['a\nb']",
            "[1] x",
            "f([1])",
            "[nan]",
            "[1 + 2]",
            "{'a': 1 'b': 2}",
            "['\\ud83d']",
            "['\\ud83d\\ue000']",
            "[r",
            "['\\x4']",
            "[é",
        ] {
            assert_eq!(parse_container(text), None, "{text}");
        }
        assert_eq!(parse_container(&"[".repeat(100_000)), None);
    }

    #[test]
    fn python_numbers_parse_like_python() {
        for (text, want) in [
            ("+5", json!(5)),
            ("-5", json!(-5)),
            (" 007 ", json!(7)),
            (".5", json!(0.5)),
            ("-.5", json!(-0.5)),
            ("5.", json!(5.0)),
            ("1_000", json!(1000)),
            ("+1.5E+3", parse_literal("1.5e+3")),
            ("2e-1", parse_literal("2e-1")),
            ("1e400", parse_literal("1e400")),
        ] {
            assert_eq!(parse_number(text), Some(want), "{text}");
        }
        for text in [
            "", "+", ".", "1,000", "1 000", "NaN", "Infinity", "inf", "0x10", "1__0", "_1", "e5",
            "1e", "--1", "٣",
        ] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }
}
