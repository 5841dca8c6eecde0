//! Resource limits of one rendering, so that no template can hang or exhaust the memory.
//!
//! The engine limits instructions and frames. This module limits the bytes of every created text,
//! the values in every created container, and the time, which is checked whenever the body of a
//! loop or a macro starts. Between two checks, a template executes at most as many operators as it
//! contains, each on a value of bounded size.

use std::time::{Duration, Instant};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Maximum number of template engine instructions in one rendering.
pub(crate) const STEPS: u64 = 5_000_000;
/// Maximum nesting depth of frames in a rendering: loops, scopes and macros. A macro counts as four
/// frames.
pub(crate) const FRAMES: usize = 200;
/// Maximum length of one text in a rendering, in bytes.
pub(crate) const TEXT: usize = 16 << 20;
/// Maximum total size of all texts and lists that one rendering creates, in bytes. Dropped values
/// count, too.
pub(crate) const TOTAL: usize = 512 << 20;
/// Maximum number of values in one container of a rendering. A shared value counts each time it is
/// reached.
pub(crate) const VALUES: usize = 1 << 18;
/// Maximum nesting depth of containers in a rendering.
pub(crate) const DEPTH: usize = 100;
/// Maximum duration of rendering a template.
pub(crate) const TIME: Duration = Duration::from_secs(10);

/// Budget of time and bytes that remains for a rendering.
#[derive(Debug)]
pub(crate) struct RenderBudget {
    bytes: usize,
    until: Instant,
    /// Namespaces that the rendering has created. They must not contain each other, because a cycle
    /// could be neither compared nor freed.
    namespaces: Vec<Value>,
}

impl RenderBudget {
    fn new() -> Self {
        RenderBudget { bytes: TOTAL, until: Instant::now() + TIME, namespaces: Vec::new() }
    }

    fn spend(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes > TEXT {
            return Err(template_error(format!(
                "the template creates a string of {bytes} bytes, but at most {TEXT} are allowed"
            )));
        }
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(|| {
            template_error(format!(
                "one rendering creates more than {TOTAL} bytes of text; is there an infinite \
                 loop?"
            ))
        })?;
        Ok(())
    }

    fn check_time(&self, now: Instant) -> Result<(), Error> {
        if now >= self.until {
            let seconds = TIME.as_secs();
            return Err(template_error(format!(
                "rendering takes more than {seconds} s; is there an infinite loop?"
            )));
        }
        Ok(())
    }
}

pub(crate) fn template_error(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Charges `bytes` to the budget of a rendering, before the bytes are allocated.
///
/// # Errors
/// Returns an error if there are too many bytes for one text, or for the remaining budget.
pub(crate) fn spend_bytes(state: &mut State, bytes: usize) -> Result<(), Error> {
    state.get_or_insert_extension_with(RenderBudget::new).spend(bytes)
}

/// Starts the body of a loop or a macro, and charges the `bytes` of text that the body prints to
/// the budget.
pub(crate) fn start_iteration(state: &mut State, bytes: usize) -> Result<Value, Error> {
    let budget = state.get_or_insert_extension_with(RenderBudget::new);
    budget.check_time(Instant::now())?;
    budget.spend(bytes)?;
    Ok(Value::UNDEFINED)
}

/// Creates a text value, and charges its length to the budget of the rendering.
pub(crate) fn make_text(state: &mut State, text: impl Into<String>) -> Result<Value, Error> {
    let text = text.into();
    spend_bytes(state, text.len())?;
    Ok(Value::from(text))
}

/// Creates a list value, and charges its items to the budget of the rendering.
pub(crate) fn make_list(state: &mut State, items: Vec<Value>) -> Result<Value, Error> {
    spend_bytes(state, items.len().saturating_mul(size_of::<Value>()))?;
    Ok(Value::from(items))
}

/// Registers a namespace that the template has created.
pub(crate) fn remember_namespace(state: &mut State, namespace: &Value) {
    state.get_or_insert_extension_with(RenderBudget::new).namespaces.push(namespace.clone());
}

/// Returns whether a value is a namespace that the template has created.
pub(crate) fn is_namespace(state: &mut State, value: &Value) -> bool {
    let known = &state.get_or_insert_extension_with(RenderBudget::new).namespaces;
    known.iter().any(|namespace| minijinja::tests::is_sameas(namespace, value))
}

/// Size of a template value: its values, nesting depth and bytes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct ValueSize {
    /// Number of values in the value, including the value itself.
    pub values: usize,
    /// Nesting depth of containers in the value.
    pub depth: usize,
    /// Total length of the texts in the value, in bytes.
    pub bytes: usize,
    /// Whether the value contains an undefined value.
    pub undefined: bool,
}

/// Measures the size of a template value.
///
/// # Errors
/// Returns an error if the value contains more than [`VALUES`] values, or if it is nested deeper
/// than [`DEPTH`]. A value that contains itself exceeds every depth.
pub(crate) fn measure_value(state: &mut State, value: &Value) -> Result<ValueSize, Error> {
    let mut size = ValueSize::default();
    measure_into(state, value, 0, &mut size)?;
    Ok(size)
}

fn measure_into(
    state: &mut State,
    value: &Value,
    depth: usize,
    size: &mut ValueSize,
) -> Result<(), Error> {
    size.values += 1;
    size.depth = size.depth.max(depth);
    if size.values > VALUES {
        return Err(template_error(format!(
            "the template creates a value of more than {VALUES} parts"
        )));
    }
    if depth > DEPTH {
        return Err(template_error(format!("the template nests values deeper than {DEPTH}")));
    }
    match value.kind() {
        ValueKind::Undefined => size.undefined = true,
        ValueKind::String => size.bytes += value.as_str().map_or(0, str::len),
        ValueKind::Map => {
            if depth > 0 && is_namespace(state, value) {
                return Err(template_error(
                    "the template stores a namespace in another value, which Levade does not allow",
                ));
            }
            for (key, item) in mapping_pairs(value) {
                measure_into(state, &key, depth + 1, size)?;
                measure_into(state, &item, depth + 1, size)?;
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                measure_into(state, &item, depth + 1, size)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Returns the pairs of keys and values of a mapping.
pub(crate) fn mapping_pairs(value: &Value) -> impl Iterator<Item = (Value, Value)> {
    value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

/// Checks a container that a template creates or stores, and charges its values to the budget of
/// the rendering.
///
/// # Errors
/// Returns an error if the container is too large or too deep, or if it contains a namespace.
pub(crate) fn check_container(state: &mut State, value: Value) -> Result<Value, Error> {
    if matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        if is_namespace(state, &value) {
            return Err(template_error(
                "the template stores a namespace in another value, which Levade does not allow",
            ));
        }
        let size = measure_value(state, &value)?;
        spend_bytes(state, size.values.saturating_mul(size_of::<Value>()))?;
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_limits_time_and_bytes() {
        let mut budget = RenderBudget::new();
        let start = Instant::now();
        budget.check_time(start).unwrap();
        assert!(budget.check_time(start + TIME * 2).unwrap_err().to_string().contains("10 s"));
        assert!(budget.spend(TEXT + 1).unwrap_err().to_string().contains("16777216"));
        for _ in 0..TOTAL / TEXT {
            budget.spend(TEXT).unwrap();
        }
        assert!(budget.spend(1).unwrap_err().to_string().contains("536870912"));
    }
}
