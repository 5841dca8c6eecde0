//! Events that the process of a rollout reports, stored as spans.

use axum::extract::{Path, Request, State};
use levade_store::rollouts::trace::TRIPLET_SPAN;
use levade_store::rollouts::{NewSpan, Rollouts, SpanFilter, TrySelector, TryStatus, TryUpdate};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::triplets::{read_token_ids, remove_repeated_requests, to_triplet};
use super::wire::{GatewayRollout, find_rollout, save_metadata};
use crate::data_interface::new_reported_span;
use crate::openapi::{Routes, op};
use crate::request::{parse_body, parse_query};
use crate::response::{ApiError, RouteResult, ok_response};
use crate::service::Shared;
use crate::spans::by_number;

/// Smallest id of a span that stores an event. Such ids do not collide with other span ids: clients
/// choose ids at random, and reports of Agent Lightning 0.1 have small ids.
const FIRST_SPAN_ID: usize = 0xe << 60;

/// Name of the span attribute that contains the type of the event that the span stores.
const TYPE: &str = "agentlightning.event.type";
const ATTEMPT: &str = "agentlightning.event.attempt_id";
const DATA: &str = "agentlightning.event.data";

/// Returns the HTTP routes of events, without their path prefix.
pub(super) fn routes() -> Routes {
    Routes::new("agent-lightning-1.0")
        .post(
            "/rollouts/{id}/attempt/{attempt_id}/events",
            add_event,
            op("Report an event", 200, "EventV1").body("NewEventV1"),
        )
        .get(
            "/rollouts/{id}/events",
            list_events,
            op("List the events of a rollout", 200, "[EventV1]").query(&["event_type", "format"]),
        )
}

#[derive(Deserialize)]
struct EventBody {
    event_type: String,
    #[serde(default)]
    data: Map<String, Value>,
}

async fn add_event(
    State(service): State<Shared>,
    Path((id, attempt_id)): Path<(String, String)>,
    request: Request,
) -> RouteResult {
    let EventBody { event_type, data } = parse_body(request).await?;
    let store = service.checked().await?;
    let mut rollout = find_rollout(store, &id).await?;
    if rollout.rollout.latest_try.is_none() {
        rollout = start_first_try(&service, &id).await?;
    }
    let of = rollout
        .rollout
        .latest_try
        .as_ref()
        .ok_or_else(|| ApiError::bad_request(format!("rollout {id} has no attempt")))?;
    let mut attributes = Map::from_iter([
        (TYPE.to_owned(), json!(event_type)),
        (ATTEMPT.to_owned(), json!(attempt_id)),
    ]);
    let mut name = "agentlightning.event";
    match event_type.as_str() {
        "reward" => {
            name = "agentlightning.annotation";
            let value = data.get("value").cloned().unwrap_or_default();
            attributes.insert("agentlightning.reward.0.name".to_owned(), json!("primary"));
            attributes.insert("agentlightning.reward.0.value".to_owned(), value);
        }
        "model_request" => {
            name = TRIPLET_SPAN;
            let (prompt, response) = read_token_ids(&data);
            attributes.insert("prompt_token_ids".to_owned(), prompt);
            attributes.insert("response_token_ids".to_owned(), response);
            let response_id = data.get("response").and_then(|response| response.get("id"));
            if let Some(id) = response_id.filter(|id| id.is_string()) {
                attributes.insert("gen_ai.response.id".to_owned(), id.clone());
            }
        }
        _ => {}
    }
    let event = json!({
        "event_type": event_type, "rollout_id": id, "attempt_id": attempt_id,
        "timestamp": store.now(), "data": data,
    });
    attributes.insert(DATA.to_owned(), json!(Value::Object(data).to_string()));
    // The number is issued by the rollout's counter, so no other event has the same id.
    let number = store.reserve_span_numbers(&id, 1).await?;
    let span =
        new_reported_span(of, name, attributes, FIRST_SPAN_ID + number as usize, store.now());
    store.add_spans(vec![NewSpan { number: Some(number), ..span }]).await?;
    ok_response(&event)
}

/// Starts the first try of a rollout if no try has started yet. An agent process can report an
/// event before its controller reports the start.
async fn start_first_try(service: &Shared, id: &str) -> Result<GatewayRollout, ApiError> {
    let _permit = service.acquire_transition().await;
    let store = service.store();
    let GatewayRollout { rollout, metadata, mut extra } = find_rollout(store, id).await?;
    if rollout.latest_try.is_none() {
        extra.is_started_by_event = true;
        save_metadata(store, id, &metadata, &extra).await?;
        store.start_try(id, None).await?;
        let running = TryUpdate { status: Some(TryStatus::Running), ..TryUpdate::default() };
        store.update_try(id, &TrySelector::Latest, &running).await?;
    }
    find_rollout(store, id).await
}

/// Returns all events of a rollout in the order of their arrival, as pairs (attempt id, event).
async fn read_events(store: &dyn Rollouts, id: &str) -> Result<Vec<(String, Value)>, ApiError> {
    let spans = store.query_spans(&SpanFilter::new(id), &by_number()).await?.items;
    Ok(spans.iter().filter_map(|span| parse_event(span, id)).collect())
}

/// Returns the event that a span stores, as a pair (attempt id, event). Returns `None` if the span
/// does not store an event.
fn parse_event(span: &levade_store::rollouts::Span, rollout_id: &str) -> Option<(String, Value)> {
    let body: Value = serde_json::from_str(span.body.get()).ok()?;
    let attributes = &body["attributes"];
    let data: Value = serde_json::from_str(attributes[DATA].as_str()?).ok()?;
    let attempt_id = attributes[ATTEMPT].as_str()?.to_owned();
    let event = json!({
        "event_type": attributes[TYPE].as_str()?, "rollout_id": rollout_id,
        "attempt_id": attempt_id, "timestamp": body["start_time"], "data": data,
    });
    Some((attempt_id, event))
}

/// Returns the ids of a rollout's attempts that have events, in the order of their first events.
pub(super) async fn read_attempt_ids(
    store: &dyn Rollouts,
    id: &str,
) -> Result<Vec<String>, ApiError> {
    let mut ids: Vec<String> = Vec::new();
    for (attempt_id, _) in read_events(store, id).await? {
        if !ids.contains(&attempt_id) {
            ids.push(attempt_id);
        }
    }
    Ok(ids)
}

#[derive(Deserialize)]
struct EventsQuery {
    #[serde(default)]
    event_type: Option<String>,
    #[serde(default)]
    format: Option<String>,
}

async fn list_events(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let query: EventsQuery = parse_query(&request)?;
    let store = service.checked().await?;
    let rollout = find_rollout(store, &id).await?;
    let events = read_events(store, &id).await?.into_iter().filter(|(attempt_id, event)| {
        attempt_id == rollout.attempt_id()
            && query.event_type.as_ref().is_none_or(|kind| event["event_type"] == kind.as_str())
    });
    let mut events: Vec<Value> = events.map(|(_, event)| event).collect();
    if query.format.as_deref() == Some("triplet") {
        events = remove_repeated_requests(events.into_iter().map(to_triplet).collect());
    }
    ok_response(&events)
}
