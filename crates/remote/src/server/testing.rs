//! Fake servers with the API of vLLM (both generations) or SGLang, over a small table instead of a
//! model, that hang, crash and misreport on demand. Tests drive a fleet of them as a run drives
//! real servers.

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
use group::Membership;
pub use group::{SendFault, Sender};
pub use lie::Lie;
pub use routing::impatient;
use sleep::Given;
pub use sleep::Log;
pub use weights::publish;

pub const VOCABULARY: usize = 40;
const CONTEXT: usize = 64;

/// API of a fake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speaks {
    NewVllm,
    OldVllm,
    Sglang,
}

/// Behavior of a fake.
#[derive(Debug, Clone, Default)]
pub struct Behaviour {
    /// Number of tokens of a completion after which it hangs.
    pub hangs_after: Option<usize>,
    /// Number of tokens after which its process is killed.
    pub dies_after: Option<usize>,
    /// Whether its process is killed when it is asked to load weights.
    pub dies_reading: bool,
    /// Whether it rejects weights.
    pub refuses_weights: bool,
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
    pub refuses_sleep: bool,
    /// Whether its process is killed when it is put to sleep.
    pub dies_sleeping: bool,
    /// Whether its process is killed when it is woken.
    pub dies_waking: bool,
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
    /// Shift of the table: a function of the loaded weights.
    shift: u64,
    paused: bool,
    asked: Vec<(String, Value)>,
    adapters: BTreeMap<String, u64>,
    membership: Membership,
    given: Given,
    /// Number of tokens sampled from partly replaced weights.
    half: usize,
}

/// A fake server, killed when dropped.
pub struct Fake {
    pub url: String,
    port: u16,
    speaks: Speaks,
    pub behaviour: Arc<Mutex<Behaviour>>,
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

struct Shared {
    speaks: Speaks,
    behaviour: Arc<Mutex<Behaviour>>,
    life: Arc<Mutex<Life>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
    started: f64,
}

/// Returns the log-probabilities of all tokens after a sequence.
fn distribution(shift: u64, path: &[u32], temperature: f64) -> Vec<f64> {
    let last = u64::from(*path.last().unwrap_or(&0));
    let logit = |id: u64| ((id * 7 + last * 13 + shift * 5 + path.len() as u64 * 3) % 17) as f64 / 6.0;
    let logits: Vec<f64> = (0..VOCABULARY as u64).map(|id| logit(id) / temperature).collect();
    let sum = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.into_iter().map(|logit| logit - sum).collect()
}

/// Returns the table's shift for a directory: the number in its name `v7`.
fn shift_of(folder: &str) -> u64 {
    Path::new(folder)
        .file_name()
        .and_then(|name| name.to_str()?.strip_prefix('v')?.parse().ok())
        // `m` is the model that the fake was started with.
        .unwrap_or(if folder == "m" { 1 } else { 99 })
}

impl Fake {
    pub async fn new(speaks: Speaks) -> Self {
        Self::with(speaks, Behaviour::default()).await
    }

    pub async fn with(speaks: Speaks, behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let fake = Fake {
            url: format!("http://127.0.0.1:{port}"),
            port,
            speaks,
            behaviour: Arc::new(Mutex::new(behaviour)),
            life: Arc::default(),
            task: Arc::default(),
        };
        fake.run(listener);
        fake
    }

