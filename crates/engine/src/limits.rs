//! Finds the memory that this process can still allocate: the minimum of what the machine, the
//! control groups of the process (cgroups) and its resource limits leave.
//!
//! All values are read from the system's files. CPU quotas are out of scope:
//! `std::thread::available_parallelism` respects them.

use std::path::{Component, Path, PathBuf};

/// Returns the number of bytes that can be allocated without swapping, according to the system: the
/// minimum of the machine's free memory, what the cgroup of the process and each of its ancestors
/// leave (Slurm, systemd, Docker, Kubernetes), and what its resource limits leave (`ulimit -v`,
/// `-d`). Returns `None` if the system has no such files, as outside Linux.
pub fn available_memory() -> Option<u64> {
    SystemFiles { root: Path::new("/") }.available()
}

/// The system's files below a root directory, which is `/` outside tests.
struct SystemFiles<'a> {
    root: &'a Path,
}

/// A cgroup hierarchy that limits memory.
#[derive(Debug, PartialEq)]
struct CgroupHierarchy {
    /// Whether the hierarchy is of cgroup version 2.
    unified: bool,
    /// Path of the hierarchy's mount point.
    mount: PathBuf,
    /// Cgroup of the process, relative to the mount point.
    group: PathBuf,
}

impl SystemFiles<'_> {
    fn read_file(&self, path: impl AsRef<Path>) -> String {
        let path = path.as_ref();
        std::fs::read_to_string(self.root.join(path.strip_prefix("/").unwrap_or(path)))
            .unwrap_or_default()
    }

    fn available(&self) -> Option<u64> {
        let machine = parse_kilobytes(&self.read_file("/proc/meminfo"), "MemAvailable:")?;
        let hierarchies = hierarchies(
            &self.read_file("/proc/self/cgroup"),
            &self.read_file("/proc/self/mountinfo"),
        );
        let groups = hierarchies.iter().filter_map(|hierarchy| self.free_in_hierarchy(hierarchy));
        let own = free_under_resource_limits(
            &self.read_file("/proc/self/limits"),
            &self.read_file("/proc/self/status"),
        );
        groups.chain(own).chain([machine]).min()
    }

    /// Returns the bytes that the limits of the process's cgroup and of its ancestors leave: the
    /// minimum over these groups. Returns `None` if there is no limit.
    fn free_in_hierarchy(
        &self,
        CgroupHierarchy { unified, mount, group }: &CgroupHierarchy,
    ) -> Option<u64> {
        let free_in = |group: &Path| {
            let file = |name: &str| self.read_file(mount.join(group).join(name));
            let stat = file("memory.stat");
            if *unified {
                // Above `memory.high` the kernel throttles the group until it uses less.
                let limits = [file("memory.max"), file("memory.high")];
                free_in_group(&limits, &file("memory.current"), &stat, "inactive_file")
            } else {
                // Includes limits of ancestors that are not visible from inside the container.
                let ancestor_limit =
                    number_after(&stat, "hierarchical_memory_limit").unwrap_or_default();
                let limits = [file("memory.limit_in_bytes"), ancestor_limit];
                free_in_group(&limits, &file("memory.usage_in_bytes"), &stat, "total_inactive_file")
            }
        };
        group.ancestors().filter_map(free_in).min()
    }
}

/// Returns the bytes that a cgroup leaves: the lowest of its limits, minus its usage. The arguments
/// are the contents of its files. File pages that were not accessed lately count as usage, but the
/// kernel drops them when memory is needed. Returns `None` if there is no limit.
fn free_in_group(limits: &[String], used: &str, stat: &str, dropped: &str) -> Option<u64> {
    let dropped = number_after(stat, dropped).and_then(|text| parse_number(&text)).unwrap_or(0);
    let used = parse_number(used).unwrap_or(0).saturating_sub(dropped);
    let limit = limits.iter().filter_map(|limit| parse_number(limit)).min()?;
    Some(limit.saturating_sub(used))
}

fn parse_number(text: &str) -> Option<u64> {
    text.trim().parse::<u64>().ok()
}

fn number_after(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).map(str::to_owned)
}

