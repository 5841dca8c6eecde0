//! A cgroup (version 2) for each run. The kernel charges all memory to it, and counts its processes
//! and time.
//!
//! Cgroups are optional. They are used if this process can create one that limits memory: as root
//! with a writable cgroup file system, or in a subtree that systemd delegates (`systemd-run --user
//! --scope -p Delegate=yes`). Otherwise the memory watch (`memory.rs`) and the call filter enforce
//! the limit.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::limits::Limits;

/// Name prefix of the cgroup directories that this module creates. The process id follows it.
const PREFIX: &str = "levade-sandbox-";

/// Memory that a run's cgroup permits beyond the limits of the run, in bytes, for the pages that
/// the run's keeper process modifies.
const SUPERVISOR_MEMORY: u64 = 16 << 20;

/// Number of processes that a run's cgroup permits beyond the limit of the run: the keeper, the
/// runner and a reserve during a fork.
const EXTRA_PROCESSES: u32 = 4;

/// Timeout for the kernel to release the cgroups of runs that have ended.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Parent cgroup that contains the cgroups of all runs. Dropping it removes its directory.
#[derive(Debug)]
pub(crate) struct CgroupParent {
    path: PathBuf,
    created: AtomicUsize,
    /// Directories of dropped cgroups that the kernel has not released yet, because their processes
    /// are still ending.
    ended: Mutex<Vec<PathBuf>>,
}

/// Cgroup of one run, which limits memory and processes. Dropping it kills all its processes.
#[derive(Debug)]
pub(crate) struct RunCgroup {
    path: PathBuf,
    groups: Arc<CgroupParent>,
}

impl CgroupParent {
    /// Creates a parent cgroup for runs, as close as possible to the cgroup of this process.
    /// Returns an error if no cgroup that limits memory can be created.
    pub(crate) fn create() -> Result<Arc<Self>, String> {
        let mounts =
            fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let (mount, own) = find_cgroup(&mounts, &own).ok_or("cgroup version 2 is not mounted")?;
        let mut why = format!("{}: no cgroup in it can limit memory", mount.display());
        // Tries the closest ancestors first, so that the limits of this process apply to runs as
        // well.
        let mut above = Some(own.as_path());
        while let Some(parent) = above.filter(|path| path.starts_with(&mount)) {
            match CgroupParent::create_in_dir(parent) {
                Ok(groups) => return Ok(Arc::new(groups)),
                Err(error) => why = format!("{}: {error}", parent.display()),
            }
            above = parent.parent();
        }
        Err(why)
    }

    fn create_in_dir(parent: &Path) -> std::io::Result<Self> {
        remove_stale_dirs(parent);
        enable_controllers(parent)?;
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let path = path.with_extension(NUMBER.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&path)?;
        let groups = CgroupParent { path, created: AtomicUsize::new(0), ended: Mutex::default() };
        enable_controllers(&groups.path)?;
        // This is a test: missing permissions show only when a process is moved.
        let trial = Arc::new(groups);
        let group = RunCgroup::create(&trial, &Limits::default())?;
        let mut child = std::process::Command::new("sleep").arg("60").spawn()?;
        let moved = group
            .open_processes_file()
            .and_then(|to| fs::File::from(to).write_all(child.id().to_string().as_bytes()));
        let _ = child.kill();
        let _ = child.wait();
        moved?;
        drop(group);
        Arc::into_inner(trial)
            .ok_or_else(|| std::io::Error::other("the test cgroup is still in use"))
    }

    /// Removes the directories of ended cgroups that the kernel has released. Returns whether all
    /// of them are removed.
    fn remove_released_dirs(&self) -> bool {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.retain(|path| fs::remove_dir(path).is_err() && path.exists());
        ended.is_empty()
    }
}

impl Drop for CgroupParent {
    fn drop(&mut self) {
        let started = Instant::now();
        while !self.remove_released_dirs() && started.elapsed() < RELEASE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = fs::remove_dir(&self.path);
    }
}

impl RunCgroup {
    /// Creates a cgroup with the limits of a run. The memory of the cgroup includes the files of
    /// the run.
    pub(crate) fn create(groups: &Arc<CgroupParent>, limits: &Limits) -> std::io::Result<Self> {
        groups.remove_released_dirs();
        let path = groups.path.join(groups.created.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&path)?;
        let group = RunCgroup { path, groups: Arc::clone(groups) };
        let memory = ((limits.memory_mb + limits.disk_mb) << 20) + SUPERVISOR_MEMORY;
        group.write_control_file("memory.max", &memory.to_string())?;
        group.write_control_file("memory.oom.group", "1")?;
        group.write_control_file(
            "pids.max",
            &limits.processes.saturating_add(EXTRA_PROCESSES).to_string(),
        )?;
        // This file does not exist if the kernel has no swap support.
        let _ = group.write_control_file("memory.swap.max", "0");
        Ok(group)
    }

