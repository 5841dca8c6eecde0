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

/// Returns the routes of all APIs. They are served at the root, and under the path prefixes that
/// name an attempt and an agent.
fn api_routes() -> Router<Gateway> {
    let v1 = Router::new()
        .route("/chat/completions", post(openai::create_chat_completion))
        .route("/completions", post(openai::create_completion))
        .route("/models", get(list_models))
        .route("/models/{*model}", get(get_model))
        .route("/responses", post(responses::create_response))
        .route(
            "/responses/{response}",
            get(responses::get_response).delete(responses::delete_response),
        )
        .route("/responses/input_tokens", post(responses::count_input_tokens))
        .route("/responses/{response}/input_items", get(responses::list_input_items))
        .route("/messages", post(anthropic::create_message))
        .route("/messages/count_tokens", post(anthropic::count_tokens))
        // Some clients check whether the server is reachable before their first call.
        .route("/", get(check_health));
    Router::new()
        // Clients differ in whether a base URL ends in /v1.
        .merge(v1.clone())
        .nest("/v1", v1)
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/inference/v1/generate", post(vllm::generate))
        .route("/generate", post(sglang::generate))
        .route("/tokenizer_info", get(info::get_tokenizer_info))
        .route("/version", get(info::get_version))
        .route("/weight_info", get(info::get_weight_info))
        .route("/model_info", get(info::get_model_info))
        .route("/get_model_info", get(info::get_model_info))
        .route("/server_info", get(info::get_server_info))
        .route("/get_server_info", get(info::get_server_info))
        .route("/health_generate", get(info::check_generation))
        .route("/reward", post(rewards::post_reward))
        .route("/health", get(check_health))
        .route("/ping", get(check_health).post(check_health))
}

async fn check_health() -> Response {
    StatusCode::OK.into_response()
}

async fn get_metrics(State(gateway): State<Gateway>) -> Response {
    let crate::gateway::GatewayInner { metrics, waiting, rejoined, .. } = &*gateway.0;
    let text =
        crate::metrics::format_metrics(metrics, waiting.load(Relaxed), rejoined.load(Relaxed));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// Returns whether a request uses Anthropic's API, whose errors have another format.
fn is_anthropic(uri: &Uri, headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
        || uri.path().split('/').any(|part| part == "messages")
}

/// Returns the HTTP error response to a rejected request, in Anthropic's format if `anthropic` is
/// true, otherwise in OpenAI's.
fn rejection_response(gateway: &Gateway, anthropic: bool, error: &ApiError) -> Response {
    if anthropic {
        anthropic::rejection_response(gateway, error)
    } else {
        error_response(error, &openai::error_body(error))
    }
}

async fn list_models(State(gateway): State<Gateway>, request: Request) -> Response {
    if is_anthropic(request.uri(), request.headers()) {
        anthropic::list_models.call(request, gateway).await
    } else {
        openai::list_models.call(request, gateway).await
    }
}

async fn get_model(State(gateway): State<Gateway>, request: Request) -> Response {
    if is_anthropic(request.uri(), request.headers()) {
        anthropic::get_model.call(request, gateway).await
    } else {
        openai::get_model.call(request, gateway).await
    }
}

/// Returns whether a request has the key of an attempt. Web pages cannot know such a key, so these
/// requests need no check of their origin.
fn has_attempt_key(gateway: &Gateway, headers: &HeaderMap) -> bool {
    key_of(headers)
        .is_some_and(|key| gateway.find_session_by_key(key).is_ok_and(|session| session.is_some()))
}

/// Returns the HTTP router of a gateway, which accepts requests to the hosts in `access`. [`serve`]
/// serves the router on a socket. Tests can call the router without a network.
pub fn build_router(gateway: &Gateway, access: Access) -> Router {
    let attempt = "/rollout/{rollout}/attempt/{attempt}";
    let routes = Router::new()
        .merge(api_routes())
        .nest(attempt, api_routes())
        .nest(&format!("{attempt}/agent/{{agent}}"), api_routes())
        .route("/metrics", get(get_metrics))
        .route("/rl/start_session", post(client_sessions::start_session))
        .route("/rl/set_reward", post(client_sessions::set_reward))
        .route("/rl/end_session", post(client_sessions::end_session))
        .route(&format!("{attempt}/"), get(check_health))
        .route(&format!("{attempt}/agent/{{agent}}/"), get(check_health));
    let [by_key, rejecting] = [gateway.clone(), gateway.clone()];
    service::with_rejections(
        routes,
        access,
        move |headers| {
            let options = &by_key.0.options;
            !options.open || !options.keys.is_empty() || has_attempt_key(&by_key, headers)
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

/// Serves a gateway's HTTP API until `stop` completes, and then completes the responses in flight.
///
/// # Errors
/// Returns an error if the listener fails.
pub async fn serve(
    gateway: &Gateway,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let access = gateway.0.options.access.clone().with_address(listener.local_addr()?.ip());
    service::serve(build_router(gateway, access), listener, stop).await
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
