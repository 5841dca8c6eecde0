//! How deeply values are nested: JSON that is too deep can be written into the record, and not be read again.

use serde_json::Value;

/// Deepest nesting of what is handed over for the scoring: less than readers of JSON take (128), by what the
/// record puts around it.
const MOST_NESTED: usize = 100;

/// Lists and tables within each other; 0 for a value that is neither.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// Says why a value is nested too deeply to be kept in the record, or returns `None` if it can be kept.
pub fn too_deep(value: &Value) -> Option<String> {
    let depth = depth(value);
    (depth > MOST_NESTED).then(|| format!("it is nested {depth} deep, and {MOST_NESTED} can be kept"))
}
