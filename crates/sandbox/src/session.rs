//! Sessions: an interpreter that keeps its names from cell to cell, as a notebook's does.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_policy::awake::within;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinHandle;

use crate::error::SandboxError;
use crate::jail::{Event, Happened, Jail, deadline};
use crate::limits::Limits;
use crate::output::Captured;
use crate::protection::reasons;
use crate::run::{Ended, Language, Run, check, ended, seconds};
use crate::sandbox::Sandbox;

/// How a session is to be.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionOptions {
    /// Files in the work folder of every interpreter that it starts.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Environment variables.
    pub environment: BTreeMap<String, String>,
    /// Files that are handed out where the session is [finished](Session::finish).
    pub fetch: Vec<String>,
    /// Limits; the time is that of a cell.
    pub limits: Limits,
}

/// An interpreter, or none yet, or none any more: the next cell starts one.
#[derive(Debug)]
pub struct Session {
    sandbox: Sandbox,
    options: SessionOptions,
    resting: Option<Resting>,
    /// Whether one was lost, and the next cell has yet to say so.
    is_fresh: bool,
    _place: OwnedSemaphorePermit,
}

/// An interpreter between two cells. Threads and processes that cells have left continue meanwhile. They are
/// watched: their memory has the limit of the session, and the time of processors that they use between two
/// cells has the limit of a cell. Dropping it ends them.
#[derive(Debug)]
struct Resting {
    watch: JoinHandle<(Jail, Option<Happened>)>,
    wake: oneshot::Sender<()>,
}

impl Resting {
    fn begin(jail: Jail, cpu: f64) -> Self {
        let (wake, woken) = oneshot::channel();
        Resting { watch: tokio::spawn(jail.rest(cpu, woken)), wake }
    }

    /// The interpreter, and what has happened to it.
    async fn end(self) -> Result<(Jail, Option<Happened>), SandboxError> {
        // Whoever watches it may have seen its end.
        let _ = self.wake.send(());
        self.watch.await.map_err(|error| SandboxError::Broken(format!("watching a session: {error}")))
    }
}

/// Result of a cell.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Standard output.
    pub stdout: Captured,
    /// Standard error, without the traceback.
    pub stderr: Captured,
    /// Values that it showed: that of its last expression, and those given to `display`, as `repr` prints
    /// them.
    pub shown: Vec<String>,
    /// Exception that ended it.
    pub error: Option<CellError>,
    /// End of the interpreter, and all its names with it, where the cell brought that about.
    pub ended: Option<Ended>,
    /// Whether it began with no names because an earlier cell had ended the interpreter.
    pub is_fresh: bool,
    /// Time by the clock, in seconds, without the wait for a place.
    pub seconds: f64,
}

/// An exception.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CellError {
    /// Its class.
    pub ename: String,
    /// Its text.
    pub evalue: String,
    /// Lines of its traceback.
    pub traceback: Vec<String>,
}

#[derive(Deserialize)]
struct Answer {
    shown: Vec<String>,
    error: Option<CellError>,
}

impl Sandbox {
    /// Opens a session: an interpreter that keeps its names between cells. It starts with the first of them.
    ///
    /// # Errors
    /// When the request cannot be met, or too many sessions are open.
    pub fn session(&self, options: SessionOptions) -> Result<Session, SandboxError> {
        options.limits.check().map_err(SandboxError::Request)?;
        check(&options.files, &options.fetch, &options.environment)?;
        let Ok(place) = Arc::clone(&self.0.sessions).try_acquire_owned() else {
            return Err(SandboxError::Sessions { most: self.options().sessions });
        };
        Ok(Session { sandbox: self.clone(), options, resting: None, is_fresh: false, _place: place })
    }
}

impl Session {
    /// Sets the longest time of the cells to come, in seconds.
    pub fn set_seconds(&mut self, seconds: f64) {
        self.options.limits.seconds = seconds;
    }

