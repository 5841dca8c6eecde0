//! A running jail as seen from outside: reads its output, and enforces its memory limit and
//! deadline.

use std::fmt;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::time::Duration;

use levade_policy::process_time;
use rustix::process::{Signal, pidfd_send_signal};
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::cgroup::RunCgroup;
use crate::error::SandboxError;
use crate::limits::Limits;
use crate::memory::{self, MemoryWatch};
use crate::output::CapturedOutput;
use crate::protection::MissingWall;
use crate::wire::FrameStream;
use crate::zygote::RunStreams;

/// Interval between observations of a jail's memory during a call.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Interval between observations of a jail's memory between the calls of a session.
const IDLE_WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// Minimum interval between memory observations, as a multiple of the duration of an observation.
/// It ensures that many processes in the jail do not keep this process busy.
const MIN_INTERVAL_FACTOR: u32 = 4;

/// Maximum interval between observations of a jail's memory during a call.
const MAX_INTERVAL: Duration = Duration::from_millis(200);

/// Timeout for a keeper process to end its run and to return files, after a request to stop.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Maximum number of reads to empty an output pipe.
const MAX_READS: usize = 64;

/// Message that requests a keeper process to end its run.
const STOP: &[u8] = b"k";

/// A jail in which a run executes, from the fork of its keeper process to its end. Dropping it ends
/// all its processes.
pub(crate) struct Jail {
    line: FrameStream,
    cells: Option<FrameStream>,
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    out: CapturedOutput,
    err: CapturedOutput,
    supervisor: Option<OwnedFd>,
    pid: Option<u32>,
    jailed: bool,
    memory: u64,
    /// Memory watch of the jail. `None` while an observation is running.
    watch: Option<MemoryWatch>,
    looking: Option<JoinHandle<MemoryWatch>>,
    next_look: Instant,
    interval: Duration,
    /// Cgroup of the run. `None` if cgroups are not used.
    group: Option<RunCgroup>,
    buffers: Box<[[u8; 16 << 10]; 2]>,
    /// Whether the memory of the jail could be observed.
    pub was_watched: bool,
    /// Walls that the runner could not build, because it could not drop a privilege.
    pub missing: Vec<MissingWall>,
}

impl fmt::Debug for Jail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jail").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// Deadline that does not count the time in which this process was stopped.
pub(crate) type Deadline = Pin<Box<dyn Future<Output = Duration> + Send>>;

pub(crate) fn new_deadline(time: Duration) -> Deadline {
    Box::pin(process_time::sleep(time))
}

/// An event in a jail, except output.
#[derive(Debug)]
pub(crate) enum JailEvent {
    /// All processes of the jail have ended. Contains the keeper's report.
    Ended(JailReport),
    /// A cell of a session is complete. Contains the response of the runner.
    Cell(Vec<u8>),
    /// The runner has closed the channel for cells, so that it runs no more cells.
    NoCells,
    /// The deadline of the run has passed.
    Late,
    /// The processes of the jail together exceed the memory limit.
    OverMemory,
    /// An observation has found the memory of the jail within its limit.
    Observed(MemoryWatch),
}

/// An event in a jail, or an error of the processes that build jails.
pub(crate) type EventResult = Result<JailEvent, SandboxError>;

