//! JSON requests to one server, each with a deadline, and streams of events.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use levade_http::{Bounds, Client, ClientRequest, Hosts, HttpError, causes};
use levade_policy::PolicyError;
use levade_policy::process_time::with_timeout;
use serde_json::Value;

use crate::external::{
    EndpointServer as Endpoint, MAX_ERROR_BYTES, SseDecoder, extract_message, plain_uri, truncate,
};

/// Maximum size of a server's response, in bytes.
const MAX_BYTES: usize = 256 << 20;

/// HTTP client of one inference server.
#[derive(Debug)]
pub(super) struct Http {
    client: Client,
    /// Kind and address of the server, for errors and logs.
    pub name: String,
    base: String,
    endpoint: Endpoint,
}

/// JSON response of a server, with any status.
pub(super) struct JsonResponse {
    pub status: StatusCode,
    pub value: Value,
    text: String,
}

impl Http {
    /// Creates an HTTP client of an inference server. Reads the API key from the environment.
    ///
    /// # Errors
    /// Returns an error if the address is invalid or the key is missing.
    pub fn new(kind: &str, url: &str, key_env: Option<&String>) -> Result<Self, PolicyError> {
        let base = url.trim().trim_end_matches('/').to_owned();
        // An invalid address may contain a password, so it is not shown.
        let uri = plain_uri(&base).map_err(|why| {
            PolicyError::Invalid(format!("the url of a {kind} server is invalid: {why}"))
        })?;
        let endpoint = Endpoint::at_uri(uri, key_env, |name| std::env::var(name))
            .map_err(|error| invalid_error(&error))?;
        let client =
            Client::new(Hosts::allow_all(), None).map_err(|error| invalid_error(&error))?;
        Ok(Http { client, name: format!("{kind} at {base}"), base, endpoint })
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.extend(self.endpoint.authorization().map(|key| (AUTHORIZATION, key)));
        headers
    }

    /// Returns the host of the server's address.
    pub fn host(&self) -> String {
        let uri: Option<Uri> = self.base.parse().ok();
        let host = uri.as_ref().and_then(Uri::host).unwrap_or("127.0.0.1");
        host.trim_start_matches('[').trim_end_matches(']').to_owned()
    }

    /// Converts an HTTP connection error into a policy error: the server is unreachable, or timed
    /// out.
    fn to_policy_error(&self, error: HttpError) -> PolicyError {
        match error {
            HttpError::Late { after, .. } => {
                PolicyError::Deadline(after, format!("a response of {}", self.name))
            }
            other => self.stopped_error(&self.endpoint.without_key(&other.to_string())),
        }
    }

    /// Builds the error of a server that does not work as it should, and may be restarted.
    pub fn stopped_error(&self, why: &str) -> PolicyError {
        PolicyError::Stopped(format!("{} ({why})", self.name).into())
    }

    /// Builds the error of a request that the server cannot serve, or of a missing start option.
    pub fn rejection_error(&self, why: impl std::fmt::Display) -> PolicyError {
        PolicyError::Invalid(format!("{}: {why}", self.name))
    }

