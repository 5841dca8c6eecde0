//! Non-mutating methods of Python's `dict`, `list` and `tuple`, and of the few other objects that
//! templates use.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::arguments::BoundArguments;
use super::limits::{is_namespace, make_list, mapping_pairs, template_error};
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
pub(crate) fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => strings::call_string_method(
            state,
            value.as_str().unwrap_or_default(),
            method,
            arguments,
        ),
        ValueKind::Map => call_mapping_method(state, value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => call_sequence_method(value, method, arguments),
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

fn mutation_error(method: &str) -> Error {
    template_error(format!(
        "{method} changes a value, which is forbidden, as in the sandbox of transformers"
    ))
}

fn call_mapping_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match method {
        "keys" | "values" | "items" => {
            BoundArguments::new(method, &[], arguments)?;
            let items = mapping_pairs(value).map(|(key, item)| match method {
                "keys" => key,
                "values" => item,
                _ => Value::from(Tuple::from([key, item])),
            });
            make_list(state, items.collect())
        }
        "get" => {
            let bound = BoundArguments::new(method, &["key", "default"], arguments)?;
            let found = value.get_item(bound.required(0)?)?;
            let default = || bound.value(1).cloned().unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() { default() } else { found })
        }
        "copy" => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(Value::from_pairs(mapping_pairs(value)))
        }
        method
            if CHANGES.contains(&method)
                && value.get_item(&Value::from(method))?.is_undefined() =>
        {
            Err(mutation_error(method))
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn call_sequence_method(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
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
                .ok_or_else(|| template_error(format!("index: {wanted} is not in the list")))
        }
        "copy" if !value.is_tuple() => {
            BoundArguments::new(method, &[], arguments)?;
            Ok(value.clone())
        }
        method if CHANGES.contains(&method) => Err(mutation_error(method)),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// A method that a template references without calling it. The method is defined and truthy, and
/// has no attributes.
#[derive(Debug)]
struct UncalledMethod(String);

impl Object for UncalledMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "<built-in method {} of dict object>", self.0)
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        Err(template_error(format!(
            "{0} is called under another name; write .{0}() after the mapping",
            self.0
        )))
    }
}

/// Returns the attribute `value.name` if `name` is one of [`METHODS`].
pub(super) fn get_attribute(state: &mut State, value: Value, name: &str) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map || is_namespace(state, &value) {
        return value.get_attr(name);
    }
    // The sandbox hides methods that change the mapping.
    Ok(if CHANGES.contains(&name) {
        Value::UNDEFINED
    } else {
        Value::from_object(UncalledMethod(name.into()))
    })
}
