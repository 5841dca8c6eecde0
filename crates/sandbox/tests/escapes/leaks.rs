//! Snapshots of processes, mounts, descriptors and files, to detect leftovers of runs.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

/// Timeout for the kernel to release what has ended.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Snapshot of everything that a run could leave behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceSnapshot {
    /// Ids of the descendants of this process.
    processes: BTreeSet<u32>,
    /// Number of descriptors of this process and all its descendants.
    descriptors: usize,
    /// Mounts of this process, as text.
    mounts: String,
    /// Names of the sandbox's files in the directory for temporary files.
    files: BTreeSet<String>,
}

impl ResourceSnapshot {
    /// Takes a snapshot of the current state.
    fn snapshot() -> Self {
        let processes = descendants(std::process::id());
        let descriptors = num_open_files(std::process::id())
            + processes.iter().map(|pid| num_open_files(*pid)).sum::<usize>();
        let files = fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        let files = files.map(|entry| entry.file_name().to_string_lossy().into_owned());
        ResourceSnapshot {
            processes,
            descriptors,
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap(),
            files: files.filter(|name| name.starts_with("levade-sandbox-")).collect(),
        }
    }

    /// Takes a snapshot once the state has stopped changing.
    pub async fn wait_until_stable() -> Self {
        let mut last = ResourceSnapshot::snapshot();
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = ResourceSnapshot::snapshot();
            if now == last {
                return now;
            }
            last = now;
        }
    }

    /// Waits until the state equals this snapshot again. Returns a description of the leftovers on
    /// timeout.
    pub async fn wait_until_restored(&self) -> Result<(), String> {
        let started = std::time::Instant::now();
        loop {
            let now = ResourceSnapshot::snapshot();
            if now == *self {
                return Ok(());
            }
            if started.elapsed() > TIMEOUT {
                return Err(format!("left over: {now:?}\nbefore: {self:?}"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn num_open_files(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Returns the number of descendants of this process.
pub fn processes() -> usize {
    descendants(std::process::id()).len()
}

fn descendants(pid: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut open = vec![pid];
    while let Some(pid) = open.pop() {
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok());
            open.extend(children.filter(|pid| found.insert(*pid)));
        }
    }
    found
}