    /// Runs a cell. Where it takes too long, too much memory, or ends the interpreter, the next cell begins
    /// with a fresh one. Given up before its end, it ends the interpreter.
    ///
    /// # Errors
    /// When all places are taken, or the sandbox itself fails.
    pub async fn cell(&mut self, code: &str) -> Result<Cell, SandboxError> {
        let sandbox = self.sandbox.clone();
        let _place = sandbox.0.place().await?;
        let begun = std::time::Instant::now();
        let limits = self.options.limits;
        let is_fresh = self.is_fresh;
        // Only a cell that was followed to its end puts it back.
        self.is_fresh |= self.resting.is_some();
        let (mut jail, mut happened) = match self.resting.take() {
            Some(resting) => resting.end().await?,
            None => (self.started().await?, None),
        };
        self.is_fresh = true;
        let mut until = deadline(seconds(limits.seconds));
        // An interpreter that a thread of an earlier cell keeps from reading, or has ended.
        let handed = match &happened {
            None => within(seconds(limits.seconds), jail.hand(code)).await,
            Some(_) => None,
        };
        let ended = loop {
            let event = match happened.take() {
                Some(happened) => happened?,
                None => jail.next(&mut until).await?,
            };
            break match event {
                Event::Cell(answer) => {
                    let answer = handed.as_ref().and_then(|_| serde_json::from_slice(&answer).ok());
                    let Some(Answer { shown, error }) = answer else {
                        // Code that writes into what it should leave alone.
                        jail.stop().await;
                        break Ended::Signal(libc::SIGKILL);
                    };
                    let (stdout, stderr) = jail.take_output(&limits);
                    (self.resting, self.is_fresh) = (Some(Resting::begin(jail, limits.seconds)), false);
                    let seconds = begun.elapsed().as_secs_f64();
                    return Ok(Cell { stdout, stderr, shown, error, ended: None, is_fresh, seconds });
                }
                Event::Looked(_) => continue,
                Event::NoCells if handed.as_ref().is_some_and(Result::is_ok) => continue,
                Event::NoCells => {
                    jail.stop().await.map_or(Ended::Signal(libc::SIGKILL), |report| ended(&report))
                }
                Event::Ended(report) => ended(&report),
                Event::Late => {
                    jail.stop().await;
                    Ended::TimeLimit
                }
                Event::OverMemory => {
                    jail.stop_at_once().await;
                    Ended::MemoryLimit
                }
            };
        };
        let lost = std::mem::take(&mut jail.missing);
        if sandbox.0.is_full() && !lost.is_empty() {
            return Err(SandboxError::Broken(format!("protection was lost: {}", reasons(&lost))));
        }
        let (stdout, stderr) = jail.take_output(&limits);
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Cell { stdout, stderr, shown: Vec::new(), error: None, ended: Some(ended), is_fresh, seconds })
    }

    /// Ends the interpreter, and hands out files; those that cannot be had, with the reason.
    ///
    /// # Errors
    /// When the sandbox itself fails.
    pub async fn finish(mut self) -> Result<BTreeMap<String, Result<Vec<u8>, String>>, SandboxError> {
        let Some(resting) = self.resting.take() else { return Ok(BTreeMap::new()) };
        let report = match resting.end().await? {
            (_, Some(Ok(Event::OverMemory | Event::Late))) => return Ok(BTreeMap::new()),
            (jail, Some(Ok(Event::Ended(report)))) => (jail, Some(report)),
            (mut jail, _) => {
                let report = jail.stop().await;
                (jail, report)
            }
        };
        let (mut jail, Some(report)) = report else {
            return Err(SandboxError::Broken("the session did not end when it was told to".into()));
        };
        Ok(jail.fetched(&report).await?.into_iter().collect())
    }

    async fn started(&self) -> Result<Jail, SandboxError> {
        let SessionOptions { files, environment, fetch, limits } = &self.options;
        let run = Run {
            files: files.clone(),
            environment: environment.clone(),
            fetch: fetch.clone(),
            limits: *limits,
            ..Run::new(Language::Python, "")
        };
        let zygote = self.sandbox.0.zygote().await?;
        let order = self.sandbox.0.order(&run, true);
        let contents: Vec<&[u8]> = run.files.values().map(Vec::as_slice).collect();
        let group = zygote.group(limits)?;
        let streams = zygote.spawn(&order, &contents, &[], group.as_ref()).await;
        let streams = streams.map_err(|error| SandboxError::Broken(format!("the fork server: {error}")))?;
        Ok(Jail::new(streams, limits, zygote.jailed, group))
    }
}
