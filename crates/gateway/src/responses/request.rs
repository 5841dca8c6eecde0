//! Parser of requests for responses, which become calls.

use std::sync::Arc;

use levade_text::{Chat, Message};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::caller_memory::CallerMemory;
use super::items::{self, API};
use super::tools::RequestTools;
use crate::call::Call;
use crate::gateway::Gateway;
use crate::openai;
use levade_call::ApiError;
use levade_call::Request as CallRequest;
use levade_call::{Constraint, Input, SamplingOptions};

/// Body of a request to `/v1/responses`.
#[derive(Deserialize)]
struct ResponsesRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    input: Option<Value>,
    instructions: Option<Value>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    include: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Value>,
    reasoning: Option<Value>,
    max_output_tokens: Option<i64>,
    metadata: Option<Value>,
    truncation: Option<String>,
    top_logprobs: Option<i64>,
    stream: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A request to `/v1/responses` after parsing.
pub(super) struct ParsedRequest {
    pub call: Call,
    /// Whether the client requests a streamed response.
    pub streams: bool,
    pub received: ReceivedItems,
}

/// Data of a request to the Responses API that its response repeats or depends on.
pub(super) struct ReceivedItems {
    pub tools: RequestTools,
    /// Messages that the request adds to the conversation, without instructions.
    pub input: Vec<Message>,
    /// Id of the response that the request continues. `None` for the start of a conversation.
    pub previous: Option<String>,
    /// Whether the response is stored, so that later requests can continue it.
    pub store: bool,
    /// Whether the response repeats the reasoning as summaries.
    pub summary: bool,
    /// Whether the response's reasoning items contain `encrypted_content`, so that a client can
    /// send the reasoning back.
    pub encrypted: bool,
    /// Input items of the request. Plain texts have been converted to message items.
    pub items: Vec<Value>,
    /// Chat format of the model. Present only if the response contains log-probabilities.
    pub chat: Option<Arc<Chat>>,
    /// Request fields that the response repeats, with their values.
    pub echo: Map<String, Value>,
}

/// Parses the body of a request to `/v1/responses`.
///
/// # Errors
/// Returns an error that names the first invalid or unsupported field, its value and a remedy.
pub(super) fn parse_request(
    gateway: &Gateway,
    memory: &CallerMemory,
    body: &[u8],
) -> Result<ParsedRequest, ApiError> {
    let mut request: ResponsesRequest = crate::http::parse_json_body(body)?;
    check_fields(gateway, &mut request.rest)?;
    let own = request.text.as_ref().map(parse_format).transpose()?.flatten();
    let constraint = openai::structured::take_constraint(gateway, own, &mut request.rest)?;
    let requested = openai::take_sampling_fields(&mut request.rest)?;
    if requested.num_completions()? != 1 {
        return Err(ApiError::field(
            "n",
            "n is not supported, because a response has one completion; leave it out",
        ));
    }
    openai::check_fields(gateway, API, &request.rest)?;
    let include = request.include.clone().unwrap_or_default();
    let logprobs = validate_logprobs(includes_logprobs(gateway, &include), request.top_logprobs)?;

    let tools = RequestTools::parse_tools(gateway, request.tools.as_deref().unwrap_or_default())?;
    let input = match request.input.as_ref().filter(|input| !input.is_null()) {
        Some(input) => items::parse_input(gateway, input, |id| memory.find_item(id))?,
        None => Vec::new(),
    };
    let mut messages: Vec<Message> =
        match request.instructions.as_ref().filter(|present| !present.is_null()) {
            Some(Value::String(text)) => vec![Message::system(text.as_str())],
            Some(items) => items::parse_input(gateway, items, |id| memory.find_item(id))?,
            None => Vec::new(),
        };
    if let Some(previous) = &request.previous_response_id {
        messages.extend(
            memory.read_history(previous).map_err(|missing| not_found_error(previous, &missing))?,
        );
    }
    messages.extend(input.iter().cloned());
    if messages.is_empty() {
        return Err(ApiError::field("input", "input is missing; send a string or a list of items"));
    }
    let limit = request.max_output_tokens.map(|limit| match usize::try_from(limit) {
        Ok(limit) if limit > 0 => Ok(limit),
        _ => {
            let message = format!("max_output_tokens = {limit}, but it must be at least 1");
            Err(ApiError::field("max_output_tokens", message))
        }
    });
    let sampling = SamplingOptions {
        max_tokens: limit.transpose()?,
        logprobs,
        ..requested.to_sampling_options()?
    };
    let mut specs = tools.specs.clone();
    let tool_choice = tools.parse_tool_choice(request.tool_choice.as_ref(), &mut specs)?;
    let requested = CallRequest {
        tools: specs,
        strict: tools.strict.clone(),
        tool_choice,
        parallel_calls: request.parallel_tool_calls.unwrap_or(true),
        constraint,
        sampling,
        ..CallRequest::new(Input::Messages(messages))
    };
    let call = Call { model: request.model.clone(), request: requested };
    let summary = request.reasoning.as_ref().is_some_and(|requested| {
        let wanted = |field: &str| requested[field].as_str().is_some_and(|detail| detail != "none");
        wanted("summary") || wanted("generate_summary")
    });
    let received = ReceivedItems {
        echo: echo_fields(&request, &call),
        tools,
        input,
        items: normalize_input_items(request.input.as_ref()),
        chat: None,
        store: request.store.unwrap_or(true),
        summary,
        encrypted: include.iter().any(|what| what == "reasoning.encrypted_content"),
        previous: request.previous_response_id,
    };
    Ok(ParsedRequest { call, streams: request.stream.unwrap_or(false), received })
}

