//! The endpoint `/inference/v1/generate` in vLLM's format: token ids in, token ids out.
//!
//! Log-probabilities identify tokens in the formats of all versions of vLLM: `token` as
//! `"token_id:ID"`, and `token_id`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use levade_text::Chat;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{
    ApiDialect, CollectedCompletion, IncomingRequest, error_response, format_frame,
    parse_json_body, write_response,
};
use crate::openai::{
    self, TokenReport, build_usage, clamp_logprob, structured, sum_usage, weight_version_spans,
};
use levade_call::ApiError;
use levade_call::Input;
use levade_call::Request as CallRequest;
use levade_call::{End, Event, Head, Token};

/// Name of vLLM's API in the counters of unknown request fields.
const API: &str = "generate";

/// Body of a request to `/inference/v1/generate`.
#[derive(Deserialize)]
struct VllmRequest {
    model: Option<String>,
    request_id: Option<String>,
    token_ids: Vec<u32>,
    #[serde(default, deserialize_with = "crate::http::or_default")]
    sampling_params: Map<String, Value>,
    stream: Option<bool>,
    stream_options: Option<Map<String, Value>>,
    output_mode: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Handles `POST /inference/v1/generate`.
pub(crate) async fn generate(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    match prepare_call(&gateway, incoming) {
        Err(found) => error_response(&found, &openai::error_body(&found)),
        Ok((caller, call, writer, streams)) => {
            let started = gateway.call(&caller, call).await;
            write_response(started, writer, streams, ping).await
        }
    }
}

/// Removes the field `name`, a number of log-probabilities, from the sampling parameters and
/// returns it. Returns `None` if the request asks for no log-probabilities.
fn take_logprob_count(
    params: &mut Map<String, Value>,
    name: &str,
) -> Result<Option<usize>, ApiError> {
    let Some(value) = params.remove(name).filter(|value| !value.is_null()) else { return Ok(None) };
    value
        .as_u64()
        .and_then(|count| usize::try_from(count).ok())
        .ok_or_else(|| {
            let field = format!("sampling_params.{name}");
            ApiError::field(
                &field,
                format!("{field} is {value}, but must be a whole number of at least 0, or null"),
            )
        })
        .map(Some)
}

fn prepare_call(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<(Caller, Call, VllmWriter, bool), ApiError> {
    let (caller, body) = incoming.into_call()?;
    let request: VllmRequest = parse_json_body(&body)?;
    if let Some(mode) = request.output_mode.filter(|mode| mode != "tokens") {
        let message = format!("output_mode is {mode:?}, but must be \"tokens\"");
        return Err(ApiError::field("output_mode", message));
    }
    openai::check_fields(gateway, API, &request.rest)?;
    let mut params = request.sampling_params;
    let logprobs = take_logprob_count(&mut params, "logprobs")?;
    let prompt_logprobs = take_logprob_count(&mut params, "prompt_logprobs")?;
    let constraint = structured::take_vllm_constraint(gateway, &mut params)?;
    let requested = openai::take_sampling_fields(&mut params)?;
    openai::check_fields(gateway, "generate.sampling_params", &params)?;
    let mut sampling = requested.to_sampling_options()?;
    (sampling.logprobs, sampling.prompt_logprobs) = (logprobs, prompt_logprobs);
    let stop_ids = sampling.stop_ids.clone();
    let input = Input::Tokens(request.token_ids);
    let call = Call {
        model: request.model.unwrap_or_default(),
        request: CallRequest {
            n: requested.num_completions()?,
            sampling,
            constraint,
            ..CallRequest::new(input)
        },
    };
    let writer = VllmWriter {
        chat: gateway.find_chat(&caller, &call)?,
        tokens: TokenReport {
            logprobs: logprobs.is_some(),
            as_ids: true,
            ..TokenReport::default()
        },
        request_id: request.request_id,
        stop_ids,
        include_usage: request
            .stream_options
            .is_some_and(|options| options.get("include_usage") == Some(&true.into())),
        reported: vec![(0, None); call.request.n],
        ended: Vec::new(),
    };
    Ok((caller, call, writer, request.stream.unwrap_or(false)))
}

/// Writer of complete and streamed responses in vLLM's format.
struct VllmWriter {
    chat: Arc<Chat>,
    tokens: TokenReport,
    /// Id that the client has assigned to the call. If `None`, the response contains the gateway's
    /// id.
    request_id: Option<String>,
    /// Token ids that the request lists as stop tokens. If one of them ends a completion, it is the
    /// stop reason.
    stop_ids: Vec<u32>,
    include_usage: bool,
    /// Number of tokens of each choice that were written so far, and the id of the last of these
    /// tokens. `None` if no token was written.
    reported: Vec<(usize, Option<u32>)>,
    /// Number of tokens, and of reasoning tokens, of each completion that has ended.
    ended: Vec<(usize, usize)>,
}

impl VllmWriter {
    /// Returns a completion, or a part of it, in vLLM's format. The first of `tokens` has the index
    /// `start` in the completion.
    fn build_choice(&self, index: usize, tokens: &[Token], start: usize) -> Value {
        let logprobs = if self.tokens.logprobs {
            self.tokens.logprob_content(&self.chat, tokens)
        } else {
            Value::Null
        };
        json!({
            "index": index,
            "token_ids": tokens.iter().map(|token| token.id).collect::<Vec<_>>(),
            "logprobs": logprobs,
            "finish_reason": null,
            "stop_reason": null,
            "weight_versions": weight_version_spans(tokens, start),
        })
    }

    /// Sets the finish reason and the stop reason of a completion whose last token is `last`.
    fn set_finish_reason(&self, choice: &mut Value, end: &End, last: Option<u32>) {
        choice["finish_reason"] = openai::to_finish_reason(end).into();
        choice["stop_reason"] = match last.filter(|last| self.stop_ids.contains(last)) {
            Some(id) if end.finish == levade_policy::FinishReason::StopId => id.into(),
            _ => openai::to_stop_reason(end),
        };
    }

    fn build_document(&self, head: &Head, choices: Vec<Value>) -> Value {
        json!({
            "request_id": self.request_id.as_deref().unwrap_or(&head.id),
            "model": head.model,
            "created": head.created,
            "output_mode": "tokens",
            "choices": choices,
            "prompt_logprobs": null,
        })
    }
}

/// Returns the log-probabilities of a prompt in vLLM's format. Each token has an object that maps
/// the ids of the alternatives at its position to their log-probabilities. The entry of the first
/// token is null.
fn build_prompt_logprobs(chat: &Chat, tokens: &[Token]) -> Value {
    tokens
        .iter()
        .map(|token| {
            if token.logprob.is_nan() {
                return Value::Null;
            }
            let top = token.top.iter().zip(1..);
            let mut found: Map<String, Value> = top
                .map(|((id, logprob), rank)| {
                    (id.to_string(), logprob_value(chat, *id, *logprob, Some(rank)))
                })
                .collect();
            found
                .entry(token.id.to_string())
                .or_insert_with(|| logprob_value(chat, token.id, token.logprob, None));
            found.into()
        })
        .collect::<Vec<_>>()
        .into()
}

fn logprob_value(chat: &Chat, id: u32, logprob: f32, rank: Option<usize>) -> Value {
    let text = chat.tokenizer().token_text(id);
    json!({ "logprob": clamp_logprob(logprob), "rank": rank, "decoded_token": text })
}

impl ApiDialect for VllmWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        openai::error_body(found)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        let choices = completions.iter().enumerate().map(
            |(index, CollectedCompletion { tokens, end, .. })| {
                let mut choice = self.build_choice(index, tokens, 0);
                self.set_finish_reason(&mut choice, end, tokens.last().map(|token| token.id));
                choice
            },
        );
        let mut body = self.build_document(head, choices.collect());
        if let Some(first) = completions.first().filter(|first| !first.prompt.is_empty()) {
            body["prompt_logprobs"] = build_prompt_logprobs(&self.chat, &first.prompt);
        }
        body["usage"] = sum_usage(&completions);
        body
    }

