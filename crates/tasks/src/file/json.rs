//! Reads JSON rows: an object on each line, objects over several lines, or one array of objects.
//!
//! Numbers keep all their digits; only the notation of exponents is normalized (`1E5` becomes
//! `1e+5`). In addition to JSON, lone surrogates (`\ud83d`) are accepted, which Python writes and
//! JSON forbids. They become U+FFFD and are counted.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Deserializer, Value};

use crate::RowLocation;

/// A JSON error in a row, with its line and column.
#[derive(Debug, PartialEq)]
pub(super) struct JsonRowError {
    pub line: usize,
    pub column: usize,
    /// Message of the JSON parser.
    pub why: String,
}

/// A parsed JSON value, together with the original notation of its numbers if the value does not
/// preserve it.
#[derive(Debug, PartialEq)]
pub(super) struct ParsedValue {
    pub value: Value,
    /// The value with strings in place of numbers whose exponents the parsed value writes
    /// differently. `None` if there are no such numbers.
    pub spelled: Option<Value>,
}

impl ParsedValue {
    /// Splits a JSON array into its items.
    fn into_items(self) -> Vec<ParsedValue> {
        let mut spelled = self.spelled.map(to_list).into_iter().flatten();
        to_list(self.value)
            .into_iter()
            .map(|value| ParsedValue { value, spelled: spelled.next() })
            .collect()
    }
}

fn to_list(value: Value) -> Vec<Value> {
    if let Value::Array(items) = value { items } else { Vec::new() }
}

/// Parses the rows of a JSON or JSON lines text, and passes them to `each` one by one. Returns the
/// number of lone surrogates that were replaced.
///
/// # Errors
/// Returns an error if a row is not JSON, or if `each` fails.
pub(super) fn parse_rows<E>(
    text: &str,
    wrong: &dyn Fn(JsonRowError) -> E,
    each: &mut dyn FnMut(RowLocation, ParsedValue) -> Result<(), E>,
) -> Result<usize, E> {
    let start = text.len() - text.trim_start().len();
    if text[start..].starts_with('[') {
        let (read, halves) = parse_value(text, 1).map_err(wrong)?;
        for (at, row) in read.into_items().into_iter().enumerate() {
            each(RowLocation::Row(at + 1), row)?;
        }
        return Ok(halves);
    }
    let mut rest = text;
    let mut line = 1;
    let mut halves = 0;
    while !rest.is_empty() {
        // Concatenated files have a byte-order mark each.
        rest = rest.trim_start_matches('\u{feff}');
        let end = rest.find('\n').unwrap_or(rest.len());
        let mut row = &rest[..end];
        if !row.trim().is_empty() {
            let (value, replaced) = match parse_value(row, line) {
                Ok(read) => read,
                // An object may continue on the next lines. If it does not, the error is in its
                // first line.
                Err(first) => match find_first_value(rest).filter(|long| long.len() > end) {
                    Some(long) => {
                        row = long;
                        parse_value(row, line).map_err(wrong)?
                    }
                    None => return Err(wrong(first)),
                },
            };
            halves += replaced;
            each(RowLocation::Line(line), value)?;
        }
        // Skips to the end of the line on which the row ends.
        let next = rest[row.len()..].find('\n').map_or(rest.len(), |end| row.len() + end + 1);
        if !rest[row.len()..next].trim().is_empty() {
            let line = line + row.matches('\n').count();
            let column = 1 + row.rsplit('\n').next().unwrap_or_default().len();
            return Err(wrong(JsonRowError { line, column, why: "trailing characters".into() }));
        }
        line += rest[..next].matches('\n').count();
        rest = &rest[next..];
    }
    Ok(halves)
}

/// Returns the complete JSON value at the start of a text, or `None` if there is no complete value.
fn find_first_value(text: &str) -> Option<&str> {
    let mut values = Deserializer::from_str(text).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(&text[..values.byte_offset()])
}

