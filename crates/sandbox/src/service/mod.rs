//! HTTP service with SandboxFusion's API, over a [`Sandbox`].
//!
//! `POST /run_code` and `POST /run_jupyter` respond as SandboxFusion does: 200 even if the sandbox
//! failed, with the status `SandboxError` in the body, and 422 if the request is invalid. In
//! addition, the service responds with 401 to requests without a valid key if keys are configured,
//! and with 429 if the queue is full.
//!
//! `GET /v1/ping` returns `pong`, and `GET /protection` the protection under which code runs. If no
//! keys are configured, requests that a web page can cause get 403 or 415.

mod fusion;

use std::future::Future;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use levade_http::{Access, service};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::TcpListener;

use crate::error::SandboxError;
use crate::limits::Limits;
use crate::run::{EndReason, Language, Run};
use crate::sandbox::Sandbox;
use crate::session::SessionOptions;

pub use fusion::{
    CellResponse, CodeResponse, CommandResult, CommandStatus, Exception, JupyterResponse, RunCode,
    RunJupyter, Status,
};
use fusion::{LANGUAGES, decode_files, to_command_result};

/// Maximum size of a request body, in bytes.
const MAX_BYTES: usize = 128 << 20;

/// HTTP service with SandboxFusion's API, which runs code in a sandbox.
#[derive(Clone)]
pub struct Service(Arc<ServiceInner>);

struct ServiceInner {
    sandbox: Sandbox,
    limits: Limits,
    keys: Vec<String>,
    access: Access,
}

impl Service {
    /// Creates a service. Requests must have one of the API keys `keys`; if `keys` is empty, no key
    /// is required. `limits` are the maxima of a request: a larger memory limit is reduced to the
    /// maximum, and a longer time is rejected.
    pub fn new(sandbox: Sandbox, limits: Limits, keys: &[String], access: Access) -> Self {
        Service(Arc::new(ServiceInner { sandbox, limits, keys: keys.to_vec(), access }))
    }

    /// Returns a router with all HTTP routes of the service.
    pub fn router(&self) -> Router {
        let routes = Router::new()
            .route("/run_code", post(run_code))
            .route("/run_jupyter", post(run_jupyter))
            .route("/protection", get(get_protection))
            .route_layer(from_fn_with_state(self.clone(), authenticate))
            .route("/v1/ping", get(|| async { Json("pong") }))
            .layer(DefaultBodyLimit::max(MAX_BYTES));
        let needs_key = !self.0.keys.is_empty();
        let routes = service::with_rejections(
            routes,
            self.0.access.clone(),
            move |_| needs_key,
            |_, rejection| detail_response(rejection.status, rejection.message),
        );
        routes.with_state(self.clone())
    }

    /// Returns the resource limits of a request. `name` is the name of the request's field for the
    /// time limit.
    ///
    /// # Errors
    /// Returns an error if the time exceeds the maximum of the service.
    fn request_limits(
        &self,
        name: &str,
        seconds: f64,
        memory_mb: i64,
    ) -> Result<Limits, SandboxError> {
        let max_limits = self.0.limits;
        if seconds > max_limits.seconds {
            return Err(SandboxError::Request(format!(
                "the request has `{name}` = {seconds}, but this service runs code for at most \
                 {} seconds; request less time, or start the service with a higher --max-seconds",
                max_limits.seconds
            )));
        }
        let memory = u64::try_from(memory_mb)
            .ok()
            .filter(|memory| *memory > 0)
            .unwrap_or(max_limits.memory_mb);
        Ok(Limits { seconds, memory_mb: memory.min(max_limits.memory_mb), ..max_limits })
    }
}

/// Serves requests until `stop` completes and the requests in progress have ended.
///
/// # Errors
/// Returns an error if the listener fails.
pub async fn serve(
    service: &Service,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    service::serve(service.router(), listener, stop).await
}

/// Rejects a request that has no valid API key.
async fn authenticate(State(service): State<Service>, request: Request, next: Next) -> Response {
    if service::is_valid_key(&service.0.keys, service::key_of(request.headers())) {
        return next.run(request).await;
    }
    detail_response(StatusCode::UNAUTHORIZED, "a key is needed: Authorization: Bearer KEY")
}

/// Creates an error response in FastAPI's format: `{"detail": …}`.
fn detail_response(status: StatusCode, detail: impl Serialize) -> Response {
    (status, Json(json!({ "detail": detail }))).into_response()
}

fn parse_body<T: DeserializeOwned>(sent: &Bytes) -> Result<T, SandboxError> {
    serde_json::from_slice(sent).map_err(|error| SandboxError::Request(error.to_string()))
}

