//! The HTTP service: Search-R1's `/retrieve`, Agent-R1's `/search`, and `/health`.
//!
//! Responses have the formats that clients of Search-R1 and Agent-R1 expect. Errors are returned as
//! JSON, `{"error": {"code", "message"}, "detail"}`; `detail` is for clients that expect FastAPI's
//! format.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use levade_http::{Access, Rejection, service};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tracing::debug;

use crate::{Hit, Mode, SearchError, Searcher};

/// Value of the `Retry-After` header in the responses of a busy server, in seconds.
const RETRY_AFTER: u64 = 1;

/// Options of the HTTP search service.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// API keys. Each request except `/health` must contain one of these keys. If empty, no key is
    /// required.
    pub keys: Vec<String>,
    /// Host names that the service accepts if no key is required, and origins whose web pages can
    /// call the service.
    pub access: Access,
    /// Number of passages per query if the request does not set it. Defaults to 3.
    pub top_k: usize,
    /// Maximum size of a request body, in bytes. Defaults to 16 MiB.
    pub body_bytes: usize,
}

impl Default for HttpOptions {
    fn default() -> Self {
        HttpOptions { keys: Vec::new(), access: Access::default(), top_k: 3, body_bytes: 16 << 20 }
    }
}

struct SearchService {
    searcher: Searcher,
    options: HttpOptions,
}

type SharedState = Arc<SearchService>;

/// An HTTP error response to a request that was rejected or failed.
struct ErrorResponse {
    status: StatusCode,
    message: String,
}

impl ErrorResponse {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        ErrorResponse { status, message: message.into() }
    }

    fn invalid_request(message: impl Into<String>) -> Self {
        ErrorResponse::new(StatusCode::BAD_REQUEST, message)
    }

    /// Returns the error code that the JSON body of the response contains.
    fn code(&self) -> &'static str {
        match self.status {
            StatusCode::BAD_REQUEST => "invalid",
            StatusCode::UNAUTHORIZED => "unauthorised",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::METHOD_NOT_ALLOWED => "method",
            StatusCode::PAYLOAD_TOO_LARGE => "too_large",
            StatusCode::SERVICE_UNAVAILABLE => "busy",
            StatusCode::INTERNAL_SERVER_ERROR => "internal",
            _ => "forbidden",
        }
    }
}

impl From<SearchError> for ErrorResponse {
    fn from(error: SearchError) -> Self {
        let status = match &error {
            SearchError::Query(_) => StatusCode::BAD_REQUEST,
            SearchError::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            SearchError::Embedding(error) if error.is_transient() => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ErrorResponse::new(status, error.to_string())
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let code = self.code();
        let ErrorResponse { status, message } = self;
        debug!(%status, message, "rejected a request");
        let body = json!({ "error": { "code": code, "message": message }, "detail": message });
        let mut response = (status, Json(body)).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER.into());
        }
        if status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Request body of Search-R1's route `/retrieve`.
#[derive(Deserialize)]
struct RetrieveRequest {
    queries: Vec<String>,
    #[serde(default)]
    topk: Option<usize>,
    #[serde(default)]
    return_scores: bool,
}

/// Request body of Agent-R1's route `/search`. Exactly one of `query` and `queries` must be set.
#[derive(Deserialize)]
struct SearchRequest {
    #[serde(default)]
    query: Option<String>,
    #[serde(default)]
    queries: Option<Vec<String>>,
    #[serde(default)]
    top_k: Option<usize>,
}

/// A passage in Search-R1's response format. Its dense server returns only `contents`; its BM25
/// server also returns the title and the text.
#[derive(Serialize)]
struct ResponseDocument {
    id: String,
    contents: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    title: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

impl SearchService {
    fn to_document(&self, hit: Hit) -> ResponseDocument {
        let contents = hit.passage.contents();
        let parts = self.searcher.mode() == Mode::Bm25;
        let part = |text: String| parts.then_some(text);
        let title = part(hit.passage.title);
        let text = part(hit.passage.text);
        ResponseDocument { id: hit.passage.id, contents, title, text }
    }

    /// Rejects a request without a valid API key if the service requires a key.
    fn check_key(&self, headers: &HeaderMap) -> Result<(), ErrorResponse> {
        if service::is_valid_key(&self.options.keys, service::key_of(headers)) {
            Ok(())
        } else {
            Err(ErrorResponse::new(StatusCode::UNAUTHORIZED, service::WRONG_KEY))
        }
    }

    /// Checks the API key of a request, and parses its body as JSON.
    async fn read_json<T: DeserializeOwned>(&self, request: Request) -> Result<T, ErrorResponse> {
        self.check_key(request.headers())?;
        let (parts, body) = request.into_parts();
        let body = service::read_body(&parts.headers, body, self.options.body_bytes).await;
        let body =
            body.map_err(|Rejection { status, message }| ErrorResponse::new(status, message))?;
        service::read_json(&body)
            .map_err(|malformed| ErrorResponse::invalid_request(malformed.message))
    }

