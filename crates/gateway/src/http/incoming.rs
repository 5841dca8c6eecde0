//! Requests as they come: who calls, and the body.

use std::sync::Arc;

use axum::extract::{FromRequest, RawPathParams, Request};
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use levade_http::Unpack;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use xxhash_rust::xxh3::Xxh3;

use crate::gateway::Caller;
use crate::gateway::Gateway;
use levade_call::{ApiError, ErrorKind};

/// Headers that name the agent; the second is that of before the project was called Levade.
const AGENT: [&str; 2] = ["x-levade-agent", "x-dressage-agent"];
/// Headers that say how often a client has asked before.
const RETRIES: [&str; 2] = ["x-stainless-retry-count", "x-retry-count"];

/// A request, its body read. Whatever is wrong with it is said in the shape of the API that was called.
pub(crate) struct Incoming {
    /// Who calls.
    pub caller: Result<Caller, ApiError>,
    /// The key that it bears.
    pub key: Option<String>,
    /// Parts of the path that have a name.
    named: Vec<(String, String)>,
    /// All of the body.
    pub body: Result<Bytes, ApiError>,
}

impl FromRequest<Gateway> for Incoming {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, gateway: &Gateway) -> Result<Self, Self::Rejection> {
        let (mut parts, body) = request.into_parts();
        let params = <RawPathParams as axum::extract::FromRequestParts<Gateway>>::from_request_parts(
            &mut parts, gateway,
        )
        .await;
        let key = key_of(&parts.headers);
        let most = gateway.0.options.body_bytes;
        let (named, caller) = match params {
            Ok(params) => {
                let named = params.iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
                let named: Vec<_> = named.collect();
                let caller = caller(gateway, &parts.headers, key.as_deref(), &named);
                (named, caller)
            }
            // Without its parts nobody could tell whether the path is of the key's attempt.
            Err(error) => {
                let message = format!("the path cannot be read: {}", error.body_text());
                (Vec::new(), Err(ApiError::new(ErrorKind::Invalid, message)))
            }
        };
        // Nothing of a stranger's body is read.
        let body = match &caller {
            Err(fault) => Err(fault.clone()),
            Ok(_) => axum::body::to_bytes(body, most).await.map_err(|error| {
                let error = error.to_string();
                match error.contains("length limit") {
                    true => ApiError::new(
                        ErrorKind::TooLarge,
                        format!("the body has more than {most} bytes, the most that is read"),
                    ),
                    false => ApiError::new(ErrorKind::Invalid, format!("the body broke off: {error}")),
                }
            }),
        };
        let body = body.and_then(|body| unpacked(&parts.headers, body, most));
        let mut caller = caller;
        if let (Ok(caller), Ok(body)) = (&mut caller, &body) {
            let mut hash = Xxh3::new();
            hash.update(parts.uri.path().as_bytes());
            hash.update(&[0xFF]);
            hash.update(body);
            caller.body = Some(hash.digest128());
        }
        Ok(Incoming { caller, key, named, body })
    }
}

/// Unpacks a body, up to `max` bytes.
fn unpacked(headers: &HeaderMap, body: Bytes, max: usize) -> Result<Bytes, ApiError> {
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let (Some(encoding), None) = (encodings.next(), encodings.next()) else {
        return match headers.contains_key(header::CONTENT_ENCODING) {
            true => Err(packed("several encodings")),
            false => Ok(body),
        };
    };
    let encoding = encoding.to_str().unwrap_or_default();
    levade_http::unpack(encoding, body, max).map_err(|why| match why {
        Unpack::Unknown => packed(&format!("{encoding:?}")),
        Unpack::Broken => ApiError::new(
            ErrorKind::Invalid,
            format!("the body is not the {encoding} that its Content-Encoding names"),
        ),
        Unpack::TooLarge => ApiError::new(
            ErrorKind::TooLarge,
            format!("the unpacked body has more than {max} bytes, the most that is read"),
        ),
    })
}

fn packed(encoding: &str) -> ApiError {
    let message = format!(
        "the Content-Encoding of the body is {encoding}; send the body with gzip or without encoding"
    );
    ApiError::new(ErrorKind::MediaType, message)
}

