//! The endpoint `/generate` in SGLang's format: token ids or text in, token ids and text out.
//!
//! Each frame of a stream contains the complete output so far, as in SGLang.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use levade_policy::FinishReason;
use levade_text::{Chat, CompletionDelta};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{
    ApiDialect, CollectedCompletion, IncomingRequest, error_response, format_frame, gather_all,
    json_response, parse_json_body, write_response,
};
use crate::openai::{self, clamp_logprob, structured, weight_version_spans};
use levade_call::ApiError;
use levade_call::Request as CallRequest;
use levade_call::before_stop;
use levade_call::{Constraint, Input};
use levade_call::{End, Event, Head, Token};

/// Name of SGLang's API in the counters of unknown request fields.
const API: &str = "sglang";

/// Maximum number of tokens of a completion if the request sets no maximum, as in SGLang.
const MAX_NEW_TOKENS: usize = 128;

/// Request field that is either one value for all prompts of a batch or a list with one value for
/// each prompt.
#[derive(Clone, Deserialize)]
#[serde(untagged, expecting = "must be one value, or a list with one value for each prompt")]
enum PerPrompt<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> PerPrompt<T> {
    /// Returns the value for the prompt with the index `at`, in a batch of `count` prompts. `field`
    /// names the request field in errors.
    fn value_for(&self, field: &str, at: usize, count: usize) -> Result<T, ApiError> {
        match self {
            PerPrompt::One(value) => Ok(value.clone()),
            PerPrompt::Many(values) if values.len() == count => Ok(values[at].clone()),
            PerPrompt::Many(values) => {
                let message = format!(
                    "{field} has {} entries for {count} prompts; give one for each",
                    values.len()
                );
                Err(ApiError::field(field, message))
            }
        }
    }
}

