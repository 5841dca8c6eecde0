//! The endpoints `/v1/responses` and `/v1/responses/ID`.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::recall::Recall;
use super::request::{self, Asked};
use super::write::{Writer, fault};
use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::http::{IncomingRequest, answer, failed, json as document};
use levade_call::Input;
use levade_call::{ApiError, ErrorKind};

/// Handles `POST /v1/responses`.
pub(crate) async fn responses(State(gateway): State<Gateway>, incoming: IncomingRequest) -> Response {
    let ping = gateway.0.options.ping;
    match prepare(&gateway, incoming) {
        Err(found) => failed(&found, &fault(&found)),
        Ok((caller, call, writer, streams)) => {
            let started = gateway.call(&caller, call).await;
            answer(started, writer, streams, ping).await
        }
    }
}

/// Returns the caller, the memory that is visible to the caller, and the body.
fn recall(gateway: &Gateway, incoming: IncomingRequest) -> Result<(Caller, Recall, bytes::Bytes), ApiError> {
    let key = incoming.key.clone();
    let (caller, body) = incoming.in_order()?;
    let recall = Recall::new(gateway, caller.session.clone(), key.as_deref());
    Ok((caller, recall, body))
}

fn prepare(gateway: &Gateway, incoming: IncomingRequest) -> Result<(Caller, Call, Writer, bool), ApiError> {
    let (caller, recall, body) = recall(gateway, incoming)?;
    let Asked { call, streams, mut told } = request::read(gateway, &recall, &body)?;
    if call.request.sampling.logprobs.is_some() {
        told.chat = Some(gateway.chat_of(&caller, &call)?);
    }
    Ok((caller, call, Writer::new(told, recall), streams))
}

fn unknown(id: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("Response with id '{id}' not found."))
}

fn respond(found: Result<Value, ApiError>) -> Response {
    match found {
        Ok(body) => document(StatusCode::OK, &body),
        Err(found) => failed(&found, &fault(&found)),
    }
}

/// Handles `GET /v1/responses/ID`.
pub(crate) async fn get(State(gateway): State<Gateway>, incoming: IncomingRequest) -> Response {
    let id = incoming.part("response");
    let found = recall(&gateway, incoming).and_then(|(_, recall, _)| {
        recall.get(&id).map(|response| response.body.clone()).ok_or_else(|| unknown(&id))
    });
    respond(found)
}

/// Handles `DELETE /v1/responses/ID`.
pub(crate) async fn delete(State(gateway): State<Gateway>, incoming: IncomingRequest) -> Response {
    let id = incoming.part("response");
    let found = recall(&gateway, incoming).and_then(|(_, recall, _)| match recall.remove(&id) {
        true => Ok(json!({ "id": id, "object": "response", "deleted": true })),
        false => Err(unknown(&id)),
    });
    respond(found)
}

/// Returns the page of items that a query selects. Default: the latest 20 items, latest first.
fn page(items: &[Value], query: &str) -> Result<Value, ApiError> {
    const MAX: usize = 100;
    let field = |name: &str| {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(found, _)| *found == name).map(|(_, value)| value).next_back()
    };
    let limit = field("limit").map_or(Ok(20), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=MAX).contains(limit));
        limit.ok_or_else(|| ApiError::field("limit", format!("limit is {text:?}; it is in 1..={MAX}")))
    })?;
    let mut items: Vec<&Value> = items.iter().collect();
    match field("order").unwrap_or("desc") {
        "desc" => items.reverse(),
        "asc" => {}
        other => return Err(ApiError::field("order", format!("order is {other:?}; it is asc or desc"))),
    }
    if let Some(after) = field("after") {
        let place = items.iter().position(|item| item["id"] == after);
        let place = place.ok_or_else(|| ApiError::field("after", format!("there is no item {after:?}")))?;
        items.drain(..=place);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    Ok(json!({
        "object": "list", "data": items, "first_id": first_id, "last_id": last_id, "has_more": has_more,
    }))
}

/// Handles `GET /v1/responses/ID/input_items`.
pub(crate) async fn input_items(
    State(gateway): State<Gateway>,
    RawQuery(query): RawQuery,
    incoming: IncomingRequest,
) -> Response {
    let id = incoming.part("response");
    let found = recall(&gateway, incoming).and_then(|(_, recall, _)| {
        let response = recall.get(&id).ok_or_else(|| unknown(&id))?;
        page(&response.items, query.as_deref().unwrap_or_default())
    });
    respond(found)
}

/// Handles `POST /v1/responses/input_tokens`: returns the number of prompt tokens of a request.
pub(crate) async fn input_tokens(State(gateway): State<Gateway>, incoming: IncomingRequest) -> Response {
    let counting = tokio::task::spawn_blocking(move || {
        let (caller, call, ..) = prepare(&gateway, incoming)?;
        let Input::Messages(messages) = &call.request.input else { return Ok(0) };
        Ok(gateway.chat_of(&caller, &call)?.prompt(messages, &call.request.tools)?.len())
    });
    let broken = |error| ApiError::new(ErrorKind::Internal, format!("counting did not end: {error}"));
    let counted = counting.await.map_err(broken).and_then(|counted| counted);
    respond(counted.map(|tokens| json!({ "object": "response.input_tokens", "input_tokens": tokens })))
}
