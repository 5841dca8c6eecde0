//! Memory of a jail's processes, read from outside.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

/// Bytes of a page. All processors that are supported have these.
const PAGE: u64 = 4096;

/// Most processes that are looked at.
const MOST: usize = 4096;

/// Most further readings of a list that does not stand still.
const READINGS: usize = 8;

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
        let pid = found[at];
        for thread in settled(|| threads(pid)) {
            found.extend(settled(|| children(pid, thread)));
        }
        at += 1;
    }
    found.split_off(1)
}

fn threads(pid: u32) -> BTreeSet<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn children(pid: u32, thread: u32) -> BTreeSet<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// All that a listing names until it reads the same twice in a row. Where an entry goes away in the middle of
/// a reading, the kernel leaves out one that stays: it finds its place again by counting.
fn settled(list: impl Fn() -> BTreeSet<u32>) -> BTreeSet<u32> {
    let mut last = list();
    let mut all = last.clone();
    for _ in 0..READINGS {
        let next = list();
        all.extend(&next);
        if next == last {
            break;
        }
        last = next;
    }
    all
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
    use std::sync::mpsc;
    use std::time::Duration;

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

    #[test]
    fn children_are_found_while_threads_before_theirs_end() {
        for _ in 0..300 {
            let before: Vec<_> = (0..16)
                .map(|n| std::thread::spawn(move || std::thread::sleep(Duration::from_micros(400 + 37 * n))))
                .collect();
            let (says, id) = mpsc::channel();
            let (end, ends) = mpsc::channel::<()>();
            let parent = std::thread::spawn(move || {
                let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
                says.send(child.id()).unwrap();
                let _ = ends.recv();
                child.kill().unwrap();
                child.wait().unwrap();
            });
            let child = id.recv().unwrap();
            for _ in 0..20 {
                assert!(below(std::process::id()).contains(&child));
            }
            end.send(()).unwrap();
            before.into_iter().chain([parent]).for_each(|thread| thread.join().unwrap());
        }
    }
}
