//! Rows of files, as tasks keep them.

use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// All fields of the row that a task was read from. Clones share the fields, because many parts of
/// a run refer to the same task.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TaskRow(Arc<Map<String, Value>>);

impl Deref for TaskRow {
    type Target = Map<String, Value>;

    fn deref(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl From<Map<String, Value>> for TaskRow {
    fn from(fields: Map<String, Value>) -> Self {
        TaskRow(Arc::new(fields))
    }
}

impl TaskRow {
    /// Returns whether the task has no row, for example because it was generated.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for TaskRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TaskRow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::from)
    }
}
