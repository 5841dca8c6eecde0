//! The endpoints `/v1/messages` and `/v1/messages/count_tokens`.

use axum::extract::State;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use serde_json::json;

use super::request::{self, ParsedRequest};
use super::write::{MessagesWriter, error_body};
use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{IncomingRequest, error_response, json_response, write_response};
use levade_call::Input;
use levade_call::{ApiError, ErrorKind};

/// Handles `POST /v1/messages`.
pub(crate) async fn create_message(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    let id = format!("req_{}", gateway.new_call_id());
    let prepared = parse_incoming(&gateway, incoming).and_then(|(caller, requested)| {
        // Anthropic's API requires `max_tokens`.
        requested.call.request.sampling.max_tokens.ok_or_else(|| {
            ApiError::field(
                "max_tokens",
                "max_tokens is missing; set it to the maximum number of tokens of the completion",
            )
        }).map(|_| (caller, requested))
    });
    let response = match prepared {
        Err(found) => error_response(&found, &error_body(&found, &id)),
        Ok((caller, ParsedRequest { call, streams })) => {
            let started = gateway.call(&caller, call).await;
            write_response(started, MessagesWriter::new(id.clone()), streams, ping).await
        }
    };
    with_request_id(response, &id)
}

/// Handles `POST /v1/messages/count_tokens`.
pub(crate) async fn count_tokens(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let id = format!("req_{}", gateway.new_call_id());
    let counting = tokio::task::spawn_blocking(move || {
        let (caller, ParsedRequest { call, .. }) = parse_incoming(&gateway, incoming)?;
        count_prompt_tokens(&gateway, &caller, &call)
    });
    let response = match counting
        .await
        .map_err(|error| {
            ApiError::new(
                ErrorKind::Internal,
                format!("the prompt tokens cannot be counted: {error}"),
            )
        })
        .and_then(|counted| counted)
    {
        Ok(tokens) => json_response(StatusCode::OK, &json!({ "input_tokens": tokens })),
        Err(found) => error_response(&found, &error_body(&found, &id)),
    };
    with_request_id(response, &id)
}

fn parse_incoming(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<(Caller, ParsedRequest), ApiError> {
    let (caller, body) = incoming.into_call()?;
    Ok((caller, request::parse_request(gateway, &body)?))
}

/// Returns the number of prompt tokens of a call, after the model's chat template has rendered the
/// messages and tools. 0 if the call has no messages.
fn count_prompt_tokens(gateway: &Gateway, caller: &Caller, call: &Call) -> Result<usize, ApiError> {
    let Input::Messages(messages) = &call.request.input else { return Ok(0) };
    let chat = gateway.find_chat(caller, call)?;
    Ok(chat.prompt(messages, &call.request.tools)?.len())
}

/// Returns the HTTP error response, in Anthropic's format, to a request that was rejected with
/// `found`.
pub(crate) fn rejection_response(gateway: &Gateway, found: &ApiError) -> Response {
    let id = format!("req_{}", gateway.new_call_id());
    with_request_id(error_response(found, &error_body(found, &id)), &id)
}

/// Returns an HTTP response with the JSON document `found` or, for an error, the error response in
/// Anthropic's format.
pub(super) fn build_response(
    gateway: &Gateway,
    found: Result<serde_json::Value, ApiError>,
) -> Response {
    match found {
        Ok(value) => {
            let id = format!("req_{}", gateway.new_call_id());
            with_request_id(json_response(StatusCode::OK, &value), &id)
        }
        Err(error) => rejection_response(gateway, &error),
    }
}

/// Adds the header `request-id` with the id `id` to an HTTP response. Anthropic's clients report
/// this id with errors.
fn with_request_id(mut response: Response, id: &str) -> Response {
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert("request-id", id);
    }
    response
}
