//! Sandboxes elsewhere: a client of SandboxFusion's API, as [`service`](crate::service) and others serve it.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::Method;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use levade_http::{Ask, Bounds, Client, Hosts};
use levade_policy::awake;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::SandboxError;
use crate::service::{CodeAnswer, JupyterAnswer, RunCode, RunJupyter, Status};

/// Time that a request may take beyond the code's own: connecting, and waiting for a place.
const BESIDES: Duration = Duration::from_secs(60);

/// Wait before a service that has no place is asked again; it doubles with each further one, up to the most.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Longest answer that is read, in bytes.
const MOST_BYTES: usize = 256 << 20;

/// Most redirects that are followed.
const MOST_REDIRECTS: u32 = 10;

/// A service of SandboxFusion's API.
#[derive(Debug, Clone)]
pub struct Remote {
    url: String,
    key: Option<String>,
    http: Client,
}

impl Remote {
    /// The service at a base URL, or at the address of one of its calls as verl is given it, with the key
    /// that it asks for.
    ///
    /// # Errors
    /// When the URL is of another kind.
    pub fn new(url: &str, key: Option<String>) -> Result<Self, SandboxError> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(SandboxError::Request(format!("url = {url:?} must begin with http:// or https://")));
        }
        // Whoever names a service may ask it, wherever it is.
        let http =
            Client::new(Hosts::any(), None).map_err(|error| SandboxError::Request(error.to_string()))?;
        let url = url.trim_end_matches('/');
        let base = ["/run_code", "/run_jupyter"].iter().find_map(|call| url.strip_suffix(call));
        Ok(Remote { url: base.unwrap_or(url).to_owned(), key, http })
    }

    /// `POST /run_code`
    ///
    /// # Errors
    /// When the service cannot be reached, is busy, refuses the request, or fails.
    pub async fn run_code(&self, request: &RunCode) -> Result<CodeAnswer, SandboxError> {
        let answer: CodeAnswer = self.post("run_code", request, request.run_timeout).await?;
        self.sound(answer.status, &answer.message)?;
        Ok(answer)
    }

    /// `POST /run_jupyter`
    ///
    /// # Errors
    /// When the service cannot be reached, is busy, refuses the request, or fails.
    pub async fn run_jupyter(&self, request: &RunJupyter) -> Result<JupyterAnswer, SandboxError> {
        let answer: JupyterAnswer = self.post("run_jupyter", request, request.total_timeout).await?;
        self.sound(answer.status, &answer.message)?;
        Ok(answer)
    }

    fn sound(&self, status: Status, message: &str) -> Result<(), SandboxError> {
        match status {
            Status::SandboxError => Err(SandboxError::Broken(format!("{}: {message}", self.url))),
            Status::Success | Status::Failed => Ok(()),
        }
    }

    /// Asks for a run. A service that has no place for it is asked again: nothing was run then.
    async fn post<A: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
        seconds: f64,
    ) -> Result<A, SandboxError> {
        let broken = |why: String| SandboxError::Broken(why);
        let url = format!("{}/{path}", self.url);
        let body = Bytes::from(serde_json::to_vec(request).map_err(|error| broken(error.to_string()))?);
        let limit = Duration::from_secs_f64(seconds.clamp(0.0, 1e6)) + BESIDES;
        let (mut pause, mut waited) = (PAUSE, Duration::ZERO);
        let (status, text) = loop {
            let (status, text) = self.once(url.clone(), body.clone(), limit).await?;
            if !matches!(status, 429 | 503) || waited >= BESIDES {
                break (status, text);
            }
            awake::sleep(pause).await;
            waited += pause;
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        let said = || String::from_utf8_lossy(&text[..text.len().min(500)]).into_owned();
        match status {
            200 => serde_json::from_slice(&text)
                .map_err(|error| broken(format!("{url} answered something else ({error}): {}", said()))),
            // Field and value are in the answer.
            400 | 404 | 422 => Err(SandboxError::Request(format!("{url} refused the request: {}", said()))),
            _ => Err(broken(format!("{url} answered {status}: {}", said()))),
        }
    }

    /// Status and body of the answer to a request.
    async fn once(&self, url: String, body: Bytes, limit: Duration) -> Result<(u16, Bytes), SandboxError> {
        let broken = |why: &dyn std::fmt::Display| SandboxError::Broken(format!("{url}: {why}"));
        let mut headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        if let Some(key) = &self.key {
            let value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|error| broken(&error))?;
            headers.insert(AUTHORIZATION, value);
        }
        let ask = Ask { method: Method::POST, url: url.clone(), headers, body };
        // By the clock of this process, which `levade_http` does not know: the bound there is only a net.
        let bounds = Bounds { deadline: limit * 4, bytes: MOST_BYTES, redirects: MOST_REDIRECTS };
        let reply = awake::within(limit, self.http.ask(ask, bounds)).await;
        let reply = reply.ok_or_else(|| broken(&format!("no answer within {limit:?}")))?;
        let reply = reply.map_err(|error| broken(&error))?;
        Ok((reply.status.as_u16(), reply.body))
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
    async fn a_service_without_a_place_is_asked_again() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let answer = move || {
            let first = count.fetch_add(1, Ordering::Relaxed) == 0;
            let full = (StatusCode::TOO_MANY_REQUESTS, r#"{"detail": "full"}"#);
            let done = (StatusCode::OK, r#"{"status": "Success", "run_result": {"status": "Finished"}}"#);
            std::future::ready(if first { full } else { done })
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/run_code", post(answer));
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        let request: RunCode = serde_json::from_str(r#"{"code": "1", "language": "python"}"#).unwrap();
        let answer = Remote::new(&format!("{url}/run_code"), None).unwrap().run_code(&request).await.unwrap();
        assert_eq!((answer.status, asked.load(Ordering::Relaxed)), (Status::Success, 2));
        server.abort();
    }
}
