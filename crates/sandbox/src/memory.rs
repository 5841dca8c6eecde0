//! Memory of a jail's processes, read from outside.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a page. All processors that are supported have these.
const PAGE: u64 = 4096;

/// Most processes that are looked at.
const MOST: usize = 4096;

/// The process that a descriptor stands for, as it is called here.
pub(crate) fn process(descriptor: &OwnedFd) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
}

/// Whether the processes below one can be found.
pub(crate) fn can_watch(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).is_ok()
}

/// Whether the processes below `keeper` hold more than so many bytes together.
pub(crate) fn exceeds(keeper: u32, most: u64) -> bool {
    let processes = below(keeper);
    let resident: u64 = processes.iter().map(|pid| resident(*pid)).sum();
    // What processes share counts once, which takes longer to find out.
    resident > most
        && processes.iter().map(|pid| share(*pid).unwrap_or_else(|| self::resident(*pid))).sum::<u64>() > most
}

fn below(keeper: u32) -> Vec<u32> {
    let mut found = vec![keeper];
    let mut at = 0;
    while at < found.len() && found.len() < MOST {
        let threads = fs::read_dir(format!("/proc/{}/task", found[at])).into_iter().flatten().flatten();
        for thread in threads {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        at += 1;
    }
    found.split_off(1)
}

fn resident(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * PAGE
}

/// Memory of a process, where pages that others have, too, count in part.
fn share(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_children_is_counted() {
        let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
        let me = std::process::id();
        assert!(below(me).contains(&child.id()));
        assert!(resident(child.id()) > 0 && share(child.id()).unwrap() > 0);
        assert!(exceeds(me, 1) && !exceeds(me, 1 << 40));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!exceeds(child.id(), 0));
    }
}
