//! HTTP server of rollouts and runs, in the protocols of Agent Lightning and in Levade's own.
//!
//! Runners, tracers, trainers and LLM proxies that use `agentlightning==0.3.0` work against it
//! unchanged: they reach it as `LightningStoreClient(url)`. The routes are those of Agent
//! Lightning's server below `/v1/agl`, OpenTelemetry's `/v1/traces`, and `/v1/prometheus/`. Agents
//! of Agent Lightning 0.1 use `/task`, `/resources` and `/rollout`. Programs of 1.0 use the routes
//! of rollouts and events below `/api`. All protocols share one queue, and `/openapi.json`
//! describes their routes.
//!
//! [`serve`] runs the server over any implementation of [`Rollouts`]. `levade-store-client` calls
//! the methods of that trait by the routes below `/v1/rollouts`, and stores of runs by the routes
//! below `/v1/runs`.
//!
//! # Differences from Agent Lightning's server
//! - Unknown ids return 404, so that clients fail at once instead of repeating the request for 8 s.
//! - `/v1/traces` also accepts JSON, and reports spans of unknown rollouts as rejected instead of
//!   failing.
//! - Timeouts are also enforced while no request arrives.
//! - Requests may carry additional fields: a rollout `idempotency_key`, `queue` and `priority`; a
//!   request for work `wait_seconds`; a request for sequence ids `count`.
//! - A server can require API keys.
//!
//! # Guarantees
//! - **Waits end.** A wait without a limit ends after an hour, and every wait ends when the server
//!   stops.
//! - **Foreign web pages are rejected.** Without keys, a server accepts only requests under its own
//!   names, and cross-origin requests only from permitted origins.
//! - **One trainer per run.** Only the trainer that holds the lease of a run can write it.
//!
//! Out of scope: the state of rollouts and runs, which `levade-store` keeps.

mod auth;
mod data_interface;
mod directory;
mod gateway_api;
mod ledger;
mod metrics;
mod monitoring;
mod native;
mod openapi;
#[cfg(test)]
mod openapi_tests;
mod otlp;
#[cfg(test)]
mod protocol_tests;
mod request;
mod response;
mod rollouts;
mod runs;
mod service;
mod spans;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use axum::middleware::from_fn_with_state;
use bytes::Bytes;
use levade_http::Access;
use levade_store::rollouts::Rollouts;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_http::compression::predicate::SizeAbove;
use tower_http::compression::{CompressionLayer, CompressionLevel};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use tower_service::Service as _;

use openapi::Routes;
use response::ApiError;
use runs::ServedRuns;
use service::{Service, Shared};

/// Maximum time for which a server that stops completes requests in progress.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Minimum size of a compressed response, in bytes. A smaller response would take longer to
/// compress than to send.
const MIN_COMPRESSED: u64 = 16 << 10;

/// Options of the store server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// API keys. Each request except `/v1/agl/health` must contain one of these keys. If empty, no
    /// key is required.
    pub keys: Vec<String>,
    /// Host names of the server and origins of web pages that requests can have if no key is
    /// required. The permitted origins should equal [`cors_origins`](Self::cors_origins).
    pub access: Access,
    /// Origins whose web pages can call the server. `*` permits all origins.
    pub cors_origins: Vec<String>,
    /// Minimum interval between two searches for expired tries that requests trigger. Zero searches
    /// at every request whose result depends on expired tries. Defaults to 10 s.
    pub scan_debounce: Duration,
    /// Interval between two searches for expired tries while no request triggers one. Defaults to 1
    /// s.
    pub scan_interval: Duration,
    /// Directory for the stores of runs, which is created if it does not exist. `None` keeps the
    /// stores in memory.
    pub runs_dir: Option<PathBuf>,
    /// Duration of the lease by which a trainer holds its run, without renewal. Defaults to 60 s.
    pub run_lease: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            keys: Vec::new(),
            access: Access::default(),
            cors_origins: Vec::new(),
            scan_debounce: Duration::from_secs(10),
            scan_interval: Duration::from_secs(1),
            runs_dir: None,
            run_lease: Duration::from_secs(60),
        }
    }
}

