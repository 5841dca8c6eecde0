//! Routes of rollouts, their queue and their tries.

use std::time::Duration;

use axum::extract::{Path, Request, State};
use levade_store::rollouts::{
    DEFAULT_QUEUE, Json, LeaseRequest, NewRollout, Rollout, RolloutConfig, RolloutStatus,
    RolloutUpdate, TryStatus, TryUpdate,
};
use serde::Deserialize;

use crate::openapi::{Routes, op};
use crate::request::{
    RolloutsQuery, TriesQuery, check_is_object, parse_body, parse_optional_body, parse_query,
    parse_try_selector, present, raw, reject_null,
};
use crate::response::{ApiError, RouteResult, created_response, ok_response};
use crate::service::{Shared, WirePage};

/// Maximum duration of a wait if the request sets no limit. A client that waits longer repeats the
/// request.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// Returns the HTTP routes of rollouts, of their queue and of their tries.
pub(crate) fn routes() -> Routes {
    let rollouts = op("List rollouts", 200, "Page<Rollout>");
    let tries = op("List the attempts of a rollout", 200, "Page<Attempt>");
    let report = op("Report on an attempt", 200, "Attempt").body("AttemptUpdate");
    let latest = op("Return the latest attempt", 200, "Attempt?");
    let update_latest = op("Report on the latest attempt", 200, "Attempt").body("AttemptUpdate");
    Routes::new("rollouts")
        .post(
            "/queues/rollouts/enqueue",
            enqueue_rollouts,
            op("Enqueue rollouts", 201, "[Rollout]").body("Enqueue"),
        )
        .post(
            "/queues/rollouts/dequeue",
            dequeue_rollouts,
            op("Lease rollouts", 200, "[Rollout]").optional_body("Dequeue"),
        )
        .get("/rollouts", list_rollouts, rollouts.clone().query(RolloutsQuery::FIELDS))
        .post(
            "/rollouts",
            start_rollout,
            op("Start a rollout past the queue", 201, "Rollout").body("NewRollout"),
        )
        .post("/rollouts/search", search_rollouts, rollouts.body("RolloutsQuery"))
        .get("/rollouts/{id}", get_rollout, op("Return a rollout", 200, "Rollout"))
        .post(
            "/rollouts/{id}",
            update_rollout,
            op("Replace fields of a rollout", 200, "Rollout").body("RolloutUpdate"),
        )
        .get("/rollouts/{id}/attempts", list_tries, tries.clone().query(TriesQuery::FIELDS))
        .post(
            "/rollouts/{id}/attempts",
            start_try,
            op("Start an attempt", 201, "Rollout").optional_body("WorkerName"),
        )
        .post("/rollouts/{id}/attempts/search", search_tries, tries.body("TriesQuery"))
        .get("/rollouts/{id}/attempts/latest", get_latest_try, latest)
        .post("/rollouts/{id}/attempts/latest", update_latest_try, update_latest)
        .post("/rollouts/{id}/attempts/{attempt_id}", update_try, report)
        .post(
            "/waits/rollouts",
            wait_for_rollouts,
            op("Wait for rollouts to end", 200, "[Rollout]").body("Wait"),
        )
}

/// Purpose of a rollout in Agent Lightning's protocol.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RolloutMode {
    Train,
    Val,
    Test,
}

impl RolloutMode {
    fn name(self) -> String {
        match self {
            RolloutMode::Train => "train",
            RolloutMode::Val => "val",
            RolloutMode::Test => "test",
        }
        .to_owned()
    }
}

/// Request body: a rollout to enqueue or to start. The fields after `worker_id` are additions to
/// Agent Lightning's format.
#[derive(Debug, Deserialize)]
struct RolloutBody {
    input: Json,
    #[serde(default)]
    mode: Option<RolloutMode>,
    #[serde(default)]
    resources_id: Option<String>,
    #[serde(default)]
    config: Option<RolloutConfig>,
    #[serde(default)]
    metadata: Option<Json>,
    #[serde(default)]
    worker_id: Option<String>,
    #[serde(default)]
    rollout_id: Option<String>,
    #[serde(default)]
    idempotency_key: Option<String>,
    #[serde(default)]
    queue: Option<String>,
    #[serde(default)]
    priority: i32,
}

fn check_config(config: &RolloutConfig) -> Result<(), ApiError> {
    match config.max_tries {
        0 => Err(ApiError::unprocessable(
            "greater_than_equal",
            &["body", "config", "max_attempts"],
            "Input should be greater than or equal to 1",
        )),
        _ => Ok(()),
    }
}

