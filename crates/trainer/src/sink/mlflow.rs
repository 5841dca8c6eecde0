//! An MLflow server, over its HTTP API (version 2.0), from a thread of its own.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Sink, parameters, wire};
use crate::metrics::Metrics;
use crate::recipe::Recipe;

/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest time that the end of a run waits for what is still to be passed on.
const FAREWELL: Duration = Duration::from_secs(30);
/// Most numbers of a request, by the server's own limit.
const BATCH: usize = 1000;

/// What the thread is told.
enum Message {
    Metrics(Vec<Value>),
    Close { finished: bool },
}

/// A run on a server.
pub(crate) struct Mlflow {
    server: String,
    messages: Sender<Message>,
    thread: Option<JoinHandle<Result<(), String>>>,
    /// Closed when the thread ends.
    ended: Mutex<Receiver<()>>,
}

impl Mlflow {
    /// Begins to pass on what a run measures; a run that goes on is the same run there.
    pub fn open(recipe: &Recipe, folder: &Path) -> Self {
        let (messages, receiver) = channel();
        let server = recipe.metrics.mlflow.trim_end_matches('/').to_owned();
        let client = Client {
            server: server.clone(),
            agent: ureq::Agent::config_builder().timeout_global(Some(ANSWER)).build().new_agent(),
            experiment: recipe.run.name.clone(),
            file: folder.join("mlflow.json"),
            parameters: parameters(recipe),
        };
        let (alive, ended) = channel();
        let thread = std::thread::Builder::new().name("mlflow".into()).spawn(move || {
            let served = client.serve(&receiver);
            drop(alive);
            served
        });
        Mlflow { server, messages, thread: thread.ok(), ended: Mutex::new(ended) }
    }

    /// What the thread ended with, if it has.
    fn complaint(&mut self) -> Result<(), String> {
        self.thread.take_if(|thread| thread.is_finished()).map_or(Ok(()), joined)
    }
}

fn joined(thread: JoinHandle<Result<(), String>>) -> Result<(), String> {
    thread.join().unwrap_or_else(|_| Err("its thread panicked".into()))
}

impl Sink for Mlflow {
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String> {
        let timestamp = now();
        let numbers = metrics.iter().filter(|(_, value)| value.is_finite());
        let numbers = numbers
            .map(|(key, value)| json!({"key": key, "value": value, "timestamp": timestamp, "step": step}));
        // Where the thread has ended, it says why.
        let _ = self.messages.send(Message::Metrics(numbers.collect()));
        self.complaint()
    }

    fn close(&mut self, finished: bool) -> Result<(), String> {
        let _ = self.messages.send(Message::Close { finished });
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(FAREWELL);
        if ended == Err(RecvTimeoutError::Timeout) {
            return Err(format!("not all metrics were taken within {FAREWELL:?}"));
        }
        self.thread.take().map_or(Ok(()), joined)
    }

    fn name(&self) -> String {
        format!("MLflow at {}", self.server)
    }
}

/// The thread's side.
struct Client {
    server: String,
    agent: ureq::Agent,
    experiment: String,
    /// Where the run's id is kept.
    file: PathBuf,
    /// Key and value.
    parameters: Vec<(String, String)>,
}

impl Client {
    fn serve(&self, messages: &Receiver<Message>) -> Result<(), String> {
        let run = self.run()?;
        loop {
            // Where the trainer is gone without a word, the run may be resumed.
            let message = messages.recv().unwrap_or(Message::Close { finished: false });
            match message {
                Message::Metrics(all) => {
                    for part in all.chunks(BATCH) {
                        self.post("runs/log-batch", &json!({"run_id": run, "metrics": part}))?;
                    }
                }
                Message::Close { finished } => {
                    let status = if finished { "FINISHED" } else { "KILLED" };
                    let ended = json!({"run_id": run, "status": status, "end_time": now()});
                    return self.post("runs/update", &ended).map(|_| ());
                }
            }
        }
    }

    /// The id of the run on the server: the one that an earlier process of the run began, or a new one.
    fn run(&self) -> Result<String, String> {
        let known =
            std::fs::read(&self.file).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        if let Some(known) = known.filter(|known| known["server"] == self.server.as_str())
            && let Some(run) = known["run_id"].as_str()
        {
            self.post("runs/update", &json!({"run_id": run, "status": "RUNNING"}))?;
            return Ok(run.to_owned());
        }
        let experiment = self.experiment()?;
        let made = self.post(
            "runs/create",
            &json!({"experiment_id": experiment, "run_name": self.experiment, "start_time": now()}),
        )?;
        let run = text(&made, "/run/info/run_id")?;
        for part in self.parameters.chunks(100) {
            let params: Vec<Value> =
                part.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
            self.post("runs/log-batch", &json!({"run_id": run, "params": params}))?;
        }
        let kept = json!({"server": self.server, "run_id": run}).to_string();
        std::fs::write(&self.file, kept).map_err(|error| format!("{}: {error}", self.file.display()))?;
        Ok(run)
    }

    fn experiment(&self) -> Result<String, String> {
        let url = format!("{}/api/2.0/mlflow/experiments/get-by-name", self.server);
        let asked = self.agent.get(&url).query("experiment_name", &self.experiment).call();
        match asked {
            Ok(mut answer) => {
                let found: Value = answer.body_mut().read_json().map_err(|error| error.to_string())?;
                text(&found, "/experiment/experiment_id")
            }
            Err(ureq::Error::StatusCode(404)) => {
                text(&self.post("experiments/create", &json!({"name": self.experiment}))?, "/experiment_id")
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn post(&self, verb: &str, body: &Value) -> Result<Value, String> {
        let url = format!("{}/api/2.0/mlflow/{verb}", self.server);
        let mut answer = self.agent.post(&url).send_json(body).map_err(|error| format!("{verb}: {error}"))?;
        answer.body_mut().read_json().map_err(|error| format!("{verb}: {error}"))
    }
}

fn text(answer: &Value, pointer: &str) -> Result<String, String> {
    let found = answer.pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| format!("the answer has no {pointer}: {answer}"))
}

/// Milliseconds since 1970.
fn now() -> u64 {
    wire::now().as_millis() as u64
}