/// Body of a request to `/generate`.
#[derive(Deserialize)]
struct SglangRequest {
    model: Option<String>,
    lora_path: Option<String>,
    rid: Option<PerPrompt<String>>,
    text: Option<PerPrompt<String>>,
    input_ids: Option<PromptIds>,
    sampling_params: Option<PerPrompt<Map<String, Value>>>,
    return_logprob: Option<PerPrompt<bool>>,
    logprob_start_len: Option<PerPrompt<i64>>,
    top_logprobs_num: Option<PerPrompt<usize>>,
    return_text_in_logprobs: Option<bool>,
    stream: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Prompts of a request as token ids: one prompt or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a list of token ids or a list of such lists")]
enum PromptIds {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

/// Handles `POST /generate`.
pub(crate) async fn generate(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    let PreparedCalls { caller, mut calls, mut writers, is_batch, streams } =
        match prepare_calls(&gateway, incoming) {
            Ok(prepared) => prepared,
            Err(found) => return error_response(&found, &openai::error_body(&found)),
        };
    if !is_batch && let (Some(call), Some(writer)) = (calls.pop(), writers.pop()) {
        let started = gateway.call(&caller, call).await;
        return write_response(started, writer, streams, ping).await;
    }
    match gather_all(&gateway, &caller, calls).await {
        Ok(found) => {
            let responses = writers.iter().zip(found);
            let all: Vec<Value> = responses
                .flat_map(|(writer, (head, completions))| {
                    writer.completion_values(&head, completions)
                })
                .collect();
            json_response(StatusCode::OK, &all.into())
        }
        Err(found) => error_response(&found, &openai::error_body(&found)),
    }
}

/// Model calls of a validated request, with the writers of their responses.
struct PreparedCalls {
    caller: Caller,
    calls: Vec<Call>,
    /// Writers of the responses, one for each call, in the same order.
    writers: Vec<SglangWriter>,
    is_batch: bool,
    streams: bool,
}

fn prepare_calls(gateway: &Gateway, incoming: IncomingRequest) -> Result<PreparedCalls, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let mut request: SglangRequest = parse_json_body(&body)?;
    openai::check_fields(gateway, API, &request.rest)?;
    let (inputs, is_batch) = match (request.text.take(), request.input_ids.take()) {
        (Some(PerPrompt::One(text)), None) => (vec![Input::Text(text)], false),
        (Some(PerPrompt::Many(texts)), None) => {
            (texts.into_iter().map(Input::Text).collect(), true)
        }
        (None, Some(PromptIds::One(ids))) => (vec![Input::Tokens(ids)], false),
        (None, Some(PromptIds::Many(lists))) => {
            (lists.into_iter().map(Input::Tokens).collect(), true)
        }
        _ => return Err(ApiError::field("input_ids", "set either input_ids or text")),
    };
    if inputs.is_empty() {
        return Err(ApiError::field("input_ids", "the batch is empty; send at least one prompt"));
    }
    let streams = request.stream.unwrap_or(false);
    if streams && is_batch {
        return Err(ApiError::field("stream", "a batch cannot be streamed; leave stream out"));
    }
    let count = inputs.len();
    let mut calls = Vec::with_capacity(count);
    let mut writers = Vec::with_capacity(count);
    for (at, input) in inputs.into_iter().enumerate() {
        let (call, writer) = parse_call(gateway, &caller, &request, input, (at, count))?;
        calls.push(call);
        writers.push(writer);
    }
    Ok(PreparedCalls { caller, calls, writers, is_batch, streams })
}

/// Creates the model call for the prompt with the index `at`, in a batch of `count` prompts, and
/// the writer of its response.
fn parse_call(
    gateway: &Gateway,
    caller: &Caller,
    request: &SglangRequest,
    input: Input,
    (at, count): (usize, usize),
) -> Result<(Call, SglangWriter), ApiError> {
    fn optional_value_for<T: Clone>(
        each: Option<&PerPrompt<T>>,
        field: &str,
        (at, count): (usize, usize),
    ) -> Result<Option<T>, ApiError> {
        each.map(|each| each.value_for(field, at, count)).transpose()
    }
    let field_path = (at, count);
    let mut params =
        optional_value_for(request.sampling_params.as_ref(), "sampling_params", field_path)?
            .unwrap_or_default();
    let skip_special = take_flag(&mut params, "skip_special_tokens", true)?;
    let trims = !take_flag(&mut params, "no_stop_trim", false)?;
    let constraint = parse_format(&mut params)?;
    for (theirs, ours) in [
        ("max_new_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("sampling_seed", "seed"),
    ] {
        if let Some(value) = params.remove(theirs) {
            params.insert(ours.into(), value);
        }
    }
    let requested = openai::take_sampling_fields(&mut params)?;
    openai::check_fields(gateway, "sglang.sampling_params", &params)?;
    let mut sampling = requested.to_sampling_options()?;
    sampling.max_tokens = sampling.max_tokens.or(Some(MAX_NEW_TOKENS));
    let logprobs =
        optional_value_for(request.return_logprob.as_ref(), "return_logprob", field_path)?
            .unwrap_or(false);
    let top =
        optional_value_for(request.top_logprobs_num.as_ref(), "top_logprobs_num", field_path)?
            .unwrap_or(0);
    let start =
        optional_value_for(request.logprob_start_len.as_ref(), "logprob_start_len", field_path)?
            .unwrap_or(-1);
    let start = usize::try_from(start).ok().filter(|_| logprobs);
    sampling.logprobs = logprobs.then_some(top);
    sampling.prompt_logprobs = start.map(|_| top);
    let model = request.model.as_ref().or(request.lora_path.as_ref()).cloned().unwrap_or_default();
    let request_of_call = CallRequest {
        n: requested.num_completions()?,
        sampling,
        constraint,
        ..CallRequest::new(input)
    };
    let call = Call { model, request: request_of_call };
    let writer = SglangWriter {
        chat: gateway.find_chat(caller, &call)?,
        rid: optional_value_for(request.rid.as_ref(), "rid", field_path)?,
        logprobs,
        start,
        top,
        texts: request.return_text_in_logprobs.unwrap_or(false),
        skip_special,
        trims,
        outputs: (0..call.request.n).map(|_| ChoiceOutput::default()).collect(),
    };
    Ok((call, writer))
}

fn take_flag(params: &mut Map<String, Value>, name: &str, default: bool) -> Result<bool, ApiError> {
    match params.remove(name) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(value)) => Ok(value),
        Some(other) => {
            Err(ApiError::field(name, format!("{name} = {other}, but it must be true or false")))
        }
    }
}