impl RolloutBody {
    fn into_new(self) -> Result<NewRollout, ApiError> {
        let config = self.config.unwrap_or_default();
        check_config(&config)?;
        if let Some(metadata) = &self.metadata {
            check_is_object("metadata", metadata)?;
        }
        Ok(NewRollout {
            id: self.rollout_id,
            key: self.idempotency_key,
            queue: self.queue.unwrap_or_else(|| DEFAULT_QUEUE.to_owned()),
            priority: self.priority,
            input: self.input,
            mode: self.mode.map(RolloutMode::name),
            resources_id: self.resources_id,
            config,
            metadata: self.metadata,
        })
    }
}

#[derive(Deserialize)]
struct EnqueueBody {
    rollouts: Vec<RolloutBody>,
}

async fn enqueue_rollouts(State(service): State<Shared>, request: Request) -> RouteResult {
    let bodies = parse_body::<EnqueueBody>(request).await?.rollouts.into_iter();
    let new = bodies.map(RolloutBody::into_new).collect::<Result<Vec<_>, _>>()?;
    let rollouts = service.checked().await?.enqueue(&new).await?;
    created_response(&rollouts.into_iter().map(Rollout::without_try).collect::<Vec<_>>())
}

#[derive(Deserialize)]
struct DequeueBody {
    #[serde(default = "default_limit")]
    limit: i64,
    #[serde(default)]
    worker_id: Option<String>,
    /// Name of the queue to lease from. This field is an addition to Agent Lightning's format.
    #[serde(default)]
    queue: Option<String>,
    /// Maximum wait for the first rollout, in seconds. This field is an addition to Agent
    /// Lightning's format.
    #[serde(default)]
    wait_seconds: f64,
}

fn default_limit() -> i64 {
    1
}

async fn dequeue_rollouts(State(service): State<Shared>, request: Request) -> RouteResult {
    let body: DequeueBody = parse_optional_body(request).await?;
    let store = service.checked().await?;
    let request = LeaseRequest {
        queues: vec![body.queue.unwrap_or_else(|| DEFAULT_QUEUE.to_owned())],
        wait: to_duration(body.wait_seconds),
        ..LeaseRequest::new(usize::try_from(body.limit).unwrap_or(0), body.worker_id.as_deref())
    };
    tokio::select! {
        leased = store.lease_rollouts(&request) => ok_response(&leased?),
        () = service.stopped(), if !request.wait.is_zero() => ok_response(&[(); 0]),
    }
}

/// Converts a number of seconds to a duration. A negative number becomes zero.
fn to_duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(MAX_WAIT).min(MAX_WAIT)
}

async fn start_rollout(State(service): State<Shared>, request: Request) -> RouteResult {
    let mut body: RolloutBody = parse_body(request).await?;
    let worker = body.worker_id.take();
    let new = body.into_new()?;
    created_response(&service.checked().await?.start_rollout(&new, worker.as_deref()).await?)
}

async fn list_rollouts(State(service): State<Shared>, request: Request) -> RouteResult {
    query_rollouts(&service, parse_query(&request)?).await
}

async fn search_rollouts(State(service): State<Shared>, request: Request) -> RouteResult {
    query_rollouts(&service, parse_body(request).await?).await
}

async fn query_rollouts(service: &Shared, query: RolloutsQuery) -> RouteResult {
    let paging = query.paging();
    let page = paging.page(None)?;
    let rollouts = service.checked().await?.query_rollouts(&query.filter(), &page).await?;
    ok_response(&WirePage::new(rollouts, &paging))
}

async fn get_rollout(State(service): State<Shared>, Path(id): Path<String>) -> RouteResult {
    match service.checked().await?.rollout(&id).await? {
        Some(rollout) => ok_response(&rollout),
        None => {
            Err(ApiError::new(axum::http::StatusCode::NOT_FOUND, format!("Rollout {id} not found")))
        }
    }
}

#[derive(Deserialize)]
struct UpdateBody {
    #[serde(default, deserialize_with = "raw")]
    input: Option<Json>,
    #[serde(default, deserialize_with = "present")]
    mode: Option<Option<RolloutMode>>,
    #[serde(default, deserialize_with = "present")]
    resources_id: Option<Option<String>>,
    #[serde(default, deserialize_with = "present")]
    status: Option<Option<RolloutStatus>>,
    #[serde(default, deserialize_with = "present")]
    config: Option<Option<RolloutConfig>>,
    #[serde(default, deserialize_with = "present")]
    metadata: Option<Option<Json>>,
}