/// The key of a request: `Authorization: Bearer`, as OpenAI's clients send it, or `x-api-key`, as
/// Anthropic's.
pub(super) fn key_of(headers: &HeaderMap) -> Option<String> {
    let text = |name: &str| headers.get(name)?.to_str().ok();
    let bearer = text("authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text("x-api-key")).or_else(|| text("api-key")).map(str::to_owned)
}

/// Who calls, by key; what the path says must fit it.
fn caller(
    gateway: &Gateway,
    headers: &HeaderMap,
    key: Option<&str>,
    params: &[(String, String)],
) -> Result<Caller, ApiError> {
    let param = |name: &str| params.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str());
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let session = key.map(|key| gateway.session_of(key)).transpose()?.flatten();
    if let Some(attempt) = param("attempt") {
        let Some(session) = &session else {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "calls of an attempt bear its key, as Authorization: Bearer or x-api-key",
            ));
        };
        let options = &session.options;
        if options.attempt != attempt || param("rollout").is_some_and(|rollout| options.rollout != rollout) {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                format!("this key is of another attempt than {attempt}"),
            ));
        }
    }
    if let Some(session) = &session {
        session.recorder().check_open()?;
    } else {
        let keys = &gateway.0.options.keys;
        if !gateway.0.options.open {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "only calls that bear the key of an attempt are answered here",
            ));
        }
        if !keys.is_empty() && !key.is_some_and(|key| keys.iter().any(|known| same(known, key))) {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "the key is missing or wrong; send it as Authorization: Bearer or x-api-key",
            ));
        }
    }
    let agent = param("agent").or_else(|| AGENT.iter().find_map(|name| header(name))).map(str::to_owned);
    let retries = RETRIES.iter().any(|name| header(name).is_some_and(|count| count.trim() != "0"));
    Ok(Caller { session, agent, body: None, retries })
}

/// Whether two keys are the same, in a time that does not depend on where they differ.
fn same(known: &str, key: &str) -> bool {
    known.len() == key.len() && known.bytes().zip(key.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

/// Reads a field that may be absent: null is absent.
///
/// # Errors
/// Returns the error of the field's own type.
pub(crate) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Reads a body as JSON; an error names the place.
pub(crate) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let is_whole = path == "." || path == "?";
        let place = if is_whole { "the body".to_owned() } else { path.clone() };
        let why = error.inner().to_string();
        let why = match why.contains("surrogate") || why.contains("unexpected end of hex escape") {
            true => format!(
                "half of a surrogate pair, such as \\ud83d alone, is no character, and no text can hold it; send \
                 U+FFFD in its place ({why})"
            ),
            false => why,
        };
        let fault = ApiError::new(ErrorKind::Invalid, format!("{place}: {why}"));
        ApiError { param: Some(path).filter(|_| !is_whole), ..fault }
    })?;
    deserializer.end().map_err(|error| {
        ApiError::new(ErrorKind::Invalid, format!("the body goes on after its JSON: {error}"))
    })?;
    Ok(value)
}

impl Incoming {
    /// Part of the path of this name; empty where the path has none.
    pub(crate) fn part(&self, name: &str) -> String {
        self.named.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone()).unwrap_or_default()
    }

    /// Caller and body, of a request that is in order so far.
    pub(crate) fn in_order(self) -> Result<(Caller, Bytes), ApiError> {
        let caller = self.caller?;
        // The key for rewards opens nothing else.
        if let (Some(session), Some(key)) = (&caller.session, &self.key)
            && !session.key.is(key)
        {
            return Err(ApiError::new(ErrorKind::Forbidden, "this key is for rewards alone"));
        }
        Ok((caller, self.body?))
    }

    /// Session and body of a request that bears the key for rewards.
    pub(crate) fn of_reward(self) -> Result<(Arc<crate::session::Session>, Bytes), ApiError> {
        let session = self.caller?.session;
        let session = session.ok_or_else(|| {
            ApiError::new(ErrorKind::Unauthorized, "rewards bear the key of their attempt for rewards")
        })?;
        if !session.options.rewards {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "this recipe takes no rewards from programs (agent.rewards)",
            ));
        }
        if !self.key.is_some_and(|key| session.reward_key.is(&key)) {
            return Err(ApiError::new(
                ErrorKind::Forbidden,
                "this key is for calls alone; rewards have one of their own",
            ));
        }
        Ok((session, self.body?))
    }
}
