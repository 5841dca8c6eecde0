//! Processes, mounts, descriptors and files that are there, and whether any are left over.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

/// Longest wait for the kernel to take away what has ended.
const LONGEST: Duration = Duration::from_secs(10);

/// All that a run could leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Processes below this one.
    processes: BTreeSet<u32>,
    /// Descriptors of this process and of all below.
    descriptors: usize,
    /// Mounts of this process.
    mounts: String,
    /// Files of its own kind in the folder for temporary ones.
    files: BTreeSet<String>,
}

impl Held {
    /// The state of now.
    fn now() -> Self {
        let processes = below(std::process::id());
        let of = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let descriptors = of(std::process::id()) + processes.iter().map(|pid| of(*pid)).sum::<usize>();
        let files = fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        let files = files.map(|entry| entry.file_name().to_string_lossy().into_owned());
        Held {
            processes,
            descriptors,
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap(),
            files: files.filter(|name| name.starts_with("levade-sandbox-")).collect(),
        }
    }

    /// The state once nothing ends any more.
    pub async fn settled() -> Self {
        let mut last = Held::now();
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = Held::now();
            if now == last {
                return now;
            }
            last = now;
        }
    }

    /// Waits until there is no more than this, which must not take long.
    pub async fn waited_for(&self) -> Result<(), String> {
        let begun = std::time::Instant::now();
        loop {
            let now = Held::now();
            if now == *self {
                return Ok(());
            }
            if begun.elapsed() > LONGEST {
                return Err(format!("left over: {now:?}\nbefore: {self:?}"));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Number of the processes below this one.
pub fn processes() -> usize {
    below(std::process::id()).len()
}

fn below(pid: u32) -> BTreeSet<u32> {
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
