//! Serves `GET /v1/prometheus/`, and measures the duration of all requests.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::openapi::{Routes, op};
use crate::response::ApiError;
use crate::service::Shared;

/// Returns the route of the metrics.
pub(crate) fn routes() -> Routes {
    let metrics = op("Return metrics in the text format of Prometheus", 200, "");
    Routes::new("service").get("/v1/prometheus/", show, metrics.clone()).get(
        "/v1/prometheus",
        show,
        metrics,
    )
}

/// Records the duration of a request. Paths without a route share a label, so that clients cannot
/// create series.
pub(crate) async fn measure(
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

/// Returns the metrics in the text format of Prometheus.
async fn show(State(service): State<Shared>) -> Result<Response, ApiError> {
    let rows = service.store().statistics().await?;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    Ok((kind, service.metrics.text(&rows)).into_response())
}
