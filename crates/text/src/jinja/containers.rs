//! Non-mutating methods of Python's `dict`, `list` and `tuple`, and of the few other objects that
//! templates use.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::BoundArguments;
use super::limits::{failure, is_namespace, list, pairs};
use super::strings;

/// Names of the methods of Python's `dict`. They take precedence over items of the same name:
/// `schema.items` is never the item.
pub(super) const METHODS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// Names of mutating methods, which transformers' sandbox also hides from templates.
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

/// Calls a method of a container that the template engine does not implement.
pub(crate) fn method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => {
            strings::call(state, value.as_str().unwrap_or_default(), method, arguments)
        }
        ValueKind::Map => mapping(state, value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => sequence(value, method, arguments),
        ValueKind::Number if method == "bit_length" && value.is_integer() => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(Value::from(
                i128::try_from(value.clone())
                    .map_or(0, |value| 128 - value.unsigned_abs().leading_zeros()),
            ))
        }
        ValueKind::Number if method == "is_integer" => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(Value::from(f64::try_from(value.clone()).is_ok_and(|value| value.fract() == 0.0)))
        }
        ValueKind::Bytes if method == "decode" => {
            BoundArguments::new(method, &["encoding", "errors"], arguments)?;
            Ok(Value::from(
                String::from_utf8_lossy(value.as_bytes().unwrap_or_default()).into_owned(),
            ))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn changes(method: &str) -> Error {
    failure(format!(
        "{method} changes a value, which is forbidden, as in the sandbox of transformers"
    ))
}

fn mapping(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match method {
        "keys" | "values" | "items" => {
            BoundArguments::new(method, &[], arguments)?;
            let items = pairs(value).map(|(key, item)| match method {
                "keys" => key,
                "values" => item,
                _ => Value::from(Tuple::from([key, item])),
            });
            list(state, items.collect())
        }
        "get" => {
            let bound = BoundArguments::new(method, &["key", "default"], arguments)?;
            let found = value.get_item(bound.required(0)?)?;
            let default = || bound.value(1).cloned().unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() { default() } else { found })
        }
        "copy" => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(Value::from_pairs(pairs(value)))
        }
        method
            if CHANGES.contains(&method)
                && value.get_item(&Value::from(method))?.is_undefined() =>
        {
            Err(changes(method))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn sequence(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let bound = BoundArguments::new(method, &["value"], arguments)?;
            let wanted = bound.required(0)?;
            Ok(Value::from(value.try_iter()?.filter(|item| item == wanted).count()))
        }
        "index" => {
            let bound = BoundArguments::new(method, &["value"], arguments)?;
            let wanted = bound.required(0)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from)
                .ok_or_else(|| failure(format!("index: {wanted} is not in the list")))
        }
        "copy" if !value.is_tuple() => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(value.clone())
        }
        method if CHANGES.contains(&method) => Err(changes(method)),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// A method that a template references without calling it. The method is defined and truthy, and
/// has no attributes.
#[derive(Debug)]
struct Method(String);

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "<built-in method {} of dict object>", self.0)
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        Err(failure(format!(
            "{0} is called under another name; write .{0}() after the mapping",
            self.0
        )))
    }
}

/// Returns the attribute `value.name` if `name` is one of [`METHODS`].
pub(super) fn attribute(state: &mut State, value: Value, name: &str) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map || is_namespace(state, &value) {
        return value.get_attr(name);
    }
    // The sandbox hides methods that change the mapping.
    Ok(if CHANGES.contains(&name) {
        Value::UNDEFINED
    } else {
        Value::from_object(Method(name.into()))
    })
}