    fn write_control_file(&self, name: &str, value: &str) -> std::io::Result<()> {
        fs::write(self.path.join(name), value)
            .map_err(|error| std::io::Error::new(error.kind(), format!("{name}: {error}")))
    }

    /// Opens the file `cgroup.procs`, through which a process moves into the cgroup.
    pub(crate) fn open_processes_file(&self) -> std::io::Result<OwnedFd> {
        fs::OpenOptions::new().write(true).open(self.path.join("cgroup.procs")).map(OwnedFd::from)
    }

    /// Returns whether the kernel has killed a process of the cgroup because of the memory limit.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.read_number("memory.events", "oom_kill").is_some_and(|count| count > 0)
    }

    /// Returns the processor time of all current and former processes of the cgroup, in seconds.
    /// `None` if the kernel does not report it.
    pub(crate) fn cpu_seconds(&self) -> Option<f64> {
        Some(self.read_number("cpu.stat", "usage_usec")? as f64 / 1e6)
    }

    fn read_number(&self, file: &str, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.path.join(file)).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    }
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        let _ = self.write_control_file("cgroup.kill", "1");
        let mut ended = self.groups.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.push(std::mem::take(&mut self.path));
    }
}

/// Returns the mount point of the cgroup 2 file system, and the directory of this process's cgroup.
fn find_cgroup(mounts: &str, own: &str) -> Option<(PathBuf, PathBuf)> {
    let mount = mounts.lines().find_map(|line| {
        let (mount_fields, filesystem_fields) = line.split_once(" - ")?;
        filesystem_fields
            .starts_with("cgroup2 ")
            .then(|| mount_fields.split(' ').collect::<Vec<_>>())
    })?;
    let root = mount.get(3)?;
    let at = PathBuf::from(mount.get(4)?);
    let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    // The mount may show only a part of the tree, as in containers.
    let inside = own.strip_prefix(root.trim_end_matches('/')).unwrap_or("");
    let own = at.join(inside.trim_start_matches('/'));
    Some((at, own))
}

/// Enables the memory and process controllers for the children of a cgroup.
fn enable_controllers(parent: &Path) -> std::io::Result<()> {
    let read = |name: &str| fs::read_to_string(parent.join(name)).unwrap_or_default();
    let on = read("cgroup.subtree_control");
    let offered = read("cgroup.controllers");
    for name in ["memory", "pids"] {
        if has_word(&on, name) {
            continue;
        }
        if !has_word(&offered, name) {
            return Err(std::io::Error::other(format!(
                "the cgroup controller {name} is not available"
            )));
        }
        fs::write(parent.join("cgroup.subtree_control"), format!("+{name}"))?;
    }
    Ok(())
}

fn has_word(text: &str, name: &str) -> bool {
    text.split_whitespace().any(|found| found == name)
}

