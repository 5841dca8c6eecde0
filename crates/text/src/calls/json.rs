//! Incremental JSON scanner: finds where a value ends, or where a text stops being valid.
//!
//! # Guarantees
//! - **Linear cost**: each byte is examined once, however the text is split.
//! - **No false errors**: a value that `serde_json` accepts is never reported as broken. Numbers
//!   and escapes are checked only roughly here; the caller that parses the value checks them.

/// Maximum nesting depth of arrays and objects, equal to that of `serde_json`.
const MAX_DEPTH: usize = 127;

/// Progress of scanning a JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JsonProgress {
    /// More text is needed to complete the JSON value.
    More,
    /// The JSON value is complete. It ended before this byte offset.
    Done(usize),
    /// The text is not JSON. The byte at this offset is invalid.
    Broken(usize),
}

/// Element of JSON that the scanner expects next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExpectedToken {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Text { key: bool },
    Escaped { key: bool },
    Word(&'static [u8]),
    Number,
}

/// Incremental scanner that finds the end of a JSON array, object or string.
#[derive(Debug, Clone)]
pub(crate) struct JsonScanner {
    /// Brackets that are still open; `true` for objects, `false` for arrays.
    open: Vec<bool>,
    expect: ExpectedToken,
    /// Number of bytes that were scanned.
    at: usize,
    progress: JsonProgress,
}

impl JsonScanner {
    /// Creates a scanner for a JSON value that starts with the first non-blank byte.
    pub(crate) fn new() -> Self {
        JsonScanner {
            open: Vec::new(),
            expect: ExpectedToken::Value,
            at: 0,
            progress: JsonProgress::More,
        }
    }

    /// Continues the scan with `text`, which is the JSON value from its start as far as it is
    /// known.
    pub(crate) fn follow(&mut self, text: &str) -> JsonProgress {
        let bytes = text.as_bytes();
        while self.progress == JsonProgress::More && self.at < bytes.len() {
            let byte = bytes[self.at];
            match self.advance_byte(byte) {
                Some(true) if self.open.is_empty() && self.expect == ExpectedToken::CommaOrEnd => {
                    self.progress = JsonProgress::Done(self.at + 1);
                }
                Some(true) => {}
                // The byte ends a number and belongs to what follows.
                Some(false) => continue,
                None => self.progress = JsonProgress::Broken(self.at),
            }
            self.at += 1;
        }
        self.progress
    }

    /// Scans a byte of JSON. Returns whether the byte was consumed, or `None` if the byte is
    /// invalid at this position.
    fn advance_byte(&mut self, byte: u8) -> Option<bool> {
        use ExpectedToken::*;
        let blank = matches!(byte, b' ' | b'\n' | b'\r' | b'\t');
        self.expect = match (self.expect, byte) {
            (Text { key: true }, b'"') => Colon,
            (Text { key: false }, b'"') => CommaOrEnd,
            (Text { key }, b'\\') => Escaped { key },
            (Text { .. }, 0..b' ') => return None,
            (text @ Text { .. }, _) => text,
            (Escaped { key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' | b'u') => {
                Text { key }
            }
            (Escaped { .. }, _) => return None,
            (Word(rest), _) => match rest.split_first() {
                Some((first, [])) if *first == byte => CommaOrEnd,
                Some((first, rest)) if *first == byte => Word(rest),
                _ => return None,
            },
            (Number, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-') => Number,
            (Number, _) => {
                self.expect = CommaOrEnd;
                return Some(false);
            }
            (same, _) if blank => same,
            (Value | ValueOrEnd, b'{') => self.open_container(true)?,
            (Value | ValueOrEnd, b'[') => self.open_container(false)?,
            (Value | ValueOrEnd, b'"') => Text { key: false },
            // A call is neither a number nor a literal, so these are accepted only within an array
            // or object.
            (Value | ValueOrEnd, _) if self.open.is_empty() => return None,
            (Value | ValueOrEnd, b't') => Word(b"rue"),
            (Value | ValueOrEnd, b'f') => Word(b"alse"),
            (Value | ValueOrEnd, b'n') => Word(b"ull"),
            (Value | ValueOrEnd, b'-' | b'0'..=b'9') => Number,
            (ValueOrEnd | CommaOrEnd, b']') if self.open.last() == Some(&false) => {
                self.close_container()
            }
            (KeyOrEnd | CommaOrEnd, b'}') if self.open.last() == Some(&true) => {
                self.close_container()
            }
            (Key | KeyOrEnd, b'"') => Text { key: true },
            (Colon, b':') => Value,
            (CommaOrEnd, b',') => {
                if *self.open.last()? {
                    Key
                } else {
                    Value
                }
            }
            _ => return None,
        };
        Some(true)
    }

    fn open_container(&mut self, object: bool) -> Option<ExpectedToken> {
        self.open.push(object);
        let expect = if object { ExpectedToken::KeyOrEnd } else { ExpectedToken::ValueOrEnd };
        (self.open.len() <= MAX_DEPTH).then_some(expect)
    }

    fn close_container(&mut self) -> ExpectedToken {
        self.open.pop();
        ExpectedToken::CommaOrEnd
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn follow(text: &str) -> JsonProgress {
        JsonScanner::new().follow(text)
    }

    #[test]
    fn json_value_ends_at_last_bracket() {
        for text in
            [r#"{"a": [1, -2.5e3, true, null, "}]\"\\"], "b": {}}"#, "[]", r#""</tool_call>""#]
        {
            assert_eq!(
                follow(&format!(" {text} }}")),
                JsonProgress::Done(text.len() + 1),
                "{text}"
            );
            for end in 0..text.len() {
                assert_eq!(follow(&text[..end]), JsonProgress::More, "{}", &text[..end]);
            }
        }
    }

    #[test]
    fn json_scanner_reports_first_invalid_byte() {
        for (text, at) in [
            ("oops", 0),
            ("42", 0),
            ("{oops", 1),
            ("{'a'", 1),
            (r#"{"a" 1"#, 5),
            (r#"{"a": tru}"#, 9),
            ("{\"a\": \"\n", 7),
            (r#"{"a": "\x"#, 8),
            ("[1 2", 3),
            ("[1,]", 3),
            (r#"{"a": 1,}"#, 8),
            ("{]", 1),
        ] {
            assert_eq!(follow(text), JsonProgress::Broken(at), "{text}");
        }
        assert_eq!(follow(&"[".repeat(MAX_DEPTH)), JsonProgress::More);
        assert_eq!(follow(&"[".repeat(MAX_DEPTH + 1)), JsonProgress::Broken(MAX_DEPTH));
    }

    proptest! {
        #[test]
        fn json_scanner_agrees_with_serde_however_split(
            text in "[\\[{ ]{0,3}(\"[a-z\\\\\"]{0,4}\"|[:,\\[\\]{} ]|1|-1[.]5e3|true|null){0,12}",
            end in 0usize..40,
        ) {
            let whole = follow(&text);
            let mut values = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
            if let Some(Ok(Value::Object(_) | Value::Array(_) | Value::String(_))) = values.next() {
                prop_assert_eq!(whole, JsonProgress::Done(values.byte_offset()));
            }
            let mut json = JsonScanner::new();
            json.follow(text.get(..end).unwrap_or_default());
            prop_assert_eq!(json.follow(&text), whole);
        }
    }
}
