//! A fake group of learners over simulators, behind HTTP, that fails on demand.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use levade_policy::{
    Content, Learner, Manifest, OptimParams, PolicyError, Simulator, SimulatorConfig,
};
use levade_policy::{MicroBatchPlan, TrainRequest, WeightsAt, WeightsRef};
use levade_rl::Loss;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::batch::decode;
use super::wire::Body;

/// The bearer token that the group requires.
pub const TOKEN: &str = "of the tests";

/// How the next call of a verb fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call is executed, and its response is lost.
    LoseResponse,
    /// The connection breaks before the call is read.
    Break,
    /// The call hangs after this many micro-batches, while the group still reports progress.
    HangAfter(usize),
    /// The group answers nothing any more.
    Silent,
    /// The group is busy.
    Busy,
    /// The call fails.
    Fail,
    /// The group has exited, and was restarted without its weights.
    StartAgain,
}

/// A fake group of learners.
pub struct TestGroup {
    pub url: String,
    pub state: Arc<GroupState>,
    task: JoinHandle<()>,
}

pub struct GroupState {
    root: PathBuf,
    pub learners: Mutex<BTreeMap<String, Arc<Simulator>>>,
    version: Mutex<Option<u64>>,
    /// Responses by call ID.
    responses: Mutex<HashMap<String, (u16, Bytes)>>,
    progress: Mutex<Value>,
    faults: Mutex<Vec<(&'static str, Fault)>>,
    silent: Mutex<bool>,
    /// Verbs of the calls that were executed.
    pub done: Mutex<Vec<String>>,
    described: Value,
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn simulators() -> BTreeMap<String, Arc<Simulator>> {
    let simulator =
        || Arc::new(Simulator::new(SimulatorConfig { rows: 64, ..SimulatorConfig::default() }));
    ["policy", "reference", "critic"].map(|name| (name.to_owned(), simulator())).into()
}

impl TestGroup {
    /// Starts a group that writes below `root` and reports the given description.
    pub async fn start(root: PathBuf, described: Value) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(GroupState {
            root,
            learners: Mutex::new(simulators()),
            version: Mutex::default(),
            responses: Mutex::default(),
            progress: Mutex::new(json!({ "call": null })),
            faults: Mutex::default(),
            silent: Mutex::default(),
            done: Mutex::default(),
            described,
        });
        let task = tokio::spawn({
            let state = state.clone();
            async move {
                while let Ok((socket, _)) = listener.accept().await {
                    tokio::spawn(state.clone().serve(socket));
                }
            }
        });
        TestGroup { url, state, task }
    }

    /// Makes the next call of a verb fail.
    pub fn inject_fault(&self, verb: &'static str, injected_fault: Fault) {
        self.state.faults.lock().unwrap().push((verb, injected_fault));
    }

    /// Returns how often calls of a verb were executed.
    pub fn done(&self, verb: &str) -> usize {
        self.state.done.lock().unwrap().iter().filter(|done| *done == verb).count()
    }
}

/// Reads a request: method and path, headers in lower case, body.
async fn read(socket: &mut TcpStream) -> Option<(String, HashMap<String, String>, Vec<u8>)> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let mut lines = head.lines();
            let first = lines.next()?.to_owned();
            let headers: HashMap<String, String> = lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
                .collect();
            let length: usize =
                headers.get("content-length").map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some((first, headers, bytes.split_off(end + 4)));
            }
        }
        match socket.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

async fn respond(socket: &mut TcpStream, status: u16, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let _ = socket.write_all(head.as_bytes()).await;
    let _ = socket.write_all(body).await;
    let _ = socket.shutdown().await;
}

fn error_response(status: u16, code: &str, message: impl ToString) -> (u16, Bytes) {
    let error =
        json!({ "error": { "code": code, "message": message.to_string(), "retry": false } });
    (status, error.to_string().into())
}

