//! API of SGLang. The server labels weights, and reports with each event which tokens were sampled
//! under which label.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use hyper::Method;
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

/// HTTP API of SGLang. If `adapters` is true, requests name the LoRA adapter in addition to the
/// model.
pub(super) struct Sglang {
    pub adapters: bool,
}

impl Sglang {
    fn build_body(
        &self,
        prompt: &[u32],
        target: &RequestTarget<'_>,
        params: Value,
        from: i64,
        top: usize,
    ) -> Value {
        let mut body = json!({
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": true,
            "logprob_start_len": from,
            "top_logprobs_num": top,
            "cache_salt": target.label,
        });
        if self.adapters {
            body["lora_path"] = target.model.into();
        }
        body
    }
}

/// Parses an entry `[log-probability, token id, text]` of a response into the token's id and
/// log-probability.
fn parse_entry(entry: &Value) -> Result<(u32, f32), String> {
    let id = parse_token_id(&entry[1]).ok_or_else(|| format!("{entry} contains no token id"))?;
    Ok((id, parse_logprob(&entry[0])?))
}

fn parse_alternatives(entry: &Value, top: usize) -> Result<TopLogprobs, String> {
    let all = entry.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(most_likely(all.iter().map(parse_entry).collect::<Result<_, _>>()?, top))
}

#[async_trait]
impl ServerDialect for Sglang {
    async fn inspect(&self, http: &Http, options: &ServerOptions) -> Result<Facts, PolicyError> {
        let within = options.response_timeout;
        let info = http.send(Method::GET, "/model_info", None, within).await?;
        let Some(model) = info.value["model_path"].as_str().map(str::to_owned) else {
            return Err(http.rejection_error(format!(
                "/model_info returned {}: this is not an SGLang server of version 0.5 or later; \
                 correct the address or the kind",
                info.status.as_u16()
            )));
        };
        let server = http.get("/server_info", within).await?;
        let length = server["context_length"].as_u64().or(server["max_req_input_len"].as_u64());
        compare_context(length, "--context-length", options)
            .map_err(|why| http.rejection_error(why))?;
        if options.adapters && server["enable_lora"] == false {
            return Err(http.rejection_error(
                "the server does not accept adapters; start it with --enable-lora, \
                 --lora-target-modules all and --max-lora-rank",
            ));
        }
        if !options.tokenizer.tokens.is_empty() {
            let text = json!({ "model": model, "prompt": options.tokenizer.text, "add_special_tokens": false });
            let answer = http.send(Method::POST, "/tokenize", Some(&text), within).await?;
            if answer.status.is_success() {
                compare_tokens(options, &answer.value).map_err(|why| http.rejection_error(why))?;
            }
        }
        let program = server["version"].as_str().unwrap_or("of an unknown version").to_owned();
        Ok(Facts { model, program, labels: true, seeds: true })
    }

