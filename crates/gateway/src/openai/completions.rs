//! The endpoint `/v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use levade_text::{Chat, CompletionDelta};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{StreamOptions, take_sampling_fields};
use super::write::{
    TokenReport, build_usage, clamp_logprob, error_body, to_finish_reason, to_stop_reason,
    weight_version_spans,
};
use super::{SamplingFields, check_fields, structured};
use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{
    ApiDialect, CollectedCompletion, EventMerger, IncomingRequest, error_response, format_frame,
    gather_all, json_response, merge_all, parse_json_body, write_response,
};
use levade_call::ApiError;
use levade_call::Input;
use levade_call::Request as CallRequest;
use levade_call::{Event, Head, Token};

/// Body of a request to `/v1/completions`.
#[derive(Deserialize)]
struct TextCompletionRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    prompt: CompletionPrompts,
    echo: Option<bool>,
    logprobs: Option<usize>,
    best_of: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    return_weight_versions: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Prompts of a completion request: one prompt or several, as text or token ids.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "must be a string, or a list of strings, of token ids, or of lists of token ids"
)]
enum CompletionPrompts {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

impl CompletionPrompts {
    fn into_inputs(self) -> Vec<Input> {
        match self {
            CompletionPrompts::Text(text) => vec![Input::Text(text)],
            CompletionPrompts::Ids(ids) => vec![Input::Tokens(ids)],
            CompletionPrompts::Texts(texts) => texts.into_iter().map(Input::Text).collect(),
            CompletionPrompts::Lists(lists) => lists.into_iter().map(Input::Tokens).collect(),
        }
    }
}

/// Handles `POST /v1/completions`.
pub(crate) async fn create_completion(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    let PreparedCalls { caller, mut calls, writer, streams } =
        match prepare_calls(&gateway, incoming) {
            Ok(prepared) => prepared,
            Err(found) => return error_response(&found, &error_body(&found)),
        };
    if calls.len() == 1
        && let Some(call) = calls.pop()
    {
        let started = gateway.call(&caller, call).await;
        return write_response(started, writer, streams, ping).await;
    }
    if streams {
        return match merge_all(&gateway, &caller, calls).await {
            Ok(EventMerger { reader, prompts }) => {
                write_response(
                    Ok(reader),
                    TextCompletionWriter { prompts, ..writer },
                    streams,
                    ping,
                )
                .await
            }
            Err(found) => error_response(&found, &error_body(&found)),
        };
    }
    match gather_all(&gateway, &caller, calls).await {
        Ok(found) => json_response(StatusCode::OK, &writer.build_document(&found)),
        Err(found) => error_response(&found, &error_body(&found)),
    }
}

/// Model calls of a validated completion request, with the writer of their responses.
struct PreparedCalls {
    caller: Caller,
    calls: Vec<Call>,
    writer: TextCompletionWriter,
    streams: bool,
}

fn prepare_calls(gateway: &Gateway, incoming: IncomingRequest) -> Result<PreparedCalls, ApiError> {
    let (caller, body) = incoming.into_call()?;
    let mut request: TextCompletionRequest = parse_json_body(&body)?;
    let requested: SamplingFields = take_sampling_fields(&mut request.rest)?;
    let constraint = structured::take_constraint(gateway, None, &mut request.rest)?;
    check_fields(gateway, "completions", &request.rest)?;
    let n = requested.num_completions()?;
    if request.best_of.is_some_and(|best| best != n as i64) {
        return Err(ApiError::field(
            "best_of",
            "best_of is not supported; request n completions and select one",
        ));
    }
    let echo = request.echo.unwrap_or(false);
    let mut sampling = requested.to_sampling_options()?;
    sampling.logprobs = request.logprobs;
    sampling.prompt_logprobs = request.logprobs.filter(|_| echo);
    // OpenAI's default.
    sampling.max_tokens = sampling.max_tokens.or(Some(16));
    let inputs = request.prompt.into_inputs();
    if inputs.is_empty() {
        return Err(ApiError::field(
            "prompt",
            "prompt is an empty list, but must have at least one entry",
        ));
    }
    let streams = request.stream.unwrap_or(false);
    let calls: Vec<Call> = inputs
        .into_iter()
        .map(|input| Call {
            model: request.model.clone(),
            request: CallRequest {
                n,
                sampling: sampling.clone(),
                constraint: constraint.clone(),
                ..CallRequest::new(input)
            },
        })
        .collect();
    let chat = gateway.find_chat(&caller, &calls[0])?;
    let tokens = TokenReport {
        logprobs: request.logprobs.is_some(),
        ids: request.return_token_ids.unwrap_or(false),
        as_ids: request.return_tokens_as_token_ids.unwrap_or(false),
        versions: request.return_weight_versions.unwrap_or(false),
    };
    let include_usage =
        request.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
    let top = request.logprobs.unwrap_or(0);
    let completions = n * calls.len();
    let offsets = vec![0; completions];
    let reported = vec![0; completions];
    let prompts = Vec::new();
    let writer = TextCompletionWriter {
        chat,
        tokens,
        top,
        echo,
        prompts,
        include_usage,
        offsets,
        reported,
        ended: Vec::new(),
    };
    Ok(PreparedCalls { caller, calls, writer, streams })
}

/// Writer of complete and streamed responses in OpenAI's format of text completions.
struct TextCompletionWriter {
    chat: Arc<Chat>,
    tokens: TokenReport,
    /// Maximum number of alternatives per token in the log-probabilities of the response.
    top: usize,
    echo: bool,
    /// Prompts, as token ids, of several calls that are streamed as one call. All prompts have the
    /// same number of choices. Empty if there is a single call.
    prompts: Vec<Vec<u32>>,
    include_usage: bool,
    /// Length of the text of each choice so far, in characters.
    offsets: Vec<usize>,
    /// Number of tokens of each choice that were written so far, by the choice's index.
    reported: Vec<usize>,
    /// Number of tokens, and of reasoning tokens, of each completion that has ended.
    ended: Vec<(usize, usize)>,
}

/// Log-probabilities in OpenAI's format of text completions: four parallel lists with one entry per
/// token.
#[derive(Default)]
struct LogprobLists {
    tokens: Vec<Value>,
    logprobs: Vec<Value>,
    top: Vec<Value>,
    offsets: Vec<Value>,
}

impl TextCompletionWriter {
    /// Appends tokens to the log-probability lists. `offset` is the position, in characters, at
    /// which the text of the first token starts. Returns the position at which the text of the last
    /// token ends.
    fn append_logprobs(
        &self,
        lists: &mut LogprobLists,
        tokens: &[Token],
        mut offset: usize,
    ) -> usize {
        for token in tokens {
            let text = self.tokens.token_text(&self.chat, token.id);
            lists.offsets.push(offset.into());
            offset += self.chat.tokenizer().token_text(token.id).chars().count();
            lists.tokens.push(text.clone().into());
            if token.logprob.is_nan() {
                // The first token of a prompt has no log-probability.
                lists.logprobs.push(Value::Null);
                lists.top.push(Value::Null);
                continue;
            }
            lists.logprobs.push(clamp_logprob(token.logprob).into());
            let mut top: Map<String, Value> = Map::new();
            for (id, logprob) in token.top.iter().take(self.top) {
                top.insert(self.tokens.token_text(&self.chat, *id), clamp_logprob(*logprob).into());
            }
            // OpenAI's lists always contain the sampled token.
            top.entry(text).or_insert_with(|| clamp_logprob(token.logprob).into());
            lists.top.push(top.into());
        }
        offset
    }

