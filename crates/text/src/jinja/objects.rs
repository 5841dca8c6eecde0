//! Objects that Jinja2's globals create: a cycler and a joiner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use minijinja::value::{Object, ObjectRepr, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::limits::{self, template_error};
use super::repr::python_str;

/// Jinja's `cycler` object. It returns its items in order, and starts again after the last item.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current"))
            .then(|| self.items[self.at.load(Ordering::Relaxed)].clone())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        arguments: &[Value],
    ) -> Result<Value, Error> {
        match method {
            "next" => {
                let () = from_args(arguments)?;
                let at = self.at.load(Ordering::Relaxed);
                self.at.store((at + 1) % self.items.len(), Ordering::Relaxed);
                Ok(self.items[at].clone())
            }
            "reset" => {
                let () = from_args(arguments)?;
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Jinja's `joiner` object. It returns an empty text at the first call, and its separator at every
/// later call.
#[derive(Debug)]
struct Joiner {
    text: String,
    used: AtomicBool,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        let () = from_args(arguments)?;
        Ok(Value::from(if self.used.swap(true, Ordering::Relaxed) {
            self.text.as_str()
        } else {
            ""
        }))
    }
}

/// Implements Jinja's function `cycler(*items)`.
pub(crate) fn cycler(state: &mut State, items: Rest<Value>) -> Result<Value, Error> {
    // Nested cyclers and joiners would form chains of unbounded length.
    if items.is_empty() || items.iter().any(|item| item.kind() == ValueKind::Plain) {
        return Err(template_error(
            "cycler requires at least one argument, and no argument may be a cycler or joiner",
        ));
    }
    limits::check_container(state, Value::from(items.to_vec()))?;
    Ok(Value::from_object(Cycler { items: items.0, at: AtomicUsize::new(0) }))
}

/// Implements Jinja's function `joiner(sep=", ")`.
pub(crate) fn joiner(state: &mut State, sep: Option<Value>) -> Result<Value, Error> {
    let text = sep.map_or_else(|| Ok(", ".to_string()), |sep| python_str(state, &sep))?;
    Ok(Value::from_object(Joiner { text, used: AtomicBool::new(false) }))
}
