//! The endpoint `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use levade_text::{Chat, CompletionDelta, Message, ToolCall, ToolSpec};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::write::{
    TokenReport, build_usage, error_body, sum_usage, to_finish_reason, to_stop_reason,
    weight_version_spans,
};
use super::{SamplingFields, check_fields, structured};
use crate::call::Call;
use crate::gateway::Gateway;
use crate::http::{
    ApiDialect, CollectedCompletion, IncomingRequest, format_frame, parse_json_body, write_response,
};
use crate::parameters;
use crate::parts::{ContentParser, extract_reasoning, is_foreign_part};
use crate::tool_types;
use levade_call::ApiError;
use levade_call::Backend;
use levade_call::Request as CallRequest;
use levade_call::{Event, Head, Token};
use levade_call::{Input, ToolChoice};

/// Body of a request to `/v1/chat/completions`.
#[derive(Deserialize)]
struct ChatCompletionRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    return_weight_versions: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
pub(super) struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// Handles `POST /v1/chat/completions`.
pub(crate) async fn create_chat_completion(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    match prepare_call(&gateway, incoming) {
        Err(found) => crate::http::error_response(&found, &error_body(&found)),
        Ok((caller, call, writer, streams)) => {
            let started = gateway.call(&caller, call).await;
            write_response(started, writer, streams, ping).await
        }
    }
}

