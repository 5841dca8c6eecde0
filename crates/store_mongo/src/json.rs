//! JSON in documents: readable as fields, and exact to the byte.
//!
//! JSON in the field `NAME` is stored as BSON, so that a client can read and query it. If the BSON
//! does not determine the text, the field `NAME_text` contains the text as well. Reasons are white
//! space, the spelling of a number, an escape or a duplicate key.

use levade_store::backend::Failure;
use mongodb::bson::{Bson, Document};
use serde_json::{Map, Number, Value};

use crate::fields;

/// Maximum nesting depth of JSON that is stored as BSON. Servers accept 100 levels in a document.
const MAX_DEPTH: usize = 60;

/// Returns the two document fields that store JSON text: its value, and the exact text if the value
/// does not determine it. Both are null if `json` is `None`.
pub(crate) fn to_fields(name: &str, json: Option<&str>) -> [(String, Bson); 2] {
    let value = json.and_then(|text| to_bson(&serde_json::from_str(text).ok()?, 0));
    let is_exact = value.as_ref().and_then(to_json).is_some_and(|again| Some(&*again) == json);
    let text = if is_exact { None } else { json };
    [(name.to_owned(), value.unwrap_or(Bson::Null)), (exact_text_field(name), text.into())]
}

/// Writes the JSON text `json` to the fields of `document` that belong to the name `name`.
pub(crate) fn write_json(document: &mut Document, name: &str, json: &str) {
    for (field, value) in to_fields(name, Some(json)) {
        // A null value represents the JSON `null`, unless `NAME_text` has a text.
        if value != Bson::Null || field == name {
            document.insert(field, value);
        }
    }
}

/// Returns the exact JSON text that [`write_json`] wrote for the name `name`, or `None` if the
/// field is missing.
///
/// # Errors
/// Returns an error if the field has a type that JSON does not have.
pub(crate) fn read_json(document: &Document, name: &str) -> Result<Option<String>, Failure> {
    if let Some(text) = fields::read_optional_text(document, &exact_text_field(name))? {
        return Ok(Some(text));
    }
    let Some(value) = document.get(name) else { return Ok(None) };
    to_json(value)
        .map(Some)
        .ok_or_else(|| Failure::Corrupt(format!("the field `{name}` is not JSON")))
}

/// Returns the name of the field that contains the exact JSON text of the field `name`.
pub(crate) fn exact_text_field(name: &str) -> String {
    format!("{name}_text")
}

/// Converts a JSON value to BSON. Returns `None` if a key cannot be stored or the nesting is too
/// deep.
fn to_bson(value: &Value, depth: usize) -> Option<Bson> {
    if depth > MAX_DEPTH {
        return None;
    }
    Some(match value {
        Value::Null => Bson::Null,
        Value::Bool(value) => Bson::Boolean(*value),
        Value::Number(number) => match number.as_i64() {
            Some(integer) => i32::try_from(integer).map_or(Bson::Int64(integer), Bson::Int32),
            None => Bson::Double(number.as_f64().filter(|number| number.is_finite())?),
        },
        Value::String(text) => Bson::String(text.clone()),
        Value::Array(values) => Bson::Array(
            values.iter().map(|value| to_bson(value, depth + 1)).collect::<Option<_>>()?,
        ),
        Value::Object(members) => {
            let mut document = Document::new();
            for (key, value) in members {
                // Servers interpret keys that start with a dollar sign.
                if key.starts_with('$') || key.contains('\0') {
                    return None;
                }
                document.insert(key, to_bson(value, depth + 1)?);
            }
            Bson::Document(document)
        }
    })
}

/// Converts a BSON value to JSON text. Returns `None` if the value has a type that JSON does not
/// have.
fn to_json(value: &Bson) -> Option<String> {
    Some(to_value(value)?.to_string())
}

fn to_value(value: &Bson) -> Option<Value> {
    Some(match value {
        Bson::Null => Value::Null,
        Bson::Boolean(value) => Value::Bool(*value),
        Bson::Int32(number) => Value::Number((*number).into()),
        Bson::Int64(number) => Value::Number((*number).into()),
        Bson::Double(number) => Value::Number(Number::from_f64(*number)?),
        Bson::String(text) => Value::String(text.clone()),
        Bson::Array(values) => Value::Array(values.iter().map(to_value).collect::<Option<_>>()?),
        Bson::Document(document) => {
            let mut members = Map::new();
            for (key, value) in document {
                members.insert(key.clone(), to_value(value)?);
            }
            Value::Object(members)
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Stores text in a document and reads it again.
    fn round_trip(json: &str) -> (Document, String) {
        let mut document = Document::new();
        write_json(&mut document, "x", json);
        let read = read_json(&document, "x").unwrap().unwrap();
        (document, read)
    }

    #[test]
    fn plain_json_is_stored_without_its_text() {
        for json in [
            r#"{"question":"2+2","answer":4,"weights":[0.1,-1.5,1e-7],"none":null,"ok":true}"#,
            r#"{"gen_ai.request.model":"m","big":9007199254740993}"#,
            "null",
            "\"text\"",
        ] {
            let (document, read) = round_trip(json);
            assert_eq!(read, json);
            assert!(!document.contains_key("x_text"), "{document}");
        }
    }

    #[test]
    fn json_that_bson_would_change_is_stored_with_its_text() {
        for json in [
            r#"{"b": 1.0, "a": 12345678901234567890123, "é": "\u00e9", "n": [null, -0.0, 1e400]}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"$where":"1"}"#,
            r#"{"a":1.00}"#,
            &format!("{}{}", "[".repeat(90), "]".repeat(90)),
        ] {
            let (document, read) = round_trip(json);
            assert_eq!(read, json);
            assert_eq!(document.get_str("x_text").unwrap(), json);
        }
    }

    #[test]
    fn missing_json_field_reads_as_none() {
        assert_eq!(read_json(&Document::new(), "x").unwrap(), None);
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((".{0,3}", inner), 0..6)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn stored_json_round_trips_byte_for_byte(value in any_json(), is_pretty in any::<bool>()) {
            let json = if is_pretty { format!("{value:#}") } else { value.to_string() };
            // BSON is what travels: the document is encoded and decoded.
            let (document, read) = round_trip(&json);
            prop_assert_eq!(&read, &json);
            let bytes = mongodb::bson::serialize_to_vec(&document).unwrap();
            let decoded: Document = mongodb::bson::deserialize_from_slice(&bytes).unwrap();
            prop_assert_eq!(read_json(&decoded, "x").unwrap().unwrap(), json);
        }
    }
}
