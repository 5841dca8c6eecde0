//! Methods of Python's `dict`, `list` and `tuple` that change nothing, and of the few other objects that
//! templates meet.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::Bound;
use super::limits::{failure, list, pairs};
use super::strings;

/// Names that the sandbox of transformers keeps from templates.
const CHANGES: [&str; 12] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "add",
];

/// Calls a method that the engine does not know.
pub(crate) fn method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => strings::call(state, value.as_str().unwrap_or_default(), method, arguments),
        ValueKind::Map => mapping(state, value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => sequence(value, method, arguments),
        ValueKind::Number if method == "bit_length" && value.is_integer() => {
            Bound::new(method, &[], arguments)?;
            Ok(Value::from(
                i128::try_from(value.clone()).map_or(0, |value| 128 - value.unsigned_abs().leading_zeros()),
            ))
        }
        ValueKind::Number if method == "is_integer" => {
            Bound::new(method, &[], arguments)?;
            Ok(Value::from(f64::try_from(value.clone()).is_ok_and(|value| value.fract() == 0.0)))
        }
        ValueKind::Bytes if method == "decode" => {
            Bound::new(method, &["encoding", "errors"], arguments)?;
            Ok(Value::from(String::from_utf8_lossy(value.as_bytes().unwrap_or_default()).into_owned()))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn changes(method: &str) -> Error {
    failure(format!("{method} changes a value, which the sandbox of transformers forbids, too"))
}

fn mapping(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "keys" | "values" | "items" => {
            Bound::new(method, &[], arguments)?;
            let items = pairs(value).map(|(key, item)| match method {
                "keys" => key,
                "values" => item,
                _ => Value::from(Tuple::from([key, item])),
            });
            list(state, items.collect())
        }
        "get" => {
            let bound = Bound::new(method, &["key", "default"], arguments)?;
            let found = value.get_item(bound.required(0)?)?;
            let default = || bound.value(1).cloned().unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() { default() } else { found })
        }
        "copy" => {
            Bound::new(method, &[], arguments)?;
            Ok(Value::from_pairs(pairs(value)))
        }
        method if CHANGES.contains(&method) && value.get_item(&Value::from(method))?.is_undefined() => {
            Err(changes(method))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn sequence(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let bound = Bound::new(method, &["value"], arguments)?;
            let wanted = bound.required(0)?;
            Ok(Value::from(value.try_iter()?.filter(|item| item == wanted).count()))
        }
        "index" => {
            let bound = Bound::new(method, &["value"], arguments)?;
            let wanted = bound.required(0)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| failure(format!("index: {wanted} is not in the list")))
        }
        "copy" if !value.is_tuple() => {
            Bound::new(method, &[], arguments)?;
            Ok(value.clone())
        }
        method if CHANGES.contains(&method) => Err(changes(method)),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}
