//! Sends metrics to an MLflow server over its HTTP API (version 2.0), from a separate thread.
//!
//! If the server is unreachable when a run starts, the sink reports an error at once, because the
//! recipe is probably wrong. After the server has accepted the run, it may be unreachable for any
//! time: metrics are queued and sent when it responds again.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use levade_policy::process_time;
use levade_recipe::Recipe;
use levade_traces::CollectorError;
use serde_json::{Value, json};
use ureq::Body;
use ureq::http::Response;

use super::{Sink, recipe_parameters, wire};
use crate::metrics::Metrics;

/// Timeout for each response of the MLflow server.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for sending the remaining metrics at the end of a run.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of metrics per request. The MLflow server sets this limit.
const MAX_BATCH_METRICS: usize = 1000;
/// Minimum and maximum pause before a retry when the MLflow server is unavailable.
const MIN_RETRY_INTERVAL: Duration = Duration::from_secs(1);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Messages to the thread that sends metrics.
enum SinkMessage {
    Metrics(Vec<Value>),
    Close { finished: bool },
}

/// Sink that sends metrics to a run on an MLflow server.
pub(crate) struct Mlflow {
    server: String,
    messages: Sender<SinkMessage>,
    thread: Option<JoinHandle<Result<(), String>>>,
    /// Channel that is disconnected when the sending thread ends.
    ended: Mutex<Receiver<()>>,
}

impl Mlflow {
    /// Starts a thread that sends the metrics of a run to MLflow. A resumed run continues its run
    /// on the server.
    pub fn open(recipe: &Recipe, dir: &Path) -> Self {
        Mlflow::with_client(MlflowClient {
            server: recipe.metrics.mlflow.trim_end_matches('/').to_owned(),
            agent: http_client(),
            experiment: recipe.run.name.clone(),
            file: dir.join("mlflow.json"),
            parameters: recipe_parameters(recipe),
            pause: MIN_RETRY_INTERVAL,
        })
    }

    fn with_client(client: MlflowClient) -> Self {
        let (messages, receiver) = channel();
        let server = client.server.clone();
        let (is_alive, ended) = channel();
        let thread = std::thread::Builder::new().name("mlflow".into()).spawn(move || {
            let served = client.send_messages(&receiver);
            drop(is_alive);
            served
        });
        Mlflow { server, messages, thread: thread.ok(), ended: Mutex::new(ended) }
    }

    /// Returns an error if the sending thread has ended with an error.
    fn thread_error(&mut self) -> Result<(), String> {
        self.thread.take_if(|thread| thread.is_finished()).map_or(Ok(()), wait_for_thread)
    }
}

/// Creates an HTTP client for the MLflow server. Error statuses are returned as responses, because
/// their bodies contain the error messages.
fn http_client() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .timeout_global(Some(RESPONSE_TIMEOUT))
        .http_status_as_error(false);
    config.build().new_agent()
}

fn wait_for_thread(thread: JoinHandle<Result<(), String>>) -> Result<(), String> {
    thread.join().unwrap_or_else(|_| Err("the thread that sends the metrics panicked".into()))
}

impl Sink for Mlflow {
    fn log(&mut self, step: u32, metrics: &Metrics) -> Result<(), String> {
        let timestamp = unix_millis();
        let numbers = metrics.iter().filter(|(_, value)| value.is_finite());
        let numbers = numbers.map(|(name, value)| {
            json!({
                "key": metric_key(name), "value": value, "timestamp": timestamp, "step": step,
            })
        });
        // If the thread has ended, `thread_error` returns its error.
        let _ = self.messages.send(SinkMessage::Metrics(numbers.collect()));
        self.thread_error()
    }

    fn close(&mut self, finished: bool) -> Result<(), String> {
        let _ = self.messages.send(SinkMessage::Close { finished });
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = process_time::receive(ended, CLOSE_TIMEOUT);
        if ended == Err(RecvTimeoutError::Timeout) {
            return Err(format!(
                "the server did not accept all metrics within {CLOSE_TIMEOUT:?}: it is slow or \
                 unavailable"
            ));
        }
        self.thread.take().map_or(Ok(()), wait_for_thread)
    }

    fn name(&self) -> String {
        format!("MLflow at {}", self.server)
    }
}

/// State of the thread that sends metrics to MLflow.
struct MlflowClient {
    server: String,
    agent: ureq::Agent,
    experiment: String,
    /// File that stores the id of the run on the server.
    file: PathBuf,
    /// Names and values of the recipe's keys, which are sent as parameters.
    parameters: Vec<(String, String)>,
    /// Initial pause before a retry when the server is unavailable. It doubles with each retry, up
    /// to [`MAX_RETRY_INTERVAL`].
    pause: Duration,
}