    fn start_frames(&mut self, _head: &Head) -> String {
        String::new()
    }

    fn event_frames(&mut self, head: &Head, event: &Event) -> String {
        match event {
            Event::Prompt { choice: 0, tokens } => {
                let mut body = self.build_document(head, Vec::new());
                body["prompt_logprobs"] = build_prompt_logprobs(&self.chat, tokens);
                format_frame(None, &body)
            }
            // All choices have the same prompt.
            Event::Prompt { .. } => String::new(),
            Event::Delta { tokens, .. } if tokens.is_empty() => String::new(),
            Event::Delta { choice, tokens, .. } => {
                let value = self.build_choice(*choice, tokens, self.reported[*choice].0);
                self.reported[*choice].0 += tokens.len();
                self.reported[*choice].1 = tokens.last().map(|token| token.id);
                format_frame(None, &self.build_document(head, vec![value]))
            }
            Event::Ended { choice, end } => {
                self.ended.push((end.tokens, end.reasoning_tokens));
                let (sent, last) = self.reported[*choice];
                let mut value = self.build_choice(*choice, &[], sent);
                self.set_finish_reason(&mut value, end, last);
                format_frame(None, &self.build_document(head, vec![value]))
            }
            Event::Failed(found) => format_frame(None, &openai::error_body(found)),
            Event::Done => {
                let mut text = String::new();
                if self.include_usage {
                    let mut body = self.build_document(head, Vec::new());
                    body["usage"] = build_usage(head.prompt.len(), &self.ended);
                    text += &format_frame(None, &body);
                }
                text + "data: [DONE]\n\n"
            }
        }
    }
}

#[cfg(test)]
#[path = "vllm_tests.rs"]
mod tests;
