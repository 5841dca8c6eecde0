//! Binds the arguments of a call to the parameters of a Python signature.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::limits::template_error;

/// A Jinja filter, which receives the value to which it is applied, and its arguments.
pub(super) type Filter = fn(&mut State, Value, &[Value]) -> Result<Value, Error>;

/// Argument values of a call by parameter. The value is `None` for a parameter that the caller
/// omitted.
pub(crate) struct BoundArguments<'a> {
    call: &'a str,
    names: &'a [&'a str],
    values: Vec<Option<Value>>,
}

/// Splits the arguments of a call into positional and keyword arguments.
pub(crate) fn split_arguments(arguments: &[Value]) -> Result<(&[Value], Kwargs), Error> {
    from_args(arguments)
}

impl<'a> BoundArguments<'a> {
    /// Binds the arguments of a call to the parameters `names`. `call` is the name of the call in
    /// error messages.
    ///
    /// # Errors
    /// Returns an error if there are too many arguments, if an argument is given twice, or if a
    /// name is unknown.
    pub fn new(call: &'a str, names: &'a [&'a str], arguments: &[Value]) -> Result<Self, Error> {
        let (positional, named) = split_arguments(arguments)?;
        if positional.len() > names.len() {
            let given = positional.len();
            let max_arguments = names.len();
            let message =
                format!("{call} takes at most {max_arguments} arguments, but {given} are given");
            return Err(Error::new(ErrorKind::TooManyArguments, message));
        }
        let mut values: Vec<Option<Value>> = positional.iter().cloned().map(Some).collect();
        values.resize(names.len(), None);
        for name in named.args() {
            let Some(slot) = names.iter().position(|known| *known == name) else {
                return Err(template_error(format!("{call} has no parameter {name}")));
            };
            if values[slot].replace(named.peek::<Value>(name)?).is_some() {
                return Err(template_error(format!("{call} receives {name} twice")));
            }
        }
        Ok(BoundArguments { call, names, values })
    }

    fn argument_error(&self, index: usize, wanted: &str, value: Option<&Value>) -> Error {
        let given = value.map_or("missing".to_string(), |value| {
            format!("{} ({})", value.kind(), excerpt(value))
        });
        template_error(format!(
            "{}: {} is {given}, but must be {wanted}",
            self.call, self.names[index]
        ))
    }

    /// Returns the argument at `index`, or `None` if it is missing or `none`.
    pub fn value(&self, index: usize) -> Option<&Value> {
        self.values[index].as_ref().filter(|value| !value.is_none())
    }

    /// Returns the required argument at `index`, or an error if it is missing.
    pub fn required(&self, index: usize) -> Result<&Value, Error> {
        self.values[index].as_ref().ok_or_else(|| self.argument_error(index, "given", None))
    }

    /// Returns the required argument at `index`, which must be a string.
    pub fn text(&self, index: usize) -> Result<&str, Error> {
        let value = self.required(index)?;
        value.as_str().ok_or_else(|| self.argument_error(index, "a string", Some(value)))
    }

    /// Returns the string argument at `index`, or `None` if it is missing or `none`.
    pub fn text_or_none(&self, index: usize) -> Result<Option<&str>, Error> {
        self.value(index).map(|_| self.text(index)).transpose()
    }

    /// Returns the integer argument at `index`, or `default` if it is missing or `none`.
    pub fn integer(&self, index: usize, default: i64) -> Result<i64, Error> {
        match self.value(index) {
            None => Ok(default),
            Some(value) => {
                integer(value).ok_or_else(|| self.argument_error(index, "an integer", Some(value)))
            }
        }
    }

    /// Returns whether the argument at `index` is truthy, or `default` if it is missing.
    pub fn truth(&self, index: usize, default: bool) -> bool {
        self.values[index].as_ref().map_or(default, Value::is_true)
    }
}

/// Converts a value to an integer as Python sees it: booleans are 0 and 1, floats are not integers.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    match value.kind() {
        ValueKind::Bool => Some(i64::from(value.is_true())),
        ValueKind::Number if value.is_integer() => {
            // Values beyond 64 bits are clamped, because no length here is that large.
            let value = i128::try_from(value.clone()).ok()?;
            Some(i64::try_from(value).unwrap_or(if value > 0 { i64::MAX } else { i64::MIN }))
        }
        _ => None,
    }
}

/// Returns a short text for a value in an error message: at most 30 characters of a string, and `…`
/// for an object.
fn excerpt(value: &Value) -> String {
    match value.as_str() {
        Some(text) => format!("{:?}", text.chars().take(30).collect::<String>()),
        None if value.as_object().is_some() => "…".into(),
        None => value.to_string(),
    }
}
