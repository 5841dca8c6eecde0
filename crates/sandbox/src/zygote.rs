//! The fork server: a Python interpreter that has started in a jail, and forks a separate jail for
//! each run.
//!
//! The fork server is a Python process (`zygote/*.py`) in its own namespaces, with a read-only root
//! that contains an interpreter, libraries and five devices. For each run it forks a *keeper*, the
//! supervisor of that run, into new namespaces. The keeper forks the *runner*, which drops all
//! rights (resource limits, capabilities, Landlock, list of system calls) and executes the code.
//!
//! Everything that a run leaves ends with the keeper, and the keeper ends when its caller has
//! exited. The fork server loads most of the call filter once for all runs. The runner exits
//! without finalizing the interpreter, because finalization would copy the memory that it shares
//! with the fork server.
//!
//! This module passes the descriptors and the description of a run. This process decides on the
//! filter, limits and directories, observes the run from outside (`jail`, `memory`, `cgroup`), and
//! trusts nothing that a runner reports. All steps after the fork are in Python: only a process
//! itself can drop its rights, and code starts fast only in an interpreter that is already running.

use std::io::{Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::unix::pipe;
use tokio::net::{UnixDatagram, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::cgroup::{CgroupParent, RunCgroup};
use crate::error::SandboxError;
use crate::filter;
use crate::limits::Limits;
use crate::protection::{MissingWall, NAMESPACE_WALLS};
use crate::python::Python;
use crate::wire::{FrameStream, send_descriptors};

/// Source code of the Python program that is the fork server.
const PROGRAM: &str = concat!(
    include_str!("zygote/jail.py"),
    include_str!("zygote/keeper.py"),
    include_str!("zygote/runner.py"),
    include_str!("zygote/server.py")
);

/// User id of the sandboxed code on the host if this process is root. The id is outside all ranges
/// that are usually assigned.
const USER: u32 = 0x7000_0d5e;

/// Timeout for the fork server to start and to import the preloaded modules.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A fork server process, which starts each run from a preloaded interpreter.
pub(crate) struct Zygote {
    control: UnixDatagram,
    /// The fork server process. It exits when the control socket closes. Dropping this value kills
    /// the process if necessary.
    _process: Child,
    /// Whether each run has its own namespaces.
    pub jailed: bool,
    /// Walls that the fork server could not build, with the reasons.
    pub missing: Vec<MissingWall>,
    /// Parent cgroup of the runs. `None` if this process cannot create cgroups.
    groups: Option<Arc<CgroupParent>>,
}

/// Configuration of a fork server.
#[derive(Debug, Clone)]
pub(crate) struct ZygoteConfig {
    pub python: Python,
    /// Names of Python modules that are imported before runs are forked.
    pub preload: Vec<String>,
    /// Whether a run ends if it cannot drop a privilege.
    pub full: bool,
    /// Whether the fork server tries to create namespaces.
    pub namespaces: bool,
    /// Parent cgroup of the runs. `None` if this process cannot create cgroups.
    pub groups: Option<Arc<CgroupParent>>,
}

/// First message of the fork server, which describes its protection.
#[derive(Deserialize)]
struct ZygoteHello {
    missing: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    preload: std::collections::BTreeMap<String, String>,
}

/// Description of a run for its keeper process, without the contents of files.
#[derive(Debug, Serialize)]
pub(crate) struct RunOrder {
    /// Command to execute instead of Python code. `None` runs the code in the forked interpreter.
    pub command: Option<Vec<String>>,
    /// Name of the file that contains the code.
    pub main: String,
    pub session: bool,
    /// Maximum length of the text of a value that a cell displays, in characters.
    pub shown: usize,
    pub environment: std::collections::BTreeMap<String, String>,
    /// Name of each file, and its size in bytes.
    pub files: Vec<(String, usize)>,
    pub fetch: Vec<String>,
    pub fetch_bytes: u64,
    /// Work directory of the run if there are no namespaces. `None` with namespaces.
    #[serde(rename = "folder")]
    pub dir: Option<String>,
    /// Resource limits as JSON, in bytes and seconds.
    pub limits: Value,
}

/// The ends of a run's streams that belong to this process.
pub(crate) struct RunStreams {
    pub line: FrameStream,
    pub stdout: pipe::Receiver,
    pub stderr: pipe::Receiver,
    pub cells: Option<FrameStream>,
}

impl Zygote {
    /// Starts a fork server process.
    ///
    /// # Errors
    /// Returns an error if the server does not start, or a module cannot be imported.
    pub(crate) async fn start(config: &ZygoteConfig) -> Result<Self, SandboxError> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|error| broken_error("no socket", error.into()))?;
        rustix::io::ioctl_fionbio(&ours, true)
            .map_err(|error| broken_error("no socket", error.into()))?;
        let mut command = Command::new(&config.python.executable);
        command
            .args(["-I", "-X", "utf8", "-B", "-c", PROGRAM])
            .env_clear()
            .env("OPENBLAS_NUM_THREADS", "1")
            .env("OMP_NUM_THREADS", "1")
            .env("MPLBACKEND", "agg")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().map_err(|error| {
            broken_error(&config.python.executable.display().to_string(), error)
        })?;
        drop(command);
        let stderr_text = read_stderr_tail(process.stderr.take());
        // This is a SEQPACKET socket: packets in order over a connection that reports when the peer
        // has exited. tokio has no type for it.
        let control = UnixDatagram::from_std(ours.into())
            .map_err(|error| broken_error("no socket", error))?;
        let filters =
            filter::build_filter_programs(config.groups.is_some()).map_err(SandboxError::Broken)?;
        let hex =
            |bytes: &Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let settings = json!({
            "namespaces": config.namespaces,
            "read": config.python.read,
            "preload": config.preload,
            "filters": filters.server.iter().map(hex).collect::<Vec<_>>(),
            "runner_filter": hex(&filters.runner),
            "full": config.full,
            "apart": config.python.separate_dirs,
            "counted": config.groups.is_some(),
            "user": USER,
            "pivot_root": libc::SYS_pivot_root,
            "clone": libc::SYS_clone,
        });
        let greeted = timeout(START_TIMEOUT, async {
            control.send(settings.to_string().as_bytes()).await?;
            receive_response(&control).await
        });
        let greeting = match greeted.await {
            Ok(Ok(bytes)) if !bytes.is_empty() => bytes,
            Ok(_) => {
                let stderr_text =
                    timeout(Duration::from_secs(2), stderr_text).await.ok().and_then(Result::ok);
                let stderr_text = stderr_text.unwrap_or_default();
                return Err(SandboxError::Broken(format!(
                    "the fork server exited during its start: {stderr_text}"
                )));
            }
            Err(_) => {
                return Err(SandboxError::Broken(format!(
                    "the fork server did not start within {START_TIMEOUT:?}"
                )));
            }
        };
        let greeting: ZygoteHello = serde_json::from_slice(&greeting).map_err(|error| {
            SandboxError::Broken(format!(
                "the first message of the fork server is invalid: {error}"
            ))
        })?;
        if let Some((module, why)) = greeting.preload.first_key_value() {
            return Err(SandboxError::Request(format!(
                "the module {module:?} in `preload` cannot be loaded in the jail: {why}"
            )));
        }
        let mut missing = Vec::new();
        let none = (!config.namespaces).then(|| "not tried".to_owned());
        if let Some(why) = greeting.missing.get("namespaces").or(none.as_ref()) {
            let wall = |name: &str| MissingWall { name: name.to_owned(), why: why.clone() };
            missing.extend(NAMESPACE_WALLS.iter().map(|name| wall(name)));
        }
        let groups = config.groups.clone();
        Ok(Zygote { control, _process: process, jailed: missing.is_empty(), missing, groups })
    }

    /// Returns whether the fork server process is running.
    pub(crate) fn is_alive(&self) -> bool {
        let mut polled = [rustix::event::PollFd::new(&self.control, rustix::event::PollFlags::IN)];
        // The server sends nothing after its greeting, so the socket becomes readable only when the
        // server exits.
        !matches!(
            rustix::event::poll(&mut polled, Some(&rustix::time::Timespec::default())),
            Ok(1..)
        )
    }

    /// Creates the cgroup of a run. Returns `None` if this process cannot create cgroups.
    ///
    /// # Errors
    /// Returns an error if the kernel rejects the cgroup. Then the run must not start, because the
    /// system call filter relies on the cgroup.
    pub(crate) fn create_cgroup(&self, limits: &Limits) -> Result<Option<RunCgroup>, SandboxError> {
        let created =
            self.groups.as_ref().map(|groups| RunCgroup::create(groups, limits)).transpose();
        created.map_err(|error| {
            SandboxError::Broken(format!("cannot create the cgroup of the run: {error}"))
        })
    }

    /// Forks the keeper process of a run, in the cgroup `group`.
    ///
    /// # Errors
    /// Returns an error if the fork server has exited, or this process has no free descriptors.
    pub(crate) async fn start_run(
        &self,
        order: &RunOrder,
        files: &[&[u8]],
        stdin: &[u8],
        group: Option<&RunCgroup>,
    ) -> std::io::Result<RunStreams> {
        let ordered = std::fs::File::from(memfd_create("order", MemfdFlags::CLOEXEC)?);
        let mut writing = &ordered;
        let head = serde_json::to_vec(order)?;
        writing.write_all(&(head.len() as u32).to_ne_bytes())?;
        writing.write_all(&head)?;
        files.iter().try_for_each(|file| writing.write_all(file))?;
        writing.rewind()?;
        let input = create_input_file(stdin)?;
        let (stdout_out, stdout_in) = create_output_pipe()?;
        let (stderr_out, stderr_in) = create_output_pipe()?;
        let (line, their_line) = StdStream::pair()?;
        let (cells, their_cells) = StdStream::pair()?;
        let group = group.map(RunCgroup::open_processes_file).transpose()?;
        let theirs = [
            ordered.as_fd(),
            input.as_fd(),
            stdout_in.as_fd(),
            stderr_in.as_fd(),
            their_line.as_fd(),
            their_cells.as_fd(),
        ];
        let theirs: Vec<_> = theirs.into_iter().chain(group.as_ref().map(AsFd::as_fd)).collect();
        send_descriptors(&self.control, &theirs).await?;
        Ok(RunStreams {
            line: to_frame_stream(line)?,
            stdout: pipe::Receiver::from_owned_fd(stdout_out)?,
            stderr: pipe::Receiver::from_owned_fd(stderr_out)?,
            cells: if order.session { Some(to_frame_stream(cells)?) } else { None },
        })
    }
}

