//! Starts child processes that end with this process.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use levade_policy::environment::child_environment;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child as Spawned, ChildStdin, ChildStdout, Command};

use crate::tail::{Tail, TailReader};

/// Timeout for a supervisor process to terminate its program. After the timeout, the supervisor is
/// killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for reading the rest of the output of a program that has exited.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10);

/// Command that starts a [supervisor process](crate::supervise), which terminates its program with
/// all descendants.
///
/// Without a command (`Supervisor::default()`), programs are started directly. Dropping a [`Child`]
/// then kills its process group, but detached processes survive, and so does the group if this
/// process is killed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Supervisor(pub Vec<String>);

/// A program to start, with its directory and environment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Launch {
    /// Program and its arguments. Must not be empty.
    pub command: Vec<String>,
    /// Working directory of the program. If empty, the program runs in the directory of this
    /// process.
    pub dir: PathBuf,
    /// Names of environment variables that the program inherits if they are set, in addition to the
    /// [usual variables](levade_policy::environment::CHILD_VARIABLES).
    pub passes: Vec<String>,
    /// Names and values of additional environment variables.
    pub variables: Vec<(String, String)>,
}

/// Source of a program's standard input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The contained text is the complete input.
    Text(String),
    /// The caller writes the input while the program runs.
    Piped,
}

impl Supervisor {
    /// Creates a supervisor whose command is this binary with the argument `keep`.
    ///
    /// # Errors
    /// Returns an error if the path of this binary is unknown.
    pub fn from_current_exe() -> io::Result<Self> {
        let file = std::env::current_exe()?;
        Ok(Supervisor(vec![file.to_string_lossy().into_owned(), "keep".into()]))
    }

    /// Starts a program whose standard output and standard error the caller can read.
    ///
    /// # Errors
    /// Returns an error if the process cannot be spawned. If a supervisor cannot start its program,
    /// the child exits with code 127, and its standard error starts with `cannot start`.
    pub fn start(&self, launch: &Launch, input: Input) -> Result<Child, String> {
        let order = self.build_order(launch, &input, false);
        let (text, has_more) = match (order, input) {
            (Some(order), input) => (order, input == Input::Piped),
            (None, Input::Text(text)) => (text, false),
            (None, Input::Piped) => (String::new(), true),
        };
        self.spawn(launch, text, has_more, None)
    }

    /// Starts a program that runs until it is stopped, and appends its standard output and error to
    /// `log`.
    ///
    /// # Errors
    /// Returns an error if the process cannot be spawned. Errors of the supervisor are written to
    /// the log.
    pub async fn serve(&self, launch: &Launch, log: File) -> Result<Child, String> {
        let order = self.build_order(launch, &Input::Piped, true).unwrap_or_default();
        let mut child = self.spawn(launch, order, false, Some(log))?;
        if let Some(stdin) = &mut child.stdin {
            // If the supervisor has exited, the log contains the reason.
            let _ = stdin.write("").await;
        }
        Ok(child)
    }

    /// Returns the first input line for the supervisor process, or `None` if programs are started
    /// directly. If `signals_end` is true, each later byte is a request to end the program.
    fn build_order(&self, launch: &Launch, input: &Input, signals_end: bool) -> Option<String> {
        let input = match input {
            Input::Text(text) => Some(text),
            Input::Piped => None,
        };
        let Launch { command, dir, .. } = launch;
        let order =
            json!({ "command": command, "folder": dir, "input": input, "asks": signals_end });
        (!self.0.is_empty()).then(|| format!("{order}\n"))
    }

    fn spawn(
        &self,
        launch: &Launch,
        pending: String,
        is_piped: bool,
        log: Option<File>,
    ) -> Result<Child, String> {
        let is_direct = self.0.is_empty();
        let argv = if is_direct { &launch.command } else { &self.0 };
        let [program, arguments @ ..] = &argv[..] else {
            return Err("the command is empty, but must start with a program".into());
        };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(launch.build_environment()).stdin(Stdio::piped());
        match log {
            Some(log) => {
                let other = log
                    .try_clone()
                    .map_err(|error| format!("the program's log cannot be written: {error}"))?;
                command.stdout(log).stderr(other);
            }
            None => drop(command.stdout(Stdio::piped()).stderr(Stdio::piped())),
        }
        if is_direct && !launch.dir.as_os_str().is_empty() {
            command.current_dir(&launch.dir);
        }
        // With a group of its own, the child gets no Ctrl-C. This process does, and ends its
        // children cleanly.
        command.process_group(0);
        let mut process = command.spawn().map_err(|error| {
            if is_direct {
                format!("cannot start {program}: {error}")
            } else {
                format!("cannot start {program}, which supervises programs: {error}")
            }
        })?;
        let group = process.id().filter(|_| is_direct).and_then(|id| Pid::from_raw(id as i32));
        let stdin = process.stdin.take().map(|pipe| Stdin { pipe, pending });
        Ok(Child { process, stdin, is_piped, group: ProcessGroup(group) })
    }
}