/// Reason why a request to the MLflow server failed.
enum RequestFailure {
    /// The server is unreachable, or its status indicates a temporary failure.
    Unavailable(String),
    /// The server rejected the request. A retry would also be rejected.
    Rejected(Rejection),
}

/// HTTP status and message of a rejected request.
struct Rejection {
    status: u16,
    why: String,
}

impl From<Rejection> for String {
    fn from(Rejection { status, why }: Rejection) -> String {
        format!("{why} (HTTP status {status})")
    }
}

impl From<RequestFailure> for String {
    fn from(failure: RequestFailure) -> String {
        match failure {
            RequestFailure::Unavailable(why) => why,
            RequestFailure::Rejected(rejection) => rejection.into(),
        }
    }
}

/// A run on the MLflow server, with the last step that the server has for each metric.
struct MlflowRun {
    id: String,
    known: HashMap<String, u64>,
}

impl MlflowClient {
    fn send_messages(&self, messages: &Receiver<SinkMessage>) -> Result<(), String> {
        let MlflowRun { id, known } = self.resume_or_create_run()?;
        // Steps repeated after a crash are already on the server.
        let is_new = |number: &Value| {
            let key = number["key"].as_str().unwrap_or_default();
            known.get(key).is_none_or(|last| number["step"].as_u64() > Some(*last))
        };
        loop {
            // If the trainer has exited without a message, the run may be resumed.
            let message = messages.recv().unwrap_or(SinkMessage::Close { finished: false });
            match message {
                SinkMessage::Metrics(mut all) => {
                    all.retain(is_new);
                    for part in all.chunks(MAX_BATCH_METRICS) {
                        let numbers = json!({"run_id": id, "metrics": part});
                        self.send_with_retries(|| self.post("runs/log-batch", &numbers))?;
                    }
                }
                SinkMessage::Close { finished } => {
                    let status = if finished { "FINISHED" } else { "KILLED" };
                    let ended = json!({"run_id": id, "status": status, "end_time": unix_millis()});
                    return Ok(self
                        .send_with_retries(|| self.post("runs/update", &ended))
                        .map(|_| ())?);
                }
            }
        }
    }

    /// Returns the run on the server. It is the run that an earlier process created, if that run
    /// still exists, or a new run.
    fn resume_or_create_run(&self) -> Result<MlflowRun, String> {
        if let Some(id) = self.stored_run_id() {
            // If the server rejects it, a user has deleted the run.
            if let Ok(known) = self.send_with_retries(|| self.reopen_run(&id)) {
                return Ok(MlflowRun { id, known });
            }
        }
        let experiment = self.experiment_id().map_err(String::from)?;
        let made = self.post(
            "runs/create",
            &json!({"experiment_id": experiment, "run_name": self.experiment, "start_time": unix_millis()}),
        )?;
        let id = text_at(&made, "/run/info/run_id")?;
        for part in self.parameters.chunks(100) {
            let params: Vec<Value> =
                part.iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
            self.post("runs/log-batch", &json!({"run_id": id, "params": params}))?;
        }
        let kept = json!({"server": self.server, "run_id": id}).to_string();
        std::fs::write(&self.file, kept)
            .map_err(|error| format!("{}: {error}", self.file.display()))?;
        Ok(MlflowRun { id, known: HashMap::new() })
    }

    /// Returns the id of the run that an earlier process created on this server, or `None` if no
    /// such id is stored.
    fn stored_run_id(&self) -> Option<String> {
        let known: Value = serde_json::from_slice(&std::fs::read(&self.file).ok()?).ok()?;
        let same = known["server"] == self.server.as_str();
        known["run_id"].as_str().filter(|_| same).map(str::to_owned)
    }

    /// Marks a run on the server as running again. Returns the last step that the server has for
    /// each metric.
    fn reopen_run(&self, id: &str) -> Result<HashMap<String, u64>, RequestFailure> {
        self.post("runs/update", &json!({"run_id": id, "status": "RUNNING"}))?;
        let found = self.get("runs/get", ("run_id", id))?;
        let last = |metric: &Value| {
            let step = &metric["step"];
            let step = step.as_u64().or_else(|| step.as_str()?.parse().ok())?;
            Some((metric["key"].as_str()?.to_owned(), step))
        };
        let metrics = found.pointer("/run/data/metrics").and_then(Value::as_array);
        Ok(metrics.into_iter().flatten().filter_map(last).collect())
    }

