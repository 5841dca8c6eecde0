//! Servers of a chat API: their addresses, keys, and pauses after failures.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::Uri;
use hyper::header::HeaderValue;
use levade_policy::process_time::with_timeout;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::error::ExternalError;
use super::limits::add_jitter;

/// Pause after a server has rejected a call as busy for the first time. Doubles with each further
/// rejection.
const INITIAL_WAIT: Duration = Duration::from_millis(500);
/// Maximum pause after a server has rejected calls as busy, unless the server requests a longer
/// pause.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Time after a server's first failure during which other servers are preferred. Doubles with each
/// further failure.
const INITIAL_AVOIDANCE: Duration = Duration::from_secs(5);
/// Maximum time after a server's failure during which other servers are preferred.
const MAX_AVOIDANCE: Duration = Duration::from_secs(300);

/// A server of an OpenAI-compatible chat API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Base URL of the server. It can end with `/v1`, but need not.
    pub base_url: String,
    /// Name under which the server serves the model.
    pub model: String,
    /// Environment variable that contains the API key. If `None`, no key is sent.
    #[serde(default)]
    pub key_env: Option<String>,
}

/// An API key, which `Debug` output hides.
#[derive(Clone)]
struct ApiKey(HeaderValue, String);

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[key]")
    }
}

/// A chat API server with its API key and its state, such as its pause and its calls in flight.
#[derive(Debug)]
pub(crate) struct EndpointServer {
    /// Address of the server as the user wrote it, for errors and logs.
    pub name: String,
    pub model: String,
    pub uri: Uri,
    key_env: Option<String>,
    key: Option<ApiKey>,
    pauses: Mutex<EndpointPauses>,
    /// Number of calls in flight on the server.
    running: Arc<AtomicUsize>,
}

/// Guard of a call in flight. The server counts the call until the guard is dropped.
#[derive(Debug)]
pub(crate) struct ResponseGuard(Arc<AtomicUsize>);

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Pauses of a server. After the server rejected calls as busy, it is not called for a while. After
/// it failed, other servers are preferred for a while.
#[derive(Debug, Default)]
struct EndpointPauses {
    in_a_row: u32,
    until: Option<Instant>,
    /// Message of the last failure. `None` if no call failed since the last response.
    cause: Option<String>,
    /// Number of consecutive failures. Failures within one pause count once.
    failures: u32,
    avoided_until: Option<Instant>,
}

/// Parses an address that starts with `http://` or `https://`. Rejects addresses with a user name
/// or a password.
pub(crate) fn plain_uri(address: &str) -> Result<Uri, String> {
    let schemes = ["https://", "http://"];
    if !schemes.iter().any(|scheme| address.len() > scheme.len() && address.starts_with(scheme)) {
        return Err("the address must begin with https:// or http:// and name a host".into());
    }
    let uri: Uri =
        address.parse().map_err(|error| format!("the address cannot be parsed: {error}"))?;
    match uri.authority() {
        Some(authority) if authority.as_str().contains('@') => {
            Err("the address contains a user name or a password; put the key into an environment \
             variable, and name it in key_env"
                .into())
        }
        _ => Ok(uri),
    }
}

/// Returns the URL of the chat completions route of a server with the base URL `base`.
fn chat_uri(base: &str) -> Result<Uri, String> {
    let (address, query) =
        base.split_once('?').map_or((base, None), |(address, query)| (address, Some(query)));
    let address = address.trim_end_matches('/');
    let path = address.split_once("://").map_or(address, |(_, rest)| rest);
    let has_version = path
        .split('/')
        .skip(1)
        .any(|part| part.starts_with('v') && part[1..].starts_with(|c: char| c.is_ascii_digit()));
    let rest = match (address.ends_with("/chat/completions"), has_version) {
        (true, _) => "",
        (_, true) => "/chat/completions",
        (_, false) => "/v1/chat/completions",
    };
    let query = query.map(|query| format!("?{query}")).unwrap_or_default();
    plain_uri(&format!("{address}{rest}{query}"))
}

