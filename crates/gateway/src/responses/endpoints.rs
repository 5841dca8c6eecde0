//! The endpoints `/v1/responses` and `/v1/responses/ID`.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::caller_memory::CallerMemory;
use super::request::{self, ParsedRequest};
use super::write::{ResponsesWriter, error_body};
use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{
    IncomingRequest, error_response, find_query_field, json_response, write_response,
};
use levade_call::Input;
use levade_call::{ApiError, ErrorKind};

/// Handles `POST /v1/responses`.
pub(crate) async fn create_response(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ping = gateway.0.options.ping;
    match prepare_call(&gateway, incoming) {
        Err(found) => error_response(&found, &error_body(&found)),
        Ok((caller, call, writer, streams)) => {
            let started = gateway.call(&caller, call).await;
            write_response(started, writer, streams, ping).await
        }
    }
}

/// Returns the sender and the body of a request, with the stored responses that are visible to the
/// sender.
fn open_caller_memory(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<(Caller, CallerMemory, bytes::Bytes), ApiError> {
    let key = incoming.key.clone();
    let (caller, body) = incoming.into_call()?;
    let memory = CallerMemory::new(gateway, caller.session.clone(), key.as_deref());
    Ok((caller, memory, body))
}

fn prepare_call(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<(Caller, Call, ResponsesWriter, bool), ApiError> {
    let (caller, memory, body) = open_caller_memory(gateway, incoming)?;
    let ParsedRequest { call, streams, received: mut sent } =
        request::parse_request(gateway, &memory, &body)?;
    if call.request.sampling.logprobs.is_some() {
        sent.chat = Some(gateway.find_chat(&caller, &call)?);
    }
    Ok((caller, call, ResponsesWriter::new(sent, memory), streams))
}

fn not_found_error(id: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("Response with id '{id}' not found."))
}

fn build_response(found: Result<Value, ApiError>) -> Response {
    match found {
        Ok(body) => json_response(StatusCode::OK, &body),
        Err(found) => error_response(&found, &error_body(&found)),
    }
}

/// Handles `GET /v1/responses/ID`, which returns a stored response.
pub(crate) async fn get_response(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let id = incoming.path_param("response");
    let found = open_caller_memory(&gateway, incoming).and_then(|(_, memory, _)| {
        memory.get(&id).map(|response| response.body.clone()).ok_or_else(|| not_found_error(&id))
    });
    build_response(found)
}

/// Handles `DELETE /v1/responses/ID`, which removes a stored response.
pub(crate) async fn delete_response(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let id = incoming.path_param("response");
    let found = open_caller_memory(&gateway, incoming).and_then(|(_, memory, _)| {
        if memory.remove(&id) {
            Ok(json!({ "id": id, "object": "response", "deleted": true }))
        } else {
            Err(not_found_error(&id))
        }
    });
    build_response(found)
}

/// Returns the page of a response's input items that the query string selects. Default: the latest
/// 20 items, latest first.
fn select_page(items: &[Value], query: &str) -> Result<Value, ApiError> {
    const MAX: usize = 100;
    let limit = find_query_field(query, "limit").map_or(Ok(20), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=MAX).contains(limit));
        limit.ok_or_else(|| {
            ApiError::field("limit", format!("limit is {text:?}, but must be in 1..={MAX}"))
        })
    })?;
    let mut items: Vec<&Value> = items.iter().collect();
    match find_query_field(query, "order").unwrap_or("desc") {
        "desc" => items.reverse(),
        "asc" => {}
        other => {
            return Err(ApiError::field(
                "order",
                format!("order is {other:?}, but must be asc or desc"),
            ));
        }
    }
    if let Some(after) = find_query_field(query, "after") {
        let field_path = items.iter().position(|item| item["id"] == after);
        let field_path = field_path
            .ok_or_else(|| ApiError::field("after", format!("there is no item {after:?}")))?;
        items.drain(..=field_path);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let first_id = id_or_null(items.first());
    let last_id = id_or_null(items.last());
    Ok(json!({
        "object": "list", "data": items, "first_id": first_id, "last_id": last_id, "has_more": has_more,
    }))
}

fn id_or_null(item: Option<&&Value>) -> Value {
    item.map_or(Value::Null, |item| item["id"].clone())
}

/// Handles `GET /v1/responses/ID/input_items`, which returns the input items of a stored response.
pub(crate) async fn list_input_items(
    State(gateway): State<Gateway>,
    RawQuery(query): RawQuery,
    incoming: IncomingRequest,
) -> Response {
    let id = incoming.path_param("response");
    let found = open_caller_memory(&gateway, incoming).and_then(|(_, memory, _)| {
        let response = memory.get(&id).ok_or_else(|| not_found_error(&id))?;
        select_page(&response.items, query.as_deref().unwrap_or_default())
    });
    build_response(found)
}

/// Handles `POST /v1/responses/input_tokens`, which returns the number of prompt tokens of a
/// request.
pub(crate) async fn count_input_tokens(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let counting = tokio::task::spawn_blocking(move || {
        let (caller, call, ..) = prepare_call(&gateway, incoming)?;
        let Input::Messages(messages) = &call.request.input else { return Ok(0) };
        Ok(gateway.find_chat(&caller, &call)?.prompt(messages, &call.request.tools)?.len())
    });
    let counted = counting
        .await
        .map_err(|error| {
            ApiError::new(
                ErrorKind::Internal,
                format!("the prompt tokens cannot be counted: {error}"),
            )
        })
        .and_then(|counted| counted);
    build_response(
        counted.map(|tokens| json!({ "object": "response.input_tokens", "input_tokens": tokens })),
    )
}