fn prepare_call(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<(crate::gateway::Caller, Call, ChatCompletionWriter, bool), ApiError> {
    let (caller, body) = incoming.into_call()?;
    let mut request: ChatCompletionRequest = parse_json_body(&body)?;
    let messages = parse_messages(gateway, std::mem::take(&mut request.messages))?;
    let requested: SamplingFields = take_sampling_fields(&mut request.rest)?;
    let constraint = structured::take_constraint(gateway, None, &mut request.rest)?;
    check_fields(gateway, "chat", &request.rest)?;
    let mut sampling = requested.to_sampling_options()?;
    let logprobs = request.logprobs.unwrap_or(false);
    if let (false, Some(top @ 1..)) = (logprobs, request.top_logprobs) {
        let message =
            format!("top_logprobs is {top}, but logprobs is not true; set logprobs to true");
        return Err(ApiError::field("top_logprobs", message));
    }
    sampling.logprobs = logprobs.then(|| request.top_logprobs.unwrap_or(0));
    let listed_tools = request.tools.as_deref().unwrap_or_default();
    let mut tools = parse_tools(gateway, "chat", listed_tools)?;
    let custom =
        listed_tools.iter().filter(|tool| tool["type"] == "custom").filter_map(tool_name).collect();
    let tool_choice =
        match request.tool_choice.as_ref().filter(|choice| choice["type"] == ALLOWED_TOOLS) {
            Some(choice) => {
                let mut choice = choice[ALLOWED_TOOLS].clone();
                if let Some(listed) = choice["tools"].as_array_mut() {
                    listed.retain(|tool| !tool_types::is_hosted_tool(tool));
                }
                retain_allowed_tools(&mut tools, &choice, tool_name)?
            }
            None => parse_tool_choice(request.tool_choice.as_ref())?,
        };
    let requested = CallRequest {
        tools,
        strict: request.tools.iter().flatten().filter_map(strict_tool_name).collect(),
        tool_choice,
        parallel_calls: request.parallel_tool_calls.unwrap_or(true),
        constraint,
        n: requested.num_completions()?,
        sampling,
        ..CallRequest::new(Input::Messages(messages))
    };
    let call = Call { model: request.model, request: requested };
    let tokens = TokenReport {
        logprobs,
        ids: request.return_token_ids.unwrap_or(false),
        as_ids: request.return_tokens_as_token_ids.unwrap_or(false),
        versions: request.return_weight_versions.unwrap_or(false),
    };
    let include_usage =
        request.stream_options.and_then(|options| options.include_usage).unwrap_or(false);
    let variables = request.chat_template_kwargs.unwrap_or_default();
    let model = gateway.find_party(&caller, &call)?;
    // External chat APIs have neither template variables nor token ids.
    let chat = match &model.backend {
        Backend::Messages(_) if variables.is_empty() && !tokens.reports_any() => None,
        _ => Some(Arc::clone(model.tokens()?.format.chat())),
    };
    if let Some(chat) = &chat {
        check_variables(chat, &variables)?;
    }
    let calls = vec![0; call.request.n];
    let reported = vec![0; call.request.n];
    let ended = Vec::new();
    let writer = ChatCompletionWriter {
        chat,
        tokens,
        include_usage,
        custom,
        prompt_tokens: 0,
        calls,
        reported,
        ended,
    };
    Ok((caller, call, writer, request.stream.unwrap_or(false)))
}

/// Removes the sampling fields (such as `temperature`) from the request body `rest`, and parses
/// them.
pub(crate) fn take_sampling_fields(
    rest: &mut Map<String, Value>,
) -> Result<SamplingFields, ApiError> {
    const FIELDS: [&str; 17] = [
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "seed",
        "n",
    ];
    let found: Map<String, Value> =
        FIELDS.iter().filter_map(|name| Some(((*name).to_owned(), rest.remove(*name)?))).collect();
    serde_path_to_error::deserialize(Value::Object(found)).map_err(|error| {
        let path = error.path().to_string();
        ApiError::field(&path.clone(), format!("{path}: {}", error.into_inner()))
    })
}

/// Parses the messages of a chat completion request. Content parts, reasoning and tool calls in the
/// formats of other APIs are parsed as in those APIs.
pub(crate) fn parse_messages(
    gateway: &Gateway,
    values: Vec<Value>,
) -> Result<Vec<Message>, ApiError> {
    let parts = ContentParser { gateway, api: "chat" };
    let mut read = Vec::with_capacity(values.len());
    for (at, mut value) in values.into_iter().enumerate() {
        let field_path = format!("messages[{at}].content");
        let mut found = None;
        if let Value::Object(fields) = &mut value {
            for name in ["reasoning_content", "reasoning"] {
                if let Some(reasoning) =
                    fields.get_mut(name).filter(|reasoning| reasoning.is_array())
                {
                    let text = extract_reasoning(reasoning);
                    *reasoning = text.into();
                }
            }
            for call in
                fields.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten()
            {
                if let (true, Some(input)) =
                    (call["type"] == "custom", call["custom"]["input"].as_str())
                {
                    let arguments = Value::from(tool_types::custom_arguments(input));
                    call["function"] =
                        json!({ "name": call["custom"]["name"], "arguments": arguments });
                }
            }
            let content = fields.get("content").filter(|content| content.is_array());
            let list = content.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            match (fields.get("role").and_then(Value::as_str), content) {
                (Some("user"), Some(content)) if list.iter().any(is_foreign_part) => {
                    parts.parse_user(content, &field_path, &mut read)?;
                    continue;
                }
                (Some("assistant"), Some(content)) if list.iter().any(is_foreign_part) => {
                    let message = parts.parse_assistant(content, &field_path)?;
                    fields.insert("content".into(), message.content.as_str().into());
                    found = Some(message);
                }
                (Some("tool" | "function"), Some(content))
                    if list.iter().any(|part| part["type"] != "text") =>
                {
                    let text = parts.parse_tool_result(content, &field_path)?;
                    fields.insert("content".into(), text.into());
                }
                _ => {}
            }
        }
        let mut message: Message = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            let path = if path == "." {
                format!("messages[{at}]")
            } else {
                format!("messages[{at}].{path}")
            };
            ApiError::field(&path, format!("{path}: {}", error.inner()))
        })?;
        if let Some(found) = found {
            message.reasoning_content = message.reasoning_content.or(found.reasoning_content);
            for call in found.tool_calls {
                // Clients that send calls in both places send equal ids.
                if message.tool_calls.iter().all(|known| known.id != call.id) {
                    message.tool_calls.push(call);
                }
            }
        }
        read.push(message);
    }
    Ok(read)
}

