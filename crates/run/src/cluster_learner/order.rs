//! Files through which the nodes of a learner find each other. They are in the run directory, which
//! all nodes share.
//!
//! For every start of the learner, the first node writes an order. All other nodes follow the
//! newest order. If the processes of a node exit, the node reports this in a file, and the first
//! node then starts the whole learner again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// Name of the file that contains the order of the newest start.
const ORDER: &str = "group.json";
/// Name of the file that marks the run as finished.
const FINISHED_FILE: &str = "over";
/// Placeholder in a command that is replaced by the node's rank.
const NODE: &str = "{node}";

/// Order to start the processes of a learner once: the command and the environment for its nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchOrder {
    /// Random name that identifies this start.
    pub start: String,
    /// Command that each node runs. `{node}` is replaced by the node's rank.
    pub command: Vec<String>,
    /// Environment variables with their values. None of them is secret.
    pub variables: Vec<(String, String)>,
    /// Names of the environment variables that each node passes to its processes if they are set.
    pub environment: Vec<String>,
    /// Number of nodes that run the learner.
    pub nodes: u32,
    /// Timeout for the next start, if the learner is started again, in seconds.
    #[serde(rename = "patience")]
    pub start_timeout_seconds: f64,
}

impl LaunchOrder {
    /// Returns the command that the node with rank `node` runs.
    pub fn node_command(&self, node: u32) -> Vec<String> {
        self.command
            .iter()
            .map(|word| if word == NODE { node.to_string() } else { word.clone() })
            .collect()
    }

    /// Returns all environment variables of a node's processes.
    pub fn full_environment(&self) -> Vec<(String, String)> {
        let mut all = levade_policy::environment::child_environment(&self.environment);
        all.extend(self.variables.iter().cloned());
        all
    }

    /// Returns the placeholder in commands for the node's rank.
    pub fn node() -> String {
        NODE.into()
    }

    /// Writes the order into `dir` atomically, so that readers never see an incomplete order.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        let partial = dir.join(format!("{ORDER}.half"));
        std::fs::write(&partial, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(partial, dir.join(ORDER))
    }

    /// Reads the newest order in `dir`. Returns `None` if there is no order.
    ///
    /// # Errors
    /// Returns an error if the order cannot be read.
    pub fn read(dir: &Path) -> io::Result<Option<Self>> {
        match std::fs::read(dir.join(ORDER)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Prepares the directory for another start: removes the files of earlier starts.
pub fn remove_old_files(dir: &Path) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if [ORDER, FINISHED_FILE].contains(&name.as_str()) || name.starts_with("left-") {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

fn exit_file(dir: &Path, start: &str, node: u32) -> PathBuf {
    dir.join(format!("left-{start}-{node}"))
}

/// Records that the processes of a node have exited. `how` describes how they exited.
pub fn report_exit(dir: &Path, start: &str, node: u32, how: &str) -> io::Result<()> {
    std::fs::write(exit_file(dir, start, node), how)
}

/// Returns how the processes of another node exited. Returns `None` if the processes of all nodes
/// are running.
pub fn find_exited_node(dir: &Path, order: &LaunchOrder) -> Option<String> {
    (1..order.nodes).find_map(|node| {
        let how = std::fs::read_to_string(exit_file(dir, &order.start, node)).ok()?;
        Some(format!("on machine {node}: {how}"))
    })
}

fn claim_file(dir: &Path, node: u32) -> PathBuf {
    dir.join(format!("taken-{node}"))
}

/// Claims the role of a node under a unique name. A disconnected or late process that claimed the
/// role before then gives up the role.
pub fn claim_role(dir: &Path, node: u32, name: &str) -> io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(claim_file(dir, node), name)
}

/// Returns whether another process has claimed the role of a node after the process `name`.
pub fn is_role_claimed(dir: &Path, node: u32, name: &str) -> bool {
    std::fs::read_to_string(claim_file(dir, node)).is_ok_and(|now| !now.is_empty() && now != name)
}

/// Marks the run as finished.
pub fn mark_finished(dir: &Path) -> io::Result<()> {
    if dir.is_dir() { std::fs::write(dir.join(FINISHED_FILE), "") } else { Ok(()) }
}

/// Returns when the run was marked as finished, or `None` if it was not.
pub fn finished_at(dir: &Path) -> Option<SystemTime> {
    std::fs::metadata(dir.join(FINISHED_FILE)).and_then(|found| found.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_follow_newest_order() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("learner");
        remove_old_files(&dir).unwrap();
        assert_eq!(LaunchOrder::read(&dir).unwrap(), None);
        let order = LaunchOrder {
            start: "a".into(),
            command: vec![
                "torchrun".into(),
                "--node-rank".into(),
                LaunchOrder::node(),
                "{node}s".into(),
            ],
            variables: vec![("OMP_NUM_THREADS".into(), "1".into())],
            environment: Vec::new(),
            nodes: 3,
            start_timeout_seconds: 60.0,
        };
        order.write(&dir).unwrap();
        assert_eq!(LaunchOrder::read(&dir).unwrap(), Some(order.clone()));
        assert_eq!(order.node_command(2), ["torchrun", "--node-rank", "2", "{node}s"]);
        assert!(order.full_environment().contains(&("OMP_NUM_THREADS".into(), "1".into())));
        assert_eq!(find_exited_node(&dir, &order), None);
        report_exit(&dir, "earlier", 1, "exit code 1").unwrap();
        assert_eq!(find_exited_node(&dir, &order), None);
        report_exit(&dir, "a", 2, "killed by signal 9").unwrap();
        assert_eq!(find_exited_node(&dir, &order).unwrap(), "on machine 2: killed by signal 9");
        claim_role(&dir, 1, "one").unwrap();
        assert!(!is_role_claimed(&dir, 1, "one") && !is_role_claimed(&dir, 2, "one"));
        claim_role(&dir, 1, "other").unwrap();
        assert!(is_role_claimed(&dir, 1, "one") && !is_role_claimed(&dir, 1, "other"));
        mark_finished(&dir).unwrap();
        assert!(finished_at(&dir).is_some());
        remove_old_files(&dir).unwrap();
        assert!(finished_at(&dir).is_none() && find_exited_node(&dir, &order).is_none());
    }
}
