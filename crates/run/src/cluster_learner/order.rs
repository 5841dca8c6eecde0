//! Files through which the machines of a group find each other: in the folder of the run, which all of them
//! reach.
//!
//! The first machine writes an order for every start of the group; each other one follows the newest. One
//! whose processes have ended says so, and the first machine then starts the group anew.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The order of the newest start.
const ORDER: &str = "group.json";
/// Says that the run is over.
const OVER: &str = "over";
/// Stands for the number of the machine in a command.
const NODE: &str = "{node}";

/// One start of a group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Random name of the start.
    pub start: String,
    /// Command of a machine; `{node}` stands for its number.
    pub command: Vec<String>,
    /// Variables of its environment, none of them secret.
    pub variables: Vec<(String, String)>,
    /// Names of variables that are passed on where they are set.
    pub environment: Vec<String>,
    /// Machines.
    pub nodes: u32,
    /// Longest wait for the next start, in seconds.
    pub patience: f64,
}

impl Order {
    /// The command of a machine.
    pub fn of_node(&self, node: u32) -> Vec<String> {
        self.command.iter().map(|word| if word == NODE { node.to_string() } else { word.clone() }).collect()
    }

    /// The whole environment of a machine's processes.
    pub fn whole_environment(&self) -> Vec<(String, String)> {
        let mut all = levade_policy::environment::passed(&self.environment);
        all.extend(self.variables.iter().cloned());
        all
    }

    /// The word that stands for the number of a machine.
    pub fn node() -> String {
        NODE.into()
    }

    /// Writes it, so that it is whole or not there.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let half = folder.join(format!("{ORDER}.half"));
        std::fs::write(&half, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(half, folder.join(ORDER))
    }

    /// The newest one, if any.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(folder: &Path) -> io::Result<Option<Self>> {
        match std::fs::read(folder.join(ORDER)) {
            Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Makes the folder ready for another start: nothing of earlier ones stands there any more.
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

/// Says that the processes of a machine have ended, and how.
pub fn leave(folder: &Path, start: &str, node: u32, how: &str) -> io::Result<()> {
    std::fs::write(left(folder, start, node), how)
}

/// How the processes of another machine ended, once those of one have.
pub fn has_left(folder: &Path, order: &Order) -> Option<String> {
    (1..order.nodes).find_map(|node| {
        let how = std::fs::read_to_string(left(folder, &order.start, node)).ok()?;
        Some(format!("on machine {node}: {how}"))
    })
}

fn taken(folder: &Path, node: u32) -> PathBuf {
    folder.join(format!("taken-{node}"))
}

/// Takes the part of a machine, under a name that nobody else has. Whoever had it before is cut off, lost or
/// late, and leaves it.
pub fn take(folder: &Path, node: u32, name: &str) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(taken(folder, node), name)
}

/// Whether somebody else has taken the part of a machine since.
pub fn is_taken(folder: &Path, node: u32, name: &str) -> bool {
    std::fs::read_to_string(taken(folder, node)).is_ok_and(|now| !now.is_empty() && now != name)
}

/// Says that the run is over.
pub fn end(folder: &Path) -> io::Result<()> {
    if folder.is_dir() { std::fs::write(folder.join(OVER), "") } else { Ok(()) }
}

/// When the run was said to be over, if it is.
pub fn over(folder: &Path) -> Option<SystemTime> {
    std::fs::metadata(folder.join(OVER)).and_then(|found| found.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_follow_the_newest_order() {
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
