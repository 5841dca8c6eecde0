//! Fingerprints of lists of tasks that no file of the run contains.

use levade_agent::environments::TaskList;
use levade_tasks::Task;
use serde_json::json;

/// Fingerprint of a task list, by which a changed list is detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedTasks {
    /// The source of tasks, such as `tasks.0`.
    pub source: String,
    /// Packages that provide the list, with their versions.
    pub package: String,
    /// Length of the list as JSON, in bytes.
    pub bytes: u64,
    /// CRC-32C checksum of the list as JSON.
    pub crc32c: u32,
}

impl ListedTasks {
    /// Returns the fingerprint of the list that an environment returned. `source_index` is the
    /// index of the source in the recipe.
    pub fn new(source_index: usize, listed: &TaskList) -> Self {
        let text = json!([listed.train, listed.held_out]).to_string();
        ListedTasks {
            source: format!("tasks.{source_index}"),
            package: listed.package.clone(),
            bytes: text.len() as u64,
            crc32c: crc32c::crc32c(text.as_bytes()),
        }
    }

    /// Returns the fingerprint of a list of recorded sessions. `source_index` is the index of the
    /// source in the recipe.
    pub fn of_sessions(source_index: usize, tasks: &[Task]) -> Self {
        let text = json!(tasks).to_string();
        ListedTasks {
            source: format!("tasks.{source_index}"),
            package: "the list of sessions".to_owned(),
            bytes: text.len() as u64,
            crc32c: crc32c::crc32c(text.as_bytes()),
        }
    }
}
