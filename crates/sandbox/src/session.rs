//! Sessions: an interpreter that keeps its variables between cells, as a notebook does.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_policy::process_time::with_timeout;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinHandle;

use crate::error::SandboxError;
use crate::jail::{EventResult, Jail, JailEvent, new_deadline};
use crate::limits::Limits;
use crate::output::CapturedOutput;
use crate::protection::describe_missing_walls;
use crate::run::{EndReason, Language, Run, check_paths_and_variables, end_reason, to_duration};
use crate::sandbox::Sandbox;

/// Configuration of a session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Contents of files in the work directory, by relative path. Each interpreter that the session
    /// starts gets these files.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Environment variables of the interpreter. It inherits no variable of this process.
    pub environment: BTreeMap<String, String>,
    /// Relative paths of the files that [`Session::finish`] returns.
    pub fetch: Vec<String>,
    /// Resource limits of the session. `seconds` is the maximum time of each cell.
    pub limits: Limits,
}

/// A session with a Python interpreter that keeps variables between cells. If the interpreter was
/// lost or has not started yet, the next cell starts one.
#[derive(Debug)]
pub struct Session {
    sandbox: Sandbox,
    options: SessionOptions,
    idle: Option<IdleSession>,
    /// Whether an interpreter was lost and no later cell has reported the loss yet.
    is_fresh: bool,
    _permit: OwnedSemaphorePermit,
}

/// An interpreter between two cells. Threads and processes that cells have left continue to run.
/// They share the session's memory limit, and their processor time between two cells is limited to
/// the time limit of a cell. Dropping this value ends them.
#[derive(Debug)]
struct IdleSession {
    watch: JoinHandle<(Jail, Option<EventResult>)>,
    wake: oneshot::Sender<()>,
}

impl IdleSession {
    fn new(jail: Jail, cpu: f64) -> Self {
        let (wake, woken) = oneshot::channel();
        IdleSession { watch: tokio::spawn(jail.watch_idle(cpu, woken)), wake }
    }

    /// Stops the observation of the idle interpreter. Returns the interpreter, and the event that
    /// occurred meanwhile, if any.
    async fn stop_watching(self) -> Result<(Jail, Option<EventResult>), SandboxError> {
        // The observing task may have ended already.
        let _ = self.wake.send(());
        self.watch.await.map_err(|error| {
            SandboxError::Broken(format!("the session cannot be observed: {error}"))
        })
    }
}

/// Result of a cell that a session has run.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Captured standard output of the cell.
    pub stdout: CapturedOutput,
    /// Captured standard error of the cell, without the traceback.
    pub stderr: CapturedOutput,
    /// Values that the cell displayed, formatted with `repr`: the value of its last expression, and
    /// the values passed to `display`.
    pub shown: Vec<String>,
    /// Exception that ended the cell. `None` if the cell raised none.
    pub error: Option<CellError>,
    /// Reason why the interpreter ended. `None` if it is still running. If it ended, all variables
    /// are lost.
    pub ended: Option<EndReason>,
    /// Whether the cell started without variables because an earlier cell had ended the
    /// interpreter.
    pub is_fresh: bool,
    /// Wall-clock time of the cell, in seconds, without the time in the queue.
    pub seconds: f64,
}

/// An exception that a cell raised.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CellError {
    /// Name of the exception's class.
    pub ename: String,
    /// Message of the exception.
    pub evalue: String,
    /// Lines of the traceback.
    pub traceback: Vec<String>,
}

#[derive(Deserialize)]
struct CellResult {
    shown: Vec<String>,
    error: Option<CellError>,
}

impl Sandbox {
    /// Opens a session with an interpreter that keeps its variables between cells. The interpreter
    /// starts with the first cell.
    ///
    /// # Errors
    /// Returns an error if the request is invalid or too many sessions are open.
    pub fn session(&self, options: SessionOptions) -> Result<Session, SandboxError> {
        options.limits.check().map_err(SandboxError::Request)?;
        check_paths_and_variables(&options.files, &options.fetch, &options.environment)?;
        let Ok(permit) = Arc::clone(&self.0.sessions).try_acquire_owned() else {
            return Err(SandboxError::Sessions { max: self.options().sessions });
        };
        Ok(Session { sandbox: self.clone(), options, idle: None, is_fresh: false, _permit: permit })
    }
}

impl Session {
    /// Sets the maximum time of each later cell, in seconds.
    pub fn set_seconds(&mut self, seconds: f64) {
        self.options.limits.seconds = seconds;
    }

