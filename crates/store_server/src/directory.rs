//! Routes of workers, resources, health and statistics.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::routing::{get, post};
use levade_store::rollouts::Json;
use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};

use crate::request::{
    ResourcesQuery, WorkersQuery, body, bytes, not_null, object, optional_body, parse, present,
    query,
};
use crate::response::{ApiError, RouteResult, created, ok};
use crate::service::{Shared, WirePage};

/// Name of the store in its statistics.
const NAME: &str = "LevadeStore";

/// Returns the routes.
pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/health", get(health))
        .route("/statistics", get(statistics))
        .route("/workers", get(list_workers))
        .route("/workers/search", post(search_workers))
        .route("/workers/{id}", get(worker).post(update_worker))
        .route("/resources", get(list_resources).post(add_resources))
        .route("/resources/latest", get(latest_resources).post(update_latest_resources))
        .route("/resources/{id}", get(resources).post(update_resources))
}

async fn health() -> RouteResult {
    ok(&json!({ "status": "ok" }))
}

async fn statistics(State(service): State<Shared>) -> RouteResult {
    let mut all = serde_json::to_value(service.store().statistics().await?).unwrap_or_default();
    all["name"] = NAME.into();
    all["uptime"] = json!(service.started.elapsed().as_secs_f64());
    ok(&all)
}

async fn list_workers(State(service): State<Shared>, request: Request) -> RouteResult {
    found_workers(&service, query(&request)?).await
}

async fn search_workers(State(service): State<Shared>, request: Request) -> RouteResult {
    found_workers(&service, body(request).await?).await
}

async fn found_workers(service: &Shared, query: WorkersQuery) -> RouteResult {
    let paging = query.paging();
    let page = paging.page(None)?;
    ok(&WirePage::new(service.checked().await?.workers(&query.filter(), &page).await?, &paging))
}

async fn worker(State(service): State<Shared>, Path(id): Path<String>) -> RouteResult {
    ok(&service.store().worker(&id).await?)
}

#[derive(Deserialize)]
struct WorkerBody {
    #[serde(default, deserialize_with = "present")]
    heartbeat_stats: Option<Option<Json>>,
}

async fn update_worker(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let body: WorkerBody = optional_body(request).await?;
    let stats = not_null("heartbeat_stats", body.heartbeat_stats)?;
    stats.as_ref().map(|stats| object("heartbeat_stats", stats)).transpose()?;
    ok(&service.store().beat_worker(&id, stats).await?)
}

async fn list_resources(State(service): State<Shared>, request: Request) -> RouteResult {
    let query: ResourcesQuery = query(&request)?;
    let paging = query.paging();
    let page = paging.page(None)?;
    ok(&WirePage::new(service.store().query_resources(&query.filter(), &page).await?, &paging))
}

/// Parses named resources, with the defaults that clients may omit.
fn named_resources(bytes: &[u8]) -> Result<Json, ApiError> {
    let mut named: BTreeMap<String, Value> = parse(bytes)?;
    for (name, resource) in &mut named {
        let wrong = |message: String| {
            ApiError::unprocessable("union_tag_invalid", &["body", name], message)
        };
        let kind =
            resource.get("resource_type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let (required, defaults): (&[&str], Value) = match kind.as_str() {
            "llm" | "proxy_llm" => {
                (&["endpoint", "model"], json!({ "api_key": null, "sampling_parameters": {} }))
            }
            "prompt_template" => (&["template", "engine"], json!({})),
            _ => {
                let expected = "'prompt_template', 'llm', 'proxy_llm'";
                let message =
                    format!("the resource_type {kind:?} is none of the expected tags {expected}");
                return Err(wrong(message));
            }
        };
        for field in required {
            if !resource[*field].is_string() {
                let location = ["body", name, &kind, field];
                return Err(ApiError::unprocessable(
                    "string_type",
                    &location,
                    "Input should be a valid string",
                ));
            }
        }
        if kind == "prompt_template"
            && !["jinja", "f-string", "poml"].contains(&resource["engine"].as_str().unwrap_or(""))
        {
            return Err(wrong("the engine must be 'jinja', 'f-string' or 'poml'".to_owned()));
        }
        for (field, default) in defaults.as_object().into_iter().flatten() {
            if resource.get(field).is_none() {
                resource[field] = default.clone();
            }
        }
    }
    to_raw_value(&named).map_err(|error| ApiError::bad_request(error.to_string()))
}

async fn add_resources(State(service): State<Shared>, request: Request) -> RouteResult {
    let value = named_resources(&bytes(request).await?)?;
    created(&service.store().put_resources(None, &value).await?)
}

async fn latest_resources(State(service): State<Shared>) -> RouteResult {
    ok(&service.store().resources(None, None).await?)
}

#[derive(Deserialize)]
struct VersionQuery {
    /// Number of the version, as text. Addition of this server.
    #[serde(default)]
    version: Option<String>,
}

async fn resources(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let query: VersionQuery = query(&request)?;
    let version = query.version.map(|text| {
        let wrong =
            || ApiError::unprocessable("int_parsing", &["query", "version"], "expected an integer");
        text.parse().map_err(|_| wrong())
    });
    ok(&service.store().resources(Some(&id), version.transpose()?).await?)
}

async fn update_latest_resources(service: State<Shared>, request: Request) -> RouteResult {
    update_resources(service, Path("latest".to_owned()), request).await
}

async fn update_resources(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let value = named_resources(&bytes(request).await?)?;
    ok(&service.checked().await?.put_resources(Some(&id), &value).await?)
}
