//! HTTP requests with bounded responses, read as they arrive.

use std::path::Path;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER,
};
use hyper::{Method, Request, Response, StatusCode};
use levade_http::{Client, Hosts, HttpError, causes};
use serde_json::Value;

use super::call_deadline::CallDeadline;
use super::endpoint::EndpointServer;
use super::error::ExternalError;

/// Maximum number of bytes that are read from an error response.
pub(crate) const MAX_ERROR_BYTES: usize = 64 * 1024;
/// Maximum number of characters of a server's message that an error contains.
const MAX_SHOWN_CHARS: usize = 400;

/// HTTP client with pooled connections.
#[derive(Clone, Debug)]
pub(crate) struct EndpointHttp(Client);

/// Body of a response with status 200, read piece by piece.
#[derive(Debug)]
pub(crate) struct ResponseBody {
    body: Incoming,
    endpoint: String,
    /// Number of bytes of the body that have arrived.
    bytes: usize,
    max: usize,
    /// Whether the body is a stream of server-sent events. Otherwise it is one JSON value.
    pub is_stream: bool,
}

impl EndpointHttp {
    /// Creates an HTTP client that trusts Mozilla's root certificates and the certificates in the
    /// PEM file `more_roots`. It connects to any host, because the user chooses the endpoints.
    ///
    /// # Errors
    /// Returns [`ExternalError::Invalid`] if the file cannot be read or has no certificate, or if
    /// TLS cannot be set up.
    pub fn new(more_roots: Option<&Path>) -> Result<Self, ExternalError> {
        let client = Client::new(Hosts::allow_all(), more_roots);
        client.map(EndpointHttp).map_err(|error| ExternalError::Invalid(error.to_string()))
    }

    /// Posts a JSON body to a server. Returns once the response's headers have arrived, if its
    /// status is 200. `max` is the maximum size of the response, in bytes.
    ///
    /// # Errors
    /// Returns the error that corresponds to the status, with the server's message. Returns an
    /// error if the server is unreachable, the deadline passes, or the response is neither an event
    /// stream nor JSON.
    pub async fn post(
        &self,
        server: &EndpointServer,
        body: Bytes,
        max: usize,
        deadline: &mut CallDeadline,
    ) -> Result<ResponseBody, ExternalError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(server.uri.clone())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "text/event-stream, application/json");
        let request =
            server.authorization().into_iter().fold(request, |r, key| r.header(AUTHORIZATION, key));
        let request = request.body(Full::new(body)).map_err(|error| {
            ExternalError::Invalid(format!("cannot call {}: {error}", server.name))
        })?;
        let response = deadline.wait("the server to respond", self.0.request(request)).await?;
        let endpoint = server.name.clone();
        let response = response.map_err(|error| match error {
            HttpError::Connect { why, .. } => {
                ExternalError::Connect { endpoint: endpoint.clone(), why: server.without_key(&why) }
            }
            HttpError::Broken { why, .. } => ExternalError::Broken {
                endpoint: endpoint.clone(),
                bytes: 0,
                why: server.without_key(&why),
            },
            other => ExternalError::Invalid(format!("cannot call {endpoint}: {other}")),
        })?;
        if response.status() != StatusCode::OK {
            return Err(response_error(server, response, deadline).await);
        }
        let kind = response
            .headers()
            .get(CONTENT_TYPE)
            .map(|kind| kind.to_str().unwrap_or("no text").to_owned());
        let is = |wanted: &str| {
            let kind = kind.as_deref().unwrap_or_default().split(';').next().unwrap_or_default();
            kind.trim().eq_ignore_ascii_case(wanted)
        };
        let is_stream = is("text/event-stream");
        let mut response_body =
            ResponseBody { body: response.into_body(), endpoint, bytes: 0, max, is_stream };
        if is_stream || is("application/json") {
            return Ok(response_body);
        }
        let kind =
            kind.map_or("no content type".to_owned(), |kind| format!("the content type {kind:?}"));
        response_body.max = MAX_ERROR_BYTES;
        let shown = response_body
            .collect(deadline)
            .await
            .map(|bytes| to_excerpt(server, &bytes))
            .unwrap_or_default();
        Err(ExternalError::Protocol {
            endpoint: response_body.endpoint,
            why: format!(
                "expected text/event-stream or application/json, but found {kind} with a body \
                 that starts with {shown:?}"
            ),
        })
    }
}