impl Launch {
    /// Creates the launch of a command in the working directory of this process, with only the
    /// usual environment variables.
    pub fn new(command: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Launch { command: command.into_iter().map(Into::into).collect(), ..Launch::default() }
    }

    fn build_environment(&self) -> Vec<(String, String)> {
        child_environment(&self.passes).into_iter().chain(self.variables.iter().cloned()).collect()
    }
}

/// Standard input of a child process, and text that must be written first.
#[derive(Debug)]
pub(crate) struct Stdin {
    pipe: ChildStdin,
    /// Text that has not been written yet and precedes all other input.
    pending: String,
}

impl Stdin {
    /// Writes the pending text, then `text`, to the standard input. If the future is dropped,
    /// neither text is written again.
    pub(crate) async fn write(&mut self, text: &str) -> io::Result<()> {
        let pending = std::mem::take(&mut self.pending);
        self.pipe.write_all(pending.as_bytes()).await?;
        self.pipe.write_all(text.as_bytes()).await
    }
}

/// A running program. Dropping this handle terminates the program and all processes that it
/// started.
#[derive(Debug)]
pub struct Child {
    process: Spawned,
    /// Standard input of the child process. A supervisor process lets its program run while this is
    /// open.
    stdin: Option<Stdin>,
    /// Whether the caller writes to the program's standard input.
    is_piped: bool,
    group: ProcessGroup,
}

/// Process group of a child that is started without a supervisor.
#[derive(Debug)]
struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    fn kill(&self) {
        if let Some(leader) = self.0 {
            // The call fails if the group is empty.
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Child {
    /// Sends the order to the supervisor, and returns the program's standard input. Returns `None`
    /// after the first call. Dropping the input terminates a supervised program.
    pub async fn take_stdin(&mut self) -> Option<ChildStdin> {
        let mut stdin = self.stdin.take()?;
        // A supervisor that has exited reports the reason on the standard error.
        let _ = stdin.write("").await;
        Some(stdin.pipe)
    }

    pub(crate) fn take_unwritten_stdin(&mut self) -> Option<Stdin> {
        self.stdin.take()
    }

    /// Returns the program's standard output, or `None` after the first call.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.process.stdout.take()
    }

    /// Starts to read the program's standard error into `tail`. Later calls read nothing. If `name`
    /// is set, the text is also logged under this name.
    pub fn read_stderr(&mut self, tail: Tail, name: Option<String>) -> TailReader {
        TailReader::start(self.process.stderr.take(), tail, name)
    }

    /// Waits until the program exits and returns its exit code. A code above 128 is 128 plus the
    /// number of the terminating signal. `None` means that the supervisor was killed.
    ///
    /// # Errors
    /// Returns an error if waiting for the process fails.
    pub async fn wait(&mut self) -> io::Result<Option<i32>> {
        let is_complete = self.group.0.is_some() && !self.is_piped;
        let stdin = &mut self.stdin;
        // Write errors are ignored, because a program can exit without reading its input.
        let write = async {
            if let Some(input) = stdin {
                let _ = input.write("").await;
            }
            if is_complete {
                *stdin = None;
            }
            std::future::pending::<std::convert::Infallible>().await
        };
        let status = tokio::select! {
            status = self.process.wait() => status?,
            never = write => match never {},
        };
        Ok(self.exit_code(status))
    }

    /// Returns the exit code as [`Self::wait`] does, or `None` if the program is still running. If
    /// the state of the process is unavailable, the program counts as exited with an unknown code.
    pub fn try_wait(&mut self) -> Option<Option<i32>> {
        match self.process.try_wait() {
            Ok(status) => status.map(|status| self.exit_code(status)),
            Err(_) => Some(None),
        }
    }

    /// Waits until the program exits, and describes its exit in the format of [`describe_exit`].
    pub async fn describe_end(&mut self) -> String {
        match self.wait().await {
            Ok(code) => describe_exit(code),
            Err(error) => format!("waiting for the program failed: {error}"),
        }
    }

    fn exit_code(&self, status: ExitStatus) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt;
        let signal = status.signal().filter(|_| self.group.0.is_some()).map(|signal| 128 + signal);
        status.code().or(signal)
    }

    /// Asks a program that was started by [`Supervisor::serve`] to exit (SIGTERM). Does not wait
    /// for the exit, and has no timeout.
    pub async fn request_end(&mut self) {
        // A program that has exited needs no signal.
        match (self.group.0, &mut self.stdin) {
            (Some(leader), _) => drop(kill_process(leader, Signal::TERM)),
            (None, Some(stdin)) => drop(stdin.write("t").await),
            (None, None) => {}
        }
    }

    /// Terminates the program and all processes that it started, and returns when they have exited.
    pub async fn stop(&mut self) {
        // The supervisor detects the end of its input, unless it is blocked because the program
        // does not read its own input. In that case, the signal stops it.
        self.stdin = None;
        if self.is_piped
            && let Some(pid) = self.process.id().and_then(|id| Pid::from_raw(id as i32))
        {
            let _ = kill_process(pid, Signal::TERM);
        }
        self.group.kill();
        if tokio::time::timeout(STOP_TIMEOUT, self.process.wait()).await.is_err() {
            let _ = self.process.kill().await;
        }
    }
}