    fn build_choice(&self, index: usize, text: &str, lists: Option<LogprobLists>) -> Value {
        let logprobs = lists.map_or(Value::Null, |lists| {
            json!({
                "tokens": lists.tokens,
                "token_logprobs": lists.logprobs,
                "top_logprobs": lists.top,
                "text_offset": lists.offsets,
            })
        });
        json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": null })
    }

    fn build_document(&self, calls: &[(Head, Vec<CollectedCompletion>)]) -> Value {
        let mut choices = Vec::new();
        let mut prompt_tokens = 0;
        let mut ended = Vec::new();
        for (head, completions) in calls {
            prompt_tokens += head.prompt.len();
            for CollectedCompletion { prompt, tokens, end, .. } in completions {
                let mut text = if self.echo {
                    self.chat.tokenizer().decode_with_special(&head.prompt)
                } else {
                    String::new()
                };
                let mut lists = LogprobLists::default();
                let offset =
                    if self.echo { self.append_logprobs(&mut lists, prompt, 0) } else { 0 };
                self.append_logprobs(&mut lists, tokens, offset);
                text += &end.text;
                let mut choice =
                    self.build_choice(choices.len(), &text, self.tokens.logprobs.then_some(lists));
                choice["finish_reason"] = to_finish_reason(end).into();
                choice["stop_reason"] = to_stop_reason(end);
                if self.tokens.ids {
                    choice["prompt_token_ids"] = head.prompt.as_slice().into();
                    choice["token_ids"] =
                        tokens.iter().map(|token| token.id).collect::<Vec<_>>().into();
                }
                if self.tokens.versions {
                    choice["weight_versions"] = weight_version_spans(tokens, 0);
                }
                choices.push(choice);
                ended.push((end.tokens, end.reasoning_tokens));
            }
        }
        let Some((head, _)) = calls.first() else { return Value::Null };
        json!({
            "id": format!("cmpl-{}", head.id),
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": build_usage(prompt_tokens, &ended),
        })
    }

