//! The server: routes of the paths to the handlers of the APIs.

use std::future::Future;
use std::sync::atomic::Ordering::Relaxed;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use levade_http::Access;
use levade_http::service::{self, key_of};
use tokio::net::TcpListener;

use super::response::{error_response, to_api_error};
use crate::gateway::Gateway;
use crate::{anthropic, client_sessions, info, openai, responses, rewards, sglang, tokens, vllm};
use levade_call::ApiError;

/// Returns the routes of all APIs. They are served at the root, and below the prefixes that name an
/// attempt and an agent.
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
        // Some clients check whether the server is reachable before their first call.
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

/// Returns whether a request uses Anthropic's API, whose errors have another format.
fn is_anthropic(uri: &Uri, headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
        || uri.path().split('/').any(|part| part == "messages")
}

/// Returns the response to a rejected request, in the format of the called API.
fn rejection_response(gateway: &Gateway, anthropic: bool, error: &ApiError) -> Response {
    if anthropic {
        anthropic::rejection_response(gateway, error)
    } else {
        error_response(error, &openai::error_body(error))
    }
}

async fn models(State(gateway): State<Gateway>, request: Request) -> Response {
    if is_anthropic(request.uri(), request.headers()) {
        anthropic::models.call(request, gateway).await
    } else {
        openai::models.call(request, gateway).await
    }
}

async fn model(State(gateway): State<Gateway>, request: Request) -> Response {
    if is_anthropic(request.uri(), request.headers()) {
        anthropic::model.call(request, gateway).await
    } else {
        openai::model.call(request, gateway).await
    }
}

/// Returns whether a request has the key of an attempt, which no web page knows.
fn bears_attempt_key(gateway: &Gateway, headers: &HeaderMap) -> bool {
    key_of(headers)
        .is_some_and(|key| gateway.session_of(key).is_ok_and(|session| session.is_some()))
}

/// Returns the routes of a gateway, which accepts requests to the hosts in `access`. [`serve`]
/// serves them over HTTP; a caller without connections can call them.
pub fn router(gateway: &Gateway, access: Access) -> Router {
    let attempt = "/rollout/{rollout}/attempt/{attempt}";
    let routes = Router::new()
        .merge(api())
        .nest(attempt, api())
        .nest(&format!("{attempt}/agent/{{agent}}"), api())
        .route("/metrics", get(metrics))
        .route("/rl/start_session", post(client_sessions::start))
        .route("/rl/set_reward", post(client_sessions::reward))
        .route("/rl/end_session", post(client_sessions::end))
        .route(&format!("{attempt}/"), get(health))
        .route(&format!("{attempt}/agent/{{agent}}/"), get(health));
    let [by_key, rejecting] = [gateway.clone(), gateway.clone()];
    service::with_rejections(
        routes,
        access,
        move |headers| {
            let options = &by_key.0.options;
            !options.open || !options.keys.is_empty() || bears_attempt_key(&by_key, headers)
        },
        move |request, rejection| {
            rejection_response(
                &rejecting,
                is_anthropic(request.uri(), request.headers()),
                &to_api_error(rejection),
            )
        },
    )
    .with_state(gateway.clone())
}

/// Serves a gateway until `stop` completes, and then completes the responses in flight.
///
/// # Errors
/// Returns an error if the listener fails.
pub async fn serve(
    gateway: &Gateway,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let access = gateway.0.options.access.clone().with_address(listener.local_addr()?.ip());
    service::serve(router(gateway, access), listener, stop).await
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