/// Serves a rollout store over HTTP until `stop` finishes. Then requests in progress are completed,
/// and waiting requests end early.
///
/// # Errors
/// Returns an error if the listener fails, or if an origin of `options` is not a valid header
/// value.
pub async fn serve(
    store: Arc<dyn Rollouts>,
    options: ServerOptions,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let scan_interval = options.scan_interval;
    let Server { routes, service, stopping } = Server::new(store, options)?;
    let stop = async move {
        stop.await;
        let _ = stopping.send(true);
    };
    let timer = service.scan_every(scan_interval);
    let overdue = async {
        service.stopped().await;
        tokio::time::sleep(STOP_GRACE).await;
        tracing::warn!("closed connections that did not end in time");
    };
    tokio::select! {
        served = levade_http::service::serve(routes, listener, stop) => served,
        () = timer => Ok(()),
        () = overdue => Ok(()),
    }
}

/// A server without a listener, whose requests are passed to [`call`](Self::call). Simulations use
/// this type instead of [`serve`].
pub struct Server {
    routes: Router,
    service: Shared,
    stopping: watch::Sender<bool>,
}

impl Server {
    /// Creates a server without a listener over the rollout store `store`.
    ///
    /// # Errors
    /// Returns an error if an origin of `options` is not a valid header value.
    pub fn new(store: Arc<dyn Rollouts>, options: ServerOptions) -> std::io::Result<Self> {
        let (stopping, stopped) = watch::channel(false);
        let runs = ServedRuns::new(options.runs_dir.clone(), options.run_lease);
        let service = Arc::new(Service::new(store, runs, options.scan_debounce, stopped));
        Ok(Server { routes: build_router(Arc::clone(&service), options)?, service, stopping })
    }

    /// Handles one request and returns the response.
    ///
    /// # Errors
    /// Returns an error if the body of the response breaks off.
    pub async fn call(&self, request: Request<Bytes>) -> std::io::Result<Response<Bytes>> {
        // A router is always ready, and never fails.
        let Ok(response) = self.routes.clone().call(request.map(Body::from)).await;
        let (head, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.map_err(std::io::Error::other)?;
        Ok(Response::from_parts(head, body))
    }

    /// Searches for tries that exceeded a timeout and ends them, once per `interval`, until the
    /// future is dropped.
    pub async fn scan_every(&self, interval: Duration) {
        self.service.scan_every(interval).await;
    }
}

/// Returns all documented HTTP routes of the server.
fn routes() -> Routes {
    let agl = rollouts::routes().merge(directory::routes()).merge(spans::routes());
    agl.with_prefix("/v1/agl")
        .merge(otlp::routes())
        .merge(monitoring::routes())
        .merge(gateway_api::routes())
        .merge(data_interface::routes())
}

/// Returns the HTTP router of the server: all routes, with the checks of API keys and origins.
fn build_router(service: Shared, options: ServerOptions) -> std::io::Result<Router> {
    let ServerOptions { keys, access, cors_origins, .. } = options;
    let cors = build_cors_layer(&cors_origins)?;
    let routes = routes()
        .into_router()
        .merge(native::routes())
        .merge(ledger::routes())
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "Not Found"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(from_fn_with_state(Arc::clone(&service), monitoring::record_duration))
        .layer(from_fn_with_state(Arc::new(auth::AccessRules { keys, access }), auth::check_access))
        .layer(
            CompressionLayer::new()
                .quality(CompressionLevel::Fastest)
                .compress_when(SizeAbove::new(MIN_COMPRESSED)),
        );
    let routes = match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    Ok(routes.with_state(service))
}

/// Returns the layer for cross-origin resource sharing (CORS), or `None` if no origin is permitted.
fn build_cors_layer(origins: &[String]) -> std::io::Result<Option<CorsLayer>> {
    if origins.is_empty() {
        return Ok(None);
    }
    let origin = if origins.iter().any(|origin| origin.trim() == "*") {
        // A wildcard is not permitted together with credentials, so the response repeats the
        // request's origin.
        AllowOrigin::mirror_request()
    } else {
        let values =
            origins.iter().map(|origin| HeaderValue::from_str(origin.trim().trim_end_matches('/')));
        AllowOrigin::list(values.collect::<Result<Vec<_>, _>>().map_err(std::io::Error::other)?)
    };
    let private = HeaderName::from_static("retry-after");
    let layer = CorsLayer::new()
        .allow_origin(origin)
        .allow_methods(AllowMethods::list([
            Method::GET,
            Method::POST,
            Method::PATCH,
            Method::DELETE,
            Method::OPTIONS,
        ]))
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([private])
        .allow_credentials(true);
    Ok(Some(layer))
}