async fn update_rollout(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let body: UpdateBody = parse_body(request).await?;
    let config = reject_null("config", body.config)?;
    config.as_ref().map(check_config).transpose()?;
    body.metadata
        .iter()
        .flatten()
        .try_for_each(|metadata| check_is_object("metadata", metadata))?;
    let update = RolloutUpdate {
        input: body.input,
        mode: body.mode.map(|mode| mode.map(RolloutMode::name)),
        resources_id: body.resources_id,
        status: reject_null("status", body.status)?,
        config,
        metadata: body.metadata,
    };
    let updated = service.checked().await?.update_rollout(&id, &update).await;
    let updated = updated.map_err(|error| match ApiError::from(error) {
        error if error.status == axum::http::StatusCode::NOT_FOUND => {
            let text =
                format!("Item does not exist with primary key(s): {id}; Rollout {id} not found");
            ApiError::new(error.status, text)
        }
        error => error,
    })?;
    ok_response(&updated.without_try())
}

#[derive(Deserialize)]
struct WorkerName {
    #[serde(default)]
    worker_id: Option<String>,
}

async fn start_try(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let worker = parse_optional_body::<WorkerName>(request).await?.worker_id;
    created_response(&service.checked().await?.start_try(&id, worker.as_deref()).await?)
}

async fn list_tries(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    query_tries(&service, &id, &parse_query(&request)?).await
}

async fn search_tries(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    query_tries(&service, &id, &parse_body(request).await?).await
}

async fn query_tries(service: &Shared, id: &str, query: &TriesQuery) -> RouteResult {
    let paging = query.paging();
    let page = paging.page(Some("sequence_id"))?;
    ok_response(&WirePage::new(service.checked().await?.query_tries(id, &page).await?, &paging))
}

async fn get_latest_try(State(service): State<Shared>, Path(id): Path<String>) -> RouteResult {
    let rollout = service.checked().await?.rollout(&id).await?;
    ok_response(&rollout.and_then(|rollout| rollout.latest_try))
}

#[derive(Deserialize)]
struct TryBody {
    #[serde(default, deserialize_with = "present")]
    status: Option<Option<TryStatus>>,
    #[serde(default, deserialize_with = "present")]
    worker_id: Option<Option<String>>,
    #[serde(default, deserialize_with = "present")]
    last_heartbeat_time: Option<Option<f64>>,
    #[serde(default, deserialize_with = "present")]
    metadata: Option<Option<Json>>,
}

async fn update_latest_try(
    service: State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    update_try(service, Path((id, "latest".to_owned())), request).await
}

async fn update_try(
    State(service): State<Shared>,
    Path((id, attempt_id)): Path<(String, String)>,
    request: Request,
) -> RouteResult {
    let body: TryBody = parse_body(request).await?;
    let update = TryUpdate {
        status: reject_null("status", body.status)?,
        worker_id: reject_null("worker_id", body.worker_id)?,
        last_heartbeat_time: reject_null("last_heartbeat_time", body.last_heartbeat_time)?,
        metadata: reject_null("metadata", body.metadata)?,
    };
    update.metadata.as_ref().map(|metadata| check_is_object("metadata", metadata)).transpose()?;
    ok_response(
        &service.checked().await?.update_try(&id, &parse_try_selector(attempt_id), &update).await?,
    )
}

#[derive(Deserialize)]
struct WaitBody {
    rollout_ids: Vec<String>,
    #[serde(default)]
    timeout: Option<f64>,
}

async fn wait_for_rollouts(State(service): State<Shared>, request: Request) -> RouteResult {
    let body: WaitBody = parse_body(request).await?;
    let store = service.checked().await?;
    let wait = body.timeout.map_or(MAX_WAIT, to_duration);
    // If a try exceeds its timeout during the wait, the server's timer ends it, which also ends
    // this wait.
    let finished = tokio::select! {
        finished = store.wait_until_finished(&body.rollout_ids, wait) => finished?,
        () = service.stopped() => {
            store.wait_until_finished(&body.rollout_ids, Duration::ZERO).await?
        }
    };
    ok_response(&finished.into_iter().map(Rollout::without_try).collect::<Vec<_>>())
}
