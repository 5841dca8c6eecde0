//! Routes of rollouts and their states.

use std::time::Duration;

use axum::extract::{Path, Request, State as SharedState};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use levade_store::rollouts::{
    Json, NewRollout, PageRequest, RolloutConfig, RolloutFilter, RolloutStatus, RolloutUpdate,
    Rollouts, TrySelector, TryStatus, TryUpdate,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::events::read_attempt_ids;
use super::wire::{GatewayFields, GatewayRollout, GatewayState, find_rollout, save_metadata};
use crate::openapi::{Routes, op};
use crate::request::{parse_body, parse_query, present};
use crate::response::{ApiError, RouteResult, created_response, ok_response};
use crate::service::Shared;

/// Number of rollouts that are read from the store at a time.
const PAGE: usize = 1000;

/// Returns the HTTP routes of rollouts, without their path prefix.
pub(super) fn routes() -> Routes {
    Routes::new("agent-lightning-1.0")
        .post(
            "/rollouts",
            enqueue_rollouts,
            op("Enqueue rollouts", 201, "[RolloutV1]").body("EnqueueV1"),
        )
        .get(
            "/rollouts",
            list_rollouts,
            op("List rollouts by state", 200, "[RolloutV1]").query(&["state_in", "limit"]),
        )
        .get(
            "/rollouts/terminal",
            list_terminal_rollouts,
            op("List rollouts that ended, from a cursor", 200, "TerminalV1")
                .query(&["after", "limit"]),
        )
        .get(
            "/rollouts/{id}",
            get_rollout,
            op("Return a rollout and the ids of its attempts", 200, "RolloutDetailV1"),
        )
        .route(
            "patch",
            "/rollouts/{id}",
            patch_rollout,
            op("Report the state of a rollout", 200, "RolloutV1").body("RolloutPatchV1"),
        )
        .route("delete", "/rollouts/{id}", delete_rollout, op("Hide a rollout", 204, ""))
}

pub(super) async fn health() -> RouteResult {
    ok_response(&json!({ "status": "ok" }))
}

fn default_timeout() -> f64 {
    3600.0
}

#[derive(Deserialize)]
struct ConfigBody {
    #[serde(default = "default_timeout")]
    timeout_seconds: f64,
    #[serde(default)]
    local: Option<Value>,
    #[serde(default)]
    k8s: Option<Value>,
}

fn default_is_local() -> bool {
    true
}

#[derive(Deserialize)]
struct RolloutBody {
    input: Json,
    #[serde(default = "default_is_local")]
    is_train: bool,
    #[serde(default)]
    config: Option<ConfigBody>,
    #[serde(default)]
    metadata: Option<Map<String, Value>>,
    #[serde(default)]
    rollout_id: Option<String>,
}

impl RolloutBody {
    fn into_new(self) -> NewRollout {
        let config = self.config.unwrap_or(ConfigBody {
            timeout_seconds: default_timeout(),
            local: None,
            k8s: None,
        });
        let ConfigBody { timeout_seconds, local, k8s } = config;
        let extra = GatewayFields { local, k8s, ..GatewayFields::default() };
        NewRollout {
            id: self.rollout_id,
            mode: Some(if self.is_train { "train" } else { "val" }.to_owned()),
            config: RolloutConfig {
                timeout_seconds: Some(timeout_seconds),
                ..RolloutConfig::default()
            },
            metadata: GatewayRollout::stored_metadata(&self.metadata.unwrap_or_default(), &extra),
            ..NewRollout::new(self.input)
        }
    }
}

async fn enqueue_rollouts(
    SharedState(service): SharedState<Shared>,
    request: Request,
) -> RouteResult {
    let bodies: Vec<RolloutBody> = parse_body(request).await?;
    let new: Vec<NewRollout> = bodies.into_iter().map(RolloutBody::into_new).collect();
    let store = service.checked().await?;
    let rollouts = store.enqueue(&new).await?.into_iter().map(GatewayRollout::new);
    let rollouts: Vec<GatewayRollout> = rollouts.collect();
    if let Some(deleted) = rollouts.iter().find(|of| of.extra.is_deleted) {
        let text = format!("Rollout {} was deleted; choose another id", deleted.rollout.id);
        return Err(ApiError::new(StatusCode::CONFLICT, text));
    }
    created_response(&rollouts.iter().map(GatewayRollout::to_json).collect::<Vec<_>>())
}

fn default_list_limit() -> i64 {
    500
}

#[derive(Deserialize)]
struct ListQuery {
    state_in: Vec<GatewayState>,
    #[serde(default = "default_list_limit")]
    limit: i64,
}

async fn list_rollouts(SharedState(service): SharedState<Shared>, request: Request) -> RouteResult {
    let query: ListQuery = parse_query(&request)?;
    let store = service.checked().await?;
    let statuses = query.state_in.iter().flat_map(|state| state.matching_statuses()).collect();
    let filter = RolloutFilter { status_in: Some(statuses), ..RolloutFilter::default() };
    let limit = usize::try_from(query.limit).unwrap_or(0);
    let mut found = Vec::new();
    let mut offset = 0;
    while found.len() < limit {
        let page = PageRequest { limit: Some(PAGE as u64), offset, ..PageRequest::default() };
        let rollouts = store.query_rollouts(&filter, &page).await?.items;
        let is_last = rollouts.len() < PAGE;
        offset += rollouts.len() as u64;
        found.extend(
            rollouts.into_iter().map(GatewayRollout::new).filter(|of| !of.extra.is_deleted),
        );
        if is_last {
            break;
        }
    }
    ok_response(&found.iter().take(limit).map(GatewayRollout::to_json).collect::<Vec<_>>())
}

fn default_page_limit() -> i64 {
    PAGE as i64
}

#[derive(Deserialize)]
struct TerminalQuery {
    #[serde(default)]
    after: i64,
    #[serde(default = "default_page_limit")]
    limit: i64,
}

async fn list_terminal_rollouts(
    SharedState(service): SharedState<Shared>,
    request: Request,
) -> RouteResult {
    let query: TerminalQuery = parse_query(&request)?;
    let store = service.checked().await?;
    let limit = usize::try_from(query.limit).unwrap_or(0).max(1);
    let mut after = u64::try_from(query.after).unwrap_or(0);
    let mut items = Vec::new();
    while items.len() < limit {
        let page_limit = PAGE.min(limit - items.len());
        let (changed, last) = store.wait_for_changes(after, page_limit, Duration::ZERO).await?;
        after = last;
        let is_last = changed.len() < page_limit;
        let ended = changed.into_iter().map(GatewayRollout::new);
        items.extend(
            ended.filter(|of| of.rollout.status.is_finished() && !of.extra.is_deleted).map(|of| {
                json!({
                    "rollout_id": of.rollout.id, "state": of.state(), "data_id": of.data_id(),
                    "is_train": of.is_train(),
                })
            }),
        );
        if is_last {
            break;
        }
    }
    let ended =
        [RolloutStatus::Succeeded, RolloutStatus::Failed, RolloutStatus::Cancelled].to_vec();
    let filter = RolloutFilter { status_in: Some(ended), ..RolloutFilter::default() };
    let page = PageRequest { limit: Some(1), ..PageRequest::default() };
    let total = store.query_rollouts(&filter, &page).await?.total;
    ok_response(&json!({ "items": items, "next_after": after, "total_terminal": total }))
}

async fn get_rollout(
    SharedState(service): SharedState<Shared>,
    Path(id): Path<String>,
) -> RouteResult {
    let store = service.checked().await?;
    let rollout = find_rollout(store, &id).await?;
    let attempts = read_attempt_ids(store, &id).await?;
    ok_response(&json!({ "rollout": rollout.to_json(), "attempts": attempts }))
}

/// Fields of a rollout's status that a controller reports. An absent field does not change the
/// stored value, and null clears the stored value.
#[derive(Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct StatusPatch {
    #[serde(deserialize_with = "present")]
    state: Option<Option<GatewayState>>,
    #[serde(deserialize_with = "present")]
    k8s_job_name: Option<Option<String>>,
    #[serde(deserialize_with = "present")]
    last_attempt_id: Option<Option<String>>,
    #[serde(deserialize_with = "present")]
    error_message: Option<Option<String>>,
}

