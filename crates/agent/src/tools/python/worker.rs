//! A worker: a process that answers orders, several at once.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::PythonOptions;
use super::offered::{Described, Offered};
use crate::Keeper;
use crate::kept::{self, Tail};

/// The program of a worker: it reads the other files from the first line of its input.
pub(crate) const START: &str = include_str!("worker/start.py");

/// The files of a worker, each after those that it imports.
const MODULES: [(&str, &str); 7] = [
    ("docstrings", include_str!("worker/docstrings.py")),
    ("schema", include_str!("worker/schema.py")),
    ("answers", include_str!("worker/answers.py")),
    ("shims", include_str!("worker/shims.py")),
    ("tools", include_str!("worker/tools.py")),
    ("load", include_str!("worker/load.py")),
    ("serve", include_str!("worker/serve.py")),
];

/// Longest line that a worker may print.
const LONGEST_LINE: u64 = 16 << 20;

/// How long a call that was given up may go on until its worker is ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a process may take to end once it has closed its line, or has been told to.
const ENDING: Duration = Duration::from_secs(10);

/// How far a worker is.
#[derive(Debug, Clone)]
pub(super) enum State {
    /// Loading the user's file.
    Starting,
    /// Taking orders.
    Ready,
    /// Gone, and why.
    Ended { why: String, was_ready: bool },
}

/// A worker under way. It ends once nobody holds it.
pub(super) struct Worker {
    orders: mpsc::UnboundedSender<Order>,
    pub state: watch::Receiver<State>,
    /// Orders under way.
    pub busy: AtomicUsize,
    /// Attempts whose instances it has.
    pub sessions: AtomicUsize,
}

/// An order to a worker.
enum Order {
    Do {
        id: u64,
        order: Value,
        answer: oneshot::Sender<Result<Value, String>>,
    },
    /// Nobody waits for this order any more.
    GiveUp(u64),
}

/// Numbers of orders, unique in this process.
static ORDERS: AtomicU64 = AtomicU64::new(0);

impl Worker {
    /// Starts one. Its tools are those that `offered` has, or become these.
    ///
    /// # Errors
    /// When its keeper cannot be started.
    pub fn start(
        name: &str,
        options: &PythonOptions,
        keeper: &Keeper,
        offered: Arc<OnceLock<Arc<Offered>>>,
    ) -> Result<Arc<Self>, String> {
        let child = keeper.start(levade_policy::environment::passed(&options.passes))?;
        let (orders, taken) = mpsc::unbounded_channel();
        let (tell, state) = watch::channel(State::Starting);
        let process = Process { name: name.to_owned(), limit: options.start, offered, tell };
        tokio::spawn(process.keep(child, first_lines(options), taken));
        Ok(Arc::new(Worker { orders, state, busy: AtomicUsize::new(0), sessions: AtomicUsize::new(0) }))
    }

    /// Why it takes no orders any more, where it does not.
    pub fn ended(&self) -> Option<String> {
        match &*self.state.borrow() {
            State::Ended { why, .. } => Some(why.clone()),
            // Nobody looks after it any more: the runtime that did is gone.
            _ if self.orders.is_closed() => Some("its Python process is gone".into()),
            _ => None,
        }
    }

    /// Gives an order, and waits for the answer. Where that is given up, so is the order.
    ///
    /// # Errors
    /// When the worker ends first, and why.
    pub async fn ask(&self, mut order: Value) -> Result<Value, String> {
        let id = ORDERS.fetch_add(1, Ordering::Relaxed);
        order["id"] = json!(id);
        let (answer, answered) = oneshot::channel();
        self.busy.fetch_add(1, Ordering::Relaxed);
        let _waits = Waits { worker: self, id };
        let gone = || self.ended().unwrap_or_else(|| "its Python process is gone".into());
        self.orders.send(Order::Do { id, order, answer }).map_err(|_| gone())?;
        answered.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Gives an order whose answer nobody waits for.
    pub fn tell(&self, mut order: Value) {
        let id = ORDERS.fetch_add(1, Ordering::Relaxed);
        order["id"] = json!(id);
        let _ = self.orders.send(Order::Do { id, order, answer: oneshot::channel().0 });
    }
}

/// Somebody who waits for an answer.
struct Waits<'w> {
    worker: &'w Worker,
    id: u64,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.worker.busy.fetch_sub(1, Ordering::Relaxed);
        // Nothing comes of it where the answer is there.
        let _ = self.worker.orders.send(Order::GiveUp(self.id));
    }
}

