//! API of vLLM: its routes, fields and labels of weights.
//!
//! From 0.32 on, vLLM labels weights and reports at the end of a completion which tokens were
//! sampled under which label; 0.20 does not. With `in_flight = "keep"`, tokens are returned at once
//! if no change of weights has started since their request, and held until the end otherwise. With
//! other settings a change ends the requests, which continue with their tokens under the new
//! weights. New requests to a paused server hang until it is resumed.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use hyper::{Method, StatusCode};
use levade_policy::{Load, PolicyError, SampleRequest, SamplingParams, TopLogprobs};
use serde_json::{Value, json};

use super::dialect::{
    ASLEEP, CompletionEnd, Facts, LoadSpec, Part, PromptScores, RequestTarget, ServerDialect,
    StreamChunk, compare_context, compare_tokens, is_asleep_label, logit_bias, most_likely,
    parse_logprob, parse_spans, parse_token_id, unload_adapter, unservable_reason,
};
use super::http::Http;
use super::options::{InFlight, ServerOptions};
use super::receive::{JoinedGroup, ReceiveSpec, ReceiveWeights, SendFuture, receive_weights};
use crate::push::{GroupBackend, Rendezvous, RendezvousInfo, SendReport};

/// URL path for sampling requests, which exists only with a server option.
const GENERATE: &str = "/inference/v1/generate";
/// URL path that returns the server's configuration.
const CONFIG: &str = "/server_info?config_format=json";
/// Environment variable that a server needs so that its weights can be replaced.
const DEV_MODE: &str = "VLLM_SERVER_DEV_MODE=1";
/// Environment variable and flag that a server needs so that it accepts LoRA adapters.
const ADAPTERS: &str = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora";

/// Maximum number of alternatives per token: vLLM's limit of 20 includes the sampled token.
const MAX_TOP_LOGPROBS: usize = 19;

/// HTTP API of vLLM.
pub(super) struct Vllm;

/// Parses the token id of a log-probability entry, in the format of either API version: `token_id`,
/// or a `token` such as `token_id:7`.
fn parse_token(entry: &Value) -> Option<u32> {
    parse_token_id(&entry["token_id"])
        .or_else(|| entry["token"].as_str()?.strip_prefix("token_id:")?.parse().ok())
}

fn to_params(params: &SamplingParams, seed: Option<u64>) -> Value {
    let mut all = json!({
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens.saturating_sub(params.sampled_before),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": if params.top_k == 0 { -1 } else { params.top_k as i64 },
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop_token_ids": params.stop_ids,
        // The request's stop tokens end completions, not the end-of-text tokens of the model's
        // files.
        "ignore_eos": true,
        // The sampled token comes first and counts.
        "logprobs": if params.top_logprobs == 0 { 0 } else { params.top_logprobs + 1 },
        "detokenize": false,
    });
    if let Some(seed) = seed.filter(|_| params.temperature > 0.0) {
        all["seed"] = json!(seed >> 1);
    }
    if let Some(bias) = logit_bias(params) {
        all["logit_bias"] = bias;
    }
    all
}

fn build_body(prompt: &[u32], target: &RequestTarget<'_>, params: Value) -> Value {
    json!({ "model": target.model, "token_ids": prompt, "cache_salt": target.label, "sampling_params": params })
}

fn parse_likely(entry: &Value, top: usize) -> Result<TopLogprobs, String> {
    let Some(all) = entry["top_logprobs"].as_array().filter(|_| top > 0) else {
        return Ok(Vec::new());
    };
    Ok(most_likely(
        all.iter()
            .map(|entry| {
                let id =
                    parse_token(entry).ok_or_else(|| format!("{entry} contains no token id"))?;
                Ok((id, entry["logprob"].as_f64().unwrap_or(f64::NEG_INFINITY) as f32))
            })
            .collect::<Result<_, String>>()?,
        top,
    ))
}

