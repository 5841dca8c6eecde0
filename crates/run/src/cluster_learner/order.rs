//! Files through which the nodes of a learner find each other. They are in the run directory, which
//! all nodes share.
//!
//! For every start of the learner, the first node writes an order. All other nodes follow the newest
//! order. If the processes of a node exit, the node reports this in a file, and the first node then
//! starts the whole learner again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// File with the order of the newest start.
const ORDER: &str = "group.json";
/// File that marks the run as finished.
const OVER: &str = "over";
/// Placeholder for the node's rank in a command.
const NODE: &str = "{node}";

/// The order for one start of a learner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Random name of the start.
    pub start: String,
    /// Command of a node. `{node}` stands for the node's rank.
    pub command: Vec<String>,
    /// Environment variables and their values, none of them secret.
    pub variables: Vec<(String, String)>,
    /// Names of environment variables that each node passes on if they are set.
    pub environment: Vec<String>,
    /// Number of nodes.
    pub nodes: u32,
    /// Timeout for the next start, in seconds.
    pub patience: f64,
}

impl Order {
    /// Returns the command of a node.
    pub fn of_node(&self, node: u32) -> Vec<String> {
        self.command.iter().map(|word| if word == NODE { node.to_string() } else { word.clone() }).collect()
    }

    /// Returns the complete environment of a node's processes.
    pub fn whole_environment(&self) -> Vec<(String, String)> {
        let mut all = levade_policy::environment::passed(&self.environment);
        all.extend(self.variables.iter().cloned());
        all
    }

    /// Returns the placeholder for the node's rank.
    pub fn node() -> String {
        NODE.into()
    }

    /// Writes the order atomically, so that readers see the complete order or none.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let half = folder.join(format!("{ORDER}.half"));
        std::fs::write(&half, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(half, folder.join(ORDER))
    }

    /// Returns the newest order, or `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the order cannot be read.
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        match std::fs::read(folder.join(ORDER)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Prepares the directory for another start: removes the files of earlier starts.
pub fn clear(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if [ORDER, OVER].contains(&name.as_str()) || name.starts_with("left-") {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

fn left(folder: &Path, start: &str, node: u32) -> PathBuf {
    folder.join(format!("left-{start}-{node}"))
}

/// Reports that the processes of a node have exited, and how.
pub fn leave(folder: &Path, start: &str, node: u32, how: &str) -> io::Result<()> {
    std::fs::write(left(folder, start, node), how)
}

/// Returns how the processes of another node exited, or `None` if all are running.
pub fn has_left(folder: &Path, order: &Order) -> Option<String> {
    (1..order.nodes).find_map(|node| {
        let how = std::fs::read_to_string(left(folder, &order.start, node)).ok()?;
        Some(format!("on machine {node}: {how}"))
    })
}

fn taken(folder: &Path, node: u32) -> PathBuf {
    folder.join(format!("taken-{node}"))
}

/// Claims the role of a node under a unique name. A process that had the role before, which is
/// disconnected or late, then gives it up.
pub fn take(folder: &Path, node: u32, name: &str) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(taken(folder, node), name)
}

/// Returns whether another process has claimed the role of a node since.
pub fn is_taken(folder: &Path, node: u32, name: &str) -> bool {
    std::fs::read_to_string(taken(folder, node)).is_ok_and(|now| !now.is_empty() && now != name)
}

/// Marks the run as finished.
pub fn end(folder: &Path) -> io::Result<()> {
    if folder.is_dir() { std::fs::write(folder.join(OVER), "") } else { Ok(()) }
}

/// Returns when the run was marked as finished, or `None` if it was not.
pub fn over(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join(OVER)).and_then(|found| found.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_follow_newest_order() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("learner");
        clear(&folder).unwrap();
        assert_eq!(Order::read(&folder).unwrap(), None);
        let order = Order {
            start: "a".into(),
            command: vec!["torchrun".into(), "--node-rank".into(), Order::node(), "{node}s".into()],
            variables: vec![("OMP_NUM_THREADS".into(), "1".into())],
            environment: Vec::new(),
            nodes: 3,
            patience: 60.0,
        };
        order.write(&folder).unwrap();
        assert_eq!(Order::read(&folder).unwrap(), Some(order.clone()));
        assert_eq!(order.of_node(2), ["torchrun", "--node-rank", "2", "{node}s"]);
        assert!(order.whole_environment().contains(&("OMP_NUM_THREADS".into(), "1".into())));
        assert_eq!(has_left(&folder, &order), None);
        leave(&folder, "earlier", 1, "exit code 1").unwrap();
        assert_eq!(has_left(&folder, &order), None);
        leave(&folder, "a", 2, "killed by signal 9").unwrap();
        assert_eq!(has_left(&folder, &order).unwrap(), "on machine 2: killed by signal 9");
        take(&folder, 1, "one").unwrap();
        assert!(!is_taken(&folder, 1, "one") && !is_taken(&folder, 2, "one"));
        take(&folder, 1, "other").unwrap();
        assert!(is_taken(&folder, 1, "one") && !is_taken(&folder, 1, "other"));
        end(&folder).unwrap();
        assert!(over(&folder).is_some());
        clear(&folder).unwrap();
        assert!(over(&folder).is_none() && has_left(&folder, &order).is_none());
    }
}