    /// Returns the id of the experiment, which is created on the server if it does not exist.
    fn experiment_id(&self) -> Result<String, RequestFailure> {
        match self.get("experiments/get-by-name", ("experiment_name", &self.experiment)) {
            Ok(found) => required_id(&found, "/experiment/experiment_id"),
            Err(RequestFailure::Rejected(Rejection { status: 404, .. })) => {
                match self.post("experiments/create", &json!({"name": self.experiment})) {
                    Ok(made) => required_id(&made, "/experiment_id"),
                    // Another thread or run has created it in the meantime.
                    Err(RequestFailure::Rejected(Rejection { status: 400, .. })) => {
                        let found = self.get(
                            "experiments/get-by-name",
                            ("experiment_name", &self.experiment),
                        )?;
                        required_id(&found, "/experiment/experiment_id")
                    }
                    Err(failure) => Err(failure),
                }
            }
            Err(failure) => Err(failure),
        }
    }

    /// Sends a request, and repeats it while the server is unavailable.
    fn send_with_retries<T>(
        &self,
        request: impl Fn() -> Result<T, RequestFailure>,
    ) -> Result<T, Rejection> {
        let mut pause = self.pause;
        loop {
            match request() {
                Ok(answer) => return Ok(answer),
                Err(RequestFailure::Rejected(rejection)) => return Err(rejection),
                Err(RequestFailure::Unavailable(_)) => std::thread::sleep(pause),
            }
            pause = (2 * pause).min(MAX_RETRY_INTERVAL);
        }
    }

    fn get(&self, verb: &str, (name, value): (&str, &str)) -> Result<Value, RequestFailure> {
        read_response(verb, self.agent.get(self.url(verb)).query(name, value).call())
    }

    fn post(&self, verb: &str, body: &Value) -> Result<Value, RequestFailure> {
        read_response(verb, self.agent.post(self.url(verb)).send_json(body))
    }

    fn url(&self, verb: &str) -> String {
        format!("{}/api/2.0/mlflow/{verb}", self.server)
    }
}

/// Converts an HTTP response of the MLflow server to JSON, or to the reason of the failure.
fn read_response(
    verb: &str,
    body_text: Result<Response<Body>, ureq::Error>,
) -> Result<Value, RequestFailure> {
    let unavailable =
        |error: &dyn std::fmt::Display| RequestFailure::Unavailable(format!("{verb}: {error}"));
    let mut body_text = body_text.map_err(|error| unavailable(&error))?;
    let status = body_text.status().as_u16();
    let body = body_text.body_mut().read_to_string().map_err(|error| unavailable(&error))?;
    if matches!(status, 408 | 429 | 500..) {
        return Err(unavailable(&format!("HTTP status {status}")));
    }
    let why = match (status, serde_json::from_str::<Value>(&body)) {
        (200..=299, Ok(value)) => return Ok(value),
        (_, Ok(value)) => value["message"].as_str().map(str::to_owned),
        _ => None,
    };
    let why = why.unwrap_or_else(|| body.chars().take(200).collect());
    Err(RequestFailure::Rejected(Rejection { status, why: format!("{verb}: {why}") }))
}

/// Returns the id of the experiment called `name` on an MLflow server. The experiment is created if
/// it does not exist.
///
/// # Errors
/// Returns an error if the server is unavailable or rejects the name.
pub fn mlflow_experiment(server: &str, name: &str) -> Result<String, CollectorError> {
    let client = MlflowClient {
        server: server.trim_end_matches('/').to_owned(),
        agent: http_client(),
        experiment: name.to_owned(),
        file: PathBuf::new(),
        parameters: Vec::new(),
        pause: MIN_RETRY_INTERVAL,
    };
    client.experiment_id().map_err(|failure| match failure {
        RequestFailure::Unavailable(why) => CollectorError::Unavailable(why),
        RequestFailure::Rejected(rejection) => CollectorError::Rejected(rejection.into()),
    })
}

/// Returns the id at `pointer` in a response. If the id is missing, the server is treated as
/// unavailable, because the response does not come from MLflow.
fn required_id(answer: &Value, pointer: &str) -> Result<String, RequestFailure> {
    text_at(answer, pointer).map_err(RequestFailure::Unavailable)
}

/// Converts a metric name to the characters that MLflow allows: letters, digits and `_-. /`.
fn metric_key(name: &str) -> String {
    name.replace('@', "_at_")
        .chars()
        .map(|c| if c.is_alphanumeric() || "_-. /".contains(c) { c } else { '_' })
        .collect()
}

fn text_at(answer: &Value, pointer: &str) -> Result<String, String> {
    let found = answer.pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| format!("the response has no {pointer}: {answer}"))
}

/// Returns the current time as a Unix timestamp in milliseconds.
fn unix_millis() -> u64 {
    wire::unix_time().as_millis() as u64
}

#[cfg(test)]
#[path = "mlflow_tests.rs"]
mod tests;
