//! Depth of nested values: JSON that is nested too deeply can be written to the store, but not read
//! back.

use serde_json::Value;

/// Maximum nesting depth of scorer input. JSON parsers accept 128 levels; the store needs some
/// levels for the enclosing values.
const MAX_NESTING: usize = 100;

/// Returns the nesting depth of arrays and objects in a JSON value; 0 for other values.
fn nesting_depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(nesting_depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(nesting_depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Returns why a JSON value is nested too deeply for the store, or `None` if the store accepts it.
pub fn depth_error(value: &Value) -> Option<String> {
    let depth = nesting_depth(value);
    (depth > MAX_NESTING).then(|| {
        format!("the value is nested {depth} deep, but at most {MAX_NESTING} levels can be stored")
    })
}
