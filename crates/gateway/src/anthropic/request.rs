//! Parser of Anthropic's message requests, which become calls.

use levade_text::ToolSpec;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::messages::{self, API};
use crate::call::Call;
use crate::gateway::Gateway;
use crate::openai::{structured, validate_top_k};
use crate::tool_types;
use levade_call::ApiError;
use levade_call::Request as CallRequest;
use levade_call::{Constraint, Input, SamplingOptions, ToolChoice};

/// Body of a request to `/v1/messages`.
#[derive(Deserialize)]
struct MessagesRequest {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
    messages: Vec<Value>,
    system: Option<Value>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    max_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    output_config: Option<Map<String, Value>>,
    output_format: Option<Value>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// A request to `/v1/messages` after parsing.
pub(super) struct ParsedRequest {
    pub call: Call,
    /// Whether the client requests a streamed response.
    pub streams: bool,
}

/// Parses the body of a request to `/v1/messages`.
///
/// # Errors
/// Returns an error that names the first invalid or unsupported field, its value and a remedy.
pub(super) fn parse_request(gateway: &Gateway, body: &[u8]) -> Result<ParsedRequest, ApiError> {
    let mut request: MessagesRequest = crate::http::parse_json_body(body)?;
    let own = parse_format(gateway, request.output_config, request.output_format)?;
    let constraint = structured::take_constraint(gateway, own, &mut request.rest)?;
    check_fields(gateway, &request.rest)?;
    let (tool_choice, parallel_calls) = parse_tool_choice(request.tool_choice.as_ref())?;
    let messages =
        messages::parse_conversation(gateway, request.system.as_ref(), &request.messages)?;
    let sampling = SamplingOptions {
        max_tokens: request
            .max_tokens
            .map(|limit| validate_count("max_tokens", limit))
            .transpose()?,
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: validate_top_k(request.top_k)?,
        stop: request.stop_sequences.unwrap_or_default(),
        ..SamplingOptions::default()
    };
    let requested = CallRequest {
        tools: parse_tools(gateway, request.tools.as_deref().unwrap_or_default())?,
        strict: request.tools.iter().flatten().filter_map(strict_tool_name).collect(),
        tool_choice,
        parallel_calls,
        sampling,
        constraint,
        ..CallRequest::new(Input::Messages(messages))
    };
    let call = Call { model: request.model, request: requested };
    Ok(ParsedRequest { call, streams: request.stream.unwrap_or(false) })
}

fn validate_count(name: &str, value: i64) -> Result<usize, ApiError> {
    match usize::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(ApiError::field(name, format!("{name} = {value}, but it must be at least 1"))),
    }
}

/// Request fields that are ignored, because they are hints or bookkeeping of the provider.
const IGNORED_FIELDS: [&str; 9] = [
    "anthropic_beta",
    "betas",
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
];

/// Request fields that are rejected: features that the gateway does not support, and fields of
/// other APIs that would change the sampling.
const UNSUPPORTED_FIELDS: [&str; 16] = [
    "container",
    "custom_logit_processor",
    "fallbacks",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "logits_processors",
    "mcp_servers",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
];

/// Checks the request fields that have not been parsed: rejects unsupported fields and counts
/// unknown fields. Fields that set the amount of reasoning or remove parts of the history count as
/// unknown, because the template and the training of a model decide both here.
fn check_fields(gateway: &Gateway, rest: &Map<String, Value>) -> Result<(), ApiError> {
    for (field, value) in rest {
        let is_empty = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
        if UNSUPPORTED_FIELDS.contains(&field.as_str()) {
            if !is_empty {
                return Err(ApiError::field(
                    field,
                    format!("{field} is not supported; leave it out"),
                ));
            }
        } else if !IGNORED_FIELDS.contains(&field.as_str()) && !is_empty {
            gateway.count_unknown_field(API, field);
        }
    }
    Ok(())
}

/// Returns the format constraint of a request: from `output_config.format`, or from the earlier
/// field `output_format`.
fn parse_format(
    gateway: &Gateway,
    config: Option<Map<String, Value>>,
    format: Option<Value>,
) -> Result<Option<Constraint>, ApiError> {
    let mut config = config.unwrap_or_default();
    let config_format = config.remove("format").filter(|format| !format.is_null());
    let field = if config_format.is_some() { "output_config.format" } else { "output_format" };
    let format = config_format.or(format).filter(|format| !format.is_null());
    for field in config.keys() {
        gateway.count_unknown_field(API, &format!("output_config.{field}"));
    }
    let Some(format) = format else { return Ok(None) };
    match (format["type"].as_str(), &format["schema"]) {
        (Some("json_schema"), schema @ Value::Object(_)) => {
            Ok(Some(Constraint::JsonSchema(schema.clone())))
        }
        _ => Err(ApiError::field(
            field,
            format!("{field} is {format}, but must be an object of type json_schema with a schema"),
        )),
    }
}