#[derive(Deserialize)]
struct RolloutPatch {
    #[serde(default)]
    status: Option<StatusPatch>,
}

async fn patch_rollout(
    SharedState(service): SharedState<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let patch: RolloutPatch = parse_body(request).await?;
    // Of two concurrent reports, only one may find the transition permitted.
    let _permit = service.acquire_transition().await;
    let store = service.checked().await?;
    let GatewayRollout { rollout, metadata, mut extra } = find_rollout(store, &id).await?;
    let Some(status) = patch.status.filter(|status| *status != StatusPatch::default()) else {
        return ok_response(&GatewayRollout { rollout, metadata, extra }.to_json());
    };
    let state = GatewayState::from_status(rollout.status);
    let StatusPatch { state: next, k8s_job_name, last_attempt_id, error_message } = status;
    let is_announced = extra.is_started_by_event && next == Some(Some(GatewayState::Running));
    if let Some(next) = next
        && !next.is_some_and(|next| state.permits_transition_to(next))
        && !is_announced
    {
        let [from, to] = [Some(state), next].map(|state| match state {
            Some(state) => json!(state).as_str().unwrap_or_default().to_owned(),
            None => "None".to_owned(),
        });
        let text = format!("Rollout {id}: cannot transition {from} -> {to}");
        return Err(ApiError::new(StatusCode::CONFLICT, text));
    }
    extra.is_started_by_event &= next.is_none();
    extra.k8s_job_name = k8s_job_name.unwrap_or(extra.k8s_job_name);
    extra.last_attempt_id = last_attempt_id.unwrap_or(extra.last_attempt_id);
    extra.error_message = error_message.unwrap_or(extra.error_message);
    extra.reports += 1;
    extra.reported_at = Some(store.now());
    save_metadata(store, &id, &metadata, &extra).await?;
    match next.flatten() {
        None => {}
        Some(_) if is_announced => {}
        Some(GatewayState::Running) => {
            store.start_try(&id, None).await?;
            set_try_status(store, &id, TryStatus::Running).await?;
        }
        Some(GatewayState::Succeeded) => set_try_status(store, &id, TryStatus::Succeeded).await?,
        Some(_) if state == GatewayState::Running => {
            set_try_status(store, &id, TryStatus::Failed).await?;
        }
        Some(_) => {
            let failed = Some(RolloutStatus::Failed);
            let update = RolloutUpdate { status: failed, ..RolloutUpdate::default() };
            store.update_rollout(&id, &update).await?;
        }
    }
    ok_response(&find_rollout(store, &id).await?.to_json())
}

/// Sets the status of the latest try of the rollout `id`.
async fn set_try_status(store: &dyn Rollouts, id: &str, status: TryStatus) -> Result<(), ApiError> {
    let update = TryUpdate { status: Some(status), ..TryUpdate::default() };
    store.update_try(id, &TrySelector::Latest, &update).await?;
    Ok(())
}

async fn delete_rollout(
    SharedState(service): SharedState<Shared>,
    Path(id): Path<String>,
) -> Result<axum::response::Response, ApiError> {
    let _permit = service.acquire_transition().await;
    let store = service.store();
    if let Some(rollout) = store.rollout(&id).await? {
        let GatewayRollout { metadata, extra, .. } = GatewayRollout::new(rollout);
        store.cancel_rollouts(std::slice::from_ref(&id)).await?;
        save_metadata(store, &id, &metadata, &GatewayFields { is_deleted: true, ..extra }).await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
