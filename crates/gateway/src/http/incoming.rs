//! Incoming requests: the caller and the body.

use std::sync::Arc;

use axum::extract::{FromRequest, RawPathParams, Request};
use axum::http::HeaderMap;
use bytes::Bytes;
use levade_http::service::{self, key_of};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use xxhash_rust::xxh3::Xxh3;

use super::response::to_api_error;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use crate::session::NO_REWARDS;
use levade_call::{ApiError, ErrorKind};

/// Request headers that name the agent. The second header dates from before the project was called
/// Levade.
const AGENT: [&str; 2] = ["x-levade-agent", "x-dressage-agent"];
/// Request headers with the number of times that the client has already sent the request.
const RETRIES: [&str; 2] = ["x-stainless-retry-count", "x-retry-count"];

/// Request header with the id of the conversation that a call belongs to.
const TRAFFIC: &str = "x-session-id";
/// Request header with the key of the person who makes a call. The key is recorded.
const PERSON: &str = "x-person-id";

/// Prefix of the URL paths at which clients start and end sessions.
const SESSIONS: &str = "/rl/";

/// HTTP request whose body has been read. Errors are kept, so that the handler can report them in
/// the format of the called API.
pub(crate) struct IncomingRequest {
    /// Sender of the request, or the error if the key or the path is invalid.
    pub caller: Result<Caller, ApiError>,
    /// API key in the request's headers. `None` if the request has no key.
    pub key: Option<String>,
    /// Names and values of the parameters in the request's path.
    named: Vec<(String, String)>,
    /// Complete body of the request, or the error if the body could not be read.
    pub body: Result<Bytes, ApiError>,
}

impl FromRequest<Gateway> for IncomingRequest {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, gateway: &Gateway) -> Result<Self, Self::Rejection> {
        let (mut parts, body) = request.into_parts();
        let params =
            <RawPathParams as axum::extract::FromRequestParts<Gateway>>::from_request_parts(
                &mut parts, gateway,
            )
            .await;
        let key = key_of(&parts.headers).map(str::to_owned);
        let max_bytes = gateway.0.options.body_bytes;
        let (named, caller) = match params {
            Ok(params) => {
                let named = params.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
                let named: Vec<_> = named.collect();
                let manages_sessions = parts.uri.path().starts_with(SESSIONS);
                let caller = identify_caller(
                    gateway,
                    &parts.headers,
                    key.as_deref(),
                    &named,
                    manages_sessions,
                );
                (named, caller)
            }
            // Without the parameters, the path cannot be compared with the key's attempt.
            Err(error) => {
                let message = format!("the path cannot be parsed: {}", error.body_text());
                (Vec::new(), Err(ApiError::new(ErrorKind::Invalid, message)))
            }
        };
        // The body of an unauthorized request is not read.
        let body = match &caller {
            Err(api_error) => Err(api_error.clone()),
            Ok(_) => {
                service::read_body(&parts.headers, body, max_bytes).await.map_err(to_api_error)
            }
        };
        let mut caller = caller;
        if let (Ok(caller), Ok(body)) = (&mut caller, &body) {
            let mut hash = Xxh3::new();
            hash.update(parts.uri.path().as_bytes());
            hash.update(&[0xFF]);
            hash.update(body);
            caller.body = Some(hash.digest128());
        }
        Ok(IncomingRequest { caller, key, named, body })
    }
}