    fn sampling_route(&self) -> &'static str {
        "/generate"
    }

    fn rejection_reason(&self, params: &SamplingParams) -> Option<String> {
        unservable_reason(params, "SGLang").or_else(|| {
            (params.repetition_penalty != 1.0).then(|| {
                format!(
                    "repetition_penalty = {}: SGLang counts only the completion, and not the \
                     prompt; remove it from the request",
                    params.repetition_penalty
                )
            })
        })
    }

    fn generate_body(&self, request: &SampleRequest, target: &RequestTarget<'_>) -> Value {
        let params = &request.params;
        let mut sampling = json!({
            "max_new_tokens": params.max_tokens,
            "min_new_tokens": params.min_tokens.saturating_sub(params.sampled_before),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": if params.top_k == 0 { -1 } else { params.top_k as i64 },
            "min_p": params.min_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": params.stop_ids,
            // With `ignore_eos`, SGLang also ignores stop tokens, so it is set only without any.
            "ignore_eos": params.stop_ids.is_empty(),
            "skip_special_tokens": false,
            "no_stop_trim": true,
        });
        if let Some(seed) = target.seed {
            sampling["sampling_seed"] = json!(seed >> 33);
        }
        if let Some(bias) = logit_bias(params) {
            sampling["logit_bias"] = bias;
        }
        let mut body = self.build_body(&request.prompt, target, sampling, -1, params.top_logprobs);
        body["stream"] = true.into();
        body
    }

    fn parse_chunk(&self, event: &Value, seen: usize, top: usize) -> Result<StreamChunk, String> {
        if let Some(failed) = StreamChunk::from_error_event(event) {
            return Ok(failed);
        }
        let meta = &event["meta_info"];
        let all = meta["output_token_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        let likely = meta["output_top_logprobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        // Events repeat earlier tokens, unless the server was started to send only new ones.
        let total = meta["completion_tokens"].as_u64().unwrap_or(0) as usize;
        let known = if all.len() + seen > total { seen.min(all.len()) } else { 0 };
        let mut chunk =
            StreamChunk { spans: parse_spans(&meta["weight_versions"])?, ..StreamChunk::default() };
        for (i, entry) in all.iter().enumerate().skip(known) {
            let (id, logprob) = parse_entry(entry)?;
            chunk.tokens.push(id);
            chunk.logprobs.push(logprob);
            if top > 0 {
                chunk.top.push(parse_alternatives(likely.get(i).unwrap_or(&Value::Null), top)?);
            }
        }
        let finish = &meta["finish_reason"];
        // Spans may cover fewer tokens than have arrived, except at the end.
        let so_far = seen + chunk.tokens.len();
        let is_short = chunk
            .spans
            .as_ref()
            .is_some_and(|spans| spans.last().map_or(0, |span| span.end) < so_far);
        if is_short && finish.is_null() {
            chunk.spans = None;
        }
        let reason = finish["type"].as_str().or(finish.as_str());
        // An abort with a status comes from the server itself, for a request that it cannot serve.
        let why = finish["message"].as_str().filter(|_| finish["status_code"].is_u64());
        let token = finish["matched"].as_u64().and_then(|id| u32::try_from(id).ok());
        chunk.end = reason.map(|reason| match (CompletionEnd::from_reason(reason), why) {
            (CompletionEnd::Abort, Some(why)) => CompletionEnd::Failed(why.to_owned()),
            (CompletionEnd::Stop, _) => token.map_or(CompletionEnd::Stop, CompletionEnd::Token),
            (end, _) => end,
        });
        Ok(chunk)
    }

    fn score_body(&self, prompt: &[u32], top: usize, target: &RequestTarget<'_>) -> Value {
        self.build_body(prompt, target, json!({ "max_new_tokens": 1, "temperature": 1.0 }), 0, top)
    }

    fn parse_scores(
        &self,
        answer: &Value,
        prompt: &[u32],
        top: usize,
    ) -> Result<PromptScores, String> {
        let meta = &answer["meta_info"];
        let all = meta["input_token_logprobs"]
            .as_array()
            .ok_or("the server returned no input_token_logprobs")?;
        if all.len() != prompt.len() {
            return Err(format!(
                "the server returned {} input_token_logprobs for {} tokens",
                all.len(),
                prompt.len()
            ));
        }
        let mut logprobs = Vec::new();
        let mut likely = Vec::new();
        for (i, (id, entry)) in prompt.iter().zip(all).enumerate().skip(1) {
            let (found_id, logprob) = parse_entry(entry)?;
            if found_id != *id {
                return Err(format!(
                    "the log-probability {entry} belongs to another token than {id}"
                ));
            }
            logprobs.push(logprob);
            if top > 0 {
                likely.push(parse_alternatives(&meta["input_top_logprobs"][i], top)?);
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
        let mode = if in_flight == InFlight::Keep { "in_place" } else { "retract" };
        http.post("/pause_generation", &json!({ "mode": mode }), within).await.map(|_| ())
    }

    async fn resume(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        http.post("/continue_generation", &json!({}), within).await.map(|_| ())
    }

    async fn load_weights(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError> {
        let call = json!({
            "model_path": dir,
            "weight_version": load.label,
            "abort_all_requests": false,
            // Labels keep cached prefixes separate in any case.
            "flush_cache": !load.keeps,
        });
        require_success(http, http.post("/update_weights_from_disk", &call, load.within).await?)
            .map(|_| ())
    }

    async fn query_label(
        &self,
        http: &Http,
        _facts: &Facts,
        within: Duration,
    ) -> Result<String, PolicyError> {
        let info = http.get("/model_info", within).await?;
        Ok(info["weight_version"].as_str().unwrap_or_default().to_owned())
    }

    async fn load_adapter(
        &self,
        http: &Http,
        dir: &Path,
        load: &LoadSpec<'_>,
    ) -> Result<(), PolicyError> {
        let call = json!({ "lora_name": load.label, "lora_path": dir });
        let answer = http.post("/load_lora_adapter", &call, load.within).await?;
        if answer["success"] == false {
            Err(http.rejection_error(
                answer["error_message"].as_str().unwrap_or("the server rejected the adapter"),
            ))
        } else {
            Ok(())
        }
    }

    async fn drop_adapter(
        &self,
        http: &Http,
        name: &str,
        within: Duration,
    ) -> Result<(), PolicyError> {
        unload_adapter(http, "/unload_lora_adapter", name, within).await
    }

    async fn query_load(
        &self,
        _http: &Http,
        _within: Duration,
    ) -> Result<Option<Load>, PolicyError> {
        // SGLang reports its load only with a flag.
        Ok(None)
    }

    async fn is_paused(&self, _http: &Http, _within: Duration) -> bool {
        false
    }

    async fn check_sleeps(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        let info = http.get("/server_info", within).await?;
        if info["enable_memory_saver"] == false {
            Err(http.rejection_error(
                "the server keeps its device memory while it is asleep; start it with \
                 --enable-memory-saver",
            ))
        } else {
            Ok(())
        }
    }

    async fn sleep(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        let tags = [Part::Cache, Part::Weights].map(Part::tag);
        http.post("/release_memory_occupation", &json!({ "tags": tags }), within).await?;
        let label = json!({ "new_version": ASLEEP, "abort_all_requests": false });
        require_success(http, http.post("/update_weight_version", &label, within).await?)
            .map(|_| ())
    }

    /// Wakes a part of the server's memory. The part must be asleep: SGLang crashes if an awake
    /// part is woken.
    async fn wake(&self, http: &Http, part: Part, within: Duration) -> Result<(), PolicyError> {
        let call = json!({ "tags": [part.tag()] });
        http.post("/resume_memory_occupation", &call, within).await.map(|_| ())
    }

    async fn is_asleep(&self, http: &Http, within: Duration) -> Result<bool, PolicyError> {
        Ok(is_asleep_label(&http.get("/model_info", within).await?["weight_version"]))
    }

    async fn load_initial_weights(&self, http: &Http, within: Duration) -> Result<(), PolicyError> {
        let info = http.get("/model_info", within).await?;
        let call = json!({
            "model_path": info["model_path"],
            "weight_version": "as started",
            "abort_all_requests": false,
            "flush_cache": false,
        });
        require_success(http, http.post("/update_weights_from_disk", &call, within).await?)
            .map(|_| ())
    }
}

/// Returns a response of the server, unless it reports a failure.
///
/// # Errors
/// Returns the server's message if `success` is false.
fn require_success(http: &Http, answer: Value) -> Result<Value, PolicyError> {
    if answer["success"] == false {
        Err(http.rejection_error(answer["message"].as_str().unwrap_or("no reason given")))
    } else {
        Ok(answer)
    }
}

#[async_trait]
impl ReceiveWeights for Sglang {
    fn rendezvous(&self, _backend: GroupBackend) -> Rendezvous {
        Rendezvous::Store
    }

    async fn count_receivers(&self, http: &Http, within: Duration) -> Result<usize, PolicyError> {
        let info = http.get("/server_info", within).await?;
        let number = |key: &str| info[key].as_u64().unwrap_or(1) as usize;
        // Other processes than the tensor-parallel ranks would join under ranks that are already
        // taken.
        for (key, flag) in [("dp_size", "--dp-size"), ("pp_size", "--pp-size")] {
            if number(key) > 1 {
                return Err(http.rejection_error(format!(
                    "the server has {flag} {}, but weights can be sent only to servers with \
                     {flag} 1; start it with that value, or set cluster.samplers.weights = \
                     \"folder\"",
                    number(key)
                )));
            }
        }
        Ok(number("tp_size").max(1))
    }

    async fn join_group(
        &self,
        http: &Http,
        joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError> {
        let JoinedGroup { opening, opened } = joint;
        let RendezvousInfo::Store { address, port } = &opened.rendezvous else {
            return Err(
                http.rejection_error("the server joins process groups only through a store")
            );
        };
        let call = json!({
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": opening.ranks,
            "group_name": opening.group,
            "backend": opening.backend.name(),
        });
        require_success(http, http.post("/init_weights_update_group", &call, within).await?)
            .map(|_| ())
    }

    async fn receive(
        &self,
        http: &Http,
        push: &ReceiveSpec<'_>,
        sending: SendFuture<'_>,
    ) -> Result<SendReport, PolicyError> {
        let ReceiveSpec { joint, label, keeps, within, response_timeout } = *push;
        require_success(http, http.post("/begin_weight_update", &json!({}), within).await?)?;
        let call = json!({
            "names": joint.opened.names,
            "dtypes": joint.opened.dtypes,
            "shapes": joint.opened.shapes,
            "group_name": joint.opening.group,
            "weight_version": label,
            "flush_cache": !keeps,
        });
        let update = async {
            require_success(
                http,
                http.post("/update_weights_from_distributed", &call, within).await?,
            )
        };
        let taken =
            receive_weights(http, update, sending, self.leave_group(http, joint, response_timeout))
                .await;
        // Without the end of the update, the server loads no weights in any other way.
        let ended = http
            .post("/end_weight_update", &json!({}), within)
            .await
            .and_then(|answer| require_success(http, answer));
        let (_, sent) = taken?;
        ended?;
        Ok(sent)
    }

    async fn leave_group(
        &self,
        http: &Http,
        joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError> {
        let call = json!({ "group_name": joint.opening.group });
        http.post("/destroy_weights_update_group", &call, within).await.map(|_| ())
    }
}
