//! Processes of others under a keeper, which ends them with all that they have started.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, Command};

/// The binary that is started as [keeper](crate::program::keeper), with its arguments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Keeper(pub Vec<String>);

impl Keeper {
    /// This very binary, as `levade keep`.
    ///
    /// # Errors
    /// When its file is not found.
    pub fn this() -> std::io::Result<Self> {
        let file = std::env::current_exe()?;
        Ok(Keeper(vec![file.to_string_lossy().into_owned(), "keep".into()]))
    }

    /// Starts a keeper, which waits for its order. Its environment is that of the program to come. Its
    /// program ends once its standard input does.
    ///
    /// # Errors
    /// When it cannot be started, in words.
    pub(crate) fn start(&self, environment: Vec<(String, String)>) -> Result<Child, String> {
        self.start_with(environment, None)
    }

    /// Starts a program that serves until it is stopped, or this process is gone. All that it prints goes
    /// into `log`.
    ///
    /// # Errors
    /// When its keeper cannot be started, in words.
    pub async fn serve(
        &self,
        command: &[String],
        folder: &Path,
        environment: Vec<(String, String)>,
        log: File,
    ) -> Result<KeptProcess, String> {
        let other = log.try_clone().map_err(|error| format!("its log cannot be written: {error}"))?;
        let mut keeper = self.start_with(environment, Some((log.into(), other.into())))?;
        let mut line = keeper.stdin.take();
        if let Some(line) = &mut line {
            // A keeper that is gone says why in the log.
            let order = json!({ "command": command, "folder": folder, "input": null, "asks": true });
            let _ = line.write_all(format!("{order}\n").as_bytes()).await;
        }
        Ok(KeptProcess { keeper, line })
    }

    fn start_with(
        &self,
        environment: Vec<(String, String)>,
        log: Option<(Stdio, Stdio)>,
    ) -> Result<Child, String> {
        let Some((keeper, arguments)) = self.0.split_first() else {
            return Err("no keeper is named for programs".into());
        };
        let mut command = Command::new(keeper);
        command.args(arguments).env_clear().envs(environment).stdin(Stdio::piped());
        match log {
            Some((out, err)) => command.stdout(out).stderr(err),
            None => command.stdout(Stdio::piped()).stderr(Stdio::piped()),
        };
        // Ctrl-C is for this process, which then ends its programs in good order.
        #[cfg(unix)]
        command.process_group(0);
        command.spawn().map_err(|error| format!("cannot start {keeper}, which keeps programs: {error}"))
    }
}

impl levade_reward::Supervisor for Keeper {
    fn start(
        &self,
        program: &[String],
        folder: &Path,
        environment: Vec<(String, String)>,
        input: Option<String>,
    ) -> Result<(Child, String), String> {
        Ok((Keeper::start(self, environment)?, order(program, folder, input)))
    }
}

/// A program that serves, under its keeper. Dropping it ends the program, with all that it has started.
pub struct KeptProcess {
    keeper: Child,
    /// Open for as long as the program may live.
    line: Option<ChildStdin>,
}

/// How long a keeper may take to end a program; then it is ended itself.
const STOPPING: Duration = Duration::from_secs(10);

impl KeptProcess {
    /// Waits for the end of the program, and says how it ended.
    pub async fn ended(&mut self) -> String {
        match self.keeper.wait().await {
            Ok(status) => ending(status.code()),
            Err(error) => format!("cannot be waited for: {error}"),
        }
    }

    /// Exit code of the program, once it has ended: beyond 128 the signal that ended it, `None` where that is
    /// not known.
    pub fn has_ended(&mut self) -> Option<Option<i32>> {
        match self.keeper.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(status.code()),
            Err(_) => Some(None),
        }
    }

    /// Asks the program itself to end in good order (SIGTERM), however long that takes.
    pub async fn ask_to_end(&mut self) {
        if let Some(line) = &mut self.line {
            // A keeper that is gone has ended it.
            let _ = line.write_all(b"t").await;
        }
    }

    /// Ends the program with all that it has started, and returns once they are gone.
    pub async fn stop(mut self) {
        self.line = None;
        if tokio::time::timeout(STOPPING, self.keeper.wait()).await.is_err() {
            let _ = self.keeper.kill().await;
        }
    }
}

/// Most of what a program prints that is kept: the end of each stream, in bytes.
const KEPT: usize = 64 << 10;

/// End of a stream that was read.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    kept: Vec<u8>,
    /// Bytes that came.
    pub bytes: u64,
}

impl Tail {
    /// A stream with this text.
    pub fn of(text: String) -> Self {
        Tail { bytes: text.len() as u64, kept: text.into_bytes() }
    }

    /// Adds what has come.
    pub fn push(&mut self, more: &[u8]) {
        self.bytes += more.len() as u64;
        self.kept.extend_from_slice(more);
        if self.kept.len() > 2 * KEPT {
            self.kept.drain(..self.kept.len() - KEPT);
        }
    }

    /// The text that was kept.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }

    /// The last line that is not blank.
    pub fn last_line(&self) -> Option<String> {
        self.text().lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
    }
}

/// Lines of a program that are shown.
const LINES: usize = 10;

/// Characters of such a line that are shown.
const LINE: usize = 300;

/// Returns the lines of what a program printed that tell most: the last ones, after the last line that names
/// an error and what explains it, if that is above them. Each is indented.
pub(crate) fn telling_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines.len().saturating_sub(LINES);
    let named = lines[..last].iter().rposition(|line| names_error(line));
    let is_named_below = lines[last..].iter().any(|line| names_error(line));
    match named.filter(|_| !is_named_below) {
        Some(at) => {
            let end = (at + LINES / 2).min(last);
            let skipped = (end < last).then(|| "  …".to_owned());
            let above = lines[at..end].iter().map(|line| shown(line)).chain(skipped);
            above.chain(lines[last + LINES / 2..].iter().map(|line| shown(line))).collect()
        }
        None => lines[last..].iter().map(|line| shown(line)).collect(),
    }
}

fn shown(line: &str) -> String {
    let line = line.trim_end();
    match line.char_indices().nth(LINE) {
        Some((end, _)) => format!("  {}…", &line[..end]),
        None => format!("  {line}"),
    }
}

/// Whether a line names an error, as `ValueError: …` or `npm error …` do.
fn names_error(line: &str) -> bool {
    let line = line.trim_start().to_lowercase();
    // Frames of a stack name the files of errors.
    if line.starts_with("at ") || line.starts_with("file \"") {
        return false;
    }
    ["error", "exception", "fatal", "panicked", "cannot find", "could not", "not found"]
        .into_iter()
        .any(|word| line.contains(word))
}

/// Reads a stream to its end.
pub(crate) async fn read(stream: Option<impl AsyncRead + Unpin>) -> Tail {
    let mut tail = Tail::default();
    let Some(mut stream) = stream else { return tail };
    let mut buffer = vec![0; 16 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        tail.push(&buffer[..count]);
    }
    tail
}

/// How a program ended, from the exit code of its keeper: that of the program, or 128 and a signal.
pub(crate) fn ending(code: Option<i32>) -> String {
    match code {
        Some(code @ 129..=192) => format!("killed by signal {}", code - 128),
        Some(code) => format!("exit code {code}"),
        None => "its keeper was killed".into(),
    }
}

/// The order to a keeper, the first line that it reads: a program with its arguments, the folder that it runs
/// in (the keeper's own where empty), and its whole input, or `None` where that comes after the order.
pub(crate) fn order(command: &[String], folder: &Path, input: Option<String>) -> String {
    format!("{}\n", json!({ "command": command, "folder": folder, "input": input }))
}