impl GroupState {
    async fn serve(self: Arc<Self>, mut socket: TcpStream) {
        let Some((first, headers, body)) = read(&mut socket).await else { return };
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        if *self.silent.lock().unwrap() {
            return std::future::pending().await;
        }
        let (status, response) = if headers.get("authorization") != Some(&format!("Bearer {TOKEN}"))
        {
            error_response(401, "unauthorised", "no")
        } else if path == "/v1/describe" {
            let mut described = self.described.clone();
            described["learners"]["policy"]["version"] = json!(*self.version.lock().unwrap());
            (200, described.to_string().into())
        } else if path == "/v1/progress" {
            (200, self.progress.lock().unwrap().to_string().into())
        } else {
            let parts: Vec<&str> = path.trim_start_matches("/v1/learners/").split('/').collect();
            let [learner, verb] = parts[..] else { panic!("{path}") };
            let injected_fault = {
                let mut faults = self.faults.lock().unwrap();
                let found = faults.iter().position(|(target, _)| *target == verb);
                found.map(|at| faults.remove(at).1)
            };
            let id = headers["x-levade-call"].clone();
            match injected_fault {
                Some(Fault::Break) => return,
                Some(Fault::HangAfter(done)) => {
                    let hung = json!({ "call": id, "micro_batches_done": done, "of": 2 });
                    *self.progress.lock().unwrap() = hung;
                    return std::future::pending().await;
                }
                Some(Fault::Silent) => {
                    *self.silent.lock().unwrap() = true;
                    return std::future::pending().await;
                }
                Some(Fault::Busy) => {
                    let (status, response) = error_response(503, "busy", "another call runs");
                    return respond(&mut socket, status, &response).await;
                }
                Some(Fault::Fail) => {
                    let (status, response) =
                        error_response(500, "failed", "rank 1 is out of memory");
                    return respond(&mut socket, status, &response).await;
                }
                Some(Fault::StartAgain) => {
                    *self.learners.lock().unwrap() = simulators();
                    *self.version.lock().unwrap() = None;
                    self.responses.lock().unwrap().clear();
                    return;
                }
                Some(Fault::LoseResponse) | None => {}
            }
            let known = self.responses.lock().unwrap().get(&id).cloned();
            let response = match known {
                Some(response) => response,
                None => {
                    let done = self.execute(&id, learner, verb, &body).await;
                    let response = done.unwrap_or_else(|error| to_error_response(&error));
                    self.responses.lock().unwrap().insert(id, response.clone());
                    response
                }
            };
            if injected_fault == Some(Fault::LoseResponse) {
                return;
            }
            response
        };
        respond(&mut socket, status, &response).await;
    }