impl ResponseBody {
    /// Returns the next bytes of the body, never an empty slice, or `None` at the end.
    ///
    /// # Errors
    /// Returns an error if the response breaks off, exceeds its maximum size, or does not continue
    /// within `silence` and the deadline.
    pub async fn next_bytes(
        &mut self,
        silence: Duration,
        deadline: &mut CallDeadline,
    ) -> Result<Option<Bytes>, ExternalError> {
        loop {
            let what = format!("more of a response after {} bytes", self.bytes);
            let frame = match deadline.wait_for(silence, what, self.body.frame()).await? {
                None => return Ok(None),
                Some(Ok(frame)) => frame,
                Some(Err(error)) => {
                    let endpoint = self.endpoint.clone();
                    let bytes = self.bytes;
                    return Err(ExternalError::Broken { endpoint, bytes, why: causes(&error) });
                }
            };
            // Trailers are ignored.
            let Ok(data) = frame.into_data() else { continue };
            self.bytes += data.len();
            if self.bytes > self.max {
                return Err(ExternalError::TooLarge {
                    endpoint: self.endpoint.clone(),
                    what: "the response".into(),
                    max: self.max,
                    option: "max_bytes".into(),
                });
            }
            if !data.is_empty() {
                return Ok(Some(data));
            }
        }
    }

    /// Returns the number of bytes of the body that have arrived.
    pub fn num_bytes(&self) -> usize {
        self.bytes
    }

    /// Reads all remaining bytes of the body.
    ///
    /// # Errors
    /// Returns the errors of [`next_bytes`](Self::next_bytes).
    pub async fn collect(&mut self, deadline: &mut CallDeadline) -> Result<Vec<u8>, ExternalError> {
        let mut all = Vec::new();
        while let Some(data) = self.next_bytes(Duration::MAX, deadline).await? {
            all.extend_from_slice(&data);
        }
        Ok(all)
    }
}

/// Returns bytes from a server as text for an error: truncated, and without the API key.
fn to_excerpt(server: &EndpointServer, bytes: &[u8]) -> String {
    truncate(server.without_key(String::from_utf8_lossy(bytes).trim()))
}

/// Truncates a text to [`MAX_SHOWN_CHARS`] characters.
pub(crate) fn truncate(text: String) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Returns the message in the JSON of an error response, which is `{"error": {"message"}}` or a
/// variant of this format.
pub(crate) fn extract_message(value: &Value) -> Option<String> {
    let error = value.get("error").unwrap_or(value);
    let found = error.get("message").or_else(|| value.get("detail")).unwrap_or(error);
    match found {
        Value::String(text) => Some(text.clone()),
        Value::Null => None,
        other => Some(other.to_string()),
    }
}

/// Returns the pause that the server requests in the header `Retry-After`, in seconds or as an HTTP
/// date. `None` if the header is absent or invalid.
fn parse_retry_after(headers: &HeaderMap<HeaderValue>) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let until = httpdate::parse_http_date(value).ok()?;
    Some(until.duration_since(SystemTime::now()).unwrap_or_default())
}

/// Converts a response with a status other than 200 into an error.
async fn response_error(
    server: &EndpointServer,
    response: Response<Incoming>,
    deadline: &mut CallDeadline,
) -> ExternalError {
    let status = response.status();
    let headers = response.headers().clone();
    let endpoint = server.name.clone();
    let body = response.into_body();
    let mut response_body = ResponseBody {
        body,
        endpoint: endpoint.clone(),
        bytes: 0,
        max: MAX_ERROR_BYTES,
        is_stream: false,
    };
    // The status is reported even if the body does not arrive.
    let text = response_body.collect(deadline).await.unwrap_or_default();
    let parsed_message =
        serde_json::from_slice::<Value>(&text).ok().and_then(|value| extract_message(&value));
    let mut message =
        to_excerpt(server, parsed_message.as_deref().map_or(&text[..], str::as_bytes));
    if message.is_empty() {
        message = status.canonical_reason().unwrap_or("no reason given").into();
    }
    let code = status.as_u16();
    match code {
        401 | 403 => {
            let way_out = server.key_hint();
            ExternalError::Unauthorized { endpoint, status: code, message, way_out }
        }
        429 | 503 => {
            let wait = server.note_rejection(parse_retry_after(&headers));
            let retry_after = wait.as_secs_f64().ceil().max(1.0) as u64;
            ExternalError::Busy { endpoint, status: code, message, retry_after }
        }
        300..=399 => {
            let to = headers
                .get(LOCATION)
                .map(|to| to_excerpt(server, to.as_bytes()))
                .unwrap_or_default();
            message = format!(
                "it redirects to {to:?}, which is not followed; use that address if you trust it"
            );
            ExternalError::Rejected { endpoint, status: code, message }
        }
        500.. => ExternalError::Failed { endpoint, status: code, message },
        _ => ExternalError::Rejected { endpoint, status: code, message },
    }
}
