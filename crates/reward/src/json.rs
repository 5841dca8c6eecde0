//! Parses JSON with all digits of its numbers, and without mistaking an object for a number.
//!
//! With its feature `arbitrary_precision`, `serde_json` represents a number internally as an object
//! with a private key. It therefore parses an object that has only this key, such as
//! `{"$serde_json::private::Number": "5"}`, as a number. Text from a model or a data set is parsed
//! with this module instead, which distinguishes the two.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses a text that is one JSON value.
///
/// # Errors
/// Returns an error if the text is not JSON, or if more than 127 arrays and objects are nested.
pub(crate) fn parse(text: &str) -> serde_json::Result<Value> {
    let mut source = serde_json::Deserializer::from_str(text);
    let value = ExactValue.deserialize(&mut source)?;
    source.end()?;
    Ok(value)
}

/// Deserializer of a JSON value that keeps all digits of numbers, and never mistakes an object for
/// a number.
struct ExactValue;

impl<'de> DeserializeSeed<'de> for ExactValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<Value, D::Error> {
        source.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ExactValue {
    type Value = Value;

    fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(ExactValue)? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key_seed(KeySeed)? {
            match key {
                ObjectKey::Field(name) => {
                    drop(fields.insert(name, entries.next_value_seed(ExactValue)?))
                }
                ObjectKey::Number => {
                    let digits: String = entries.next_value()?;
                    return digits.parse::<Number>().map(Value::Number).map_err(de::Error::custom);
                }
            }
        }
        Ok(Value::Object(fields))
    }
}

/// Key of a JSON object, or the private key under which `serde_json` passes a number. Both arrive
/// in `visit_map`.
enum ObjectKey {
    /// A key of a JSON object in the text.
    Field(String),
    /// The private key under which `serde_json` passes a number.
    Number,
}

/// Distinguishes keys of JSON objects from `serde_json`'s private key for numbers. When an option
/// is requested, `serde_json` passes a key of an object to `visit_some`, and its private key always
/// to `visit_str`.
struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = ObjectKey;

    fn deserialize<D: Deserializer<'de>>(self, source: D) -> Result<ObjectKey, D::Error> {
        source.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = ObjectKey;

    fn expecting(&self, to: &mut fmt::Formatter) -> fmt::Result {
        to.write_str("a key")
    }

    fn visit_some<D: Deserializer<'de>>(self, source: D) -> Result<ObjectKey, D::Error> {
        de::Deserialize::deserialize(source).map(ObjectKey::Field)
    }

    fn visit_str<E>(self, _: &str) -> Result<ObjectKey, E> {
        Ok(ObjectKey::Number)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PRIVATE: &str = "$serde_json::private::Number";

    #[test]
    fn json_parser_keeps_objects_with_private_key() {
        for inner in ["\"5\"", "5", "\"x\"", "null", "{}", "\"5\", \"b\": 1"] {
            let text =
                format!("[{{\"{PRIVATE}\": {inner}}}, {{\"a\": {{\"{PRIVATE}\": {inner}}}}}]");
            let value = parse(&text).unwrap();
            assert!(value[0].is_object() && value[1]["a"].is_object(), "{text}");
            assert_eq!(value[0], value[1]["a"]);
            assert!(value[0].get(PRIVATE).is_some());
        }
        // The private key, written with an escape.
        assert!(parse(r#"{"\u0024serde_json::private::Number": "5"}"#).unwrap().is_object());
    }

    #[test]
    fn json_parser_agrees_with_serde_json_on_other_texts() {
        for text in [
            "null",
            "true",
            " [1, 1.10, -0, 1e400, 12345678901234567890123] ",
            r#"{"a": {"b": "c\n"}, "a": 2}"#,
            "",
            "{",
            "[1,]",
            "01",
            "NaN",
            "1 2",
            "{\"a\"}",
            "\"\\ud800\"",
            "{1: 2}",
        ] {
            let own = serde_json::from_str::<Value>(text);
            let own = own.map_err(|error| error.to_string());
            let found = parse(text).map_err(|error| error.to_string());
            assert_eq!(found.is_ok(), own.is_ok(), "{text}");
            if let (Ok(found), Ok(own)) = (found, own) {
                assert_eq!((found.to_string(), &found), (own.to_string(), &own), "{text}");
            }
        }
        assert!(parse(&"[".repeat(100_000)).is_err());
    }

    proptest! {
        #[test]
        fn json_parser_agrees_with_serde_json_on_any_text(text in "[\\[\\]{}:,\"a1.e+ \\-\\\\u0]{0,16}") {
            let own = serde_json::from_str::<Value>(&text).ok();
            prop_assert_eq!(parse(&text).ok(), own);
        }
    }
}
