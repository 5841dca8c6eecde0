//! Serves `GET /v1/prometheus/`, and measures the duration of all requests.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::openapi::{Routes, op};
use crate::response::ApiError;
use crate::service::Shared;

/// Returns the HTTP route of the metrics.
pub(crate) fn routes() -> Routes {
    let metrics = op("Return metrics in the text format of Prometheus", 200, "");
    Routes::new("service").get("/v1/prometheus/", get_metrics, metrics.clone()).get(
        "/v1/prometheus",
        get_metrics,
        metrics,
    )
}

/// Middleware that records the duration of each request. All paths without a route share one label,
/// so that clients cannot create new time series.
pub(crate) async fn record_duration(
    State(service): State<Shared>,
    request: Request,
    next: Next,
) -> Response {
    let route =
        request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    let method = request.method().to_string();
    let start = Instant::now();
    let response = next.run(request).await;
    service.metrics.record((method, route, response.status().as_u16()), start.elapsed());
    response
}

/// Responds with the metrics in the text format of Prometheus.
async fn get_metrics(State(service): State<Shared>) -> Result<Response, ApiError> {
    let rows = service.store().statistics().await?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, service.metrics.to_prometheus_text(&rows)).into_response())
}