/// The first lines of a worker's input: the order to its keeper, and what it is to load.
fn first_lines(options: &PythonOptions) -> String {
    let path = |path: &Option<std::path::PathBuf>| path.as_ref().map(|path| path.display().to_string());
    let place = options.file.as_deref().or(options.config.as_deref()).and_then(Path::parent);
    let command = [options.python.clone(), "-c".into(), START.into()];
    let order = kept::order(&command, place.unwrap_or(Path::new("")), None);
    let first = json!({
        "modules": MODULES,
        "file": path(&options.file),
        "config": path(&options.config),
        "functions": options.functions,
    });
    format!("{order}{first}\n")
}

/// Whatever is known of a process by those who look after it.
struct Process {
    name: String,
    limit: Duration,
    offered: Arc<OnceLock<Arc<Offered>>>,
    tell: watch::Sender<State>,
}

/// An order that a worker has not answered.
struct Open {
    /// Name of the tool, or the verb.
    of: String,
    answer: oneshot::Sender<Result<Value, String>>,
    /// When the worker is ended, since nobody waits any more.
    until: Option<Instant>,
}

impl Process {
    /// Looks after a worker, from its start to its end.
    async fn keep(self, mut child: Child, first: String, mut orders: mpsc::UnboundedReceiver<Order>) {
        let (to_write, written) = mpsc::unbounded_channel();
        let writer = tokio::spawn(write(child.stdin.take(), written));
        let (said, mut lines) = mpsc::channel(64);
        let reader = tokio::spawn(read(child.stdout.take(), said));
        let tail = Arc::<Mutex<Tail>>::default();
        let mut log = tokio::spawn(log(self.name.clone(), child.stderr.take(), Arc::clone(&tail)));
        let _ = to_write.send(first);
        let mut open: HashMap<u64, Open> = HashMap::new();
        let mut start = Some(Instant::now() + self.limit);
        let why = loop {
            let next = start.into_iter().chain(open.values().filter_map(|open| open.until)).min();
            tokio::select! {
                biased;
                line = lines.recv() => match line {
                    Some(Ok(value)) if start.is_some() => match self.begin(&value) {
                        Ok(()) => start = None,
                        Err(why) => break why,
                    },
                    Some(Ok(value)) => {
                        let of = value["id"].as_u64().and_then(|id| open.remove(&id));
                        of.map(|open| open.answer.send(Ok(value)));
                    }
                    Some(Err(why)) => break why,
                    None => break how_it_ended(&mut child, &tail, &mut log).await,
                },
                order = orders.recv() => match order {
                    Some(Order::Do { id, order, answer }) => {
                        let of = order["tool"].as_str().or(order["do"].as_str()).unwrap_or_default().to_owned();
                        let _ = to_write.send(format!("{order}\n"));
                        open.insert(id, Open { of, answer, until: None });
                    }
                    Some(Order::GiveUp(id)) => if let Some(open) = open.get_mut(&id) {
                        open.until = Some(Instant::now() + PATIENCE);
                        let _ = to_write.send(format!("{}\n", json!({ "do": "give_up", "id": id })));
                    },
                    None => break "it is no longer needed".into(),
                },
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let late = open.values().find(|open| open.until.is_some_and(|until| until <= Instant::now()));
                    match late {
                        Some(late) => break format!(
                            "the Python process was ended, since a call on it ({}) went on for {PATIENCE:?} after it \
                             had been given up",
                            late.of
                        ),
                        None if start.is_some() => break format!("it was still loading after {:?}", self.limit),
                        None => {}
                    }
                }
            }
        };
        debug!(tool = %self.name, why, "a Python process ends");
        self.tell.send_replace(State::Ended { why: why.clone(), was_ready: start.is_none() });
        for (_, open) in open {
            let _ = open.answer.send(Err(why.clone()));
        }
        // The keeper takes the end of its line for the end of the process, and so it does a signal, should
        // the process no longer read what the keeper passes on.
        writer.abort();
        reader.abort();
        stop(child).await;
        log.abort();
    }

    /// Takes the first line of a worker.
    ///
    /// # Errors
    /// When it could not load its tools, or has others than those before it.
    fn begin(&self, said: &Value) -> Result<(), String> {
        if let Some(why) = said["failed"].as_str() {
            return Err(why.to_owned());
        }
        let tools: Vec<Described> = serde_json::from_value(said["ready"]["tools"].clone())
            .map_err(|error| format!("its first line is none of a worker: {error}"))?;
        let offered = match self.offered.get() {
            Some(offered) => Arc::clone(offered),
            None => {
                let new = Arc::new(Offered::new(tools.clone())?);
                Arc::clone(self.offered.get_or_init(|| new))
            }
        };
        if offered.tools != tools {
            return Err("its tools are others than at the beginning: the file has changed".into());
        }
        debug!(tool = %self.name, python = said["ready"]["python"].as_str(), "a Python process is ready");
        self.tell.send_replace(State::Ready);
        Ok(())
    }
}