/// Parses a text as one JSON value. Also returns the number of lone surrogates that were replaced.
/// `line` is the line number at which the text starts.
fn parse_value(text: &str, line: usize) -> Result<(ParsedValue, usize), JsonRowError> {
    // The original text is validated, so that columns in errors are right.
    let checked = serde_json::from_str::<IgnoredAny>(text);
    let (plain, halves) = match checked {
        Ok(_) => replace_surrogates(text),
        Err(error) => return Err(to_row_error(text, line, &error)),
    };
    let value = serde_json::from_str(&plain).map_err(|error| to_row_error(text, line, &error))?;
    serde_json::from_str::<UniqueNames>(&plain)
        .map_err(|error| to_row_error(text, line, &error))?;
    let spelled = quote_exponents(&plain).and_then(|spelled| serde_json::from_str(&spelled).ok());
    Ok((ParsedValue { value, spelled }, halves))
}

/// Parses JSON text within a field by the same rules as rows: lone surrogates are replaced.
///
/// # Errors
/// Returns an error if the text is not JSON.
pub(super) fn parse_lenient(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str::<IgnoredAny>(text)?;
    serde_json::from_str(&replace_surrogates(text).0)
}

/// Counts the escapes of lone surrogates in valid JSON.
pub(super) fn count_surrogates(text: &str) -> usize {
    replace_surrogates(text).1
}

/// Returns a text without leading byte-order marks.
pub(super) fn strip_byte_order_mark(text: &str) -> &str {
    text.trim_start_matches('\u{feff}')
}

/// Validates that no object has a duplicate name, because parsers would silently choose one of the
/// values.
struct UniqueNames;

impl<'de> Deserialize<'de> for UniqueNames {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueNames)
    }
}

impl<'de> Visitor<'de> for UniqueNames {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E: Error>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    // Here, serde_json represents numbers other than 64-bit integers as maps with one field.
    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = fields.next_key::<String>()? {
            if names.contains(&name) {
                return Err(A::Error::custom(format!(
                    "the name {name:?} occurs twice in one object"
                )));
            }
            names.insert(name);
            fields.next_value::<Self>()?;
        }
        Ok(self)
    }
}

fn to_row_error(text: &str, line: usize, error: &serde_json::Error) -> JsonRowError {
    // The parser counts lines within the row.
    let below = error.line().saturating_sub(1);
    let column = error.column();
    let mut why = error.to_string().split(" at line ").next().unwrap_or_default().to_owned();
    let at = text
        .lines()
        .nth(below)
        .and_then(|line| line.get(column.saturating_sub(1)..))
        .unwrap_or_default();
    let number = ["NaN", "Infinity", "-Infinity"]
        .into_iter()
        .find(|number| at.starts_with(number.trim_start_matches('-')));
    if let Some(number) = number {
        why.push_str(&format!(
            " ({number}, which Python writes, is not JSON: write null or a string)"
        ));
    }
    JsonRowError { line: line + below, column, why }
}

/// Replaces lone surrogates in valid JSON. Also returns their number.
fn replace_surrogates(text: &str) -> (Cow<'_, str>, usize) {
    let bytes = text.as_bytes();
    let mut plain = String::new();
    let mut kept = 0;
    let mut halves = 0;
    let mut at = 0;
    // In valid JSON, backslashes occur only within strings.
    while let Some(found) = text[at..].find('\\') {
        at += found;
        match parse_surrogate(bytes, at) {
            Some(0xD800..0xDC00)
                if matches!(parse_surrogate(bytes, at + 6), Some(0xDC00..0xE000)) =>
            {
                at += 12
            }
            Some(_) => {
                plain.push_str(&text[kept..at]);
                plain.push_str("\\ufffd");
                at += 6;
                kept = at;
                halves += 1;
            }
            None => at += 2,
        }
    }
    if kept == 0 {
        return (Cow::Borrowed(text), halves);
    }
    plain.push_str(&text[kept..]);
    (Cow::Owned(plain), halves)
}

