//! The server: which path is answered by whom.

use std::future::Future;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use tokio::net::TcpListener;

use crate::fault::{Fault, Kind};
use crate::gateway::Gateway;
use crate::{anthropic, info, openai, responses, rewards, sglang, tokens, vllm};

/// Paths of an API, below a prefix that says who calls or below none.
fn api() -> Router<Gateway> {
    let v1 = Router::new()
        .route("/chat/completions", post(openai::chat))
        .route("/completions", post(openai::completions))
        .route("/models", get(openai::models))
        .route("/models/{*model}", get(openai::model))
        .route("/responses", post(responses::responses))
        .route("/responses/{response}", get(responses::get).delete(responses::delete))
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
    let waiting = gateway.0.waiting.load(std::sync::atomic::Ordering::Relaxed);
    let text = gateway.0.metrics.text(waiting);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

async fn nowhere(request: Request) -> Response {
    let message = format!("nothing is at {} {}", request.method(), request.uri().path());
    let fault = Fault::new(Kind::NotFound, message);
    crate::http::failed(&fault, &openai::fault(&fault))
}

impl Gateway {
    /// All paths of the gateway.
    pub fn router(&self) -> Router {
        let attempt = "/rollout/{rollout}/attempt/{attempt}";
        Router::new()
            .merge(api())
            .nest(attempt, api())
            .nest(&format!("{attempt}/agent/{{agent}}"), api())
            .route("/metrics", get(metrics))
            .route(&format!("{attempt}/"), get(health))
            .route(&format!("{attempt}/agent/{{agent}}/"), get(health))
            .fallback(nowhere)
            .method_not_allowed_fallback(nowhere)
            .with_state(self.clone())
    }
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
    // Frames of a stream are small: held back until the client confirms the one before, each would take 40
    // ms.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps its small packets back");
        }
    });
    axum::serve(listener, gateway.router()).with_graceful_shutdown(stop).await
}
