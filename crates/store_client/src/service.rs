//! Requests to a store server: key, deadlines and retries.
//!
//! The client waits for a server that restarts or is unreachable. A request that may have been
//! executed is repeated only if a repetition has no further effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode};
use levade_http::{Bounds, Client, ClientRequest, ClientResponse, Hosts, HttpError};
use levade_policy::process_time;
use levade_store::{Code, StoreError};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Environment variable with the API key of the store server.
pub const KEY_VARIABLE: &str = "LEVADE_STORE_KEY";

/// Environment variable with the timeout for a store server that does not respond, in seconds.
pub const TIMEOUT_VARIABLE: &str = "LEVADE_STORE_TIMEOUT";

/// Default timeout for a store server that does not respond.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// Timeout for one response, in addition to the time for which the server may hold the request.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time for which the server holds a request. A longer wait is split into several requests.
pub(crate) const MAX_HOLD: Duration = Duration::from_secs(30);

/// Maximum size of a response in bytes.
const MAX_RESPONSE: usize = 1 << 30;

/// Pause before the first repetition of a failed request. The pause doubles with each repetition,
/// up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Maximum pause between two repetitions of a failed request.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Request header that contains the number of the trainer's lease.
const EPOCH_HEADER: HeaderName = HeaderName::from_static("x-levade-epoch");

/// Response header that contains the time of the store's clock, as a Unix timestamp in seconds.
const TIME_HEADER: &str = "x-levade-time";

/// Options for the connection to a store server: API key and timeout.
#[derive(Clone)]
pub struct ServiceOptions {
    /// API key of the store server. `None` sends requests without a key.
    pub key: Option<String>,
    /// Timeout for a store server that does not respond, when connecting and later.
    pub timeout: Duration,
}

impl ServiceOptions {
    /// Reads the options from the environment variables `LEVADE_STORE_KEY` and
    /// `LEVADE_STORE_TIMEOUT`.
    ///
    /// # Errors
    /// Returns a message if the value of a variable is invalid.
    pub fn from_env() -> Result<Self, String> {
        let timeout = match non_empty_variable(TIMEOUT_VARIABLE) {
            None => DEFAULT_TIMEOUT,
            Some(text) => text
                .trim()
                .parse()
                .ok()
                .filter(|seconds: &f64| *seconds > 0.0)
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .ok_or_else(|| {
                    format!(
                        "{TIMEOUT_VARIABLE} is {text:?}, but must be a number of seconds above 0"
                    )
                })?,
        };
        Ok(ServiceOptions { key: non_empty_variable(KEY_VARIABLE), timeout })
    }
}

/// One request to a store server.
pub(crate) struct ServerCall {
    /// Path of the request, below the URL of the server.
    pub path: String,
    /// Body of the request.
    pub body: Bytes,
    /// Media type of the body.
    pub content_type: &'static str,
    /// Number of the trainer's lease. `None` if the request needs no lease.
    pub epoch: Option<u64>,
    /// Time for which the server may hold the request.
    pub hold: Duration,
    /// Whether the request is safe to repeat. If so, the client repeats a request whose response
    /// was lost.
    pub is_repeatable: bool,
}

/// Reason why a request to the store server failed.
pub(crate) enum CallError<E> {
    /// The server's store rejected the request with this error.
    Rejected(E),
    /// The request or the response is unusable, or the server did not respond in time. Contains the
    /// error code and a description.
    Failed(Code, String),
}

/// Sends single requests to a server, without repetitions. Simulations implement this trait to
/// replace the network.
#[async_trait]
pub trait Transport: Send + Sync {
    /// Sends a request and returns the complete response.
    ///
    /// # Errors
    /// Returns an error if no response arrives within `bounds`.
    async fn send(
        &self,
        request: ClientRequest,
        bounds: Bounds,
    ) -> Result<ClientResponse, HttpError>;
}

#[async_trait]
impl Transport for Client {
    async fn send(
        &self,
        request: ClientRequest,
        bounds: Bounds,
    ) -> Result<ClientResponse, HttpError> {
        Client::send(self, request, bounds).await
    }
}

fn non_empty_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.trim().is_empty())
}