/// Removes the cgroup directories of earlier processes that were killed.
fn remove_stale_dirs(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|name| name.split('.').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            for run in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(run.path());
            }
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_path_joins_mount_point_and_own_cgroup() {
        let mounts = "25 1 0:22 / /sys rw - sysfs sysfs rw\n\
                      30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 \
                      rw,nsdelegate\n";
        let found = find_cgroup(mounts, "0::/user.slice/run-1.scope\n").unwrap();
        assert_eq!(found.1, Path::new("/sys/fs/cgroup/user.slice/run-1.scope"));
        let inside = "30 25 0:26 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        assert_eq!(
            find_cgroup(inside, "0::/docker/1/a\n").unwrap().1,
            Path::new("/sys/fs/cgroup/a")
        );
        assert_eq!(find_cgroup(inside, "4:memory:/\n"), None);
        assert_eq!(find_cgroup("25 1 0:22 / /sys rw - sysfs sysfs rw\n", "0::/\n"), None);
    }

    #[test]
    fn cgroup_directory_without_controllers_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let error = CgroupParent::create_in_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("memory"), "{error}");
    }

    /// Creates a parent cgroup in an ordinary directory, whose files keep what is written to them.
    fn create_on_disk(dir: &tempfile::TempDir) -> Arc<CgroupParent> {
        let path = dir.path().join("runs");
        fs::create_dir(&path).unwrap();
        Arc::new(CgroupParent { path, created: AtomicUsize::new(0), ended: Mutex::default() })
    }

    #[test]
    fn run_cgroup_sets_limits_and_kills_processes_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let groups = create_on_disk(&dir);
        let limits = Limits { memory_mb: 100, disk_mb: 28, processes: 30, ..Limits::default() };
        let first = RunCgroup::create(&groups, &limits).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join("runs/0").join(name));
        for (name, value) in [
            ("memory.max", (128 << 20) + SUPERVISOR_MEMORY),
            ("memory.oom.group", 1),
            ("memory.swap.max", 0),
            ("pids.max", 34),
        ] {
            assert_eq!(read(name).unwrap(), value.to_string(), "{name}");
        }
        assert!(RunCgroup::create(&groups, &limits).unwrap().path.ends_with("runs/1"));
        read("cgroup.kill").unwrap_err();
        drop(first);
        assert_eq!(read("cgroup.kill").unwrap(), "1");
    }

    #[test]
    fn run_cgroup_reads_memory_events_and_processor_time() {
        let dir = tempfile::tempdir().unwrap();
        let group = RunCgroup::create(&create_on_disk(&dir), &Limits::default()).unwrap();
        assert_eq!((group.is_out_of_memory(), group.cpu_seconds()), (false, None));
        let write = |name: &str, text: &str| fs::write(group.path.join(name), text).unwrap();
        write("memory.events", "low 0\noom 3\noom_kill 0\n");
        write("cpu.stat", "usage_usec 2500000\nuser_usec 1\n");
        assert_eq!((group.is_out_of_memory(), group.cpu_seconds()), (false, Some(2.5)));
        write("memory.events", "low 0\noom 0\noom_kill 2\noom_group_kill 1\n");
        assert!(group.is_out_of_memory());
    }

    /// The kernel refuses to remove a cgroup until its last process has ended.
    #[test]
    fn cgroup_directories_of_ended_runs_are_removed_on_release() {
        let dir = tempfile::tempdir().unwrap();
        let groups = create_on_disk(&dir);
        let [busy, removed] =
            [0, 1].map(|_| RunCgroup::create(&groups, &Limits::default()).unwrap());
        let [busy, removed] = [busy, removed].map(|group| group.path.clone());
        assert!(!groups.remove_released_dirs() && busy.exists());
        fs::remove_dir_all(&removed).unwrap();
        assert!(!groups.remove_released_dirs());
        assert_eq!(*groups.ended.lock().unwrap(), std::slice::from_ref(&busy));
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            fs::read_dir(busy)
                .unwrap()
                .for_each(|file| fs::remove_file(file.unwrap().path()).unwrap());
        });
        drop(groups);
        assert!(!dir.path().join("runs").exists());
        ends.join().unwrap();
    }

    #[test]
    fn stale_cgroup_directories_of_ended_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // Process ids are at most 2^22.
        let ended = format!("{PREFIX}{}.0", (1 << 22) + 1);
        let own = format!("{PREFIX}{}.0", std::process::id());
        for name in [ended.as_str(), own.as_str(), "system.slice"] {
            fs::create_dir_all(dir.path().join(name).join("1")).unwrap();
        }
        remove_stale_dirs(dir.path());
        let exists = |name: &str| dir.path().join(name).join("1").exists();
        assert!(exists(&own) && exists("system.slice") && !dir.path().join(ended).exists());
    }

    #[test]
    fn cgroup_delegation_turns_on_missing_controllers() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("cgroup.subtree_control");
        let delegated = |offered: &str, on: &str| {
            fs::write(dir.path().join("cgroup.controllers"), offered).unwrap();
            fs::write(&control, on).unwrap();
            enable_controllers(dir.path()).map(|()| fs::read_to_string(&control).unwrap())
        };
        // An ordinary file keeps only what was written last.
        assert_eq!(delegated("cpu memory pids\n", "").unwrap(), "+pids");
        assert_eq!(delegated("cpu memory pids\n", "cpu pids\n").unwrap(), "+memory");
        assert_eq!(delegated("cpu memory pids\n", "memory pids\n").unwrap(), "memory pids\n");
        assert!(delegated("cpu pids\n", "").unwrap_err().to_string().contains("controller memory"));
    }
}