#[async_trait]
impl ServerDialect for Vllm {
    async fn inspect(&self, http: &Http, options: &ServerOptions) -> Result<Facts, PolicyError> {
        let within = options.response_timeout;
        let version = http.send(Method::GET, "/version", None, within).await?;
        let Some(program) = version.value["version"].as_str().map(str::to_owned) else {
            return Err(http.rejection_error(format!(
                "/version returned {}: this is not a vLLM server; correct the address or the kind",
                version.status.as_u16()
            )));
        };
        let routes = http.get("/openapi.json", within).await?;
        let has = |route: &str| routes["paths"].get(route).is_some();
        if !(has("/pause") && has("/collective_rpc")) {
            return Err(http.rejection_error(format!(
                "the server has no routes to pause it and to load weights; start it with \
                 {DEV_MODE} in its environment"
            )));
        }
        if options.adapters && !has("/v1/load_lora_adapter") {
            return Err(http.rejection_error(format!(
                "the server does not accept adapters; start it with {ADAPTERS}"
            )));
        }
        let labels = has("/weight_info");
        if !labels && options.in_flight == InFlight::Keep && !options.adapters {
            return Err(http.rejection_error(format!(
                "vLLM {program} does not report which weights sampled a token, so completions \
                 cannot continue across an update of the weights; set in_flight = \"recompute\", \
                 or use vLLM 0.32 or later"
            )));
        }
        if options.push.is_some() && !(labels && has("/init_weight_transfer_engine")) {
            return Err(http.rejection_error(format!(
                "vLLM {program} cannot receive weights over a process group; set \
                 cluster.samplers.weights = \"folder\", or use vLLM 0.32 or later"
            )));
        }
        let models = http.get("/v1/models", within).await?;
        let model = &models["data"][0];
        let Some(name) = model["id"].as_str() else {
            return Err(http.rejection_error("the server's route /v1/models lists no model"));
        };
        let length = model["max_model_len"].as_u64();
        compare_context(length, "--max-model-len", options)
            .map_err(|why| http.rejection_error(why))?;
        // Servers are slow to return the configuration, so it is requested once.
        let config = http.send(Method::GET, CONFIG, None, within).await;
        let config = config.map(|mut info| info.value["vllm_config"].take());
        let seeds = config.as_ref().map_or(true, accepts_seeds);
        let facts = Facts { model: name.to_owned(), program, labels, seeds };
        self.check_flags(http, &facts, options).await?;
        if options.push.is_some() || options.adapters {
            check_config(&config?, options).map_err(|why| http.rejection_error(why))?;
        }
        if !options.tokenizer.tokens.is_empty() && has("/tokenize") {
            let text = json!({ "model": name, "prompt": options.tokenizer.text, "add_special_tokens": false });
            let tokens = http.post("/tokenize", &text, within).await?;
            compare_tokens(options, &tokens).map_err(|why| http.rejection_error(why))?;
        }
        Ok(facts)
    }