/// Identifies the sender of a request by its API key. The parameters of the path must match the
/// key. If `manages_sessions` is true, the gateway's own keys are accepted even if calls need the
/// key of an attempt, because clients start sessions with the gateway's keys.
fn identify_caller(
    gateway: &Gateway,
    headers: &HeaderMap,
    key: Option<&str>,
    params: &[(String, String)],
    manages_sessions: bool,
) -> Result<Caller, ApiError> {
    let session = key.map(|key| gateway.find_session_by_key(key)).transpose()?.flatten();
    if let Some(attempt) = find_param(params, "attempt") {
        let Some(session) = &session else {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "the key of the attempt is missing; send it as Authorization: Bearer or x-api-key",
            ));
        };
        let options = &session.options;
        if options.attempt != attempt
            || find_param(params, "rollout").is_some_and(|rollout| options.rollout != rollout)
        {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                format!(
                    "the key belongs to another attempt than {attempt}; send that attempt's key"
                ),
            ));
        }
    }
    if let Some(session) = &session {
        session.recorder().check_open()?;
    } else {
        let keys = &gateway.0.options.keys;
        if !gateway.0.options.open && (keys.is_empty() || !manages_sessions) {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "this gateway accepts only calls with the key of an attempt; send it as \
                 Authorization: Bearer or x-api-key",
            ));
        }
        if !service::is_valid_key(keys, key) {
            return Err(ApiError::new(ErrorKind::Unauthorized, service::WRONG_KEY));
        }
    }
    let agent = find_param(params, "agent")
        .or_else(|| AGENT.iter().find_map(|name| find_header(headers, name)))
        .map(str::to_owned);
    let retries = RETRIES
        .iter()
        .any(|name| find_header(headers, name).is_some_and(|count| count.trim() != "0"));
    let traffic_id = find_header(headers, TRAFFIC).map(str::to_owned);
    // A key that cannot be read must not be lost: the person could not be found later.
    let person = headers.get(PERSON).map(|value| value.to_str()).transpose().map_err(|_| {
        let message = format!("the header {PERSON} must consist of visible ASCII characters");
        ApiError::new(ErrorKind::Invalid, message)
    })?;
    let person = person.filter(|key| !key.trim().is_empty()).map(str::to_owned);
    Ok(Caller { session, agent, body: None, retries, traffic_id, person })
}

/// Returns the last value of the field `name` in a query string, without decoding it.
pub(crate) fn find_query_field<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(found, _)| *found == name).map(|(_, value)| value).next_back()
}

fn find_param<'a>(params: &'a [(String, String)], name: &str) -> Option<&'a str> {
    params.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
}

fn find_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Deserializes an optional request field. Null yields the default value, as if the field were
/// absent.
///
/// # Errors
/// Returns the error of the field's type if the value is invalid.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Parses a request body as JSON. The error names the invalid field.
pub(crate) fn parse_json_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    service::read_json(body).map_err(|malformed| ApiError {
        param: malformed.field,
        ..ApiError::new(ErrorKind::Invalid, malformed.message)
    })
}

impl IncomingRequest {
    /// Returns the path parameter `name`, or an empty string if the path has no such parameter.
    pub(crate) fn path_param(&self, name: &str) -> String {
        self.named
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, value)| value.clone())
            .unwrap_or_default()
    }

    /// Returns the sender and the body of a request. Fails if the sender or the body is invalid, or
    /// if the key permits only rewards.
    pub(crate) fn into_call(self) -> Result<(Caller, Bytes), ApiError> {
        let caller = self.caller?;
        // The key for rewards permits nothing else.
        if let (Some(session), Some(key)) = (&caller.session, &self.key)
            && !session.key.matches(key)
        {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "this key permits only rewards; send calls with the attempt's key for calls",
            ));
        }
        Ok((caller, self.body?))
    }

    /// Returns the session and the body of a request that has the attempt's key for rewards.
    pub(crate) fn into_reward(self) -> Result<(Arc<crate::session::Session>, Bytes), ApiError> {
        let session = self.caller?.session;
        let session = session.ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unauthorized,
                "the reward key of the attempt is missing; send it as Authorization: Bearer or \
                 x-api-key",
            )
        })?;
        if !session.options.rewards {
            return Err(ApiError::new(ErrorKind::Forbidden, NO_REWARDS));
        }
        if !self.key.is_some_and(|key| session.reward_key.matches(&key)) {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "this key permits only calls; send rewards with the reward key of the attempt",
            ));
        }
        Ok((session, self.body?))
    }
}
