//! `/v1/models`.

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::write::respond;
use crate::fault::Fault;
use crate::gateway::Gateway;
use crate::http::Incoming;
use crate::model::Model;

fn describe(model: &Model) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "levade",
        "root": model.name,
        "max_model_len": model.tokens().ok().map(|model| model.context),
    })
}

/// Models that a caller can ask for: those of its attempt, by the names of their policies too.
fn known(gateway: &Gateway, incoming: Incoming) -> Result<Vec<Value>, Fault> {
    let caller = incoming.caller?;
    let mut found: Vec<Value> = Vec::new();
    match &caller.session {
        Some(session) => {
            for route in &session.options.routes {
                let value = describe(&route.model);
                if !found.contains(&value) {
                    found.push(value);
                }
            }
        }
        None => found.extend(gateway.models().iter().map(|model| describe(model))),
    }
    Ok(found)
}

/// Answers `GET /v1/models`.
pub(crate) async fn models(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    respond(known(&gateway, incoming).map(|found| json!({ "object": "list", "data": found })))
}

/// Answers `GET /v1/models/NAME`; names may have slashes.
pub(crate) async fn model(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    let name = incoming.part("model");
    let found = known(&gateway, incoming).and_then(|models| {
        let found = models.into_iter().find(|model| model["id"] == name.as_str());
        found.map_or_else(|| gateway.model(&name).map(|model| describe(&model)), Ok)
    });
    respond(found)
}