/// Returns the hierarchies that limit memory, each with the cgroup of the process, from its
/// `cgroup` and `mountinfo` files.
fn hierarchies(cgroup: &str, mountinfo: &str) -> Vec<CgroupHierarchy> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        // Version 1: 4:memory:/slurm/uid_1000/job_7. Version 2: 0::/user.slice/user-1000.slice
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|name| name == "memory") {
            continue;
        }
        for (root, mount) in memory_mounts(mountinfo, unified) {
            // A container may see only its own group, mounted as the root, or read the path of a
            // group that is not visible to it.
            let inside = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
            let is_below = inside.components().all(|part| matches!(part, Component::Normal(_)));
            let group = if is_below { inside.to_owned() } else { PathBuf::new() };
            found.push(CgroupHierarchy { unified, mount, group });
        }
    }
    found
}

/// Returns the mounts of cgroup hierarchies for memory: the group at the root of the mount, and the
/// mount point.
fn memory_mounts(mountinfo: &str, unified: bool) -> Vec<(PathBuf, PathBuf)> {
    mountinfo.lines().filter_map(|line| parse_mount(line, unified)).collect()
}

/// Parses a line of `mountinfo`. Returns `None` if it is no mount of a hierarchy for memory.
fn parse_mount(line: &str, unified: bool) -> Option<(PathBuf, PathBuf)> {
    // 35 31 0:32 /root /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
    let (mount_info, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let name = kind.next()?;
    let options = kind.nth(1).unwrap_or_default();
    let is_match = if unified {
        name == "cgroup2"
    } else {
        name == "cgroup" && options.split(',').any(|option| option == "memory")
    };
    let mut mount_fields = mount_info.split(' ').skip(3);
    let root = mount_fields.next()?;
    let mount = mount_fields.next()?;
    is_match.then(|| (unescape(root).into(), unescape(mount).into()))
}

/// Decodes a path from `mountinfo`, which writes spaces, tabs, line breaks and backslashes as octal
/// escapes.
fn unescape(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(text.to_owned(), |text, (code, character)| text.replace(code, character))
}

/// Returns the bytes that the resource limits on address space and data leave, or `None` if both
/// are unlimited.
fn free_under_resource_limits(limits: &str, status: &str) -> Option<u64> {
    let free = |name: &str, used: &str| {
        // Max address space         307200000            unlimited            bytes
        let soft =
            limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
        Some(soft.parse::<u64>().ok()?.saturating_sub(parse_kilobytes(status, used).unwrap_or(0)))
    };
    [free("Max address space", "VmSize:"), free("Max data size", "VmData:")]
        .into_iter()
        .flatten()
        .min()
}

/// Parses the number of bytes from a line such as `MemAvailable:   123 kB`.
fn parse_kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    /// Returns the memory left, in MiB, on a machine with 8000 MiB free and these files.
    fn available_mib(files: &[(&str, &str)]) -> u64 {
        let dir = tempfile::tempdir().unwrap();
        let meminfo = format!("MemTotal: 9999999 kB\nMemAvailable:  {} kB\n", 8000 << 10);
        for (path, contents) in [("proc/meminfo", meminfo.as_str())].iter().chain(files) {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, contents).unwrap();
        }
        SystemFiles { root: dir.path() }.available().unwrap() / MIB
    }

    fn mib(n: u64) -> String {
        format!("{}\n", n * MIB)
    }

    #[test]
    fn available_memory_is_free_memory_without_limits() {
        assert_eq!(available_mib(&[]), 8000);
        let unlimited = [
            ("proc/self/cgroup", "0::/init.scope\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/init.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/init.scope/memory.current", "999999999\n"),
            (
                "proc/self/limits",
                "Max address space         unlimited            unlimited            bytes\n",
            ),
        ];
        assert_eq!(available_mib(&unlimited), 8000);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(SystemFiles { root: dir.path() }.available(), None);
    }

    /// systemd, version 2: the limit may be the unit's own, or that of an enclosing slice.
    #[test]
    fn systemd_unit_memory_is_limited_by_enclosing_slice() {
        let own = mib(3000);
        let slice = mib(2500);
        let used = mib(900);
        let more = mib(1000);
        let stat = format!("anon 1\ninactive_file {}", mib(400));
        let unit = "sys/fs/cgroup/user.slice/user-1000.slice/run-7.scope";
        let files = [
            ("proc/self/cgroup", "0::/user.slice/user-1000.slice/run-7.scope\n"),
            ("proc/self/mountinfo", UNIFIED),
            (&format!("{unit}/memory.max"), &*own),
            (&format!("{unit}/memory.current"), &*used),
            (&format!("{unit}/memory.stat"), &*stat),
            ("sys/fs/cgroup/user.slice/user-1000.slice/memory.max", "max"),
            ("sys/fs/cgroup/user.slice/user-1000.slice/memory.high", &*slice),
            ("sys/fs/cgroup/user.slice/user-1000.slice/memory.current", &*more),
        ];
        assert_eq!(available_mib(&files[..5]), 3000 - (900 - 400));
        assert_eq!(available_mib(&files), 2500 - 1000);
    }

    /// Slurm, version 1: steps within jobs within users; the job has the limit. The hybrid
    /// hierarchy of version 2, mounted alongside, has no memory controller.
    #[test]
    fn slurm_step_memory_is_limited_by_job() {
        let job = mib(4000);
        let used = mib(1500);
        let none = "9223372036854771712\n";
        let files = [
            (
                "proc/self/cgroup",
                "9:cpuset:/\n4:memory:/slurm/uid_5/job_7/step_0\n0::/system.slice\n",
            ),
            (
                "proc/self/mountinfo",
                "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                 34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                 35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup \
                 rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/memory/slurm/uid_5/job_7/step_0/memory.limit_in_bytes", none),
            ("sys/fs/cgroup/memory/slurm/uid_5/job_7/memory.limit_in_bytes", &*job),
            ("sys/fs/cgroup/memory/slurm/uid_5/job_7/memory.usage_in_bytes", &*used),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", none),
        ];
        assert_eq!(available_mib(&files), 2500);
    }

    /// Docker: with a cgroup namespace, the group is the root; without one, its path is the host's
    /// path, and so is the root of the mount.
    #[test]
    fn docker_container_memory_is_limited_by_cgroup() {
        let limit = mib(1000);
        let used = mib(250);
        let own = [("sys/fs/cgroup/memory.max", &*limit), ("sys/fs/cgroup/memory.current", &*used)];
        let namespace = [("proc/self/cgroup", "0::/\n"), ("proc/self/mountinfo", UNIFIED)];
        assert_eq!(available_mib(&[&own[..], &namespace].concat()), 750);
        // The path of the group lies outside of what the container sees.
        let outside = [("proc/self/cgroup", "0::/../other\n"), ("proc/self/mountinfo", UNIFIED)];
        assert_eq!(available_mib(&[&own[..], &outside].concat()), 750);
        let host = [
            ("proc/self/cgroup", "0::/system.slice/docker-ab.scope\n"),
            (
                "proc/self/mountinfo",
                "30 23 0:26 /system.slice/docker-ab.scope /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            ),
        ];
        assert_eq!(available_mib(&[&own[..], &host].concat()), 750);
    }

    /// Kubernetes, version 1: the container sees only its own directory; the pod's limit is in its
    /// statistics.
    #[test]
    fn kubernetes_pod_limit_is_read_from_memory_stat() {
        let limit = mib(3000);
        let used = mib(500);
        let stat =
            format!("hierarchical_memory_limit {}total_inactive_file {}", mib(2000), mib(100));
        let files = [
            ("proc/self/cgroup", "4:hugetlb,memory:/kubepods/burstable/pod1/c1\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 /kubepods/burstable/pod1/c1 /odd\\040place/memory ro master:9 - \
                 cgroup cgroup rw,memory\n",
            ),
            ("odd place/memory/memory.limit_in_bytes", &*limit),
            ("odd place/memory/memory.usage_in_bytes", &*used),
            ("odd place/memory/memory.stat", &*stat),
        ];
        assert_eq!(available_mib(&files), 2000 - (500 - 100));
    }

    #[test]
    fn ulimits_limit_available_memory() {
        let limits = format!(
            "Limit                     Soft Limit           Hard Limit           Units\n\
             Max data size             {}            unlimited            bytes\n\
             Max address space         {}            unlimited            bytes\n",
            700 * MIB,
            1000 * MIB
        );
        let status = format!("VmSize:\t  {} kB\nVmData:\t  {} kB\n", 200 << 10, 50 << 10);
        let files = [("proc/self/limits", &*limits), ("proc/self/status", &*status)];
        assert_eq!(available_mib(&files), 650);
        assert_eq!(available_mib(&files[..1]), 700);
    }
}