/// Removes the format constraint from a request's sampling parameters and returns it.
fn parse_format(params: &mut Map<String, Value>) -> Result<Option<Constraint>, ApiError> {
    let mut take = |name: &str| params.remove(name).filter(|value| !value.is_null());
    let schema = take("json_schema");
    let pattern = take("regex");
    if take("ebnf").is_some() {
        let message = "EBNF grammars are not supported; use regex or json_schema";
        return Err(ApiError::field("sampling_params.ebnf", message));
    }
    let field = "sampling_params.json_schema";
    let schema = schema.map(|schema| structured::parse_json_schema(field, &schema)).transpose()?;
    let pattern = match pattern {
        None => None,
        Some(Value::String(pattern)) => Some(Constraint::Regex(pattern)),
        Some(other) => {
            let message = format!("sampling_params.regex is {other}, but must be a string");
            return Err(ApiError::field("sampling_params.regex", message));
        }
    };
    structured::at_most_one(schema, pattern)
}

/// Writer of complete and streamed responses in SGLang's format.
struct SglangWriter {
    chat: Arc<Chat>,
    /// Id that the client has assigned to the call. If `None`, the response contains the gateway's
    /// id.
    rid: Option<String>,
    logprobs: bool,
    /// Index of the first prompt token whose log-probability is reported. `None` reports none.
    start: Option<usize>,
    /// Maximum number of alternatives per token in the log-probabilities of the response.
    top: usize,
    /// Whether entries of the log-probability lists contain the text of their token.
    texts: bool,
    /// Whether special tokens are omitted from the text.
    skip_special: bool,
    /// Whether the stop string or stop token that ended the completion is omitted from the text.
    trims: bool,
    /// Output of each choice so far, by the choice's index.
    outputs: Vec<ChoiceOutput>,
}

/// Output of one completion so far.
#[derive(Default)]
struct ChoiceOutput {
    text: String,
    prompt: Vec<Token>,
    tokens: Vec<Token>,
}

impl SglangWriter {
    /// Returns the text of a completion. `end` is `None` if the completion has not ended.
    fn completion_text(&self, tokens: &[Token], end: Option<&End>) -> String {
        if let Some(end) = end.filter(|_| self.skip_special && self.trims) {
            return end.text.clone();
        }
        let mut ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let trimming = end.filter(|_| self.trims);
        if trimming.is_some_and(|end| end.finish == FinishReason::StopId) {
            ids.pop();
        }
        let tokenizer = self.chat.tokenizer();
        let mut text = if self.skip_special {
            tokenizer.decode(&ids)
        } else {
            tokenizer.decode_with_special(&ids)
        };
        let stop = trimming.and_then(|end| end.stopped_by.as_deref());
        if let Some(stop) = stop {
            text.truncate(before_stop(&text, stop).len());
        }
        text
    }

    /// Returns an entry of SGLang's log-probability lists: log-probability, token id and text.
    /// `logprob` is `None` for the first reported prompt token.
    fn logprob_entry(&self, id: u32, logprob: Option<f32>) -> Value {
        let text = self.texts.then(|| self.chat.tokenizer().token_text(id));
        json!([logprob.map(clamp_logprob), id, text])
    }

    fn logprob_entries(&self, tokens: &[Token]) -> Value {
        tokens
            .iter()
            .map(|token| self.logprob_entry(token.id, Some(token.logprob)))
            .collect::<Vec<_>>()
            .into()
    }

    fn top_logprob_entries(&self, tokens: &[Token]) -> Vec<Value> {
        tokens
            .iter()
            .map(|token| {
                token
                    .top
                    .iter()
                    .map(|(id, logprob)| self.logprob_entry(*id, Some(*logprob)))
                    .collect::<Vec<_>>()
                    .into()
            })
            .collect()
    }

    /// Adds the log-probabilities of the prompt tokens to the response's metadata, starting with
    /// the token at the index `self.start`. As in SGLang, the log-probability of the first reported
    /// token is always null.
    fn add_prompt_logprobs(&self, meta: &mut Value, prompt: &[Token]) {
        let known = self.start.and_then(|start| prompt.get(start..)).unwrap_or_default();
        let mut list = Vec::new();
        let mut tops = Vec::new();
        if let Some((first, rest)) = known.split_first() {
            list.push(self.logprob_entry(first.id, None));
            list.extend(rest.iter().map(|token| self.logprob_entry(token.id, Some(token.logprob))));
            tops.push(Value::Null);
            tops.extend(self.top_logprob_entries(rest));
        }
        meta["input_token_logprobs"] = list.into();
        if self.top > 0 {
            meta["input_top_logprobs"] = tops.into();
        }
    }