    fn build_chunk(&self, head: &Head, choice: Option<Value>) -> Value {
        json!({
            "id": format!("cmpl-{}", head.id),
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choice.into_iter().collect::<Vec<_>>(),
        })
    }
}

impl ApiDialect for TextCompletionWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        error_body(found)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        self.build_document(&[(head.clone(), completions)])
    }

    fn start_frames(&mut self, head: &Head) -> String {
        if !self.echo {
            return String::new();
        }
        let prompts = match &self.prompts[..] {
            [] => vec![head.prompt.clone()],
            several => several.to_vec(),
        };
        let completions = head.n / prompts.len();
        let mut frames = String::new();
        for (at, prompt) in prompts.iter().enumerate() {
            let text = self.chat.tokenizer().decode_with_special(prompt);
            for index in at * completions..(at + 1) * completions {
                self.offsets[index] = text.chars().count();
                frames += &format_frame(
                    None,
                    &self.build_chunk(head, Some(self.build_choice(index, &text, None))),
                );
            }
        }
        frames
    }

    fn event_frames(&mut self, head: &Head, event: &Event) -> String {
        match event {
            Event::Prompt { choice, tokens } => {
                if !self.echo {
                    return String::new();
                }
                let mut lists = LogprobLists::default();
                self.append_logprobs(&mut lists, tokens, 0);
                format_frame(
                    None,
                    &self.build_chunk(head, Some(self.build_choice(*choice, "", Some(lists)))),
                )
            }
            Event::Delta { choice, deltas, tokens } => {
                let texts = deltas.iter().map(|delta| match delta {
                    CompletionDelta::Speech(text) => text.as_str(),
                    _ => "",
                });
                let text: String = texts.collect();
                let has_tokens = self.tokens.reports_any() && !tokens.is_empty();
                if text.is_empty() && !has_tokens {
                    return String::new();
                }
                let lists = self.tokens.logprobs.then(|| {
                    let mut lists = LogprobLists::default();
                    self.offsets[*choice] =
                        self.append_logprobs(&mut lists, tokens, self.offsets[*choice]);
                    lists
                });
                let mut value = self.build_choice(*choice, &text, lists);
                if self.tokens.ids {
                    value["token_ids"] =
                        tokens.iter().map(|token| token.id).collect::<Vec<_>>().into();
                }
                if self.tokens.versions {
                    value["weight_versions"] = weight_version_spans(tokens, self.reported[*choice]);
                }
                self.reported[*choice] += tokens.len();
                format_frame(None, &self.build_chunk(head, Some(value)))
            }
            Event::Ended { choice, end } => {
                self.ended.push((end.tokens, end.reasoning_tokens));
                let mut value = self.build_choice(*choice, "", None);
                value["finish_reason"] = to_finish_reason(end).into();
                value["stop_reason"] = to_stop_reason(end);
                format_frame(None, &self.build_chunk(head, Some(value)))
            }
            Event::Failed(found) => format_frame(None, &error_body(found)),
            Event::Done => {
                let mut text = String::new();
                if self.include_usage {
                    let mut chunk = self.build_chunk(head, None);
                    let prompt =
                        head.prompt.len() + self.prompts.iter().map(Vec::len).sum::<usize>();
                    chunk["usage"] = build_usage(prompt, &self.ended);
                    text += &format_frame(None, &chunk);
                }
                text + "data: [DONE]\n\n"
            }
        }
    }
}