    async fn execute(
        &self,
        id: &str,
        learner: &str,
        verb: &str,
        body: &[u8],
    ) -> Result<(u16, Bytes), PolicyError> {
        let Some(target) = self.learners.lock().unwrap().get(learner).cloned() else {
            return Ok(error_response(404, "unknown", format!("there is no learner {learner}")));
        };
        let mut body = Body::read(body).map_err(PolicyError::Invalid)?;
        self.done.lock().unwrap().push(verb.to_owned());
        let invalid = PolicyError::Invalid;
        let batch = |body: &mut Body| decode::batch(body).map(Arc::new).map_err(invalid);
        let mut response = Body::new(json!({}));
        match verb {
            "plan" => {
                let micro_batch_plan =
                    target.plan(&decode::update_sequences(&mut body).map_err(invalid)?).await?;
                response.json = json!({ "cut": micro_batch_plan });
            }
            "train" => {
                let loss: Loss = body.take("loss").map_err(invalid)?;
                let params = params(&mut body)?;
                let micro_batch_plan: MicroBatchPlan = body.take("cut").map_err(invalid)?;
                let paths = decode::paths(&mut body).map_err(invalid)?;
                let mut done = 0;
                let trained = target
                    .train(
                        TrainRequest { sequences: paths, loss, params },
                        &micro_batch_plan,
                        &mut || {
                            done += 1;
                            *self.progress.lock().unwrap() =
                                json!({ "call": id, "micro_batches_done": done });
                        },
                    )
                    .await?;
                // So that concurrent progress queries see it.
                tokio::time::sleep(Duration::from_secs(3)).await;
                response.json = json!({ "sums": trained.sums, "step": trained.step });
            }
            "logprobs" => {
                response.put_numbers("logprobs", target.logprobs(batch(&mut body)?).await?)
            }
            "values" => response.put_numbers("values", target.values(batch(&mut body)?).await?),
            "predictions" => {
                let found = target.predictions(batch(&mut body)?).await?;
                response.put_numbers("logprobs", found.logprobs);
                response.put_numbers("entropies", found.entropies);
                response.put_numbers("concentrations", found.concentrations);
            }
            "forward_backward" => {
                let loss: Loss = body.take("loss").map_err(invalid)?;
                response.json =
                    json!({ "sums": target.forward_backward(batch(&mut body)?, loss).await? });
            }
            "optim_step" => {
                response.json = json!({ "step": target.optim_step(params(&mut body)?).await? })
            }
            "save" => {
                let dir: PathBuf = body.take("folder").map_err(invalid)?;
                let with_optimizer: bool = body.take("with_optimiser").map_err(invalid)?;
                response.json = json!({ "manifest": target.save(&dir, with_optimizer).await? });
            }
            "load" => {
                let dir: Option<PathBuf> = body.take("folder").map_err(invalid)?;
                let with_optimizer = body.take("with_optimiser").map_err(invalid)?;
                match dir {
                    Some(dir) => target.load(&dir, with_optimizer).await?,
                    None => drop(simulators().remove(learner).and_then(|initial| {
                        self.learners.lock().unwrap().insert(learner.to_owned(), initial)
                    })),
                }
            }
            "publish" => {
                let version: u64 = body.take("version").map_err(invalid)?;
                let dir = self.root.join(format!("{learner}-{version}"));
                std::fs::create_dir_all(&dir).unwrap();
                let written = target.save(&dir, false).await?;
                let names: Vec<String> = written.files.into_iter().map(|file| file.name).collect();
                let manifest = Manifest::from_files(&dir, Content::Full, &names)?;
                *self.version.lock().unwrap() = Some(version);
                response.json =
                    json!({ "weights": WeightsRef { version, at: WeightsAt::Manifest(manifest) } });
            }
            "offload" => {
                let keeps: bool = body.take("keeps_weights").map_err(invalid)?;
                response.json = json!({ "bytes": if keeps { 8 } else { 12 }, "seconds": 0.5 });
            }
            "onload" => response.json = json!({ "bytes": 12, "seconds": 0.5 }),
            other => {
                return Ok(error_response(404, "unknown", format!("there is no verb {other}")));
            }
        }
        Ok((200, response.to_bytes().unwrap()))
    }
}

/// Reads optimizer parameters. JSON has no infinity, so `null` is a gradient norm bound of
/// infinity.
fn params(body: &mut Body) -> Result<OptimParams, PolicyError> {
    let mut value: Value = body.take("params").map_err(PolicyError::Invalid)?;
    let unbounded = value["max_grad_norm"].is_null();
    if unbounded {
        value["max_grad_norm"] = json!(0.0);
    }
    let params: OptimParams =
        serde_json::from_value(value).map_err(|e| PolicyError::Invalid(e.to_string()))?;
    Ok(if unbounded { OptimParams { max_grad_norm: f32::INFINITY, ..params } } else { params })
}

fn to_error_response(error: &PolicyError) -> (u16, Bytes) {
    match error {
        PolicyError::PlanMismatch(why) => error_response(409, "cut", why),
        PolicyError::NoValueHead => error_response(422, "no_value_head", error),
        PolicyError::NoPredictions => error_response(422, "no_predictions", error),
        PolicyError::NoTerms => error_response(422, "no_terms", error),
        PolicyError::Storage(why) => error_response(507, "storage", why),
        other => error_response(400, "invalid", other),
    }
}