/// Converts the numbers in valid JSON to strings if serde_json would write their exponents
/// differently. Returns `None` if there are no such numbers.
fn quote_exponents(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let mut spelled = String::new();
    let mut kept = 0;
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while bytes.get(at).is_some_and(|byte| *byte != b'"') {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let end = at
                    + bytes[at..]
                        .iter()
                        .take_while(|byte| {
                            matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9')
                        })
                        .count();
                let number = &text[at..end];
                let exponent = number.split_once('e').map(|(_, exponent)| exponent);
                let is_changed = exponent.is_some_and(|exponent| !exponent.starts_with(['+', '-']));
                if is_changed || number.contains('E') {
                    spelled.push_str(&text[kept..at]);
                    spelled.push_str(&format!("\"{number}\""));
                    kept = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    (kept > 0).then(|| spelled + &text[kept..])
}

/// Returns the code of the surrogate whose escape starts at the offset `at`, or `None` if no
/// surrogate is escaped there.
fn parse_surrogate(bytes: &[u8], at: usize) -> Option<u32> {
    let digits = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
    let unit = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    (0xD800..0xE000).contains(&unit).then_some(unit)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn format_error(wrong: JsonRowError) -> String {
        format!("{}:{}: {}", wrong.line, wrong.column, wrong.why)
    }

    fn read(text: &str) -> Result<(Vec<(String, Value)>, usize), String> {
        let mut found = Vec::new();
        let halves = parse_rows(text, &format_error, &mut |location, row| {
            found.push((location.to_string(), row.value));
            Ok(())
        })?;
        Ok((found, halves))
    }

    fn values(text: &str) -> Vec<Value> {
        read(text).unwrap().0.into_iter().map(|(_, row)| row).collect()
    }

    #[test]
    fn json_numbers_keep_all_digits() {
        for (number, want) in [
            ("2", "2"),
            ("-7", "-7"),
            ("27.0", "27.0"),
            ("18446744073709551617", "18446744073709551617"),
            ("-9223372036854775809", "-9223372036854775809"),
            ("1.10", "1.10"),
            ("0.1000", "0.1000"),
            ("-0", "-0"),
            ("3.14159265358979323846", "3.14159265358979323846"),
            ("1e-07", "1e-07"),
            ("3.2E-06", "3.2e-06"),
            ("1E5", "1e+5"),
            ("1e400", "1e+400"),
        ] {
            let nested = format!(
                "{{\"a{number}\": [\"{number} \\\" {number}\", {number}, {{\"b\": {number}}}]}}"
            );
            let [row] = &values(&nested)[..] else { panic!("{nested}") };
            let items = &row[format!("a{number}")];
            assert_eq!(items[0], json!(format!("{number} \" {number}")));
            for found in [&items[1], &items[2]["b"]] {
                let Value::Number(found) = found else { panic!("{number} is read as {found}") };
                assert_eq!(found.as_str(), want);
            }
        }
    }

    #[test]
    fn exponents_keep_original_notation() {
        let row =
            r#"{"1e5 \" 1E5": [1E5, 1e5, 1.50e3, 1e+5, 1e-05, 2E-3, 7, "1e5"], "b": {"c": 1e400}}"#;
        let want = json!({"1e5 \" 1E5": ["1E5", "1e5", "1.50e3", 1e5, 1, "2E-3", 7, "1e5"], "b": {"c": "1e400"}});
        let mut found = spelled(row);
        let found = found.pop().flatten().unwrap();
        for at in [0, 1, 2, 5, 6, 7] {
            assert_eq!(found["1e5 \" 1E5"][at], want["1e5 \" 1E5"][at]);
        }
        assert!(found["1e5 \" 1E5"][3].is_number() && found["1e5 \" 1E5"][4].is_number());
        assert_eq!(found["b"], want["b"]);
        assert_eq!(spelled(r#"{"a": [1, 1e-5, "1E5"]}"#), [None]);
        let [first, second] = &spelled(r#"[{"a": 1}, {"a": 1E5}]"#)[..] else { panic!() };
        assert_eq!((first, second), (&Some(json!({"a": 1})), &Some(json!({"a": "1E5"}))));
    }

    fn spelled(text: &str) -> Vec<Option<Value>> {
        let mut found = Vec::new();
        parse_rows(text, &format_error, &mut |_, row| {
            found.push(row.spelled);
            Ok(())
        })
        .unwrap();
        found
    }

    #[test]
    fn concatenated_files_with_byte_order_marks_parse() {
        let found = read("\u{feff}{\"a\": 1}\n\u{feff}{\"a\": 2}\n\u{feff}").unwrap().0;
        let locations: Vec<&str> = found.iter().map(|(location, _)| location.as_str()).collect();
        assert_eq!(locations, ["line 1", "line 2"]);
    }

    #[test]
    fn lone_surrogates_are_replaced_and_counted() {
        let (found, halves) =
            read(r#"{"q": "\ud83d 1 \uDE00 \ud83d\ude00 \\ud83d \ud83d\ud83d\ude00"}"#).unwrap();
        assert_eq!(found[0].1, json!({"q": "\u{fffd} 1 \u{fffd} 😀 \\ud83d \u{fffd}😀"}));
        assert_eq!(halves, 3);
    }

    #[test]
    fn rows_parse_from_lines_and_arrays() {
        assert_eq!(
            located_rows("{\"a\": 1}\r\n\n  {\"a\":2} \n"),
            [located_row("line 1", 1), located_row("line 3", 2)]
        );
        assert_eq!(
            located_rows("{\n  \"a\": 1\n}\n{\n\"a\": 2}\n{\"a\": 3}"),
            [located_row("line 1", 1), located_row("line 4", 2), located_row("line 6", 3)]
        );
        assert_eq!(
            located_rows("\n [{\"a\": 1},\n{\"a\": 2}]\n"),
            [located_row("row 1", 1), located_row("row 2", 2)]
        );
        assert_eq!(located_rows("[]"), []);
        assert_eq!(located_rows(" \n"), []);
    }

    fn located_rows(text: &str) -> Vec<(String, Value)> {
        read(text).unwrap().0
    }

    fn located_row(location: &str, a: u32) -> (String, Value) {
        (location.to_owned(), json!({"a": a}))
    }

    #[test]
    fn json_errors_have_line_and_column() {
        for (text, want) in [
            ("{\"a\": 1}\n{\"a\": \"é\", b: 2}", "2:13: key must be a string"),
            ("{\"a\": 1\n{\"a\": 2}\n", "1:7: EOF while parsing an object"),
            ("{\n\"a\": 1}\n{\n\"a\": 1,}", "3:1: EOF while parsing an object"),
            ("[{\"a\": 1},\n{\"a\": }]", "2:7: expected value"),
            ("[{\"a\": 1},\n{\"a\": 2}", "2:8: EOF while parsing a list"),
            ("[{\"a\": 1}]\n[{\"a\": 2}]", "2:1: trailing characters"),
            ("{\"a\": 1} {\"a\": 2}\n", "1:10: trailing characters"),
            ("{\n\"a\": 1\n} x\n", "3:2: trailing characters"),
            (
                "{\"a\": NaN}",
                "1:7: expected value (NaN, which Python writes, is not JSON: write null or a \
                 string)",
            ),
            ("{\"a\": 01}", "1:8: invalid number"),
            (
                "{\"a\": 1}\n{\"a\": 1, \"b\": 2.5, \"a\": 3}",
                "2:22: the name \"a\" occurs twice in one object",
            ),
            (
                "{\"a\": [{\"b\": null, \"\\u0062\": true}]}",
                "1:27: the name \"b\" occurs twice in one object",
            ),
        ] {
            assert_eq!(read(text).unwrap_err(), want, "{text}");
        }
    }
}