/// Parses the tools of a request in OpenAI's format. Tools that the provider hosts are omitted and
/// counted.
pub(crate) fn parse_tools(
    gateway: &Gateway,
    api: &str,
    values: &[Value],
) -> Result<Vec<ToolSpec>, ApiError> {
    values
        .iter()
        .filter(|tool| {
            let is_hosted = tool_types::is_hosted_tool(tool);
            if is_hosted {
                gateway.count_unknown_field(
                    api,
                    &format!("tools[type={}]", tool["type"].as_str().unwrap_or_default()),
                );
            }
            !is_hosted
        })
        .map(parse_tool)
        .collect()
}

/// Returns the name of a function or a custom tool in a tool definition, a tool choice or a tool
/// call.
fn tool_name(tool: &Value) -> Option<String> {
    let kind = tool["type"].as_str().unwrap_or("function");
    tool[kind]["name"].as_str().map(str::to_owned)
}

/// Parses the definition of one tool in OpenAI's format.
fn parse_tool(value: &Value) -> Result<ToolSpec, ApiError> {
    match value["type"].as_str().unwrap_or("function") {
        "function" => {}
        "custom" => {
            let name = tool_name(value).filter(|name| !name.is_empty());
            let name =
                name.ok_or_else(|| tool_error(format!("a tool has no custom.name: {value}")))?;
            return Ok(tool_types::custom_tool_spec(name, &value["custom"]));
        }
        _ => return Err(tool_types::unknown_tool_error(value, "tools")),
    }
    let function = &value["function"];
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| tool_error(format!("a tool has no function.name: {value}")))?;
    let parameters = parameters::parameters_to_schema(&function["parameters"]);
    let parameters = parameters.map_err(|why| tool_error(format!("tool {name:?}: {why}")))?;
    let description = function["description"].as_str().unwrap_or_default().to_owned();
    Ok(ToolSpec { name: name.to_owned(), description, parameters })
}

fn tool_error(why: String) -> ApiError {
    ApiError::field("tools", why)
}

/// Returns the name of a tool whose definition sets `strict`, or `None` if `strict` is not true.
fn strict_tool_name(value: &Value) -> Option<String> {
    let function = &value["function"];
    let is_strict = function["strict"] == true || value["strict"] == true;
    function["name"].as_str().filter(|_| is_strict).map(str::to_owned)
}

/// Type of a tool choice that permits only some of the tools.
pub(crate) const ALLOWED_TOOLS: &str = "allowed_tools";

/// Removes from `tools` the tools that a tool choice of type `allowed_tools` does not list, because
/// a model cannot call a tool that it does not see. `name` returns the name of an entry in the
/// choice's list.
///
/// # Errors
/// Returns an error if the list is empty, if a listed tool is not among `tools`, or if the mode is
/// unknown.
pub(crate) fn retain_allowed_tools(
    tools: &mut Vec<ToolSpec>,
    choice: &Value,
    name: impl Fn(&Value) -> Option<String>,
) -> Result<ToolChoice, ApiError> {
    let listed = choice["tools"].as_array().filter(|listed| !listed.is_empty());
    let listed = listed.ok_or_else(|| {
        tool_choice_error(format!(
            "the tools of tool_choice are {}, but must be a list of tools with at least one entry",
            choice["tools"]
        ))
    })?;
    let mut names = Vec::with_capacity(listed.len());
    for tool in listed {
        let name = name(tool).filter(|name| tools.iter().any(|known| known.name == *name));
        names.push(name.ok_or_else(|| {
            tool_choice_error(format!("tool_choice allows {tool}, which is not among the tools"))
        })?);
    }
    tools.retain(|tool| names.contains(&tool.name));
    match choice["mode"].as_str() {
        Some("auto") => Ok(ToolChoice::Auto),
        Some("required") => Ok(ToolChoice::Required),
        _ => Err(tool_choice_error(format!(
            "the mode of tool_choice is {}, but must be auto or required",
            choice["mode"]
        ))),
    }
}

