//! The process of a program: started through its keeper, read to the end, stopped with all that it started.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin};
use tokio::task::JoinHandle;

use super::Program;
use crate::kept::{self, Tail, read};

/// Placeholder of the question among the arguments of a program.
const QUESTION: &str = "{question}";

/// How long the keeper may take to end the program; then it is ended itself.
const STOPPING: Duration = Duration::from_secs(10);

/// A program under way. Dropping it ends the line to the keeper, which then ends the program.
pub(super) struct Process {
    keeper: Child,
    /// Open for as long as the program may live.
    line: Option<ChildStdin>,
    /// Order that the keeper has yet to be told.
    order: Option<String>,
    stdout: JoinHandle<Tail>,
    stderr: JoinHandle<Tail>,
}

/// How a program ended.
#[derive(Debug)]
pub(super) struct Ended {
    /// Exit code; beyond 128 the signal that ended it. `None` where it was stopped.
    pub code: Option<i32>,
    pub stdout: Tail,
    pub stderr: Tail,
}

impl Ended {
    /// One whose worker has said how it went.
    pub(super) fn of_worker(said: serde_json::Value) -> Self {
        match said["error"].as_str() {
            Some(error) => {
                Ended { code: Some(1), stdout: Tail::default(), stderr: Tail::of(error.to_owned()) }
            }
            None => Ended { code: Some(0), stdout: Tail::of(said.to_string()), stderr: Tail::default() },
        }
    }

    /// One that was stopped.
    pub(super) fn stopped() -> Self {
        Ended { code: None, stdout: Tail::default(), stderr: Tail::default() }
    }
}

/// The order to a keeper: the program, and its whole input.
fn order(program: &Program, input: &serde_json::Value) -> String {
    let question = input["question"].as_str().unwrap_or_default();
    let command: Vec<String> =
        program.command.iter().map(|argument| argument.replace(QUESTION, question)).collect();
    kept::order(&command, &program.folder, Some(format!("{input}\n")))
}

/// Starts the program of an attempt.
///
/// # Errors
/// When its keeper cannot be started, in words.
pub(super) fn start(
    program: &Program,
    environment: Vec<(String, String)>,
    input: &serde_json::Value,
) -> Result<Process, String> {
    let mut keeper = program.keeper.start(environment)?;
    let line = keeper.stdin.take();
    let stdout = tokio::spawn(read(keeper.stdout.take()));
    let stderr = tokio::spawn(read(keeper.stderr.take()));
    Ok(Process { keeper, line, order: Some(order(program, input)), stdout, stderr })
}

impl Process {
    /// Waits for the program's end.
    ///
    /// # Errors
    /// When it cannot be waited for, in words.
    pub(super) async fn wait(&mut self) -> Result<Ended, String> {
        if let (Some(order), Some(line)) = (self.order.take(), &mut self.line) {
            // A keeper that is gone says why on its standard error.
            let _ = line.write_all(order.as_bytes()).await;
        }
        let status = self.keeper.wait().await.map_err(|error| format!("cannot be waited for: {error}"))?;
        self.line = None;
        Ok(self.ended(status.code()).await)
    }

    /// Ends the program, and all that it has started.
    pub(super) async fn stop(&mut self) -> Ended {
        // The keeper takes the end of the line for the end of its program.
        self.line = None;
        if tokio::time::timeout(STOPPING, self.keeper.wait()).await.is_err() {
            let _ = self.keeper.kill().await;
        }
        self.ended(None).await
    }

    async fn ended(&mut self, code: Option<i32>) -> Ended {
        // Whoever holds the streams open was ended by the keeper; should somebody have got away, they are
        // left alone.
        let mut take = async |stream: Stream| {
            let stream = match stream {
                Stream::Out => &mut self.stdout,
                Stream::Err => &mut self.stderr,
            };
            match tokio::time::timeout(STOPPING, &mut *stream).await {
                Ok(tail) => tail.unwrap_or_default(),
                Err(_) => {
                    stream.abort();
                    Tail::default()
                }
            }
        };
        Ended { code, stdout: take(Stream::Out).await, stderr: take(Stream::Err).await }
    }
}

/// Streams that a program prints to.
enum Stream {
    Out,
    Err,
}
