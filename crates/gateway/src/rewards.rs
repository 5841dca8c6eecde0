//! `POST …/reward`: rewards that an attempt's own program gives.

use axum::response::Response;
use serde_json::json;

use crate::fault::Fault;
use crate::http::{Incoming, read};
use crate::openai::respond;
use crate::session::Reward;

/// Answers `POST …/reward`.
pub(crate) async fn reward(incoming: Incoming) -> Response {
    respond(note(incoming).map(|()| json!({ "noted": true })))
}

fn note(incoming: Incoming) -> Result<(), Fault> {
    let (session, body) = incoming.of_reward()?;
    let reward: Reward = read(&body)?;
    session.reward(reward)
}