    /// Runs a cell. If the cell exceeds the time or memory limit or ends the interpreter, the next
    /// cell starts with a new interpreter. Dropping the future ends the interpreter.
    ///
    /// # Errors
    /// Returns an error if the queue is full or the sandbox itself fails.
    pub async fn cell(&mut self, code: &str) -> Result<Cell, SandboxError> {
        let sandbox = self.sandbox.clone();
        let _permit = sandbox.0.acquire_permit().await?;
        let started_at = std::time::Instant::now();
        let limits = self.options.limits;
        let is_fresh = self.is_fresh;
        // Only a cell that has completed returns the interpreter to the session.
        self.is_fresh |= self.idle.is_some();
        let (mut jail, mut happened) = match self.idle.take() {
            Some(resting) => resting.stop_watching().await?,
            None => (self.start_jail().await?, None),
        };
        self.is_fresh = true;
        let mut until = new_deadline(to_duration(limits.seconds));
        // A thread of an earlier cell may have ended the interpreter or keep it from reading.
        let handed = match &happened {
            None => with_timeout(to_duration(limits.seconds), jail.send_cell(code)).await,
            Some(_) => None,
        };
        let ended = loop {
            let event = match happened.take() {
                Some(happened) => happened?,
                None => jail.next_event(&mut until).await?,
            };
            break match event {
                JailEvent::Cell(response) => {
                    let response =
                        handed.as_ref().and_then(|_| serde_json::from_slice(&response).ok());
                    let Some(CellResult { shown, error }) = response else {
                        // The code has written to the runner's channel, which it must not use.
                        jail.stop().await;
                        break EndReason::Signal(libc::SIGKILL);
                    };
                    let (stdout, stderr) = jail.take_output(&limits);
                    (self.idle, self.is_fresh) =
                        (Some(IdleSession::new(jail, limits.seconds)), false);
                    let seconds = started_at.elapsed().as_secs_f64();
                    return Ok(Cell {
                        stdout,
                        stderr,
                        shown,
                        error,
                        ended: None,
                        is_fresh,
                        seconds,
                    });
                }
                JailEvent::Observed(_) => continue,
                JailEvent::NoCells if handed.as_ref().is_some_and(Result::is_ok) => continue,
                JailEvent::NoCells => jail
                    .stop()
                    .await
                    .map_or(EndReason::Signal(libc::SIGKILL), |report| end_reason(&report)),
                JailEvent::Ended(report) => end_reason(&report),
                JailEvent::Late => {
                    jail.stop().await;
                    EndReason::TimeLimit
                }
                JailEvent::OverMemory => {
                    jail.kill_all().await;
                    EndReason::MemoryLimit
                }
            };
        };
        let lost = std::mem::take(&mut jail.missing);
        if sandbox.0.is_full() && !lost.is_empty() {
            return Err(SandboxError::Broken(format!(
                "protection was lost: {}",
                describe_missing_walls(&lost)
            )));
        }
        let (stdout, stderr) = jail.take_output(&limits);
        let seconds = started_at.elapsed().as_secs_f64();
        Ok(Cell {
            stdout,
            stderr,
            shown: Vec::new(),
            error: None,
            ended: Some(ended),
            is_fresh,
            seconds,
        })
    }

    /// Ends the interpreter and returns the requested files. For a file that cannot be returned,
    /// the result contains the reason as an error.
    ///
    /// # Errors
    /// Returns an error if the sandbox itself fails.
    pub async fn finish(
        mut self,
    ) -> Result<BTreeMap<String, Result<Vec<u8>, String>>, SandboxError> {
        let Some(resting) = self.idle.take() else { return Ok(BTreeMap::new()) };
        let report = match resting.stop_watching().await? {
            (_, Some(Ok(JailEvent::OverMemory | JailEvent::Late))) => return Ok(BTreeMap::new()),
            (jail, Some(Ok(JailEvent::Ended(report)))) => (jail, Some(report)),
            (mut jail, _) => {
                let report = jail.stop().await;
                (jail, report)
            }
        };
        let (mut jail, Some(report)) = report else {
            return Err(SandboxError::Broken(
                "the session did not end after the request to stop".into(),
            ));
        };
        Ok(jail.fetch_files(&report).await?.into_iter().collect())
    }

    async fn start_jail(&self) -> Result<Jail, SandboxError> {
        let SessionOptions { files, environment, fetch, limits } = &self.options;
        let run = Run {
            files: files.clone(),
            environment: environment.clone(),
            fetch: fetch.clone(),
            limits: *limits,
            ..Run::new(Language::Python, "")
        };
        let zygote = self.sandbox.0.get_zygote().await?;
        let order = self.sandbox.0.to_order(&run, true);
        let contents: Vec<&[u8]> = run.files.values().map(Vec::as_slice).collect();
        let group = zygote.create_cgroup(limits)?;
        let streams = zygote.start_run(&order, &contents, &[], group.as_ref()).await;
        let streams =
            streams.map_err(|error| SandboxError::Broken(format!("the fork server: {error}")))?;
        Ok(Jail::new(streams, limits, zygote.jailed, group))
    }
}