    /// Sends a request to the server, and returns the complete response, whatever its status.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable or times out.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        deadline: Duration,
    ) -> Result<JsonResponse, PolicyError> {
        let body = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let request = ClientRequest {
            method,
            url: format!("{}{path}", self.base),
            headers: self.headers(),
            body,
        };
        // The deadline above excludes suspended time, which `levade_http` cannot measure; this
        // bound is a safety net.
        let bounds = Bounds { deadline: deadline * 4, bytes: MAX_BYTES, redirects: 0 };
        let response = with_timeout(deadline, self.client.send(request, bounds)).await;
        let response = response
            .ok_or_else(|| {
                PolicyError::Deadline(deadline, format!("a response of {} to {path}", self.name))
            })?
            .map_err(|error| self.to_policy_error(error))?;
        let text = self.endpoint.without_key(&response.text());
        Ok(JsonResponse {
            status: response.status,
            value: serde_json::from_str(&text).unwrap_or(Value::Null),
            text,
        })
    }

    /// Gets the URL path `path` from the server, and returns the JSON response.
    ///
    /// # Errors
    /// Returns the server's message if the status is not a success. Returns an error if the server
    /// is unreachable or times out.
    pub async fn get(&self, path: &str, deadline: Duration) -> Result<Value, PolicyError> {
        self.require_success(path, self.send(Method::GET, path, None, deadline).await?)
    }

    /// Posts a JSON request to the URL path `path` of the server, and returns the JSON response.
    ///
    /// # Errors
    /// Returns the server's message if the status is not a success. Returns an error if the server
    /// is unreachable or times out.
    pub async fn post(
        &self,
        path: &str,
        body: &Value,
        deadline: Duration,
    ) -> Result<Value, PolicyError> {
        self.require_success(path, self.send(Method::POST, path, Some(body), deadline).await?)
    }

    fn require_success(&self, path: &str, response: JsonResponse) -> Result<Value, PolicyError> {
        if response.status.is_success() {
            Ok(response.value)
        } else {
            Err(self.status_error(path, response.status, &response.error_message()))
        }
    }

    /// Converts a response with a status other than 200 into an error.
    pub fn status_error(&self, path: &str, status: StatusCode, message: &str) -> PolicyError {
        let why = format!("{path} returned {}: {message}", status.as_u16());
        match status.as_u16() {
            401 => self.rejection_error(format!("{why}; {}", self.endpoint.key_hint())),
            429 | 503 => {
                PolicyError::Busy { what: format!("{}: {why}", self.name), retry_after: 1 }
            }
            500.. => self.stopped_error(&why),
            _ => self.rejection_error(why),
        }
    }

    /// Posts a request whose response is a stream of events. Returns the stream once the response's
    /// headers have arrived.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable, times out, or rejects the request.
    pub async fn stream(
        &self,
        path: &str,
        body: &Value,
        deadline: Duration,
    ) -> Result<EventStream, PolicyError> {
        let mut request = Request::new(Full::new(Bytes::from(body.to_string())));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = format!("{}{path}", self.base)
            .parse()
            .map_err(|error| self.rejection_error(format!("{path}: {error}")))?;
        *request.headers_mut() = self.headers();
        let response =
            with_timeout(deadline, self.client.request(request)).await.ok_or_else(|| {
                PolicyError::Deadline(
                    deadline,
                    format!("{} to start its response to {path}", self.name),
                )
            })?;
        let response = response.map_err(|error| self.to_policy_error(error))?;
        let status = response.status();
        let mut events = EventStream {
            body: response.into_body(),
            decoder: SseDecoder::default(),
            read: Vec::new(),
        };
        if status.is_success() {
            return Ok(events);
        }
        let text = with_timeout(deadline, events.text()).await.unwrap_or_default();
        let value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let text = self.endpoint.without_key(&text);
        Err(self.status_error(path, status, &JsonResponse { status, value, text }.error_message()))
    }
}

fn invalid_error(error: &dyn std::fmt::Display) -> PolicyError {
    PolicyError::Invalid(error.to_string())
}

impl JsonResponse {
    /// Returns the error message that the response contains.
    pub fn error_message(&self) -> String {
        let message = Some(&self.value).filter(|value| !value.is_null()).and_then(extract_message);
        let message = message.unwrap_or_else(|| self.text.trim().to_owned());
        if message.is_empty() {
            self.status.canonical_reason().unwrap_or("no reason given").into()
        } else {
            truncate(message)
        }
    }

    /// Returns the complete response body as text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Server-sent events of a streamed response.
pub(super) struct EventStream {
    body: Incoming,
    decoder: SseDecoder,
    read: Vec<Vec<u8>>,
}

impl EventStream {
    /// Returns the data of the next event, or `None` at the end.
    ///
    /// # Errors
    /// Returns a message if the connection breaks.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            if !self.read.is_empty() {
                return Ok(Some(self.read.remove(0)));
            }
            let Some(frame) = self.body.frame().await else {
                let rest = std::mem::take(&mut self.decoder).finish();
                return Ok(rest);
            };
            let frame =
                frame.map_err(|error| format!("the response broke off: {}", causes(&error)))?;
            // Trailers are ignored.
            let Ok(data) = frame.into_data() else { continue };
            self.decoder.feed(&data, &mut self.read);
            if self.decoder.num_pending_bytes() > MAX_BYTES {
                return Err(format!("an event of the stream has more than {MAX_BYTES} bytes"));
            }
        }
    }

    /// Returns the first bytes of an error response as text.
    async fn text(&mut self) -> String {
        let mut all = Vec::new();
        while let Some(Ok(frame)) = self.body.frame().await {
            all.extend_from_slice(&frame.into_data().unwrap_or_default());
            if all.len() > MAX_ERROR_BYTES {
                break;
            }
        }
        String::from_utf8_lossy(&all).into_owned()
    }
}
