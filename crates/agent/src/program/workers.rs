//! Workers: programs that stay alive and take attempts one after another, or several at once, for frameworks
//! that take seconds to load.
//!
//! A worker reads one line of JSON for each attempt, with all that a program would find in its environment,
//! and prints one when it is done: `{"attempt": NAME, "answer": …, "reward": …}`, or with `"error"`. Other
//! lines are its own affair.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::Launch;
use crate::kept::{Tail, read};

/// Longest line that a worker may print.
const LONGEST_LINE: usize = 16 << 20;

/// How long a worker that was told to end an attempt may take before it is ended itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// Workers of one program.
pub struct Workers {
    launch: Launch,
    places: Arc<Semaphore>,
    most_each: usize,
    workers: Mutex<Vec<Option<Arc<Worker>>>>,
}

/// A worker under way.
struct Worker {
    line: tokio::sync::Mutex<Line>,
    state: Mutex<State>,
}

/// The line to a worker's keeper.
struct Line {
    pipe: Option<ChildStdin>,
    /// Lines that keeper and program must be told before anything else.
    order: Option<String>,
}

impl Line {
    async fn write(&mut self, text: &str) -> std::io::Result<()> {
        let pipe = self.pipe.as_mut().ok_or(std::io::ErrorKind::BrokenPipe)?;
        if let Some(order) = self.order.take() {
            pipe.write_all(order.as_bytes()).await?;
        }
        pipe.write_all(text.as_bytes()).await
    }
}

#[derive(Default)]
struct State {
    /// Attempts under way, and who waits for each.
    waiting: HashMap<String, oneshot::Sender<Result<Value, String>>>,
    /// Why it takes no more.
    ended: Option<String>,
}

impl Worker {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all of its attempts.
    fn end(&self, why: &str) {
        let mut state = self.state();
        state.ended = Some(why.to_owned());
        for (_, waiting) in state.waiting.drain() {
            let _ = waiting.send(Err(why.to_owned()));
        }
    }
}

/// An attempt that a worker has taken.
pub(crate) struct Taken {
    worker: Arc<Worker>,
    attempt: String,
    done: oneshot::Receiver<Result<Value, String>>,
    _place: OwnedSemaphorePermit,
}

impl Workers {
    /// Room for `count` workers, each with at most `most_each` attempts at once. They are started as they are
    /// needed.
    pub fn new(launch: Launch, count: usize, most_each: usize) -> Self {
        let (count, most_each) = (count.max(1), most_each.max(1));
        Workers {
            launch,
            places: Arc::new(Semaphore::new(count.saturating_mul(most_each))),
            most_each,
            workers: Mutex::new(vec![None; count]),
        }
    }

    /// Hands an attempt to the worker with the fewest, once there is room.
    ///
    /// # Errors
    /// When no worker can be started, or the one at hand is gone.
    pub(crate) async fn take(&self, attempt: &str, order: Value) -> Result<Taken, String> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(|error| error.to_string())?;
        let (sender, done) = oneshot::channel();
        let worker = self.least(attempt, sender)?;
        // A worker that takes nothing is gone, and whoever reads its output says why.
        let _ = worker.line.lock().await.write(&format!("{order}\n")).await;
        Ok(Taken { worker, attempt: attempt.to_owned(), done, _place: place })
    }

    fn least(
        &self,
        attempt: &str,
        sender: oneshot::Sender<Result<Value, String>>,
    ) -> Result<Arc<Worker>, String> {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in workers.iter_mut() {
            if slot.as_ref().is_some_and(|worker| worker.state().ended.is_some()) {
                *slot = None;
            }
        }
        let load =
            |slot: &Option<Arc<Worker>>| slot.as_ref().map_or(0, |worker| worker.state().waiting.len());
        // A worker that is there is better than one that has yet to load, until it has its share.
        let place = (0..workers.len())
            .filter(|&at| load(&workers[at]) < self.most_each)
            .min_by_key(|&at| (load(&workers[at]), workers[at].is_none()));
        let place = place.ok_or("no worker has room")?;
        let worker = match &workers[place] {
            Some(worker) => Arc::clone(worker),
            None => {
                let worker = start(&self.launch)?;
                workers[place] = Some(Arc::clone(&worker));
                worker
            }
        };
        worker.state().waiting.insert(attempt.to_owned(), sender);
        Ok(worker)
    }
}

