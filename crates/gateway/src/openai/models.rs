//! The endpoint `/v1/models`.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::write::build_response;
use crate::gateway::Gateway;
use crate::gateway::Model;
use crate::http::IncomingRequest;
use crate::info;
use levade_call::ApiError;

fn describe_model(model: &Model) -> Value {
    json!({
        "id": model.party.model,
        "object": "model",
        "created": model.created,
        "owned_by": "levade",
        "root": model.party.model,
        "max_model_len": model.party.tokens().ok().map(|model| model.context),
    })
}

/// Returns the models that the sender of a request can call, described in OpenAI's format.
fn describe_callable_models(
    gateway: &Gateway,
    incoming: IncomingRequest,
) -> Result<Vec<Value>, ApiError> {
    let caller = incoming.caller?;
    Ok(info::callable_models(gateway, &caller).iter().map(describe_model).collect())
}

/// Handles `GET /v1/models`.
pub(crate) async fn list_models(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    build_response(
        describe_callable_models(&gateway, incoming)
            .map(|found| json!({ "object": "list", "data": found })),
    )
}

/// Handles `GET /v1/models/NAME`. A model's name can contain slashes.
pub(crate) async fn get_model(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let name = incoming.path_param("model");
    let found = describe_callable_models(&gateway, incoming).and_then(|models| {
        let found = models.into_iter().find(|model| model["id"] == name.as_str());
        found.map_or_else(|| gateway.find_model(&name).map(|model| describe_model(&model)), Ok)
    });
    build_response(found)
}