/// Converts an error of the sandbox to a response: an HTTP error if the client can act on it, and
/// otherwise the response that `failed` creates.
fn to_response(error: SandboxError, failed: impl FnOnce(String) -> Response) -> Response {
    match error {
        SandboxError::Busy { .. } | SandboxError::Sessions { .. } => {
            let mut response = detail_response(StatusCode::TOO_MANY_REQUESTS, error.to_string());
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            response
        }
        SandboxError::Request(why) => {
            let wrong = json!([{ "type": "value_error", "loc": ["body"], "msg": why }]);
            detail_response(StatusCode::UNPROCESSABLE_ENTITY, wrong)
        }
        other => {
            tracing::error!(error = %other, "the sandbox failed");
            failed(other.to_string())
        }
    }
}

async fn get_protection(State(service): State<Service>) -> Response {
    let sandbox = &service.0.sandbox;
    let text = json!({
        "protection": sandbox.protection().name(),
        "achieved": sandbox.protection().achieved,
        "missing": sandbox.protection().missing,
        "python": sandbox.python(),
        "memory": if sandbox.has_cgroups() { "cgroup" } else { "watch" },
    });
    Json(text).into_response()
}

async fn run_code(State(service): State<Service>, sent: Bytes) -> Response {
    let response = async {
        let request: RunCode = parse_body(&sent)?;
        let Some(language) = Language::from_name(&request.language) else {
            if !LANGUAGES.contains(&request.language.as_str()) {
                return Err(SandboxError::Request(format!(
                    "language is {:?}, which is unknown",
                    request.language
                )));
            }
            let message =
                format!("{:?} is not supported here; use python or bash", request.language);
            return Ok(CodeResponse::from_sandbox_error(message));
        };
        let run = Run {
            language,
            code: request.code,
            stdin: request.stdin.unwrap_or_default().into_bytes(),
            files: decode_files(&request.files).map_err(SandboxError::Request)?,
            fetch: request.fetch_files,
            environment: Default::default(),
            limits: service.request_limits(
                "run_timeout",
                request.run_timeout,
                request.memory_limit_mb,
            )?,
        };
        let outcome = service.0.sandbox.run(&run).await?;
        Ok(CodeResponse::from_outcome(&outcome, &run.limits))
    };
    match response.await {
        Ok(response) => Json(response).into_response(),
        Err(error) => {
            to_response(error, |why| Json(CodeResponse::from_sandbox_error(why)).into_response())
        }
    }
}

async fn run_jupyter(State(service): State<Service>, sent: Bytes) -> Response {
    let response = async { run_cells(&service, parse_body(&sent)?).await };
    match response.await {
        Ok(response) => Json(response).into_response(),
        Err(error) => {
            to_response(error, |why| Json(JupyterResponse::from_sandbox_error(why)).into_response())
        }
    }
}

/// Runs the cells of a request in order, up to the last cell or to a cell that ends the
/// interpreter.
async fn run_cells(
    service: &Service,
    request: RunJupyter,
) -> Result<JupyterResponse, SandboxError> {
    if request.kernel != "python3" {
        return Err(SandboxError::Request(format!(
            "kernel is {:?}, but must be python3",
            request.kernel
        )));
    }
    let limits =
        service.request_limits("total_timeout", request.total_timeout, request.memory_limit_mb)?;
    let files = decode_files(&request.files).map_err(SandboxError::Request)?;
    let options = SessionOptions {
        files,
        fetch: request.fetch_files,
        environment: Default::default(),
        limits,
    };
    let mut session = service.0.sandbox.session(options)?;
    let mut done = Vec::with_capacity(request.cells.len());
    let mut ended = EndReason::Exit(0);
    // Only the cells count: their wait in the queue behind other runs does not.
    let mut spent = 0.0;
    for code in &request.cells {
        let remaining = request.total_timeout - spent;
        let cell_seconds = if request.cell_timeout > 0.0 {
            remaining.min(request.cell_timeout)
        } else {
            remaining
        };
        if cell_seconds <= 0.0 {
            ended = EndReason::TimeLimit;
            break;
        }
        session.set_seconds(cell_seconds);
        let cell = session.cell(code).await?;
        spent += cell.seconds;
        done.push(CellResponse::from_cell(&cell));
        if let Some(end) = cell.ended {
            ended = end;
            break;
        }
    }
    let is_complete = done.len() == request.cells.len() && ended == EndReason::Exit(0);
    let mut found = std::collections::BTreeMap::new();
    for (name, content) in session.finish().await? {
        if let Ok(content) = content {
            found.insert(name, BASE64_STANDARD.encode(content));
        }
    }
    let mut driver = to_command_result(ended, &limits);
    driver.execution_time = Some(spent);
    Ok(JupyterResponse {
        status: if is_complete { Status::Success } else { Status::Failed },
        driver: Some(driver),
        cells: done,
        files: found,
        ..JupyterResponse::from_sandbox_error(String::new())
    })
}

#[cfg(test)]
#[path = "service_tests.rs"]
mod tests;