/// Starts a worker.
fn start(launch: &Launch) -> Result<Arc<Worker>, String> {
    let (mut child, first) = launch.start()?;
    let line = Line { pipe: child.stdin.take(), order: Some(first) };
    let worker = Arc::new(Worker { line: tokio::sync::Mutex::new(line), state: Mutex::default() });
    tokio::spawn(follow(child, Arc::downgrade(&worker)));
    Ok(worker)
}

/// Reads what a worker prints, to its end.
async fn follow(mut child: Child, worker: std::sync::Weak<Worker>) {
    let errors = tokio::spawn(read(child.stderr.take()));
    if let Some(stdout) = child.stdout.take() {
        let mut lines = BufReader::new(stdout);
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut limited = tokio::io::AsyncReadExt::take(&mut lines, LONGEST_LINE as u64);
            match limited.read_until(b'\n', &mut line).await {
                Ok(1..) => {}
                _ => break,
            }
            let Some(worker) = worker.upgrade() else { break };
            if let Ok(value) = serde_json::from_slice::<Value>(&line)
                && let Some(attempt) = value["attempt"].as_str()
                && let Some(waiting) = worker.state().waiting.remove(attempt)
            {
                let _ = waiting.send(Ok(value));
            }
        }
    }
    let status = child.wait().await;
    let errors: Tail = errors.await.unwrap_or_default();
    let last = errors.last_line().unwrap_or_else(|| "nothing on standard error".into());
    let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
    if let Some(worker) = worker.upgrade() {
        worker.end(&format!("the worker ended with {how}: {last}"));
    }
}

impl Taken {
    /// Waits for the worker's answer. Can be given up, and gone on with.
    ///
    /// # Errors
    /// When the worker ends first.
    pub(crate) async fn wait(&mut self) -> Result<Value, String> {
        let gone = || Err("the worker is gone".to_owned());
        (&mut self.done).await.unwrap_or_else(|_| gone())
    }

    /// Tells the worker that the attempt is over. One that does not let go of it is ended, with all that it
    /// has under way.
    pub(crate) async fn stop(&mut self) {
        let line = format!("{}\n", json!({ "attempt": self.attempt, "stop": true }));
        let tell = async { self.worker.line.lock().await.write(&line).await };
        let _ = tokio::time::timeout(PATIENCE, tell).await;
        if tokio::time::timeout(PATIENCE, self.wait()).await.is_err() {
            let why =
                format!("the worker did not let go of {} within {PATIENCE:?}, and was ended", self.attempt);
            self.worker.end(&why);
            self.worker.line.lock().await.pipe = None;
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.worker.state().waiting.remove(&self.attempt);
    }
}

/// The order that a program in a worker gets for an attempt: the variables of its environment that are ours,
/// and the limits and agents of the attempt.
pub(super) fn order_of(
    program: &super::Program,
    environment: &[(String, String)],
    attempt: &str,
    task: &Value,
) -> Value {
    let of =
        |name: &str| environment.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
    json!({
        "attempt": attempt,
        "base_url": of("OPENAI_BASE_URL"),
        "anthropic_base_url": of("ANTHROPIC_BASE_URL"),
        "api_key": of("LEVADE_API_KEY"),
        "model": of("LEVADE_MODEL"),
        "reward_url": of("LEVADE_REWARD_URL"),
        "reward_key": of("LEVADE_REWARD_KEY"),
        "max_turns": program.limits.turns,
        "agents": program.agents.iter().map(|agent| &agent.name).collect::<Vec<_>>(),
        "task": task,
    })
}
