//! Bounds of one rendering, so that no template can hang or fill the memory.
//!
//! The engine counts instructions and frames. The rest is counted here: bytes of every text that is made,
//! values in every container that is built, and time, which is looked at whenever the body of a loop or a
//! macro begins. Between two such looks a template can do only as much as it has operators, each on a value
//! of bounded size.

use std::time::{Duration, Instant};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Instructions of the engine in one rendering.
pub(crate) const STEPS: u64 = 5_000_000;
/// Frames of loops, scopes and macros (which count four times) within each other.
pub(crate) const FRAMES: usize = 200;
/// Bytes of one text.
pub(crate) const TEXT: usize = 16 << 20;
/// Bytes of all texts and lists that one rendering makes, those that it drops again included.
pub(crate) const TOTAL: usize = 512 << 20;
/// Values in one container, counted as often as they are reached.
pub(crate) const VALUES: usize = 1 << 18;
/// Containers within each other.
pub(crate) const DEPTH: usize = 100;
/// Time of one rendering.
pub(crate) const TIME: Duration = Duration::from_secs(10);

/// Budget that a rendering may still use.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: usize,
    until: Instant,
    /// Namespaces, which may not hold each other: a cycle could not be compared or freed.
    namespaces: Vec<Value>,
}

impl Budget {
    fn new() -> Self {
        Budget { bytes: TOTAL, until: Instant::now() + TIME, namespaces: Vec::new() }
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes > TEXT {
            return Err(failure(format!("it makes a text of {bytes} bytes; at most {TEXT} are allowed")));
        }
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| {
            failure(format!(
                "it makes more than {TOTAL} bytes of text in one rendering; does a loop never end?"
            ))
        })?;
        Ok(())
    }

    fn look(&self, now: Instant) -> Result<(), Error> {
        if now >= self.until {
            let seconds = TIME.as_secs();
            return Err(failure(format!("it takes more than {seconds} s to render; does a loop never end?")));
        }
        Ok(())
    }
}

/// An error of a template.
pub(crate) fn failure(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Takes `bytes` from the budget, before they are made.
///
/// # Errors
/// When they are too many for one text, or for what is left.
pub(crate) fn charge(state: &mut State, bytes: usize) -> Result<(), Error> {
    state.get_or_insert_extension_with(Budget::new).spend(bytes)
}

/// Begins the body of a loop or a macro that prints `bytes` of its own.
pub(crate) fn tick(state: &mut State, bytes: usize) -> Result<Value, Error> {
    let budget = state.get_or_insert_extension_with(Budget::new);
    budget.look(Instant::now())?;
    budget.spend(bytes)?;
    Ok(Value::UNDEFINED)
}

/// A text whose length has been paid for.
pub(crate) fn text(state: &mut State, text: impl Into<String>) -> Result<Value, Error> {
    let text = text.into();
    charge(state, text.len())?;
    Ok(Value::from(text))
}

/// A list whose items have been paid for.
pub(crate) fn list(state: &mut State, items: Vec<Value>) -> Result<Value, Error> {
    charge(state, items.len().saturating_mul(size_of::<Value>()))?;
    Ok(Value::from(items))
}

/// Remembers a namespace.
pub(crate) fn remember_namespace(state: &mut State, namespace: &Value) {
    state.get_or_insert_extension_with(Budget::new).namespaces.push(namespace.clone());
}

/// Whether a value is a namespace.
pub(crate) fn is_namespace(state: &mut State, value: &Value) -> bool {
    let known = &state.get_or_insert_extension_with(Budget::new).namespaces;
    known.iter().any(|namespace| minijinja::tests::is_sameas(namespace, value))
}

/// How large a value is.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Size {
    /// Values in it, itself included.
    pub values: usize,
    /// Containers within each other.
    pub depth: usize,
    /// Bytes of its texts.
    pub bytes: usize,
    /// Whether an undefined value is in it.
    pub undefined: bool,
}

/// Measures a value.
///
/// # Errors
/// When it holds more than [`VALUES`] or is nested deeper than [`DEPTH`], as one that holds itself is.
pub(crate) fn measure(state: &mut State, value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    walk(state, value, 0, &mut size)?;
    Ok(size)
}

fn walk(state: &mut State, value: &Value, depth: usize, size: &mut Size) -> Result<(), Error> {
    size.values += 1;
    size.depth = size.depth.max(depth);
    if size.values > VALUES {
        return Err(failure(format!("it builds a value of more than {VALUES} parts")));
    }
    if depth > DEPTH {
        return Err(failure(format!("it nests values deeper than {DEPTH}")));
    }
    match value.kind() {
        ValueKind::Undefined => size.undefined = true,
        ValueKind::String => size.bytes += value.as_str().map_or(0, str::len),
        ValueKind::Map => {
            if depth > 0 && is_namespace(state, value) {
                return Err(failure("it puts a namespace into another value, which Levade does not allow"));
            }
            for (key, item) in pairs(value) {
                walk(state, &key, depth + 1, size)?;
                walk(state, &item, depth + 1, size)?;
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                walk(state, &item, depth + 1, size)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Keys and values of a mapping.
pub(crate) fn pairs(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

/// Looks at a value before it is kept in a name that can be assigned to again.
pub(crate) fn keep(state: &mut State, value: Value) -> Result<Value, Error> {
    if matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        if is_namespace(state, &value) {
            return Err(failure("it puts a namespace into another value, which Levade does not allow"));
        }
        let size = measure(state, &value)?;
        charge(state, size.values.saturating_mul(size_of::<Value>()))?;
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_bytes_run_out() {
        let mut budget = Budget::new();
        let start = Instant::now();
        budget.look(start).unwrap();
        assert!(budget.look(start + TIME * 2).unwrap_err().to_string().contains("10 s"));
        assert!(budget.spend(TEXT + 1).unwrap_err().to_string().contains("16777216"));
        for _ in 0..TOTAL / TEXT {
            budget.spend(TEXT).unwrap();
        }
        assert!(budget.spend(1).unwrap_err().to_string().contains("536870912"));
    }
}