/// Writes what is to be written, until there is nothing more.
async fn write(pipe: Option<ChildStdin>, mut texts: mpsc::UnboundedReceiver<String>) {
    let Some(mut pipe) = pipe else { return };
    while let Some(text) = texts.recv().await {
        // A worker that takes nothing is gone, and whoever reads its output says why.
        if pipe.write_all(text.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads the lines of a worker.
async fn read(stdout: Option<ChildStdout>, said: mpsc::Sender<Result<Value, String>>) {
    let Some(stdout) = stdout else { return };
    let (mut lines, mut line) = (BufReader::new(stdout), Vec::new());
    loop {
        line.clear();
        match (&mut lines).take(LONGEST_LINE).read_until(b'\n', &mut line).await {
            Ok(1..) => {}
            _ => return,
        }
        let value = serde_json::from_slice(&line);
        let value = value.map_err(|error| format!("a line of the Python process is no answer: {error}"));
        let is_last = value.is_err();
        if said.send(value).await.is_err() || is_last {
            return;
        }
    }
}

/// Puts what a worker prints into the log, and keeps the end of it.
async fn log(name: String, stream: Option<impl tokio::io::AsyncRead + Unpin>, tail: Arc<Mutex<Tail>>) {
    let Some(stream) = stream else { return };
    let (mut lines, mut line) = (BufReader::new(stream), Vec::new());
    loop {
        line.clear();
        match (&mut lines).take(LONGEST_LINE >> 8).read_until(b'\n', &mut line).await {
            Ok(1..) => {}
            _ => return,
        }
        tail.lock().unwrap_or_else(PoisonError::into_inner).push(&line);
        debug!(tool = %name, "{}", String::from_utf8_lossy(&line).trim_end());
    }
}

/// How a worker ended that has closed its line.
async fn how_it_ended(child: &mut Child, tail: &Mutex<Tail>, log: &mut JoinHandle<()>) -> String {
    let Ok(status) = timeout(ENDING, child.wait()).await else {
        return "the Python process has closed its line".into();
    };
    let code = status.map_or(None, |status| status.code());
    // Whoever reads what it has printed may be a moment behind.
    let _ = timeout(ENDING, log).await;
    let last = tail.lock().unwrap_or_else(PoisonError::into_inner).last_line();
    let last = last.unwrap_or_else(|| "it printed nothing".into());
    format!("the Python process ended ({}): {last}", kept::ending(code))
}

/// Ends a keeper with its program.
async fn stop(mut child: Child) {
    if let Some(pid) = child.id().and_then(|id| Pid::from_raw(id as i32)) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if timeout(ENDING, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}
