//! Levels of protection, and the named walls (isolation mechanisms) between code and the host.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Level of protection that a sandbox must provide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Demand {
    /// Every wall of [`WALLS`] is required. If a wall is missing, no code runs.
    #[default]
    Full,
    /// Code runs behind the walls that the kernel provides, even if other walls are missing.
    BestEffort,
}

impl std::str::FromStr for Demand {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "full" => Ok(Demand::Full),
            "best-effort" => Ok(Demand::BestEffort),
            other => Err(format!("the protection {other:?} is unknown; use full or best-effort")),
        }
    }
}

/// Names of all walls of full protection, each with its purpose.
pub const WALLS: [(&str, &str); 14] = [
    ("user-namespace", "privileges that are confined to the jail"),
    ("mount-namespace", "private mounts"),
    ("pid-namespace", "sees and signals its own processes only; all end with the run"),
    ("network-namespace", "no network device, not even loopback"),
    ("ipc-namespace", "no shared memory with other processes"),
    ("uts-namespace", "no host name"),
    ("minimal-root", "read-only: interpreter, libraries, five devices"),
    ("sized-folders", "work directory and /tmp in memory, limited in size and number of files"),
    ("landlock", "a second barrier around files, sockets and signals"),
    ("seccomp", "only listed system calls; only local sockets"),
    ("no-new-privileges", "no privileges from setuid files"),
    ("no-capabilities", "no capabilities in any namespace"),
    ("resource-limits", "limits on memory, processes, time and files"),
    ("memory-watch", "limit on the total memory of all processes"),
];

/// Names of the walls that only namespaces provide.
pub(crate) const NAMESPACE_WALLS: [&str; 8] = [
    "user-namespace",
    "mount-namespace",
    "pid-namespace",
    "network-namespace",
    "ipc-namespace",
    "uts-namespace",
    "minimal-root",
    "sized-folders",
];

/// Protection that a sandbox has achieved on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Protection {
    /// Names of the active walls.
    pub achieved: Vec<String>,
    /// Missing walls, with the reasons.
    pub missing: Vec<MissingWall>,
}

/// A wall of the sandbox that this kernel does not provide.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingWall {
    /// Name of the wall, as in [`WALLS`].
    pub name: String,
    /// Reason why the wall is missing, as the kernel reports it.
    pub why: String,
}

impl Protection {
    /// Creates a protection that has all walls except `missing`.
    pub(crate) fn with_missing(missing: Vec<MissingWall>) -> Self {
        let achieved = WALLS
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| !missing.iter().any(|wall| wall.name == **name))
            .map(str::to_owned)
            .collect();
        Protection { achieved, missing }
    }

    /// Returns whether all walls are active.
    pub fn is_full(&self) -> bool {
        self.missing.is_empty()
    }

    /// Returns the name of the achieved level: `full` or `partial`.
    pub fn name(&self) -> &'static str {
        if self.is_full() { "full" } else { "partial" }
    }
}

impl fmt::Display for Protection {
    /// Formats the protection as one line with the active and the missing walls.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name(), self.achieved.join(", "))?;
        if !self.is_full() {
            let missing: Vec<&str> = self.missing.iter().map(|wall| wall.name.as_str()).collect();
            write!(f, "; missing: {}", missing.join(", "))?;
        }
        Ok(())
    }
}

/// Describes the missing walls with their reasons, for an error message. Walls with the same reason
/// are grouped.
pub(crate) fn describe_missing_walls(missing: &[MissingWall]) -> String {
    let mut grouped: Vec<(&str, Vec<&str>)> = Vec::new();
    for wall in missing {
        match grouped.iter_mut().find(|(why, _)| *why == wall.why) {
            Some((_, names)) => names.push(&wall.name),
            None => grouped.push((&wall.why, vec![&wall.name])),
        }
    }
    let grouped: Vec<String> =
        grouped.iter().map(|(why, names)| format!("{} ({why})", names.join(", "))).collect();
    grouped.join("; ")
}

/// Returns instructions for getting the missing walls, for a user who can configure the machine.
pub(crate) fn missing_walls_advice(missing: &[MissingWall]) -> String {
    let mut ways = Vec::new();
    let lacks = |name: &str| missing.iter().any(|wall| wall.name == name);
    if lacks("user-namespace") {
        let switches = [
            ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=65536"),
            (
                "/proc/sys/kernel/unprivileged_userns_clone",
                "0",
                "sysctl kernel.unprivileged_userns_clone=1",
            ),
            (
                "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
                "1",
                "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            ),
        ];
        let off = |path: &str, value| {
            std::fs::read_to_string(path).is_ok_and(|text| text.trim() == value)
        };
        ways.extend(
            switches
                .iter()
                .filter(|(path, value, _)| off(path, *value))
                .map(|(.., way)| (*way).to_owned()),
        );
        if ways.is_empty() {
            ways.push(container_advice(rustix::process::geteuid().is_root()).into());
        }
    }
    if lacks("landlock") {
        ways.push("boot with `landlock` in lsm= (Linux 5.13 or later)".into());
    }
    if lacks("memory-watch") {
        ways.push("mount /proc".into());
    }
    ways.push(
        "or give protection = \"best-effort\" (--protection best-effort) to run behind what there \
         is"
        .into(),
    );
    ways.join("; ")
}

/// Returns the options of a container in which the sandbox can create namespaces. As root, the
/// sandbox mounts outside of a user namespace, which requires a capability that containers lack.
/// For other users, the container's seccomp filter and its masks over `/proc` prevent it.
fn container_advice(root: bool) -> &'static str {
    if root {
        "in a container, let root create namespaces (podman or docker run --cap-add SYS_ADMIN)"
    } else {
        "in a container, let it create namespaces and mount /proc (podman run --security-opt \
         seccomp=unconfined --security-opt unmask=ALL; docker has systempaths=unconfined instead \
         of unmask=ALL)"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing_wall(name: &str, why: &str) -> MissingWall {
        MissingWall { name: name.into(), why: why.into() }
    }

    #[test]
    fn missing_walls_are_named_with_reason_and_remedy() {
        let lost = vec![
            missing_wall("user-namespace", "unshare: No space left on device"),
            missing_wall("pid-namespace", "unshare: No space left on device"),
            missing_wall("landlock", "Function not implemented"),
        ];
        let protection = Protection::with_missing(lost.clone());
        assert!(!protection.is_full() && protection.achieved.contains(&"seccomp".to_owned()));
        assert!(!protection.achieved.contains(&"landlock".to_owned()));
        let text = describe_missing_walls(&lost);
        assert_eq!(
            text,
            "user-namespace, pid-namespace (unshare: No space left on device); landlock (Function \
             not implemented)"
        );
        let way = missing_walls_advice(&lost);
        assert!(way.contains("lsm=") && way.ends_with("to run behind what there is"), "{way}");
        assert!(Protection::with_missing(Vec::new()).is_full());
    }

    #[test]
    fn container_advice_names_capability_for_root_and_filters_for_user() {
        assert!(container_advice(true).contains("--cap-add SYS_ADMIN"));
        assert!(!container_advice(true).contains("seccomp"));
        let user = container_advice(false);
        assert!(user.contains("seccomp=unconfined") && user.contains("unmask=ALL"), "{user}");
        assert!(!user.contains("SYS_ADMIN"));
    }

    #[test]
    fn namespace_walls_are_in_wall_list() {
        for name in NAMESPACE_WALLS {
            assert!(WALLS.iter().any(|(wall, _)| *wall == name), "{name}");
        }
    }
}
