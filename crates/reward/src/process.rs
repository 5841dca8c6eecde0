//! Processes that score: their environment, and their end.
//!
//! A [`Supervisor`] starts them in a run, so that they end with this process even if it is killed. Without
//! one (in tests, and for users of the library) a process and its group end when its value is dropped.

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::process::{ExitStatus, Output, Stdio};

use levade_policy::environment::passed;
#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, Command};

/// Starts programs that end with this process, with all that they have started, however this process ends.
pub trait Supervisor: Debug + Send + Sync {
    /// Starts a program in a folder, which is that of this process if empty, with these environment
    /// variables. Returns its process and a text to write to the standard input first. The program ends when
    /// that input does. Without `input`, what follows the text is the program's input.
    ///
    /// # Errors
    /// Returns an error if the supervising process cannot be started. If the program cannot be, the process
    /// ends with code 127 and says `cannot start` on its standard error.
    fn start(
        &self,
        program: &[String],
        folder: &Path,
        environment: Vec<(String, String)>,
        input: Option<String>,
    ) -> Result<(Child, String), String>;
}

/// A process with all that it has started; dropping it ends them.
#[derive(Debug)]
pub(crate) struct Process {
    pub child: Child,
    /// Standard input, if the process reads more than its first input.
    pub stdin: Option<ChildStdin>,
    #[cfg(unix)]
    _group: Group,
}

/// What is started.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch<'a> {
    pub program: &'a [String],
    pub folder: &'a Path,
    /// Names of environment variables besides the usual ones.
    pub environment: &'a [String],
    pub supervisor: Option<&'a dyn Supervisor>,
}

/// Starts a program. With `input`, that is all that it reads.
///
/// # Errors
/// Returns an error if the program cannot be started, or says so later if it is supervised.
pub(crate) async fn start(launch: Launch<'_>, input: Option<String>) -> io::Result<Process> {
    let Launch { program, folder, environment, supervisor } = launch;
    if let Some(supervisor) = supervisor {
        let started = supervisor.start(program, folder, passed(environment), input);
        let (mut child, first) = started.map_err(io::Error::other)?;
        let mut stdin = child.stdin.take();
        if let Some(stdin) = &mut stdin {
            // A supervising process that is gone says why on its standard error.
            let _ = stdin.write_all(first.as_bytes()).await;
        }
        return Ok(Process {
            child,
            stdin,
            #[cfg(unix)]
            _group: Group(None),
        });
    }
    let [program, arguments @ ..] = program else { return Err(io::ErrorKind::NotFound.into()) };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_clear().envs(passed(environment)).kill_on_drop(true);
    if !folder.as_os_str().is_empty() {
        command.current_dir(folder);
    }
    #[cfg(unix)]
    command.process_group(0);
    let mut child = command.spawn()?;
    let mut stdin = child.stdin.take();
    if let Some(input) = input
        && let Some(mut stdin) = stdin.take()
    {
        // A program may know its answer without reading to the end.
        tokio::spawn(async move { stdin.write_all(input.as_bytes()).await });
    }
    Ok(Process {
        #[cfg(unix)]
        _group: Group(child.id().and_then(|id| Pid::from_raw(id as i32))),
        child,
        stdin,
    })
}

impl Process {
    /// Reads all that it prints, to its end.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub async fn output(&mut self) -> io::Result<Output> {
        let (out, err) = (self.child.stdout.take(), self.child.stderr.take());
        let (stdout, stderr, status) = tokio::join!(read(out), read(err), self.child.wait());
        Ok(Output { status: status?, stdout: stdout?, stderr: stderr? })
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut read = Vec::new();
    if let Some(mut from) = from {
        from.read_to_end(&mut read).await?;
    }
    Ok(read)
}

/// The group of a process that leads it.
#[cfg(unix)]
#[derive(Debug)]
struct Group(Option<Pid>);

#[cfg(unix)]
impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // Mostly there is nobody left.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

/// Returns how a process ended; a supervised one that was killed has a code beyond 128.
pub(crate) fn ending(status: ExitStatus) -> String {
    match status.code() {
        Some(code @ 129..=192) => format!("signal: {}", code - 128),
        _ => status.to_string(),
    }
}

/// Returns why a supervised program could not be started, if it could not.
pub(crate) fn not_started(status: ExitStatus, stderr: &[u8]) -> Option<String> {
    let why = String::from_utf8_lossy(stderr);
    (status.code() == Some(127) && why.starts_with("cannot start")).then(|| why.trim_end().to_owned())
}

/// The beginning of a text, for a message.
pub(crate) fn shown(text: &str) -> String {
    text.trim().chars().take(80).collect()
}
