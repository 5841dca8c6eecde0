//! One worker: a process that handles several requests concurrently.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use levade_policy::process_time;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::ChildStdout;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::options::{Handshake, PoolOptions};
use crate::request::{Request, WorkerError};
use crate::supervisor::{Child, Input, Stdin};
use crate::tail::{Tail, TailReader};

/// Maximum length of an output line of a worker, in bytes.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// Timeout for the exit of a worker that has closed its output, and for the end of its standard
/// error.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// State of a worker process.
#[derive(Debug, Clone)]
pub(crate) enum WorkerState {
    Starting,
    Ready,
    Ended { error: WorkerError, was_ready: bool },
}

/// Guard that keeps a counter incremented while it exists.
#[derive(Debug)]
struct CountGuard(Arc<AtomicUsize>);

impl CountGuard {
    fn new(counter: &Arc<AtomicUsize>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        CountGuard(Arc::clone(counter))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A worker process of a [`Pool`](crate::Pool). The process is terminated when no pool, call or
/// affinity references the worker.
#[derive(Debug)]
pub struct Worker {
    messages: mpsc::UnboundedSender<WorkerMessage>,
    pub(crate) state: watch::Receiver<WorkerState>,
    /// Number of reserved slots, and of requests without a response.
    busy: Arc<AtomicUsize>,
    affinities: Arc<AtomicUsize>,
}

enum WorkerMessage {
    Send { request: Request, open: PendingRequest },
    Cancel(String),
}

/// A request to which the worker has not responded.
struct PendingRequest {
    response: oneshot::Sender<Result<Value, WorkerError>>,
    /// Time at which the worker is terminated unless it responds. `None` if the request was not
    /// cancelled.
    until: Option<Instant>,
    _busy: CountGuard,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Reservation on a worker for one request.
#[derive(Debug)]
pub struct Slot {
    worker: Arc<Worker>,
    busy: CountGuard,
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

/// Binding of an attempt to a worker, so that all requests of the attempt go to the same process.
/// The binding counts as load when a worker is selected.
#[derive(Debug)]
pub struct Affinity {
    worker: Arc<Worker>,
    _count: CountGuard,
}

impl Deref for Affinity {
    type Target = Arc<Worker>;

    fn deref(&self) -> &Arc<Worker> {
        &self.worker
    }
}

/// A request that was sent to a worker. Dropping the call cancels the request.
#[derive(Debug)]
pub struct Call {
    worker: Arc<Worker>,
    id: String,
    response: oneshot::Receiver<Result<Value, WorkerError>>,
}

impl Worker {
    /// Starts a worker process.
    ///
    /// # Errors
    /// Returns an error if the process cannot be spawned.
    pub(crate) fn start(options: &Arc<PoolOptions>) -> Result<Arc<Self>, WorkerError> {
        let child = options.supervisor.start(&options.launch, Input::Piped);
        let child = child.map_err(WorkerError::NotStarted)?;
        let (messages, received) = mpsc::unbounded_channel();
        let first =
            if options.handshake.is_some() { WorkerState::Starting } else { WorkerState::Ready };
        let (state, watched) = watch::channel(first);
        tokio::spawn(
            WorkerProcess { options: Arc::clone(options), state, open: HashMap::new() }
                .run(child, received),
        );
        Ok(Arc::new(Worker {
            messages,
            state: watched,
            busy: Arc::default(),
            affinities: Arc::default(),
        }))
    }

    /// Returns the reason why the worker accepts no more requests, or `None` if it accepts
    /// requests.
    pub fn error(&self) -> Option<WorkerError> {
        match &*self.state.borrow() {
            WorkerState::Ended { error, .. } => Some(error.clone()),
            _ => self.messages.is_closed().then_some(WorkerError::Closed),
        }
    }

    /// Returns the load of the worker: its number of reserved slots, pending requests and
    /// affinities.
    pub(crate) fn load(&self) -> usize {
        self.busy.load(Ordering::Relaxed) + self.affinities.load(Ordering::Relaxed)
    }

    pub(crate) fn has_slot(&self, max_requests: usize) -> bool {
        self.busy.load(Ordering::Relaxed) < max_requests
    }

    /// Reserves a slot for one request on this worker.
    pub fn slot(self: &Arc<Self>) -> Slot {
        Slot { worker: Arc::clone(self), busy: CountGuard::new(&self.busy), permit: None }
    }

    /// Binds an attempt to this worker until the returned affinity is dropped.
    pub fn affinity(self: &Arc<Self>) -> Affinity {
        Affinity { worker: Arc::clone(self), _count: CountGuard::new(&self.affinities) }
    }

    /// Sends a request to this worker and waits for the response. Dropping the future cancels the
    /// request.
    ///
    /// # Errors
    /// Returns an error if the worker exits first.
    pub async fn request(self: &Arc<Self>, request: Request) -> Result<Value, WorkerError> {
        self.slot().send(request).response().await
    }

    /// Sends a request to this worker, and ignores the response. The request is not cancelled.
    pub fn notify(self: &Arc<Self>, request: Request) {
        let Slot { busy, .. } = self.slot();
        let open = PendingRequest {
            response: oneshot::channel().0,
            until: None,
            _busy: busy,
            _permit: None,
        };
        let _ = self.messages.send(WorkerMessage::Send { request, open });
    }
}

impl Slot {
    /// Returns the worker on which the slot is reserved.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Sends a request to the worker on which the slot is reserved.
    pub fn send(self, request: Request) -> Call {
        let Slot { worker, busy, permit } = self;
        let (response, received) = oneshot::channel();
        let id = request.id.clone();
        let open = PendingRequest { response, until: None, _busy: busy, _permit: permit };
        // If the worker has exited, the call finds the response channel closed.
        let _ = worker.messages.send(WorkerMessage::Send { request, open });
        Call { worker, id, response: received }
    }
}

impl Call {
    /// Waits for the worker's response. This method is cancel safe.
    ///
    /// # Errors
    /// Returns an error if the worker exits first.
    pub async fn response(&mut self) -> Result<Value, WorkerError> {
        (&mut self.response)
            .await
            .unwrap_or_else(|_| Err(self.worker.error().unwrap_or(WorkerError::Closed)))
    }

    /// Cancels the request, and returns when the worker has responded to it. A worker that does not
    /// respond within the pool's grace period is terminated.
    pub async fn cancel(mut self) {
        let _ = self.worker.messages.send(WorkerMessage::Cancel(self.id.clone()));
        let _ = self.response().await;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // The message has no effect if the worker has responded.
        let _ = self.worker.messages.send(WorkerMessage::Cancel(self.id.clone()));
    }
}

/// State of the task that owns the process of a worker.
struct WorkerProcess {
    options: Arc<PoolOptions>,
    state: watch::Sender<WorkerState>,
    open: HashMap<String, PendingRequest>,
}

impl WorkerProcess {
    /// Handles the messages for a worker from the start of its process to the exit.
    async fn run(mut self, mut child: Child, mut messages: mpsc::UnboundedReceiver<WorkerMessage>) {
        let (to_write, texts) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write_texts(child.take_unwritten_stdin(), texts));
        let (read, mut lines) = mpsc::channel(64);
        let reader = tokio::spawn(read_lines(child.take_stdout(), read));
        let stderr = child.read_stderr(Tail::default(), Some(self.options.name.clone()));
        if let Some(first) = &self.options.first {
            let _ = to_write.send(format!("{first}\n"));
        }
        let start = tokio::select! {
            start = self.wait_for_handshake(&mut lines) => start,
            // Before the worker is ready, no request is sent; the channel can only close.
            _ = messages.recv(), if self.options.handshake.is_some() => Err(Some(WorkerError::Closed)),
        };
        let was_ready = start.is_ok();
        let end = match start {
            Ok(()) => self.forward_messages(&mut lines, &mut messages, &to_write).await,
            Err(end) => end,
        };
        let error = match end {
            Some(error) => error,
            None => read_exit_reason(&mut child, &stderr).await,
        };
        debug!(process = %self.options.name, %error, "worker ended");
        self.state.send_replace(WorkerState::Ended { error: error.clone(), was_ready });
        messages.close();
        for (_, open) in self.open.drain() {
            let _ = open.response.send(Err(error.clone()));
        }
        writer.abort();
        reader.abort();
        child.stop().await;
    }

    /// Waits for the worker's handshake, if the pool requires one.
    ///
    /// # Errors
    /// Returns the reason if the worker is not ready, or `None` if the worker's output has ended.
    async fn wait_for_handshake(
        &self,
        lines: &mut mpsc::Receiver<Vec<u8>>,
    ) -> Result<(), Option<WorkerError>> {
        let Some(Handshake { timeout, check }) = &self.options.handshake else { return Ok(()) };
        let line = process_time::with_timeout(*timeout, lines.recv())
            .await
            .ok_or(WorkerError::StartTimeout(*timeout))?;
        let mut value = parse_response(&line.ok_or(None)?)?;
        if let Some(error) = value["error"].as_str() {
            return Err(Some(WorkerError::NotReady(error.to_owned())));
        }
        let report = value.get_mut("ready").map(Value::take).unwrap_or_default();
        check(report).map_err(WorkerError::NotReady)?;
        self.state.send_replace(WorkerState::Ready);
        Ok(())
    }

    /// Forwards requests to the worker and responses from it, until the worker ends. Returns the
    /// reason, or `None` if the worker's output has ended.
    async fn forward_messages(
        &mut self,
        lines: &mut mpsc::Receiver<Vec<u8>>,
        messages: &mut mpsc::UnboundedReceiver<WorkerMessage>,
        to_write: &mpsc::UnboundedSender<String>,
    ) -> Option<WorkerError> {
        loop {
            let next = self.open.iter().filter_map(|(id, open)| Some((open.until?, id))).min();
            let next = next.map(|(until, id)| (until, id.clone()));
            tokio::select! {
                line = lines.recv() => match parse_response(&line?) {
                    Ok(answer) => self.handle_response(answer),
                    // Without a handshake, the worker prints to the same stream.
                    Err(_) if self.options.handshake.is_none() => {}
                    Err(error) => return Some(error),
                },
                message = messages.recv() => match message {
                    Some(message) => if let Some(text) = self.handle_message(message) {
                        let _ = to_write.send(text);
                    },
                    None => return Some(WorkerError::Closed),
                },
                id = sleep_until_due(next) => {
                    return Some(WorkerError::Unresponsive { id, grace: self.options.cancel_grace });
                }
            }
        }
    }

    fn handle_response(&mut self, response: Value) {
        let id = response[self.options.id_key].as_str();
        if let Some(open) = id.and_then(|id| self.open.remove(id)) {
            let _ = open.response.send(Ok(response));
        }
    }

    /// Processes a message for the worker. Returns the line to write to the worker, or `None` if
    /// there is nothing to write.
    fn handle_message(&mut self, message: WorkerMessage) -> Option<String> {
        let key = self.options.id_key;
        match message {
            WorkerMessage::Send { request: Request { id, mut body }, open } => {
                body[key] = json!(id);
                self.open.insert(id, open);
                Some(format!("{body}\n"))
            }
            WorkerMessage::Cancel(id) => {
                let open = self.open.get_mut(&id).filter(|open| open.until.is_none())?;
                open.until = Some(Instant::now() + self.options.cancel_grace);
                Some(format!("{}\n", json!({ (key): id, "stop": true })))
            }
        }
    }
}

/// Waits until the grace period of a cancelled request has passed, and returns the request's id.
/// Never returns if `next` is `None`.
async fn sleep_until_due(next: Option<(Instant, String)>) -> String {
    let Some((until, id)) = next else { return std::future::pending().await };
    sleep_until(until).await;
    id
}

fn parse_response(line: &[u8]) -> Result<Value, WorkerError> {
    serde_json::from_slice(line).map_err(|error| {
        let line: String = String::from_utf8_lossy(line).trim().chars().take(80).collect();
        WorkerError::InvalidLine(format!("{error} in {line:?}"))
    })
}

async fn write_texts(stdin: Option<Stdin>, mut texts: mpsc::UnboundedReceiver<String>) {
    let Some(mut stdin) = stdin else { return };
    while let Some(text) = texts.recv().await {
        if stdin.write(&text).await.is_err() {
            // The end of the worker's output reports why it no longer reads.
            return;
        }
    }
}

/// Sends the lines that a worker prints to `lines`, until the worker's output ends.
async fn read_lines(stdout: Option<ChildStdout>, lines: mpsc::Sender<Vec<u8>>) {
    let Some(stdout) = stdout else { return };
    let mut stdout = BufReader::new(stdout);
    loop {
        let mut line = Vec::new();
        match (&mut stdout).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).await {
            Ok(1..) if lines.send(line).await.is_ok() => {}
            _ => return,
        }
    }
}

/// Returns the reason why a worker has closed its output: its exit, or that it still runs.
async fn read_exit_reason(child: &mut Child, stderr: &TailReader) -> WorkerError {
    let Ok(code) = tokio::time::timeout(EXIT_TIMEOUT, child.wait()).await else {
        return WorkerError::ClosedOutput;
    };
    let code = code.ok().flatten();
    let last_line = stderr.finish(EXIT_TIMEOUT).await.last_line();
    match last_line {
        Some(why) if code == Some(127) && why.starts_with("cannot start") => {
            WorkerError::NotStarted(why)
        }
        last_line => WorkerError::Exited { code, last_line },
    }
}
