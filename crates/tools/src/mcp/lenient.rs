//! A lenient JSON parser for the deviations that servers print.
//!
//! Python's `json.dumps` writes `NaN`, `Infinity` and lone surrogates. A server may also print
//! bytes that are not UTF-8, or control characters within a string. The parser accepts such
//! messages: a lone surrogate or an invalid byte becomes U+FFFD, a number that JSON does not have
//! becomes `null`, and a control character is preserved. All other invalid JSON is an error.

use std::borrow::Cow;

use serde_json::Value;

/// Names of numbers that Python writes but JSON does not have.
const NO_NUMBERS: [&str; 3] = ["NaN", "Infinity", "-Infinity"];

/// Parses a JSON message leniently: repairs common deviations from JSON if the text is invalid.
///
/// # Errors
/// Returns the parser's message, with the column, if the text is invalid even after the repairs.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, String> {
    let text = String::from_utf8_lossy(bytes);
    let text = trim_whitespace(&text);
    let strict = match serde_json::from_str(text) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    match repair(text) {
        Cow::Borrowed(_) => Err(strict),
        Cow::Owned(text) => serde_json::from_str(&text),
    }
    .map_err(|error| error.to_string().replace("at line 1 column", "at column"))
}

/// Trims whitespace, control characters and byte-order marks, which terminals and record separators
/// add.
pub(super) fn trim_whitespace(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || c.is_control() || c == '\u{feff}')
}

/// Parses concatenated JSON objects without line breaks between them. Returns `None` if the text
/// contains anything else.
pub(super) fn parse_concatenated(bytes: &[u8]) -> Option<Vec<Value>> {
    let values = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    values
        .collect::<Result<Vec<Value>, _>>()
        .ok()
        .filter(|values| values.iter().all(Value::is_object))
}

/// Replaces the accepted deviations from JSON by valid JSON. Returns the text unchanged if it has
/// none.
fn repair(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let mut repaired = String::new();
    let mut kept = 0;
    let mut at = 0;
    let mut replace = |range: std::ops::Range<usize>, by: &str| {
        repaired.push_str(&text[kept..range.start]);
        repaired.push_str(by);
        kept = range.end;
    };
    let mut is_string = false;
    while at < bytes.len() {
        let rest = &text.as_bytes()[at..];
        match bytes[at] {
            b'"' => (is_string, at) = (!is_string, at + 1),
            b'\\' if is_string => {
                match (parse_surrogate(rest), parse_surrogate(rest.get(6..).unwrap_or_default())) {
                    (Some(0xD800..0xDC00), Some(0xDC00..0xE000)) => at += 12,
                    (Some(_), _) => {
                        replace(at..at + 6, "\\ufffd");
                        at += 6;
                    }
                    (None, _) => at += 2,
                }
            }
            control @ 0..0x20 if is_string => {
                replace(at..at + 1, &format!("\\u{control:04x}"));
                at += 1;
            }
            b'N' | b'I' | b'-' if !is_string => {
                match NO_NUMBERS.into_iter().find(|word| rest.starts_with(word.as_bytes())) {
                    Some(word) => {
                        replace(at..at + word.len(), "null");
                        at += word.len();
                    }
                    None => at += 1,
                }
            }
            _ => at += 1,
        }
    }
    if kept == 0 {
        return Cow::Borrowed(text);
    }
    repaired.push_str(&text[kept..]);
    Cow::Owned(repaired)
}

/// Returns the surrogate code unit that a `\u` escape at the start of `bytes` encodes, or `None` if
/// there is no such escape.
fn parse_surrogate(bytes: &[u8]) -> Option<u32> {
    let digits = bytes.get(..6)?.strip_prefix(b"\\u")?;
    let unit = u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    (0xD800..0xE000).contains(&unit).then_some(unit)
}

/// Returns the value of the key `id` in a message that is invalid JSON. The key must be in the
/// outermost object and precede the syntax error.
pub(super) fn find_outer_id(bytes: &[u8]) -> Option<Value> {
    let mut depth = 0_usize;
    let mut at = 0;
    let mut key = None;
    while at < bytes.len() {
        match bytes[at] {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b'"' => {
                let end = find_string_end(bytes, at)?;
                if key == Some(&b"id"[..]) && depth == 1 {
                    return serde_json::from_slice(&bytes[at..=end]).ok();
                }
                key = Some(&bytes[at + 1..end]);
                at = end + 1;
                continue;
            }
            b',' => key = None,
            b'-' | b'0'..=b'9' if key == Some(&b"id"[..]) && depth == 1 => {
                let digits = bytes[at..]
                    .iter()
                    .take_while(|byte| matches!(byte, b'-' | b'0'..=b'9'))
                    .count();
                return serde_json::from_slice(&bytes[at..at + digits]).ok();
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Returns the index of the closing quote of the string whose opening quote is at `start`.
fn find_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parse_repairs_python_numbers_surrogates_and_bytes() {
        for (text, want) in [
            (
                &br#"{"a":NaN,"b":[Infinity,-Infinity,-1]}"#[..],
                json!({ "a": null, "b": [null, null, -1] }),
            ),
            (br#"{"a":"NaN, -Infinity"}"#, json!({ "a": "NaN, -Infinity" })),
            (
                br#"["\ud83d half","\udE00","\ud83d\ude00","\\ud83d"]"#,
                json!(["\u{fffd} half", "\u{fffd}", "😀", "\\ud83d"]),
            ),
            (br#"["\ud83d\ud83d\ude00 \ud83dA"]"#, json!(["\u{fffd}😀 \u{fffd}A"])),
            (b"[\"caf\xe9\"]", json!(["caf\u{fffd}"])),
            (b"[\"a\tb\x01\"]", json!(["a\tb\u{1}"])),
            (b"\xef\xbb\xbf {\"a\": 1}\r\n", json!({ "a": 1 })),
            (b"\x1e{\"a\": 1}\0", json!({ "a": 1 })),
            (br#"["a \" NaN \\",NaN]"#, json!(["a \" NaN \\", null])),
        ] {
            assert_eq!(parse(text).unwrap(), want, "{}", String::from_utf8_lossy(text));
        }
    }

    #[test]
    fn parse_rejects_invalid_json_with_column() {
        for (text, why) in [
            (&b"{\"a\": }"[..], "expected value at column 7"),
            (b"{\"a\": Nope}", "at column 7"),
            (b"{\"a\": [1, 2", "EOF while parsing a list at column 11"),
            (b"", "EOF while parsing a value at column 0"),
            (b"{'a': 1}", "key must be a string at column 2"),
        ] {
            let found = parse(text).unwrap_err();
            assert!(found.contains(why), "{found}");
        }
        let deep = [b"[".repeat(3000), b"]".repeat(3000)].concat();
        assert!(parse(&deep).unwrap_err().starts_with("recursion limit exceeded"));
    }

    #[test]
    fn find_outer_id_ignores_nested_ids() {
        for (text, want) in [
            (r#"{"jsonrpc":"2.0","id":7,"result":{"id":8,"#, Some(json!(7))),
            (r#"{"result":{"id":8,"x":["id",9]},"id": "12" ,"#, Some(json!("12"))),
            (r#"{"result":{"id":8},"a":"\"id\":5,","id":-3}"#, Some(json!(-3))),
            (r#"{"id":null,"error":{"id":1}"#, None),
            (r#"{"result":{"id":8,"#, None),
            (r#"[{"id":8}"#, None),
            ("no JSON", None),
            ("}}}", None),
        ] {
            assert_eq!(find_outer_id(text.as_bytes()), want, "{text}");
        }
    }
}