impl EndpointServer {
    /// Creates the state of an endpoint. `variable` reads an environment variable, from which the
    /// API key is taken.
    ///
    /// # Errors
    /// Returns an error if the address is invalid or the key is missing.
    pub fn new(
        endpoint: &Endpoint,
        variable: impl Fn(&str) -> Result<String, std::env::VarError>,
    ) -> Result<Self, ExternalError> {
        // An invalid address may contain a password, so the message names only its model.
        let uri = chat_uri(endpoint.base_url.trim()).map_err(|why| {
            ExternalError::Invalid(format!(
                "the base_url of model {:?} is invalid: {why}",
                endpoint.model
            ))
        })?;
        let server = Self::at_uri(uri, endpoint.key_env.as_ref(), variable)?;
        if endpoint.model.is_empty() {
            let name = server.name;
            return Err(ExternalError::Invalid(format!(
                "the endpoint {name} has no model; set model to one of its models"
            )));
        }
        Ok(EndpointServer { model: endpoint.model.clone(), ..server })
    }

    /// Creates the state of a server at `uri`, whatever its API. `variable` reads an environment
    /// variable, from which the API key is taken.
    ///
    /// # Errors
    /// Returns an error if the key is missing.
    pub fn at_uri(
        uri: Uri,
        key_env: Option<&String>,
        variable: impl Fn(&str) -> Result<String, std::env::VarError>,
    ) -> Result<Self, ExternalError> {
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        let name = format!("{}://{authority}{}", uri.scheme_str().unwrap_or_default(), uri.path());
        let key = |name: &String| -> Result<ApiKey, String> {
            let key = variable(name).map_err(|error| match error {
                std::env::VarError::NotPresent => "not set".to_owned(),
                std::env::VarError::NotUnicode(_) => "not UTF-8".to_owned(),
            })?;
            let key = key.trim().to_owned();
            let header = HeaderValue::from_str(&format!("Bearer {key}"));
            let mut header = header.map_err(|_| "not a valid header value".to_owned())?;
            header.set_sensitive(true);
            if key.is_empty() { Err("empty".into()) } else { Ok(ApiKey(header, key)) }
        };
        let key = key_env.map(|variable| {
            key(variable).map_err(|found| ExternalError::NoKey {
                variable: variable.clone(),
                endpoint: name.clone(),
                found,
            })
        });
        Ok(EndpointServer {
            name,
            uri,
            model: String::new(),
            key_env: key_env.cloned(),
            key: key.transpose()?,
            pauses: Mutex::default(),
            running: Arc::default(),
        })
    }

    /// Opens a TCP connection to the server and closes it.
    ///
    /// # Errors
    /// Returns an error if the server does not accept the connection within `timeout`.
    pub async fn connect(&self, timeout: Duration) -> Result<(), ExternalError> {
        // An IPv6 address is in brackets, which a socket address lacks.
        let host = self.uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let default_port = if self.uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = self.uri.port_u16().unwrap_or(default_port);
        let why = match with_timeout(timeout, TcpStream::connect((host, port))).await {
            Some(Ok(_)) => return Ok(()),
            Some(Err(error)) => error.to_string(),
            None => format!("the server accepted no connection within {timeout:?}"),
        };
        Err(ExternalError::Connect { endpoint: self.name.clone(), why })
    }

    /// Returns the value of the `Authorization` header, or `None` if the server has no key.
    pub fn authorization(&self) -> Option<HeaderValue> {
        self.key.as_ref().map(|ApiKey(header, _)| header.clone())
    }

    /// Returns a hint that names the place where the user can correct the API key, for errors.
    pub fn key_hint(&self) -> String {
        match &self.key_env {
            Some(variable) => format!("check the environment variable {variable}"),
            None => "name the environment variable that contains the key in key_env".into(),
        }
    }

    /// Replaces the API key in a text by `[key]`.
    pub fn without_key(&self, text: &str) -> String {
        match &self.key {
            Some(ApiKey(_, key)) => text.replace(key.as_str(), "[key]"),
            None => text.to_owned(),
        }
    }