/// Run of a program that reads one text, with the program's output. Dropping the run terminates the
/// program and all processes that it started.
#[derive(Debug)]
pub struct ProgramRun {
    child: Child,
    stdout: TailReader,
    stderr: TailReader,
}

/// Exit code and output of a [`ProgramRun`].
#[derive(Debug)]
pub struct RunOutput {
    /// Exit code of the program. A code above 128 is 128 plus the number of the terminating signal.
    /// `None` means that the program was stopped or its supervisor was killed.
    pub code: Option<i32>,
    /// Kept part of the program's standard output.
    pub stdout: Tail,
    /// Kept part of the program's standard error.
    pub stderr: Tail,
}

impl ProgramRun {
    /// Starts a program with the complete input `input`. `stdout` is an empty tail that sets how
    /// much of the standard output is kept.
    ///
    /// # Errors
    /// Returns the errors of [`Supervisor::start`].
    pub fn start(
        supervisor: &Supervisor,
        launch: &Launch,
        input: String,
        stdout: Tail,
    ) -> Result<Self, String> {
        let mut child = supervisor.start(launch, Input::Text(input))?;
        let stdout = TailReader::start(child.take_stdout(), stdout, None);
        let stderr = child.read_stderr(Tail::default(), None);
        Ok(ProgramRun { child, stdout, stderr })
    }

    /// Waits until the program exits, and returns its exit code and output.
    ///
    /// # Errors
    /// Returns an error if waiting for the process fails.
    pub async fn wait(&mut self) -> Result<RunOutput, String> {
        let code = self
            .child
            .wait()
            .await
            .map_err(|error| format!("waiting for the program failed: {error}"))?;
        Ok(self.collect_output(code).await)
    }

    /// Terminates the program, and returns its output so far.
    pub async fn stop(&mut self) -> RunOutput {
        self.child.stop().await;
        self.collect_output(None).await
    }

    async fn collect_output(&mut self, code: Option<i32>) -> RunOutput {
        let stdout = self.stdout.finish(OUTPUT_TIMEOUT).await;
        RunOutput { code, stdout, stderr: self.stderr.finish(OUTPUT_TIMEOUT).await }
    }
}

impl RunOutput {
    /// Returns the reason if the program could not be started, or `None` if it was started.
    pub fn start_error(&self) -> Option<String> {
        let why = self.stderr.text();
        (self.code == Some(127) && self.stdout.is_empty() && why.starts_with("cannot start"))
            .then(|| why.trim_end().to_owned())
    }
}

/// Describes an exit code of [`Child::wait`] for users: `exit code 1`, `killed by signal 9`.
pub fn describe_exit(code: Option<i32>) -> String {
    match code {
        Some(code @ 129..=192) => format!("killed by signal {}", code - 128),
        Some(code) => format!("exit code {code}"),
        None => "its supervisor was killed".into(),
    }
}

/// Describes an exit code in the format of [`std::process::ExitStatus`]: `exit status: 1`, `signal:
/// 9`.
pub fn exit_status(code: Option<i32>) -> String {
    match code {
        Some(code @ 129..=192) => format!("signal: {}", code - 128),
        Some(code) => format!("exit status: {code}"),
        None => "its supervisor, which was killed".into(),
    }
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