fn tool_choice_error(why: String) -> ApiError {
    ApiError::field("tool_choice", why)
}

fn parse_tool_choice(value: Option<&Value>) -> Result<ToolChoice, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            other => Err(ApiError::field(
                "tool_choice",
                format!(
                    "tool_choice is {other:?}, but must be auto, none, required, or an object \
                     that names a function"
                ),
            )),
        },
        Some(value) => match tool_name(value) {
            Some(name) => Ok(ToolChoice::Named(name)),
            None => Err(ApiError::field(
                "tool_choice",
                format!("tool_choice is {value}, which names no function"),
            )),
        },
    }
}

/// Checks that the template variables of a request (`chat_template_kwargs`) equal those with which
/// the model is served. Variables that the template does not contain are ignored.
fn check_variables(chat: &Chat, variables: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, value) in variables {
        let served = chat.variables().get(name);
        let is_fixed = served.is_some() || chat.template().source().contains(name.as_str());
        if served != Some(value) && is_fixed {
            let served =
                served.map_or("the template's default".to_owned(), |served| format!("{served}"));
            let message = format!(
                "chat_template_kwargs has {name} = {value}, but this model is served with \
                 {served}; leave it out, or set it where the model is served"
            );
            return Err(ApiError::field("chat_template_kwargs", message));
        }
    }
    Ok(())
}

/// Writer of complete and streamed responses in OpenAI's format of chat completions.
struct ChatCompletionWriter {
    /// Chat format of the model. `None` for an external chat API.
    chat: Option<Arc<Chat>>,
    tokens: TokenReport,
    include_usage: bool,
    /// Names of the request's custom tools, whose calls have a text instead of JSON arguments.
    custom: Vec<String>,
    prompt_tokens: usize,
    /// Number of tool calls of each choice that were written so far, by the choice's index.
    calls: Vec<usize>,
    /// Number of tokens of each choice that were written so far, by the choice's index.
    reported: Vec<usize>,
    /// Number of tokens, and of reasoning tokens, of each completion that has ended.
    ended: Vec<(usize, usize)>,
}

impl ChatCompletionWriter {
    fn build_chunk(&self, head: &Head, choice: usize, delta: Value) -> Value {
        json!({
            "id": format!("chatcmpl-{}", head.id),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": [{ "index": choice, "delta": delta, "logprobs": null, "finish_reason": null }],
        })
    }

    /// Returns a tool call in OpenAI's format, which depends on whether the tool is a custom tool.
    fn to_tool_call_value(&self, call: &ToolCall) -> Value {
        let input = tool_types::custom_input(&call.arguments);
        match input.filter(|_| self.custom.contains(&call.name)) {
            Some(input) => {
                json!({ "id": call.id, "type": "custom", "custom": { "name": call.name, "input": input } })
            }
            None => serde_json::to_value(call).unwrap_or_default(),
        }
    }

    /// Adds token data (log-probabilities, ids, weight versions) to the JSON of a choice. `tokens`
    /// follow the tokens of the choice `index` that were reported before.
    fn add_tokens(&mut self, index: usize, choice: &mut Value, tokens: &[Token]) {
        if let Some(chat) = self.chat.as_ref().filter(|_| self.tokens.logprobs) {
            choice["logprobs"] = self.tokens.logprob_content(chat, tokens);
        }
        if self.tokens.ids {
            choice["token_ids"] = tokens.iter().map(|token| token.id).collect::<Vec<_>>().into();
        }
        if self.tokens.versions {
            choice["weight_versions"] = weight_version_spans(tokens, self.reported[index]);
        }
        self.reported[index] += tokens.len();
    }
}

