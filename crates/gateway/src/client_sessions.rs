//! `POST /rl/start_session`, `/rl/set_reward` and `/rl/end_session`: sessions of agents that run
//! outside of this process. The routes and their fields match AReaL's proxy.
//!
//! A key of the server starts a session. The key that the response contains permits the calls of
//! the session, its rewards and its end. A key of the server permits the last two as well, if the
//! body names the session.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use levade_call::{ApiError, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::gateway::Gateway;
use crate::http::{IncomingRequest, parse_json_body};
use crate::openai::build_response;
use crate::session::{NO_REWARDS, Reward, Session};
use crate::session_host::{EndRequest, EndedSession, HostedSession, SessionHost};

/// Response body that describes a started session. It contains secret keys and has no `Debug`.
#[derive(Serialize)]
struct StartedSession<'a> {
    session_id: &'a str,
    /// API key for the session's calls, for its rewards, and for ending the session.
    api_key: &'a str,
    /// API key that permits only posting rewards to the session.
    reward_key: &'a str,
    /// URL path of the session's endpoint, relative to the server's address.
    path: String,
    /// Task that the server has chosen. `None` if the client chooses its task.
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<Value>,
}

/// Request body with which a client sets the reward of a session.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RewardRequest {
    #[serde(alias = "value")]
    reward: f64,
    #[serde(default)]
    session_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    agent: Option<String>,
    #[serde(default)]
    turn: Option<u32>,
    #[serde(default)]
    interaction_id: Option<String>,
}

/// Handles `POST /rl/start_session`.
pub(crate) async fn start_session(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let started = async {
        let host = require_session_host(&gateway)?;
        let caller = incoming.caller?;
        if caller.session.is_some() {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "the key belongs to a session; start another session with a key of the server",
            ));
        }
        let HostedSession { session, task } =
            host.start(parse_or_default(&incoming.body?)?).await?;
        Ok(json!(StartedSession {
            session_id: &session.options.attempt,
            api_key: session.key(),
            reward_key: session.reward_key(),
            path: session.path(),
            task,
        }))
    };
    build_response(started.await)
}

/// Handles `POST /rl/set_reward`.
pub(crate) async fn set_reward(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let set = async {
        let host = require_session_host(&gateway)?;
        let (found, body) = (incoming.caller?.session, incoming.body?);
        let RewardRequest { reward, session_id, name, agent, turn, interaction_id } =
            parse_json_body(&body)?;
        if interaction_id.is_some() {
            return Err(ApiError::field(
                "interaction_id",
                "rewards of single completions are not taken by id; name the call by its index, \
                 from 0, as `turn`, or leave it out to reward the session",
            ));
        }
        let session = find_session(&*host, found, session_id.as_deref())?;
        if !session.options.rewards {
            return Err(ApiError::new(ErrorKind::Forbidden, NO_REWARDS));
        }
        let name = name.unwrap_or_else(|| "reward".to_owned());
        session.add_reward(Reward { value: reward, name, agent, turn })?;
        Ok(json!({ "message": "success" }))
    };
    build_response(set.await)
}

/// Handles `POST /rl/end_session`.
pub(crate) async fn end_session(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let ended = async {
        let host = require_session_host(&gateway)?;
        let found = incoming.caller?.session;
        if found.as_ref().is_some_and(|session| {
            incoming.key.as_ref().is_some_and(|key| !session.key.matches(key))
        }) {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "this key permits only rewards; end the session with its key for calls",
            ));
        }
        let end: EndRequest = parse_or_default(&incoming.body?)?;
        let session = find_session(&*host, found, end.session_id.as_deref())?;
        let EndedSession { attempt, interaction_count } = host.end(&session, end).await?;
        Ok(json!({
            "message": "success", "attempt": attempt, "interaction_count": interaction_count,
        }))
    };
    build_response(ended.await)
}

fn require_session_host(gateway: &Gateway) -> Result<Arc<dyn SessionHost>, ApiError> {
    gateway.session_host().ok_or_else(|| {
        let message = "this server records no sessions; start it with --record DIR";
        ApiError::new(ErrorKind::NotFound, message)
    })
}

/// Returns the session that a request refers to: `found`, the session of the request's key, or the
/// session named `id` if the request has a key of the server.
fn find_session(
    host: &dyn SessionHost,
    found: Option<Arc<Session>>,
    id: Option<&str>,
) -> Result<Arc<Session>, ApiError> {
    match (found, id) {
        (Some(session), None) => Ok(session),
        (Some(session), Some(id)) if session.options.attempt == id => Ok(session),
        (Some(_), Some(id)) => Err(ApiError::new(
            ErrorKind::Forbidden,
            format!("the key belongs to another session than {id}; send the key of that session"),
        )),
        (None, Some(id)) => host.find(id).ok_or_else(|| {
            let message = format!("there is no open session {id:?}");
            ApiError {
                param: Some("session_id".into()),
                ..ApiError::new(ErrorKind::NotFound, message)
            }
        }),
        (None, None) => Err(ApiError::field(
            "session_id",
            "session_id is missing; name the session, or send its key",
        )),
    }
}

/// Parses a request body as JSON. An empty body counts as an empty object.
fn parse_or_default<T: serde::de::DeserializeOwned + Default>(body: &[u8]) -> Result<T, ApiError> {
    if body.is_empty() { Ok(T::default()) } else { parse_json_body(body) }
}
