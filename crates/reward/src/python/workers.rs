//! Processes that run a function of the user's.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_policy::awake::within;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::PythonKeys;
use crate::Supervisor;
use crate::process::{self, Launch, Process};

/// The program of a worker.
const PROGRAM: &str = include_str!("worker.py");

/// Longest line that a worker may write, in bytes.
const LONGEST: u64 = 1 << 20;

/// Bytes of what a worker prints that are kept, for messages.
const KEPT: usize = 8 << 10;

/// How long the end of a worker may take to be told of.
const ENDING: Duration = Duration::from_secs(2);

/// The processes of a scorer.
#[derive(Debug)]
pub(super) struct Workers {
    command: Vec<String>,
    folder: PathBuf,
    environment: Vec<String>,
    supervisor: Option<Arc<dyn Supervisor>>,
    places: Arc<Semaphore>,
    idle: Arc<Mutex<Vec<Worker>>>,
}

#[derive(Debug)]
struct Worker {
    process: Process,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Columns of the data set that the function must get.
    columns: Vec<String>,
    /// End of what it has printed.
    printed: Arc<Mutex<Vec<u8>>>,
}

/// A worker for one call. Unless it is given back, it ends.
#[derive(Debug)]
pub(super) struct Taken {
    worker: Worker,
    idle: Arc<Mutex<Vec<Worker>>>,
    _place: OwnedSemaphorePermit,
}

impl Workers {
    pub fn new(keys: &PythonKeys, supervisor: Option<Arc<dyn Supervisor>>) -> Self {
        // The process may run in another folder than this one.
        let file = std::path::absolute(&keys.file).unwrap_or_else(|_| keys.file.clone());
        let folder = file.parent().map(PathBuf::from).unwrap_or_default();
        let name = file.display().to_string();
        // Output that is buffered would be lost with a process that ends itself.
        let own = serde_json::json!(keys.arguments.keys().collect::<Vec<_>>()).to_string();
        let form = keys.completions.name();
        let arguments = ["-u", "-c", PROGRAM, &name, &keys.function, &own, form];
        Workers {
            command: [keys.python.clone()].into_iter().chain(arguments.map(str::to_owned)).collect(),
            folder,
            environment: keys.environment.clone(),
            supervisor,
            places: Arc::new(Semaphore::new(keys.workers.clamp(1, super::WORKERS))),
            idle: Arc::default(),
        }
    }

    /// Waits for a place, and takes a worker that is there or starts one.
    ///
    /// # Errors
    /// When it cannot be started, or the file does not load within `start`: why.
    pub async fn take(&self, start: Duration) -> Result<Taken, String> {
        let place = self.places.clone().acquire_owned().await.map_err(|error| error.to_string())?;
        let worker = match self.idle() {
            Some(worker) => worker,
            None => match within(start, self.start()).await {
                Some(worker) => worker?,
                None => return Err(format!("did not load within {start:?}")),
            },
        };
        Ok(Taken { worker, idle: self.idle.clone(), _place: place })
    }

    /// A worker that waits for calls, and has not ended meanwhile.
    fn idle(&self) -> Option<Worker> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(mut worker) = idle.pop() {
            if matches!(worker.process.child.try_wait(), Ok(None)) {
                return Some(worker);
            }
        }
        None
    }

    async fn start(&self) -> Result<Worker, String> {
        let launch = Launch {
            program: &self.command,
            folder: &self.folder,
            environment: &self.environment,
            supervisor: self.supervisor.as_deref(),
        };
        let started = process::start(launch, None).await;
        let mut process =
            started.map_err(|error| format!("cannot be run by {}: {error}", self.command[0]))?;
        let child = &mut process.child;
        let (Some(stdin), Some(stdout), Some(mut stderr)) =
            (process.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err("cannot be talked to".into());
        };
        let printed = Arc::<Mutex<Vec<u8>>>::default();
        let kept = printed.clone();
        // Read to the end, so that a function that prints much never waits.
        tokio::spawn(async move {
            let mut buffer = vec![0; 4 << 10];
            while let Ok(count @ 1..) = stderr.read(&mut buffer).await {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend_from_slice(&buffer[..count]);
                let over = kept.len().saturating_sub(KEPT);
                kept.drain(..over);
            }
        });
        let stdout = BufReader::new(stdout);
        let mut worker = Worker { process, stdin, stdout, columns: Vec::new(), printed };
        let said = worker.line().await?;
        if let Some(error) = said["error"].as_str() {
            return Err(error.to_owned());
        }
        let columns = said["columns"].as_array().into_iter().flatten();
        worker.columns = columns.filter_map(|name| name.as_str().map(str::to_owned)).collect();
        Ok(worker)
    }
}

impl Worker {
    /// The next line that it writes.
    async fn line(&mut self) -> Result<Value, String> {
        let mut line = Vec::new();
        let read = (&mut self.stdout).take(LONGEST).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) || line.last() != Some(&b'\n') {
            return Err(self.ended().await);
        }
        serde_json::from_slice(&line)
            .map_err(|error| format!("wrote {:?}: {error}", process::shown(&String::from_utf8_lossy(&line))))
    }

    fn printed(&self) -> Vec<u8> {
        self.printed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How it ended, in words.
    async fn ended(&mut self) -> String {
        let how = match within(ENDING, self.process.child.wait()).await {
            Some(Ok(status)) => match process::not_started(status, &self.printed()) {
                Some(why) => return format!("cannot be run: {why}"),
                None => format!("ended its process with {}", process::ending(status)),
            },
            _ => "closed its line".into(),
        };
        // What it printed last may still be on its way.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let printed = self.printed();
        let printed = String::from_utf8_lossy(&printed);
        let last =
            printed.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing on standard error");
        format!("{how}: {}", last.trim())
    }
}

impl Taken {
    /// Calls the function.
    ///
    /// # Errors
    /// When the process ends first: how.
    pub async fn ask(&mut self, attempt: &Value) -> Result<Value, String> {
        let question = format!("{attempt}\n");
        if self.worker.stdin.write_all(question.as_bytes()).await.is_err() {
            return Err(self.worker.ended().await);
        }
        self.worker.line().await
    }

    /// Returns the columns of the data set that the function must get.
    pub fn columns(&self) -> &[String] {
        &self.worker.columns
    }

    /// Leaves the worker for the next call.
    pub fn give_back(self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.worker);
    }
}
