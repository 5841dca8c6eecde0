//! Fake servers with the API of vLLM (both generations) or SGLang, over a small table instead of a
//! model, that hang, crash and misreport on demand. Tests drive a fleet of them as a run drives
//! real servers.

mod generation;

mod group;
mod lie;
mod routing;
mod sleep;
mod weights;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use levade_policy::{SampleRequest, SamplingParams, TokenBytes, WeightsAt, WeightsRef};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::{InFlight, Server, ServerKind, ServerOptions, TokenizerProbe};
use generation::{Generation, generate_tokens};
use group::Membership;
pub use group::{SendFault, Sender};
pub use lie::Lie;
pub use routing::impatient;
pub use sleep::Log;
use sleep::ReleasedMemory;
pub use weights::publish;

pub const VOCABULARY: usize = 40;
const CONTEXT: usize = 64;

/// API of a fake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerApi {
    NewVllm,
    OldVllm,
    Sglang,
}

/// Behavior of a fake.
#[derive(Debug, Clone, Default)]
pub struct Behavior {
    /// Number of tokens of a completion after which it hangs.
    pub hangs_after: Option<usize>,
    /// Number of tokens after which its process is killed.
    pub exits_after: Option<usize>,
    /// Whether its process is killed when it is asked to load weights.
    pub exits_while_reading: bool,
    /// Whether it rejects weights.
    pub rejects_weights: bool,
    /// Whether log-probabilities are always at temperature 1.
    pub raw: bool,
    /// Flags that it was started without.
    pub without: &'static str,
    /// Whether its tokenizer has different tokens.
    pub other_tokenizer: bool,
    /// Whether it keeps its weights although it reports a change.
    pub keeps_weights: bool,
    /// Maximum sequence length, in tokens.
    pub context: Option<usize>,
    /// Whether it rejects requests to sleep.
    pub rejects_sleep: bool,
    /// Whether its process is killed when it is put to sleep.
    pub exits_while_sleeping: bool,
    /// Whether its process is killed when it is woken.
    pub exits_while_waking: bool,
    /// Log of the requested routes.
    pub log: Option<Log>,
    /// End-of-text token of the model's files, which only SGLang observes.
    pub ends_texts: Option<u64>,
    /// Impossible response to give.
    pub lie: Option<Lie>,
}

#[derive(Default)]
struct Life {
    weights: String,
    /// Number that shifts the simulated distribution. It depends on the loaded weights.
    shift: u64,
    paused: bool,
    requests: Vec<(String, Value)>,
    adapters: BTreeMap<String, u64>,
    membership: Membership,
    released: ReleasedMemory,
    /// Number of tokens sampled from partly replaced weights.
    half: usize,
}

/// A fake server, killed when dropped.
pub struct Fake {
    pub url: String,
    port: u16,
    api: ServerApi,
    pub behavior: Arc<Mutex<Behavior>>,
    life: Arc<Mutex<Life>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// A JSON response.
struct Json(Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([("content-type", "application/json")], self.0.to_string()).into_response()
    }
}

struct FakeState {
    api: ServerApi,
    behavior: Arc<Mutex<Behavior>>,
    life: Arc<Mutex<Life>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
    started: f64,
}

/// Returns the log-probabilities of all tokens after a sequence.
fn distribution(shift: u64, path: &[u32], temperature: f64) -> Vec<f64> {
    let last = u64::from(*path.last().unwrap_or(&0));
    let logit =
        |id: u64| ((id * 7 + last * 13 + shift * 5 + path.len() as u64 * 3) % 17) as f64 / 6.0;
    let logits: Vec<f64> = (0..VOCABULARY as u64).map(|id| logit(id) / temperature).collect();
    let sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.into_iter().map(|logit| logit - sum).collect()
}

/// Returns the table's shift for a directory: the number in its name `v7`.
fn shift_of(dir: &str) -> u64 {
    Path::new(dir)
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix('v')?.parse().ok())
        // `m` is the model that the fake was started with.
        .unwrap_or(if dir == "m" { 1 } else { 99 })
}

impl Fake {
    pub async fn new(api: ServerApi) -> Self {
        Self::with(api, Behavior::default()).await
    }