/// Final message of the keeper process about a run.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct JailReport {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub cpu: f64,
    /// Name and size of each requested file, and the reason if its content is missing.
    pub files: Vec<(String, usize, Option<String>)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum JailMessage {
    #[serde(rename = "keeper")]
    Supervisor(#[allow(dead_code, reason = "a mark")] bool),
    Missing(std::collections::BTreeMap<String, String>),
    Failed(String),
    #[serde(rename = "refused")]
    Rejected(String),
    Ended(JailReport),
}

impl Jail {
    pub(crate) fn new(
        streams: RunStreams,
        limits: &Limits,
        jailed: bool,
        group: Option<RunCgroup>,
    ) -> Self {
        Jail {
            line: streams.line,
            cells: streams.cells,
            stdout: Some(streams.stdout),
            stderr: Some(streams.stderr),
            out: CapturedOutput::new(limits.output_bytes),
            err: CapturedOutput::new(limits.output_bytes),
            supervisor: None,
            pid: None,
            jailed,
            memory: limits.memory_mb << 20,
            watch: None,
            looking: None,
            next_look: Instant::now() + WATCH_INTERVAL,
            interval: WATCH_INTERVAL,
            group,
            buffers: Box::new([[0; 16 << 10]; 2]),
            was_watched: false,
            missing: Vec::new(),
        }
    }

    /// Waits for the next event in the jail. Meanwhile reads output, so that no process blocks
    /// because of a full pipe.
    ///
    /// # Errors
    /// Returns an error if the jail cannot be built, or its keeper process has exited.
    pub(crate) async fn next_event(
        &mut self,
        deadline: &mut Deadline,
    ) -> Result<JailEvent, SandboxError> {
        loop {
            let look_at = self.next_look;
            let [out, err] = &mut *self.buffers;
            tokio::select! {
                biased;
                frame = self.line.next() => {
                    if let Some(event) = self.read_event(frame)? {
                        return Ok(event);
                    }
                }
                cell = next_cell(&mut self.cells), if self.cells.is_some() => {
                    let Ok(Some(cell)) = cell else {
                        self.cells = None;
                        return Ok(JailEvent::NoCells);
                    };
                    return Ok(JailEvent::Cell(cell));
                }
                _ = deadline.as_mut() => return Ok(JailEvent::Late),
                () = sleep_until(look_at), if self.watch.is_some() => {
                    // This runs in a separate thread, because a run can make the observation long,
                    // and other runs must not wait for it.
                    self.looking = self.watch.take().map(|watch| tokio::task::spawn_blocking(|| watch.observe()));
                    self.next_look = Instant::now();
                }
                watch = wait_for_observation(&mut self.looking), if self.looking.is_some() => {
                    self.looking = None;
                    let watch = watch?;
                    self.next_look = Instant::now() + self.interval.max((self.next_look.elapsed() * MIN_INTERVAL_FACTOR).min(MAX_INTERVAL));
                    let event = if watch.exceeded {
                        JailEvent::OverMemory
                    } else {
                        JailEvent::Observed(watch.clone())
                    };
                    self.watch = Some(watch);
                    return Ok(event);
                }
                count = read_output(&mut self.stdout, out), if self.stdout.is_some() => {
                    match count {
                        0 => self.stdout = None,
                        count => self.out.push(&out[..count]),
                    }
                }
                count = read_output(&mut self.stderr, err), if self.stderr.is_some() => {
                    match count {
                        0 => self.stderr = None,
                        count => self.err.push(&err[..count]),
                    }
                }
            }
        }
    }

    fn read_event(
        &mut self,
        frame: std::io::Result<Option<Vec<u8>>>,
    ) -> Result<Option<JailEvent>, SandboxError> {
        let frame = frame.map_err(|error| broken_error(&error.to_string()))?;
        let Some(frame) = frame else {
            if self.group.as_ref().is_some_and(RunCgroup::is_out_of_memory) {
                return Ok(Some(JailEvent::OverMemory));
            }
            return Err(broken_error(
                "the keeper process of the run has exited; check that the machine has enough free \
                 memory",
            ));
        };
        match serde_json::from_slice(&frame).map_err(|error| broken_error(&error.to_string()))? {
            JailMessage::Supervisor(_) => {
                self.supervisor = self.line.descriptor.take();
                self.pid = self.supervisor.as_ref().and_then(memory::pid_of_pidfd);
                self.was_watched = self.pid.is_some_and(memory::can_watch);
                self.watch = self.pid.map(|pid| MemoryWatch::new(pid, self.memory, self.jailed));
                Ok(None)
            }
            JailMessage::Missing(missing) => {
                self.missing =
                    missing.into_iter().map(|(name, why)| MissingWall { name, why }).collect();
                Ok(None)
            }
            JailMessage::Failed(why) => Err(broken_error(&why)),
            JailMessage::Rejected(why) => Err(SandboxError::Request(why)),
            JailMessage::Ended(report) => Ok(Some(JailEvent::Ended(report))),
        }
    }

    /// Sends the code of a cell to the runner.
    pub(crate) async fn send_cell(&mut self, cell: &str) -> std::io::Result<()> {
        let Some(cells) = &self.cells else { return Err(std::io::ErrorKind::BrokenPipe.into()) };
        let mut bytes = (cell.len() as u32).to_ne_bytes().to_vec();
        bytes.extend_from_slice(cell.as_bytes());
        cells.write_bytes(&bytes).await
    }

    /// Observes the jail between two calls of a session, until `woken` is sent or an event occurs,
    /// which is also returned. Ends the jail if it exceeds its memory limit or uses more than `cpu`
    /// seconds of processor time.
    pub(crate) async fn watch_idle(
        mut self,
        cpu: f64,
        woken: oneshot::Receiver<()>,
    ) -> (Self, Option<EventResult>) {
        (self.interval, self.next_look) =
            (IDLE_WATCH_INTERVAL, Instant::now() + IDLE_WATCH_INTERVAL);
        let mut never: Deadline = Box::pin(std::future::pending());
        let happened = tokio::select! {
            biased;
            _ = woken => None,
            happened = self.next_idle_event(cpu, &mut never) => Some(happened),
        };
        (self.interval, self.next_look) = (WATCH_INTERVAL, Instant::now() + WATCH_INTERVAL);
        if matches!(happened, Some(Ok(JailEvent::OverMemory | JailEvent::Late))) {
            self.stop().await;
        }
        (self, happened)
    }

    /// Waits for the next event in the jail. Returns [`JailEvent::Late`] if the jail has used `cpu`
    /// seconds of processor time.
    async fn next_idle_event(&mut self, cpu: f64, never: &mut Deadline) -> EventResult {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut last = None;
        let mut used = 0.0;
        loop {
            let watch = match self.next_event(never).await? {
                JailEvent::Observed(watch) => watch,
                event => return Ok(event),
            };
            let total = self.group.as_ref().and_then(RunCgroup::cpu_seconds);
            let now = Instant::now();
            let exact = total.is_some();
            let total = total.unwrap_or(watch.cpu);
            if let Some((then, before)) = last.replace((now, total)) {
                // Children that end between two observations leave no processor time behind, but at
                // each observation some are running.
                let busy = watch.busy.min(processors) as f64 * (now - then).as_secs_f64();
                used += if exact { total - before } else { busy.max(total - before) };
            }
            if used > cpu {
                return Ok(JailEvent::Late);
            }
        }
    }

    /// Returns the processor time of the run as observed from outside, in seconds. Returns 0 if the
    /// run is not observed.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let group = self.group.as_ref().and_then(RunCgroup::cpu_seconds);
        group.or(self.watch.as_ref().map(|watch| watch.cpu)).unwrap_or(0.0)
    }

    /// Takes all captured output (standard output, standard error), including what the pipes still
    /// contain.
    pub(crate) fn take_output(&mut self, limits: &Limits) -> (CapturedOutput, CapturedOutput) {
        let [buffer, _] = &mut *self.buffers;
        for (stream, kept) in [(&self.stdout, &mut self.out), (&self.stderr, &mut self.err)] {
            let Some(stream) = stream else { continue };
            // The limit is somewhat more than a pipe holds, because the code may continue to write.
            for _ in 0..MAX_READS {
                let Ok(count @ 1..) = rustix::io::read(stream, &mut *buffer) else { break };
                kept.push(&buffer[..count]);
            }
        }
        let empty = || CapturedOutput::new(limits.output_bytes);
        (std::mem::replace(&mut self.out, empty()), std::mem::replace(&mut self.err, empty()))
    }

    /// Ends all processes of the jail at once, without the keeper's report, because the processes
    /// must not allocate further memory until the keeper is scheduled. Without a PID namespace,
    /// only the keeper can end them, and its report is returned.
    pub(crate) async fn kill_all(&mut self) -> Option<JailReport> {
        if self.jailed && self.supervisor.is_some() {
            return self.kill_without_report();
        }
        self.stop().await
    }

    /// Requests the keeper to end all processes, and waits for its report. Returns `None` if the
    /// keeper does not send the report in time.
    pub(crate) async fn stop(&mut self) -> Option<JailReport> {
        let _ = self.line.write_bytes(STOP).await;
        let mut deadline = new_deadline(STOP_GRACE);
        loop {
            match self.next_event(&mut deadline).await {
                Ok(JailEvent::Ended(report)) => return Some(report),
                Ok(JailEvent::Late | JailEvent::OverMemory) | Err(_) => {
                    return self.kill_without_report();
                }
                Ok(JailEvent::Cell(_) | JailEvent::NoCells | JailEvent::Observed(_)) => {}
            }
        }
    }

    /// Returns the contents of the files that `report` names, or the reasons why they are missing.
    ///
    /// # Errors
    /// Returns an error if the keeper has exited.
    pub(crate) async fn fetch_files(
        &mut self,
        report: &JailReport,
    ) -> Result<Vec<FetchedFile>, SandboxError> {
        let mut files = Vec::with_capacity(report.files.len());
        for (name, size, why) in &report.files {
            let content = self.line.read_bytes(*size).await;
            let content = content.map_err(|error| {
                SandboxError::Broken(format!(
                    "cannot fetch the file {name:?} from the run: {error}"
                ))
            })?;
            files.push((name.clone(), why.clone().map_or(Ok(content), Err)));
        }
        Ok(files)
    }

    fn kill_without_report(&self) -> Option<JailReport> {
        self.kill_processes();
        None
    }

    fn kill_processes(&self) {
        // Without a PID namespace, the keeper must end the remaining processes. It does so when the
        // connection closes.
        if let Some(supervisor) = self.supervisor.as_ref().filter(|_| self.jailed) {
            let _ = pidfd_send_signal(supervisor, Signal::KILL);
        }
    }
}

