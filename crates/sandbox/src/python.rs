//! The Python interpreter of a sandbox, and the directories that it needs to read.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

use crate::error::SandboxError;

/// Timeout for an interpreter to run the probe script.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Script that an interpreter runs to describe itself as JSON.
const PROBE_SCRIPT: &str = r#"
import json, os, sys, sysconfig
why = None
try:
    import ctypes, resource, socket
    if not (hasattr(os, "pidfd_open") and hasattr(socket, "recv_fds")):
        why = "Python 3.9 or later on Linux is needed, and this is %s" % sys.version.split()[0]
except ImportError as error:
    why = "it lacks a module of its standard library: %s" % error
folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib")]
folders += [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
folders += [os.path.dirname(os.path.realpath(sys.executable))]
print(json.dumps({"executable": sys.executable, "why": why, "folders": folders, "version": sys.version.split()[0]}))
"#;

/// System directories that interpreters and shells need. They are exposed if they exist.
const SYSTEM: [&str; 12] = [
    "/bin",
    "/lib",
    "/lib64",
    "/lib32",
    "/libx32",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib32",
    "/usr/libexec",
    "/usr/share/zoneinfo",
    "/etc/alternatives",
];

/// Directories that are too broad to be exposed to code. An interpreter that needs one of them is
/// rejected.
const BROAD_DIRS: [&str; 12] = [
    "/", "/root", "/home", "/etc", "/var", "/tmp", "/proc", "/sys", "/dev", "/run", "/mnt", "/work",
];

/// Directories of which each run has its own. Exposed paths within them appear alongside the files
/// of the run.
const PRIVATE_DIRS: [&str; 3] = ["/work", "/tmp", "/dev/shm"];

/// A Python interpreter that the sandbox can use.
#[derive(Debug, Clone)]
pub(crate) struct Python {
    /// Path of the interpreter itself, even if it was found through a wrapper.
    pub executable: PathBuf,
    /// Version of the interpreter, such as `3.11.7`.
    pub version: String,
    /// Files and directories that code can read but not write.
    pub read: Vec<String>,
    /// Directories in `read` that the user named. A run sees each of them through a separate file
    /// system.
    pub separate_dirs: Vec<String>,
}

#[derive(Deserialize)]
struct ProbeResult {
    executable: String,
    why: Option<String>,
    #[serde(rename = "folders")]
    dirs: Vec<String>,
    version: String,
}

impl Python {
    /// Inspects a Python interpreter, or the interpreter of a virtual environment.
    ///
    /// # Errors
    /// Returns an error if the interpreter cannot be started, lacks a required feature, or is in a
    /// directory that must not be exposed.
    pub(crate) async fn find(named: &Path, also: &[PathBuf]) -> Result<Self, SandboxError> {
        let program = if named.is_dir() { named.join("bin/python3") } else { named.to_owned() };
        let mut command = Command::new(&program);
        command
            .args(["-I", "-c", PROBE_SCRIPT])
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        let outcome = tokio::time::timeout(TIMEOUT, command.output()).await;
        let output = outcome
            .map_err(|_| {
                python_error(named, format!("the interpreter printed nothing within {TIMEOUT:?}"))
            })?
            .map_err(|error| python_error(named, format!("{}: {error}", program.display())))?;
        let result: ProbeResult = serde_json::from_slice(&output.stdout).map_err(|_| {
            let stderr_text = String::from_utf8_lossy(&output.stderr);
            python_error(
                named,
                format!(
                    "the program is not a Python interpreter: {}",
                    stderr_text.lines().last().unwrap_or("the program printed unexpected output")
                ),
            )
        })?;
        if let Some(why) = result.why {
            return Err(python_error(named, why));
        }
        let mut read: Vec<String> = SYSTEM.iter().map(|dir| (*dir).to_owned()).collect();
        let home = std::env::var("HOME").unwrap_or_default();
        for dir in result.dirs.into_iter().filter(|dir| !dir.is_empty() && dir != "/usr") {
            if BROAD_DIRS.contains(&dir.as_str()) || dir == home {
                return Err(python_error(
                    named,
                    format!(
                        "the interpreter needs the complete directory {dir}, which code must not \
                         read"
                    ),
                ));
            }
            add_dir(&mut read, &dir);
        }
        let mut separate_dirs = Vec::new();
        for path in also {
            let path = std::fs::canonicalize(path).map_err(|error| {
                SandboxError::Request(format!(
                    "read = {:?} cannot be shown to code: {error}",
                    path.display()
                ))
            })?;
            if PRIVATE_DIRS.iter().any(|own| path == Path::new(own)) {
                return Err(SandboxError::Request(format!(
                    "read = {path:?} cannot be shown to code, because code has a private \
                     directory there; list the paths inside it"
                )));
            }
            let Some(text) =
                path.to_str().filter(|text| !["/", "/proc", "/sys", "/dev"].contains(text))
            else {
                return Err(SandboxError::Request(format!(
                    "read = {path:?} cannot be shown to code, because it is not UTF-8 or shows the \
                     whole system; list the paths inside it"
                )));
            };
            let kind = std::fs::metadata(&path).map(|found| found.file_type());
            if kind.is_ok_and(|kind| !kind.is_dir() && !kind.is_file()) {
                return Err(SandboxError::Request(format!(
                    "read = {path:?} cannot be shown to code: it is neither a file nor a directory"
                )));
            }
            if path.is_dir() {
                separate_dirs.push(text.to_owned());
            }
            add_dir(&mut read, text);
        }
        Ok(Python {
            executable: result.executable.into(),
            version: result.version,
            read,
            separate_dirs,
        })
    }
}

fn python_error(named: &Path, why: String) -> SandboxError {
    SandboxError::Python { python: named.display().to_string(), why }
}

/// Appends a directory and, if its path contains symbolic links, also its real path.
fn add_dir(read: &mut Vec<String>, dir: &str) {
    let real = std::fs::canonicalize(dir).ok().and_then(|path| path.to_str().map(str::to_owned));
    for path in [Some(dir.to_owned()), real].into_iter().flatten() {
        if !read.contains(&path) {
            read.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn python_search_describes_interpreter() {
        let python = Python::find(Path::new("python3"), &[]).await.unwrap();
        assert!(python.version.starts_with("3."), "{}", python.version);
        assert!(python.executable.is_absolute());
        assert!(
            !python.read.iter().any(|folder| BROAD_DIRS.contains(&folder.as_str())),
            "{:?}",
            python.read
        );
    }

    #[tokio::test]
    async fn error_names_unusable_python_interpreter_or_path() {
        for (named, part) in [
            ("/nowhere/python", "No such file"),
            ("/bin/cat", "the program is not a Python interpreter"),
        ] {
            let error = Python::find(Path::new(named), &[]).await.unwrap_err().to_string();
            assert!(error.contains(named) && error.contains(part), "{error}");
        }
        let error = Python::find(Path::new("python3"), &["/nowhere".into()]).await.unwrap_err();
        assert!(error.to_string().contains("/nowhere"), "{error}");
        let error = Python::find(Path::new("python3"), &["/tmp".into()]).await.unwrap_err();
        assert!(
            error.to_string().contains("because code has a private directory there"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn python_interpreter_exposes_only_files_and_narrow_directories() {
        let dir = tempfile::tempdir().unwrap();
        let shown = std::fs::canonicalize(dir.path()).unwrap();
        let file = shown.join("file");
        let socket = shown.join("socket");
        std::fs::write(&file, "").unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let found = find_python(&shown).await.unwrap();
        assert!(
            found.read.contains(&path_text(&shown)) && found.separate_dirs == [path_text(&shown)]
        );
        let found = find_python(&file).await.unwrap();
        assert!(found.read.contains(&path_text(&file)) && found.separate_dirs.is_empty());
        for path in [socket.as_path(), Path::new("/"), Path::new("/proc")] {
            let error = find_python(path).await.unwrap_err().to_string();
            assert!(error.contains(&format!("read = {path:?} cannot be shown to code")), "{error}");
        }
    }

    async fn find_python(path: &Path) -> Result<Python, SandboxError> {
        Python::find(Path::new("python3"), &[path.to_owned()]).await
    }

    fn path_text(path: &Path) -> String {
        path.to_str().unwrap().to_owned()
    }
}