    /// Returns a completion in SGLang's format. `end` is `None` if the completion has not ended.
    fn completion_value(
        &self,
        head: &Head,
        index: usize,
        completion: &ChoiceOutput,
        end: Option<&End>,
    ) -> Value {
        let ChoiceOutput { text, prompt, tokens } = completion;
        let id = self.rid.as_deref().unwrap_or(&head.id);
        let mut meta = json!({
            "id": if head.n == 1 { id.to_owned() } else { format!("{id}_{index}") },
            "finish_reason": end.map(|end| build_finish_reason(end, tokens)),
            "prompt_tokens": head.prompt.len(),
            "completion_tokens": tokens.len(),
            "cached_tokens": 0,
            "weight_version": tokens.last().map(|token| token.version.to_string()),
            "weight_versions": weight_version_spans(tokens, 0),
        });
        if self.logprobs {
            meta["output_token_logprobs"] = self.logprob_entries(tokens);
            if self.top > 0 {
                meta["output_top_logprobs"] = self.top_logprob_entries(tokens).into();
            }
            self.add_prompt_logprobs(&mut meta, prompt);
        }
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        json!({ "text": text, "output_ids": ids, "meta_info": meta })
    }

    /// Returns the completions of one prompt in SGLang's format.
    fn completion_values(&self, head: &Head, completions: Vec<CollectedCompletion>) -> Vec<Value> {
        completions
            .into_iter()
            .enumerate()
            .map(|(index, CollectedCompletion { prompt, tokens, end, .. })| {
                let text = self.completion_text(&tokens, Some(&end));
                self.completion_value(
                    head,
                    index,
                    &ChoiceOutput { text, prompt, tokens },
                    Some(&end),
                )
            })
            .collect()
    }

    /// Returns a stream frame with the output of the choice `index` so far.
    fn choice_frame(&self, head: &Head, index: usize, end: Option<&End>) -> String {
        let mut value = self.completion_value(head, index, &self.outputs[index], end);
        if head.n > 1 {
            value["index"] = index.into();
        }
        format_frame(None, &value)
    }
}

fn text_of_delta(delta: &CompletionDelta) -> Option<&str> {
    match delta {
        CompletionDelta::Speech(text) => Some(text),
        _ => None,
    }
}

/// Returns the finish reason of a completion in SGLang's format.
fn build_finish_reason(end: &End, tokens: &[Token]) -> Value {
    match end.finish {
        FinishReason::StopId => {
            json!({ "type": "stop", "matched": tokens.last().map(|token| token.id) })
        }
        FinishReason::StopString => json!({ "type": "stop", "matched": end.stopped_by }),
        FinishReason::Length | FinishReason::Context => {
            json!({ "type": "length", "length": tokens.len() })
        }
        FinishReason::Aborted => json!({ "type": "abort", "message": "the call was aborted" }),
    }
}

impl ApiDialect for SglangWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        openai::error_body(found)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        let mut completions = self.completion_values(head, completions);
        match completions.pop_if(|_| head.n == 1) {
            Some(only) => only,
            None => completions.into(),
        }
    }

    fn start_frames(&mut self, _head: &Head) -> String {
        String::new()
    }

    fn event_frames(&mut self, head: &Head, event: &Event) -> String {
        match event {
            Event::Prompt { choice, tokens } => {
                self.outputs[*choice].prompt.extend(tokens.iter().cloned());
                String::new()
            }
            Event::Delta { choice, deltas, tokens } => {
                self.outputs[*choice].tokens.extend(tokens.iter().cloned());
                if self.skip_special {
                    self.outputs[*choice].text.extend(deltas.iter().filter_map(text_of_delta))
                } else {
                    self.outputs[*choice].text =
                        self.completion_text(&self.outputs[*choice].tokens, None)
                }
                if tokens.is_empty() {
                    String::new()
                } else {
                    self.choice_frame(head, *choice, None)
                }
            }
            Event::Ended { choice, end } => {
                self.outputs[*choice].text =
                    self.completion_text(&self.outputs[*choice].tokens, Some(end));
                self.choice_frame(head, *choice, Some(end))
            }
            Event::Failed(found) => format_frame(None, &openai::error_body(found)),
            Event::Done => "data: [DONE]\n\n".into(),
        }
    }
}

#[cfg(test)]
#[path = "sglang_tests.rs"]
mod tests;