fn broken_error(why: &str) -> SandboxError {
    SandboxError::Broken(why.to_owned())
}

/// Waits until the running observation of memory is complete, and returns the watch.
async fn wait_for_observation(
    looking: &mut Option<JoinHandle<MemoryWatch>>,
) -> Result<MemoryWatch, SandboxError> {
    match looking {
        Some(looking) => looking.await.map_err(|error| {
            SandboxError::Broken(format!("the memory of the run cannot be observed: {error}"))
        }),
        None => std::future::pending().await,
    }
}

/// Name of a requested file, with its content or the reason why the content is missing.
pub(crate) type FetchedFile = (String, Result<Vec<u8>, String>);

impl Drop for Jail {
    fn drop(&mut self) {
        self.kill_processes();
    }
}

async fn next_cell(cells: &mut Option<FrameStream>) -> std::io::Result<Option<Vec<u8>>> {
    match cells {
        Some(cells) => cells.next().await,
        None => Ok(None),
    }
}

/// Reads from an output stream into `buffer`. Returns 0 at the end of the stream and on an error.
async fn read_output(stream: &mut Option<pipe::Receiver>, buffer: &mut [u8]) -> usize {
    match stream {
        Some(stream) => stream.read(buffer).await.unwrap_or(0),
        None => 0,
    }
}
