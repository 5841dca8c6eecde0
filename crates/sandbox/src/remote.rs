//! Client of SandboxFusion's API, served by [`service`](crate::service) and by other
//! implementations.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::Method;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use levade_http::{Bounds, Client, ClientRequest, Hosts};
use levade_policy::process_time;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::SandboxError;
use crate::service::{CodeResponse, JupyterResponse, RunCode, RunJupyter, Status};

/// Maximum time of a request beyond the run time of its code: for connecting and for waiting in the
/// queue.
const MAX_OVERHEAD: Duration = Duration::from_secs(60);

/// Pause before a request to a busy service is repeated. It doubles with each retry, up to
/// `MAX_RETRY_PAUSE`.
const INITIAL_RETRY_PAUSE: Duration = Duration::from_millis(500);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(8);

/// Maximum size of a response, in bytes.
const MAX_BYTES: usize = 256 << 20;

/// Maximum number of HTTP redirects that are followed.
const MAX_REDIRECTS: u32 = 10;

/// Client of an HTTP service with SandboxFusion's API.
#[derive(Debug, Clone)]
pub struct Remote {
    url: String,
    key: Option<String>,
    http: Client,
}

impl Remote {
    /// Creates a client for a sandbox service. `url` is the base URL of the service, or the URL of
    /// one of its calls, as in verl's configuration. `key` is the API key; `None` sends no key.
    ///
    /// # Errors
    /// Returns an error if the URL does not start with `http://` or `https://`.
    pub fn new(url: &str, key: Option<String>) -> Result<Self, SandboxError> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(SandboxError::Request(format!(
                "the sandbox service has url = {url:?}, which must begin with http:// or https://"
            )));
        }
        // The user who configures a service may call it at any address.
        let http = Client::new(Hosts::allow_all(), None)
            .map_err(|error| SandboxError::Request(error.to_string()))?;
        let url = url.trim_end_matches('/');
        let base = ["/run_code", "/run_jupyter"].iter().find_map(|call| url.strip_suffix(call));
        Ok(Remote { url: base.unwrap_or(url).to_owned(), key, http })
    }

    /// Runs code on the service: `POST /run_code`.
    ///
    /// # Errors
    /// Returns an error if the service cannot be reached, is busy, rejects the request, or fails.
    pub async fn run_code(&self, request: &RunCode) -> Result<CodeResponse, SandboxError> {
        let response: CodeResponse = self.post("run_code", request, request.run_timeout).await?;
        self.check_status(response.status, &response.message)?;
        Ok(response)
    }

    /// Runs notebook cells on the service: `POST /run_jupyter`.
    ///
    /// # Errors
    /// Returns an error if the service cannot be reached, is busy, rejects the request, or fails.
    pub async fn run_jupyter(&self, request: &RunJupyter) -> Result<JupyterResponse, SandboxError> {
        let response: JupyterResponse =
            self.post("run_jupyter", request, request.total_timeout).await?;
        self.check_status(response.status, &response.message)?;
        Ok(response)
    }

    fn check_status(&self, status: Status, message: &str) -> Result<(), SandboxError> {
        match status {
            Status::SandboxError => Err(SandboxError::Broken(format!("{}: {message}", self.url))),
            Status::Success | Status::Failed => Ok(()),
        }
    }

    /// Sends a request, and repeats it while the service is busy, because a busy service has not
    /// run the code.
    async fn post<A: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
        seconds: f64,
    ) -> Result<A, SandboxError> {
        let url = format!("{}/{path}", self.url);
        let body = Bytes::from(
            serde_json::to_vec(request).map_err(|error| SandboxError::Broken(error.to_string()))?,
        );
        let limit = Duration::from_secs_f64(seconds.clamp(0.0, 1e6)) + MAX_OVERHEAD;
        let mut pause = INITIAL_RETRY_PAUSE;
        let mut waited = Duration::ZERO;
        let (status, text) = loop {
            let (status, text) = self.send_once(url.clone(), body.clone(), limit).await?;
            if !matches!(status, 429 | 503) || waited >= MAX_OVERHEAD {
                break (status, text);
            }
            process_time::sleep(pause).await;
            waited += pause;
            pause = (2 * pause).min(MAX_RETRY_PAUSE);
        };
        let body_start = || String::from_utf8_lossy(&text[..text.len().min(500)]).into_owned();
        match status {
            200 => serde_json::from_slice(&text).map_err(|error| {
                SandboxError::Broken(format!(
                    "the response of {url} is not a sandbox result ({error}): {}",
                    body_start()
                ))
            }),
            // The response names the field and its value.
            400 | 404 | 422 => {
                Err(SandboxError::Request(format!("{url} rejected the request: {}", body_start())))
            }
            _ => Err(SandboxError::Broken(format!(
                "{url} responded with status {status}: {}",
                body_start()
            ))),
        }
    }

    /// Sends a request once. Returns the HTTP status and the body of the response.
    async fn send_once(
        &self,
        url: String,
        body: Bytes,
        limit: Duration,
    ) -> Result<(u16, Bytes), SandboxError> {
        let broken = |why: &dyn std::fmt::Display| SandboxError::Broken(format!("{url}: {why}"));
        let mut headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        if let Some(key) = &self.key {
            let value =
                HeaderValue::from_str(&format!("Bearer {key}")).map_err(|error| broken(&error))?;
            headers.insert(AUTHORIZATION, value);
        }
        let request = ClientRequest { method: Method::POST, url: url.clone(), headers, body };
        // The limit uses this process's clock, which excludes time when it was stopped.
        // `levade_http` does not know that clock, so its deadline is only a fallback.
        let bounds = Bounds { deadline: limit * 4, bytes: MAX_BYTES, redirects: MAX_REDIRECTS };
        let response = process_time::with_timeout(limit, self.http.send(request, bounds)).await;
        let response = response.ok_or_else(|| broken(&format!("no response within {limit:?}")))?;
        let response = response.map_err(|error| broken(&error))?;
        Ok((response.status.as_u16(), response.body))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::post;

    use super::*;

    #[tokio::test]
    async fn busy_service_is_retried() {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&requests);
        let response = move || {
            let first = count.fetch_add(1, Ordering::Relaxed) == 0;
            let full = (StatusCode::TOO_MANY_REQUESTS, r#"{"detail": "full"}"#);
            let done =
                (StatusCode::OK, r#"{"status": "Success", "run_result": {"status": "Finished"}}"#);
            std::future::ready(if first { full } else { done })
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/run_code", post(response));
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        let request: RunCode =
            serde_json::from_str(r#"{"code": "1", "language": "python"}"#).unwrap();
        let response = Remote::new(&format!("{url}/run_code"), None)
            .unwrap()
            .run_code(&request)
            .await
            .unwrap();
        assert_eq!((response.status, requests.load(Ordering::Relaxed)), (Status::Success, 2));
        server.abort();
    }
}