    pub async fn with(api: ServerApi, behavior: Behavior) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let fake = Fake {
            url: format!("http://127.0.0.1:{port}"),
            port,
            api,
            behavior: Arc::new(Mutex::new(behavior)),
            life: Arc::default(),
            task: Arc::default(),
        };
        fake.run(listener);
        fake
    }

    fn run(&self, listener: TcpListener) {
        *self.life.lock().unwrap() =
            Life { weights: "default".into(), shift: 1, ..Life::default() };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let state = Arc::new(FakeState {
            api: self.api,
            behavior: self.behavior.clone(),
            life: self.life.clone(),
            task: self.task.clone(),
            started: now.as_secs_f64(),
        });
        let app = Router::new().fallback(response).with_state(state);
        *self.task.lock().unwrap() = Some(tokio::spawn(async move {
            axum::serve(listener, app).await.unwrap();
        }));
    }

    /// Kills it, and breaks all its connections.
    pub fn kill(&self) {
        if let Some(task) = self.task.lock().unwrap().take() {
            task.abort();
        }
        self.life.lock().unwrap().weights = "dead".into();
    }

    /// Restarts it at its address, with its initial weights.
    pub async fn restart(&self) {
        self.kill();
        let listener = loop {
            match TcpListener::bind(("127.0.0.1", self.port)).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        self.run(listener);
    }

    pub fn set(&self, behavior: Behavior) {
        *self.behavior.lock().unwrap() = behavior;
    }

    /// Returns requests to a route, without those of an inspection.
    pub fn requests(&self, route: &str) -> Vec<Value> {
        let life = self.life.lock().unwrap();
        life.requests
            .iter()
            .filter(|(uri, _)| uri.starts_with(route))
            .map(|(_, body)| body.clone())
            .collect()
    }

    /// Pauses it, as an external client does.
    pub fn life_paused(&self) {
        self.life.lock().unwrap().paused = true;
    }

    /// Returns the number of tokens sampled from partly replaced weights.
    pub fn half(&self) -> usize {
        self.life.lock().unwrap().half
    }

    /// Returns whether it occupies device memory; a killed fake occupies none.
    pub fn is_awake(&self) -> bool {
        self.task.lock().unwrap().is_some() && self.life.lock().unwrap().released.is_awake()
    }

    /// Returns the number of samples without weights, and of calls that crashed it in its sleep.
    pub fn nonsense(&self) -> usize {
        self.life.lock().unwrap().released.nonsense
    }

    /// Returns the label of its weights.
    pub fn label(&self) -> String {
        self.life.lock().unwrap().weights.clone()
    }

    pub fn options(&self, in_flight: InFlight) -> ServerOptions {
        let kind =
            if self.api == ServerApi::Sglang { ServerKind::Sglang } else { ServerKind::Vllm };
        ServerOptions {
            in_flight,
            tokens: Some(Arc::new(Letters)),
            tokenizer: TokenizerProbe { text: "abcdef".into(), tokens: vec![1, 2, 3, 4, 5, 6] },
            tolerance: 0.1,
            response_timeout: Duration::from_secs(5),
            silence: Duration::from_secs(2),
            update_timeout: Duration::from_secs(5),
            ..ServerOptions::new(kind, &self.url, VOCABULARY, CONTEXT)
        }
    }

    pub fn server(&self, in_flight: InFlight) -> Server {
        Server::new(self.options(in_flight)).unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Tokenizer in which every token is a letter.
struct Letters;

impl TokenBytes for Letters {
    fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        b"@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefgh".get(id as usize..=id as usize)
    }
}

async fn response(
    State(state): State<Arc<FakeState>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> Response {
    let path = uri.path().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let behavior = state.behavior.lock().unwrap().clone();
    state.life.lock().unwrap().requests.push((uri.to_string(), body.clone()));
    if let (Some(log), "POST") = (&behavior.log, method.as_str()) {
        log.lock().unwrap().push(uri.to_string());
    }
    if let Some(response) = sleep::response(&state, &behavior, &uri, &body).await {
        return response;
    }
    let sglang = state.api == ServerApi::Sglang;
    match (method.as_str(), path.as_str()) {
        ("GET", "/version") if !sglang => json_response(json!({ "version": "0.32.0" })),
        ("GET", "/openapi.json") if !sglang => json_response(routes(&state, &behavior)),
        ("GET", "/is_paused") if !sglang => {
            json_response(json!({ "is_paused": state.life.lock().unwrap().paused }))
        }
        ("GET", "/v1/models") => {
            let life = state.life.lock().unwrap();
            let adapters = life.adapters.keys().map(|name| json!({ "id": name }));
            let model = json!({ "id": "m", "root": "m", "max_model_len": behavior.context.unwrap_or(CONTEXT) });
            json_response(
                json!({ "data": std::iter::once(model).chain(adapters).collect::<Vec<_>>() }),
            )
        }
        ("GET", "/model_info") if sglang => {
            let life = state.life.lock().unwrap();
            json_response(json!({ "model_path": "m", "weight_version": life.weights }))
        }
        ("GET", "/server_info") if sglang => {
            let saves = behavior.without != "memory saver";
            let context = behavior.context.unwrap_or(CONTEXT);
            json_response(
                json!({ "context_length": context, "version": "0.5.23", "enable_memory_saver": saves }),
            )
        }
        ("POST", "/tokenize") => {
            let tokens = if behavior.other_tokenizer {
                vec![1, 2, 9, 4, 5, 6]
            } else {
                vec![1, 2, 3, 4, 5, 6]
            };
            json_response(json!({ "tokens": tokens }))
        }
        ("GET", "/metrics") if !sglang => {
            let page = format!(
                "# HELP x\nprocess_start_time_seconds {}\n\
                 vllm:num_requests_running{{e=\"0\"}} 3.0\n",
                state.started
            );
            page.into_response()
        }
        ("GET", "/weight_info") if state.api == ServerApi::NewVllm => {
            json_response(json!({ "weight_version": state.life.lock().unwrap().weights }))
        }
        ("POST", "/pause" | "/pause_generation") => {
            state.life.lock().unwrap().paused = true;
            json_response(json!({ "status": "paused" }))
        }
        ("POST", "/resume" | "/continue_generation") => {
            state.life.lock().unwrap().paused = false;
            json_response(json!({ "status": "resumed" }))
        }
        ("POST", "/collective_rpc") => {
            read(&state, &behavior, &body["kwargs"]["weights_path"]).await
        }
        ("POST", "/update_weights_from_disk") => {
            let response = read(&state, &behavior, &body["model_path"]).await;
            if response.status() == StatusCode::OK {
                state.life.lock().unwrap().weights =
                    body["weight_version"].as_str().unwrap().into();
            }
            response
        }
        ("POST", "/reset_prefix_cache") => json_response(json!({})),
        ("POST", "/update_weight_version") if state.api != ServerApi::OldVllm => {
            state.life.lock().unwrap().weights = body["new_version"].as_str().unwrap().into();
            json_response(json!({}))
        }
        ("POST", "/v1/load_lora_adapter" | "/load_lora_adapter") => {
            let mut life = state.life.lock().unwrap();
            let shift = shift_of(body["lora_path"].as_str().unwrap());
            life.adapters.insert(body["lora_name"].as_str().unwrap().into(), shift);
            json_response(json!({}))
        }
        ("POST", "/v1/unload_lora_adapter" | "/unload_lora_adapter") => {
            state.life.lock().unwrap().adapters.remove(body["lora_name"].as_str().unwrap());
            json_response(json!({}))
        }
        ("POST", "/inference/v1/generate" | "/generate") => generate(state, behavior, body).await,
        _ => group::response(&state, &behavior, &path, &body).await,
    }
}

fn json_response(value: Value) -> Response {
    Json(value).into_response()
}

fn routes(state: &FakeState, behavior: &Behavior) -> Value {
    let mut routes = vec!["/inference/v1/generate", "/tokenize"];
    if behavior.without != "dev mode" {
        routes.extend(["/pause", "/collective_rpc"]);
    }
    if behavior.without != "adapters" {
        routes.push("/v1/load_lora_adapter");
    }
    if state.api == ServerApi::NewVllm {
        routes.extend(["/weight_info", "/init_weight_transfer_engine"]);
    }
    let paths: BTreeMap<&str, Value> = routes.into_iter().map(|route| (route, json!({}))).collect();
    json!({ "paths": paths })
}

/// Exits like a killed process: no connection closes cleanly.
async fn die(state: &FakeState) -> ! {
    if let Some(task) = state.task.lock().unwrap().take() {
        task.abort();
    }
    std::future::pending::<Infallible>().await;
    unreachable!()
}

async fn read(state: &FakeState, behavior: &Behavior, dir: &Value) -> Response {
    if behavior.exits_while_reading {
        die(state).await;
    }
    if behavior.rejects_weights {
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": { "message": "shapes differ" } })))
            .into_response();
    }
    sleep::check_can_write(state).await;
    if !behavior.keeps_weights {
        sleep::written(state);
        let mut life = state.life.lock().unwrap();
        life.shift = shift_of(dir.as_str().unwrap());
        life.membership = Membership::default();
    }
    Json(json!({ "success": true })).into_response()
}

fn triple(logprobs: &[f64], id: u32) -> Value {
    json!([logprobs[id as usize], id, null])
}

/// Returns a token in the format of the API version; the old API has no numeric ID.
fn named(state: &FakeState, id: u32, logprob: f64) -> Value {
    match state.api {
        ServerApi::OldVllm => json!({ "token": format!("token_id:{id}"), "logprob": logprob }),
        _ => json!({ "token_id": id, "logprob": logprob }),
    }
}

fn likely(logprobs: &[f64], top: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logprobs.len() as u32).collect();
    ids.sort_by(|a, b| logprobs[*b as usize].total_cmp(&logprobs[*a as usize]));
    ids.truncate(top);
    ids
}

async fn generate(state: Arc<FakeState>, behavior: Behavior, body: Value) -> Response {
    if behavior.without == "scale out" {
        return (
            StatusCode::FORBIDDEN,
            Json(json!({ "error": { "message": "scale-out is off" } })),
        )
            .into_response();
    }
    let sglang = state.api == ServerApi::Sglang;
    let prompt = if sglang { &body["input_ids"] } else { &body["token_ids"] };
    let params = &body["sampling_params"];
    let path: Vec<u32> =
        prompt.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let temperature = params["temperature"].as_f64().filter(|t| *t > 0.0).unwrap_or(1.0);
    let temperature = if behavior.raw { 1.0 } else { temperature };
    let limit =
        params[if sglang { "max_new_tokens" } else { "max_tokens" }].as_u64().unwrap() as usize;
    let name = if sglang { &body["lora_path"] } else { &body["model"] };
    let of_adapter = state.life.lock().unwrap().adapters.get(name.as_str().unwrap_or("")).copied();
    let scores = params.get("prompt_logprobs").is_some() || body["logprob_start_len"] == 0;
    if body["stream"] != true {
        sleep::check_can_sample(&state).await;
        if group::is_half(&state) {
            state.life.lock().unwrap().half += 1;
        }
        let shift = of_adapter.unwrap_or(state.life.lock().unwrap().shift);
        if scores {
            return score_response(&state, &path, shift, &params["prompt_logprobs"]);
        }
        let logprobs = distribution(shift, &path, temperature);
        let id = likely(&logprobs, 1)[0];
        let top: Vec<Value> = likely(&logprobs, 8)
            .into_iter()
            .map(|id| named(&state, id, logprobs[id as usize]))
            .collect();
        let mut content = named(&state, id, logprobs[id as usize]);
        content["top_logprobs"] = top.into();
        let choice = json!({ "token_ids": [id], "finish_reason": "length", "logprobs": { "content": [content] } });
        return Json(json!({ "choices": [choice] })).into_response();
    }
    let top =
        params["logprobs"].as_u64().or(body["top_logprobs_num"].as_u64()).unwrap_or(0) as usize;
    let mut stops: Vec<u64> = params["stop_token_ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap())
        .collect();
    match (sglang, params["ignore_eos"] == true) {
        (true, true) => stops.clear(),
        (true, false) => stops.extend(behavior.ends_texts),
        _ => {}
    }
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, Infallible>>();
    tokio::spawn(generate_tokens(
        state,
        behavior,
        Generation { path, temperature, limit, top, stops, of_adapter },
        move |event| sender.send(Ok(Bytes::from(event))).is_ok(),
    ));
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|item| (item, receiver))
    });
    Response::new(Body::from_stream(stream))
}

