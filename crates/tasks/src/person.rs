//! Keys of the people whom tasks come from, by which a person's data is found and withdrawn.

use serde_json::Value;

use crate::Task;

/// Name of the row field that contains the key of the person whom the task came from, or a list of
/// such keys. A key is a text or a number; null and the empty text are no keys.
pub const PERSON: &str = "person";

/// Returns the keys of the people in a task that is serialized as JSON, in the order of its row.
/// Empty if the row has no field [`PERSON`], or if the field has another form.
pub fn persons(task: &Value) -> Vec<String> {
    task["row"].get(PERSON).and_then(read_person_keys).unwrap_or_default()
}

impl Task {
    /// Returns the keys of the people whom the task came from (field [`PERSON`] of its row).
    pub fn persons(&self) -> Vec<String> {
        self.row.get(PERSON).and_then(read_person_keys).unwrap_or_default()
    }
}

/// Returns the keys that a field contains, or `None` if the field is neither a key nor a list of
/// keys.
pub(crate) fn read_person_keys(field: &Value) -> Option<Vec<String>> {
    match field {
        Value::Null => Some(Vec::new()),
        Value::String(key) if key.trim().is_empty() => Some(Vec::new()),
        Value::String(key) => Some(vec![key.clone()]),
        Value::Number(key) => Some(vec![key.to_string()]),
        Value::Array(items) if !items.iter().any(Value::is_array) => {
            Some(items.iter().map(read_person_keys).collect::<Option<Vec<_>>>()?.concat())
        }
        Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn person_field_accepts_text_numbers_and_lists() {
        for (field, want) in [
            (json!("alice"), &["alice"][..]),
            (json!(17), &["17"]),
            (json!(["alice", null, " ", 17]), &["alice", "17"]),
            (json!(null), &[]),
            (json!({ "id": "alice" }), &[]),
            (json!([["alice"]]), &[]),
            (json!(true), &[]),
        ] {
            let document = json!({ "id": "t", "row": { "person": field } });
            assert_eq!(persons(&document), want, "{document}");
            let row = document["row"].as_object().unwrap().clone();
            assert_eq!(Task { row: row.into(), ..Task::default() }.persons(), want, "{document}");
        }
        assert!(persons(&json!({ "id": "t" })).is_empty());
        assert!(persons(&json!(null)).is_empty(), "the task of an erased attempt");
    }
}