    /// Finds the best passages for each query. A `top_k` of `None` or 0 selects the default number,
    /// as in Search-R1.
    async fn find_passages(
        &self,
        queries: Vec<String>,
        top_k: Option<usize>,
    ) -> Result<Vec<Vec<Hit>>, ErrorResponse> {
        let count = top_k.filter(|count| *count > 0).unwrap_or(self.options.top_k);
        Ok(self.searcher.search(queries, count).await?)
    }

    /// Runs a search request in Agent-R1's format, and returns the response body.
    async fn run_search(&self, search: SearchRequest) -> Result<Json<Value>, ErrorResponse> {
        let started = Instant::now();
        let queries = match (search.queries, search.query) {
            (Some(queries), None) => queries,
            (None, Some(query)) => vec![query],
            (None, None) => {
                return Err(ErrorResponse::invalid_request(
                    "the request has neither `query` nor `queries`; set one of them",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(ErrorResponse::invalid_request(
                    "the request sets both `query` and `queries`; set only one of them",
                ));
            }
        };
        let found = self.find_passages(queries.clone(), search.top_k).await?;
        let search_time = started.elapsed().as_secs_f64();
        let results = queries.into_iter().zip(found).map(|(query, hits)| {
            let hits: Vec<Value> = hits
                .into_iter()
                .map(|hit| json!({ "score": hit.score, "document": hit.passage.contents() }))
                .collect();
            json!({ "query": query, "results": hits })
        });
        let results: Vec<Value> = results.collect();
        let total_time = started.elapsed().as_secs_f64();
        Ok(Json(json!({
            "query_results": results, "total_time": total_time, "search_time": search_time,
        })))
    }
}

async fn retrieve(
    State(service): State<SharedState>,
    request: Request,
) -> Result<Json<Value>, ErrorResponse> {
    let RetrieveRequest { queries, topk, return_scores } = service.read_json(request).await?;
    let found = service.find_passages(queries, topk).await?;
    let lists = found.into_iter().map(|hits| {
        hits.into_iter()
            .map(|hit| {
                let score = hit.score;
                if return_scores {
                    json!({ "document": service.to_document(hit), "score": score })
                } else {
                    json!(service.to_document(hit))
                }
            })
            .collect::<Vec<_>>()
    });
    Ok(Json(json!({ "result": lists.collect::<Vec<_>>() })))
}

async fn search(
    State(service): State<SharedState>,
    request: Request,
) -> Result<Json<Value>, ErrorResponse> {
    let search = service.read_json(request).await?;
    service.run_search(search).await
}

async fn search_by_url(
    State(service): State<SharedState>,
    headers: HeaderMap,
    pairs: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<Value>, ErrorResponse> {
    service.check_key(&headers)?;
    let Query(pairs) = pairs.map_err(|error| ErrorResponse::invalid_request(error.body_text()))?;
    let mut search = SearchRequest { query: None, queries: None, top_k: None };
    for (name, value) in pairs {
        match name.as_str() {
            "query" => search.query = Some(value),
            "queries" => search.queries.get_or_insert_default().push(value),
            "top_k" => {
                let count = value.parse();
                search.top_k = Some(count.map_err(|_| {
                    ErrorResponse::invalid_request(format!(
                        "the parameter `top_k` is {value:?}, but it must be a whole number"
                    ))
                })?);
            }
            _ => {}
        }
    }
    service.run_search(search).await
}

async fn health(State(service): State<SharedState>) -> Json<Value> {
    let manifest = service.searcher.index().manifest();
    Json(json!({
        "status": "healthy", "passages": manifest.passages, "mode": service.searcher.mode().name(),
    }))
}

/// Creates the HTTP routes of a search service for `searcher`.
pub fn router(searcher: Searcher, options: HttpOptions) -> Router {
    let access = options.access.clone();
    let needs_key = !options.keys.is_empty();
    let routes = Router::new()
        .route("/retrieve", post(retrieve))
        .route("/search", get(search_by_url).post(search))
        .route("/health", get(health));
    let service = Arc::new(SearchService { searcher, options });
    service::with_rejections(
        routes,
        access,
        move |_| needs_key,
        |_, Rejection { status, mut message }| {
            if status == StatusCode::NOT_FOUND {
                message += "; available routes: POST /retrieve, GET and POST /search, GET /health";
            }
            ErrorResponse::new(status, message).into_response()
        },
    )
    .with_state(service)
}

/// Serves `searcher` on `listener` until `stop` resolves. Then completes the requests in progress.
///
/// # Errors
/// Returns an error if the listener fails.
pub async fn serve(
    searcher: Searcher,
    mut options: HttpOptions,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    options.access = options.access.with_address(listener.local_addr()?.ip());
    service::serve(router(searcher, options), listener, stop).await
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
