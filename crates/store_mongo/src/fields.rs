//! Reads fields of documents. Servers can return a number in a different type than it was stored
//! in, so every numeric type is accepted.

use levade_store::backend::Failure;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Binary, Bson, Document};

/// Creates the failure for a field that is missing or has the wrong type.
fn corrupt(name: &str, expected: &str) -> Failure {
    Failure::Corrupt(format!("the field `{name}` is not {expected}"))
}

/// Returns a field, or `None` if it is missing or null.
pub(crate) fn value<'a>(of: &'a Document, name: &str) -> Option<&'a Bson> {
    of.get(name).filter(|value| !matches!(value, Bson::Null))
}

/// Converts a number to an integer, or returns `None` if it is not one.
pub(crate) fn as_integer(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        Bson::Double(number) if number.fract() == 0.0 => Some(*number as i64),
        Bson::Boolean(is_set) => Some(i64::from(*is_set)),
        _ => None,
    }
}

/// Returns an integer field, or `None` if it is missing.
pub(crate) fn optional_integer<T: TryFrom<i64>>(
    of: &Document,
    name: &str,
) -> Result<Option<T>, Failure> {
    let Some(value) = value(of, name) else { return Ok(None) };
    let number = as_integer(value).and_then(|number| T::try_from(number).ok());
    number.map(Some).ok_or_else(|| corrupt(name, "an integer in its range"))
}

/// Returns an integer field. A missing field is an error.
pub(crate) fn integer<T: TryFrom<i64>>(of: &Document, name: &str) -> Result<T, Failure> {
    optional_integer(of, name)?.ok_or_else(|| corrupt(name, "an integer"))
}

/// Returns a numeric field, or `None` if it is missing.
pub(crate) fn optional_number(of: &Document, name: &str) -> Result<Option<f64>, Failure> {
    match value(of, name) {
        None => Ok(None),
        Some(Bson::Double(number)) => Ok(Some(*number)),
        Some(other) => as_integer(other)
            .map(|number| Some(number as f64))
            .ok_or_else(|| corrupt(name, "a number")),
    }
}

/// Returns a numeric field. A missing field is an error.
pub(crate) fn number(of: &Document, name: &str) -> Result<f64, Failure> {
    optional_number(of, name)?.ok_or_else(|| corrupt(name, "a number"))
}

/// Returns a text field, or `None` if it is missing.
pub(crate) fn optional_text(of: &Document, name: &str) -> Result<Option<String>, Failure> {
    match value(of, name) {
        None => Ok(None),
        Some(Bson::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(corrupt(name, "a text")),
    }
}

/// Returns a text field. A missing field is an error.
pub(crate) fn text(of: &Document, name: &str) -> Result<String, Failure> {
    optional_text(of, name)?.ok_or_else(|| corrupt(name, "a text"))
}

/// Returns the bytes of a binary field, or an empty slice if it is missing.
pub(crate) fn bytes<'a>(of: &'a Document, name: &str) -> Result<&'a [u8], Failure> {
    match value(of, name) {
        None => Ok(&[]),
        Some(Bson::Binary(binary)) => Ok(&binary.bytes),
        Some(_) => Err(corrupt(name, "binary")),
    }
}

/// Creates a binary value.
pub(crate) fn binary(bytes: Vec<u8>) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Generic, bytes })
}
