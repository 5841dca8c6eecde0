//! Converts JSON values to template values. Numbers become what Python's `json.loads` returns, if
//! that preserves their value.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr};
use serde_json::{Number, Value as Json};

use crate::decimal::exact_float;

/// A number that the template engine cannot represent: an integer beyond 128 bits, or a decimal
/// that no f64 prints as. It prints its digits and does not support arithmetic.
#[derive(Debug)]
pub(super) struct UnrepresentableNumber(pub(super) Number);

impl Object for UnrepresentableNumber {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Converts a JSON value to a template value. Keys of objects keep their order.
pub(crate) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => from_number(number),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(from_json).collect(),
        Json::Object(fields) => from_fields(fields),
    }
}

/// Converts a JSON object to a template value.
pub(crate) fn from_fields(fields: &serde_json::Map<String, Json>) -> Value {
    Value::from_pairs(fields.iter().map(|(name, field)| (name.as_str(), from_json(field))))
}

fn from_number(number: &Number) -> Value {
    if let Some(value) = number.as_u64() {
        return Value::from(value);
    }
    let integer = number.as_i64().map(Value::from);
    let integer = integer.or_else(|| number.as_i128().map(Value::from));
    let integer = integer.or_else(|| number.as_u128().map(Value::from));
    integer
        .or_else(|| exact_float(number).map(Value::from))
        .unwrap_or_else(|| Value::from_object(UnrepresentableNumber(number.clone())))
}
