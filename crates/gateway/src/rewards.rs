//! `POST …/reward`: rewards that the program of an attempt posts.

use axum::response::Response;
use serde_json::json;

use crate::http::{IncomingRequest, read};
use crate::openai::respond;
use crate::session::Reward;
use levade_call::ApiError;

/// Handles `POST …/reward`, with which the program of an attempt posts a reward.
pub(crate) async fn reward(incoming: IncomingRequest) -> Response {
    respond(note(incoming).map(|()| json!({ "noted": true })))
}

fn note(incoming: IncomingRequest) -> Result<(), ApiError> {
    let (session, body) = incoming.into_reward()?;
    let reward: Reward = read(&body)?;
    session.reward(reward)
}