/// Parses the tools of a request in Anthropic's format. Tools that Anthropic hosts are omitted and
/// counted.
fn parse_tools(gateway: &Gateway, values: &[Value]) -> Result<Vec<ToolSpec>, ApiError> {
    let read = |(at, value): (usize, &Value)| {
        let field_path = format!("tools.{at}");
        match value["type"].as_str() {
            None | Some("custom") => parse_tool(value, field_path).map(Some),
            Some(hosted) if tool_types::is_hosted_tool(value) => {
                gateway.count_unknown_field(API, &format!("tools[type={hosted}]"));
                Ok(None)
            }
            _ => tool_types::published_spec(value)
                .ok_or_else(|| tool_types::unknown_tool_error(value, &field_path))
                .map(Some),
        }
    };
    values.iter().enumerate().filter_map(|tool| read(tool).transpose()).collect()
}

/// Parses the definition of one tool in Anthropic's format.
fn parse_tool(value: &Value, param: String) -> Result<ToolSpec, ApiError> {
    let name = value["name"].as_str().filter(|name| !name.is_empty());
    let name =
        name.ok_or_else(|| ApiError::field(&param, format!("{param} has no name: {value}")))?;
    let Value::Object(_) = &value["input_schema"] else {
        let message = format!(
            "the input_schema of {param} ({name:?}) is {}, not a JSON schema of type object",
            value["input_schema"]
        );
        return Err(ApiError::field(&param, message));
    };
    Ok(ToolSpec {
        name: name.to_owned(),
        description: value["description"].as_str().unwrap_or_default().to_owned(),
        parameters: value["input_schema"].clone(),
    })
}

/// Returns the name of a tool whose definition sets `strict`, or `None` if `strict` is not true.
fn strict_tool_name(value: &Value) -> Option<String> {
    value["name"].as_str().filter(|_| value["strict"] == true).map(str::to_owned)
}

/// Parses `tool_choice`. Returns the tool choice, and whether one completion may call several
/// tools.
fn parse_tool_choice(value: Option<&Value>) -> Result<(ToolChoice, bool), ApiError> {
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok((ToolChoice::Auto, true));
    };
    let parallel = value["disable_parallel_tool_use"] != true;
    let choice = match (value["type"].as_str(), value["name"].as_str()) {
        (Some("auto"), _) => ToolChoice::Auto,
        (Some("any"), _) => ToolChoice::Required,
        (Some("none"), _) => ToolChoice::None,
        (Some("tool"), Some(name)) => ToolChoice::Named(name.to_owned()),
        _ => {
            let message = format!(
                "tool_choice is {value}, but must be an object of type auto, any, none, or tool \
                 with a name"
            );
            return Err(ApiError::field("tool_choice", message));
        }
    };
    Ok((choice, parallel))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::TestGateway;

    #[test]
    fn tool_choice_parses_all_types() {
        assert_eq!(parse_tool_choice(None).unwrap(), (ToolChoice::Auto, true));
        assert_eq!(parse_choice(Value::Null), (ToolChoice::Auto, true));
        assert_eq!(parse_choice(json!({ "type": "none" })), (ToolChoice::None, true));
        let one = json!({ "type": "any", "disable_parallel_tool_use": true });
        assert_eq!(parse_choice(one), (ToolChoice::Required, false));
        let named = json!({ "type": "tool", "name": "add", "disable_parallel_tool_use": false });
        assert_eq!(parse_choice(named), (ToolChoice::Named("add".into()), true));
        for wrong in [json!("auto"), json!({ "type": "tool" }), json!({ "type": "required" })] {
            assert_eq!(
                parse_tool_choice(Some(&wrong)).unwrap_err().param.as_deref(),
                Some("tool_choice")
            );
        }
    }

    fn parse_choice(value: Value) -> (ToolChoice, bool) {
        parse_tool_choice(Some(&value)).unwrap()
    }

    #[test]
    fn parse_request_reads_sampling_and_format() {
        let gateway = TestGateway::scripted(&[]).gateway;
        let schema = json!({ "type": "object" });
        let body = json!({
            "model": "m", "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 7, "temperature": 0.5,
            "top_p": 0.9, "top_k": 3, "stop_sequences": ["x"], "stream": true,
            "output_config": { "format": { "type": "json_schema", "schema": schema } },
        });
        let ParsedRequest { call, streams } =
            parse_request(&gateway, body.to_string().as_bytes()).unwrap();
        let sampling = SamplingOptions {
            max_tokens: Some(7),
            temperature: Some(0.5),
            top_p: Some(0.9),
            top_k: Some(3),
            stop: vec!["x".into()],
            ..SamplingOptions::default()
        };
        assert_eq!((call.model.as_str(), call.request.sampling, streams), ("m", sampling, true));
        assert_eq!(call.request.constraint, Some(Constraint::JsonSchema(schema)));
        assert!(gateway.unknown_fields().is_empty());
    }
}