fn not_found_error(requested: &str, missing: &str) -> ApiError {
    let why = if requested == missing {
        String::new()
    } else {
        format!(" It continues '{missing}', which is no longer stored.")
    };
    let message = format!(
        "Previous response with id '{requested}' not found.{why} Responses are kept for a \
         limited time, and only if `store` is not false; send the complete history as input \
         instead."
    );
    ApiError::field("previous_response_id", message)
}

/// Request fields that are ignored.
const IGNORED_FIELDS: [&str; 3] = ["client_metadata", "max_tool_calls", "stream_options"];

/// Unsupported request fields, each with the values that change nothing and are therefore accepted.
const UNSUPPORTED_FIELDS: [(&str, &[Value]); 3] =
    [("background", &[Value::Bool(false)]), ("conversation", &[]), ("prompt", &[])];

/// Removes the fields of the Responses API that have not been parsed from `rest`. Rejects
/// unsupported fields.
fn check_fields(gateway: &Gateway, rest: &mut Map<String, Value>) -> Result<(), ApiError> {
    for field in IGNORED_FIELDS {
        rest.remove(field);
    }
    for (field, neutral) in UNSUPPORTED_FIELDS {
        let Some(value) = rest.remove(field) else { continue };
        if !value.is_null() && value != 0 && !neutral.contains(&value) {
            let message = format!("{field} is {value}, which is not supported; leave it out");
            return Err(ApiError::field(field, message));
        }
    }
    // Only `max_output_tokens` limits a response. The other names would override it.
    for field in ["max_tokens", "max_completion_tokens"] {
        if rest.remove(field).is_some() {
            gateway.count_unknown_field(API, field);
        }
    }
    Ok(())
}

/// Returns whether `include`, the list of additional response data, requests log-probabilities.
/// Counts all other values except the reasoning content: they concern hosted tools, which never
/// have data here.
fn includes_logprobs(gateway: &Gateway, include: &[String]) -> bool {
    for what in include {
        if !matches!(what.as_str(), "reasoning.encrypted_content" | LOGPROBS) {
            gateway.count_unknown_field(API, &format!("include[{what}]"));
        }
    }
    include.iter().any(|what| what == LOGPROBS)
}

/// Value of the request field `include` that requests log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Returns the number of alternatives per token in the log-probabilities, or `None` if the request
/// asks for no log-probabilities.
fn validate_logprobs(included: bool, top: Option<i64>) -> Result<Option<usize>, ApiError> {
    const MAX: usize = 20;
    let top = top.map(|top| {
        let count = usize::try_from(top).ok().filter(|count| *count <= MAX);
        count.ok_or_else(|| {
            ApiError::field(
                "top_logprobs",
                format!("top_logprobs = {top}, but must be in 0..={MAX}"),
            )
        })
    });
    let top = top.transpose()?.unwrap_or(0);
    Ok((included || top > 0).then_some(top))
}