async fn wait_while_paused(state: &FakeState) {
    while state.life.lock().unwrap().paused {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn score_response(state: &FakeState, path: &[u32], shift: u64, top: &Value) -> Response {
    let at = |i: usize| distribution(shift, &path[..i], 1.0);
    if state.api == ServerApi::Sglang {
        let all: Vec<Value> = (0..path.len())
            .map(|i| if i == 0 { json!([null, path[0], null]) } else { triple(&at(i), path[i]) })
            .collect();
        return Json(json!({ "meta_info": { "input_token_logprobs": all } })).into_response();
    }
    let position_logprobs = |i: usize| {
        let logprobs = at(i);
        let mut ids = likely(&logprobs, top.as_u64().unwrap_or(0) as usize);
        ids.push(path[i]);
        let entries =
            ids.into_iter().map(|id| (id.to_string(), json!({ "logprob": logprobs[id as usize] })));
        Value::Object(entries.collect())
    };
    let all: Vec<Value> =
        (0..path.len()).map(|i| if i == 0 { Value::Null } else { position_logprobs(i) }).collect();
    Json(json!({ "prompt_logprobs": all, "choices": [{ "token_ids": [0] }] })).into_response()
}

pub fn request(stream: u64, limit: usize) -> SampleRequest {
    let params =
        SamplingParams { max_tokens: limit, temperature: 0.7, ..SamplingParams::default() };
    SampleRequest {
        id: "r".into(),
        seed: 7,
        stream,
        prompt: vec![3, 1, 4],
        params,
        ..SampleRequest::default()
    }
}

/// Returns the table's log-probabilities of a sequence from index `from`, given each token's
/// version.
pub fn expected(path: &[u32], from: usize, versions: impl Fn(usize) -> u64) -> Vec<f32> {
    (from..path.len())
        .map(|i| {
            distribution(versions(i - from), &path[..i], 0.699_999_988_079_071)[path[i] as usize]
                as f32
        })
        .collect()
}

/// Returns the directory of a weights reference.
pub fn dir_of(weights: &WeightsRef) -> PathBuf {
    match &weights.at {
        WeightsAt::Manifest(manifest) => manifest.verify().unwrap().to_owned(),
        _ => panic!(),
    }
}
