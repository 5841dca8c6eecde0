//! `POST …/reward`: rewards that the program of an attempt posts.

use axum::response::Response;
use serde_json::json;

use crate::http::{IncomingRequest, parse_json_body};
use crate::openai::build_response;
use crate::session::Reward;
use levade_call::ApiError;

/// Handles `POST …/reward`, with which the program of an attempt posts a reward.
pub(crate) async fn post_reward(incoming: IncomingRequest) -> Response {
    build_response(record_reward(incoming).map(|()| json!({ "noted": true })))
}

fn record_reward(incoming: IncomingRequest) -> Result<(), ApiError> {
    let (session, body) = incoming.into_reward()?;
    let reward: Reward = parse_json_body(&body)?;
    session.add_reward(reward)
}