    fn lock_pauses(&self) -> MutexGuard<'_, EndpointPauses> {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the remaining duration of the server's pause, during which it must not be called.
    pub fn remaining_pause(&self) -> Duration {
        self.lock_pauses()
            .until
            .map(|until| until.saturating_duration_since(Instant::now()))
            .unwrap_or_default()
    }

    /// Records the error of a failed call as the cause of the server's pause. Timeouts and errors
    /// of the request itself are not recorded.
    pub fn note_cause(&self, error: &ExternalError) {
        if !matches!(error, ExternalError::Deadline { .. }) && !error.is_request_error() {
            self.lock_pauses().cause = Some(error.to_string());
        }
    }

    /// Returns the last failure of the server as the end of a sentence, or an empty text if no call
    /// failed since the last response.
    pub fn describe_last_failure(&self) -> String {
        let pauses = self.lock_pauses();
        pauses.cause.as_ref().map(|cause| format!(", after a failure: {cause}")).unwrap_or_default()
    }

    /// Returns a text that names the server's pause as the event that a call waits for.
    pub fn pause_text(&self) -> String {
        format!("the pause of {} to end{}", self.name, self.describe_last_failure())
    }

    /// Returns the number of calls in flight on the server.
    pub fn num_running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Counts a call as in flight until the returned guard is dropped.
    pub fn start_response(&self) -> ResponseGuard {
        self.running.fetch_add(1, Ordering::Relaxed);
        ResponseGuard(Arc::clone(&self.running))
    }

    /// Records that the server rejected a call as busy. `retry_after` is the pause that the server
    /// requested, if any. Returns the resulting pause, which is at least `retry_after`.
    pub fn note_rejection(&self, retry_after: Option<Duration>) -> Duration {
        let mut pauses = self.lock_pauses();
        let wait = INITIAL_WAIT.saturating_mul(1 << pauses.in_a_row.min(16)).min(MAX_WAIT);
        let wait = retry_after.unwrap_or_default().max(add_jitter(wait));
        pauses.in_a_row += 1;
        pauses.until = Some(pauses.until.unwrap_or_else(Instant::now).max(Instant::now() + wait));
        wait
    }

    /// Records a failure of the server, after which other servers are preferred for a while.
    pub fn record_failure(&self) {
        let mut pauses = self.lock_pauses();
        let now = Instant::now();
        // Failures during one pause count once.
        if pauses.avoided_until.is_none_or(|until| until <= now) {
            let pause =
                INITIAL_AVOIDANCE.saturating_mul(1 << pauses.failures.min(16)).min(MAX_AVOIDANCE);
            pauses.failures += 1;
            pauses.avoided_until = Some(now + pause);
        }
    }

    /// Returns the rank of the server; the server with the lowest rank is called first. Servers
    /// without a pause come first, then servers that have not failed recently, then servers with
    /// few calls in flight. A server that has not responded since it failed gets one call at a
    /// time.
    pub fn rank(&self) -> (Duration, bool, usize) {
        let pause = self.remaining_pause();
        let running = self.num_running();
        let pauses = self.lock_pauses();
        let is_avoided = pauses.avoided_until.is_some_and(|until| until > Instant::now());
        let is_tried = running > 0 && (pauses.failures > 0 || pauses.in_a_row > 0);
        (pause, is_avoided || is_tried, running)
    }

    /// Records that the server responded, which ends its pause and resets its failures.
    pub fn note_success(&self) {
        *self.lock_pauses() = EndpointPauses::default();
    }
}

#[cfg(test)]
mod tests {
    use std::env::VarError;

    use super::*;