/// Returns the input items of a request, with plain texts converted to message items.
fn normalize_input_items(input: Option<&Value>) -> Vec<Value> {
    match input {
        Some(Value::String(text)) => vec![message_item("user", text)],
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| match (item["role"].as_str(), item["content"].as_str()) {
                (Some(role), Some(text)) => {
                    let mut full = message_item(role, text);
                    if let Some(id) = item["id"].as_str() {
                        full["id"] = id.into();
                    }
                    full
                }
                _ => item.clone(),
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn message_item(role: &str, text: &str) -> Value {
    let kind = if role == "assistant" { "output_text" } else { "input_text" };
    let content = json!([{ "type": kind, "text": text }]);
    json!({ "type": "message", "status": "completed", "role": role, "content": content })
}

/// Returns the format constraint that the request field `text.format` specifies.
fn parse_format(text: &Value) -> Result<Option<Constraint>, ApiError> {
    let format = &text["format"];
    match (format["type"].as_str(), &format["schema"]) {
        (Some("text"), _) => Ok(None),
        (None, _) if format.is_null() => Ok(None),
        (Some("json_object"), _) => Ok(Some(Constraint::JsonObject)),
        (Some("json_schema"), schema @ (Value::Object(_) | Value::Bool(_))) => {
            Ok(Some(Constraint::JsonSchema(schema.clone())))
        }
        _ => Err(ApiError::field(
            "text.format",
            format!(
                "text.format is {format}, but its type must be text, json_object, or json_schema \
                 with a schema"
            ),
        )),
    }
}

/// Returns the fields of a response that repeat the options of its request.
fn echo_fields(request: &ResponsesRequest, call: &Call) -> Map<String, Value> {
    let sampling = &call.request.sampling;
    let echo = json!({
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": value_or_default(&request.metadata, json!({})),
        "parallel_tool_calls": call.request.parallel_calls,
        "previous_response_id": request.previous_response_id,
        "reasoning":
            value_or_default(&request.reasoning, json!({ "effort": null, "summary": null })),
        "service_tier": "default",
        "store": request.store.unwrap_or(true),
        "temperature": sampling.temperature.unwrap_or(1.0),
        "text": value_or_default(&request.text, json!({ "format": { "type": "text" } })),
        "tool_choice": value_or_default(&request.tool_choice, "auto".into()),
        "tools": request.tools.clone().unwrap_or_default(),
        "top_logprobs": sampling.logprobs.unwrap_or(0),
        "top_p": sampling.top_p.unwrap_or(1.0),
        "truncation": request.truncation.as_deref().unwrap_or("disabled"),
    });
    match echo {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn value_or_default(value: &Option<Value>, default: Value) -> Value {
    value.clone().unwrap_or(default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn include_or_top_logprobs_enables_logprobs() {
        for (included, top, want) in [
            (false, None, None),
            (false, Some(0), None),
            (false, Some(3), Some(3)),
            (true, None, Some(0)),
            (true, Some(0), Some(0)),
            (true, Some(20), Some(20)),
        ] {
            assert_eq!(validate_logprobs(included, top).unwrap(), want, "{included} {top:?}");
        }
        for wrong in [-1, 21] {
            assert_eq!(
                validate_logprobs(true, Some(wrong)).unwrap_err().param.as_deref(),
                Some("top_logprobs")
            );
        }
    }

    #[test]
    fn parse_format_accepts_all_types() {
        let schema = json!({ "type": "object", "required": ["a"] });
        let requested =
            json!({ "type": "json_schema", "name": "x", "schema": schema, "strict": true });
        assert_eq!(parse(requested).unwrap(), Some(Constraint::JsonSchema(schema)));
        assert_eq!(parse(json!({ "type": "json_object" })).unwrap(), Some(Constraint::JsonObject));
        assert_eq!(parse(json!({ "type": "text" })).unwrap(), None);
        assert_eq!(parse_format(&json!({ "verbosity": "low" })).unwrap(), None);
        let error = parse(json!({ "type": "json_schema", "schema": "x" })).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("text.format"));
    }

    fn parse(format: Value) -> Result<Option<Constraint>, ApiError> {
        parse_format(&json!({ "format": format }))
    }
}