/// Returns the value of the `Authorization` header that contains `key`. An error names the server
/// at `url`.
fn bearer_header(key: &str, url: &str) -> Result<HeaderValue, StoreError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.trim())).map_err(|_| {
        let why = format!(
            "the value of {KEY_VARIABLE} is not a valid API key; use visible ASCII characters"
        );
        open_error(url, why)
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// HTTP client of a store server. It repeats requests while the server is unavailable.
pub(crate) struct ServiceClient {
    transport: Arc<dyn Transport>,
    url: String,
    key: Option<HeaderValue>,
    timeout: Duration,
    created: Instant,
    /// Largest observed difference between the store's clock and the time since `created`, in
    /// seconds, stored as the bits of an `f64`.
    clock_offset: AtomicU64,
}

impl ServiceClient {
    /// Creates a client of the store server at `url`, such as `http://127.0.0.1:4747`.
    ///
    /// # Errors
    /// Returns [`StoreError::Open`] if the URL or the key is invalid.
    pub fn new(url: &str, options: &ServiceOptions) -> Result<Self, StoreError> {
        let client =
            Client::new(Hosts::allow_all(), None).map_err(|error| open_error(url, error))?;
        Self::with_transport(Arc::new(client), url, options)
    }

    /// Creates a client of the store server at `url` that sends its requests over `transport`.
    pub fn with_transport(
        transport: Arc<dyn Transport>,
        url: &str,
        options: &ServiceOptions,
    ) -> Result<Self, StoreError> {
        Hosts::allow_all().check(url).map_err(|error| open_error(url, error))?;
        Ok(ServiceClient {
            transport,
            url: url.trim_end_matches('/').to_owned(),
            key: options.key.as_ref().map(|key| bearer_header(key, url)).transpose()?,
            timeout: options.timeout,
            created: Instant::now(),
            clock_offset: AtomicU64::new(0),
        })
    }

    /// Returns the URL of the store server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the current time of the store's clock, as a Unix timestamp in seconds. It is
    /// estimated from the responses so far.
    pub fn now(&self) -> f64 {
        f64::from_bits(self.clock_offset.load(Ordering::Relaxed))
            + self.created.elapsed().as_secs_f64()
    }

    /// Sends a request, and returns the body of the response. Repeats the request while the server
    /// is unavailable. If a response is lost, repeats only a request that is safe to repeat.
    pub async fn call<E: DeserializeOwned>(&self, call: ServerCall) -> Result<Bytes, CallError<E>> {
        let mut last = None;
        let deadline = self.timeout + call.hold;
        match process_time::with_timeout(deadline, self.send_with_retries(&call, &mut last)).await {
            Some(result) => result,
            None => Err(CallError::Failed(
                Code::Unavailable,
                format!(
                    "timed out after {deadline:?} while waiting for a response of {} \
                     ({TIMEOUT_VARIABLE} sets the timeout): {}; check that `levade store serve` \
                     runs there",
                    self.url,
                    last.as_deref().unwrap_or("no response yet")
                ),
            )),
        }
    }

    async fn send_with_retries<E: DeserializeOwned>(
        &self,
        call: &ServerCall,
        last: &mut Option<String>,
    ) -> Result<Bytes, CallError<E>> {
        let mut headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(call.content_type))]);
        headers.extend(self.key.clone().map(|key| (AUTHORIZATION, key)));
        headers.extend(call.epoch.map(|epoch| (EPOCH_HEADER, HeaderValue::from(epoch))));
        let request = ClientRequest {
            method: Method::POST,
            url: format!("{}{}", self.url, call.path),
            headers,
            body: call.body.clone(),
        };
        let deadline = call.hold + RESPONSE_TIMEOUT;
        let bounds = Bounds { deadline, bytes: MAX_RESPONSE, redirects: 0 };
        let mut pause = FIRST_PAUSE;
        loop {
            let why = match self.transport.send(request.clone(), bounds).await {
                Ok(response) if response.status.is_success() => {
                    self.update_clock_offset(&response);
                    return Ok(response.body);
                }
                Ok(response) if is_transient(response.status) => describe_response(&response),
                Ok(response) => return Err(to_call_error(&self.url, &response)),
                Err(error) if error.is_transient() => match &error {
                    HttpError::Connect { .. } => error.to_string(),
                    _ if call.is_repeatable => error.to_string(),
                    _ => {
                        let why = format!(
                            "{error}; the server may have executed the request, and repeating it \
                             could execute it twice"
                        );
                        return Err(CallError::Failed(Code::Unavailable, why));
                    }
                },
                Err(error) => return Err(CallError::Failed(Code::Invalid, error.to_string())),
            };
            if last.is_none() {
                tracing::warn!(url = %self.url, error = %why, "waiting for the store server");
            }
            *last = Some(why);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    fn update_clock_offset(&self, response: &ClientResponse) {
        let time = response.headers.get(TIME_HEADER).and_then(|time| time.to_str().ok());
        let time: Option<f64> = time.and_then(|time| time.parse().ok());
        if let Some(offset) = time.map(|time| time - self.created.elapsed().as_secs_f64()) {
            // The bits of positive numbers are ordered as the numbers. A response that took longer
            // underestimates the store's clock.
            self.clock_offset.fetch_max(offset.max(0.0).to_bits(), Ordering::Relaxed);
        }
    }
}

/// Creates the error for a URL or a key that cannot be used.
fn open_error(url: &str, why: impl ToString) -> StoreError {
    let source = why.to_string().into();
    StoreError::Open { location: url.to_owned(), code: Code::Invalid, source }
}

/// Returns whether a repetition of a request can succeed after a response with the status `status`.
fn is_transient(status: StatusCode) -> bool {
    matches!(status.as_u16(), 429 | 502 | 503 | 504)
}

/// JSON body of a store server's error response.
#[derive(Deserialize)]
struct ErrorBody<E> {
    error: E,
}

fn to_call_error<E: DeserializeOwned>(url: &str, response: &ClientResponse) -> CallError<E> {
    if let Ok(ErrorBody { error }) = serde_json::from_slice(&response.body) {
        return CallError::Rejected(error);
    }
    let text = describe_response(response);
    match response.status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => CallError::Failed(
            Code::Forbidden,
            format!(
                "the API key was rejected: {text}; set {KEY_VARIABLE} to a key that the server \
                 accepts"
            ),
        ),
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => CallError::Failed(
            Code::NotFound,
            format!("{url} serves no store of this protocol ({text}); check the URL"),
        ),
        status if status.is_client_error() => CallError::Failed(Code::Invalid, text),
        _ => CallError::Failed(Code::Internal, text),
    }
}

/// Returns the status of a response and the start of its body, for error messages.
fn describe_response(response: &ClientResponse) -> String {
    let text: String = response.text().chars().take(500).collect();
    format!("the server responded {}: {text}", response.status)
}