    fn sampling_route(&self) -> &'static str {
        GENERATE
    }

    fn rejection_reason(&self, params: &SamplingParams) -> Option<String> {
        unservable_reason(params, "vLLM").or_else(|| {
            (params.top_logprobs > MAX_TOP_LOGPROBS).then(|| {
                format!(
                    "top_logprobs = {}: vLLM returns at most {MAX_TOP_LOGPROBS} in addition to \
                     the sampled token",
                    params.top_logprobs
                )
            })
        })
    }

    fn generate_body(&self, request: &SampleRequest, target: &RequestTarget<'_>) -> Value {
        let mut body = build_body(&request.prompt, target, to_params(&request.params, target.seed));
        body["stream"] = true.into();
        body
    }

    fn parse_chunk(&self, event: &Value, _seen: usize, top: usize) -> Result<StreamChunk, String> {
        if let Some(failed) = StreamChunk::from_error_event(event) {
            return Ok(failed);
        }
        // The last event of some servers has no choices.
        let Some(choice) = event["choices"].get(0) else { return Ok(StreamChunk::default()) };
        let content =
            choice["logprobs"]["content"].as_array().map(Vec::as_slice).unwrap_or_default();
        let ids: Vec<u32> = match choice["token_ids"].as_array() {
            Some(ids) => ids.iter().filter_map(parse_token_id).collect(),
            None => content.iter().filter_map(parse_token).collect(),
        };
        if content.len() != ids.len() {
            let (tokens, found) = (ids.len(), content.len());
            return Err(format!("the server returned {tokens} tokens, but {found} logprobs"));
        }
        let spans = parse_spans(&choice["weight_versions"])?;
        let mut chunk = StreamChunk { spans, ..StreamChunk::default() };
        for (id, entry) in ids.into_iter().zip(content) {
            if parse_token(entry) != Some(id) {
                return Err(format!(
                    "the log-probability {entry} belongs to another token than {id}"
                ));
            }
            chunk.tokens.push(id);
            chunk.logprobs.push(parse_logprob(&entry["logprob"])?);
            if top > 0 {
                chunk.top.push(parse_likely(entry, top)?);
            }
        }
        chunk.end = choice["finish_reason"].as_str().map(CompletionEnd::from_reason);
        Ok(chunk)
    }

    fn score_body(&self, prompt: &[u32], top: usize, target: &RequestTarget<'_>) -> Value {
        let params = json!({ "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top, "detokenize": false });
        build_body(prompt, target, params)
    }

    fn parse_scores(
        &self,
        answer: &Value,
        prompt: &[u32],
        top: usize,
    ) -> Result<PromptScores, String> {
        let all =
            answer["prompt_logprobs"].as_array().ok_or("the server returned no prompt_logprobs")?;
        if all.len() != prompt.len() {
            let (found, want) = (all.len(), prompt.len());
            return Err(format!("the server returned {found} prompt_logprobs for {want} tokens"));
        }
        let mut logprobs = Vec::new();
        let mut likely = Vec::new();
        for (id, position_logprobs) in prompt.iter().zip(all).skip(1) {
            let value_of = |entry: &Value| entry["logprob"].as_f64().map(|logprob| logprob as f32);
            logprobs.push(parse_logprob(&position_logprobs[&id.to_string()]["logprob"])?);
            if top > 0 {
                let entries = position_logprobs.as_object().into_iter().flatten();
                let known =
                    entries.filter_map(|(id, entry)| Some((id.parse().ok()?, value_of(entry)?)));
                likely.push(most_likely(known.collect(), top));
            }
        }
        Ok((logprobs, likely))
    }

    async fn pause(
        &self,
        http: &Http,
        in_flight: InFlight,
        within: Duration,
    ) -> Result<(), PolicyError> {
        let mode = if in_flight == InFlight::Keep { "keep" } else { "abort" };
        http.post(&format!("/pause?mode={mode}"), &json!({}), within).await.map(|_| ())
    }

    async fn resume(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        http.post("/resume", &json!({}), within).await.map(|_| ())
    }

    async fn load_weights(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError> {
        let call = json!({
            "method": "reload_weights",
            "kwargs": { "weights_path": dir },
            "timeout": load.within.as_secs_f64(),
        });
        http.post("/collective_rpc", &call, load.within).await?;
        // Labels keep prefixes separate; this call frees their memory. Frozen requests keep theirs.
        http.post("/reset_prefix_cache", &json!({}), load.within).await?;
        if load.facts.labels {
            http.post("/update_weight_version", &json!({ "new_version": load.label }), load.within)
                .await?;
        }
        Ok(())
    }

    async fn query_label(
        &self,
        http: &Http,
        facts: &Facts,
        within: Duration,
    ) -> Result<String, PolicyError> {
        if facts.labels {
            let info = http.get("/weight_info", within).await?;
            return Ok(info["weight_version"].as_str().unwrap_or_default().to_owned());
        }
        let metrics = http.send(Method::GET, "/metrics", None, within).await?;
        find_metric(metrics.text(), "process_start_time_seconds")
            .map(|start| format!("started {start}"))
            .ok_or_else(|| http.rejection_error("/metrics contains no process_start_time_seconds"))
    }

    async fn load_adapter(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError> {
        let call = json!({ "lora_name": load.label, "lora_path": dir });
        http.post("/v1/load_lora_adapter", &call, load.within).await.map(|_| ())
    }

    async fn drop_adapter(
        &self,
        http: &Http,
        name: &str,
        within: Duration,
    ) -> Result<(), PolicyError> {
        unload_adapter(http, "/v1/unload_lora_adapter", name, within).await
    }

    async fn query_load(&self, http: &Http, within: Duration) -> Result<Option<Load>, PolicyError> {
        let metrics = http.send(Method::GET, "/metrics", None, within).await?;
        let value_of = |name: &str| find_metric(metrics.text(), name);
        Ok(value_of("vllm:num_requests_running").map(|running| Load {
            running: running as usize,
            waiting: value_of("vllm:num_requests_waiting").unwrap_or(0.0) as usize,
            cache_in_use: value_of("vllm:kv_cache_usage_perc").unwrap_or(0.0),
        }))
    }

    async fn is_paused(&self, http: &Http, within: Duration) -> bool {
        http.get("/is_paused", within).await.is_ok_and(|answer| answer["is_paused"] == true)
    }

    /// Checks the flag for sleep. Without it, vLLM reports that it sleeps but keeps all memory.
    async fn check_sleeps(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        let info = http.get(CONFIG, within).await?;
        if info["vllm_config"]["model_config"]["enable_sleep_mode"] == false {
            Err(http.rejection_error(
                "the server keeps its device memory while it is asleep; start it with \
                 --enable-sleep-mode",
            ))
        } else {
            Ok(())
        }
    }

    async fn sleep(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        // The weights will be read again, so level 2 discards them instead of copying them to host
        // memory.
        http.post("/sleep?level=2&mode=abort", &json!({}), within).await?;
        let label = json!({ "new_version": ASLEEP });
        match http.send(Method::POST, "/update_weight_version", Some(&label), within).await? {
            // vLLM 0.20 has no labels.
            answer if answer.status.is_success() || answer.status == StatusCode::NOT_FOUND => {
                Ok(())
            }
            answer => Err(http.status_error(
                "/update_weight_version",
                answer.status,
                &answer.error_message(),
            )),
        }
    }

    /// Wakes a part of the server's memory, if it is asleep. Waking the last part resumes sampling.
    async fn wake(&self, http: &Http, part: Part, within: Duration) -> Result<(), PolicyError> {
        http.post(&format!("/wake_up?tags={}", part.tag()), &json!({}), within).await.map(|_| ())
    }

    /// Returns whether the label of the weights marks sleep. The server's own report is not used,
    /// because a paused server also reports that it sleeps.
    async fn is_asleep(&self, http: &Http, within: Duration) -> Result<bool, PolicyError> {
        let info = http.send(Method::GET, "/weight_info", None, within).await?;
        if info.status.is_success() {
            Ok(is_asleep_label(&info.value["weight_version"]))
        } else {
            Ok(http.get("/is_sleeping", within).await?["is_sleeping"] == true)
        }
    }

    async fn load_initial_weights(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        let models = http.get("/v1/models", within).await?;
        // Without a path the server would read the directory of the last reload, which may have
        // been removed.
        let path = &models["data"][0]["root"];
        let call = json!({
            "method": "reload_weights",
            "kwargs": { "weights_path": path },
            "timeout": within.as_secs_f64(),
        });
        http.post("/collective_rpc", &call, within).await?;
        let label = json!({ "new_version": "as started" });
        http.send(Method::POST, "/update_weight_version", Some(&label), within).await.map(|_| ())
    }
}

#[async_trait]
impl ReceiveWeights for Vllm {
    /// Returns a unique id for NCCL, because vLLM's NCCL communicators differ from PyTorch's.
    fn rendezvous(&self, backend: GroupBackend) -> Rendezvous {
        match backend {
            GroupBackend::Gloo => Rendezvous::Store,
            GroupBackend::Nccl => Rendezvous::UniqueId,
        }
    }

    async fn count_receivers(&self, http: &Http, within: Duration) -> Result<usize, PolicyError> {
        let response = http.get("/get_world_size", within).await?;
        let ranks = response["world_size"].as_u64().filter(|ranks| *ranks > 0);
        ranks
            .map(|ranks| ranks as usize)
            .ok_or_else(|| http.rejection_error("/get_world_size returned no number"))
    }

    async fn join_group(
        &self,
        http: &Http,
        joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError> {
        let JoinedGroup { opening, opened } = joint;
        let mut info = json!({ "rank_offset": 1, "world_size": opening.ranks });
        match &opened.rendezvous {
            RendezvousInfo::UniqueId { unique_id } => {
                info["nccl_unique_id_b64"] = json!(unique_id);
                // Send one tensor after another.
                info["packed"] = false.into();
            }
            RendezvousInfo::Store { address, port } => {
                info["master_address"] = json!(address);
                info["master_port"] = json!(port);
                info["group_name"] = json!(opening.group);
                info["timeout_seconds"] = json!(opening.seconds);
            }
        }
        let response =
            http.post("/init_weight_transfer_engine", &json!({ "init_info": info }), within).await;
        response.map(|_| ()).map_err(|error| {
            let backend = opening.backend.name();
            http.stopped_error(&format!(
                "{error}; check that the server was started with --weight-transfer-config \
                 '{{\"backend\": \"{backend}\"}}'"
            ))
        })
    }

    async fn receive(
        &self,
        http: &Http,
        push: &ReceiveSpec<'_>,
        sending: SendFuture<'_>,
    ) -> Result<SendReport, PolicyError> {
        let ReceiveSpec { joint, label, within, response_timeout, .. } = *push;
        http.post("/start_weight_update", &json!({}), within).await?;
        let info = json!({
            "names": joint.opened.names,
            "dtype_names": joint.opened.dtypes,
            "shapes": joint.opened.shapes,
        });
        let body = json!({ "update_info": info });
        let update = http.post("/update_weights", &body, within);
        let taken =
            receive_weights(http, update, sending, self.leave_group(http, joint, response_timeout))
                .await;
        let sent = match taken {
            Ok((_, sent)) => sent,
            Err(error) => {
                // Layers that have some of their weights would count them toward the weights from
                // the directory. Finishing the update resets this count, and a failed update must
                // be started again before it can finish.
                http.post("/start_weight_update", &json!({}), response_timeout).await.ok();
                http.post("/finish_weight_update", &json!({}), response_timeout).await.ok();
                return Err(error);
            }
        };
        http.post("/finish_weight_update", &json!({ "weight_version": label }), within).await?;
        http.post("/reset_prefix_cache", &json!({}), within).await?;
        Ok(sent)
    }

    async fn leave_group(
        &self,
        http: &Http,
        _joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError> {
        http.post("/shutdown_weight_transfer_engine", &json!({}), within).await.map(|_| ())
    }
}

impl Vllm {
    /// Samples one token at temperature 1 and one at ½, to check that the sampling route exists and
    /// that log-probabilities refer to the requested temperature.
    async fn check_flags(
        &self,
        http: &Http,
        facts: &Facts,
        options: &ServerOptions,
    ) -> Result<(), PolicyError> {
        let prompt: Vec<u32> = match &options.tokenizer.tokens[..] {
            [] => vec![0],
            tokens => tokens.iter().copied().take(16).collect(),
        };
        let mut found = Vec::new();
        for temperature in [1.0, 0.5] {
            let params = json!({ "max_tokens": 1, "temperature": temperature, "logprobs": 8, "detokenize": false });
            // A cache salt of its own, so that nothing remains in the cache for later requests.
            let target = RequestTarget { model: &facts.model, label: "looked at", seed: None };
            let question = build_body(&prompt, &target, params);
            let answer =
                http.send(Method::POST, GENERATE, Some(&question), options.silence).await?;
            if matches!(answer.status, StatusCode::FORBIDDEN | StatusCode::NOT_FOUND) {
                return Err(http.rejection_error(format!(
                    "{GENERATE} returned {}: {}; start the server with --enable-scale-out",
                    answer.status.as_u16(),
                    answer.error_message()
                )));
            }
            if !answer.status.is_success() {
                return Err(http.status_error(GENERATE, answer.status, &answer.error_message()));
            }
            let likely = parse_likely(&answer.value["choices"][0]["logprobs"]["content"][0], 8);
            found.push(likely.map_err(|why| http.rejection_error(why))?);
        }
        // If the temperature is halved, the gap between two tokens that both responses contain
        // doubles.
        let pairs = found[0].iter().flat_map(|a| found[0].iter().map(move |b| (a.0, b.0)));
        let widest = pairs
            .filter_map(|(a, b)| {
                Some((logprob_gap(&found[0], a, b)?, logprob_gap(&found[1], a, b)?))
            })
            .max_by(|a, b| a.0.total_cmp(&b.0));
        match widest {
            Some((at_one, at_half)) if at_one > 0.05 && (at_half / at_one - 2.0).abs() > 0.5 => {
                Err(http.rejection_error(
                    "the server's log-probabilities are computed before the temperature is \
                     applied; start it with --logprobs-mode processed_logprobs",
                ))
            }
            _ => Ok(()),
        }
    }
}

fn logprob_gap(all: &TopLogprobs, a: u32, b: u32) -> Option<f32> {
    Some(logprob_in(all, a)? - logprob_in(all, b)?)
}

fn logprob_in(all: &TopLogprobs, id: u32) -> Option<f32> {
    all.iter().find(|(other, _)| *other == id).map(|(_, logprob)| *logprob)
}

/// Returns whether requests may contain seeds, according to the server's configuration. On CPUs,
/// vLLM 0.32 crashes on a request with a seed whose prompt is computed in chunks: it rewinds the
/// request's random generator, which CPU generators do not support.
fn accepts_seeds(config: &Value) -> bool {
    let is_cpu = config["device_config"]["device"] == "cpu";
    !(is_cpu && config["scheduler_config"]["enable_chunked_prefill"] != false)
}

/// Checks the server's configuration, if the server reports one, for missing flags. Without this
/// check, they would cause a failure only in the middle of a run, or would never be noticed.
fn check_config(config: &Value, options: &ServerOptions) -> Result<(), String> {
    let lora = config.get("lora_config").filter(|_| options.adapters);
    if lora.is_some_and(Value::is_null) {
        return Err(format!("the server does not accept adapters; start it with {ADAPTERS}"));
    }
    if let Some(max_adapters) =
        lora.and_then(|lora| lora["max_loras"].as_u64()).filter(|max_adapters| *max_adapters < 2)
    {
        return Err(format!(
            "the server holds {max_adapters} adapter at a time, but a new one is loaded while the \
             old one is in use; start it with --max-loras 2"
        ));
    }
    let transfer = config.get("weight_transfer_config");
    let (Some(push), Some(transfer)) = (&options.push, transfer) else { return Ok(()) };
    let wanted = push.backend().name();
    let has = transfer["backend"].as_str();
    if has == Some(wanted) {
        return Ok(());
    }
    let has = has.map_or_else(|| "no backend".into(), |has| format!("the backend {has:?}"));
    Err(format!(
        "the server receives weights over {has}, but the learner sends over {wanted:?}; start it \
         with --weight-transfer-config '{{\"backend\": \"{wanted}\"}}', or set \
         cluster.samplers.weights = \"folder\""
    ))
}

/// Returns the metric `name` from a page in the Prometheus format, summed over its labels.
fn find_metric(page: &str, name: &str) -> Option<f64> {
    let found: Vec<f64> = page
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let is_full_name = rest.starts_with('{') || rest.starts_with(' ');
            is_full_name.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        })
        .collect();
    (!found.is_empty()).then(|| found.iter().sum())
}