    fn run(&self, listener: TcpListener) {
        *self.life.lock().unwrap() = Life { weights: "default".into(), shift: 1, ..Life::default() };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let shared = Arc::new(Shared {
            speaks: self.speaks,
            behaviour: self.behaviour.clone(),
            life: self.life.clone(),
            task: self.task.clone(),
            started: now.as_secs_f64(),
        });
        let app = Router::new().fallback(answer).with_state(shared);
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

    pub fn set(&self, behaviour: Behaviour) {
        *self.behaviour.lock().unwrap() = behaviour;
    }

    /// Returns requests to a route, without those of an inspection.
    pub fn asked(&self, route: &str) -> Vec<Value> {
        let life = self.life.lock().unwrap();
        life.asked
            .iter()
            .filter(|(asked, _)| asked.starts_with(route))
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
        self.task.lock().unwrap().is_some() && self.life.lock().unwrap().given.is_awake()
    }

    /// Returns the number of samples without weights, and of calls that crashed it in its sleep.
    pub fn nonsense(&self) -> usize {
        self.life.lock().unwrap().given.nonsense
    }

    /// Returns the label of its weights.
    pub fn label(&self) -> String {
        self.life.lock().unwrap().weights.clone()
    }

    pub fn options(&self, in_flight: InFlight) -> ServerOptions {
        let kind = if self.speaks == Speaks::Sglang { ServerKind::Sglang } else { ServerKind::Vllm };
        ServerOptions {
            in_flight,
            tokens: Some(Arc::new(Letters)),
            tokenizer: TokenizerProbe { text: "abcdef".into(), tokens: vec![1, 2, 3, 4, 5, 6] },
            tolerance: 0.1,
            answer: Duration::from_secs(5),
            silence: Duration::from_secs(2),
            adopt: Duration::from_secs(5),
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

async fn answer(State(shared): State<Arc<Shared>>, method: Method, uri: Uri, body: Bytes) -> Response {
    let path = uri.path().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let behaviour = shared.behaviour.lock().unwrap().clone();
    shared.life.lock().unwrap().asked.push((uri.to_string(), body.clone()));
    if let (Some(log), "POST") = (&behaviour.log, method.as_str()) {
        log.lock().unwrap().push(uri.to_string());
    }
    if let Some(answer) = sleep::answer(&shared, &behaviour, &uri, &body).await {
        return answer;
    }
    let ok = |value: Value| Json(value).into_response();
    let sglang = shared.speaks == Speaks::Sglang;
    match (method.as_str(), path.as_str()) {
        ("GET", "/version") if !sglang => ok(json!({ "version": "0.32.0" })),
        ("GET", "/openapi.json") if !sglang => ok(routes(&shared, &behaviour)),
        ("GET", "/is_paused") if !sglang => ok(json!({ "is_paused": shared.life.lock().unwrap().paused })),
        ("GET", "/v1/models") => {
            let life = shared.life.lock().unwrap();
            let adapters = life.adapters.keys().map(|name| json!({ "id": name }));
            let model =
                json!({ "id": "m", "root": "m", "max_model_len": behaviour.context.unwrap_or(CONTEXT) });
            ok(json!({ "data": std::iter::once(model).chain(adapters).collect::<Vec<_>>() }))
        }
        ("GET", "/model_info") if sglang => {
            let life = shared.life.lock().unwrap();
            ok(json!({ "model_path": "m", "weight_version": life.weights }))
        }
        ("GET", "/server_info") if sglang => {
            let saves = behaviour.without != "memory saver";
            let context = behaviour.context.unwrap_or(CONTEXT);
            ok(json!({ "context_length": context, "version": "0.5.23", "enable_memory_saver": saves }))
        }
        ("POST", "/tokenize") => {
            let tokens =
                if behaviour.other_tokenizer { vec![1, 2, 9, 4, 5, 6] } else { vec![1, 2, 3, 4, 5, 6] };
            ok(json!({ "tokens": tokens }))
        }
        ("GET", "/metrics") if !sglang => {
            let page = format!(
                "# HELP x\nprocess_start_time_seconds {}\nvllm:num_requests_running{{e=\"0\"}} 3.0\n",
                shared.started
            );
            page.into_response()
        }
        ("GET", "/weight_info") if shared.speaks == Speaks::NewVllm => {
            ok(json!({ "weight_version": shared.life.lock().unwrap().weights }))
        }
        ("POST", "/pause" | "/pause_generation") => {
            shared.life.lock().unwrap().paused = true;
            ok(json!({ "status": "paused" }))
        }
        ("POST", "/resume" | "/continue_generation") => {
            shared.life.lock().unwrap().paused = false;
            ok(json!({ "status": "resumed" }))
        }
        ("POST", "/collective_rpc") => read(&shared, &behaviour, &body["kwargs"]["weights_path"]).await,
        ("POST", "/update_weights_from_disk") => {
            let answer = read(&shared, &behaviour, &body["model_path"]).await;
            if answer.status() == StatusCode::OK {
                shared.life.lock().unwrap().weights = body["weight_version"].as_str().unwrap().into();
            }
            answer
        }
        ("POST", "/reset_prefix_cache") => ok(json!({})),
        ("POST", "/update_weight_version") if shared.speaks != Speaks::OldVllm => {
            shared.life.lock().unwrap().weights = body["new_version"].as_str().unwrap().into();
            ok(json!({}))
        }
        ("POST", "/v1/load_lora_adapter" | "/load_lora_adapter") => {
            let mut life = shared.life.lock().unwrap();
            let shift = shift_of(body["lora_path"].as_str().unwrap());
            life.adapters.insert(body["lora_name"].as_str().unwrap().into(), shift);
            ok(json!({}))
        }
        ("POST", "/v1/unload_lora_adapter" | "/unload_lora_adapter") => {
            shared.life.lock().unwrap().adapters.remove(body["lora_name"].as_str().unwrap());
            ok(json!({}))
        }
        ("POST", "/inference/v1/generate" | "/generate") => generate(shared, behaviour, body).await,
        _ => group::answer(&shared, &behaviour, &path, &body).await,
    }
}

fn routes(shared: &Shared, behaviour: &Behaviour) -> Value {
    let mut routes = vec!["/inference/v1/generate", "/tokenize"];
    if behaviour.without != "dev mode" {
        routes.extend(["/pause", "/collective_rpc"]);
    }
    if behaviour.without != "adapters" {
        routes.push("/v1/load_lora_adapter");
    }
    if shared.speaks == Speaks::NewVllm {
        routes.extend(["/weight_info", "/init_weight_transfer_engine"]);
    }
    let paths: BTreeMap<&str, Value> = routes.into_iter().map(|route| (route, json!({}))).collect();
    json!({ "paths": paths })
}

/// Exits like a killed process: no connection closes cleanly.
async fn die(shared: &Shared) -> ! {
    if let Some(task) = shared.task.lock().unwrap().take() {
        task.abort();
    }
    std::future::pending::<Infallible>().await;
    unreachable!()
}

async fn read(shared: &Shared, behaviour: &Behaviour, folder: &Value) -> Response {
    if behaviour.dies_reading {
        die(shared).await;
    }
    if behaviour.refuses_weights {
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": { "message": "shapes differ" } })))
            .into_response();
    }
    sleep::may_write(shared).await;
    if !behaviour.keeps_weights {
        sleep::written(shared);
        let mut life = shared.life.lock().unwrap();
        life.shift = shift_of(folder.as_str().unwrap());
        life.membership = Membership::default();
    }
    Json(json!({ "success": true })).into_response()
}

fn triple(logprobs: &[f64], id: u32) -> Value {
    json!([logprobs[id as usize], id, null])
}

/// Returns a token in the format of the API version; the old API has no numeric ID.
fn named(shared: &Shared, id: u32, logprob: f64) -> Value {
    match shared.speaks {
        Speaks::OldVllm => json!({ "token": format!("token_id:{id}"), "logprob": logprob }),
        _ => json!({ "token_id": id, "logprob": logprob }),
    }
}

fn likely(logprobs: &[f64], top: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logprobs.len() as u32).collect();
    ids.sort_by(|a, b| logprobs[*b as usize].total_cmp(&logprobs[*a as usize]));
    ids.truncate(top);
    ids
}

async fn generate(shared: Arc<Shared>, behaviour: Behaviour, body: Value) -> Response {
    if behaviour.without == "scale out" {
        return (StatusCode::FORBIDDEN, Json(json!({ "error": { "message": "scale-out is off" } })))
            .into_response();
    }
    let sglang = shared.speaks == Speaks::Sglang;
    let (prompt, params) =
        (if sglang { &body["input_ids"] } else { &body["token_ids"] }, &body["sampling_params"]);
    let path: Vec<u32> = prompt.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let temperature = params["temperature"].as_f64().filter(|t| *t > 0.0).unwrap_or(1.0);
    let temperature = if behaviour.raw { 1.0 } else { temperature };
    let most = params[if sglang { "max_new_tokens" } else { "max_tokens" }].as_u64().unwrap() as usize;
    let name = if sglang { &body["lora_path"] } else { &body["model"] };
    let of_adapter = shared.life.lock().unwrap().adapters.get(name.as_str().unwrap_or("")).copied();
    let scores = params.get("prompt_logprobs").is_some() || body["logprob_start_len"] == 0;
    if body["stream"] != true {
        sleep::may_draw(&shared).await;
        if group::is_half(&shared) {
            shared.life.lock().unwrap().half += 1;
        }
        let shift = of_adapter.unwrap_or(shared.life.lock().unwrap().shift);
        if scores {
            return scored(&shared, &path, shift, &params["prompt_logprobs"]);
        }
        let logprobs = distribution(shift, &path, temperature);
        let id = likely(&logprobs, 1)[0];
        let top: Vec<Value> =
            likely(&logprobs, 8).into_iter().map(|id| named(&shared, id, logprobs[id as usize])).collect();
        let mut content = named(&shared, id, logprobs[id as usize]);
        content["top_logprobs"] = top.into();
        let choice =
            json!({ "token_ids": [id], "finish_reason": "length", "logprobs": { "content": [content] } });
        return Json(json!({ "choices": [choice] })).into_response();
    }
    let top = params["logprobs"].as_u64().or(body["top_logprobs_num"].as_u64()).unwrap_or(0) as usize;
    let mut stops: Vec<u64> =
        params["stop_token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    match (sglang, params["ignore_eos"] == true) {
        (true, true) => stops.clear(),
        (true, false) => stops.extend(behaviour.ends_texts),
        _ => {}
    }
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Result<Bytes, Infallible>>();
    let send = move |event: String| sender.send(Ok(Bytes::from(event))).is_ok();
    tokio::spawn(draw(shared, behaviour, Drawing { path, temperature, most, top, stops, of_adapter }, send));
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|item| (item, receiver))
    });
    Response::new(Body::from_stream(stream))
}

async fn wait_while_paused(shared: &Shared) {
    while shared.life.lock().unwrap().paused {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn scored(shared: &Shared, path: &[u32], shift: u64, top: &Value) -> Response {
    let at = |i: usize| distribution(shift, &path[..i], 1.0);
    if shared.speaks == Speaks::Sglang {
        let all: Vec<Value> = (0..path.len())
            .map(|i| if i == 0 { json!([null, path[0], null]) } else { triple(&at(i), path[i]) })
            .collect();
        return Json(json!({ "meta_info": { "input_token_logprobs": all } })).into_response();
    }
    let place = |i: usize| {
        let logprobs = at(i);
        let mut ids = likely(&logprobs, top.as_u64().unwrap_or(0) as usize);
        ids.push(path[i]);
        let entries = ids.into_iter().map(|id| (id.to_string(), json!({ "logprob": logprobs[id as usize] })));
        Value::Object(entries.collect())
    };
    let all: Vec<Value> = (0..path.len()).map(|i| if i == 0 { Value::Null } else { place(i) }).collect();
    Json(json!({ "prompt_logprobs": all, "choices": [{ "token_ids": [0] }] })).into_response()
}

struct Drawing {
    path: Vec<u32>,
    temperature: f64,
    most: usize,
    top: usize,
    stops: Vec<u64>,
    of_adapter: Option<u64>,
}

async fn draw(shared: Arc<Shared>, behaviour: Behaviour, drawing: Drawing, send: impl Fn(String) -> bool) {
    let Drawing { mut path, temperature, most, top, stops, of_adapter } = drawing;
    let (mut spans, mut all): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    let label = || shared.life.lock().unwrap().weights.clone();
    let lie = behaviour.lie;
    let most = lie.map_or(most, |lie| lie.most(most));
    for drawn in 0..=most {
        if behaviour.dies_after == Some(drawn) {
            die(&shared).await;
        }
        if behaviour.hangs_after == Some(drawn) {
            std::future::pending::<()>().await;
        }
        sleep::may_draw(&shared).await;
        if group::is_half(&shared) {
            shared.life.lock().unwrap().half += 1;
        }
        let shift = of_adapter.unwrap_or(shared.life.lock().unwrap().shift);
        let logprobs = distribution(shift, &path, temperature);
        // Not the most likely token, so that completions depend on the sequence.
        let id = likely(&logprobs, 1 + path.len() % 5)[path.len() % 5];
        let ends = drawn + 1 >= most || stops.contains(&u64::from(id));
        path.push(id);
        let now = label();
        match spans.last_mut().filter(|span| span["version"] == now) {
            Some(span) => span["end"] = json!(drawn + 1),
            None => spans.push(json!({ "version": now, "start": drawn, "end": drawn + 1 })),
        }
        let named_as = if lie == Some(Lie::Stranger) && ends { VOCABULARY as u32 + 7 } else { id };
        let logprob = match lie {
            Some(Lie::NoNumber) if drawn == 2 => Value::Null,
            _ => json!(logprobs[id as usize]),
        };
        let told =
            lie.filter(|_| ends).and_then(|lie| lie.spans(&now, drawn)).unwrap_or_else(|| json!(spans));
        let stopped = stops.contains(&u64::from(id)) || lie == Some(Lie::Stops);
        let finish = ends.then_some(if stopped { "stop" } else { "length" });
        let event = if shared.speaks == Speaks::Sglang {
            all.push(json!([logprob, named_as, null]));
            let matched = Some(id).filter(|id| stops.contains(&u64::from(*id)));
            let finish = finish.map(|reason| json!({ "type": reason, "matched": matched }));
            json!({ "output_ids": [], "meta_info": {
                "completion_tokens": drawn + 1, "output_token_logprobs": all, "weight_versions": told,
                "finish_reason": finish,
            }})
        } else {
            let mut entry = named(&shared, named_as, logprobs[id as usize]);
            entry["logprob"] = logprob;
            let others = likely(&logprobs, top);
            entry["top_logprobs"] = others
                .into_iter()
                .map(|id| named(&shared, id, logprobs[id as usize]))
                .collect::<Vec<_>>()
                .into();
            let known = (shared.speaks == Speaks::NewVllm && ends).then_some(told);
            json!({ "choices": [{
                "index": 0, "token_ids": [named_as], "logprobs": { "content": [entry] }, "finish_reason": finish,
                "weight_versions": known,
            }]})
        };
        let event = format!("data: {event}\n\n");
        if drawn == 3 && matches!(lie, Some(Lie::Half | Lie::Ends)) {
            send(if lie == Some(Lie::Half) { event[..event.len() / 2].to_owned() } else { event });
            return;
        }
        if !send(event) || ends {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn request(stream: u64, most: usize) -> SampleRequest {
    let params = SamplingParams { max_tokens: most, temperature: 0.7, ..SamplingParams::default() };
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
        .map(|i| distribution(versions(i - from), &path[..i], 0.699_999_988_079_071)[path[i] as usize] as f32)
        .collect()
}

/// Returns the directory of a weights reference.
pub fn folder_of(weights: &WeightsRef) -> PathBuf {
    match &weights.at {
        WeightsAt::Manifest(manifest) => manifest.verify().unwrap().to_owned(),
        _ => panic!(),
    }
}
