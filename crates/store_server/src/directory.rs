//! Routes of workers, resources, server health and statistics.

use std::collections::BTreeMap;

use axum::extract::{Path, Request, State};
use levade_store::rollouts::Json;
use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};

use crate::openapi::{Routes, op};
use crate::request::{
    ResourcesQuery, WorkersQuery, check_is_object, parse_body, parse_json, parse_optional_body,
    parse_query, present, read_body_bytes, reject_null,
};
use crate::response::{ApiError, RouteResult, created_response, ok_response};
use crate::service::{Shared, WirePage};

/// Name of the store in its statistics.
const NAME: &str = "LevadeStore";

/// Returns the HTTP routes of workers, resources, health and statistics.
pub(crate) fn routes() -> Routes {
    let workers = op("List workers", 200, "Page<Worker>");
    let put = op("Add a version of resources", 200, "Resources").body("NamedResources");
    Routes::new("directory")
        .get("/health", health, op("Report that the server runs", 200, "Health"))
        .get("/statistics", get_statistics, op("Count what the store holds", 200, "Statistics"))
        .get("/workers", list_workers, workers.clone().query(WorkersQuery::FIELDS))
        .post("/workers/search", search_workers, workers.body("WorkersQuery"))
        .get("/workers/{id}", get_worker, op("Return a worker", 200, "Worker?"))
        .post(
            "/workers/{id}",
            update_worker,
            op("Record a heartbeat of a worker", 200, "Worker").optional_body("Heartbeat"),
        )
        .get(
            "/resources",
            list_resources,
            op("List resources", 200, "Page<Resources>").query(ResourcesQuery::FIELDS),
        )
        .post(
            "/resources",
            add_resources,
            op("Add resources under a new id", 201, "Resources").body("NamedResources"),
        )
        .get(
            "/resources/latest",
            get_latest_resources,
            op("Return the latest resources", 200, "Resources?"),
        )
        .post("/resources/latest", update_latest_resources, put.clone())
        .get(
            "/resources/{id}",
            get_resources,
            op("Return resources", 200, "Resources?").query(&["version"]),
        )
        .post("/resources/{id}", update_resources, put)
}

pub(crate) async fn health() -> RouteResult {
    ok_response(&json!({ "status": "ok" }))
}

async fn get_statistics(State(service): State<Shared>) -> RouteResult {
    let mut all = serde_json::to_value(service.store().statistics().await?).unwrap_or_default();
    all["name"] = NAME.into();
    all["uptime"] = json!(service.started.elapsed().as_secs_f64());
    ok_response(&all)
}

async fn list_workers(State(service): State<Shared>, request: Request) -> RouteResult {
    query_workers(&service, parse_query(&request)?).await
}

async fn search_workers(State(service): State<Shared>, request: Request) -> RouteResult {
    query_workers(&service, parse_body(request).await?).await
}

async fn query_workers(service: &Shared, query: WorkersQuery) -> RouteResult {
    let paging = query.paging();
    let page = paging.page(None)?;
    ok_response(&WirePage::new(
        service.checked().await?.query_workers(&query.filter(), &page).await?,
        &paging,
    ))
}

async fn get_worker(State(service): State<Shared>, Path(id): Path<String>) -> RouteResult {
    ok_response(&service.store().worker(&id).await?)
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
    let body: WorkerBody = parse_optional_body(request).await?;
    let stats = reject_null("heartbeat_stats", body.heartbeat_stats)?;
    stats.as_ref().map(|stats| check_is_object("heartbeat_stats", stats)).transpose()?;
    ok_response(&service.store().record_worker_heartbeat(&id, stats).await?)
}

async fn list_resources(State(service): State<Shared>, request: Request) -> RouteResult {
    let query: ResourcesQuery = parse_query(&request)?;
    let paging = query.paging();
    let page = paging.page(None)?;
    ok_response(&WirePage::new(
        service.store().query_resources(&query.filter(), &page).await?,
        &paging,
    ))
}

/// Parses the named resources in a request, and adds the defaults of the fields that a client may
/// omit.
fn parse_named_resources(bytes: &[u8]) -> Result<Json, ApiError> {
    let mut named: BTreeMap<String, Value> = parse_json(bytes)?;
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
    let value = parse_named_resources(&read_body_bytes(request).await?)?;
    created_response(&service.store().put_resources(None, &value).await?)
}

async fn get_latest_resources(State(service): State<Shared>) -> RouteResult {
    ok_response(&service.store().resources(None, None).await?)
}

#[derive(Deserialize)]
struct VersionQuery {
    /// Number of the version, as text. `None` selects the latest version. This field is an addition
    /// to Agent Lightning's format.
    #[serde(default)]
    version: Option<String>,
}

async fn get_resources(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let query: VersionQuery = parse_query(&request)?;
    let version = query.version.map(|text| {
        let wrong =
            || ApiError::unprocessable("int_parsing", &["query", "version"], "expected an integer");
        text.parse().map_err(|_| wrong())
    });
    ok_response(&service.store().resources(Some(&id), version.transpose()?).await?)
}

async fn update_latest_resources(service: State<Shared>, request: Request) -> RouteResult {
    update_resources(service, Path("latest".to_owned()), request).await
}

async fn update_resources(
    State(service): State<Shared>,
    Path(id): Path<String>,
    request: Request,
) -> RouteResult {
    let value = parse_named_resources(&read_body_bytes(request).await?)?;
    ok_response(&service.checked().await?.put_resources(Some(&id), &value).await?)
}