fn broken_error(what: &str, error: std::io::Error) -> SandboxError {
    SandboxError::Broken(format!("{what}: {error}"))
}

fn to_frame_stream(stream: StdStream) -> std::io::Result<FrameStream> {
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream).map(FrameStream::new)
}

/// Creates the standard input of a run as an immutable file. The code can read its size, read at
/// any offset, and open the file again.
fn create_input_file(bytes: &[u8]) -> std::io::Result<std::fs::File> {
    let mut file = std::fs::File::from(memfd_create(
        "stdin",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.write_all(bytes)?;
    file.rewind()?;
    fchmod(&file, Mode::from_raw_mode(0o444))?;
    fcntl_add_seals(
        &file,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )?;
    Ok(file)
}

/// Creates a pipe for output, and returns its read end and its write end. Code of another user can
/// open the write end again, for writing only, as `/dev/stdout` does.
fn create_output_pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    fchmod(&write, Mode::from_raw_mode(0o622))?;
    Ok((read, write))
}

/// Receives the next packet from the fork server. The packet is empty if the fork server has
/// exited.
async fn receive_response(from: &UnixDatagram) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 64 << 10];
    let count = from.recv(&mut bytes).await?;
    bytes.truncate(count);
    Ok(bytes)
}

/// Reads and logs the standard error of the fork server until it exits. Returns the last line.
fn read_stderr_tail(from: Option<tokio::process::ChildStderr>) -> tokio::task::JoinHandle<String> {
    use tokio::io::{AsyncBufReadExt, BufReader};
    tokio::spawn(async move {
        let mut last = String::new();
        let Some(from) = from else { return last };
        let mut lines = BufReader::new(from).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            tracing::warn!(%line, "the fork server wrote to standard error");
            last = line;
        }
        last
    })
}
