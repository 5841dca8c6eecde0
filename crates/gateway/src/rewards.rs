//! `POST …/reward`: rewards that an attempt's own program gives.

use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use crate::fault::Fault;
use crate::http::{Incoming, failed, json as document, read};
use crate::openai;
use crate::session::Reward;

/// Answers `POST …/reward`.
pub(crate) async fn reward(incoming: Incoming) -> Response {
    match note(incoming) {
        Ok(()) => document(StatusCode::OK, &json!({ "noted": true })),
        Err(fault) => failed(&fault, &openai::fault(&fault)),
    }
}

fn note(incoming: Incoming) -> Result<(), Fault> {
    let (session, body) = incoming.of_reward()?;
    let reward: Reward = read(&body)?;
    session.reward(reward)
}
