//! `/v1/responses` and `/v1/responses/ID`.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::recall::Recall;
use super::request::{self, Asked};
use super::write::{Writer, fault};
use crate::answering::Caller;
use crate::call::Call;
use crate::fault::{Fault, Kind};
use crate::gateway::Gateway;
use crate::http::{Incoming, answer, failed, json as document};

/// Answers `POST /v1/responses`.
pub(crate) async fn responses(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    let ping = gateway.0.options.ping;
    match prepare(&gateway, incoming) {
        Err(found) => failed(&found, &fault(&found)),
        Ok((caller, call, writer, streams)) => {
            let begun = gateway.call(&caller, call).await;
            answer(begun, writer, streams, ping).await
        }
    }
}

/// Who calls, and what was remembered for them.
fn recall(gateway: &Gateway, incoming: Incoming) -> Result<(Caller, Recall, bytes::Bytes), Fault> {
    let key = incoming.key.clone();
    let (caller, body) = incoming.in_order()?;
    let recall = Recall::new(gateway, caller.session.clone(), key.as_deref());
    Ok((caller, recall, body))
}

fn prepare(gateway: &Gateway, incoming: Incoming) -> Result<(Caller, Call, Writer, bool), Fault> {
    let (caller, recall, body) = recall(gateway, incoming)?;
    let Asked { call, streams, told } = request::read(gateway, &recall, &body)?;
    Ok((caller, call, Writer::new(told, recall), streams))
}

fn unknown(id: &str) -> Fault {
    Fault::new(Kind::NotFound, format!("Response with id '{id}' not found."))
}

fn respond(found: Result<Value, Fault>) -> Response {
    match found {
        Ok(body) => document(StatusCode::OK, &body),
        Err(found) => failed(&found, &fault(&found)),
    }
}

/// Answers `GET /v1/responses/ID`.
pub(crate) async fn get(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    let id = incoming.part("response");
    let found = recall(&gateway, incoming).and_then(|(_, recall, _)| {
        recall.get(&id).map(|response| response.body.clone()).ok_or_else(|| unknown(&id))
    });
    respond(found)
}

/// Answers `DELETE /v1/responses/ID`.
pub(crate) async fn delete(State(gateway): State<Gateway>, incoming: Incoming) -> Response {
    let id = incoming.part("response");
    let found = recall(&gateway, incoming).and_then(|(_, recall, _)| match recall.remove(&id) {
        true => Ok(json!({ "id": id, "object": "response", "deleted": true })),
        false => Err(unknown(&id)),
    });
    respond(found)
}
