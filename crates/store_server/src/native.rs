//! Native routes of rollouts: `POST /v1/rollouts/METHOD` calls a method of [`Rollouts`].
//!
//! The body is a JSON list of the method's arguments, and the response is the method's result. An
//! error is `{"detail": TEXT, "error": ERROR}`, where `ERROR` is a [`RolloutError`]. Every response
//! carries the time of the store's clock in the header `x-levade-time`.

use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, NewRollout, NewSpan, PageRequest, ResourcesFilter, Result,
    Rollout, RolloutError, RolloutFilter, RolloutUpdate, Rollouts, SpanFilter, TrySelector,
    TryUpdate, WorkerFilter,
};
use serde::Serialize;

use crate::request::{parse_json, read_body_bytes};
use crate::response::{ApiError, RouteResult, ok_response};
use crate::service::{Service, Shared};

/// Maximum time for which the server holds a request. A client that waits longer repeats the
/// request.
const MAX_HOLD: Duration = Duration::from_secs(3600);

/// Response header that contains the time of the store's clock, as a Unix timestamp in seconds.
const TIME_HEADER: &str = "x-levade-time";

/// Returns the HTTP routes of Levade's own protocol for rollouts.
pub(crate) fn routes() -> Router<Shared> {
    Router::new().route("/v1/rollouts/{method}", post(respond_with_time))
}

async fn respond_with_time(
    State(service): State<Shared>,
    Path(method): Path<String>,
    request: Request,
) -> Response {
    let result =
        async { call_method(&service, &method, &read_body_bytes(request).await?).await }.await;
    let mut response = result.unwrap_or_else(IntoResponse::into_response);
    if let Ok(now) = HeaderValue::from_str(&service.store().now().to_string()) {
        response.headers_mut().insert(TIME_HEADER, now);
    }
    response
}

/// Calls the method `method` of the rollout store with the JSON arguments in `body`.
async fn call_method(service: &Service, method: &str, body: &[u8]) -> RouteResult {
    let store = service.store();
    /// Parses the arguments, calls the method, and returns its result.
    macro_rules! respond {
        (|$($argument:ident: $type:ty),*| $call:expr) => {{
            let ($($argument,)*): ($($type,)*) = parse_json(body)?;
            to_response($call.await)
        }};
    }
    match method {
        "enqueue" => respond!(|new: Vec<NewRollout>| store.enqueue(&new)),
        "start" => respond!(|new: NewRollout, worker: Option<String>| {
            store.start_rollout(&new, worker.as_deref())
        }),
        "start_try" => {
            respond!(|id: String, worker: Option<String>| {
                store.start_try(&id, worker.as_deref())
            })
        }
        "lease" => respond!(|request: LeaseRequest| lease_rollouts(service, request)),
        "heartbeat" => respond!(|lease: Lease| store.record_heartbeat(&lease)),
        "finish" => respond!(|lease: Lease, end: LeaseEnd, metadata: Option<Json>| {
            store.end_lease(&lease, end, metadata)
        }),
        "cancel" => respond!(|ids: Vec<String>| store.cancel_rollouts(&ids)),
        "expire" => to_response(store.expire_tries().await),
        "update_rollout" => {
            respond!(|id: String, update: RolloutUpdate| { store.update_rollout(&id, &update) })
        }
        "update_try" => respond!(|id: String, name: TrySelector, update: TryUpdate| {
            store.update_try(&id, &name, &update)
        }),
        "rollout" => respond!(|id: String| store.rollout(&id)),
        "rollouts" => {
            respond!(|filter: RolloutFilter, page: PageRequest| {
                store.query_rollouts(&filter, &page)
            })
        }
        "tries" => respond!(|id: String, page: PageRequest| store.query_tries(&id, &page)),
        "changes" => {
            respond!(|since: u64, max: usize, wait: Duration| {
                wait_for_changes(service, since, max, wait)
            })
        }
        "wait_finished" => {
            respond!(|ids: Vec<String>, wait: Duration| {
                wait_until_finished(service, &ids, wait)
            })
        }
        "put_resources" => {
            respond!(|id: Option<String>, value: Json| {
                store.put_resources(id.as_deref(), &value)
            })
        }
        "resources" => respond!(|id: Option<String>, version: Option<u64>| {
            store.resources(id.as_deref(), version)
        }),
        "query_resources" => respond!(|filter: ResourcesFilter, page: PageRequest| {
            store.query_resources(&filter, &page)
        }),
        "beat_worker" => {
            respond!(|id: String, stats: Option<Json>| store.record_worker_heartbeat(&id, stats))
        }
        "worker" => respond!(|id: String| store.worker(&id)),
        "workers" => {
            respond!(|filter: WorkerFilter, page: PageRequest| {
                store.query_workers(&filter, &page)
            })
        }
        "add_spans" => respond!(|spans: Vec<NewSpan>| store.add_spans(spans)),
        "spans" => {
            respond!(|filter: SpanFilter, page: PageRequest| store.query_spans(&filter, &page))
        }
        "reserve_span_numbers" => {
            respond!(|id: String, count: u64| { store.reserve_span_numbers(&id, count) })
        }
        "statistics" => to_response(store.statistics().await),
        _ => {
            let text = format!("there is no method {method:?} of rollouts");
            Err(ApiError::new(StatusCode::NOT_FOUND, text))
        }
    }
}

async fn lease_rollouts(service: &Service, mut request: LeaseRequest) -> Result<Vec<Rollout>> {
    request.wait = request.wait.min(MAX_HOLD);
    tokio::select! {
        leased = service.store().lease_rollouts(&request) => leased,
        () = service.stopped(), if !request.wait.is_zero() => Ok(Vec::new()),
    }
}

async fn wait_for_changes(
    service: &Service,
    since: u64,
    max: usize,
    wait: Duration,
) -> Result<(Vec<Rollout>, u64)> {
    tokio::select! {
        changes = service.store().wait_for_changes(since, max, wait.min(MAX_HOLD)) => changes,
        () = service.stopped(), if !wait.is_zero() => Ok((Vec::new(), since)),
    }
}

/// Waits until all rollouts of `ids` have ended ([`Rollouts::wait_until_finished`]). Returns the
/// rollouts that have ended, and whether no other rollout of `ids` is unfinished. Unknown rollouts
/// do not count as unfinished.
async fn wait_until_finished(
    service: &Service,
    ids: &[String],
    wait: Duration,
) -> Result<(Vec<Rollout>, bool)> {
    let store = service.store();
    let finished = tokio::select! {
        finished = store.wait_until_finished(ids, wait.min(MAX_HOLD)) => finished?,
        () = service.stopped() => store.wait_until_finished(ids, Duration::ZERO).await?,
    };
    let is_done = finished.len() == ids.len() || !has_unfinished(store, ids).await?;
    Ok((finished, is_done))
}

/// Returns whether any rollout of `ids` exists and has not ended.
async fn has_unfinished(store: &dyn Rollouts, ids: &[String]) -> Result<bool> {
    for id in ids {
        if store.rollout(id).await?.is_some_and(|rollout| !rollout.status.is_finished()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn to_response(result: Result<impl Serialize>) -> RouteResult {
    ok_response(&result.map_err(to_typed_error)?)
}

/// Converts an error of the rollout store to an HTTP response from whose body a client restores the
/// same error.
fn to_typed_error(error: RolloutError) -> ApiError {
    let typed = serde_json::to_value(&error).unwrap_or_default();
    let mut response = ApiError::from(error);
    response.body["error"] = typed;
    response
}
