//! The server: which path is answered by whom.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use levade_http::{Access, Rejection, Verdict};
use tokio::net::TcpListener;

use super::answer::failed;
use super::incoming::key_of;
use crate::gateway::Gateway;
use crate::{anthropic, info, openai, responses, rewards, sglang, tokens, vllm};
use levade_call::{ApiError, ErrorKind};

/// Paths of an API, below a prefix that says who calls or below none.
fn api() -> Router<Gateway> {
    let v1 = Router::new()
        .route("/chat/completions", post(openai::chat))
        .route("/completions", post(openai::completions))
        .route("/models", get(models))
        .route("/models/{*model}", get(model))
        .route("/responses", post(responses::responses))
        .route("/responses/{response}", get(responses::get).delete(responses::delete))
        .route("/responses/input_tokens", post(responses::input_tokens))
        .route("/responses/{response}/input_items", get(responses::input_items))
        .route("/messages", post(anthropic::messages))
        .route("/messages/count_tokens", post(anthropic::count_tokens))
        // Some clients ask whether anybody is there before their first call.
        .route("/", get(health));
    Router::new()
        // Clients differ in whether a base URL ends in /v1.
        .merge(v1.clone())
        .nest("/v1", v1)
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/inference/v1/generate", post(vllm::generate))
        .route("/generate", post(sglang::generate))
        .route("/tokenizer_info", get(info::tokenizer_info))
        .route("/version", get(info::version))
        .route("/weight_info", get(info::weight_info))
        .route("/model_info", get(info::model_info))
        .route("/get_model_info", get(info::model_info))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/health_generate", get(info::health_generate))
        .route("/reward", post(rewards::reward))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
}

async fn health() -> Response {
    StatusCode::OK.into_response()
}

async fn metrics(State(gateway): State<Gateway>) -> Response {
    let crate::gateway::Inner { metrics, waiting, rejoined, .. } = &*gateway.0;
    let text = crate::metrics::text(metrics, waiting.load(Relaxed), rejoined.load(Relaxed));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// Returns whether a request is of Anthropic's API, whose errors have a shape of their own.
fn is_anthropic(uri: &Uri, headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version") || uri.path().split('/').any(|part| part == "messages")
}

/// Returns the response to a rejected request, in the shape of the API that it is of.
fn rejected(gateway: &Gateway, anthropic: bool, fault: &ApiError) -> Response {
    match anthropic {
        true => anthropic::rejected(gateway, fault),
        false => failed(fault, &openai::fault(fault)),
    }
}

async fn models(State(gateway): State<Gateway>, request: Request) -> Response {
    match is_anthropic(request.uri(), request.headers()) {
        true => anthropic::models.call(request, gateway).await,
        false => openai::models.call(request, gateway).await,
    }
}

async fn model(State(gateway): State<Gateway>, request: Request) -> Response {
    match is_anthropic(request.uri(), request.headers()) {
        true => anthropic::model.call(request, gateway).await,
        false => openai::model.call(request, gateway).await,
    }
}

async fn nowhere(State(gateway): State<Gateway>, request: Request) -> Response {
    let message = format!("nothing is at {} {}", request.method(), request.uri().path());
    let fault = ApiError::new(ErrorKind::NotFound, message);
    rejected(&gateway, is_anthropic(request.uri(), request.headers()), &fault)
}

/// Answers a request with a method that its path does not have. The router adds the header `Allow`.
async fn wrong_method(State(gateway): State<Gateway>, request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let fault =
        ApiError::new(ErrorKind::Method, format!("{path} has no method {method}; see the header Allow"));
    rejected(&gateway, is_anthropic(request.uri(), request.headers()), &fault)
}

/// Returns whether a request bears the key of an attempt, which no page has.
fn bears_attempt_key(gateway: &Gateway, headers: &HeaderMap) -> bool {
    key_of(headers).is_some_and(|key| gateway.session_of(&key).is_ok_and(|session| session.is_some()))
}

/// Rejects requests that a foreign web page can cause, and adds the headers that an allowed one needs.
async fn guarded(
    State((gateway, access)): State<(Gateway, Arc<Access>)>,
    request: Request,
    next: Next,
) -> Response {
    let options = &gateway.0.options;
    let needs_key =
        !options.open || !options.keys.is_empty() || bears_attempt_key(&gateway, request.headers());
    let (mut response, cors) =
        match access.check(request.method(), request.uri(), request.headers(), needs_key) {
            Verdict::Allowed(cors) => (next.run(request).await, cors),
            Verdict::Preflight(cors) => (StatusCode::NO_CONTENT.into_response(), cors),
            Verdict::Rejected(Rejection { status, message }) => {
                let kind = match status {
                    StatusCode::UNSUPPORTED_MEDIA_TYPE => ErrorKind::MediaType,
                    _ => ErrorKind::Forbidden,
                };
                let anthropic = is_anthropic(request.uri(), request.headers());
                return rejected(&gateway, anthropic, &ApiError::new(kind, message));
            }
        };
    cors.apply(response.headers_mut());
    response
}

/// Returns the routes of a gateway, which answers as the hosts that `access` allows.
pub(crate) fn router(gateway: &Gateway, access: Access) -> Router {
    let attempt = "/rollout/{rollout}/attempt/{attempt}";
    Router::new()
        .merge(api())
        .nest(attempt, api())
        .nest(&format!("{attempt}/agent/{{agent}}"), api())
        .route("/metrics", get(metrics))
        .route(&format!("{attempt}/"), get(health))
        .route(&format!("{attempt}/agent/{{agent}}/"), get(health))
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state((gateway.clone(), Arc::new(access)), guarded))
        .with_state(gateway.clone())
}

/// Serves a gateway until `stop` ends, and the answers under way with it.
///
/// # Errors
/// When the listener fails.
pub async fn serve(
    gateway: &Gateway,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let access = gateway.0.options.access.clone().bound_to(listener.local_addr()?.ip());
    // Frames of a stream are small: held back until the client confirms the one before, each would take 40
    // ms.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its small packets back");
        }
    });
    axum::serve(listener, router(gateway, access)).with_graceful_shutdown(stop).await
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