impl ApiDialect for ChatCompletionWriter {
    fn error_body(&self, found: &ApiError) -> Value {
        error_body(found)
    }

    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value {
        let choices: Vec<Value> = completions
            .iter()
            .enumerate()
            .map(|(index, CollectedCompletion { tokens, end, .. })| {
                let content_text = end.message.content.as_str();
                let content = if content_text.is_empty() && end.calls {
                    Value::Null
                } else {
                    content_text.into()
                };
                let mut message =
                    json!({ "role": "assistant", "content": content, "refusal": null });
                if let Some(reasoning) = &end.message.reasoning_content {
                    message["reasoning_content"] = reasoning.as_str().into();
                    message["reasoning"] = reasoning.as_str().into();
                }
                if end.calls {
                    message["tool_calls"] = end
                        .message
                        .tool_calls
                        .iter()
                        .map(|call| self.to_tool_call_value(call))
                        .collect::<Vec<_>>()
                        .into();
                }
                let mut choice = json!({
                    "index": index,
                    "message": message,
                    "logprobs": null,
                    "finish_reason": to_finish_reason(end),
                    "stop_reason": to_stop_reason(end),
                });
                self.add_tokens(index, &mut choice, tokens);
                choice
            })
            .collect();
        let mut body = json!({
            "id": format!("chatcmpl-{}", head.id),
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "usage": sum_usage(&completions),
        });
        if self.tokens.ids {
            body["prompt_token_ids"] = head.prompt.as_slice().into();
        }
        body
    }

    fn start_frames(&mut self, head: &Head) -> String {
        let frames = (0..head.n).map(|choice| {
            let mut chunk =
                self.build_chunk(head, choice, json!({ "role": "assistant", "content": "" }));
            if self.tokens.ids && choice == 0 {
                chunk["prompt_token_ids"] = head.prompt.as_slice().into();
            }
            format_frame(None, &chunk)
        });
        frames.collect()
    }

    fn event_frames(&mut self, head: &Head, event: &Event) -> String {
        match event {
            Event::Delta { choice, deltas, tokens } => {
                let mut content = String::new();
                let mut reasoning = String::new();
                let mut calls = Vec::new();
                for completion_delta in deltas {
                    match completion_delta {
                        CompletionDelta::Speech(text) => content += text,
                        CompletionDelta::Reasoning(text) => reasoning += text,
                        CompletionDelta::Call(Ok(found)) => {
                            let mut value = self.to_tool_call_value(found);
                            value["index"] = self.calls[*choice].into();
                            self.calls[*choice] += 1;
                            calls.push(value);
                        }
                        CompletionDelta::Call(Err(_)) | CompletionDelta::Aside(_) => {}
                    }
                }
                let has_tokens = self.tokens.reports_any() && !tokens.is_empty();
                let mut delta = Map::new();
                if !reasoning.is_empty() {
                    delta.insert("reasoning_content".into(), reasoning.as_str().into());
                    delta.insert("reasoning".into(), reasoning.into());
                }
                if !content.is_empty() {
                    delta.insert("content".into(), content.into());
                }
                if !calls.is_empty() {
                    delta.insert("tool_calls".into(), calls.into());
                }
                if delta.is_empty() && !has_tokens {
                    return String::new();
                }
                let mut chunk = self.build_chunk(head, *choice, delta.into());
                if has_tokens {
                    self.add_tokens(*choice, &mut chunk["choices"][0], tokens);
                }
                format_frame(None, &chunk)
            }
            Event::Prompt { .. } => String::new(),
            Event::Ended { choice, end } => {
                self.prompt_tokens = end.prompt_tokens;
                self.ended.push((end.tokens, end.reasoning_tokens));
                let mut chunk = self.build_chunk(head, *choice, json!({}));
                chunk["choices"][0]["finish_reason"] = to_finish_reason(end).into();
                chunk["choices"][0]["stop_reason"] = to_stop_reason(end);
                format_frame(None, &chunk)
            }
            Event::Failed(found) => format_frame(None, &error_body(found)),
            Event::Done => {
                let mut text = String::new();
                if self.include_usage {
                    let mut chunk = self.build_chunk(head, 0, json!({}));
                    chunk["choices"] = json!([]);
                    chunk["usage"] = build_usage(self.prompt_tokens, &self.ended);
                    text += &format_frame(None, &chunk);
                }
                text + "data: [DONE]\n\n"
            }
        }
    }
}