    #[test]
    fn chat_uri_accepts_base_with_or_without_version() {
        for (base, uri) in [
            ("https://api.x.com", "https://api.x.com/v1/chat/completions"),
            ("https://api.x.com/", "https://api.x.com/v1/chat/completions"),
            ("https://api.x.com/v1/", "https://api.x.com/v1/chat/completions"),
            ("http://h:8000/v1", "http://h:8000/v1/chat/completions"),
            ("https://x.com/v1beta/openai/", "https://x.com/v1beta/openai/chat/completions"),
            ("https://x.com/api/v3", "https://x.com/api/v3/chat/completions"),
            ("https://x.com/api", "https://x.com/api/v1/chat/completions"),
            ("https://v2.x.com/vision", "https://v2.x.com/vision/v1/chat/completions"),
            ("https://x.com/v1/chat/completions", "https://x.com/v1/chat/completions"),
            ("https://x.com/v1?api-version=7", "https://x.com/v1/chat/completions?api-version=7"),
        ] {
            assert_eq!(chat_uri(base).unwrap().to_string(), uri);
        }
        for (base, why) in [
            ("api.x.com/v1", "must begin with https://"),
            ("ftp://x.com", "must begin with https://"),
            ("https://", "must begin with https://"),
            ("https:///v1", "the address cannot be parsed"),
            ("https://a b/v1", "the address cannot be parsed"),
            ("https://me:secret@x.com/v1", "contains a user name or a password"),
        ] {
            let error = chat_uri(base).unwrap_err();
            assert!(error.contains(why) && !error.contains("secret"), "{base}: {error}");
        }
    }

    #[test]
    fn key_is_read_from_environment_and_hidden() {
        let endpoint = Endpoint {
            base_url: "https://x.com".into(),
            model: "m".into(),
            key_env: Some("X_KEY".into()),
        };
        let server = |value: Result<&str, VarError>| {
            EndpointServer::new(&endpoint, |name| {
                assert_eq!(name, "X_KEY");
                value.clone().map(str::to_owned)
            })
        };
        let found = server(Ok(" sk-secret\n")).unwrap();
        assert_eq!(found.authorization().unwrap().to_str().unwrap(), "Bearer sk-secret");
        assert_eq!(found.without_key("wrong key sk-secret!"), "wrong key [key]!");
        assert!(!format!("{found:?}{:?}", found.authorization()).contains("secret"));
        for (value, why) in [
            (
                Err(VarError::NotPresent),
                "X_KEY must contain the key of https://x.com/v1/chat/completions, but it is not \
                 set",
            ),
            (Ok(" "), "is empty"),
            (Ok("a\nsecret"), "not a valid header value"),
        ] {
            let error = server(value).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("secret"), "{error}");
        }
        assert!(
            EndpointServer::new(&Endpoint { model: String::new(), ..endpoint.clone() }, |_| Ok(
                "k".into()
            ))
            .is_err()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_double_with_consecutive_rejections() {
        let endpoint =
            Endpoint { base_url: "https://x.com".into(), model: "m".into(), key_env: None };
        let server = EndpointServer::new(&endpoint, |_| Err(VarError::NotPresent)).unwrap();
        assert_eq!(server.remaining_pause(), Duration::ZERO);
        for doubled in 0..10 {
            let max_wait = (0.5 * f64::from(1 << doubled)).min(60.0);
            let wait = server.note_rejection(None).as_secs_f64();
            assert!((max_wait / 2.0..=max_wait).contains(&wait), "{wait}");
        }
        server.note_success();
        assert_eq!(server.remaining_pause(), Duration::ZERO);
        // A server that has failed can be called, after other servers.
        for pause in [5, 10, 20, 40, 80, 160, 300, 300] {
            server.record_failure();
            server.record_failure();
            assert_eq!(server.rank(), (Duration::ZERO, true, 0));
            tokio::time::advance(Duration::from_secs(pause) - Duration::from_millis(1)).await;
            assert!(server.rank().1, "{pause}");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert_eq!(server.rank(), (Duration::ZERO, false, 0), "{pause}");
        }
        let call = server.start_response();
        assert_eq!(server.rank(), (Duration::ZERO, true, 1), "one call at a time");
        server.note_success();
        assert_eq!(server.rank(), (Duration::ZERO, false, 1));
        drop(call);
        assert_eq!(server.note_rejection(Some(Duration::from_secs(90))), Duration::from_secs(90));
        server.note_rejection(None);
        assert_eq!(server.remaining_pause(), Duration::from_secs(90), "the longer wait counts");
    }
}
