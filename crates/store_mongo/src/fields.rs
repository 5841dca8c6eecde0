//! Reads fields of documents. Servers can return a number in a different type than it was stored
//! in, so every numeric type is accepted.

use levade_store::backend::Failure;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, Bson, Document};

/// Creates the failure for a document field that is missing or has the wrong type.
fn corrupt_field(name: &str, expected: &str) -> Failure {
    Failure::Corrupt(format!("the field `{name}` is not {expected}"))
}

/// Returns the value of a document field, or `None` if the field is missing or null.
pub(crate) fn find_value<'a>(of: &'a Document, name: &str) -> Option<&'a Bson> {
    of.get(name).filter(|value| !matches!(value, Bson::Null))
}

/// Converts a BSON number to an integer. Returns `None` if the value is not an integer.
pub(crate) fn as_integer(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        Bson::Double(number) if number.fract() == 0.0 => Some(*number as i64),
        Bson::Boolean(is_set) => Some(i64::from(*is_set)),
        _ => None,
    }
}

/// Returns an integer field of a document, or `None` if the field is missing.
pub(crate) fn read_optional_integer<T: TryFrom<i64>>(
    of: &Document,
    name: &str,
) -> Result<Option<T>, Failure> {
    let Some(value) = find_value(of, name) else { return Ok(None) };
    let number = as_integer(value).and_then(|number| T::try_from(number).ok());
    number.map(Some).ok_or_else(|| corrupt_field(name, "an integer in its range"))
}

/// Returns an integer field of a document. A missing field is an error.
pub(crate) fn read_integer<T: TryFrom<i64>>(of: &Document, name: &str) -> Result<T, Failure> {
    read_optional_integer(of, name)?.ok_or_else(|| corrupt_field(name, "an integer"))
}

/// Returns a numeric field of a document, or `None` if the field is missing.
pub(crate) fn read_optional_number(of: &Document, name: &str) -> Result<Option<f64>, Failure> {
    match find_value(of, name) {
        None => Ok(None),
        Some(Bson::Double(number)) => Ok(Some(*number)),
        Some(other) => as_integer(other)
            .map(|number| Some(number as f64))
            .ok_or_else(|| corrupt_field(name, "a number")),
    }
}

/// Returns a numeric field of a document. A missing field is an error.
pub(crate) fn read_number(of: &Document, name: &str) -> Result<f64, Failure> {
    read_optional_number(of, name)?.ok_or_else(|| corrupt_field(name, "a number"))
}

/// Returns a text field of a document, or `None` if the field is missing.
pub(crate) fn read_optional_text(of: &Document, name: &str) -> Result<Option<String>, Failure> {
    match find_value(of, name) {
        None => Ok(None),
        Some(Bson::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(corrupt_field(name, "a text")),
    }
}

/// Returns a text field of a document. A missing field is an error.
pub(crate) fn read_text(of: &Document, name: &str) -> Result<String, Failure> {
    read_optional_text(of, name)?.ok_or_else(|| corrupt_field(name, "a text"))
}

/// Returns the bytes of a binary field of a document, or an empty slice if the field is missing.
pub(crate) fn read_bytes<'a>(of: &'a Document, name: &str) -> Result<&'a [u8], Failure> {
    match find_value(of, name) {
        None => Ok(&[]),
        Some(Bson::Binary(binary)) => Ok(&binary.bytes),
        Some(_) => Err(corrupt_field(name, "binary")),
    }
}

/// Creates a binary BSON value from `bytes`.
pub(crate) fn to_binary(bytes: Vec<u8>) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes })
}
