//! Endpoints that describe the gateway and its models, and check their health, as clients of vLLM
//! and SGLang expect.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use levade_policy::{SampleRequest, SamplingParams, with_sampler_timeout};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::gateway::Model;
use crate::http::{IncomingRequest, json_response};
use crate::openai::build_response;
use crate::route::Route;
use levade_call::{ApiError, ErrorKind, TokenBackend};

/// Timeout for the token that a health check samples, and for reading the version of a sampler's
/// weights.
const PROBE: Duration = Duration::from_secs(20);

/// Query parameter that names a model. An empty name means the first model.
#[derive(Deserialize)]
pub(crate) struct ModelQuery {
    #[serde(default, deserialize_with = "crate::http::or_default")]
    model: String,
}

/// Handles `GET /version`, which returns the version of Levade.
pub(crate) async fn get_version() -> Response {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Handles `GET /health_generate`: samples one token from every local model that the caller can
/// call.
pub(crate) async fn check_generation(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let probed = async {
        let (caller, _) = incoming.into_call()?;
        // External chat APIs are not probed, because their completions may cost money.
        for model in
            callable_models(&gateway, &caller).iter().filter(|model| model.party.tokens().is_ok())
        {
            probe_model(model).await?;
        }
        Ok(json!({}))
    };
    build_response(probed.await)
}

/// Handles `GET /model_info`, and `GET /get_model_info`, which is the earlier name of the same
/// endpoint.
pub(crate) async fn get_model_info(
    State(gateway): State<Gateway>,
    Query(query): Query<ModelQuery>,
    incoming: IncomingRequest,
) -> Response {
    let reported = async {
        let model = find_model(&gateway, incoming, &query)?;
        Ok(json!({
            "model_path": model.party.model,
            "tokenizer_path": model.party.model,
            "is_generation": true,
            "preferred_sampling_params": null,
            "weight_version": read_weight_version(&model).await?,
            "has_image_understanding": false,
            "has_audio_understanding": false,
        }))
    };
    build_response(reported.await)
}

/// Handles `GET /server_info`, and `GET /get_server_info`, which is the earlier name of the same
/// endpoint.
pub(crate) async fn get_server_info(
    State(gateway): State<Gateway>,
    Query(query): Query<ModelQuery>,
    incoming: IncomingRequest,
) -> Response {
    let reported = async {
        let model = find_model(&gateway, incoming, &query)?;
        Ok(json!({
            "model_path": model.party.model,
            "served_model_name": model.party.model,
            "version": env!("CARGO_PKG_VERSION"),
            "context_length": model.party.tokens()?.context,
            "max_running_requests": gateway.0.options.running,
            "weight_version": read_weight_version(&model).await?,
        }))
    };
    build_response(reported.await)
}

/// Handles `GET /weight_info`, which returns the version of a model's weights.
pub(crate) async fn get_weight_info(
    State(gateway): State<Gateway>,
    Query(query): Query<ModelQuery>,
    incoming: IncomingRequest,
) -> Response {
    let reported = async {
        let model = find_model(&gateway, incoming, &query)?;
        Ok(json!({ "weight_version": read_weight_version(&model).await? }))
    };
    build_response(reported.await)
}

/// Handles `GET /tokenizer_info`: returns the special tokens and the chat template under the names
/// that a tokenizer's configuration uses.
pub(crate) async fn get_tokenizer_info(
    State(gateway): State<Gateway>,
    Query(query): Query<ModelQuery>,
    incoming: IncomingRequest,
) -> Response {
    build_response(find_model(&gateway, incoming, &query).and_then(|model| {
        let model = model.party.tokens()?;
        let chat = model.format.chat();
        let tokenizer = chat.tokenizer();
        let text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id));
        let named = |name: &str| chat.variables().get(name).cloned().unwrap_or(Value::Null);
        Ok(json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": text(tokenizer.bos()),
            "eos_token": text(tokenizer.eos().first().copied()),
            "pad_token": named("pad_token"),
            "unk_token": named("unk_token"),
            "chat_template": chat.template().source(),
            "model_max_length": model.context,
        }))
    }))
}

/// Returns the models that a caller can call: the models of the caller's attempt, or all models
/// outside of attempts.
pub(crate) fn callable_models(gateway: &Gateway, caller: &Caller) -> Vec<Model> {
    let Some(session) = &caller.session else { return gateway.models() };
    let mut found: Vec<Model> = Vec::new();
    for Route { party, .. } in &session.options.routes {
        if found.iter().all(|model| model.party.model != party.model) {
            found.push(Model { party: Arc::clone(party), created: 0 });
        }
    }
    found
}

/// Returns the model that `query` names. If `query` names no model, returns the first model that
/// the sender of the request can call.
fn find_model(
    gateway: &Gateway,
    incoming: IncomingRequest,
    query: &ModelQuery,
) -> Result<Model, ApiError> {
    let (caller, _) = incoming.into_call()?;
    let mut models = callable_models(gateway, &caller);
    let index =
        models.iter().position(|model| query.model.is_empty() || model.party.model == query.model);
    match index {
        Some(index) => Ok(models.swap_remove(index)),
        None => gateway.find_model(&query.model),
    }
}

/// Returns the version of the weights with which a model currently samples, as text.
async fn read_weight_version(model: &Model) -> Result<String, ApiError> {
    let sampler = &**model.party.tokens()?.sampler;
    let found = with_sampler_timeout(sampler, PROBE, sampler.version()).await;
    Ok(found
        .ok_or_else(|| {
            let message = format!(
                "timed out after {PROBE:?} waiting for the weight version of {:?}",
                model.party.model
            );
            ApiError::new(ErrorKind::Deadline, message)
        })??
        .to_string())
}

/// Samples one token from a model, to check that the model works.
async fn probe_model(model: &Model) -> Result<(), ApiError> {
    let TokenBackend { sampler, format, .. } = model.party.tokens()?;
    let tokenizer = format.chat().tokenizer();
    let first = tokenizer.bos().or(tokenizer.eos().first().copied()).unwrap_or(0);
    let params = SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() };
    let policy = model.party.policy.clone();
    let request = SampleRequest {
        id: "probe".into(),
        policy,
        prompt: vec![first],
        params,
        ..SampleRequest::default()
    };
    let probed = async { sampler.sample(request).await?.collect(PROBE).await };
    with_sampler_timeout(&**sampler, PROBE, probed).await.ok_or_else(|| {
        ApiError::new(
            ErrorKind::Deadline,
            format!("the model {:?} sampled no token within {PROBE:?}", model.party.model),
        )
    })??;
    Ok(())
}
