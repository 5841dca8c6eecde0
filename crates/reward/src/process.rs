//! Processes that score: their environment, and their end.

use std::path::Path;
use std::process::{Output, Stdio};

use dressage_policy::environment::passed;
#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

/// A process with all that it has started; dropping it ends them.
#[derive(Debug)]
pub(crate) struct Process {
    pub child: Child,
    #[cfg(unix)]
    _group: Group,
}

/// Starts a program in a folder, with the usual environment variables and those that are named.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn start(program: &[String], folder: &Path, environment: &[String]) -> std::io::Result<Process> {
    let [program, arguments @ ..] = program else { return Err(std::io::ErrorKind::NotFound.into()) };
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_clear().envs(passed(environment)).kill_on_drop(true);
    if !folder.as_os_str().is_empty() {
        command.current_dir(folder);
    }
    #[cfg(unix)]
    command.process_group(0);
    let child = command.spawn()?;
    Ok(Process {
        #[cfg(unix)]
        _group: Group(child.id().and_then(|id| Pid::from_raw(id as i32))),
        child,
    })
}

impl Process {
    /// Reads all that it prints, to its end.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub async fn output(&mut self) -> std::io::Result<Output> {
        let (out, err) = (self.child.stdout.take(), self.child.stderr.take());
        let (stdout, stderr, status) = tokio::join!(read(out), read(err), self.child.wait());
        Ok(Output { status: status?, stdout: stdout?, stderr: stderr? })
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
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

/// The beginning of a text, for a message.
pub(crate) fn shown(text: &str) -> String {
    text.trim().chars().take(80).collect()
}
