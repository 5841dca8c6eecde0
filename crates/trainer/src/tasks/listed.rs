//! Fingerprints of lists of tasks that no file of the run contains.

use levade_agent::environments::TaskList;
use levade_tasks::Task;
use serde_json::json;

/// Fingerprint of a list of tasks. It distinguishes the list from a changed one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedTasks {
    /// The source of tasks, such as `tasks.0`.
    pub source: String,
    /// Packages that provide the list, with their versions.
    pub package: String,
    /// Length of the tasks as JSON, in bytes.
    pub bytes: u64,
    /// CRC-32C checksum of the tasks as JSON.
    pub crc32c: u32,
}

impl ListedTasks {
    /// Returns the fingerprint of the tasks that the environment of source `source_index` returned.
    pub fn new(source_index: usize, listed: &TaskList) -> Self {
        let text = json!([listed.train, listed.held_out]).to_string();
        ListedTasks {
            source: format!("tasks.{source_index}"),
            package: listed.package.clone(),
            bytes: text.len() as u64,
            crc32c: crc32c::crc32c(text.as_bytes()),
        }
    }

    /// Returns the fingerprint of the sessions of source `source_index`.
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
